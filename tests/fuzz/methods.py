"""Every method of every service, as the descriptors have them, and who calls it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.proto.modules import MODULES

ROUTER: Final = "router-9"
"""The fuzzer's own router: what it reserves and attaches is no other router's."""
WORKER: Final = "fuzz-0"
"""A worker that joins and leaves, whose certificate is good for prefill, decode and both."""
FRONT: Final = "front"
"""The router's port for clients without a certificate, as if it were a replica."""
CLIENT, OPERATOR, BARE = "client", "operator", ""

CALLERS: Final = {
    "InferenceService": CLIENT,
    "ControlService": OPERATOR,
    "RegistryService": WORKER,
    "EventService": ROUTER,
    "EncoderService": ROUTER,
    "PrefillService": ROUTER,
    "DecodeService": ROUTER,
    "Health": CLIENT,
    "ServerReflection": OPERATOR,
    "EncoderService/Push": "prefill-0",
    "EncoderService/Recall": "prefill-0",
    "DecodeService/Commit": "prefill-0",
    "DecodeService/EndTransfer": "prefill-0",
}
"""By service or method: the certificate that is shown. services/runtime/peers.py decides; a wrong one here would show
as a method that no message reaches."""
FENCED: Final = {
    "ControlService/Drain": "the replica is resumed after each message",
    "ControlService/ChangeRole": "the old role is taken again after each message that began a change",
    "ControlService/ClearCache": "alone, since it empties the caches that other messages name",
}
"""Methods that run with nothing else on the cluster, and what is put right after them."""
ENDLESS: Final = frozenset({"EventService/Watch", "RegistryService/Watch", "Health/Watch", "DecodeService/Attach"})
"""Streams that end with their caller only."""
STANDARD: Final = frozenset({"Health", "ServerReflection"})
"""Services of gRPC itself, whose handlers are not this project's: their errors are plain statuses."""


@dataclass(frozen=True)
class Method:
    service: str
    """Full name."""
    name: str
    request: type[Message]
    client_streams: bool
    server_streams: bool

    @property
    def path(self) -> str:
        """As gRPC calls it."""
        return f"/{self.service}/{self.name}"

    @property
    def short(self) -> str:
        """Service/Method."""
        return f"{self.service_name}/{self.name}"

    @property
    def service_name(self) -> str:
        """Without its package."""
        return self.service.rpartition(".")[2]

    def caller(self, port: str) -> str:
        """Whose certificate is shown on a port."""
        if port == FRONT:
            return BARE
        if self.service_name == "CachePeerService":
            return "prefill-0" if port.startswith("decode") else "decode-0"
        if self.service_name == "TransferService":
            return "prefill-0" if port.startswith("decode") else "encoder-0"
        return CALLERS.get(self.short) or CALLERS[self.service_name]

    def parses(self, datas: Iterable[bytes]) -> bool:
        """Whether bytes are this method's message, all of them, by the parser that the servers use."""
        try:
            for data in datas:
                self.request.FromString(data)
        except Exception as error:
            if type(error).__name__ != "DecodeError":
                raise
            return False
        return True


def all_methods() -> tuple[Method, ...]:
    """Of the contract, health and reflection."""
    modules: tuple[Any, ...] = (*MODULES, health_pb2, reflection_pb2)
    return tuple(
        Method(
            service.full_name,
            method.name,
            message_factory.GetMessageClass(method.input_type),
            method.client_streaming,
            method.server_streaming,
        )
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    )
