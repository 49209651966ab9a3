"""Deciding which drafted tokens are committed. The only place that commits tokens.

*accepted* tokens were drafted and agree with the target; the *correction* is the target's token where they end; when a
whole path was accepted it is called the *bonus*.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.values import Draft, Verdict, VerifyMode

__all__ = ["VERIFIERS", "Ended", "agreement", "verify_invariant", "verify_rejection"]

Ended = Callable[[int, bool], bool]  # told each committed token, and whether it was drafted; True: the answer ends here

_AHEAD = 2  # rows of a chain processed together at first when sampling, then twice as many: most end early


def _never(token: int, drafted: bool) -> bool:
    return False


def verify_invariant(draft: Draft, rows: TargetRows, draws: Draws, position: int, ended: Ended = _never) -> Verdict:
    """Accept a node iff it *is* the target's token at its position.

    The target's token there is a function of the row's distribution and the position's noise, so the committed text
    does not depend on the draft at all.

    Args:
        draft: the nodes; row 0 of `rows` follows the last committed token, row ``1 + i`` follows node i.
        rows: the target's distributions.
        draws: the answer's randomness.
        position: index in the answer of the first token to commit.
        ended: asked after each token, so that no row past the answer's end is looked at.
    """
    children = _children(draft)
    chain = draft.is_chain
    path: list[int] = []
    tokens: list[int] = []
    node, ready, ahead = -1, 0, _AHEAD
    while True:
        if chain and node + 1 == ready:
            ready, ahead = min(ready + ahead, len(draft) + 1), 2 * ahead
            rows.prepare(list(range(node + 1, ready)))
        token = rows.token(node + 1, position + len(path), draws)
        tokens.append(token)
        node = next((child for child in children.get(node, ()) if draft.tokens[child] == token), -1)
        if node >= 0:
            path.append(node)
        if ended(token, node >= 0) or node < 0:
            return Verdict(tuple(path), tuple(tokens))


def verify_rejection(draft: Draft, rows: TargetRows, draws: Draws, position: int, ended: Ended = _never) -> Verdict:
    """Speculative sampling: accept x with probability ``min(1, p(x) / q(x))``, else go on with ``(p - q)+``.

    Leviathan et al. 2023, Algorithm 1; siblings are tried in order, each against the residual the one before left
    (SpecInfer, Miao et al. 2024, section 4.3). With ``draft.q`` None each node is a point mass: accepted with
    probability p(x), the residual is p without x.
    """
    children = _children(draft)
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        p = rows.dense(node + 1)
        at = position + len(path)
        taken = -1
        for trial, child in enumerate(children.get(node, ())):
            x = draft.tokens[child]
            if draft.q is None:
                q = torch.zeros_like(p)
                q[x] = 1.0
            else:
                q = draft.q[child].to(p)
            if draws.uniform(at, Draws.ACCEPT, trial) * float(q[x]) < float(p[x]):
                taken = child
                break
            residual = (p - q).clamp_min_(0.0)
            mass = float(residual.sum())
            if mass > 0.0:  # else p and q are the same but for rounding
                p = residual / mass
        token = draft.tokens[taken] if taken >= 0 else _inverse(p, draws.uniform(at, Draws.RESIDUAL))
        tokens.append(token)
        if taken >= 0:
            path.append(taken)
        if ended(token, taken >= 0) or taken < 0:
            return Verdict(tuple(path), tuple(tokens))
        node = taken


def agreement(draft: Draft, rows: TargetRows) -> tuple[float, ...]:
    """``1 - TV(p, q)`` at every drafted position, past a rejection too (MetaSD's block divergence counts them all).

    p is the target's softmax at the request's temperature, before filters; under greedy decoding at temperature 1, so
    that the signal stays graded. For a token-only drafter q is a point mass and the value is p(token).
    """
    at = [draft.parents[node] + 1 for node in range(len(draft))]
    if draft.q is None:
        return tuple(rows.probability(row, token) for row, token in zip(at, draft.tokens, strict=True))
    return tuple(
        1.0 - 0.5 * float((rows.soft(row) - draft.q[node].double().cpu()).abs().sum()) for node, row in enumerate(at)
    )


def _children(draft: Draft) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)
    return children


def _inverse(p: torch.Tensor, u: float) -> int:
    """The token at which the cumulative mass reaches u."""
    reached = p.cumsum(0)
    token = int((reached < u * float(reached[-1])).sum())
    return min(token, int(p.nonzero()[-1]))


VERIFIERS: dict[VerifyMode, Callable[[Draft, TargetRows, Draws, int, Ended], Verdict]] = {
    "invariant": verify_invariant,
    "rejection": verify_rejection,
}
