"""``model_fp``: one digest of everything that shapes what a model computes (spec/protocol.md, Identity).

SHA-256 of canonical JSON {weights: every safetensors file's name, size and SHA-256 of its contents; config; numeric
mode}. Gigabytes are not hashed again at every start: content digests are kept in a cache file keyed by (device, inode,
size, mtime); a lost or broken cache costs time, never correctness.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.user_cache import cache_directory

_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """One weight file: its name inside the folder, size in bytes, SHA-256 (hex) of its contents."""

    name: str
    size: int
    sha256: str


def model_fingerprint(folder: Path | str, numeric_identity: str, cache: Path | None = None) -> bytes:
    """The 32-byte model_fp of a folder.

    Args:
        folder: Hugging Face model folder.
        numeric_identity: ``ModelSettings.numeric_identity(…)``.
        cache: digest cache file; default ``cache_directory()/digests.json``.

    Raises:
        FileNotFoundError: the folder has no config.json or no safetensors file.
    """
    path = Path(folder)
    files = weight_digests(path, cache)
    if not files:
        raise FileNotFoundError(f"{path} holds no *.safetensors file; fetch or convert the model first")
    identity = {
        "weights": [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in files],
        "config": json.loads((path / "config.json").read_text(encoding="utf-8")),
        "numeric_mode": numeric_identity,
    }
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).digest()


def weight_digests(folder: Path, cache: Path | None = None) -> tuple[FileDigest, ...]:
    """Digests of a folder's safetensors files, by name; contents are read only where the cache does not know them."""
    cache = cache or cache_directory() / "digests.json"
    known = _read_cache(cache)
    learned: dict[str, str] = {}
    digests = []
    for path in sorted(folder.glob("*.safetensors")):
        stat = path.stat()
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        digest = known.get(key)
        if digest is None:
            digest = _sha256(path)
            learned[key] = digest
        digests.append(FileDigest(path.name, stat.st_size, digest))
    if learned:
        _write_cache(cache, _read_cache(cache) | learned)
    return tuple(digests)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read_cache(path: Path) -> dict[str, str]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {
        key: value
        for key, value in stored.items()
        if isinstance(key, str) and isinstance(value, str) and len(value) == 64
    }


def _write_cache(path: Path, entries: dict[str, str]) -> None:
    """Replace the cache whole: readers see the old or the new one. Of two writers the later wins; that costs a hash."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError:
        return  # a read-only home: every start hashes again, nothing else changes
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(entries, file)
    os.replace(temporary, path)
