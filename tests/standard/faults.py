"""Wrappers with one fault each, beside the tests of the standard suite that must fail on them: objects and answers."""

from __future__ import annotations

import inspect
import threading
import time
from itertools import product
from typing import Any, NamedTuple

from langchain_core.language_models import BaseLLM
from langchain_core.outputs import GenerationChunk
from pydantic import Field, PrivateAttr

from metasd_langchain.testing.llm_standard import LLMIntegrationTests, LLMUnitTests
from tests.standard.fakes import Words


class Whole(LLMUnitTests, LLMIntegrationTests):
    """Every test."""


class Fault(NamedTuple):
    wrapper: type[BaseLLM]
    test: str
    arguments: dict[str, Any]


FAULTS: list[Fault] = []


def fails(*tests: str, **arguments: Any):
    """Note which tests a faulty wrapper must fail, and with which arguments; those of a tuple one by one."""

    def note(wrapper):
        for test in tests:
            wanted = inspect.signature(getattr(Whole, test)).parameters
            mine = {name: value for name, value in arguments.items() if name in wanted}
            rows = [value if isinstance(value, tuple) else (value,) for value in mine.values()]
            FAULTS.extend(Fault(wrapper, test, dict(zip(mine, row, strict=True))) for row in product(*rows))
        return wrapper

    return note


# -- objects ----------------------------------------------------------------------------------------------------------


@fails("test_init")
class DropsRetries(Words):
    max_retries: int = 7

    def __init__(self, max_retries=None, **options):
        super().__init__(**options)


@fails("test_init_streaming", "test_streaming_flag", way="invoke")
class DropsStreaming(Words):
    def __init__(self, streaming=False, **options):
        super().__init__(**options)


@fails("test_rate_limiter_field", "test_rate_limiter", "test_rate_limiter_and_cache", way="invoke")
class DropsLimiter(Words):
    def __init__(self, rate_limiter=None, **options):
        super().__init__(**options)


@fails("test_configurable_fields", "test_max_tokens", way="ainvoke")
class DropsCap(Words):
    def __init__(self, max_tokens=None, **options):
        super().__init__(max_tokens=16, **options)


@fails("test_init_time")
class LoadsAtOnce(Words):
    def __init__(self, **options):
        time.sleep(0.1)
        super().__init__(**options)


@fails("test_api_key_is_not_shown")
class ShowsItsKey(Words):
    api_key: str | None = None

    @property
    def lc_secrets(self):
        return {}


@fails("test_llm_type")
class Nameless(Words):
    @property
    def _llm_type(self):
        return ""


@fails("test_identifying_params", "test_cache_of_two_objects", name="stop", value=["standard"])
class KeyWithoutStop(Words):
    @property
    def _identifying_params(self):
        return {name: value for name, value in super()._identifying_params.items() if name != "stop"}

    def generate(self, prompts, stop=None, callbacks=None, **kwargs):
        return BaseLLM.generate(self, prompts, stop, callbacks, **kwargs)


@fails("test_serdes")
class ForgetsCapInJson(Words):
    max_tokens: int = Field(default=100, exclude=True)


@fails("test_ls_params")
class TracesNoStop(Words):
    def _get_ls_params(self, stop=None, **kwargs):
        return BaseLLM._get_ls_params(self, stop=stop, **kwargs)


@fails("test_ls_params_of_a_call")
@fails("test_traced_options", way="stream")
class TracesTheObject(Words):
    def _get_ls_params(self, stop=None, **kwargs):
        return {**super()._get_ls_params(stop), "ls_max_tokens": 16}


@fails("test_custom_token_count", "test_get_num_tokens")
class CountsCharacters(Words):
    def get_token_ids(self, text):
        return [ord(character) for character in text]


@fails("test_pickle")
class HoldsALock(Words):
    _lock: Any = PrivateAttr(default_factory=threading.Lock)


@fails("test_deepcopy")
@fails("test_copied_answers", copied="deepcopy")
@fails("test_copied_answers", copied="copy")
class IsItsOwnCopy(Words):
    def __copy__(self):
        return self

    def __deepcopy__(self, memo=None):
        return self


@fails("test_pickled_answers")
class RevivesAsAnotherModel(Words):
    def __setstate__(self, state):
        super().__setstate__({**state, "__dict__": {**state["__dict__"], "model": "another"}})


# -- answers ----------------------------------------------------------------------------------------------------------


@fails("test_answer", way="invoke")
class Echoes(Words):
    def words(self, prompt):
        yield prompt
        yield from super().words(prompt)


@fails("test_answer", way="stream")
@fails("test_chain")
class StreamsAnotherText(Words):
    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        for chunk in super()._stream(prompt, stop, run_manager):
            yield GenerationChunk(text=chunk.text.upper(), generation_info=chunk.generation_info)

    def _generate(self, prompts, stop=None, run_manager=None, **kwargs):
        return self.bound(kwargs)[0].result([list(self.bound(kwargs)[0].pieces(prompt, stop)) for prompt in prompts])


@fails("test_answer", way="astream")
@fails("test_stream_events")
class StreamsOnePieceTwice(Words):
    async def astream(self, input, config=None, **kwargs):
        async for piece in super().astream(input, config, **kwargs):
            yield piece
            yield piece


@fails("test_stream_is_text")
class StreamsChunks(Words):
    def stream(self, input, config=None, **kwargs):
        yield from (GenerationChunk(text=text) for text in super().stream(input, config, **kwargs))


@fails("test_prompt_value")
class ReadsPromptValuesAsTheyPrint(Words):
    def invoke(self, input, config=None, **kwargs):
        return super().invoke(str(input), config, **kwargs)


@fails("test_batch", concurrency=None)
@fails("test_batch", concurrency=2)
@fails("test_stop_in_a_batch", "test_cache_in_a_batch", "test_batch_callbacks", streaming=False)
class BatchesInAnotherOrder(Words):
    def batch(self, inputs, config=None, **kwargs):
        return super().batch(inputs, config, **kwargs)[::-1]


@fails("test_batch_of_nothing")
class WantsPrompts(Words):
    def batch(self, inputs, config=None, **kwargs):
        assert inputs, "no prompts"
        return super().batch(inputs, config, **kwargs)


@fails("test_batch_as_completed")
class CountsPlacesFromOne(Words):
    def batch_as_completed(self, inputs, config=None, **kwargs):
        for place, text in super().batch_as_completed(inputs, config, **kwargs):
            yield place + 1, text


@fails("test_generate")
class SortsPrompts(Words):
    def _generate(self, prompts, stop=None, run_manager=None, **kwargs):
        return super()._generate(sorted(prompts), stop, run_manager, **kwargs)


@fails("test_batch_return_exceptions")
class OneErrorForAll(Words):
    batch = BaseLLM.batch


@fails("test_batch_raises")
class SwallowsErrorsOfABatch(Words):
    def batch(self, inputs, config=None, *, return_exceptions=False, **kwargs):
        return super().batch(inputs, config, return_exceptions=True, **kwargs)


@fails("test_stop", "test_stop_of_the_object", "test_finish_reason", way=("invoke", "astream", "abatch"))
@fails("test_stop_bound", "test_stop_in_a_batch")
class IgnoresStop(Words):
    def pieces(self, prompt, stop):
        return self.model_copy(update={"stop": None}).honest_pieces(prompt)

    def honest_pieces(self, prompt):
        return super().pieces(prompt, None)


@fails("test_stop_of_the_object", way="batch")
class AddsStopToItsOwn(Words):
    def pieces(self, prompt, stop):
        return super().pieces(prompt, [*(stop or ()), *(self.stop or ())])


@fails("test_stop", way="stream")
class LeaksStopIntoStreams(Words):
    def pieces(self, prompt, stop):
        for chunk in super().pieces(prompt, None):
            yield chunk
            if stop and stop[-1] in chunk.text:
                return


@fails("test_max_tokens", "test_cache_and_options_of_a_call", way=("invoke", "abatch"))
class IgnoresOptionsOfACall(Words):
    def bound(self, kwargs):
        return self, {}


@fails("test_seed", way="invoke")
class IgnoresSeed(Words):
    def words(self, prompt):
        return self.model_copy(update={"seed": None}).honest_words(prompt)

    def honest_words(self, prompt):
        return super().words(prompt)


@fails("test_finish_reason", "test_usage", way="stream")
@fails("test_usage_of_a_batch", "test_usage_of_a_result")
class FactsOnEveryChunk(Words):
    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        for chunk in super()._stream(prompt, stop, run_manager):
            yield GenerationChunk(text=chunk.text, generation_info=self.facts(prompt, 1, "stop"))

    def result(self, answers):
        result = super().result(answers)
        result.llm_output = {"token_usage": result.generations[0][0].generation_info["usage"]}
        return result


@fails("test_usage_of_a_batch")
class ChargesForPadding(Words):
    batch, abatch = BaseLLM.batch, BaseLLM.abatch

    def _generate(self, prompts, stop=None, run_manager=None, **kwargs):
        result = super()._generate(prompts, stop, run_manager, **kwargs)
        for answers in result.generations:
            answers[0].generation_info["usage"]["prompt_tokens"] = max(len(prompt.split()) for prompt in prompts)
        return result
