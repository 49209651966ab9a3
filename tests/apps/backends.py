"""Real servers for the tests of integrations/, started as a user starts them, and what every backend must show.

They take minutes and a gigabyte of packages, so they run under `make test-backends` alone (METASD_BACKENDS=1).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integrations.running import LONG

ROOT = Path(__file__).parents[2]
ON = bool(os.environ.get("METASD_BACKENDS"))
needs_backends = [
    pytest.mark.skipif(not ON, reason="starts a real server; `make test-backends` runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.enable_socket,
]
PATIENCE = 600.0  # seconds; two shared cores may be busy
TEXT = ("landslip", "duty engineer", "Mill Street", "Samuel Okoro")  # of questions, prompts and documents
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names


@contextlib.contextmanager
def server(name: str, **variables: str) -> Iterator[str]:
    """Address of a server started by its own script; afterwards nothing of it runs and its data is gone.

    Args:
        name: folder of integrations/.
        variables: of the script.
    """
    script = ROOT / "integrations" / name / "start.sh"
    given = {**os.environ, **variables}
    given.pop("DATA", None)
    with subprocess.Popen([script], stdout=subprocess.PIPE, text=True, env=given, start_new_session=True) as process:
        try:
            said = _until_ready(process)
            yield said["url"]
        finally:
            process.terminate()
            process.wait(120)
    assert members(process.pid) == []
    assert not Path(said["log"]).parent.exists()


def _until_ready(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    said: dict[str, str] = {}
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        said[word.rstrip(";")] = rest
        if line.startswith("ready"):
            return said
    pytest.fail("the server did not start; its last words are above")


def members(session: int) -> list[int]:
    """Processes of a session that live."""
    living = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = status.read_text().rpartition(")")[2].split()
            if int(after_name[3]) == session and after_name[0] != "Z":
                living.append(int(status.parent.name))
    return living


def run_app(name: str, report: Path, *options: str) -> dict[str, Any]:
    """Run an app as a user does; what the model itself reported of its calls."""
    command = [sys.executable, "-m", f"integrations.{name}.app", "--json", str(report), *options]
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(command, check=False, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(report.read_text())
    return told


def get(url: str, **query: object) -> Any:
    """JSON of an address."""
    address = f"{url}?{urllib.parse.urlencode(query)}" if query else url
    with _direct.open(address, timeout=60) as reply:
        return json.load(reply)


def post(url: str, body: Mapping[str, Any]) -> Any:
    """JSON of a request with a JSON body."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with _direct.open(request, timeout=60) as reply:
        return json.load(reply)


def eventually(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true answer; a server may show what it was sent a little later."""
    end = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.5)
    return answer


@dataclass(frozen=True)
class Shown:
    """A span as a backend gives it back."""

    name: str
    trace: str
    id: str
    parent: str | None
    status: str
    message: str
    attributes: Mapping[str, Any] = field(repr=False)

    @property
    def ours(self) -> bool:
        return self.name.startswith(("text_completion ", "chat "))


@dataclass(frozen=True)
class Backend:
    """What a backend shows of an app's report."""

    told: Mapping[str, Any]
    spans: tuple[Shown, ...]

    def run(self, name: str, index: int = 0) -> Mapping[str, Any]:
        return [run for run in self.told["runs"] if run["name"] == name][index]

    def of(self, run: Mapping[str, Any]) -> list[Shown]:
        return [span for span in self.spans if span.trace == run["trace_id"]]

    def path(self, span: Shown) -> list[str]:
        """Names from the root down to a span."""
        by_id = {one.id: one for one in self.of({"trace_id": span.trace})}
        names = [span.name]
        while span.parent:
            span = by_id[span.parent]
            names.append(span.name)
        return names[::-1]

    def usage(self) -> list[tuple[Mapping[str, Any], int]]:
        """Each run that went through, with the tokens the model counted in it."""
        return [
            (run, sum(call["usage"]["total_tokens"] for call in run["calls"]))
            for run in self.told["runs"]
            if run["name"] == "agent run"
        ]


def check_calls(backend: Backend) -> None:
    """Model, tokens, drafters and accepted lengths of every call are those the model reported."""
    runs = [run for run in backend.told["runs"] if run["name"] == "agent run"]
    assert len(runs) == 3
    for run in runs:
        shown = [_facts(span.attributes) for span in backend.of(run) if span.ours]
        told = [_told(call) for call in run["calls"]]
        assert len(told) >= 5
        assert sorted(shown, key=str) == sorted(told, key=str), (shown, told)
        assert {call["step"] for call in told} == {"rewrite", "check", "answer", "summarise"}
    calls = [call for run in runs for call in run["calls"]]
    assert any(call["accepted"] > 0 for call in calls)  # else the above would hold for a speculation that never works
    assert len({arm for call in calls for arm in call["arms"]}) > 2


def _told(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": call["step"],
        "model": call["model"],
        "input": call["usage"]["prompt_tokens"],
        "output": call["usage"]["completion_tokens"],
        "rounds": call["rounds"],
        "accepted": call["accepted"],
        "accepted_length": round(call["accepted_length"], 9),
        "arms": {name: tuple(sums.values()) for name, sums in sorted(call["arms"].items())},
    }


def _facts(attributes: Mapping[str, Any]) -> dict[str, Any]:
    columns = ("names", "rounds", "drafted_tokens", "accepted_tokens")
    arms = zip(*(attributes[f"metasd.drafters.{column}"] for column in columns), strict=True)
    # the rounds one by one say the same as their sums
    assert len(attributes["metasd.rounds.accepted"]) == attributes["metasd.round_count"]
    assert sum(attributes["metasd.rounds.accepted"]) == attributes["metasd.tokens.accepted"]
    assert len(attributes["metasd.rounds.drafter"]) == len(attributes["metasd.rounds.duration_ms"])
    return {
        "step": attributes["metasd.step"],
        "model": attributes["gen_ai.request.model"],
        "input": attributes["gen_ai.usage.input_tokens"],
        "output": attributes["gen_ai.usage.output_tokens"],
        "rounds": attributes["metasd.round_count"],
        "accepted": attributes["metasd.tokens.accepted"],
        "accepted_length": round(attributes["metasd.accepted_length.mean"], 9),
        "arms": {name: tuple(sums) for name, *sums in sorted(arms) if sums[0]},
    }


def check_nesting(backend: Backend) -> None:
    """Every call lies under LangChain's span of the model, that under its node, that under the graph and the app's."""
    for run in backend.told["runs"]:
        if run["name"] == "run broken off":
            continue
        for span in backend.of(run):
            if not span.ours:
                continue
            step = span.attributes.get("metasd.step", "rewrite")
            path = backend.path(span)
            assert path[:3] == [run["name"], "agent", step]
            assert path[-2] in {"MetaSDLLM", "ChatMetaSD"}
            # langchain-core 1.8.3 hangs the model of a bound batch under the node, of any LLM; else the chain is there
            assert path[3:-2] == ([] if step == "summarise" else ["RunnableSequence"])


def check_nesting_alone(backend: Backend) -> None:
    """Without an instrumentor every call lies right under the app's own span."""
    for run in backend.told["runs"]:
        paths = [backend.path(span) for span in backend.of(run) if span.ours]
        assert paths
        assert all(path[0] == run["name"] and len(path) == 2 for path in paths)


def check_ends(backend: Backend, error_status: str) -> None:
    """A failed call is an error with its class, and one that was broken off is no error."""
    run = backend.run("run that fails")
    assert run["calls"] == [{"step": "rewrite", "error": "PromptTooLong"}]
    (failed,) = (span for span in backend.of(run) if span.ours)
    assert (failed.status, failed.message) == (error_status, "PromptTooLong"), (failed.status, failed.message)
    assert failed.attributes["error.type"] == "PromptTooLong"
    (root,) = (span for span in backend.of(run) if not span.parent)
    assert (root.status, root.attributes["error.type"]) == (error_status, "PromptTooLong")

    (broken,) = (span for span in backend.of(backend.run("run broken off")) if span.ours)
    assert broken.status != error_status
    assert "error.type" not in broken.attributes
    assert broken.attributes["metasd.cancelled"] is True
    assert broken.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert 0 < broken.attributes["gen_ai.usage.output_tokens"] < LONG


def check_silence(raw: object) -> None:
    """Nothing of questions, prompts, documents or answers is in what the backend got."""
    stored = json.dumps(raw)
    found = [word for word in TEXT if word in stored]
    assert not found, found
