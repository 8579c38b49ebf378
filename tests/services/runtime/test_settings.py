"""Settings: precedence, conversion, refusal of what is unknown, documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ByteSize, Field, SecretStr

from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings import (
    ListenSettings,
    RegistrySettings,
    Section,
    ServiceSettings,
    is_loopback,
)
from headrace.services.runtime.settings_docs import render, role_classes
from headrace.services.runtime.settings_fields import section_fields
from headrace.services.runtime.settings_load import SettingsError, load, to_sets

ROOT = Path(__file__).parents[3]


class PoolSettings(Section):
    """Memory."""

    bytes: ByteSize = ByteSize(1 << 30)
    """Size."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices."""
    weights: dict[str, float] = Field(default={})
    """Weights."""


class DecodeLike(ServiceSettings):
    """A role."""

    ROLE: ClassVar[Role] = Role.DECODE

    listen: ListenSettings = ListenSettings(port=7000)
    registry: RegistrySettings = RegistrySettings(ttl_seconds=3)
    pool: PoolSettings = PoolSettings()
    """Memory."""
    key: SecretStr = SecretStr("hidden-default")
    """A secret."""


def _file(folder: Path, text: str) -> Path:
    path = folder / "headrace.toml"
    path.write_text(text)
    return path


def test_no_configuration_at_all_is_a_working_local_process() -> None:
    settings = load(DecodeLike, environ={"HOME": "/", "HEADRACE_VENV": "/v"})
    assert settings == DecodeLike()
    assert settings.listen.host == "127.0.0.1"
    assert settings.registry.kind == "embedded"


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = _file(tmp_path, '[log]\nlevel = "error"\nformat = "json"\n[listen]\nport = 1\n[stop]\ndrain_seconds = 1\n')
    environ = {"HEADRACE_LOG__LEVEL": "warning", "HEADRACE_LISTEN__PORT": "2"}
    settings = load(DecodeLike, config, ["listen.port=3"], environ)
    assert (settings.listen.port, settings.log.level, settings.log.format) == (3, "warning", "json")
    assert settings.stop.drain_seconds == 1
    assert settings.stop.close_seconds == DecodeLike().stop.close_seconds


def test_a_role_table_wins_over_the_common_part_of_its_source_only(tmp_path: Path) -> None:
    config = _file(
        tmp_path,
        '[log]\nlevel = "error"\n[roles.decode.log]\nlevel = "debug"\n[roles.prefill]\nwhatever = 1\n'
        '[roles.decode.pool]\nbytes = "2GiB"\n',
    )
    assert load(DecodeLike, config, environ={}).log.level == "debug"
    assert load(DecodeLike, config, environ={}).pool.bytes == 2 << 30
    assert load(DecodeLike, config, environ={"HEADRACE_LOG__LEVEL": "info"}).log.level == "info"
    environ = {"HEADRACE_CONFIG": str(config), "HEADRACE_ROLES__DECODE__POOL__BYTES": "1MiB"}
    assert load(DecodeLike, environ=environ).pool.bytes == 1 << 20


def test_text_becomes_what_the_field_is() -> None:
    sets = ["pool.devices=cuda:0,cuda:1", 'pool.weights={"a": 0.5}', "listen.advertise=none", "metrics.enabled=false"]
    settings = load(DecodeLike, None, [*sets, "model.folder=/m", "rpc.max-message-bytes=1MiB"], {})
    assert settings.pool.devices == ("cuda:0", "cuda:1")
    assert settings.pool.weights == {"a": 0.5}
    assert settings.listen.advertise is None
    assert settings.metrics.enabled is False
    assert settings.model.folder == Path("/m")
    assert settings.rpc.max_message_bytes == 1 << 20
    assert load(DecodeLike, None, ['pool.devices=["a"]'], {}).pool.devices == ("a",)


@pytest.mark.parametrize(
    ("sets", "environ", "text", "message"),
    [
        (["listen.prot=1"], {}, "", r"listen\.prot \(--set listen\.prot\): unknown key"),
        ([], {"HEADRACE_NONSENSE": "1"}, "", r"nonsense \(environment variable HEADRACE_NONSENSE\): unknown key"),
        ([], {"HEADRACE_LISTEN__PORT": "x"}, "", r"listen\.port \(environment variable HEADRACE_LISTEN__PORT\)"),
        ([], {}, "[pool]\nbyte = 1", r"pool\.byte \(.*headrace\.toml\): unknown key"),
        ([], {}, "[roles.decoder]\nx = 1", r"unknown role"),
        (["listen=1"], {}, "[listen]\nport = 1", r"listen"),
        (["listen.port"], {}, "", r"expected section\.field=value"),
        (["pool.weights={"], {}, "", r"no JSON"),
        ([], {}, "listen = [", r"no TOML"),
        (["listen.port=70000"], {}, "", r"less than or equal to 65535"),
        (["registry.ttl_seconds=0"], {}, "", r"greater than or equal to 0\.2"),
    ],
)
def test_what_is_wrong_is_refused_with_its_source(
    tmp_path: Path, sets: list[str], environ: dict[str, str], text: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(DecodeLike, _file(tmp_path, text), sets, environ)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load(DecodeLike, tmp_path / "absent.toml", environ={})


def test_listening_beyond_loopback_needs_a_word() -> None:
    with pytest.raises(SettingsError, match="insecure_bind"):
        load(DecodeLike, None, ["listen.host=0.0.0.0"], {})
    with pytest.raises(SettingsError, match="insecure_bind"):
        load(DecodeLike, None, ["metrics.host=0.0.0.0"], {})
    sets = ["listen.host=0.0.0.0", "metrics.host=0.0.0.0", "listen.insecure_bind=true"]
    assert load(DecodeLike, None, sets, {}).listen.host == "0.0.0.0"
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("example")


def test_settings_travel_to_children_as_flags_and_secrets_do_not() -> None:
    sets = [
        "pool.devices=a,b",
        "pool.weights={}",
        "listen.port=9",
        "log.level=debug",
        "model.folder=/m",
        "key=topsecret",
    ]
    settings = load(DecodeLike, None, sets, {})
    flags = to_sets(settings)
    assert not any("topsecret" in flag for flag in flags)
    again = load(DecodeLike, None, [*flags, "key=topsecret"], {})
    assert again == settings
    assert "topsecret" not in repr(settings)


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DecodeLike().listen.port = 1  # type: ignore[misc]


def _undocumented(section: Any, at: str = "") -> list[str]:
    missing = []
    for name, field in section_fields(section).items():
        if section_fields(field.annotation):
            missing += _undocumented(field.annotation, f"{at}{name}.")
        elif not field.description:
            missing.append(at + name)
    return missing


def test_every_field_is_documented() -> None:
    assert [name for cls in (ServiceSettings, *role_classes()) for name in _undocumented(cls)] == []


def test_the_page_shows_what_a_role_adds_and_its_own_defaults() -> None:
    page = render([DecodeLike])
    role = page.split("## decode")[1]
    assert "| `listen.port` | `int` | `7000` |" in role
    assert "| `pool.bytes` | size | 1.0 GiB | Size. |" in role
    assert "`log.level`" not in role
    assert "hidden-default" not in page


def test_the_committed_page_is_what_the_classes_say() -> None:
    page = ROOT / "docs/settings.md"
    assert page.read_text(encoding="utf-8") == render(role_classes()), (
        "run: python -m headrace.services.runtime.settings_docs docs/settings.md"
    )
