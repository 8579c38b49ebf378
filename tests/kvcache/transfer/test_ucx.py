"""ucx.py: the wire is read out of UCX's own tables."""

from __future__ import annotations

import pytest

from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.ucx import environment, wire_environment, wire_name


@pytest.mark.parametrize(
    ("config", "wire"),
    [
        ("cma/memory", "cma"),
        ("tcp/lo", "tcp"),
        ("cuda_ipc/cuda", "cuda_ipc"),
        ("rc_mlx5/mlx5_0:1", "rdma"),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1", "rdma"),
        ("sysv/memory", "shm"),
        ("cuda_copy/cuda, tcp/lo", "tcp"),
        ("cma/memory tcp/lo", "cma+tcp"),
        ("", "unknown"),
    ],
)
def test_wire_names(config: str, wire: str) -> None:
    assert wire_name(config) == wire


def test_settings_become_ucx_variables() -> None:
    only_tcp = wire_environment(TransferSettings(allowed_transports=frozenset({"tcp"})))
    assert only_tcp["UCX_TLS"] == "tcp"
    assert only_tcp["UCX_NET_DEVICES"] == "lo"
    anything = wire_environment(TransferSettings(net_devices="all"))
    assert "UCX_TLS" not in anything
    assert "UCX_NET_DEVICES" not in anything


def test_children_do_not_inherit_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("UCX_TLS", "mine")
    monkeypatch.delenv("UCX_LOG_FILE", raising=False)
    with environment({"UCX_TLS": "tcp", "UCX_LOG_FILE": "/dev/null"}):
        assert os.environ["UCX_TLS"] == "tcp"
    assert os.environ["UCX_TLS"] == "mine"
    assert "UCX_LOG_FILE" not in os.environ


@pytest.mark.parametrize(
    "bad",
    [
        {"allowed_transports": frozenset({"pigeon"})},
        {"allowed_transports": frozenset()},
        {"batch_bytes": 0},
        {"window": 0},
        {"push_timeout_s": 0.0},
    ],
)
def test_settings_are_checked_at_the_border(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        TransferSettings(**bad)  # type: ignore[arg-type]
