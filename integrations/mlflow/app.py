"""Send the run of `integrations.pipeline` to MLflow: ``python -m integrations.mlflow.app --url http://127.0.0.1:5001``."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from integrations.running import parser, send, show

EXPERIMENT = "metasd"


def experiment_id(url: str, name: str) -> str:
    """Id of the experiment of that name, made if there is none."""
    try:
        return str(_post(url, "experiments/create", {"name": name})["experiment_id"])
    except urllib.error.HTTPError as refusal:
        if json.load(refusal).get("error_code") != "RESOURCE_ALREADY_EXISTS":
            raise
    with urllib.request.urlopen(f"{url}/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}") as reply:  # noqa: S310
        return str(json.load(reply)["experiment"]["experiment_id"])


def _post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310  the address is the user's own server
        f"{url}/api/2.0/mlflow/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        answer: dict[str, Any] = json.load(reply)
        return answer


def main() -> None:
    """Send it."""
    options = parser("Send a RAG and agent run to MLflow.")
    options.add_argument("--url", default="http://127.0.0.1:5001", help="of the server, as start.sh prints it")
    options.add_argument("--experiment", default=EXPERIMENT)
    args = options.parse_args()
    experiment = experiment_id(args.url, args.experiment)
    # MLflow takes no spans without this header
    runs = send(args, args.url, headers={"x-mlflow-experiment-id": experiment})
    show(args, runs, experiment=experiment)
    print(f"see {args.url}/#/experiments/{experiment}/traces")


if __name__ == "__main__":
    main()
