# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults made for real on a host that serves: nothing lost, nothing wedged, nothing to repair by hand.

Each test leaves the host as it was, notes what it saw (faults.py), and docs/reliability.md has the table. The tests
build on each other, and on those of test_site.py when these ran before.
"""

from __future__ import annotations

import json
import signal
import time

import pytest
from faults import Seen, fault
from site_host import CHECKOUT, ENGINE, PROMETHEUS, Load, SiteHost, eventually

pytestmark = pytest.mark.integration
START_SECONDS = 420
URL, MODEL = "http://10.77.0.11:30001", "smollm2-135m-instruct"
KEY_FILE = CHECKOUT / ".cache" / "lab-api-key"
STORE = f"/var/lib/sglang/models/{MODEL}"
SMOKE = ("site.yml", "--tags", "sglang_smoke")
SERVE = ("site.yml", "--tags", "sglang_serve,sglang_smoke")
# Another release in the environment of the current one, and one that needs an environment of its own.
LENGTH = ("playbooks/upgrade.yml", "-e", "sglang_serve_context_length=4096")
PYTHON = ("playbooks/upgrade.yml", "-e", "sglang_venv_python=/usr/bin/python3.11")
# The engine's parser takes this, the engine does not.
SHORTER = {"json-model-override-args": json.dumps({"max_position_embeddings": 4096})}
BROKEN = json.dumps({"sglang_serve_arguments_custom": SHORTER})
# What an upgrade to another flag changes on the host, in its order. The last one restarts.
STEPS = [
    "sglang_serve : Create the directory of the release",
    "sglang_serve : Give the release its environment",
    "sglang_serve : Write the launch scripts",
    "sglang_serve : Write the units",
    "sglang_serve : Write what the release is",
    "sglang_serve : Write the credentials",
    "sglang_serve : Point the link at the release",
    f"service_unit : Write {ENGINE}",
    f"service_unit : Apply this configuration to {ENGINE}",
]
# What follows the restart: the new release starts or serves, and is not proven yet.
LATER_STEPS = ["sglang_serve : Wait until the engine answers", "sglang_smoke : Ask the model"]
# Takes memory in the unit's control group, as a child of the engine would, until the kernel ends somebody there.
HOG = """
import os, sys, time
for path in sys.argv[1:]:
    with open(path, "w") as procs:
        procs.write(str(os.getpid()))
taken = []
for _ in range(6):
    taken.append(b"x" * (32 << 20))
    time.sleep(0.1)
time.sleep(60)
"""


# Lab hosts have the clock of the machine below them; this moves that of these units' processes, as /run/clock says.
CLOCK = CHECKOUT / "tests" / "integration" / "clock.c"
MOVED_UNITS = (ENGINE, "sglang-canary.service", "sglang-state-metrics.service")


@pytest.fixture(scope="module")
def host(site_host: SiteHost) -> SiteHost:
    return site_host


@pytest.fixture(scope="module")
def serving(host: SiteHost, converged: None) -> SiteHost:
    """A host that site.yml has converged."""
    return host


def words(text: str) -> str:
    return " ".join(text.split())


def restarted(host: SiteHost, before: int, started: float) -> float:
    """Wait until another main process answers; return the seconds since the fault."""
    eventually(lambda: host.main_pid(ENGINE) not in (0, before), START_SECONDS, "a new main process")
    eventually(host.answers, START_SECONDS, "an answer of the new process")
    eventually(
        lambda: host.shell(f"systemctl is-active {ENGINE}", status=None) == "active", 60, "the unit being active"
    )
    return time.monotonic() - started


def gone_back(host: SiteHost, before: int, release: str) -> float:
    """Wait until a play's guard has brought another main process of the release back; return the seconds."""
    started = time.monotonic()
    eventually(lambda: host.main_pid(ENGINE) not in (0, before), START_SECONDS, "the restart")
    guard = "systemctl is-active sglang-guard"
    eventually(lambda: host.shell(guard, status=None) not in ("active", "activating"), START_SECONDS, "the guard's end")
    assert host.shell("readlink /opt/sglang/current") == release
    assert host.answers()
    assert json.loads(host.shell("cat /var/lib/sglang/reports/smoke.json"))["ok"]
    return time.monotonic() - started


def storm(host: SiteHost, *arguments: str) -> dict:
    """Send the requests of storm.py from the control node."""
    program = str(CHECKOUT / "tests" / "integration" / "storm.py")
    printed = host.lab("exec", "--", "python3", program, URL, str(KEY_FILE), MODEL, *arguments, timeout=900)
    return json.loads(printed)


def up(host: SiteHost) -> str:
    """What Prometheus has of the engine now, "" when its newest sample is old."""
    query = "http://127.0.0.1:9090/api/v1/query?query=up%7Bjob=%22sglang%22%7D%20and%20time()-timestamp(up)%3C10"
    printed = host.shell(f"curl -sf '{query}'", status=None)
    result = json.loads(printed)["data"]["result"] if printed else []
    return result[0]["value"][1] if result else ""


@fault("1,000 rapid requests, 20 % of the clients leave", "the others are answered; nothing stays held")
def test_clients_that_leave_hold_nothing(serving: SiteHost, seen: Seen) -> None:
    before = serving.main_pid(ENGINE)
    files = f"ls /proc/{before}/fd | wc -l"
    held = int(serving.shell(files))
    started = time.monotonic()
    result = storm(serving, "rapid", "1000", "0.2")
    took = time.monotonic() - started
    assert result["statuses"] == {"200": 800, "aborted": 200}
    quiet = eventually(lambda: serving.at_rest() and int(serving.shell(files)) <= held + 2, 60, "an engine at rest")
    assert serving.main_pid(ENGINE) == before
    seen(f"800 answered with 200, all 1,000 within {took:.0f} s; nothing held any more", quiet)


@fault("50 malformed requests", "each is refused at once; the engine goes on")
def test_malformed_requests_are_refused(serving: SiteHost, seen: Seen) -> None:
    before = serving.main_pid(ENGINE)
    result = storm(serving, "malformed", "50")
    statuses = result["statuses"]
    assert set(statuses) <= {"400", "422", "500"}
    assert serving.answers()
    assert serving.main_pid(ENGINE) == before
    counts = ", ".join(f"{count} with {status}" for status, count in sorted(statuses.items()))
    seen(
        f"{counts} (500: JSON that is no object), the slowest in {result['slowest_s']:.1f} s; the next request answered"
    )


@fault("disk full under the journal", "the engine answers; new lines are kept when there is room")
def test_a_full_journal(serving: SiteHost, seen: Seen) -> None:
    directory, before = "/var/log/journal", serving.main_pid(ENGINE)
    serving.shell(f"mount -t tmpfs -o size=12m,mode=2755 none {directory}; systemctl restart systemd-journald")
    serving.shell(f"journalctl --flush; dd if=/dev/zero of={directory}/fill bs=64k 2>/dev/null", status=None)
    serving.shell("head -c 1000000 /dev/urandom | base64 | logger -t filler")
    assert serving.answers()
    started = time.monotonic()
    serving.shell(f"rm {directory}/fill; logger -t after-a-full-disk room")
    kept = "journalctl -t after-a-full-disk --no-pager --output=cat"
    eventually(lambda: "room" in serving.shell(kept), 30, "a line in the journal")
    took = time.monotonic() - started
    serving.shell(f"journalctl --relinquish-var; umount {directory}; journalctl --flush")
    assert serving.main_pid(ENGINE) == before
    seen("answered all the time", took)


@fault("disk full under Prometheus", "the engine answers; Prometheus records again when there is room")
def test_a_full_disk_under_prometheus(serving: SiteHost, seen: Seen) -> None:
    directory = "/var/lib/prometheus/metrics2"
    serving.shell(f"systemctl stop {PROMETHEUS}; mount -t tmpfs -o size=8m none {directory}")
    serving.shell(f"chown prometheus: {directory}; systemctl start {PROMETHEUS}")
    eventually(lambda: up(serving) == "1", 60, "a sample")
    before = serving.main_pid(PROMETHEUS)
    serving.shell(f"dd if=/dev/zero of={directory}/fill bs=4k 2>/dev/null", status=None)
    eventually(lambda: up(serving) == "", 60, "no new sample")
    assert serving.answers()
    started = time.monotonic()
    serving.shell(f"rm {directory}/fill")
    eventually(lambda: up(serving) == "1", 60, "a sample after there was room")
    took = time.monotonic() - started
    assert serving.main_pid(PROMETHEUS) == before
    serving.shell(f"systemctl stop {PROMETHEUS}; umount {directory}; systemctl start {PROMETHEUS}")
    seen("a gap in the samples, no restart", took)


@fault("disk full under reports and state", "the canary says so and fails; both are written again when there is room")
def test_a_full_disk_under_reports_and_state(serving: SiteHost, seen: Seen) -> None:
    directories = ("/var/lib/sglang/reports", "/var/lib/sglang/metrics")
    for directory in directories:
        serving.shell(f"mount -t tmpfs -o size=64k none {directory}; chown sglang: {directory}")
        serving.shell(f"dd if=/dev/zero of={directory}/fill bs=4k 2>/dev/null", status=None)
    # The service's own mounts are older than the full one.
    serving.shell("systemctl restart sglang-state-metrics")
    serving.shell("systemctl start sglang-canary", status=1)
    told = serving.shell("journalctl -u sglang-canary -n 40 --no-pager")
    assert "cannot write /var/lib/sglang/reports/smoke.json: No space left on device" in told
    complains = "journalctl -u sglang-state-metrics -n 20 --no-pager"
    eventually(lambda: "cannot write" in serving.shell(complains), 40, "a word of the state's writer")
    before = serving.main_pid("sglang-state-metrics")
    started = time.monotonic()
    serving.shell(f"rm {' '.join(f'{directory}/fill' for directory in directories)}")
    eventually(lambda: serving.shell(f"ls {directories[1]}") == "state.prom", 60, "the state being written")
    took = time.monotonic() - started
    serving.shell("systemctl start sglang-canary; test -s /var/lib/sglang/reports/smoke.json")
    assert serving.main_pid("sglang-state-metrics") == before
    serving.shell(f"umount {' '.join(directories)}; systemctl restart sglang-state-metrics")
    seen("the canary failed with the file's name; no restart of the state's writer", took)


@pytest.mark.thorough
@fault("disk full under the caches of compiled code", "the engine starts and answers all the same")
def test_a_full_disk_under_the_caches(serving: SiteHost, seen: Seen) -> None:
    cache, before = "/var/cache/sglang", serving.main_pid(ENGINE)
    serving.shell(f"mount -t tmpfs -o size=64k none {cache}")
    try:
        serving.shell(f"dd if=/dev/zero of={cache}/fill bs=4k 2>/dev/null", status=1)
        assert serving.shell(f"df --output=avail {cache} | tail -1").strip() == "0"
        started = time.monotonic()
        serving.shell(f"kill -9 {before}")
        took = restarted(serving, before, started)
    finally:
        serving.shell(f"umount -l {cache}")
    seen("the lab's engine compiles nothing for GPUs", took)


@fault("disk full under the models", "the play says so and fails; what serves runs on; nothing is left there")
def test_a_full_disk_under_the_models(serving: SiteHost, seen: Seen) -> None:
    before = serving.main_pid(ENGINE)
    serving.shell("mkdir -p /srv/full; mount -t tmpfs -o size=20m none /srv/full")
    # Preflight would refuse so little room; here it goes while the files are made.
    settings = json.dumps({"model_store_root": "/srv/full", "preflight_disks": []})
    run = serving.play("site.yml", "--tags", "model_store", "-e", settings, status=None)
    left = serving.shell("find /srv/full -mindepth 1")
    serving.shell("umount /srv/full; rmdir /srv/full")
    assert run.status != 0
    assert "No space left on device" in words(run.output), run.output[-3000:]
    assert left == ""
    assert serving.main_pid(ENGINE) == before
    assert serving.answers()
    seen("as expected")


@pytest.mark.thorough
@fault("a failed pip in an upgrade", "pip's own words; what serves runs on")
def test_a_failed_pip(serving: SiteHost, seen: Seen) -> None:
    before = serving.main_pid(ENGINE)
    serving.shell("cp -rs /srv/wheelhouse /srv/partial; rm /srv/partial/transformers-*")
    run = serving.play(*PYTHON, "-e", "sglang_venv_wheelhouse=/srv/partial", status=None)
    serving.shell("rm -r /srv/partial")
    assert run.status != 0
    assert "transformers" in run.output, run.output[-3000:]
    assert serving.main_pid(ENGINE) == before
    assert serving.answers()
    seen("no matching distribution for transformers")


@pytest.mark.thorough
@fault("disk full in an upgrade", "what serves runs on; the next run removes what was left")
def test_a_full_disk_in_an_upgrade(serving: SiteHost, seen: Seen) -> None:
    before = serving.main_pid(ENGINE)
    # The environment that the failed pip has left is the newest.
    made = serving.shell("ls -d -t /opt/sglang/environments/* | head -1")
    assert serving.shell(f"test -e {made}/complete || echo incomplete") == "incomplete"
    serving.shell(f"rm -r {made}; mkdir {made}; mount -t tmpfs -o size=100m none {made}")
    run = serving.play(*PYTHON, status=None)
    serving.shell(f"umount {made}")
    assert run.status != 0
    assert "No space left on device" in words(run.output), run.output[-3000:]
    assert serving.main_pid(ENGINE) == before
    assert serving.answers()
    assert serving.play("playbooks/upgrade.yml").changed_tasks() == ["sglang_serve : Remove what no kept release needs"]
    assert serving.main_pid(ENGINE) == before
    assert serving.shell(f"test -e {made} || echo gone") == "gone"
    seen("No space left on device; the next upgrade.yml removed what was left")


@pytest.mark.thorough
@fault("Ctrl-C at a step of an upgrade", "what serves runs on, at whatever step; the next run heals")
def test_an_interrupted_upgrade_at_each_step(serving: SiteHost, seen: Seen) -> None:
    before = serving.main_pid(ENGINE)
    for step in STEPS:
        serving.play_until(f"TASK [{step}", *LENGTH, by=signal.SIGINT)
        assert serving.main_pid(ENGINE) == before, step
    assert serving.answers()
    started = time.monotonic()
    serving.play(*SERVE)
    took = time.monotonic() - started
    assert serving.main_pid(ENGINE) == before
    assert serving.answers()
    seen(f"interrupted at each of {len(STEPS)} steps, the same process served; one play of site.yml", took)


@pytest.mark.thorough
@fault("an upgrade killed after the restart", "the host goes back by itself to what served")
def test_a_killed_upgrade_after_the_restart(serving: SiteHost, seen: Seen) -> None:
    release = serving.shell("readlink /opt/sglang/current")
    for step in LATER_STEPS:
        before = serving.main_pid(ENGINE)
        serving.play_until(f"TASK [{step}", *LENGTH)
        took = gone_back(serving, before, release)
    seen(f"killed at each of {len(LATER_STEPS)} steps; the same release, started again and proven", took)


@pytest.mark.thorough
@fault("an upgrade killed while a broken release does not start", "the host goes back by itself to what served")
def test_a_killed_upgrade_to_a_broken_release(serving: SiteHost, seen: Seen) -> None:
    release, before = serving.shell("readlink /opt/sglang/current"), serving.main_pid(ENGINE)
    serving.play_until(f"TASK [{LATER_STEPS[0]}", "playbooks/upgrade.yml", "-e", BROKEN)
    took = gone_back(serving, before, release)
    assert "json-model-override-args" not in serving.shell(
        f"cat /proc/{serving.main_pid(ENGINE)}/cmdline | tr '\\0' ' '"
    )
    seen("as expected", took)


@pytest.mark.thorough
@fault("a start that fails, and nothing to go back to", "the report is no longer green; the next run heals")
def test_a_failed_start_without_a_way_back(serving: SiteHost, seen: Seen) -> None:
    serving.play(*SMOKE)
    serving.shell("rm /opt/sglang/releases/*/proven")
    run = serving.play("site.yml", "-e", BROKEN, status=None)
    assert run.status != 0
    assert "There is no proven release to go back to" in words(run.output), run.output[-3000:]
    report = json.loads(serving.shell("cat /var/lib/sglang/reports/smoke.json"))
    assert (report["ok"], report["failed"]) == (False, ["run.begin"])
    assert "is greater than the derived context_length" in report["checks"][0]["cause"]
    metric = "grep -h ^ops_smoke_ok /var/lib/sglang/metrics/state.prom"
    eventually(lambda: serving.shell(metric).endswith(" 0"), 60, "the metric of the report")
    started = time.monotonic()
    serving.play(*SERVE)
    assert serving.answers()
    seen("report and metric say why", time.monotonic() - started)


@pytest.mark.thorough
@fault(
    "unit file edited by hand",
    "smoke says at which setting, loaded or not; site.yml puts it back",
)
def test_an_edited_unit_file(serving: SiteHost, seen: Seen) -> None:
    before, unit = serving.main_pid(ENGINE), f"/etc/systemd/system/{ENGINE}"
    serving.shell(f"sed -i 's/^RestartSec=5/RestartSec=50/' {unit}")
    for wanted in (
        "the unit file was changed and not loaded",
        "the unit file is not as it was rendered, at RestartSec",
    ):
        run = serving.play(*SMOKE, status=None)
        assert run.status != 0
        assert wanted in words(run.output), run.output[-3000:]
        serving.shell("systemctl daemon-reload")
    started = time.monotonic()
    serving.play(*SERVE)
    assert serving.shell(f"systemctl show -P RestartUSec {ENGINE}") == "5s"
    assert serving.main_pid(ENGINE) == before
    seen("drift named; healed by one play", time.monotonic() - started)


@pytest.mark.thorough
@fault("half-written launch script, unit and configurations", "site.yml writes them whole; what serves runs on")
def test_half_written_configuration(serving: SiteHost, seen: Seen) -> None:
    before = serving.main_pid(ENGINE)
    files = [
        "/opt/sglang/current/launch-unified.sh",
        f"/etc/systemd/system/{ENGINE}",
        "/etc/sglang/canary-checks.json",
        "/etc/prometheus/sglang.yml",
        "/opt/sglang/current/release.json",
    ]
    sums = f"sha256sum {' '.join(files)}"
    whole = serving.shell(sums)
    for file in files:
        serving.shell(f"truncate -s $(( $(stat -c %s {file}) / 2 )) {file}")
    serving.shell("systemctl daemon-reload")
    started = time.monotonic()
    serving.play("site.yml")
    took = time.monotonic() - started
    assert serving.shell(sums) == whole
    assert serving.main_pid(ENGINE) == before
    seen("five files cut in half, whole again after one play", took)


@pytest.mark.thorough
@fault("Prometheus killed and stopped", "the engine answers; kill -9: back by itself; stopped: smoke names it")
def test_prometheus_is_down(serving: SiteHost, seen: Seen) -> None:
    before, started = serving.main_pid(PROMETHEUS), time.monotonic()
    serving.shell(f"kill -9 {before}")
    eventually(lambda: serving.main_pid(PROMETHEUS) not in (0, before) and up(serving) == "1", 60, "Prometheus again")
    took = time.monotonic() - started
    serving.shell(f"systemctl stop {PROMETHEUS}")
    assert serving.answers()
    run = serving.play(*SMOKE, status=None)
    assert run.status != 0
    assert "127.0.0.1:9090" in words(run.output.rpartition("TASK [")[2]), run.output[-3000:]
    serving.play("site.yml", "--tags", "prometheus")
    assert serving.shell(f"systemctl is-active {PROMETHEUS}") == "active"
    seen("kill -9: samples again; stopped: smoke named its address, site.yml started it", took)


@pytest.mark.parametrize(
    "process",
    [
        pytest.param(
            "sglang::scheduler",
            marks=fault("kill -9 of the scheduler", "the unit ends and is started again by itself"),
        ),
        pytest.param(
            "sglang::detokenizer",
            marks=[
                fault("kill -9 of the detokenizer", "the unit ends and is started again by itself"),
                pytest.mark.thorough,
            ],
        ),
    ],
)
def test_kill_9_of_a_process_of_the_engine(serving: SiteHost, seen: Seen, process: str) -> None:
    """The main process: test_operations.py. It holds the start limit off, too: a start that answered has not failed."""
    before, started = serving.main_pid(ENGINE), time.monotonic()
    serving.shell(f"pkill -9 -f '[{process[0]}]{process[1:]}'")
    gone = eventually(lambda: serving.main_pid(ENGINE) != before, 60, "the end of the unit")
    took = restarted(serving, before, started)
    assert serving.shell(f"systemctl show -P NRestarts {ENGINE}") == "0"
    seen(f"the rest ended after {gone:.0f} s", took)


@pytest.mark.thorough
@fault("kill -9 of the resource tracker", "the engine goes on")
def test_kill_9_of_the_resource_tracker(serving: SiteHost, seen: Seen) -> None:
    """A helper of Python's multiprocessing, which cleans up after processes that have died."""
    before = serving.main_pid(ENGINE)
    serving.shell("pkill -9 -f '[m]ultiprocessing.resource_tracker'")
    time.sleep(10)
    assert serving.answers()
    assert serving.main_pid(ENGINE) == before
    seen("answered, the same processes")


@pytest.mark.thorough
@fault("OOM kill by the unit's memory limit", "the unit ends and is started again by itself")
def test_the_kernel_ends_the_largest_process(serving: SiteHost, seen: Seen) -> None:
    before, group = serving.main_pid(ENGINE), serving.shell(f"systemctl show -P ControlGroup {ENGINE}")
    used = int(serving.shell(f"systemctl show -P MemoryCurrent {ENGINE}"))
    serving.shell(f"systemctl set-property --runtime {ENGINE} MemoryMax={used + (64 << 20)}")
    groups = " ".join(f"/sys/fs/cgroup{part}{group}/cgroup.procs" for part in ("", "/memory", "/systemd", "/unified"))
    serving.shell(f"cat > /tmp/hog.py <<'END'\n{HOG}\nEND")
    started = time.monotonic()
    serving.shell(f"setsid python3 /tmp/hog.py $(ls {groups} 2>/dev/null) >/dev/null 2>&1 &")
    eventually(lambda: serving.main_pid(ENGINE) != before, 90, "the end of the unit")
    serving.shell(f"systemctl set-property --runtime {ENGINE} MemoryMax=infinity; rm /tmp/hog.py")
    took = restarted(serving, before, started)
    serving.shell(f"systemctl revert {ENGINE}", status=None)
    serving.shell(f"rm -rf /run/systemd/system.control/{ENGINE}.d; systemctl daemon-reload")
    seen("ended by the kernel, started again", took)


@pytest.mark.thorough
@fault("port stolen while the engine is down", "doctor names the thief; the engine starts by itself when it is gone")
def test_a_stolen_port(serving: SiteHost, seen: Seen) -> None:
    serving.shell(f"systemctl stop {ENGINE}; setsid python3 -m http.server 30001 >/dev/null 2>&1 & sleep 1")
    serving.shell(f"systemctl start --no-block {ENGINE}")
    run = serving.play("playbooks/doctor.yml", status=None)
    assert run.status != 0
    assert "port 30001 is held by process" in words(run.output), run.output[-4000:]
    told = f"journalctl -u {ENGINE} -n 50 --no-pager | grep -c 'the start waits: port 30001 is held by' || true"
    eventually(lambda: int(serving.shell(told)) >= 1, START_SECONDS, "a start that waits")
    assert not serving.answers()
    started = time.monotonic()
    serving.shell("pkill -f '[h]ttp.server 30001'")
    took = restarted(serving, 0, started)
    seen("named with its process; started by itself", took)


@pytest.mark.thorough
@fault("corrupt model file", "site.yml names it, makes the files anew and restarts what may have loaded them")
def test_a_corrupt_model_file(serving: SiteHost, seen: Seen) -> None:
    """One byte of the weights: no size tells, and the engine would start with it."""
    before, file = serving.main_pid(ENGINE), f"{STORE}/model.safetensors"
    serving.shell(f"printf X | dd of={file} bs=1 seek=$(( $(stat -c %s {file}) - 9 )) conv=notrunc 2>/dev/null")
    started = time.monotonic()
    run = serving.play("site.yml", "--tags", "model_store,sglang_serve,sglang_smoke")
    assert f"{file} has another content than when it was made" in words(run.output)
    assert serving.main_pid(ENGINE) not in (0, before)
    assert serving.answers()
    seen("named, made anew, restarted and proven by one play", time.monotonic() - started)


@pytest.mark.thorough
@fault("corrupt cache of compiled kernels", "what is damaged is thrown away before the start, and compiled again")
def test_a_corrupt_cache(serving: SiteHost, seen: Seen) -> None:
    """Metadata of a Triton kernel that was cut: the engine would end at it, at every start (test_caches.py)."""
    before, triton = serving.main_pid(ENGINE), "/var/cache/sglang/triton"
    cut, whole = f"{triton}/CUT", f"{triton}/WHOLE"
    serving.shell(f"mkdir -p {cut} {whole}; echo '{{' > {cut}/k.json; echo '{{}}' > {whole}/k.json")
    serving.shell(f"chown -R sglang: {triton}")
    started = time.monotonic()
    serving.shell(f"kill -9 {before}")
    took = restarted(serving, before, started)
    assert serving.shell(f"ls {triton}").split() == ["WHOLE"]
    assert f"{cut}/k.json is damaged" in serving.shell(f"journalctl -u {ENGINE} --no-pager | grep damaged")
    serving.shell(f"rm -r {whole}")
    seen("the damaged entry named in the journal and gone, the whole one kept", took)


def clock_of_the_engine(host: SiteHost) -> float:
    """Seconds by which the engine's clock is ahead of the machine's: an answer says when it was made."""
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    return host.ask_engine("/v1/chat/completions", ask)["created"] - time.time()


def restart_the_engine(host: SiteHost) -> int:
    """Restart it and wait until it answers; return its main process."""
    before = host.main_pid(ENGINE)
    host.shell(
        f"systemctl daemon-reload; systemctl restart sglang-state-metrics; systemctl restart --no-block {ENGINE}"
    )
    restarted(host, before, time.monotonic())
    return host.main_pid(ENGINE)


@pytest.mark.thorough
@fault("clock jumps of an hour and more, both ways, under load", "every request is answered; nothing restarts")
def test_a_clock_that_jumps(serving: SiteHost, seen: Seen) -> None:
    """In the engine, the writer of the state, and a canary that is at work meanwhile."""
    serving.shell("apt-get install -y --no-install-recommends tcc && echo 0 > /run/clock && chmod 644 /run/clock")
    serving.shell(f"cat > /run/clock.c <<'END'\n{CLOCK.read_text()}\nEND")
    serving.shell("tcc -nostdlib -nostdinc -shared -o /run/clock.so /run/clock.c && chmod 755 /run/clock.so")
    drop_ins = [f"/run/systemd/system/{unit}.d" for unit in MOVED_UNITS]
    for directory in drop_ins:
        content = "[Service]\\nEnvironment=LD_PRELOAD=/run/clock.so\\n"
        serving.shell(f"mkdir -p {directory} && printf '{content}' > {directory}/clock.conf")
    try:
        before, writer = restart_the_engine(serving), serving.main_pid("sglang-state-metrics")
        with Load(serving, URL, KEY_FILE, MODEL, clients=2) as load:
            serving.shell("systemctl start --no-block sglang-canary")
            for jump in (3600, -3600, 0):
                time.sleep(5)
                serving.shell(f"echo {jump} > /run/clock")
                eventually(lambda ahead=jump: abs(clock_of_the_engine(serving) - ahead) < 30, 30, "the clock")
            canary = "systemctl show -P ActiveState sglang-canary"
            eventually(lambda: serving.shell(canary) in ("inactive", "failed"), 180, "the canary's end")
        report = json.loads(serving.shell("cat /var/lib/sglang/reports/smoke.json"))
        assert (serving.main_pid(ENGINE), serving.main_pid("sglang-state-metrics")) == (before, writer)
    finally:
        serving.shell(f"rm -r {' '.join(drop_ins)} /run/clock*; apt-get purge -y tcc")
        restart_the_engine(serving)
    assert load.requests and [one for one in load.requests if one["error"]] == []
    # What moves the clock is itself found: a drop-in, and a variable that nobody asked for.
    assert set(report["failed"]) == {"drift.unit", "drift.environment"}
    serving.shell("systemctl start sglang-canary")
    seen(f"{len(load.requests)} requests answered; the canary at work found the moved clock and nothing else")


@pytest.mark.thorough
@fault("reboot of the host under load", "requests that run are lost, and no other; everything comes back by itself")
def test_a_reboot_under_load(serving: SiteHost, seen: Seen) -> None:
    boot = serving.shell("cat /proc/sys/kernel/random/boot_id")
    with Load(serving, URL, KEY_FILE, MODEL, clients=2) as load:
        time.sleep(5)
        started, asked = time.monotonic(), time.time()
        serving.shell("systemctl reboot", status=None)
        again = "cat /proc/sys/kernel/random/boot_id"
        eventually(lambda: serving.shell(again, status=None) not in ("", boot), 90, "a reboot")
        took = restarted(serving, 0, started)
        answered = time.time()
        time.sleep(5)
    early = [one for one in load.requests if one["ended"] < asked]
    late = [one for one in load.requests if one["started"] > answered]
    assert early and late
    assert [one for one in early + late if one["error"]] == []
    assert serving.play(*SMOKE).status == 0
    seen(f"{len(early)} requests before and {len(late)} after it answered; smoke green", took)
