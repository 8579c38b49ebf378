"""SeaweedFS's volume servers over gRPC: what HTTP cannot do, listing a volume (kvcache/store/seaweedfs/scan.py)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from headrace.kvcache.store.seaweedfs.cluster import Location
from headrace.kvcache.store.seaweedfs.scan import ListingFailed
from headrace.kvcache.store.seaweedfs.settings import TlsFiles
from headrace.kvcache.store.seaweedfs.volume_format import IndexEntry, blob_size
from headrace.services.worker.tier._weed import volume_server_pb2 as pb
from headrace.services.worker.tier._weed.volume_server_pb2_grpc import VolumeServerStub

_ANY_REVISION = 0xFFFFFFFF
"""A copy need not be of a certain compaction."""
_WHOLE = 1 << 62
_AHEAD = 64
"""Reads under way at a time."""
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WeedVolumes:
    """VolumeFiles over gRPC channels, kept per server. Thread-safe."""

    def __init__(self, tls: TlsFiles | None = None, call_s: float = 10.0) -> None:
        """`tls`: the store's; None is plain. `call_s` bounds one read of a needle, ten times that the copy of an index
        file."""
        self._tls = tls
        self._call_s = call_s
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def index_file(self, location: Location, volume: int, collection: str) -> bytes:
        request = pb.CopyFileRequest(
            volume_id=volume, ext=".idx", compaction_revision=_ANY_REVISION, stop_offset=_WHOLE, collection=collection
        )
        try:
            answers = self._stub(location).CopyFile(request, timeout=10 * self._call_s)
            return b"".join(answer.file_content for answer in answers)
        except grpc.RpcError as error:
            raise ListingFailed(f"{location.grpc} does not list volume {volume}: {error}") from error

    def needles(
        self, location: Location, volume: int, entries: Sequence[IndexEntry], head_bytes: int
    ) -> Iterator[tuple[IndexEntry, bytes]]:
        stub = self._stub(location)
        ahead: deque[tuple[IndexEntry, grpc.Future[pb.ReadNeedleBlobResponse]]] = deque()
        rest = iter(entries)
        try:
            while True:
                while len(ahead) < _AHEAD and (entry := next(rest, None)) is not None:
                    request = pb.ReadNeedleBlobRequest(
                        volume_id=volume,
                        needle_id=entry.number,
                        offset=entry.offset,
                        size=blob_size(entry, head_bytes),
                    )
                    ahead.append((entry, stub.ReadNeedleBlob.future(request, timeout=self._call_s)))
                if not ahead:
                    return
                entry, call = ahead.popleft()
                yield entry, self._blob(call, location, volume)
        finally:
            for _, call in ahead:
                call.cancel()

    @staticmethod
    def _blob(call: grpc.Future[pb.ReadNeedleBlobResponse], location: Location, volume: int) -> bytes:
        try:
            return call.result().needle_blob
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() not in _NO_ANSWER:
                return b""  # this needle alone: it went with a compaction, or the disk does not give it
            raise ListingFailed(f"{location.grpc} does not read volume {volume}: {error}") from error

    def close(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _stub(self, location: Location) -> VolumeServerStub:
        with self._lock:
            channel = self._channels.get(location.grpc)
            if channel is None:
                channel = self._channels[location.grpc] = self._open(location.grpc)
        return VolumeServerStub(channel)

    def _open(self, server: str) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(server)
        ca, cert, key = (Path(name).read_bytes() for name in (self._tls.ca, self._tls.cert, self._tls.key))
        return grpc.secure_channel(server, grpc.ssl_channel_credentials(ca, key, cert))
