"""A process of its own that keeps one replica registered: holder.py KIND ADDRESS ID TTL PARENT."""

from __future__ import annotations

import sys

from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.lifecycle import Lifecycle, run_service
from headrace.services.runtime.registry.base import Registry, Replica, Role
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.registry.member import Membership
from headrace.services.runtime.registry.remote import RemoteRegistry
from headrace.services.runtime.settings import RpcSettings, StopSettings


def main(kind: str, address: str, identifier: str, ttl: str, parent: str) -> int:
    async def start(life: Lifecycle) -> None:
        registry: Registry = (
            EtcdRegistry([address], "/test/", RpcSettings())
            if kind == "etcd"
            else RemoteRegistry(address, RpcSettings())
        )
        replica = Replica(
            id=identifier,
            incarnation=new_incarnation(),
            role=Role.ROUTER,
            data_centre="dc",
            host="h",
            endpoint="127.0.0.1:1",
        )
        membership = Membership(registry, replica, float(ttl), lambda: life.stop("replaced", exit_code=3))
        life.spawn(membership.run(), "membership")
        await membership.registered.wait()
        sys.stdout.write("registered\n")
        sys.stdout.flush()

    return run_service(start, StopSettings(parent_pid=int(parent)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
