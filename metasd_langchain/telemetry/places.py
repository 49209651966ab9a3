"""Where ``setup_telemetry`` can send spans and metrics: OTLP, files, the console, Prometheus. One exporter each.

What an exporter needs is imported when it is asked for; extra ``otel`` brings it all.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metasd_langchain.errors import BadOption, MissingExtra
from metasd_langchain.models.embedded import cache_root

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Places", "Scraped", "Wanted", "part"]

TIMEOUT_S = 2.0  # of one request to an endpoint
_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_JOIN_S = 3.0


@dataclass(frozen=True)
class Wanted:
    """Arguments of ``setup_telemetry``, checked."""

    endpoint: str | None
    protocol: str
    headers: Mapping[str, str] | None
    file: Path | None
    console: bool
    prometheus: tuple[str, int] | None
    metrics: bool
    interval: float
    timeout: float | None
    service_name: str | None
    resource: Mapping[str, Any] | None

    @property
    def nowhere(self) -> bool:
        """Whether no place was named."""
        return self.endpoint is None and self.file is None and not self.console and self.prometheus is None

    @property
    def otlp(self) -> bool:
        """Whether there is an OTLP endpoint: named, or OpenTelemetry's variables' where nothing is."""
        return self.endpoint is not None or (self.nowhere and any(os.environ.get(name) for name in _ENDPOINTS))


class Scraped:
    """A page for Prometheus, served until `stop`."""

    def __init__(self, host: str, port: int) -> None:
        self._exporter = part("opentelemetry.exporter.prometheus", "the Prometheus exporter")
        client = part("prometheus_client", "prometheus_client")
        try:
            self._server, self._thread = client.start_http_server(port, addr=host)
        except OSError as cause:
            raise BadOption("prometheus", f"{host}:{port}", f"a free port ({cause.strerror})") from cause
        self.port: int = self._server.server_port

    def reader(self) -> MetricReader:
        """What fills it."""
        reader: MetricReader = self._exporter.PrometheusMetricReader()
        return reader

    def stop(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


class Places:
    """The exporters for what is wanted.

    Attributes:
        file: the file written to, where there is one.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.file = wanted.file
        if wanted.nowhere and not wanted.otlp:
            self.file = cache_root() / "telemetry.sqlite"
        self._files: Any = None
        self._store: Any = None
        if self.file is not None:
            self._files = part("metasd_langchain.telemetry.files")
            self._store = self._files.store_at(self.file)

    def resource(self) -> Resource:
        """What is said of the process."""
        own = dict(self._wanted.resource or {})
        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if self._wanted.service_name or not named:
            own.setdefault("service.name", self._wanted.service_name or "metasd-langchain")
        resource: Resource = part("opentelemetry.sdk.resources").Resource.create(own)
        return resource

    def span_exporters(self) -> list[SpanExporter]:
        """Those for spans."""
        found: list[SpanExporter] = []
        if self._wanted.otlp:
            found.append(self._otlp("trace_exporter", "OTLPSpanExporter", "v1/traces"))
        if self._store is not None:
            found.append(self._files.SpanFile(self._store))
        if self._wanted.console:
            found.append(part("opentelemetry.sdk.trace.export").ConsoleSpanExporter(out=sys.stderr))
        return found

    def metric_exporters(self) -> list[MetricExporter]:
        """Those that are given metrics, rather than asked for them."""
        found: list[MetricExporter] = []
        if not self._wanted.metrics:
            return found
        if self._wanted.otlp:
            found.append(self._otlp("metric_exporter", "OTLPMetricExporter", "v1/metrics"))
        if self._store is not None:
            found.append(self._files.MetricFile(self._store))
        if self._wanted.console:
            found.append(part("opentelemetry.sdk.metrics.export").ConsoleMetricExporter(out=sys.stderr))
        return found

    def _otlp(self, module: str, name: str, path: str) -> Any:
        wanted, grpc = self._wanted, self._wanted.protocol == "grpc"
        package = f"opentelemetry.exporter.otlp.proto.{'grpc' if grpc else 'http'}.{module}"
        exporter: Callable[..., Any] = getattr(part(package, "the OTLP exporter"), name)
        options: dict[str, Any] = {"headers": wanted.headers}
        if wanted.timeout is not None or not os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT"):
            options["timeout"] = wanted.timeout or TIMEOUT_S
        if wanted.endpoint is not None and grpc:
            options.update(endpoint=wanted.endpoint, insecure=not wanted.endpoint.startswith("https://"))
        elif wanted.endpoint is not None:
            base = wanted.endpoint.rstrip("/").removesuffix("/v1/traces").removesuffix("/v1/metrics")
            options["endpoint"] = f"{base}/{path}"
        return exporter(**options)


def part(module: str, what: str = "the OpenTelemetry SDK") -> Any:
    """A module that an extra brings.

    Raises:
        MissingExtra: names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise MissingExtra(what, "otel") from cause
