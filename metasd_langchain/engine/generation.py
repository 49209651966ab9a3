"""One answer in the making: ``plan`` chooses and drafts, ``settle`` verifies, halts, keeps, observes, learns.

The invariant: the slot holds a strict prefix of the committed tokens. A round feeds the rest and the draft, so prefill,
pieces of a long prompt and every later round are the same step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from metasd_langchain.bandits.selector import Seat
from metasd_langchain.engine.context import Context
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.guide import Guide
from metasd_langchain.engine.halt import Halt, Taken
from metasd_langchain.engine.pool import Pool
from metasd_langchain.engine.sampling import Shape, TargetRows
from metasd_langchain.engine.scoring import Scoring
from metasd_langchain.engine.sessions import Sessions
from metasd_langchain.engine.text import Detokenizer, TextStream
from metasd_langchain.engine.verify import VERIFIERS, agreement
from metasd_langchain.models.lm import CausalLM, Feed, Scores, Slot
from metasd_langchain.models.shaper import Shaper
from metasd_langchain.values import (
    EMPTY_DRAFT,
    PLAIN,
    Choice,
    Draft,
    FinishReason,
    Piece,
    Request,
    Round,
    RoundRecord,
    Step,
    Summary,
    TokenLogprob,
    Verdict,
)

if TYPE_CHECKING:
    from torch import Tensor

    from metasd_langchain.models.load import Target

__all__ = ["Forward", "Generation"]


@dataclass(frozen=True, slots=True)
class Forward:
    """A packed forward that happened.

    Attributes:
        scores: of all feeds.
        width: new tokens of all feeds.
        seconds: wall clock.
        batch: feeds in it.
    """

    scores: Scores
    width: int
    seconds: float
    batch: int


class Generation:
    """State of one request between rounds.

    Args:
        request: what to generate.
        pool: what may be played.
        target: who answers.
        detokenizer: ids to text.
        started: clock reading (``time.perf_counter``) at submission.
    """

    def __init__(self, request: Request, pool: Pool, target: Target, detokenizer: Detokenizer, started: float) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.slot = Slot()
        self._pool = pool
        self._lm: CausalLM = target.lm
        seed = request.sampling.seed
        self._draws = Draws(int.from_bytes(os.urandom(8), "little") if seed is None else seed, request.completion)
        self._seat = pool.selector.open(f"{request.scope}/{request.step}", np.random.default_rng())
        self._sessions = Sessions(request, pool, target.lm.vocab_size, self.slot)
        self._context = Context(request, pool, target, detokenizer)
        self._scoring = _scoring(self._sessions, self._seat, request, pool)
        stream = TextStream(detokenizer.decode, detokenizer.byte_ids, request.stop)
        window = target.lm.window if request.limit is None else min(request.limit, target.lm.window)
        cap = min(request.max_tokens, window - len(request.prompt))
        self._guide = _guide(request, cap, target, forces=bool(pool.drafters))
        self._forced = 0  # nodes, at the draft's beginning, that the grammar leaves no choice about
        self._halt = Halt(stream, request.stop_ids, cap, self._guide.ended if self._guide else None)
        shaping = request.shaping
        self._shaper = Shaper(shaping, len(request.prompt), request.stop_ids) if shaping.active else None
        self._started = started
        self._prefill_s = 0.0
        self._first_token_s = 0.0
        self._records: list[RoundRecord] = []
        self._choice: Choice | None = None
        self._draft_s = 0.0
        self._round_started = started

    @property
    def position(self) -> int:
        """Tokens of the answer committed so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states some drafter of this answer, or its policy, wants."""
        return tuple({*self._pool.hidden_layers, *self._context.hidden_layers})

    # -- plan: choose, draft --------------------------------------------------------------------------------------

    def plan(self, room: int, batch: int) -> Feed:
        """The next feed: all pending tokens with a draft, or a piece of the prompt when more than `room` are pending.

        Args:
            room: new prompt tokens this round may read, at least 1.
            batch: live generations, told to the policy.
        """
        self._round_started = time.perf_counter()
        pending = tuple(self.tokens[self.slot.length :])
        if len(pending) > room:
            return Feed(self.slot, pending[:room], scored=0)
        draft = self._draft(batch)
        self._draft_s = time.perf_counter() - self._round_started
        return Feed(self.slot, pending, draft, min(len(pending), 1 + self._pool.prompt_rows))

    def _draft(self, batch: int) -> Draft:
        self._choice = None
        self._forced = 0
        room = self._halt.left - 1  # the target adds a token of its own to whatever is accepted
        if room <= 0:
            return EMPTY_DRAFT
        if self._guide is None:
            return self._proposed(batch, (), room)
        answer = self.tokens[len(self.request.prompt) :]
        forced = self._guide.forced(answer, room)
        self._forced = len(forced)
        draft = self._proposed(batch, forced, room - len(forced)) if room > len(forced) else EMPTY_DRAFT
        drawn = self.request.verify == "rejection" and draft.q is not None
        return self._guide.hung(answer, forced, draft, prune=not drawn)

    def _proposed(self, batch: int, forced: tuple[int, ...], room: int) -> Draft:
        """What the arm that is chosen for this round drafts behind forced tokens."""
        hints, arms = self._sessions.hints(), self._pool.selector.arms
        tokens = [*self.tokens, *forced] if forced else self.tokens
        seconded = self._sessions.compared(tokens, room, self._draws) if self._pool.selector.compares else {}
        benched = self._sessions.benched
        self._choice = self._seat.choose(
            {arm.name: hints.get(arm.drafter, math.nan) for arm in arms if arm.budget},
            self._context.features(self.position, batch),
            {arm.name for arm in arms if arm.drafter in benched},
            self._context.vector,
            {arm.name: seconded[arm.drafter] for arm in arms if arm.drafter in seconded},
        )
        chosen = self._choice.arm
        arm = next((arm for arm in arms if arm.name == chosen and arm.budget), None)
        if arm is None:
            return EMPTY_DRAFT
        return self._sessions.propose(arm.drafter, tokens, min(arm.budget, room), self._draws)

    # -- settle: verify, halt, keep, observe, learn -----------------------------------------------------------------

    def settle(self, feed: Feed, forward: Forward, place: int) -> Step | None:
        """Turn the target's scores into committed tokens.

        Args:
            feed: what `plan` gave.
            forward: the packed forward that scored it.
            place: of the feed among those it scored.

        Returns:
            What to deliver; None when only a piece of the prompt was read.
        """
        if len(feed.pending) > 1:
            self._prefill_s += forward.seconds
        self._context.read(feed, forward.scores, place)
        if not feed.scored:
            self._lm.keep(feed)
            hidden = self._hidden(feed, forward, place, ())
            if hidden:
                self._sessions.observe(self._round((), hidden))
            return None
        start = forward.scores.starts[place]
        logits = forward.scores.logits[start : start + feed.rows]
        rows = TargetRows(
            logits,
            self.request.sampling,
            self._pool.candidates,
            feed.scored - 1,
            self._shape(feed.draft),
            self._guide.masks(self.tokens[len(self.request.prompt) :], feed.draft) if self._guide else None,
        )
        verdict = VERIFIERS[self.request.verify](feed.draft, rows, self._draws, self.position, self._halt.push)
        taken = self._halt.collect()
        measured = self._choice is not None and len(feed.draft) > 0 and self._seat.needs_agreement(self._choice)
        agreed = agreement(feed.draft, rows) if measured else ()
        self._keep(feed, verdict)
        if self._scoring is not None:
            before = _rows_before(verdict)
            self._scoring.foresee(
                self.tokens, len(before), lambda place: rows.probability(before[place], verdict.tokens[place])
            )
        self._observe(feed, forward, place, rows, verdict)
        self._learn(feed, forward, verdict, agreed)
        if taken.finish is None:
            self._context.drawn(rows, _rows_before(verdict)[-1])
        if self._scoring is not None:
            self._scoring.look_back(self.tokens, ended=taken.finish is not None)
        return self._tell(feed, forward, rows, verdict, taken)

    def _shape(self, draft: Draft) -> Shape | None:
        """How rows of a draft are shaped: each by the committed tokens and its own path."""
        shaper = self._shaper
        if shaper is None:
            return None
        committed = tuple(self.tokens)

        def shape(row: int, logits: Tensor) -> Tensor:
            path: list[int] = []
            node = row - 1
            while node >= 0:
                path.append(draft.tokens[node])
                node = draft.parents[node]
            return shaper((*committed, *reversed(path)), logits)

        return shape

    def _keep(self, feed: Feed, verdict: Verdict) -> None:
        self.tokens += verdict.tokens
        # a strict prefix: the last committed token stays pending
        self._lm.keep(feed, verdict.path[: len(verdict.tokens) - 1])

    def _observe(self, feed: Feed, forward: Forward, place: int, rows: TargetRows, verdict: Verdict) -> None:
        trunk = feed.scored
        kept = verdict.path[: len(verdict.tokens) - 1]
        self._sessions.observe(
            self._round(
                verdict.tokens,
                self._hidden(feed, forward, place, kept),
                fed=feed.pending[len(feed.pending) - trunk :] + feed.draft.tokens,
                parents=tuple(range(-1, trunk - 1)) + tuple(parent + trunk for parent in feed.draft.parents),
                candidates=rows.candidates,
                path=tuple(node + trunk for node in verdict.path),
            )
        )

    def _hidden(self, feed: Feed, forward: Forward, place: int, path: tuple[int, ...]) -> dict[int, Tensor]:
        """Hidden states of the last tokens that a round added to the slot, as many as some drafter wants."""
        layers = self._pool.hidden_layers
        if not layers:
            return {}
        pending, first = len(feed.pending), forward.scores.tokens[place]
        rows = [*range(pending), *(pending + node for node in path)][-self._pool.hidden_window :]
        # Copies: a view of a few rows would keep alive what the whole batch read.
        return {layer: forward.scores.hidden[layer][[first + row for row in rows]] for layer in layers}

    def _round(self, committed: tuple[int, ...], hidden: dict[int, Tensor], **scored: Any) -> Round:
        """What sessions are told of a round whose tokens are in the slot."""
        rows = len(next(iter(hidden.values()), ()))
        return Round(committed, **scored, hidden=hidden, hidden_start=self.slot.length - rows if rows else 0)

    def _learn(self, feed: Feed, forward: Forward, verdict: Verdict, agreed: tuple[float, ...]) -> None:
        if self._choice is None:
            return
        forced = self._accepted_forced(verdict)
        drafted = len(feed.draft) - self._forced
        if drafted and forced < self._forced:
            return  # the draft hung on a token that did not come: nothing was learned about the arm
        reading = len(feed.pending) > 1  # a prompt's forward says nothing about the cost of a round
        self._seat.learn(
            self._choice,
            drafted=drafted,
            accepted=len(verdict.path) - forced,
            committed=len(verdict.tokens) - forced,
            agreement=agreed[self._forced :],
            draft_s=self._draft_s,
            score_s=None if reading else forward.seconds,
            width=1 + len(feed.draft) if reading else forward.width,
            batch=forward.batch,
            position=self.position - len(verdict.tokens) + forced,
        )

    def _accepted_forced(self, verdict: Verdict) -> int:
        return sum(1 for node in verdict.path if node < self._forced)

    def _tell(self, feed: Feed, forward: Forward, rows: TargetRows, verdict: Verdict, taken: Taken) -> Step:
        likely: tuple[TokenLogprob, ...] = ()
        if self.request.logprobs is not None:
            likely = tuple(rows.logprobs(_rows_before(verdict), list(verdict.tokens), self.request.logprobs))
        now = time.perf_counter()
        forced = self._accepted_forced(verdict)
        drafted, accepted = len(feed.draft) - self._forced, len(verdict.path)
        arm = self._choice.arm if self._choice is not None and drafted else PLAIN
        if not self._records:
            self._first_token_s = now - self._started
        total = now - self._round_started
        last = verdict.path[-1] if accepted else -1
        bonus = bool(feed.draft) and len(verdict.tokens) > accepted and last not in feed.draft.parents
        scoring = 0.0 if self._scoring is None else self._scoring.seconds
        self._records.append(
            RoundRecord(
                arm,
                drafted,
                accepted - forced,
                len(verdict.tokens),
                self._draft_s + scoring,
                forward.seconds,
                total,
                bonus,
                forced,
                scoring,
            )
        )
        summary = None if taken.finish is None else self._summary(taken.finish)
        return Step(verdict.tokens, taken.pieces, arm, accepted, summary, likely, self._records[-1])

    # -- end --------------------------------------------------------------------------------------------------------

    def end(self, finish: FinishReason) -> Step:
        """End the answer from outside, with what is there."""
        pieces: tuple[Piece, ...] = self._halt.flush()
        return Step((), pieces, summary=self._summary(finish))

    def close(self) -> None:
        """Free the slot and end the draft sessions."""
        self._sessions.close()
        self.slot = Slot()

    def _summary(self, finish: FinishReason) -> Summary:
        return Summary(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.position,
            finish_reason=finish,
            rounds=tuple(self._records),
            prefill_s=self._prefill_s,
            first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._started,
            policy=self._pool.selector.policy_name,
            step=self.request.step,
            values=self.values,
        )

    @property
    def last_record(self) -> RoundRecord:
        """The round told last."""
        return self._records[-1]

    @property
    def last_choice(self) -> Choice | None:
        """What was chosen for it."""
        return self._choice

    @property
    def values(self) -> Mapping[str, float]:
        """The policy's value of each arm, in the reward's units."""
        return self._seat.values()


def _scoring(sessions: Sessions, seat: Seat, request: Request, pool: Pool) -> Scoring | None:
    """Scoring of all drafters, where the policy learns from it and some drafter can."""
    drafters = sessions.scoring(request.prompt) if pool.selector.full_information else {}
    if not drafters:
        return None
    seat.score(drafters)
    drawn = not request.sampling.greedy
    return Scoring(sessions, seat, drafters, len(request.prompt), pool.selector.every, drawn=drawn)


def _rows_before(verdict: Verdict) -> list[int]:
    """The scored row that each committed token was chosen from."""
    return [0, *(node + 1 for node in verdict.path)][: len(verdict.tokens)]


def _guide(request: Request, cap: int, target: Target, *, forces: bool) -> Guide | None:
    if request.constraint is None:
        return None
    return Guide(request.constraint.open(request.stop_ids, cap), target.lm.vocab_size, forces=forces)
