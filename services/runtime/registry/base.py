"""The membership interface: who is alive, by incarnation (L14), as evidenced by short renewed leases (L8).

A member is (id, incarnation); one incarnation per id lives at a time. Its lease is renewed by its holder every third
of the time to live. Only the registry's verdict ends a lease: while the registry cannot be reached, holders keep
trying and watchers keep what they last knew, because silence of the registry is no evidence that a member died.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from headrace.services.runtime.ids import valid_incarnation


class Role(StrEnum):
    """What a replica does."""

    ROUTER = "router"
    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
    GATEWAY = "gateway"
    """HTTP for clients. Has settings, and is no member of any registry."""


ENGINE_ROLES = frozenset({Role.PREFILL, Role.DECODE, Role.WHOLE})
"""Roles that exchange KV rows with each other, so that their layouts must agree."""
CHANGEABLE_ROLES = (Role.PREFILL, Role.DECODE)
"""Roles that a process can change between, over one loaded model."""


class State(StrEnum):
    """Whether a replica takes work."""

    STARTING = "starting"
    """Loading or warming up."""
    READY = "ready"
    """Its canary generation succeeded (L18)."""
    DRAINING = "draining"
    """It finishes what it has and takes nothing new (L19)."""
    UNREADY = "unready"
    """Alive but not able: too much quarantine, a failed canary."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a replica can hold over all ranks; 0 where a role has none."""

    rows: int = 0
    """KV rows (blocks), without the reserved ones."""
    slots: int = 0
    """Sequences that can run at once."""
    snapshots: int = 0
    block_tokens: int = 0
    """Tokens per row."""
    queue_requests: int = 0
    """Requests that may wait."""
    context_tokens: int = 0
    """Positions of one sequence."""
    embedding_bytes: int = 0
    """Size of an encoder's embedding pool."""
    row_bytes: int = 0
    slot_bytes: int = 0
    """What goes with a request's rows from prefill to decode; 0 where the layout has none."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One engine thread of a replica."""

    index: int
    device: str
    """As torch names it: cpu, cuda:0."""
    agent: bytes = b""
    """A serialised headrace.v1.TransferAgent, opaque here; empty for routers."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One member. Equal ids with different incarnations are different members."""

    id: str
    incarnation: str
    """32 hexadecimal digits (ids.new_incarnation)."""
    role: Role
    data_centre: str
    host: str
    endpoint: str
    """host:port of its gRPC server, as peers reach it."""
    state: State = State.STARTING
    model_name: str = ""
    """Members of one name serve the same model and exchange rows. Empty for routers."""
    layout_fp: bytes = b""
    """32 bytes; empty for roles without KV (spec/protocol.md, Identity)."""
    row_fp: bytes = b""
    """The layout's fingerprint without the ring, which is what enters cache keys; 32 bytes, or empty like layout_fp."""
    model_fp: bytes = b""
    """32 bytes; empty for routers."""
    capacity: Capacity = Capacity()
    ranks: tuple[Rank, ...] = ()
    loads: tuple[bytes, ...] = ()
    """Serialised headrace.v1.LoadReport of each rank, opaque here."""
    metrics_endpoint: str = ""
    """host:port of its metrics page, or empty."""
    version: str = ""
    pid: int = 0
    """For people; never compared."""
    started_unix_ms: int = 0
    """For people; never compared."""

    def __post_init__(self) -> None:
        if not self.id or "/" in self.id:
            raise ValueError(f"replica id {self.id!r} must be non-empty and free of '/'")
        if not valid_incarnation(self.incarnation):
            raise ValueError(f"incarnation {self.incarnation!r} is not 32 hexadecimal digits")
        for name, digest in (("layout_fp", self.layout_fp), ("row_fp", self.row_fp), ("model_fp", self.model_fp)):
            if len(digest) not in (0, 32):
                raise ValueError(f"{name} has 0 or 32 bytes, not {len(digest)}")


@dataclass(frozen=True, slots=True)
class Added:
    """A new member; also every member present when a watch starts."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Changed:
    """The same incarnation published new facts: state, loads, transfer agents."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Removed:
    """The member left, died, or was replaced; `replica` is what was last known of it."""

    replica: Replica


Event = Added | Changed | Removed


class LostReason(StrEnum):
    """Why a lease ended without its holder's wish."""

    EXPIRED = "expired"
    """The registry does not know the lease: the holder was silent too long, or the registry forgot."""
    REPLACED = "replaced"
    """Another incarnation registered under the same id. Do not register again: two processes would evict each other
    for ever."""


class Lease(Protocol):
    """A membership held by this process and renewed by a task of its own."""

    @property
    def replica(self) -> Replica:
        """What is published now."""
        ...

    @property
    def lost(self) -> asyncio.Future[LostReason]:
        """Resolves when the registry says that the lease is gone; cancelled by `release`; raises if renewing is broken.
        Do not cancel it."""
        ...

    async def update(self, replica: Replica) -> None:
        """Publish another state, loads or ranks; everything else must be equal (ValueError).

        Raises LeaseLostError when the lease is gone, RegistryUnavailableError when the registry cannot be reached.
        """
        ...

    async def release(self) -> None:
        """Leave now: watchers see Removed at once. Repeating it does nothing. Raises RegistryUnavailableError; the
        lease then expires by itself."""
        ...


class Registry(Protocol):
    """Where replicas register and find each other."""

    async def register(self, replica: Replica, ttl_seconds: float) -> Lease:
        """Become a member for `ttl_seconds` at a time; the returned lease renews itself.

        A living member of the same id is replaced (a restarted process), or taken over when the incarnation is equal.
        Raises IncompatibleReplicaError (L14), RegistryUnavailableError.
        """
        ...

    async def members(self, roles: frozenset[Role] = frozenset()) -> tuple[Replica, ...]:
        """Living members of `roles` (empty: all), ordered by id. Raises RegistryUnavailableError."""
        ...

    def watch(self, roles: frozenset[Role] = frozenset()) -> AsyncGenerator[Event, None]:
        """Membership from now on, for ever: first an Added for every living member, then each change.

        Gap-free: whatever interrupts it (a broken connection, compaction, a restart of the registry), it goes on with
        the difference between what it last told and what is true then. States passed in between may be skipped, but
        a replaced member is always Removed before its successor is Added. `aclose` ends it.
        """
        ...

    async def close(self) -> None:
        """Stop tasks and connections of this object. Leases not released are left to expire."""
        ...


class RegistryError(Exception):
    """Base of what a registry raises."""


class RegistryUnavailableError(RegistryError):
    """The registry could not be reached in time; try again."""


class IncompatibleReplicaError(RegistryError):
    """Its layout or model differs from that of the living members that serve the same model name (L14)."""


class LeaseLostError(RegistryError):
    """The lease is no longer held; `reason` says why."""

    def __init__(self, reason: LostReason) -> None:
        super().__init__(
            "another incarnation took this id; stop, and give each process its own replica_id"
            if reason is LostReason.REPLACED
            else "the registry does not know this lease; register again"
        )
        self.reason = reason


def check_compatible(replica: Replica, living: Iterable[Replica]) -> None:
    """Raise IncompatibleReplicaError when `replica` cannot exchange rows with those who serve its model name (L14).

    Engine roles of one model name must have equal layout_fp, row_fp, model_fp, block_tokens and context_tokens, since
    the router asks any one of them; an encoder's model_fp must be theirs too. An earlier incarnation of the same id
    does not count: it is being replaced. The first member decides.
    """
    if replica.role in ENGINE_ROLES and not (replica.model_name and replica.layout_fp and replica.model_fp):
        raise IncompatibleReplicaError(f"a {replica.role} replica needs model_name, layout_fp and model_fp to register")
    if not replica.model_name:
        return
    for other in living:
        if other.model_name != replica.model_name or other.id == replica.id:
            continue
        pairs: list[tuple[str, bytes | int, bytes | int]] = [("model_fp", replica.model_fp, other.model_fp)]
        if replica.role in ENGINE_ROLES and other.role in ENGINE_ROLES:
            mine, theirs = replica.capacity, other.capacity
            pairs += [
                ("layout_fp", replica.layout_fp, other.layout_fp),
                ("row_fp", replica.row_fp, other.row_fp),
                ("block_tokens", mine.block_tokens, theirs.block_tokens),
                ("context_tokens", mine.context_tokens, theirs.context_tokens),
            ]
        for name, one, another in pairs:
            if one != another:
                raise IncompatibleReplicaError(
                    f"{replica.role} {replica.id}: {name} {_short(one)} differs from {_short(another)} of "
                    f"{other.role} {other.id}, which serves the same model name {replica.model_name!r}; start it with "
                    "the same model folder and cache settings, or under another model name"
                )


def _short(value: bytes | int) -> str:
    return str(value) if isinstance(value, int) else f"{value.hex()[:16]}…"


def check_update(old: Replica, new: Replica) -> None:
    """Raise ValueError unless `new` differs from `old` in state, loads and ranks at most."""
    if replace(new, state=old.state, loads=old.loads, ranks=old.ranks) != old:
        raise ValueError(f"{old.id}: an update may change state, loads and ranks only; register again instead")
