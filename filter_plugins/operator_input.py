# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that say what is wrong with something an operator has set; nothing is wrong when the result is empty.

They are used by the checks that every play begins with, before anything is changed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

# service_state puts the hash of a configuration here.
PLACEHOLDER = "@CONFIG_SHA256@"

# SGLang's own arguments that hold a secret, and words that no other argument of it has.
SECRET_ARGUMENTS = ("admin-api-key", "ssl-keyfile-password")
SECRET_ARGUMENT_WORDS = re.compile(r"(^|-)(api-keys?|password|passwd|secret|credentials?)(-|\Z)")
SECRET_ENVIRONMENT = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)API_?KEYS?(_|\Z)", re.IGNORECASE)
# SGLang's own settings count tokens of text (SGLANG_INIT_NEW_TOKEN_RATIO); none of them is a secret.
TOKEN_ENVIRONMENT = re.compile(r"(?!SGLANG_).*TOKEN(_|\Z)", re.IGNORECASE)

# Debian's own accounts and groups, and those of packages; separated by spaces.
ACCOUNTS = """
root daemon bin sys sync games man lp mail news uucp proxy www-data backup list irc gnats nobody adm tty disk kmem
dialout fax voice cdrom floppy tape sudo wheel audio dip operator src shadow utmp video sasl plugdev staff users
nogroup crontab netdev messagebus input sgx kvm render sshd ssh tcpdump polkitd ntp chrony postfix admin debian
ubuntu docker prometheus grafana nvidia-persistenced
"""

# The system's own, and what the units hide from the engine (ProtectHome, PrivateTmp).
SYSTEM_DIRECTORIES = "bin boot dev etc home lib lib32 lib64 libx32 lost+found proc root run sbin sys tmp usr"
LOCAL_DIRECTORIES = "bin etc games include lib libexec man sbin share src"
STATE_DIRECTORIES = "cache lib local opt"
STATE_OF_OTHERS = """
apt aptitude containerd dbus debconf docker dpkg fontconfig grafana initramfs-tools initscripts kubelet ldconfig
logrotate man man-db misc mysql nfs pam polkit-1 postgresql private prometheus python snapd ssl sudo systemd tuned
ucf update-notifier usbutils vim xml-core
"""


def address_of(host: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text is; nothing for a name. A zone (fe80::1%eth0) has no place in a URL."""
    try:
        return None if "%" in str(host) else ipaddress.ip_address(str(host))
    except ValueError:
        return None


def host_fault(host: Any) -> str:
    """Return why a text is neither an IP address nor the name of a host."""
    if address_of(host) or re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", str(host)):
        return ""
    return "wanted: one IP address or host name"


def public_hosts(hosts: Sequence[str]) -> list[str]:
    """Return those of some addresses to listen on that other hosts can reach; a name may be anybody's but localhost."""
    return [host for host in hosts if not getattr(address_of(host), "is_loopback", host == "localhost")]


def number_faults(variables: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each variable that is no whole number, or is a list that has something else.

    variables: name -> value. A text of digits is one: -e gives such. What else Python or Ansible takes for a number
    (1e5, 6_4, true, digits of other scripts) would go into a launch line as it is.
    """
    return [
        f"{name} {'has' if isinstance(value, (list, tuple)) else 'is'} {one!r}; wanted: a whole number, digits only"
        for name, value in variables.items()
        for one in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(one, bool) or not re.fullmatch(r"-?[0-9]+", str(one))
    ]


def argument_faults(custom: Mapping[str, Any], managed: Mapping[str, str], variable: str) -> list[str]:
    """Return what is wrong with arguments of a launch line.

    managed: name of an argument -> the variable that sets it. variable: the one that holds `custom`.
    """
    faults = (argument_fault(name, value, managed) for name, value in custom.items())
    return [f"{variable} {fault}" for fault in faults if fault]


def argument_fault(name: Any, value: Any, managed: Mapping[str, str]) -> str:
    """Return what is wrong with one argument, without its value."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", str(name)):
        return f"has the name {str(name)!r}; wanted: lower-case letters, digits and '-', without leading dashes"
    # The engine takes the beginning of a name for the name.
    variables = [managed[name]] if name in managed else [managed[one] for one in managed if one.startswith(name)]
    if variables:
        return f"sets {name}; wanted: {' or '.join(dict.fromkeys(variables))} instead"
    shortened = name != "ssl-keyfile" and any(one.startswith(name) for one in SECRET_ARGUMENTS)
    if shortened or SECRET_ARGUMENT_WORDS.search(name):
        return f"sets {name}; wanted: no secrets (a command line can be read by everybody)"
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values or None in values:
        return f"has {name} without a value; wanted: true for a bare flag, false to drop the argument, or a value"
    return placeholder_fault(name, value)


def environment_faults(custom: Mapping[str, Any], variable: str) -> list[str]:
    """Return what is wrong with environment variables of a unit; variable: the one that holds `custom`."""
    faults = (environment_fault(name, value) for name, value in custom.items())
    return [f"{variable} {fault}" for fault in faults if fault]


def environment_fault(name: Any, value: Any) -> str:
    """Return what is wrong with one environment variable, without its value."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
        return f"has the name {str(name)!r}; wanted: letters, digits and '_', beginning with none of the digits"
    if SECRET_ENVIRONMENT.search(name) or TOKEN_ENVIRONMENT.match(name):
        return f"has {name}; wanted: no secrets (a unit's environment can be read by everybody)"
    if value is None:
        return f"has {name} without a value; wanted: a text or a number"
    if isinstance(value, (Mapping, list, tuple)):
        return f"has a mapping or a list in {name}; wanted: a text or a number"
    if "\0" in str(value):
        return f"has {name} with a NUL in it; wanted: a text that a process can be given"
    return placeholder_fault(name, value)


def placeholder_fault(name: str, value: Any) -> str:
    """Return whether a value has the text that is replaced in every unit."""
    return f"has {PLACEHOLDER} in {name}; wanted: a value without it" if PLACEHOLDER in str(value) else ""


def directory_fault(path: Any) -> str:
    """Return why a directory can't be one that is this project's alone, to be made and removed as a whole."""
    parts = str(path).strip("/").split("/")
    if not re.fullmatch(r"(/[^/\s]+)+/?", str(path)) or {".", ".."} & set(parts):
        return "wanted: an absolute path without spaces, '.' and '..'"
    if len(parts) < 2:
        return "wanted: a directory of at least two levels, because it is removed as a whole"
    if parts[:2] == ["usr", "local"]:
        ours = len(parts) > 2 and parts[2] not in LOCAL_DIRECTORIES.split()
    elif parts[0] == "var":
        ours = len(parts) > 2 and parts[1] in STATE_DIRECTORIES.split() and parts[2] not in STATE_OF_OTHERS.split()
    else:
        ours = parts[0] not in SYSTEM_DIRECTORIES.split()
    return "" if ours else "wanted: a directory that is not the system's or a user's, because it is removed as a whole"


def account_fault(name: Any) -> str:
    """Return why a name can't be that of a user or group that is this project's alone, to be made and removed."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,30}", str(name)):
        return (
            "wanted: a system name of at most 31 characters, lower-case letters, digits, '_' and '-', "
            "beginning with a letter"
        )
    if name in ACCOUNTS.split() or name.startswith("systemd-"):
        return "wanted: a name that the system does not use for something else"
    return ""


def account_entry_fault(entry: Sequence[str] | None) -> str:
    """Return why an account that is there can't be this project's.

    entry: what getent says after the name: password, uid, gid, comment, home, shell. None: there is no such account.
    """
    if not entry or (int(entry[1]) >= 100 and entry[5].rsplit("/", 1)[-1] in ("nologin", "false")):
        return ""
    return f"an account with the uid {entry[1]} and the shell {entry[5] or '/bin/sh'}"


def group_entry_fault(entry: Sequence[str] | None) -> str:
    """Return why a group that is there can't be this project's; entry: password, gid, members."""
    return f"a group with the gid {entry[1]}" if entry and int(entry[1]) < 100 else ""


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict:
        return {
            "host_fault": host_fault,
            "public_hosts": public_hosts,
            "number_faults": number_faults,
            "argument_faults": argument_faults,
            "environment_faults": environment_faults,
            "directory_fault": directory_fault,
            "account_fault": account_fault,
            "account_entry_fault": account_entry_fault,
            "group_entry_fault": group_entry_fault,
        }
