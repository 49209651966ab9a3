"""``metasd chat``: a conversation in the terminal, every token in the colour of the drafter that proposed it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, messages_to_dict
from rich.console import Console
from rich.table import Table

from metasd_langchain.chat import ChatMetaSD
from metasd_langchain.cli.screen import Flow, drafter_of, legend, output, shares, tell, waiting
from metasd_langchain.errors import BadOption, MetaSDError
from metasd_langchain.values import RoundRecord, Summary

__all__ = ["Talk", "run"]

_HELP = """\
/stats       who drafted what so far, and how fast
/save FILE   write the conversation (.json: LangChain's messages, else text)
/clear       start a new conversation
/help        this
/quit        leave; so does Ctrl-D"""
_GOODBYE = ("/quit", "/exit", "/q")


def run(options: Mapping[str, object], *, system: str | None, save: Path | None) -> None:
    """Talk until the end of input.

    Args:
        options: fields of ChatMetaSD.
        system: what the model is told first.
        save: where to write the conversation when it ends.

    Raises:
        MetaSDError: wrong options, or a model that cannot be loaded; errors of single answers are shown.
    """
    console = output()
    llm = ChatMetaSD(**{"memory_key": "chat", **options})
    with waiting(f"loading {llm.model or 'the model'}"):
        llm.warmup()
    talk = Talk(console, llm, system)
    if console.is_terminal:
        console.print("/help lists commands", style="dim")
    while True:
        try:
            line = console.input("\n[bold]you:[/] " if console.is_terminal else "", markup=True)
        except EOFError:
            break
        if not talk.hear(line.strip()):
            break
    if save is not None:
        talk.save(save)
    llm.close()


@dataclass
class Talk:
    """One conversation.

    Attributes:
        console: where answers are painted.
        llm: who answers.
        system: what it is told first.
        messages: the conversation without that.
    """

    console: Console
    llm: ChatMetaSD
    system: str | None = None
    messages: list[BaseMessage] = field(default_factory=list)
    _rounds: list[RoundRecord] = field(default_factory=list)
    _summaries: list[Summary] = field(default_factory=list)

    def hear(self, line: str) -> bool:
        """Answer a line or obey a command; False ends the conversation."""
        if line.lower() in _GOODBYE:
            return False
        if not line.startswith("/"):
            if line:
                self.answer(line)
            return True
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "/stats": self.stats,
            "/save": lambda: self.save(Path(rest.strip())),
            "/clear": self.clear,
            "/help": lambda: self.console.print(_HELP),
        }
        command = commands.get(name.lower(), lambda: tell(f"no command {name}; /help lists them"))
        try:
            command()
        except BadOption as error:
            tell(str(error))
        return True

    def answer(self, question: str) -> None:
        """Ask, and paint the answer as it comes. Ctrl-C breaks it off; what was said stays in the conversation."""
        asked = [*self.messages, HumanMessage(question)]
        flow, parts = Flow(self.console, width=self.console.width), list[str]()
        told = [SystemMessage(self.system), *asked] if self.system else asked
        summary: Summary | None = None
        try:
            steps = self.llm.steps(told)
            try:
                for step in steps:
                    flow.show(step)
                    parts.append(step.text)
                    summary = step.summary
            finally:
                steps.close()
        except KeyboardInterrupt:
            tell("(broken off)")
        except MetaSDError as error:  # the conversation goes on without this question
            flow.end()
            tell(f"error: {error}")
            return
        flow.end()
        self.messages = [*asked, AIMessage("".join(parts).strip())]
        if summary is not None:
            self._rounds += summary.rounds
            self._summaries.append(summary)
            self.console.print(_line(summary), style="dim")

    def stats(self) -> None:
        """Tokens by who proposed them, and each drafter's rounds, over the whole conversation."""
        if not self._rounds:
            tell("nothing has been answered yet")
            return
        names = [name for name, _ in shares(self._rounds)]
        self.console.print(legend(names[:-1]))
        table = Table()
        for column in ("drafter", "tokens", "rounds", "accepted a round"):
            table.add_column(column, justify="left" if column == "drafter" else "right")
        for name, share in shares(self._rounds):
            own = [record for record in self._rounds if drafter_of(record.arm) == name]
            each = f"{sum(record.accepted for record in own) / len(own):.2f}" if own else "-"
            table.add_row(name, f"{share:.0%}", str(len(own)), each)
        self.console.print(table)
        tokens = sum(summary.completion_tokens for summary in self._summaries)
        seconds = sum(summary.total_s for summary in self._summaries)
        self.console.print(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s")

    def save(self, path: Path) -> None:
        """Write the conversation.

        Raises:
            BadOption: no path, or a file that cannot be written.
        """
        if path == Path():
            raise BadOption("/save", "", "the name of a file")
        messages = ([SystemMessage(self.system)] if self.system else []) + self.messages
        text = json.dumps(messages_to_dict(messages), indent=1) if path.suffix == ".json" else _as_text(messages)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as cause:
            raise BadOption("/save", str(path), "a file that can be written") from cause
        tell(f"saved {path.name}")

    def clear(self) -> None:
        """Forget what was said; what was learned about drafters stays."""
        self.messages = []


def _line(summary: Summary) -> str:
    rounds = len(summary.rounds) or 1
    rate = summary.completion_tokens / summary.total_s if summary.total_s else 0.0
    return f"{summary.completion_tokens} tokens, {summary.completion_tokens / rounds:.2f} a round, {rate:.1f} tokens/s"


def _as_text(messages: Sequence[BaseMessage]) -> str:
    names = {"human": "you", "ai": "model", "system": "system"}
    return "\n\n".join(f"{names.get(message.type, message.type)}: {message.text}" for message in messages)
