"""Who watches: sinks that turn a call's summary into spans, counters or rows. The engine knows none of them.

``attributes.py`` builds the span attributes (pure); ``otel.py`` and ``metrics.py`` speak OpenTelemetry through its API
alone, ``parents.py`` finds the span a call belongs under; ``setup.py`` makes providers for those who have none.
``recorder.py`` writes calls to a trace file, ``page.py`` makes a page of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metasd_langchain.telemetry.recorder import Recording, record
    from metasd_langchain.telemetry.setup import Telemetry, setup_telemetry
    from metasd_langchain.telemetry.traced import Trace, read_trace

_HOMES = {
    "Recording": "recorder",
    "Telemetry": "setup",
    "Trace": "traced",
    "read_trace": "traced",
    "record": "recorder",
    "setup_telemetry": "setup",
}

__all__ = ["Recording", "Telemetry", "Trace", "read_trace", "record", "setup_telemetry"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
