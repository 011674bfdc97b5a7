#!/bin/sh
# sglang-unified.service: starts the engine. Written by Ansible; change the inventory, not this file.
# Its arguments were read by the parser of the engine e3b0c44298fc.
# The last line replaces the shell, so that systemd's main process is the engine itself and receives the stop signal.
set -eu
# A process that another text than the unit's has started says so, and the next run of the playbook restarts it.
[ "$(sha256sum < "$0" | cut -c 1-64)" = "${OPS_LAUNCH_SHA256:-}" ] || export OPS_CONFIG_SHA256=another-launch-script
# systemd places the key in a directory that only this service can read; it never appears in a command line.
set -- --config "$CREDENTIALS_DIRECTORY/engine.yaml" "$@"
exec "${0%/*}/venv/bin/sglang" serve \
  --model-path /var/lib/sglang/models/DeepSeek-V4-Flash-NVFP4 \
  --served-model-name DeepSeek-V4-Flash-NVFP4 \
  --device cuda \
  --dtype auto \
  --context-length 1048576 \
  --mem-fraction-static 0.9 \
  --max-running-requests 16 \
  --enable-metrics \
  --speculative-algorithm EAGLE \
  --speculative-num-steps 1 \
  --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 2 \
  --moe-runner-backend flashinfer_cutlass \
  --tool-call-parser deepseekv4 \
  --reasoning-parser deepseek-v4 \
  --enable-cache-report \
  --chunked-prefill-size 8192 \
  --cuda-graph-max-bs-decode 16 \
  --schedule-policy fcfs \
  --host 0.0.0.0 \
  --port 30011 \
  --nccl-port 29511 \
  --tp-size 4 \
  --base-gpu-id 0 \
  "$@"
