"""What every ahead-of-time compiled config must satisfy."""

STACK_LIMIT_BYTES = 0
"""Bytes per thread that a kernel may keep in local memory; spilled registers live there."""


def check_reports(reports: list[dict], stack_limit: int = STACK_LIMIT_BYTES) -> None:
    """Shared memory fits, tensor cores are used where promised, registers do not spill."""
    assert reports, "no config shipped for this op and architecture"
    for report in reports:
        label = f"{report['name']} on {report['arch']}: {report['options']}"
        assert report["shared"] <= report["shared_limit"], f"{label}: {report['shared']} B of shared memory"
        assert not report["tensor_cores"] or report["mma"] > 0, f"{label}: no tensor-core instruction"
        assert report["stack"] <= stack_limit, f"{label}: {report['stack']} B of stack per thread (limit {stack_limit})"
