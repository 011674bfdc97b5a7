"""The benchmark without a GPU: its cases are right, and what is not verified gets no time."""

import torch

from benchmarks import cases_decode, harness, run
from benchmarks.harness import Built, Case, Contender


def test_decode_cases_pass_their_own_check(monkeypatch) -> None:
    """Small pools: the shapes are the real ones, in the interpreter."""
    monkeypatch.setattr(cases_decode, "POOL", {256: 512, 64: 256, 2: 64})
    cases_decode.cache.cache_clear()
    built = cases_decode.build(torch.device("cpu"), 1, 8, 64, 96, 128)
    cases_decode.cache.cache_clear()
    assert not built.peers
    assert built.ours.error() < 1.2e-2  # the interpreter's bf16, see test_decode.TOLERANCE
    assert built.bytes == (128 + 96) * 584


def test_an_unverified_result_gets_no_time() -> None:
    def never() -> None:
        raise RuntimeError("timed although it is wrong")

    def wrong() -> float:
        raise AssertionError("wrong in kind")

    bad = {"inexact": Contender(never, lambda: 0.5, 1e-2), "wrong": Contender(never, wrong, 1e-2)}
    case = Case("decode", "group", {"rows": 1}, lambda: Built(Contender(never, lambda: float("nan"), 1.0), bad))
    record = run.measure(case)
    assert record["times"] == {} and set(record["failures"]) == {"ours", "inexact", "wrong"}
    env = {"gpu": "none", "torch": "", "triton": "", "package": "", "copy_bandwidth_gb_s": 1}
    assert run.markdown([record], env).count("unverified") == 3


def test_cases_timed_in_turn_get_medians_and_their_spread(monkeypatch) -> None:
    """The one that fails its check gets no time and does not keep the others from theirs."""
    samples = [[10.0, 11.0, 12.0] * 20, [11.0, 12.0, 13.0] * 20]
    monkeypatch.setattr(harness, "interleaved_us", lambda runs: samples[: len(runs)])

    def case(width: int, error: float) -> Case:
        return Case("decode", "zero tax", {"width": width}, lambda: Built(Contender(list, lambda: error, 1e-2)), "both")

    records = run.measure_together([case(1, 1e-3), case(2, 0.5), case(3, 1e-3)])
    assert [r["times"].get("ours") for r in records] == [11.0, None, 12.0]
    low, high = records[0]["together"]["spread_95"]
    assert low <= records[0]["together"]["spread_percent"] <= high
    assert round(records[0]["together"]["spread_percent"], 2) == round(100 / 11, 2)
    env = {"gpu": "none", "torch": "", "triton": "", "package": "", "copy_bandwidth_gb_s": 1}
    assert "both, 60 rounds: medians 9.09 % apart" in run.markdown(records, env)
