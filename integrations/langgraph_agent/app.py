"""An agent with tools and a memory: ``python -m integrations.langgraph_agent.app`` (or ``make agent``)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from rich.console import Console

from integrations.langgraph_agent.graph import agent
from metasd_langchain import ChatMetaSD, MetaSDError

__all__ = ["main"]

QUESTIONS = ("What do the records say about the tanks?", "Calculate 400 + 900 + 1200.")


def main(arguments: list[str] | None = None) -> int:
    """Ask the questions given, or two of our own, in one thread of conversation; it goes on at the next start."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("question", nargs="*")
    options.add_argument("--thread", default="town", help="name of the conversation")
    options.add_argument("--state", type=Path, default=Path("out/agent"), help="folder of the two SQLite files")
    options.add_argument("--model", help="folder, hub id or .gguf file; default: the embedded model")
    args = options.parse_args(arguments)
    console = Console(highlight=False)
    args.state.mkdir(parents=True, exist_ok=True)
    try:
        llm = ChatMetaSD(model=args.model, memory=str(args.state / "bandit.sqlite"), max_tokens=128)
        with SqliteSaver.from_conn_string(str(args.state / "threads.sqlite")) as saver:
            graph = agent(llm, saver)
            for question in args.question or QUESTIONS:
                ask(console, graph, question, args.thread)
        llm.close()
    except MetaSDError as error:
        console.print(f"[red]{error}[/]")
        return 2
    return 0


def ask(console: Console, graph: Any, question: str, thread: str) -> None:
    """One question, with every step printed as it happens."""
    console.print(f"[bold]{question}[/]")
    config = {"configurable": {"thread_id": thread}, "recursion_limit": 20}
    for update in graph.stream({"messages": [HumanMessage(question)]}, config, stream_mode="updates"):
        for node, state in update.items():
            for message in state["messages"]:
                console.print(f"  {node}: {_shown(message)}", markup=False)
                if isinstance(message, AIMessage):
                    console.print(f"    {_drafted(message.response_metadata)}", style="dim", markup=False)


def _shown(message: BaseMessage) -> str:
    if isinstance(message, AIMessage) and message.tool_calls:
        return ", ".join(f"{call['name']}({call['args']})" for call in message.tool_calls)
    return str(message.text).strip() or "(no text)"


def _drafted(metadata: Mapping[str, Any]) -> str:
    facts = metadata.get("metasd", {})
    arms = ", ".join(f"{arm} {sums['rounds']}" for arm, sums in facts.get("arms", {}).items())
    return f"{facts.get('accepted_length', 0.0):.2f} tokens a round; rounds by arm: {arms}"


if __name__ == "__main__":
    raise SystemExit(main())
