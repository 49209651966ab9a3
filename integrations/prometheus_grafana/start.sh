#!/usr/bin/env bash
# Start Prometheus on this machine, with the rules of this folder. As any user; PORT and DATA as in ../serve.sh.
#
#   TARGET=127.0.0.1:9464   where the application is scraped
#   EVERY=15s               how often it is scraped and rules are evaluated
set -u
CALLED=$0
source "$(dirname "$0")/../serve.sh"

PROMETHEUS=${PROMETHEUS:-prometheus}
command -v "$PROMETHEUS" >/dev/null || fail "Prometheus is not installed: apt-get install prometheus"

PORT=${PORT:-$(free_port)}
HERE=$ROOT/integrations/prometheus_grafana
cp -r "$HERE/rules" "$DATA/"
sed -e "s/127\.0\.0\.1:9464/${TARGET:-127.0.0.1:9464}/" -e "s/15s/${EVERY:-15s}/" "$HERE/prometheus.yml" >"$DATA/prometheus.yml"

serve "$DATA/prometheus.log" "$PROMETHEUS" --config.file="$DATA/prometheus.yml" --storage.tsdb.path="$DATA/data" \
    --web.listen-address="127.0.0.1:$PORT"
wait_for "http://127.0.0.1:$PORT/-/ready" "$DATA/prometheus.log"
echo "url http://127.0.0.1:$PORT"
echo "log $DATA/prometheus.log"
stay
