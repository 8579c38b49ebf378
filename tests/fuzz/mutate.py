"""From a valid message to a bad one, by the message's own descriptor.

Nothing here knows a message of this system: fields are dropped, set to extremes, repeated, swapped and filled wherever
the descriptor says that there is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
MAX_DEPTH: Final = 8
"""Of the walk through nested messages; the contract's deepest is 6."""
MANY: Final = (17, 300, 5000)
"""Elements that a repeated field is blown up to, within MAX_BYTES."""
MAX_BYTES: Final = 256 * 1024
"""About the largest message that one mutation makes."""
_RANGES: Final[dict[int, tuple[int, int]]] = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_NUMBERS: Final = (0, 1, 2, -1, 127, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1)
_FLOATS: Final = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -1.0, 1e-45, 3.4e38, -3.4e38, 1.0000001, 0.5)
_STRINGS: Final = (
    "", " ", "\0", "a\0b", "é\u202e\U0001f600\ufeff", "../../etc/passwd", "{{7*7}}", "%s%n", "a/b@c", "\n\r\x1b[2J",
    "127.0.0.1:1", "[::1]:0", "http://169.254.169.254/", "f" * 32, "0" * 32, "x" * 65, "y" * 129, "z" * 70_000,
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A field of a message, at any depth."""

    owner: Message
    field: Any
    """Its FieldDescriptor."""
    path: str

    @property
    def present(self) -> bool:
        """It has a value, or elements."""
        if self.field.is_repeated:
            return bool(getattr(self.owner, self.field.name))
        if self.field.has_presence:
            return bool(self.owner.HasField(self.field.name))
        return bool(getattr(self.owner, self.field.name) != self.field.default_value)


def sites(message: Message, path: str = "", depth: int = 0) -> list[Site]:
    """Every field of a message and of the messages in it, absent ones too. Maps are left alone: no request has one."""
    found: list[Site] = []
    for field in message.DESCRIPTOR.fields:
        if _is_map(field):
            continue
        here = f"{path}.{field.name}" if path else field.name
        site = Site(message, field, here)
        found.append(site)
        if field.type != Field.TYPE_MESSAGE or depth >= MAX_DEPTH or not site.present:
            continue
        value = getattr(message, field.name)
        for index, child in enumerate(value if field.is_repeated else (value,)):
            if index < 4:
                found += sites(child, f"{here}[{index}]" if field.is_repeated else here, depth + 1)
    return found


class Mutator:
    """Mutations by a random generator: equal seeds and messages give equal mutations."""

    def __init__(self, rng: random.Random, others: Sequence[Message] = ()) -> None:
        """`others`: messages whose parts may be put in place of parts of the same type (crossing)."""
        self.rng = rng
        self._others = tuple(others)

    def mutate(self, message: M, times: int = 1) -> tuple[M, tuple[str, ...]]:
        """A changed copy, and what was done where."""
        changed = type(message)()
        changed.CopyFrom(message)
        done: list[str] = []
        for _ in range(times):
            site = self._choose(sites(changed))
            if site is not None:
                done.append(f"{self._change(site)} {site.path}")
        return changed, tuple(done)

    def fill(self, message: Message, depth: int = 0) -> None:
        """Set about half of the fields of an empty message to anything."""
        for field in message.DESCRIPTOR.fields:
            if _is_map(field) or self.rng.random() < 0.5:
                continue
            if field.is_repeated:
                for _ in range(self.rng.choice((1, 1, 2, 5))):
                    self._append(message, field, depth)
            elif field.type == Field.TYPE_MESSAGE:
                child = getattr(message, field.name)
                child.SetInParent()
                if depth < 3:
                    self.fill(child, depth + 1)
            else:
                setattr(message, field.name, self.value(field))

    def value(self, field: Any) -> Any:
        """Anything that a scalar field takes, mostly from the edges."""
        rng = self.rng
        match field.cpp_type:
            case Field.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case Field.CPPTYPE_FLOAT | Field.CPPTYPE_DOUBLE:
                return rng.choice((*_FLOATS, rng.uniform(-2, 2)))
            case Field.CPPTYPE_ENUM:
                known = [value.number for value in field.enum_type.values]
                return rng.choice((*known, max(known) + 1, 99, 2**31 - 1, -1, -(2**31)))
            case Field.CPPTYPE_STRING:
                return self._bytes() if field.type == Field.TYPE_BYTES else rng.choice(_STRINGS)
        low, high = _RANGES[field.cpp_type]
        return rng.choice([number for number in (*_NUMBERS, low, high, high - 1) if low <= number <= high])

    # --- inside ------------------------------------------------------------------------------------------------

    def _choose(self, found: Sequence[Site]) -> Site | None:
        """Mostly fields that are set: what is unset is often not looked at."""
        there = [site for site in found if site.present]
        chosen = there if there and self.rng.random() < 0.75 else found
        return self.rng.choice(chosen) if chosen else None

    def _change(self, site: Site) -> str:
        kinds = self._kinds(site)
        name = self.rng.choice(tuple(kinds))
        kinds[name]()
        return name

    def _kinds(self, site: Site) -> dict[str, Callable[[], None]]:
        owner, field = site.owner, site.field
        kinds: dict[str, Callable[[], None]] = {}
        if site.present:
            kinds["drop"] = lambda: owner.ClearField(field.name)
        if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
            kinds["switch"] = lambda: self._switch(owner, field)
        if field.is_repeated:
            kinds["append"] = lambda: self._append(owner, field, 2)
            if site.present:
                kinds |= {
                    "blow up": lambda: self._blow_up(owner, field),
                    "shuffle": lambda: self._shuffle(owner, field),
                    "cut": lambda: self._cut(owner, field),
                }
                if field.type != Field.TYPE_MESSAGE:
                    kinds["set element"] = lambda: self._set_element(owner, field)
            return kinds
        if field.type == Field.TYPE_MESSAGE:
            kinds["empty"] = lambda: self._empty(owner, field)
            kinds["refill"] = lambda: self._refill(owner, field)
            if spare := self._spare(field, getattr(owner, field.name)):
                kinds["cross"] = lambda: getattr(owner, field.name).CopyFrom(self.rng.choice(spare))
            return kinds
        kinds["set"] = lambda: setattr(owner, field.name, self.value(field))
        kinds["nudge"] = lambda: setattr(owner, field.name, self._nudged(field, getattr(owner, field.name)))
        return kinds

    def _nudged(self, field: Any, value: Any) -> Any:
        """Near what was there: the next number, one bit, one character."""
        rng = self.rng
        if field.cpp_type in _RANGES:
            low, high = _RANGES[field.cpp_type]
            return min(max(value + rng.choice((-1, 1, 2, -16, 16, value)), low), high)
        if isinstance(value, bytes) and value:
            place = rng.randrange(len(value))
            flipped = bytes([value[place] ^ (1 << rng.randrange(8))])
            return rng.choice((value[:place] + flipped + value[place + 1 :], value[:-1], value + b"\0", value[1:]))
        if isinstance(value, str) and value:
            return rng.choice((value[:-1], value + "x", value.swapcase(), value[::-1]))
        return self.value(field)

    def _bytes(self) -> bytes:
        length = self.rng.choice((0, 1, 8, 16, 31, 32, 32, 32, 33, 64, 1000, 65_536))
        return self.rng.randbytes(length)

    def _append(self, owner: Message, field: Any, depth: int) -> None:
        values = getattr(owner, field.name)
        if field.type == Field.TYPE_MESSAGE:
            child = values.add()
            if depth < 3:
                self.fill(child, depth + 1)
        else:
            values.append(self.value(field))

    def _blow_up(self, owner: Message, field: Any) -> None:
        values = getattr(owner, field.name)
        element = self.rng.choice(list(values))
        size = max(1, element.ByteSize() if isinstance(element, Message) else len(bytes(str(element), "utf-8")))
        count = min(self.rng.choice(MANY), max(1, MAX_BYTES // size))
        values.extend([element] * count)

    def _shuffle(self, owner: Message, field: Any) -> None:
        values = getattr(owner, field.name)
        kept = [_copied(element) for element in values]
        self.rng.shuffle(kept)
        owner.ClearField(field.name)
        values.extend(kept)

    def _cut(self, owner: Message, field: Any) -> None:
        values = getattr(owner, field.name)
        del values[self.rng.randrange(len(values)) :]

    def _set_element(self, owner: Message, field: Any) -> None:
        values = getattr(owner, field.name)
        values[self.rng.randrange(len(values))] = self.value(field)

    def _empty(self, owner: Message, field: Any) -> None:
        owner.ClearField(field.name)
        getattr(owner, field.name).SetInParent()

    def _refill(self, owner: Message, field: Any) -> None:
        self._empty(owner, field)
        self.fill(getattr(owner, field.name), 1)

    def _switch(self, owner: Message, field: Any) -> None:
        other = self.rng.choice([one for one in field.containing_oneof.fields if one is not field])
        if other.type == Field.TYPE_MESSAGE:
            self._refill(owner, other)
        else:
            setattr(owner, other.name, self.value(other))

    def _spare(self, field: Any, present: Message) -> list[Message]:
        """Parts of the other messages with the field's type, unlike what is there."""
        wanted = field.message_type.full_name
        found: list[Message] = []
        for other in self._others:
            for site in sites(other):
                if site.field.type != Field.TYPE_MESSAGE or site.field.message_type.full_name != wanted:
                    continue
                value = getattr(site.owner, site.field.name)
                found += [one for one in (value if site.field.is_repeated else (value,)) if one != present]
        return found


def _is_map(field: Any) -> bool:
    return field.type == Field.TYPE_MESSAGE and field.message_type.GetOptions().map_entry


def _copied(element: Any) -> Any:
    if not isinstance(element, Message):
        return element
    copy = type(element)()
    copy.CopyFrom(element)
    return copy
