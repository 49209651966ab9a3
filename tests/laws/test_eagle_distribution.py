"""Rejection mode with a head that draws from its own q: the joint of the committed tokens is exactly the target's.

The whole engine plays, on a target of eight tokens; the exact joint comes from cache-free forwards of the unwrapped
model. The bandit switches between the head and plain, so that states are caught up too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain.assemble import make_pool
from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.engine.loop import Engine
from metasd_langchain.models.load import load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import Request, Sampling
from tests.eagles import random_head, saved
from tests.laws.exact import chi_square, processed

VOCAB, LENGTH, N = 8, 3, 1500
PROMPT = (4, 5, 6)
SAMPLING = Sampling(temperature=1.1, top_k=6)


def joint(model: Any) -> dict[tuple[int, ...], float]:
    """Probability of every answer of three tokens."""
    texts = [(*PROMPT, *tail) for n in range(LENGTH) for tail in itertools.product(range(VOCAB), repeat=n)]
    after: dict[tuple[int, ...], Any] = {}
    for text in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([text]), use_cache=False).logits[0, -1].double().numpy()
        after[text] = processed(logits, SAMPLING)
    answers = itertools.product(range(VOCAB), repeat=LENGTH)
    return {
        answer: float(np.prod([after[(*PROMPT, *answer[:n])][answer[n]] for n in range(LENGTH)])) for answer in answers
    }


@pytest.mark.parametrize("arms", [("head",), ("head", "plain")])
def test_the_joint_of_three_tokens_is_the_targets(tmp_path: Path, arms: tuple[str, ...]) -> None:
    model = tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.4)
    engine = Engine(load_target((model, tiny_tokenizer())), max_batch=32)
    path = saved(random_head(engine.target, aux_layers=(0, 1), draft_vocab_size=VOCAB), tmp_path)
    pool = make_pool([(Eagle(path, stop=0.0), 2) if arm == "head" else arm for arm in arms], "random", memory="request")
    try:
        counts: Counter[tuple[int, ...]] = Counter()
        for batch in range(N // 30):
            runs = [
                engine.generate(
                    Request(
                        PROMPT,
                        Sampling(SAMPLING.temperature, top_k=SAMPLING.top_k, seed=30 * batch + row),
                        max_tokens=LENGTH,
                        verify="rejection",
                    ),
                    pool,
                )
                for row in range(30)
            ]
            counts.update(tuple(token for step in run for token in step.tokens) for run in runs)
    finally:
        engine.close()
    exact = joint(model)
    observed = np.array([counts[answer] for answer in exact], dtype=float)
    assert observed.sum() == N
    assert chi_square(observed, N * np.array(list(exact.values()))) > 1e-3
