"""On what and when something was measured."""

from __future__ import annotations

import datetime as dt
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["machine", "now"]


def machine(dtype: str) -> dict[str, Any]:
    """Processor, memory, versions, threads, and how busy the machine is now. Call it before anything heavy starts.

    ``load_average``: processes running or waiting, mean of the last 1, 5 and 15 minutes; well above 0 means that others
    were at work and that only ratios within one run mean anything.
    """
    import torch
    import transformers

    import metasd_langchain

    facts: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_gib": _ram_gib(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "metasd_langchain": metasd_langchain.__version__,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }
    return facts


def now() -> str:
    """Date and time in UTC, to the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _ram_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
