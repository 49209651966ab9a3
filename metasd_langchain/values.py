"""The nouns of one round, shared by every layer. Frozen, small, and free of torch at import time.

A *round* is: choose an arm, draft tokens, score them with one forward of the target, verify, keep the accepted ones.
A *node* is one drafted token; nodes form a tree whose root is the last committed token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from metasd_langchain.errors import BadOption

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from metasd_langchain.constraints import Constraint

__all__ = [
    "EMPTY_DRAFT",
    "FEATURES",
    "PLAIN",
    "Arm",
    "Choice",
    "Draft",
    "FinishReason",
    "Outcome",
    "Piece",
    "Request",
    "Round",
    "RoundRecord",
    "Sampling",
    "Shaping",
    "Situation",
    "Step",
    "Summary",
    "TokenLogprob",
    "Verdict",
    "VerifyMode",
]

FinishReason = Literal["stop", "length", "cancelled", "error"]
VerifyMode = Literal["invariant", "rejection"]
PLAIN = "plain"  # the arm that drafts nothing


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens as a tree in topological order; a chain is the tree where each node hangs on the one before.

    Args:
        tokens: n token ids.
        parents: n indices; ``parents[i] < i``, and -1 hangs node i on the last committed token.
        q: ``[n, vocab]`` distributions the tokens were drawn from, or None for a point mass (a token-only drafter).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise BadOption("parents", self.parents, f"{len(self.tokens)} indices, one a token")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise BadOption("parents", self.parents, "-1 or the index of an earlier node")

    @classmethod
    def chain(cls, tokens: Sequence[int], q: Tensor | None = None) -> Draft:
        """A linear draft."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), q)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs on the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the last committed token; 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def cut(self, nodes: int, depth: int) -> Draft:
        """The draft with at most the first `nodes` nodes, none deeper than `depth`."""
        if len(self.tokens) <= nodes and (len(self.tokens) <= depth or max(self.depths, default=0) <= depth):
            return self
        kept: list[int] = []
        known = {-1}
        for node, (parent, level) in enumerate(zip(self.parents, self.depths, strict=True)):
            if len(kept) < nodes and level <= depth and parent in known:
                known.add(node)
                kept.append(node)
        return self.only(kept)

    def only(self, nodes: Sequence[int]) -> Draft:
        """The draft with these nodes, in their order; each of them with the node it hangs on."""
        if len(nodes) == len(self.tokens):
            return self
        index = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        q = None if self.q is None else self.q[list(nodes)]
        return Draft(tuple(self.tokens[i] for i in nodes), tuple(index[self.parents[i]] for i in nodes), q)

    def behind(self, tokens: Sequence[int]) -> Draft:
        """The draft hung on the end of a chain of other tokens, which become its first nodes."""
        if not tokens:
            return self
        trunk = len(tokens)
        q = self.q
        if q is not None:
            joined = q.new_zeros((trunk + q.shape[0], q.shape[1]))
            joined[trunk:] = q
            joined[range(trunk), list(tokens)] = 1.0
            q = joined
        parents = (*range(-1, trunk - 1), *(parent + trunk for parent in self.parents))
        return Draft((*tokens, *self.tokens), parents, q)

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier commits.

    Attributes:
        path: accepted node indices, root to leaf.
        tokens: committed tokens: the accepted ones, then the correction or bonus token. That one is missing when the
            answer ended with an accepted token.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """What a bandit may play: a drafter with a budget. Written ``suffix@16``; ``plain`` drafts nothing.

    Attributes:
        name: unique name, also the key under which statistics are kept.
        drafter: name of the drafter, or "plain".
        budget: most nodes a draft of this arm may have; 0 for plain.
    """

    name: str
    drafter: str
    budget: int


# What the engine tells of a round, by name. `entropy` costs a pass over a row of the vocabulary, so only policies that
# name it in their attribute `features` are told; nan before the first token.
FEATURES: Mapping[str, str] = {
    "position": "tokens of the answer so far",
    "batch": "answers that are made at the same time",
    "prompt": "tokens of the prompt",
    "entropy": "nats of the distribution that the newest token came from (the target's at the request's temperature, 1 "
    "when greedy; before filters and penalties)",
}


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy sees before it chooses.

    Attributes:
        arms: names of the arms on offer (benched ones are absent). Never empty.
        hints: a cheap guess by each arm's drafter of how well it would do now, e.g. the matched length; nan = no idea,
            0 = it would draft nothing.
        features: numbers by name about the round, see `FEATURES`. (The pipeline step is none of them: every step has
            statistics of its own.)
        vector: what the policy's encoder made of the prompt, the same array in every round of an answer; None while
            there is none.
        seconded: of arms whose drafts were compared before the choice: how many tokens from the first on another
            drafter guesses, too. Only for policies that ask for it; absent = not compared.
    """

    arms: tuple[str, ...]
    hints: Mapping[str, float] = field(default_factory=dict)
    features: Mapping[str, float] = field(default_factory=dict)
    vector: NDArray[np.float64] | None = field(default=None, compare=False)
    seconded: Mapping[str, int] = field(default_factory=dict)

    def hint(self, arm: str) -> float:
        """The arm's hint, nan when it gave none."""
        return self.hints.get(arm, math.nan)


@dataclass(frozen=True, slots=True)
class Choice:
    """An arm and the probability with which it was drawn: travels from ``select`` to ``update``, never recomputed."""

    arm: str
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round gave, after the halting rules trimmed it. Rewards are functions of this.

    Attributes:
        arm: the arm played.
        budget: the arm's budget in nodes (N_max in MetaSD).
        drafted: nodes actually drafted.
        accepted: draft tokens committed.
        committed: tokens committed (accepted + correction or bonus, less what a stop trimmed). Of a round that was not
            played but estimated (``bandits/hindsight.py``), accepted and committed are expectations.
        agreement: ``1 - TV(p, q)`` per drafted node, empty when not measured.
        draft_s: seconds the draft took (smoothed by the cost model).
        score_s: seconds the target's forward took (smoothed).
        plain_s: seconds a forward without draft takes in the same situation (smoothed).
    """

    arm: str
    budget: int
    drafted: int
    accepted: float
    committed: float
    agreement: tuple[float, ...] = ()
    draft_s: float = 0.0
    score_s: float = 0.0
    plain_s: float = 0.0


def _number(option: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise BadOption(option, value, expected)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from the target's logits. The filters apply in the order of transformers: temperature,
    top_k, top_p, min_p.

    Args:
        temperature: 0 is greedy.
        top_p: keep the smallest set of most likely tokens whose mass reaches it; None or 1 keeps all.
        top_k: keep the k most likely tokens; None or 0 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one; None or 0 keeps all.
        seed: the same seed gives the same answer; None draws one for each request.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e4, "a finite number of at least 0")
        if self.top_p is not None:
            _number("top_p", self.top_p, 1e-9, 1.0, "a number in (0, 1]")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0
        ):
            raise BadOption("top_k", self.top_k, "a whole number of at least 0")
        if self.min_p is not None:
            _number("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise BadOption("seed", self.seed, "a whole number")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Shaping:
    """How the target's logits change before a token is chosen. State is a row's own text: committed tokens and, for a
    drafted node, the path to it.

    Args:
        logit_bias: pairs (token id, what is added to its logit); -100 in effect bans a token.
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or answer hold
            (Keskar et al. 2019, CTRL); 1 is off.
        no_repeat_ngram_size: no n-gram of prompt and answer occurs twice; 0 is off.
        presence_penalty: subtracted once from tokens that the answer holds.
        frequency_penalty: subtracted for each time the answer holds a token.
        min_tokens: stop ids are impossible before the answer has this many tokens.
        processors: callables ``(ids [1, n], logits [1, vocab]) -> logits``, as transformers' LogitsProcessor. Called in
            order, last, once for each position of the answer, with committed tokens only.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    processors: tuple[Callable[[Any, Any], Any], ...] = ()

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise BadOption("logit_bias", token, "token ids")
            _number("logit_bias", bias, -1e4, 1e4, "a finite number for each token id")
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3, "a number above 0; 1 is off")
        for option in ("presence_penalty", "frequency_penalty"):
            _number(option, getattr(self, option), -2.0, 2.0, "a number in [-2, 2]")
        for option in ("no_repeat_ngram_size", "min_tokens"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise BadOption(option, value, "a whole number of at least 0")
        for processor in self.processors:
            if not callable(processor):
                raise BadOption("logits_processors", type(processor).__name__, "callables (ids, logits) -> logits")

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        return self != _AS_IS


_AS_IS = Shaping()


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to generate.

    Args:
        prompt: token ids, special tokens included. Not empty.
        sampling: how tokens are drawn.
        max_tokens: most tokens of the answer, the stop token included.
        stop_ids: token ids that end the answer (they are committed and counted, but are not part of the text).
        stop: strings that end the answer (cut off the text; the token that completes one is committed and counted).
        verify: "invariant" (the answer is a function of prompt, seed and options alone) or "rejection"
            (Leviathan et al. 2023, Algorithm 1).
        step: name of the pipeline step, the key under which the bandit remembers.
        scope: requests of other scopes see nothing of this one's text or bandit memory.
        deadline_s: seconds after submission at which DeadlineExceeded is raised, or None.
        shaping: what happens to logits before a token is chosen.
        completion: which of several answers to one prompt; each has randomness of its own under the same seed.
        logprobs: None, or how many of the most likely tokens are reported beside each committed token.
        limit: most tokens of prompt and answer together; None, or more than the model's window: the window.
        constraint: what the answer may be; None: anything.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    verify: VerifyMode = "invariant"
    step: str = ""
    scope: str = ""
    deadline_s: float | None = None
    shaping: Shaping = _AS_IS
    completion: int = 0
    logprobs: int | None = None
    limit: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What every draft session is told after a round.

    Attributes:
        committed: tokens committed by the round, in order.
        fed: tokens whose rows were scored: pending committed tokens asked for, then draft nodes.
        parents: for each scored row the index of the row before it, -1 for the first.
        candidates: ``[rows, k]`` ids of the target's most likely next tokens after each scored row, best first, on the
            host (numpy int64); None when nobody needed them. k may be more or less than a drafter asked for.
        path: accepted draft nodes, as row indices.
        hidden: layer -> ``[n, width]`` hidden states, in the order of the text, of committed tokens the target has read
            since the last round (not of the round's last token), for drafters that asked for layers. Long prompts are
            read in pieces: each is told as a round that commits nothing.
        hidden_start: place in prompt and answer of the first of them. Only the last ones of a long piece are kept, so
            this may lie behind the end of those before.
    """

    committed: tuple[int, ...]
    fed: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    candidates: object | None = None
    path: tuple[int, ...] = ()
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    hidden_start: int = 0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of one call, for spans, statistics and pages. Holds no text.

    Attributes:
        arm: arm played ("plain" when it drafted nothing by choice).
        drafted, accepted, committed: token counts; accepted excludes the correction or bonus token.
        draft_s, score_s, total_s: seconds for drafting, for the target's forward and for the whole round.
        bonus: whether the target's token came on top of a path that was accepted to its end; False: it corrected a
            draft, there was none, or the answer ended with an accepted token.
        forced: tokens committed because a grammar left no choice; neither drafted nor accepted.
        scoring_s: seconds, of ``draft_s``, in which drafters scored committed tokens (policies with full information).
    """

    arm: str
    drafted: int
    accepted: int
    committed: int
    draft_s: float
    score_s: float
    total_s: float
    bonus: bool = False
    forced: int = 0
    scoring_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole call in numbers. Holds no text.

    Attributes:
        prompt_tokens, completion_tokens: usage; the stop token counts.
        finish_reason: "stop", "length", "cancelled" or "error".
        rounds: one record a round that committed tokens.
        prefill_s: seconds of the forwards that read the prompt.
        first_token_s: seconds from submission to the first committed token.
        total_s: seconds from submission to the end.
        policy, step: which policy played, for which step.
        values: the policy's current value of each arm, for display.
    """

    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason
    rounds: tuple[RoundRecord, ...] = ()
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    policy: str = ""
    step: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became final, and who guessed it.

    Attributes:
        text: never a part of a character, never a prefix of a stop string that was completed later.
        drafted: True when its token was drafted and accepted, False when the target supplied it.
    """

    text: str
    drafted: bool


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A committed token's natural log-probability in the target's own distribution: softmax of its logits at
    temperature 1, before penalties and filters.

    Attributes:
        token: id.
        logprob: its log-probability.
        top: the most likely tokens with theirs, most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What a caller receives after each round of its request.

    Attributes:
        tokens: tokens committed by the round, stop token included.
        pieces: text that became final with it. Joined over all steps it is the answer. May lag behind the tokens, so a
            piece can stem from an earlier round than its step.
        arm: arm that played the round.
        accepted: how many of the tokens, from the front, were drafted; those a grammar forced among them.
        summary: set on the last step only.
        logprobs: one a token, when the request asked for them.
        record: the round in numbers; None where there was no round.
    """

    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    arm: str = PLAIN
    accepted: int = 0
    summary: Summary | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    record: RoundRecord | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The step's text."""
        return "".join(piece.text for piece in self.pieces)
