# SPDX-License-Identifier: GPL-3.0-or-later
"""engine/debian.py with the machine's real apt and a small archive of packages of our own."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("debian", ROOT / "engine/debian.py")
debian = importlib.util.module_from_spec(spec)
spec.loader.exec_module(debian)


class Archive:
    """An archive, apt's configuration for it, a mirror of it, and the lock of the mirror."""

    def __init__(self, directory: Path) -> None:
        self.packages, self.mirror, self.lock = directory / "archive", directory / "mirror", directory / "lock.sha256"
        self.packages.mkdir()
        (directory / "archive.list").write_text(f"deb [trusted=yes] file:{self.packages} ./\n")
        self.config = directory / "apt.conf"
        self.config.write_text(f'Dir::Etc::SourceList "{directory}/archive.list";\nDir::Etc::SourceParts "-";\n')
        (directory / "stack.yml").write_text("debian: {packages: {server: the reason}}\n")
        self.stack = directory / "stack.yml"

    def build(self, file: Path, name: str, version: str, depends: str = "") -> None:
        """Build a package into a file."""
        tree = self.packages.parent / "tree"
        (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: Tests <tests@example>\n"
            + (f"Depends: {depends}\n" if depends else "")
            + f"Description: stands for {name}\n"
        )
        build = ["dpkg-deb", "--root-owner-group", "--build", tree, file]
        subprocess.run(build, check=True, capture_output=True)

    def publish(self, **versions: str) -> None:
        """Have the archive hold these packages and no others; a server depends on the library."""
        for file in self.packages.iterdir():
            file.unlink()
        for name, version in versions.items():
            file = self.packages / f"{name}_{version.replace(':', '%3a')}_all.deb"
            self.build(file, name, version, "library" if name == "server" else "")
        index = subprocess.run(["apt-ftparchive", "packages", "."], cwd=self.packages, check=True, capture_output=True)
        (self.packages / "Packages").write_bytes(index.stdout)

    def files(self) -> list[str]:
        return sorted(file.name for file in self.mirror.iterdir())


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Archive:
    archive = Archive(tmp_path)
    archive.publish(server="1:2.0-1", library="1.0")
    monkeypatch.setenv("APT_CONFIG", str(archive.config))
    monkeypatch.setattr(debian, "STACK", archive.stack)
    return archive


@pytest.fixture
def run(archive, monkeypatch, capsys):
    """Run the program and return what it printed."""

    def run(*words: str) -> str:
        command = ["debian.py", str(archive.mirror), "--lock", str(archive.lock), *words]
        monkeypatch.setattr(sys, "argv", command)
        debian.main()
        return capsys.readouterr().out

    return run


def test_an_update_locks_packages_with_what_they_depend_on(archive, run):
    assert "2 packages" in run("--update")
    assert archive.files() == ["Packages", "library_1.0_all.deb", "server_1%3a2.0-1_all.deb"]
    assert sorted(debian.read_lock(archive.lock.read_text())) == archive.files()
    check = ["sha256sum", "--check", "--strict", "--quiet", archive.lock]
    assert subprocess.run(check, cwd=archive.mirror, check=False).returncode == 0
    before = archive.lock.read_text()
    assert "; 0 fetched" in run("--update")
    assert archive.lock.read_text() == before


def test_what_is_there_is_not_fetched_again_and_what_is_missing_is(archive, run):
    run("--update")
    times = {file.name: file.stat().st_mtime_ns for file in archive.mirror.iterdir()}
    assert "; 0 fetched" in run()
    (archive.mirror / "library_1.0_all.deb").unlink()
    (archive.mirror / "Packages").unlink()
    assert "; 1 fetched" in run()
    assert archive.files() == sorted(times)
    assert (archive.mirror / "server_1%3a2.0-1_all.deb").stat().st_mtime_ns == times["server_1%3a2.0-1_all.deb"]


def test_apt_installs_from_the_index(archive, run, tmp_path):
    run("--update")
    (tmp_path / "archive.list").write_text(f"deb [trusted=yes] file:{archive.mirror} ./\n")
    for file in archive.packages.iterdir():
        file.unlink()
    (tmp_path / "scratch").mkdir()
    done = debian.Apt(tmp_path / "scratch").run("--simulate", "install", "server")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^Inst (\S+) \((\S+)", done.stdout, re.MULTILINE) == [("library", "1.0"), ("server", "1:2.0-1")]


def test_another_file_than_the_locks_is_refused_and_kept(archive, run):
    run("--update")
    file = archive.mirror / "library_1.0_all.deb"
    wanted = debian.sha256(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SystemExit) as refused:
        run()
    assert str(refused.value).startswith(f"{file}: sha256 is {debian.sha256(file)}, wanted {wanted}. ")
    assert f"Next: rm {file}, then" in str(refused.value)


def test_an_archive_with_another_file_of_that_name_is_refused(archive, run):
    run("--update")
    (archive.mirror / "library_1.0_all.deb").unlink()
    lock = archive.lock.read_text()
    archive.lock.write_text(re.sub(r"[0-9a-f]{64}(?=  library)", "0" * 64, lock))
    with pytest.raises(SystemExit, match=r"1 packages could not be had, first library_1.0_all.deb; wanted: all of"):
        run()
    assert not (archive.mirror / "library_1.0_all.deb").exists()


def test_a_version_that_the_archive_dropped_is_explained_and_an_update_takes_the_new_one(archive, run):
    run("--update")
    (archive.mirror / "server_1%3a2.0-1_all.deb").unlink()
    archive.publish(server="1:2.0-2", library="1.0")
    lock = archive.lock.read_text()
    with pytest.raises(
        SystemExit, match=r"server_1%3a2.0-1_all.deb; wanted(?s:.*)An archive drops a version.*--update"
    ):
        run()
    assert archive.lock.read_text() == lock
    run("--update")
    assert "server_1%3a2.0-2_all.deb" in debian.read_lock(archive.lock.read_text())


def test_without_a_lock_the_next_command_is_named(run):
    with pytest.raises(SystemExit, match=r"has no package; wanted: a lock\. Next: the same command with --update"):
        run()


@pytest.fixture
def grafana(archive, tmp_path) -> Path:
    """A package from elsewhere that depends on one of the lock and on one that is not in it."""
    file = tmp_path / "grafana.deb"
    archive.build(file, "grafana", "12.3.1", "library, fonts (>= 2.0) | other-fonts, server:any")
    return file


def test_a_package_from_elsewhere_without_what_it_depends_on_is_refused(archive, run, grafana):
    run("--update")
    lock = archive.lock.read_text()
    with pytest.raises(SystemExit) as refused:
        run("--for", str(grafana))
    told = str(refused.value)
    assert told.startswith(
        f"{grafana} depends on fonts or other-fonts, which {archive.lock} does not have; wanted: all"
    )
    assert f"--update --for {grafana}, review FILE, set sglang_host_debian_lock: FILE." in told
    assert archive.lock.read_text() == lock


def test_an_update_locks_what_a_package_from_elsewhere_depends_on(archive, run, grafana):
    archive.publish(server="1:2.0-1", library="1.0", fonts="2.1")
    run("--update", "--for", str(grafana))
    assert "fonts_2.1_all.deb" in debian.read_lock(archive.lock.read_text())
    assert "; 0 fetched" in run("--for", str(grafana))


def test_a_file_that_is_no_package_is_refused(run, tmp_path):
    (tmp_path / "grafana.deb").write_text("<html>not found</html>")
    with pytest.raises(SystemExit, match=r"grafana.deb is no Debian package .*; wanted: one. Next: fetch it again"):
        run("--for", str(tmp_path / "grafana.deb"))


def test_what_another_package_provides_is_not_lacking():
    needed = debian.alternatives("adduser, libc6 (>= 2.34), fontconfig-config | fonts, mail-transport-agent:any")
    assert needed == [["adduser"], ["libc6"], ["fontconfig-config", "fonts"], ["mail-transport-agent"]]
    index = "Package: adduser\n\nPackage: libc6\n\nPackage: exim\nProvides: mail (= 1), mail-transport-agent\n"
    assert debian.lacking(needed, index) == [["fontconfig-config", "fonts"]]


def test_a_source_is_looked_at_in_place_of_the_machines(archive, run, tmp_path):
    """Whatever its keyring: the lock's hashes vouch for what is fetched. A lock is written of a signed archive only."""
    source = ("--source", f"deb [signed-by={tmp_path}/none.gpg] file:{archive.packages} ./")
    archive.config.write_text(f'Dir::Etc::SourceList "{tmp_path}/none.list";\nDir::Etc::SourceParts "-";\n')
    with pytest.raises(SystemExit, match=r"apt-get can't resolve server:(?s:.*)Nothing was written"):
        run("--update", "--release", "noble", *source)
    trusted = source[1].replace(f"signed-by={tmp_path}/none.gpg", "trusted=yes")
    with pytest.raises(SystemExit, match=r"does not name the hosts' release; wanted: (?s:.*)or --release NAME"):
        run("--update", "--source", trusted)
    run("--update", "--release", "noble", "--source", trusted)
    (archive.mirror / "library_1.0_all.deb").unlink()
    assert "; 1 fetched" in run(*source)
    (archive.mirror / "library_1.0_all.deb").unlink()
    archive.lock.write_text(re.sub(r"[0-9a-f]{64}(?=  library)", "0" * 64, archive.lock.read_text()))
    with pytest.raises(SystemExit, match=r"library_1\.0_all\.deb; wanted: all of"):
        run(*source)


def test_packages_that_are_named_take_the_place_of_the_stacks(archive, run):
    run("--update", "--package", "library=1.0")
    assert archive.files() == ["Packages", "library_1.0_all.deb"]
    with pytest.raises(SystemExit):
        run("--package", "library=1.0")


def test_a_source_that_is_none_is_refused(archive, run):
    with pytest.raises(SystemExit, match=r"--source is 'trixie'; wanted: deb \[OPTIONS\] URL SUITE COMPONENT"):
        run("--update", "--source", "trixie")
    assert not archive.lock.exists()


def test_a_lock_names_the_release_of_the_machine_that_wrote_it(run, archive):
    run("--update")
    assert f"# Release: {debian.release_of([])}\n" in archive.lock.read_text()


@pytest.mark.parametrize(
    ("suite", "release"),
    [("trixie", "trixie"), ("noble-updates", "noble"), ("bookworm-security", "bookworm"), ("stable", ""), ("/", "")],
)
def test_the_first_source_names_the_release(suite, release):
    assert debian.release_of([f"deb [arch=amd64] file:/srv {suite} main", "deb file:/srv other main"]) == release


@pytest.mark.parametrize("words", [(), ("--update",)])
def test_a_lock_of_another_release_is_left_alone(run, archive, words):
    run("--update")
    text = archive.lock.read_text().replace(f"# Release: {debian.release_of([])}", "# Release: other")
    archive.lock.write_text(text)
    with pytest.raises(SystemExit, match=r"is for other, and the packages would come from \w+; wanted: --source lines"):
        run(*words)
    assert archive.lock.read_text() == text


def test_a_lock_may_lie_in_a_new_directory(run, archive, tmp_path):
    archive.lock = tmp_path / "files/driver.sha256"
    run("--update")
    assert archive.lock.is_file()
