"""The promise of sampling: whatever is drafted, the joint of the committed tokens is exactly the target's.

The target is a table: the logits of the next token by the last one. Three tokens are generated with the verifiers
alone, as the engine would (a draft is cut to what may still be committed), once a seed, and their joint is compared
with the exact one. A test of the tests: bugs planted into the same loop must be found.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from metasd_langchain.engine import heads as heads_module
from metasd_langchain.engine import verify as verify_module
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.engine.verify import VERIFIERS
from metasd_langchain.values import EMPTY_DRAFT, Draft, Sampling, Verdict, VerifyMode
from tests.laws.exact import Floats, chi_square, processed

Shape = Literal["chain", "tree"]
Kind = Literal["point", "model"]
VOCAB, START, LENGTH, N = 6, 6, 3, 20_000
PLANTED_N = 8_000
SAMPLINGS = {
    "temperature": Sampling(temperature=0.8),
    "filters": Sampling(temperature=1.3, top_k=5, top_p=0.9, min_p=0.12),
}
_rng = np.random.default_rng(5)
TARGET = _rng.normal(0.0, 1.3, (VOCAB + 1, VOCAB)).astype(np.float32)  # row: the last token, or START
MODEL = (TARGET + _rng.normal(0.0, 0.8, TARGET.shape)).astype(np.float32)  # a drafter's idea of it
RANKED = np.argsort(-TARGET, axis=1).tolist()


class Noise(Draws):
    """An answer's randomness whose Gumbel noise is kept for the next test that uses the seed."""

    _known: dict[tuple[int, int], Floats] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed = seed

    def gumbel(self, position: int, tokens: Sequence[int] | NDArray[np.int64]) -> Floats:
        place = (self.seed, position)
        if place not in self._known:
            self._known[place] = super().gumbel(position, np.arange(VOCAB))
        return self._known[place][tokens]


class Table:
    """The real TargetRows of the whole table, and its whole distributions."""

    def __init__(self, logits: Floats, sampling: Sampling) -> None:
        self.rows = TargetRows(torch.from_numpy(logits), sampling)
        self.rows.prepare(list(range(len(logits))))
        self.dense = [self.rows.dense(row) for row in range(len(logits))]


class Rows:
    """What the verifiers read of a round: the table's rows behind the trunk and each node."""

    def __init__(self, table: Table, contexts: Sequence[int]) -> None:
        self.table, self.contexts = table, contexts

    def prepare(self, rows: list[int]) -> None:
        assert max(rows) < len(self.contexts)

    def token(self, row: int, position: int, draws: Draws) -> int:
        return self.table.rows.token(self.contexts[row], position, draws)

    def dense(self, row: int) -> torch.Tensor:
        return self.table.dense[self.contexts[row]]


class Drafter:
    """Chains, or trees with two children everywhere, to a depth.

    A "point" drafter always says the target's second and third guess. A "model" draws from its own q: with the
    answer's noise in invariant mode (siblings: its two highest), independently in rejection mode.
    """

    def __init__(self, mode: VerifyMode, kind: Kind, shape: Shape, sampling: Sampling) -> None:
        self.mode, self.kind, self.width = mode, kind, 1 if shape == "chain" else 2
        self.q = np.stack([processed(row, sampling) for row in MODEL])
        self.told = torch.from_numpy(self.q)  # what the verifier is told the nodes were drawn from
        self._rng = random.Random(1)
        self._reach = np.cumsum(self.q, 1).tolist()
        with np.errstate(divide="ignore"):
            self._log = np.log(self.q)

    def children(self, context: int, position: int, draws: Noise) -> list[int]:
        if self.kind == "point":
            return RANKED[context][1 : 1 + self.width]
        if self.mode == "rejection":
            reach = self._reach[context]
            return [min(bisect(reach, self._rng.random()), VOCAB - 1) for _ in range(self.width)]
        scores = self._log[context] + draws.gumbel(position, range(VOCAB))
        return [int(scores.argmax())] if self.width == 1 else np.argsort(-scores)[:2].tolist()

    def draft(self, context: int, depth: int, position: int, draws: Noise) -> tuple[Draft, list[int]]:
        """The draft and the contexts of its rows."""
        if depth == 0:
            return EMPTY_DRAFT, [context]
        tokens: list[int] = []
        parents: list[int] = []
        level = [(-1, context)]
        for ahead in range(depth):
            nodes = []
            for parent, last in level:
                for token in self.children(last, position + ahead, draws):
                    nodes.append((len(tokens), token))
                    tokens.append(token)
                    parents.append(parent)
            level = nodes
        contexts = [context, *tokens]
        q = None if self.kind == "point" else self.told[[contexts[parent + 1] for parent in parents]]
        return Draft(tuple(tokens), tuple(parents), q), contexts


@dataclass
class Tally:
    """What many answers were.

    Attributes:
        joint: counts by the three tokens.
        accepted: answers whose first round accepted its first token.
    """

    joint: NDArray[np.int64]
    accepted: int = 0

    def p_value(self, sampling: Sampling) -> float:
        return chi_square(self.joint, exact(sampling) * self.joint.sum())


@cache
def exact(sampling: Sampling) -> Floats:
    """The joint of three tokens, by hand."""
    p = np.stack([processed(row, sampling) for row in TARGET])
    return p[START][:, None, None] * p[:VOCAB][:, :, None] * p[:VOCAB][None, :, :]


Verifier = Callable[[Draft, Any, Any, int], Verdict]


def generate(drafter: Drafter, table: Table, verify: Verifier, n: int, rows: type[Rows] = Rows) -> Tally:
    tally = Tally(np.zeros((VOCAB,) * LENGTH, dtype=np.int64))
    with torch.inference_mode():
        for seed in range(n):
            draws, tokens = Noise(seed), []
            while len(tokens) < LENGTH:
                context = tokens[-1] if tokens else START
                draft, contexts = drafter.draft(context, LENGTH - len(tokens) - 1, len(tokens), draws)
                verdict = verify(draft, rows(table, contexts), draws, len(tokens))
                tally.accepted += not tokens and bool(verdict.path)
                tokens += verdict.tokens
            tally.joint[tuple(tokens)] += 1
    return tally


@cache
def tally(mode: VerifyMode, kind: Kind, shape: Shape, filters: str) -> Tally:
    sampling = SAMPLINGS[filters]
    return generate(Drafter(mode, kind, shape, sampling), Table(TARGET, sampling), VERIFIERS[mode], N)


MODES: tuple[VerifyMode, ...] = ("invariant", "rejection")
KINDS: tuple[Kind, ...] = ("point", "model")
SHAPES: tuple[Shape, ...] = ("chain", "tree")


@pytest.mark.parametrize("filters", sorted(SAMPLINGS))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_joint_of_three_tokens_is_the_targets(mode: VerifyMode, kind: Kind, shape: Shape, filters: str) -> None:
    result = tally(mode, kind, shape, filters)
    assert result.joint.sum() == N
    assert result.p_value(SAMPLINGS[filters]) > 1e-3


def test_the_joint_is_the_targets_when_most_of_the_mass_is_outside_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head of two tokens a third of all draws goes through the tail."""
    monkeypatch.setattr(heads_module, "HEAD", 2)
    sampling = SAMPLINGS["temperature"]
    table = Table(TARGET, sampling)
    assert all(table.rows._heads[row].mass < 0.99 for row in range(len(TARGET)))
    result = generate(Drafter("invariant", "point", "chain", sampling), table, VERIFIERS["invariant"], N // 2)
    assert result.p_value(sampling) > 1e-3


def test_in_invariant_mode_every_draft_gives_the_same_answers_one_by_one() -> None:
    for filters in SAMPLINGS:
        same = [tally("invariant", kind, shape, filters).joint for kind in KINDS for shape in SHAPES]
        assert all((joint == same[0]).all() for joint in same)


@pytest.mark.parametrize(("mode", "filters"), [("invariant", "temperature"), ("rejection", "filters")])
def test_a_point_mass_is_accepted_with_its_probability(mode: VerifyMode, filters: str) -> None:
    p = float(processed(TARGET[START], SAMPLINGS[filters])[RANKED[START][1]])
    assert 0.05 < p < 0.95
    rate = tally(mode, "point", "chain", filters).accepted / N
    assert abs(rate - p) < 4 * np.sqrt(p * (1 - p) / N)


def test_a_model_is_accepted_by_shared_noise_nearly_as_often_as_by_rejection() -> None:
    p, q = (processed(table[START], SAMPLINGS["temperature"]) for table in (TARGET, MODEL))
    best = float(np.minimum(p, q).sum())  # 1 - TV: no scheme accepts more
    assert 0.5 < best < 0.95
    rejection = tally("rejection", "model", "chain", "temperature").accepted / N
    shared = tally("invariant", "model", "chain", "temperature").accepted / N
    assert abs(rejection - best) < 4 * np.sqrt(best * (1 - best) / N)
    assert best - 0.1 < shared < best + 0.01


def test_the_table_gives_the_verifiers_what_rows_of_a_real_round_would() -> None:
    for sampling in SAMPLINGS.values():
        table = Table(TARGET, sampling)
        for mode, verify in VERIFIERS.items():
            drafter = Drafter(mode, "model", "tree", sampling)
            for seed in range(20):
                draws = Noise(seed)
                draft, contexts = drafter.draft(START, 2, 0, draws)
                real = TargetRows(torch.from_numpy(TARGET[contexts]), sampling)
                assert verify(draft, real, Draws(seed), 0) == verify(draft, Rows(table, contexts), draws, 0)  # type: ignore[arg-type]


# -- planted bugs: each must be found ----------------------------------------------------------------------------------


def planted(
    mode: VerifyMode,
    kind: Kind,
    *,
    sampling: Sampling = SAMPLINGS["filters"],
    shape: Shape = "chain",
    rows: type[Rows] = Rows,
    verify: Verifier | None = None,
    table: Table | None = None,
    drafter: Drafter | None = None,
) -> float:
    """p-value of a loop with a bug in it."""
    return generate(
        drafter or Drafter(mode, kind, shape, sampling),
        table or Table(TARGET, sampling),
        verify or VERIFIERS[mode],
        PLANTED_N,
        rows,
    ).p_value(sampling)


def test_without_a_bug_the_smaller_loop_passes() -> None:
    assert planted("invariant", "model") > 1e-3
    assert planted("rejection", "model") > 1e-3


def accept_everything(draft: Draft, rows: Any, draws: Draws, position: int) -> Verdict:
    path: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    last = rows.token((path[-1] if path else -1) + 1, position + len(path), draws)
    return Verdict(tuple(path), (*(draft.tokens[node] for node in path), last))


@pytest.mark.parametrize("mode", ["invariant", "rejection"])
@pytest.mark.parametrize("kind", ["point", "model"])
def test_found_accepting_everything(mode: VerifyMode, kind: Kind) -> None:
    assert planted(mode, kind, verify=accept_everything) < 1e-6


@pytest.mark.parametrize("mode", ["invariant", "rejection"])
def test_found_drawing_from_the_target_before_its_filters(mode: VerifyMode) -> None:
    unfiltered = Sampling(SAMPLINGS["filters"].temperature)
    assert planted(mode, "model", table=Table(TARGET, unfiltered)) < 1e-6


def test_found_filtering_q_after_the_draft_was_drawn() -> None:
    sampling = SAMPLINGS["filters"]
    drafter = Drafter("rejection", "model", "chain", Sampling(sampling.temperature))
    drafter.told = Drafter("rejection", "model", "chain", sampling).told
    assert planted("rejection", "model", drafter=drafter) < 1e-6


def test_found_dropping_drafted_tokens_the_drafter_finds_unlikely() -> None:
    """Re-ranking after the draw: the verifier is told the q of the draw, but low draws never reach it."""
    drafter = Drafter("rejection", "model", "chain", SAMPLINGS["filters"])
    draw = drafter.children

    def picky(context: int, position: int, draws: Noise) -> list[int]:
        while drafter.q[context][(token := draw(context, position, draws)[0])] < 0.25 < drafter.q[context].max():
            pass
        return [token]

    drafter.children = picky  # type: ignore[method-assign]
    assert planted("rejection", "model", drafter=drafter) < 1e-6


class _LatePosition(Rows):
    def token(self, row: int, position: int, draws: Draws) -> int:
        return super().token(row, max(0, position - 1), draws)


def test_found_an_off_by_one_draw_in_invariant_mode() -> None:
    assert planted("invariant", "point", rows=_LatePosition) < 1e-6


def test_found_an_off_by_one_draw_in_rejection_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = Draws.uniform
    monkeypatch.setattr(
        Draws,
        "uniform",
        lambda self, position, stream, trial=0: uniform(self, max(0, position - 1), stream, trial),
    )
    assert planted("rejection", "point", sampling=SAMPLINGS["temperature"]) < 1e-6


def test_found_acceptance_and_residual_sharing_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = Draws.uniform
    monkeypatch.setattr(Draws, "uniform", lambda self, position, stream, trial=0: uniform(self, position, Draws.ACCEPT))
    assert planted("rejection", "model", sampling=SAMPLINGS["temperature"]) < 1e-6


class _RowBefore(Rows):
    def token(self, row: int, position: int, draws: Draws) -> int:
        return super().token(max(0, row - 1), position, draws)

    def dense(self, row: int) -> torch.Tensor:
        return super().dense(max(0, row - 1))


@pytest.mark.parametrize("mode", ["invariant", "rejection"])
def test_found_reading_the_row_before(mode: VerifyMode) -> None:
    assert planted(mode, "model", rows=_RowBefore) < 1e-6


@pytest.mark.parametrize("kind", ["point", "model"])
def test_found_a_residual_without_subtraction(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    read: list[torch.Tensor] = []

    class Recorded(Rows):
        def dense(self, row: int) -> torch.Tensor:
            read.append(super().dense(row))
            return read[-1]

    inverse = verify_module._inverse
    monkeypatch.setattr(verify_module, "_inverse", lambda p, u: inverse(read[-1], u))
    assert planted("rejection", kind, rows=Recorded) < 1e-6


def test_found_siblings_tried_against_the_same_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sibling must be tried against what the first left; here every child is tried against p itself."""
    rejection = VERIFIERS["rejection"]

    def forgetful(draft: Draft, rows: Any, draws: Draws, position: int) -> Verdict:
        path: list[int] = []
        tokens: list[int] = []
        while True:
            parent = path[-1] if path else -1
            taken = [n for n, above in enumerate(draft.parents) if above == parent]
            here = rows.contexts[parent + 1]
            for trial, node in enumerate(taken):
                one = Draft((draft.tokens[node],), (-1,), None if draft.q is None else draft.q[[node]])
                verdict = rejection(one, Rows(rows.table, [here, 0]), Noise(draws.seed + 10**6 * trial), position)
                if verdict.path:
                    path.append(node)
                    tokens.append(draft.tokens[node])
                    position += 1
                    break
            else:
                last = Rows(rows.table, [here])
                return Verdict(tuple(path), (*tokens, *rejection(EMPTY_DRAFT, last, draws, position).tokens))

    assert planted("rejection", "model", shape="tree", verify=forgetful) < 1e-6
