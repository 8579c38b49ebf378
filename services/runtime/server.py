"""The gRPC server of a process and the channels to its peers, with the same limits at both ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.services.runtime import logs
from headrace.services.runtime.files import write_whole
from headrace.services.runtime.health import Health
from headrace.services.runtime.intercept import CallGuard, Translate
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.peers import Doorkeeper
from headrace.services.runtime.rotating import RotatingChannel
from headrace.services.runtime.settings import FrontSettings, ListenSettings, RpcSettings
from headrace.services.runtime.tls import Tls

T = TypeVar("T")
_log = logs.get(__name__)


class Described(Protocol):
    """A protobuf service descriptor: `some_pb2.DESCRIPTOR.services_by_name["SomeService"]`."""

    @property
    def full_name(self) -> str: ...

    @property
    def methods_by_name(self) -> Any: ...


class ServiceServer:
    """One grpc.aio server: health, reflection, request ids, typed errors, conservation counters (L11).

    Add servicers, then `start`. `refuse_admission` begins a drain; `stop` closes. `translate` turns exceptions of a
    lower layer into typed errors. With `tls` every caller shows a certificate, whose role says what it may call;
    `front` is one more port, for clients without.
    """

    def __init__(
        self,
        listen: ListenSettings,
        rpc: RpcSettings,
        metrics: Metrics,
        health: Health,
        translate: Translate | None = None,
        tls: Tls | None = None,
        front: FrontSettings | None = None,
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._front = front
        self._guard = CallGuard(metrics, translate, None if tls is None else Doorkeeper())
        self._health = health
        self._names: list[str] = [reflection.SERVICE_NAME]
        self._server = grpc.aio.server(interceptors=[self._guard], options=server_options(rpc))
        self.address = ""
        """host:port that peers use; set by `start`."""
        self.front_address = ""
        """host:port for clients without a certificate; empty without such a port."""
        self.add(
            health_pb2_grpc.add_HealthServicer_to_server,
            health.servicer,
            health_pb2.DESCRIPTOR.services_by_name["Health"],
        )

    def add(
        self,
        adder: Callable[[T, Any], None],
        servicer: T,
        descriptor: Described,
        admits: Collection[str] = (),
    ) -> None:
        """Serve `servicer`. `adder` is the generated add_…Servicer_to_server, `descriptor` names it for reflection.

        `admits` are the methods that bring new work: they are refused once draining (L19), the others go on, as
        running requests need them.
        """
        known = set(descriptor.methods_by_name)
        if not known.issuperset(admits):
            raise ValueError(f"{descriptor.full_name} has no method {sorted(set(admits) - known)}")
        adder(servicer, self._server)
        self._names.append(descriptor.full_name)
        self._guard.admitting.update(f"/{descriptor.full_name}/{name}" for name in admits)

    async def start(self) -> int:
        """Bind and serve; returns the port. Raises OSError when the address is taken."""
        reflection.enable_server_reflection(self._names, self._server)
        await self._health.start()
        at, port = self._bind(self._listen.host, self._listen.port)
        if self._front is not None and self._front.port is not None:
            self.front_address, _ = self._bind(self._front.host, self._front.port, client_certificates=False)
        await self._server.start()
        self.address = self._listen.advertise or at
        if self._listen.address_file is not None:
            write_whole(self._listen.address_file, f"{at}\n".encode(), 0o666)
        if self._front is not None and self._front.address_file is not None and self.front_address:
            write_whole(self._front.address_file, f"{self.front_address}\n".encode(), 0o666)
        _log.info("listening", address=at, advertised=self.address, tls=self._tls is not None)
        return port

    def _bind(self, host: str, port: int, *, client_certificates: bool = True) -> tuple[str, int]:
        """The address (host:port) and port that are bound."""
        bound = f"[{host}]" if ":" in host else host
        try:
            if self._tls is None:
                taken = self._server.add_insecure_port(f"{bound}:{port}")
            else:
                credentials = self._tls.server_credentials(client_certificates=client_certificates)
                taken = self._server.add_secure_port(f"{bound}:{port}", credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {bound}:{port}: {error}") from error
        return f"{bound}:{taken}", taken

    async def refuse_admission(self) -> None:
        """Turn not ready and refuse admitting methods; everything else still works."""
        await self._health.end()
        self._guard.draining = True

    def take_work_again(self) -> None:
        """The end of `refuse_admission`, once the process is ready again."""
        self._guard.draining = False

    async def stop(self, grace: float = 0.5) -> None:
        """Refuse all calls, give running ones `grace` seconds, cancel the rest."""
        await self._server.stop(grace)

    @property
    def draining(self) -> bool:
        """New work is refused. For methods that have something to give back before they refuse."""
        return self._guard.draining

    @property
    def live_calls(self) -> int:
        """Calls being served now, over all methods."""
        return self._guard.live_calls


def server_options(rpc: RpcSettings) -> list[tuple[str, int]]:
    """gRPC core options of a server."""
    return [
        ("grpc.max_send_message_length", int(rpc.max_message_bytes)),
        ("grpc.max_receive_message_length", int(rpc.max_message_bytes)),
        # Two processes must not share a port in silence.
        ("grpc.so_reuseport", 0),
        # Clients ping idle connections (below); the default policy would answer with GOAWAY too_many_pings.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(
    address: str, rpc: RpcSettings, *, idle_pings: bool = True, read_ahead: bool = True, tls: Tls | None = None
) -> grpc.aio.Channel:
    """A channel to `address` (host:port) with the limits of `rpc`; close it when done. Without `tls` it is plain text;
    with it, it shows this process's certificate and follows its rotation.

    `idle_pings` is for servers of ours; others may take pings on a channel without calls for an attack. Without
    `read_ahead` no more than 64 KiB of a stream waits here unread; with it gRPC lets that grow to megabytes, as the
    connection's speed has it, which a channel whose readers may stop must not (L12).

    Dead hosts are noticed within about two keepalive intervals; reconnects back off to 1 s at most, as leases last
    seconds (L8). Environment proxies are never used.
    """
    interval = int(rpc.keepalive_seconds * 1000)
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", int(rpc.max_message_bytes)),
        ("grpc.max_receive_message_length", int(rpc.max_message_bytes)),
        ("grpc.keepalive_time_ms", interval),
        ("grpc.keepalive_timeout_ms", interval),
        ("grpc.keepalive_permit_without_calls", int(idle_pings)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # This bounds one attempt to connect, too: a busy host may need a while for its handshake.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", int(read_ahead)),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name is not None:  # instead of the host that is dialled
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return RotatingChannel(
        lambda: grpc.aio.secure_channel(address, tls.channel_credentials(), options=options), lambda: tls.generation
    )
