r"""Prompts from JSON lines, in groups, in the form in which a model is asked.

``turns`` (Spec-Bench): the first turn, in the model's chat template, or as ``Question: ...\nAnswer:`` for a model
without one. ``prompt`` (HumanEval, our own): as it is. ``question`` (GSM8K): as ``turns``.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluators.errors import EvaluatorError

if TYPE_CHECKING:
    from metasd_langchain import Engine

__all__ = ["Prompt", "encode", "find", "load", "spread"]

# Spec-Bench counts the eight categories of MT-Bench as one task
_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
_SOURCES = {
    "spec_bench": "https://github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl)",
    "humaneval": "https://github.com/openai/human-eval (data/HumanEval.jsonl.gz)",
    "gsm8k": "https://github.com/openai/grade-school-math (grade_school_math/data)",
}
_OWN = "any JSON lines with a `prompt`, and a `task` to group by; public ones: " + ", ".join(_SOURCES.values())


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        name: its id in the file, for reports.
        group: the task it counts for.
        text: what a model without a chat template reads.
        question: what goes into a chat template, or None when `text` is read by every model.
    """

    name: str
    group: str
    text: str
    question: str | None = None


def find(file: str, data: str | None) -> Path:
    """The file as named, else inside the data folder (``--data``, else METASD_DATA, else ``../shared/data``).

    Raises:
        EvaluatorError: in neither place; says where the data comes from.
    """
    folder = Path(data or os.environ.get("METASD_DATA") or "../shared/data")
    for path in (Path(file), folder / file, folder / Path(file).name):
        if path.is_file():
            return path
    source = next((url for name, url in _SOURCES.items() if name in Path(file).name), _OWN)
    raise EvaluatorError(f"no {Path(file).name} here nor in the data folder (--data, METASD_DATA); source: {source}")


def load(path: Path) -> list[Prompt]:
    """All prompts of a file, in order.

    Raises:
        EvaluatorError: a line that is no JSON object or holds no prompt.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):  # JSON may hold other line ends
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), number, path.stem))
        except (ValueError, KeyError, TypeError, IndexError) as cause:
            raise EvaluatorError(
                f"{path.name}, line {number}: expected a JSON object with `turns`, `prompt` or `question`"
            ) from cause
    if not prompts:
        raise EvaluatorError(f"{path.name} holds no prompts")
    return prompts


def spread(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """`limit` prompts spread evenly over the groups, and inside a group evenly over the file; shuffled by the seed."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.group].append(prompt)
    quota = dict.fromkeys(groups, 0)
    left = min(len(prompts), len(prompts) if limit is None else limit)
    while left:
        for group, members in groups.items():
            if left and quota[group] < len(members):
                quota[group] += 1
                left -= 1
    chosen = [
        members[i * len(members) // quota[group]] for group, members in groups.items() for i in range(quota[group])
    ]
    random.Random(seed).shuffle(chosen)
    return chosen


def encode(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    """Ids of a prompt for the engine's model; every method is given the same."""
    tokenizer = engine.target.tokenizer
    if prompt.question is None or not getattr(tokenizer, "chat_template", None):
        return tuple(engine.target.encode(prompt.text))
    turn = [{"role": "user", "content": prompt.question}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _prompt(row: Mapping[str, Any], number: int, stem: str) -> Prompt:
    name = str(row.get("question_id", row.get("task_id", number)))
    group = str(row.get("task", row.get("category", stem)))
    group = "mt_bench" if group in _MT_BENCH else group
    if "prompt" in row:
        return Prompt(name, group, _text(row["prompt"]))
    turns = row.get("turns", [])
    if not isinstance(turns, list):
        raise TypeError("turns is a list of strings")
    question = _text(turns[0] if "turns" in row else row["question"])
    return Prompt(name, group, f"Question: {question}\nAnswer:", question)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("a prompt is a string of at least one character")
    return value
