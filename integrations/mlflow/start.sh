#!/usr/bin/env bash
# Start MLflow on this machine: PORT and DATA as in ../serve.sh. Its venv is made by `make backends`.
set -u
CALLED=$0
source "$(dirname "$0")/../serve.sh"

MLFLOW=${MLFLOW:-$ROOT/.venvs/mlflow/bin/mlflow}
[ -x "$MLFLOW" ] || fail "MLflow is not installed: run make backends"

PORT=${PORT:-$(free_port)}
# no usage figures; and no workers for evaluation jobs, which traces do without
export MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false

serve "$DATA/mlflow.log" "$MLFLOW" server --host 127.0.0.1 --port "$PORT" --workers 1 \
    --backend-store-uri "sqlite:///$DATA/mlflow.db" --default-artifact-root "$DATA/artifacts"
wait_for "http://127.0.0.1:$PORT/health" "$DATA/mlflow.log"
echo "url http://127.0.0.1:$PORT"
echo "log $DATA/mlflow.log"
stay
