"""Settings of streams, mailboxes, services and cursors, as people type and read them.

Owns the units: a setting whose name says bytes takes a size, one that ends in _ms a duration. The
rule: the broker decides what a setting may be; this module knows only how it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from malamute_protocol.schema import SchemaError, read_schema
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.output import Cell
from malamute_py.cli.values import (
    count_text,
    duration_ms,
    duration_text,
    pairs,
    size_bytes,
    size_text,
    typed,
)

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting by its name (repeatable)."),
]
Description = Annotated[str | None, typer.Option(metavar="TEXT", help="Description for people.")]
LevelOption = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="Confirm at: stored or synced (default).")
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Settings that are not named go back to their defaults.")
]
_TEXTS: Final = ("description", "level", "full", "dead_letters", "body_kind", "validate")
"""Settings that are texts, also where a person types digits."""


def wanted(texts: list[str] | None, **flags: Any) -> dict[str, Any]:
    """Return settings by name, as the broker takes them, from --set and from options of their own.

    flags: values of those options as typed; None: it was not given. Raises CommandFailed: a text is
    no size, duration or pair.
    """
    given: dict[str, Any] = dict(pairs(texts, "--set"))
    given.update({name: value for name, value in flags.items() if value is not None})
    return {name: _read(name, value) for name, value in given.items()}


def _read(name: str, value: Any) -> Any:
    """Return a setting's value from what a person typed: sizes and times may have units.

    A value that is no text was read by the framework already.
    """
    if not isinstance(value, str) or name in _TEXTS:
        return value
    if "bytes" in name:
        return size_bytes(value)
    if name.endswith("_ms") and not value.isdigit():
        return duration_ms(value)
    return typed(value)


def _columns(schema: bytes) -> str:
    """Return the columns of a schema for a person."""
    try:
        return ", ".join(map(str, read_schema(schema)))
    except SchemaError as error:
        return error.reason


def schema_of(file: Path) -> bytes:
    """Return the schema of a file: of Arrow (stream, file or feather) or Parquet.

    Raises CommandFailed: it has none.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise CommandFailed(
            "a schema needs pyarrow: pip install 'malamute-py[arrow]'", USAGE
        ) from None
    from malamute_py.client.session.tables import schema_message

    readers = (
        parquet.read_schema,
        lambda path: pa.ipc.open_file(path).schema,
        lambda path: pa.ipc.open_stream(path).schema,
    )
    for read in readers:
        try:
            schema = read(str(file))
        except FileNotFoundError as error:
            raise CommandFailed(f"there is no file {file}", USAGE) from error
        except (pa.ArrowException, OSError):
            continue  # It is of another form.
        return schema_message(schema)
    raise CommandFailed(f"{file} is neither Parquet nor Arrow", USAGE)


def shown(settings: Mapping[str, Any], zero: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return settings as a person reads them; JSON still has the numbers.

    zero: what 0 means, by setting, where that is not "no limit".
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "schema" and value:
            found[name] = _columns(value)
        elif name == "former_schemas" and value:
            found[name] = "; ".join(map(_columns, value))
        elif type(value) is not int:
            found[name] = value
        elif not value:
            found[name] = Cell(value, (zero or {}).get(name, "no limit"), "dim")
        elif "bytes" in name:
            found[name] = Cell(value, size_text(value))
        elif name.endswith("_ms"):
            found[name] = Cell(value, duration_text(value))
        else:
            found[name] = Cell(value, count_text(value))
    return found
