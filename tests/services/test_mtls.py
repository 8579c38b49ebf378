"""A cluster of real processes with mutual TLS: every port that it listens on gives a stranger nothing (L25)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import PIL.Image
import psutil
import pytest

from headrace.cli.ask import Answer, Message, chat_prompt, gather
from headrace.cli.certificates import issue, make_authority
from headrace.cli.client import RouterClient, replica_status, typed
from headrace.cli.client_tls import TLS_FOLDER, ClientTls, identity
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make
from headrace.services.router.api_keys import KeyRole, KeysDocument, mint
from headrace.services.router.key_stores import FileKeys
from headrace.services.runtime.errors import HeadraceError, PermissionDenied, Unauthenticated, Unavailable
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.v1 import (
    cache_pb2,
    common_pb2,
    decode_pb2,
    encoder_pb2,
    inference_pb2,
    prefill_pb2,
    registry_pb2,
    transfer_pb2,
)
from tests.proto.modules import MODULES
from tests.services.tiny import BLOCK

METHODS = [
    f"/{service.full_name}/{method}"
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods_by_name
]
PATIENCE_S = 120.0


@dataclass
class Secured:
    cluster: LocalCluster
    foreign: Path
    """Folder of an authority that the cluster does not know."""
    key: str
    """A tenant's API key."""

    @property
    def folder(self) -> Path:
        return self.cluster.run_dir / TLS_FOLDER

    def ports(self) -> dict[int, str]:
        """Every TCP port that any process of the cluster listens on → whose it is."""
        return {
            connection.laddr.port: child.name
            for child in self.cluster.children
            for process in (psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }

    def address(self, name: str) -> str:
        address = self.cluster.child(name).address
        assert address is not None
        return address


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("mtls")
    make_authority(folder / "foreign")
    key, record = mint(KeyRole.TENANT, "acme")
    (folder / "keys.json").write_text(KeysDocument().with_key(record).model_dump_json())
    sets = (
        "front.port=0",
        f"router.keys={folder / 'keys.json'}",
        "load.dtype=float32",
        "load.entry_format=float32",
        f"load.block_tokens={BLOCK}",
        "load.native_kernels=false",
        "cache.min_load_tokens=1",
        "cache.break_even=false",
        "engine.prefix_reuse=true",
        "roles.router.front.address_file=" + str(folder / "front"),
        # As between hosts; the encoder's rows go by shared memory, as they do inside one.
        "roles.prefill.transfer.transport=stream",
    )
    spec = ClusterSpec(
        make("deepseek-v41-tiny", folder, 0),
        {"encoder": 1, "prefill": 2, "decode": 1},
        sets=sets,
        store=str(folder / "store"),
        tls=True,
    )
    with LocalCluster(spec, run_dir=folder / "run") as running:
        yield Secured(running, folder / "foreign", key)


def picture() -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (90, 60), (200, 20, 200)).save(file, format="PNG")
    return file.getvalue()


def ask(address: str, tls: ClientTls | None, key: str, image: bool = False) -> Answer:
    request = inference_pb2.GenerateRequest(
        prompt=chat_prompt([Message("user", "What is a headrace? " * 8, (picture(),) if image else ())]),
        stop=common_pb2.StopParams(max_tokens=3, ignore_eos=True),
    )
    with RouterClient(address, api_key=key, tls=tls) as client:
        return gather(client.generate(request, timeout_s=PATIENCE_S))


def status_of(channel: grpc.Channel, method: str) -> HeadraceError:
    """The error of an empty message to a method; the answers of all of them are errors."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"", timeout=60)
    return typed(caught.value)


def test_requests_are_answered_over_tls_with_rows_by_shared_memory_and_by_stream(secured: Secured) -> None:
    """Every hop of the way: client, router, encoder, prefill, decode, registry, events, host tiers."""
    client = identity(secured.folder, "client")
    assert ask(secured.cluster.router, client, secured.key, image=True).usage is not None

    def wires(name: str) -> set[str]:
        return {one.transport for one in replica_status(secured.address(name), tls=secured.cluster.tls).transports}

    assert wires("encoder-0")
    assert wires("encoder-0") <= {"cma", "shm"}
    assert "stream" in wires("prefill-0") | wires("prefill-1")
    assert wires("prefill-0") | wires("prefill-1") <= {"stream", "cma", "shm"}


def test_every_port_gives_strangers_nothing(secured: Secured) -> None:
    """L25: no certificate, another authority's, plain text: on every port of every process no byte of an answer. UCX
    listens nowhere, as it authenticates nobody."""
    foreign_files = issue(secured.foreign, Peer(PeerRole.DECODE, "decode-0"))
    front = int((secured.cluster.run_dir.parent / "front").read_text().rpartition(":")[2])
    ports = secured.ports()
    # gRPC and metrics of each of five processes, and the front door.
    assert len(ports) == 11
    for port in ports:
        assert _plain(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") is None
        assert _plain(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0") is None
        assert _tls(port, secured.folder / "ca.crt", foreign_files.cert, foreign_files.key) is (port == front)
        assert _tls(port, secured.folder / "ca.crt", None, None) is (port == front)


def test_the_front_door_answers_requests_and_nothing_else(secured: Secured) -> None:
    front = (secured.cluster.run_dir.parent / "front").read_text().strip()
    bare = identity(secured.folder, "")
    assert ask(front, bare, secured.key).usage is not None
    channel = bare.open(front, [])
    with channel:
        for method in METHODS:
            if "InferenceService" not in method:
                assert isinstance(status_of(channel, method), Unauthenticated | HeadraceError)
                assert status_of(channel, method).code in (
                    common_pb2.ERROR_CODE_UNAUTHENTICATED,
                    common_pb2.ERROR_CODE_UNIMPLEMENTED,
                )


def test_a_clients_certificate_opens_inference_alone(secured: Secured) -> None:
    """L25: on every process, every call of the contract."""
    client = identity(secured.folder, "client")
    for child in secured.cluster.children:
        with client.open(secured.address(child.name), []) as channel:
            for method in METHODS:
                if "InferenceService" in method:
                    continue
                error = status_of(channel, method)
                # Unimplemented: the process does not serve it at all.
                assert error.code in (common_pb2.ERROR_CODE_PERMISSION_DENIED, common_pb2.ERROR_CODE_UNIMPLEMENTED), (
                    child.name,
                    method,
                )


def test_a_worker_acts_in_its_own_name(secured: Secured) -> None:
    """A stolen decode certificate cannot join as another replica, nor call what routers call."""
    decode = identity(secured.folder, "decode-0")
    peer = common_pb2.PeerId(replica_id="prefill-0", incarnation="0" * 32)
    register = registry_pb2.RegisterRequest(
        replica=registry_pb2.Replica(peer=peer, role=common_pb2.ROLE_PREFILL, state=registry_pb2.REPLICA_STATE_READY)
    )
    with decode.open(secured.cluster.router, []) as channel:
        call: Any = channel.unary_unary("/headrace.v1.RegistryService/Register")
        with pytest.raises(grpc.RpcError) as caught:
            call(register.SerializeToString(), timeout=60)
        assert isinstance(typed(caught.value), PermissionDenied)
    with decode.open(secured.address("prefill-0"), []) as channel:
        assert isinstance(status_of(channel, "/headrace.v1.PrefillService/Run"), PermissionDenied)
    with decode.open(secured.address("decode-0"), []) as channel:
        assert isinstance(status_of(channel, "/headrace.v1.DecodeService/Commit"), PermissionDenied)


def test_transfer_parameters_that_nobody_signed_are_refused(secured: Secured) -> None:
    """L25: a stolen certificate of the right role is not enough to have something written, sent or ended."""
    landing = common_pb2.TransferHandle(
        transfer_id="t",
        receiver=common_pb2.PeerId(replica_id="decode-0", incarnation="0" * 32),
        checksum=common_pb2.CHECKSUM_KIND_XXH3_64,
        payload=common_pb2.PAYLOAD_KIND_KV,
        time_left_ms=5000,
    )
    agent = common_pb2.TransferAgent(owner=landing.receiver, agent_name="0.x", agent_metadata=b"x")
    agent.owner.replica_id = "prefill-1"
    run = prefill_pb2.RunRequest(
        spec=common_pb2.RequestSpec(id=common_pb2.AttemptId(request_id="r", attempt=1)),
        target=prefill_pb2.DecodeTarget(landing=landing, agent=agent),
    )
    run.spec.router.replica_id = "router-0"
    end = decode_pb2.EndTransferRequest(landing=landing, outcome=decode_pb2.TRANSFER_OUTCOME_QUIET)
    push = encoder_pb2.PushRequest(landing=landing, receiver=agent)
    send = cache_pb2.SendRequest(reader=agent, lease_id="x")
    write = transfer_pb2.WriteRequest(begin=transfer_pb2.WriteBegin(landing=landing))
    write.begin.landing.receiver.incarnation = _incarnation(secured, "decode-0")
    write.begin.sender.replica_id = "prefill-0"
    for role, to, method, message in (
        ("router-0", "prefill-0", "PrefillService/Run", run),
        ("router-0", "decode-0", "DecodeService/EndTransfer", end),
        ("prefill-0", "encoder-0", "EncoderService/Push", push),
        ("prefill-1", "prefill-0", "CachePeerService/Send", send),
        ("prefill-0", "decode-0", "TransferService/Write", write),
    ):
        with identity(secured.folder, role).open(secured.address(to), []) as channel:
            call: Any = channel.unary_stream(f"/headrace.v1.{method}")
            with pytest.raises(grpc.RpcError) as caught:
                list(call(message.SerializeToString(), timeout=10))
        error = typed(caught.value)
        assert isinstance(error, PermissionDenied), (method, error)
        assert "signed" in str(error), (method, error)


def test_rows_are_streamed_by_those_alone_whose_rows_they_are(secured: Secured) -> None:
    """L25: with a certificate of the cluster, but of another role, or in another's name."""
    for role, name in (("router-0", "router-0"), ("client", "x"), ("monitor", "x"), ("prefill-0", "prefill-1")):
        begin = transfer_pb2.WriteBegin(sender=common_pb2.PeerId(replica_id=name))
        with identity(secured.folder, role).open(secured.address("decode-0"), []) as channel:
            call: Any = channel.stream_unary("/headrace.v1.TransferService/Write")
            with pytest.raises(grpc.RpcError) as caught:
                call(iter([transfer_pb2.WriteRequest(begin=begin).SerializeToString()]), timeout=60)
        assert isinstance(typed(caught.value), PermissionDenied), role


def test_certificates_rotate_while_requests_run(secured: Secured) -> None:
    """A new certificate for every process, the launcher and the client: nothing restarts, nothing fails."""
    hosts = ("127.0.0.1", "localhost")
    pids = [child.pid for child in secured.cluster.children]
    before = {name: _serial(secured, name) for name in secured.cluster.spec.names}
    for name in secured.cluster.spec.names:
        issue(secured.folder, Peer(PeerRole(name.rpartition("-")[0]), name), hosts)
    issue(secured.folder, Peer(PeerRole.CLIENT), name="client")
    deadline = time.monotonic() + PATIENCE_S
    while any(_serial(secured, name) == old for name, old in before.items()):
        assert time.monotonic() < deadline, "the new certificates are not served"
        assert ask(secured.cluster.router, identity(secured.folder, "client"), secured.key).usage is not None
    assert ask(secured.cluster.router, identity(secured.folder, "client"), secured.key).usage is not None
    assert [child.pid for child in secured.cluster.children] == pids
    secured.cluster.check()


def test_a_revoked_key_is_refused_by_the_running_router(secured: Secured) -> None:
    """Through the commands: created, used, revoked, UNAUTHENTICATED, and nothing restarts."""
    store = FileKeys(secured.cluster.run_dir.parent / "keys.json")
    key, record = mint(KeyRole.TENANT, "umbrella")
    asyncio.run(store.update(lambda document: document.with_key(record)))
    client = identity(secured.folder, "client")

    def said() -> str:
        with RouterClient(secured.cluster.router, api_key=key, tls=client) as router:
            try:
                router.models()
            except Unauthenticated as error:
                return str(error)
        return "taken"

    def until(words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in said():
            assert time.monotonic() < deadline, f"the router does not say {words!r}"
            time.sleep(0.05)

    until("taken")
    asyncio.run(store.update(lambda document: document.without(record.id, time.time())))
    until("revoked")
    assert ask(secured.cluster.router, client, secured.key).usage is not None


def test_logs_hold_no_key(secured: Secured) -> None:
    """No private key, and no operator's key, in any log."""
    secrets = [line for file in secured.folder.glob("*.key") for line in file.read_text().splitlines()[1:-1]]
    secrets += [secured.cluster._operator_key, secured.key]
    for child in secured.cluster.children:
        text = child.log.read_text(encoding="utf-8", errors="replace")
        assert not [secret for secret in secrets if secret in text]


def test_plain_text_clients_are_told_apart_from_a_dead_cluster(secured: Secured) -> None:
    with pytest.raises(Unavailable):
        ask(secured.cluster.router, None, secured.key)


def _incarnation(secured: Secured, name: str) -> str:
    """Of the running process."""
    return next(one.peer.incarnation for one in secured.cluster.status().members if one.peer.replica_id == name)


def _plain(port: int, opening: bytes) -> bytes | None:
    """What plain text gets: None for nothing but a closed connection or a TLS alert."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.settimeout(10)
        try:
            connection.sendall(opening)
            answer = connection.recv(4096)
        except (ConnectionError, TimeoutError):
            return None
    return None if not answer or answer[0] == 0x15 else answer


def _tls(port: int, ca: Path, cert: Path | None, key: Path | None) -> bool:
    """Whether a handshake leads to a connection on which an HTTP/2 opening or a GET is answered."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    if cert is not None:
        context.load_cert_chain(cert, key)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.settimeout(10)
            # In TLS 1.3 the client's side is done before the server has seen its certificate.
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            return bool(connection.recv(4096))
    except OSError:
        return False


def _serial(secured: Secured, name: str) -> str:
    """Fingerprint of the certificate that a process serves now."""
    host, _, port = secured.address(name).rpartition(":")
    own = identity(secured.folder)
    context = ssl.create_default_context(cafile=str(own.ca))
    assert own.cert is not None
    context.load_cert_chain(own.cert, own.key)
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None
    return hashlib.sha256(certificate).hexdigest()
