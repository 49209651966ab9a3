"""Send the run of `integrations.pipeline` to Phoenix: ``python -m integrations.phoenix.app --url http://127.0.0.1:6006``."""

from __future__ import annotations

from integrations.running import parser, send, show

PROJECT = "metasd"


def main() -> None:
    """Send it."""
    options = parser("Send a RAG and agent run to Phoenix.")
    options.add_argument("--url", default="http://127.0.0.1:6006", help="of the server, as start.sh prints it")
    options.add_argument("--project", default=PROJECT)
    args = options.parse_args()
    # Phoenix files spans under the project that the process's resource names
    runs = send(args, args.url, resource={"openinference.project.name": args.project})
    show(args, runs)
    print(f"see {args.url}, project {args.project}")


if __name__ == "__main__":
    main()
