# SPDX-License-Identifier: GPL-3.0-or-later
"""The role grafana on a real host, with a package of our own in the place of Grafana's.

What is seen here is the role: which package it takes, what it writes, how the password travels, what a second run does
and what uninstall.yml leaves. What Grafana makes of it needs Grafana's package. The tests build on each other.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from apt_repository import Key, Repository, Server
from site_host import CHECKOUT, Run, SiteHost, difference

pytestmark = pytest.mark.integration
VERSION = "12.3.1"
FIRST, SECOND = "first-password-of-the-vault", "second-password-of-the-vault"
UNIT = "grafana-server.service"
NEEDED, MIRROR = "fonts-of-a-grafana", "/run/mirror-of-grafana"
# Like Grafana: the password of the environment counts at the first start, from then on the one in the database does.
PROGRAM = """#!/usr/bin/env python3
import base64, configparser, http.server, os, pathlib, sys
words = sys.argv[1:]
ini = configparser.ConfigParser()
ini.read(" ".join(words).replace("=", " ").partition("--config ")[2].split()[0])
database = pathlib.Path(ini["paths"]["data"], "grafana.db")
if "reset-admin-password" in words:
    database.write_text(sys.stdin.read().strip())
    sys.exit()
if not database.exists():
    database.write_text(pathlib.Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]).read_text())
class Api(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        given = base64.b64decode(self.headers.get("Authorization", "Basic ").split()[-1]).decode()
        self.send_response(200 if given == "admin:" + database.read_text() else 401)
        self.end_headers()
    def log_message(self, *_):
        pass
server = ini["server"]
http.server.ThreadingHTTPServer((server["http_addr"], int(server["http_port"])), Api).serve_forever()
"""
# As the vendor's: a user, and a unit that would listen on every address.
POSTINST = "#!/bin/sh\nid grafana >/dev/null 2>&1 || useradd --system --home /usr/share/grafana grafana\n"
VENDOR_UNIT = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A directory with the package."""
    repository = Repository(tmp_path_factory.mktemp("apt") / "repository")
    files = {"/usr/share/grafana/bin/grafana": PROGRAM, "/DEBIAN/postinst": POSTINST}
    files |= {f"/lib/systemd/system/{UNIT}": VENDOR_UNIT, "/etc/grafana/grafana.ini": "[server]\n"}
    # Grafana's own needs packages that no other role brings; this one comes from the mirror's directory.
    repository.add(NEEDED, "1.0", files={f"/usr/share/{NEEDED}/font": "a font\n"})
    repository.add("grafana", VERSION, depends=NEEDED, files=files)
    key = Key()
    repository.publish(key)
    key.forget()
    return repository


@pytest.fixture(scope="module")
def server(host: SiteHost, repository: Repository) -> Iterator[Server]:
    """The package on the lab's network."""
    server = Server(repository.directory, host.environment, "10.77.0.1")
    yield server
    server.close()


@pytest.fixture(scope="module")
def lock(host: SiteHost, repository: Repository, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lock of a mirror on the host, with the one package that ours depends on."""
    directory = tmp_path_factory.mktemp("mirror")
    file = repository.directory / f"{NEEDED}_1.0_all.deb"
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    control = subprocess.run(["dpkg-deb", "--field", file], check=True, capture_output=True, text=True).stdout.rstrip()
    index = f"{control}\nFilename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {sha256}\n"
    sums = f"{sha256}  {file.name}\n{hashlib.sha256(index.encode()).hexdigest()}  Packages\n"
    (directory / "debian.sha256").write_text(sums)
    (repository.directory / "index-of-the-mirror").write_text(index)
    fetch = f"curl -sf -o {file.name} {server.url}/{file.name} && curl -sf -o Packages {server.url}/index-of-the-mirror"
    host.shell(f"mkdir -p {MIRROR} && cd {MIRROR} && {fetch}")
    return directory / "debian.sha256"


@pytest.fixture
def provision(host: SiteHost, repository: Repository, server: Server, lock: Path, tmp_path: Path):
    """Run the role, with everything shown that can be."""
    package = f"grafana_{VERSION}_all.deb"
    sha256 = hashlib.sha256((repository.directory / package).read_bytes()).hexdigest()

    def run(*arguments: str, password: str = FIRST, status: int | None = 0, **variables: object) -> Run:
        values = {"grafana_enabled": True, "grafana_package": f"{server.url}/{package}", "grafana_version": VERSION}
        values |= {"grafana_package_sha256": sha256, "grafana_admin_password": password}
        values |= {"sglang_host_debian_mirror": MIRROR, "sglang_host_debian_lock": str(lock), **variables}
        (tmp_path / "variables.json").write_text(json.dumps(values))
        settings = ("-e", f"@{tmp_path}/variables.json", "--diff", "-vvv")
        done = host.play("site.yml", "--tags", "grafana", *settings, *arguments, status=status)
        assert FIRST not in done.output
        assert SECOND not in done.output
        return done

    return run


def login(host: SiteHost, password: str) -> str:
    """Return the status that the admin gets."""
    return host.shell(f"curl -s -o /dev/null -w '%{{http_code}}' -u 'admin:{password}' http://127.0.0.1:3000/api/user")


def test_another_package_is_refused(provision, host: SiteHost, fresh: dict) -> None:
    run = provision(status=None, grafana_package_sha256="0" * 64)
    assert run.status != 0
    assert f"did not match {'0' * 64}; it was" in " ".join(run.output.split()), run.output[-3000:]
    assert host.shell("dpkg-query -W grafana 2>/dev/null || true") == ""
    host.shell("systemctl unmask --runtime grafana-server.service")
    assert set(difference(fresh, host.snapshot())) == set()


def test_check_mode_installs_nothing(provision, host: SiteHost, fresh: dict) -> None:
    assert provision("--check").changed > 3
    assert set(difference(fresh, host.snapshot())) == set()


def test_the_pinned_package_serves_on_loopback(provision, host: SiteHost) -> None:
    provision()
    assert host.shell("dpkg-query -W -f '${Version}' grafana") == VERSION
    assert host.shell(f"cat /usr/share/{NEEDED}/font") == "a font"
    assert host.shell(f"systemctl is-active {UNIT}") == "active"
    assert host.shell("ss -ltnH 'sport = :3000' | awk '{print $4}'") == "127.0.0.1:3000"
    assert host.shell("ps -o user= -p " + str(host.main_pid(UNIT))) == "grafana"
    assert (login(host, FIRST), login(host, "wrong")) == ("200", "401")


def test_the_password_is_roots_and_shows_nowhere(host: SiteHost) -> None:
    assert host.shell("stat -c '%U %a' /etc/grafana/admin-password") == "root 400"
    seen = host.shell(f"systemctl show {UNIT}; systemctl cat {UNIT}; ps -eo args; journalctl --no-pager")
    seen += host.shell(f"tr '\\0' '\\n' < /proc/{host.main_pid(UNIT)}/environ; cat /etc/grafana/sglang.ini")
    assert "GF_SECURITY_ADMIN_PASSWORD__FILE" in seen
    assert FIRST not in seen


def test_the_dashboard_is_provisioned_and_read_only(host: SiteHost) -> None:
    shown = host.shell("cat /etc/grafana/sglang/json/kv-cache.json")
    assert json.loads(shown) == json.loads((CHECKOUT / "grafana/dashboards/kv-cache.json").read_text())
    assert json.loads(shown)["editable"] is False
    assert "allowUiUpdates: false" in host.shell("cat /etc/grafana/sglang/dashboards/sglang.yml")
    assert host.shell("find /etc/grafana/sglang -writable ! -user root") == ""
    user = "runuser -u grafana -- sh -c 'touch /etc/grafana/sglang/json/x 2>/dev/null && echo written || echo refused'"
    assert host.shell(user) == "refused"


def test_a_second_run_changes_nothing(provision, host: SiteHost) -> None:
    pid = host.main_pid(UNIT)
    run = provision()
    assert (run.changed, run.changed_tasks()) == (0, [])
    assert host.main_pid(UNIT) == pid


def test_another_password_replaces_the_one_in_the_database(provision, host: SiteHost) -> None:
    provision(password=SECOND)
    assert (login(host, FIRST), login(host, SECOND)) == ("401", "200")
    assert SECOND not in host.shell("ps -eo args; journalctl --no-pager")


def test_uninstall_leaves_the_host_as_it_was(host: SiteHost, fresh: dict) -> None:
    host.play("playbooks/uninstall.yml", "-e", "uninstall_models=true")
    host.shell(f"rm -r {MIRROR}")
    left = difference(fresh, host.snapshot())
    # The package's own script made them, and no package removes its user.
    users = {name: [line for line in lines if not line.startswith("+grafana:")] for name, lines in left.items()}
    assert {name: lines for name, lines in users.items() if lines} == {}
