"""Heads on hidden states: lossless whatever they guess, as good after a rest as without one, never in another's way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from metasd_langchain.assemble import make_pool
from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.drafters import HostileDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer
from metasd_langchain.values import Draft, Request, Round, Sampling, Step
from tests.eagles import KINDS, learned_head, random_head, saved

COUNT = 16
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=5)
PROMPTS = [tuple(random.Random(n).randrange(4, 500) for _ in range(n)) for n in (1, 2, 9, 30)]
FAMILIES = ["gemma3", "llama", "qwen3"]


def truth(model: Any, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    """Cache-free forwards of the unwrapped model; the draw alone is ours."""
    if sampling.greedy:
        return tuple(reference_tokens(model, list(prompt), COUNT))
    draws, tokens = Draws(sampling.seed or 0), list(prompt)
    for position in range(COUNT):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(TargetRows(logits, sampling).token(0, position, draws))
    return tuple(tokens[len(prompt) :])


def answer(steps: Any) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.tokens)


def drafted(steps: list[Step]) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    summary = steps[-1].summary
    assert summary is not None
    return sum(record.drafted for record in summary.rounds), sum(record.accepted for record in summary.rounds)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Engine]]:
    model = tiny_model(request.param)
    engine = Engine(load_target((model, tiny_tokenizer())), prefill_tokens=16)
    yield model, engine
    engine.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_kind_of_head_gives_the_reference_ids(
    family: tuple[Any, Engine], sampling: Sampling, tmp_path: Path
) -> None:
    model, engine = family
    truths = {prompt: truth(model, prompt, sampling) for prompt in PROMPTS}
    for number, kind in enumerate(sorted(KINDS)):
        path = saved(random_head(engine.target, kind), tmp_path, f"head{number}")
        shape, window = ("tree", 8) if number % 2 else ("chain", 1024)  # prompts longer than the window, too
        pool = make_pool([(Eagle(path, shape=shape, window=window, stop=0.0), 5)], "fixed")
        runs = [engine.generate(Request(prompt, sampling, max_tokens=COUNT), pool) for prompt in PROMPTS]
        steps = [list(run) for run in runs]  # packed with the others
        assert [answer(run) for run in steps] == list(truths.values())
        assert all(drafted(run)[0] >= COUNT // 6 for run in steps)  # it did play


@pytest.fixture(scope="module")
def learned(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[tuple[int, ...], Any]]:
    answers = {prompt: truth(tiny_model(), prompt, GREEDY) for prompt in PROMPTS}
    return saved(learned_head(target, answers), tmp_path_factory.mktemp("eagle"), "learned"), answers


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("pieces", [1024, 4])
def test_a_head_that_knows_the_answers_has_its_drafts_accepted(
    target: Target, learned: tuple[str, Any], shape: str, pieces: int
) -> None:
    """An offset of one anywhere between the target's states and the head's inputs would show here."""
    path, answers = learned
    engine = Engine(target, prefill_tokens=pieces, max_batch=3)
    try:
        pool = make_pool([(Eagle(path, shape=shape), 4)], "fixed")
        runs = [engine.generate(Request(prompt, max_tokens=COUNT), pool) for prompt in answers]
        steps = [list(run) for run in runs]
        assert [answer(run) for run in steps] == list(answers.values())
        rounds = sum(len(run) for run in steps)
        assert sum(drafted(run)[1] for run in steps) >= 2 * rounds  # 4 drafted a round; untrained heads get none
    finally:
        engine.close()


def test_as_good_after_other_arms_played(engine: Engine, learned: tuple[str, Any]) -> None:
    path, answers = learned
    pool = make_pool([(Eagle(path), 4), (HostileDrafter(512, answers), 3), "plain"], "random")
    accepted = rounds = 0
    for _ in range(3):
        for prompt in answers:
            steps = list(engine.generate(Request(prompt, max_tokens=COUNT), pool))
            assert answer(steps) == answers[prompt]
            records = [record for step in steps[-1:] for record in step.summary.rounds]  # type: ignore[union-attr]
            played = [record for record in records if record.arm.startswith("eagle") and record.drafted]
            rounds += len(played)
            accepted += sum(record.accepted for record in played)
    assert accepted >= 2 * rounds > 0


def test_cancelled_in_the_middle_leaves_the_next_call_right(engine: Engine, learned: tuple[str, Any]) -> None:
    path, answers = learned
    pool = make_pool([f"eagle:{path}@4"], "fixed")
    for prompt in answers:
        steps = engine.generate(Request(prompt, max_tokens=COUNT), pool)
        next(steps)
        steps.close()
        assert answer(engine.generate(Request(prompt, max_tokens=COUNT), pool)) == answers[prompt]


def test_rejection_mode_is_greedy_at_temperature_zero(engine: Engine, learned: tuple[str, Any]) -> None:
    path, answers = learned
    for shape in ("chain", "tree"):
        pool = make_pool([(Eagle(path, shape=shape), 4)], "fixed")
        for prompt in answers:
            request = Request(prompt, max_tokens=COUNT, verify="rejection")
            assert answer(engine.generate(request, pool)) == answers[prompt]


def test_nothing_is_asked_of_the_model_when_no_drafter_wants_states(
    engine: Engine, learned: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    score = engine.target.lm.score

    def scoring(feeds: Any, hidden_layers: Any = ()) -> Any:
        asked.append(tuple(hidden_layers))
        return score(feeds, hidden_layers)

    monkeypatch.setattr(engine.target.lm, "score", scoring)
    prompt = PROMPTS[2]
    list(engine.generate(Request(prompt, max_tokens=4), make_pool(["suffix", "plain"], "fixed")))
    assert set(asked) == {()}
    list(engine.generate(Request(prompt, max_tokens=4), make_pool([f"eagle:{learned[0]}"], "fixed")))
    assert set(asked) == {(), (2, 3)}


class _Recording:
    """Wants hidden states; drafts a tree in which a wrong token comes before each right one."""

    name, candidates, prompt_rows, hidden_layers, hidden_window = "recording", 0, 0, (0, 2, 3), 50

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.answers = answers
        self.told: dict[tuple[int, ...], dict[int, list[torch.Tensor]]] = {}

    def open(self, request: Request) -> Any:
        self.told[request.prompt] = {layer: [] for layer in self.hidden_layers}
        return _Recorded(self, request.prompt)

    def forget(self, scope: str | None = None) -> None: ...


class _Recorded:
    def __init__(self, owner: _Recording, prompt: tuple[int, ...]) -> None:
        self.owner, self.prompt = owner, prompt
        self.end = 0  # rows told so far

    def hint(self) -> float:
        return 1.0

    def propose(self, tokens: Any, budget: int, draws: Any) -> Draft:
        right = self.owner.answers[self.prompt][len(tokens) - len(self.prompt) :][:3]
        nodes = [(token, parent) for depth, said in enumerate(right) for token, parent in (
            ((said + 1) % 512, 2 * depth - 1 if depth else -1), (said, 2 * depth - 1 if depth else -1)
        )]  # fmt: skip
        return Draft(tuple(token for token, _ in nodes), tuple(parent for _, parent in nodes))

    def observe(self, round: Round) -> None:
        rows = {len(states) for states in round.hidden.values()}
        assert len(rows) == 1
        assert round.hidden_start == self.end  # nothing twice, nothing left out
        self.end += rows.pop()
        for layer, states in round.hidden.items():
            self.owner.told[self.prompt][layer].append(states)

    def close(self) -> None: ...


@pytest.mark.parametrize("pieces", [1024, 4])
def test_sessions_are_told_the_states_of_all_committed_tokens_in_order(
    target: Target, learned: tuple[str, Any], pieces: int
) -> None:
    answers = learned[1]
    drafter = _Recording(answers)
    engine = Engine(target, prefill_tokens=pieces, max_batch=3)
    try:
        pool = make_pool([(drafter, 6), "plain"], "random")
        runs = [engine.generate(Request(prompt, max_tokens=COUNT), pool) for prompt in answers]
        steps = [list(run) for run in runs]
    finally:
        engine.close()
    assert sum(drafted(run)[1] for run in steps) > COUNT
    for prompt, said in answers.items():
        with torch.inference_mode():
            text = torch.tensor([(*prompt, *said)])
            want = tiny_model()(text, output_hidden_states=True, use_cache=False).hidden_states
        for layer, told in drafter.told[prompt].items():
            states = torch.cat(told)
            assert len(states) >= len(prompt) + COUNT - 5  # of the last round's tokens some are never read
            assert torch.allclose(states, want[layer][0, : len(states)], atol=1e-4)


def test_of_a_long_piece_the_last_states_are_told(target: Target, learned: tuple[str, Any]) -> None:
    drafter = _Recording(learned[1])
    drafter.hidden_window = 7
    engine = Engine(target)
    seen: list[tuple[int, int]] = []
    try:
        session = drafter.open(Request(PROMPTS[3]))
        session.observe = lambda told: seen.append((told.hidden_start, len(told.hidden[2])))
        drafter.open = lambda request: session  # type: ignore[method-assign]
        list(engine.generate(Request(PROMPTS[3], max_tokens=1), make_pool([(drafter, 6)], "fixed")))
    finally:
        engine.close()
    assert seen == [(len(PROMPTS[3]) - 7, 7)]
