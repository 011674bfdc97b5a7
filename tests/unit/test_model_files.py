# SPDX-License-Identifier: GPL-3.0-or-later
"""A model's files: what a manifest promises is there, also after a fetch that was cut short many times."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ops import model_files
from ops.model_files import COMPLETE, UNDER_WAY, File, ModelFilesError, Seen, Store, files_of

ROOT = Path(__file__).parents[2]
CONTENT = {
    "config.json": b'{"model_type": "llama"}',
    "empty.txt": b"",
    "model-00001-of-00002.safetensors": os.urandom(3_000_001),
    "model-00002-of-00002.safetensors": os.urandom(2_500_000),
    "inference/with space.txt": b"x",
}
CONTENT = {name.replace(" ", "_"): text for name, text in CONTENT.items()}


def entry(text: bytes) -> dict:
    return {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}


MANIFEST = {"files": {name: entry(text) for name, text in CONTENT.items()}}


class Source(ThreadingHTTPServer):
    """Serves CONTENT below /model. most: bytes of an answer before the connection ends; ranges: whether it has them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/model"
        self.content, self.most, self.ranges, self.asked = dict(CONTENT), 10**9, True, []


class Answer(BaseHTTPRequestHandler):
    server: Source

    def do_GET(self) -> None:
        name = self.path.removeprefix("/model/")
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        self.server.asked.append((name, start))
        if name not in self.server.content:
            self.send_error(404)
            return
        text = self.server.content[name]
        start = start if self.server.ranges else 0
        self.send_response(206 if self.server.ranges else 200)
        if self.server.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(text) - 1}/{len(text)}")
        self.send_header("Content-Length", str(len(text) - start))
        self.end_headers()
        self.wfile.write(text[start:][: self.server.most])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Keep the test's output for the test."""


@pytest.fixture
def source() -> Iterator[Source]:
    server = Source()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with every file."""
    for name, text in CONTENT.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(text)
    return tmp_path / "model"


def store(directory: Path, url: str = "") -> Store:
    return Store(str(directory), files_of(MANIFEST), Seen(str(directory.parent / "seen.json")), url)


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_is_there_is_read_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = store(directory).work(60)
    assert (look.status, look.done, look.fetched) == (COMPLETE, sum(map(len, CONTENT.values())), 0)
    read: list[str] = []
    monkeypatch.setattr(model_files, "sha256_of", lambda path: read.append(path) or "")
    assert store(directory).work(60).status == COMPLETE
    assert read == []


@pytest.mark.parametrize("change", [b"other", CONTENT["config.json"][:-1] + b"X"])
def test_a_file_that_is_another_one_is_named(directory: Path, change: bytes) -> None:
    """By its size, or by its hash, also when it was right before."""
    store(directory).work(60)
    (directory / "config.json").write_bytes(change)
    wanted = "has 5 bytes; the manifest wants 23 bytes" if change == b"other" else r"sha256 is \w+; the manifest wants"
    with pytest.raises(ModelFilesError, match=rf"config.json:? {wanted}"):
        store(directory).work(60)


def test_a_file_that_is_missing_is_named(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert [file.name for file in store(directory).missing()] == ["config.json"]
    with pytest.raises(ModelFilesError, match=r"config.json is not there; the manifest wants 23 bytes"):
        store(directory).work(60)


@pytest.mark.parametrize("ranges", [True, False])
def test_everything_is_fetched(tmp_path: Path, source: Source, ranges: bool) -> None:
    source.ranges = ranges
    look = store(tmp_path / "model", source.url).work(60)
    assert (look.status, look.fetched) == (COMPLETE, sum(map(len, CONTENT.values())))
    assert content(tmp_path / "model") == CONTENT
    assert (tmp_path / "model/config.json").stat().st_mode & 0o777 == 0o644
    source.asked.clear()
    assert store(tmp_path / "model", source.url).work(60).fetched == 0
    assert source.asked == []


def test_a_fetch_goes_on_where_it_was_cut_short(tmp_path: Path, source: Source) -> None:
    """By the source, which ends each answer early, and by the clock; nothing is sent twice."""
    source.most = 700_000
    looks = []
    while not looks or looks[-1].status == UNDER_WAY:
        looks.append(store(tmp_path / "model", source.url).work(0))
        assert len(looks) < 30
    assert content(tmp_path / "model") == CONTENT
    assert sum(look.fetched for look in looks) == sum(map(len, CONTENT.values()))
    assert [look.done for look in looks] == sorted(look.done for look in looks)
    assert re.fullmatch(
        r"0\.00 of 0\.01 GiB, \d+ MB/s, 0m\d\ds left: fetching model-00001-of-00002.safetensors",
        next(look for look in looks if "00001" in look.doing).line(),
    )
    starts = [start for name, start in source.asked if name.startswith("model-00001")]
    assert starts == sorted(set(starts)) and len(starts) > 3


def test_time_ends_a_call_and_not_the_fetch(tmp_path: Path, source: Source) -> None:
    first = store(tmp_path / "model", source.url)
    looks = [first.work(0) for _ in range(3)]
    assert looks[-1].status == UNDER_WAY
    assert not (tmp_path / "model/model-00002-of-00002.safetensors").exists()
    assert store(tmp_path / "model", source.url).work(60).status == COMPLETE


def test_other_data_is_thrown_away(tmp_path: Path, source: Source) -> None:
    source.content["config.json"] = b"x" * len(CONTENT["config.json"])
    with pytest.raises(ModelFilesError, match=r"/model/config.json: sha256 is \w+; the manifest wants"):
        store(tmp_path / "model", source.url).work(60)
    assert content(tmp_path / "model") == {}
    source.content["config.json"] = CONTENT["config.json"]
    assert store(tmp_path / "model", source.url).work(60).status == COMPLETE


def test_a_source_that_gives_nothing_ends_it(tmp_path: Path, source: Source) -> None:
    del source.content["inference/with_space.txt"]
    with pytest.raises(ModelFilesError, match=r"inference/with_space.txt: HTTP Error 404"):
        store(tmp_path / "model", source.url).work(60)
    # What had come stays.
    assert set(content(tmp_path / "model")) == set(CONTENT) - {"inference/with_space.txt"}
    source.content["inference/with_space.txt"] = b""
    with pytest.raises(ModelFilesError, match=r"sends nothing from byte 0 on; wanted: 1 bytes"):
        store(tmp_path / "model", source.url).work(60)


def test_too_little_room_is_said_before_anything_is_fetched(tmp_path: Path, source: Source) -> None:
    huge = Store(str(tmp_path), [File("x", 1 << 60, "0" * 64)], Seen(str(tmp_path / "seen.json")), source.url)
    with pytest.raises(ModelFilesError, match=r"GiB free; wanted: 1073741824.0 GiB for what is missing"):
        huge.work(60)
    assert source.asked == []


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({}, "the manifest has no files"),
        ([], "the manifest has no files"),
        ({"files": {"../x": entry(b"")}}, r"the manifest has the file '../x'"),
        ({"files": {"/etc/x": entry(b"")}}, r"the manifest has the file '/etc/x'"),
        ({"files": {"a/../../x": entry(b"")}}, r"wanted: a name below the model's directory"),
        ({"files": {"x.part": entry(b"")}}, r"the manifest has the file 'x.part'"),
        ({"files": {"x": {"size": 1}}}, r"wanted: size in bytes and sha256"),
        ({"files": {"x": 1}}, r"the manifest has 1 for x"),
        ({"files": {"x": {"size": True, "sha256": "0" * 64}}}, r"wanted: size in bytes and sha256"),
    ],
)
def test_what_is_no_manifest_is_refused(manifest: object, words: str) -> None:
    with pytest.raises(ModelFilesError, match=words):
        files_of(manifest)


def test_a_directory_is_described(directory: Path) -> None:
    (directory / ".gitattributes").write_text("hidden")
    (directory / "half.part").write_text("half")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "module_utils")}
    command = [sys.executable, "-m", "ops.model_files", str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == MANIFEST
    assert sorted(json.loads(done.stdout)["files"]) == sorted(CONTENT)


PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {{name: "{root}/roles/model_store"}}
"""


def play(directory: Path, *options: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run the role on this machine."""
    (directory / "play.yml").write_text(PLAY.format(root=ROOT))
    (directory / "manifest.json").write_text(json.dumps(MANIFEST))
    given = {"model_store_name": "m", "model_store_root": str(directory / "models"), **variables}
    given |= {
        "model_store_manifest": str(directory / "manifest.json"),
        "model_store_state": str(directory / "seen.json"),
    }
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", directory / "play.yml", *options]
    command += ["-e", json.dumps({**given, "ansible_python_interpreter": sys.executable})]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_role_fetches_and_says_how_far_it_is(tmp_path: Path, source: Source) -> None:
    source.most = 700_000
    assert "changed=1" in play(tmp_path, "--check", model_store_url=source.url).stdout
    assert source.asked == []
    done = play(tmp_path, model_store_url=source.url)
    assert "changed=1" in done.stdout, done.stdout + done.stderr
    assert content(tmp_path / "models/m") == CONTENT
    assert "changed=0" in play(tmp_path, model_store_url=source.url).stdout
    (tmp_path / "models/m/config.json").unlink()
    refused = play(tmp_path)
    assert refused.returncode != 0
    assert "models/m/config.json is not there; the manifest wants 23 bytes" in " ".join(refused.stdout.split())


def test_the_module(run_module: types.FunctionType, tmp_path: Path, source: Source) -> None:
    arguments = {
        "path": str(tmp_path / "model"),
        "manifest": MANIFEST,
        "url": source.url,
        "state_path": str(tmp_path / "seen.json"),
    }
    before = run_module("model_files", {**arguments, "max_wait": 0})
    assert (before["status"], sorted(before["missing"])) == (UNDER_WAY, sorted(CONTENT))
    assert source.asked == []
    done = run_module("model_files", arguments)
    assert (done["changed"], done["status"], done["missing"]) == (True, COMPLETE, [])
    again = run_module("model_files", arguments)
    assert (again["changed"], again["status"]) == (False, COMPLETE)
    (tmp_path / "model/config.json").unlink()
    failed = run_module("model_files", {**arguments, "url": ""})
    assert failed["failed"]
    assert "config.json is not there; the manifest wants 23 bytes. next command: ls -l" in failed["msg"]
