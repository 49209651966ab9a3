"""A small independent language model drafts: speculative decoding as first proposed.

Law: the small model reads the text and proposes a chain, one forward a token, each token drawn with the noise that the
target will use (see ``models/proposals.py``). It goes on while the product of the tokens' chances to be taken is at
least `confidence`.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318); as a pool of specialists, MetaSpS in
MetaSD (Kim et al. 2025). Stopping by confidence as in transformers' assisted generation, with the product in place of
the last token's own. The window with attention sinks is StreamingLLM's (Xiao et al. 2023, 2309.17453).

Its keys and values are kept by generation. What other arms committed meanwhile is read in one forward when it plays
again. With ``kv="window:N"``, and with "full" past the model's own window, only the first 4 tokens and at most the
last N are read, at positions 0, 1, ... in a row: the model sees a short text that begins where the long one does. When
the window moves it is read anew, so that a draft is a function of the text alone, never of who played when; it moves
by a quarter of itself, so that this stays rare. So a switch costs at most one forward over N + 4 tokens.

It must speak the target's token ids, all or some of them. Its own generation config is not looked at.

When another is better: an ``eagle`` head reads the target's own features and needs one layer; where text repeats,
``suffix`` is free.

Options: ``path`` (folder of a causal model; needed), ``kv`` ("full" or "window:N"), ``confidence`` (0.15), ``device``
("auto": the target's), ``name`` ("small_lm").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metasd_langchain.drafters import Draws, Options
from metasd_langchain.drafters._options import only, text
from metasd_langchain.errors import BadOption, DrafterError, IncompatibleVocabulary
from metasd_langchain.registry import number
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

if TYPE_CHECKING:
    from torch import Tensor

    from metasd_langchain.models.load import Target
    from metasd_langchain.models.small import Small

__all__ = ["SmallLM", "create", "window_start"]

SINKS = 4  # first tokens that stay: attention that has nowhere to go rests on them
_PIECE = 512  # tokens read in one forward
CONFIDENCE = 0.15  # below, a further draft step costs more than it is expected to bring: about 4 of 35 ms


def window_start(length: int, recent: int, sinks: int = SINKS) -> int:
    """Index of the first recent token that is kept of `length` tokens; 0 = all are kept.

    At most `recent` and more than three quarters of that: the start moves a quarter at a time.
    """
    over = length - sinks - recent
    if over <= 0:
        return 0
    step = max(1, recent // 4)
    return sinks + step * math.ceil(over / step)


class _Reader:
    """The bound model: target ids in, logits over the columns out."""

    def __init__(self, small: Small, target_size: int, recent: int | None) -> None:
        self.lm, self.vocabulary, self.nbytes = small.lm, small.vocabulary, small.nbytes
        self.target_size = target_size
        self.columns = min(self.lm.vocab_size, target_size) if self.vocabulary is None else len(self.vocabulary)
        self.recent = self._window(recent)

    def _window(self, recent: int | None) -> int:
        """Recent tokens kept. With all of them kept: as many as fit with room for a draft."""
        most = self.lm.window - SINKS - 1
        if most < 1:
            raise BadOption("path", self.lm.window, f"a model with a window of more than {SINKS + 1} tokens")
        if recent is None:
            return max(1, most - min(64, most // 4))
        if recent > most:
            raise BadOption("kv", f"window:{recent}", f"a window of at most {most} for this model")
        return recent

    def places(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """What the model is fed for target ids."""
        if self.vocabulary is not None:
            return tuple(self.vocabulary.places(tokens))
        return tuple(token if token < self.columns else 0 for token in tokens)

    def ids(self) -> Any:
        """Target ids of the columns, or None when they are the same."""
        return None if self.vocabulary is None else self.vocabulary.d2t


class _SmallSession:
    def __init__(self, request: Request, reader: _Reader, confidence: float) -> None:
        from metasd_langchain.models.lm import Slot
        from metasd_langchain.models.proposals import Proposer

        self._reader: _Reader | None = reader  # None once closed
        self._prompt, self._stop_ids, self._confidence = len(request.prompt), request.stop_ids, confidence
        self._greedy = request.sampling.greedy
        exact = request.verify == "rejection"
        self._proposer = Proposer(request.sampling, reader.ids(), reader.target_size, exact=exact)
        self._drafts = 0
        self._slot = Slot()
        self._held: list[int] = []  # target ids whose keys and values the slot holds, in order

    def hint(self) -> float:
        """No idea: what it would draft is not known before it has read."""
        return math.nan

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Catch up with the text, then draft a chain."""
        reader = self._reader
        if reader is None or budget <= 0 or not tokens:
            return EMPTY_DRAFT
        logits = self._read(reader, self._visible(reader, tokens))[-1]
        position = len(tokens) - self._prompt
        budget = min(budget, reader.lm.window - len(self._held) + 1)
        self._drafts += 1
        drafted: list[int] = []
        rows: list[Tensor] = []
        sure = 1.0
        while True:
            proposal = self._proposer.guess(logits, draws, position + len(drafted), self._drafts)
            drafted.append(proposal.token)
            if proposal.q is not None:
                rows.append(proposal.q)
            sure *= proposal.confidence
            if len(drafted) >= budget or sure < self._confidence or proposal.token in self._stop_ids:
                break
            logits = self._feed(reader, [proposal.token])[-1]
        return Draft.chain(drafted, _stacked(rows))

    def _visible(self, reader: _Reader, tokens: Sequence[int]) -> list[int]:
        """The tokens to be read: all, or the first and the last ones."""
        start = window_start(len(tokens), reader.recent)
        return [*tokens[:SINKS], *tokens[start:]] if start else list(tokens)

    def _read(self, reader: _Reader, wanted: list[int], rows: int = 1) -> Tensor:
        """Logits after the last `rows` wanted tokens; reads those and what the slot does not hold.

        Keys and values depend on the tokens before them and their places alone, so that what is the same is kept: of a
        window that moved the first tokens, of a draft what was accepted.
        """
        same = min(len(self._held), len(wanted) - rows)  # the last ones are read in any case: their logits are needed
        while self._held[:same] != wanted[:same]:
            same -= 1
        del self._held[same:]
        for at in range(same, len(wanted) - max(rows, _PIECE), _PIECE):
            self._feed(reader, wanted[at : min(at + _PIECE, len(wanted) - rows)], scored=0)
        return self._feed(reader, wanted[len(self._held) :], rows)

    def _feed(self, reader: _Reader, tokens: list[int], scored: int = 1) -> Tensor:
        from metasd_langchain.models.lm import Feed

        self._slot.length = len(self._held)
        feed = Feed(self._slot, reader.places(tokens), scored=scored)
        logits = reader.lm.score([feed]).logits
        reader.lm.keep(feed)
        self._held += tokens
        return logits[:, : reader.columns]

    scores_late = True

    def score(self, tokens: Sequence[int], start: int) -> list[float] | None:
        """The model's probability of each token, from one forward over them; greedy, whether it is the most likely one.

        In a window that moved meanwhile, by what the model sees at the end; nan for tokens that have left it.
        """
        reader = self._reader
        count = len(tokens) - start
        if reader is None:
            return None
        if count <= 0 or start < 1:
            return [math.nan] * max(0, count)
        wanted = self._visible(reader, tokens[:-1])
        rows = min(count, len(wanted) if len(wanted) == len(tokens) - 1 else len(wanted) - SINKS)
        logits = self._read(reader, wanted, rows)
        chances, ranks = self._proposer.probabilities(logits, tokens[len(tokens) - rows :])
        if self._greedy:
            chances = [0.0 if rank else 1.0 for rank in ranks]
        return [math.nan] * (count - rows) + chances

    def observe(self, round: Round) -> None:
        """Nothing: what was committed is read when it is needed."""

    def close(self) -> None:
        """Free the keys and values."""
        from metasd_langchain.models.lm import Slot

        self._reader, self._slot, self._held = None, Slot(), []


def _stacked(rows: list[Tensor]) -> Tensor | None:
    if not rows:
        return None
    import torch

    return torch.stack(rows)


class SmallLM:
    """Holds the model.

    Args:
        model: its folder, or a live pair ``(model, tokenizer)``, which is left as it is.
        kv: "full", or "window:N": the first 4 and at most the last N tokens are read.
        confidence: drafting ends when the product of the tokens' chances falls below.
        device: "auto" is the target's.
        name: its name in arms.

    Nothing is loaded before `bind`, which returns the drafter that plays.
    """

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: str | Path | tuple[Any, Any],
        *,
        kv: str = "full",
        confidence: float = CONFIDENCE,
        device: str = "auto",
        name: str = "small_lm",
    ) -> None:
        self.name = name
        self._model, self._recent = model, _recent(kv)
        self._confidence, self._device = confidence, device

    def bind(self, target: Target) -> _Bound:
        """The drafter for a target: loads the model and sees that it speaks the target's token ids.

        Raises:
            LoadError: no such folder.
            BadCheckpoint: it cannot be read.
            UnsupportedModel: see CausalLM.
            IncompatibleVocabulary: ids mean other tokens.
            BadOption: a window that the model does not have.
        """
        from metasd_langchain.models.checkpoints import drafter_path
        from metasd_langchain.models.small import load_small

        model = self._model if isinstance(self._model, tuple) else drafter_path(str(self._model), target.name)
        small = load_small(model, self._device, target.lm.device)
        _check(self.name, small, target)
        return _Bound(self.name, _Reader(small, target.lm.vocab_size, self._recent), self._confidence)

    def open(self, request: Request) -> _SmallSession:
        """Not before `bind`.

        Raises:
            DrafterError: always.
        """
        raise DrafterError(f"{self.name} is not bound to a target yet")

    def forget(self, scope: str | None = None) -> None:
        """Nothing is shared between requests."""


class _Bound:
    """The drafter with its weights, checked against a target."""

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, name: str, reader: _Reader, confidence: float) -> None:
        self.name, self._reader, self._confidence = name, reader, confidence

    def open(self, request: Request) -> _SmallSession:
        """A session with a slot of its own; nothing is read yet."""
        return _SmallSession(request, self._reader, self._confidence)

    def forget(self, scope: str | None = None) -> None:
        """Nothing is shared between requests."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights."""
        return self._reader.nbytes


def _check(name: str, small: Small, target: Target) -> None:
    from metasd_langchain.models.vocabulary import fingerprint, refuse_other_meanings

    vocabulary = small.vocabulary
    if vocabulary is None:
        refuse_other_meanings(name, small.tokenizer.get_vocab(), target.tokenizer.get_vocab())
        return
    if vocabulary.target_size != target.lm.vocab_size:
        raise IncompatibleVocabulary(
            f"{name} was made for a vocabulary of {vocabulary.target_size} tokens, the target has "
            f"{target.lm.vocab_size}"
        )
    if vocabulary.fingerprint and vocabulary.fingerprint != fingerprint(target.tokenizer):
        raise IncompatibleVocabulary(
            f"{name} was made for another tokenizer than the target's", hint="train it on this target"
        )


def _recent(kv: str) -> int | None:
    if kv == "full":
        return None
    word, _, count = kv.partition(":") if isinstance(kv, str) else ("", "", "")
    if word != "window" or not count.isdigit() or int(count) < 1:
        raise BadOption("kv", kv, '"full" or "window:N" with N of at least 1')
    return int(count)


def create(options: Options) -> SmallLM:
    """Build the drafter from options."""
    only(options, ("path", "kv", "confidence", "device", "name"))
    path = options.get("path")
    if not isinstance(path, (str, Path)) or not str(path):
        raise BadOption("path", path, "the folder of a small causal model, as in small_lm:FOLDER@5")
    return SmallLM(
        path,
        kv=str(options.get("kv", "full")),
        confidence=number("confidence", options.get("confidence", CONFIDENCE), 0.0, 1.0),
        device=text(options, "device", "auto"),
        name=text(options, "name", "small_lm"),
    )
