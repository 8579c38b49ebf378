"""What a local cluster is made of: counts, cores, sizes, and which settings reach which process."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.cluster_spec import (
    SECTION_ROLES,
    ClusterSpec,
    parse_bytes,
    parse_pins,
    parse_replicas,
    router_store_sets,
    user_sets,
)
from headrace.cli.exits import CliError
from headrace.services.runtime.settings import ServiceSettings
from headrace.services.runtime.settings_docs import role_classes


def test_replicas() -> None:
    assert parse_replicas("prefill=2, decode=2,encoder=1") == {"prefill": 2, "decode": 2, "encoder": 1}
    for bad in ("prefill", "prefill=x", "prefill=-1", "prefill=1,prefill=2", ""):
        with pytest.raises(CliError, match="--replicas"):
            parse_replicas(bad)


def test_pins() -> None:
    assert parse_pins("prefill=0,decode-1=1-3+5") == {"prefill": frozenset({0}), "decode-1": frozenset({1, 2, 3, 5})}
    for bad in ("prefill", "prefill=", "prefill=3-1", "prefill=0,prefill=1"):
        with pytest.raises(CliError, match="--pin"):
            parse_pins(bad)


def test_sizes() -> None:
    assert parse_bytes("--memory", "8GiB") == 8 << 30
    assert parse_bytes("--memory", "1.5 mb") == 1_500_000
    assert parse_bytes("--memory", "17") == 17
    with pytest.raises(CliError, match="--memory 'lots'"):
        parse_bytes("--memory", "lots")


def test_names_and_cores() -> None:
    spec = ClusterSpec(
        Path("m"),
        {"decode": 2, "encoder": 1, "prefill": 1},
        pins={"decode": frozenset({0}), "decode-1": frozenset({1})},
    )
    assert spec.names == ("router-0", "encoder-0", "prefill-0", "decode-0", "decode-1")
    assert [spec.cores(name) for name in spec.names] == [frozenset(), frozenset(), frozenset(), {0}, {1}]


@pytest.mark.parametrize(
    ("replicas", "pins", "message"),
    [
        ({"cook": 1}, {}, "'cook' is no role"),
        ({"router": 2}, {}, "'router' is no role"),
        ({"decode": 1}, {"decode-1": frozenset({0})}, "no replica or role 'decode-1'"),
    ],
)
def test_what_makes_no_cluster_is_refused(
    replicas: dict[str, int], pins: dict[str, frozenset[int]], message: str
) -> None:
    with pytest.raises(CliError, match=message):
        ClusterSpec(Path("m"), replicas, pins=pins)


def test_a_setting_reaches_the_roles_that_have_its_section() -> None:
    sets = ["engine.max_sequences=4", "log.level=debug", "roles.decode.log.level=info", "router.credit_tokens=9"]
    assert user_sets(sets, "decode") == sets[:3]
    assert user_sets(sets, "encoder") == sets[1:3]
    assert user_sets(sets, "router") == [sets[1], sets[3], sets[2]]


def test_a_worker_has_the_settings_of_both_roles_that_it_may_have() -> None:
    """What one of them alone knows is addressed to it, before what the user has addressed, so that this wins."""
    sets = ["roles.decode.decode.linger_seconds=1", "decode.linger_seconds=9", "prefill.max_runs=3", "engine.threads=1"]
    both = ["roles.decode.decode.linger_seconds=9", "roles.prefill.prefill.max_runs=3", "engine.threads=1"]
    assert user_sets(sets, "prefill") == user_sets(sets, "decode") == [*both, sets[0]]
    assert user_sets(sets, "encoder") == [sets[0]]


def test_section_roles_are_those_of_the_settings_classes() -> None:
    """The table stands apart because the classes import torch; it must tell the same."""
    common = set(ServiceSettings.model_fields)
    found: dict[str, set[str]] = {}
    for cls in role_classes():
        for section in set(cls.model_fields) - common:
            found.setdefault(section, set()).add(cls.ROLE.value)
    assert found == {section: set(roles) for section, roles in SECTION_ROLES.items()}


def test_a_store_is_a_folder_or_a_url(tmp_path: Path) -> None:
    """`--store DIR` is a file URL with an absolute path, whatever the working directory of the workers."""
    assert ClusterSpec(tmp_path).store_url is None
    assert ClusterSpec(tmp_path, store=str(tmp_path / "cache")).store_url == f"file://{tmp_path}/cache"
    assert ClusterSpec(tmp_path, store="seaweedfs://one:9333").store_url == "seaweedfs://one:9333"


def test_the_router_is_told_where_the_store_of_the_workers_is(tmp_path: Path) -> None:
    """Otherwise it would know of the store only what events tell."""
    assert router_store_sets(ClusterSpec(tmp_path)) == []
    spec = ClusterSpec(tmp_path, store="seaweedfs://one:9333", sets=("cache.index=redis://one:6379/0", "cache.name=x"))
    assert router_store_sets(spec) == [
        "index.store=seaweedfs://one:9333",
        "index.store_index=redis://one:6379/0",
        "index.name=x",
    ]
    assert router_store_sets(ClusterSpec(tmp_path, sets=("roles.prefill.cache.name=x",))) == []
