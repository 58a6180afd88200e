"""Where a `ServeConfig` comes from: flags, then `MOESERVE_...` in the environment, then a TOML file, then defaults."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from moeserve.config import ConfigError, ServeConfig, parse_size

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def flag_name(setting: Field[Any]) -> str:
    """`kv_cache_memory` → `--kv-cache-memory`."""
    return "--" + setting.name.replace("_", "-")


def environment_name(setting: Field[Any]) -> str:
    """`kv_cache_memory` → `MOESERVE_KV_CACHE_MEMORY`."""
    return "MOESERVE_" + setting.name.upper()


def value_type(setting: Field[Any]) -> type:
    """The plain type of a setting's value: str, int, float or bool (also of each element of a tuple)."""
    hint = get_type_hints(ServeConfig)[setting.name]
    if isinstance(hint, UnionType) or get_args(hint):
        hint = next(part for part in get_args(hint) if part not in (type(None), Ellipsis))
    return hint  # type: ignore[no-any-return]


def load_config(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> ServeConfig:
    """The settings from all sources. `flags` maps field names to text (None or an empty tuple: not given).

    Raises ConfigError, whose sentence names the flag, variable or file key.
    """
    in_file = _read_toml(file) if file else {}
    values: dict[str, Any] = {}
    for setting in fields(ServeConfig):
        flag, variable = flags.get(setting.name), environment.get(environment_name(setting))
        if flag is not None and flag != ():
            values[setting.name] = _value(setting, flag, flag_name(setting))
        elif variable is not None:
            given = variable.split(",") if setting.metadata.get("multiple") else variable
            values[setting.name] = _value(setting, given, environment_name(setting))
        elif setting.name in in_file:
            values[setting.name] = _value(setting, in_file[setting.name], f"{setting.name} in {file}")
    return ServeConfig(**values)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    known = {setting.name for setting in fields(ServeConfig)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            raise ConfigError(f"{file} has an unknown setting {key!r}{hint}")
        if name in values:
            raise ConfigError(f"{file} gives {name} twice")
        values[name] = value
    return values


def _value(setting: Field[Any], given: Any, source: str) -> Any:
    """`given`, text or a TOML value, as the setting's type and within its limits."""
    if setting.metadata.get("multiple"):
        items = [given] if isinstance(given, str) else given
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{source} must be a list of strings")
        return tuple(_scalar(setting, item, source) for item in items)
    return _scalar(setting, given, source)


def _scalar(setting: Field[Any], given: Any, source: str) -> Any:
    metadata = setting.metadata
    try:
        value = parse_size(given) if metadata.get("kind") == "size" else _CONVERT[value_type(setting)](given)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (TypeError, ValueError, OverflowError):
        shown = "the given value" if metadata.get("secret") else repr(given)
        raise ConfigError(f"{source}: {shown} is not {_NOUNS[value_type(setting)]}") from None
    if "choices" in metadata and value not in metadata["choices"]:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(metadata['choices'])}")
    if "minimum" in metadata and value < metadata["minimum"]:
        raise ConfigError(f"{source}: {value} is less than {metadata['minimum']}")
    if "maximum" in metadata and value > metadata["maximum"]:
        raise ConfigError(f"{source}: {value} is more than {metadata['maximum']}")
    return value


def _as_bool(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    word = given.strip().lower() if isinstance(given, str) else ""
    if word not in _TRUE | _FALSE:
        raise ValueError
    return word in _TRUE


def _as_int(given: Any) -> int:
    if isinstance(given, bool | float):
        raise TypeError
    return int(given)


def _as_float(given: Any) -> float:
    if isinstance(given, bool):
        raise TypeError
    value = float(given)
    if not math.isfinite(value):
        raise ValueError
    return value


def _as_text(given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise TypeError
    return given.strip()


_CONVERT = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_text}
_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text that is not empty"}
