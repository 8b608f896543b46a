"""How a configuration is filled: the file, then variables, then the command line.

Owns how each of them is read, of which the later goes over the earlier. The rule: a fault is told
by its key, with what may be written instead. A number of bytes or a time may be a text with its
unit ("4GiB", "5s"). Source: deploy/malamute.toml.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from malamute_py import units
from malamute_py.config.combinations import wrong_in_combination
from malamute_py.config.keys import (
    FIELDS,
    FILES,
    KEYS,
    SECTIONS,
    WITH_UNITS,
    key_faults,
    key_of_variable,
    nearest,
    path_of_override,
    put,
)
from malamute_py.config.sections import Config
from malamute_py.sections import ConfigError


def load(
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration of a broker: a file, over it variables, over them overrides.

    environment: usually os.environ; MALAMUTE_JOURNAL_RING_BYTES is journal.ring_bytes. overrides:
    values by dotted name, of the command line or an embedding program. Raises ConfigError, which
    names the key and where it was written.
    """
    table: dict[str, Any] = {}
    if path is not None:
        table = read_file(Path(path))
        try:
            # The file is checked by itself: once variables and overrides are in it, no fault could
            # be attributed to it.
            typed(table)
        except ConfigError as error:
            raise ConfigError(error.key, f"{error.why} (in {path})") from None
    for name, text in sorted((environment or {}).items()):
        key = key_of_variable(name)
        if key is not None:
            put(table, key.split("."), parse_value(key, text))
    for key, value in (overrides or {}).items():
        put(table, path_of_override(key), read_override(key, value))
    return from_table(table)


def read_override(key: str, value: Any) -> Any:
    """Read the value of an override, which may be a text as on the command line."""
    return parse_value(key, value) if isinstance(value, str) else value


def from_table(table: Mapping[str, Any]) -> Config:
    """Return a configuration of a table of tables, wholly checked; raises ConfigError."""
    config = typed(table)
    for fault in wrong_in_combination(config):
        raise fault
    return config


def typed(table: Mapping[str, Any]) -> Config:
    """Return a configuration of a table of tables, each value checked by itself alone.

    What the table leaves out has its default. Raises ConfigError.
    """
    for fault in key_faults(table):
        raise fault
    try:
        return msgspec.convert(_in_units(table), Config, strict=True)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None


def _in_units(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the table with numbers where sizes and times are texts. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        # KEYS has None for a number. WITH_UNITS: tables whose keys KEYS lacks.
        if isinstance(value, Mapping) and (key in SECTIONS or key.startswith(WITH_UNITS)):
            value = _in_units(value, f"{key}.")
        elif isinstance(value, str) and (KEYS.get(key, str) is None or key.startswith(WITH_UNITS)):
            value = _number(key, value)
        found[name] = value
    return found


def _number(key: str, text: str) -> Any:
    """Read a size or a time; other texts stay what they are, for convert() to judge."""
    try:
        number = units.in_unit_of(key.rpartition(".")[2], text)
    except ValueError as error:
        raise ConfigError(key, str(error)) from None
    return text if number is None else number


def parse_value(key: str, text: str) -> Any:
    """Return the value of a key that a variable or the command line gives as text.

    Text stays as it is where the key takes text; else it is read as TOML. A list may be written
    with commas: tcp://127.0.0.1:9797,ipc:///run/malamute.sock; a number of bytes with its unit:
    64MiB.
    """
    # str, list, dict, a tuple of the words that are allowed, or None for numbers and the like.
    kind = KEYS.get(key)
    if kind is str:
        return text
    if kind is list:
        if text.lstrip().startswith("["):
            return _toml_value(key, text)
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(kind, tuple):
        return text  # whether it is one of the words is checked with the whole configuration
    if kind is None and not text.lstrip().startswith(("-", "+")):
        number = _number(key, text.replace("_", ""))
        if not isinstance(number, str):
            return number
    return _toml_value(key, text)


def _toml_value(key: str, text: str) -> Any:
    """Return what a text says as a value of TOML. Raises ConfigError."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(key, f"{text!r} is neither a number, true or false, nor a list") from None


def read_file(path: Path) -> dict[str, Any]:
    """Read a configuration's TOML file; relative paths in it begin at the file's folder.

    Raises ConfigError with the file as its key.
    """
    try:
        with path.open("rb") as file:
            return _beside(path.parent, tomllib.load(file))
    except FileNotFoundError:
        raise ConfigError(
            str(path), "there is no such file; `malamute deploy config` writes an example"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(str(path), "not valid TOML: nested too deep") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"not UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None


def _beside(folder: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose relative paths begin at the folder of the configuration's file.

    Not where the broker was started: FILES are the settings that name files. A path may begin with
    `~`, the home of a user. table: changed in place.
    """
    for key in FILES:
        section, _, name = key.partition(".")
        inner = table.get(section)
        named = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and isinstance(named, str) and named:
            inner[name] = str(folder / os.path.expanduser(named))  # an absolute path stays
    return table


def _validation_error(text: str) -> ConfigError:
    """Turn an error text of msgspec into an error for the operator, with key and what is allowed.

    text: such as "Expected `int`, got `str` - at `$.journal.ring_bytes`".
    """
    message, _, path = text.partition(" - at `$")
    # msgspec writes `[...]` for a key of a table.
    key = re.sub(r"\[\.\.\.\]", "", path.rstrip("`")).lstrip(".")
    words = KEYS.get(key)  # the allowed words of a setting, or its type
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message)
    if isinstance(words, tuple):
        message = f"must be one of {', '.join(words)}"
    elif unknown:
        fields = FIELDS.get(key, ())  # the keys of the section that the error names
        near = nearest(unknown[1], fields) or ("; there are " + ", ".join(fields) if fields else "")
        message = f"there is no such key: {unknown[1]}{near}"
    message = message.replace("`array`", "`list`").replace("`object`", "`table`")
    if words is list and "`str`" in message:
        message = 'must be a list: ["...", "..."], of one entry where there is one'
    return ConfigError(key or "configuration", message[:1].lower() + message[1:])
