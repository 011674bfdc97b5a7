"""``python -m dsv4_sm120.env_report``: which kernels would be active in this environment, and why. Changes nothing.

``--json`` prints one object. Exit status 1 when a kernel that is wanted could not be installed here.
"""

import argparse
import json
import os
import platform
import sys
from importlib import metadata

from . import __version__, config, contract, plugin, settings

DISTRIBUTION = "sglang-dsv4-sm120"
PREFIXES = (settings.PREFIX, "SGLANG_PLUGINS")
PACKAGES = ("sglang", "torch", "triton", "tilelang", "prometheus_client")


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def collect() -> dict:
    """Versions, settings, GPUs, contract, and per kernel a verdict."""
    report: dict = {
        "version": __version__,
        "wheel": installed_version(DISTRIBUTION),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
    }
    report["intact"] = report["wheel"] in (None, __version__)
    try:
        wanted = settings.load()
    except ValueError as error:
        return report | {"error": str(error), "ok": False, "kernels": {}}
    gpus, why_no_gpu = find_gpus()
    report["gpus"] = gpus
    mismatches = [] if why_no_gpu else contract.check(wanted.kernels)
    report["mismatches"] = [str(m) for m in mismatches]
    report["kernels"] = {}
    for name in settings.KERNELS:
        if name not in wanted.kernels:
            verdict = f"off: DSV4_SM120_{name.upper()}=0"
        elif why_no_gpu:
            verdict = f"off: {why_no_gpu}"
        elif mismatches:
            verdict = "off: SGLang does not fit, see mismatches"
        else:
            verdict = "installs; each rank decides after its self-check, see the line it writes at start"
        report["kernels"][name] = verdict
    report["ok"] = report["intact"] and not mismatches
    return report


def find_gpus() -> tuple[list[dict], str | None]:
    """(GPUs with the configuration files they get, None), or ([], why there is none)."""
    try:
        if not plugin.has_cuda_gpu():
            return [], "no CUDA GPU here"
    except ImportError:
        return [], "torch is not installed here"
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name, arch = torch.cuda.get_device_name(index), config.arch_of(index)
        found.append({"name": name, "capability": f"{major}.{minor}", "config": arch})
    return found, None


def render(report: dict) -> str:
    """The report for people."""
    wheel = report["wheel"] or "not installed as a wheel"
    lines = [f"dsv4_sm120 {report['version']} (wheel: {wheel}), Python {report['python']}"]
    if not report["intact"]:
        lines.append("  WARNING: files differ from the wheel that was installed; reinstall it")
    lines += [f"  {name:<18} {version or 'not installed'}" for name, version in report["packages"].items()]
    lines += [f"  {name}={value}" for name, value in report["environment"].items()]
    lines += [f"  GPU {g['name']} ({g['capability']}): configs {g['config']}" for g in report.get("gpus", [])]
    if "error" in report:
        lines.append(f"error: {report['error']}")
    lines += [f"mismatch: {line}" for line in report.get("mismatches", [])]
    lines += [f"kernel {name:<8} {verdict}" for name, verdict in report["kernels"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2, sort_keys=True) if args.json else render(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
