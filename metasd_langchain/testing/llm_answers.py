"""What an LLM must answer: the same text however it is asked, cut where it was told to, with honest numbers."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseLLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField

from metasd_langchain.testing.llm_base import LLMTests
from metasd_langchain.testing.llm_watch import WAYS, Heard, ask, over, stop_in

__all__ = ["LLMAnswerTests"]

SHORT = 3  # tokens


def whole(text: str) -> str:
    """The text less half a character at its end, where a cap may cut one."""
    return text.rstrip("\ufffd")


class LLMAnswerTests(LLMTests):
    """Every way of asking."""

    @over(*WAYS)
    async def test_answer(self, llm: BaseLLM, way: str) -> None:
        """An answer is a text that is not empty and does not repeat the prompt, the same in every way of asking.
        Fix: let ``_generate``, ``_stream`` and their async forms consume one generator.
        """
        text = (await ask(way, llm, self.prompt)).text
        assert isinstance(text, str)
        assert text
        assert not text.startswith(self.prompt)
        if self.is_deterministic:
            assert text == llm.invoke(self.prompt)

    async def test_stream_is_text(self, llm: BaseLLM) -> None:
        """Streams give strings, and at least one.
        Fix: yield a last chunk with empty text when there is nothing to say.
        """
        pieces = [*llm.stream(self.prompt), *[piece async for piece in llm.astream(self.prompt)]]
        assert pieces
        assert all(isinstance(piece, str) for piece in pieces)

    def test_prompt_value(self, llm: BaseLLM) -> None:
        """A prompt value is as good as its text.
        Fix: leave ``invoke`` to LangChain.
        """
        self.needs("is_deterministic")
        assert llm.invoke(StringPromptValue(text=self.prompt)) == llm.invoke(self.prompt)

    def test_chain(self, llm: BaseLLM) -> None:
        """In a chain the answer is the same, invoked and streamed.
        Fix: look for state that a call leaves behind, and for ``stream`` other than ``invoke``.
        """
        self.needs("is_deterministic")
        chain = PromptTemplate.from_template("{text}") | llm | StrOutputParser()
        want = llm.invoke(self.prompt)
        assert chain.invoke({"text": self.prompt}) == want
        assert "".join(chain.stream({"text": self.prompt})) == want

    # -- several prompts ----------------------------------------------------------------------------------------------

    def _singles(self, llm: BaseLLM) -> tuple[list[Any], list[str]]:
        """Prompts with one of them twice, and their answers one by one, which must not all be the same."""
        self.needs("is_deterministic")
        prompts = [*self.prompts, self.prompts[0]]
        answers = [llm.invoke(prompt) for prompt in prompts]
        assert len(set(answers)) > 1, "choose prompts with different answers"
        return prompts, answers

    @pytest.mark.parametrize("concurrency", [None, 1, 2])
    async def test_batch(self, llm: BaseLLM, concurrency: int | None) -> None:
        """A batch gives what single calls give, in the order of the prompts, however many run at a time.
        Fix: pad on the left or not at all, and sort answers back into place.
        """
        prompts, want = self._singles(llm)
        assert llm.batch(prompts, {"max_concurrency": concurrency}) == want
        assert await llm.abatch(prompts, {"max_concurrency": concurrency}) == want

    async def test_batch_of_nothing(self, llm: BaseLLM) -> None:
        """No prompts give no answers.
        Fix: return early in ``batch``.
        """
        assert llm.batch([]) == []
        assert await llm.abatch([]) == []

    async def test_batch_as_completed(self, llm: BaseLLM) -> None:
        """Answers that come as they are ready carry the place of their prompt.
        Fix: leave ``batch_as_completed`` to LangChain.
        """
        prompts, want = self._singles(llm)
        assert dict(llm.batch_as_completed(prompts)) == dict(enumerate(want))
        found = {place: answer async for place, answer in llm.abatch_as_completed(prompts)}
        assert found == dict(enumerate(want))

    async def test_generate(self, llm: BaseLLM) -> None:
        """``generate`` gives a list of answers for each prompt, in order, each with a run of its own.
        Fix: return one inner list a prompt from ``_generate``.
        """
        prompts, want = self._singles(llm)
        for result in (llm.generate(prompts), await llm.agenerate(prompts)):
            assert [answers[0].text for answers in result.generations] == want
            assert len({run.run_id for run in result.run or ()}) == len(prompts)

    async def test_batch_return_exceptions(self, llm: BaseLLM) -> None:
        """One bad prompt of a batch fails alone.
        Fix: ``batch = Runnable.batch`` and ``abatch = Runnable.abatch``: LangChain's own spread one error over all.
        """
        bad = self._bad()
        prompts: list[Any] = [self.prompts[0], bad, self.prompts[1]]
        results: list[list[Any]] = [
            llm.batch(prompts, return_exceptions=True),
            await llm.abatch(prompts, return_exceptions=True),
            llm.batch(prompts, {"max_concurrency": 2}, return_exceptions=True),
        ]
        for answers in results:
            assert isinstance(answers[1], Exception), "bad_prompt is no bad prompt; None says that there is none"
            assert [type(answer) for answer in answers[::2]] == [str, str], f"the error spread: {answers}"
            if self.is_deterministic:
                assert answers[::2] == [llm.invoke(prompt) for prompt in prompts[::2]]

    async def test_batch_raises(self, llm: BaseLLM) -> None:
        """Without ``return_exceptions`` the error of a bad prompt is raised, and the next call works.
        Fix: check prompts before any work, and clean up in ``finally``.
        """
        prompts: list[Any] = [self.prompts[0], self._bad()]
        with pytest.raises(Exception):  # noqa: B017, PT011 - which one is the wrapper's own affair
            llm.batch(prompts)
        with pytest.raises(Exception):  # noqa: B017, PT011
            await llm.abatch(prompts)
        assert llm.invoke(self.prompt)

    def _bad(self) -> str:
        if self.bad_prompt is None:
            pytest.skip("no prompt is bad")
        return self.bad_prompt

    # -- stop and cap -------------------------------------------------------------------------------------------------

    @over(*WAYS)
    async def test_stop(self, llm: BaseLLM, way: str) -> None:
        """``stop`` of a call cuts the answer before it, wherever token borders lie; nothing of it leaks into a stream.
        Fix: search the text, not token ids, and hold back what may become a stop string.
        """
        self.needs("supports_stop", "is_deterministic")
        text = llm.invoke(self.prompt)
        stop = stop_in(text)
        want = text[: text.index(stop)]
        assert (await ask(way, llm, self.prompt, stop=[stop])).text == want
        assert (await ask(way, llm, self.prompt, stop=["\x00never", stop])).text == want

    @over(*WAYS)
    async def test_stop_of_the_object(self, llm: BaseLLM, way: str) -> None:
        """The field ``stop`` cuts too; ``stop`` of a call replaces it.
        Fix: use ``stop or self.stop``, in ``_stream`` also.
        """
        self.needs("supports_stop", "is_deterministic")
        text = llm.invoke(self.prompt)
        stop = stop_in(text)
        stopped = self.make(stop=[stop])
        assert (await ask(way, stopped, self.prompt)).text == text[: text.index(stop)]
        assert (await ask(way, stopped, self.prompt, stop=["\x00never"])).text == text

    def test_stop_bound(self, llm: BaseLLM) -> None:
        """``bind(stop=...)``, as agents do it, is ``stop`` of each call; no stop strings are no stop.
        Fix: take ``stop`` as LangChain hands it on, and treat [] and None alike.
        """
        self.needs("supports_stop", "is_deterministic")
        text = llm.invoke(self.prompt)
        stop = stop_in(text)
        want = text[: text.index(stop)]
        assert llm.bind(stop=[stop]).invoke(self.prompt) == want
        assert "".join(llm.bind(stop=[stop]).stream(self.prompt)) == want
        assert llm.bind(stop=[]).invoke(self.prompt) == text

    async def test_stop_in_a_batch(self, llm: BaseLLM) -> None:
        """Each answer of a batch is cut at its own first stop string.
        Fix: keep the state of the search by prompt.
        """
        self.needs("supports_stop")
        prompts, texts = self._singles(llm)
        stop = stop_in(texts[0])
        want = [text.split(stop, 1)[0] for text in texts]
        assert llm.batch(prompts, stop=[stop]) == want
        assert await llm.abatch(prompts, stop=[stop]) == want

    @over(*WAYS)
    async def test_max_tokens(self, llm: BaseLLM, way: str) -> None:
        """``max_tokens`` of a call wins over the object's, in every way of asking, and gives the answer's beginning.
        Fix: read the keyword arguments of ``_generate`` and ``_stream``.
        """
        self.needs("supports_max_tokens", "is_deterministic")
        text = llm.invoke(self.prompt)
        answer = await ask(way, llm, self.prompt, max_tokens=SHORT)
        assert answer.text != text
        assert text.startswith(whole(answer.text))
        if self.supports_usage:
            assert self.usage_of(answer.run.generation.generation_info)["completion_tokens"] == SHORT
        assert (await ask(way, self.make(max_tokens=SHORT), self.prompt)).text == answer.text
        assert (await ask(way, self.make(max_tokens=1), self.prompt, max_tokens=SHORT)).text == answer.text

    def test_configurable_fields(self, llm: BaseLLM) -> None:
        """A configurable field takes the place of the option, and the object stays as it was.
        Fix: let the constructor take every field by its name, and share what is loaded.
        """
        self.needs("supports_max_tokens", "is_deterministic")
        flexible = llm.configurable_fields(max_tokens=ConfigurableField(id="cap"))
        want = llm.invoke(self.prompt)
        short = flexible.invoke(self.prompt, {"configurable": {"cap": SHORT}})
        assert short == llm.invoke(self.prompt, max_tokens=SHORT) != want
        assert flexible.with_config(configurable={"cap": SHORT}).invoke(self.prompt) == short
        assert flexible.invoke(self.prompt) == want

    @over(*WAYS)
    async def test_seed(self, llm: BaseLLM, way: str) -> None:
        """A seed makes a drawn answer repeatable, in every way of asking; another seed gives another answer.
        Fix: draw from a generator that the call makes from its seed.
        """
        self.needs("supports_seed")
        drawn = [(await ask(way, llm, self.prompt, **self.sampling_params, seed=seed)).text for seed in (7, 8, 7)]
        assert drawn[0] == drawn[2] != drawn[1]
        assert drawn[0] == llm.invoke(self.prompt, **self.sampling_params, seed=7)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @over(*WAYS)
    async def test_finish_reason(self, llm: BaseLLM, way: str) -> None:
        """``finish_reason`` is "length" at the cap and "stop" at a stop string, once.
        Fix: put it into ``generation_info``, in a stream on the last chunk only, since chunks are added up.
        """
        self.needs("returns_finish_reason", "supports_max_tokens")
        cut = await ask(way, llm, self.prompt, max_tokens=SHORT)
        assert cut.run.generation.generation_info["finish_reason"] == "length"
        if self.supports_stop and self.is_deterministic:
            ended = await ask(way, llm, self.prompt, stop=[stop_in(llm.invoke(self.prompt))])
            assert ended.run.generation.generation_info["finish_reason"] == "stop"

    @over(*WAYS)
    async def test_usage(self, llm: BaseLLM, way: str) -> None:
        """Usage is in ``generation_info``, adds up, and is the same in every way of asking.
        Fix: put it there, in a stream on the last chunk only: numbers on two chunks are summed.
        """
        self.needs("supports_usage", "supports_max_tokens", "is_deterministic")
        usage = self.usage_of((await ask(way, llm, self.prompt, max_tokens=SHORT)).run.generation.generation_info)
        assert all(isinstance(usage[name], int) for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
        assert usage["prompt_tokens"] > 0
        assert usage["completion_tokens"] == SHORT
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    async def test_usage_of_a_batch(self, llm: BaseLLM) -> None:
        """Each prompt of a batch has its own usage, that of its single call.
        Fix: count by prompt, and leave padding out.
        """
        self.needs("supports_usage", "is_deterministic")
        heard, aheard = Heard(), Heard()
        llm.batch(list(self.prompts), {"callbacks": [heard]})
        await llm.abatch(list(self.prompts), {"callbacks": [aheard]})
        for prompt in self.prompts:
            want = self.usage_of((await ask("invoke", llm, prompt)).run.generation.generation_info)
            for runs in (heard.by_prompt(), aheard.by_prompt()):
                assert self.usage_of(runs[prompt].generation.generation_info) == want

    def test_usage_of_a_result(self, llm: BaseLLM) -> None:
        """``llm_output["token_usage"]`` is the sum over the prompts.
        Fix: sum it in ``_generate``.
        """
        self.needs("supports_usage")
        result = llm.generate(list(self.prompts))
        single = [self.usage_of(answers[0].generation_info or {}) for answers in result.generations]
        total = (result.llm_output or {})["token_usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert total[name] == sum(usage[name] for usage in single)

    def test_get_num_tokens(self, llm: BaseLLM) -> None:
        """``get_num_tokens`` counts what a call is charged for.
        Fix: override ``get_token_ids`` with the model's own tokenizer, special tokens included.
        """
        self.needs("supports_usage", "counts_tokens")
        for prompt, answers in zip(self.prompts, llm.generate(list(self.prompts)).generations, strict=True):
            assert llm.get_num_tokens(prompt) == self.usage_of(answers[0].generation_info or {})["prompt_tokens"]
