"""A run scraped by a real Prometheus: its numbers are the model's own, and every rule and panel has finite data."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apps import backends
from tests.apps.backends import get

pytestmark = backends.needs_backends

HERE = backends.ROOT / "integrations" / "prometheus_grafana"
SECONDS = 12  # of play; at least one play, and rates need several scrapes
SETTLED = 4.0  # seconds after the last call, by when it has been scraped, and rules have seen it
# what Grafana puts in for a reader who has chosen nothing
VARIABLES = {"$__rate_interval": "5m", "$__range": "10m", "$model": ".*", "$step": ".*", "$price": "1.00"}


class Prometheus:
    """The server's answers as of a moment, and what the app it scraped had reported by then."""

    def __init__(self, url: str, told: dict[str, Any], moment: float) -> None:
        self.url, self.told, self.moment = url, told, moment

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        answer = get(f"{self.url}/api/v1/query", query=expression, time=self.moment)
        assert answer["status"] == "success"
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def last(self, metric: str, by: str) -> dict[str, float]:
        """Values of a metric by a label."""
        return {labels.get(by, ""): value for labels, value in self.query(f"sum by ({by}) ({metric})")}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    assert shutil.which("prometheus"), "Prometheus is not installed: apt-get install prometheus"
    report = tmp_path_factory.mktemp("prometheus") / "told.json"
    port = _free_port()
    with backends.server("prometheus_grafana", TARGET=f"127.0.0.1:{port}", EVERY="1s") as url:
        options = ["--port", str(port), "--seconds", str(SECONDS), "--linger", str(2 * SETTLED), "--policy", "random"]
        told = backends.run_app("prometheus_grafana", report, *options)
        yield Prometheus(url, told, report.stat().st_mtime + SETTLED)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _calls(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [call for run in prometheus.told["runs"] for call in run["calls"] if "rounds" in call]


def test_counters_by_drafter_are_what_the_model_reported(prometheus: Prometheus) -> None:
    # calls that were broken off report nothing to LangChain, so theirs, which have a step of their own, stay out
    for metric, key in (("rounds", "rounds"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
        shown = prometheus.last(
            f'metasd_spec_decode_{metric}_total{{metasd_step!="broken off"}}', "metasd_drafter_name"
        )
        told: dict[str, float] = {}
        for call in _calls(prometheus):
            for arm, sums in call["arms"].items():
                told[arm] = told.get(arm, 0) + sums[key]
        assert shown == told
        assert sum(told.values()) > 0


def test_tokens_and_calls_by_step_are_what_the_model_reported(prometheus: Prometheus) -> None:
    for kind, key in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        metric = f'gen_ai_client_token_usage_sum{{gen_ai_token_type="{kind}",metasd_step!="broken off"}}'
        told: dict[str, float] = {}
        for call in _calls(prometheus):
            told[call["step"]] = told.get(call["step"], 0) + call["usage"][key]
        assert prometheus.last(metric, "metasd_step") == told
    runs = len([run for run in prometheus.told["runs"] if run["name"] == "run that fails"])
    duration = "gen_ai_client_operation_duration_seconds_count"
    assert prometheus.last(f'{duration}{{error_type="PromptTooLong"}}', "metasd_finish_reason") == {"error": runs}
    assert prometheus.last(f'{duration}{{metasd_step="broken off"}}', "metasd_finish_reason") == {"cancelled": runs}
    assert prometheus.last("metasd_requests_active", "gen_ai_request_model") == {_calls(prometheus)[0]["model"]: 0}


def _panels() -> list[tuple[str, str]]:
    panels = json.loads((HERE / "dashboard.json").read_text())["panels"]
    return [(f"{panel['title']} {target['refId']}", target["expr"]) for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize(("title", "expression"), _panels(), ids=[title for title, _ in _panels()])
def test_every_panel_has_finite_data(prometheus: Prometheus, title: str, expression: str) -> None:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    found = prometheus.query(expression)
    assert found
    assert all(math.isfinite(value) for _, value in found)


def test_every_recording_rule_has_finite_data_and_no_rule_fails(prometheus: Prometheus) -> None:
    groups = get(f"{prometheus.url}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    wanted = [rule["record"] for rule in _rules("recording.yml")]
    assert sorted(recorded) == sorted(wanted)
    for name in recorded:
        found = prometheus.query(name)
        assert found, name
        assert all(math.isfinite(value) for _, value in found), name
    assert sum(value for _, value in prometheus.query("drafter:metasd_rounds:share5m")) == pytest.approx(1.0)


def _rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((HERE / "rules" / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_give_hand_computed_numbers_and_alerts_fire_for_their_reason(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool comes with Prometheus"
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "rules/tests.yml"]):
        done = subprocess.run([promtool, *command], check=False, cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (HERE / "rules" / "tests.yml").read_text()
    assert [rule["alert"] for rule in _rules("alerts.yml") if rule["alert"] not in tested] == []
