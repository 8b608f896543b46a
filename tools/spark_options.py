"""The generator of the table of options in the Spark connector's README.

Owns how a row of OPTIONS becomes a row of the table. The rule: what it makes is committed, and
tests/spark compares it. `make spark-options` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pyspark_malamute.option_values import Option
from pyspark_malamute.options import OPTIONS

README: Final = Path(__file__).resolve().parents[1] / "spark_connector" / "README.md"
HEAD: Final = "| Option | Default | Meaning |\n|---|---|---|\n"
_TABLE: Final = re.compile(re.escape(HEAD) + r"(\|.*\n)*")


def option_table() -> str:
    """The table, as Markdown."""
    return HEAD + "".join(map(_row, OPTIONS))


def _row(option: Option) -> str:
    default = f"`{option.default}`" if option.default else ""
    only = f" (`spark.{option.only}` only)" if option.only else ""
    names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
    return f"| {names} | {default} | {option.meaning}{only} |\n"


def with_table(text: str) -> str:
    """The README's text with the table in its place."""
    made, count = _TABLE.subn(lambda _: option_table(), text)
    assert count == 1, "the README has one table of options"
    return made


def main() -> None:
    """Write the table into the README."""
    README.write_text(with_table(README.read_text()))


if __name__ == "__main__":
    main()
