"""Version with a content hash, computed from the package's own files.

The same function runs when the wheel is built and when the package is imported, so an installed copy whose files were
edited reports another version than its metadata (see ``env_report``). Standard library only: the build reads this file
without importing the package.
"""

import hashlib
from pathlib import Path

RELEASE = "0.1.0"


def content_hash(root: Path) -> str:
    """First 8 hex digits of the SHA-256 over names and bytes of all ``*.py`` and ``*.json`` files under ``root``."""
    digest = hashlib.sha256()
    files = [p for p in root.rglob("*") if p.suffix in (".py", ".json") and p.is_file()]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()[:8]


__version__ = f"{RELEASE}+{content_hash(Path(__file__).resolve().parent)}"
