#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start the SGLang router with an API key that is in no command line.

    start_router.py [--only-read] [arguments of `sglang-router launch`]

The router takes its key as an argument only. This program reads it from the systemd credential `api-key`, if the unit
has one, and hands it over inside of the process. The router itself logs no key.

With --only-read it ends when the router's own parser has read the arguments: with status 0, or with what is wrong.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from sglang_router.launch_router import launch_router, parse_router_args

ONLY_READ = "--only-read"


def refusal(words: list[str]) -> str | None:
    """Return what the router's parser has against some arguments, without its pages of usage."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse_router_args(words)
    except SystemExit:
        reason = said.getvalue().strip().rpartition("error: ")[2]
        return f"{reason}. The router was not touched. Next: correct sglang_router_arguments_custom."
    return None


def main() -> None:
    words = [word for word in sys.argv[1:] if word != ONLY_READ]
    if ONLY_READ in sys.argv:
        sys.exit(refusal(words))
    arguments = parse_router_args(words)
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if directory:
        arguments.api_key = Path(directory, "api-key").read_text().strip()
    launch_router(arguments)


if __name__ == "__main__":
    main()
