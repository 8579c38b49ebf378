"""Dropping in one tier what an operator names: everything, a namespace, a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.kvcache.cache_events import Tier
from headrace.kvcache.entries import TENANT_TAG_BYTES
from headrace.kvcache.host.tier import HostTier
from headrace.kvcache.keys import KEY_BYTES
from headrace.kvcache.store.base import Store
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import control_pb2


def wanted_tiers(wire: Sequence[int]) -> tuple[Tier, ...]:
    """None named: all. Raises InvalidArgument."""
    try:
        return tuple(Tier(tier) for tier in wire if tier) or tuple(Tier)
    except ValueError:
        raise InvalidArgument(f"{list(wire)} names no cache tier", field="tiers") from None


def scope_of(request: control_pb2.ClearCacheRequest) -> str:
    """What is dropped, for the log; checks the request. Raises InvalidArgument."""
    match request.WhichOneof("scope"):
        case "everything" if request.everything:
            return "everything"
        case "namespace" if len(request.namespace) == KEY_BYTES:
            return f"namespace {request.namespace.hex()}"
        case "tenant_tag" if len(request.tenant_tag) == TENANT_TAG_BYTES:
            return f"tenant tag {request.tenant_tag.hex()}"
        case "namespace":
            raise InvalidArgument(f"a namespace has {KEY_BYTES} bytes", field="namespace")
        case "tenant_tag":
            raise InvalidArgument(f"a tenant's tag has {TENANT_TAG_BYTES} bytes", field="tenant_tag")
        case "tenant":
            raise InvalidArgument("only a router knows tenants by name; ask it", field="tenant")
        case _:
            raise InvalidArgument("say what to drop: everything, namespace or tenant_tag", field="scope")


def drop_in_store(store: Store, request: control_pb2.ClearCacheRequest) -> control_pb2.TierDrop:
    """Walks an index: not for an event loop. Raises Unimplemented for what the engine cannot, StoreError."""
    can = store.capabilities
    if request.WhichOneof("scope") == "tenant_tag":
        if not can.drop_tenant:
            raise Unimplemented("tenant_tag", "this store engine cannot drop a tenant")
        count = store.drop_tenant(request.tenant_tag)
        return tier_drop(Tier.STORE, count.blocks, count.snapshots)
    if not can.drop_namespace:
        raise Unimplemented("scope", "this store engine cannot drop a namespace")
    if request.WhichOneof("scope") == "namespace":
        count = store.drop_namespace(request.namespace)
        return tier_drop(Tier.STORE, count.blocks, count.snapshots)
    if not can.scan:
        raise Unimplemented("everything", "this store engine cannot list what it holds; drop namespaces by name")
    blocks = snapshots = 0
    for namespace in sorted({entry.info.namespace for entry in store.scan()}):
        count = store.drop_namespace(namespace)
        blocks, snapshots = blocks + count.blocks, snapshots + count.snapshots
    return tier_drop(Tier.STORE, blocks, snapshots)


def drop_in_host(host: HostTier, request: control_pb2.ClearCacheRequest) -> control_pb2.TierDrop:
    """What is being read stays until its reader is done, and is not found any more."""
    before = host.stats()
    match request.WhichOneof("scope"):
        case "tenant_tag":
            host.drop_tenant(request.tenant_tag)
        case "namespace":
            host.drop_namespace(request.namespace)
        case _:
            host.clear()
    after = host.stats()
    return tier_drop(Tier.HOST, max(0, before.blocks - after.blocks), max(0, before.snapshots - after.snapshots))


def tier_drop(tier: Tier, blocks: int, snapshots: int) -> control_pb2.TierDrop:
    """What one tier of this process dropped."""
    return control_pb2.TierDrop(tier=TIERS[tier], blocks=blocks, snapshots=snapshots)


TIERS: Final = {
    Tier.DEVICE: control_pb2.CACHE_TIER_DEVICE,
    Tier.HOST: control_pb2.CACHE_TIER_HOST,
    Tier.STORE: control_pb2.CACHE_TIER_STORE,
}
