"""Answers end where plain decoding ends them: stop ids, stop strings, cap and window at every offset inside a block.

"Declare it": the answer is known first (forced or random), then a token or a string it holds is declared the end. So
every end is met at every place of an accepted block, whatever its length and shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from metasd_langchain.assemble import make_pool
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.text import Detokenizer
from metasd_langchain.models.attention import Slot
from metasd_langchain.models.load import Target
from metasd_langchain.models.tree import offsets
from metasd_langchain.testing.drafters import PerfectDrafter
from metasd_langchain.values import PLAIN, Request, Round, Sampling, Step, Summary
from tests.laws.test_lossless import reference

BLOCKS = (1, 2, 4, 8, 16)
PROMPT = (2, 300, 301, 302, 40, 41, 42, 43, 44, 45)  # past the window of 8
TEXT = "He said:\n\n  nothing    . <eos> in on"
EMOJI = "\U0001fae9"
COUNT = 20


class Watched(PerfectDrafter):
    """Remembers what its sessions are told."""

    def __init__(self, answer: Sequence[int], shape: Any = "chain") -> None:
        super().__init__({PROMPT: tuple(answer)}, shape=shape, vocab=512)
        self.told: list[Round] = []
        self.closed = 0

    def open(self, request: Request) -> Any:
        return _WatchedSession(super().open(request), self)


class _WatchedSession:
    def __init__(self, inner: Any, owner: Watched) -> None:
        self._inner, self._owner = inner, owner
        self.hint, self.propose = inner.hint, inner.propose

    def observe(self, round: Round) -> None:
        self._owner.told.append(round)
        self._inner.observe(round)

    def close(self) -> None:
        self._owner.closed += 1


@dataclass
class Slots:
    """What the slots held after each round, and how far the target read."""

    lengths: list[int] = field(default_factory=list)
    farthest: int = 0
    last: Slot | None = None


@pytest.fixture
def slots(target: Target, monkeypatch: pytest.MonkeyPatch) -> Slots:
    seen, keep, score = Slots(), target.lm.keep, target.lm.score

    def keeping(feed: Any, path: Sequence[int] = ()) -> None:
        keep(feed, path)
        seen.lengths.append(feed.slot.length)
        seen.last = feed.slot

    def scoring(feeds: Any, hidden_layers: Sequence[int] = ()) -> Any:
        for feed in feeds:
            deepest = feed.slot.length + max(offsets(len(feed.pending), feed.draft.parents))
            seen.farthest = max(seen.farthest, deepest)
        return score(feeds, hidden_layers)

    monkeypatch.setattr(target.lm, "keep", keeping)
    monkeypatch.setattr(target.lm, "score", scoring)
    return seen


@pytest.fixture
def force(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the target say given tokens after PROMPT, whatever it would have said."""

    def forced(answer: Sequence[int]) -> list[int]:
        score = target.lm.score

        def scoring(feeds: Any, hidden_layers: Sequence[int] = ()) -> Any:
            scores = score(feeds, hidden_layers)
            with torch.inference_mode():
                for feed, start in zip(feeds, scores.starts, strict=True):
                    places = [feed.slot.length + at for at in offsets(len(feed.pending), feed.draft.parents)]
                    for row, place in enumerate(places[len(places) - feed.rows :]):
                        at = place + 1 - len(PROMPT)
                        if 0 <= at < len(answer):
                            scores.logits[start + row, answer[at]] += 1e4
            return scores

        monkeypatch.setattr(target.lm, "score", scoring)
        return list(answer)

    yield forced
    monkeypatch.undo()


def encode(target: Target, text: str) -> list[int]:
    """Ids without the BOS; what looks like a special token is typed, one character a token."""
    typed = target.tokenizer.convert_tokens_to_ids(list("<eos>"))
    parts = [target.encode(part)[1:] for part in text.split("<eos>")]
    return parts[0] + [token for part in parts[1:] for token in [*typed, *part]]


@dataclass
class Answer:
    ids: tuple[int, ...]
    text: str
    chunks: list[str]
    summary: Summary

    @property
    def end(self) -> tuple[tuple[int, ...], str, str, int]:
        return self.ids, self.text, self.summary.finish_reason, self.summary.completion_tokens


def run(engine: Engine, request: Request, drafter: Any = None, budget: int = 4) -> Answer:
    pool = make_pool([PLAIN] if drafter is None else [(drafter, budget)], "fixed")
    steps: list[Step] = list(engine.generate(request, pool))
    summary = steps[-1].summary
    assert summary is not None
    assert all(step.summary is None for step in steps[:-1])
    chunks = [piece.text for step in steps for piece in step.pieces]
    return Answer(tuple(t for step in steps for t in step.tokens), "".join(chunks), chunks, summary)


def expected(target: Target, answer: Sequence[int], request: Request) -> tuple[tuple[int, ...], str, str, int]:
    """Where plain decoding ends, by decoding every prefix: ids, text, reason, usage."""
    decode = Detokenizer(target.tokenizer).decode
    cap = min(request.max_tokens, target.lm.window - len(request.prompt))
    for n, token in enumerate(answer[:cap], 1):
        ids = tuple(answer[:n])
        if token in request.stop_ids:
            return ids, decode(ids[:-1]), "stop", n
        text = decode(ids)
        found = [at for at in map(text.find, request.stop) if at >= 0]
        if found:
            return ids, text[: min(found)], "stop", n
    return tuple(answer[:cap]), decode(answer[:cap]), "length", cap


def check(
    engine: Engine, target: Target, slots: Slots, answer: Sequence[int], request: Request, budget: int, shape: str
) -> Answer:
    """Ids, text, reason, usage, records, what drafters were told and what the slot holds: all say the same."""
    slots.lengths.clear()
    slots.farthest = 0
    drafter = Watched(answer, shape)
    got = run(engine, request, drafter, budget)
    assert got.end == expected(target, answer, request)
    records = got.summary.rounds
    assert sum(record.committed for record in records) == len(got.ids)
    assert all(record.accepted <= min(record.committed, record.drafted) for record in records)
    assert tuple(token for told in drafter.told for token in told.committed) == got.ids
    assert [len(told.committed) for told in drafter.told] == [record.committed for record in records]
    for told, record in zip(drafter.told, records, strict=True):
        assert [told.fed[node] for node in told.path] == list(told.committed[: record.accepted])
    total = len(request.prompt) + len(got.ids)
    assert slots.lengths[-1] == total - 1  # a strict prefix of what was committed
    assert slots.farthest < len(request.prompt) + request.max_tokens
    assert drafter.closed == 1
    assert got.summary.prompt_tokens == len(request.prompt)
    return got


@pytest.fixture(scope="module")
def sampled() -> tuple[int, ...]:
    """An answer of many different tokens."""
    answer = reference(PROMPT, Sampling(1.0, seed=11))
    assert len(set(answer)) > 15
    return answer


SHAPES = ["chain", "tree"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", BLOCKS)
def test_a_stop_id_at_every_offset(
    engine: Engine, target: Target, slots: Slots, sampled: tuple[int, ...], budget: int, shape: str
) -> None:
    for at in range(min(COUNT, budget + 3)):
        request = Request(PROMPT, Sampling(1.0, seed=11), COUNT, stop_ids=frozenset({sampled[at], 511}))
        got = check(engine, target, slots, sampled, request, budget, shape)
        assert got.ids == sampled[: sampled.index(sampled[at]) + 1]
        assert got.summary.finish_reason == "stop"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", BLOCKS)
def test_the_cap_is_exact(
    engine: Engine, target: Target, slots: Slots, sampled: tuple[int, ...], budget: int, shape: str
) -> None:
    for cap in range(1, 11) if budget > 2 else (1, 2, 3, 4, 10):
        request = Request(PROMPT, Sampling(1.0, seed=11), cap)
        got = check(engine, target, slots, sampled, request, budget, shape)
        assert (got.ids, got.summary.finish_reason) == (sampled[:cap], "length")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", BLOCKS)
def test_a_stop_string_completed_by_every_token(
    engine: Engine, target: Target, slots: Slots, force: Any, budget: int, shape: str
) -> None:
    answer = force(encode(target, TEXT))
    decode = Detokenizer(target.tokenizer).decode
    ends = [len(decode(answer[: n + 1])) for n in range(len(answer))]
    assert decode(answer) == TEXT
    for at, end in enumerate(ends[: budget + 3]):
        stop = TEXT[max(0, end - 3) : end]  # three characters, over one to three tokens
        got = check(engine, target, slots, answer, Request(PROMPT, max_tokens=60, stop=(stop,)), budget, shape)
        assert got.text == TEXT[: TEXT.index(stop)]
        assert len(got.ids) <= at + 1
        assert got.summary.finish_reason == "stop"


@pytest.mark.parametrize("budget", [None, *BLOCKS])
def test_a_stop_of_the_end_of_one_token_and_the_beginning_of_the_next(
    engine: Engine, target: Target, force: Any, budget: int | None
) -> None:
    pieces = ["▁th", "the", "▁an", "and", "▁in", "ing", "hen", "then"]
    vocab = target.tokenizer.get_vocab()
    answer = force([vocab[piece] for piece in pieces if piece in vocab] * 2)
    decode = Detokenizer(target.tokenizer).decode
    assert len(answer) >= 8
    for at in range(len(answer) // 2 - 1):
        one, two = decode([answer[at]]), decode([answer[at + 1]])
        stop = one[-2:] + two[:3]
        drafter = None if budget is None else Watched(answer)
        request = Request(PROMPT, max_tokens=len(answer), stop=(stop,))
        got = run(engine, request, drafter, budget or 1)
        assert got.end == expected(target, answer, request)
        assert got.text == decode(answer)[: decode(answer).index(stop)]
        assert stop not in got.text


def test_every_block_length_ends_as_plain_does(engine: Engine, target: Target, force: Any) -> None:
    answer = force(encode(target, TEXT))
    requests = [
        Request(PROMPT, max_tokens=60, stop=("\n\n  no", "nothing")),
        Request(PROMPT, max_tokens=60, stop=("nothing here", "nothing    !", "    . <")),
        Request(PROMPT, max_tokens=9, stop=("no such",)),
        Request(PROMPT, max_tokens=60, stop=("said",), stop_ids=frozenset({answer[3]})),
        Request(PROMPT, max_tokens=len(answer), stop=("on and on",)),
    ]
    for request in requests:
        plain = run(engine, request)
        assert plain.end == expected(target, answer, request)
        for budget, shape in ((1, "tree"), (2, "chain"), (4, "tree"), (8, "chain"), (16, "tree"), (16, "chain")):
            assert run(engine, request, Watched(answer, shape), budget).end == plain.end


@pytest.mark.parametrize("budget", BLOCKS)
def test_beginnings_of_stops_that_are_not_completed_are_not_swallowed_and_completed_ones_never_leak(
    engine: Engine, target: Target, force: Any, budget: int
) -> None:
    answer = force(encode(target, TEXT))
    whole = run(
        engine,
        Request(PROMPT, max_tokens=len(answer), stop=("He said!", "nothings", "nothing   x", "in on.", "on and")),
        Watched(answer),
        budget,
    )
    assert (whole.text, whole.summary.finish_reason) == (TEXT, "length")
    cut = run(engine, Request(PROMPT, max_tokens=60, stop=("nothing    .",)), Watched(answer), budget)
    assert cut.text == TEXT[: TEXT.index("nothing")]
    seen = ""
    for chunk in cut.chunks:
        seen += chunk
        assert TEXT.index("nothing") >= len(seen)


@pytest.mark.parametrize("budget", [1, 8])
def test_an_end_at_the_very_first_token(engine: Engine, target: Target, slots: Slots, force: Any, budget: int) -> None:
    answer = force(encode(target, TEXT))
    first = Detokenizer(target.tokenizer).decode(answer[:1])
    for request in (
        Request(PROMPT, stop=(first,)),
        Request(PROMPT, stop_ids=frozenset({answer[0]})),
    ):
        got = check(engine, target, slots, answer, request, budget, "chain")
        assert (got.ids, got.text, got.summary.finish_reason) == ((answer[0],), "", "stop")
        assert len(got.summary.rounds) == 1
    got = check(engine, target, slots, answer, Request(PROMPT, max_tokens=1), budget, "chain")
    assert (got.ids, got.text, got.summary.finish_reason) == ((answer[0],), first, "length")


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 8])
def test_a_character_of_four_tokens_over_blocks(engine: Engine, target: Target, force: Any, budget: int) -> None:
    answer = force(encode(target, f"a {EMOJI}b{EMOJI}{EMOJI} c"))
    assert sum(4 <= token < 260 for token in answer) == 12  # bytes
    got = run(engine, Request(PROMPT, max_tokens=len(answer)), Watched(answer), budget)
    assert got.text == f"a {EMOJI}b{EMOJI}{EMOJI} c"
    assert not any("�" in chunk for chunk in got.chunks)
    for cap in range(1, len(answer)):  # cut inside the character: as the tokenizer reads it
        got = run(engine, Request(PROMPT, max_tokens=cap), Watched(answer), budget)
        assert got.text == Detokenizer(target.tokenizer).decode(answer[:cap])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 3, 4, 16])
def test_a_stop_inside_a_run_of_bytes(
    engine: Engine, target: Target, slots: Slots, force: Any, budget: int, shape: str
) -> None:
    answer = force(
        [*encode(target, "ok "), *(4 + byte for byte in f"{EMOJI}é!STOP{EMOJI}".encode()), *encode(target, "x")]
    )
    decode = Detokenizer(target.tokenizer).decode
    assert decode(answer) == f"ok {EMOJI}é!STOP{EMOJI}x"
    for stop, text in (
        ("STOP", f"ok {EMOJI}é!"),
        ("é", f"ok {EMOJI}"),
        (EMOJI, "ok "),
        (f"é!STOP{EMOJI}x", f"ok {EMOJI}"),
    ):
        request = Request(PROMPT, max_tokens=len(answer), stop=(stop,))
        got = check(engine, target, slots, answer, request, budget, shape)
        assert (got.text, got.summary.finish_reason) == (text, "stop")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [None, 1, 8])
def test_a_full_window_ends_with_length(
    target: Target, engine: Engine, slots: Slots, budget: int | None, shape: Any
) -> None:
    window = target.lm.window
    for room in (1, 2, 5, 11):
        prompt = tuple(PROMPT[i % len(PROMPT)] for i in range(window - room))
        answer = run(engine, Request(prompt, max_tokens=999)).ids
        assert len(answer) == room
        drafter = None if budget is None else PerfectDrafter({prompt: answer}, shape=shape, vocab=512)
        got = run(engine, Request(prompt, max_tokens=999), drafter, budget or 1)
        assert (got.ids, got.summary.finish_reason) == (answer, "length")
        assert slots.farthest < window


@pytest.mark.parametrize("arms", [["plain"], ["lookup@8"], ["suffix@16"], ["recycling@4"]])
def test_without_any_eos_an_answer_goes_on_to_its_cap(engine: Engine, arms: list[str]) -> None:
    prompt = (2, *[40, 41, 42, 43] * 6)
    steps = list(engine.generate(Request(prompt, max_tokens=30), make_pool(arms, "fixed")))
    assert sum(len(step.tokens) for step in steps) == 30
    assert steps[-1].summary is not None
    assert steps[-1].summary.finish_reason == "length"


def test_several_stop_ids_all_count(engine: Engine, target: Target, slots: Slots, sampled: tuple[int, ...]) -> None:
    for pair in ((3, 9), (9, 3), (0, 19), (7, 8)):
        request = Request(PROMPT, Sampling(1.0, seed=11), COUNT, stop_ids=frozenset(sampled[at] for at in pair))
        got = check(engine, target, slots, sampled, request, 8, "chain")
        assert len(got.ids) == min(sampled.index(sampled[at]) for at in pair) + 1


@pytest.mark.parametrize("special", [0, 1, 2])
def test_special_tokens_are_no_text_whether_they_end_the_answer_or_not(
    engine: Engine, target: Target, slots: Slots, force: Any, special: int
) -> None:
    typed = encode(target, "so <eos> is")
    answer = force([*typed[:4], special, *typed[4:], special])
    through = check(engine, target, slots, answer, Request(PROMPT, max_tokens=len(answer)), 4, "chain")
    assert through.text == "so <eos> is"
    ended = check(engine, target, slots, answer, Request(PROMPT, stop_ids=frozenset({special})), 4, "chain")
    assert ended.ids == tuple(answer[:5])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_slot_holds_what_plain_decoding_would_have_put_there(
    engine: Engine, target: Target, slots: Slots, sampled: tuple[int, ...], shape: str
) -> None:
    """Keys and values after a stop inside an accepted block are those of the kept tokens, nothing of the rest."""
    for at in (2, 5, 9, 13):
        request = Request(PROMPT, Sampling(1.0, seed=11), COUNT, stop_ids=frozenset({sampled[at]}))
        run(engine, request)
        plain = slots.last
        assert plain is not None
        check(engine, target, slots, sampled, request, 8, shape)
        assert slots.last is not None
        assert slots.last is not plain
        assert slots.last.length == plain.length
        for ours, theirs in zip([*slots.last.keys, *slots.last.values], [*plain.keys, *plain.values], strict=True):
            assert torch.allclose(ours[:, : plain.length], theirs[:, : plain.length], atol=1e-4)
