"""What every drafter must do: a pytest base class.

Subclass it in a test and give ``make``::

    class TestMine(DrafterContract):
        def make(self):
            return create({})
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from metasd_langchain.drafters import Drafter, DraftSession
from metasd_langchain.testing.drafters import NoDraws
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

__all__ = ["DrafterContract", "play", "scored"]

Guess = tuple[float, Draft]
DRAWS = NoDraws()


def walk(draft: Draft, truth: Sequence[int]) -> list[int]:
    """Nodes of the draft that say what the target says, root to leaf."""
    path: list[int] = []
    for token in truth:
        above = path[-1] if path else -1
        found = [n for n, p in enumerate(draft.parents) if p == above and draft.tokens[n] == token]
        if not found:
            break
        path.append(found[0])
    return path


def tell(
    drafter: Drafter,
    text: Sequence[int],
    draft: Draft,
    truth: Sequence[int],
    vocab: int,
    most: int = 99,
    seen: bool = True,
) -> Round:
    """The round in which `draft` was verified after `text`, when the target goes on with `truth`.

    The target's second best and further candidates are made up, the same for the same token. `most` trims the round.
    Hidden states, for a drafter that wants some, are made up as well, as wide as its ``hidden_width`` says: of the
    round's tokens, and of the text before them unless the session has `seen` those.
    """
    path = walk(draft, truth)
    committed = tuple(truth[: len(path) + 1])[:most]
    start = len(text) - 1 if seen else 0
    fed = (text[-1], *draft.tokens) if text else draft.tokens
    shift = 1 if text else 0
    parents = tuple(parent + shift for parent in draft.parents)
    width = min(drafter.candidates, vocab)
    best = np.array([[(token * 7 + 3 + rank) % vocab for rank in range(width)] for token in fed], dtype=np.int64)
    if width and text:
        for row, said in zip([0, *(node + shift for node in path)], truth, strict=False):
            best[row] = [said, *(token for token in best[row].tolist() if token != said)][:width]
    return Round(
        committed=committed,
        fed=fed,
        parents=((-1, *parents) if text else parents),
        candidates=best.reshape(len(fed), width) if width else None,
        path=tuple(node + shift for node in path)[: len(committed)],
        hidden=_states(drafter, (*text[start:], *committed[:-1])),
        hidden_start=start,
    )


def _states(drafter: Drafter, tokens: Sequence[int]) -> dict[int, Any]:
    """Made-up hidden states after the tokens, for a drafter that wants some."""
    if not drafter.hidden_layers or not tokens:
        return {}
    import torch

    def state(token: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(token)
        return torch.randn(drafter.hidden_width, generator=generator)  # type: ignore[attr-defined]

    return dict.fromkeys(drafter.hidden_layers, torch.stack([state(token) for token in tokens]))


def play(
    drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], *, budget: int = 8, vocab: int = 40, scope: str = ""
) -> list[Guess]:
    """Generate `answer` with the drafter and close the session. Returns hint and draft of every round."""
    session = drafter.open(Request(prompt=tuple(prompt), scope=scope))
    guesses = advance(drafter, session, prompt, answer, budget, vocab)
    session.close()
    return guesses


def advance(
    drafter: Drafter, session: DraftSession, text: Sequence[int], truth: Sequence[int], budget: int, vocab: int
) -> list[Guess]:
    """Go on with an open session from `text` through `truth`."""
    guesses: list[Guess] = []
    text, truth = list(text), list(truth)
    first = True
    while truth:
        hint, draft = session.hint(), session.propose(text, budget, DRAWS)
        guesses.append((hint, draft))
        told = tell(drafter, text, draft, truth, vocab, seen=not first)
        session.observe(told)
        first = False
        text += told.committed
        truth = truth[len(told.committed) :]
    return guesses


def scored(
    drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], *, every: int, budget: int = 8, vocab: int = 40
) -> tuple[list[Guess], list[float]]:
    """As `play`, with the session's scoring asked for as the engine does; and the scores of the answer's tokens."""
    session: Any = drafter.open(Request(prompt=tuple(prompt)))
    late = getattr(session, "scores_late", False)
    scores = list(session.score(tuple(prompt), len(prompt)))  # asked for nothing: none yet
    guesses: list[Guess] = []
    text, done = list(prompt), len(prompt)
    for turn in range(len(answer)):
        guesses.append((session.hint(), session.propose(text, budget, DRAWS)))
        truth = answer[len(text) - len(prompt) :]
        told = tell(drafter, text, guesses[-1][1], truth, vocab, seen=turn > 0)
        text += told.committed
        if not late:
            scores += session.score(text, len(text) - len(told.committed))
        session.observe(told)
        over = len(told.committed) == len(truth)
        if late and (over or turn % every == every - 1):
            scores += session.score(text, done)
            done = len(text)
        if over:
            break
    session.close()
    return guesses, scores


class DrafterContract:
    """The checks.

    A drafter that is bound to a target (``bind``) is bound in `make`.

    Attributes:
        vocab: token ids the checks use are below it.
        from_text: the drafter only repeats what it saw, so that it has nothing to say about a text of new tokens.
    """

    vocab: ClassVar[int] = 40
    from_text: ClassVar[bool] = True

    def make(self) -> Drafter:
        """A new drafter with nothing learned."""
        raise NotImplementedError

    def texts(self, seed: int, prompt: int = 30, answer: int = 60) -> tuple[list[int], list[int]]:
        """A prompt and an answer full of repeated phrases."""
        rng = random.Random(seed)
        phrases = [[rng.randrange(self.vocab) for _ in range(rng.randint(2, 6))] for _ in range(5)]
        text = [token for _ in range(prompt + answer) for token in rng.choice(phrases)]
        return text[:prompt], text[prompt : prompt + answer]

    def play(self, drafter: Drafter, seed: int, budget: int = 8, scope: str = "") -> list[Guess]:
        """`play` with the texts of a seed."""
        return play(drafter, *self.texts(seed), budget=budget, vocab=self.vocab, scope=scope)

    def test_follows_the_protocol(self) -> None:
        drafter = self.make()
        assert isinstance(drafter, Drafter)
        assert drafter.name
        assert "@" not in drafter.name
        assert drafter.candidates >= 0
        assert drafter.prompt_rows >= 0
        assert all(layer >= 0 for layer in drafter.hidden_layers)

    @pytest.mark.parametrize("budget", [0, 1, 2, 7, 32])
    def test_drafts_are_trees_within_budget_and_vocabulary(self, budget: int) -> None:
        for _, draft in self.play(self.make(), 1, budget):
            assert len(draft) <= budget
            assert all(0 <= token < self.vocab for token in draft.tokens)
            assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))

    def test_siblings_differ(self) -> None:
        for _, draft in self.play(self.make(), 2, 16):
            nodes = list(zip(draft.parents, draft.tokens, strict=True))
            assert len(set(nodes)) == len(nodes)

    def test_hint_is_nan_or_not_negative_and_zero_means_no_draft(self) -> None:
        for hint, draft in self.play(self.make(), 3):
            assert math.isnan(hint) or hint >= 0
            if hint == 0:
                assert draft == EMPTY_DRAFT

    def test_nothing_to_say_about_new_tokens(self) -> None:
        if not self.from_text:
            pytest.skip("drafts from more than what it saw")
        prompt = list(range(self.vocab))
        session = self.make().open(Request(prompt=tuple(prompt)))
        assert session.hint() == 0
        assert session.propose(prompt, 8, DRAWS) == EMPTY_DRAFT

    @pytest.mark.parametrize("length", [0, 1, 2])
    def test_shortest_prompts(self, length: int) -> None:
        _, answer = self.texts(4)
        for _, draft in play(self.make(), [5] * length, answer, vocab=self.vocab):
            assert len(draft) <= 8

    def test_round_without_rows_or_tokens(self) -> None:
        drafter = self.make()
        prompt, answer = self.texts(5)
        session = drafter.open(Request(prompt=tuple(prompt)))
        session.observe(Round(committed=()))
        session.observe(Round(committed=tuple(answer[:4])))
        assert len(session.propose(prompt + answer[:4], 8, DRAWS)) <= 8

    def test_only_committed_tokens_of_a_trimmed_round_count(self) -> None:
        if not self.from_text:
            pytest.skip("what was scored may count")
        drafter = self.make()
        loop = list(range(6)) * 4
        session, other = (drafter.open(Request(prompt=tuple(loop), scope=scope)) for scope in "ab")
        draft = session.propose(loop, 5, DRAWS)
        session.observe(tell(drafter, loop, draft, [0, 1, 2, 3, 4, 5], self.vocab, most=2))
        other.observe(tell(drafter, loop, EMPTY_DRAFT, [0, 1], self.vocab))
        other.observe(tell(drafter, [*loop, 0], EMPTY_DRAFT, [1, 2], self.vocab))
        text = [*loop, 0, 1]
        assert session.propose(text, 1, DRAWS) == other.propose(text, 1, DRAWS) == Draft.chain([2])

    def test_tokens_a_grammar_forces_are_part_of_the_text(self) -> None:
        drafter = self.make()
        loop = list(range(6)) * 4
        session = drafter.open(Request(prompt=tuple(loop)))
        draft = session.propose([*loop, 0, 1], 1, DRAWS)
        if self.from_text:
            assert draft == Draft.chain([2])
        assert session.propose([*loop, 0, 1], 1, DRAWS) == draft
        ahead = drafter.open(Request(prompt=(*loop, 0, 1)))
        assert draft == ahead.propose([*loop, 0, 1], 1, DRAWS)

    def test_same_inputs_give_the_same_drafts(self) -> None:
        one, two = self.make(), self.make()
        for seed in (6, 7, 6):
            assert repr(self.play(one, seed)) == repr(self.play(two, seed))

    def test_scopes_do_not_see_each_other(self) -> None:
        alone = self.make()
        drafter = self.make()
        for _ in range(2):
            self.play(drafter, 8, scope="theirs")
            assert repr(self.play(drafter, 8, scope="ours")) == repr(self.play(alone, 8, scope="ours"))

    def test_running_generations_of_two_scopes_do_not_see_each_other(self) -> None:
        drafter, alone = self.make(), self.make()
        prompt, answer = self.texts(9)
        ours = drafter.open(Request(prompt=tuple(prompt), scope="ours"))
        theirs = drafter.open(Request(prompt=tuple(prompt), scope="theirs"))
        advance(drafter, theirs, prompt, answer, 8, self.vocab)
        seen = advance(drafter, ours, prompt, answer, 8, self.vocab)
        assert repr(seen) == repr(play(alone, prompt, answer, vocab=self.vocab, scope="ours"))

    @pytest.mark.parametrize("scope", ["ours", None])
    def test_forget(self, scope: str | None) -> None:
        drafter, fresh = self.make(), self.make()
        drafter.forget(scope)
        self.play(drafter, 10, scope="ours")
        drafter.forget(scope)
        drafter.forget("never seen")
        assert repr(self.play(drafter, 10, scope="ours")) == repr(self.play(fresh, 10, scope="ours"))

    def test_what_runs_while_forgotten_stays_forgotten(self) -> None:
        drafter, fresh = self.make(), self.make()
        prompt, answer = self.texts(11)
        session = drafter.open(Request(prompt=tuple(prompt), scope="ours"))
        advance(drafter, session, prompt, answer[:30], 8, self.vocab)
        drafter.forget("ours")
        advance(drafter, session, prompt + answer[:30], answer[30:], 8, self.vocab)
        session.close()
        assert repr(self.play(drafter, 11, scope="ours")) == repr(self.play(fresh, 11, scope="ours"))

    @pytest.mark.parametrize("every", [1, 3])
    def test_scoring_gives_probabilities_and_changes_no_draft(self, every: int) -> None:
        drafter, other = self.make(), self.make()
        prompt, answer = self.texts(12)
        session = drafter.open(Request(prompt=tuple(prompt)))
        ask = getattr(session, "score", None)
        if ask is None or ask(prompt, len(prompt)) is None:
            pytest.skip("does not score")
        session.close()
        guesses, scores = scored(drafter, prompt, answer, every=every, vocab=self.vocab)
        plain = play(other, prompt, answer, vocab=self.vocab)
        assert [(draft.tokens, draft.parents) for _, draft in guesses] == [(d.tokens, d.parents) for _, d in plain]
        assert [hint for hint, _ in guesses] == pytest.approx([hint for hint, _ in plain], nan_ok=True)
        assert len(scores) == len(answer)
        assert all(math.isnan(score) or 0.0 <= score <= 1.0 + 1e-6 for score in scores)
        assert not all(math.isnan(score) for score in scores)

    def test_a_score_says_what_would_have_been_drafted(self) -> None:
        if not self.from_text:
            pytest.skip("has probabilities of its own")
        drafter = self.make()
        prompt, answer = self.texts(13)
        session: Any = drafter.open(Request(prompt=tuple(prompt)))
        if getattr(session, "score", None) is None:
            pytest.skip("does not score")
        for place in range(0, len(answer), 3):
            text, block = [*prompt, *answer[:place]], answer[place : place + 3]
            ahead = [[*text, *block[:more]] for more in range(len(block))]
            drafts = [session.propose(known, 1, DRAWS) for known in ahead]
            expected = [float(draft.tokens == (token,)) for draft, token in zip(drafts, block, strict=True)]
            assert session.score([*text, *block], len(text)) == expected
            session.observe(tell(drafter, text, Draft.chain(block[:-1]), block, self.vocab))

    def test_a_near_free_draft_leaves_no_trace(self) -> None:
        drafter, other = self.make(), self.make()
        if not getattr(drafter, "near_free", False):
            pytest.skip("its drafts cost something")
        prompt, answer = self.texts(14)
        session = drafter.open(Request(prompt=tuple(prompt)))
        text, truth, guesses = list(prompt), list(answer), list[Guess]()
        while truth:
            for budget in (1, 3, 8, 16):
                session.propose([*text, *truth[: budget % 3]], budget, DRAWS)
            guesses.append((session.hint(), session.propose(text, 8, DRAWS)))
            told = tell(drafter, text, guesses[-1][1], truth, self.vocab, seen=len(guesses) > 1)
            session.observe(told)
            text += told.committed
            truth = truth[len(told.committed) :]
        assert repr(guesses) == repr(play(other, prompt, answer, vocab=self.vocab))

    def test_close_twice(self) -> None:
        drafter = self.make()
        session = drafter.open(Request(prompt=(1, 2, 3)))
        session.close()
        session.close()
