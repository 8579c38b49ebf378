"""An index from its URL."""

from __future__ import annotations

from pathlib import Path

from headrace.kvcache.index.base import Index
from headrace.kvcache.index.redis import RedisIndex
from headrace.kvcache.index.sqlite import DEFAULT_CACHED_ROWS, SqliteIndex

SQLITE_FILE = "index.sqlite"
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class IndexUrlError(ValueError):
    """The setting is neither `sqlite`, nor sqlite:///FILE, nor a URL of Redis."""


def is_redis(url: str) -> bool:
    """Whether it is the address of a Redis server, which several processes can share."""
    return url.startswith(_REDIS_SCHEMES)


def open_index(url: str, directory: Path, name: str, *, cached_rows: int = DEFAULT_CACHED_ROWS) -> Index:
    """The index that a store uses.

    url        `sqlite` (a file in `directory`), `sqlite:///absolute/file`, `redis://host:port/db`,
               `rediss://user:password@host:port/db?ssl_ca_certs=FILE`, `unix:///socket?db=0`
    directory  the machine's own folder of this store; must be a local disk for SQLite, never a network mount
    name       which store: stores that share files share a name, others that share a server must not

    A Redis server need not be up: calls raise IndexUnavailable until it is.
    """
    if url == "sqlite":
        return SqliteIndex(directory / SQLITE_FILE, cached_rows=cached_rows)
    if url.startswith("sqlite:///"):
        return SqliteIndex(Path(url.removeprefix("sqlite://")), cached_rows=cached_rows)
    if is_redis(url):
        return RedisIndex(url, name)
    scheme = url.split(":", 1)[0]
    raise IndexUrlError(
        f"index `{scheme}` is unknown; use sqlite, redis://host:port or rediss://user:password@host:port"
    )
