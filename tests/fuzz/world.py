"""The cluster under fire: real processes with mutual TLS, the fuzzer's identities, and what it knows of them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from headrace.cli.certificates import files_of, issue, own_hosts
from headrace.cli.client_tls import TLS_FOLDER
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_children import SECRET_FILE
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import make
from headrace.services.router.api_keys import KeyRole, KeysDocument, mint
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.services.worker.signing import Signer
from headrace.v1 import common_pb2, control_pb2, inference_pb2, registry_pb2
from tests.fuzz.methods import BARE, FRONT, OPERATOR, ROUTER, WORKER, Method, all_methods
from tests.fuzz.phantom import nobody
from tests.fuzz.send import PATIENCE_S, Outcome, exchange
from tests.services.tiny import BLOCK

WORKERS: Final = ("encoder-0", "prefill-0", "decode-0")
SETS: Final = (
    "load.dtype=float32", "load.entry_format=float32", "load.batch_invariant=true", f"load.block_tokens={BLOCK}",
    "load.native_kernels=false", "cache.min_load_tokens=1", "cache.break_even=false", "cache.host_bytes=4MiB",
    "engine.kv_bytes=16777216", "engine.max_sequences=16", "engine.max_batched_tokens=64", "engine.lease_s=3",
    "front.port=0", "requests.max_tokens=8", "roles.decode.engine.prefix_reuse=false", "log.format=json",
)  # fmt: skip
TENANT, NEIGHBOUR = "acme", "umbrella"
"""Whose key the fuzzer sends, and whose requests run beside it."""
ROOM_TRIES: Final = 600
PASSING: Final = ("ERROR_CODE_RESOURCE_EXHAUSTED", "ERROR_CODE_UNAVAILABLE")
"""What others of the fuzzer's messages may rightly cause, and what passes: no room, and a replica that was drained and
takes work again, of which the router has not heard yet."""
_OPTIONS: Final = (
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@contextmanager
def running(folder: Path) -> Iterator[LocalCluster]:
    """A router, an encoder, a prefill and a decode of a tiny model, and two tenants' API keys."""
    document = KeysDocument()
    for tenant in (TENANT, NEIGHBOUR):
        key, record = mint(KeyRole.TENANT, tenant)
        document = document.with_key(record)
        (folder / f"{tenant}.key").write_text(key)
    (folder / "keys.json").write_text(document.model_dump_json())
    sets = (*SETS, f"router.keys={folder / 'keys.json'}", f"roles.router.front.address_file={folder / FRONT}")
    replicas = {name.partition("-")[0]: 1 for name in WORKERS}
    spec = ClusterSpec(make("deepseek-v41-tiny", folder, 0), replicas, sets=sets, store=str(folder / "store"), tls=True)
    with LocalCluster(spec, run_dir=folder / "run") as cluster:
        tls = cluster.run_dir / TLS_FOLDER
        issue(tls, Peer(PeerRole.ROUTER, ROUTER), own_hosts())
        issue(tls, Peer(PeerRole.WHOLE, WORKER), own_hosts())
        yield cluster


@dataclass
class World:
    """Everything that a valid message is made from. Belongs to one event loop."""

    cluster: LocalCluster
    keys: dict[str, str]
    """Tenant → API key."""
    addresses: dict[str, str]
    """Port → host:port."""
    methods: dict[str, Method]
    """Service/Method → it."""
    model: inference_pb2.Model = field(default_factory=inference_pb2.Model)
    phantom_address: str = ""
    """Where the worker that is not there answers."""
    replicas: dict[str, registry_pb2.Replica] = field(default_factory=dict)
    """Worker → its present life."""
    router: common_pb2.PeerId = field(
        default_factory=lambda: common_pb2.PeerId(replica_id=ROUTER, incarnation=secrets.token_hex(16))
    )
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """For names of requests."""
    _channels: dict[tuple[str, str], grpc.aio.Channel] = field(default_factory=dict)
    _nobody: grpc.aio.Server | None = None

    @classmethod
    async def of(cls, cluster: LocalCluster) -> World:
        folder = cluster.run_dir.parent
        addresses = {child.name: child.address or "" for child in cluster.children}
        addresses[FRONT] = (folder / FRONT).read_text().strip()
        world = cls(
            cluster,
            {tenant: (folder / f"{tenant}.key").read_text() for tenant in (TENANT, NEIGHBOUR)},
            addresses,
            {method.short: method for method in all_methods()},
        )
        world.signer = Signer(file=cluster.run_dir / SECRET_FILE)
        world._nobody, world.phantom_address = await nobody(files_of(cluster.run_dir / TLS_FOLDER, WORKER))
        models = await world.ask("router-0", "InferenceService/ListModels", inference_pb2.ListModelsRequest())
        world.model = inference_pb2.ListModelsResponse.FromString(models).models[0]
        await world.look()
        return world

    signer: Signer = field(default_factory=Signer)
    """Of the cluster's own secret, which no attacker has: for what only workers could have made."""

    def channel(self, caller: str, port: str) -> grpc.aio.Channel:
        """With the caller's certificate; kept open."""
        channel = self._channels.get((caller, port))
        if channel is None:
            files = files_of(self.cluster.run_dir / TLS_FOLDER, caller or OPERATOR)
            pair = (None, None) if caller == BARE else (files.key.read_bytes(), files.cert.read_bytes())
            credentials = grpc.ssl_channel_credentials(files.ca.read_bytes(), *pair)
            channel = grpc.aio.secure_channel(self.addresses[port], credentials, options=_OPTIONS)
            self._channels[caller, port] = channel
        return channel

    def metadata(self, method: Method, port: str, tenant: str = TENANT) -> Sequence[tuple[str, str]]:
        """The credential that goes with a call: a tenant's key, or the operator's for the router's control."""
        if method.service_name == "InferenceService":
            return (("authorization", f"Bearer {self.keys[tenant]}"),)
        if method.service_name == "ControlService" and port == "router-0":
            return (("authorization", f"Bearer {self.cluster._operator_key}"),)
        return ()

    async def send(self, port: str, method: Method, datas: Sequence[bytes], **options: Any) -> Outcome:
        """By the caller that may; any bytes."""
        caller = options.pop("caller", None) or method.caller(port)
        metadata = self.metadata(method, port, options.pop("tenant", TENANT))
        return await exchange(self.channel(caller, port), method, port, datas, metadata, **options)

    async def ask(self, port: str, short: str, message: Message, **options: Any) -> bytes:
        """A call of the harness itself, which must succeed, when there is room for it. Raises AssertionError."""
        options.setdefault("patience_s", PATIENCE_S)
        outcome = await self.send(port, self.methods[short], [message.SerializeToString()], **options)
        for _ in range(ROOM_TRIES):
            if outcome.code not in PASSING:
                break
            await asyncio.sleep(0.1)
            outcome = await self.send(port, self.methods[short], [message.SerializeToString()], **options)
        assert outcome.status == "OK", outcome.row()
        return outcome.responses[-1] if outcome.responses else b""

    async def status(self, port: str, *, check: bool = False) -> control_pb2.StatusResponse:
        """State of a process."""
        request = control_pb2.StatusRequest(check_integrity=check)
        return control_pb2.StatusResponse.FromString(await self.ask(port, "ControlService/Status", request))

    async def look(self) -> None:
        """Learn the workers' present lives."""
        for name in WORKERS:
            self.replicas[name] = (await self.status(name)).replica

    def peer(self, name: str) -> common_pb2.PeerId:
        return self.replicas[name].peer

    def name(self) -> str:
        """Of a new request."""
        return f"fuzz-{next(self.numbers)}"

    async def close(self) -> None:
        if self._nobody is not None:
            await self._nobody.stop(None)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
