"""The connector's README says of the options what the table of options says."""

from __future__ import annotations

from pyspark_malamute.options import parse_options
from pyspark_malamute.schema import spark_schema
from tools.spark_options import README, option_table


def cells_of(section: str) -> list[list[str]]:
    text = README.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_table_of_options_is_the_one_that_make_spark_options_writes() -> None:
    assert option_table() in README.read_text()


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
