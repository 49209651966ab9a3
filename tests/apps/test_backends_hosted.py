"""LangSmith and Langfuse cannot be run here: their settings, and the request that a server of theirs would get."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from integrations.langfuse.app import place as langfuse
from integrations.langsmith.app import place as langsmith
from tests.apps import backends


def test_settings_of_langsmith() -> None:
    endpoint, headers = langsmith({"LANGSMITH_API_KEY": "k"})
    assert endpoint == "https://api.smith.langchain.com/otel"
    assert headers == {"x-api-key": "k", "Langsmith-Project": "metasd"}
    other = {"LANGSMITH_API_KEY": "k", "LANGSMITH_ENDPOINT": "https://eu.example/", "LANGSMITH_PROJECT": "p"}
    assert langsmith(other) == ("https://eu.example/otel", {"x-api-key": "k", "Langsmith-Project": "p"})


def test_settings_of_langfuse() -> None:
    endpoint, headers = langfuse({"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk"})
    assert endpoint == "https://cloud.langfuse.com/api/public/otel"
    kind, encoded = headers["Authorization"].split()
    assert (kind, base64.b64decode(encoded)) == ("Basic", b"pk:sk")
    assert headers["x-langfuse-ingestion-version"] == "4"


class Sink(http.server.ThreadingHTTPServer):
    """Takes what it is sent, and notes where and with which headers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Take(http.server.BaseHTTPRequestHandler):
    server: Sink

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sink() -> Iterator[Sink]:
    with Sink() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.skipif(not backends.ON, reason="runs an app; `make test-backends` does")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.enable_socket
@pytest.mark.parametrize(
    ("name", "variables", "path", "header"),
    [
        (
            "langsmith",
            {"LANGSMITH_ENDPOINT": "", "LANGSMITH_API_KEY": "secret"},
            "/otel/v1/traces",
            ("x-api-key", "secret"),
        ),
        (
            "langfuse",
            {"LANGFUSE_BASE_URL": "", "LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk"},
            "/api/public/otel/v1/traces",
            ("authorization", "Basic cGs6c2s="),
        ),
    ],
)
def test_what_a_hosted_server_would_get(
    sink: Sink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    variables: dict[str, str],
    path: str,
    header: tuple[str, str],
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value or sink.url)
    backends.run_app(name, tmp_path / "told.json", "--questions", "1")
    assert sink.requests
    assert {where for where, _, _ in sink.requests} == {path}
    assert all(headers[header[0]] == header[1] for _, headers, _ in sink.requests)
    sent = b"".join(body for _, _, body in sink.requests)
    assert b"metasd.drafters.names" in sent
    assert [word for word in backends.TEXT if word.encode() in sent] == []
