"""Pools of arms by name, for evaluators that play every arm of a pool alone."""

from __future__ import annotations

from collections.abc import Sequence

from evaluators.errors import EvaluatorError
from evaluators.prompts import Prompt
from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.models.checkpoints import preset_folder
from metasd_langchain.training.places import DOMAINS, FIVE_DOMAINS, OFA
from metasd_langchain.training.split import held_out

__all__ = ["POOLS", "arms_of", "unseen"]

_BUDGET = 8  # nodes of a head's tree, see DECISIONS 36
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


def unseen(prompts: Sequence[Prompt], arms: Sequence[str]) -> list[Prompt]:
    """The prompts that no trained drafter of the pool may have seen: all, or the evaluation's two thirds.

    Raises:
        EvaluatorError: none is left.
    """
    if not any(":" in arm for arm in arms):
        return list(prompts)
    kept = [prompt for prompt in prompts if held_out(prompt.name)]
    if not kept:
        raise EvaluatorError("every prompt is in the training third")
    return kept


def _heads(target: str) -> list[str]:
    """Arms of the finished heads of the preset."""
    folder = preset_folder(target, FIVE_DOMAINS)
    done = [domain for domain in (*DOMAINS, OFA) if (folder / domain / "config.json").is_file()]
    return [f"eagle:{FIVE_DOMAINS}/{domain}@{_BUDGET}" for domain in done]
