"""The connector's README says of options and columns what the code says."""

from __future__ import annotations

from pyspark_malamute.options import parse_options
from pyspark_malamute.schema import spark_schema
from pyspark_malamute.sink_options import KINDS
from tools.spark_options import README, option_tables


def cells_of(section: str) -> list[list[str]]:
    text = README.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_tables_of_options_are_those_that_make_spark_options_writes() -> None:
    for table in option_tables():
        assert table in README.read_text()


def test_each_column_of_the_sink_is_there_with_its_types() -> None:
    found = {row[0]: tuple(row[1].split(" or ")) for row in cells_of("Writing into a stream")}
    assert {name: found.get(name) for name in KINDS} == KINDS


def test_each_column_is_there_with_its_type() -> None:
    columns = spark_schema(
        parse_options(
            {
                "endpoint": "tcp://a:1", "streams": "s", "includeKeys": "true",
                "includeProperties": "true",
            }
        )
    )  # fmt: skip
    assert [(row[0], row[1].partition(",")[0]) for row in cells_of("Columns")] == [
        (field.name, field.dataType.simpleString().partition(",")[0]) for field in columns
    ]
