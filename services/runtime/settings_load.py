"""Merge of the sources of settings: flags > environment > TOML > model folder > defaults. Keys know their source.

One file may serve all roles of a deployment: top-level tables hold for every role, tables under [roles.ROLE] for that
role alone and win over top-level ones of the same source. The environment and the flags follow the same rule
(`HEADRACE_ROLES__PREFILL__LOG__LEVEL`).

A model folder may say how it wants to be loaded: headrace.toml in it holds a table [load], which stands below all other
sources and reaches the roles that have the section.
"""

from __future__ import annotations

import importlib
import json
import os
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings import ServiceSettings
from headrace.services.runtime.settings_fields import section_fields

ENV_PREFIX: Final = "HEADRACE_"
ENV_CONFIG: Final = "HEADRACE_CONFIG"
"""Names the TOML file when `--config` does not."""
NOT_SETTINGS: Final = frozenset(
    {
        ENV_CONFIG,
        "HEADRACE_API_KEY",
        "HEADRACE_CACHE",
        "HEADRACE_IDENTITY",
        "HEADRACE_MODELS",
        "HEADRACE_RUNTIME",
        "HEADRACE_VENV",
        "HEADRACE_WITHOUT_SERVERS",
    }
)
"""Variables with the prefix that are no settings: of this module, build.sh, the models directory and the CLI."""

FOLDER_FILE: Final = "headrace.toml"
FOLDER_SECTION: Final = "load"
"""A model folder's own file of settings, and the one table that it may hold."""

S = TypeVar("S", bound=ServiceSettings)
_Tree = dict[str, Any]
_ROLES: Final = "roles"
_UNKNOWN: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
"""pydantic's words for a key that a model, or a dataclass, does not have."""


class SettingsError(Exception):
    """Settings are wrong; the message has one line per problem, with the source of each."""


def settings_class(role: Role) -> type[ServiceSettings]:
    """A role's own class, of its services/ROLE/settings.py. By name, as processes share no code beyond this folder."""
    module = importlib.import_module(f"headrace.services.{role}.settings")
    found: type[ServiceSettings] = getattr(module, f"{role.capitalize()}Settings")
    return found


def load(
    cls: type[S],
    config: Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> S:
    """The settings of one process.

    `sets` are `section.field=value` strings; `environ` defaults to the process environment. Raises SettingsError
    for an unknown key, a bad value, an unreadable file.
    """
    environ = os.environ if environ is None else environ
    if config is None and (named := environ.get(ENV_CONFIG)):
        config = Path(named)
    layers = [_toml_layer(config)] if config is not None else []
    layers += [_environ_layer(cls, environ), _flags_layer(cls, sets)]
    merged: _Tree = {}
    origins: dict[tuple[str, ...], str] = {}
    for leaves in layers:
        for path, (value, origin) in _for_role(cls.ROLE, leaves).items():
            _put(merged, path, value, origin)
            origins[path] = origin
    for path, (value, origin) in _folder_layer(cls, merged).items():
        if path not in origins:
            _put(merged, path, value, origin)
            origins[path] = origin
    try:
        return cls.model_validate(merged)
    except ValidationError as error:
        raise SettingsError("\n".join(_problems(error, origins))) from None


_Leaves = dict[tuple[str, ...], tuple[Any, str]]


def _toml_layer(config: Path) -> _Leaves:
    try:
        tree = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {config}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{config} is no TOML: {error}") from error
    return {path: (value, str(config)) for path, value in _leaves(tree, ())}


def _folder_layer(cls: type[BaseModel], merged: _Tree) -> _Leaves:
    """What the folder of model.folder prefers, for a role with the section `load`."""
    model = merged.get("model")
    folder = model.get("folder") if isinstance(model, dict) else None
    if not isinstance(folder, (str, Path)) or FOLDER_SECTION not in cls.model_fields:
        return {}
    path = Path(folder) / FOLDER_FILE
    leaves = _toml_layer(path) if path.is_file() else {}
    for key in leaves:
        if key[0] != FOLDER_SECTION:
            raise SettingsError(f"{'.'.join(key)} ({path}): a model folder may set only [{FOLDER_SECTION}]")
    return leaves


def _leaves(tree: _Tree, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*at, key))
        else:
            yield (*at, key), value


def _environ_layer(cls: type[BaseModel], environ: Mapping[str, str]) -> _Leaves:
    leaves: _Leaves = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            path = tuple(name[len(ENV_PREFIX) :].lower().split("__"))
            origin = f"environment variable {name}"
            leaves[path] = (_parse(cls, path, text, origin), origin)
    return leaves


def _flags_layer(cls: type[BaseModel], sets: Sequence[str]) -> _Leaves:
    leaves: _Leaves = {}
    for item in sets:
        dotted, equals, text = item.partition("=")
        if not equals or not dotted:
            raise SettingsError(f"--set {item!r}: expected section.field=value")
        path = tuple(dotted.strip().replace("-", "_").split("."))
        leaves[path] = (_parse(cls, path, text, f"--set {dotted}"), f"--set {dotted}")
    return leaves


def _for_role(role: Role, leaves: _Leaves) -> _Leaves:
    """The leaves that concern `role`, its own table's last; other roles' tables are validated by those roles."""
    common: _Leaves = {}
    own: _Leaves = {}
    for path, leaf in leaves.items():
        if path[0] != _ROLES:
            common[path] = leaf
        elif len(path) < 2 or path[1] not in {r.value for r in Role}:
            raise SettingsError(f"{'.'.join(path)} ({leaf[1]}): unknown role; roles are {', '.join(Role)}")
        elif path[1] == role and len(path) > 2:
            own[path[2:]] = leaf
    return common | own


def _put(tree: _Tree, path: tuple[str, ...], value: Any, origin: str) -> None:
    for key in path[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise SettingsError(f"{'.'.join(path)} ({origin}): {key} is a value, not a table")
        tree = below
    tree[path[-1]] = value


def _parse(cls: type[BaseModel], path: tuple[str, ...], text: str, origin: str) -> Any:
    """Text of a flag or variable as the field wants it. Unknown keys stay text; validation refuses them."""
    if path[0] == _ROLES:
        path = path[2:]
    kinds = _field_kinds(cls, path)
    if type(None) in kinds and text in ("", "none"):
        return None
    if kinds & {list, tuple, set, frozenset}:
        if not text.startswith("["):
            return [item.strip() for item in text.split(",") if item.strip()]
        return _json(text, origin)
    if dict in kinds:
        return _json(text, origin)
    return text


def _json(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{origin}: {text!r} is no JSON: {error.msg}") from error


def _field_kinds(cls: type[BaseModel], path: tuple[str, ...]) -> set[Any]:
    """The classes that a field's annotation allows, parameters dropped: list[int] | None → {list, NoneType}."""
    model: Any = cls
    annotation: Any = None
    for key in path:
        if key not in (fields := section_fields(model)):
            return set()
        annotation = model = fields[key].annotation
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return {get_origin(one) or one for one in alternatives if get_origin(one) is not Literal}


def _problems(error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_input=False):
        path = tuple(str(part) for part in problem["loc"])
        under = [origin for at, origin in origins.items() if at[: len(path)] == path]
        above = [origin for at, origin in origins.items() if path[: len(at)] == at]
        source = ", ".join(dict.fromkeys(under or above)) or "defaults"
        text = "unknown key" if problem["type"] in _UNKNOWN else problem["msg"]
        yield f"{'.'.join(path) or 'settings'} ({source}): {text}"


def to_sets(settings: ServiceSettings) -> list[str]:
    """`section.field=value` strings that reproduce what differs from the defaults, as `headrace up` hands to children.

    Secrets are left out: hand them on by environment, as flags can be read by every user of the machine.
    """
    return list(_differences(settings, type(settings)(), ()))


def _differences(now: object, default: object, at: tuple[str, ...]) -> Iterator[str]:
    for name in section_fields(type(now)):
        value, usual = getattr(now, name), getattr(default, name)
        path = (*at, name)
        if section_fields(type(value)):
            yield from _differences(value, usual, path)
        elif value != usual and not isinstance(value, SecretStr):
            yield f"{'.'.join(path)}={_text(value)}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return json.dumps(list(value) if isinstance(value, (set, frozenset)) else value)
    return str(value)
