"""Tools and structured output: valid whatever the model says, the same however it is asked."""

from __future__ import annotations

import json
from functools import reduce
from operator import add as plus
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration
from langchain_core.runnables import RunnableBinding, RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as OldModel
from pydantic.v1 import Field as OldField
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from typing_extensions import TypedDict

from metasd_langchain.constraints.compiled import compiled
from metasd_langchain.errors import BadGrammar, BadOption, BadTool, CapTooSmall, UnknownName
from metasd_langchain.structured import parsed
from metasd_langchain.tool_grammar import closed
from tests.unit.chatkit import CHATML, HELLO, MODEL, TOKENIZER, TOOLED, asked, make


@tool
def get_price(item: str, amount: int, urgent: bool = False) -> str:
    """Price of some pieces of an item."""
    return f"{amount} {item} {urgent}"


@tool
def list_shops() -> str:
    """Names of all shops."""
    return "none"


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    number: int = Field(ge=1, le=999)
    kind: Literal["home", "work"] = "home"


class Person(BaseModel):
    """A person."""

    name: str
    address: Address
    nickname: str | None = None


class OldPerson(OldModel):
    """A person, in pydantic 1."""

    name: str = OldField(description="the name")
    age: int


class PersonDict(TypedDict):
    """A person, as a mapping."""

    name: Annotated[str, ..., "the name"]
    age: Annotated[int | None, None, "years"]


SCHEMAS = {
    "pydantic": Person,
    "pydantic 1": OldPerson,
    "typed dict": PersonDict,
    "json schema": Person.model_json_schema(),
    "old schema": OldPerson.schema(),
    "function": {
        "name": "person",
        "description": "A person.",
        "parameters": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]},
    },
    "bare": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]},
}
CAP = 300


def legal(chat, text, **given) -> bool:
    """Whether the grammar of a call allows an answer, and may end there."""
    one = asked(chat, HELLO, **given)
    matcher = compiled(one.grammar, chat._load().target).matcher()
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    if matcher.validate_tokens(ids) != len(ids):
        return False
    matcher.consume_tokens(ids)
    return bool(matcher.is_accepting())


def valid(call: Any, *tools: Any) -> None:
    schemas = {one.name: one.args_schema.model_json_schema() for one in tools}
    jsonschema.validate(call["args"], schemas[call["name"]])


# -- bind_tools -------------------------------------------------------------------------------------------------------


def test_bind_tools_binds_openais_shape():
    bound = make().bind_tools([get_price], tool_choice="any", strict=True, parallel_tool_calls=False, temperature=0.5)
    assert isinstance(bound, RunnableBinding)
    assert bound.kwargs["tools"][0]["function"]["name"] == "get_price"
    assert bound.kwargs["tool_choice"] == "any"
    assert bound.kwargs["temperature"] == 0.5
    assert make().bind_tools([]).invoke(HELLO).tool_calls == []


@pytest.mark.parametrize("template", [None, CHATML, TOOLED])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize(
    "choice", ["any", "required", True, "get_price", {"type": "function", "function": {"name": "get_price"}}]
)
def test_a_forced_call_is_always_valid(template, options, choice):
    chat = make(chat_template=template, max_tokens=CAP, **options)
    message = chat.bind_tools([get_price, list_shops], tool_choice=choice, parallel_tool_calls=False).invoke(HELLO)
    (call,) = message.tool_calls
    valid(call, get_price, list_shops)
    if choice not in ("any", "required", True):
        assert call["name"] == "get_price"
        assert call["args"]["item"]  # a required string is not empty
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert message.invalid_tool_calls == []


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "gemma", "plain"])
@pytest.mark.parametrize("several", [False, True])
def test_every_format_calls(form, several):
    chat = make(chat_template=CHATML, tool_format=form, max_tokens=CAP, temperature=1.0, seed=2)
    bound = chat.bind_tools([get_price, list_shops], tool_choice="any", parallel_tool_calls=several)
    message = bound.invoke(HELLO)
    assert message.tool_calls
    for call in message.tool_calls:
        valid(call, get_price, list_shops)
    if not several:
        assert len(message.tool_calls) == 1
    total = reduce(plus, bound.stream(HELLO))
    assert [(one["name"], one["args"]) for one in total.tool_calls] == [
        (one["name"], one["args"]) for one in message.tool_calls
    ]
    assert total.content == message.content


async def test_every_way_is_one_answer():
    chat = make(max_tokens=CAP, temperature=0.9, seed=7).bind_tools([get_price], tool_choice="any")
    wanted = chat.invoke(HELLO)
    others = [
        reduce(plus, chat.stream(HELLO)),
        await chat.ainvoke(HELLO),
        reduce(plus, [chunk async for chunk in chat.astream(HELLO)]),
        chat.batch([HELLO])[0],
    ]
    for other in others:
        assert [one["args"] for one in other.tool_calls] == [one["args"] for one in wanted.tool_calls]
        assert other.usage_metadata == wanted.usage_metadata
        assert other.response_metadata["finish_reason"] == "tool_calls"


def test_calls_stream():
    chunks = list(make(max_tokens=CAP, speculative=False).bind_tools([get_price], tool_choice="any").stream(HELLO))
    pieces = [one for chunk in chunks for one in chunk.tool_call_chunks]
    assert len(pieces) > 3
    assert [piece["id"] is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece["name"] for piece in pieces if piece["name"]] == ["get_price"]
    assert {piece["index"] for piece in pieces} == {0}
    assert json.loads("".join(piece["args"] for piece in pieces)) == reduce(plus, chunks).tool_calls[0]["args"]


@pytest.mark.parametrize("template", [None, CHATML, TOOLED])
def test_tool_choice_none_shows_tools_and_calls_none(template):
    chat = make(chat_template=template)
    bound = chat.bind_tools([get_price], tool_choice="none")
    assert bound.invoke(HELLO).tool_calls == []
    one = asked(chat, HELLO, tools=bound.kwargs["tools"], tool_choice="none")
    assert one.grammar is None
    assert "get_price" in one.text


CALL = '{"name": "list_shops", "arguments": {}}'
PLAIN, TEXT = "Tool call: list_shops\nArguments: {}", "Assistant:"
LLAMA = '{"name": "list_shops", "parameters": {}}'


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        (
            {},
            [f"{TEXT} hello", f"{TEXT} a\n\n{PLAIN}", PLAIN, f"{TEXT} a\n\nTool call"],
            [
                "hello",
                f"{TEXT} a\n\nAssistant: b",
                f"{TEXT} a\n\nTool call: no",
                f"{TEXT} a\n{PLAIN}",
                PLAIN[:-1],
                "Tool call: {}",
            ],
        ),
        (
            {"chat_template": CHATML},
            [
                "hello",
                f"<tool_call>\n{CALL}\n</tool_call>",
                f"why\n<tool_call>\n{CALL}\n</tool_call>",
                "a < b <tool_cal",
            ],
            ["<tool_call>", f"<tool_call>\n{CALL}", "a <tool_call> b", f"<tool_call>{CALL}</tool_call>"],
        ),
        (
            {"chat_template": CHATML, "tool_format": "llama3"},
            ["hello", LLAMA, '{"a": 1}', f"{LLAMA}; {LLAMA}"],
            [LLAMA[:-1], '{"name": "other", "parameters": {}}', '{"name"'],
        ),
        (
            {"chat_template": CHATML, "tool_format": "mistral"},
            ["hello", f"[TOOL_CALLS][{CALL}]", f"[TOOL_CALLS][{CALL}, {CALL}]", "[1]"],
            [f"[TOOL_CALLS][{CALL}", f"[TOOL_CALLS]{CALL}", "[TOOL_CALLS] hello"],
        ),
        (
            {"chat_template": CHATML, "tool_format": "gemma"},
            ["hello", f"```tool_code\n{LLAMA}\n```", f"Well.\n```tool_code\n{LLAMA}\n```", "```python\nx\n```"],
            ["```tool_code\nlist_shops()\n```", "```tool_code\n", LLAMA[:-1]],
        ),
    ],
)
def test_what_an_answer_may_be_when_the_model_decides(options, good, bad):
    chat = make(**options)
    given = make().bind_tools([list_shops]).kwargs
    for text in good:
        assert legal(chat, text, **given), text
    for text in bad:
        assert not legal(chat, text, **given), text


def test_text_follows_its_label_whole():
    """The template's own labels are stop strings; the reply's is none."""
    answers = [make(temperature=1.0, seed=seed).bind_tools([list_shops]).invoke(HELLO) for seed in range(12)]
    texts = [one for one in answers if one.response_metadata["finish_reason"] == "length" and not one.tool_calls]
    assert texts
    assert all(one.content and not one.content.startswith("Assistant") for one in texts)


def test_several_calls_only_where_the_model_was_taught_or_it_is_asked_for():
    given = make().bind_tools([list_shops], tool_choice="any").kwargs
    two = f"{PLAIN}\n\n{PLAIN}".removeprefix("Tool call:")
    assert not legal(make(), two, **given)
    assert legal(make(), two, **given, parallel_tool_calls=True)
    assert legal(make(), f"{PLAIN}\n\nTool result:".removeprefix("Tool call:"), **given, parallel_tool_calls=True)
    two = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    assert legal(make(chat_template=CHATML), two, **given)
    assert not legal(make(chat_template=CHATML), two, **given, parallel_tool_calls=False)


@pytest.mark.parametrize(("form", "opener"), [("mistral", "[TOOL_CALLS]"), ("hermes", "<tool_call>")])
def test_an_opener_that_is_a_control_token(form, opener):
    """Its text is not in the reply; the call is all the same."""
    state = json.loads(TOKENIZER.backend_tokenizer.to_str())
    model = state["model"]
    last = TOKENIZER.convert_ids_to_tokens(511)
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) != last]
    model["vocab"] = {opener if piece == last else piece: number for piece, number in model["vocab"].items()}
    raw = Tokenizer.from_str(json.dumps(state))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **names, additional_special_tokens=[opener])
    assert tokenizer.convert_tokens_to_ids(opener) == 511
    chat = make(model=(MODEL, tokenizer), chat_template=CHATML, tool_format=form, max_tokens=CAP)
    given = make().bind_tools([get_price]).kwargs
    assert "<[511]>" in asked(chat, HELLO, **given).grammar.lark
    bound = chat.bind_tools([get_price], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(HELLO).tool_calls
    valid(call, get_price)
    assert reduce(plus, bound.stream(HELLO)).tool_calls[0]["args"] == call["args"]


def test_reasoning_in_front():
    thinking = CHATML + "{# <think> </think> #}"
    given = make().bind_tools([list_shops], tool_choice="any").kwargs
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    for text, wanted in ((call, True), (f"<think>a < b</think>\n\n{call}", True), (f"why {call}", False)):
        assert legal(make(chat_template=thinking), text, **given) == wanted
    begun = CHATML.replace("<assistant>{% endif", "<assistant><think>{% endif") + "{# </think> #}"
    for text, wanted in ((call, False), (f"a < b</think>\n\n{call}", True), (f"a</think>{call}", True)):
        assert legal(make(chat_template=begun), text, **given) == wanted
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text, wanted in (('{"a": 1}', True), ('<think>x</think>\n\n{"a": 1}', True), ("<think>x</think>hello", False)):
        assert legal(make(chat_template=thinking), text, response_format=schema) == wanted


def test_an_answer_in_json_beside_tools():
    chat = make(chat_template=CHATML)
    given = {**make().bind_tools([list_shops]).kwargs, "response_format": Address}
    answer = '{"street": "x", "number": 3}'
    for text, wanted in (
        (answer, True),
        (f"<tool_call>\n{CALL}\n</tool_call>", True),
        ("hello", False),
        ('{"street": "x", "number": 0}', False),
        (f"{answer} <tool_call>", False),
    ):
        assert legal(chat, text, **given) == wanted
    assert legal(make(), f"{TEXT} {answer}", **given)
    assert not legal(make(), f"{TEXT} hello", **given)


def test_tools_that_are_wrong_are_named():
    chat = make()
    with pytest.raises(BadTool, match="get_price"):
        chat.bind_tools(
            [get_price, {"name": "get_price", "description": "", "parameters": {"type": "object", "properties": {}}}]
        )
    with pytest.raises(UnknownName, match=r"'get_prise'.*did you mean 'get_price'"):
        chat.bind_tools([get_price], tool_choice="get_prise")
    broken = {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "no such type"}}},
    }
    with pytest.raises(BadGrammar, match="tools"):
        chat.bind_tools([get_price, broken], tool_choice="any").invoke(HELLO)
    with pytest.raises(CapTooSmall, match="4 may be generated"):
        chat.bind_tools([get_price], tool_choice="any").invoke(HELLO, max_tokens=4)
    assert chat.bind_tools([get_price], tool_choice="any").invoke(HELLO, max_tokens=CAP).tool_calls


def test_schemas_are_closed_where_they_name_keys():
    schema = Person.model_json_schema()
    made = closed(schema)
    assert made["additionalProperties"] is False
    assert made["$defs"]["Address"]["additionalProperties"] is False
    assert "additionalProperties" not in schema  # the caller's is left alone
    assert "additionalProperties" not in closed({"type": "object"})
    assert (
        closed({"type": "object", "properties": {"a": {}}, "additionalProperties": True})["additionalProperties"]
        is True
    )
    split = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert closed(split) == split
    filled = closed({"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a"]}, filled=True)
    assert filled["properties"] == {"a": {"type": "string", "minLength": 1}, "b": {"type": "string"}}


# -- structured output ------------------------------------------------------------------------------------------------


def fits(result: Any, schema: Any) -> None:
    if isinstance(schema, type) and issubclass(schema, BaseModel | OldModel):
        assert isinstance(result, schema)
    else:
        assert isinstance(result, dict)
        if isinstance(schema, dict):
            jsonschema.validate(result, schema.get("parameters", schema))


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_structured_output(name, method):
    schema = SCHEMAS[name]
    if name == "bare" and method == "function_calling":
        pytest.skip("a tool has a name")
    chat = make(max_tokens=CAP, temperature=1.0, seed=3).with_structured_output(schema, method=method)
    result = chat.invoke(HELLO)
    fits(result, schema)
    last = None
    for piece in chat.stream(HELLO):
        last = piece
    assert last == result


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_raw_beside_parsed(method, strict):
    chat = make(max_tokens=CAP).with_structured_output(Address, method=method, include_raw=True, strict=strict)
    for result in (chat.invoke(HELLO), await chat.ainvoke(HELLO)):
        assert isinstance(result["raw"], AIMessage)
        assert isinstance(result["parsed"], Address)
        assert result["parsing_error"] is None
    total = reduce(plus, chat.stream(HELLO))
    assert isinstance(total["parsed"], Address)


def test_any_json_object():
    chat = make(max_tokens=60).with_structured_output(method="json_mode")
    assert isinstance(chat.invoke(HELLO), dict)


def test_structured_output_that_cannot_be():
    for schema, method, name in (
        (Person, "yaml", "method"),
        (None, "json_schema", "schema"),
        (3, "json_schema", "schema"),
    ):
        with pytest.raises(BadOption, match=name):
            make().with_structured_output(schema, method=method)


def test_the_model_is_told_the_schema():
    text = asked(make(), HELLO, response_format=Address).text
    assert '"street"' in text
    assert "JSON" in text


def cut(text: str, **metadata: Any) -> ChatGeneration:
    message = AIMessage(text, response_metadata={"finish_reason": "length", **metadata})
    message.usage_metadata = {"input_tokens": 1, "output_tokens": 6, "total_tokens": 7}
    return ChatGeneration(message=message)


@pytest.mark.parametrize("schema", [Address, Address.model_json_schema()])
def test_cut_json_is_an_error_that_names_the_cap(schema):
    parser = parsed(schema, "json_schema")
    with pytest.raises(OutputParserException, match=r"cut at 6 tokens.*'length'"):
        parser.parse_result([cut('{"street": "a", "number": 3')])
    # a stream's pieces are shown as they come; its end is strict
    pieces = [
        AIMessageChunk('{"street": "a", '),
        AIMessageChunk('"number": 3', response_metadata={"finish_reason": "length"}),
    ]
    with pytest.raises(OutputParserException, match="length"):
        list(parser.transform(iter(pieces)))


def test_a_cut_call_is_an_error_that_names_the_cap():
    for schema, name in ((Address, ""), (Address.model_json_schema(), "Address")):
        parser = parsed(schema, "function_calling", name)
        one = cut("")
        broken = {
            "name": "Address",
            "args": '{"street',
            "id": "1",
            "error": "the call is cut",
            "type": "invalid_tool_call",
        }
        one.message.invalid_tool_calls = [broken]
        with pytest.raises(OutputParserException, match=r"cut at 6 tokens.*the call is cut"):
            parser.parse_result([one])


# -- agents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["provider", "tool", "auto"])
def test_agents_with_structured_answers(method):
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy

    wanted = {"provider": ProviderStrategy(Address), "tool": ToolStrategy(Address), "auto": Address}[method]
    chat = make(max_tokens=CAP, temperature=1.0, seed=1)
    agent = create_agent(chat, tools=[], response_format=wanted)
    result = agent.invoke({"messages": [HumanMessage(HELLO)]})
    assert isinstance(result["structured_response"], Address)


class Forced:
    """A model that calls a tool first, and answers in text then."""

    def __init__(self, chat):
        self.chat = chat

    def bind_tools(self, tools, **kwargs):
        called = self.chat.bind_tools(tools, tool_choice="any", parallel_tool_calls=False)
        plain = self.chat.bind_tools(tools, tool_choice="none")
        return RunnableLambda(
            lambda messages: (plain if isinstance(messages[-1], ToolMessage) else called).invoke(messages)
        )


@pytest.mark.parametrize("template", [None, TOOLED])
def test_a_loop_of_an_agent_in_langgraph(template):
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = Forced(make(max_tokens=CAP, chat_template=template)).bind_tools([get_price])
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([get_price]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "agent")
    messages = graph.compile().invoke({"messages": [HumanMessage(HELLO)]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].tool_call_id == messages[1].tool_calls[0]["id"]
    assert messages[1].response_metadata["metasd"]["step"] == "agent"  # the node's name


async def test_langgraph_streams_the_same_message():
    from langgraph.graph import START, MessagesState, StateGraph

    chat = make()
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_edge(START, "agent")
    made = graph.compile()
    wanted = chat.invoke([HumanMessage(HELLO)])
    chunks = [one for one, _ in made.stream({"messages": [HumanMessage(HELLO)]}, stream_mode="messages")]
    total = reduce(plus, [one for one in chunks if isinstance(one, AIMessageChunk)])
    assert total.content == wanted.content
    assert total.usage_metadata == wanted.usage_metadata
