"""What the plugin relies on in SGLang: its version, the signatures of the functions it hooks, and the cache layout.

Everything here is checked against the installed SGLang before a hook is registered, because SGLang itself logs and
swallows whatever goes wrong in a plugin.
"""

import importlib
import inspect
from dataclasses import dataclass
from importlib import metadata

from . import layout

SGLANG_VERSION = "0.5.23"

BACKEND_INIT = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend.__init__"
DECODE = "sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120"
TOPK = "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged"
MHC = "sglang.kernels.ops.layernorm.mhc.mhc_fused_post_pre"
LOGITS = "sglang.kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits"
"""Imports tilelang, so it is looked at only where the attention backend is built, on a GPU."""

PARAMETERS = {
    BACKEND_INIT: "self model_runner skip_prefill speculative_step_id topk speculative_num_steps",
    DECODE: "**kwargs",
    TOPK: "scores seq_lens page_tables out_page_indices page_size out_raw_indices",
    MHC: (
        "x residual post_layer_mix comb_res_mix fn hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps "
        "hc_post_mult_value sinkhorn_repeat n_splits tile_n *norm_weight *norm_eps"
    ),
    LOGITS: "q_fp8 kvcache_fp8 weight seq_lens page_table deep_gemm_metadata max_seq_len clean_logits",
}
"""Names of the parameters of each target; ``*name`` is keyword-only, ``**name`` collects the rest."""

TARGETS = {"decode": (DECODE,), "indexer": (TOPK, LOGITS), "mhc": (MHC,)}
"""The seams of each kernel. Those of one kernel are installed together or not at all."""


@dataclass(frozen=True)
class Mismatch:
    """One thing that is not as expected: what it is, the value seen and the value wanted."""

    what: str
    seen: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.what} is {self.seen}, wanted {self.wanted}"


def resolve(target: str) -> object:
    """The object at a dotted path, a method of a class included. Raises ``ImportError`` or ``AttributeError``."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise
            continue
        for name in parts[split:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(f"no module named {parts[0]!r}", name=parts[0])


def parameters(function: object) -> str:
    """The parameters of ``function`` in the notation of ``PARAMETERS``."""
    marks = {inspect.Parameter.KEYWORD_ONLY: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return " ".join(marks.get(p.kind, "") + p.name for p in found)


def check_version() -> list[Mismatch]:
    """The installed SGLang against ``SGLANG_VERSION``, without importing it."""
    try:
        seen = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        seen = "not installed"
    return [] if seen == SGLANG_VERSION else [Mismatch("sglang version", seen, SGLANG_VERSION)]


def check_target(target: str) -> list[Mismatch]:
    """One target: it exists and has the parameters expected. Imports its module."""
    try:
        seen = parameters(resolve(target))
    except (ImportError, AttributeError) as error:
        return [Mismatch(target, f"missing ({type(error).__name__}: {error})", "a function")]
    wanted = PARAMETERS[target]
    return [] if seen == wanted else [Mismatch(f"signature of {target}", f"({seen})", f"({wanted})")]


def check_layout() -> list[Mismatch]:
    """``dsv4_sm120.layout`` against SGLang's own layout class."""
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    found = []
    for page_size in layout.PAGE_SIZES.values():
        seen, wanted = KVLayout.V4.page_bytes(page_size), layout.page_bytes(page_size)
        if seen != wanted:
            found.append(Mismatch(f"bytes of a {page_size}-token cache page", str(seen), str(wanted)))
    return found


def check(kernels: frozenset[str]) -> list[Mismatch]:
    """Everything that can be checked without a GPU for ``kernels``; empty when all is as expected."""
    mismatches = check_version()
    if mismatches:
        return mismatches  # one clear line instead of the consequences
    for target in (BACKEND_INIT, *(t for name in sorted(kernels) for t in TARGETS[name] if t != LOGITS)):
        mismatches += check_target(target)
    return mismatches + check_layout()
