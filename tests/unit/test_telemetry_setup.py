"""``setup_telemetry``: where spans and metrics go, what it leaves alone, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry import metrics, trace
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from metasd_langchain.errors import BadOption, ConfigError, MissingExtra
from metasd_langchain.telemetry import files, setup, setup_telemetry
from metasd_langchain.telemetry.workers import Worker, within
from tests.bugs.watching import Sink, unset
from tests.unit.calls import CANARY, record, start, summary


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    unset(monkeypatch)
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "cache"))
    yield
    if setup._live is not None:
        setup._live.shutdown()


def play(**options):
    call = start(step="rewrite", **options)
    call.round(record("suffix@16", 10, 7))
    call.end(summary())


def rows(file, query):
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return connection.execute(query).fetchall()


# -- files


def test_without_a_place_it_is_a_file_in_the_cache_folder(tmp_path):
    handle = setup_telemetry()
    assert handle.file == tmp_path / "cache" / "telemetry.sqlite"
    with trace.get_tracer("app").start_as_current_span("app") as app:
        play()
        call = start()
        call.end(None, error=ValueError(CANARY))
    assert handle.shutdown()
    ((name, parent, status, message, told, service, seconds),) = rows(
        handle.file,
        "SELECT name, parent_id, status, message, attributes, service, (end_ns - start_ns) / 1e9 FROM spans"
        " WHERE attributes LIKE '%error.type%'",
    )
    assert (name, status, message) == ("text_completion gemma-3-270m", "ERROR", "ValueError")
    assert (parent, service) == (f"{app.get_span_context().span_id:016x}", "metasd-langchain")
    assert json.loads(told)["gen_ai.request.model"] == "gemma-3-270m"
    assert 0 <= seconds < 60
    assert rows(handle.file, "SELECT count(*), count(DISTINCT trace_id) FROM spans") == [(3, 1)]
    counts = dict(rows(handle.file, "SELECT name, value FROM metrics WHERE name LIKE 'metasd.spec_decode.%tokens'"))
    assert counts == {"metasd.spec_decode.draft_tokens": "10", "metasd.spec_decode.accepted_tokens": "7"}
    ((histogram,),) = rows(handle.file, "SELECT value FROM metrics WHERE name = 'metasd.spec_decode.accepted_length'")
    assert json.loads(histogram)["sum"] == 8
    assert handle.file.stat().st_mode & 0o077 == 0  # content may be in it
    assert CANARY not in handle.file.read_text(errors="replace")


def test_lines_of_json(tmp_path):
    with setup_telemetry(file=tmp_path / "deep" / "run.jsonl", interval=0.05) as handle:
        play(capture_content=True)
        play()
        time.sleep(0.3)
    lines = [json.loads(line) for line in handle.file.read_text().splitlines()]
    spans = [line for line in lines if line["kind"] == "span"]
    assert [span["attributes"]["metasd.round_count"] for span in spans] == [7, 7]
    values = [line for line in lines if line["kind"] == "metric" and line["name"] == "metasd.spec_decode.rounds"]
    assert [value["value"] for value in values] in ([2], [1, 2])  # only what changed, not each time it was read
    assert handle.file.stat().st_mode & 0o077 == 0


def test_files_of_earlier_runs_go_on(tmp_path):
    for name in ("a.sqlite", "a.jsonl"):
        for _ in range(2):
            with setup_telemetry(file=tmp_path / name):
                play()
    assert rows(tmp_path / "a.sqlite", "SELECT count(*) FROM spans") == [(2,)]
    assert rows(tmp_path / "a.sqlite", "SELECT count(DISTINCT process) FROM metrics") == [(2,)]
    assert (tmp_path / "a.jsonl").read_text().count('"kind":"span"') == 2


def test_files_do_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_SPANS", 10)
    monkeypatch.setattr(files, "_MOST_POINTS", 5)
    monkeypatch.setattr(files, "_MOST_BYTES", 10_000)
    for name in ("a.sqlite", "a.jsonl"):
        with setup_telemetry(file=tmp_path / name) as handle:
            for _ in range(8):
                for _ in range(5):
                    play()
                handle.flush()
    assert rows(tmp_path / "a.sqlite", "SELECT count(*) FROM spans") == [(10,)]
    assert rows(tmp_path / "a.sqlite", "SELECT count(*) FROM metrics") == [(5,)]
    assert (tmp_path / "a.jsonl").stat().st_size < 40_000
    assert (tmp_path / "a.jsonl.1").stat().st_size < 40_000


def test_two_writers_of_one_file_lose_nothing(tmp_path):
    stores = [files.store_at(tmp_path / name) for name in ("a.sqlite", "a.sqlite", "a.jsonl", "a.jsonl")]
    row = files.SpanRow("t", "s", None, "n" * 500, 1, 2, "UNSET", None, {}, [], "x")
    threads = [threading.Thread(target=lambda s=s: [s.spans([row] * 3) for _ in range(40)]) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows(tmp_path / "a.sqlite", "SELECT count(*) FROM spans") == [(240,)]
    assert len([json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]) == 240


def test_a_file_that_becomes_unwritable_is_said_once(tmp_path, caplog):
    with setup_telemetry(file=tmp_path / "sub" / "a.sqlite") as handle:
        handle.file.unlink()
        (tmp_path / "sub").rmdir()
        for _ in range(3):
            play()
            handle.flush()
    assert caplog.text.count("cannot be written") == 2  # spans and metrics


@pytest.mark.parametrize("name", ["a.txt", "a", ".sqlite"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(BadOption, match=r"\.jsonl"):
        setup_telemetry(file=tmp_path / name)
    assert setup._live is None


def test_files_of_others_are_refused(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "theirs.db")) as connection:
        connection.execute("CREATE TABLE spans (a)")
    (tmp_path / "text.sqlite").write_text("not a database, but a text that is long enough for a header " * 3)
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("theirs.db", "text.sqlite", "folder.jsonl"):
        with pytest.raises(BadOption, match="can be written"):
            setup_telemetry(file=tmp_path / name)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)  # nothing half done
    setup_telemetry(file=tmp_path / "mine.sqlite")


# -- servers


@pytest.mark.enable_socket
def test_spans_and_metrics_by_otlp():
    with Sink() as sink:
        with setup_telemetry(
            sink.endpoint + "/", headers={"x-mlflow-experiment-id": "7"}, resource={"openinference.project.name": "p"}
        ):
            play()
        assert sorted(path for path, _ in sink.bodies) == ["/v1/metrics", "/v1/traces"]
        (span,) = sink.spans()
        assert span.name == "text_completion gemma-3-270m"
        assert {"metasd.spec_decode.rounds", "gen_ai.client.token.usage"} <= sink.metrics()
        assert b"openinference.project.name" in sink.bytes


def test_spans_and_metrics_by_grpc():
    got = {}

    class Service(metrics_service_pb2_grpc.MetricsServiceServicer, trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802  gRPC's name
            got[type(request).__name__] = (request.SerializeToString(), dict(context.invocation_metadata()))
            traces = isinstance(request, trace_service_pb2.ExportTraceServiceRequest)
            pb2 = trace_service_pb2 if traces else metrics_service_pb2
            return pb2.ExportTraceServiceResponse() if traces else pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with setup_telemetry(f"http://127.0.0.1:{port}", protocol="grpc", headers={"x-key": "7"}, timeout=20):
            play()
            assert setup._live.flush(20)
    finally:
        server.stop(0)
    spans, metadata = got["ExportTraceServiceRequest"]
    assert b"text_completion gemma-3-270m" in spans
    assert metadata["x-key"] == "7"
    assert b"metasd.spec_decode.rounds" in got["ExportMetricsServiceRequest"][0]


@pytest.mark.enable_socket
def test_spans_alone_for_backends_that_take_no_metrics():
    with Sink() as sink:
        with setup_telemetry(sink.endpoint + "/v1/traces", metrics=False) as handle:
            play()
        assert [path for path, _ in sink.bodies] == ["/v1/traces"]
        assert handle.meter_provider is None


@pytest.mark.enable_socket
def test_opentelemetrys_variables_count_where_no_place_is_named(monkeypatch, tmp_path):
    with Sink() as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        with setup_telemetry() as handle:
            play()
        assert handle.file is None
        assert len(sink.spans()) == 1
        assert b"mine" in sink.bytes
        with setup_telemetry(file=tmp_path / "a.jsonl"):
            play()
        assert len(sink.spans()) == 1


@pytest.mark.enable_socket
def test_prometheus_scrapes():
    with setup_telemetry(prometheus=0, file=None) as handle:
        assert handle.file is None
        play()
        page = urllib.request.urlopen(f"http://127.0.0.1:{handle.prometheus_port}/metrics", timeout=10).read().decode()
        with pytest.raises(ConfigError):
            setup_telemetry(prometheus=handle.prometheus_port)
    assert "metasd_spec_decode_accepted_tokens_total{" in page
    assert 'metasd_drafter_name="suffix@16"' in page
    for name in (
        "gen_ai_client_operation_duration_seconds_bucket",
        "gen_ai_client_token_usage_bucket",
        "metasd_spec_decode_rounds_total",
        "metasd_spec_decode_draft_tokens_total",
        "metasd_spec_decode_accepted_tokens_per_position_total",
        "metasd_spec_decode_accepted_length_bucket",
        "metasd_bandit_arm_value",
        "metasd_requests_active",
    ):
        assert f"\n{name}{{" in page, name
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{handle.prometheus_port}/metrics", timeout=10)


@pytest.mark.enable_socket
def test_a_port_that_is_taken():
    before = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadOption, match=f"{port}"):
            setup_telemetry(prometheus=f"127.0.0.1:{port}")
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    with setup_telemetry(prometheus=port):
        play()


def test_the_console(capsys):
    with setup_telemetry(console=True, metrics=True):
        play()
    said = capsys.readouterr()
    assert not said.out  # the program's own
    assert "text_completion gemma-3-270m" in said.err
    assert "metasd.spec_decode.rounds" in said.err


# -- what it leaves alone


def test_the_same_again_is_the_same(tmp_path):
    handle = setup_telemetry(file=tmp_path / "a.jsonl")
    assert setup_telemetry(file=str(tmp_path / "a.jsonl")) is handle
    with pytest.raises(ConfigError, match="shutdown"):
        setup_telemetry(file=tmp_path / "b.jsonl")
    assert handle.shutdown()
    assert handle.shutdown()
    other = setup_telemetry(file=tmp_path / "b.jsonl")
    play()
    assert other.shutdown()
    assert "metasd.spec_decode.rounds" in (tmp_path / "b.jsonl").read_text()
    assert '"kind":"span"' in (tmp_path / "b.jsonl").read_text()
    assert '"kind":"span"' not in (tmp_path / "a.jsonl").read_text()
    play()  # to nobody


def test_providers_of_the_application_stay_as_they_are(tmp_path, caplog):
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    theirs = TracerProvider(shutdown_on_exit=False)
    theirs.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    trace.set_tracer_provider(theirs)
    metrics.set_meter_provider(meters)
    before = theirs._active_span_processor._span_processors
    with setup_telemetry(file=tmp_path / "a.jsonl") as handle:
        play()
    assert (handle.tracer_provider, handle.meter_provider) == (None, None)
    assert caplog.text.count("already") == 2
    assert theirs._active_span_processor._span_processors == before
    assert trace.get_tracer_provider() is theirs
    assert (tmp_path / "a.jsonl").read_text() == ""
    play()  # shutting down ended nothing of theirs
    assert len(exporter.get_finished_spans()) == 2
    assert reader.get_metrics_data() is not None


def test_one_provider_of_the_application_and_one_of_ours(tmp_path):
    theirs = TracerProvider(shutdown_on_exit=False)
    trace.set_tracer_provider(theirs)
    with setup_telemetry(file=tmp_path / "a.jsonl"):
        play()
    assert '"kind":"metric"' in (tmp_path / "a.jsonl").read_text()
    assert '"kind":"span"' not in (tmp_path / "a.jsonl").read_text()


def test_what_ends_the_provider_ends_the_exporters(tmp_path):
    handle = setup_telemetry(file=tmp_path / "a.jsonl")
    play()
    assert trace.get_tracer_provider().force_flush()
    assert (tmp_path / "a.jsonl").read_text().count('"kind":"span"') == 1
    play()
    trace.get_tracer_provider().shutdown()
    assert (tmp_path / "a.jsonl").read_text().count('"kind":"span"') == 2
    assert handle.shutdown()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("interval", 0),
        ("interval", True),
        ("timeout", float("inf")),
        ("timeout", "2"),
        ("protocol", "udp"),
        ("prometheus", 70_000),
        ("prometheus", -1),
        ("prometheus", True),
        ("prometheus", "localhost"),
    ],
)
def test_wrong_values(option, value):
    with pytest.raises(BadOption, match=option):
        setup_telemetry(**{option: value})
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("opentelemetry.sdk.trace", {"console": True}),
        ("opentelemetry.exporter.otlp.proto.http.trace_exporter", {"endpoint": "http://127.0.0.1:9"}),
        ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", {"endpoint": "http://x", "protocol": "grpc"}),
        ("opentelemetry.exporter.prometheus", {"prometheus": 0}),
    ],
)
def test_what_is_not_installed_names_the_extra(monkeypatch, missing, options):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=r"metasd-langchain\[otel\]"):
        setup_telemetry(**options)


WITHOUT_SDK = """
import sys

class No:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ImportError(name)

sys.meta_path.insert(0, No())
from metasd_langchain.telemetry import setup_telemetry
from tests.unit.calls import record, start, summary

call = start()
call.round(record())
call.end(summary())
assert "torch" not in sys.modules
try:
    setup_telemetry()
except ImportError as error:
    print(error)
"""

AT_EXIT = """
import sys
from metasd_langchain.telemetry import setup_telemetry
from tests.unit.calls import start, summary

setup_telemetry(file=sys.argv[1])
start().end(summary())
"""

FORKED = """
import os, sys
from metasd_langchain.telemetry import setup_telemetry
from tests.unit.calls import start, summary

handle = setup_telemetry(file=sys.argv[1])
start().end(summary())
child = os.fork()
start(model="child" if child == 0 else "parent").end(summary())
assert handle.shutdown(20)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def python(program, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "."},
    )


def test_without_an_sdk_calls_work_and_setup_names_the_extra():
    assert "metasd-langchain[otel]" in python(WITHOUT_SDK).stdout


def test_what_is_left_goes_out_at_exit(tmp_path):
    assert python(AT_EXIT, tmp_path / "a.jsonl").stderr == ""
    text = (tmp_path / "a.jsonl").read_text()
    assert text.count('"kind":"span"') == 1
    assert "gen_ai.client.operation.duration" in text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_sends_its_own(tmp_path):
    python(FORKED, tmp_path / "a.jsonl")
    names = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    spans = sorted(line["name"] for line in names if line["kind"] == "span")
    assert spans == ["text_completion child", "text_completion gemma-3-270m", "text_completion parent"]


# -- workers


def test_nobody_waits_longer_than_asked():
    let_go = threading.Event()
    stuck = [Worker(let_go.wait, let_go.wait) for _ in range(3)]
    quick = Worker(lambda: None, lambda: 1 / 0)
    assert within(10, [quick.flush])
    assert within(10, [quick.stop])  # failing is an end, too
    assert not within(0.05, [worker.stop for worker in stuck])
    let_go.set()
    assert within(10, [])
