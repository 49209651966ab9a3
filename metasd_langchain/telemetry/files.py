"""Spans and metrics in a file, for those who run no server: SQLite to ask questions of, or a line of JSON each.

Both are OpenTelemetry exporters; an SDK calls them on a thread of its own. Several processes may write one file.
Needs the SDK (extra ``otel``).
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from metasd_langchain.errors import BadOption

__all__ = ["JsonLines", "MetricFile", "SpanFile", "Sqlite", "store_at"]

_SQLITE = (".sqlite", ".sqlite3", ".db")
_JSON = (".jsonl", ".ndjson")
_MOST_SPANS = 100_000  # of a SQLite file; the oldest go first
_MOST_POINTS = 20_000
_MOST_BYTES = 64 * 2**20  # of a file of lines; then it is put aside as NAME.1 and begun anew
_OURS = 0x4D455453  # "METS", so that we never write into somebody else's database
_SCHEMA = 1
_BUSY_S = 2.0

_log = logging.getLogger(__name__)


class SpanRow(NamedTuple):
    """A finished span. Times are nanoseconds since 1970, mappings are JSON-able."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int
    status: str
    message: str | None
    attributes: dict[str, Any]
    events: list[dict[str, Any]]
    service: str


class PointRow(NamedTuple):
    """A metric's latest value for one set of attributes; `value` is a number, or a histogram's counts."""

    process: str
    name: str
    attributes: dict[str, Any]
    unit: str
    time_ns: int
    value: Any


class Store(Protocol):
    """Where rows go. Called on several threads."""

    def spans(self, rows: Sequence[SpanRow]) -> None:
        """Add finished spans."""
        ...

    def points(self, rows: Sequence[PointRow]) -> None:
        """Note the latest values."""
        ...


def store_at(path: str | os.PathLike[str]) -> Store:
    """The store behind a path: SQLite for ``.sqlite``, ``.sqlite3`` and ``.db``, lines for ``.jsonl`` and ``.ndjson``.

    Raises:
        BadOption: another ending, or a file that cannot be written.
    """
    file = Path(path).expanduser().absolute()
    kind: type[Sqlite | JsonLines] | None
    kind = Sqlite if file.suffix in _SQLITE else JsonLines if file.suffix in _JSON else None
    if kind is None:
        raise BadOption("file", str(path), f"a name that ends with one of {', '.join((*_SQLITE, *_JSON))}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return kind(file)
    except (OSError, sqlite3.Error) as cause:
        raise BadOption("file", str(path), f"a file that can be written ({cause})") from cause


class JsonLines:
    """A line of JSON for each span, and for each metric's value that changed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str], Any] = {}
        self._append(())

    def spans(self, rows: Sequence[SpanRow]) -> None:
        """Add finished spans."""
        self._append({"kind": "span", **row._asdict()} for row in rows)

    def points(self, rows: Sequence[PointRow]) -> None:
        """Add the values that are not what they were."""
        lines = []
        for row in rows:
            key = row.name, _json(row.attributes)
            if self._told.get(key) != row.value:
                self._told[key] = row.value
                lines.append({"kind": "metric", **row._asdict()})
        self._append(lines)

    def _append(self, rows: Iterable[dict[str, Any]]) -> None:
        data = "".join(f"{_json(row)}\n" for row in rows).encode(errors="replace")
        with self._lock:
            if self._file.exists() and self._file.stat().st_size > _MOST_BYTES:
                self._file.replace(self._file.with_name(f"{self._file.name}.1"))
            # whoever switches content on has prompts in here
            handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                while data:  # one write as a rule, so that lines of several processes stay whole
                    data = data[os.write(handle, data) :]
            finally:
                os.close(handle)


class Sqlite:
    """Tables ``spans`` (newest 100,000) and ``metrics`` (the latest value of each process)."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        if not file.exists():
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
        self._run([])

    def spans(self, rows: Sequence[SpanRow]) -> None:
        """Add finished spans."""
        values = [(*row[:8], _json(row.attributes), _json(row.events), row.service) for row in rows]
        self._run([("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values), _trim("spans", _MOST_SPANS)])

    def points(self, rows: Sequence[PointRow]) -> None:
        """Note the latest values."""
        values = [
            (row.process, row.name, _json(row.attributes), row.unit, row.time_ns, _json(row.value)) for row in rows
        ]
        self._run(
            [("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?, ?, ?)", values), _trim("metrics", _MOST_POINTS)]
        )

    def _run(self, statements: Sequence[tuple[str, Sequence[Sequence[Any]]]]) -> None:
        """One transaction on a connection of its own: nothing is shared with other threads or over a fork."""
        with self._lock, closing(sqlite3.connect(self._file, _BUSY_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                _create(connection)
                for statement, values in statements:
                    connection.executemany(statement, values)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")


def _create(connection: sqlite3.Connection) -> None:
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    schema = connection.execute("PRAGMA user_version").fetchone()[0]
    if (owner, schema) == (_OURS, _SCHEMA):
        return
    if owner or schema or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise sqlite3.DatabaseError("it is another program's, or another version's, database")
    connection.execute(f"PRAGMA application_id = {_OURS}")
    connection.execute(f"PRAGMA user_version = {_SCHEMA}")
    connection.execute(
        "CREATE TABLE spans (trace_id TEXT, span_id TEXT, parent_id TEXT, name TEXT, start_ns INTEGER, end_ns INTEGER,"
        " status TEXT, message TEXT, attributes TEXT, events TEXT, service TEXT)"
    )
    connection.execute("CREATE INDEX spans_of_trace ON spans (trace_id)")
    connection.execute(
        "CREATE TABLE metrics (process TEXT, name TEXT, attributes TEXT, unit TEXT, time_ns INTEGER, value TEXT,"
        " PRIMARY KEY (process, name, attributes))"
    )


def _trim(table: str, most: int) -> tuple[str, Sequence[Sequence[Any]]]:
    return f"DELETE FROM {table} WHERE rowid <= (SELECT max(rowid) FROM {table}) - ?", [(most,)]  # noqa: S608  ours


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


# -- what an SDK calls ------------------------------------------------------------------------------------------------


class _Quiet:
    """Says once that a file cannot be written, and again only after it could be."""

    def __init__(self) -> None:
        self._failing = False

    def tried(self, write: Any, rows: Sequence[Any]) -> bool:
        try:
            write(rows)
        except (OSError, sqlite3.Error) as failure:
            if not self._failing:
                _log.warning("telemetry file cannot be written: %s", failure)
            self._failing = True
            return False
        self._failing = False
        return True


class SpanFile(SpanExporter):
    """Exports spans to a store."""

    def __init__(self, store: Store) -> None:
        self._store, self._quiet = store, _Quiet()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See OpenTelemetry."""
        done = self._quiet.tried(self._store.spans, [_span_row(span) for span in spans])
        return SpanExportResult.SUCCESS if done else SpanExportResult.FAILURE


class MetricFile(MetricExporter):
    """Exports metrics to a store."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store, self._quiet = store, _Quiet()
        self._process = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """See OpenTelemetry."""
        rows = [
            PointRow(
                self._process,
                metric.name,
                dict(point.attributes or {}),
                metric.unit or "",
                point.time_unix_nano,
                _value(point),
            )
            for resource in metrics_data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        ]
        done = not rows or self._quiet.tried(self._store.points, rows)
        return MetricExportResult.SUCCESS if done else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing is held back."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Nothing is held open."""


def _span_row(span: ReadableSpan) -> SpanRow:
    return SpanRow(
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        name=span.name,
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        status=span.status.status_code.name,
        message=span.status.description,
        attributes=dict(span.attributes or {}),
        events=[
            {"name": event.name, "time_ns": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
        service=str(span.resource.attributes.get("service.name", "")),
    )


def _value(point: Any) -> Any:
    if hasattr(point, "value"):
        return point.value
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name in ("count", "sum", "min", "max", "explicit_bounds", "bucket_counts")
        if (value := getattr(point, name, None)) is not None
    }
