"""SGLang plugin that keeps API keys out of the log.

At start, SGLang 0.5.23 logs every server argument, the API keys among them (`server_args={...}`, in
entrypoints/engine.py), so the keys would lie in the journal. This plugin masks them there, through SGLang's own plugin
interface. SGLang goes on when a plugin fails; a start that would log the keys must not go on, so a missing target ends
the process.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

TARGET_MODULE = "sglang.srt.entrypoints.engine"
TARGET_FUNCTION = "_server_args_for_logging"
SECRETS = ("api_key", "admin_api_key")


def mask(arguments: dict[str, Any], *_args: object, **_kwargs: object) -> dict[str, Any]:
    """Return `arguments` with every API key that is set replaced by "***"."""
    return {name: "***" if name in SECRETS and value else value for name, value in arguments.items()}


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`; acts in the launching process, the one that logs."""
    if multiprocessing.parent_process() is not None:
        return
    import importlib

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not callable(getattr(importlib.import_module(TARGET_MODULE), TARGET_FUNCTION, None)):
        raise SystemExit(
            f"sglang_secrets_plugin: {TARGET_MODULE} has no {TARGET_FUNCTION}, so API keys would be logged in the "
            "clear. This SGLang is not the version that engine/locks pins: install that one, or adapt the plugin."
        )
    HookRegistry.register(f"{TARGET_MODULE}.{TARGET_FUNCTION}", mask, HookType.AFTER)
