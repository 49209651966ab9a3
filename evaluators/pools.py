"""Pools of arms by name, for evaluators that play every arm of a pool alone."""

from __future__ import annotations

from evaluators.errors import EvaluatorError
from metasd_langchain.assemble import DEFAULT_ARMS

__all__ = ["POOLS", "arms_of"]

POOLS = ("auto", "training-free", "full")


def arms_of(pool: str, target: str) -> list[str]:
    """Arms of a pool.

    Args:
        pool: "training-free": the default arms; "full": with the trained heads of the user's cache too; "auto": "full"
            where there are heads, else "training-free".
        target: name of the model that the heads were trained for.

    Raises:
        EvaluatorError: "full", and no heads are there.
    """
    heads = [] if pool == "training-free" else _heads(target)
    if pool == "full" and not heads:
        raise EvaluatorError(f"no trained heads for {target}; make them with `metasd train preset five-domains`")
    return [*DEFAULT_ARMS, *heads]


def _heads(target: str) -> list[str]:
    return []
