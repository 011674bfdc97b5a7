"""The version follows the content, and nothing else."""

import shutil
from pathlib import Path

import dsv4_sm120
from dsv4_sm120 import version

PACKAGE = Path(version.__file__).parent


def test_same_content_same_hash(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    assert version.content_hash(copy) == version.content_hash(PACKAGE)
    assert dsv4_sm120.__version__ == f"{version.RELEASE}+{version.content_hash(copy)}"


def test_any_change_changes_the_hash(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    before = version.content_hash(copy)
    config = next(copy.rglob("decode.sm_120.json"))
    config.write_text(config.read_text() + "\n")
    after = version.content_hash(copy)
    assert after != before
    config.rename(config.with_name("decode.sm_121.json"))
    assert version.content_hash(copy) not in (before, after)
