"""What bug tests are made of: a tiny model, the slow truth, drafters of known quality, and every way of asking.

"Declare it": an answer is computed first by plain forwards; then a token or string it really holds is declared the
stop, the EOS or the end. So no test depends on luck.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from langchain_core.callbacks import BaseCallbackHandler

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import HalfDrafter, HostileDrafter, PerfectDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer

MODEL, TOKENIZER = tiny_model(), tiny_tokenizer()
EOS = frozenset({1})
VOCAB = 512
PROMPT = "the cat sat on the mat and then the cat sat on the"
BLOCKS = (1, 2, 4, 8, 16)


def make(**options: Any) -> MetaSDLLM:
    """A MetaSDLLM over the tiny model; all of them share one engine."""
    return MetaSDLLM(**{"model": (MODEL, TOKENIZER), "max_tokens": 24, **options})


def encode(prompt: str) -> tuple[int, ...]:
    """Ids of a prompt, BOS included."""
    return tuple(TOKENIZER(prompt)["input_ids"])


def decode(ids: Any) -> str:
    """Text of an answer's ids."""
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@functools.cache
def ref_of(prompt: tuple[int, ...], count: int, stop: frozenset[int] = EOS) -> tuple[int, ...]:
    """The greedy answer to a prompt of ids, one cache-free forward a token; ends with the first stop id."""
    return tuple(reference_tokens(MODEL, list(prompt), count, stop))


def ref(prompt: str = PROMPT, count: int = 24, stop: frozenset[int] = EOS) -> tuple[int, ...]:
    """The greedy answer to a prompt; ends with the first stop id."""
    return ref_of(encode(prompt), count, stop)


def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What scripted drafters know: the greedy answer, EOS ignored, so that they draft past any declared end."""
    return ref_of(prompt, 40, frozenset())


def perfect(shape: Any = "chain", answers: Any = truth) -> PerfectDrafter:
    """Everything it drafts is accepted."""
    return PerfectDrafter(answers, shape=shape, vocab=VOCAB)


def hostile(shape: Any = "chain", answers: Any = truth) -> HostileDrafter:
    """Nothing it drafts is accepted."""
    return HostileDrafter(VOCAB, answers, shape=shape)


def half(shape: Any = "chain", answers: Any = truth) -> HalfDrafter:
    """Right in the first half of each block."""
    return HalfDrafter(answers, VOCAB, shape=shape)


def scripted(drafter: Any, budget: int, **options: Any) -> MetaSDLLM:
    """A MetaSDLLM that plays one drafter with one budget in every round."""
    return make(drafters=[(drafter, budget)], policy="fixed", **options)


class Heard(BaseCallbackHandler):
    """What the callbacks of calls hear, in order."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.events: list[str] = []
        self.responses: list[Any] = []
        self.failures: list[BaseException] = []

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("start")

    def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
        assert chunk is not None
        self.events.append("token")
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.events.append("end")
        self.responses.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.events.append("error")
        self.failures.append(error)


class Answer(NamedTuple):
    """One answer, as far as every mode must agree on it."""

    text: str
    finish_reason: str
    usage: dict[str, int]


def _answer(text: str, heard: Heard) -> Answer:
    info = heard.responses[0].generations[0][0].generation_info
    return Answer(text, info["finish_reason"], info["usage"])


async def every_way(llm: MetaSDLLM, prompt: str = PROMPT, **options: Any) -> dict[str, Answer]:
    """The answer by invoke, stream, ainvoke, astream, batch and abatch, each with callbacks of its own."""
    answers: dict[str, Answer] = {}
    heard = Heard()
    answers["invoke"] = _answer(llm.invoke(prompt, {"callbacks": [heard]}, **options), heard)
    heard = Heard()
    answers["stream"] = _answer("".join(llm.stream(prompt, {"callbacks": [heard]}, **options)), heard)
    heard = Heard()
    answers["ainvoke"] = _answer(await llm.ainvoke(prompt, {"callbacks": [heard]}, **options), heard)
    heard = Heard()
    text = "".join([piece async for piece in llm.astream(prompt, {"callbacks": [heard]}, **options)])
    answers["astream"] = _answer(text, heard)
    heard = Heard()
    answers["batch"] = _answer(llm.batch([prompt], {"callbacks": [heard]}, **options)[0], heard)
    heard = Heard()
    answers["abatch"] = _answer((await llm.abatch([prompt], {"callbacks": [heard]}, **options))[0], heard)
    return answers


def ids(llm: MetaSDLLM, prompt: str = PROMPT, **options: Any) -> tuple[int, ...]:
    """Token ids of the answer."""
    return tuple(token for step in llm.steps(prompt, **options) for token in step.tokens)


def rounds(llm: MetaSDLLM, prompt: str = PROMPT, **options: Any) -> Any:
    """Records of the rounds of an answer."""
    summary = [step.summary for step in llm.steps(prompt, **options)][-1]
    assert summary is not None
    return summary.rounds
