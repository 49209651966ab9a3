"""What commands show: colours by drafter, streamed text, what is being waited for, errors."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from metasd_langchain.errors import BadOption, MetaSDError
from metasd_langchain.values import PLAIN, RoundRecord, Step

__all__ = [
    "TARGET",
    "Flow",
    "colour",
    "drafter_of",
    "legend",
    "output",
    "quieten",
    "save_picture",
    "shares",
    "show_error",
    "tell",
    "waiting",
]

TARGET = "target"  # who supplies what no drafter proposed
# Okabe and Ito's palette, told apart by colour-blind eyes and readable on dark and light grounds
_COLOURS = {"suffix": "#56b4e9", "lookup": "#e69f00", "recycling": "#cc79a7", "recycling_tree": "#cc79a7"}
_OTHERS = ("#009e73", "#d55e00", "#f0e442", "#0072b2")
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_WIDTH = 120  # where there is no terminal
_MESSAGE = 400  # characters of an error; libraries put whole pages into theirs


def quieten() -> None:
    """Keep libraries' bars and notices off the screen. Call it before they are imported; what the user set stays."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # else tokenizers complains about forks
    }.items():
        os.environ.setdefault(name, value)


def output(*, record: bool = False) -> Console:
    """Standard output for text with styles."""
    console = Console(highlight=False, emoji=False, markup=False, record=record)
    if not console.is_terminal or record:
        console.width = _WIDTH
    return console


def _errors() -> Console:
    return Console(file=sys.stderr, highlight=False, emoji=False, markup=False)


def tell(message: str | Text) -> None:
    """A line on standard error."""
    _errors().print(message, soft_wrap=True)


def show_error(error: MetaSDError) -> None:
    """An error in one line, its hint in the next."""
    message = " ".join(str(error).split())
    hint = " ".join(error.hint.split())
    if hint:
        message = message.removesuffix(f" ({hint})")
    if len(message) > _MESSAGE:
        message = message[:_MESSAGE] + "..."
    tell(Text.assemble(("error: ", "bold red"), message))
    if hint:
        tell(Text.assemble(("hint: ", "bold"), hint))


def save_picture(console: Console, path: Path) -> None:
    """Save what a recording console showed as SVG, without rich's links to web fonts.

    Raises:
        BadOption: the file cannot be written.
    """
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="metasd demo"), flags=re.DOTALL)
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as cause:
        raise BadOption("svg", str(path), "a file that can be written") from cause
    tell(f"saved {path.name}")


class _Relay(logging.Handler):
    """Hands the package's log messages on: loading says there what takes long."""

    def __init__(self, say: object) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if callable(self._say):
            self._say(record.getMessage())


@contextmanager
def waiting(words: str = "", *, still: bool = False) -> Iterator[None]:
    """Show on standard error what is being waited for: a spinner with a clock. Where nothing can move, what the package
    logs (loading, converting) appears as lines.

    Args:
        words: shown at first.
        still: paint once and then rest, so that what is waited for can be timed.
    """
    errors = _errors()
    moving = errors.is_terminal and not errors.is_dumb_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = Progress(*columns, console=errors, transient=True, disable=not moving, auto_refresh=not still)
    task = progress.add_task(words or "starting")

    def say(message: str) -> None:
        if moving:
            progress.reset(task, description=message)
        else:
            errors.print(message, soft_wrap=True)

    logger = logging.getLogger("metasd_langchain")
    relay, level = _Relay(say), logger.level
    logger.addHandler(relay)
    logger.setLevel(logging.INFO)
    try:
        with progress:
            yield
    finally:
        logger.removeHandler(relay)
        logger.setLevel(level)


# -- who drafted what --------------------------------------------------------------------------------------------------


def drafter_of(arm: str) -> str:
    """Name of the drafter behind an arm; TARGET for plain."""
    return TARGET if arm == PLAIN else arm.partition("@")[0]


def colour(drafter: str) -> str:
    """A drafter's style; "" (the terminal's own) for the target."""
    if drafter == TARGET:
        return ""
    return _COLOURS.get(drafter) or _OTHERS[sum(drafter.encode()) % len(_OTHERS)]


def legend(drafters: Iterable[str]) -> Text:
    """Which colour stands for which drafter."""
    text = Text("tokens by who proposed them:  ")
    for name in drafters:
        text.append(f"■ {name}  ", colour(name))
    return text.append(f"■ {TARGET}")


def shares(rounds: Sequence[RoundRecord]) -> list[tuple[str, float]]:
    """Share of an answer's tokens by who proposed them, largest first, the target last."""
    counts: Counter[str] = Counter()
    for record in rounds:
        counts[drafter_of(record.arm)] += record.accepted
        counts[TARGET] += record.committed - record.accepted
    total = counts.total() or 1
    named = sorted((name for name in counts if name != TARGET and counts[name]), key=lambda name: -counts[name])
    return [(name, counts[name] / total) for name in (*named, TARGET)]


class Flow:
    """Streamed text, broken into lines between words, every token in the colour of the drafter that proposed it.

    Args:
        console: where to.
        indent: in front of every line.
        width: of a line; 0 leaves lines as they are, as the terminal breaks them.
    """

    def __init__(self, console: Console, indent: str = "", width: int = 0) -> None:
        self._console, self._indent, self._width = console, indent, width
        self._word = Text()
        self._column = -1  # nothing on the line yet
        self._begun = False

    def show(self, step: Step) -> None:
        """Append the text of a step."""
        style = colour(drafter_of(step.arm))
        for piece in step.pieces:
            self.write(piece.text.translate(_CONTROL), style if piece.drafted else "")

    def write(self, text: str, style: str = "") -> None:
        """Append text."""
        if not self._width:
            self._put(Text(text, style))
            return
        for part in re.findall(r"\s|\S+", text):
            if part == "\n":
                self._flush()
                self._break()
            elif part.isspace():
                self._flush()
                self._word.append(part, style)
            else:
                self._word.append(part, style)

    def end(self) -> None:
        """Finish the last line."""
        self._flush()
        self._put(Text("\n"))
        self._column = -1

    def _flush(self) -> None:
        if not self._word:
            return
        if self._column >= 0 and self._column + self._word.cell_len > self._width:
            self._break()
            self._word = _unspaced(self._word)
        if not self._begun:  # a model begins with the space behind the prompt
            self._begun, self._word = True, _unspaced(self._word)
        if self._column < 0:
            self._put(Text(self._indent))
            self._column = 0
        self._put(self._word)
        self._column += self._word.cell_len
        self._word = Text()

    def _break(self) -> None:
        self._put(Text("\n"))
        self._column = -1

    def _put(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)


def _unspaced(word: Text) -> Text:
    return word[1:] if word.plain.startswith(" ") and len(word) > 1 else word
