# SPDX-License-Identifier: GPL-3.0-or-later
"""Answers questions with the installed engine's own code; runs under the engine's Python, on a CPU (see conftest.py).

One JSON request per line on stdin, one JSON answer per line on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
# The engine prints while it is imported; answers keep the real stdout.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

# A venv that comes from the lock file alone lacks what lets SGLang start on a CPU.
if importlib.util.find_spec("sgl_kernel") is None:
    sys.path.append(str(Path(__file__).parents[1] / "engine" / "cpu_shim" / "src"))
    importlib.import_module("sglang_cpu_shim")

from sglang.srt.entrypoints import engine  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402


def parse(argv: list[str]) -> dict[str, Any]:
    """What SGLang's own parser makes of a command line: option -> value, and the API key.

    Abbreviations are refused: argparse takes one until the next release adds an option that begins the same.
    """
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = parser._option_string_actions
    given = [word for word in argv if word.startswith("--")]
    unknown = [word for word in given if word not in known]
    if unknown:
        raise ValueError(f"no options of this SGLang by their full names: {', '.join(unknown)}")
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            arguments = prepare_server_args(argv)
    except SystemExit:
        raise ValueError(words.getvalue().strip().splitlines()[-1]) from None
    options = {name: getattr(arguments, known[name].dest) for name in given if name != "--config"}
    return {"options": options, "api_key": arguments.api_key}


def logged_arguments(plugin: str, argv: list[str]) -> dict[str, Any]:
    """What SGLang logs of its arguments, before and after it has loaded the plugins in a directory of packages.

    `without_target` is what the plugin says when SGLang has not the function that it hooks.
    """
    arguments = prepare_server_args(argv)
    logged = engine._server_args_for_logging
    before = logged(arguments)
    sys.path.insert(0, plugin)

    del engine._server_args_for_logging
    try:
        importlib.import_module("sglang_secrets_plugin").register()
        without_target = ""
    except SystemExit as refused:
        without_target = str(refused)
    engine._server_args_for_logging = logged

    load_plugins()
    after = engine._server_args_for_logging(arguments)
    changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    return {"changed": changed, "served": arguments.api_key, "without_target": without_target}


def main() -> None:
    """Answer until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": {"parse": parse, "logged_arguments": logged_arguments}[request["ask"]](**request["with"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        ANSWERS.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    main()
