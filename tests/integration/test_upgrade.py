# SPDX-License-Identifier: GPL-3.0-or-later
"""upgrade.yml and rollback.yml on a host that serves: what fails, or is killed, leaves a service that answers.

The tests build on each other, and on those of test_site.py when these ran before.
"""

from __future__ import annotations

import json

import pytest
from site_host import ENGINE, SiteHost, eventually

pytestmark = pytest.mark.integration
UPGRADE, ROLLBACK = "playbooks/upgrade.yml", "playbooks/rollback.yml"
# Another environment, without our kernels, and another flag.
OTHER = ["-e", "sglang_kernels_enabled=false", "-e", "sglang_serve_context_length=4096"]
# The engine's parser takes this, the engine does not.
SHORTER = {"json-model-override-args": json.dumps({"max_position_embeddings": 2048})}
BROKEN = [*OTHER, "-e", json.dumps({"sglang_serve_arguments_custom": SHORTER})]


@pytest.fixture(scope="module")
def host(site_host: SiteHost) -> SiteHost:
    return site_host


@pytest.fixture(scope="module")
def serving(host: SiteHost) -> SiteHost:
    """A host that site.yml has converged."""
    if not current(host):
        host.play("site.yml")
    return host


def current(host: SiteHost) -> str:
    """Return the name of the release that serves, "" for none."""
    return host.shell("readlink /opt/sglang/current || true").removeprefix("releases/")


def releases(host: SiteHost) -> set[str]:
    return set(host.shell("ls /opt/sglang/releases").split())


def proven(host: SiteHost, release: str) -> bool:
    return host.shell(f"test -s /opt/sglang/releases/{release}/proven && echo yes || true") == "yes"


def context_length(host: SiteHost) -> int:
    """Return what the running engine was told."""
    words = host.shell(f"tr '\\0' '\\n' < /proc/{host.main_pid(ENGINE)}/cmdline").split("\n")
    return int(words[words.index("--context-length") + 1])


def guarded(host: SiteHost) -> bool:
    """Whether a guard waits for the end of a play, or goes back."""
    return host.shell("systemctl is-active sglang-guard", status=None) in ("active", "activating")


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_converged_host_has_a_proven_release_that_is_left_alone(serving: SiteHost) -> None:
    before = serving.main_pid(ENGINE), current(serving)
    assert json.loads(serving.shell("cat /opt/sglang/current/proven"))["start_seconds"] > 0
    run = serving.play(UPGRADE)
    assert (run.changed, run.changed_tasks()) == (0, [])
    assert (serving.main_pid(ENGINE), current(serving)) == before


@pytest.mark.parametrize(
    ("wanted", "differs"),
    [
        pytest.param(OTHER[:2], "package kernels:", id="environment"),
        pytest.param(OTHER, "--context-length: 8192 -> 4096", id="argument too", marks=pytest.mark.thorough),
    ],
)
def test_check_mode_says_what_would_differ_and_touches_nothing(
    serving: SiteHost, wanted: list[str], differs: str
) -> None:
    """Also of an environment, which check mode does not make."""
    before = serving.main_pid(ENGINE), current(serving), serving.shell("ls /opt/sglang/*")
    run = serving.play(UPGRADE, "--check", *wanted)
    for text in (differs, f"restarts {ENGINE}", "as at the last start"):
        assert text in words(run.output)
    assert (serving.main_pid(ENGINE), current(serving), serving.shell("ls /opt/sglang/*")) == before


@pytest.mark.thorough
def test_check_mode_refuses_nothing_that_only_the_wanted_engine_could_know(serving: SiteHost) -> None:
    """The installed SGLang is asked only when it is the one that would run."""
    unknown = '{"sglang_serve_environment_custom": {"SGLANG_OF_ANOTHER_VERSION": "1"}}'
    refused = serving.play(UPGRADE, "--check", "-e", unknown, status=None)
    assert refused.status != 0
    assert "The installed SGLang knows no SGLANG_OF_ANOTHER_VERSION" in words(refused.output)
    run = serving.play(UPGRADE, "--check", "-e", unknown, "-e", '{"sglang_serve_pins": {"sglang": "0.5.99"}}')
    assert "is installed and 0.5.99 is wanted" in words(run.output)


@pytest.mark.parametrize(
    "step",
    [
        "sglang_venv : Install the engine",
        pytest.param(f"service_unit : Write {ENGINE}", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_upgrade_leaves_the_service_as_it_was(serving: SiteHost, step: str) -> None:
    """While the environment is made, and when the link has been switched and the unit not been written."""
    before, release = serving.main_pid(ENGINE), current(serving)
    serving.play_until(f"TASK [{step}", UPGRADE, *OTHER)
    assert serving.main_pid(ENGINE) == before
    assert serving.answers()
    assert context_length(serving) == 8192
    eventually(lambda: current(serving) == release, 120, "the link to what serves")
    eventually(lambda: not guarded(serving), 120, "the guard's end")
    assert serving.main_pid(ENGINE) == before


def test_an_upgrade_that_is_killed_after_the_restart_is_taken_back_by_the_host(serving: SiteHost) -> None:
    before, release = serving.main_pid(ENGINE), current(serving)
    serving.play_until("TASK [sglang_serve : Wait until the engine answers]", UPGRADE, *OTHER)
    eventually(lambda: serving.main_pid(ENGINE) not in (0, before), 120, "a new main process")
    assert current(serving) != release
    eventually(lambda: not guarded(serving), 420, "the guard's end")
    assert (current(serving), context_length(serving)) == (release, 8192)
    assert serving.answers()
    assert json.loads(serving.shell("cat /var/lib/sglang/reports/smoke.json"))["ok"]
    told = serving.shell("journalctl -u sglang-guard -o cat --no-pager -n 20")
    assert f"{ENGINE} serves again after" in told
    assert "gone back; what the play was for has not happened. Next: run it again" in told


@pytest.mark.thorough
def test_an_upgrade_that_was_killed_after_the_restart_is_told(serving: SiteHost) -> None:
    """When nothing is there to go back by itself, as after a reboot; the next test's run proves the new release."""
    before = serving.main_pid(ENGINE)
    serving.play_until("TASK [sglang_serve : Wait until the engine answers]", UPGRADE, *OTHER)
    serving.shell("systemctl stop sglang-guard")
    eventually(lambda: serving.main_pid(ENGINE) not in (0, before), 120, "a new main process")
    eventually(serving.answers, 420, "an answer of the new release")
    assert context_length(serving) == 4096
    assert not proven(serving, current(serving))
    run = serving.play("playbooks/doctor.yml", *OTHER, status=None)
    assert run.status != 0
    assert f"The release {current(serving)} serves and was never proven" in words(run.output), run.output[-3000:]


def test_the_next_run_upgrades_and_says_from_what_to_what(serving: SiteHost) -> None:
    serving.play(UPGRADE, *OTHER)
    assert context_length(serving) == 4096
    assert proven(serving, current(serving))
    (old,) = releases(serving) - {current(serving)}
    assert serving.answers()
    kernels = "ls /opt/sglang/{}/venv/lib/python3*/site-packages | grep -c dsv4 || true"
    assert serving.shell(kernels.format("current")) == "0"
    assert serving.shell(kernels.format(f"releases/{old}")) != "0"


def test_an_engine_that_does_not_start_is_taken_back(serving: SiteHost) -> None:
    before = current(serving)
    run = serving.play(UPGRADE, *BROKEN, status=None)
    assert run.status != 0
    last = words(run.output.rpartition("TASK [")[2])
    for text in (
        "context_length (4096) is greater than the derived context_length (2048)",
        "change: sglang_serve_context_length",
        f"Went back: the release {before} serves again and is proven",
    ):
        assert text in last, run.output[-4000:]
    assert current(serving) == before
    assert serving.answers()
    assert context_length(serving) == 4096


def test_back_on_demand_and_the_canary_follows(serving: SiteHost) -> None:
    refused = serving.play(ROLLBACK, "-e", "sglang_serve_release=0.0.0-none", status=None)
    assert (refused.status != 0, refused.changed) == (True, 0)
    assert f"on this host: {', '.join(sorted(releases(serving)))}" in words(refused.output)
    run = serving.play(ROLLBACK)
    assert "--context-length: 4096 -> 8192" in words(run.output)
    assert context_length(serving) == 8192
    planned = "grep -h ^ops_memory_plan_planned.*context_len /var/lib/sglang/metrics/memory-plan-*.prom"
    assert serving.shell(planned).endswith(" 8192")
    assert serving.answers()
    serving.shell("systemctl start sglang-canary.service")
    assert serving.shell("systemctl show -P Result sglang-canary.service") == "success"


def test_an_inventory_that_is_put_back_after_a_rollback_restarts_nothing(serving: SiteHost) -> None:
    before = serving.main_pid(ENGINE), current(serving)
    # The release that never started goes.
    expected = ["sglang_venv : Point the link at the environment", "sglang_serve : Remove what no kept release needs"]
    assert serving.play("site.yml").changed_tasks() == expected
    assert (serving.main_pid(ENGINE), current(serving)) == before


@pytest.mark.thorough
def test_the_inventory_of_the_release_that_was_rolled_back_is_told_so(serving: SiteHost) -> None:
    (newer,) = [name for name in releases(serving) - {current(serving)} if proven(serving, name)]
    for playbook in ("smoke.yml", "playbooks/doctor.yml"):
        run = serving.play(playbook, *OTHER, status=None)
        assert run.status != 0
        for text in (
            f"The release {newer}, which the inventory asks for, was proven at",
            f"and rolled back; {current(serving)}, proven at",
            "--context-length: 8192 -> 4096",
            "playbooks/upgrade.yml, which goes forward again",
        ):
            assert text in words(run.output), run.output[-4000:]
    report = json.loads(serving.shell("cat /var/lib/sglang/reports/smoke.json"))
    assert (report["failed"], report["checks"][0]["cause"][:18]) == (["run.begin"], "drift: The release")
    serving.play("smoke.yml")
