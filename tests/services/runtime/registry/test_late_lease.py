"""A lease that ends before its holder is registered is asked for again (L8): nobody ends for want of it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.registry.base import RegistryUnavailableError, Replica, Role
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.registry.etcd_client import LeaseNotFoundError
from headrace.services.runtime.settings import RpcSettings


class Late:
    """An etcd that stands still for longer than it grants."""

    async def grant(self, seconds: int) -> tuple[int, float]:
        return 7, float(seconds)

    async def read_prefix(self, prefix: bytes) -> tuple[list[Any], int]:
        return [], 1

    async def put_if(self, *_: object) -> bool:
        raise LeaseNotFoundError("etcdserver: requested lease not found")


async def test_it_is_no_reason_to_end() -> None:
    registry = EtcdRegistry(["127.0.0.1:1"], "/test/", RpcSettings())
    await registry.client.close()
    registry.client = Late()  # type: ignore[assignment]
    replica = Replica("decode-0", new_incarnation(), Role.ROUTER, "dc", "host", "127.0.0.1:2")
    with pytest.raises(RegistryUnavailableError, match="try again"):
        await registry.register(replica, 4.0)
