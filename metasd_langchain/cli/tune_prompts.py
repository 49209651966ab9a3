"""Prompts that ``metasd tune`` measures with: the user's file, or one of each kind of the demo's calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from metasd_langchain.cli.prompts import CALLS, FIELDS, QUESTION
from metasd_langchain.errors import BadOption, RequestError

__all__ = ["Prompt", "built_in", "fitting", "read", "rendered"]

_PASSAGES = ("When something goes wrong", "Storage and pressure")  # the answer's last, next to the question


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        name: says which it is without its text.
        text: what a model without a chat template reads.
        question: what goes into a chat template, or None when every model reads `text`.
        stop: strings that end the answer.
        cap: most tokens the answer ever needs, or None.
    """

    name: str
    text: str
    question: str | None = None
    stop: tuple[str, ...] = ()
    cap: int | None = None


def read(path: Path) -> list[Prompt]:
    """Prompts of a file: ``.txt``, parted by blank lines, or ``.jsonl`` with ``prompt`` or ``turns`` in every line.

    ``prompt`` is read as it is; the first of ``turns``, and ``question``, in the model's chat template.

    Raises:
        BadOption: no such file, not text, another kind of file, nothing in it.
        RequestError: a line that holds no prompt, named by its number.
    """
    kind = path.suffix.lower()
    if kind not in (".txt", ".jsonl"):
        raise BadOption("prompts", str(path), "a .txt file (blank lines part prompts) or a .jsonl file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as cause:
        raise BadOption("prompts", str(path), "a readable text file in UTF-8") from cause
    found = _lines(text, path.name) if kind == ".jsonl" else _blocks(text)
    if not found:
        raise BadOption("prompts", str(path), "a file with at least one prompt")
    return found


def built_in() -> list[Prompt]:
    """The demo's five kinds of calls, over passages of the demo's document."""
    document = files("metasd_langchain.cli").joinpath("document.md").read_text(encoding="utf-8")
    by_title = {
        title.strip(): " ".join(body.split()) for title, _, body in (p.partition("\n") for p in document.split("\n## "))
    }
    best, other = (by_title[title] for title in _PASSAGES)
    inputs = {
        "question": QUESTION,
        "passage": best,
        "passages": f"{other} {best}",
        "arguments": ", ".join(FIELDS),
        "assignments": "\n".join(f"        self.{name} = {name}" for name in FIELDS),
        "first": FIELDS[0],
    }
    return [Prompt(call.name, call.template.format(**inputs), stop=call.stop, cap=call.cap) for call in CALLS.values()]


def rendered(tokenizer: Any, prompt: Prompt) -> str:
    """The text the model reads.

    Raises:
        RequestError: the model's chat template cannot be applied.
    """
    if prompt.question is None or not getattr(tokenizer, "chat_template", None):
        return prompt.text
    turn = [{"role": "user", "content": prompt.question}]
    try:
        return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    except Exception as cause:  # a template is code that came with the model
        raise RequestError(f"{prompt.name}: the model's chat template fails ({type(cause).__name__})") from cause


def fitting(prompts: Sequence[Prompt], target: Any, most: int) -> tuple[list[tuple[Prompt, str]], int]:
    """At most `most` prompts that fit the model's window, with their texts, and how many did not fit.

    Drawn from all over the file, the same ones every time.

    Raises:
        RequestError: none fits.
    """
    order = list(prompts)
    if len(order) > most:
        random.Random(0).shuffle(order)
    found: list[tuple[Prompt, str]] = []
    skipped = 0
    for prompt in order:
        if len(found) == most:
            break
        text = rendered(target.tokenizer, prompt)
        if len(target.encode(text)) < target.lm.window:
            found.append((prompt, text))
        else:
            skipped += 1
    if not found:
        raise RequestError(
            f"no prompt fits the model's window of {target.lm.window} tokens",
            hint="shorten the prompts or use a model with a longer window; nothing is cut silently",
        )
    return found, skipped


def _blocks(text: str) -> list[Prompt]:
    blocks = [block.strip("\n") for block in re.split(r"\n[^\S\n]*\n", text) if block.strip()]
    return [Prompt(f"prompt {number}", block) for number, block in enumerate(blocks, 1)]


def _lines(text: str, name: str) -> list[Prompt]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold other line ends
        if not line.strip():
            continue
        try:
            found.append(_prompt(json.loads(line), f"line {number}"))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise RequestError(
                f"{name}, line {number}: expected a JSON object with `prompt` or `turns`"
            ) from None  # the cause would quote the prompt
    return found


def _prompt(row: Any, name: str) -> Prompt:
    if not isinstance(row, dict):
        raise TypeError("no object")
    if "prompt" in row:
        return Prompt(name, _text(row["prompt"]))
    turns = row["turns"] if "turns" in row else [row["question"]]
    if not isinstance(turns, list):
        raise TypeError("no list of turns")
    question = _text(turns[0])
    return Prompt(name, f"Question: {question}\nAnswer:", question)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("a prompt is a string of at least one character")
    value.encode()  # a lone surrogate is no text
    return value
