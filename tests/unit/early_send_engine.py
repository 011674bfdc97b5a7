# SPDX-License-Identifier: GPL-3.0-or-later
"""What SGLang's prefill server sends of a prompt whose earlier chunk is still computed; runs under the engine's Python.

Prints one JSON object: `sent`, the ends in tokens of what is sent ahead, with the variable as it is and with 0; `kept`,
for each transfer backend, whether what it queues still has the event that says when the pages are computed.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

# The engine prints while it is imported; the answer keeps the real stdout.
ANSWER = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402  after stdout is put aside
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager  # noqa: E402
from sglang.srt.disaggregation.nixl.conn import NixlKVManager  # noqa: E402
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402

CHUNK, PAGE, ROOM = 8192, 256, 1
EARLY_SEND = envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX
EVENT = SimpleNamespace(record=lambda stream: None)


def sent_ahead() -> list[int]:
    """Return the ends of what is sent before the second chunk of a request is launched."""
    sent: list[int] = []
    scheduler = SimpleNamespace(
        enable_staging=False,
        enable_overlap=True,
        forward_stream=None,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        send_kv_chunk=lambda req, last_chunk, end_idx: sent.append(end_idx),
    )
    # The first chunk counts as a cached prefix as soon as the second one is scheduled.
    request = SimpleNamespace(
        prefix_len=CHUNK,
        host_hit_length=0,
        start_send_idx=0,
        pending_bootstrap=False,
        early_send_prefix_end=None,
        disagg_kv_sender=SimpleNamespace(),
    )
    SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk(scheduler, request)
    return sent


def keeps_event(backend: type) -> bool:
    """Whether a backend's queue holds the event that it is given with some pages."""
    queued: list = []
    manager = object.__new__(type("Manager", (backend,), {"kv_shard_size": 1}))
    manager.disaggregation_mode = DisaggregationMode.PREFILL
    manager.enable_all_cp_ranks_for_transfer = manager.is_dummy_cp_rank = manager.enable_staging = False
    manager._dcp_pack_max_tokens = None
    manager.transfer_queues = [SimpleNamespace(put=queued.append)]
    manager.transfer_infos = {ROOM: {"10.0.0.1:1": SimpleNamespace(dst_port=1, endpoint="10.0.0.1")}}
    manager.request_status = {ROOM: 2}
    manager.update_status = lambda *_: None
    manager.add_transfer_request(ROOM, [1], slice(0, 1), False, wait_event=EVENT)
    (chunk,) = queued
    return chunk.wait_event is EVENT


def main() -> None:
    torch.cuda.Event = lambda: EVENT
    sent = {"default": sent_ahead()}
    with EARLY_SEND.override(False):
        sent["0"] = sent_ahead()
    kept = {"nixl": keeps_event(NixlKVManager), "mooncake": keeps_event(MooncakeKVManager)}
    json.dump({"sent": sent, "kept": kept}, ANSWER)
    ANSWER.close()


if __name__ == "__main__":
    main()
