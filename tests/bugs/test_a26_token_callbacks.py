"""A26: on_llm_new_token comes after the consumer has the piece, twice, never, without its chunk, or for text that a
stop string takes back later; what callbacks hear is not what the stream says.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from metasd_langchain import MetaSDLLM
from tests.bugs import kit

COUNT = 16
HOT: dict[str, Any] = {"temperature": 0.7, "seed": 4, "top_k": 60}
SAMPLED = kit.ids(kit.make(drafters=["plain"], max_tokens=COUNT), **HOT)
TEXT = kit.decode(SAMPLED)
STOP = TEXT[len(TEXT) // 2 : len(TEXT) // 2 + 4]  # over tokens, in the middle of a block
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "greedy": ({}, kit.decode(kit.ref(count=COUNT))),
    "sampled": (HOT, TEXT),
    "stopped": ({**HOT, "stop": [STOP]}, TEXT[: TEXT.index(STOP)]),
    "beginnings of stops": ({**HOT, "stop": [TEXT[n : n + 3] + "\0" for n in range(0, 12, 2)]}, TEXT),
    "capped": ({**HOT, "max_tokens": 5}, kit.decode(SAMPLED[:5])),
    "one token": ({**HOT, "max_tokens": 1}, kit.decode(SAMPLED[:1])),
}
PLAYERS: list[dict[str, Any]] = [{}, {"drafters": ["plain"]}, {"drafters": ["suffix@8"], "policy": "fixed"}]
for n, k in enumerate(kit.BLOCKS * 2):
    known = {kit.encode(kit.PROMPT): (*SAMPLED, *([5] * 20))}
    drafter = (kit.perfect, kit.half, kit.hostile)[n % 3]("tree" if n % 2 else "chain", answers=known)
    PLAYERS.append({"drafters": [(drafter, k)], "policy": "fixed"})


def make(**options: Any) -> MetaSDLLM:
    return kit.make(**{"max_tokens": COUNT, **options})


class Log(BaseCallbackHandler):
    """Writes down, in order, what the callbacks hear and what the consumer sees."""

    raise_error = True

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.lines.append(("start", ""))

    def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
        assert chunk is not None
        assert chunk.text == token
        self.lines.append(("heard", token))

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.lines.append(("end", response.generations[0][0].text))

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.lines.append(("error", type(error).__name__))

    def saw(self, piece: str) -> None:
        self.lines.append(("seen", piece))

    def texts(self, kind: str) -> list[str]:
        return [text for name, text in self.lines if name == kind]


class AsyncLog(AsyncCallbackHandler):
    """The same for an async handler."""

    raise_error = True

    def __init__(self, log: Log) -> None:
        self.log = log

    async def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
        self.log.on_llm_new_token(token, chunk=chunk)


def check(log: Log, want: str) -> None:
    """Start; then each piece heard once and at once seen; then the end."""
    heard, middle = log.texts("heard"), log.lines[1:-1]
    assert "".join(heard) == want
    assert middle == [line for text in heard for line in (("heard", text), ("seen", text))]
    assert (log.lines[0], log.lines[-1]) == (("start", ""), ("end", want))
    assert all(heard[:-1])  # only the last piece, which has the facts about the call, may be without text


async def follow(llm: MetaSDLLM, want: str) -> None:
    chain = PromptTemplate.from_template("{x}") | llm | StrOutputParser()
    for runnable, given in ((llm, kit.PROMPT), (chain, {"x": kit.PROMPT})):
        log = Log()
        for piece in runnable.stream(given, {"callbacks": [log]}):
            log.saw(piece)
        check(log, want)
        log = Log()
        async for piece in runnable.astream(given, {"callbacks": [log]}):
            log.saw(piece)
        check(log, want)


@pytest.mark.parametrize("case", CASES)
async def test_each_piece_is_heard_once_and_before_it_is_seen(case: str) -> None:
    options, want = CASES[case]
    for player in PLAYERS:
        await follow(make(**player, **options), want)


@pytest.mark.parametrize("case", CASES)
async def test_events_say_each_piece_once(case: str) -> None:
    options, want = CASES[case]
    for player in PLAYERS[::3]:
        llm = make(**player, **options)
        for runnable, given in ((llm, kit.PROMPT), (PromptTemplate.from_template("{x}") | llm, {"x": kit.PROMPT})):
            events = [event async for event in runnable.astream_events(given, version="v2")]
            kinds = [event["event"] for event in events if event["name"] == "MetaSDLLM"]
            pieces = [event["data"]["chunk"] for event in events if event["event"] == "on_llm_stream"]
            assert "".join(getattr(piece, "text", piece) for piece in pieces) == want
            assert kinds == ["on_llm_start", *["on_llm_stream"] * len(pieces), "on_llm_end"]
            end = next(event["data"]["output"] for event in events if event["event"] == "on_llm_end")
            assert end["generations"][0][0]["text"] == want


@pytest.mark.parametrize("case", CASES)
async def test_asked_for_a_whole_answer_handlers_hear_its_end_and_pieces_only_where_asked_for(case: str) -> None:
    options, want = CASES[case]
    for player in PLAYERS[::4]:
        llm, log = make(**player, **options), Log()
        assert llm.invoke(kit.PROMPT, {"callbacks": [log]}) == want
        assert await llm.ainvoke(kit.PROMPT, {"callbacks": [log]}) == want
        assert log.lines == [("start", ""), ("end", want)] * 2
        llm, logs = make(**player, **options, streaming=True), (Log(), Log())
        assert llm.invoke(kit.PROMPT, {"callbacks": [logs[0]]}) == want
        assert await llm.ainvoke(kit.PROMPT, {"callbacks": [logs[1]]}) == want
        for log in logs:
            heard = log.texts("heard")
            assert "".join(heard) == want
            assert log.lines == [("start", ""), *(("heard", piece) for piece in heard), ("end", want)]


async def test_several_handlers_of_both_kinds_hear_the_same_wherever_they_are_set() -> None:
    logs = [Log() for _ in range(5)]
    llm = make(**HOT, callbacks=[logs[0]])
    config: Any = {"callbacks": [logs[1], logs[2], AsyncLog(logs[3])]}
    text = "".join([piece async for piece in llm.with_config(callbacks=[logs[4]]).astream(kit.PROMPT, config)])
    assert [log.texts("heard") for log in logs] == [logs[0].texts("heard")] * 5
    assert "".join(logs[0].texts("heard")) == text == TEXT


async def test_left_or_failing_streams_have_told_what_was_seen_and_one_error() -> None:
    class Failing(Log):
        def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
            super().on_llm_new_token(token, chunk=chunk)
            if len(self.texts("heard")) == 3:
                raise ValueError("boom")

    llm = make(**HOT, max_tokens=300, drafters=["plain"])
    for kind in (Log, Failing):
        log, later = kind(), kind()
        with pytest.raises(ValueError, match="boom") if kind is Failing else nullcontext():
            stream: Any = llm.stream(kit.PROMPT, {"callbacks": [log]})
            while len(log.texts("seen")) < 4:
                log.saw(next(stream))
            stream.close()
        with pytest.raises(ValueError, match="boom") if kind is Failing else nullcontext():
            stream = llm.astream(kit.PROMPT, {"callbacks": [later]})
            while len(later.texts("seen")) < 4:
                later.saw(await anext(stream))
            await stream.aclose()
        for one in (log, later):
            assert one.texts("heard")[: 4 if kind is Log else 2] == one.texts("seen")
            assert one.texts("error") == ["GeneratorExit" if kind is Log else "ValueError"]
            assert one.texts("end") == []
        assert llm.invoke(kit.PROMPT, max_tokens=5) == kit.decode(SAMPLED[:5])
    assert llm._load().live == 0
