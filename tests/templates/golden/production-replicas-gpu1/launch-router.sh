#!/bin/sh
# sglang-router.service: starts the router. Written by Ansible; change the inventory, not this file.
# The line below replaces the shell, so that systemd's main process is the router itself and receives the stop signal.
set -eu
exec /opt/sglang/router/environment/venv/bin/python /opt/sglang/bin/start_router.py \
  --host 0.0.0.0 \
  --port 30001 \
  --prometheus-host 127.0.0.1 \
  --prometheus-port 29000 \
  --policy cache_aware \
  --worker-urls http://127.0.0.1:30011 http://127.0.0.1:30012 \
  --worker-startup-timeout-secs 2700 \
  --shutdown-grace-period-secs 60 \
  --health-check-endpoint /ready \
  --health-check-interval-secs 5 \
  --health-check-timeout-secs 5 \
  --health-failure-threshold 2 \
  --health-success-threshold 1 \
  --cb-timeout-duration-secs 10 \
  --cb-success-threshold 1 \
  --log-level warn \
  "$@"
