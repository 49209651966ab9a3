"""Who can answer a prompt: our engine with some arms, and bare transformers. Same ids in, same limits, same stops.

A call is timed from the prompt's ids to the last new id, on the caller's thread: building the request or the input
tensor, reading the prompt, decoding and handing over all count; the tokenizer does not, on either side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from metasd_langchain import Engine, Request, Sampling, make_pool
from metasd_langchain.assemble import ArmSpec
from metasd_langchain.models.embedded import EMBEDDED, embedded_folder
from metasd_langchain.values import RoundRecord

__all__ = ["PREFILL_TOKENS", "Answer", "Limits", "Method", "Ours", "Transformers", "load_reference"]

PREFILL_TOKENS = 1024  # the engine's default: prompt tokens read in one forward
_SCOPE = "evaluators"


@dataclass(frozen=True, slots=True)
class Limits:
    """How every method generates.

    Attributes:
        max_tokens: most new tokens.
        temperature: 0 is greedy.
        top_p: 1 keeps all. top_k is off on every side.
        stop_ids: ids that end an answer; empty with ``--ignore-eos``.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gave.

    Attributes:
        ids: new tokens, EOS included.
        seconds: wall clock.
        forwards: forwards of the target; 0 when not known.
        rounds: our engine's rounds.
        forward_s: seconds of our engine's forwards by its own clock.
    """

    ids: tuple[int, ...]
    seconds: float
    forwards: int
    rounds: tuple[RoundRecord, ...] = field(default=(), repr=False)
    forward_s: float = 0.0


class Method(Protocol):
    """Somebody who answers prompts."""

    name: str

    def answer(self, prompt: Sequence[int], seed: int) -> Answer:
        """Answer a prompt; the same seed gives the same draws."""
        ...

    def reset(self, *, memory: bool) -> None:
        """Forget what earlier prompts left behind: text indexes, and with `memory` what was learned about arms."""
        ...


class Ours:
    """Our engine with a pool of arms.

    Args:
        name: in reports.
        arms: as for ``make_pool``; None is the default pool.
        step: pipeline step of every request, the key of the bandit's memory.
        options: more for ``make_pool``: policy, reward, ...

    Raises:
        UnknownName, BadOption: wrong arms. No weights are loaded here.
    """

    engine: Engine
    limits: Limits

    def __init__(self, name: str, arms: Sequence[ArmSpec] | None = None, step: str = "speed", **options: Any) -> None:
        self.name, self.step = name, step
        self.pool = make_pool(**options) if arms is None else make_pool(arms, **options)

    def bind(self, engine: Engine, limits: Limits) -> Ours:
        """Give it the engine to work on."""
        self.engine, self.limits = engine, limits
        return self

    def answer(self, prompt: Sequence[int], seed: int) -> Answer:
        """See Method."""
        limits = self.limits
        start = time.perf_counter()
        request = Request(
            prompt=tuple(prompt),
            sampling=Sampling(limits.temperature, limits.top_p, seed=seed),
            max_tokens=limits.max_tokens,
            stop_ids=limits.stop_ids,
            step=self.step,
            scope=_SCOPE,
        )
        steps = list(self.engine.generate(request, self.pool))
        seconds = time.perf_counter() - start
        ids = tuple(token for step in steps for token in step.tokens)
        summary = steps[-1].summary
        if summary is None:
            raise RuntimeError("the engine's last step has no summary")
        rounds = summary.rounds
        pieces = (len(prompt) - 1) // PREFILL_TOKENS  # forwards that only read, before the first round
        reads = len(prompt) - pieces * PREFILL_TOKENS > 1  # then the first round's forward is part of prefill_s
        forward_s = summary.prefill_s + sum(record.score_s for record in rounds[1 if reads else 0 :])
        return Answer(ids, seconds, pieces + len(rounds), rounds, forward_s)

    def reset(self, *, memory: bool) -> None:
        """See Method."""
        self.pool.forget(None if memory else _SCOPE)


class Transformers:
    """Bare ``model.generate``.

    Args:
        name: in reports.
        model: a transformers model, from `load_reference`.
        limits: as for the others. Every sampling option is spelled out, since the model's own defaults differ.
        options: more for ``generate``, e.g. ``prompt_lookup_num_tokens``.
    """

    def __init__(self, name: str, model: Any, limits: Limits, **options: Any) -> None:
        self.name, self._model = name, model
        self._options: dict[str, Any] = {"max_new_tokens": limits.max_tokens, "do_sample": not limits.greedy, **options}
        if not limits.greedy:
            self._options |= {"temperature": limits.temperature, "top_k": 0, "top_p": limits.top_p}
        self._forwards = 0
        model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def answer(self, prompt: Sequence[int], seed: int) -> Answer:
        """See Method."""
        torch.manual_seed(seed)
        before = self._forwards
        start = time.perf_counter()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), **self._options)
        new = tuple(output[0, len(prompt) :].tolist())
        return Answer(new, time.perf_counter() - start, self._forwards - before)

    def reset(self, *, memory: bool) -> None:
        """Nothing is kept between calls."""


def load_reference(model: str, engine: Engine, stop_ids: frozenset[int]) -> Any:
    """A second copy of the engine's model, straight from ``from_pretrained``: same files, dtype and device.

    The checkpoint's generation defaults (repetition penalty and the like) are dropped and its stop ids replaced by
    `stop_ids`, since our side is asked for the bare model too.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    path = Path(model).expanduser()
    where: str = model
    extra: dict[str, Any] = {}
    if model == EMBEDDED:
        where, extra = str(embedded_folder(print)), {"local_files_only": True}
    elif path.suffix == ".gguf":
        where, extra = str(path.parent), {"gguf_file": path.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(where, dtype=engine.target.lm.dtype, **extra)
    live = loaded.to(engine.target.lm.device).eval()
    tokenizer = engine.target.tokenizer
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    live.generation_config = GenerationConfig(
        eos_token_id=sorted(stop_ids) or None, pad_token_id=next(pad for pad in pads if pad is not None)
    )
    return live
