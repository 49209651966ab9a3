"""What a user of the evaluators can put right."""

from __future__ import annotations

__all__ = ["EvaluatorError"]


class EvaluatorError(Exception):
    """Printed without a traceback; the command ends with status 2."""
