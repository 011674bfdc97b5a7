# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands of lab/lab."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time

from . import image, machine
from .errors import LabError
from .lab import Lab
from .settings import DEFAULT_HOSTS, HostSpec, Settings, control_address, parse_hosts

DESCRIPTION = "Real Debian 12 systemd hosts in systemd-nspawn, in private namespaces of this machine."
EPILOG = """\
environment:
  LAB_NAME     which lab; labs with different names run side by side, even with equal addresses (lab)
  LAB_MEMORY   memory limit of each new host (12g)
  LAB_BIND_RO  SRC:DST directories for new hosts, read-only, spaces between them
  LAB_SUITE    release of the image: bookworm or trixie, or one that LAB_SOURCES has (bookworm)
  LAB_SOURCES  file of apt sources (deb822) for the image, when not those of this machine
  LAB_DEBS     more Debian packages that hosts can install, spaces between them
  LAB_STATE    where the hosts' disks lie (/var/lib/sglang-lab)
  LAB_CACHE    where images are kept (~/.cache/sglang-lab)

examples:
  lab/lab up                                      lab1 at 10.77.0.11, the host of inventory/lab
  lab/lab exec -- curl http://lab1:30001/health   as the control node
  lab/lab forward 30001=lab1:30001                http://127.0.0.1:30001 on this machine
  lab/lab forward 9090=lab1:127.0.0.1:9090        the same for a port that only the host itself reaches
  lab/ssh lab1                                    a login, as Ansible has it
  lab/lab run lab1=10.77.0.11 -- pytest tests/integration
"""


def say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    options, command = parse(arguments)
    try:
        machine.check_root()
        return COMMANDS[options.command](Lab(Settings.from_environment(), say), options, command) or 0
    except LabError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the command after `--`."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="lab/lab", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    hosts = argparse.ArgumentParser(add_help=False)
    hosts.add_argument(
        "hosts", nargs="*", metavar="NAME=IP", help=f"hosts, at most 11 characters a name ({' '.join(DEFAULT_HOSTS)})"
    )
    hosts.add_argument(
        "--bind-ro",
        action="append",
        default=os.environ.get("LAB_BIND_RO", "").split(),
        metavar="SRC:DST",
        help="a directory of this machine, read-only in the new hosts",
    )
    hosts.add_argument("--memory", default=os.environ.get("LAB_MEMORY") or "12g", help="limit of each new host (12g)")
    one = commands.add_parser("image", help="build the hosts' base image, or find it in the cache")
    one.add_argument("--rebuild", action="store_true", help="even if the cache has it (newer packages)")
    commands.add_parser(
        "up", parents=[hosts], help="start hosts and wait until they have booted; those that are up stay"
    )
    commands.add_parser("down", help="end and remove everything of this lab")
    one = commands.add_parser("status", help="what is up; exit code 3 when nothing is")
    one.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("exec", help="exec -- CMD...: run CMD as the control node, in the lab's network")
    one = commands.add_parser("shell", help="shell NAME [-- CMD...]: a root shell in a host, past ssh")
    one.add_argument("name")
    one.add_argument("words", nargs="*", metavar="CMD", help="a command instead of a shell")
    one = commands.add_parser("power", help="power NAME on|off|cut: switch on, power off cleanly, or pull the plug")
    one.add_argument("name")
    one.add_argument("to", choices=["on", "off", "cut"])
    commands.add_parser(
        "run", parents=[hosts], help="run [NAME=IP...] -- CMD...: up, CMD, down; the lab dies with this process"
    )
    one = commands.add_parser(
        "forward", help="forward [LISTEN:]PORT=NAME:[127.0.0.1:]PORT: reach a host's port from this machine"
    )
    one.add_argument(
        "forward",
        metavar="[LISTEN:]PORT=NAME:[127.0.0.1:]PORT",
        help="LISTEN is 127.0.0.1 unless given; ends with the lab",
    )
    options = parser.parse_args(arguments[:split])
    command = arguments[split + 1 :]
    if options.command in ("exec", "run") and not command:
        parser.error(f"{options.command} needs -- CMD...")
    return options, command


def wanted_hosts(options: argparse.Namespace) -> list[HostSpec]:
    return parse_hosts(options.hosts or DEFAULT_HOSTS, options.memory, options.bind_ro)


def bring_up(lab: Lab, specs: list[HostSpec], with_parent: bool = False) -> None:
    begin = time.monotonic()
    built = None if lab.up else image.ensure(lab.settings.cache, say)
    with lab.lock():
        if with_parent and lab.up:
            raise LabError(
                f"the lab {lab.settings.name!r} is up already",
                seen=f"pid {lab.pid}",
                wanted="a lab of its own for `run`",
                next="lab/lab exec -- CMD, or LAB_NAME=other lab/lab run ...",
            )
        if not lab.up:
            begin = time.monotonic()
            lab.start(built or image.ensure(lab.settings.cache, say), control_address(specs[0].ip), with_parent)
        untouched = lab.ensure(specs)
    for spec in specs:
        lab.wait_booted(spec.name)
        if spec.name in untouched:
            say(f"{spec.name}: already up with {spec.ip}, left alone")
        else:
            say(f"{spec.name}: up at {spec.ip} ({time.monotonic() - begin:.1f} s)")


def do_image(lab: Lab, options: argparse.Namespace, _command: list[str]) -> None:
    machine.check()
    print(image.ensure(lab.settings.cache, say, options.rebuild))


def do_up(lab: Lab, options: argparse.Namespace, _command: list[str]) -> None:
    specs = wanted_hosts(options)
    lab.require_outside("lab up")
    machine.check()
    machine.check_state_root(lab.settings.state_root)
    bring_up(lab, specs)


def do_down(lab: Lab, _options: argparse.Namespace, _command: list[str]) -> None:
    lab.require_outside("lab down")
    with lab.lock():
        existed = lab.remove()
    say(f"{lab.settings.id}: " + ("removed" if existed else "was not there, nothing to remove"))


def do_run(lab: Lab, options: argparse.Namespace, command: list[str]) -> int:
    specs = wanted_hosts(options)
    lab.require_outside("lab run")
    machine.check()
    machine.check_state_root(lab.settings.state_root)
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _frame: sys.exit(128 + signum))
    try:
        bring_up(lab, specs, with_parent=True)
        process = subprocess.Popen(lab.enter(command))
        while os.getppid() == parent:
            try:
                code = process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            return code if code >= 0 else 128 - code
        say("the calling process has ended, taking the lab down")
        return 128 + signal.SIGHUP
    finally:
        if lab.started:
            with lab.lock():
                lab.remove()


def do_status(lab: Lab, options: argparse.Namespace, _command: list[str]) -> int:
    if not lab.up:
        print("{}" if options.json else f"{lab.settings.id}: down")
        return 3
    status = lab.ask("status")
    if options.json:
        print(json.dumps({**status, "pid": lab.pid}, indent=2))
        return 0
    print(f"{lab.settings.id}: up, state in {lab.state}, control node {status['control']}")
    for host in status["hosts"]:
        power = "on" if host["on"] else "off"
        memory = f"memory {(host['memory_used'] or 0) >> 20} of {host['memory'] >> 20} MiB"
        print(f"  {host['name']:<11} {host['ip']:<15} {power:<3}  boots {host['boots']}  {memory}")
        for source, target in host["binds"]:
            print(f"    {target} is {source}, read-only")
    for near, far in status["forwards"].items():
        print(f"  {near} -> {far}")
    return 0


def do_exec(lab: Lab, _options: argparse.Namespace, command: list[str]) -> None:
    lab.require_up()
    words = lab.enter(command)
    os.execvp(words[0], words)


def do_shell(lab: Lab, options: argparse.Namespace, command: list[str]) -> None:
    lab.require_up()
    leader = lab.host(options.name)["leader"]
    if not leader:
        raise LabError(
            f"{options.name} is off",
            seen="no process 1",
            wanted="a running host",
            next=f"lab/lab power {options.name} on",
        )
    environment = [
        "env",
        "-i",
        "HOME=/root",
        "LANG=C.UTF-8",
        f"TERM={os.environ.get('TERM', 'dumb')}",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ]
    words = lab.enter(
        [
            "nsenter",
            "--target",
            str(leader),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
            "--",
            *environment,
            *(options.words + command or ["bash", "-l"]),
        ]
    )
    os.execvp(words[0], words)


def do_power(lab: Lab, options: argparse.Namespace, _command: list[str]) -> None:
    lab.require_up()
    begin = time.monotonic()
    lab.ask("power", name=options.name, to=options.to)
    if options.to == "on":
        lab.wait_booted(options.name)
    say(f"{options.name}: {'up' if options.to == 'on' else 'off'} ({time.monotonic() - begin:.1f} s)")


def do_forward(lab: Lab, options: argparse.Namespace, _command: list[str]) -> None:
    near, _, far = options.forward.partition("=")
    listen, _, near_port = near.rpartition(":")
    name, _, target = far.partition(":")
    inside, _, far_port = target.rpartition(":")
    ports = all(port.isdigit() and 0 < int(port) < 65536 for port in (near_port, far_port))
    if not ports or inside not in ("", "127.0.0.1"):
        raise LabError(
            "the forward is not usable",
            seen=repr(options.forward),
            wanted="[LISTEN:]PORT=NAME:PORT, or [LISTEN:]PORT=NAME:127.0.0.1:PORT",
            next="lab/lab forward 9090=lab1:127.0.0.1:9090",
        )
    lab.require_up()
    lab.require_outside("lab forward")
    lab.host(name)
    address = listen or "127.0.0.1", int(near_port)
    key = f"{address[0]}:{address[1]}"
    current = lab.ask("status")["forwards"].get(key)
    if current == far:
        say(f"{key} -> {current}: already there, left alone")
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            raise LabError(
                "this machine's port cannot be opened",
                seen=f"{key}: {error.strerror}",
                wanted="a free port",
                next=f"lab/lab forward {int(near_port) + 10000}={far}, or ss -ltnp",
            ) from error
        lab.ask("forward", (listener.fileno(),), name=name, port=int(far_port), loopback=bool(inside))
    say(f"{key} -> {far}, until the lab ends")


COMMANDS = {
    "image": do_image,
    "up": do_up,
    "down": do_down,
    "status": do_status,
    "exec": do_exec,
    "shell": do_shell,
    "power": do_power,
    "run": do_run,
    "forward": do_forward,
}
