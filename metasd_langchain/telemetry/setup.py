"""``setup_telemetry``: one call that sends spans and metrics somewhere. The only place that makes providers.

An endpoint that is down, or hangs, costs its data and never an answer: exporters have threads, queues and short
timeouts of their own, and shutting down waits for them so long and no longer. The SDK's own ``shutdown`` waited 7 to 30
seconds in that case, and its ``force_flush`` ignores the time it is given.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from opentelemetry import metrics as metrics_api
from opentelemetry import trace as trace_api

from metasd_langchain.errors import BadOption, ConfigError
from metasd_langchain.telemetry import metrics as counted
from metasd_langchain.telemetry.places import Places, Scraped, Wanted, part
from metasd_langchain.telemetry.workers import Worker, within

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from metasd_langchain.telemetry.outlet import Outlet

__all__ = ["Telemetry", "setup_telemetry"]

Protocol = Literal["http/protobuf", "grpc"]

SHUTDOWN_S = 3.0
_QUEUE, _BATCH, _DELAY_MS = 2048, 512, 1000.0

_log = logging.getLogger("metasd_langchain")


def setup_telemetry(
    endpoint: str | None = None,
    *,
    protocol: Protocol | None = None,
    headers: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    console: bool = False,
    prometheus: int | str | None = None,
    metrics: bool = True,
    interval: float = 15.0,
    timeout: float | None = None,
    service_name: str | None = None,
    resource: Mapping[str, str | bool | int | float] | None = None,
) -> Telemetry:
    """Send this process's spans and metrics to one or several places, and make the providers for it.

    Asked for no place, it takes the OTLP endpoint that OpenTelemetry's variables name, else a SQLite file in the user's
    cache folder, which needs no server. A provider that the process already has stays as it is: nothing is added to
    it, our spans or metrics go where it sends them, and a warning says so. Asked again with the same arguments it
    returns the same object.

    Args:
        endpoint: OTLP receiver, e.g. "http://127.0.0.1:4318" (spans go to ``/v1/traces``, metrics to ``/v1/metrics``
            under it), or "http://127.0.0.1:4317" with ``protocol="grpc"``.
        protocol: "http/protobuf" or "grpc". None: OTEL_EXPORTER_OTLP_PROTOCOL, else "http/protobuf".
        headers: sent with each OTLP request.
        file: ``.sqlite``, ``.sqlite3`` or ``.db`` for a database, ``.jsonl`` or ``.ndjson`` for lines.
        console: write both to standard error.
        prometheus: port on 127.0.0.1 to be scraped at, or "HOST:PORT"; port 0 takes a free one, see
            `Telemetry.prometheus_port`.
        metrics: False for spans alone; Phoenix and MLflow take no metrics.
        interval: seconds between exports of metrics.
        timeout: seconds for one OTLP request. None: OTEL_EXPORTER_OTLP_TIMEOUT, else 2.
        service_name: None: OTEL_SERVICE_NAME, else "metasd-langchain".
        resource: further attributes of the process, e.g. ``{"deployment.environment.name": "dev"}``.

    Returns:
        A handle; `Telemetry.shutdown` is called at exit, too.

    Raises:
        MissingExtra: names the extra that brings the SDK or an exporter.
        BadOption: a wrong value, a file that cannot be written, a port that is taken.
        ConfigError: it was called before with other arguments and not shut down.
    """
    where = None if file is None else Path(file).expanduser().absolute()
    wanted = Wanted(
        endpoint,
        protocol or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf",
        None if headers is None else dict(headers),
        where,
        console,
        _host_and_port(prometheus),
        metrics,
        _seconds("interval", interval),
        None if timeout is None else _seconds("timeout", timeout),
        service_name,
        None if resource is None else dict(resource),
    )
    if wanted.protocol not in ("http/protobuf", "grpc"):
        raise BadOption("protocol", wanted.protocol, "'http/protobuf' or 'grpc'")
    with _lock:
        return _set_up(wanted)


_lock = threading.RLock()
_live: Telemetry | None = None
# what we gave the process; it has one of each and keeps it
_outlet: Outlet | None = None
_meters: MeterProvider | None = None


def _set_up(wanted: Wanted) -> Telemetry:
    global _live  # noqa: PLW0603  as OpenTelemetry's providers are one a process
    if _live is not None:
        if _live.wanted == wanted:
            return _live
        raise ConfigError(
            "telemetry is set up already, with other arguments",
            hint="shut the first one down before: handle.shutdown()",
        )
    handle = Telemetry(wanted)
    try:
        places = Places(wanted)
        handle.file = places.file
        _spans(handle, places)
        _metrics(handle, places, wanted)
    except BaseException:
        handle.shutdown(0.0)
        raise
    atexit.register(handle.shutdown)
    _live = handle
    return handle


class Telemetry:
    """Where spans and metrics go, until `shutdown`. Also a context manager.

    Attributes:
        file: the file written to, where there is one.
        prometheus_port: the port to scrape, where there is one.
        tracer_provider, meter_provider: the SDK's providers that were made; None where the process has one of its own.
    """

    def __init__(self, wanted: object) -> None:
        self.wanted = wanted
        self.file: Path | None = None
        self.prometheus_port: int | None = None
        self.tracer_provider: TracerProvider | None = None
        self.meter_provider: MeterProvider | None = None
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.shutdown()

    def flush(self, timeout: float = SHUTDOWN_S) -> bool:
        """Export what there is. Whether all of it was handed over in time; an endpoint may have refused it."""
        return within(timeout, [worker.flush for worker in self._workers])

    def shutdown(self, timeout: float = SHUTDOWN_S) -> bool:
        """Export what there is and end, after `timeout` seconds at most, whatever the endpoint does.

        The providers stay, since OpenTelemetry lets a process have no others, and record for nobody until the next
        `setup_telemetry`, which gives them exporters again (their resource stays the first one's).

        Returns:
            Whether everything ended in time; what did not is lost.
        """
        global _live  # noqa: PLW0603
        atexit.unregister(self.shutdown)
        with _lock:
            if _live is self:
                _live = None
            workers, self._workers = self._workers, []
            if not workers:
                return True
            if _outlet is not None:
                _outlet.processors = ()
            counted.use(None)
        return within(timeout, [worker.stop for worker in workers])

    def add(self, flush: Callable[[], object], stop: Callable[[], object]) -> None:
        """Take care of one exporter's end."""
        self._workers.append(Worker(flush, stop))


def _spans(handle: Telemetry, places: Places) -> None:
    """Give the process a tracer provider, or ours new exporters."""
    global _outlet  # noqa: PLW0603
    sdk = part("opentelemetry.sdk.trace")
    there = trace_api.get_tracer_provider()
    ours = _outlet is not None and _outlet.provider is there
    if not ours and not isinstance(there, trace_api.ProxyTracerProvider):
        _left_alone("tracer", "spans")
        return
    exporters = places.span_exporters()
    if not exporters:
        return
    if _outlet is None or not ours:
        provider = sdk.TracerProvider(resource=places.resource(), shutdown_on_exit=False)
        _outlet = part("metasd_langchain.telemetry.outlet").Outlet(provider)
        provider.add_span_processor(_outlet)
        trace_api.set_tracer_provider(provider)
    processor = part("opentelemetry.sdk.trace.export").BatchSpanProcessor
    processors = [processor(exporter, _QUEUE, _DELAY_MS, _BATCH) for exporter in exporters]
    for one in processors:
        handle.add(one.force_flush, one.shutdown)
    _outlet.processors = tuple(processors)
    handle.tracer_provider = _outlet.provider


def _metrics(handle: Telemetry, places: Places, wanted: Wanted) -> None:
    """Give the process a meter provider; us alone, where it has one that we gave it and shut down."""
    global _meters  # noqa: PLW0603
    if not wanted.metrics and wanted.prometheus is None:
        return
    sdk, export = part("opentelemetry.sdk.metrics"), part("opentelemetry.sdk.metrics.export")
    there = metrics_api.get_meter_provider()
    none = type(there).__module__.startswith("opentelemetry.metrics")
    if not none and there is not _meters:
        _left_alone("meter", "metrics")
        return
    exporters = places.metric_exporters()
    readers: list[MetricReader] = []
    if wanted.prometheus is not None:
        page = Scraped(*wanted.prometheus)  # first, for its port may be taken
        handle.prometheus_port = page.port
        handle.add(lambda: None, page.stop)
        readers.append(page.reader())
    readers += [export.PeriodicExportingMetricReader(exporter, wanted.interval * 1e3) for exporter in exporters]
    if not readers:
        return
    provider = sdk.MeterProvider(metric_readers=readers, resource=places.resource(), shutdown_on_exit=False)
    for reader in readers:
        handle.add(reader.force_flush, reader.shutdown)
    handle.meter_provider = provider
    if none:
        _meters = provider
        metrics_api.set_meter_provider(provider)
    else:
        counted.use(provider)


def _left_alone(kind: str, what: str) -> None:
    _log.warning(
        "this process has a %s provider already; it stays as it is and gets our %s, setup_telemetry adds nothing to it",
        kind,
        what,
    )


def _seconds(option: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise BadOption(option, value, "a positive number of seconds")
    return value


def _host_and_port(place: int | str | None) -> tuple[str, int] | None:
    if place is None:
        return None
    host, _, port = place.rpartition(":") if isinstance(place, str) else ("127.0.0.1", ":", str(place))
    if isinstance(place, bool) or not (port.isdigit() and int(port) < 2**16):
        raise BadOption("prometheus", place, "a port, or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
