"""Settings, all from the environment, read once per process in ``plugin.register``."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "DSV4_SM120_"
KERNELS = ("decode", "indexer", "mhc")


@dataclass(frozen=True)
class Settings:
    """``kernels`` wanted; what to do ``on_mismatch`` with the installed SGLang; whether to ``self_check`` at start."""

    kernels: frozenset[str]
    on_mismatch: str
    self_check: bool


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Parse ``DSV4_SM120_*``. Raises ``ValueError`` naming a variable that is unknown or has an unknown value."""
    choices = {f"{PREFIX}{name.upper()}": ("1", "0") for name in KERNELS}
    choices |= {f"{PREFIX}ON_MISMATCH": ("exit", "stock"), f"{PREFIX}SELF_CHECK": ("1", "0")}
    values = {name: allowed[0] for name, allowed in choices.items()}
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in choices:
            raise ValueError(f"unknown variable {name}; known: {', '.join(choices)}")
        if value not in choices[name]:
            raise ValueError(f"{name}={value!r}; wanted one of: {', '.join(choices[name])}")
        values[name] = value
    return Settings(
        kernels=frozenset(name for name in KERNELS if values[f"{PREFIX}{name.upper()}"] == "1"),
        on_mismatch=values[f"{PREFIX}ON_MISMATCH"],
        self_check=values[f"{PREFIX}SELF_CHECK"] == "1",
    )
