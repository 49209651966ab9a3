#!/usr/bin/env bash
# Start Phoenix on this machine: PORT, GRPC_PORT and DATA as in ../serve.sh. Its venv is made by `make backends`.
set -u
CALLED=$0
source "$(dirname "$0")/../serve.sh"

PHOENIX=${PHOENIX:-$ROOT/.venvs/phoenix/bin/phoenix}
[ -x "$PHOENIX" ] || fail "Phoenix is not installed: run make backends"

PORT=${PORT:-$(free_port)}
GRPC_PORT=${GRPC_PORT:-$(free_port)}
# it sends usage figures home and loads fonts from elsewhere unless told not to
export PHOENIX_WORKING_DIR=$DATA PHOENIX_HOST=127.0.0.1 PHOENIX_PORT=$PORT PHOENIX_GRPC_PORT=$GRPC_PORT
export PHOENIX_TELEMETRY_ENABLED=false PHOENIX_ALLOW_EXTERNAL_RESOURCES=false

serve "$DATA/phoenix.log" "$PHOENIX" serve
wait_for "http://127.0.0.1:$PORT/healthz" "$DATA/phoenix.log"
echo "url http://127.0.0.1:$PORT"
echo "log $DATA/phoenix.log"
stay
