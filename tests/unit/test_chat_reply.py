"""The reply parser on texts as model families write them, in one piece and character by character."""

from __future__ import annotations

import json
import random

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk

from metasd_langchain.messages import chunks, last_chunk, whole
from metasd_langchain.reply import ReplyParser
from metasd_langchain.reply_parts import CallBroken, Reasoning, Text
from metasd_langchain.tool_formats import FORMATS, Call

THINK = ("<think>", "</think>")
USAGE = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}


def read(text, form="hermes", pieces=None, why="a stop came", **options):
    """All parts of a reply, fed in pieces."""
    parser = ReplyParser(FORMATS[form] if form else None, **options)
    parts = []
    for piece in pieces if pieces is not None else [text]:
        parts += parser.feed(piece)
    return [*parts, *parser.end(why)]


def message(parts) -> AIMessage:
    return whole(parts, {}, None)


def calls(parts):
    return [(call["name"], call["args"]) for call in message(parts).tool_calls]


def facts(parts):
    made = message(parts)
    return (
        made.content,
        made.additional_kwargs,
        [(call["name"], call["args"]) for call in made.tool_calls],
        [(call["name"], call["args"], call["error"]) for call in made.invalid_tool_calls],
    )


WEATHER = ("get_weather", {"city": "Paris", "days": 2})
TIME = ("get_time", {"zone": {"name": "CET", "list": [1, "}", '"]']}})

GOOD = {
    # (format, text) -> content, calls
    "hermes one": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        "",
        [WEATHER],
    ),
    "hermes two": (
        "hermes",
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_time", "arguments": {"zone": {"name": "CET", "list": [1, "}", "\\"]"]}}}\n</tool_call>'  # noqa: E501
        ),
        "",
        [WEATHER, TIME],
    ),
    "qwen with text in front": (
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        "Let me look.\n\n",
        [WEATHER],
    ),
    "hermes, arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}</tool_call>',
        "",
        [WEATHER],
    ),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    "llama3 json": ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", [WEATHER]),
    "llama3 typed json": (
        "llama3",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        "",
        [WEATHER],
    ),
    "llama3 two": (
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; {"name": "now", "parameters": {}}',
        "",
        [WEATHER, ("now", {})],
    ),
    "llama3 python tag": (
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        "",
        [WEATHER],
    ),
    "llama3 built-in": (
        "llama3",
        '<|python_tag|>brave_search.call(query="rain in Paris")',
        "",
        [("brave_search.call", {"query": "rain in Paris"})],
    ),
    "mistral one": (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
        "",
        [WEATHER],
    ),
    "mistral two": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "now", "arguments": {}}]',  # noqa: E501
        "",
        [WEATHER, ("now", {})],
    ),
    "mistral, its opener being no text": (
        "mistral",
        '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
        "",
        [WEATHER],
    ),
    "mistral, later versions": (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[ARGS]{}',
        "",
        [WEATHER, ("now", {})],
    ),
    "gemma tool_code": ("gemma", '```tool_code\nget_weather(city="Paris", days=2)\n```', "", [WEATHER]),
    "gemma tool_code, printed": ("gemma", '```tool_code\nprint(get_weather(city="Paris", days=2))\n```', "", [WEATHER]),
    "gemma list": (
        "gemma",
        '```tool_code\n[get_weather(city="Paris", days=2), now()]\n```',
        "",
        [WEATHER, ("now", {})],
    ),
    "gemma json": ("gemma", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", [WEATHER]),
    "gemma fenced json": (
        "gemma",
        'Sure.\n```tool_code\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}\n```',
        "Sure.\n",
        [WEATHER],
    ),
    "plain": ("plain", 'Tool call: get_weather\nArguments: {"city": "Paris", "days": 2}', "", [WEATHER]),
    "plain two": (
        "plain",
        'Tool call: get_weather\nArguments: {"city": "Paris", "days": 2}\n\nTool call: now\nArguments: {}',
        "",
        [WEATHER, ("now", {})],
    ),
    "no call": ("hermes", "5 < 6 and <tool> is no marker {}", "5 < 6 and <tool> is no marker {}", []),
    "mistral text": ("mistral", "[1] is a reference [TOOL", "[1] is a reference [TOOL", []),
    "llama3 text": ("llama3", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
}


@pytest.mark.parametrize("name", GOOD)
def test_families(name):
    form, text, content, wanted = GOOD[name]
    parts = read(text, form)
    assert message(parts).content == content
    assert calls(parts) == wanted
    assert message(parts).invalid_tool_calls == []


@pytest.mark.parametrize("name", GOOD)
def test_pieces_change_nothing(name):
    form, text, _, _ = GOOD[name]
    wanted = facts(read(text, form))
    assert facts(read(text, form, pieces=text)) == wanted
    draw = random.Random(name)
    for _ in range(5):
        cuts = sorted(draw.sample(range(len(text)), min(6, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert facts(read(text, form, pieces=pieces)) == wanted


@pytest.mark.parametrize("name", GOOD)
def test_chunks_add_up_to_the_message(name):
    form, text, _, _ = GOOD[name]
    parser = ReplyParser(FORMATS[form])
    parts, total = [], None
    for char in text:
        new = parser.feed(char)
        parts += new
        for chunk in chunks(new):
            total = chunk if total is None else total + chunk
    new = parser.end("a stop came")
    for chunk in [*chunks(new), last_chunk({}, USAGE, parts)]:
        total = chunk if total is None else total + chunk
    parts += new
    assert isinstance(total, AIMessageChunk)
    made = message(parts)
    assert total.content == made.content
    assert total.tool_calls == made.tool_calls  # ids too: they are on one chunk only
    assert len({call["id"] for call in made.tool_calls}) == len(made.tool_calls)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_written_calls_are_read_back(form):
    """What stands in a prompt's history is what the parser understands."""
    wanted = [Call("get_weather", WEATHER[1]), Call("get_time", TIME[1])]
    text = FORMATS[form].written(wanted)
    assert calls(read(text, form)) == [(call.name, call.args) for call in wanted]


BROKEN = {
    "cut in a string": ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', "f", '{"a": "b', "is cut"),
    "cut behind a backslash": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b\\',
        "f",
        '{"a": "b\\',
        "is cut",
    ),
    "cut in a list": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2', "f", '{"a": [1, 2', "is cut"),
    "cut behind the arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "f", '{"a": 1}', "is cut"),
    "single quotes": ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", "", None, "names no tool"),
    "no name": ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "", '{"a": 1}', "names no tool"),
    "arguments are text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        "f",
        '"{}"',
        "no JSON object",
    ),
    "trailing comma": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        "f",
        '{"a": 1,}',
        "no valid JSON",
    ),
    "no object": ("hermes", "<tool_call>hello</tool_call>", "", None, "no JSON object follows"),
    "code": ("gemma", "```tool_code\nx = 1\n```", "", "\nx = 1\n", "neither"),
    "mistral cut": ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": ', "f", '{"a": ', "is cut"),
    "mistral bare cut": ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', "f", '{"a": ', "is cut"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls_say_why_and_are_never_repaired(name):
    form, text, called, args, why = BROKEN[name]
    parts = read(text, form, why="max_tokens was reached after 7 tokens")
    made = message(parts)
    assert made.tool_calls == []
    (call,) = made.invalid_tool_calls
    assert call["name"] == called
    assert why in call["error"]
    if "cut" in why:
        assert "max_tokens was reached after 7 tokens" in call["error"]
    if args is not None:
        assert call["args"].strip() == args.strip()
    # added up by LangChain, which completes what is open, it is no call either
    total = None
    for chunk in [*chunks(parts), last_chunk({}, USAGE, parts)]:
        total = chunk if total is None else total + chunk
    assert total.tool_calls == []
    assert len(total.invalid_tool_calls) == 1
    assert total.response_metadata["invalid_tool_call_errors"] == [call["error"]]


@pytest.mark.parametrize("cut", range(1, 78))
def test_a_call_cut_anywhere_is_no_call(cut):
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "c\\"d"}], "e": true}}</tool_call>'
    complete = cut >= text.index("</tool_call>")
    parts = read(text[:cut])
    total = None
    for chunk in [*chunks(parts), last_chunk({}, USAGE, parts)]:
        total = chunk if total is None else total + chunk
    made = message(parts)
    assert bool(made.tool_calls) == bool(total.tool_calls) == complete
    if cut < len("<tool_call>"):
        assert made.content == text[:cut]
    elif not complete:
        assert len(made.invalid_tool_calls) == 1


def test_a_second_call_that_is_cut_leaves_the_first():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"a'
    parts = read(text)
    assert calls(parts) == [("f", {})]
    assert [part.index for part in parts if isinstance(part, CallBroken)] == [1]


def test_reasoning_is_apart_from_content():
    text = "<think>2 and 2 is 4 < 5</think>\n\nIt is 4."
    for pieces in ([text], text):
        parts = read(text, pieces=pieces, think=THINK)
        made = message(parts)
        assert made.additional_kwargs == {"reasoning_content": "2 and 2 is 4 < 5"}
        assert made.content.strip() == "It is 4."


def test_reasoning_that_the_prompt_began():
    parts = read('why</think><tool_call>{"name": "f", "arguments": {}}</tool_call>', think=THINK, opened="think")
    assert [part for part in parts if isinstance(part, Reasoning)] == [Reasoning("why")]
    assert calls(parts) == [("f", {})]


def test_a_call_that_the_prompt_began():
    text = ' f\nArguments: {"a": 1}'
    for pieces in ([text], text):
        parts = read(text, "plain", pieces=pieces, opened="call", trim=True)
        assert facts(parts) == ("", {}, [("f", {"a": 1})], [])


@pytest.mark.parametrize("pieces", [None, "letters"])
def test_labels_and_white_space_of_the_plain_form(pieces):
    text = "Assistant:  one\n\ntwo \n\nTool call: f\nArguments: {}\n\n"
    parts = read(text, "plain", pieces=text if pieces else None, said="Assistant:", trim=True)
    assert message(parts).content == "one\n\ntwo"
    assert calls(parts) == [("f", {})]


def test_text_is_text_where_no_tool_is_offered():
    text = 'Assistant: <tool_call>{"name": "f"}</tool_call> <think>'
    assert read(text, None) == [Text(text)]


def test_arguments_stream_as_they_come():
    parser = ReplyParser(FORMATS["hermes"])
    parser.feed('<tool_call>{"name": "f", "arguments": {"text": "')
    for word in ("one ", "two ", "three"):
        (chunk,) = chunks(parser.feed(word))
        assert chunk.tool_call_chunks[0]["args"] == word
        assert chunk.tool_call_chunks[0]["id"] is None
    assert json.loads('{"text": "one two three"}') == {"text": "one two three"}
