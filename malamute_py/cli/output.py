"""Output of commands: tables and colour for people, lines and JSON for programs.

Owns the decision between the three. The rule: tables and colour only where standard output is a
terminal (NO_COLOR is honoured), tab-separated lines without a header in a pipe, and JSON when it
was asked for; nothing is cut off in a pipe.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def on_terminal() -> bool:
    """Whether a person sees standard output."""
    return sys.stdout.isatty()


def in_colour() -> bool:
    """Whether standard output takes colour and the person wants it."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Column(NamedTuple):
    """One column of a listing: its key in JSON, its title for people."""

    key: str
    title: str
    right: bool = False
    style: str = ""
    whole: bool = False
    """True: the column is never broken over two lines."""
    spare: bool = False
    """True: the column is left out, the last first, where a terminal is too narrow for all."""
    cell: Callable[[Any], Any] | None = None
    """Returns the value or Cell of an entry; None: the value is the entry's attribute `key`."""

    def of(self, entry: Any) -> Any:
        """Return the value or Cell of an entry."""
        return getattr(entry, self.key) if self.cell is None else self.cell(entry)


class Cell:
    """A value, and its text for people where that differs; JSON has the value alone."""

    __slots__ = ("style", "text", "value")

    def __init__(self, value: Any, text: str, style: str = "") -> None:
        self.value = value
        self.text = text
        self.style = style


def kept(memory: bool) -> Cell:
    """Return the cell that says where something is kept."""
    return Cell(memory, "in memory", "yellow") if memory else Cell(memory, "on disk")


def entries(columns: Sequence[Column], found: Iterable[Any], **how: Any) -> None:
    """Print entries, of which each column takes its own value. how: as of listing()."""
    listing(columns, [[column.of(each) for column in columns] for each in found], **how)


def listing(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Any]],
    *,
    as_json: bool,
    empty: str,
    mark: str = "",
) -> None:
    """Print rows of values or Cells.

    empty: text for a person when there are no rows. mark: begins each line in a pipe, where a
    command prints more than one listing.
    """
    kept = list(rows)
    if as_json:
        print_json(_objects(columns, kept))
    elif not on_terminal():
        for row in kept:
            cells = [mark] if mark else []
            print("\t".join(cells + [_line(_value(cell)) for cell in row]))
    elif not kept:
        print(empty)
    else:
        _table(columns, kept)


def objects(columns: Sequence[Column], found: Iterable[Any]) -> list[dict[str, Any]]:
    """Return entries as JSON objects, with the columns' keys."""
    return _objects(columns, [[column.of(each) for column in columns] for each in found])


def _objects(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    keys = [column.key for column in columns]
    return [dict(zip(keys, map(_value, row), strict=True)) for row in rows]


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table for a person; leave out spare columns, the last first, until it fits."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    texts = [
        [cell if isinstance(cell, Cell) else Cell(cell, _line(cell)) for cell in row]
        for row in rows
    ]
    # `at` is the place of a column among all; `shown` are those that are left.
    widths = [_width(column, texts, at) for at, column in enumerate(columns)]
    out = console()
    shown = list(range(len(columns)))
    for at in reversed(range(len(columns))):
        if _total(widths[each] for each in shown) > out.width and columns[at].spare:
            shown.remove(at)
    # A figure that is cut is a wrong figure: rather claim more width than the terminal has, and let
    # it break the lines.
    out.width = max(out.width, _total(widths[each] for each in shown))
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in (columns[at] for at in shown):
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            style=column.style or None,
            no_wrap=column.right or column.whole,
            overflow="fold",
        )
    for row in texts:
        table.add_row(*(Text(row[at].text, style=row[at].style) for at in shown))
    out.print(table)
    hidden = [column.title for at, column in enumerate(columns) if at not in shown]
    if hidden:
        out.print(Text(f"not shown for want of room: {', '.join(hidden)}; see --json", "dim"))


_FOLDED: Final = 12
"""Width down to which columns of text may be folded."""


def _width(column: Column, rows: Sequence[Sequence[Cell]], at: int) -> int:
    """Return the least width of a column: its longest text, or _FOLDED where it may be folded."""
    from rich.cells import cell_len

    longest = max((cell_len(row[at].text) for row in rows), default=0)
    if not (column.right or column.whole):
        longest = min(longest, _FOLDED)
    return max(longest, cell_len(column.title))


def _total(widths: Iterable[int]) -> int:
    """Return the width of a table: three between two columns, one at each edge."""
    kept = list(widths)
    return sum(kept) + 3 * (len(kept) - 1) + 2


def facts(values: Mapping[str, Any], *, as_json: bool) -> None:
    """Print facts about one thing. values: values, Cells, or tables of these.

    In a pipe each is a line `name<tab>value`, with dotted names for inner tables.
    """
    if as_json:
        print_json({key: _value(value) for key, value in values.items()})
    elif on_terminal():
        _facts(values)
    else:
        for key, value in _flat("", values):
            print(f"{key}\t{_line(value)}")


def _facts(values: Mapping[str, Any]) -> None:
    """Print facts below each other, inner tables indented, for a person."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    def add(table: Mapping[str, Any], indent: str) -> None:
        """Add the rows of a table, each inner table below its name."""
        for key, value in table.items():
            # A Cell's text has its unit, and the name need not have it.
            known = key.removesuffix("_ms") if isinstance(value, Cell) else key
            name = indent + known.replace("_", " ")
            if isinstance(value, Mapping):
                if value:
                    grid.add_row(name, "")
                    add(value, indent + "  ")
            elif isinstance(value, Cell):
                grid.add_row(name, Text(value.text, style=value.style))
            else:
                text = f"{value:,}" if type(value) is int else _line(value)
                grid.add_row(name, Text(text or "-", style="" if text else "dim"))

    add(values, "")
    console().print(grid)


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the values of nested tables, and of Cells of tables, under dotted names."""
    for key, cell in values.items():
        value = _value(cell)
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield prefix + key, value


def _value(cell: Any) -> Any:
    return cell.value if isinstance(cell, Cell) else cell


def _line(value: Any) -> str:
    """Return one value as plain text without tabs or line ends."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return ",".join(_line(item) for item in value)
    if value is None:
        return ""
    return " ".join(str(value).split())


def print_json(value: Any, *, compact: bool = False) -> None:
    """Print one JSON value; bytes become hexadecimal text."""
    options: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    print(json.dumps(value, ensure_ascii=False, default=_jsonable, **options))


def _jsonable(value: Any) -> Any:
    """Return a value that JSON can hold in place of one that it cannot."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, Cell):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)


def done(text: str, value: Mapping[str, Any], *, as_json: bool) -> None:
    """Report that something was done: as a line, or as JSON facts."""
    if as_json:
        print_json(value, compact=True)
    elif in_colour():
        print(f"\x1b[32m✓\x1b[0m {text}")
    else:
        print(text)


def console() -> Any:
    """Return a rich console on standard output."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)
