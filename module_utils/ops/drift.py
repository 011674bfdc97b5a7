# SPDX-License-Identifier: GPL-3.0-or-later
"""Is what runs what was meant? The intent (as rendered) against the unit, its process and the server's own report.

A server can be healthy with yesterday's configuration: the unit was changed but not restarted, a drop-in overrides it,
an older container holds the port, or the engine chose another backend than it was told.

Nothing secret is read from the server (its report also holds keys), and no value of a variable whose name looks like a
secret is ever shown.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import os
import re
import time
import typing as t
from dataclasses import dataclass, field

from . import packages, systemd
from .engine_load import METRICS_PATH, samples
from .host import SECONDS as PROGRAM_S
from .http import Client, HttpError, curl_command, fields_command, parse_json
from .listeners import foreign_listener
from .preflight import Host
from .redact import is_secret, masked, printable
from .report import Row, build_report, skipped_row, without_key

INFO_PATH = "/server_info"
# Command-line names whose field in /server_info has another one.
ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "pp": "pp_size",
    "model": "model_path",
}
# Variables that change what the engine loads, how it computes or communicates; one that nobody asked for is drift.
ENGINE_VARIABLES = re.compile(
    r"(SGLANG|SGL|DSV4_SM120|VLLM|NCCL|GLOO|UCX|MC|MOONCAKE|CUDA|CUBLAS|CUDNN|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|"
    r"FLASHINFER|DG|OMP|KMP)_|(NVIDIA_TF32_OVERRIDE|LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH)$"
)
# The sha256 of the launch script, in the unit file.
LAUNCH_HASH_VARIABLE = "OPS_LAUNCH_SHA256"
# Those among them that the unit file sets for every server, beside what the intent names.
UNIT_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_AUTOTUNING")
# What the distribution, or the container that the host is, gives to all services.
VENDOR_DROP_INS = re.compile(r"(/usr)?/lib/systemd/system/|/run/systemd/(system|generator[.a-z]*)/service\.d/")
# What our kernels say of themselves, one sample for each kernel and rank.
KERNEL_ACTIVE = "dsv4_sm120_kernel_active"
# A question to the server ends within so many seconds.
ASK_S = 10.0
# Of what somebody else wrote: a value, and all that one row shows.
LONGEST_VALUE = 200
LONGEST_ROW = 4000
NVIDIA_SMI = ["nvidia-smi", "--query-compute-apps=pid,gpu_bus_id,used_memory", "--format=csv,noheader"]


@dataclass(frozen=True)
class Intent:
    """What must run. Everything but unit is optional; what is not named is not compared.

    arguments are the engine's options by their name on the command line, False meaning "not given". environment are
    the variables that the unit sets. release is the directory of the virtual environment, a link or not. server_info
    are further fields that the server must report, such as a backend. min_total_tokens is the smallest KV pool that
    was meant. kernels are those of ours that must be active on every rank. config_sha256 is the hash of the wanted
    configuration; without one the unit file's own counts. unit_source is the file that the unit file was made from,
    with a placeholder for the hash; it names the launch script and its hash. neighbours are the units of this host's
    other engines, which have GPUs of their own.
    """

    unit: str
    arguments: dict[str, t.Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    server_info: dict[str, t.Any] = field(default_factory=dict)
    config_sha256: str | None = None
    unit_source: str | None = None
    release: str | None = None
    version: str | None = None
    min_total_tokens: int | None = None
    kernels: tuple[str, ...] = ()
    drop_ins: tuple[str, ...] = ()
    gpus: bool = False
    neighbours: tuple[str, ...] = ()


def intent_of(data: t.Mapping[str, t.Any]) -> Intent:
    """An intent from plain data. Raises ValueError for what it does not know or needs and misses."""
    names = {field.name for field in dataclasses.fields(Intent)}
    unknown = sorted(set(data) - names)
    if unknown or not data.get("unit"):
        raise ValueError(f"the intent has {', '.join(unknown) or 'no unit'}; known are {', '.join(sorted(names))}")
    given = {name: value for name, value in data.items() if value is not None}
    for name, value in given.items():
        words, fits = _TYPES[name]
        if not fits(value):
            raise ValueError(f"{name} is {_value(value)}, wanted {words}")
    for name, value in given.get("environment", {}).items():
        if not isinstance(value, (str, int, float)):
            raise ValueError(f"environment: {name} is {shown(name, value)}, wanted a single value")
    return Intent(**{**given, **{name: tuple(given.get(name, ())) for name in ("drop_ins", "neighbours", "kernels")}})


def _is_texts(value: t.Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


# Field of an intent -> its type in words, and whether a value has it.
_TYPES: dict[str, tuple[str, t.Callable[[t.Any], bool]]] = {
    **dict.fromkeys(
        ("unit", "config_sha256", "unit_source", "release", "version"), ("a text", lambda value: isinstance(value, str))
    ),
    **dict.fromkeys(("arguments", "environment", "server_info"), ("a mapping", lambda value: isinstance(value, dict))),
    **dict.fromkeys(("kernels", "drop_ins", "neighbours"), ("a list of texts", _is_texts)),
    "min_total_tokens": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "gpus": ("true or false", lambda value: isinstance(value, bool)),
}


@dataclass(frozen=True)
class Reality:
    """Where to look. key_file is named in commands to run by hand."""

    client: Client
    host: Host = field(default_factory=Host)
    runner: systemd.Runner = systemd.ask_command
    key_file: str | None = None

    def environment(self, pid: int) -> dict[str, str] | None:
        return systemd.process_environment(pid, self.host.path("/proc"))


def drift_rows(intent: Intent, reality: Reality) -> list[Row]:
    """Compare everything. Raises PermissionError."""
    start = time.monotonic()
    try:
        state = systemd.show(intent.unit, reality.runner)
        rows = [_timed(start, unit_row, intent, state, reality)]
        why = f"{intent.unit} has no main process: {state.words()}"
    except systemd.SystemdError as error:
        state, why, words = systemd.UnitState(intent.unit), "systemd can't be asked", str(error)
        command, evidence = "systemctl is-system-running", {"timeout_s": systemd.QUERY_S}
        rows = [_timed(start, _row, "drift.unit", _AS_ON_DISK, "no answer of systemd", words, command, evidence)]
    rows += [_timed(None, row, intent, reality) for id, row in _DISK_ROWS.items() if _asked(id, intent)]
    if not state.main_pid:
        rows += [skipped_row(id, "as intended", why) for id in (*_PROCESS_ROWS, *_SERVER_ROWS) if _asked(id, intent)]
    else:
        rows += [_timed(None, row, intent, state, reality) for id, row in _PROCESS_ROWS.items() if _asked(id, intent)]
        rows += server_rows(intent, reality)
    if intent.gpus:
        rows.append(_timed(None, gpu_row, intent, reality))
    return rows


def _timed(start: float | None, look: t.Callable[..., Row], *arguments: t.Any) -> Row:
    """The row of a look, with the seconds that it took, or those since start."""
    start = time.monotonic() if start is None else start
    row = look(*arguments)
    return dataclasses.replace(row, elapsed_s=time.monotonic() - start)


def drift_report(intent: Intent, reality: Reality) -> dict[str, t.Any]:
    """The rows as a report. Raises PermissionError."""
    started, start = time.time(), time.monotonic()
    rows = drift_rows(intent, reality)
    head = {"unit": intent.unit, "base_url": reality.client.base_url}
    return without_key(build_report(rows, started, time.monotonic() - start, **head), reality.client.redacted)


def _asked(id: str, intent: Intent) -> bool:
    named = {
        "drift.launch": intent.unit_source,
        "drift.packages": intent.release,
        "drift.release": intent.release,
        "drift.environment": intent.environment,
        "drift.arguments": intent.arguments,
        "drift.server_info": intent.server_info,
        "drift.version": intent.version,
        "drift.capacity": intent.min_total_tokens,
        "drift.kernels": intent.kernels,
    }
    return id not in named or bool(named[id])


def _row(id: str, wanted: str, seen: str, cause: str, command: str, evidence: dict[str, t.Any] | None = None) -> Row:
    return Row(
        id,
        not cause,
        wanted,
        printable(seen, LONGEST_ROW),
        0.0,
        cause=printable(cause, LONGEST_ROW),
        next_command=command if cause else "",
        passed=int(not cause),
        tried=1,
        evidence=evidence or {},
    )


# The unit and its process

_AS_ON_DISK = "active, as rendered and on disk, without other drop-ins"


def unit_row(intent: Intent, state: systemd.UnitState, reality: Reality) -> Row:
    """Active, with the unit file as it was rendered, loaded, and no drop-in that nobody asked for."""
    argv = ["systemctl", "show", intent.unit, "--property=DropInPaths"]
    paths = systemd.checked(reality.runner, argv).partition("DropInPaths=")[2].splitlines()
    seen = set((paths[0] if paths else "").split()) - set(intent.drop_ins)
    drop_ins = sorted(path for path in seen if not VENDOR_DROP_INS.match(path))
    causes = []
    if state.active_state != "active":
        causes.append("the unit is not running")
    if state.need_daemon_reload:
        causes.append("the unit file was changed and not loaded")
    causes += _edited(intent, state, reality.host)
    if drop_ins:
        causes.append(f"drop-ins that are not part of the configuration: {', '.join(drop_ins)}")
    command = f"systemctl status {intent.unit}" if "running" in " ".join(causes) else f"systemctl cat {intent.unit}"
    evidence = {
        "timeout_s": systemd.QUERY_S,
        "unit_file": state.fragment_path,
        "made_from": intent.unit_source,
        "drop_ins": sorted(seen),
        "main_pid": state.main_pid,
    }
    return _row("drift.unit", _AS_ON_DISK, state.words(), "; ".join(causes), command, evidence)


def _edited(intent: Intent, state: systemd.UnitState, host: Host) -> list[str]:
    """What somebody else wrote into the unit file, in words; nothing where the intent names no source of it."""
    if not intent.unit_source:
        return []
    source = host.read(intent.unit_source)
    if not source:
        return [f"{intent.unit_source}, which the unit file is made from, can't be read: site.yml writes it anew"]
    texts = (source, host.read(state.fragment_path))
    before, after = ([_without_hash(line) for line in text.splitlines()] for text in texts)
    # Only the name of a setting is shown: its value may be a secret.
    changed = [line[2:].partition("=")[0] for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]
    places = ", ".join(dict.fromkeys(name.strip() or "an empty line" for name in changed))
    return [f"the unit file is not as it was rendered, at {places}: site.yml writes it anew"] if changed else []


def _without_hash(line: str) -> str:
    """A line of a unit file, without the hash that only a written one has."""
    return re.sub(rf"({systemd.CONFIG_HASH_VARIABLE})=\S*", r"\1", line)


def launch_row(intent: Intent, reality: Reality) -> Row:
    """The launch script that the next start runs is the one that the release was made with."""
    source = reality.host.read(str(intent.unit_source))
    path = re.search(r"^ExecStart=(\S+)$", source, re.MULTILINE)
    wanted = re.search(rf"^Environment={LAUNCH_HASH_VARIABLE}=([0-9a-f]{{64}})$", source, re.MULTILINE)
    if not (path and wanted):
        why = f"{intent.unit_source} names no launch script with its sha256"
        return skipped_row("drift.launch", "the launch script as rendered", why, f"cat {intent.unit_source}")
    try:
        with open(reality.host.path(path[1]), "rb") as script:
            seen = hashlib.sha256(script.read()).hexdigest()
        cause = "" if seen == wanted[1] else "the launch script is not as it was rendered: site.yml writes it anew"
    except OSError as error:
        seen, cause = "", f"the launch script can't be read: {error.strerror}; site.yml writes it anew"
    words = f"{path[1]} with sha256 {{}}".format
    evidence = {"path": path[1], "wanted_sha256": wanted[1], "sha256": seen}
    command = f"cat {path[1]}"
    return _row("drift.launch", words(wanted[1][:12]), words(seen[:12] or "unknown"), cause, command, evidence)


def packages_row(intent: Intent, reality: Reality) -> Row:
    """The virtual environment holds what its lock file and our wheels brought, in their versions, and nothing else."""
    venv = os.path.realpath(reality.host.path(str(intent.release)))
    directory = os.path.dirname(venv)
    lock = os.path.join(directory, "requirements.txt")
    command = f"{intent.release}/bin/python -m pip list --format=freeze"
    python = packages.python_of(venv)
    if not python:
        cause = "there is no Python in the virtual environment: site.yml installs it anew"
        return _row("drift.packages", "the packages of its lock file", "none", cause, f"ls -l {intent.release}/")
    try:
        with open(lock, encoding="utf-8") as text:
            wanted = packages.locked(text.read(), python) | packages.built(directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"what was installed can't be read beside the virtual environment: {type(error).__name__}: {error}"
        return skipped_row("drift.packages", "the packages of its lock file", why, f"ls -l {directory}")
    seen = packages.installed(os.path.join(venv, "lib", python, "site-packages"))
    wrong = [f"{name} is not installed, wanted {wanted[name]}" for name in sorted(set(wanted) - set(seen))]
    for name in sorted(seen):
        if name in wanted and not packages.same_version(seen[name], wanted[name]):
            wrong.append(f"{name} is {seen[name]}, wanted {wanted[name]}")
        elif name not in wanted and name not in packages.OF_THE_VENV:
            wrong.append(f"{name} {seen[name]} is installed, wanted nothing")
    cause = (
        "somebody installed or removed packages: uninstall what is wanted nowhere; "
        f"site.yml installs the others anew once {directory}/complete is removed"
    )
    words = f"{len(wanted)} packages"
    evidence = {"lock": lock, "python": python, "installed": len(seen), "differing": wrong[:50]}
    shown_words = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
    return _row("drift.packages", words, shown_words or "all as locked", cause if wrong else "", command, evidence)


# Neither needs a process: what the next start would run.
_DISK_ROWS: dict[str, t.Callable[[Intent, Reality], Row]] = {
    "drift.launch": launch_row,
    "drift.packages": packages_row,
}


def config_row(intent: Intent, state: systemd.UnitState, reality: Reality) -> Row:
    """The process was started with the configuration that was rendered last: the intent's, or that of the unit file."""
    running = (reality.environment(state.main_pid) or {}).get(systemd.CONFIG_HASH_VARIABLE)
    wanted = intent.config_sha256 or _hash_on_disk(state, reality.host)
    command = f"systemctl show {intent.unit} --property=Environment,MainPID"
    if wanted is None:
        return skipped_row("drift.config", "the configuration of the unit file", "the unit file has no hash", command)
    cause = "" if running == wanted else "the process was started with another configuration: restart it"
    seen = f"configuration {running or 'without a hash'}"
    evidence = {"main_pid": state.main_pid, "wanted_sha256": wanted, "sha256": running}
    return _row("drift.config", f"configuration {wanted}", seen, cause, command, evidence)


def _hash_on_disk(state: systemd.UnitState, host: Host) -> str | None:
    found = re.search(rf"{systemd.CONFIG_HASH_VARIABLE}=([0-9a-f]+)", host.read(state.fragment_path))
    return found[1] if found else None


def port_row(intent: Intent, state: systemd.UnitState, reality: Reality) -> Row:
    """Whoever answers on the port belongs to the unit."""
    port = reality.client.port
    foreign = foreign_listener(port, state.main_pid, reality.host) or ""
    seen = foreign or f"process {state.main_pid} of {intent.unit}"
    cause = "another server answers on this port" if foreign else ""
    command, evidence = f"ss -ltnp 'sport = :{port}'", {"port": port, "main_pid": state.main_pid}
    return _row("drift.port", f"port {port} held by {intent.unit}", seen, cause, command, evidence)


def release_row(intent: Intent, state: systemd.UnitState, reality: Reality) -> Row:
    """The libraries that the process has mapped are those of the installed release."""
    wanted = os.path.realpath(reality.host.path(str(intent.release)))
    maps = reality.host.read(f"/proc/{state.main_pid}/maps")
    pattern = re.compile(r"\s(/\S*?)/lib/python[\d.]+/site-packages/[^\n]*?\.so[^\n]*$", re.MULTILINE)
    libraries = list(pattern.finditer(maps))
    mapped = {os.path.realpath(reality.host.path(match[1])) for match in libraries}
    replaced = [match[0] for match in libraries if match[0].endswith(" (deleted)")]
    others = sorted(mapped - {wanted})
    if not mapped:
        cause = "the process has mapped no library of a virtual environment: it is still starting, or is no engine"
    elif others:
        cause = "the process runs another release than the installed one: restart it"
    elif replaced:
        cause = "files of the release were replaced under the running process: restart it"
    else:
        cause = ""
    seen = ", ".join(sorted(mapped)) or "no library"
    seen += f"; mapped and replaced: {len(replaced)}, such as {replaced[0].strip()}" if replaced else ""
    command = f"grep -o '/.*site-packages' /proc/{state.main_pid}/maps | sort -u"
    evidence = {"main_pid": state.main_pid, "mapped": sorted(mapped), "libraries": len(libraries)}
    return _row("drift.release", wanted, seen, cause, command, {**evidence, "replaced": len(replaced)})


def environment_row(intent: Intent, state: systemd.UnitState, reality: Reality) -> Row:
    """Every wanted variable has its value, and no other one steers the engine."""
    running = reality.environment(state.main_pid) or {}
    wrong = []
    for name, value in sorted(intent.environment.items()):
        if running.get(name) != str(value):
            wrong.append(f"{name} is {shown(name, running.get(name))}, wanted {shown(name, str(value))}")
    known = (*intent.environment, *UNIT_VARIABLES)
    extra = sorted(name for name in running if ENGINE_VARIABLES.match(name) and name not in known)
    wrong += [f"{name} is set ({shown(name, running[name])}), wanted nothing" for name in extra]
    seen = "; ".join(wrong) or f"all {len(intent.environment)} as wanted"
    cause = "the process was started with another environment than the configured one" if wrong else ""
    command = f"systemctl show {intent.unit} --property=Environment,DropInPaths"
    evidence = {"main_pid": state.main_pid, "compared": sorted(intent.environment), "not_asked_for": extra}
    return _row("drift.environment", f"{len(intent.environment)} variables", seen, cause, command, evidence)


def shown(name: str, value: t.Any) -> str:
    """A value for people; hidden when the name looks like a secret's."""
    if value is None:
        return "not set"
    return "(hidden)" if is_secret(name, value) else _value(value)


def _value(value: t.Any) -> str:
    """A value for people: in one line, bounded, without what looks like a secret."""
    text = masked(repr(value))
    return printable(text, LONGEST_VALUE) + ("..." if len(text) > LONGEST_VALUE else "")


def kernels_row(intent: Intent, _state: systemd.UnitState, reality: Reality) -> Row:
    """Each wanted kernel is active on every rank. One that failed its own check leaves SGLang's in its place."""
    wanted = f"active on every rank: {', '.join(intent.kernels)}"
    command = f"journalctl -u {intent.unit} -g dsv4_sm120"
    try:
        text = reality.client.get(METRICS_PATH, ASK_S).body.decode("utf-8", errors="replace")
    except HttpError as error:
        return _row("drift.kernels", wanted, "no answer", str(error), command, {"timeout_s": ASK_S})
    ranks = _kernels_by_rank(text)
    expected = _expected_ranks(intent)
    parts, off, missing = [], [], []
    for kernel in sorted({*ranks, *intent.kernels}):
        active = ranks.get(kernel, {})
        absent = sorted(expected - set(active))
        parts.append(f"{kernel} on {sum(active.values())} of {len({*active, *expected})} ranks")
        if kernel in intent.kernels and not (active and all(active.values())):
            off.append(kernel)
        elif kernel in intent.kernels and absent:
            missing.append(f"{kernel} on {', '.join(_rank_words(rank) for rank in absent)}")
    if not ranks:
        return _row("drift.kernels", wanted, "nothing", _NO_PLUGIN, command, {"timeout_s": ASK_S})
    causes = []
    if off:
        causes.append(f"SGLang's own code does the work of {', '.join(off)}: the kernel failed its check at the start")
    if missing:
        causes.append(f"nothing is said of {'; '.join(missing)}: those processes did not load the plugin")
    active = {name: sum(seen.values()) for name, seen in sorted(ranks.items())}
    evidence = {"timeout_s": ASK_S, "active_ranks": active, "wanted_ranks": len(expected)}
    return _row("drift.kernels", wanted, "; ".join(parts), "; ".join(causes), command, evidence)


_NO_PLUGIN = "the engine says nothing about its kernels: their plugin is not loaded"


def _kernels_by_rank(text: str) -> dict[str, dict[tuple[str, str], bool]]:
    """Kernel -> (pipeline rank, tensor rank) -> whether all samples say that it is active."""
    ranks: dict[str, dict[tuple[str, str], bool]] = {}
    for _name, label, value in samples(text, (KERNEL_ACTIVE,)):
        if "kernel" in label:
            seen = ranks.setdefault(label["kernel"], {})
            rank = (label.get("pp_rank", "0"), label.get("tp_rank", "0"))
            seen[rank] = seen.get(rank, True) and re.fullmatch(r"1(\.0*)?", value) is not None
    return ranks


def _expected_ranks(intent: Intent) -> set[tuple[str, str]]:
    """The (pipeline rank, tensor rank) of every process; none when the intent names no tensor parallel size."""
    fields = _fields(intent.arguments)
    sizes = [str(fields.get(name, default)) for name, default in (("pp_size", 1), ("tp_size", 0))]
    pp, tp = (int(size) if re.fullmatch(r"\d{1,4}", size) else 0 for size in sizes)
    return {(str(stage), str(rank)) for stage in range(pp) for rank in range(tp)}


def _rank_words(rank: tuple[str, str]) -> str:
    return f"TP{rank[1]}" if rank[0] == "0" else f"PP{rank[0]} TP{rank[1]}"


_PROCESS_ROWS: dict[str, t.Callable[[Intent, systemd.UnitState, Reality], Row]] = {
    "drift.config": config_row,
    "drift.port": port_row,
    "drift.release": release_row,
    "drift.environment": environment_row,
    "drift.kernels": kernels_row,
}


# The server


_SERVER_ROWS = ("drift.arguments", "drift.server_info", "drift.version", "drift.capacity")


def server_rows(intent: Intent, reality: Reality) -> list[Row]:
    """What the server says about itself. Only the fields that the intent names are looked at."""
    asked = [id for id in _SERVER_ROWS if _asked(id, intent)]
    if not asked:
        return []
    url, start = f"{reality.client.base_url}{INFO_PATH}", time.monotonic()
    try:
        info = reality.client.get_json(INFO_PATH, ASK_S)
        problem = "" if isinstance(info, dict) else "the answer is no JSON object"
    except HttpError as error:
        error.body = ""  # it may hold the key
        problem = str(error)
    if problem:
        command = curl_command(url, reality.key_file, "-o /dev/null -w '%{http_code}\\n'")
        said = ("as intended", "no answer", problem, command, {"timeout_s": ASK_S})
        return [_timed(start, _row, id, *said) for id in asked]
    look = functools.partial(fields_command, url, reality.key_file)
    made = {
        "drift.arguments": lambda id: _fields_row(id, _fields(intent.arguments), info, look),
        "drift.server_info": lambda id: _fields_row(id, dict(intent.server_info), info, look),
        "drift.version": lambda id: _version_row(id, intent, info, look(["version"])),
        "drift.capacity": lambda id: _capacity_row(id, intent, info, look(["max_total_num_tokens"])),
    }
    # One answer is read for all of them, and its time is part of each.
    return [_timed(start, made[id], id) for id in asked]


def _fields(arguments: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The fields of /server_info that stand for these arguments; what is not given has none."""
    fields = {}
    for name, value in arguments.items():
        key = name.replace("-", "_")
        if value is not False and value is not None:
            fields[ALIASES.get(key, key)] = value
    return fields


def _fields_row(
    id: str, wanted: t.Mapping[str, t.Any], info: t.Mapping[str, t.Any], look: t.Callable[[list[str]], str]
) -> Row:
    secret = sorted(name for name in wanted if is_secret(name, wanted[name]))
    compared = sorted(set(wanted) & set(info) - set(secret))
    unknown = sorted(set(wanted) - set(info) - set(secret))
    differing = [name for name in compared if not same(wanted[name], info[name])]
    wrong = [f"{name} is {_value(info[name])}, wanted {_value(wanted[name])}" for name in differing]
    aside = [f"not reported: {', '.join(unknown)}"] if unknown else []
    aside += [f"not compared: {', '.join(secret)}"] if secret else []
    seen = "; ".join([*wrong, *aside] if wrong else [f"{len(compared)} as wanted", *aside])
    cause = (
        "the server runs with other settings: an old process or an earlier run's -e (site.yml brings back what the "
        "inventory says), or the engine overrode them"
    )
    cause = cause if wrong else ""
    if not wrong and not compared:
        cause = "the server reports none of these fields: another version, or another server"
    evidence = {"timeout_s": ASK_S, "compared": compared, "not_reported": unknown, "not_compared": secret}
    return _row(id, f"{len(wanted)} settings", seen, cause, look(differing or unknown), evidence)


def same(wanted: t.Any, seen: t.Any) -> bool:
    """Whether two values mean the same, from the command line and from the report: 8 and "8", or two JSON texts."""
    if isinstance(wanted, (list, tuple)) or isinstance(seen, (list, tuple)):
        one = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        other = list(seen) if isinstance(seen, (list, tuple)) else [seen]
        return len(one) == len(other) and all(same(left, right) for left, right in zip(one, other))
    return bool(_plain(wanted) == _plain(seen))


def _plain(value: t.Any) -> t.Any:
    """The value that a text stands for: a number, a truth value, a JSON object, or the text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return parse_json(value)
    except ValueError:
        return value


def _version_row(id: str, intent: Intent, info: t.Mapping[str, t.Any], command: str) -> Row:
    seen = info.get("version")
    cause = "" if seen == intent.version else "the process runs another engine than the locked one"
    evidence = {"timeout_s": ASK_S, "wanted": intent.version, "version": str(seen)[:LONGEST_VALUE]}
    return _row(id, f"SGLang {intent.version}", f"SGLang {evidence['version']}", cause, command, evidence)


def _capacity_row(id: str, intent: Intent, info: t.Mapping[str, t.Any], command: str) -> Row:
    wanted, seen = intent.min_total_tokens or 0, info.get("max_total_num_tokens")
    enough = isinstance(seen, int) and seen >= wanted
    cause = (
        "" if enough else "the KV pool is smaller than planned: another process holds GPU memory, or the plan is wrong"
    )
    evidence = {"timeout_s": ASK_S, "wanted_tokens": wanted, "tokens": str(seen)[:LONGEST_VALUE]}
    return _row(id, f"at least {wanted} tokens of KV", f"{evidence['tokens']} tokens of KV", cause, command, evidence)


# The GPUs


def gpu_row(intent: Intent, reality: Reality) -> Row:
    """Every process on a GPU belongs to the unit or to a neighbour, and there is one of the unit."""
    status, output = reality.host.run(NVIDIA_SMI)
    command = " ".join(NVIDIA_SMI)
    wanted = f"only {intent.unit} on the GPUs"
    if status != 0:
        said, next_command = output.strip()[:200], "dmesg | grep -i xid"
        evidence: dict[str, t.Any] = {"timeout_s": PROGRAM_S, "status": status}
        return _row("drift.gpus", wanted, said, "nvidia-smi does not answer", next_command, evidence)
    owned, foreign = 0, []
    for line in output.splitlines():
        pid, _comma, rest = (part.strip() for part in line.partition(","))
        if not pid.isdigit():
            continue
        unit = reality.host.unit_of(int(pid))
        name = reality.host.read(f"/proc/{pid}/comm").strip()
        if unit == intent.unit:
            owned += 1
        elif unit not in intent.neighbours:
            foreign.append(f"process {pid} ({name or 'unknown'}{', ' + unit if unit else ''}) on {rest}")
    cause = "a process that is not the engine's holds GPU memory" if foreign else ""
    if not foreign and not owned:
        cause = "no process of the engine is on a GPU"
    seen = "; ".join(foreign) or f"{owned} processes of {intent.unit}"
    evidence = {"timeout_s": PROGRAM_S, "own_processes": owned, "other_processes": len(foreign)}
    return _row("drift.gpus", wanted, seen, cause, command, evidence)
