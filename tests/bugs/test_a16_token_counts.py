"""A16: tokens are counted with another tokenizer (GPT-2's, downloaded when it is first asked for) or without what the
prompt is given on its way to the model, so a text that "fits" does not, and prices and trimming are wrong.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.language_models import base
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.prompt_values import ChatPromptValue

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import PerfectDrafter
from metasd_langchain.testing.models import tiny_tokenizer
from metasd_langchain.values import Request
from tests.bugs import kit

TEXTS = [
    "a",
    " a ",
    "a ,  b \n",
    "the cat sat on the mat",
    "\n\n  x",
    "<bos>",
    "<bos>the cat",
    "<bos><bos>the cat",
    "<eos>",
    "a<eos>b<pad>c",
    "\U0001fae9 é 漢字",
    "x" * 200,
    "0 1 2 " * 30,
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain's own way of counting is an error."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("counted with another tokenizer")

    monkeypatch.setattr(base, "get_tokenizer", fail)
    monkeypatch.setattr(base, "_get_token_ids_default_method", fail)


class Witness(PerfectDrafter):
    """Drafts nothing and remembers the ids the engine was given."""

    def __init__(self) -> None:
        super().__init__({}, name="witness")
        self.prompts: list[tuple[int, ...]] = []

    def open(self, request: Request) -> Any:
        self.prompts.append(request.prompt)
        return super().open(request)


def usage_of(result: Any) -> list[dict[str, int]]:
    return [row[0].generation_info["usage"] for row in result.generations]


WITNESS = Witness()
LLM = kit.scripted(WITNESS, 4, max_tokens=1)


def check(text: str) -> None:
    count = LLM.get_num_tokens(text)
    usage = usage_of(LLM.generate([text]))[0]
    assert usage["prompt_tokens"] == count == len(WITNESS.prompts[-1])
    assert tuple(LLM.get_token_ids(text)) == WITNESS.prompts[-1]
    assert WITNESS.prompts[-1].count(2) == 1 or "<bos>" in text


@pytest.mark.parametrize("text", TEXTS)
async def test_the_count_is_the_prompts_usage_in_every_mode(text: str) -> None:
    check(text)
    answers = await kit.every_way(LLM, text)
    assert {name: answer.usage["prompt_tokens"] for name, answer in answers.items()} == dict.fromkeys(
        answers, LLM.get_num_tokens(text)
    )


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
@settings(max_examples=60)
def test_the_count_of_any_text_is_its_prompts_usage(text: str) -> None:
    check(text)


@pytest.mark.parametrize("drafters", [None, ["plain"], ["lookup@8"], ["recycling_tree@12"]])
@pytest.mark.parametrize("count", [1, 7])
def test_the_usage_adds_up_over_a_batch_whoever_drafts(drafters: Any, count: int) -> None:
    llm = kit.make(drafters=drafters, max_tokens=count)
    result = llm.generate(TEXTS)
    counts = [llm.get_num_tokens(text) for text in TEXTS]
    rows = usage_of(result)
    assert [usage["prompt_tokens"] for usage in rows] == counts
    assert all(1 <= usage["completion_tokens"] <= count for usage in rows)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in rows)
    assert result.llm_output["token_usage"] == {name: sum(usage[name] for usage in rows) for name in rows[0]}


def test_the_answers_tokens_are_counted_as_committed() -> None:
    for budget, shape in itertools.product(kit.BLOCKS, ("chain", "tree")):
        llm = kit.scripted(kit.half(shape), budget, max_tokens=13)
        usage = usage_of(llm.generate([kit.PROMPT]))[0]
        assert usage == {
            "prompt_tokens": llm.get_num_tokens(kit.PROMPT),
            "completion_tokens": len(kit.ref(count=13)),
            "total_tokens": len(kit.encode(kit.PROMPT)) + len(kit.ref(count=13)),
        }


def test_a_prompt_of_the_largest_count_that_fits_is_answered_and_the_next_is_not() -> None:
    text = "x" * 510
    assert LLM.get_num_tokens(text) == 511
    assert usage_of(LLM.generate([text]))[0]["prompt_tokens"] == 511
    with pytest.raises(ValueError, match="512"):
        LLM.generate([text + "x"])


def bare() -> MetaSDLLM:
    """The tiny model as a family without BOS."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    return MetaSDLLM(model=(kit.MODEL, tokenizer), max_tokens=1)


def test_counting_asks_the_objects_own_tokenizer_and_needs_no_call_before() -> None:
    fresh = bare()
    assert fresh.get_num_tokens("QWX") == 3
    assert fresh.get_num_tokens("") == 0
    assert usage_of(fresh.generate(["QWX"]))[0]["prompt_tokens"] == 3
    assert kit.make().get_num_tokens("") == 1  # the BOS
    assert kit.make(custom_get_token_ids=lambda text: [7] * len(text)).get_num_tokens("four") == 4


@pytest.mark.parametrize("llm", [LLM, bare()], ids=["bos", "no bos"])
def test_messages_are_counted_as_the_prompt_they_become(llm: MetaSDLLM) -> None:
    messages = [SystemMessage("Be QUICK."), HumanMessage("<bos>the cat"), AIMessage("sat"), HumanMessage("on the mat?")]
    for several in (messages[1:2], messages[:2], messages):
        usage = usage_of(llm.generate_prompt([ChatPromptValue(messages=several)]))[0]
        assert llm.get_num_tokens_from_messages(several) == usage["prompt_tokens"]
    limit = llm.get_num_tokens_from_messages(messages[2:])
    assert trim_messages(messages, max_tokens=limit, token_counter=llm, strategy="last") == messages[2:]
