# SPDX-License-Identifier: GPL-3.0-or-later
"""preflight.yml and gpu_host.yml on a real host that has nothing of ours, with packages of our own for a driver.

What needs a GPU is not here: that the vendor's module loads, and what the vendor's packages do when they are installed.
The tests build on each other.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from apt_repository import Key, Repository, Server
from site_host import CHECKOUT, SiteHost, difference

pytestmark = pytest.mark.integration
OLD, NEW, NVCC = "580.95.05-1", "580.105.08-1", "13.0.88-1"
CUDA = '{"sglang_serve_device": "cuda", "sglang_serve_islands": [{"gpus": [0]}]}'
UNIT = """\
[Unit]
Description=Stands for the persistence daemon
[Service]
ExecStart=/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""
SMI = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate' >&2\nexit 9\n"
VERSIONS = "dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\\n' '*nvidia*' 'cuda-*' 2>/dev/null || true"


@pytest.fixture(scope="module")
def key() -> Iterator[Key]:
    """The key that the host is told to trust."""
    key = Key()
    yield key
    key.forget()


def add_driver(repository: Repository, version: str) -> None:
    """Add one version of what stands for the driver."""
    same = f"libnvidia-compute (= {version})"
    repository.add("nvidia-open", version, same)
    repository.add("libnvidia-compute", version, files={"/usr/bin/nvidia-smi": SMI})
    repository.add("nvidia-persistenced", version, same, {"/lib/systemd/system/nvidia-persistenced.service": UNIT})


@pytest.fixture(scope="module")
def repository(key: Key, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A signed repository with one version of everything."""
    repository = Repository(tmp_path_factory.mktemp("apt") / "repository")
    add_driver(repository, OLD)
    repository.add("cuda-nvcc-13-0", NVCC)
    repository.publish(key)
    return repository


@pytest.fixture(scope="module")
def server(host: SiteHost, repository: Repository) -> Iterator[Server]:
    """The repository on the lab's network."""
    server = Server(repository.directory, host.environment, "10.77.0.1")
    yield server
    server.close()


@pytest.fixture
def provision(host: SiteHost, key: Key, server: Server, tmp_path: Path):
    """Run gpu_host.yml with these packages, and other variables."""

    def run(*arguments: str, driver: str = OLD, packages: dict | None = None, status: int | None = 0, **variables):
        named = {"nvidia-open": driver, "nvidia-persistenced": driver} if packages is None else packages
        values = {
            "gpu_host_repository_uris": [server.url],
            "gpu_host_repository_key": key.public,
            "gpu_host_packages": named,
            "gpu_host_pins": {"libnvidia-*": driver},
            **variables,
        }
        (tmp_path / "variables.json").write_text(json.dumps(values))
        return host.play("playbooks/gpu_host.yml", "-e", f"@{tmp_path}/variables.json", *arguments, status=status)

    return run


def words(text: str) -> str:
    return " ".join(text.split())


# Preflight.


def test_preflight_on_a_bare_host_changes_nothing(host: SiteHost, fresh: dict, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run = host.play("playbooks/preflight.yml", "-e", f"preflight_report={report}")
    assert run.changed == 0
    assert difference(fresh, host.snapshot()) == {}
    told = json.loads(report.read_text())
    assert {"host", "findings", "accepted", "unchecked", "facts", "transfers"} == set(told)
    assert [finding for finding in told["findings"] if finding["severity"] == "error"] == []
    assert {"id": "gpu.*", "reason": "sglang_serve_device is cpu"} in told["unchecked"]
    assert "not looked at: gpu.*, because sglang_serve_device is cpu" in words(run.output)


def test_an_error_ends_the_run_and_is_in_the_report(host: SiteHost, fresh: dict, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    device = ["-e", CUDA, "-e", f"preflight_report={report}"]
    run = host.play("playbooks/preflight.yml", *device, status=2)
    assert "gpu.driver: nvidia-smi is not installed" in words(run.output)
    assert run.changed == 0
    assert "gpu.driver" in {finding["id"] for finding in json.loads(report.read_text())["findings"]}
    assert difference(fresh, host.snapshot()) == {}


def test_nvidia_smi_hangs(host: SiteHost, fresh: dict) -> None:
    script = "#!/bin/sh\\ntrap '' TERM\\nsleep 300\\n"
    host.shell(f'printf "{script}" > /usr/local/bin/nvidia-smi; chmod +x /usr/local/bin/nvidia-smi')
    slow = ["-e", CUDA, "-e", "preflight_timeout_seconds=2"]
    run = host.play("playbooks/preflight.yml", *slow, status=2)
    assert "gpu.hang: nvidia-smi did not end within 2 s" in words(run.output)
    assert host.shell("pgrep -f '[s]leep 300' || echo none") == "none"
    host.shell("rm /usr/local/bin/nvidia-smi")


def test_an_accepted_warning_is_listed_as_such(host: SiteHost, fresh: dict) -> None:
    """A clock that is not synchronised, whatever the machine's is."""
    host.shell("printf '#!/bin/sh\\necho no\\n' > /usr/local/bin/timedatectl; chmod +x /usr/local/bin/timedatectl")
    run = host.play("playbooks/preflight.yml", "-e", json.dumps({"preflight_accept": {}}))
    assert "warning host.clock: the clock is not synchronised" in words(run.output)
    accepted = json.dumps({"preflight_accept": {"host.clock": "the hypervisor keeps it"}})
    run = host.play("playbooks/preflight.yml", "-e", accepted)
    assert "accepted host.clock: the clock is not synchronised" in words(run.output)
    assert "[WARNING]: host.clock" not in run.output
    host.shell("rm /usr/local/bin/timedatectl")


def test_transfers_are_not_measured_without_gpus(host: SiteHost, fresh: dict) -> None:
    run = host.play("playbooks/preflight.yml", "-e", "preflight_p2p=true")
    assert "not measured: there is no /opt/sglang/current/venv/bin/python" in words(run.output)
    host.shell("mkdir -p /srv/venv/bin && ln -s /usr/bin/python3 /srv/venv/bin/python")
    run = host.play("playbooks/preflight.yml", "-e", "preflight_p2p=true", "-e", "preflight_venv=/srv/venv")
    host.shell("rm -r /srv/venv")
    assert "not measured: /srv/venv/bin/python has no PyTorch" in words(run.output)
    assert run.changed == 0
    assert difference(fresh, host.snapshot()) == {}


# The role gpu_host.


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"gpu_host_repository_uris": []}, "gpu_host_repository_uris is []"),
        ({"gpu_host_repository_key": "none"}, "gpu_host_repository_key has 4 characters; wanted: a public key"),
        ({"gpu_host_packages": {}}, "gpu_host_packages has no package"),
        ({"gpu_host_packages": {"nvidia-open": "580.*"}}, "gpu_host_packages has nvidia-open; wanted"),
        ({"gpu_host_repository_components": ["main"]}, "with components ['main']; wanted"),
    ],
)
def test_what_is_not_pinned_is_refused(provision, host: SiteHost, fresh: dict, variables: dict, wanted: str) -> None:
    run = provision(status=2, **variables)
    assert wanted in words(run.output)
    assert run.changed == 0


def test_gpu_host_in_check_mode_on_an_empty_host(provision, host: SiteHost, fresh: dict) -> None:
    run = provision("--check", "--diff")
    assert [task.removeprefix("gpu_host : ") for task in run.changed_tasks()] == [
        "Write the repository, its key and its pins",
        "Say what would be installed",
        "Write limits, settings and module options",
    ]
    assert f"nvidia-open={OLD} nvidia-persistenced={OLD}" in run.output
    assert difference(fresh, host.snapshot()) == {}


def test_a_repository_of_another_key_is_refused(provision, repository: Repository, key: Key, host: SiteHost) -> None:
    stranger = Key()
    repository.publish(stranger)
    stranger.forget()
    run = provision(status=2)
    assert "NO_PUBKEY" in run.output or "not signed" in run.output
    assert "nvidia" not in host.shell(VERSIONS, status=None)
    repository.publish(key)


def test_an_index_that_was_changed_after_signing_is_refused(
    provision, repository: Repository, key: Key, host: SiteHost
) -> None:
    packages = repository.directory / "Packages"
    packages.write_text(packages.read_text().replace("stands for", "stands 4"))
    run = provision(status=2)
    assert "Hash Sum mismatch" in run.output or "unexpected size" in run.output
    assert "nvidia" not in host.shell(VERSIONS, status=None)
    repository.publish(key)


def test_the_pinned_versions_are_installed_and_held(provision, host: SiteHost) -> None:
    provision()
    installed = set(host.shell(VERSIONS).splitlines())
    assert {f"hi  {name} {OLD}" for name in ("libnvidia-compute", "nvidia-open", "nvidia-persistenced")} <= installed
    assert "cuda-nvcc-13-0" not in " ".join(line for line in installed if line.startswith(("ii", "hi")))
    assert host.shell("systemctl is-active nvidia-persistenced") == "active"
    assert host.shell("systemctl is-enabled nvidia-persistenced") == "enabled"
    assert "blacklist nouveau" in host.shell("cat /etc/modprobe.d/sglang-gpu.conf")


def test_a_second_run_changes_nothing(provision) -> None:
    assert provision().changed_tasks() == []
    assert provision("--check").changed_tasks() == []


def test_a_newer_version_in_the_repository_is_not_taken(
    provision, repository: Repository, key: Key, host: SiteHost
) -> None:
    add_driver(repository, NEW)
    repository.publish(key)
    assert provision().changed_tasks() == []
    # Nor by the system itself, held or not.
    host.shell("apt-get update -qq")
    assert "nvidia" not in host.shell("apt-get --simulate dist-upgrade | grep ^Inst || true")
    host.shell("apt-mark unhold nvidia-open nvidia-persistenced libnvidia-compute")
    assert "nvidia" not in host.shell("apt-get --simulate dist-upgrade | grep ^Inst || true")
    run = provision()
    assert run.changed_tasks() == ["gpu_host : Hold the packages"]
    assert NEW not in host.shell(VERSIONS)


def test_another_package_comes_without_moving_the_driver(provision, host: SiteHost) -> None:
    packages = {"nvidia-open": OLD, "nvidia-persistenced": OLD, "cuda-nvcc-13-0": NVCC}
    provision(packages=packages)
    assert f"hi  cuda-nvcc-13-0 {NVCC}" in host.shell(VERSIONS)
    assert NEW not in host.shell(VERSIONS)


def test_another_version_in_the_inventory_waits_for_the_word(provision, host: SiteHost) -> None:
    run = provision(driver=NEW)
    assert f"left alone: nvidia-open {OLD}, nvidia-persistenced {OLD}. Next: -e gpu_host_upgrade=true" in words(
        run.output
    )
    assert NEW not in host.shell(VERSIONS)
    run = provision("-e", "gpu_host_upgrade=true", driver=NEW)
    installed = set(host.shell(VERSIONS).splitlines())
    assert {f"hi  {name} {NEW}" for name in ("libnvidia-compute", "nvidia-open", "nvidia-persistenced")} <= installed
    assert provision("-e", "gpu_host_upgrade=true", driver=NEW).changed_tasks() == []


def test_a_reboot_is_announced_and_not_made(provision, host: SiteHost) -> None:
    """What stands for GRUB writes the arguments where GRUB would; the kernel is the machine's and goes on without."""
    host.shell(
        "mkdir -p /boot/grub /etc/default/grub.d && touch /boot/grub/grub.cfg && printf '%s\\n' '#!/bin/sh' "
        "'. /etc/default/grub.d/60-sglang-gpu.cfg' 'echo \"linux $GRUB_CMDLINE_LINUX\" > /boot/grub/grub.cfg' "
        "> /usr/sbin/update-grub && chmod +x /usr/sbin/update-grub"
    )
    started = host.shell("stat --format %Y /proc/1")
    arguments = ["iommu=pt", "pcie_aspm=off"]
    run = provision(driver=NEW, gpu_host_kernel_arguments=arguments)
    assert "a reboot is needed: the kernel runs without iommu=pt pcie_aspm=off" in words(run.output)
    assert host.shell("cat /boot/grub/grub.cfg") == "linux  iommu=pt pcie_aspm=off"
    assert host.shell("stat --format %Y /proc/1") == started
    assert provision(driver=NEW, gpu_host_kernel_arguments=arguments).changed_tasks() == []
    run = provision(driver=NEW, gpu_host_kernel_arguments=arguments, gpu_host_reboot=True)
    assert "gpu_host : Reboot" in run.changed_tasks()
    assert host.shell("stat --format %Y /proc/1") != started
    assert host.shell("systemctl is-active nvidia-persistenced") == "active"


def test_the_driver_comes_from_a_directory_that_a_lock_vouches_for(
    provision, repository: Repository, host: SiteHost, tmp_path: Path
) -> None:
    """Without a repository, and back to the version before: what it had pinned is gone with it.

    engine/debian.py makes the directory of packages at one version and what they depend on.
    """
    mirror, lock = tmp_path / "driver", tmp_path / "driver.sha256"
    source = f"deb [trusted=yes] file:{repository.directory} ./"
    # What they depend on is named as well: the host and the repository have newer ones.
    packages = dict.fromkeys(("nvidia-open", "nvidia-persistenced", "libnvidia-compute"), OLD)
    command = [sys.executable, CHECKOUT / "engine/debian.py", mirror, "--lock", lock, "--update", "--source", source]
    named = [f"--package={name}={version}" for name, version in packages.items()]
    subprocess.run([*command, "--release=bookworm", *named], check=True)
    pack = subprocess.run(["tar", "-cC", mirror, "."], capture_output=True, check=True).stdout
    unpack = f"mkdir /srv/driver; echo {base64.b64encode(pack).decode()} | base64 -d | tar -xC /srv/driver"
    # An argument of a command has 128 KiB at most.
    assert len(unpack) < 100_000
    host.shell(unpack)
    settings = {"gpu_host_repository_uris": [], "gpu_host_repository_key": "", "gpu_host_pins": {}}
    settings |= {"gpu_host_mirror": "/srv/driver", "gpu_host_lock": str(lock), "packages": packages}
    host.shell("cp /srv/driver/Packages /srv; echo >> /srv/driver/Packages")
    upgrade = ("-e", "gpu_host_upgrade=true")
    run = provision(*upgrade, status=2, **settings)
    assert f"/srv/driver on the host is not what {lock} says: Packages: FAILED" in words(run.output)
    assert OLD not in host.shell(VERSIONS)
    host.shell("mv /srv/Packages /srv/driver")
    provision(*upgrade, **settings)
    installed = set(host.shell(VERSIONS).splitlines())
    assert {f"hi  {name} {OLD}" for name in ("libnvidia-compute", "nvidia-open", "nvidia-persistenced")} <= installed
    assert provision(**settings).changed_tasks() == []
    assert host.shell("find /etc/apt -name 'sglang-gpu*'") == ""


def test_preflight_sees_what_was_installed(host: SiteHost) -> None:
    """The stand-in for nvidia-smi fails as the real one does without a GPU."""
    run = host.play("playbooks/preflight.yml", "-e", CUDA, status=2)
    assert "gpu.output: nvidia-smi failed" in words(run.output)
    assert "gpu.driver_hold" not in run.output
