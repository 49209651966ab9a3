# Sourced by the start scripts, which set CALLED to their own path. They run in the foreground; Ctrl-C or TERM stops the server.
#
#   PORT=6006     a port of your own; a free one otherwise
#   DATA=folder   where the server keeps what it is sent; a temporary folder that goes with it otherwise
#   READY_S=300   seconds a server may take to come up

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
READY_S=${READY_S:-300}
SERVER=

if [ -z "${DATA:-}" ]; then
    DATA=$(mktemp -d "${TMPDIR:-/tmp}/metasd-backend.XXXXXX")
    TEMPORARY=$DATA
fi
mkdir -p "$DATA"

fail() {
    echo "$CALLED: $1" >&2
    exit 1
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

answers() { # address
    python3 -c 'import sys, urllib.request; urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=2)' "$1" 2>/dev/null
}

# The server leads a process group of its own (its workers are in it), so that all of it can be ended, and nothing else.
serve() { # log command...
    local log=$1
    shift
    set -m
    "$@" >"$log" 2>&1 &
    SERVER=$!
    set +m
}

wait_for() { # address log
    local end=$((SECONDS + READY_S))
    until answers "$1"; do
        kill -0 "$SERVER" 2>/dev/null || { tail -n 20 "$2" >&2; fail "the server ended while starting"; }
        [ "$SECONDS" -lt "$end" ] || { tail -n 20 "$2" >&2; fail "no answer at $1 within $READY_S s"; }
        sleep 0.2
    done
}

stop() {
    trap - EXIT INT TERM HUP
    if [ -n "$SERVER" ]; then
        for signal in TERM KILL; do
            kill -"$signal" -- "-$SERVER" 2>/dev/null
            for _ in $(seq 300); do # MLflow's workers take up to 10 s, on a busy machine longer
                kill -0 -- "-$SERVER" 2>/dev/null || break 2
                sleep 0.1
            done
        done
    fi
    [ -z "${TEMPORARY:-}" ] || rm -rf "$TEMPORARY"
}

trap stop EXIT
trap 'stop; exit 143' INT TERM HUP

stay() {
    echo "ready; Ctrl-C stops it"
    wait "$SERVER"
}
