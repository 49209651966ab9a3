"""The target's processed distribution of each scored row, and the draw of a token from it.

A row of logits becomes a distribution by temperature, then top_k, top_p and min_p (the order of transformers). The
token of an answer's position is an exact draw from it that depends on the position's keyed noise alone:

* one uniform decides between the ``HEAD`` most likely tokens and the tail;
* inside the head the token is ``argmax(log p + Gumbel noise keyed by token id)``, so a drafter that draws from its own
  distribution with the same noise lands on the same token nearly as often as rejection sampling would accept it;
* in the tail it is the token at which the cumulative mass reaches a second uniform.

When a filter leaves a finite set, the whole set is the head. Equal logits (common in bfloat16) are ordered by token
id, so neither batch width nor kernel decides a draw.

Under a grammar a row chooses among its legal tokens: all others have no mass, and the rest is as above. Where penalties
or a user's processors forbid every legal token, the grammar wins and the token is chosen from the model's own logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metasd_langchain.constraints.legal import FEW
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.guide import RowMasks
from metasd_langchain.engine.heads import HEAD, Head, best, blocks_of, find_heads, scaled
from metasd_langchain.errors import TargetError
from metasd_langchain.values import Sampling, TokenLogprob

__all__ = ["HEAD", "Shape", "TargetRows", "best"]

_NO_MASS = -1e4  # for -inf: exp of it is 0 in float32, and 0 times it is 0

Shape = Callable[[int, Tensor], Tensor]  # a row's number and its logits [vocab] -> the logits to choose from


class TargetRows:
    """Processed distributions of the rows of one generation's round.

    Args:
        logits: ``[rows, vocab]``.
        sampling: temperature and filters.
        candidates: how many of the best next tokens each row must report in `candidates`.
        origin: row of `logits` that follows the last committed token; rows are numbered from it. Rows before it (of the
            prompt) only report candidates.
        shape: applied to a row's logits before a token is chosen from it: once, and only to rows that are reached.
        masks: which tokens a row may choose from; None: all. Comes last.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        candidates: int = 0,
        origin: int = 0,
        shape: Shape | None = None,
        masks: RowMasks | None = None,
    ) -> None:
        self._logits = logits[origin:]
        self._shape = shape
        self._masks = masks
        self._shaped: dict[int, Tensor] = {}
        self._origin = origin
        self._sampling = sampling
        self._heads: dict[int, Head] = {}
        self._temperature = 1.0 if sampling.greedy else max(sampling.temperature, 1e-30)  # not 0 as a float32
        self.candidates: NDArray[np.int64] | None = None
        if candidates or (sampling.greedy and shape is None):  # shaped rows are looked at one by one
            with torch.inference_mode():
                values, ids = best(logits, max(1, candidates))
                if bool(values[:, 0].isnan().any()):
                    raise TargetError("the model's logits hold nan")
                self.candidates = ids.cpu().numpy()

    def __len__(self) -> int:
        return self._logits.shape[0]

    def token(self, row: int, position: int, draws: Draws) -> int:
        """The target's token after a row, at a position of the answer."""
        return self._fitting(row, lambda: self._drawn(row, position, draws))

    def _fitting(self, row: int, draw: Callable[[], int]) -> int:
        """A row's token; drawn anew as long as it leaves a grammar too little room for the answer's end."""
        token = draw()
        while self._masks is not None and self._masks.refuses(row, token):
            self._heads.pop(row, None)
            token = draw()
        return token

    def _drawn(self, row: int, position: int, draws: Draws) -> int:
        few = self._few(row)
        if few is not None and len(few) == 1 and self._shape is None:
            return int(few[0])
        if self._sampling.greedy:
            return self._greedy(row, few)
        head = self._head(row)
        if head.mass < 1.0 and draws.uniform(position, Draws.SPLIT) >= head.mass:
            token = self._tail(row, head, draws.uniform(position, Draws.TAIL))
            if token >= 0:
                return token
        return int(head.ids[int(np.argmax(head.logits + draws.gumbel(position, head.ids)))])

    def _greedy(self, row: int, few: NDArray[np.int64] | None) -> int:
        if self._shape is None and self.candidates is not None:
            token = int(self.candidates[self._origin + row, 0])
            if self._masks is None or token in self._masks.legal(row):
                return token
        with torch.inference_mode():
            if few is None:
                return int(best(self._chosen_from([row]), 1)[1])
            return int(few[int(best(self._picked(row, few), 1)[1])])

    def probability(self, row: int, token: int) -> float:
        """p(token) of a row under the temperature alone (1 when greedy): ``1 - TV`` against a point mass.

        Under a grammar, among the legal tokens: a node that it leaves no choice about is certain.
        """
        with torch.inference_mode():
            z = scaled(self._legal_logits(row)[None], self._temperature)[0]
            return float((z[token] - z.logsumexp(-1)).exp())

    def dense(self, row: int) -> Tensor:
        """The whole processed distribution of a row: float64 ``[vocab]``, sums to 1. Slow at a large vocabulary.

        Where a grammar has to come to its end, only the `FEW` most likely tokens are tried for whether they leave room.
        """
        with torch.inference_mode():
            if self._sampling.greedy:
                result = torch.zeros(self._logits.shape[1], dtype=torch.float64)
                result[self._fitting(row, lambda: self._greedy(row, self._few(row)))] = 1.0
                return result
            if self._masks is not None and self._masks.tight(row):
                likely = best(self._masked_logits(row)[None], FEW)[1][0].tolist()
                self._masks.keep_fitting(row, likely)
                self._heads.pop(row, None)
            head = self._head(row)
            if head.mass < 1.0:
                return (self._chosen_from([row])[0].cpu().double() / self._temperature).softmax(-1)
            result = torch.zeros(self._logits.shape[1], dtype=torch.float64)
            weights = np.exp(head.logits - head.logits.max())
            result[torch.from_numpy(head.ids)] = torch.from_numpy(weights / weights.sum())
            return result

    def soft(self, row: int) -> Tensor:
        """Softmax of a row at the temperature (1 when greedy), before filters: what drafters are compared with."""
        with torch.inference_mode():
            return (self._legal_logits(row).cpu().double() / self._temperature).softmax(-1)

    def entropy(self, row: int) -> float:
        """Entropy in nats of `soft`, in float32: one pass over the row."""
        with torch.inference_mode():
            z = scaled(self._legal_logits(row)[None], self._temperature)[0].clamp_(min=_NO_MASS)
            weights = z.exp()  # z is at most 0, so nothing overflows
            total = weights.sum()
            return float(total.log() - weights.dot(z) / total)

    def logprobs(self, rows: list[int], tokens: list[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of tokens after rows, in the target's own distribution (see TokenLogprob)."""
        found: list[TokenLogprob] = []
        with torch.inference_mode():
            for row, token in zip(rows, tokens, strict=True):
                logits = self._logits[row : row + 1]
                total = logits.float().logsumexp(-1)
                mine = float(logits[0, token].float() - total)
                values, ids = best(logits, max(1, top))
                likely = tuple(zip(ids[0].tolist(), (values[0] - total).tolist(), strict=True))
                found.append(TokenLogprob(token, mine, likely[:top]))
        return found

    def prepare(self, rows: list[int]) -> None:
        """Compute several rows at once, as far as that can be done ahead; the draw then works on the host."""
        if self._shape is None and self._masks is None and not self._sampling.greedy:
            self._find(rows)

    def _find(self, rows: list[int]) -> None:
        missing = [row for row in rows if row not in self._heads]
        if not missing:
            return
        with torch.inference_mode():
            few = self._few(missing[0]) if self._masks is not None else None  # then they come one by one
            if few is not None:
                self._heads[missing[0]] = self._small_head(missing[0], few)
                return
            heads = find_heads(self._chosen_from(missing), self._sampling, self._temperature)
        self._heads.update(zip(missing, heads, strict=True))

    def _small_head(self, row: int, few: NDArray[np.int64]) -> Head:
        """The head of a row with few legal tokens, of which it is nearly always all."""
        head = find_heads(self._picked(row, few), self._sampling, self._temperature)[0]
        return Head(few[head.ids], head.logits, 1.0 if len(head.ids) == len(few) else head.mass)

    def _few(self, row: int) -> NDArray[np.int64] | None:
        """A row's legal tokens where a grammar leaves only few."""
        return None if self._masks is None else self._masks.legal(row).few

    def _picked(self, row: int, few: NDArray[np.int64]) -> Tensor:
        """Logits of a row's few legal tokens, ``[1, len(few)]``."""
        ids = torch.from_numpy(few)
        picked = self._shaped_logits(row)[ids.to(self._logits.device)]
        if self._shape is not None and bool((picked == -torch.inf).all()):
            picked = self._logits[row][ids.to(self._logits.device)]
        return picked[None]

    def _chosen_from(self, rows: list[int]) -> Tensor:
        """Logits that rows' tokens are chosen from, ``[len(rows), vocab]``."""
        if self._shape is None and self._masks is None:
            return self._logits[rows]
        return torch.stack([self._masked_logits(row) for row in rows])

    def _shaped_logits(self, row: int) -> Tensor:
        """A row's logits after penalties and processors, which are asked once."""
        if self._shape is None:
            return self._logits[row]
        if row not in self._shaped:
            self._shaped[row] = self._shape(row, self._logits[row])
            if bool(self._shaped[row].isnan().any()):
                raise TargetError("logits hold nan, the model's own or after a logits processor")
        return self._shaped[row]

    def _masked_logits(self, row: int) -> Tensor:
        """A row's logits after everything, the grammar last."""
        shaped = self._shaped_logits(row)
        if self._masks is None:
            return shaped
        masked = self._masks.legal(row).masked(shaped)
        if self._shape is not None and bool((masked == -torch.inf).all()):
            return self._legal_logits(row)
        return masked

    def _legal_logits(self, row: int) -> Tensor:
        """The model's own logits of a row; under a grammar, of the legal tokens."""
        return self._logits[row] if self._masks is None else self._masks.legal(row).masked(self._logits[row])

    def _head(self, row: int) -> Head:
        self._find([row])
        return self._heads[row]

    def _tail(self, row: int, head: Head, u: float) -> int:
        """The token outside the head at which the cumulative mass, in order of ids, reaches u; -1 without any mass."""
        with torch.inference_mode():
            mass = scaled(self._chosen_from([row]), self._temperature).softmax(-1)
            mass[0, torch.from_numpy(head.ids).to(mass.device)] = 0.0
            blocks = blocks_of(mass, fill=0.0)[0]
            reached = blocks.sum(-1).cpu().double().cumsum(0)
            goal = u * float(reached[-1])
            if goal <= 0.0:
                return -1
            block = min(int((reached < goal).sum()), blocks.shape[0] - 1)
            inside = blocks[block].cpu().double().cumsum(0) + (float(reached[block - 1]) if block else 0.0)
            place = int((inside < goal).sum())
            if place >= blocks.shape[1]:  # rounding at a block's end: its last token with mass
                place = int(blocks[block].nonzero()[-1])
            return block * blocks.shape[1] + place
