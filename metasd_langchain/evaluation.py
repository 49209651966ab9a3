"""Evaluators over what a call's metadata says: accepted length, speed-up, and whether drafting changed anything.

Each takes what `langsmith.evaluate` gives, ``(run, example)`` or any of ``inputs``, ``outputs``, ``reference_outputs``
by name, or, in plain Python, anything that holds our metadata: a message, a ``Generation``, an ``LLMResult``, a run, a
list or mapping of those. Each returns ``{"key", "score", "comment"}``; the score is None where nothing can be said.

    >>> from langsmith import evaluate  # doctest: +SKIP
    >>> evaluate(chain.invoke, data="questions", evaluators=[accepted_length, speedup, lossless(llm)])  # doctest: +SKIP
    >>> accepted_length(outputs=llm.generate(["Once upon a time"]))  # doctest: +SKIP
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from metasd_langchain.values import Step

__all__ = ["Score", "accepted_length", "lossless", "speedup"]

Score = dict[str, Any]
T = TypeVar("T")
_HOLDERS = ("outputs", "child_runs", "generations", "generation_info", "message", "response_metadata", "kwargs")
_DEEP = 64  # a run nested deeper is not looked into
_NOTHING = "no metadata of MetaSDLLM or ChatMetaSD in the outputs or the runs below"


class _Model(Protocol):
    temperature: float
    seed: int | None

    def steps(self, prompt: str, *, stop: list[str] | None = None, **options: Any) -> Iterator[Step]: ...


def accepted_length(
    run: Any = None, example: Any = None, *, inputs: Any = None, outputs: Any = None, reference_outputs: Any = None
) -> Score:
    """Tokens a forward of the target gave: ``1 + accepted / rounds``, over all calls found. 1 is plain decoding."""
    calls = _calls(run, outputs)
    rounds = sum(call["rounds"] for call in calls)
    if not rounds:
        return _score("accepted_length", None, _NOTHING if not calls else "the calls have no rounds")
    accepted = sum(call["accepted"] for call in calls)
    told = f"{accepted} accepted tokens in {rounds} rounds of {_calls_said(len(calls))}"
    return _score("accepted_length", 1.0 + accepted / rounds, told)


def speedup(
    run: Any = None, example: Any = None, *, inputs: Any = None, outputs: Any = None, reference_outputs: Any = None
) -> Score:
    """How many times faster calls decoded than undrafted rounds alone would have, by their own clocks.

    ``sum(plain_round_s * decode_tokens) / sum(decode_s)`` over all calls: the seconds that the tokens after a call's
    first round would have taken one an undrafted round, over the seconds they took. ``plain_round_s`` is the median
    of the call's own undrafted rounds, less the time in which a drafter looked and found nothing. The first round is
    left out, since it reads the prompt. Calls with fewer than three undrafted rounds say too little and are left out;
    the comment tells how many. It is an estimate: ``metasd tune`` measures against plain decoding.
    """
    calls = _calls(run, outputs)
    told = [call for call in calls if call.get("plain_round_s") and call.get("decode_s")]
    if not told:
        return _score("speedup", None, "no call has three undrafted rounds to compare with" if calls else _NOTHING)
    would = sum(call["plain_round_s"] * call["decode_tokens"] for call in told)
    value = would / sum(call["decode_s"] for call in told)
    return _score("speedup", value, f"against the undrafted rounds of {len(told)} of {_calls_said(len(calls))}")


def lossless(llm: _Model, **options: Any) -> Callable[..., Score]:
    """An evaluator that asks again with ``speculative=False`` and compares token ids: 1 when all are the same, else 0.

    Where the outputs hold token ids (calls with ``logprobs``), those are compared; otherwise the prompt is run once
    more with drafting, too. In half precision two tokens may be so close that a forward over several tokens rounds to
    the other, as transformers' assisted generation does; in float32 every difference is a fault.

    Args:
        llm: the model that made the outputs, or one with the same options.
        options: of the call, where it had any, e.g. ``stop``.
    """

    def lossless(
        run: Any = None, example: Any = None, *, inputs: Any = None, outputs: Any = None, reference_outputs: Any = None
    ) -> Score:
        temperature, seed = options.get("temperature", llm.temperature), options.get("seed", llm.seed)
        if temperature and seed is None:
            return _score("lossless", None, "answers are drawn without a seed, so no two are the same")
        prompts = list(_prompts(run)) or list(_prompts(inputs))
        if not prompts:
            return _score("lossless", None, "no prompt: inputs are no text and no mapping with one text")
        found = [ids for ids in _walk((run, outputs), _ids_in) if ids]
        known = found if len(found) == len(prompts) == 1 else None
        for index, prompt in enumerate(prompts):
            drafted = known[index] if known else _ids(llm.steps(prompt, **options))
            plain = _ids(llm.steps(prompt, **{**options, "speculative": False}))
            if drafted != plain:
                told = f"prompt {index + 1} of {len(prompts)} differs from token {_parting(drafted, plain) + 1} on"
                return _score("lossless", 0.0, told)
        return _score("lossless", 1.0, f"{len(prompts)} answers token for token the same")

    return lossless


# -- looking for what is known -----------------------------------------------------------------------------------------


def _score(key: str, score: float | None, comment: str) -> Score:
    return {"key": key, "score": score, "comment": comment}


def _calls_said(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


def _calls(*places: Any) -> list[Mapping[str, Any]]:
    """Our metadata of each call; a call that is in a run's outputs and in those of the runs below counts once."""
    found: list[Mapping[str, Any]] = []
    for call in _walk(places, _metadata_in):
        if call not in found:
            found.append(call)
    return found


def _metadata_in(thing: Mapping[str, Any]) -> Mapping[str, Any] | None:
    told = thing.get("metasd")
    if isinstance(told, Mapping) and isinstance(told.get("rounds"), int) and isinstance(told.get("accepted"), int):
        return told
    return None


def _ids_in(thing: Mapping[str, Any]) -> list[int] | None:
    """Token ids beside log-probabilities."""
    told = thing.get("logprobs")
    entries = told.get("content") if isinstance(told, Mapping) else None
    if not isinstance(entries, Sequence):
        return None
    return [entry["id"] for entry in entries if isinstance(entry, Mapping) and "id" in entry]


def _walk(things: Iterable[Any], take: Callable[[Mapping[str, Any]], T | None]) -> Iterator[T]:
    """What `take` finds in the mappings inside of things, each once."""
    waiting = deque((thing, 0) for thing in things)
    seen: dict[int, Any] = {}  # kept, so that no id is used again meanwhile
    while waiting:
        thing, depth = waiting.popleft()
        if thing is None or isinstance(thing, (str, bytes, int, float)) or id(thing) in seen or depth > _DEEP:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Mapping):
            found = take(thing)
            if found is not None:
                yield found
            inside: Iterable[Any] = thing.values()
        elif isinstance(thing, (list, tuple)):
            inside = thing
        else:
            inside = [getattr(thing, name, None) for name in _HOLDERS]
        waiting += [(one, depth + 1) for one in inside]


def _prompts(thing: Any) -> Iterator[str]:
    """Prompts of the model calls in a run, or the text that inputs are."""
    if isinstance(thing, str):
        yield thing
    elif isinstance(thing, Mapping):
        texts = [value for value in thing.values() if isinstance(value, str)]
        if len(texts) == 1:
            yield texts[0]
    elif thing is not None:
        below = getattr(thing, "child_runs", None) or ()
        if getattr(thing, "run_type", "") == "llm":
            yield from (getattr(thing, "inputs", None) or {}).get("prompts", ())
        for one in below:
            yield from _prompts(one)


def _parting(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first difference; the end of the shorter one when there is none before."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _ids(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]
