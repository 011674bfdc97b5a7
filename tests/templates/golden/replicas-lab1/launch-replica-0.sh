#!/bin/sh
# sglang-replica-0.service: starts the engine. Written by Ansible; change the inventory, not this file.
# Its arguments were read by the parser of the engine e3b0c44298fc.
# The last line replaces the shell, so that systemd's main process is the engine itself and receives the stop signal.
set -eu
# A process that another text than the unit's has started says so, and the next run of the playbook restarts it.
[ "$(sha256sum < "$0" | cut -c 1-64)" = "${OPS_LAUNCH_SHA256:-}" ] || export OPS_CONFIG_SHA256=another-launch-script
# systemd places the key in a directory that only this service can read; it never appears in a command line.
set -- --config "$CREDENTIALS_DIRECTORY/engine.yaml" "$@"
exec "${0%/*}/venv/bin/sglang" serve \
  --model-path /var/lib/sglang/models/smollm2-135m-instruct \
  --served-model-name smollm2-135m-instruct \
  --device cpu \
  --dtype float32 \
  --context-length 8192 \
  --max-total-tokens 8192 \
  --max-running-requests 8 \
  --enable-metrics \
  --sleep-on-idle \
  --disable-overlap-schedule \
  --host 127.0.0.1 \
  --port 30011 \
  --nccl-port 29501 \
  --tp-size 1 \
  "$@"
