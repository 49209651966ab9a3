"""Send the run of `integrations.pipeline` to LangSmith over OTLP: ``python -m integrations.langsmith.app``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from integrations.running import parser, send, show


def place(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Endpoint and headers, as LangSmith's own variables name them.

    Raises:
        KeyError: LANGSMITH_API_KEY is not set.
    """
    server = environment.get("LANGSMITH_ENDPOINT") or "https://api.smith.langchain.com"
    project = environment.get("LANGSMITH_PROJECT") or "metasd"
    headers = {"x-api-key": environment["LANGSMITH_API_KEY"], "Langsmith-Project": project}
    return f"{server.rstrip('/')}/otel", headers


def main() -> None:
    """Send it."""
    args = parser("Send a RAG and agent run to LangSmith.").parse_args()
    try:
        endpoint, headers = place(os.environ)
    except KeyError as missing:
        sys.exit(f"set {missing.args[0]}")
    show(args, send(args, endpoint, headers=headers))


if __name__ == "__main__":
    main()
