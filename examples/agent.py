"""An agent with a tool, by LangChain's create_agent.

Run it as ``python examples/agent.py`` for the embedded model, or name a folder, a hub id or a .gguf file behind it.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware
from langchain_core.tools import tool

from metasd_langchain import ChatMetaSD

STOCK = {"rye bread": 12, "white rolls": 40, "spelt bread": 0}


@tool
def in_stock(article: str) -> int:
    """How many of an article the bakery has."""
    return next((count for name, count in STOCK.items() if name in article.lower()), 0)


def make_agent(llm: ChatMetaSD) -> Any:
    system = "You work in a bakery. Look the stock up, then answer."
    # a small model may look up for ever
    return create_agent(
        llm, [in_stock], system_prompt=system, middleware=[ToolCallLimitMiddleware(run_limit=3, exit_behavior="end")]
    )


def main(model: str | None = None) -> None:
    agent = make_agent(ChatMetaSD(model=model, max_tokens=96))
    asked = {"messages": [("human", "How many white rolls are there?")]}
    for message in agent.invoke(asked, {"recursion_limit": 12})["messages"]:
        calls = [f"{call['name']}({call['args']})" for call in getattr(message, "tool_calls", [])]
        print(f"{message.type}: {', '.join(calls) or str(message.text).strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
