"""What a model's own generation config says about choosing tokens, in our names."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["generation_defaults"]

logger = logging.getLogger("metasd_langchain")
# its name -> ours. Whether and how hot to sample stays the caller's: a temperature of 0 is greedy for every model.
_NAMES = {
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_new_tokens": "min_tokens",
}
# change answers in transformers, and nothing here does the same
_UNSERVED = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "num_beams",
    "penalty_alpha",
    "sequence_bias",
    "stop_strings",
    "typical_p",
)


def generation_defaults(model: Any) -> dict[str, Any]:
    """Options the model's authors set for it, under our field names; read once, the config object is not changed.

    Args:
        model: a transformers model.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    said = config.to_diff_dict()
    unserved = [name for name in _UNSERVED if said.get(name) is not None]
    if unserved:
        logger.warning("the model's generation config sets %s, which we do not apply", ", ".join(unserved))
    defaults = {ours: said[name] for name, ours in _NAMES.items() if said.get(name) is not None}
    banned = said.get("suppress_tokens")
    if banned:
        defaults["logit_bias"] = {int(token): -1e4 for token in banned}
    return defaults
