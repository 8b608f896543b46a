"""The connector's README says of the options what the table of options says."""

from __future__ import annotations

from pathlib import Path

from pyspark_malamute.options import OPTIONS, parse_options
from pyspark_malamute.schema import spark_schema

README = Path(__file__).parents[2] / "spark_connector" / "README.md"


def cells_of(section: str) -> list[list[str]]:
    text = README.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows]


def test_each_option_is_there_with_its_default_and_meaning() -> None:
    assert cells_of("Options") == [
        [
            option.name,
            option.default or "",
            option.meaning + (f" (`spark.{option.only}` only)" if option.only else ""),
        ]
        for option in OPTIONS
    ]


def test_each_column_is_there_with_its_type() -> None:
    columns = spark_schema(
        parse_options(
            {
                "endpoint": "tcp://a:1", "stream": "s", "includeKeys": "true",
                "includeProperties": "true",
            }
        )
    )  # fmt: skip
    assert [(row[0], row[1].partition(",")[0]) for row in cells_of("Columns")] == [
        (field.name, field.dataType.simpleString().partition(",")[0]) for field in columns
    ]
