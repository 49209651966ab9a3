"""The product on a real model, end to end. Fails, never skips, when the embedded model is missing."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import torch

from metasd_langchain import MetaSDLLM
from metasd_langchain.models.embedded import embedded_folder, half_weights, quick_form, read_tokenizer

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(600)]

DOCUMENT = files("metasd_langchain.cli").joinpath("document.md").read_text()
PROMPTS = {
    "question": "Question: Why is the sky blue?\nAnswer:",
    "code": "def fib(n):\n    a, b = 0, 1\n    while n:\n        a, b, n = b, a + b, n - 1\n    return a\n\n\ndef",
    "past the window": DOCUMENT[:4500] + "\n\nSummary:",  # more than 512 tokens, on 15 of 18 layers
}
COUNT = 24


@pytest.fixture(scope="module")
def hf() -> tuple[Any, Any]:
    """transformers' own model, loaded apart from ours."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_folder(print)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def llm() -> MetaSDLLM:
    return MetaSDLLM(dtype="float32", max_tokens=COUNT)


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_float32_ids_are_those_of_transformers_generate(hf: tuple[Any, Any], llm: MetaSDLLM, name: str) -> None:
    model, tokenizer = hf
    encoded = tokenizer(PROMPTS[name], return_tensors="pt")
    if name == "past the window":
        assert encoded.input_ids.shape[1] > 600
    with torch.inference_mode():
        want = model.generate(**encoded, max_new_tokens=COUNT, do_sample=False)[
            0, encoded.input_ids.shape[1] :
        ].tolist()
    steps = list(llm.steps(PROMPTS[name]))
    assert [token for step in steps for token in step.tokens] == want
    assert llm.invoke(PROMPTS[name]) == tokenizer.decode(want, skip_special_tokens=True)


TEXTS = (
    *PROMPTS.values(),
    "",
    " ",
    "  two  spaces,   three\ttabs\t\tand\r\nlines\n\n\n\nend ",
    "<bos>special <eos> <start_of_turn>user\n<end_of_turn> <unused42> <mask> [multimodal] <0x41>",
    "Größe, naïve, Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย, 한국어, 日本語, 你好",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and combining e\u0301 a\u0328\u0301, zero width\u200bjoin\u200d, rtl \u202e",
    "\U0001f9ff\U00012345\U000e0041 \x00\x01\x7f\ufffd\ufeff▁▁ ▁",
    "1234567890 3.14159 0xdeadbeef 1e-10 $1,000,000.00 https://example.org/a?b=c&d=%20#e",
    'def f(x): return {"a": [x**2 for x in range(10)], **kwargs}  # äöü\n\tif True:\n\t\tpass\n',
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft " + "a" * 300 + "ab" * 200,
)


def test_the_quick_tokenizer_is_that_of_transformers(hf: tuple[Any, Any]) -> None:
    """transformers builds its own from the same file's vocabulary and merges, by other code."""
    folder = embedded_folder(print)
    quick, theirs = read_tokenizer(folder), hf[1]
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert quick(text)["input_ids"] == ids
        for skip in (False, True):
            assert quick.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    every = range(len(theirs))
    assert len(quick) == len(theirs)
    assert quick.convert_ids_to_tokens(every) == theirs.convert_ids_to_tokens(every)
    assert set(quick.all_special_ids) <= set(theirs.all_special_ids)
    plain = quick.backend_tokenizer.to_str(pretty=True)  # as transformers saves it
    assert quick_form(plain) == (folder / "tokenizer.json").read_text()


def test_bfloat16_weights_are_the_rounded_ones() -> None:
    from transformers import AutoModelForCausalLM

    folder = embedded_folder(print)
    half = half_weights(folder, print)
    assert half != folder
    want, got = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16, local_files_only=True).state_dict()
        for place in (folder, half)
    )
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_sampled_ids_do_not_depend_on_who_drafts(llm: MetaSDLLM) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    plain = MetaSDLLM(dtype="float32", max_tokens=COUNT, drafters=["plain"])
    for prompt in (PROMPTS["question"], PROMPTS["code"]):
        want = [token for step in plain.steps(prompt, **options) for token in step.tokens]
        assert [token for step in llm.steps(prompt, **options) for token in step.tokens] == want
        assert "".join(llm.stream(prompt, **options)) == plain.invoke(prompt, **options)


def test_in_bfloat16_drafts_are_accepted_and_the_text_is_sensible() -> None:
    llm = MetaSDLLM(max_tokens=40)
    steps = list(llm.steps("Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"))
    assert "".join(step.text for step in steps).startswith(" 13, 14, 15, 16")
    summary = steps[-1].summary
    assert summary is not None
    assert len(summary.rounds) < 30  # 40 tokens in fewer forwards
