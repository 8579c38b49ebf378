"""What a local cluster consists of, and the settings that each of its processes gets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

from headrace.cli.exits import CliError
from headrace.services.runtime.registry.base import CHANGEABLE_ROLES

WORKER_ROLES: Final = ("encoder", "prefill", "decode")
"""Roles whose number can be chosen, in the order in which they start. The router is always one."""
SECTION_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "load": WORKER_ROLES,
    "transfer": WORKER_ROLES,
    "engine": ("prefill", "decode"),
    "cache": ("prefill", "decode"),
    "encoder": ("encoder",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "gateway": ("gateway",),
    "https": ("gateway",),
    "responses": ("gateway",),
    "router": ("router",),
    "front": ("router",),
    "tokens": ("router",),
    "limits": ("router",),
    "fetch": ("router",),
    "admission": ("router",),
    "balance": ("router",),
    "index": ("router",),
    "requests": ("router",),
    "replay": ("router",),
}
"""Which roles have a section of settings; sections that are not here belong to all. A test compares with the classes,
which cannot be asked here: they import torch."""

C = TypeVar("C", bound=str)
_UNITS: Final = {"b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?")
_REPLICAS = re.compile(r"([a-z]+)=(\d+)")
_PIN = re.compile(r"([a-z]+(?:-\d+)?)=(\d+(?:-\d+)?(?:\+\d+(?:-\d+)?)*)")


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster on this machine: one router, and workers that share a model folder."""

    folder: Path
    replicas: Mapping[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    """Role → number."""
    model_name: str | None = None
    """Name under which it is served; None: the folder's."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str | None = None
    """float32 or bfloat16; None leaves it to the folder."""
    port: int = 0
    """The router's; 0 takes a free one."""
    threads: int = 1
    """torch threads of each process on the CPU."""
    pins: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Role or replica name → CPU cores."""
    sets: tuple[str, ...] = ()
    """`section.field=value`, handed to the roles that have the section; `roles.ROLE.section.field=value` to one role.
    They win over what is derived from the other fields."""
    config: Path | None = None
    """A TOML file for all processes (docs/settings.md)."""
    store: str | None = None
    """Where prefixes are kept beyond the workers' lives: a folder, or a URL of `cache.store`. None: nowhere."""
    tls: bool = False
    """Mutual TLS, with an authority of its own in the run directory."""
    memory_bytes: int | None = None
    """What all processes together may use; None: what the cgroup leaves (L29)."""

    def __post_init__(self) -> None:
        """Raises CliError for counts and names that make no cluster."""
        for role, count in self.replicas.items():
            if role not in WORKER_ROLES:
                raise CliError(f"replicas: {role!r} is no role; choose from {', '.join(WORKER_ROLES)}")
            if count < 0:
                raise CliError(f"replicas: {role} must be 0 or more")
        for name in self.pins:
            if name not in (*WORKER_ROLES, "router", *self.names):
                raise CliError(f"pin: no replica or role {name!r} in this cluster; it has {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Replica names, the router's first."""
        workers = (f"{role}-{index}" for role in WORKER_ROLES for index in range(self.replicas.get(role, 0)))
        return ("router-0", *workers)

    @property
    def served_name(self) -> str:
        return self.model_name or self.folder.resolve().name

    @property
    def store_folder(self) -> Path | None:
        """The store's own folder, where it is one of this machine."""
        return None if self.store is None or "://" in self.store else Path(self.store).expanduser().resolve()

    @property
    def store_url(self) -> str | None:
        """As the workers' setting `cache.store` wants it."""
        return self.store if self.store_folder is None else f"file://{self.store_folder}"

    def cores(self, name: str) -> frozenset[int]:
        """Cores of a replica: its own pin, else its role's, else none."""
        return self.pins.get(name) or self.pins.get(role_of(name)) or frozenset()


def role_of(name: str) -> str:
    """`prefill-1` → `prefill`."""
    return name.rpartition("-")[0]


def user_sets(sets: Sequence[str], role: str) -> list[str]:
    """Those of `sets` that concern a role, and those of the role that it may change to.

    What only one of the two knows is addressed to it (`roles.ROLE.…`), and stands before what the user has addressed.
    """
    plain: list[str] = []
    addressed: list[str] = []
    for item in sets:
        section = item.partition("=")[0].strip().partition(".")[0]
        roles = SECTION_ROLES.get(section, (role,))
        if section == "roles":
            addressed.append(item)
        elif section in CHANGEABLE_ROLES:
            if role in CHANGEABLE_ROLES:
                plain.append(f"roles.{section}.{item.strip()}")
        elif role in roles:
            plain.append(item)
    return [*plain, *addressed]


_STORE_FIELDS: Final = {
    "cache.store": "index.store",
    "cache.index": "index.store_index",
    "cache.local_directory": "index.local_directory",
    "cache.name": "index.name",
}


def router_store_sets(spec: ClusterSpec) -> list[str]:
    """What the router has to know of the workers' store, so that it asks the same index."""
    sets = [] if spec.store_url is None else [f"index.store={spec.store_url}"]
    for item in user_sets(spec.sets, "prefill"):
        name, _, value = item.partition("=")
        if name.strip() in _STORE_FIELDS:
            sets.append(f"{_STORE_FIELDS[name.strip()]}={value}")
    return sets


def parse_choice(flag: str, value: str, choices: tuple[C, ...]) -> C:
    """One of `choices`. Raises CliError."""
    for choice in choices:
        if value == choice:
            return choice
    raise CliError(f"{flag} {value!r}: choose from {', '.join(choices)}")


def parse_bytes(flag: str, text: str) -> int:
    """`8GiB`, `512MB`, `1000000` → bytes. Raises CliError."""
    match = _BYTES.fullmatch(text.strip().lower())
    if match is None:
        raise CliError(f"{flag} {text!r}: expected a size, as in 8GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2] or "b"])


def parse_replicas(text: str) -> dict[str, int]:
    """`prefill=2,decode=2,encoder=1` → counts. Raises CliError."""
    counts: dict[str, int] = {}
    for item in text.split(","):
        match = _REPLICAS.fullmatch(item.strip())
        if match is None:
            raise CliError(f"--replicas {item!r}: expected role=count, as in prefill=2,decode=2,encoder=1")
        if match[1] in counts:
            raise CliError(f"--replicas names {match[1]} twice")
        counts[match[1]] = int(match[2])
    return counts


def parse_pins(text: str) -> dict[str, frozenset[int]]:
    """`prefill=0,decode-0=1,decode-1=2-3+5` → cores by role or replica. Raises CliError."""
    pins: dict[str, frozenset[int]] = {}
    for item in text.split(","):
        match = _PIN.fullmatch(item.strip())
        if match is None:
            raise CliError(f"--pin {item!r}: expected ROLE=CORES or REPLICA=CORES, as in prefill=0,decode=1-2+5")
        cores: set[int] = set()
        for span in match[2].split("+"):
            first, _, last = span.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        if match[1] in pins or not cores:
            raise CliError(f"--pin {item!r}: {'named twice' if cores else 'no cores'}")
        pins[match[1]] = frozenset(cores)
    return pins
