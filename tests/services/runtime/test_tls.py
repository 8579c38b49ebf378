"""Mutual TLS: who is let in, what each role may call, and files that are exchanged under a running process (L25)."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from headrace.cli.certificates import issue, make_authority
from headrace.services.runtime import errors, peers
from headrace.services.runtime.health import Health
from headrace.services.runtime.metrics import Metrics, MetricsServer
from headrace.services.runtime.peers import METHODS, SERVICES, Peer, PeerRole, may_call
from headrace.services.runtime.rotating import RotatingChannel
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import FrontSettings, ListenSettings, RpcSettings
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.runtime.tls import Tls
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.proto.modules import MODULES

RPC = RpcSettings()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def material(folder: Path, peer: Peer, clock: Clock | None = None, name: str | None = None) -> Tls:
    files = issue(folder, peer, name=name)
    return Tls(files.ca, files.cert, files.key, monotonic=clock or Clock())


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    make_authority(tmp_path / "tls")
    return tmp_path / "tls"


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers everybody, and says who asked."""

    async def CountTokens(self, request: Any, context: Any) -> inference_pb2.CountTokensResponse:
        caller = peers.caller()
        return inference_pb2.CountTokensResponse(prompt_tokens=len(caller.uri) if caller else 0)


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Lets claims that fit the certificate through."""

    async def Renew(self, request: Any, context: Any) -> registry_pb2.RegistryServiceRenewResponse:
        peers.require_claim(request.peer, field="peer")
        return registry_pb2.RegistryServiceRenewResponse()


@asynccontextmanager
async def server(tls: Tls, front: bool = False) -> AsyncIterator[ServiceServer]:
    made = ServiceServer(
        ListenSettings(), RPC, Metrics(), Health(), tls=tls, front=FrontSettings(port=0) if front else None
    )
    services = inference_pb2.DESCRIPTOR.services_by_name, registry_pb2.DESCRIPTOR.services_by_name
    made.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Inference(), services[0]["InferenceService"])
    made.add(registry_pb2_grpc.add_RegistryServiceServicer_to_server, Registry(), services[1]["RegistryService"])
    await made.start()
    try:
        yield made
    finally:
        await made.stop(0)


async def count(channel: grpc.aio.Channel) -> int:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    response = await stub.CountTokens(inference_pb2.CountTokensRequest(), timeout=60)
    return response.prompt_tokens


async def renew(channel: grpc.aio.Channel, replica: str) -> None:
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    request = registry_pb2.RegistryServiceRenewRequest(peer=common_pb2.PeerId(replica_id=replica))
    try:
        await stub.Renew(request, timeout=60)
    except grpc.aio.AioRpcError as failure:
        raise errors.from_rpc_error(failure) from failure


async def test_only_certificates_of_the_authority_come_in(authority: Path, tmp_path: Path) -> None:
    """L25: no certificate, another authority's and plain text get nothing, not even an error of ours."""
    make_authority(tmp_path / "foreign")
    own = material(authority, Peer(PeerRole.ROUTER, "router-0"))
    client = material(authority, Peer(PeerRole.CLIENT))
    foreign = material(tmp_path / "foreign", Peer(PeerRole.CLIENT))
    stranger = Tls(authority / "ca.crt", *foreign.files)
    bare = Tls(authority / "ca.crt", None, None)
    async with server(own) as made:
        async with open_channel(made.address, RPC, tls=client) as channel:
            assert await count(channel) == len("headrace://client")
        for tls in (stranger, bare, None):
            async with open_channel(made.address, RPC, tls=tls) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await count(channel)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(made.address, RPC, tls=foreign) as channel:
            with pytest.raises(grpc.aio.AioRpcError):  # the client believes the server as little
                await count(channel)


async def test_a_role_calls_what_is_its_own_and_claims_what_it_is(authority: Path) -> None:
    """L25: a client's certificate opens InferenceService alone; a worker's only in its own name."""
    async with server(material(authority, Peer(PeerRole.ROUTER))) as made:
        client = open_channel(made.address, RPC, tls=material(authority, Peer(PeerRole.CLIENT)))
        worker = open_channel(made.address, RPC, tls=material(authority, Peer(PeerRole.DECODE, "decode-0")))
        any_prefill = open_channel(made.address, RPC, tls=material(authority, Peer(PeerRole.PREFILL)))
        async with client, worker, any_prefill:
            with pytest.raises(errors.PermissionDenied, match="role client"):
                await renew(client, "decode-0")
            await renew(worker, "decode-0")
            with pytest.raises(errors.PermissionDenied, match="decode-0"):
                await renew(worker, "decode-1")
            await renew(any_prefill, "prefill-7")


async def test_the_front_door_takes_clients_without_a_certificate_to_inference_alone(authority: Path) -> None:
    """L25: by TLS all the same, and the cluster's own calls are closed there."""
    async with server(material(authority, Peer(PeerRole.ROUTER)), front=True) as made:
        bare = Tls(authority / "ca.crt", None, None)
        async with open_channel(made.front_address, RPC, tls=bare) as channel:
            assert await count(channel) == len("headrace://nobody")
            with pytest.raises(errors.Unauthenticated):
                await renew(channel, "decode-0")
        async with open_channel(made.front_address, RPC) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await count(channel)


async def test_certificates_rotate_under_a_running_server_and_channel(authority: Path, tmp_path: Path) -> None:
    """A new authority replaces the old at both ends: a call under way goes on, new ones use the new certificates, and
    the old certificate is worth nothing any more."""
    clock = Clock()
    own = material(authority, Peer(PeerRole.ROUTER), clock, name="own")
    mine = material(authority, Peer(PeerRole.CLIENT), clock, name="mine")
    old = tmp_path / "old"
    old.mkdir()
    for file in ("ca.crt", "mine.crt", "mine.key"):
        (old / file).write_bytes((authority / file).read_bytes())
    async with server(own) as made, open_channel(made.address, RPC, tls=mine) as channel:
        assert isinstance(channel, RotatingChannel)
        await count(channel)
        first = channel.life()
        (authority / "ca.key").unlink()
        make_authority(authority)
        issue(authority, Peer(PeerRole.ROUTER), name="own")
        issue(authority, Peer(PeerRole.CLIENT), name="mine")
        await count(channel)  # nobody has looked at the files yet
        assert channel.life() is first
        clock.now += 2
        await count(channel)
        assert channel.life() is not first
        await asyncio.sleep(0)
        former = Tls(old / "ca.crt", old / "mine.crt", old / "mine.key")
        async with open_channel(made.address, RPC, tls=former) as late:
            with pytest.raises(grpc.aio.AioRpcError):
                await count(late)


async def test_a_former_channel_lives_until_its_last_call(authority: Path) -> None:
    """A rotation disturbs no stream that runs."""
    generation = 1
    ends: list[Any] = []

    class Call:
        def add_done_callback(self, callback: Any) -> None:
            ends.append(callback)

    class Plain:
        closed = False

        def unary_stream(self, *_: Any, **__: Any) -> Any:
            return lambda *_, **__: Call()

        async def close(self, grace: float | None = None) -> None:
            self.closed = True

    made: list[Any] = []

    def make() -> Any:
        made.append(Plain())
        return made[-1]

    channel = RotatingChannel(make, lambda: generation)
    method = channel.unary_stream("/a/b")
    method()
    generation = 2
    method()
    await asyncio.sleep(0)
    assert [one.closed for one in made] == [False, False]
    ends[0](None)
    await asyncio.sleep(0)
    assert [one.closed for one in made] == [True, False]
    await channel.close()
    assert made[1].closed


async def test_a_rotation_while_a_channel_opens_is_not_missed() -> None:
    """A channel with the former certificates never passes for one with the new."""
    in_force = 1

    class Plain:
        def __init__(self, certificates: int) -> None:
            self.certificates = certificates

        async def close(self, grace: float | None = None) -> None:
            pass

    def make() -> Any:
        nonlocal in_force
        made = Plain(in_force)
        in_force = 2
        return made

    channel = RotatingChannel(make, lambda: in_force)
    opened: Any = channel.life().channel
    assert opened.certificates == 2
    await channel.close()


def test_a_rotation_half_done_leaves_the_former_files_in_force(authority: Path) -> None:
    """A certificate whose key has not come yet is not taken; both together are."""
    clock = Clock()
    tls = material(authority, Peer(PeerRole.DECODE), clock, name="own")
    before = tls.current()
    key = (authority / "own.key").read_bytes()
    issue(authority, Peer(PeerRole.DECODE), name="own")
    new_key = (authority / "own.key").read_bytes()
    (authority / "own.key").write_bytes(key)
    clock.now += 2
    assert tls.current() is before
    (authority / "own.key").write_bytes(new_key)
    clock.now += 2
    assert tls.current().key == new_key
    assert tls.generation == before.generation + 1
    assert new_key.decode() not in repr(tls.current())


def test_unusable_files_end_the_start(authority: Path, tmp_path: Path) -> None:
    """With a line that names them."""
    files = issue(authority, Peer(PeerRole.DECODE))
    other = issue(authority, Peer(PeerRole.PREFILL))
    with pytest.raises(SettingsError, match="absent"):
        Tls(tmp_path / "absent", files.cert, files.key)
    with pytest.raises(SettingsError, match="tls"):
        Tls(files.ca, files.cert, other.key)


def test_every_service_of_the_contract_has_its_callers() -> None:
    """A service without a row is closed to all, which would be found late; rows of methods that are gone mislead."""
    services: dict[str, ServiceDescriptor] = {
        service.full_name: service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()
    }
    assert {name for name in SERVICES if name.startswith("headrace")} == set(services)
    for name in METHODS:
        service, _, method = name.partition("/")
        assert method in services[service].methods_by_name
    assert not may_call(PeerRole.OPERATOR, "/headrace.v1.NewService/Call")
    for service in services.values():
        for method in service.methods_by_name:
            client = may_call(PeerRole.CLIENT, f"/{service.full_name}/{method}")
            assert client == (service.full_name == "headrace.v1.InferenceService")


@pytest.mark.parametrize(
    "uris", [(), ("headrace://decode", "headrace://router"), ("headrace://nobody",), ("spiffe://x",)]
)
def test_a_certificate_without_one_role_is_nobody(uris: tuple[str, ...]) -> None:
    with pytest.raises(errors.Unauthenticated):
        peers.peer_of(uris)
    assert peers.peer_of(["headrace://decode/decode-0", "spiffe://x"]) == Peer(PeerRole.DECODE, "decode-0")


def test_metrics_are_for_monitors(authority: Path) -> None:
    """HTTPS; a client's certificate is refused, plain HTTP and no certificate get nothing, a silent caller holds up
    nobody."""
    page = MetricsServer(Metrics(role="decode"), "127.0.0.1", 0, material(authority, Peer(PeerRole.DECODE)))
    try:
        silent = http.client.HTTPConnection(page.host, page.port, timeout=60)
        silent.connect()

        def get(role: PeerRole | None) -> tuple[int, bytes]:
            context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
            if role is not None:
                files = issue(authority, Peer(role))
                context.load_cert_chain(files.cert, files.key)
            connection = http.client.HTTPSConnection("localhost", page.port, context=context, timeout=60)
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            body = response.read()
            connection.close()
            return response.status, body

        status, body = get(PeerRole.MONITOR)
        assert status == 200
        assert b"headrace_info" in body
        assert get(PeerRole.CLIENT) == (403, b"")
        with pytest.raises(OSError, match=r"(?i)certificate|reset|broken|EOF"):
            get(None)
        plain = http.client.HTTPConnection(page.host, page.port, timeout=60)
        plain.connect()
        plain.request("GET", "/metrics")
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.getresponse()
        silent.close()
        plain.close()
    finally:
        page.close()
