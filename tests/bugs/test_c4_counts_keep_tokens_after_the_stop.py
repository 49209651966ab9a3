"""C4: usage, log-probabilities, callbacks or spans count tokens that lie behind the end of the answer.
All of them agree on the tokens kept (the one that completes a stop string counts), and block lengths do not show.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit


def talker() -> Any:
    """A model whose answers vary (tied to its embeddings it says one token for ever) and are printable."""
    model = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)
    model.lm_head.weight.data[:260] = 0
    return model


MODEL = talker()
COUNT = 20
ENDER = talker()


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT))


ANSWER = truth(kit.encode(kit.PROMPT))
TEXT = kit.decode(ANSWER)
ASKED = len(kit.encode(kit.PROMPT))
ENDER.generation_config.eos_token_id = [1, ANSWER[6]]
PAIR, ENDING = (MODEL, kit.TOKENIZER), (ENDER, kit.TOKENIZER)
STOP = TEXT[8:11]
KEPT = next(n for n in range(COUNT) if STOP in kit.decode(ANSWER[:n]))
# How an answer may end: options, its text, its tokens, its finish reason.
ENDS: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "stop": ({"model": PAIR, "stop": [STOP]}, TEXT[: TEXT.index(STOP)], KEPT, "stop"),
    "eos": ({"model": ENDING}, kit.decode(ANSWER[:6]), 7, "stop"),
    "cap": ({"model": PAIR, "max_tokens": 11}, kit.decode(ANSWER[:11]), 11, "length"),
}
DRAFTERS: dict[str, Any] = {
    **{
        f"{quality.__name__} {shape}@{block}": [(quality(shape, truth), block)]
        for quality in (kit.perfect, kit.half)
        for shape in ("chain", "tree")
        for block in kit.BLOCKS
    },
    "hostile@8": [(kit.hostile("chain", truth), 8)],
    **{name: [name] for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12", "plain")},
    "default pool": None,
}


def make(end: str, name: str, **options: Any) -> MetaSDLLM:
    return kit.make(**{"max_tokens": COUNT, **ENDS[end][0], "drafters": DRAFTERS[name], **options})


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_ids_usage_rounds_callbacks_and_span_agree(name: str, end: str, spans: Any) -> None:
    _, text, count, finish = ENDS[end]
    for call in ("invoke", "stream", "steps"):
        llm, heard = make(end, name), kit.Heard()
        spans.clear()
        if call == "steps":
            steps = list(llm.steps(kit.PROMPT))
            summary = steps[-1].summary
            assert summary is not None
            assert tuple(token for step in steps for token in step.tokens) == ANSWER[:count]
            assert "".join(step.text for step in steps) == text
            assert (summary.completion_tokens, summary.finish_reason) == (count, finish)
            assert sum(record.committed for record in summary.rounds) == count
            assert sum(step.accepted for step in steps) == sum(record.accepted for record in summary.rounds) <= count
        else:
            config: Any = {"callbacks": [heard]}
            assert (
                "".join([llm.invoke(kit.PROMPT, config)] if call == "invoke" else llm.stream(kit.PROMPT, config))
                == text
            )
            info = heard.responses[0].generations[0][0].generation_info
            assert info["usage"] == {
                "prompt_tokens": ASKED,
                "completion_tokens": count,
                "total_tokens": ASKED + count,
            }
            assert info["finish_reason"] == finish
            assert info["metasd"]["accepted"] <= count
            if call == "stream":
                assert "".join(heard.tokens) == text
        (span,) = spans.get_finished_spans()
        assert span.attributes["gen_ai.usage.output_tokens"] == count
        assert span.attributes["gen_ai.usage.input_tokens"] == ASKED
        assert span.attributes["gen_ai.response.finish_reasons"] == (finish,)
        assert span.attributes["metasd.tokens.accepted"] <= count


@pytest.mark.parametrize("end", ENDS)
def test_a_total_over_several_prompts_counts_what_each_kept(end: str) -> None:
    for block in (1, 16):
        result = make(end, f"perfect chain@{block}").generate([kit.PROMPT] * 3)
        assert result.llm_output is not None
        assert result.llm_output["token_usage"]["completion_tokens"] == 3 * ENDS[end][2]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("block", kit.BLOCKS)
def test_log_probabilities_are_those_of_the_kept_tokens(block: int, end: str) -> None:
    llm = make(end, f"perfect chain@{block}", logprobs=2)
    kept = [one for step in llm.steps(kit.PROMPT) for one in step.logprobs]
    assert tuple(one.token for one in kept) == ANSWER[: ENDS[end][2]]
