"""``metasd generate``: one answer, streamed, or as JSON for scripts."""

from __future__ import annotations

import atexit
import gc
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.text import Text

from metasd_langchain.cli.screen import Flow, colour, output, shares, tell, waiting
from metasd_langchain.errors import RequestError
from metasd_langchain.models.load import uncollected
from metasd_langchain.values import Step, Summary

__all__ = ["run"]


def run(prompt: str, options: Mapping[str, object], *, as_json: bool, stats: bool) -> None:
    """Generate and print.

    Args:
        prompt: text, or "-" for standard input.
        options: fields of MetaSDLLM.
        as_json: one JSON object on standard output and nothing else.
        stats: who drafted what, on standard error.

    Raises:
        MetaSDError: as MetaSDLLM.
    """
    prompt = _read(prompt)
    atexit.register(gc.freeze)  # else the interpreter goes through a million objects, for a second, before it ends
    with waiting(), uncollected:
        # inside, because these imports take as long as loading a small model; LangChain would take another half second
        from metasd_langchain.local import LocalModel
        from metasd_langchain.runtime import finish_info

        model = LocalModel(**options)
        steps = model.steps(prompt)  # loads the weights
    shown = list(steps) if as_json else list(_streamed(steps))
    summary = next(step.summary for step in reversed(shown) if step.summary is not None)
    if as_json:
        name = model._model_name  # noqa: SLF001 - only classes for users have a public one
        print(json.dumps(_answer(shown, summary, finish_info(name, summary)), ensure_ascii=False))
    if stats:
        _show_stats(summary)


def _read(prompt: str) -> str:
    """The prompt itself, or all of standard input for "-", nothing stripped."""
    try:
        if prompt == "-":
            prompt = sys.stdin.read() if sys.stdin else ""
        prompt.encode()  # bytes of an argument that are no text arrive as lone surrogates
    except UnicodeError as cause:
        raise RequestError("the prompt is not valid UTF-8") from cause
    if not prompt:
        raise RequestError("the prompt is empty", hint="a prompt has at least one character")
    return prompt


def _streamed(steps: Iterator[Step]) -> Iterator[Step]:
    """Print steps while passing them on. What is piped gets the very text; a terminal gets colours and no codes."""
    console = output()
    flow = Flow(console) if console.is_terminal else None
    for step in steps:
        if flow is not None:
            flow.show(step)
        else:
            sys.stdout.write(step.text)
            sys.stdout.flush()
        yield step
    print()


def _answer(steps: list[Step], summary: Summary, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text": "".join(step.text for step in steps),
        "ids": [token for step in steps for token in step.tokens],
        **facts,
        "rounds": [asdict(record) for record in summary.rounds],
        "values": dict(summary.values),
    }


def _show_stats(summary: Summary) -> None:
    parts = [Text(f"{name} {share:.0%}", colour(name)) for name, share in shares(summary.rounds)]
    rounds = len(summary.rounds) or 1
    tell(Text("proposed by: ").append_text(Text(", ").join(parts)))
    tell(
        f"{summary.completion_tokens} tokens in {summary.total_s:.2f} s"
        f" ({summary.completion_tokens / max(summary.total_s, 1e-9):.1f} a second),"
        f" first after {summary.first_token_s:.2f} s, {summary.completion_tokens / rounds:.2f} a round,"
        f" policy {summary.policy}"
    )
