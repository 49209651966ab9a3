"""Full information: every drafter is scored on what is committed. Answers and drafts stay what they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from metasd_langchain.assemble import make_pool
from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.drafters.layer_skip import LayerSkipDrafter
from metasd_langchain.drafters.small_lm import SmallLM
from metasd_langchain.engine.loop import Engine
from metasd_langchain.models.load import Target
from metasd_langchain.testing.drafters import HostileDrafter, PerfectDrafter
from metasd_langchain.testing.models import tiny_tokenizer
from metasd_langchain.values import PLAIN, Choice, Draft, Request, Round, RoundRecord
from tests.bugs import kit
from tests.eagles import random_head, saved
from tests.laws.test_lossless import COUNT, SAMPLINGS, answer, prompts, reference
from tests.laws.test_lossless_model_drafters import alike

MODES = ("greedy", "t0.7")
SOME = [prompts()[i] for i in (0, 4, 6)]
PROMPT = prompts()[-1]
FREE = ["suffix@6", "recycling_tree@5", "lookup@3", "fused:suffix+recycling@6"]
FREE_ARMS = ("suffix@6", "recycling_tree@5", "lookup@3", "fused-suffix+recycling@6")


@pytest.fixture(scope="module")
def truths() -> dict[str, dict[tuple[int, ...], tuple[int, ...]]]:
    return {mode: {prompt: reference(prompt, SAMPLINGS[mode]) for prompt in SOME} for mode in MODES}


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    folder = tmp_path_factory.mktemp("heads")
    return [saved(random_head(target, seed=seed), folder, f"head{seed}") for seed in (0, 1)]


def with_weights(heads: Sequence[str]) -> list[Any]:
    return [
        (Eagle(heads[0], name="tree", stop=0.0), 5),
        (Eagle(heads[1], name="chain", shape="chain", stop=0.0, window=8), 4),
        (SmallLM((alike(0.004), tiny_tokenizer()), confidence=0.0), 4),
        (SmallLM((alike(0.01), tiny_tokenizer()), kv="window:9", confidence=0.0, name="narrow"), 3),
        (LayerSkipDrafter(ratio=0.34, confidence=0.0), 2),  # cannot score
    ]


def rounds(steps: Sequence[Any]) -> tuple[RoundRecord, ...]:
    return steps[-1].summary.rounds  # type: ignore[no-any-return]


# -- the answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("policy", "reward"), [("hedge", "throughput"), ("normalhedge", "expected_length")])
def test_answers_are_those_of_plain_decoding(
    engine: Engine, truths: Any, heads: Sequence[str], policy: str, reward: str, mode: str
) -> None:
    truth = truths[mode]
    scripted = [(PerfectDrafter(truth), 4), (HostileDrafter(512, truth, shape="tree"), 3)]
    pool = make_pool([*FREE, *with_weights(heads), *scripted, PLAIN], policy, reward, policy_options={"every": 3})
    requests = [Request(prompt, SAMPLINGS[mode], max_tokens=COUNT, step="one") for prompt in SOME]
    for request in requests:
        steps = list(engine.generate(request, pool))
        assert answer(steps) == truth[request.prompt]
        assert all(record.scoring_s <= record.draft_s for record in rounds(steps))
        assert sum(record.scoring_s for record in rounds(steps)) > 0.0
    runs = [engine.generate(request, pool) for request in requests]  # packed with the others
    assert [answer(run) for run in runs] == [truth[request.prompt] for request in requests]


@pytest.mark.parametrize("mode", MODES)
def test_with_rejection_the_answer_ends_as_it_should(engine: Engine, heads: Sequence[str], mode: str) -> None:
    pool = make_pool([*FREE, *with_weights(heads), PLAIN], "normalhedge", "expected_length")
    request = Request(PROMPT, SAMPLINGS[mode], max_tokens=COUNT, verify="rejection")
    said = answer(engine.generate(request, pool))
    assert len(said) == COUNT
    assert mode != "greedy" or said == reference(PROMPT, SAMPLINGS[mode])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_invoke_is_stream(temperature: float) -> None:
    llm = kit.make(drafters=["suffix@6", "recycling@4", PLAIN], policy="normalhedge", reward="expected_length")
    llm = llm.model_copy(update={"temperature": temperature, "seed": 3, "max_tokens": 24})
    said = llm.invoke(kit.PROMPT)
    assert "".join(llm.stream(kit.PROMPT)) == said == llm.invoke(kit.PROMPT)


# -- drafts ------------------------------------------------------------------------------------------------------------


class Always:
    """Plays its arm and keeps what it was told."""

    name = "always"
    every = 2

    def __init__(self, arm: str, *, full: bool) -> None:
        self.arm, self.full_information = arm, full
        self.told: list[dict[str, float]] = []

    def __deepcopy__(self, memo: Any) -> Always:
        return self  # told in one place

    def select(self, situation: Any, rng: Any) -> Choice:
        return Choice(self.arm if self.arm in situation.arms else PLAIN)

    def update(self, situation: Any, choice: Choice, rewards: Any) -> None:
        self.told.append(dict(rewards))

    def values(self) -> dict[str, float]:
        return {}

    def dump(self) -> dict[str, object]:
        return {}

    def load(self, state: object) -> None: ...


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arm", ["suffix@6", "recycling_tree@5", "tree@5", "chain@4", "small_lm@4", "narrow@3"])
def test_scoring_changes_no_draft(engine: Engine, heads: Sequence[str], arm: str, mode: str) -> None:
    found = []
    for full in (True, False):
        policy = Always(arm, full=full)
        arms = [*FREE, *with_weights(heads)] if arm not in FREE else FREE
        pool = make_pool([*arms, PLAIN], policy, "length", memory="request")
        steps = list(engine.generate(Request(PROMPT, SAMPLINGS[mode], max_tokens=COUNT), pool))
        found.append([(step.tokens, step.record.drafted, step.record.accepted) for step in steps if step.record])
        weighty = {"tree@5", "chain@4", "small_lm@4", "narrow@3"} if arm not in FREE else set()
        assert set().union(*policy.told) == ({*FREE_ARMS, *weighty, PLAIN} if full else {arm})
    assert found[0] == found[1]
    assert any(drafted for _, drafted, _ in found[0])


def test_of_a_drafter_that_is_the_target_every_token_is_likely(engine: Engine) -> None:
    for mode in MODES:
        policy = Always(PLAIN, full=True)
        twin = SmallLM((alike(0.0), tiny_tokenizer()), confidence=0.0)
        pool = make_pool([(twin, 4), PLAIN], policy, "expected_length", memory="request")
        list(engine.generate(Request(PROMPT, SAMPLINGS[mode], max_tokens=COUNT), pool))
        lengths = [17 * rewards["small_lm@4"] for rewards in policy.told]
        assert lengths == pytest.approx([5.0] * (COUNT - 4) + [4.0, 3.0, 2.0], abs=1e-3)


def test_what_did_not_play_is_learned_about(engine: Engine, truths: Any) -> None:
    truth = truths["greedy"]
    policy = Always(PLAIN, full=True)
    good, bad = Scoring(truth), Scoring({}, name="bad")
    pool = make_pool([(good, 4), (bad, 4), PLAIN], policy, "expected_length", memory="request")
    list(engine.generate(Request(PROMPT, max_tokens=COUNT), pool))
    assert policy.told[0] == {"scoring@4": pytest.approx(5 / 17), "bad@4": pytest.approx(1 / 17), PLAIN: 1 / 17}


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Scoring(PerfectDrafter):
    """Scores by its script, 1 or 0; keeps what it was asked."""

    late: ClassVar[bool] = False

    def __init__(self, answers: Any, name: str = "scoring") -> None:
        super().__init__(answers, name=name)
        self.asked: list[tuple[int, int, int]] = []  # tokens, start, tokens observed
        self.closed = 0

    def open(self, request: Request) -> Any:
        drafter, inner = self, super().open(request)

        class Session:
            scores_late = drafter.late
            seen = len(request.prompt)

            def hint(self) -> float:
                return math.nan

            def propose(self, tokens: Sequence[int], budget: int, draws: Any) -> Draft:
                return inner.propose(tokens, budget, draws)

            def score(self, tokens: Sequence[int], start: int) -> Any:
                drafter.asked.append((len(tokens), start, self.seen))
                said = drafter.truth(request)[start - len(request.prompt) :]
                return [float(token in said[place : place + 1]) for place, token in enumerate(tokens[start:])]

            def observe(self, round: Round) -> None:
                self.seen += len(round.committed)

            def close(self) -> None:
                drafter.closed += 1

        return Session()

    def truth(self, request: Request) -> Sequence[int]:
        return self._answers.get(request.prompt, ())  # type: ignore[union-attr]


class Late(Scoring):
    late = True


def test_who_scores_ahead_is_asked_before_it_observes_and_who_reads_every_few_rounds(
    engine: Engine, truths: Any
) -> None:
    early, late = Scoring({}, name="early"), Late({}, name="late")
    pool = make_pool([(early, 4), (late, 4), PLAIN], "fixed")  # of a policy without full information nobody is asked
    list(engine.generate(Request(PROMPT, max_tokens=10), pool))
    assert not early.asked + late.asked
    pool = make_pool([(early, 4), (late, 4), PLAIN], Always(PLAIN, full=True), memory="request")
    list(engine.generate(Request(PROMPT, max_tokens=5), pool))
    n = len(PROMPT)
    assert early.asked == [(n, n, n), *((n + i + 1, n + i, n + i) for i in range(5))]
    assert late.asked == [(n, n, n), (n + 2, n, n + 2), (n + 4, n + 2, n + 4), (n + 5, n + 4, n + 5)]


def boom(tokens: Sequence[int], start: int) -> list[float]:
    raise ValueError("boom")


WRONG = {
    "raises": boom,
    "too few": lambda tokens, start: [1.0] * max(0, len(tokens) - start - 1),
    "no probability": lambda tokens, start: [1.5] * (len(tokens) - start),
    "no number": lambda tokens, start: ["much"] * (len(tokens) - start),
    "nothing": lambda tokens, start: 3,
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wrong", sorted(WRONG))
@pytest.mark.parametrize("policy", ["always", "normalhedge"])
def test_a_drafter_whose_score_fails_is_benched_like_any_that_fails(
    engine: Engine, truths: Any, wrong: str, late: bool, policy: str
) -> None:
    truth = truths["greedy"]
    asked: list[int] = []

    class Failing(Late if late else Scoring):  # type: ignore[misc]
        def open(self, request: Request) -> Any:
            session = super().open(request)

            def score(tokens: Sequence[int], start: int) -> Any:
                asked.append(start)
                return [] if len(asked) == 1 else WRONG[wrong](tokens, start)

            session.score = score
            return session

    chosen: Any = Always("good@1", full=True) if policy == "always" else policy
    pool = make_pool(
        [(Failing(truth), 4), (Scoring(truth, name="good"), 1), PLAIN], chosen, "expected_length", memory="request"
    )
    steps = list(engine.generate(Request(PROMPT, max_tokens=COUNT), pool))
    assert answer(steps) == truth[PROMPT]
    if policy == "always":
        assert len(asked) == 1 + 3  # after three failures in a row it is left alone
        assert not any("scoring@4" in rewards for rewards in chosen.told)
        assert {"good@1", PLAIN} <= set(chosen.told[-1])
    assert answer(engine.generate(Request(PROMPT, max_tokens=COUNT), pool)) == truth[PROMPT]


def test_a_session_that_says_it_cannot_is_not_asked_again_and_alone_leaves_bandit_feedback(engine: Engine) -> None:
    class Mute(Scoring):
        def open(self, request: Request) -> Any:
            session = super().open(request)
            session.score = lambda tokens, start: self.asked.append((0, 0, 0))
            return session

    mute, policy = Mute({}), Always(PLAIN, full=True)
    pool = make_pool([(mute, 4), PLAIN], policy, memory="request")
    list(engine.generate(Request(PROMPT, max_tokens=8), pool))
    assert len(mute.asked) == 1
    assert {frozenset(rewards) for rewards in policy.told} == {frozenset({PLAIN})}


def test_a_cancelled_call_leaves_nothing_behind(engine: Engine, truths: Any) -> None:
    truth = truths["greedy"]
    policy, late = Always(PLAIN, full=True), Late(truth, name="late")
    policy.every = 1000
    pool = make_pool([(late, 4), PLAIN], policy, "expected_length", memory="request")
    steps = engine.generate(Request(PROMPT, max_tokens=COUNT), pool)
    next(steps), next(steps)
    steps.close()
    said = answer(engine.generate(Request(PROMPT, max_tokens=COUNT), pool))
    assert said == truth[PROMPT]
    assert late.closed == 2
    assert len(late.asked) == 1 + 2  # the cancelled one was only greeted
    assert len(policy.told) == COUNT - 1  # the second call's rounds
