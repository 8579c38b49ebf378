"""The children of a local cluster: command, environment and credentials of each."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

from headrace.cli.certificates import files_of, issue, make_authority, own_hosts
from headrace.cli.child import ChildSpec, address_file, same_code
from headrace.cli.client_tls import OPERATOR, TLS_FOLDER
from headrace.cli.cluster_memory import WorkerMemory, device_of, gpu_free_bytes
from headrace.cli.cluster_spec import ClusterSpec, role_of, router_store_sets, user_sets
from headrace.cli.store_secret import VARIABLE, store_secret
from headrace.services.runtime.files import write_whole
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.services.runtime.registry.base import CHANGEABLE_ROLES

SECRET_FILE: Final = "transfer-secret"
"""In the run directory."""
OPERATOR_KEY: Final = "HEADRACE_ROLES__ROUTER__ROUTER__OPERATOR_KEY"
"""Wins over what else names the setting, but for a flag."""


class ChildMaker:
    """Of one run, in its directory."""

    def __init__(self, spec: ClusterSpec, run_dir: Path, environ: Mapping[str, str], operator_key: str) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._environ = environ
        self._operator_key = operator_key

    def credentials(self) -> None:
        """What all children of this run need before the first starts."""
        if self._spec.tls:
            self._make_certificates()
        self._make_secret()

    def child(self, name: str, wiring: tuple[str, ...], memory: WorkerMemory | None) -> ChildSpec:
        """How one is started; `wiring` are settings that tie it to the others."""
        spec, role = self._spec, role_of(name)
        sets = [*self._derived_sets(name, memory), *user_sets(spec.sets, role), *wiring]
        if spec.tls:
            files = files_of(self._run_dir / TLS_FOLDER, name)
            sets += [f"tls.ca={files.ca}", f"tls.cert={files.cert}", f"tls.key={files.key}"]
        # The launcher depends on these; whatever the user's own settings say of them, they hold.
        sets += [
            f"replica_id={name}",
            f"listen.address_file={address_file(self._run_dir, name)}",
            "registry.kind=embedded",
            f"stop.parent_pid={os.getpid()}",
        ]
        command = [sys.executable, "-m", "headrace.cli.main", "serve", role]
        if spec.config is not None:
            command += ["--config", str(spec.config)]
        for item in sets:
            command += ["--set", item]
        return ChildSpec(name, role, tuple(command), self._child_environ(role), spec.cores(name))

    def _make_secret(self) -> None:
        """What the workers of this run sign transfer parameters with."""
        write_whole(self._run_dir / SECRET_FILE, f"{secrets.token_hex(32)}\n".encode(), 0o600)

    def _make_certificates(self) -> None:
        """An authority for this run, a certificate for each child, and the launcher's own."""
        folder = self._run_dir / TLS_FOLDER
        if not (folder / "ca.key").exists():
            make_authority(folder)
        for name in self._spec.names:
            # A worker may change its role, and its certificate stays.
            role = PeerRole.WHOLE if role_of(name) in CHANGEABLE_ROLES else PeerRole(role_of(name))
            issue(folder, Peer(role, name), own_hosts())
        issue(folder, Peer(PeerRole.OPERATOR), name=OPERATOR)
        issue(folder, Peer(PeerRole.CLIENT), name="client")
        issue(folder, Peer(PeerRole.MONITOR), name="monitor")

    def _derived_sets(self, name: str, memory: WorkerMemory | None) -> list[str]:
        spec, role = self._spec, role_of(name)
        sets = [f"model.folder={spec.folder.resolve()}", f"model.name={spec.served_name}", "log.format=console"]
        if role == "router":
            sets += [f"listen.port={spec.port}", *router_store_sets(spec)]
        else:
            sets += [f"load.device={self._device(name)}", f"transfer.secret_file={self._run_dir / SECRET_FILE}"]
            if spec.device == "cuda":  # exists on the CPU only, whatever the model's folder prefers
                sets += ["load.batch_invariant=false"]
            if spec.dtype is not None:
                sets += [f"load.dtype={spec.dtype}"]
        if role == "encoder":
            sets += [f"encoder.threads={spec.threads}"]
        if memory is not None:
            sets += [
                f"engine.threads={spec.threads}",
                f"engine.kv_bytes={memory.kv_bytes}",
                f"engine.spill_bytes={memory.spill_bytes}",
            ]
            if spec.store_url is not None:
                sets += [f"cache.store={spec.store_url}", f"cache.host_bytes={memory.host_bytes}"]
            sets += [f"roles.decode.decode.landing_bytes={memory.landing_bytes}"]
        return sets

    def _device(self, name: str) -> str:
        if self._spec.device == "cpu":
            return "cpu"
        if role_of(name) == "encoder":
            return device_of(0, 1)
        workers = [other for other in self._spec.names if role_of(other) in ("prefill", "decode")]
        return device_of(workers.index(name), self._gpus)

    @cached_property
    def _gpus(self) -> int:
        return len(gpu_free_bytes())

    def _child_environ(self, role: str) -> dict[str, str]:
        environ = same_code(self._environ)
        environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        environ.setdefault("UCX_NET_DEVICES", "lo")
        if role == "router":
            environ[OPERATOR_KEY] = self._operator_key
            if self._spec.store_folder is not None and VARIABLE not in environ:
                environ[VARIABLE] = store_secret(self._spec.store_folder)
        return environ
