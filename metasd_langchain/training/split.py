"""Which rows of the development prompts drafters may be trained on: one rule for training and for evaluation.

A trained drafter measured on its own training prompts would look better than it is. So a third of the rows, by a hash
of their id, is for training, and no evaluation of a trained drafter may use it; the others are never trained on.
"""

from __future__ import annotations

import hashlib

__all__ = ["RULE", "held_out", "in_training_third"]

RULE = "blake2b(row id, 8 bytes, big-endian) mod 3 == 0 is for training"


def in_training_third(row: str | int) -> bool:
    """Whether a row is for training.

    Args:
        row: its id as the file gives it: ``question_id`` of Spec-Bench, ``task_id`` of HumanEval.
    """
    digest = hashlib.blake2b(str(row).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 3 == 0


def held_out(row: str | int) -> bool:
    """Whether a trained drafter may be evaluated on a row."""
    return not in_training_third(row)
