# SPDX-License-Identifier: GPL-3.0-or-later
"""What the environment and the command line ask for, checked."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import LabError

CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_HOSTS = ("lab1=10.77.0.11",)  # as in inventory/lab
# The host's interface in the lab is vb-NAME, and Linux allows 15 characters.
NAME = re.compile(r"[a-z][a-z0-9-]{0,10}")
# ssh binds <state>/cp/ADDRESS-USER plus a random suffix of 17 characters; a socket's path has at most 107.
# This leaves 22 for USER.
STATE_LENGTH = 107 - 17 - len("/cp/") - len("255.255.255.255-") - 22


@dataclass(frozen=True)
class HostSpec:
    """One host as asked for. memory: bytes; binds: (source, target) directories, read-only in the host."""

    name: str
    ip: str
    memory: int
    binds: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping) -> HostSpec:
        return cls(
            data["name"], data["ip"], data["memory"], tuple((source, target) for source, target in data["binds"])
        )


@dataclass(frozen=True)
class Settings:
    """Where this lab lives. Labs of two checkouts, or with two LAB_NAMEs, are independent."""

    name: str
    state_root: Path
    cache: Path

    @property
    def id(self) -> str:
        return f"{self.name}-{hashlib.sha256(os.fsencode(CHECKOUT)).hexdigest()[:8]}"

    @property
    def prefix(self) -> str:
        """What a command for this lab begins with."""
        return "" if self.name == "lab" else f"LAB_NAME={self.name} "

    @property
    def state(self) -> Path:
        return self.state_root / self.id

    @property
    def mark(self) -> Path:
        """A file that only the lab's own namespaces have."""
        return Path("/run/systemd") / f"sglang-lab-{self.id}"

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Settings:
        name = env.get("LAB_NAME") or "lab"
        check_name("LAB_NAME", name)
        cache = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/root") / ".cache") / "sglang-lab"
        settings = cls(name, Path(env.get("LAB_STATE") or "/var/lib/sglang-lab"), Path(env.get("LAB_CACHE") or cache))
        for variable, path in (("LAB_STATE", settings.state_root), ("LAB_CACHE", settings.cache)):
            if not path.is_absolute() or set(str(path)) & set(" \t\n,:\"'"):
                raise LabError(
                    f"{variable} is not usable", seen=path, wanted="an absolute path without space , : or quote"
                )
        if len(str(settings.state)) > STATE_LENGTH:
            raise LabError(
                "the path of the lab's state is too long for ssh's control sockets",
                seen=f"{settings.state} ({len(str(settings.state))} characters)",
                wanted=f"at most {STATE_LENGTH} characters",
                next="set LAB_STATE to a shorter directory",
            )
        return settings


def check_name(what: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise LabError(
            f"{what} is not usable",
            seen=f"{name!r} ({len(name)} characters)",
            wanted="1 to 11 of a-z 0-9 -, a letter first (it names a network interface, which has 15 characters)",
            next="lab/lab up lab1=10.77.0.11",
        )


def parse_memory(text: str) -> int:
    """'12g', '900m' or bytes, as bytes."""
    match = re.fullmatch(r"(\d+)([kmgt]?)", text.lower())
    size = int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2]] if match else 0
    if size < 256 << 20:
        raise LabError(
            "the memory limit of a host is not usable",
            seen=repr(text),
            wanted="a size of 256m or more, such as 12g",
            next="set LAB_MEMORY=12g",
        )
    return size


def parse_bind(text: str) -> tuple[str, str]:
    """'SRC:DST' as two absolute paths, of which SRC is there."""
    source, separator, target = text.partition(":")
    if not separator or not source.startswith("/") or not target.startswith("/") or ":" in target:
        raise LabError("a bind is not usable", seen=repr(text), wanted="/absolute/source:/absolute/target")
    if not os.path.isdir(source):
        raise LabError("the source of a bind is not there", seen=source, wanted="a directory", next=f"ls -ld {source}")
    return source, target


def parse_hosts(words: Iterable[str], memory: str, binds: Iterable[str]) -> list[HostSpec]:
    """NAME=IP words as hosts, all in one /24 network."""
    size, bound = parse_memory(memory), tuple(sorted(parse_bind(bind) for bind in binds))
    hosts = []
    for word in words:
        name, separator, ip = word.partition("=")
        if not separator:
            raise LabError("a host is not usable", seen=repr(word), wanted="NAME=IP, such as lab1=10.77.0.11")
        check_name("a host's name", name)
        try:
            address = ipaddress.IPv4Address(ip)
        except ValueError:
            raise LabError(f"the address of {name} is not usable", seen=repr(ip), wanted="an IPv4 address") from None
        if not address.is_private or address.is_loopback or int(address) & 0xFF in (0, 1, 255):
            raise LabError(
                f"the address of {name} is not usable",
                seen=ip,
                wanted="a private IPv4 address that does not end in .0, .1 (the control node) or .255",
            )
        hosts.append(HostSpec(name, str(address), size, bound))
    for what, values in (("name", [host.name for host in hosts]), ("address", [host.ip for host in hosts])):
        if len(set(values)) < len(values):
            raise LabError(f"two hosts have the same {what}", seen=" ".join(values), wanted=f"one {what} for each host")
    if len({control_address(host.ip) for host in hosts}) > 1:
        raise LabError(
            "the hosts are not in one network", seen=" ".join(host.ip for host in hosts), wanted="addresses in one /24"
        )
    return hosts


def control_address(ip: str) -> str:
    """The control node's address in the /24 of a host."""
    return ip.rpartition(".")[0] + ".1"
