"""Tiny EAGLE heads: random ones of every kind, and one that has learned the answers to given prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts
from metasd_langchain.models.eagle_format import save_eagle
from metasd_langchain.models.load import Target

VOCAB = 512
KINDS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {"aux_layers": (1, 2, 3), "draft_vocab_size": 300},
    "eagle3 last state": {"aux_layers": (3,), "draft_vocab_size": 300, "qk_norm": True, "norm_before_residual": True},
    "eagle3 joined": {"aux_layers": (3,), "draft_vocab_size": 300, "join_residual": True},
    "eagle3 biases": {"aux_layers": (0, 3), "norm_before_fc": True, "attention_bias": True},
    "eagle": {"version": "eagle", "aux_layers": (3,), "draft_vocab_size": 300, "fc_bias": True},
}


def parts(target: Target) -> TargetParts:
    """What a head takes from a target."""
    return TargetParts.of(target.lm, target.name)


def random_head(target: Target, kind: str = "eagle3", seed: int = 0, **changes: Any) -> EagleHead:
    """An untrained head with weights large enough to have opinions."""
    config = EagleConfig.of_target(parts(target), **{**KINDS[kind], **changes})
    known = min(VOCAB, config.target_vocab_size)
    ids = None if config.full_vocabulary else torch.randperm(known, generator=_seeded(seed))[: config.draft_vocab_size]
    head = EagleHead.initialised(config, parts(target), None if ids is None else ids.sort().values, seed=seed)
    noise = _seeded(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.2)
    return head.eval()


def learned_head(target: Target, answers: Mapping[tuple[int, ...], tuple[int, ...]], steps: int = 150) -> EagleHead:
    """A head trained, in about a second, to know the greedy answers to these prompts by heart."""
    config = EagleConfig.of_target(parts(target), aux_layers=(2, 3), intermediate_size=128)
    head = EagleHead.initialised(config, parts(target))
    texts = [(*prompt, *answer) for prompt, answer in answers.items()]
    n = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (n - len(text))] for text in texts])
    hidden = torch.stack([F.pad(states(target, text, config), (0, 0, 0, n - len(text))) for text in texts])
    labels = torch.full((len(texts), n - 1), -100)
    for row, (prompt, answer) in enumerate(answers.items()):
        first = len(prompt) - 2  # index i of the features predicts token i + 2
        labels[row, max(0, first) : first + len(answer)] = torch.tensor(answer[max(0, -first) :])
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3)
    for _ in range(steps):
        features = head(tokens, hidden, 3)
        losses = []
        for step, feature in enumerate(features):
            wanted = labels.clone()
            wanted[:, :step] = -100
            losses.append(F.cross_entropy(head.logits(feature).flatten(0, 1), wanted.flatten(), ignore_index=-100))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return head.eval()


def states(target: Target, text: tuple[int, ...], config: EagleConfig) -> torch.Tensor:
    """The target's hidden states after each token of a text, ``[n, feature_size]``."""
    from metasd_langchain.models.lm import Feed, Slot

    found = target.lm.score([Feed(Slot(), text)], config.aux_layers).hidden
    return torch.cat([found[layer] for layer in config.aux_layers], -1).clone()


def saved(head: EagleHead, folder: Path, name: str = "tiny") -> str:
    """The folder of the written head, in float32."""
    return str(save_eagle(head, folder / name, dtype=torch.float32))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
