# SPDX-License-Identifier: GPL-3.0-or-later
"""How this machine's apt reaches Debian's archive: its sources, and its settings for the network."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import LabError

SUITE = "bookworm"  # of the machine, and of the hosts unless LAB_SUITE says otherwise


def machine_sources(etc: Path = Path("/etc/apt"), suite: str = SUITE) -> str:
    """The machine's own Debian sources in deb822 form, for the hosts' suite; sources of anything else are left out.

    Raises LabError when there is none for Debian 12.
    """
    stanzas = []
    for path in [etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))]:
        stanzas += _one_line_stanzas(path.read_text() if path.is_file() else "")
    for path in sorted(etc.glob("sources.list.d/*.sources")):
        stanzas += _deb822_stanzas(path.read_text())
    suites = {SUITE, f"{SUITE}-updates", f"{SUITE}-security"}
    debian = [
        stanza
        for stanza in stanzas
        if suites & set(stanza["Suites"].split()) and "main" in stanza["Components"].split()
    ]
    if not any(SUITE in stanza["Suites"].split() for stanza in debian):
        raise LabError(
            f"this machine has no apt source for Debian 12 ({SUITE})",
            seen=json.dumps(stanzas) if stanzas else f"nothing in {etc}",
            wanted=f"suite {SUITE}, component main, in {etc}/sources.list or {etc}/sources.list.d",
            next="run on Debian 12, or add its archive to apt's sources",
        )
    kept = []
    for stanza in debian:
        stanza = {
            **stanza,
            "Suites": " ".join(name.replace(SUITE, suite) for name in stanza["Suites"].split() if name in suites),
            "Components": "main",
            "URIs": " ".join(_mirrors(stanza["URIs"].split())),
        }
        kept.append("".join(f"{field}: {value}\n" for field, value in stanza.items()))
    return "\n".join(kept)


def _one_line_stanzas(text: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        if match := re.match(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+)", line.strip()):
            options = dict(option.split("=", 1) for option in (match[1] or "").split() if "=" in option)
            stanza = {"Types": "deb", "URIs": match[2], "Suites": match[3], "Components": match[4].strip()}
            yield {**stanza, **({"Signed-By": options["signed-by"]} if "signed-by" in options else {})}


def _deb822_stanzas(text: str) -> Iterator[dict[str, str]]:
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for block in re.split(r"\n\s*\n", text):
        fields = {
            match[1].title(): match[2].strip()
            for match in re.finditer(r"^([\w-]+):((?:.*)(?:\n[ \t].*)*)", block, re.M)
        }
        fields = {{"Uris": "URIs"}.get(field, field): value for field, value in fields.items()}
        if (
            "deb" in fields.get("Types", "").split()
            and fields.get("Enabled", "yes") == "yes"
            and "Components" in fields
        ):
            yield {
                "Types": "deb",
                **{field: fields[field] for field in ("URIs", "Suites", "Components", "Signed-By") if field in fields},
            }


def _mirrors(uris: Iterable[str]) -> Iterator[str]:
    """Addresses as they are; a mirror list in a file (cloud images) as its first address."""
    for uri in uris:
        path = Path("/" + uri.removeprefix("mirror+file:").lstrip("/"))
        yield path.read_text().split()[0] if uri.startswith("mirror+file:") else uri


def machine_apt_options() -> list[str]:
    """How this machine's apt reaches its archive: proxies, certificates, date checks."""
    dump = subprocess.run(["apt-config", "dump", "--no-empty"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^(Acquire::(?:https?::.+|Check-Valid-Until|Check-Date|Retries) \".*\");$", dump, re.M)
