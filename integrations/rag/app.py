"""Ask a folder of texts: ``python -m integrations.rag.app`` (or ``make rag``)."""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from rich.console import Console

from integrations.rag.pipeline import conversation, index, remembered
from metasd_langchain import ChatMetaSD, MetaSDError
from metasd_langchain.cli.demo import MiniLM

__all__ = ["main"]

HERE = Path(__file__).parent
QUESTIONS = ("How much water does the covered tank hold?", "And the north tank?", "Who helps with old handwriting?")


def main(arguments: list[str] | None = None) -> int:
    """Answer the questions given, or some about the documents beside this file; ``--ask`` goes on from the keyboard."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("question", nargs="*", help="asked one after another, as a conversation")
    options.add_argument("--documents", type=Path, default=HERE / "documents", help="folder of .md, .rst, .txt files")
    options.add_argument("--store", type=Path, default=Path("out/rag"), help="where Chroma keeps the passages")
    options.add_argument("--model", help="folder, hub id or .gguf file; default: the embedded model")
    options.add_argument("--ask", action="store_true", help="go on asking until an empty line")
    args = options.parse_args(arguments)
    console = Console(highlight=False)
    try:
        search = index(args.documents, args.store, MiniLM())
        llm = ChatMetaSD(model=args.model, memory=str(args.store / "bandit.sqlite"))
        talk(console, llm, search, args.question or list(QUESTIONS), ask=args.ask)
    except (FileNotFoundError, MetaSDError) as error:
        console.print(f"[red]{error}[/]")
        return 2
    llm.close()  # what was learned about drafters is saved beside the passages
    return 0


def talk(console: Console, llm: ChatMetaSD, search: BaseRetriever, questions: list[str], *, ask: bool = False) -> None:
    """One conversation, printed."""
    chain, history = conversation(llm, search), list[BaseMessage]()
    while questions or ask:
        question = questions.pop(0) if questions else console.input("[bold]> [/]").strip()
        if not question:
            return
        told = chain.invoke({"question": question, "history": history})
        console.print(f"[bold]{question}[/]")
        if told["standalone"] != question:
            console.print(f"  searched for: {told['standalone']}", style="dim", markup=False)
        console.print(f"  {told['answer']}", markup=False)
        console.print(f"  from {', '.join(told['sources'])}", style="dim", markup=False)
        history = remembered(history, told)


if __name__ == "__main__":
    raise SystemExit(main())
