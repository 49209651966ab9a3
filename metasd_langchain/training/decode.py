"""Batched decoding for teacher data: many rows that begin together, in columns, not packed.

The engine serves requests that come and go, row by row. Here all rows of a batch begin and go on together, so keys and
values lie aligned to the right in one tensor a layer: a step writes one column and makes two batched products. Rows
that have ended are taken out. Against the engine's packed rows that saves the work between products, which at 32 rows
is a third of a step.

At 262,144 columns the head is the larger half of a decoding step. `CandidateHead` computes the likely columns only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metasd_langchain.models.lm import CausalLM
from metasd_langchain.models.packed_linear import PackedLinear, native_bfloat16

__all__ = ["CandidateHead", "Decoded", "decode", "sample"]

_BLOCK = 512  # columns whose mass is summed before one of them is looked for
_ROWS = 4  # rows sampled at once: their float32 copy stays in the cache
_PREFILL = 8192  # prompt tokens a forward
_NOTED = 4  # of so many steps the mass of one is added up
_COMPACT = 0.75  # rows are taken out when fewer than this share of them is going on


@dataclass(slots=True)
class Decoded:
    """One row.

    Attributes:
        tokens: prompt and answer; a stop id that ended the answer included.
        hidden: layer -> ``[n, width]``, the target's states after each of the first n tokens; the last token was not
            read unless it is the prompt's.
        prompt: how many of `tokens` are the prompt.
        normalisers: logsumexp of the whole vocabulary's logits at the row's temperature (at 1 when greedy), for every
            position from the last of the prompt on that a token was drawn at; None when only likely columns were
            computed.
    """

    tokens: list[int]
    hidden: dict[int, Tensor]
    prompt: int
    normalisers: Tensor | None = None


class CandidateHead:
    """The output layer for some columns only.

    Args:
        rows: ``[vocab, hidden]`` of the whole output layer.
        ids: the columns, ascending.
        softcap: of the logits, where the model has one.
    """

    def __init__(self, rows: Tensor, ids: Tensor, softcap: float | None = None) -> None:
        self.ids = ids
        self._softcap = softcap
        linear = nn.utils.skip_init(nn.Linear, rows.shape[1], len(ids), bias=False, dtype=rows.dtype)
        linear.weight = nn.Parameter(rows[ids], requires_grad=False)
        packable = rows.dtype == torch.bfloat16 and rows.device.type == "cpu" and native_bfloat16()
        self._linear: nn.Module = PackedLinear(linear) if packable else linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of the columns, ``[rows, hidden] -> [rows, len(ids)]``."""
        logits: Tensor = self._linear(hidden)
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token of each row, and the logarithm of the mass of all columns.

    An exact draw by the inverse of the distribution function: first a block of columns by its mass, then a column of
    it. No sort and no noise a column: one exponential a column is the price. A temperature of 0 takes the highest.

    Args:
        logits: ``[rows, columns]``.
        temperature: at least 0.
        generator: of the draws.

    Returns:
        Columns ``[rows]`` and logsumexp at the temperature (at 1 for 0), float32 ``[rows]``.
    """
    tokens, masses = [], []
    for part in logits.split(_ROWS):
        z = part.float()
        top = z.amax(-1, keepdim=True)
        weights = ((z - top) / (temperature or 1.0)).exp_()
        if weights.shape[1] % _BLOCK:
            weights = nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK))
        blocks = weights.view(len(z), -1, _BLOCK)
        reached = blocks.sum(-1).double().cumsum(-1)
        masses.append(reached[:, -1].log().float() + top[:, 0] / (temperature or 1.0))
        if not temperature:
            tokens.append(part.argmax(-1))
            continue
        # 1 - u lies in (0, 1], so a goal of 0 that would name a column without mass cannot be drawn
        goal = (1.0 - torch.rand(len(z), 1, generator=generator, dtype=torch.float64)).to(z.device) * reached[:, -1:]
        block = torch.searchsorted(reached, goal).clamp_max(reached.shape[1] - 1)
        before = torch.where(block > 0, reached.gather(1, (block - 1).clamp_min(0)), 0.0)
        inside = blocks[torch.arange(len(z)), block[:, 0]].double().cumsum(-1)
        goal = torch.minimum(goal - before, inside[:, -1:])  # the two sums differ in their last digits
        tokens.append((block * _BLOCK + torch.searchsorted(inside, goal))[:, 0].clamp_max(logits.shape[1] - 1))
    return torch.cat(tokens), torch.cat(masses)


def decode(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    layers: Sequence[int],
    stop_ids: frozenset[int] = frozenset(),
    head: CandidateHead | None = None,
    mass: Tensor | None = None,
) -> list[Decoded]:
    """Answers of the model to the prompts, with its hidden states.

    Args:
        lm: the model.
        prompts: token ids; prompts of like length waste least.
        new_tokens: most tokens of an answer; 0 reads the prompts only.
        temperature: 0 is greedy.
        generator: of the draws.
        layers: hidden states to keep, as transformers numbers them; the last is kept anyway.
        stop_ids: end an answer.
        head: computes likely columns only; None: all of them.
        mass: float64 ``[vocab]``, to which the probabilities of every step are added; with all columns only.
    """
    with torch.inference_mode():
        return _Batch(lm, prompts, layers, new_tokens, head, mass).run(temperature, generator, stop_ids)


class _Batch:
    def __init__(
        self,
        lm: CausalLM,
        prompts: Sequence[Sequence[int]],
        layers: Sequence[int],
        new_tokens: int,
        head: CandidateHead | None,
        mass: Tensor | None,
    ) -> None:
        self._lm, self._head, self._mass = lm, head, mass
        self._last = int(lm.config.num_hidden_layers)
        self._layers = tuple(sorted({*layers, self._last}))
        self._new = new_tokens
        longest = max(map(len, prompts))
        self._columns = _Columns(lm, len(prompts), longest, longest + new_tokens)
        self._rows = [Decoded(list(prompt), {}, len(prompt)) for prompt in prompts]
        self._hidden: list[dict[int, list[Tensor]]] = [{layer: [] for layer in self._layers} for _ in prompts]
        self._normalisers: list[list[Tensor]] = [[] for _ in prompts]

    def run(self, temperature: float, generator: torch.Generator, stop_ids: frozenset[int]) -> list[Decoded]:
        states = self._read_prompts()
        alive = list(range(len(self._rows)))
        for step in range(self._new):
            logits = self._logits(states)
            tokens, masses = sample(logits, temperature, generator)
            if self._head is None:
                self._note(alive, logits, masses, temperature, step)
            else:
                tokens = self._head.ids[tokens.cpu()]
            for row, token in zip(alive, tokens.tolist(), strict=True):
                if row >= 0:
                    self._rows[row].tokens.append(token)
            ended = [row < 0 or token in stop_ids for row, token in zip(alive, tokens.tolist(), strict=True)]
            if step + 1 == self._new or all(ended):
                break
            kept = [place for place, over in enumerate(ended) if not over]
            if len(kept) < _COMPACT * len(ended):
                self._columns.select(kept)
                tokens = tokens[kept]
                alive = [alive[place] for place in kept]
            else:
                alive = [-1 if over else row for row, over in zip(alive, ended, strict=True)]
            states = self._step(tokens.tolist(), alive)
        return self._finish()

    def _read_prompts(self) -> Tensor:
        """Feed the prompts, some at a time; the last states of each, ``[rows, hidden]``."""
        lasts: list[Tensor] = []
        first = 0
        while first < len(self._rows):
            stop, total = first + 1, len(self._rows[first].tokens)
            while stop < len(self._rows) and total + len(self._rows[stop].tokens) <= _PREFILL:
                total += len(self._rows[stop].tokens)
                stop += 1
            rows = self._rows[first:stop]
            self._columns.prefill(first, [len(row.tokens) for row in rows])
            tokens = [token for row in rows for token in row.tokens]
            hidden = self._forward(tokens, [place for row in rows for place in range(len(row.tokens))])
            start = 0
            for number, row in enumerate(rows, first):
                end = start + len(row.tokens)
                for layer in self._layers:
                    self._hidden[number][layer].append(hidden[layer][start:end])
                lasts.append(hidden[self._last][end - 1])
                start = end
            first = stop
        return torch.stack(lasts)

    def _step(self, tokens: list[int], alive: Sequence[int]) -> Tensor:
        """Read one token of each row; the states after it."""
        hidden = self._forward(tokens, self._columns.advance())
        for place, row in enumerate(alive):
            if row >= 0:
                for layer in self._layers:
                    self._hidden[row][layer].append(hidden[layer][place : place + 1])
        return hidden[self._last]

    def _forward(self, tokens: list[int], positions: list[int]) -> dict[int, Tensor]:
        """Hidden states after each token; no logits, which are computed where they are wanted."""
        device = self._lm.device
        output: Any = self._lm._model(  # noqa: SLF001 - the engine's own module tree, with another context
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            cache=self._columns,
            use_cache=True,
            logits_to_keep=torch.empty(0, dtype=torch.long),
            output_hidden_states=True,
            metasd=self._columns,
        )
        return {layer: output.hidden_states[layer][0] for layer in self._layers}

    def _logits(self, states: Tensor) -> Tensor:
        if self._head is not None:
            return self._head(states)
        logits: Tensor = self._lm._twin.get_output_embeddings()(states)  # noqa: SLF001
        softcap = getattr(self._lm.config, "final_logit_softcapping", None)
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    def _note(self, alive: Sequence[int], logits: Tensor, masses: Tensor, temperature: float, step: int) -> None:
        """Keep what the whole vocabulary says."""
        for place, row in enumerate(alive):
            if row >= 0:
                self._normalisers[row].append(masses[place])
                if self._mass is not None and not step % _NOTED:
                    self._mass += (logits[place].float() / (temperature or 1.0) - masses[place]).exp()

    def _finish(self) -> list[Decoded]:
        for row, hidden, normalisers in zip(self._rows, self._hidden, self._normalisers, strict=True):
            row.hidden = {layer: torch.cat(parts) for layer, parts in hidden.items()}
            row.normalisers = torch.stack(normalisers) if normalisers else None
        return self._rows


@dataclass(slots=True)
class _Columns:
    """Context of the forwards: keys and values of all rows, aligned to the right at column `end`.

    Stands in for a transformers cache, as ``models.attention.PackedRows`` does.
    """

    lm: CausalLM
    rows: int
    end: int
    capacity: int
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # of the rows filled so far
    filling: tuple[int, list[int]] | None = None  # first row and lengths of the prompts being read
    masks: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)

    is_compileable = False
    is_sliding = (False,)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values pass through; `attend` stores them."""
        return key, value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Positions are given explicitly."""
        return 0

    def get_query_offset(self, *args: Any, **kwargs: Any) -> int:
        """See `get_seq_length`."""
        return 0

    def get_mask_sizes(self, query: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Sizes of a mask that is never built."""
        return (query if isinstance(query, int) else len(query)), 0

    def prefill(self, first: int, lengths: list[int]) -> None:
        """The next forward reads the prompts of the rows from `first` on."""
        self.filling = first, lengths
        self.lengths += lengths

    def advance(self) -> list[int]:
        """The next forward reads one token a row; their positions."""
        self.filling = None
        self.masks.clear()
        positions = list(self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        self.end += 1
        return positions

    def select(self, kept: list[int]) -> None:
        """Keep these rows only."""
        index = torch.tensor(kept, device=self.lm.device)
        self.keys = {layer: keys[index] for layer, keys in self.keys.items()}
        self.values = {layer: values[index] for layer, values in self.values.items()}
        self.lengths = [self.lengths[row] for row in kept]
        self.rows = len(kept)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store and attend; shapes as ``models.attention.PackedRows.attend``."""
        if layer not in self.keys:
            shape = self.rows, key.shape[1], self.capacity, key.shape[3]
            self.keys[layer], self.values[layer] = key.new_zeros(shape), value.new_zeros(shape)
        if self.filling is None:
            return self._attend_column(layer, query * scale, key, value, window, softcap)
        first, lengths = self.filling
        parts, start = [], 0
        for row, n in enumerate(lengths, first):
            span = slice(start, start + n)
            self.keys[layer][row, :, self.end - n : self.end] = key[0, :, span]
            self.values[layer][row, :, self.end - n : self.end] = value[0, :, span]
            groups = query.shape[1] // key.shape[1]
            mixed = _mix(
                (query[0, :, span] * scale).reshape(key.shape[1], groups * n, -1),
                key[0, :, span],
                value[0, :, span],
                self._causal(n, window).repeat(groups, 1),
                softcap,
            )
            parts.append(mixed.view(query.shape[1], n, -1))
            start += n
        return torch.cat(parts, 1).to(query.dtype).transpose(0, 1).unsqueeze(0)

    def _attend_column(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.end - 1] = key[0].transpose(0, 1)
        values[:, :, self.end - 1] = value[0].transpose(0, 1)
        low = 0 if window is None else max(0, self.end - window)
        heads, kv_heads, width = query.shape[1], keys.shape[1], self.end - low
        flat = query[0].transpose(0, 1).reshape(self.rows * kv_heads, heads // kv_heads, -1)
        mixed = _mix(
            flat,
            keys[:, :, low : self.end].reshape(self.rows * kv_heads, width, -1),
            values[:, :, low : self.end].reshape(self.rows * kv_heads, width, -1),
            self._padding(low, kv_heads),
            softcap,
        )
        return mixed.to(query.dtype).view(1, self.rows, heads, -1)

    def _padding(self, low: int, kv_heads: int) -> Tensor | None:
        """What hides the columns before each row's first token: ``[rows * kv_heads, 1, columns]``."""
        known = low, kv_heads
        if known not in self.masks:
            starts = torch.tensor([self.end - length for length in self.lengths], device=self.lm.device)
            hidden = torch.arange(low, self.end, device=self.lm.device)[None] < starts[:, None]
            mask = torch.zeros(hidden.shape, device=self.lm.device).masked_fill_(hidden, -torch.inf)
            self.masks[known] = mask.repeat_interleave(kv_heads, 0)[:, None] if bool(hidden.any()) else None
        return self.masks[known]

    def _causal(self, n: int, window: int | None) -> Tensor:
        known = n, window or 0
        mask = self.masks.get(known)
        if mask is None:
            sees = torch.ones(n, n, dtype=torch.bool, device=self.lm.device).tril()
            if window is not None and window < n:
                sees &= torch.ones_like(sees).triu(1 - window)
            mask = self.masks[known] = torch.zeros(n, n, device=sees.device).masked_fill_(~sees, -torch.inf)
        return mask


def _mix(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None) -> Tensor:
    """Softmax attention, scores in float32: ``[b, n, d]`` scaled queries against ``[b, keys, d]``."""
    scores = torch.bmm(query, keys.transpose(1, 2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.bmm(scores.softmax(-1).to(values.dtype), values)
