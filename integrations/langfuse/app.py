"""Send the run of `integrations.pipeline` to Langfuse over OTLP: ``python -m integrations.langfuse.app``."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping

from integrations.running import parser, send, show


def place(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Endpoint and headers, as Langfuse's own variables name them.

    Raises:
        KeyError: LANGFUSE_PUBLIC_KEY or LANGFUSE_SECRET_KEY is not set.
    """
    server = environment.get("LANGFUSE_BASE_URL") or environment.get("LANGFUSE_HOST") or "https://cloud.langfuse.com"
    keys = f"{environment['LANGFUSE_PUBLIC_KEY']}:{environment['LANGFUSE_SECRET_KEY']}"
    basic = base64.b64encode(keys.encode()).decode()
    # without a version of 4, Langfuse shows spans minutes later
    headers = {"Authorization": f"Basic {basic}", "x-langfuse-ingestion-version": "4"}
    return f"{server.rstrip('/')}/api/public/otel", headers


def main() -> None:
    """Send it."""
    args = parser("Send a RAG and agent run to Langfuse.").parse_args()
    try:
        endpoint, headers = place(os.environ)
    except KeyError as missing:
        sys.exit(f"set {missing.args[0]}")
    show(args, send(args, endpoint, headers=headers))


if __name__ == "__main__":
    main()
