"""B14, heads: a prompt longer than the drafter's window crashes it, or nothing is accepted ever after. It reads the
last `window` states, whatever came before, and guesses as well behind a long prompt as behind a short one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.models.load import load_target
from tests.bugs import kit
from tests.eagles import learned_head, random_head, saved

COUNT, WINDOW = 16, 32
LONG = tuple(4 + 7 * place % 500 for place in range(60))
SHORT = LONG[-10:]


def ids(steps: Any) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.tokens)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("prefill", [7, 16, 1024])
def test_a_prompt_of_twice_the_window_gives_the_reference_ids(tmp_path: Path, shape: str, prefill: int) -> None:
    from metasd_langchain.assemble import make_pool
    from metasd_langchain.engine.loop import Engine
    from metasd_langchain.values import Request

    target = load_target((kit.MODEL, kit.TOKENIZER))
    path = saved(random_head(target), tmp_path)
    engine = Engine(target, prefill_tokens=prefill)
    try:
        pool = make_pool([(Eagle(path, shape=shape, window=WINDOW, stop=0.0), 4)], "fixed")
        steps = list(engine.generate(Request(LONG, max_tokens=COUNT), pool))
        assert ids(steps) == kit.ref_of(LONG, COUNT, frozenset())
        assert all(step.summary is None or max(r.drafted for r in step.summary.rounds) == 4 for step in steps)
    finally:
        engine.close()


def test_drafts_are_accepted_behind_a_long_prompt(tmp_path: Path) -> None:
    from metasd_langchain.assemble import make_pool
    from metasd_langchain.engine.loop import Engine
    from metasd_langchain.values import Request

    target = load_target((kit.MODEL, kit.TOKENIZER))
    answers = {prompt: kit.ref_of(prompt, COUNT, frozenset()) for prompt in (LONG, SHORT)}
    path = saved(learned_head(target, answers), tmp_path)
    engine = Engine(target)
    try:
        pool = make_pool([(Eagle(path, window=WINDOW), 4)], "fixed")
        for prompt, want in answers.items():
            steps = list(engine.generate(Request(prompt, max_tokens=COUNT), pool))
            assert ids(steps) == want
            assert sum(step.accepted for step in steps) >= len(steps)
    finally:
        engine.close()
