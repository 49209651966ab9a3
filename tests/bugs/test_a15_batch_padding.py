"""A15: in a batch only the longest prompt is answered right: the others are padded, and pads are read, shift positions
or push words out of the sliding window. The tokenizer's own padding settings, or a missing pad token, decide.
"""

from __future__ import annotations

from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.models import tiny_tokenizer
from tests.bugs import kit

COUNT = 10
LENGTHS = (1, 2, 7, 8, 9, 40, 3, 61, 16, 1)  # more rows than the engine runs at once, one twice; the window is 8


def text_of(length: int) -> str:
    """A prompt of so many ids: "<bos>" is one, and each of these characters one more."""
    text = "<bos>" if length == 1 else ("QWXYZ0123456789" * 9)[length : 2 * length - 1]
    assert len(kit.encode(text)) - (text == "<bos>") == length
    return text


PROMPTS = [text_of(length) for length in LENGTHS]


def engine_ids(prompt: str) -> tuple[int, ...]:
    return (2,) if prompt == "<bos>" else kit.encode(prompt)


def want(prompt: str, count: int = COUNT) -> tuple[int, ...]:
    return kit.ref_of(engine_ids(prompt), count)


WANT = [kit.decode(want(prompt)) for prompt in PROMPTS]
DRAFTERS = {"perfect": kit.perfect, "hostile": kit.hostile, "half": kit.half}


def side_by_side(llm: MetaSDLLM, prompts: list[str], **options: Any) -> list[tuple[int, ...]]:
    """Ids of answers that run in the same forwards."""
    started = [llm.steps(prompt, **options) for prompt in prompts]
    return [tuple(token for step in steps for token in step.tokens) for steps in started]


async def every_batch(llm: MetaSDLLM, prompts: list[str], **options: Any) -> list[list[str]]:
    """The answers by every way that takes several prompts."""
    results = [[row[0].text for row in llm.generate(prompts, **options).generations]]
    results.append([row[0].text for row in (await llm.agenerate(prompts, **options)).generations])
    for most in (None, 2):
        config: Any = {"max_concurrency": most}
        results.append(llm.batch(prompts, config, **options))
        results.append(await llm.abatch(prompts, config, **options))
    results.append([text for _, text in sorted(llm.batch_as_completed(prompts, **options))])
    return results


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("quality", DRAFTERS)
def test_rows_of_all_lengths_in_one_forward_give_the_ids_they_give_alone(quality: str, shape: str) -> None:
    for budget in kit.BLOCKS:
        llm = kit.scripted(DRAFTERS[quality](shape), budget, max_tokens=COUNT)
        assert side_by_side(llm, PROMPTS) == [want(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("drafters", [None, ["plain"], ["lookup@8", "recycling@4"]])
async def test_every_batch_equals_the_single_answers_in_order(drafters: Any) -> None:
    llm = kit.make(drafters=drafters, max_tokens=COUNT)
    assert [llm.invoke(prompt) for prompt in PROMPTS] == WANT
    assert all(result == WANT for result in await every_batch(llm, PROMPTS))
    backwards = PROMPTS[::-1]
    assert llm.batch(backwards) == WANT[::-1]


async def test_a_sampled_batch_equals_the_single_answers_of_the_same_seed() -> None:
    hot: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
    plain = kit.make(drafters=["plain"], max_tokens=COUNT)
    single = [plain.invoke(prompt, **hot) for prompt in PROMPTS]
    assert len(set(single)) > 5
    assert all(result == single for result in await every_batch(kit.make(max_tokens=COUNT), PROMPTS, **hot))
    ids = [kit.ids(plain, prompt, **hot) for prompt in PROMPTS]
    assert side_by_side(kit.make(max_tokens=COUNT), PROMPTS, **hot) == ids


async def test_rows_that_end_early_leave_the_others_as_they_are() -> None:
    stop = WANT[5][2:4]  # the row of 40 really says it
    llm = kit.make(max_tokens=COUNT, stop=[stop])
    cut = [text.split(stop, maxsplit=1)[0] for text in WANT]
    assert cut[5] != WANT[5]
    assert any(short == full for short, full in zip(cut, WANT, strict=True))  # and others do not
    assert all(result == cut for result in await every_batch(llm, PROMPTS))
    started = [llm.steps(prompt, max_tokens=n + 1, stop=["no such"]) for n, prompt in enumerate(PROMPTS)]
    for n, (prompt, steps) in enumerate(zip(PROMPTS, started, strict=True)):
        assert tuple(token for step in steps for token in step.tokens) == want(prompt)[: n + 1]


@pytest.mark.parametrize("kind", ["no pad token", "pad is eos", "left", "right", "padding switched on"])
async def test_no_padding_setting_of_the_tokenizer_matters(kind: str) -> None:
    tokenizer = tiny_tokenizer()
    if kind == "no pad token":
        tokenizer.pad_token = None
    elif kind == "pad is eos":
        tokenizer.pad_token = tokenizer.eos_token
    elif kind == "padding switched on":
        tokenizer.backend_tokenizer.enable_padding(length=64, pad_id=0)
        tokenizer.backend_tokenizer.enable_truncation(4)
    else:
        tokenizer.padding_side = tokenizer.truncation_side = kind
    llm = MetaSDLLM(model=(kit.MODEL, tokenizer), max_tokens=COUNT)
    assert llm.batch(PROMPTS) == WANT
    assert await llm.abatch(PROMPTS) == WANT
    assert side_by_side(llm, PROMPTS) == [want(prompt) for prompt in PROMPTS]
    usage = [row[0].generation_info["usage"]["prompt_tokens"] for row in llm.generate(PROMPTS).generations]
    assert usage == list(LENGTHS)
