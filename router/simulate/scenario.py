"""What happens to a simulated cluster on purpose: a TOML or JSON file of events.

[[event]]
at = 60.0
do = "die"
replica = "prefill-3"
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIONS: dict[str, tuple[str, ...]] = {
    "die": ("replica",),
    "return": ("replica",),
    "slow": ("replica", "factor"),
    "mute": ("replica",),
    "lie": ("replica",),
    "absurd": ("replica",),
    "role": ("replica", "to"),
    "rebalance": ("prefill", "decode"),
}
"""What can happen, and which fields say how."""
ROLES = ("prefill", "decode")


class ScenarioError(ValueError):
    """A scenario that cannot be played; says which event and why."""


@dataclass(frozen=True, slots=True)
class Event:
    """`die`: the process is gone with all it has. `return`: it comes back, empty. `slow`: everything takes `factor`
    times as long (1 heals it). `mute`: it stops to report its load. `lie`: it says that it is idle, whatever it has.
    `absurd`: its reports cannot be true. `role`: it drains, and serves as the other role after a while. `rebalance`: as
    many replicas change their role as it takes to have so many ranks of each."""

    at: float
    do: str
    replica: str = ""
    factor: float = 1.0
    to: str = ""
    prefill: int = 0
    decode: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Events in order of time."""

    events: tuple[Event, ...] = ()


NOTHING = Scenario()


def parse(text: str, *, is_json: bool) -> Scenario:
    """Raises ScenarioError."""
    try:
        document = json.loads(text) if is_json else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ScenarioError(f"the scenario is no valid {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(document, dict) or set(document) - {"event"} or not isinstance(document.get("event", []), list):
        raise ScenarioError("a scenario has one list, `event`, and nothing else beside it")
    events = [_event(number, entry) for number, entry in enumerate(document.get("event", []), 1)]
    return Scenario(tuple(sorted(events, key=lambda event: event.at)))


def _event(number: int, entry: object) -> Event:
    where = f"event {number}"
    if not isinstance(entry, Mapping):
        raise ScenarioError(f"{where} is no table")
    do = entry.get("do")
    if not isinstance(do, str) or do not in ACTIONS:
        raise ScenarioError(f"{where}: do = {do!r} is none of {', '.join(ACTIONS)}")
    wanted = {"at", "do", *ACTIONS[do]}
    if unknown := set(entry) - wanted:
        raise ScenarioError(
            f"{where} ({do}): {', '.join(sorted(unknown))} is unknown; it takes {', '.join(sorted(wanted))}"
        )
    if missing := wanted - set(entry):
        raise ScenarioError(f"{where} ({do}) lacks {', '.join(sorted(missing))}")
    fields: dict[str, Any] = {name: _checked(f"{where} ({do})", name, entry[name]) for name in ACTIONS[do]}
    return Event(at=_number(where, "at", entry["at"], 0.0), do=do, **fields)


def _checked(where: str, name: str, value: object) -> object:
    if name == "replica":
        role, _, number = value.partition("-") if isinstance(value, str) else ("", "", "")
        if role not in ROLES or not number.isdecimal():
            raise ScenarioError(f"{where}: replica = {value!r} is no name such as prefill-3 or decode-0")
        return value
    if name == "to":
        if value not in ROLES:
            raise ScenarioError(f"{where}: to = {value!r} is none of {', '.join(ROLES)}")
        return value
    if name == "factor":
        return _number(where, name, value, 0.01)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScenarioError(f"{where}: {name} = {value!r} is no number of ranks of at least 1")
    return value


def _number(where: str, name: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ScenarioError(f"{where}: {name} = {value!r} is no number of at least {least:g}")
    return float(value)
