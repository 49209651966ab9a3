"""Options of MetaSDLLM by every name, in constructor and call, and what the model's own generation config adds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core._api import LangChainBetaWarning
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd, load
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import ConfigurableField

from metasd_langchain import MetaSDLLM
from metasd_langchain.bandits.rewards import Reward
from metasd_langchain.errors import BadOption, PromptTooLong, UnknownName, UnsupportedParameter
from metasd_langchain.options import ALIASES
from metasd_langchain.testing.models import tiny_model
from tests.bugs.kit import MODEL, PROMPT, TOKENIZER, Heard, encode, every_way, ids, make, ref, rounds

# A value other than the default for every option that changes answers or metadata, each valid at once.
VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram_size": 2,
    "logit_bias": {7: -1.0},
    "generation_config": "none",
    "max_tokens": 5,
    "min_tokens": 2,
    "stop": ["zz"],
    "stop_token_ids": [9],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "timeout": 60.0,
    "verify": "rejection",
    "max_model_len": 100,
    "drafters": ["lookup@4", "plain"],
    "policy": "ucb",
    "policy_options": {"c": 0.1},
    "reward": "be",
    "memory": "request",
    "memory_key": "step",
    "scope": "me",
    "speculative": False,
    "revision": "main",
    "device": "cpu",
    "dtype": "float32",
    "compile": True,
    "num_threads": 1,
    "model_kwargs": {"local_files_only": True},
}
# The same, but at most one of them at a time.
CONSTRAINTS: dict[str, Any] = {
    "response_format": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "regex": "[ab]+",
    "choices": ["yes", "no"],
    "grammar": 'start: "a" | "b"',
}
WRONG: dict[str, list[Any]] = {
    "temperature": [-1, float("nan"), "hot"],
    "top_p": [0, 1.5],
    "top_k": [-1, 1.5],
    "min_p": [-0.1, 2],
    "repetition_penalty": [0, -1, float("inf")],
    "presence_penalty": [3, float("nan")],
    "frequency_penalty": [-3],
    "no_repeat_ngram_size": [-1, 0.5],
    "logit_bias": [{-1: 1.0}, {"x": 1.0}, {3: float("nan")}, [1]],
    "logits_processors": [["x"]],
    "generation_config": ["all"],
    "max_tokens": [0, -1, 1.5],
    "min_tokens": [-1],
    "stop_token_ids": [[-1], ["x"]],
    "n": [0, -1],
    "logprobs": [-1],
    "top_logprobs": [-1, 10**6],
    "timeout": [0, -1],
    "verify": ["hope"],
    "max_model_len": [0, 1],
    "num_threads": [0],
    "device": ["tpu"],
    "dtype": ["int8"],
    "drafters": ["suffix"],
    "memory": ["disk"],
    "scope": [5],
    "speculative": ["perhaps"],
    "capture_content": ["perhaps"],
    "model_kwargs": [3],
    "response_format": [3, "json_object", {"type": "json_schema"}, {"type": "object", "properties": {1, 2}}, Heard],
    "regex": [3, "", "a("],
    "choices": [[], "yes", [""], [3]],
    "grammar": [3, " ", "begin: x"],
}


def test_every_option_is_covered_here() -> None:
    free = {
        "model",
        "logits_processors",
        "max_retries",
        "api_key",
        "hf_token",
        "base_url",
        "settings",
        "capture_content",
    }
    assert {*VALUES, *CONSTRAINTS} == set(MetaSDLLM._per_call()) - free


@pytest.mark.parametrize("option", [*VALUES, *CONSTRAINTS])
def test_an_option_of_a_call_is_a_field_of_that_call_only(option: str) -> None:
    llm = make()
    value = {**VALUES, **CONSTRAINTS}[option]
    bound, rest = llm._bound({option: value})
    assert getattr(bound, option) == value != getattr(llm, option)
    assert rest == {}
    assert bound._identifying_params != llm._identifying_params  # so LangChain's cache keeps the answers apart


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_an_error_before_anything_is_loaded(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option.removeprefix("top_").rstrip("s")):
        MetaSDLLM(model="no/such-model", **{option: value})
    with pytest.raises((BadOption, TypeError)):
        MetaSDLLM(model="no/such-model").invoke(PROMPT, **{option: value})


@pytest.mark.parametrize("alias", ALIASES)
def test_names_that_users_know_work_in_constructor_and_call(alias: str) -> None:
    ours = ALIASES[alias]
    value = {**VALUES, "model": "some/model", "logits_processors": [max]}[ours]
    assert (
        getattr(MetaSDLLM(**{"model": "some/model", alias: value} if ours != "model" else {alias: value}), ours)
        == value
    )
    assert getattr(MetaSDLLM()._bound({alias: value})[0], ours) == value


def test_one_option_under_two_names_is_an_error() -> None:
    with pytest.raises(BadOption, match="max_tokens"):
        MetaSDLLM(max_tokens=3, max_new_tokens=4)
    assert MetaSDLLM(max_tokens=3, max_new_tokens=3).max_tokens == 3


@pytest.mark.parametrize("call", ["invoke", "stream", "batch", "generate", "steps", "constructor"])
def test_an_unknown_option_names_what_there_is(call: str) -> None:
    wrong = {"temprature": 1.0}
    with pytest.raises(UnsupportedParameter, match=r"temprature.*temperature"):
        make(**wrong) if call == "constructor" else list(
            getattr(make(), call)([PROMPT] if call in ("batch", "generate") else PROMPT, **wrong)
        )


# -- coming from HuggingFacePipeline -----------------------------------------------------------------------------------


def test_from_model_id_takes_what_huggingface_pipeline_takes() -> None:
    llm = MetaSDLLM.from_model_id(
        "some/model",
        "text-generation",
        device=-1,
        model_kwargs={"trust_remote_code": False},
        pipeline_kwargs={"max_new_tokens": 10, "do_sample": True, "top_k": 50, "repetition_penalty": 1.1},
        tags=["mine"],
    )
    assert (llm.model, llm.device, llm.max_tokens, llm.top_k, llm.repetition_penalty) == (
        "some/model",
        "cpu",
        10,
        50,
        1.1,
    )
    assert (llm.temperature, llm.tags) == (1.0, ["mine"])
    assert llm.model_kwargs == {"trust_remote_code": False}
    assert MetaSDLLM.from_model_id("m", device=1).device == "cuda:1"
    assert MetaSDLLM.from_model_id("m", device_map="auto").model_kwargs == {"device_map": "auto"}
    with pytest.raises(BadOption, match="task"):
        MetaSDLLM.from_model_id("m", "summarization")
    with pytest.raises(UnsupportedParameter, match="return_full_text"):
        MetaSDLLM.from_model_id("m", pipeline_kwargs={"return_full_text": True})


def test_an_option_beside_a_group_wins_and_groups_work_in_calls() -> None:
    assert make(max_tokens=3, pipeline_kwargs={"max_new_tokens": 9}).max_tokens == 3
    assert ids(make(), pipeline_kwargs={"max_new_tokens": 4}) == ref()[:4]
    warm = make(temperature=0.3)
    assert warm._bound({"do_sample": True})[0].temperature == 0.3
    assert make()._bound({"do_sample": True})[0].temperature == 1.0


def test_logprobs_false_in_a_call_switches_them_off_and_a_number_wins() -> None:
    llm = make(logprobs=True, top_logprobs=5)
    assert llm.wanted_logprobs == 5
    assert llm._bound({"logprobs": False})[0].wanted_logprobs is None
    assert llm._bound({"logprobs": 2})[0].wanted_logprobs == 2
    assert make(top_logprobs=3).wanted_logprobs is None


def test_policy_options_reach_the_policy_and_own_rewards_are_taken() -> None:
    assert make(policy="ucb", policy_options={"beta": 0.02})._pool() is not make(policy="ucb")._pool()
    with pytest.raises(UnknownName, match="gamma_ray"):
        make(policy="ucb", policy_options={"gamma_ray": 1})
    own = Reward("own", 0.0, 100.0, False, lambda outcome: float(outcome.committed))
    assert ids(make(reward=own)) == ref()
    assert make(reward=own)._identifying_params["reward"] == "own"


def test_ids_outside_the_vocabulary_are_errors_before_any_compute() -> None:
    for wrong in ({"stop_token_ids": [10**9], "min_tokens": 2}, {"logit_bias": {600: 1.0}}):
        with pytest.raises(BadOption, match="below 512"):
            make().invoke(PROMPT, **wrong)
    with pytest.raises(BadOption, match="running engine"):
        make(engine=make()._load()).invoke(PROMPT, model="other")


def test_a_token_for_the_hub_is_shown_and_stored_nowhere() -> None:
    llm = MetaSDLLM(model="me/private", model_kwargs={"token": "hf_secret", "trust_remote_code": False})
    assert llm._load_kwargs == {"token": "hf_secret", "trust_remote_code": False}
    shown = [repr(llm), str(llm), json.dumps(dumpd(llm)), str(llm._identifying_params), str(llm.asdict())]
    assert not [text for text in shown if "hf_secret" in text]


def test_do_sample_false_is_greedy_whatever_the_temperature() -> None:
    assert make(generation_kwargs={"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert ids(make(temperature=0.9), do_sample=False) == ref()


# -- the model's generation config -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opinionated() -> Any:
    model = tiny_model()
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=4, top_p=0.7, repetition_penalty=1.3)
    return model, TOKENIZER


def test_filters_and_penalties_of_the_generation_config_apply_where_none_are_given(opinionated: Any) -> None:
    before = opinionated[0].generation_config.to_dict()
    own = make(model=opinionated)
    assert ids(own) == ids(make(repetition_penalty=1.3)) != ref()  # and a temperature of 0 stays greedy
    sampled = {"temperature": 0.8, "seed": 5}
    assert ids(own, **sampled) == ids(make(repetition_penalty=1.3, top_k=4, top_p=0.7, **sampled))
    assert ids(own, top_p=1.0, top_k=0, repetition_penalty=1.0, **sampled) == ids(make(**sampled))
    assert ids(own, generation_config="none") == ref()
    assert opinionated[0].generation_config.to_dict() == before


def test_options_of_the_generation_config_that_we_lack_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(seed=1)
    model.generation_config.typical_p = 0.5
    make(model=(model, TOKENIZER)).warmup()
    assert "typical_p" in caplog.text


def test_suppressed_tokens_never_come() -> None:
    model = tiny_model()
    model.generation_config.suppress_tokens = [ref()[0], ref()[5]]
    assert not {ref()[0], ref()[5]} & set(ids(make(model=(model, TOKENIZER))))


# -- what single options do --------------------------------------------------------------------------------------------


def test_without_a_cap_an_answer_ends_with_the_window() -> None:
    llm = make(max_tokens=None, max_model_len=len(encode(PROMPT)) + 30)
    answer = llm.generate([PROMPT]).generations[0][0].generation_info
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["finish_reason"] == "length"
    with pytest.raises(PromptTooLong) as caught:
        make(max_model_len=len(encode(PROMPT))).invoke(PROMPT)
    assert (caught.value.length, caught.value.limit) == (len(encode(PROMPT)),) * 2
    with pytest.raises(BadOption, match="logit_bias"):
        make(logit_bias={512: 1.0}).invoke(PROMPT)


async def test_without_speculation_every_mode_gives_the_same_and_nothing_is_drafted() -> None:
    llm = make(temperature=0.8, seed=2)
    assert set(map(repr, (await every_way(llm)).values())) == set(
        map(repr, (await every_way(llm, speculative=False)).values())
    )
    assert {(record.arm, record.drafted) for record in rounds(llm, speculative=False)} == {("plain", 0)}


async def test_n_answers_differ_are_reproducible_and_the_prompt_is_counted_once() -> None:
    llm = make(temperature=1.0, seed=9, n=3, max_tokens=8)
    result = llm.generate([PROMPT, "another"])
    assert [len(answers) for answers in result.generations] == [3, 3]
    texts = [answer.text for answer in result.generations[0]]
    assert len(set(texts)) == 3
    assert texts[0] == make(temperature=1.0, seed=9, max_tokens=8).invoke(PROMPT)
    assert [answer.text for answer in (await llm.agenerate([PROMPT])).generations[0]] == texts
    assert [answer.text for answer in llm.generate([PROMPT], speculative=False).generations[0]] == texts
    assert result.llm_output["token_usage"]["prompt_tokens"] == len(encode(PROMPT)) + len(encode("another"))
    with pytest.raises(BadOption, match="streamed"):
        next(llm.stream(PROMPT))


async def test_with_streaming_invoke_tells_callbacks_each_piece_once() -> None:
    llm = make(streaming=True)
    heard, async_heard, quiet = Heard(), Heard(), Heard()
    text = llm.invoke(PROMPT, {"callbacks": [heard]})
    assert await llm.ainvoke(PROMPT, {"callbacks": [async_heard]}) == text
    assert "".join(heard.tokens) == "".join(async_heard.tokens) == text
    make().invoke(PROMPT, {"callbacks": [quiet]})
    assert quiet.tokens == []


class Counting(BaseRateLimiter):
    """A limiter that never limits."""

    def __init__(self) -> None:
        self.asked = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.asked += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        self.asked += 1
        return True


async def test_a_rate_limiter_is_asked_once_a_prompt_and_not_for_a_cached_answer() -> None:
    limiter = Counting()
    llm = make(rate_limiter=limiter)
    await every_way(llm)
    assert limiter.asked == 6
    limiter.asked = 0
    cached = make(rate_limiter=limiter, cache=InMemoryCache())
    for _ in range(3):
        cached.invoke(PROMPT)
    assert limiter.asked == 1


def test_warmup_loads_and_leaves_nothing_behind(spans: Any) -> None:
    llm = make()
    assert llm.warmup() is llm
    assert spans.get_finished_spans() == ()
    assert llm._pool().selector.arms
    assert ids(llm) == ref()


def test_validate_model_on_init_loads_in_the_constructor(tmp_path: Path) -> None:
    MetaSDLLM(model=str(tmp_path / "nothing"))
    with pytest.raises(Exception, match="no such folder"):
        MetaSDLLM(model=str(tmp_path / "nothing"), validate_model_on_init=True)


def test_a_configured_option_loads_nothing_anew() -> None:
    llm = make()
    engine = llm._load()
    configurable = llm.configurable_fields(temperature=ConfigurableField(id="t"), max_tokens=ConfigurableField(id="m"))
    assert configurable.with_config(configurable={"m": 3}).invoke(PROMPT) == TOKENIZER.decode(ref()[:3])
    alternatives = llm.configurable_alternatives(ConfigurableField(id="which"), short=make(max_tokens=2))
    assert alternatives.with_config(configurable={"which": "short"}).invoke(PROMPT) == TOKENIZER.decode(ref()[:2])
    assert llm._load() is engine is make(temperature=0.5)._load()


def test_threads_are_given_to_the_engine_alone_under_a_key_of_its_own() -> None:
    assert make(num_threads=1)._engine_key != make()._engine_key
    assert ids(make(num_threads=1)) == ref()


def test_a_model_of_a_call_is_another_engine_with_statistics_of_its_own() -> None:
    other = (tiny_model(seed=3), TOKENIZER)
    llm = make()
    engine, pool = llm._load(), llm._pool()
    theirs = ids(make(model=other))
    assert ids(llm, model=other) == theirs != ref()
    assert ids(llm) == ref()
    assert llm._load() is engine
    assert llm._pool() is pool is not llm._bound({"model": other})[0]._pool()
    llm.close()
    assert engine.closed


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_serialised_options_come_back_and_secrets_and_processors_do_not_go(constraint: str) -> None:
    options = {key: value for key, value in VALUES.items() if key not in ("compile", "revision", "policy_options")}
    options[constraint] = CONSTRAINTS[constraint]
    llm = MetaSDLLM(model="some/model", api_key="sk-secret", max_retries=2, base_url="http://x", **options)
    stored = dumpd(llm)
    assert "sk-secret" not in json.dumps(stored)
    assert "sk-secret" not in repr(llm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LangChainBetaWarning)
        back = load(stored, valid_namespaces=["metasd_langchain"], allowed_objects=[MetaSDLLM])
    assert back.asdict() == llm.asdict()
    assert back._identifying_params == llm._identifying_params


def test_no_mode_or_seed_of_torch_leaks_to_the_caller() -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    for _ in make(temperature=1.0).stream(PROMPT):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert MODEL.generation_config.to_dict() == tiny_model().generation_config.to_dict()


def test_a_cached_answer_is_never_that_of_another_processor_or_model() -> None:
    """Objects come and go at the same address; what a cache keeps for one must not serve the next."""
    llm = make(cache=InMemoryCache(), max_tokens=1)
    for token in range(10, 50):
        text = llm.generate(
            [PROMPT],
            logits_processors=[lambda ids, scores, token=token: scores.index_fill(1, torch.tensor([token]), 1e9)],
        )
        assert text.generations[0][0].text == TOKENIZER.decode([token])

    class Favourite:
        def __init__(self, token: int) -> None:
            self.token = token

        def shape(self, ids: Any, scores: Any) -> Any:
            return scores.index_fill(1, torch.tensor([self.token]), 1e9)

    one, other = Favourite(60), Favourite(61)
    before = [llm.invoke(PROMPT, logits_processors=[thing.shape]) for thing in (one, other, one)]
    assert before == [TOKENIZER.decode([token]) for token in (60, 61, 60)]
    name = llm._bound({"logits_processors": [one.shape]})[0]._identifying_params["logits_processors"]
    assert name == llm._bound({"logits_processors": [one.shape]})[0]._identifying_params["logits_processors"]
