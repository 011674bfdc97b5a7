# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the checks of a served model: which ones belong to a profile, in which order, within which time.

Used by the sglang_smoke module and, without Ansible, by a timer on the host:

    python3 -m ops.smoke --suite FILE --url http://127.0.0.1:30001 --model NAME --profile quick --metrics-file FILE

With --intent the report begins with what differs from the intent, see drift.py. With --unit nothing is asked of a unit
that is not active. The command ends with status 0 when no check failed, 1 when one did, 2 when it could not begin.

No old verdict stays in force. A report says from its beginning that its run has not ended, and one of a run that could
not begin says why. After a run, as ExecStopPost= of a unit, the same command with --ended says of a run that was killed
that it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
import sys
import time
import typing as t
from dataclasses import dataclass

from . import systemd
from .drift import Reality, drift_rows, intent_of
from .http import Client, parse_json, read_token
from .probe import INFO_TIMEOUT_S, Capacity, capacity
from .prompt_checks import (
    MODEL_ROW,
    PROFILES,
    SEEN_CHARS,
    PromptCheck,
    Target,
    check_problem,
    fault_rows,
    model_row,
    prompt_row,
)
from .redact import masked
from .report import (
    Row,
    build_report,
    exposition,
    failure_text,
    plain,
    summary_text,
    without_key,
    write_problem,
    write_report,
    write_text,
)
from .service_checks import (
    CancelCheck,
    ConcurrentCheck,
    CountersCheck,
    EndpointsCheck,
    NeedleCheck,
    OverLongCheck,
    RestingCheck,
    Scene,
    SpeculationCheck,
    ToolCheck,
    reading,
)

# After so many silent checks in a row the others are not run.
UNANSWERED_LIMIT = 2
# Seconds after which no further check of a profile begins.
BUDGET_S = {"quick": 60.0, "full": 1200.0, "capacity": 7200.0}
# A run ends so many seconds after that at the latest: systemd and the counters have times of their own.
AFTER_BUDGET_S = 120
METRIC_PREFIX = "sglang_smoke"
RUN_PLAY = "ansible-playbook smoke.yml"
# The words of a check before the run that end with what to do.
_NEXT = re.compile(r"(?:^|\n)next command: ([^\n]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Suite:
    """All checks of a model. The last six are the server's own and need no data; None leaves one out."""

    prompts: tuple[PromptCheck, ...] = ()
    tools: tuple[ToolCheck, ...] = ()
    needles: tuple[NeedleCheck, ...] = ()
    concurrent: tuple[ConcurrentCheck, ...] = ()
    over_long: OverLongCheck | None = None
    cancelled_client: CancelCheck | None = None
    resting_level: RestingCheck | None = None
    counters: CountersCheck | None = None
    endpoints: EndpointsCheck | None = None
    speculation: SpeculationCheck | None = None

    def of(self, profile: str) -> Suite:
        """The checks of one profile; a larger one holds the smaller."""
        rank = PROFILES.index(profile)

        def chosen(value: t.Any) -> t.Any:
            if isinstance(value, tuple):
                return tuple(filter(None, map(chosen, value)))
            return value if value is not None and PROFILES.index(value.profile) <= rank else None

        return Suite(**{name.name: chosen(getattr(self, name.name)) for name in dataclasses.fields(self)})

    @property
    def looks_at_engine(self) -> bool:
        """Whether any check needs more than the answers to its questions."""
        own = (self.over_long, self.cancelled_client, self.resting_level, self.counters, self.speculation)
        return bool(self.needles or any(own))

    @property
    def asks(self) -> bool:
        """Whether there is any check at all."""
        return bool(self.prompts or self.tools or self.concurrent or self.looks_at_engine)

    def problem(self, profile: str) -> str:
        """Why a run of a profile would prove nothing, or an empty string."""
        empty = self.asks and not self.of(profile).asks
        return f"no check belongs to the profile {profile}; the checks name larger ones" if empty else ""


# From plain data


class SuiteError(ValueError):
    """The data describes no usable suite. The text names every problem."""


REQUEST_FIELDS = ("response_format", "tools", "chat_template_kwargs")
_LISTS: dict[str, t.Any] = {"tools": ToolCheck, "needles": NeedleCheck, "concurrent": ConcurrentCheck}
_SINGLES: dict[str, t.Any] = {
    "over_long": OverLongCheck,
    "cancelled_client": CancelCheck,
    "resting_level": RestingCheck,
    "counters": CountersCheck,
    "endpoints": EndpointsCheck,
    "speculation": SpeculationCheck,
}
# Asked for by name only: not every server has it.
_UNASKED = ("speculation",)
# What an id may hold: it is part of a metric's label and of a line for operators.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "dict": (dict,),
    "tuple": (list, tuple),
}


def suite_of(data: t.Mapping[str, t.Any]) -> Suite:
    """A suite from data such as `checks` of a file in models/. Raises SuiteError.

    Lists that are not there are empty; the server's own checks are made unless they are set to false, that of
    speculation only when it is there. A suite without a question names each of those checks: nobody leaves all
    questions out by mistake.
    """
    problems: list[str] = []
    data = _mapping(data, "checks")
    unknown = sorted(set(data) - {field.name for field in dataclasses.fields(Suite)})
    problems += [f"{name!r} is no kind of check" for name in unknown]
    made: dict[str, t.Any] = {"prompts": []}
    for kind in ("prompts", *_LISTS):
        made[kind] = []
        listed = [] if data.get(kind) is None else data[kind]
        if not isinstance(listed, (list, tuple)):
            problems.append(f"{kind} is {listed!r}, wanted a list")
            continue
        for index, given in enumerate(listed):
            try:
                maker = _prompt if kind == "prompts" else _listed(_LISTS[kind])
                made[kind].append(maker(given, f"{kind}[{index}]"))
            except SuiteError as error:
                problems.append(str(error))
        ids = [check.id for check in made[kind]]
        problems += [f"{kind}: check id {id!r} is used twice" for id in sorted({id for id in ids if ids.count(id) > 1})]
        made[kind] = tuple(made[kind])
    for kind, cls in _SINGLES.items():
        try:
            given = data.get(kind, False if kind in _UNASKED else {})
            made[kind] = None if given is False else _built(cls, {} if given is None else given, kind, fixed=("id",))
        except SuiteError as error:
            problems.append(str(error))
    unnamed = sorted(set(_SINGLES) - {*_UNASKED, *data})
    if not problems and unnamed and not any(made[kind] for kind in ("prompts", *_LISTS)):
        problems.append(
            f"there is no question; wanted: prompts, or a word about {', '.join(unnamed)} (false: left out)"
        )
    if problems:
        raise SuiteError("; ".join(problems))
    return Suite(**made)


def _listed(cls: t.Any) -> t.Callable[[t.Any, str], t.Any]:
    def make(given: t.Any, where: str) -> t.Any:
        values = _extra(_mapping(given, where), where, () if cls is ToolCheck else ("tools",))
        if cls is ToolCheck and "tool_choice" in values:
            values["first_extra"] = {"tool_choice": values.pop("tool_choice")}
        return _built(cls, values, where)

    return make


def _prompt(given: t.Any, where: str) -> PromptCheck:
    values = _extra(_mapping(given, where), where, ("tools",))
    asked = [name for name in ("prompt", "messages") if values.get(name)]
    if len(asked) != 1 or ("system" in values and asked != ["prompt"]):
        raise SuiteError(f"{where}: wanted prompt (with or without system), or messages")
    for name in ("prompt", "system"):
        if not isinstance(values.get(name, ""), str):
            raise SuiteError(f"{where}: {name} is {values[name]!r}, wanted str")
    prompt, system = values.pop("prompt", None), values.pop("system", None)
    if prompt:
        named = (("system", system), ("user", prompt))
        values["messages"] = [{"role": role, "content": content} for role, content in named if content]
    return _built(PromptCheck, values, where)


def _extra(values: dict[str, t.Any], where: str, more: tuple[str, ...]) -> dict[str, t.Any]:
    """The values, with the further fields of the request gathered in extra."""
    if "extra" in values or "first_extra" in values:
        raise SuiteError(f"{where}: wanted extra_body instead of extra")
    names = [name for name in REQUEST_FIELDS if name != "tools" or "tools" in more]
    extra = {name: values.pop(name) for name in names if values.get(name) is not None}
    body = values.pop("extra_body", None)
    extra.update({} if body is None else _mapping(body, f"{where}: extra_body"))
    return {**values, **({"extra": extra} if extra else {})}


def _mapping(given: t.Any, where: str) -> dict[str, t.Any]:
    if not isinstance(given, dict):
        raise SuiteError(f"{where} is {given!r}, wanted a mapping")
    strange = [key for key in given if not isinstance(key, str)]
    if strange:
        raise SuiteError(f"{where}: the key {strange[0]!r} is no text")
    return dict(given)


def _built(cls: t.Any, given: t.Any, where: str, fixed: tuple[str, ...] = ()) -> t.Any:
    """A check from a mapping, which may hold no unknown key and no value of another type."""
    values = _mapping(given, where)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in fixed}
    problems = [f"{name} is unknown" for name in sorted(set(values) - set(fields))]
    problems += [
        f"{name} is missing"
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING  # type: ignore[misc]
    ]
    for name in sorted(set(values) & set(fields)):
        problem = _type_problem(str(fields[name].type), values[name])
        if name == "id" and not problem and not _ID.fullmatch(values[name]):
            problem = f"is {values[name]!r}, wanted letters, digits, '_', '.' and '-'"
        if problem:
            problems.append(f"{name} {problem}")
    if problems:
        raise SuiteError(f"{where}: {', '.join(problems)}")
    check = cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    problem = check_problem(check) if cls is PromptCheck else check.problem()
    profile = "" if check.profile in PROFILES else f"profile is {check.profile!r}, known are {', '.join(PROFILES)}"
    if problem or profile:
        raise SuiteError(f"{where}: {problem or profile}")
    return check


def _type_problem(annotation: str, value: t.Any) -> str:
    """Why a value does not fit the annotation of a field, or an empty string."""
    names = [part.strip().split("[")[0] for part in annotation.split(" | ")]
    if value is None and "None" in names:
        return ""
    wanted = tuple(kind for name in names for kind in _TYPES.get(name, ()))
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value!r}, wanted a finite number"
    if isinstance(value, wanted) and (bool in wanted or not isinstance(value, bool)):
        return ""
    return f"is {value!r}, wanted {names[0].replace('tuple', 'list')}"


# Running


def run(
    client: Client,
    model: str,
    suite: Suite,
    profile: str = "capacity",
    key_file: str | None = None,
    engine: Client | None = None,
    budget_s: float | None = None,
    before: t.Sequence[Row] = (),
) -> dict[str, t.Any]:
    """Run the checks of a profile and return the report. A server that stays silent is not asked to the end.

    before are rows that stand in front of the others in the report.
    """
    started, start = time.time(), time.monotonic()
    chosen = suite.of(profile)
    budget = BUDGET_S[profile] if budget_s is None else budget_s
    target = Target(client, model, key_file, start + budget)
    engine = engine or client
    rows = [*before, *guarded(MODEL_ROW, lambda: [model_row(target)])]
    look_s = target.left(INFO_TIMEOUT_S)
    looks = chosen.looks_at_engine
    read = reading(engine, look_s) if looks else (None, None, {})
    scene = Scene(target, engine, capacity(engine, target.left(look_s)) if looks else Capacity(), *read)
    asked: list[Row] = []
    for id, check in _steps(chosen, scene):
        unrun = _unrun(id, asked, target, budget)
        asked += [unrun] if unrun else guarded(id, lambda check=check: [check()])  # type: ignore[misc]
    rows += asked
    counted, speculation = chosen.counters, chosen.speculation
    if counted:
        rows += guarded(counted.id, lambda: [counted.run_after(scene, asked)])
    if speculation:
        rows += guarded(speculation.id, lambda: [speculation.run_after(scene, asked)])
    if chosen.endpoints:
        rows.append(chosen.endpoints.run_after([client, engine], key_file))
    rows += fault_rows([row for row in asked if row.tries])
    head = {"base_url": client.base_url, "model": model, "profile": profile}
    return without_key(build_report(rows, started, time.monotonic() - start, **head), client.redacted)


def unbegun_report(
    why: str,
    base_url: str,
    model: str,
    profile: str,
    started: float,
    next_command: str = "ansible-playbook site.yml, which writes what a run needs",
    before: t.Sequence[Row] = (),
) -> dict[str, t.Any]:
    """The report of a run that could not begin: it must not leave an older report's verdict in force.

    before are rows of what was judged before it, which stand behind its own.
    """
    words, evidence = ("a run", "nothing was asked", 0.0), {"timeout_s": BUDGET_S.get(profile), "profile": profile}
    row = Row("run.begin", False, *words, cause=why, next_command=next_command, tried=1, evidence=evidence)
    head = {"base_url": masked(base_url), "model": model, "profile": profile}
    return plain(build_report([row, *before], started, 0.0, **head))


def stopped_report(
    words: str, base_url: str, model: str, profile: str, started: float, before: t.Sequence[Row] = ()
) -> dict[str, t.Any]:
    """The report of a run that a check before it forbade. words are that check's, with its "next command: " lines."""
    commands = _NEXT.findall(words)
    why = "; ".join(line for line in _NEXT.sub("", words).splitlines() if line.strip())
    return unbegun_report(why, base_url, model, profile, started, commands[0] if commands else RUN_PLAY, before)


def begun_report(path: str, base_url: str, model: str, profile: str, started: float) -> dict[str, t.Any]:
    """What stands at the path from the beginning of a run to its end, and for ever when the run is killed: not ok.

    Until `ends_by` (seconds since the epoch) the run may still be going on, and `before`, the report that it replaces
    or null, is the last word.
    """
    try:
        before = {name: value for name, value in _read_json(path).items() if name not in ("before", "ends_by")}
    except (OSError, ValueError):
        before = None
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started))
    why = f"the run that began at {began} has not ended: it goes on, or it was killed"
    report = unbegun_report(why, base_url, model, profile, started, RUN_PLAY)
    return {**report, "ends_by": int(started + BUDGET_S[profile] + AFTER_BUDGET_S), "before": before}


def guarded(id: str, check: t.Callable[[], list[Row]]) -> list[Row]:
    """The rows of a check; one that breaks is a failed row, so that a report is always written and never says ok."""
    start = time.monotonic()
    try:
        return check()
    except Exception as error:
        cause = f"the check itself failed: {type(error).__name__}: {str(error)[:SEEN_CHARS]}"
        elapsed, command = time.monotonic() - start, "report this to those who maintain these checks"
        evidence = {"error": type(error).__name__}
        seen = "no verdict"
        return [
            Row(id, False, "a verdict", seen, elapsed, cause=cause, next_command=command, tried=1, evidence=evidence)
        ]


def _steps(suite: Suite, scene: Scene) -> list[tuple[str, t.Callable[[], Row]]]:
    """The checks in order: what a client sees first, then limits, load and length, at last the server's own view."""
    steps: list[tuple[str, t.Callable[[], Row]]] = []
    for prompt in suite.prompts:
        steps.append((f"prompt.{prompt.id}", lambda prompt=prompt: prompt_row(scene.target, prompt)))  # type: ignore[misc]
    for prefix, checks in (("tool", suite.tools), ("concurrent", suite.concurrent), ("needle", suite.needles)):
        for check in checks:
            steps.append((f"{prefix}.{check.id}", lambda check=check: check.run(scene)))  # type: ignore[misc]
    for single in (suite.over_long, suite.cancelled_client, suite.resting_level):
        if single:
            steps.append((single.id, lambda single=single: single.run(scene)))  # type: ignore[misc]
    return steps


def _unrun(id: str, done: t.Sequence[Row], target: Target, budget: float) -> Row | None:
    """The row of a check that is not run, or None: the server is silent, or the profile's time is over."""
    silent = done[-UNANSWERED_LIMIT:]
    if len(silent) == UNANSWERED_LIMIT and all(row.unanswered for row in silent):
        cause = f"the server was silent for {UNANSWERED_LIMIT} checks before"
        command = silent[-1].next_command
        return _not_asked(id, cause, command, budget, unanswered=True)
    if target.over:
        cause = f"the {budget:g} s of this profile were over; the slow checks are above"
        command = "journalctl -u 'sglang-*' -n 100 --no-pager"
        return _not_asked(id, cause, command, budget)
    return None


def _not_asked(id: str, cause: str, command: str, budget: float, unanswered: bool = False) -> Row:
    evidence = {"profile_s": budget}
    words = ("an answer", "not asked", 0.0)
    return Row(id, False, *words, cause=cause, next_command=command, unanswered=unanswered, evidence=evidence)


def _read_json(path: str) -> dict[str, t.Any]:
    """The object in a JSON file. Raises OSError, and ValueError that names the file."""
    with open(path, encoding="utf-8") as handle:
        try:
            return _mapping(parse_json(handle.read()), path)
        except SuiteError:
            raise
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None


def main(argv: t.Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ops.smoke", description="Ask a served model questions with known answers.")
    parser.add_argument("--suite", required=True, help="JSON file with the checks")
    parser.add_argument("--url", required=True, help="base URL, such as http://127.0.0.1:30001")
    parser.add_argument("--intent", help="JSON file with what must run; compared with what does")
    parser.add_argument(
        "--engine-url", help="base URL of an engine, when --url is a router's: its limits, /metrics, /v1/loads"
    )
    parser.add_argument("--model", required=True, help="name under which the model must be served")
    parser.add_argument("--profile", choices=PROFILES, default="quick")
    parser.add_argument("--api-key-file", help="file that holds the API key")
    parser.add_argument("--report", help="file for the report (JSON)")
    parser.add_argument("--metrics-file", help="file for node_exporter's textfile collector")
    parser.add_argument("--unit", help="systemd unit that must be active for anything to be asked")
    parser.add_argument("--ended", action="store_true", help="ask nothing; say of a run that was killed that it was")
    arguments = parser.parse_args(argv)
    started = time.time()
    said = (arguments.url, arguments.model, arguments.profile)
    if arguments.ended:
        why = _killed(os.environ)
        if why:
            _write(arguments, unbegun_report(why, *said, started, RUN_PLAY), started)
        return 0
    try:
        suite = suite_of(_read_json(arguments.suite))
        files = [path for path in (arguments.report, arguments.metrics_file) if path]
        problem = suite.problem(arguments.profile) or next(filter(None, map(write_problem, files)), "")
        if problem:
            raise ValueError(problem)
        token = read_token(token_file=arguments.api_key_file)
        client = Client(arguments.url, token)
        engine = Client(arguments.engine_url, token) if arguments.engine_url else client
        reality = Reality(engine, key_file=arguments.api_key_file)
        intent = intent_of(_read_json(arguments.intent)) if arguments.intent else None
    except (OSError, ValueError) as error:
        _write(arguments, unbegun_report(str(error), *said, started), started)
        parser.error(str(error))
    down = _not_active(arguments.unit) if arguments.unit else None
    if down:
        report = unbegun_report(down[0], *said, started, down[1])
        _write(arguments, report, started)
        sys.stdout.write(failure_text(report) + "\n")
        return 1
    if arguments.report:
        with contextlib.suppress(OSError):  # what can't be written now can't be at the end, and is told then
            write_report(arguments.report, begun_report(arguments.report, *said, started))
    drift = guarded("drift", lambda: drift_rows(intent, reality)) if intent else []
    report = run(client, arguments.model, suite, arguments.profile, arguments.api_key_file, engine=engine, before=drift)
    written = _write(arguments, report, started)
    sys.stdout.write((summary_text(report) if report["ok"] else failure_text(report)) + "\n")
    return 0 if report["ok"] and written else 1


def _not_active(unit: str) -> tuple[str, str] | None:
    """Why nothing can be asked of a unit, and what to do; None when it is active."""
    try:
        state = systemd.show(unit)
    except systemd.SystemdError as error:
        return f"systemd does not say whether {unit} runs: {error}", "systemctl is-system-running"
    if state.active_state in ("active", "reloading"):
        return None
    stopped = state.active_state == "inactive"
    return f"{unit} is not active: {state.words()}", f"systemctl {'start' if stopped else 'status'} {unit}"


def _killed(environment: t.Mapping[str, str]) -> str:
    """How systemd says that a run ended without a verdict; empty when it ended by itself. See systemd.exec(5)."""
    code, result = environment.get("EXIT_CODE", "exited"), environment.get("SERVICE_RESULT", "")
    if code == "exited":
        return ""
    return f"the run was ended by a signal before it had a verdict: {environment.get('EXIT_STATUS', '')} ({result})"


def _write(arguments: argparse.Namespace, report: dict[str, t.Any], started: float) -> bool:
    """Write the report and the metrics that were asked for; False when one can't be written."""
    written = True
    for path, write in (
        (arguments.report, lambda path: write_report(path, report)),
        (arguments.metrics_file, lambda path: write_text(path, exposition(METRIC_PREFIX, report, started))),
    ):
        try:
            if path:
                write(path)
        except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
            written = False
            sys.stderr.write(f"cannot write {path}: {getattr(error, 'strerror', None) or error}\n")
    return written


if __name__ == "__main__":
    raise SystemExit(main())
