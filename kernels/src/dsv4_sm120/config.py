"""Launch configurations shipped as package data: ``configs/<op>.<arch>.json``, one file per op and GPU architecture.

There is no autotuning at run time: it would time dummy lengths during graph capture and stall the first request.
"""

import functools
import json
from importlib import resources

ARCHS = {"sm_120": (12, 0), "sm_90": (9, 0)}

SHARED_MEMORY_LIMIT = {"sm_120": 101_376, "sm_90": 232_448}
"""Bytes of shared memory one thread block may use (opt-in maximum) per architecture."""


@functools.cache
def load(op: str, arch: str) -> dict:
    """Parsed ``configs/<op>.<arch>.json``. Raises ``FileNotFoundError`` for an unknown op or architecture."""
    path = resources.files("dsv4_sm120") / "configs" / f"{op}.{arch}.json"
    return json.loads(path.read_text(encoding="utf-8"))


@functools.cache
def arch_of(device_index: int) -> str:
    """Architecture name of a CUDA device; every device that is not Hopper gets the sm_120 files.

    Those are the conservative ones: they fit the smaller shared memory.
    """
    import torch

    if not torch.cuda.is_available():
        return "sm_120"
    return "sm_90" if torch.cuda.get_device_capability(device_index)[0] == 9 else "sm_120"
