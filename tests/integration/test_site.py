# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml, smoke.yml and uninstall.yml on one real host with the real engine, as an operator meets them.

The tests build on each other: one host is converged once and then goes through everything. A failure makes
those after it meaningless, so run the file with -x when you look for the cause.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from site_host import CHECKOUT, ENGINE, PROMETHEUS, SiteHost, difference, eventually

sys.path.append(str(CHECKOUT / "prometheus"))
import generate

pytestmark = pytest.mark.integration
API_KEY_FILE = CHECKOUT / ".cache" / "lab-api-key"
START_SECONDS = 420
# What a changed argument of the engine may change on the host.
EXPECTED = ("sglang_serve : ", "service_unit : ", "sglang_canary : Write", "memory_plan : Export")
LENGTH = ["-e", "sglang_serve_context_length=4096"]
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
VENDOR_SOCKET = "[Socket]\\nListenStream=/var/run/vendor.sock\\n[Install]\\nWantedBy=sockets.target\\n"


# Each with what the message must say. The inventory is the lab's; the command line sets one thing wrong.
REFUSALS = {
    "misspelt name": (["sglang_serve_prot=30002"], ["sglang_serve_prot", "did you mean sglang_serve_port"]),
    "name of no role": (["sglang_model=x"], ["sglang_model is not a variable of any role"]),
    "wrong type": (["sglang_serve_port=http"], ["sglang_serve_port", "http", "int"]),
    "not a choice": (["sglang_serve_device=tpu"], ["sglang_serve_device", "tpu", "cuda, cpu"]),
    "port out of range": (["sglang_serve_port=80"], ["sglang_serve_port is 80", "1024 to 32767"]),
    "two services on one port": (["sglang_serve_nccl_port=30001"], ["sglang_serve_nccl_port", "30001", "two ports"]),
    "context too long": (
        ["sglang_serve_context_length=2000000"],
        ["sglang_serve_context_length is 2000000", "1048576"],
    ),
    "pool smaller than a request": (
        ["sglang_serve_max_total_tokens=4096"],
        ["sglang_serve_max_total_tokens is 4096", "8192"],
    ),
    "fraction out of range": (
        ["sglang_serve_mem_fraction_static=1.2"],
        ["sglang_serve_mem_fraction_static is 1.2", "0.1 to 0.95"],
    ),
    "public without a key": (
        ["sglang_serve_api_key="],
        ["0.0.0.0", "sglang_serve_api_key has 0 characters", "at least 16"],
    ),
    "argument set twice": (
        ['{"sglang_serve_arguments_custom": {"port": 1}}'],
        ["sglang_serve_arguments_custom sets port", "sglang_serve_port"],
    ),
    "secret in the environment": (
        ['{"sglang_serve_environment_custom": {"HF_TOKEN": "x"}}'],
        ["HF_TOKEN", "no secrets"],
    ),
    "shortened argument": (
        ['{"sglang_serve_arguments_custom": {"api-ke": "x"}}'],
        ["sglang_serve_arguments_custom sets api-ke", "sglang_serve_api_key"],
    ),
    "key with a line's end": (
        ['{"sglang_serve_api_key": "0123456789abcdef-of-a-client\\n"}'],
        ["sglang_serve_api_key has", "a line's end"],
    ),
    "system's directory": (["sglang_venv_root=/usr/lib"], ["sglang_venv_root is '/usr/lib'", "removed as a whole"]),
    "system's user": (["sglang_host_user=root"], ["sglang_host_user is 'root'", "the system does not use"]),
    "Prometheus on the engine's port": (["prometheus_port=30001"], ["port 30001", "prometheus_port", "two ports"]),
    "Prometheus for everybody": (["prometheus_host=0.0.0.0"], ["prometheus_host is '0.0.0.0'", "loopback"]),
    "two package sources": (
        ["sglang_venv_index_url=http://mirror.invalid/simple"],
        ["sglang_venv_wheelhouse is '/srv/wheelhouse'", "one source"],
    ),
    "interpreter missing": (
        ["sglang_venv_python=/usr/bin/python9"],
        ["/usr/bin/python9 does not run", "Python 3.11", "sglang_venv_python"],
    ),
    "too little disk": (
        ["sglang_venv_free_gib=999999"],
        ["GiB free for /opt/sglang", "999999.0 GiB", "sglang_venv_root"],
    ),
    "model path missing": (
        ["model_store_source=directory", "model_store_path=/srv/none"],
        ["no file /srv/none/config.json", "model_store_path"],
    ),
    "too little memory": (
        ['{"preflight_memory": {"need_gib": 4096, "variable": "site_model"}}'],
        ["GiB available", "4096.0 GiB"],
    ),
    "unknown model": (["site_model=gpt"], ["site_model", "gpt"]),
    "port taken": (["sglang_serve_port=22022"], ["port 22022 is held by process", "python3", "sglang_serve_port"]),
}


@pytest.mark.parametrize("case", REFUSALS, ids=[name.replace(" ", "_") for name in REFUSALS])
def test_wrong_variable_is_refused_before_anything_changes(host: SiteHost, fresh: dict, case: str) -> None:
    settings, wanted = REFUSALS[case]
    if case == "port taken":
        host.shell("setsid python3 -m http.server 22022 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 1")
    run = host.play("site.yml", *(word for setting in settings for word in ("-e", setting)), status=None)
    if case == "port taken":
        host.shell("pkill -f '[h]ttp.server 22022'; sleep 0.5")
    assert run.status != 0
    message = " ".join(run.output.split())
    assert [text for text in wanted if text not in message] == [], run.output[-3000:]
    assert run.changed == 0


def test_refusals_left_nothing_behind(host: SiteHost, fresh: dict) -> None:
    assert difference(fresh, host.snapshot()) == {}


def test_check_mode_on_the_empty_host_passes_and_changes_nothing(host: SiteHost, fresh: dict) -> None:
    run = host.play("site.yml", "--check", "--diff")
    assert run.changed > 10
    assert difference(fresh, host.snapshot()) == {}


def test_converge_serves_and_proves(host: SiteHost) -> None:
    run = host.play("site.yml")
    for text in (
        "http://10.77.0.11:30001/v1",
        "smollm2-135m-instruct",
        "1 request of 8k tokens, or 16 requests of 512 tokens",
        "checks passed",
        "systemctl status sglang-unified",
        "journalctl -u sglang-unified -f",
        "ansible-playbook smoke.yml",
    ):
        assert text in " ".join(run.output.split())
    assert host.answers()


def test_check_mode_then_converge_change_nothing(host: SiteHost) -> None:
    assert host.play("site.yml", "--check", "--diff").changed_tasks() == []
    pids = host.main_pid(ENGINE), host.main_pid(PROMETHEUS)
    run = host.play("site.yml")
    assert (run.changed, run.changed_tasks()) == (0, [])
    assert (host.main_pid(ENGINE), host.main_pid(PROMETHEUS)) == pids


def test_smoke_is_green_and_changes_nothing(host: SiteHost) -> None:
    run = host.play("smoke.yml")
    assert run.changed == 0
    last = run.output.rpartition("TASK [")[2]
    assert "unified runs as configured" in last and "checks passed" in last and "reports/smoke.json" in last
    report = host.shell("cat /var/lib/sglang/reports/smoke.json")
    assert '"prompt.capital_of_france"' in report


def test_the_canary_asks_by_itself(host: SiteHost) -> None:
    assert host.shell("systemctl is-enabled sglang-canary.timer") == "enabled"
    assert host.shell("systemctl is-active sglang-canary.timer") == "active"
    host.shell("systemctl start sglang-canary.service")
    assert host.shell("systemctl show -P Result sglang-canary.service") == "success"


def test_doctor_finds_nothing(host: SiteHost) -> None:
    run = host.play("playbooks/doctor.yml")
    assert run.changed == 0
    assert "drift unified" in " ".join(run.output.rpartition("TASK [")[2].split())


def test_only_known_ports_are_public(host: SiteHost) -> None:
    listening = set(host.shell("ss -ltnH | awk '{print $4}'").splitlines())
    public = {address for address in listening if not address.startswith(("127.", "[::1]"))}
    # 29501: PyTorch's rendezvous listens on every address whatever it is told; the firewall closes it.
    assert public == {"0.0.0.0:22", "[::]:22", "0.0.0.0:30001", "*:29501"}
    for port, open_ in ((22, True), (30001, True), (29501, False)):
        connect = f"timeout 2 bash -c '</dev/tcp/10.77.0.11/{port}' 2>/dev/null && echo open || echo closed"
        assert (port, host.lab("exec", "--", "sh", "-c", connect).strip()) == (port, "open" if open_ else "closed")


def test_the_api_key_shows_nowhere(host: SiteHost) -> None:
    key = API_KEY_FILE.read_text().split()[0]
    seen = host.shell(f"systemctl show {ENGINE}; systemctl cat {ENGINE}; ps -eo args; journalctl --no-pager")
    seen += host.shell(
        "cat /opt/sglang/releases/*/*.*; for p in $(pgrep -u sglang); do tr '\\0' '\\n' < /proc/$p/environ; done"
    )
    assert "OPS_CONFIG_SHA256" in seen
    assert key not in seen
    run = host.play("site.yml", "--check", "--diff", "-vvv", "-e", "sglang_serve_api_key=another-key-of-24-letters")
    assert key not in run.output
    assert "another-key-of-24-letters" not in run.output.replace("sglang_serve_api_key=another-key-of-24-letters", "")
    assert host.shell("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30001/server_info") == "401"


def test_one_variable_restarts_that_unit_only(host: SiteHost) -> None:
    engine, prometheus = host.main_pid(ENGINE), host.main_pid(PROMETHEUS)
    run = host.play("site.yml", "-e", "sglang_serve_context_length=4096")
    assert host.main_pid(ENGINE) not in (0, engine)
    assert host.main_pid(PROMETHEUS) == prometheus
    assert [task for task in run.changed_tasks() if not task.startswith(EXPECTED)] == []
    assert "--context-length 4096" in host.shell("cat /opt/sglang/current/launch-unified.sh")
    stale = "systemctl show -P NeedDaemonReload sglang-canary.service sglang-canary.timer"
    assert host.shell(stale).split() == ["no", "no"]


def test_what_the_engine_would_refuse_is_refused_while_it_runs(host: SiteHost) -> None:
    """A misspelt argument, and a key that only a restart would bring, with the restart put off."""
    before = host.main_pid(ENGINE)
    refused = {
        '{"sglang_serve_arguments_custom": {"context-lenght": 1}}': [
            "refuses its arguments: unrecognized arguments: --context-lenght 1",
            "Change sglang_serve_arguments_custom",
        ],
        '{"sglang_serve_restart_policy": "defer", "sglang_serve_api_key": "another-key-of-24-letters"}': [
            "sglang_serve_api_key is not the key on the host",
            "sglang_serve_restart_policy: auto",
        ],
    }
    for settings, wanted in refused.items():
        run = host.play("site.yml", "--tags=sglang_serve", *LENGTH, "-e", settings, status=None)
        assert (run.status != 0, run.changed) == (True, 0), run.output[-3000:]
        assert [text for text in wanted if text not in " ".join(run.output.split())] == [], run.output[-3000:]
    assert host.main_pid(ENGINE) == before


def test_a_drop_in_of_somebody_is_named(host: SiteHost) -> None:
    directory = f"/etc/systemd/system/{ENGINE}.d"
    host.shell(f"mkdir {directory}; printf '[Service]\\nNice=1\\n' > {directory}/x.conf; systemctl daemon-reload")
    run = host.play("site.yml", "--tags=sglang_smoke", *LENGTH, status=None)
    host.shell(f"rm -r {directory}; systemctl daemon-reload")
    assert run.status != 0
    message = " ".join(run.output.split())
    assert f"not part of the configuration: {directory}/x.conf" in message, run.output[-3000:]
    assert f"systemctl cat {ENGINE}" in message


def test_an_edited_launch_script_is_put_back_and_so_is_what_it_started(host: SiteHost) -> None:
    host.shell("sed -i 's/--context-length 4096/--context-length 2048/' /opt/sglang/current/launch-unified.sh")
    host.shell(f"systemctl restart {ENGINE}")
    edited = host.main_pid(ENGINE)
    # What systemd says of somebody else's unit is no reason to stop.
    host.shell(f"printf '{VENDOR_SOCKET}' > /etc/systemd/system/vendor.socket")
    host.shell("printf '[Service]\\nExecStart=/bin/true\\n' > /etc/systemd/system/vendor.service")
    host.shell("systemctl daemon-reload; systemctl enable --quiet vendor.socket")
    host.play("site.yml", "-e", "sglang_serve_context_length=4096")
    assert host.main_pid(ENGINE) not in (0, edited)
    assert "--context-length\n4096" in host.shell(f"tr '\\0' '\\n' < /proc/{host.main_pid(ENGINE)}/cmdline")
    host.shell("systemctl disable --quiet vendor.socket; rm /etc/systemd/system/vendor.*; systemctl daemon-reload")


def test_an_interrupted_converge_is_healed_by_the_next(host: SiteHost) -> None:
    """Killed after the files are written, before the restart: a handler would be lost; the state is not."""
    before = host.main_pid(ENGINE)
    host.play_until(f"TASK [service_unit : Apply this configuration to {ENGINE}]", "site.yml")
    written = host.shell(f"grep -o 'OPS_CONFIG_SHA256=.*' /etc/systemd/system/{ENGINE}")
    running = host.shell(f"tr '\\0' '\\n' < /proc/{before}/environ | grep OPS_CONFIG_SHA256")
    assert host.main_pid(ENGINE) == before
    assert written != running
    host.play("site.yml")
    assert host.main_pid(ENGINE) not in (0, before)
    assert "--context-length 8192" in host.shell(
        "tr '\\0' ' ' < /proc/$(systemctl show -P MainPID " + ENGINE + ")/cmdline"
    )


def test_kill_9_is_answered_by_a_restart(host: SiteHost) -> None:
    before = host.main_pid(ENGINE)
    host.shell(f"kill -9 {before}")
    eventually(lambda: host.main_pid(ENGINE) not in (0, before), 60, "a new main process")
    eventually(host.answers, START_SECONDS, "an answer after kill -9")


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


def test_a_hung_engine_pages_and_its_end_is_told(host: SiteHost, tmp_path: Path) -> None:
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

    host.shell(f"systemctl kill --signal=STOP {ENGINE}")
    eventually(lambda: told("firing"), 60, "a page")
    host.shell(f"systemctl kill --signal=CONT {ENGINE}")
    eventually(lambda: told("resolved"), 60, "the end of the page")
    assert host.answers()
    shown += host.shell("systemctl cat prometheus-alertmanager; ps -eo args; journalctl --no-pager")
    assert "0123456789abcdef" not in shown
    assert ":9094" not in host.shell("ss -ltunH")
    host.play(*monitoring)
    assert host.shell("systemctl is-active prometheus-alertmanager", status=None) == "inactive"
    host.shell("pkill -f '[w]ebhook.py'")
    host.shell("rm /tmp/webhook.py /tmp/pages")


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
