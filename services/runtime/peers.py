"""Who is at the other end of a connection, by its certificate, and which calls that end may make (L25).

A certificate names its role, and its replica unless it is good for any of that role, in one URI among its subject's
alternative names: `headrace://decode/decode-0`, `headrace://decode`. With TLS off there are no identities and every
call is let in, as the ports are then reachable from this machine alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509

from headrace.services.runtime.errors import PermissionDenied, Unauthenticated
from headrace.v1 import common_pb2

SCHEME: Final = "headrace"


class PeerRole(StrEnum):
    """What a certificate is for."""

    ROUTER = "router"
    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
    """Prefill and decode in one process."""
    OPERATOR = "operator"
    """A person or a launcher that manages the cluster."""
    MONITOR = "monitor"
    """Reads metrics and health."""
    CLIENT = "client"
    """Sends requests."""
    NOBODY = "nobody"
    """No certificate was asked for: the front door. Never in a certificate."""


@dataclass(frozen=True)
class Peer:
    """One end."""

    role: PeerRole
    replica: str = ""
    """Empty: any replica of the role."""

    @property
    def uri(self) -> str:
        """As certificates carry it."""
        return f"{SCHEME}://{self.role.value}" + (f"/{self.replica}" if self.replica else "")


NOBODY: Final = Peer(PeerRole.NOBODY)
_WORKERS: Final = frozenset({PeerRole.ENCODER, PeerRole.PREFILL, PeerRole.DECODE, PeerRole.WHOLE})
_ENGINES: Final = frozenset({PeerRole.PREFILL, PeerRole.DECODE, PeerRole.WHOLE})
_ROUTER: Final = frozenset({PeerRole.ROUTER})
_CLUSTER: Final = _WORKERS | _ROUTER
_OPERATORS: Final = frozenset({PeerRole.OPERATOR})
_ALL: Final = frozenset(PeerRole)

SERVICES: Final[Mapping[str, frozenset[PeerRole]]] = {
    "headrace.v1.InferenceService": _ALL - {PeerRole.MONITOR},
    "headrace.v1.ControlService": _ROUTER | _OPERATORS,
    "headrace.v1.RegistryService": _CLUSTER,
    "headrace.v1.EventService": _ROUTER,
    "headrace.v1.EncoderService": _ROUTER,
    "headrace.v1.PrefillService": _ROUTER,
    "headrace.v1.DecodeService": _ROUTER,
    "headrace.v1.CachePeerService": _ENGINES,
    "headrace.v1.TransferService": frozenset({PeerRole.ENCODER, PeerRole.PREFILL, PeerRole.WHOLE}),
    "grpc.health.v1.Health": _ALL,
    "grpc.reflection.v1alpha.ServerReflection": _CLUSTER | _OPERATORS,
}
"""Who may call a service. One that is not here is closed to all."""
METHODS: Final[Mapping[str, frozenset[PeerRole]]] = {
    "headrace.v1.RegistryService/List": _CLUSTER | _OPERATORS,
    "headrace.v1.RegistryService/Watch": _CLUSTER | _OPERATORS,
    "headrace.v1.EncoderService/Push": frozenset({PeerRole.PREFILL, PeerRole.WHOLE}),
    "headrace.v1.EncoderService/Recall": frozenset({PeerRole.PREFILL, PeerRole.WHOLE}),
    "headrace.v1.PrefillService/Cancel": _ROUTER | {PeerRole.DECODE, PeerRole.WHOLE},
    "headrace.v1.DecodeService/Commit": frozenset({PeerRole.PREFILL, PeerRole.WHOLE}),
    "headrace.v1.DecodeService/EndTransfer": _ROUTER | {PeerRole.PREFILL, PeerRole.WHOLE},
}
"""Methods that differ from their service."""
SCRAPERS: Final = frozenset({PeerRole.MONITOR, PeerRole.OPERATOR, PeerRole.ROUTER})
"""Who may read the metrics page."""

_current: ContextVar[Peer | None] = ContextVar("headrace_peer", default=None)


def may_call(role: PeerRole, method: str) -> bool:
    """Whether a role may call /package.Service/Method."""
    name = method.removeprefix("/")
    allowed = METHODS.get(name)
    if allowed is None:
        allowed = SERVICES.get(name.partition("/")[0], frozenset())
    return role in allowed


def peer_of(uris: Iterable[str]) -> Peer:
    """The identity in a certificate's URIs. Raises Unauthenticated for a certificate without exactly one."""
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}://")]
    if len(ours) != 1:
        raise Unauthenticated("the certificate names no role of this system; make one with `headrace certs issue`")
    split = urlsplit(ours[0])
    try:
        role = PeerRole(split.netloc)
    except ValueError:
        role = PeerRole.NOBODY
    if role is PeerRole.NOBODY:
        raise Unauthenticated("the certificate names an unknown role; make one with `headrace certs issue`")
    return Peer(role, split.path.removeprefix("/"))


def peer_of_certificate(pem: bytes) -> Peer:
    """The identity of a certificate. Raises Unauthenticated."""
    extensions = x509.load_pem_x509_certificate(pem).extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return peer_of(())
    return peer_of(names.get_values_for_type(x509.UniformResourceIdentifier))


class Doorkeeper:
    """Lets calls in by the certificate of their connection. Identities are remembered by the certificate's URIs, so a
    call costs a look into a dictionary."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], Peer] = {}

    def admit(self, method: str, auth: Mapping[str, Iterable[bytes]]) -> Peer:
        """The caller of a method. `auth` is gRPC's: properties of the connection. Raises Unauthenticated,
        PermissionDenied."""
        uris = tuple(auth.get("peer_uri", ()))
        peer = self._known.get(uris)
        if peer is None:
            if uris or "x509_pem_cert" in auth:
                peer = peer_of(uri.decode("utf-8", "replace") for uri in uris)
            else:
                peer = NOBODY
            if len(self._known) >= 4096:
                self._known.clear()
            if uris:
                self._known[uris] = peer
        if not may_call(peer.role, method):
            if peer.role is PeerRole.NOBODY:
                raise Unauthenticated("this call needs a client certificate; use the cluster's own port")
            raise PermissionDenied(f"a certificate of role {peer.role.value} does not allow this call")
        return peer


def enter(peer: Peer | None) -> None:
    """The current task serves a call of `peer`."""
    _current.set(peer)


def caller() -> Peer | None:
    """Who made the call that the current task serves; None with TLS off."""
    return _current.get()


def require_claim(claimed: common_pb2.PeerId, *roles: PeerRole, field: str) -> None:
    """The certificate of the current call says what the message claims. With `roles`, callers of other roles are not
    held to it (a router speaks for a worker). Raises PermissionDenied."""
    peer = _current.get()
    if peer is None or (roles and peer.role not in roles):
        return
    if peer.replica and peer.replica != claimed.replica_id:
        raise PermissionDenied(
            f"the certificate is of {peer.replica!r}, the message of {claimed.replica_id!r}", field=field
        )
