"""Spans and metrics that can be switched on and off, as OpenTelemetry takes one provider a process only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from metasd_langchain.telemetry import metrics

__all__ = ["Switch"]


class _Counting(SpanExporter):
    """Reads every span as an exporter would, keeps nothing."""

    def __init__(self) -> None:
        self.count = 0

    def export(self, spans: Any) -> SpanExportResult:
        for span in spans:
            span.to_json()
            self.count += 1
        return SpanExportResult.SUCCESS


class Switch(trace.TracerProvider):
    """The process's tracer provider: an SDK with a batch processor while `on`, nothing while not; metrics likewise."""

    def __init__(self) -> None:
        self._exporter = _Counting()
        self._sdk = TracerProvider(shutdown_on_exit=False)
        self._sdk.add_span_processor(BatchSpanProcessor(self._exporter))
        self._nothing = trace.NoOpTracerProvider()
        self._reader = InMemoryMetricReader()
        self._meters = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)
        self.on = False

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator[Switch]:
        """Make one the process's provider. It stays that, since OpenTelemetry takes no second one, but off."""
        switch = cls()
        trace.set_tracer_provider(switch)
        try:
            yield switch
        finally:
            switch.on = False

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._on

    @on.setter
    def on(self, on: bool) -> None:
        self._on = on
        metrics.use(self._meters if on else None)

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        """See OpenTelemetry."""
        return (self._sdk if self.on else self._nothing).get_tracer(*args, **kwargs)

    def flush(self) -> None:
        """Wait until every ended span is exported."""
        if self.on:
            self._sdk.force_flush()

    def collect_seconds(self) -> float:
        """Median seconds of one reading of all metrics."""
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            self._reader.get_metrics_data()
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds))

    @property
    def exported(self) -> int:
        """Spans exported so far."""
        self._sdk.force_flush()
        return self._exporter.count

    @property
    def metrics(self) -> int:
        """Metrics there are."""
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return sum(len(scope.metrics) for scope in scopes)
