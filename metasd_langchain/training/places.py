"""Names of domains and presets; where trained drafters lie is said in ``models.checkpoints``."""

from __future__ import annotations

__all__ = ["DOMAINS", "FIVE_DOMAINS", "OFA", "PRESETS"]

DOMAINS = ("code", "translation", "summarization", "qa", "math")
OFA = "ofa"  # one size fits all: trained on the five together
FIVE_DOMAINS = "five-domains"
PRESETS = (FIVE_DOMAINS,)
