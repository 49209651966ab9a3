"""What the apps share: their options, the model, the runs, and a report to compare a backend's answers with."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from opentelemetry import trace

from integrations.pipeline import Reported, State, agent, retriever
from metasd_langchain import MetaSDError, MetaSDLLM
from metasd_langchain.telemetry import setup_telemetry

__all__ = ["LONG", "QUESTIONS", "instrument", "make_llm", "parser", "pipeline", "play", "send", "show"]

QUESTIONS = (
    "What did the duty engineer do after the landslip broke the main?",
    "How much water do the three tanks hold together?",
    "What did the duty engineer do after the landslip broke the main?",  # again: now it is known to the drafters
)
_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_KIND = "openinference.span.kind"
_PATIENCE_S = 30.0
_WINDOW = 4096  # tokens; what does not fit fails
LONG = 2048


def parser(about: str) -> argparse.ArgumentParser:
    """Options of every app."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--model", default="tiny", help="tiny (random weights), embedded, or what MetaSDLLM takes")
    options.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many are asked")
    options.add_argument("--policy", default="hinted_ucb", help="of the bandit")
    options.add_argument("--content", action="store_true", help="put prompts and answers on the spans, too")
    options.add_argument("--instrumentor", choices=("openinference", "none"), default="openinference")
    options.add_argument("--json", type=Path, metavar="FILE", help="where to write what the model itself reported")
    return options


def make_llm(args: argparse.Namespace) -> MetaSDLLM:
    """The model of an app; "tiny" has random weights and needs no extra and no download."""
    options: dict[str, Any] = {"max_model_len": _WINDOW, "max_tokens": 64, "policy": args.policy}
    if args.model == "embedded":
        return MetaSDLLM(**options)
    if args.model != "tiny":
        return MetaSDLLM(model=args.model, **options)
    from metasd_langchain.testing.models import tiny_model, tiny_tokenizer

    return MetaSDLLM(model=(tiny_model(max_position_embeddings=_WINDOW), tiny_tokenizer()), **options)


def instrument(args: argparse.Namespace) -> None:
    """Have OpenInference trace LangChain's own steps, if that is asked for, with the process's tracer provider.

    Neither prompts nor answers leave the process unless ``--content`` says so: our spans hold none by default, but
    OpenInference's do.
    """
    if args.content:
        os.environ[_CONTENT] = "SPAN_ONLY"
    if args.instrumentor == "openinference":
        from openinference.instrumentation import TraceConfig
        from openinference.instrumentation.langchain import LangChainInstrumentor

        class Silent(TraceConfig):
            """Hides the variables of prompts, too, which no option of openinference-instrumentation 0.1.72 does."""

            def mask(self, key: str, value: Any, **options: Any) -> Any:
                return None if key.startswith("llm.prompt_template.") else super().mask(key, value, **options)

        config = TraceConfig() if args.content else Silent(hide_inputs=True, hide_outputs=True)
        LangChainInstrumentor().instrument(config=config)


def send(args: argparse.Namespace, endpoint: str, **telemetry: Any) -> list[dict[str, Any]]:
    """Set up telemetry, play, and see that all of it has been sent.

    Args:
        args: of `parser`.
        endpoint: an OTLP receiver of spans; the address without ``/v1/traces``.
        telemetry: more options of `setup_telemetry`.
    """
    # a server's first request may take seconds: longer than one would wait for in life
    options: dict[str, Any] = {"metrics": False, "timeout": _PATIENCE_S, "service_name": "metasd-demo", **telemetry}
    with setup_telemetry(endpoint, **options) as handle:
        instrument(args)
        llm = make_llm(args)
        runs = play(llm, pipeline(llm), QUESTIONS[: args.questions])
        llm.close()  # spans of calls that were broken off end with the engine
        if not handle.flush(_PATIENCE_S):
            print(f"{endpoint} did not take all spans within {_PATIENCE_S:.0f} s")
    return runs


def pipeline(llm: BaseLanguageModel[Any]) -> Runnable[State, State]:
    """The graph over the demo's document."""
    text = files("metasd_langchain.cli").joinpath("document.md").read_text(encoding="utf-8")
    return agent(llm, retriever(text))


def play(
    llm: BaseLanguageModel[Any], graph: Runnable[State, State], questions: Sequence[str] = QUESTIONS
) -> list[dict[str, Any]]:
    """The runs of an app: a question each, one that fails in its first node, and a stream that is broken off.

    Returns:
        A mapping a run: ``name``, ``trace_id``, ``error`` (class name or None), ``calls`` as `Reported` has them.
    """

    def ask(question: str, heard: Reported) -> State:
        return graph.invoke({"question": question}, {"callbacks": [heard]})

    def break_off(question: str, heard: Reported) -> None:
        config: Any = {"callbacks": [heard], "run_name": "broken off"}
        # so long that it cannot have come to its end before it is given up
        stream: Any = llm.stream(question, config, max_tokens=LONG, min_tokens=LONG)
        next(stream)
        stream.close()

    runs = [_run("agent run", ask, question) for question in questions]
    runs.append(_run("run that fails", ask, "Where? " * 2 * _WINDOW))
    runs.append(_run("run broken off", break_off, questions[0]))
    return runs


def _run(name: str, what: Any, question: str) -> dict[str, Any]:
    heard, error = Reported(), None
    with trace.get_tracer("integrations").start_as_current_span(name, attributes={_KIND: "CHAIN"}) as span:
        try:
            what(question, heard)
        except MetaSDError as failure:
            error = type(failure).__qualname__
            span.set_attribute("error.type", error)
            span.set_status(trace.StatusCode.ERROR, error)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    return {"name": name, "trace_id": trace_id, "error": error, "calls": heard.calls}


def show(args: argparse.Namespace, runs: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Print a line a call, and write the report where it is wanted."""
    for run in runs:
        print(f"{run['name']}  trace {run['trace_id']}  {run['error'] or 'ok'}")
        for call in run["calls"]:
            print(f"  {call['step'] or '-':<10}", call.get("error") or _line(call))
    if args.json is not None:
        args.json.write_text(json.dumps({"runs": runs, **more}), encoding="utf-8")


def _line(call: Mapping[str, Any]) -> str:
    usage, arms = call["usage"], ", ".join(f"{name} {sums['rounds']}" for name, sums in call["arms"].items())
    tokens = f"{usage['prompt_tokens']:>5} + {usage['completion_tokens']:>3} tokens"
    return f"{tokens}  {call['accepted_length']:5.2f} a round  rounds by arm: {arms}"
