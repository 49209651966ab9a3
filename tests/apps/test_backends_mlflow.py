"""A run in a real MLflow: read back through its REST API, everything is what the model itself reported."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.apps import backends
from tests.apps.backends import Backend, Shown, get, post

pytestmark = backends.needs_backends


class MLflow:
    """The server's answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def trace(self, trace_id: str) -> dict[str, Any]:
        trace: dict[str, Any] = get(f"{self.url}/api/3.0/mlflow/traces/get", trace_id=f"tr-{trace_id}")["trace"]
        return trace

    def backend(self, told: dict[str, Any]) -> Backend:
        traces = [self.trace(run["trace_id"]) for run in told["runs"]]
        return Backend(told, tuple(_shown(span) for trace in traces for span in trace["spans"]))

    def matching(self, experiment: str, condition: str) -> set[str]:
        """Ids of the traces that a filter of the page's search field leaves."""
        place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}}
        body = {"locations": [place], "filter": condition, "max_results": 100}
        traces = post(f"{self.url}/api/3.0/mlflow/traces/search", body).get("traces", [])
        return {trace["trace_id"].removeprefix("tr-") for trace in traces}


def _shown(span: Mapping[str, Any]) -> Shown:
    parent = span.get("parent_span_id")
    status = span["status"]
    return Shown(
        span["name"],
        _hex(span["trace_id"]),
        _hex(span["span_id"]),
        _hex(parent) if parent else None,
        status.get("code", "STATUS_CODE_UNSET"),
        status.get("message", ""),
        {item["key"]: _plain(item.get("value", {})) for item in span["attributes"]},
    )


def _hex(encoded: str) -> str:
    return base64.b64decode(encoded).hex()


def _plain(value: Mapping[str, Any]) -> Any:
    """An OTLP value as Python's."""
    if not value:  # an empty one
        return None
    ((kind, inner),) = value.items()
    if kind == "array_value":
        return [_plain(one) for one in inner.get("values", [])]
    if kind == "kvlist_value":
        return {one["key"]: _plain(one.get("value", {})) for one in inner.get("values", [])}
    return int(inner) if kind == "int_value" else inner


@pytest.fixture(scope="module")
def mlflow() -> Iterator[MLflow]:
    with backends.server("mlflow") as url:
        yield MLflow(url)


def _sent(mlflow: MLflow, folder: Path, experiment: str, *options: str) -> Backend:
    told = backends.run_app("mlflow", folder / "told.json", "--url", mlflow.url, "--experiment", experiment, *options)
    return mlflow.backend(told)


@pytest.fixture(scope="module")
def under(mlflow: MLflow, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The run under OpenInference's spans of LangChain."""
    return _sent(mlflow, tmp_path_factory.mktemp("under"), "under")


@pytest.fixture(scope="module")
def alone(mlflow: MLflow, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The run without an instrumentor, content and all."""
    options = ("--instrumentor", "none", "--content")
    return _sent(mlflow, tmp_path_factory.mktemp("alone"), "alone", *options)


def test_every_call_shows_what_the_model_reported(under: Backend, alone: Backend) -> None:
    backends.check_calls(under)
    backends.check_calls(alone)


def test_calls_lie_under_their_step(under: Backend, alone: Backend) -> None:
    backends.check_nesting(under)
    backends.check_nesting_alone(alone)


def test_errors_are_errors_and_calls_given_up_are_none(mlflow: MLflow, under: Backend, alone: Backend) -> None:
    for backend in (under, alone):
        backends.check_ends(backend, "STATUS_CODE_ERROR")
        states = {run["name"]: mlflow.trace(run["trace_id"])["trace_info"]["state"] for run in backend.told["runs"]}
        assert states == {"agent run": "OK", "run that fails": "ERROR", "run broken off": "OK"}


@pytest.mark.parametrize("name", ["under", "alone"])
def test_tokens_are_counted_once(mlflow: MLflow, name: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(name)
    for run, tokens in backend.usage():
        counted = json.loads(mlflow.trace(run["trace_id"])["trace_info"]["trace_metadata"]["mlflow.trace.tokenUsage"])
        assert counted["total_tokens"] == tokens
        assert counted["input_tokens"] == sum(call["usage"]["prompt_tokens"] for call in run["calls"])


def test_no_text_is_sent_unless_asked_for(mlflow: MLflow, under: Backend, alone: Backend) -> None:
    backends.check_silence([mlflow.trace(run["trace_id"]) for run in under.told["runs"]])
    (answer, *_) = (span for span in alone.spans if span.attributes.get("metasd.step") == "answer")
    assert "duty engineer" in answer.attributes["input.value"]
    assert answer.attributes["output.value"]


@pytest.mark.parametrize(
    ("condition", "runs"),
    [
        ("span.attributes.metasd.step LIKE '%answer%'", {"agent run"}),
        ("span.attributes.metasd.drafters.names LIKE '%suffix@16%'", {"agent run", "run broken off"}),
        ("span.attributes.error.type LIKE '%PromptTooLong%'", {"run that fails"}),
        ("trace.status = 'ERROR'", {"run that fails"}),
    ],
)
def test_filters_of_the_readme_find_the_traces(mlflow: MLflow, under: Backend, condition: str, runs: set[str]) -> None:
    found = mlflow.matching(under.told["experiment"], condition)
    assert found == {run["trace_id"] for run in under.told["runs"] if run["name"] in runs}
    assert condition in (backends.ROOT / "integrations" / "mlflow" / "README.md").read_text()
