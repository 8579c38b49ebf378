"""Random operations: SQLite and Redis say what the dict says, through two handles as two processes have them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.index.open import open_index
from headrace.kvcache.index.sqlite import SqliteIndex
from tests.kvcache.index.redis_server import RedisServer
from tests.kvcache.index.rows import key, row, soon

NUMBERS = st.integers(0, 11)
GROUPS = st.sampled_from(["a", "b", "v1/ff/chat/1800000000/n-b-3.seg"])


@st.composite
def rows(draw: st.DrawFn) -> IndexRow:
    return row(
        draw(NUMBERS),
        draw(GROUPS),
        draw(st.sampled_from([0, 4096, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 96) - 1])),
        length=draw(st.integers(1, 1 << 22)),
        kind=draw(st.sampled_from(EntryKind)),
        retention=draw(st.sampled_from(RetentionClass)),
        tokens=draw(st.integers(1, 1 << 20)),
        expires_at=draw(st.integers(0, 1 << 31)),
        tenant_tag=bytes([draw(st.integers(0, 2))]) * 16,
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(rows(), max_size=6)),
        st.tuples(st.just("get"), st.lists(NUMBERS, max_size=8)),
        st.tuples(st.just("remove"), st.lists(NUMBERS, max_size=4)),
        st.tuples(st.just("remove other"), st.lists(rows(), max_size=4)),
        st.tuples(st.just("drop"), GROUPS),
        st.tuples(st.just("rows of"), GROUPS),
        st.tuples(st.just("scan"), st.none()),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=14,
)


def by_key(found: object) -> list[IndexRow]:
    return sorted(found, key=lambda r: r.key)  # type: ignore[call-overload, no-any-return]


def run(index: Index, operations: list[tuple[str, object]]) -> list[object]:
    """What a caller sees of the operations, and what is left at the end."""
    seen: list[object] = []
    for name, argument in operations:
        match name, argument:
            case "put", list():
                index.put_many(argument, soon())
            case "get", list():
                seen.append(list(index.get_many([key(number) for number in argument], soon())))
            case "remove", list():
                there = index.get_many([key(number) for number in argument], soon())
                seen.append(index.remove_many([r for r in there if r is not None], soon()))
            case "remove other", list():
                seen.append(index.remove_many(argument, soon()))
            case "drop", str():
                seen.append(by_key(index.drop_group(argument, soon())))
            case "rows of", str():
                seen.append(by_key(index.rows_of(argument, soon())))
            case "scan", _:
                seen.append(by_key(index.scan(soon())))
            case "clear", _:
                index.clear(soon())
    stats = index.stats(soon())
    seen += [by_key(index.scan(soon())), sorted(index.groups(soon())), stats.entries, stats.groups]
    return seen


RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@RANDOM
@given(operations=OPERATIONS, cached_rows=st.sampled_from([0, 3, 1_000]))
def test_sqlite_says_what_the_dict_says(tmp_path: Path, operations: list[tuple[str, object]], cached_rows: int) -> None:
    index = SqliteIndex(tmp_path / f"{uuid.uuid4().hex}.sqlite", cached_rows=cached_rows)
    try:
        assert run(index, operations) == run(DictIndex(), operations)
    finally:
        index.close()


@RANDOM
@given(operations=OPERATIONS)
def test_redis_says_what_the_dict_says(redis_plain: RedisServer, operations: list[tuple[str, object]]) -> None:
    index = open_index(redis_plain.url, Path("unused"), uuid.uuid4().hex)
    try:
        assert run(index, operations) == run(DictIndex(), operations)
    finally:
        index.clear(soon())
        index.close()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_names_and_tenants_are_remembered_right_while_groups_come_and_go(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A number that one process remembers must never mean another group later."""
    url = "sqlite" if kind == "sqlite" else request.getfixturevalue("redis_plain").url
    name = uuid.uuid4().hex
    writer, reader = (open_index(url, tmp_path, name, cached_rows=0) for _ in range(2))
    for turn in range(30):
        changes = row(turn, f"group {turn}", tenant_tag=bytes([turn]) * 16)
        writer.put_many([changes], soon())
        assert list(reader.get_many([key(turn)], soon())) == [changes]
        assert list(writer.drop_group(f"group {turn}", soon())) == [changes]
        assert list(reader.get_many([key(turn)], soon())) == [None]
    writer.close()
    reader.close()
