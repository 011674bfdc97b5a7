"""What every ahead-of-time compiled config must satisfy."""

SPILL_LIMIT_BYTES = 0
"""Bytes per thread that a kernel may spill to local memory."""


def check_reports(reports: list[dict], spill_limit: int = SPILL_LIMIT_BYTES) -> None:
    """Shared memory fits, tensor cores are used where promised, registers do not spill."""
    assert reports, "no config shipped for this op and architecture"
    for report in reports:
        label = f"{report['name']} on {report['arch']}: {report['options']}"
        assert report["shared"] <= report["shared_limit"], f"{label}: {report['shared']} B of shared memory"
        assert not report["tensor_cores"] or report["mma"] > 0, f"{label}: no tensor-core instruction"
        spilled = report["spill_store_bytes"] + report["spill_load_bytes"]
        assert spilled <= spill_limit, f"{label}: spills {spilled} B per thread (limit {spill_limit})"
