"""Which registry the settings ask for."""

from __future__ import annotations

from headrace.services.runtime.registry.base import Registry
from headrace.services.runtime.registry.etcd import EtcdRegistry
from headrace.services.runtime.registry.remote import RemoteRegistry
from headrace.services.runtime.settings import RegistrySettings, RpcSettings
from headrace.services.runtime.tls import Tls


def open_registry(settings: RegistrySettings, rpc: RpcSettings, tls: Tls | None = None) -> Registry:
    """The registry as workers and tools see it; close it when done. `tls` is the process's own.

    With kind = embedded the router does not call this: it holds an EmbeddedRegistry and serves RegistryService.
    """
    if settings.kind == "etcd":
        endpoints = [endpoint.strip() for endpoint in settings.address.split(",") if endpoint.strip()]
        return EtcdRegistry(endpoints, settings.prefix, rpc, tls=etcd_tls(settings, tls))
    return RemoteRegistry(settings.address, rpc, tls=tls)


def etcd_tls(settings: RegistrySettings, own: Tls | None) -> Tls | None:
    """The material of connections to etcd; None: plain text. Raises SettingsError."""
    if settings.etcd_ca is None:
        return None
    cert, key = settings.etcd_cert, settings.etcd_key
    if cert is None and own is not None:
        cert, key = own.files
    return Tls(settings.etcd_ca, cert, key)
