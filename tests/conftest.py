"""What all tests share: a fixed environment without network, and a place where spans land."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

# Some libraries read these when they are first imported, so a fixture would come too late.
for _name in list(os.environ):
    if _name.startswith(("OTEL_", "LANGCHAIN_", "LANGSMITH_")) or _name in {"METASD_MODEL", "METASD_TRACE_ROUNDS"}:
        del os.environ[_name]
# Tiny models gain nothing from threads, and spinning teams of several processes stall each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", LANGSMITH_TRACING="false")

hypothesis.settings.register_profile("local", deadline=None)  # two shared cores: a deadline would test the machine
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _metrics_are_nobodys() -> Iterator[None]:
    """A test that leaves its meter provider in place takes every later test's metrics away: it fails itself."""
    yield
    module = sys.modules.get("metasd_langchain.telemetry.metrics")
    left = None if module is None else module._own
    if left is not None:
        module.use(None)
        pytest.fail("telemetry.metrics still reports to this test's provider")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The test's finished spans. Elsewhere no tracer provider is set, so spans cost nothing and go nowhere."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # the real setter works once a process
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    """Where the test's metrics are read. Elsewhere no meter provider is set."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    return reader
