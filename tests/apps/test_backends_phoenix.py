"""A run in a real Phoenix: read back through its APIs, everything is what the model itself reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apps import backends
from tests.apps.backends import Backend, Shown, get, post

pytestmark = backends.needs_backends

_SPANS = "query($id: ID!, $if: String) { node(id: $id) { ... on Project {\
 spans(first: 1000, filterCondition: $if) { edges { node { name spanId } } } } } }"
_TRACE = "query($id: ID!, $trace: ID!) { node(id: $id) { ... on Project {\
 trace(traceId: $trace) { rootSpan { cumulativeTokenCountTotal } } } } }"


class Phoenix:
    """The server's answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def raw(self, project: str) -> list[dict[str, Any]]:
        answer = get(f"{self.url}/v1/projects/{project}/spans", limit=1000)
        assert not answer["next_cursor"]
        spans: list[dict[str, Any]] = answer["data"]
        return spans

    def backend(self, project: str, told: dict[str, Any]) -> Backend:
        return Backend(told, tuple(_shown(span) for span in self.raw(project)))

    def ask(self, query: str, **variables: str) -> Any:
        answer = post(f"{self.url}/graphql", {"query": query, "variables": variables})
        assert "errors" not in answer, answer["errors"]
        return answer["data"]

    def project(self, name: str) -> dict[str, Any]:
        edges = self.ask("{ projects { edges { node { id name tokenCountTotal } } } }")["projects"]["edges"]
        (found,) = (edge["node"] for edge in edges if edge["node"]["name"] == name)
        return dict(found)

    def matching(self, project: str, condition: str) -> set[str]:
        """Ids of the spans that a filter of the page's search field leaves."""
        node = self.ask(_SPANS, **{"id": self.project(project)["id"], "if": condition})["node"]
        return {edge["node"]["spanId"] for edge in node["spans"]["edges"]}


def _shown(span: dict[str, Any]) -> Shown:
    where = span["context"]
    return Shown(
        span["name"],
        where["trace_id"],
        where["span_id"],
        span["parent_id"],
        span["status_code"],
        span["status_message"],
        span["attributes"],
    )


@pytest.fixture(scope="module")
def phoenix() -> Iterator[Phoenix]:
    with backends.server("phoenix") as url:
        yield Phoenix(url)


def _sent(phoenix: Phoenix, folder: Path, project: str, *options: str) -> Backend:
    told = backends.run_app("phoenix", folder / "told.json", "--url", phoenix.url, "--project", project, *options)
    return phoenix.backend(project, told)


@pytest.fixture(scope="module")
def under(phoenix: Phoenix, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The run under OpenInference's spans of LangChain."""
    return _sent(phoenix, tmp_path_factory.mktemp("under"), "under")


@pytest.fixture(scope="module")
def alone(phoenix: Phoenix, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The run without an instrumentor, content and all."""
    options = ("--instrumentor", "none", "--content")
    return _sent(phoenix, tmp_path_factory.mktemp("alone"), "alone", *options)


def test_every_call_shows_what_the_model_reported(under: Backend, alone: Backend) -> None:
    backends.check_calls(under)
    backends.check_calls(alone)


def test_calls_lie_under_their_step(under: Backend, alone: Backend) -> None:
    backends.check_nesting(under)
    backends.check_nesting_alone(alone)


def test_errors_are_errors_and_calls_given_up_are_none(under: Backend, alone: Backend) -> None:
    backends.check_ends(under, "ERROR")
    backends.check_ends(alone, "ERROR")


@pytest.mark.parametrize("name", ["under", "alone"])
def test_tokens_are_counted_once(phoenix: Phoenix, name: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(name)
    project = phoenix.project(name)
    for run, tokens in backend.usage():
        trace = phoenix.ask(_TRACE, id=project["id"], trace=run["trace_id"])["node"]["trace"]
        assert trace["rootSpan"]["cumulativeTokenCountTotal"] == tokens
    (broken,) = (span for span in backend.of(backend.run("run broken off")) if span.ours)
    given_up = sum(broken.attributes[f"gen_ai.usage.{kind}_tokens"] for kind in ("input", "output"))
    assert project["tokenCountTotal"] == sum(tokens for _, tokens in backend.usage()) + given_up


def test_no_text_is_sent_unless_asked_for(phoenix: Phoenix, under: Backend, alone: Backend) -> None:
    backends.check_silence(phoenix.raw("under"))
    (answer, *_) = (span for span in alone.spans if span.attributes.get("metasd.step") == "answer")
    assert "duty engineer" in answer.attributes["input.value"]
    assert answer.attributes["output.value"]


@pytest.mark.parametrize(
    ("condition", "key", "wanted"),
    [
        ("metasd.step == 'answer'", "metasd.step", lambda value: value == "answer"),
        ("metasd.bandit.policy == 'hinted_ucb'", "metasd.bandit.policy", lambda value: value == "hinted_ucb"),
        ("attributes['metasd']['accepted_length']['mean'] > 2", "metasd.accepted_length.mean", lambda value: value > 2),
        (
            "'plain' in attributes['metasd']['drafters']['names']",
            "metasd.drafters.names",
            lambda names: "plain" in names,
        ),
        ("attributes['error']['type'] == 'PromptTooLong'", "error.type", lambda value: value == "PromptTooLong"),
    ],
)
def test_filters_of_the_readme_find_the_spans(
    phoenix: Phoenix, under: Backend, condition: str, key: str, wanted: Any
) -> None:
    found = phoenix.matching("under", condition)
    assert found == {span.id for span in under.spans if key in span.attributes and wanted(span.attributes[key])}
    assert found
    assert condition in (backends.ROOT / "integrations" / "phoenix" / "README.md").read_text()
