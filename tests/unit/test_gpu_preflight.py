# SPDX-License-Identifier: GPL-3.0-or-later
"""What preflight sees of GPUs: answers of the driver's and the kernel's programs, whole, cut off, missing and odd."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest
from gpu_samples import MAX_Q, WANTED, GpuHost, gpu_xml, process_xml, sample, smi_xml
from ops import gpu_checks, gpu_facts, gpu_free
from ops.findings import KINDS, Finding
from ops.gpu_facts import parse_csv, parse_lspci, parse_p2p, parse_xids, parse_xml, propose_islands
from ops.host import Host, number, run_program
from ops.preflight import check_host, listening_inodes


@pytest.fixture
def gpus(tmp_path) -> GpuHost:
    return GpuHost(tmp_path)


def look(gpus: GpuHost, **wanted) -> gpu_checks.GpuView:
    return gpu_checks.check_gpus(gpus.host, {**WANTED, **wanted}, ["sglang-*.service"], 30)


def only(view: gpu_checks.GpuView, id: str):
    """Return the one finding, which is of this kind."""
    assert [finding.id for finding in view.findings] == [id], view.findings
    assert view.findings[0].severity == KINDS[id][0]
    assert view.findings[0].fix
    return view.findings[0]


def with_gpu(gpus: GpuHost, index: int, **fields: str) -> None:
    """Give one of the eight GPUs other fields."""
    gpus.smi(*(gpu_xml(one, **(fields if one == index else {})) for one in range(8)))


def test_a_fit_host(gpus):
    view = look(gpus)
    assert view.findings == []
    assert [one.id for one in view.unchecked] == ["gpu.p2p_*"]
    assert (view.driver, view.cuda, len(view.gpus)) == ("580.95.05", "13.0", 8)
    assert view.islands == [{"gpus": [0, 1, 2, 3], "numa": 0}, {"gpus": [4, 5, 6, 7], "numa": 1}]
    gpu = view.gpus[7]
    assert (gpu.index, gpu.bus_id, gpu.memory_mib, gpu.bar1_mib) == (7, "0000:c4:00.0", 97887, 131072)
    assert (gpu.persistence, gpu.ecc, gpu.mig, gpu.power_limit_w, gpu.link_width) == (True, True, False, 600, 16)


# The parsers.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("300.00 W", 300),
        ("16x", 16),
        ("97887 MiB", 97887),
        ("[ 12 ]", 12),
        ("-1", -1),
        ("N/A", None),
        ("[N/A]", None),
        ("[Not Supported]", None),
        ("[Unknown Error]", None),
        ("Nicht verfügbar", None),
        ("", None),
        (None, None),
    ],
)
def test_number(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "word", ["N/A", "[N/A]", "[Not Supported]", "Requested functionality has been deprecated", "Aktiviert", ""]
)
def test_a_field_that_says_nothing_gives_no_verdict(gpus, word):
    fields = dict.fromkeys(
        (
            "persistence_mode",
            "current_ecc",
            "current_mig",
            "current_power_limit",
            "default_power_limit",
            "total",
            "used",
            "max_link_width",
            "current_link_width",
            "remapped_row_pending",
            "remapped_row_failure",
            "dram_uncorrectable",
            "compute_mode",
        ),
        word,
    )
    with_gpu(gpus, 2, **fields)
    view = look(gpus)
    assert view.findings == []
    gpu = view.gpus[2]
    assert (gpu.persistence, gpu.ecc, gpu.memory_mib, gpu.power_limit_w, gpu.link_width) == (None,) * 5


def test_older_drivers_call_elements_otherwise():
    text = smi_xml([gpu_xml(0)])
    text = text.replace("gpu_power_readings", "power_readings").replace("current_power_limit", "power_limit")
    text = text.replace("clocks_event_reason", "clocks_throttle_reason")
    text = text.replace(
        "<clocks_throttle_reason_hw_thermal_slowdown>Not Active", "<clocks_throttle_reason_hw_thermal_slowdown>Active"
    )
    (gpu,) = parse_xml(text).gpus
    assert (gpu.power_limit_w, gpu.power_default_w, gpu.slowed_by) == (600, 600, ("heat (hardware)",))


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_xml_that_is_cut_off_is_damaged(part):
    text = smi_xml([gpu_xml(0), gpu_xml(1)])
    answer = parse_xml(text[: int(len(text) * part)])
    assert (answer.problem, answer.gpus) == ("damaged", ())


def test_words_around_the_xml_do_no_harm():
    answer = parse_xml("WARNING: infoROM is corrupted at gpu 0000:03:00.0\n" + smi_xml([gpu_xml(0)]) + "\nbye\n")
    assert (answer.problem, len(answer.gpus)) == ("", 1)


@pytest.mark.parametrize(
    "line",
    [
        sample("nvidia_smi_lost.txt"),
        "Unable to determine the device handle for GPU 0000:C4:00.0: GPU is lost.  Reboot the system to recover it\n",
        "Unable to determine the device handle for GPU7: 0000:C4:00.0: Unknown Error\n",
        "Unable to determine the device handle for gpu 00000000:C4:00.0: Unknown Error\n",
    ],
)
def test_lost_gpus(line):
    ((address, reason),) = gpu_facts.lost_gpus(line)
    assert address == "0000:c4:00.0"
    assert reason.startswith(("GPU is lost", "Unknown Error"))


def test_csv():
    answer = parse_csv(sample("nvidia_smi.csv"))
    first, second = answer.gpus
    assert (answer.driver, first.name, first.power_limit_w, first.link_width) == ("580.95.05", MAX_Q, 300, 16)
    assert (second.used_mib, second.persistence, second.ecc, second.power_limit_w) == (None, None, None, None)
    assert (second.link_width, second.link_width_max) == (8, 16)
    assert parse_csv("No devices were found\n").gpus == ()
    assert parse_csv("").gpus == ()


def test_kernel_log():
    xids = parse_xids(sample("kernel.log"))
    assert [(xid.bus_id, xid.number, xid.count) for xid in xids] == [("0000:83:00.0", 31, 2), ("0000:c4:00.0", 79, 1)]
    assert "pid=4712" in xids[0].last
    assert parse_xids("kernel: nothing of interest\n") == []


def test_p2p_matrix():
    states = parse_p2p(sample("topo_p2p.txt"))
    assert len(states) == 12
    assert {pair for pair, state in states.items() if state != "OK"} == {(1, 3), (3, 1)}
    assert states[1, 3] == "CNS"
    assert parse_p2p("\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\tX\tOK\n") == {(0, 1): "OK"}
    assert parse_p2p("Invalid combination of input arguments.\n") == {}


def test_lspci():
    devices = {device.bus_id: device for device in parse_lspci(sample("lspci.txt"))}
    assert set(devices) == {"0000:00:01.1", "0000:02:00.0", "0000:03:00.0"}
    assert devices["0000:02:00.0"].acs.startswith("SrcValid+ TransBlk- ReqRedir+")
    assert (devices["0000:03:00.0"].kind, devices["0000:03:00.0"].aspm) == ("3D controller", "L1 Enabled")
    denied = "0000:00:01.1 PCI bridge: AMD Bridge\n\tCapabilities: <access denied>\n"
    (bridge,) = parse_lspci(denied)
    assert (bridge.acs, bridge.aspm) == ("", "")
    assert parse_lspci("") == []


@pytest.mark.parametrize(
    ("text", "address"),
    [("00000000:C1:00.0", "0000:c1:00.0"), ("c1:00.0", "0000:c1:00.0"), ("00010000:C1:00.0", "0000:c1:00.0")],
)
def test_bus_addresses(text, address):
    assert gpu_facts.bus_id(text) == address


@pytest.mark.parametrize(("text", "numbers"), [("", []), ("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5])])
def test_kernel_lists(text, numbers):
    assert gpu_facts.cpu_list(text) == numbers


# A table of sockets in which one of our own units listens on port 30001, and somebody on port 22.
SOCKETS = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 17120 1 0 100 0
   1: 00000000:7531 00000000:0000 0A 00000000:00000000 00:00000000 00000000   999        0 48113 1 0 100 0
"""
CSV = "nvidia-smi --query-gpu=" + ",".join(gpu_facts.CSV_FIELDS) + " --format=csv,noheader"
# What is cut off -> the errors that it may bring: half of nvidia-smi's XML is one by itself, nothing else is.
CUT = {
    "lspci": {"lspci -D -vvv": sample("lspci.txt")},
    "topo": {"nvidia-smi topo -p2p r": sample("topo_p2p.txt")},
    "kernel log": {"journalctl --dmesg --boot --no-pager --quiet": sample("kernel.log")},
    "sockets": {"/proc/net/tcp": SOCKETS},
    "xml": {"nvidia-smi -q -x": smi_xml([gpu_xml(index) for index in range(8)])},
    "csv": {"nvidia-smi -q -x": "<nvidia_smi_log>", CSV: sample("nvidia_smi.csv")},
    "numactl": {"numactl --show": "policy: default\npreferred node: current\nphyscpubind: 0 1 2 3 \ncpubind: 0 1 \n"},
}


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_off_raises_nothing_and_invents_no_error(gpus, name, part):
    """A program that was killed, or a full disk, leaves half a line; half a number is another number."""
    gpus.process(4711, "system.slice/sglang-unified.service")
    gpus.open_file(4711, "socket:[48113]")

    def findings(share: float) -> list[Finding]:
        for asked, text in CUT[name].items():
            cut = text[: int(len(text) * share)]
            gpus.write(asked, cut) if asked.startswith("/") else gpus.answers.update({asked: (0, cut)})
        port = {"port": 30001, "variable": "sglang_serve_port", "units": ["sglang-unified.service"]}
        engines = [{"arguments": {"base-gpu-id": 0, "tp-size": 8}}] if name == "numactl" else []
        return check_host(gpus.host, ports=[port], gpus=WANTED, engines=engines).findings

    whole, cut = findings(1), findings(part)
    allowed = {"gpu.output"} if name in ("xml", "csv") else set()
    assert {finding.id for finding in whole if finding.severity == "error"} <= allowed
    assert {finding.id for finding in cut if finding.severity == "error"} <= allowed
    if name not in ("xml", "csv"):  # other numbers of GPUs make other islands
        assert {finding.id for finding in cut} <= {finding.id for finding in whole}


def test_half_a_line_is_no_line():
    log = sample("kernel.log")
    line = next(line for line in log.splitlines() if "Xid" in line)
    number = line.partition("): ")[2].split(",")[0]
    assert len(number) > 1
    assert parse_xids(line[: line.index("): ") + 4]) == []
    assert parse_p2p(" \tGPU0\tGPU1\n GPU0\tX\tO") == {}
    assert listening_inodes(SOCKETS[: SOCKETS.index("48113") + 3], 30001) == set()
    assert listening_inodes(SOCKETS, 30001) == {"48113"}


# Islands.


@pytest.mark.parametrize(
    ("nodes", "size", "islands"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 4, [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 1)]),
        ([0, 0, 0, 0, 1, 1, 1, 1], 0, [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 1)]),
        ([0, 0, 0, 0, 1, 1, 1, 1], 2, [([0, 1], 0), ([2, 3], 0), ([4, 5], 1), ([6, 7], 1)]),
        ([0, 0, 0, 0, 1, 1, 1, 1], 8, [([0, 1, 2, 3, 4, 5, 6, 7], None)]),
        ([0, 1, 0, 1, 0, 1, 0, 1], 4, [([0, 2, 4, 6], 0), ([1, 3, 5, 7], 1)]),
        ([0] * 8, 4, [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 0)]),
        ([None] * 4, 0, [([0, 1, 2, 3], None)]),
        # Five and three: one GPU too many here, one too few there.
        ([0, 0, 0, 0, 0, 1, 1, 1], 4, [([0, 1, 2, 3], 0), ([4, 5, 6, 7], None)]),
        ([0, 0, 0, 0, 1, 1, 1], 4, [([0, 1, 2, 3], 0), ([4, 5, 6], None)]),
        ([], 4, []),
    ],
)
def test_islands(nodes, size, islands):
    proposed = propose_islands(dict(enumerate(nodes)), {}, size)
    assert [(island["gpus"], island["numa"]) for island in proposed] == islands


def test_gpus_of_one_switch_stay_together():
    order = {0: "/pci0000:00/a/0", 1: "/pci0000:00/b/1", 2: "/pci0000:00/a/2", 3: "/pci0000:00/b/3"}
    proposed = propose_islands(dict.fromkeys(range(4), 0), order, 2)
    assert [island["gpus"] for island in proposed] == [[0, 2], [1, 3]]


def test_an_unknown_node_is_the_only_node(gpus):
    shutil.rmtree(gpus.root / "sys/devices/system/node/node1")
    for device in (gpus.root / "sys/bus/pci/devices").iterdir():
        (device / "numa_node").write_text("-1\n")
    view = look(gpus)
    assert view.findings == []
    assert view.islands == [{"gpus": [0, 1, 2, 3], "numa": 0}, {"gpus": [4, 5, 6, 7], "numa": 0}]


def test_torn_islands(gpus):
    gpus.write("/sys/bus/pci/devices/0000:83:00.0/numa_node", "0\n")
    finding = only(look(gpus), "gpu.islands")
    assert "[[4, 5, 6, 7]]" in finding.seen


@pytest.mark.parametrize(
    ("islands", "seen"),
    [
        ([([0, 1, 2, 3], 0), ([4, 5, 6, 7], 1)], None),
        ([([0, 1], 0), ([2, 3], 0)], None),
        ([([4, 5, 6, 7], None)], None),
        # Eight GPUs are on two nodes whatever one does.
        ([([0, 1, 2, 3, 4, 5, 6, 7], None)], None),
        (
            [([0, 1, 2, 3], 1), ([4, 5, 6, 7], 1)],
            "GPUs [0, 1, 2, 3] are said to be on node 1: GPU 0 is on node 0, GPU 1 is on node 0, "
            "GPU 2 is on node 0, GPU 3 is on node 0",
        ),
        ([([2, 3, 4, 5], 0)], "GPUs [2, 3, 4, 5] are said to be on node 0: GPU 4 is on node 1, GPU 5 is on node 1"),
        (
            [([2, 3, 4, 5], None)],
            "GPUs [2, 3, 4, 5] are on nodes [0, 1], and [[0, 1, 2, 3], [4, 5, 6, 7]] are not",
        ),
        ([([8], 1)], "GPUs [8]: this host has no GPU 8"),
        ([([0, 1], 3), ([9], None)], "GPU 1 is on node 0; GPUs [9]: this host has no GPU 9"),
    ],
)
def test_islands_of_the_inventory(gpus, islands, seen):
    inventory = [{"gpus": members, "numa": numa} for members, numa in islands]
    view = gpu_checks.check_gpus(gpus.host, WANTED, [], 30, inventory)
    if seen is None:
        assert view.findings == []
    else:
        finding = only(view, "gpu.islands")
        assert seen in finding.seen
        assert finding.variable == "sglang_serve_islands"
        assert '[{"gpus": [0, 1, 2, 3], "numa": 0}' in finding.fix


def test_an_island_over_nodes_whose_numbers_alternate_is_needed(gpus):
    """An engine takes consecutive GPUs, and no four of them are on one node."""
    for index, device in enumerate(sorted((gpus.root / "sys/bus/pci/devices").iterdir())):
        (device / "numa_node").write_text(f"{index % 2}\n")
    view = gpu_checks.check_gpus(gpus.host, WANTED, [], 30, [{"gpus": [0, 1, 2, 3], "numa": None}])
    assert view.findings == []


def test_a_node_that_nobody_knows_contradicts_no_inventory(gpus):
    for device in (gpus.root / "sys/bus/pci/devices").iterdir():
        (device / "numa_node").write_text("-1\n")
    inventory = [{"gpus": [0, 1, 2, 3], "numa": 0}]
    view = gpu_checks.check_gpus(gpus.host, {**WANTED, "island_size": 0}, [], 30, inventory)
    assert "said to be" not in str(view.findings)


@pytest.mark.parametrize(("first", "size", "wanted"), [(0, 8, True), (0, 4, False), (4, 4, False), (2, 4, True)])
def test_ranks_over_several_nodes_need_numactl(gpus, first, size, wanted):
    engines = [{"arguments": {"base-gpu-id": first, "tp-size": size}}]
    view = gpu_checks.check_gpus(gpus.host, WANTED, [], 30, engines=engines)
    assert [finding.id for finding in view.findings] == (["host.numactl"] if wanted else [])
    gpus.answers["numactl --show"] = (0, "policy: default\n")
    assert gpu_checks.check_gpus(gpus.host, WANTED, [], 30, engines=engines).findings == []


# nvidia-smi does not answer.


@pytest.mark.parametrize(
    ("status", "text", "id", "seen"),
    [
        (127, "No such file", "gpu.driver", "nvidia-smi is not installed, though module 580.95.05 is loaded"),
        (124, "nvidia-smi did not end within 30 s", "gpu.hang", "did not end within 30 s"),
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.105\n",
            "gpu.driver_library",
            "the loaded module is 580.95.05",
        ),
        (
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n",
            "gpu.driver",
            "couldn't communicate",
        ),
    ],
)
def test_why_there_is_no_answer(gpus, status, text, id, seen):
    gpus.answers["nvidia-smi -q -x"] = (status, text)
    assert seen in only(look(gpus), id).seen


def test_no_devices(gpus):
    gpus.answers["nvidia-smi -q -x"] = (6, "No devices were found\n")
    view = look(gpus)
    assert [finding.id for finding in view.findings] == ["gpu.output", "gpu.count"]
    assert "8 on the PCI bus, without a driver: 0000:03:00.0" in view.findings[1].seen


def test_a_closed_module_is_named(gpus):
    gpus.answers["nvidia-smi -q -x"] = (6, "No devices were found\n")
    gpus.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Wed Sep 24\n")
    assert "Blackwell needs the open kernel module" in look(gpus).findings[1].fix


def test_the_csv_answers_for_damaged_xml(gpus):
    whole = gpus.answers["nvidia-smi -q -x"][1]
    gpus.answers["nvidia-smi -q -x"] = (0, whole[: len(whole) // 2])
    gpus.answers["nvidia-smi --query-gpu=" + ",".join(gpu_facts.CSV_FIELDS) + " --format=csv,noheader"] = (
        0,
        sample("nvidia_smi.csv"),
    )
    view = look(gpus, count=2)
    assert [finding.id for finding in view.findings] == ["gpu.output", "gpu.link_width", "gpu.islands"]
    assert "its CSV names 2 GPUs" in view.findings[0].seen


def hanging_program(directory, body: str) -> str:
    """Write nvidia-smi as a script and return its path."""
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    "body", ["sleep 600", "trap '' TERM INT; sleep 600 & echo $! > child; while :; do sleep 600; done"]
)
def test_a_program_that_hangs_is_left_behind_in_time(tmp_path, monkeypatch, body):
    monkeypatch.chdir(tmp_path)
    program = hanging_program(tmp_path, body)
    started = time.monotonic()
    status, text = run_program([program, "-q", "-x"], timeout=0.5)
    assert time.monotonic() - started < 10
    assert (status, text) == (124, f"{program} did not end within 0.5 s")
    if (tmp_path / "child").exists():
        child = Path("/proc") / (tmp_path / "child").read_text().strip()
        while child.exists() and ") Z" not in (child / "stat").read_text():
            assert time.monotonic() - started < 20, "the child still runs"


def test_a_hanging_nvidia_smi_is_a_finding(tmp_path, monkeypatch):
    hanging_program(tmp_path, "sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = time.monotonic()
    view = gpu_checks.check_gpus(Host(), {"count": 8}, [], 0.5)
    assert time.monotonic() - started < 10
    assert "gpu.hang" in {finding.id for finding in view.findings}
    assert "gpu.count" not in {finding.id for finding in view.findings}


def test_programs_speak_the_language_that_is_parsed(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    assert run_program(["/bin/sh", "-c", "echo $LC_ALL $LANGUAGE"]) == (0, "C C\n")
    assert run_program(["/bin/sh", "-c", "printf '\\377'"])[1] == "\N{REPLACEMENT CHARACTER}"


# The GPUs are not what they should be.


def test_seven_of_eight(gpus):
    gpus.smi(*(gpu_xml(index) for index in range(7)))
    view = look(gpus)
    assert [finding.id for finding in view.findings] == ["gpu.count", "gpu.islands"]
    assert view.findings[0].seen == "7 GPUs; 8 on the PCI bus, without a driver: 0000:c4:00.0"
    assert view.findings[0].wanted == "8 GPUs"
    (gpus.root / "sys/bus/pci/devices/0000:c4:00.0").unlink()
    finding = look(gpus).findings[0]
    assert finding.seen == "7 GPUs; 7 on the PCI bus"
    assert "lspci -d 10de:" in finding.fix


def test_a_lost_gpu(gpus):
    text = sample("nvidia_smi_lost.txt") + smi_xml([gpu_xml(index) for index in range(7)])
    gpus.answers["nvidia-smi -q -x"] = (15, text)
    findings = {finding.id: finding for finding in look(gpus).findings}
    assert set(findings) == {"gpu.lost", "gpu.count", "gpu.islands"}
    assert findings["gpu.lost"].seen.startswith("0000:c4:00.0: GPU is lost")


def test_a_lost_gpu_that_spoils_the_whole_answer(gpus):
    gpus.answers["nvidia-smi -q -x"] = (15, sample("nvidia_smi_lost.txt"))
    assert {"gpu.lost", "gpu.count"} == {finding.id for finding in look(gpus).findings}


def test_more_than_wanted(gpus):
    assert only(look(gpus, count=4), "gpu.count").fix == "set preflight_gpus.count to what this host has"


def test_nothing_wanted_nothing_compared(gpus):
    view = gpu_checks.check_gpus(gpus.host, {}, [], 30)
    assert view.findings == []


@pytest.mark.parametrize(
    ("fields", "id", "seen"),
    [
        ({"product_name": "NVIDIA L4"}, "gpu.name", "GPU 2 (0000:43:00.0): NVIDIA L4"),
        ({"total": "48935 MiB"}, "gpu.memory", "GPU 2 (0000:43:00.0) has 48935 MiB"),
        ({"persistence_mode": "Disabled"}, "gpu.persistence", "off on GPU 2 (0000:43:00.0)"),
        ({"current_ecc": "Disabled"}, "gpu.ecc", "ECC is off"),
        ({"current_mig": "Enabled"}, "gpu.mig", "MIG is on"),
        ({"compute_mode": "Exclusive_Process"}, "gpu.compute_mode", "GPU 2"),
        ({"compute_mode": "Prohibited"}, "gpu.compute_mode", "GPU 2"),
        ({"current_link_width": "8x"}, "gpu.link_width", "GPU 2 (0000:43:00.0) has x8"),
        ({"remapped_row_pending": "Yes"}, "gpu.ecc_errors", "a memory row waits"),
        ({"remapped_row_failure": "Yes"}, "gpu.ecc_errors", "could not be taken out"),
        ({"clocks_event_reason_hw_thermal_slowdown": "Active"}, "gpu.throttle", "heat (hardware)"),
        ({"clocks_event_reason_hw_power_brake_slowdown": "Active"}, "gpu.throttle", "the power supply"),
        ({"current_power_limit": "450.00 W"}, "gpu.power_limit", "450 W"),
    ],
)
def test_one_gpu_differs(gpus, fields, id, seen):
    with_gpu(gpus, 2, **fields)
    assert seen in only(look(gpus), id).seen


def test_memory_errors_of_the_past_are_past(gpus):
    with_gpu(gpus, 2, dram_uncorrectable="2")
    assert "2 uncorrected memory errors" in only(look(gpus), "gpu.ecc_errors").seen
    with_gpu(gpus, 2, dram_correctable="900")
    assert look(gpus).findings == []


def test_a_slow_link_of_an_idle_card_is_no_finding(gpus):
    """The sample's cards are in P8, at generation 1 of 5: they lower the link's speed when they rest."""
    assert "<current_link_gen>1<" in gpus.answers["nvidia-smi -q -x"][1]
    assert look(gpus).findings == []


def test_bar1(gpus):
    text = gpu_xml(0).replace("<total>131072 MiB", "<total>256 MiB")
    gpus.smi(text, *(gpu_xml(index) for index in range(1, 8)))
    assert only(look(gpus), "gpu.bar1").seen == "GPU 0 (0000:03:00.0) shows 256 of 97887 MiB on the bus (BAR1)"


@pytest.mark.parametrize(
    ("name", "limit", "wanted", "expected"),
    [
        (MAX_Q, "300.00 W", {}, None),
        (MAX_Q, "250.00 W", {}, "300 W"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "600.00 W", {}, None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "300.00 W", {}, "600 W"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "500.00 W", {}, "600 W"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "500.00 W", {"power_limit_w": 500}, None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "600.00 W", {"power_limit_w": 500}, "500 W"),
        # An edition that nobody knows: the card's own default, 600 W in the sample.
        ("NVIDIA RTX PRO 6000 Blackwell Edge Edition", "450.00 W", {}, "600 W"),
        ("NVIDIA RTX PRO 6000 Blackwell Edge Edition", "599.98 W", {}, None),
    ],
)
def test_power_limit_of_each_edition(gpus, name, limit, wanted, expected):
    gpus.smi(gpu_xml(0, name, current_power_limit=limit))
    view = look(gpus, count=1, island_size=0, **wanted)
    assert [finding.wanted for finding in view.findings if finding.id == "gpu.power_limit"] == (
        [expected] if expected else []
    )


# Who holds the memory.


def held_by(gpus: GpuHost, pid: int, used: str = "90112 MiB", fb: str = "90500 MiB") -> None:
    text = (
        gpu_xml(5)
        .replace("<used>0 MiB", f"<used>{fb}")
        .replace("<processes>\n\t\t</processes>", process_xml(pid, used))
    )
    gpus.smi(*(gpu_xml(index) for index in range(5)), text, gpu_xml(6), gpu_xml(7))


def test_our_own_unit_may_hold_memory(gpus):
    gpus.process(4711, "system.slice/sglang-unified.service")
    held_by(gpus, 4711)
    assert look(gpus).findings == []


@pytest.mark.parametrize(
    ("group", "owner"),
    [
        ("system.slice/ollama.service", "process 4711 (python3, of ollama.service)"),
        ("system.slice/docker-1f2e.scope", "process 4711 (python3, of docker-1f2e.scope)"),
        ("user.slice", "process 4711 (python3)"),
    ],
)
def test_an_orphan_is_named_and_not_ended(gpus, group, owner):
    gpus.process(4711, group)
    held_by(gpus, 4711)
    finding = only(look(gpus), "gpu.memory_held")
    assert finding.seen == f"GPU 5 (0000:84:00.0): 90112 MiB held by {owner}"
    assert finding.fix.endswith("kill 4711")
    assert not any("kill" in command for command in gpus.asked)


def test_an_orphan_whose_memory_the_driver_does_not_tell(gpus):
    held_by(gpus, 4711, used="N/A")
    assert "90500 MiB held by process 4711 (python3)" in only(look(gpus), "gpu.memory_held").seen


def test_memory_without_a_process(gpus):
    with_gpu(gpus, 5, used="71234 MiB")
    finding = only(look(gpus), "gpu.memory_held")
    assert finding.seen.endswith("71234 MiB held by no process that can be seen from here")
    assert "/dev/nvidia5" in finding.fix


def test_a_little_memory_is_no_orphan(gpus):
    gpus.process(900, "system.slice/gdm.service", "Xorg")
    held_by(gpus, 900, used="120 MiB", fb="300 MiB")
    assert look(gpus).findings == []


@pytest.mark.parametrize(
    ("free", "seen"),
    [
        ("97251 MiB", ""),
        ("96992 MiB", ""),
        ("96991 MiB", "GPU 5 (0000:84:00.0): 96991 MiB free at rest"),
        ("80000 MiB", "GPU 5 (0000:84:00.0): 80000 MiB free at rest"),
        ("N/A", ""),
    ],
)
def test_less_free_than_the_plan_counts_on(gpus, free, seen):
    # The bus' window, whose element has the same name, is all visible here.
    text = gpu_xml(5).replace("<free>97251 MiB", f"<free>{free}")
    gpus.smi(*(gpu_xml(index) for index in range(5)), text, gpu_xml(6), gpu_xml(7))
    findings = look(gpus, memory_free_mib=97_248.0).findings
    assert [(finding.id, finding.seen) for finding in findings] == ([("gpu.memory_free", seen)] if seen else [])
    for finding in findings:
        assert finding.wanted == "the plan's 97248 MiB" and finding.variable == "memory_plan_memory_free_mib"
        assert f"memory_plan_memory_free_mib: {free.split()[0]} " in finding.fix
    assert look(gpus).findings == []


@pytest.mark.parametrize(
    ("unit", "used", "ids"),
    [
        ("sglang-unified.service", "90500 MiB", []),
        ("sglang-unified.service", "500 MiB", []),
        ("ollama.service", "90500 MiB", ["gpu.memory_held"]),
        ("ollama.service", "500 MiB", ["gpu.memory_free"]),
    ],
)
def test_free_memory_is_compared_at_rest_only(gpus, unit, used, ids):
    gpus.process(4711, f"system.slice/{unit}")
    text = gpu_xml(5).replace("<used>0 MiB", f"<used>{used}").replace("<free>97251 MiB", "<free>5000 MiB")
    text = text.replace("<processes>\n\t\t</processes>", process_xml(4711, used))
    gpus.smi(*(gpu_xml(index) for index in range(5)), text, gpu_xml(6), gpu_xml(7))
    assert [finding.id for finding in look(gpus, memory_free_mib=97_249.0).findings] == ids


def test_several_gpus_with_less_free_are_one_finding(gpus):
    with_less = [gpu_xml(index).replace("<free>97251 MiB", f"<free>{90_000 + index} MiB") for index in range(8)]
    gpus.smi(*with_less)
    finding = only(look(gpus, memory_free_mib=97_249.0), "gpu.memory_free")
    assert finding.seen.endswith("90000 MiB free at rest at the least")
    assert "memory_plan_memory_free_mib: 90000 " in finding.fix


# Before a server starts.


def wait(gpus: GpuHost, *units: str, timeout: float = 60) -> tuple[int, list[str], list[float]]:
    """Wait for GPU 4 to 7; return the status, what was said, and the pauses."""
    said, pauses = [], []
    status = gpu_free.wait_until_free(
        gpus.host, [4, 5, 6, 7], units, timeout, said.append, lambda: float(len(pauses)), pauses.append
    )
    return status, said, pauses


def test_free_memory_is_not_waited_for(gpus):
    assert wait(gpus) == (0, ["the memory of GPU 4, 5, 6, 7 is free after 0 s"], [])


def test_memory_that_stays_held_is_no_start(gpus):
    gpus.process(4711, "user.slice")
    held_by(gpus, 4711)
    status, said, pauses = wait(gpus, timeout=5)
    assert (status, len(pauses)) == (1, 4)
    assert "GPU 5 (0000:84:00.0): 90112 MiB held by process 4711 (python3)" in said[0]
    assert said[0].endswith("kill 4711")


def test_memory_of_a_neighbour_or_of_other_gpus_is_not_looked_at(gpus):
    gpus.process(4711, "system.slice/sglang-replica-0.service")
    held_by(gpus, 4711)
    assert wait(gpus, "sglang-replica-0.service")[0] == 0
    assert gpu_free.wait_until_free(gpus.host, [0, 1, 2, 3], [], 5, print, lambda: 0.0, lambda _s: None) == 0


@pytest.mark.parametrize(
    ("answer", "why", "fix"),
    [
        ((127, "not found"), "nvidia-smi is not installed", "ansible-playbook playbooks/gpu_host.yml"),
        ((124, "nvidia-smi did not end within 20 s"), "nvidia-smi did not end within 20 s", "needs a reboot"),
        ((9, "Failed to initialize NVML: Driver Not Loaded"), "Driver Not Loaded", "modprobe nvidia"),
        ((255, "out of order"), "nvidia-smi failed: out of order", "journalctl -k -b"),
    ],
)
def test_memory_that_nobody_tells_of_is_no_start(gpus, answer, why, fix):
    gpus.answers["nvidia-smi -q -x"] = answer
    status, said, pauses = wait(gpus, timeout=5)
    assert (status, len(pauses), len(said)) == (1, 4, 1)
    assert said[0].startswith("not started: not known whether the memory of GPU 4, 5, 6, 7 is free: ")
    assert why in said[0] and fix in said[0]


def test_a_gpu_that_is_left_out_is_no_start(gpus):
    gpus.smi(*(gpu_xml(index) for index in range(7)))
    status, said, _pauses = wait(gpus, timeout=5)
    assert status == 1
    assert "whether the memory of GPU 7 is free: nvidia-smi tells no memory of GPU 7, wanted: the memory of" in said[0]


def test_a_driver_that_answers_late_is_waited_for(gpus):
    whole = gpus.answers["nvidia-smi -q -x"]
    gpus.answers["nvidia-smi -q -x"] = (9, "Failed to initialize NVML: Driver Not Loaded")
    said, pauses = [], []

    def sleep(seconds):
        pauses.append(seconds)
        gpus.answers["nvidia-smi -q -x"] = whole

    assert gpu_free.wait_until_free(gpus.host, [4], [], 60, said.append, lambda: float(len(pauses)), sleep) == 0
    assert said == ["the memory of GPU 4 is free after 1 s"]


# The driver and the kernel.


def test_driver_too_old(gpus):
    gpus.smi(*(gpu_xml(index) for index in range(8)), driver="575.57.08")
    gpus.write(
        "/proc/driver/nvidia/version", sample("proc_driver_nvidia_version.txt").replace("580.95.05", "575.57.08")
    )
    finding = only(look(gpus), "gpu.driver_version")
    assert (finding.seen, finding.wanted) == ("driver 575.57.08", "580.65.06 or newer")


@pytest.mark.parametrize(("have", "least", "fit"), [("580.95.05", "580.95.5", True), ("610.43", "580.65.06", True)])
def test_versions_compare_as_numbers(gpus, have, least, fit):
    gpus.smi(*(gpu_xml(index) for index in range(8)), driver=have)
    gpus.write("/proc/driver/nvidia/version", sample("proc_driver_nvidia_version.txt").replace("580.95.05", have))
    assert (look(gpus, driver_min=least).findings == []) is fit


def test_libraries_of_another_version(gpus):
    gpus.smi(*(gpu_xml(index) for index in range(8)), driver="580.105.08")
    assert only(look(gpus), "gpu.driver_library").seen == "module 580.95.05, libraries 580.105.08"


def test_nouveau_and_secure_boot(gpus):
    gpus.write("/proc/modules", "nouveau 2400256 0 - Live 0x0000000000000000\n")
    assert only(look(gpus), "gpu.nouveau").seen == "module nouveau is loaded"
    (gpus.root / "proc/driver/nvidia/version").unlink()
    gpus.write("/proc/modules", "nvidiafb 1 0 - Live 0x0\n")
    gpus.answers["nvidia-smi -q -x"] = (9, "couldn't communicate with the NVIDIA driver")
    gpus.write(gpu_checks.EFI_SECURE_BOOT, "\x06\x00\x00\x00\x01")
    assert [finding.id for finding in look(gpus).findings] == ["gpu.driver", "gpu.secure_boot"]
    gpus.write(gpu_checks.EFI_SECURE_BOOT, "\x06\x00\x00\x00\x00")
    assert only(look(gpus), "gpu.driver").id == "gpu.driver"


def test_the_next_boot_has_no_driver(gpus):
    gpus.write("/boot/vmlinuz-6.1.0-40-amd64", "")
    gpus.write("/lib/modules/6.1.0-40-amd64/modules.dep", "kernel/drivers/video/fbdev/nvidia/nvidiafb.ko: \n")
    finding = only(look(gpus), "gpu.driver_next_kernel")
    assert "6.1.0-40-amd64" in finding.seen
    assert "linux-headers-6.1.0-40-amd64" in finding.fix


@pytest.mark.parametrize(
    "line",
    [
        "updates/dkms/nvidia.ko.xz: x",
        "kernel/nvidia-580-open/nvidia.ko.zst:",
        "updates/dkms/nvidia-current-open.ko:",
        "updates/dkms/nvidia-current.ko: x",
    ],
)
def test_where_distributions_put_the_module(gpus, line):
    gpus.write("/lib/modules/6.1.0-38-amd64/modules.dep", f"kernel/a.ko:\n{line}\n")
    assert look(gpus).findings == []


def test_packages_that_are_not_held(gpus):
    query = "dpkg-query -W -f ${db:Status-Abbrev}${Package}\n *nvidia*"
    packages = "ii nvidia-driver-580-open\nii libnvidia-compute-580\nun nvidia-legacy\nrc nvidia-old\nii nvidiafoo\n"
    gpus.answers[query] = (0, packages)
    gpus.answers["apt-mark showhold"] = (0, "libnvidia-compute-580\n")
    assert look(gpus).findings == []
    gpus.answers["apt-config dump APT::Periodic"] = (0, 'APT::Periodic::Unattended-Upgrade "1";\n')
    finding = only(look(gpus), "gpu.driver_hold")
    assert finding.fix == "apt-mark hold nvidia-driver-580-open"
    gpus.answers["apt-mark showhold"] = (0, "libnvidia-compute-580\nnvidia-driver-580-open\n")
    assert look(gpus).findings == []


@pytest.mark.parametrize(
    ("answers", "seen"),
    [
        ({}, "no nvcc in /usr/local/cuda/bin or the PATH"),
        ({"nvcc --version": (0, "Cuda compilation tools, release 12.4, V12.4.131")}, "nvcc 12.4"),
        ({"nvcc --version": (0, "Cuda compilation tools, release 13.5, V13.5.37")}, None),
        ({"/usr/local/cuda/bin/nvcc --version": (1, "killed")}, "no nvcc in /usr/local/cuda/bin or the PATH"),
    ],
)
def test_nvcc(gpus, answers, seen):
    del gpus.answers["/usr/local/cuda/bin/nvcc --version"]
    gpus.answers.update(answers)
    view = look(gpus)
    assert [finding.seen for finding in view.findings] == ([seen] if seen else [])


def test_xids(gpus):
    gpus.answers["journalctl --dmesg --boot --no-pager --quiet"] = (0, sample("kernel.log"))
    first, second = look(gpus).findings
    assert (first.id, second.id) == ("gpu.xid", "gpu.xid")
    assert first.seen.startswith("GPU 4 (0000:83:00.0): 2 x Xid 31, an application touched memory")
    assert "reboot" in second.fix
    assert "reboot" not in first.fix


def test_the_kernel_log_from_dmesg_and_from_nowhere(gpus):
    gpus.answers["journalctl --dmesg --boot --no-pager --quiet"] = (0, "")
    gpus.answers["dmesg"] = (0, sample("kernel.log"))
    assert len(look(gpus).findings) == 2
    gpus.answers["dmesg"] = (1, "dmesg: read kernel buffer failed: Operation not permitted\n")
    view = look(gpus)
    assert view.findings == []
    assert "gpu.xid" in {one.id for one in view.unchecked}


@pytest.mark.parametrize(("kind", "ids"), [("DMA-FQ", ["host.iommu"]), ("DMA", ["host.iommu"]), ("identity", [])])
def test_iommu(gpus, kind, ids):
    gpus.write("/sys/bus/pci/devices/0000:03:00.0/iommu_group/type", f"{kind}\n")
    assert [finding.id for finding in look(gpus).findings] == ids


def test_acs_and_aspm(gpus):
    gpus.answers["lspci -D -vvv"] = (0, sample("lspci.txt"))
    acs, aspm = look(gpus).findings
    assert (acs.id, acs.seen) == ("host.acs", "ReqRedir+ at 1 bridges: 0000:02:00.0")
    assert "setpci -s $b ECAP_ACS+6.w=0000" in acs.fix
    assert (aspm.id, aspm.seen) == ("host.aspm", "ASPM L1 Enabled on 0000:03:00.0")
    # A bridge above no GPU may redirect what it likes.
    gpus.answers["lspci -D -vvv"] = (0, sample("lspci.txt").replace("0000:02:00.0", "0000:e2:00.0"))
    assert [finding.id for finding in look(gpus).findings] == ["host.aspm"]


@pytest.mark.parametrize(
    "answer", [(127, "not there"), (0, "0000:00:01.1 PCI bridge: X\n\tCapabilities: <access denied>\n")]
)
def test_lspci_that_tells_nothing(gpus, answer):
    gpus.answers["lspci -D -vvv"] = answer
    view = look(gpus)
    assert view.findings == []
    assert "host.acs" in {one.id for one in view.unchecked}


def test_what_hangs_is_not_said_to_need_root(gpus):
    gpus.answers["lspci -D -vvv"] = (124, "lspci did not end within 30 s")
    gpus.answers["journalctl --dmesg --boot --no-pager --quiet"] = (124, "journalctl did not end within 30 s")
    gpus.answers["dmesg"] = (124, "dmesg did not end within 30 s")
    view = look(gpus)
    assert view.findings == []
    reasons = {one.id: one.reason for one in view.unchecked}
    assert reasons["host.acs"] == "lspci did not end within 30 s: a device does not answer"
    assert reasons["gpu.xid"] == "journalctl and dmesg did not end within 30 s"
    del gpus.answers["dmesg"]
    assert {one.id: one.reason for one in look(gpus).unchecked}["gpu.xid"] == "journalctl did not end within 30 s"
    gpus.answers["dmesg"] = (0, sample("kernel.log"))
    assert "gpu.xid" not in {one.id for one in look(gpus).unchecked}


def test_a_compiler_that_hangs_is_not_said_to_be_missing(gpus):
    gpus.answers["/usr/local/cuda/bin/nvcc --version"] = (124, "/usr/local/cuda/bin/nvcc did not end within 20 s")
    assert only(look(gpus), "gpu.nvcc").seen == "/usr/local/cuda/bin/nvcc did not end within 20 s"


def test_p2p_that_the_driver_refuses(gpus):
    gpus.answers["nvidia-smi topo -p2p r"] = (0, sample("topo_p2p.txt"))
    assert only(look(gpus), "gpu.p2p").seen == "CNS between 1-3, 3-1"
    gpus.answers["nvidia-smi topo -p2p r"] = (124, "")
    view = look(gpus)
    assert view.findings == []
    assert "did not end" in next(one.reason for one in view.unchecked if one.id == "gpu.p2p")
