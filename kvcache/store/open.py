"""A store from its URL (settings `cache.store` and `cache.index`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from headrace.kvcache.cache_events import EventSink, ignore_events
from headrace.kvcache.index.base import Index, IndexUnavailable
from headrace.kvcache.index.open import IndexUrlError, open_index
from headrace.kvcache.store.base import Store, StoreError, WallClock
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.seaweedfs.scan import OpenVolumeFiles
from headrace.kvcache.store.seaweedfs.settings import SCHEME, TLS_SCHEME, SeaweedSettings, parse_url
from headrace.kvcache.store.seaweedfs.store import SeaweedStore
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import MIB, Liveness, SegmentSettings
from headrace.kvcache.store.threefs.abi import DEFAULT_LIBRARY
from headrace.kvcache.store.threefs.layer import ThreeFsLayer
from headrace.kvcache.store.threefs.settings import ThreeFsSettings

_ERASURE_POLL_S = 1.0
"""On 3FS a look at the log of erasures is a round trip; the rows of what was erased leave the shared index at once."""


@dataclass(frozen=True)
class StoreSettings:
    """Where a process keeps its store."""

    url: str
    """`file:///directory` (a local disk or a mounted POSIX file system), `3fs:///mount/directory` (with
    `?lib=/path/to/libhf3fs_api_shared.so` where the loader does not find it), `seaweedfs://host:port,…`,
    `seaweedfs+tls://host:port,…?ca=FILE&cert=FILE&key=FILE`."""
    index: str = "sqlite"
    """`sqlite`, `sqlite:///file`, `redis://…`, `rediss://…`."""
    local_directory: str = ""
    """This machine's own folder for an SQLite index; empty: the store's directory, which must then be a local disk."""
    name: str = "store"
    """Stores that share files share a name, others that share an index server must not."""
    capacity_bytes: int = 0
    """0: no limit but the disk."""
    tenant_bytes: int = 0
    queue_bytes: int = 256 * MIB
    read_buffer_bytes: int = 256 * MIB
    read_threads: int = 8
    segment_bytes: int = 0
    """Of the largest segment; 0: 256 MiB. Where the capacity or the disk is small segments are smaller."""
    node: str = ""
    """Name of this machine in segment names; empty: its host name."""
    boot: str = ""
    """Incarnation of this process, hexadecimal; empty: a random one."""


def open_store(
    settings: StoreSettings,
    *,
    events: EventSink = ignore_events,
    wall: WallClock = time.time,
    liveness: Liveness | None = None,
    volume_files: OpenVolumeFiles | None = None,
) -> Store:
    """Open the store that the settings name; the caller closes it. StoreError, which says what to do, if it cannot.

    `volume_files` (services/worker/tier/weed_volumes.py) lets a SeaweedFS store list its volumes, without which it
    cannot refill a lost index. Other stores do not use it."""
    scheme, separator, rest = settings.url.partition("://")
    if not separator or not rest:
        raise StoreError(f"store {settings.url!r} is no URL; use file:///dir, 3fs:///mount/dir, seaweedfs://host:port")
    if scheme == "file":
        return _open_segments(settings, Path(rest), events, wall, liveness)
    if scheme == "3fs":
        return _open_three_fs(settings, rest, events, wall, liveness)
    if scheme in (SCHEME, TLS_SCHEME):
        return _open_seaweed(settings, events, wall, volume_files)
    raise StoreError(f"store scheme {scheme!r} is unknown; use file:///dir, 3fs:///mount/dir or seaweedfs://host:port")


def segment_settings(settings: StoreSettings) -> SegmentSettings:
    """What the segment engine is told, on a local disk and on 3FS alike."""
    segments = SegmentSettings(
        segment_bytes=settings.segment_bytes or SegmentSettings.segment_bytes,
        queue_bytes=settings.queue_bytes,
        read_buffer_bytes=settings.read_buffer_bytes,
        read_threads=settings.read_threads,
        capacity_bytes=settings.capacity_bytes,
        tenant_bytes=settings.tenant_bytes,
    )
    return replace(segments, node=settings.node or segments.node, boot=settings.boot or segments.boot)


def store_index(settings: StoreSettings, directory: Path) -> Index:
    """The index beside a store whose own folder is `directory`."""
    try:
        return open_index(settings.index, Path(settings.local_directory or directory), settings.name)
    except IndexUrlError as error:
        raise StoreError(str(error)) from error
    except IndexUnavailable as error:
        raise StoreError(f"the store's index cannot be used: {error}; make it writable, or name another") from error


def _open_seaweed(
    settings: StoreSettings, events: EventSink, wall: WallClock, volume_files: OpenVolumeFiles | None
) -> Store:
    if settings.index == "sqlite" and not settings.local_directory:
        raise StoreError("a SeaweedFS store keeps no index of its own: set index to redis://…, or local_directory")
    if settings.capacity_bytes or settings.tenant_bytes:
        raise StoreError(
            "a SeaweedFS store enforces no quotas: set capacity and tenant quota to 0, and limit its volumes"
        )
    masters, tls = parse_url(settings.url)
    weed = SeaweedSettings(
        masters,
        tls=tls,
        collection=settings.name,
        queue_bytes=settings.queue_bytes,
        readers=settings.read_threads,
        read_bytes=settings.read_buffer_bytes,
    )
    index = store_index(settings, Path(settings.local_directory))
    files = volume_files(tls) if volume_files is not None else None
    return SeaweedStore(weed, index, files=files, events=events, wall=wall)


def _open_three_fs(
    settings: StoreSettings, rest: str, events: EventSink, wall: WallClock, liveness: Liveness | None
) -> Store:
    path, _, query = rest.partition("?")  # by hand: urlsplit takes no scheme that begins with a digit
    directory = unquote(path)
    options = dict(parse_qsl(query, keep_blank_values=True))
    library = options.pop("lib", DEFAULT_LIBRARY)
    if options or not directory.startswith("/"):
        raise StoreError(f"store {settings.url!r} must be 3fs:///mount/directory, with ?lib=/path/to/library at most")
    if settings.index == "sqlite" and not settings.local_directory:
        raise StoreError("a store on 3FS keeps its index elsewhere: set index to redis://…, or local_directory")
    segments = replace(segment_settings(settings), erasure_poll_s=_ERASURE_POLL_S)
    index = store_index(settings, Path(settings.local_directory or directory))
    try:
        files = ThreeFsLayer(directory, ThreeFsSettings(library=library), owner=segments.writer, alive=liveness)
        try:
            # Its locks ask for the liveness of owners on other hosts; of this host's they know better.
            return SegmentStore(files, index, segments, events=events, wall=wall)
        except (OSError, StoreError):
            files.close()
            raise
    except OSError as error:
        index.close()
        raise StoreError(f"3FS directory {directory} cannot be used: {error}") from error
    except StoreError:
        index.close()
        raise


def _open_segments(
    settings: StoreSettings, directory: Path, events: EventSink, wall: WallClock, liveness: Liveness | None
) -> Store:
    if not directory.is_absolute():
        raise StoreError(f"store {settings.url!r} needs an absolute path: file:///var/lib/headrace/store")
    try:
        files = PosixFileLayer(directory)
    except OSError as error:
        raise StoreError(f"store directory {directory} cannot be made: {error}; use another") from error
    index = store_index(settings, directory)
    try:
        return SegmentStore(files, index, segment_settings(settings), events=events, wall=wall, liveness=liveness)
    except OSError as error:
        index.close()
        raise StoreError(f"store directory {directory} cannot be used: {error}") from error
    except StoreError:
        index.close()
        raise
