"""What is counted over calls: names, units, values, labels, and that series stay few."""

from __future__ import annotations

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import NoOpTracerProvider

from metasd_langchain.telemetry import metrics as counted
from metasd_langchain.telemetry.metrics import FLUSH_ROUNDS
from metasd_langchain.values import Summary
from tests.unit.calls import CANARY, ROUNDS, record, start, summary

BASE = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "metasd",
    "gen_ai.request.model": "gemma-3-270m",
}


def read(reader):
    """Metric name -> the metric."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def points(reader, name):
    """Labels that vary -> a point's value, or (count, sum) of a histogram."""
    found = {}
    for point in read(reader)[name].data.data_points:
        labels = {key: value for key, value in point.attributes.items() if key not in BASE}
        assert {**BASE, **labels} == point.attributes
        value = point.value if hasattr(point, "value") else (point.count, pytest.approx(point.sum))
        found[tuple(sorted(labels.items()))] = value
    return found


def drafter(name, step="rewrite"):
    return tuple(sorted({"metasd.drafter.name": name, **({"metasd.step": step} if step else {})}.items()))


def play(rounds=ROUNDS, step="rewrite", ended=None, **options):
    call = start(step=step, **options)
    for one in rounds:
        call.round(one)
    call.end(summary(rounds) if ended is None else ended)


def test_what_a_call_adds(meters):
    play(stream=True)
    found = read(meters)
    assert {name: metric.unit for name, metric in found.items()} == {
        "gen_ai.client.operation.duration": "s",
        "gen_ai.client.operation.time_to_first_chunk": "s",
        "gen_ai.client.token.usage": "{token}",
        "metasd.requests.active": "{request}",
        "metasd.spec_decode.rounds": "{round}",
        "metasd.spec_decode.draft_tokens": "{token}",
        "metasd.spec_decode.accepted_tokens": "{token}",
        "metasd.spec_decode.accepted_tokens_per_position": "{token}",
        "metasd.spec_decode.accepted_length": "{token}",
        "metasd.spec_decode.round.duration": "s",
        "metasd.bandit.arm.value": "{reward}",
    }
    assert points(meters, "metasd.spec_decode.rounds") == {
        drafter("plain"): 4,
        drafter("suffix@16"): 2,
        drafter("recycling@4"): 1,
    }
    assert points(meters, "metasd.spec_decode.draft_tokens") == {
        drafter("plain"): 0,
        drafter("suffix@16"): 14,
        drafter("recycling@4"): 4,
    }
    assert points(meters, "metasd.spec_decode.accepted_tokens") == {
        drafter("plain"): 0,
        drafter("suffix@16"): 7,
        drafter("recycling@4"): 2,
    }
    step = ("metasd.step", "rewrite")
    assert points(meters, "gen_ai.client.token.usage") == {
        (("gen_ai.token.type", "input"), step): (1, 11),
        (("gen_ai.token.type", "output"), step): (1, 16),
    }
    assert points(meters, "gen_ai.client.operation.time_to_first_chunk") == {(step,): (1, 0.21)}
    ((labels, (count, seconds)),) = points(meters, "gen_ai.client.operation.duration").items()
    assert (labels, count) == ((("metasd.finish_reason", "stop"), step), 1)
    assert 0 < seconds.expected < 60
    assert points(meters, "metasd.requests.active") == {(): 0}
    assert points(meters, "metasd.bandit.arm.value") == {
        (("metasd.bandit.policy", "hinted_ucb"), ("metasd.drafter.name", "plain"), step): 1.0
    }


def test_positions_count_how_far_drafts_got(meters):
    play([record("a@4", 4, n) for n in (0, 2, 4, 4)], step="one")
    play([record("a@4", 4, 1)], step="two")
    assert points(meters, "metasd.spec_decode.accepted_tokens_per_position") == {
        (("metasd.draft.position", position), ("metasd.drafter.name", "a@4")): count
        for position, count in enumerate((4, 3, 2, 2))
    }


def test_accepted_length_is_a_calls_mean_by_drafter_that_drafted(meters):
    play()
    play([record("suffix@16", 10, 3), record("suffix@16", 10, 4)])
    assert points(meters, "metasd.spec_decode.accepted_length") == {
        drafter("suffix@16"): (2, 1 + 7 / 2 + 1 + 7 / 2),
        drafter("recycling@4"): (1, 3.0),
    }


def test_a_rounds_duration_is_by_drafter_and_without_the_prompts(meters):
    play()
    assert points(meters, "metasd.spec_decode.round.duration") == {
        drafter("plain", ""): (3, 0.15),  # the first of four took 0.2 s
        drafter("suffix@16", ""): (2, 0.1),
        drafter("recycling@4", ""): (1, 0.05),
    }


def test_buckets_fit_what_is_measured(meters):
    play(stream=True)
    found = read(meters)
    bounds = {
        name: metric.data.data_points[0].explicit_bounds
        for name, metric in found.items()
        if hasattr(metric.data.data_points[0], "explicit_bounds")
    }
    assert bounds["gen_ai.client.operation.duration"] == tuple(0.01 * 2**n for n in range(14))
    assert bounds["gen_ai.client.token.usage"] == tuple(4**n for n in range(14))
    assert bounds["metasd.spec_decode.accepted_length"][0] == 1
    assert bounds["metasd.spec_decode.accepted_length"][-1] == 17  # suffix@16 accepted whole
    assert bounds["metasd.spec_decode.round.duration"][-1] > 1
    assert len(bounds) == 5


def test_a_long_answer_shows_before_it_ends(meters):
    call = start(step="s")
    for _ in range(FLUSH_ROUNDS - 1):
        call.round(record("a@4", 4, 1))
    assert "metasd.spec_decode.rounds" not in read(meters)
    assert points(meters, "metasd.requests.active") == {(): 1}
    call.round(record("a@4", 4, 1))
    assert points(meters, "metasd.spec_decode.rounds") == {drafter("a@4", "s"): FLUSH_ROUNDS}
    call.round(record("a@4", 4, 1))
    call.end(None, error=ValueError())
    assert points(meters, "metasd.spec_decode.rounds") == {drafter("a@4", "s"): FLUSH_ROUNDS + 1}
    assert points(meters, "metasd.requests.active") == {(): 0}


@pytest.mark.parametrize(
    ("how", "labels"),
    [
        ({"summary": None, "error": ValueError(CANARY)}, {"error.type": "ValueError", "metasd.finish_reason": "error"}),
        (
            {"summary": summary(finish_reason="error"), "error": TimeoutError(CANARY)},
            {"error.type": "TimeoutError", "metasd.finish_reason": "error"},
        ),
        ({"summary": None, "error": GeneratorExit()}, {"metasd.finish_reason": "cancelled"}),
        ({"summary": None, "cancelled": True}, {"metasd.finish_reason": "cancelled"}),
        ({"summary": summary(finish_reason="cancelled")}, {"metasd.finish_reason": "cancelled"}),
        ({"summary": summary(finish_reason="length")}, {"metasd.finish_reason": "length"}),
    ],
)
def test_how_it_ended_is_a_label_and_nothing_stays_active(meters, how, labels):
    call = start()
    call.end(**how)
    call.end(summary())  # only the first counts
    assert list(points(meters, "gen_ai.client.operation.duration")) == [tuple(sorted(labels.items()))]
    assert points(meters, "metasd.requests.active") == {(): 0}
    assert CANARY not in repr(read(meters))


def test_further_answers_to_a_prompt_do_not_count_it_again(meters, spans):
    for completion in range(3):
        play(completion=completion)
    found = points(meters, "gen_ai.client.token.usage")
    step = ("metasd.step", "rewrite")
    assert found[("gen_ai.token.type", "input"), step] == (1, 11)
    assert found[("gen_ai.token.type", "output"), step] == (3, 48)
    told = [span.attributes for span in spans.get_finished_spans()]
    assert [one["gen_ai.usage.input_tokens"] for one in told] == [11, 0, 0]
    assert [one.get("metasd.completion.index") for one in told] == [None, 1, 2]


def test_calls_whose_span_is_not_sampled_count_too(meters, monkeypatch):
    monkeypatch.setattr(trace, "get_tracer_provider", NoOpTracerProvider)
    play()
    assert points(meters, "metasd.spec_decode.rounds")[drafter("plain")] == 4


def test_a_step_without_a_name_is_no_label(meters):
    play(step="")
    assert drafter("plain", "") in points(meters, "metasd.spec_decode.rounds")
    assert (("gen_ai.token.type", "input"),) in points(meters, "gen_ai.client.token.usage")


def test_series_stay_few_whatever_steps_and_arms_are_called(meters):
    for number in range(700):
        play([record(f"arm{number}@4", 4, 1)], step=f"step {number}")
    for name, metric in read(meters).items():
        assert len(metric.data.data_points) <= 501, name
    rounds = points(meters, "metasd.spec_decode.rounds")
    assert sum(rounds.values()) == 700
    assert len({dict(labels).get("metasd.step") for labels in rounds}) <= 34
    assert max(rounds.values()) > 100  # "other"


def test_values_of_untried_arms_and_of_old_steps_are_not_shown(meters):
    values = {"plain": 1.0, "a@4": float("inf"), "b@4": float("nan")}
    for number in range(100):
        ended = Summary(1, 1, "stop", ROUNDS, 0.1, 0.1, 0.1, f"policy{number}", "", values)
        play(step="", ended=ended)
    found = points(meters, "metasd.bandit.arm.value")
    assert len(found) == 64
    assert {dict(labels)["metasd.drafter.name"] for labels in found} == {"plain"}
    assert "policy99" in repr(found)


def test_without_a_provider_nothing_is_made():
    assert type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics")
    assert counted.CallMetrics.start("chat", "m", "") is None
    play()


def test_a_provider_that_comes_later_is_found_and_keeps_its_sums(monkeypatch):
    def provide():
        reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        return reader, provider

    (first, one), (second, other) = provide(), provide()
    for provider in (one, other, one):  # as after `use(None)`
        monkeypatch.setattr(metrics, "get_meter_provider", lambda provider=provider: provider)
        play()
    assert points(first, "metasd.spec_decode.rounds")[drafter("plain")] == 8
    assert points(second, "metasd.spec_decode.rounds")[drafter("plain")] == 4
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: one)
    counted.use(other)
    try:
        play()
    finally:
        counted.use(None)
    assert points(second, "metasd.spec_decode.rounds")[drafter("plain")] == 8


def test_instruments_that_fail_spoil_nothing(meters, monkeypatch, caplog):
    monkeypatch.setattr(counted.Instruments, "add", lambda *_: 1 / 0)
    call = start()
    for _ in range(FLUSH_ROUNDS + 1):
        call.round(record())
    call.end(summary())
    assert "ZeroDivisionError" in caplog.text


def test_a_duration_leads_to_its_trace(meters, spans):
    play()
    (span,) = spans.get_finished_spans()
    (point,) = read(meters)["gen_ai.client.operation.duration"].data.data_points
    assert [exemplar.span_id for exemplar in point.exemplars] == [span.context.span_id]
