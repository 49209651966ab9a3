"""A tool loop in LangGraph: `model` decides, `tools` runs, until the model answers in text. State lives in SQLite.

The nodes' names are what the bandit remembers by: the node that writes tool calls and one that writes prose learn
different drafters without being told to.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode

__all__ = ["TOOLS", "agent", "calculate", "look_up"]

_SYSTEM = "You answer questions about the town of Alden. Use a tool when it helps; then answer in one sentence."
_FACTS = {
    "tanks": "The old tank holds 400 cubic metres, the north tank 900, the covered tank 1200.",
    "library": "The library is open from Tuesday to Saturday, ten to six, and until nine on Thursdays.",
    "bakery": "The bakery in Mill Street opens at five. Cakes are ordered two days ahead.",
}
_MOST_CALLS = 4  # of tools for one question: a small model may go round in circles
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


@tool
def look_up(topic: str) -> str:
    """What the town's records say about a topic: tanks, library or bakery."""
    known = next((text for name, text in _FACTS.items() if name in topic.lower()), None)
    return known or f"Nothing is known about {topic}. Topics: {', '.join(_FACTS)}."


@tool
def calculate(expression: str) -> str:
    """The value of an arithmetic expression such as 400 + 900 * 2."""
    try:
        return f"{_value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError, RecursionError) as cause:
        return f"That is not arithmetic ({type(cause).__name__}): only numbers, + - * / and brackets."


TOOLS: tuple[BaseTool, ...] = (look_up, calculate)


def agent(
    llm: BaseChatModel, saver: BaseCheckpointSaver[Any] | None = None, tools: Sequence[BaseTool] = TOOLS
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph.

    Args:
        llm: any chat model with tools.
        saver: keeps every thread's messages, so that a conversation goes on after a restart.
        tools: what the model may call.
    """
    calling, closing = llm.bind_tools(list(tools)), llm

    def model(state: MessagesState) -> MessagesState:
        asked = [SystemMessage(_SYSTEM), *state["messages"]]
        # past the limit the model is not offered tools any more, so that it has to answer
        return {"messages": [(calling if _calls(state) < _MOST_CALLS else closing).invoke(asked)]}

    def onwards(state: MessagesState) -> str:
        last = state["messages"][-1]
        return "tools" if isinstance(last, AIMessage) and last.tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", model)
    graph.add_node("tools", ToolNode(list(tools)))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", onwards, ["tools", END])
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=saver, name="agent")


def _calls(state: MessagesState) -> int:
    """Tool calls since the last question."""
    count = 0
    for message in reversed(state["messages"]):
        if message.type == "human":
            break
        if isinstance(message, AIMessage):
            count += len(message.tool_calls)
    return count


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp):
        return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp):
        return float(_OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("not arithmetic")
