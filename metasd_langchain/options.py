"""What a caller may set: names, aliases, checks, and how options become the engine's values. Loads nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, SecretStr, TypeAdapter

from metasd_langchain.constraints import Grammar, choice, json_schema, lark, regex
from metasd_langchain.errors import BadOption, UnsupportedParameter
from metasd_langchain.values import Sampling, Shaping, VerifyMode

__all__ = ["ALIASES", "GROUPS", "Options", "named_options", "stop_strings"]

# names that users know from other integrations -> ours
ALIASES = {
    "model_id": "model",
    "model_name": "model",
    "model_path": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "logits_processor": "logits_processors",
    "num_return_sequences": "n",
    "n_ctx": "max_model_len",
    "num_ctx": "max_model_len",
    "n_threads": "num_threads",
    "num_thread": "num_threads",
    "torch_dtype": "dtype",
    "request_timeout": "timeout",
}
GROUPS = ("generation_kwargs", "pipeline_kwargs")  # mappings of options, as HuggingFacePipeline takes them
_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "max_tokens",
    "min_tokens",
    "n",
    "top_logprobs",
    "timeout",
    "max_model_len",
    "num_threads",
)
_TOKENS = ("token", "use_auth_token")  # of from_pretrained
_MOST_LOGPROBS = 1000
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")
_CONSTRAINTS = ("response_format", "regex", "choices", "grammar")
_SETTINGS = ("drafters", "policy", "reward", "memory")


class Options(BaseModel):
    """Options of `MetaSDLLM` and their checks. Every one can also be given for a single call.

    Raises:
        UnknownName, BadOption: for a drafter, policy, reward or value that does not exist.
        UnsupportedParameter: for an option that does not exist.
    """

    model_config = ConfigDict(protected_namespaces=(), arbitrary_types_allowed=True)

    model: Any = None
    """Folder, hub id, ``.gguf`` file, "gemma-3-270m" (embedded), or a live ``(model, tokenizer)``. None: what the
    environment variable METASD_MODEL names, else the embedded model. Also ``model_id``, ``model_name``,
    ``model_path``."""
    revision: str | None = None
    """Revision of a hub id."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed through to ``from_pretrained``: ``device_map``, ``quantization_config``, ..."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1" or "mps"."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16" or "float16"."""
    compile: bool = False
    """Hand the target's forward to ``torch.compile``."""
    num_threads: int | None = None
    """CPU threads of the engine; torch keeps one such number a process. None: torch's own choice."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together, where that is to be less than the model's window. A longer prompt is
    an error, never cut."""

    drafters: Any = None
    """Arms of the bandit: names with budgets (``["suffix@16", "lookup", "plain"]``), drafter objects, or pairs (object,
    budget). None: the default pool."""
    policy: Any = "hinted_ucb"
    """Name of the bandit policy, or a policy object that each pipeline step starts from a copy of."""
    policy_options: dict[str, Any] | None = None
    """Options of a policy given by name, e.g. ``{"beta": 0.02}`` for ``ucb``."""
    reward: Any = "throughput"
    """Name of the reward, or a Reward."""
    memory: Any = "process"
    """"process": each pipeline step goes on learning; "request": every call starts fresh; a path such as
    "bandit.sqlite", or ``SqliteMemory(path)``: it goes on learning where an earlier process stopped."""
    memory_key: str | None = None
    """Name of the pipeline step. None: the LangGraph node, the run's name, or step tags and the prompt's start."""
    scope: str | None = None
    """Keeps users of one object apart: text indexes and bandit memory of one scope never show in another."""
    speculative: bool = True
    """False drafts nothing: plain decoding on the same engine, and the same answer."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float | None = None
    """Nucleus sampling. None: the model's generation config, else off; 1 is off."""
    top_k: int | None = None
    """Keep the k most likely tokens. None: the model's generation config, else off; 0 is off."""
    min_p: float | None = None
    """Keep tokens at least this likely relative to the most likely one. None: as top_p; 0 is off."""
    seed: int | None = None
    """The same seed gives the same answer. None draws one for each call."""
    repetition_penalty: float | None = None
    """Above 1 makes tokens of prompt and answer less likely. None: the model's generation config, else 1 (off)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens that the answer holds."""
    frequency_penalty: float = 0.0
    """Subtracted for each time the answer holds a token."""
    no_repeat_ngram_size: int | None = None
    """No n-gram of prompt and answer occurs twice. None: the model's generation config, else off; 0 is off."""
    logit_bias: dict[int, float] | None = None
    """Token id -> what is added to its logit; beside what the model's generation config bans."""
    logits_processors: list[Any] | None = None
    """Callables ``(ids [1, n], logits [1, vocab]) -> logits``, as transformers' LogitsProcessor; they see committed
    tokens only, once for each position. A running object: it is not serialised."""
    generation_config: str = "auto"
    """"auto": what the model's generation config says of filters and penalties applies where an option is not given;
    "none": it is not read, but for its EOS ids."""

    max_tokens: int | None = 256
    """Most tokens of an answer; None: until a stop or the end of the window. Also ``max_new_tokens``,
    ``num_predict``."""
    min_tokens: int | None = None
    """Before that many tokens no stop id can come (a stop string can). None: the generation config, else 0."""
    stop: list[str] | None = None
    """Strings that end an answer; a call's own ``stop`` replaces them. Also ``stop_sequences``."""
    stop_token_ids: list[int] | None = None
    """Ids that end an answer besides the model's own."""
    n: int = 1
    """Answers to each prompt; each has randomness of its own under the same seed."""
    logprobs: bool | int | None = None
    """True: each token's log-probability under the target goes into ``generation_info["logprobs"]``; a number: the most
    likely tokens beside it too."""
    top_logprobs: int | None = None
    """How many of the most likely tokens, where ``logprobs`` is True."""
    response_format: Any = None
    """What the answer may be, as OpenAI writes it: ``{"type": "json_object"}``, ``{"type": "json_schema",
    "json_schema": {"name": ..., "schema": ...}}`` or ``{"type": "text"}``; or a JSON schema itself, a pydantic class, a
    TypedDict or a dataclass. Answers are valid JSON that is complete within ``max_tokens``."""
    regex: str | None = None
    """The answer matches this regular expression as a whole (Rust's syntax)."""
    choices: list[str] | None = None
    """The answer is one of these strings."""
    grammar: str | None = None
    """The answer is a ``start`` of this grammar: text in llguidance's Lark dialect, or a `Grammar`."""
    timeout: float | None = None
    """Seconds after which a call fails with DeadlineExceeded, which carries the text so far."""
    verify: VerifyMode = "invariant"
    """"invariant": the answer depends on prompt, seed and options alone. "rejection": Leviathan et al.'s speculative
    sampling, for measuring papers' claims."""

    capture_content: bool | None = None
    """Whether prompt and answer go on spans, cut after 8 kB each. None: what the environment variable
    OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says when the call begins; unset it says no."""

    max_retries: int | None = Field(default=None, exclude=True)
    """Accepted for LangChain's sake; a local model has nothing to retry."""
    hf_token: SecretStr | None = Field(default=None, exclude=True)
    """For private hub models; also taken from ``model_kwargs["token"]``. Never shown, logged or serialised."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """Accepted for LangChain's sake; never used, shown or serialised."""
    base_url: str | None = Field(default=None, exclude=True)
    """Accepted for LangChain's sake; never used."""
    settings: Any = Field(default=None, exclude=True)
    """Mapping or JSON file, e.g. of ``metasd tune``, with any of drafters, policy, reward, memory; options given here
    win."""

    def __init__(self, **options: Any) -> None:
        known = {*type(self).model_fields, *ALIASES, *GROUPS, "do_sample"}
        named = named_options(options, known)
        super().__init__(**{**_read_settings(named.get("settings"), named), **named})

    def check_options(self) -> None:
        """Raise for wrong values; a copy's fields have not been through the constructor."""
        self._check_types()
        self.sampling_values({})
        self.shaping_values({})
        self._check_words()
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        for option, least in (("max_model_len", 2), ("num_threads", 1)):
            if getattr(self, option) is not None:
                _whole(option, getattr(self, option), least)
        _whole("n", self.n, 1)
        if self.timeout is not None and not (_is_number(self.timeout) and self.timeout > 0):
            raise BadOption("timeout", self.timeout, "a positive number of seconds")
        for token in self.stop_token_ids or ():
            _whole("stop_token_ids", token, 0)
        stop_strings(self.stop)
        self.wanted_logprobs  # noqa: B018 - raises
        self.wanted_grammar()

    def _check_types(self) -> None:
        for option in ("scope", "memory_key", "revision"):
            if not isinstance(getattr(self, option), str | None):
                raise BadOption(option, getattr(self, option), "a string")
        for option in ("speculative", "compile"):
            if not isinstance(getattr(self, option), bool):
                raise BadOption(option, getattr(self, option), "True or False")
        if not isinstance(self.capture_content, bool | None):
            raise BadOption("capture_content", self.capture_content, "True, False or None")
        if not isinstance(self.model_kwargs, Mapping):
            raise BadOption("model_kwargs", type(self.model_kwargs).__name__, "a mapping")

    def _check_words(self) -> None:
        if self.dtype not in _DTYPES:
            raise BadOption("dtype", self.dtype, ", ".join(_DTYPES))
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise BadOption("device", self.device, "auto, cpu, cuda, cuda:1, mps ...")
        if self.verify not in ("invariant", "rejection"):
            raise BadOption("verify", self.verify, "'invariant' or 'rejection'")
        if self.generation_config not in ("auto", "none"):
            raise BadOption("generation_config", self.generation_config, "'auto' or 'none'")

    @property
    def wanted_logprobs(self) -> int | None:
        """Most likely tokens to report beside each token; None: no log-probabilities at all."""
        for option in ("logprobs", "top_logprobs"):
            count = getattr(self, option)
            if count is not None and not (option == "logprobs" and isinstance(count, bool)):
                _whole(option, count, 0)
                if count > _MOST_LOGPROBS:
                    raise BadOption(option, count, f"at most {_MOST_LOGPROBS}")
        if self.logprobs is None or self.logprobs is False:
            return None
        return (self.top_logprobs or 0) if self.logprobs is True else self.logprobs

    def wanted_grammar(self) -> Grammar | None:
        """What the answer may be; None: anything.

        Raises:
            BadOption: more than one of the four options, or one of the wrong type.
        """
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise BadOption(given[1], getattr(self, given[1]), f"nothing beside {given[0]}, which is given too")
        if not given:
            return None
        if given[0] == "grammar":
            return lark(self.grammar or "")
        if given[0] == "response_format":
            schema = _format_schema(self.response_format)
            return None if schema is None else json_schema(schema)
        return regex(self.regex or "") if given[0] == "regex" else choice(self.choices or ())

    def wanted_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that ``response_format`` asks for; None: it asks for none."""
        return None if self.response_format is None else _format_schema(self.response_format)

    def sampling_values(self, defaults: Mapping[str, Any]) -> Sampling:
        """How tokens are drawn.

        Args:
            defaults: what the model's generation config says; given options win.
        """
        top_p, top_k, min_p = (self._else(name, defaults) for name in ("top_p", "top_k", "min_p"))
        return Sampling(self.temperature, top_p, top_k, min_p, self.seed)

    def shaping_values(self, defaults: Mapping[str, Any]) -> Shaping:
        """What happens to logits; see `sampling_values`."""
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping):
            raise BadOption("logit_bias", type(bias).__name__, "a mapping from token ids to numbers")
        if self.generation_config == "auto":
            bias = {**defaults.get("logit_bias", {}), **bias}
        penalty = self._else("repetition_penalty", defaults)
        return Shaping(
            logit_bias=tuple(sorted((_token(token), value) for token, value in bias.items())),
            repetition_penalty=1.0 if penalty is None else penalty,
            no_repeat_ngram_size=self._else("no_repeat_ngram_size", defaults) or 0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self._else("min_tokens", defaults) or 0,
            processors=tuple(self.logits_processors or ()),
        )

    def _else(self, name: str, defaults: Mapping[str, Any]) -> Any:
        given = getattr(self, name)
        return defaults.get(name) if given is None and self.generation_config == "auto" else given


def named_options(options: Mapping[str, Any], known: Iterable[str], temperature: float = 0.0) -> dict[str, Any]:
    """Options under our names, groups unpacked.

    Args:
        options: as a caller wrote them.
        known: names that exist.
        temperature: of the object that the options are for.

    Raises:
        UnsupportedParameter: a name that does not exist.
        BadOption: one option under two names with different values.
    """
    known = set(known)
    named: dict[str, Any] = {}
    for name, value in _flat(options, known):
        if name not in known:
            raise UnsupportedParameter(name, known)
        ours = ALIASES.get(name, name)
        if ours in _NUMBERS and isinstance(value, bool):  # pydantic would take True for 1
            raise BadOption(ours, value, "a number")
        if ours in named and named[ours] is not value and named[ours] != value:
            raise BadOption(name, value, f"one value; {ours} is given too")
        named[ours] = _plain(ours, value)
    if "do_sample" in named:  # transformers' switch: a temperature of 0 says the same
        if not named.pop("do_sample"):
            named["temperature"] = 0.0
        elif not named.get("temperature", temperature):
            named["temperature"] = 1.0
    if isinstance(named.get("stop"), str):
        named["stop"] = [named["stop"]]
    return _without_secrets(named)


def _plain(option: str, value: Any) -> Any:
    """A value as plain JSON, which can be stored, compared and sent."""
    if option == "logit_bias" and isinstance(value, Mapping):
        return {_token(token): bias for token, bias in value.items()}
    if option == "response_format" and value is not None and not isinstance(value, Mapping):
        return _schema_of(value)
    return value.lark if isinstance(value, Grammar) else value


def _without_secrets(named: dict[str, Any]) -> dict[str, Any]:
    """A token in ``model_kwargs`` goes where nothing is shown or stored."""
    kwargs = named.get("model_kwargs")
    if not isinstance(kwargs, Mapping):
        return named
    found = next((kwargs[name] for name in _TOKENS if kwargs.get(name)), None)
    kept = {name: value for name, value in kwargs.items() if name not in _TOKENS}
    if isinstance(found, str):
        return {**named, "model_kwargs": kept, "hf_token": named.get("hf_token") or SecretStr(found)}
    return named


def _flat(options: Mapping[str, Any], known: AbstractSet[str]) -> Iterator[tuple[str, Any]]:
    """Options with those of groups among them. Given beside a group, an option wins over the group's."""
    for name, value in options.items():
        if name not in GROUPS or name not in known:
            yield name, value
        elif value is not None and not isinstance(value, Mapping):
            raise BadOption(name, type(value).__name__, "a mapping of options")
        else:
            beside = {ALIASES.get(given, given) for given in options}
            yield from (pair for pair in (value or {}).items() if ALIASES.get(pair[0], pair[0]) not in beside)


def stop_strings(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    """Stop strings as the engine takes them; empty ones are left out."""
    if isinstance(stop, str):
        stop = [stop]
    if any(not isinstance(string, str) for string in stop or ()):
        raise BadOption("stop", stop, "a list of strings")
    return tuple(string for string in stop or () if string)


def _schema_of(kind: Any) -> dict[str, Any]:
    """A class as OpenAI writes a response format."""
    if not isinstance(kind, type):
        raise BadOption("response_format", type(kind).__name__, "a mapping or a class")
    own = getattr(kind, "model_json_schema", None) or getattr(kind, "schema", None)  # pydantic 2, pydantic 1
    try:
        schema = own() if own is not None else TypeAdapter(kind).json_schema()
    except (PydanticUserError, TypeError, ValueError) as cause:
        raise BadOption("response_format", kind.__name__, "a pydantic class, a TypedDict or a dataclass") from cause
    return {"type": "json_schema", "json_schema": {"name": kind.__name__, "schema": schema}}


def _format_schema(given: Any) -> Mapping[str, Any] | None:
    """The JSON schema of a response format; None for text."""
    if not isinstance(given, Mapping):
        given = _schema_of(given)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        return dict(given)
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise BadOption("response_format", sorted(given), "a mapping with json_schema: {name, schema}")
    schema: Mapping[str, Any] = inner["schema"]
    return schema


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(option: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadOption(option, value, f"a whole number of at least {least}")


def _token(token: object) -> int:
    """A token id; JSON has only strings for keys."""
    if isinstance(token, str) and token.isdigit():
        return int(token)
    if isinstance(token, bool) or not isinstance(token, int):
        raise BadOption("logit_bias", token, "token ids")
    return token


def _read_settings(settings: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options from a settings mapping or file, less those given to the constructor."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        try:
            settings = json.loads(Path(settings).read_text())
        except (OSError, ValueError, TypeError) as cause:
            raise BadOption("settings", str(settings), "a mapping or a readable JSON file") from cause
        if not isinstance(settings, Mapping):
            raise BadOption("settings", type(settings).__name__, "a JSON object")
    for name in settings:
        if name not in (*_SETTINGS, "measured"):  # what a tuning run measured is for people to read
            raise UnsupportedParameter(name, _SETTINGS)
    return {name: value for name, value in settings.items() if name in _SETTINGS and name not in given}
