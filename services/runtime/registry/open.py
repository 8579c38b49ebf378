"""Which registry the settings ask for."""

from __future__ import annotations

from headrace.services.runtime.registry.base import Registry
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.registry.remote import RemoteRegistry
from headrace.services.runtime.settings import RegistrySettings, RpcSettings


def open_registry(settings: RegistrySettings, rpc: RpcSettings) -> Registry:
    """The registry as workers and tools see it; close it when done.

    With kind = embedded the router does not call this: it holds an EmbeddedRegistry and serves RegistryService.
    """
    if settings.kind == "etcd":
        endpoints = [endpoint.strip() for endpoint in settings.address.split(",") if endpoint.strip()]
        return EtcdRegistry(endpoints, settings.prefix, rpc)
    return RemoteRegistry(settings.address, rpc)
