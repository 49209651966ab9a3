"""Tiny random models with a real tokenizer, made in memory: everything an engine test needs, in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

__all__ = ["FAMILIES", "reference_tokens", "tiny_model", "tiny_tokenizer"]

VOCAB = 512
PAD, EOS, BOS, UNK = range(4)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # large, so that a random model has opinions
    "tie_word_embeddings": False,  # tied, Gemma shapes repeat one token for ever, and a law tested on that tests little
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]

# family -> (config class, model class, what differs from the common shape)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 8, "layer_types": _SLIDING}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 8, "sliding_window": 8, "layer_types": _SLIDING, "attn_logit_softcapping": 5.0},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 8}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"use_sliding_window": False}),
}


def tiny_model(family: str = "gemma3", seed: int = 0, **changes: Any) -> Any:
    """A random float32 model of a family with 512 tokens, three layers and, where it has one, a window of 8.

    Args:
        family: a key of FAMILIES.
        seed: of the weights; the global generator is left as it was.
        changes: over the config.
    """
    config_name, model_name, own = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_SHAPE, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, model_name)(config).eval()


def tiny_tokenizer() -> Any:
    """A tokenizer shaped like Gemma's: pieces with byte fallback, a BOS in front, spaces as U+2581; 512 ids."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = (
        specials + [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581"] + [chr(c) for c in range(33, 127)] + ["\n"]
    )
    merges: list[tuple[str, str]] = []
    for left in "tahieo\u2581snr":
        for right in "hneraosti dlu":
            if len(pieces) < VOCAB and right != " " and left + right not in pieces:
                merges.append((left, right))
                pieces.append(left + right)
    for left in ("\u2581t", "\u2581a", "th", "an", "he", "in"):
        for right in "enidghaot":
            if len(pieces) < VOCAB and left in pieces and left + right not in pieces:
                merges.append((left, right))
                pieces.append(left + right)
    pieces += [f"<unused{i}>" for i in range(VOCAB - len(pieces))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    raw = Tokenizer(tokenizer_models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "\u2581")
    raw.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def reference_tokens(model: Any, prompt: list[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """Greedy answer by one forward without cache a token: the slow truth everything else is compared with."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]
