# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml and smoke.yml on one real host with the real engine, as an operator meets them.

The tests build on each other: one host is converged once and then goes through everything, here and in the files after
this one (ONE_HOST in conftest.py). A failure makes those after it meaningless, so run the files with -x when you look
for the cause.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from site_host import CHECKOUT, ENGINE, PROMETHEUS, Run, SiteHost, difference

pytestmark = pytest.mark.integration
API_KEY_FILE = CHECKOUT / ".cache" / "lab-api-key"
# Names of files that hold the key, but for those that are there to hold it. The pattern is read from a file, so that
# no command line has it; of the environments, whose libraries are gigabytes, text alone is read.
KEY_ON_THE_HOST = """
cd /
for where in "etc var run tmp root" "-I opt"; do
  grep --recursive --files-with-matches --fixed-strings --no-messages --devices=skip \
    --file=/etc/sglang/credentials/api-key $where
done | grep -vE '^(etc/sglang/credentials|run/credentials)/'
"""
PROMETHEUS_API = ("status/config", "status/flags", "status/runtimeinfo", "targets", "rules", "labels", "metadata")
# What the engine answers, or refuses, to whoever asks without a key.
UNASKED = ("/server_info", "/get_server_info", "/metrics", "/model_info", "/get_model_info", "/v1/models", "/health")


# Each with what the message must say. The inventory is the lab's; the command line sets one thing wrong.
REFUSALS = {
    "misspelt name": (["sglang_serve_prot=30002"], ["sglang_serve_prot", "did you mean", "sglang_serve_port?"]),
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
    "no memory for the model": (
        ["memory_plan_memory_free_mib=300"],
        ["Refused (weights_exceed_budget): weights and runtime take 2.9 GiB", "no fraction helps"],
    ),
    "unknown model": (["site_model=gpt"], ["site_model", "gpt"]),
    "port taken": (["sglang_serve_port=22022"], ["port 22022 is held by process", "python3", "sglang_serve_port"]),
}


@pytest.fixture(scope="module")
def host(site_host: SiteHost) -> SiteHost:
    return site_host


@pytest.fixture(scope="module")
def refused(request: pytest.FixtureRequest, host: SiteHost, fresh: dict) -> dict[str, Run]:
    """The runs of all chosen cases, two at a time: none of them gets as far as changing the host.

    Those that get as far as preflight hold the host, so one of two may have to try again.
    """
    cases = [item.callspec.params["case"] for item in request.session.items if "refused" in item.fixturenames]

    def play(case: str) -> Run:
        settings = [word for setting in REFUSALS[case][0] for word in ("-e", setting)]
        for _attempt in range(5):
            run = host.play("site.yml", *settings, status=None)
            if "is held by another play" not in " ".join(run.output.split()):
                break
        return run

    host.shell("setsid python3 -m http.server 22022 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 1")
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = dict(zip(cases, pool.map(play, cases), strict=True))
    host.shell("pkill -f '[h]ttp.server 22022'; sleep 0.5")
    return runs


@pytest.mark.parametrize("case", REFUSALS, ids=[name.replace(" ", "_") for name in REFUSALS])
def test_wrong_variable_is_refused_before_anything_changes(refused: dict[str, Run], case: str) -> None:
    run, wanted = refused[case], REFUSALS[case][1]
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


@pytest.mark.thorough
def test_bench_in_check_mode_on_the_empty_host_says_what_would_be_measured(
    host: SiteHost, fresh: dict, tmp_path: Path
) -> None:
    run = host.play("playbooks/bench.yml", "--check", "-e", f"sglang_bench_fetch_directory={tmp_path}")
    assert "C=1, context 0, 4 requests" in run.output
    assert difference(fresh, host.snapshot()) == {}


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the first converge printed, with all that an operator can ask for."""
    return []


def test_converge_serves_and_proves(host: SiteHost, printed: list[str]) -> None:
    run = host.play("site.yml", "--diff", "-vvv")
    printed.append(run.output)
    for text in (
        "http://10.77.0.11:30001/v1",
        "smollm2-135m-instruct",
        "1 request of 8k tokens, or 8 requests of 512 tokens",
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


def test_the_api_key_is_nowhere_on_the_host_and_in_no_answer(host: SiteHost, printed: list[str]) -> None:
    """The whole file system, Prometheus, the engine without a key, and what the converge printed."""
    key = API_KEY_FILE.read_text().split()[0]
    # Two files that the search has to find, and no other.
    planted = ["root/planted", "opt/sglang/planted"]
    host.shell("; ".join(f"install -m 600 /etc/sglang/credentials/engine.yaml /{path}" for path in planted))
    found = host.shell(KEY_ON_THE_HOST)
    host.shell(f"cd /; rm {' '.join(planted)}")
    assert found.split() == planted
    answers = [host.shell(f"curl -sS http://127.0.0.1:9090/api/v1/{path}") for path in PROMETHEUS_API]
    assert [answer for answer in answers if not answer.startswith('{"status":"success"')] == []
    answers += [host.shell(f"curl -sS -i http://127.0.0.1:30001{path}") for path in UNASKED]
    assert [answer for answer in answers[len(PROMETHEUS_API) :] if not answer.startswith("HTTP/1.1 ")] == []
    answers += [host.shell("cat /var/lib/sglang/reports/*.json /var/lib/sglang/metrics/*.prom")]
    assert "TASK [sglang_serve : Write the credentials]" in printed[0]
    assert [text for text in [*answers, *printed] if key in text] == []


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
