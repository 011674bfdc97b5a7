# SPDX-License-Identifier: GPL-3.0-or-later
"""What happens to a host after its converge, from one variable to uninstall.yml, with the real engine.

The tests build on each other, and on those of test_site.py when these ran before: thorough ones leave the host as they
found it, or are followed by what does not depend on it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from faults import Seen, fault
from site_host import CHECKOUT, ENGINE, PROMETHEUS, Load, SiteHost, difference, eventually

sys.path.append(str(CHECKOUT / "prometheus"))
import generate

# One test alone (-k) needs the host converged, too.
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("converged")]
START_SECONDS = 420
# What a changed argument of the engine may change on the host.
EXPECTED = ("sglang_serve : ", "service_unit : ", "sglang_canary : Write", "memory_plan : Export")
LENGTH = ["-e", "sglang_serve_context_length=4096"]
BENCH = ("-e", "sglang_bench_concurrency=2", "-e", "sglang_bench_contexts=0")
# A webhook that writes down the names of the alerts it is told, and whether they begin or end.
WEBHOOK = """
import http.server, json
class Webhook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        for alert in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"]:
            print(alert["labels"]["host"], alert["labels"]["alertname"], alert["status"], flush=True)
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", 22023), Webhook).serve_forever()
"""
# Lets a stopped engine go on; who wants it to hang stops this first.
WAKE = "sglang-wake.timer"
URL, MODEL = "http://10.77.0.11:30001", "smollm2-135m-instruct"
API_KEY_FILE = CHECKOUT / ".cache" / "lab-api-key"
VENDOR_SOCKET = "[Socket]\\nListenStream=/var/run/vendor.sock\\n[Install]\\nWantedBy=sockets.target\\n"


@pytest.fixture(scope="module")
def host(site_host: SiteHost) -> SiteHost:
    return site_host


def report_of(host: SiteHost) -> dict:
    """Return what the last smoke test on the host found."""
    return json.loads(host.shell("cat /var/lib/sglang/reports/smoke.json"))


def test_what_the_engine_would_refuse_is_refused_while_it_runs(host: SiteHost) -> None:
    """What is misspelt or no longer there, and a key that only a restart would bring, with the restart put off."""
    before = host.main_pid(ENGINE)
    refused = {
        '{"sglang_serve_arguments_custom": {"context-lenght": 1}}': [
            "refuses its arguments: unrecognized arguments: --context-lenght 1",
            "Change sglang_serve_arguments_custom",
        ],
        '{"sglang_serve_arguments_custom": {"cuda-graph-max-bs": 8}}': [
            "refuses its arguments: ",
            "--cuda-graph-max-bs",
            "Change sglang_serve_arguments_custom",
        ],
        '{"sglang_serve_environment_custom": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUC": "1"}}': [
            "knows no SGLANG_ENABLE_PCIE_IPC_ALLREDUC (did you mean SGLANG_ENABLE_PCIE_IPC_ALLREDUCE?)",
            "Change sglang_serve_environment_custom",
        ],
        '{"sglang_serve_restart_policy": "defer", "sglang_serve_api_key": "another-key-of-24-letters"}': [
            "sglang_serve_api_key is not the key on the host",
            "sglang_serve_restart_policy: auto",
        ],
    }
    for settings, wanted in refused.items():
        run = host.play("site.yml", "--tags=sglang_serve", "-e", settings, status=None)
        assert (run.status != 0, run.changed) == (True, 0), run.output[-3000:]
        assert [text for text in wanted if text not in " ".join(run.output.split())] == [], run.output[-3000:]
    assert host.main_pid(ENGINE) == before


def test_a_drop_in_of_somebody_is_named(host: SiteHost) -> None:
    directory = f"/etc/systemd/system/{ENGINE}.d"
    host.shell(f"mkdir {directory}; printf '[Service]\\nNice=1\\n' > {directory}/x.conf; systemctl daemon-reload")
    run = host.play("site.yml", "--tags=sglang_smoke", status=None)
    host.shell(f"rm -r {directory}; systemctl daemon-reload")
    assert run.status != 0
    message = " ".join(run.output.split())
    assert f"not part of the configuration: {directory}/x.conf" in message, run.output[-3000:]
    assert f"systemctl cat {ENGINE}" in message


@pytest.mark.thorough
def test_one_side_of_a_pair_is_ready_by_itself(host: SiteHost) -> None:
    """The unit as the decode side, as far as a CPU goes: SGLang's own `fake` transfer, and the probe with --side."""
    unit, directory = f"/etc/systemd/system/{ENGINE}", f"/run/systemd/system/{ENGINE}.d"
    launch = "/opt/sglang/current/launch-unified.sh --disaggregation-mode decode"
    # SGLang would keep what is pushed back in a pool of host memory that wants more than 10 GiB.
    launch += " --disaggregation-transfer-backend fake --disaggregation-decode-retraction-backup cpu_tensor"
    (probe,) = host.shell(f"grep '^ExecStartPost=.*ops.probe' {unit}").splitlines()
    lines = ["[Service]", "ExecStart=", f"ExecStart={launch}", "ExecStartPost=", f"{probe} --side"]
    host.shell(f"mkdir -p {directory}; cat > {directory}/decode.conf <<'END'\n" + "\n".join(lines) + "\nEND")
    try:
        host.shell(f"systemctl daemon-reload; systemctl restart --no-block {ENGINE}")
        # At once it may still be the old one that is active.
        eventually(lambda: "decode" in arguments_of(host), 120, "the process of the decode side")
        active = f"systemctl is-active {ENGINE}"
        eventually(lambda: host.shell(active, status=None) == "active", START_SECONDS, "the decode side being ready")
        words = arguments_of(host)
        assert words[words.index("--disaggregation-transfer-backend") + 1] == "fake"
        generated = "curl -s http://127.0.0.1:30001/metrics | grep '^sglang:generation_tokens_total'"
        assert sum(float(line.rsplit(" ", 1)[1]) for line in host.shell(generated).splitlines()) > 0
    finally:
        host.shell(f"rm -r {directory}; systemctl daemon-reload; systemctl restart --no-block {ENGINE}")
    eventually(host.answers, START_SECONDS, "an answer of the whole server again")


def arguments_of(host: SiteHost) -> list[str]:
    """Return the words that the engine's process was started with."""
    return host.shell(f"tr '\\0' '\\n' < /proc/{host.main_pid(ENGINE)}/cmdline", status=None).splitlines()


@pytest.mark.thorough
def test_an_edited_launch_script_is_put_back_and_so_is_what_it_started(host: SiteHost) -> None:
    host.shell("sed -i 's/--context-length 8192/--context-length 2048/' /opt/sglang/current/launch-unified.sh")
    host.shell(f"systemctl restart {ENGINE}", timeout=START_SECONDS)
    edited = host.main_pid(ENGINE)
    # What systemd says of somebody else's unit is no reason to stop.
    host.shell(f"printf '{VENDOR_SOCKET}' > /etc/systemd/system/vendor.socket")
    host.shell("printf '[Service]\\nExecStart=/bin/true\\n' > /etc/systemd/system/vendor.service")
    host.shell("systemctl daemon-reload; systemctl enable --quiet vendor.socket")
    host.play("site.yml")
    assert host.main_pid(ENGINE) not in (0, edited)
    assert "--context-length\n8192" in host.shell(f"tr '\\0' '\\n' < /proc/{host.main_pid(ENGINE)}/cmdline")
    host.shell("systemctl disable --quiet vendor.socket; rm /etc/systemd/system/vendor.*; systemctl daemon-reload")


@fault("kill -9 of the engine's main process", "the unit ends and is started again by itself")
def test_kill_9_is_answered_by_a_restart(host: SiteHost, seen: Seen) -> None:
    before, started = host.main_pid(ENGINE), time.monotonic()
    host.shell(f"kill -9 {before}")
    gone = eventually(lambda: host.main_pid(ENGINE) not in (0, before), 60, "a new main process")
    eventually(host.answers, START_SECONDS, "an answer after kill -9")
    seen(f"a new main process after {gone:.0f} s", time.monotonic() - started)


def test_reboot_brings_everything_back(host: SiteHost) -> None:
    boot = host.shell("cat /proc/sys/kernel/random/boot_id")
    host.shell("systemctl reboot", status=None)
    eventually(lambda: host.shell("cat /proc/sys/kernel/random/boot_id", status=None) not in ("", boot), 60, "a reboot")
    eventually(host.answers, START_SECONDS, "an answer after a reboot")
    eventually(
        lambda: host.shell(f"systemctl is-active {ENGINE}", status=None) == "active", 30, "the unit being active"
    )
    assert host.shell(f"systemctl is-active {PROMETHEUS}") == "active"
    assert host.play("smoke.yml").changed == 0


@pytest.mark.thorough
def test_a_failed_start_is_explained_and_healed_by_the_next_run(host: SiteHost) -> None:
    """The play ends when the engine does, not at the time limit, says what to change, and goes back."""
    shorter = {"json-model-override-args": json.dumps({"max_position_embeddings": 4096})}
    arguments = json.dumps({"sglang_serve_arguments_custom": shorter})
    started = time.monotonic()
    run = host.play("site.yml", "-e", arguments, status=None)
    assert run.status != 0
    assert time.monotonic() - started < START_SECONDS
    assert host.answers()
    message = " ".join(run.output.split())
    for text in (
        "context_length (8192) is greater than the derived context_length (4096)",
        "change: sglang_serve_context_length",
        "next command: journalctl -u sglang-unified.service",
        "serves again and is proven",
    ):
        assert text in message, run.output[-3000:]
    host.play("site.yml")
    assert host.answers()


def test_an_engine_that_never_starts_is_given_up(host: SiteHost) -> None:
    """The start limit must be reachable: a unit that is restarted for ever hides its failure."""
    override = f"/run/systemd/system/{ENGINE}.d"
    host.shell(f"systemctl stop {ENGINE}; mkdir -p {override}")
    host.shell(
        f"printf '[Service]\\nExecStart=\\nExecStart=/bin/false\\n' > {override}/broken.conf; systemctl daemon-reload"
    )
    host.shell(f"systemctl start --no-block {ENGINE}")
    eventually(lambda: host.shell(f"systemctl show -P ActiveState {ENGINE}") == "failed", 60, "giving up")
    assert int(host.shell(f"systemctl show -P NRestarts {ENGINE}")) <= 3
    host.shell(f"rm -r {override}; systemctl daemon-reload; systemctl reset-failed {ENGINE}; systemctl start {ENGINE}")
    assert host.answers()


@fault("SIGSTOP of the whole engine, with nothing that wakes it", "a page; its end when the engine goes on")
def test_a_hung_engine_pages_and_its_end_is_told(host: SiteHost, seen: Seen, tmp_path: Path) -> None:
    """SIGSTOP to every process of the unit; the rules wait seconds in place of minutes."""
    (tmp_path / "sglang.yml").write_text(generate.generate(restart_duration="4s", settle_duration="4s"))
    settings = {
        "alertmanager_enabled": True,
        "alertmanager_webhooks": [{"url": "http://127.0.0.1:22023", "bearer_token": "0123456789abcdef"}],
        "alertmanager_group_wait_seconds": 1,
        "alertmanager_group_interval_seconds": 1,
        "prometheus_rule_files": [str(tmp_path / "sglang.yml")],
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monitoring = ("site.yml", "--tags", "prometheus,alertmanager")
    shown = host.play(*monitoring, "-e", f"@{tmp_path}/settings.json", "--diff", "-vvv").output
    host.shell(
        f"cat > /tmp/webhook.py <<'END'\n{WEBHOOK}\nEND\nsetsid python3 /tmp/webhook.py > /tmp/pages 2>/dev/null &"
    )

    def told(what: str) -> bool:
        return f"lab1 SGLangTargetDown {what}" in host.shell("cat /tmp/pages")

    host.shell(f"systemctl stop {WAKE}; systemctl kill --signal=STOP {ENGINE}")
    paged = eventually(lambda: told("firing"), 60, "a page")
    host.shell(f"systemctl kill --signal=CONT {ENGINE}; systemctl start {WAKE}")
    ended = eventually(lambda: told("resolved"), 60, "the end of the page")
    assert host.answers()
    shown += host.shell("systemctl cat prometheus-alertmanager; ps -eo args; journalctl --no-pager")
    assert "0123456789abcdef" not in shown
    assert ":9094" not in host.shell("ss -ltunH")
    host.play(*monitoring)
    assert host.shell("systemctl is-active prometheus-alertmanager", status=None) == "inactive"
    host.shell("pkill -f '[w]ebhook.py'")
    host.shell("rm /tmp/webhook.py /tmp/pages")
    seen(f"a page after {paged:.0f} s, with rules that wait 4 s", ended)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            "pkill -STOP -f '[s]glang::scheduler'",
            marks=fault("SIGSTOP of the scheduler under load", "it goes on by itself; every request is answered"),
            id="scheduler",
        ),
        pytest.param(
            f"systemctl kill --signal=STOP {ENGINE}",
            marks=fault("SIGSTOP of the whole engine under load", "it goes on by itself; every request is answered"),
            id="engine",
        ),
    ],
)
def test_a_stopped_engine_goes_on_by_itself(host: SiteHost, seen: Seen, command: str) -> None:
    """Within 120 s, without a restart."""
    before = host.main_pid(ENGINE)
    stopped = "ps -o pid= -o stat= -u sglang | awk '$2 ~ /^T/ {print $1}'"
    with Load(host, URL, API_KEY_FILE, MODEL, clients=2) as load:
        time.sleep(5)
        started, asked = time.monotonic(), time.time()
        host.shell(command)
        pids = host.shell(stopped).split()
        assert pids
        eventually(lambda: host.shell(stopped) == "", 120, "an engine that goes on")
        eventually(host.answers, 120 - (time.monotonic() - started), "an answer")
        took = time.monotonic() - started
        time.sleep(5)
    assert host.main_pid(ENGINE) == before
    on_their_way = [one for one in load.requests if one["started"] <= asked <= one["ended"]]
    assert on_their_way and [one for one in load.requests if one["error"]] == []
    told = host.shell("journalctl -u sglang-wake --no-pager")
    assert [pid for pid in pids if f"process {pid} (" not in told] == []
    seen(f"{len(pids)} processes woken, {len(load.requests)} requests answered, no restart", took)


@pytest.mark.parametrize(
    ("verb", "back", "cause", "command"),
    [
        pytest.param(
            "kill --signal=STOP",
            "kill --signal=CONT",
            "is silent now: it hangs",
            f"systemctl restart {ENGINE}",
            id="hung",
            marks=pytest.mark.thorough,
        ),
        pytest.param("stop", "start", "the unit was stopped", f"systemctl start {ENGINE}", id="stopped"),
    ],
)
def test_a_hung_and_a_stopped_engine_are_told_apart(
    host: SiteHost, verb: str, back: str, cause: str, command: str
) -> None:
    """Both with the command that brings the engine back, and with no verdict of before left."""
    host.play("smoke.yml")
    host.shell(f"systemctl stop {WAKE}; systemctl {verb} {ENGINE}")
    started = time.monotonic()
    run = host.play("smoke.yml", status=None)
    assert (run.status != 0, time.monotonic() - started < 120) == (True, True)
    row = report_of(host)["checks"][0]
    assert (row["id"], row["next_command"]) == ("run.begin", command)
    assert "not ready: " in row["cause"]
    assert cause in " ".join(row["cause"].split())
    assert command in run.output
    shown = host.play("playbooks/doctor.yml", status=None).output.rpartition("the cause first]")[2]
    assert f"next command: {command}" in shown.partition("further findings follow from it: ")[0], shown
    host.shell(f"systemctl {back} {ENGINE}; systemctl start {WAKE}", timeout=START_SECONDS)
    host.shell("systemctl start sglang-canary.service")
    assert report_of(host)["ok"]


def test_the_canary_says_how_to_start_a_stopped_engine(host: SiteHost) -> None:
    host.shell(f"systemctl stop {ENGINE}")
    host.shell("systemctl start sglang-canary.service", status=1)
    assert report_of(host)["checks"][0]["next_command"] == f"systemctl start {ENGINE}"
    host.shell(f"systemctl start {ENGINE}; systemctl start sglang-canary.service", timeout=START_SECONDS)
    assert report_of(host)["ok"]


def test_a_canary_that_is_killed_leaves_no_verdict_of_before(host: SiteHost) -> None:
    host.shell("systemctl start --no-block sglang-canary.service")
    eventually(lambda: "ends_by" in report_of(host), 30, "a run that has begun")
    host.shell("systemctl kill --signal=KILL sglang-canary.service")
    eventually(lambda: "ends_by" not in report_of(host), 30, "the end of the run")
    assert "ended by a signal before it had a verdict: KILL" in report_of(host)["checks"][0]["cause"]
    host.shell("systemctl start sglang-canary.service")
    assert report_of(host)["ok"]


@pytest.mark.thorough
def test_an_interrupted_converge_is_healed_by_the_next(host: SiteHost) -> None:
    """Killed after the files are written, before the restart: a handler would be lost; the state is not."""
    before = host.main_pid(ENGINE)
    host.play_until(f"TASK [service_unit : Apply this configuration to {ENGINE}]", "site.yml", *LENGTH)
    written = host.shell(f"grep -o 'OPS_CONFIG_SHA256=.*' /etc/systemd/system/{ENGINE}")
    running = host.shell(f"tr '\\0' '\\n' < /proc/{before}/environ | grep OPS_CONFIG_SHA256")
    assert host.main_pid(ENGINE) == before
    assert written != running
    host.play("site.yml", *LENGTH)
    assert host.main_pid(ENGINE) not in (0, before)
    assert "--context-length 4096" in host.shell(
        "tr '\\0' ' ' < /proc/$(systemctl show -P MainPID " + ENGINE + ")/cmdline"
    )


def test_one_variable_restarts_that_unit_only(host: SiteHost) -> None:
    engine, prometheus = host.main_pid(ENGINE), host.main_pid(PROMETHEUS)
    run = host.play("site.yml", "-e", "sglang_serve_context_length=6144")
    assert host.main_pid(ENGINE) not in (0, engine)
    assert host.main_pid(PROMETHEUS) == prometheus
    assert [task for task in run.changed_tasks() if not task.startswith(EXPECTED)] == []
    assert "--context-length 6144" in host.shell("cat /opt/sglang/current/launch-unified.sh")
    stale = "systemctl show -P NeedDaemonReload sglang-canary.service sglang-canary.timer"
    assert host.shell(stale).split() == ["no", "no"]


def test_stop_leaves_no_process_and_frees_the_port(host: SiteHost) -> None:
    """Also a child that left the session: it is in the unit's control group still."""
    group = host.shell(f"systemctl show -P ControlGroup {ENGINE}")
    # Into the unit's group in every hierarchy of the host, as a child of the engine would be.
    host.shell(
        "setsid sleep 98765 >/dev/null 2>&1 &"
        " for root in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do"
        f" [ ! -e $root{group}/cgroup.procs ] || echo $! > $root{group}/cgroup.procs; done"
    )
    assert host.shell("pgrep -f '[s]leep 98765'")
    host.shell(f"systemctl stop {ENGINE}")
    assert host.shell("pgrep -f '[s]leep 98765' || true") == ""
    assert host.shell("pgrep -af '[s]glang serve|[s]glang::' || true") == ""
    assert host.shell("ss -ltnH 'sport = :30001'") == ""
    assert host.shell(f"systemctl show -P ActiveState {ENGINE}") == "inactive"


def test_a_stopped_service_is_not_measured(host: SiteHost, tmp_path: Path) -> None:
    run = host.play("playbooks/bench.yml", "-e", f"sglang_bench_fetch_directory={tmp_path}", *BENCH, status=None)
    assert run.status != 0
    assert f"{ENGINE} is not ready" in " ".join(run.output.split())
    assert "TASK [sglang_bench : Plan the levels]" not in run.output
    assert list(tmp_path.iterdir()) == []


def test_uninstall_leaves_the_host_as_it_was(host: SiteHost, fresh: dict) -> None:
    run = host.play("playbooks/uninstall.yml")
    last = run.output.rpartition("TASK [")[2]
    assert "sglang-unified.service" in last and "-e uninstall_models=true removes them too" in last
    left = difference(fresh, host.snapshot())
    assert set(left) <= {"files"}
    assert all(name.startswith(("+/var/lib/sglang", "+/var/lib/sglang/models")) for name in left.get("files", [])), left
    assert "+/var/lib/sglang/models/smollm2-135m-instruct/config.json" in left["files"]
    host.play("playbooks/uninstall.yml", "-e", "uninstall_models=true")
    assert difference(fresh, host.snapshot()) == {}


def test_a_bare_host_is_explained(host: SiteHost) -> None:
    """No engine, no key file: each says so, and doctor writes it down."""
    for playbook in ("smoke.yml", "playbooks/doctor.yml"):
        run = host.play(playbook, status=None)
        assert run.status != 0
        assert "/etc/sglang/credentials/api-key" in run.output
        assert "no attribute" not in run.output
    assert host.shell("test -s /var/lib/sglang/reports/doctor.json && echo there") == "there"
