"""The generator of the tables of options in the Spark connector's README.

Owns how a row of OPTIONS or SINK_OPTIONS becomes a row of its table. The rule: what it makes is
committed, and tests/spark compares it. `make spark-options` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pyspark_malamute.option_values import Option
from pyspark_malamute.options import OPTIONS
from pyspark_malamute.sink_options import SINK_OPTIONS

README: Final = Path(__file__).resolve().parents[1] / "spark_connector" / "README.md"
HEAD: Final = "| Option | Default | Meaning |\n|---|---|---|\n"
_TABLE: Final = re.compile(re.escape(HEAD) + r"(\|.*\n)*")


def option_tables() -> tuple[str, str]:
    """The tables of the source and of the sink, as Markdown."""
    source, sink = ("".join(map(_row, options)) for options in (OPTIONS, SINK_OPTIONS))
    return HEAD + source, HEAD + sink


def _row(option: Option) -> str:
    default = f"`{option.default}`" if option.default else ""
    owner = "df" if option.only == "write" else "spark"
    only = f" (`{owner}.{option.only}` only)" if option.only else ""
    names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
    return f"| {names} | {default} | {option.meaning}{only} |\n"


def with_tables(text: str) -> str:
    """The README's text with the tables in their places."""
    tables = iter(option_tables())
    made, count = _TABLE.subn(lambda _: next(tables), text)
    assert count == len(option_tables()), "the README has a table for the source and for the sink"
    return made


def main() -> None:
    """Write the tables into the README."""
    README.write_text(with_tables(README.read_text()))


if __name__ == "__main__":
    main()
