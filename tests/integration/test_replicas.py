# SPDX-License-Identifier: GPL-3.0-or-later
"""Two hosts with a real engine each behind the real router: both answer, one dies under load, and it comes back; both
restart under load, one after the other, and no request is lost.

The tests build on each other, as those of test_site.py do.
"""

from __future__ import annotations

import json
import shlex
import time

import pytest
from faults import Seen, fault
from site_host import CHECKOUT, Load, SiteHost, eventually

pytestmark = pytest.mark.integration
INVENTORY, HOSTS = "inventory/lab-replicas", ("lab1=10.77.0.11", "lab2=10.77.0.12")
ENGINE, ROUTER, OTHER = "sglang-replica-0.service", "sglang-router.service", "sglang-prefill.service"
ENGINES = {"lab1": "http://127.0.0.1:30011", "lab2": "http://10.77.0.12:30011"}
PUBLIC = "http://10.77.0.11:30001"
API_KEY_FILE = CHECKOUT / ".cache" / "lab-api-key"
MODEL = "smollm2-135m-instruct"
START_SECONDS = 420
SHORTER = ["-e", "sglang_serve_context_length=4096"]
# The engine's parser takes this, the engine does not.
BROKEN = [
    "-e",
    json.dumps({"sglang_serve_arguments_custom": {"json-model-override-args": '{"max_position_embeddings": 2048}'}}),
]
# A unit of another topology. It notes when it had ended.
OTHER_UNIT = r"""
[Service]
ExecStart=/bin/sleep infinity
ExecStopPost=/usr/bin/touch /run/other-ended
Environment=OPS_CONFIG_SHA256=none
[Install]
WantedBy=multi-user.target
"""

# Prints the TCP ports of an address that take a connection within a second. A firewall that drops answers nothing.
SCAN = """
import errno, resource, select, socket, sys, time
TOGETHER, SECONDS = 4096, 1.0
_soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * TOGETHER), hard))
def reached(address, ports):
    poll, waiting, found = select.poll(), {}, []
    for port in ports:
        one = socket.socket()
        one.setblocking(False)
        status = one.connect_ex((address, port))
        if status == errno.EINPROGRESS:
            waiting[one.fileno()] = one, port
            poll.register(one, select.POLLOUT)
        elif status == 0:
            found.append(port)
        elif status != errno.ECONNREFUSED:
            sys.exit(f"port {port}: {errno.errorcode[status]}")
    end = time.monotonic() + SECONDS
    while waiting and time.monotonic() < end:
        for number, _event in poll.poll(1000 * max(0, end - time.monotonic())):
            one, port = waiting.pop(number)
            poll.unregister(number)
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                found.append(port)
            one.close()
    for one, _port in waiting.values():
        one.close()
    return found
for first in range(1, 65536, TOGETHER):
    print(*reached(sys.argv[1], range(first, min(first + TOGETHER, 65536))))
"""


@pytest.fixture(scope="module")
def lab(host: SiteHost) -> SiteHost:
    """Two fresh hosts, one with a unit of another topology."""
    host.shell(f"printf '%s' '{OTHER_UNIT}' > /etc/systemd/system/{OTHER}", host="lab2")
    host.shell(f"systemctl daemon-reload; systemctl enable --now {OTHER}", host="lab2")
    return host


def generated(lab: SiteHost, host: str) -> int:
    """Tokens that the engine of a host has generated since its start."""
    page = lab.shell(f"curl -s {ENGINES[host]}/metrics | grep '^sglang:generation_tokens_total' || true", host=host)
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in page.splitlines())


def ready_servers(lab: SiteHost) -> int:
    """How many servers the router sends requests to."""
    return json.loads(lab.shell("curl -s http://127.0.0.1:30001/readiness")).get("healthy_workers", 0)


def load(lab: SiteHost, clients: int = 6) -> Load:
    """Clients of the service."""
    return Load(lab, PUBLIC, API_KEY_FILE, MODEL, clients)


def test_converge_serves_behind_the_router(lab: SiteHost) -> None:
    run = lab.play("site.yml")
    text = " ".join(run.output.split())
    for wanted in (
        "http://10.77.0.11:30001/v1",
        "replicas: replica-0",
        "checks passed",
        "systemctl status sglang-replica",
    ):
        assert wanted in text
    assert ready_servers(lab) == 2


def test_the_unit_of_another_topology_had_ended_before_the_engine_started(lab: SiteHost) -> None:
    assert lab.shell(f"systemctl cat {OTHER} 2>&1", status=None, host="lab2").startswith("No files found")
    ended = float(lab.shell("stat -c %Y /run/other-ended", host="lab2"))
    started = lab.shell(f'date -d "$(systemctl show -P ExecMainStartTimestamp {ENGINE})" +%s', host="lab2")
    assert ended <= float(started)


def test_check_mode_then_converge_change_nothing(lab: SiteHost) -> None:
    pids = [lab.main_pid(ENGINE, host) for host in ENGINES] + [lab.main_pid(ROUTER)]
    run = lab.play("site.yml")
    assert (run.changed, run.changed_tasks()) == (0, [])
    assert [lab.main_pid(ENGINE, host) for host in ENGINES] + [lab.main_pid(ROUTER)] == pids


def test_smoke_is_green_through_the_router(lab: SiteHost) -> None:
    run = lab.play("smoke.yml")
    assert run.changed == 0
    assert '"base_url": "http://10.77.0.11:30001"' in lab.shell("cat /var/lib/sglang/reports/smoke.json")


def test_the_canaries_ask_the_router_and_each_replica(lab: SiteHost) -> None:
    for host, names in {
        "lab1": ["sglang-canary", "sglang-canary-replica-0"],
        "lab2": ["sglang-canary-replica-0"],
    }.items():
        timers = lab.shell(
            "systemctl list-unit-files --no-legend 'sglang-canary*.timer' | awk '{print $1, $2}'", host=host
        )
        assert sorted(timers.splitlines()) == sorted(f"{name}.timer enabled" for name in names)
        for name in names:
            lab.shell(f"systemctl start {name}.service", host=host)
            assert lab.shell(f"systemctl show -P Result {name}.service", host=host) == "success"


def test_doctor_finds_nothing(lab: SiteHost) -> None:
    assert lab.play("playbooks/doctor.yml").changed == 0


def test_only_the_router_is_public(lab: SiteHost) -> None:
    # 29501: PyTorch's rendezvous listens on every address whatever it is told; README says so.
    for host, wanted in {"lab1": {"0.0.0.0:30001"}, "lab2": {"10.77.0.12:30011"}}.items():
        listening = set(lab.shell("ss -ltnH | awk '{print $4}'", host=host).splitlines())
        public = {address for address in listening if not address.startswith(("127.", "[::1]"))}
        assert public == {"0.0.0.0:22", "[::]:22", "*:29501"} | wanted


def open_ports(lab: SiteHost, address: str, origin: str) -> set[int]:
    """All TCP ports of an address that a host can connect to, of 1 to 65535."""
    return {int(word) for word in lab.shell(f"python3 -c {shlex.quote(SCAN)} {address}", host=origin).split()}


def test_a_neighbour_reaches_ssh_and_the_public_port_and_no_other(lab: SiteHost) -> None:
    """Every TCP port of lab1, from lab2. Asked on lab1 itself, which no rule is for, the same scan finds more."""
    started = time.monotonic()
    assert open_ports(lab, "10.77.0.11", "lab2") == {22, 30001}
    assert time.monotonic() - started < 60
    assert open_ports(lab, "10.77.0.11", "lab1") >= {22, 29501, 30001}


def test_the_api_key_is_needed_and_shows_nowhere(lab: SiteHost) -> None:
    key = API_KEY_FILE.read_text().split()[0]
    ask = "curl -s -o /dev/null -w '%{http_code}' -H 'Content-Type: application/json' -d '{}'"
    for url in (PUBLIC, ENGINES["lab1"], ENGINES["lab2"]):
        assert lab.shell(f"{ask} {url}/v1/chat/completions") == "401"
    for host in ENGINES:
        seen = lab.shell(
            "systemctl show 'sglang-*'; systemctl cat 'sglang-*'; ps -eo args; journalctl --no-pager", host=host
        )
        seen += lab.shell("for p in $(pgrep -u sglang); do tr '\\0' '\\n' < /proc/$p/environ; done", host=host)
        assert "OPS_CONFIG_SHA256" in seen
        assert key not in seen


def test_an_engine_that_dies_under_load_costs_only_what_it_was_answering(lab: SiteHost) -> None:
    """kill -9 of lab2's engine: the router goes on with lab1's, and takes lab2's back by itself."""
    before = {host: generated(lab, host) for host in ENGINES}
    pid = lab.main_pid(ENGINE, "lab2")
    with load(lab) as clients:
        eventually(lambda: all(generated_since(lab, before)), 60, "answers from both engines")
        before_kill = time.time()
        lab.shell(f"kill -9 {pid}", host="lab2")
        after_kill = time.time()
        gone = eventually(lambda: ready_servers(lab) == 1, 60, "the router leaving the dead engine out")
        back = eventually(lambda: ready_servers(lab) == 2, START_SECONDS, "the engine being back behind the router")
        eventually(lambda: generated(lab, "lab2") > 0, 60, "an answer from the engine that came back")
    lost = [one for one in clients.requests if one["error"]]
    running = [one for one in clients.requests if one["started"] <= after_kill and before_kill <= one["ended"]]
    print(f"{len(clients.requests)} requests, {len(running)} running at the kill, {len(lost)} lost; ", end="")
    print(f"left out after {gone:.0f} s, back after {back:.0f} s more")
    # The other engine was answering some of those that ran, so not all may be lost; and no other.
    assert len(lost) < len(running)
    assert [one for one in lost if one not in running] == []
    assert lab.main_pid(ENGINE, "lab2") not in (0, pid)


@pytest.mark.thorough
@fault(
    "network cut between router and engine",
    "the others answer; after the cut it is back by itself; nothing is lost but what it was answering",
)
def test_a_cut_network_costs_only_what_was_on_its_way(lab: SiteHost, seen: Seen) -> None:
    """No packet of lab2 reaches the router any more, and nobody is told so."""
    pids = [lab.main_pid(ENGINE, host) for host in ENGINES]
    before = {host: generated(lab, host) for host in ENGINES}
    with load(lab) as clients:
        eventually(lambda: all(generated_since(lab, before)), 60, "answers from both engines")
        cut = time.time()
        lab.shell("ip route add blackhole 10.77.0.11", host="lab2")
        try:
            eventually(lambda: ready_servers(lab) == 1, 60, "the router leaving the engine out")
            out = time.time()
            time.sleep(20)
        finally:
            mended = time.time()
            lab.shell("ip route del blackhole 10.77.0.11", host="lab2")
        back = eventually(lambda: ready_servers(lab) == 2, 60, "the engine being back behind the router")
        again = {host: generated(lab, host) for host in ENGINES}
        eventually(lambda: all(generated_since(lab, again)), 60, "answers from both engines again")
    lost = [one for one in clients.requests if one["error"]]
    on_its_way = [one for one in clients.requests if one["started"] <= out and cut <= one["ended"]]
    meanwhile = [one for one in clients.requests if out < one["started"] and one["ended"] <= mended]
    assert [one for one in lost if one not in on_its_way] == []
    assert len(lost) < len(on_its_way)
    assert meanwhile
    assert [lab.main_pid(ENGINE, host) for host in ENGINES] == pids
    longest = max(one["ended"] - one["started"] for one in on_its_way)
    seen(
        f"left out after {out - cut:.0f} s, {len(meanwhile)} answered by the other until the end of the cut; of "
        f"{len(on_its_way)} on their way {len(lost)} lost, the slowest took {longest:.0f} s",
        back,
    )


@pytest.mark.thorough
@fault("kill -9 of the router", "it is started again by itself, with all its servers; none of them restarts")
def test_a_router_that_dies_comes_back(lab: SiteHost, seen: Seen) -> None:
    pids, before = [lab.main_pid(ENGINE, host) for host in ENGINES], lab.main_pid(ROUTER)
    started = time.monotonic()
    lab.shell(f"kill -9 {before}")
    eventually(lambda: lab.main_pid(ROUTER) not in (0, before), 60, "a new router")
    answered = "curl -sf http://127.0.0.1:30001/readiness"
    eventually(lambda: lab.shell(answered, status=None) and ready_servers(lab) == 2, 120, "both servers behind it")
    took = time.monotonic() - started
    with load(lab, clients=2) as clients:
        time.sleep(5)
    assert clients.requests and [one for one in clients.requests if one["error"]] == []
    assert [lab.main_pid(ENGINE, host) for host in ENGINES] == pids
    seen(f"back with both servers; the next {len(clients.requests)} requests answered", took)


def generated_since(lab: SiteHost, before: dict[str, int]) -> list[bool]:
    """Whether the engine of each host has generated tokens since then."""
    return [generated(lab, host) > before[host] for host in ENGINES]


def context_lengths(lab: SiteHost) -> list[str]:
    """What the running engines were told, one for each host."""
    words = [
        lab.shell(f"tr '\\0' '\\n' < /proc/{lab.main_pid(ENGINE, it)}/cmdline", host=it).split("\n") for it in ENGINES
    ]
    return [one[one.index("--context-length") + 1] for one in words]


def away(lab: SiteHost, host: str) -> tuple[float, float]:
    """When an engine was last down: seconds since the epoch of the end and of the next readiness of its unit."""
    names = ("ActiveExitTimestamp", "ActiveEnterTimestamp")
    begin, end = (lab.shell(f'date -d "$(systemctl show -P {name} {ENGINE})" +%s.%N', host=host) for name in names)
    return float(begin), float(end)


@pytest.mark.parametrize(
    ("playbook", "arguments", "length"),
    [
        pytest.param("playbooks/upgrade.yml", SHORTER, "4096", id="upgrade"),
        pytest.param("playbooks/rollback.yml", [], "8192", id="rollback", marks=pytest.mark.thorough),
    ],
)
def test_both_restart_under_load_and_no_request_is_lost(
    lab: SiteHost, playbook: str, arguments: list[str], length: str
) -> None:
    """upgrade.yml with another argument, then the way back: never both away at once, and every request is answered."""
    began, before = time.time(), [lab.main_pid(ENGINE, host) for host in ENGINES]
    with load(lab, clients=2) as clients:
        lab.play(playbook, *arguments)
    assert [one for one in clients.requests if one["error"]] == []
    assert {one["stream"] for one in clients.requests} == {True, False}
    assert context_lengths(lab) == [length, length]
    assert not set(before) & {lab.main_pid(ENGINE, host) for host in ENGINES}
    first, second = sorted(away(lab, host) for host in ENGINES)
    assert began < first[0] < first[1] < second[0] < second[1]
    inside = [
        sum(begin <= one["started"] and one["ended"] <= end for one in clients.requests)
        for begin, end in (first, second)
    ]
    assert min(inside) > 0
    assert ready_servers(lab) == 2
    durations = [f"{end - begin:.0f} s" for begin, end in (first, second)]
    print(f"{playbook}: {len(clients.requests)} requests, 0 lost; away {durations}, {inside} answered meanwhile")


@pytest.mark.thorough
def test_what_the_first_replica_does_not_take_never_reaches_the_second(lab: SiteHost) -> None:
    """It goes back by itself, under load, with nothing lost; the other one goes on all the while."""
    before, lengths = [lab.main_pid(ENGINE, host) for host in ENGINES], context_lengths(lab)
    with load(lab, clients=2) as clients:
        run = lab.play("playbooks/upgrade.yml", *BROKEN, status=None)
    text = " ".join(run.output.rpartition("TASK [")[2].split())
    assert run.status != 0
    assert "serves again and is proven" in text, run.output[-4000:]
    assert [one for one in clients.requests if one["error"]] == []
    after = [lab.main_pid(ENGINE, host) for host in ENGINES]
    assert (after[0] not in (0, before[0]), after[1]) == (True, before[1])
    assert context_lengths(lab) == lengths
    assert ready_servers(lab) == 2


@pytest.mark.thorough
def test_a_replica_that_a_killed_run_left_out_comes_back(lab: SiteHost) -> None:
    """Killed when the first one is out of the router: the other one answers, and the next run puts it back."""
    lab.play_until("TASK [Note that it is out]", "site.yml", *SHORTER)
    assert ready_servers(lab) == 1
    lab.play("site.yml")
    assert ready_servers(lab) == 2
    assert context_lengths(lab) == ["8192", "8192"]


DRAIN = ("playbooks/drain.yml", "-e", "sglang_serve_drain=replica-0")


def test_drain_says_what_it_would_take_out_and_takes_not_all(lab: SiteHost) -> None:
    for arguments, wanted in (
        ([], "There is no --limit, and sglang_serve_drain names servers of each host; wanted: one of lab1, lab2"),
        (["--limit", "all"], "name all 2 replicas, and none would be left to answer"),
        (["--limit", "lab2", "-e", "sglang_serve_drain=replica-7"], "is replica-7; wanted: some of replica-0"),
    ):
        run = lab.play(*DRAIN, *arguments, status=None)
        assert (run.status != 0, run.changed) == (True, 0)
        assert wanted in " ".join(run.output.split())
    run = lab.play(*DRAIN, "--limit", "lab2", "--check")
    assert run.changed_tasks() == ["Take them out of the routers", "Stop them"]
    assert ready_servers(lab) == 2


def test_a_replica_is_taken_out_for_work_and_comes_back(lab: SiteHost) -> None:
    """Under load, with nothing lost."""
    length, before = context_lengths(lab)[0], [lab.main_pid(ENGINE, host) for host in ENGINES]
    with load(lab, clients=2) as clients:
        run = lab.play(*DRAIN, "--limit", "lab2")
    assert [one for one in clients.requests if one["error"]] == []
    said = " ".join(run.output.rpartition("TASK [")[2].split())
    assert f"{ENGINE} is stopped; a reboot starts it again nothing left after" in said, said
    assert "a router is on this host" not in said
    assert [lab.main_pid(ENGINE, host) for host in ENGINES] == [before[0], 0]
    assert ready_servers(lab) == 1
    assert lab.play(*DRAIN, "--limit", "lab2").changed == 0
    last = lab.play(*DRAIN, "--limit", "lab1", status=None)
    assert "is the only server that the router has left" in " ".join(last.output.split())
    assert "replica-0 of lab1 may be out of a router, or stopped" in " ".join(last.output.split())
    lab.play("site.yml", "-e", f"sglang_serve_context_length={length}")
    assert ready_servers(lab) == 2
    assert lab.main_pid(ENGINE, "lab1") == before[0]


@pytest.mark.thorough
def test_a_restart_that_is_put_off_is_seen(lab: SiteHost) -> None:
    """By doctor.yml and in the metrics; nothing restarts."""
    before = [lab.main_pid(ENGINE, host) for host in ENGINES]
    lab.play("site.yml", "-e", "sglang_serve_restart_policy=defer", *SHORTER)
    assert [lab.main_pid(ENGINE, host) for host in ENGINES] == before
    pending = f'ops_restart_pending{{unit="{ENGINE}",role="replica-0"}}'
    eventually(
        lambda: f"{pending} 1" in lab.shell("cat /var/lib/sglang/metrics/state.prom"), 60, "the metric of the restart"
    )
    doctor = lab.play("playbooks/doctor.yml", *SHORTER, status=None)
    assert doctor.status != 0
    assert "the process was started with another configuration: restart it" in " ".join(doctor.output.split())
    lab.play("site.yml")
    eventually(
        lambda: f"{pending} 0" in lab.shell("cat /var/lib/sglang/metrics/state.prom"), 60, "the metric without it"
    )


def test_prometheus_where_the_router_is_sees_every_server(lab: SiteHost) -> None:
    query = "curl -s 'http://127.0.0.1:9090/api/v1/query?query=up'"
    result = json.loads(lab.shell(query))["data"]["result"]
    up = {(one["metric"]["job"], one["metric"]["instance"]): one["value"][1] for one in result}
    assert up == {
        ("sglang", "127.0.0.1:30011"): "1",
        ("sglang", "10.77.0.12:30011"): "1",
        ("router", "127.0.0.1:29000"): "1",
        ("node", "127.0.0.1:9100"): "1",
    }
    ready = lab.shell("grep ^ops_engine_ready /var/lib/sglang/metrics/state.prom")
    assert ready.splitlines() == [
        f'ops_engine_ready{{unit="{ENGINE}",role="replica-0"}} 1',
        f'ops_engine_ready{{unit="{ROUTER}",role="router"}} 1',
    ]
