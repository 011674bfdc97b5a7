#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start the SGLang router with an API key that is in no command line.

    start_router.py [arguments of `sglang-router launch`]

The router takes its key as an argument only. This program reads it from the systemd credential `api-key`, if the unit
has one, and hands it over inside of the process. The router itself logs no key.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sglang_router.launch_router import launch_router, parse_router_args


def main() -> None:
    arguments = parse_router_args(sys.argv[1:])
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if directory:
        arguments.api_key = Path(directory, "api-key").read_text().strip()
    launch_router(arguments)


if __name__ == "__main__":
    main()
