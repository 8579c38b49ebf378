"""Where a segment lies: `v1/<namespace hex>/<class>/<expiry bucket>/<node>-<boot>-<seq>.seg`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.kvcache.entries import RetentionClass

ROOT = "v1"
SUFFIX = ".seg"
SIDECAR_SUFFIX = ".idx"
GONE_SUFFIX = ".gone"
"""A segment that is about to be unlinked."""
LOCKS = "writers"
"""Directory of the lock files of living writers."""

_CLASSES = {retention.name.lower(): retention for retention in RetentionClass}
_WRITER = re.compile(r"[A-Za-z0-9_.]+-[0-9a-f]+")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.]")


def node_name(host: str) -> str:
    """A host's name as it may stand in a file name."""
    return _UNSAFE.sub("_", host) or "node"


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """What expires together."""

    namespace: bytes
    retention: RetentionClass
    end: int
    """Unix second of its end; 0: never."""

    @property
    def name(self) -> str:
        """As events, stats and operators write it."""
        return f"{self.namespace.hex()}/{self.retention.name.lower()}/{self.end}"

    @property
    def directory(self) -> str:
        return f"{ROOT}/{self.name}"

    @staticmethod
    def parse(name: str) -> Bucket | None:
        """The bucket of that name, or None if it is none."""
        parts = name.split("/")
        if len(parts) != 3 or parts[1] not in _CLASSES or not parts[2].isdecimal():
            return None
        try:
            namespace = bytes.fromhex(parts[0])
        except ValueError:
            return None
        return Bucket(namespace, _CLASSES[parts[1]], int(parts[2])) if len(namespace) == 32 else None


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """One segment file."""

    bucket: Bucket
    writer: str
    """`<node>-<boot>`."""
    number: int

    @property
    def path(self) -> str:
        return f"{self.bucket.directory}/{self.writer}-{self.number}{SUFFIX}"

    @property
    def sidecar(self) -> str:
        return f"{self.bucket.directory}/{self.writer}-{self.number}{SIDECAR_SUFFIX}"

    @staticmethod
    def parse(path: str) -> SegmentName | None:
        """The segment at that path, or None if the path is not one of a segment."""
        if not path.startswith(f"{ROOT}/") or not path.endswith(SUFFIX):
            return None
        directory, _, file = path[len(ROOT) + 1 : -len(SUFFIX)].rpartition("/")
        bucket = Bucket.parse(directory)
        writer, _, number = file.rpartition("-")
        if bucket is None or not number.isdecimal() or not _WRITER.fullmatch(writer):
            return None
        return SegmentName(bucket, writer, int(number))


def bucket_name(group: str) -> str:
    """Bucket of an index row's group, which is a segment's path."""
    return group[len(ROOT) + 1 :].rpartition("/")[0]
