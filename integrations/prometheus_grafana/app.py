"""Play the run of `integrations.pipeline` again and again, and be scraped.

``python -m integrations.prometheus_grafana.app``, then ``start.sh`` in this folder.
"""

from __future__ import annotations

import time

from integrations.running import make_llm, parser, pipeline, play, show
from metasd_langchain.telemetry import setup_telemetry


def main() -> None:
    """Play."""
    options = parser("Play RAG and agent runs while Prometheus scrapes.")
    options.add_argument("--port", type=int, default=9464, help="to be scraped at; 0 takes a free one")
    options.add_argument("--seconds", type=float, default=300.0, help="how long to play")
    options.add_argument("--linger", type=float, default=0.0, help="seconds to be scraped after the last run")
    args = options.parse_args()
    with setup_telemetry(prometheus=args.port, service_name="metasd-demo") as handle:
        print(f"metrics at http://127.0.0.1:{handle.prometheus_port}/metrics", flush=True)
        llm = make_llm(args)
        graph = pipeline(llm)
        end = time.monotonic() + args.seconds
        runs = play(llm, graph)
        while time.monotonic() < end:
            runs += play(llm, graph)
        llm.close()  # calls that were broken off end with the engine
        show(args, runs)
        time.sleep(args.linger)


if __name__ == "__main__":
    main()
