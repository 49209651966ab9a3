"""The dashboard and the rules name metrics and labels that a call really leaves. Needs no Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from metasd_langchain import MetaSDError
from tests.bugs.kit import PROMPT, make

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

HERE = Path(__file__).parents[2] / "integrations" / "prometheus_grafana"
_ADDED = {"instance", "job", "le", "alertname"}  # by Prometheus
_UNITS = {"s": "_seconds"}


def _expressions() -> dict[str, str]:
    found = {}
    for panel in json.loads((HERE / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for file in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((HERE / "rules" / file).read_text())["groups"]:
            for rule in group["rules"]:
                found[rule.get("record") or rule["alert"]] = rule["expr"]
    return found


def _exposed(name: str, unit: str, data: Any) -> set[str]:
    """Names that OpenTelemetry's exporter for Prometheus gives a metric."""
    base = name.replace(".", "_") + _UNITS.get(unit, "")
    if hasattr(data, "is_monotonic"):
        return {f"{base}_total" if data.is_monotonic else base}
    if any(hasattr(point, "bucket_counts") for point in data.data_points):
        return {f"{base}_{part}" for part in ("bucket", "sum", "count")}
    return {base}


@pytest.fixture
def exposed(meters: InMemoryMetricReader) -> tuple[set[str], set[str]]:
    """Metrics and labels after a call that goes through, one that is streamed and one that fails."""
    llm = make(memory_key="answer", max_model_len=256)
    llm.invoke(PROMPT)
    list(llm.stream(PROMPT))
    with pytest.raises(MetaSDError):
        llm.invoke("word " * 300)
    names, labels = set[str](), set[str]()
    data = meters.get_metrics_data()
    assert data is not None
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                names |= _exposed(metric.name, metric.unit, metric.data)
                for point in metric.data.data_points:
                    labels |= {str(key).replace(".", "_") for key in point.attributes}
    return names, labels


def test_every_metric_and_label_of_the_dashboard_and_the_rules_exists(exposed: tuple[set[str], set[str]]) -> None:
    names, labels = exposed
    expressions = _expressions()
    assert len(expressions) > 30
    used = set[str]()
    for title, expression in expressions.items():
        code = re.sub(r"\b(?:drafter|model|step):[a-z0-9_:]+", "", re.sub(r'"[^"]*"', '""', expression))
        for word in re.findall(r"\b(?:metasd|gen_ai|error)_[a-z_]+", code):
            assert word in names | labels, f"{title}: {word}"
            used.add(word)
        for word in re.findall(r"(?:by|on) \(([^)]*)\)", code):
            assert {label.strip() for label in word.split(",") if label.strip()} <= labels | _ADDED, title
    assert {name for name in names if "accepted_length_" not in name} - used <= {
        "gen_ai_client_token_usage_bucket",
        "gen_ai_client_token_usage_count",
        "gen_ai_client_operation_time_to_first_chunk_seconds_sum",
        "gen_ai_client_operation_time_to_first_chunk_seconds_count",
        "metasd_spec_decode_round_duration_seconds_bucket",
    }, "a metric that is shown nowhere"


def test_recorded_names_that_rules_use_are_recorded() -> None:
    expressions = _expressions()
    for title, expression in expressions.items():
        for name in re.findall(r"\b(?:drafter|model|step):[a-z0-9_:]+", expression):
            assert name in expressions, f"{title}: {name}"


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads((HERE / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
