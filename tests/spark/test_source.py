"""The source as Spark finds it, without a Spark session."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pyspark.sql.types import StructType

from pyspark_malamute import DefaultSource
from pyspark_malamute.errors import MalamuteSourceError, OptionError
from pyspark_malamute.options import parse_options
from pyspark_malamute.schema import spark_schema

LEAST = {"endpoint": "tcp://127.0.0.1:9797", "stream": "flights"}


@pytest.mark.moderate
def test_importing_the_package_imports_pyspark_and_nothing_of_ours_besides() -> None:
    """An import that fails in the package would hide every Python data source of a session."""
    program = (
        "import sys, pyspark.sql.datasource\n"
        "before = set(sys.modules)\n"
        "import pyspark_malamute\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["pyspark_malamute"]


def test_wrong_options_are_refused_when_the_source_is_loaded() -> None:
    with pytest.raises(OptionError, match="did you mean 'pattern'"):
        DefaultSource({**LEAST, "patern": "x"}).schema()


def test_a_table_is_refused_with_the_view_that_works_instead() -> None:
    """Spark 4.3 passes the table's properties for CREATE TABLE, and none for its first read."""
    created = {
        **LEAST, "provider": "malamute", "owner": "ann", "location": "file:/data/t",
        "option.endpoint": LEAST["endpoint"], "option.stream": "flights",
    }  # fmt: skip
    with pytest.raises(MalamuteSourceError, match="CREATE TEMPORARY VIEW name USING malamute"):
        DefaultSource(created).schema()
    with pytest.raises(MalamuteSourceError, match="CREATE TEMPORARY VIEW name USING malamute"):
        DefaultSource({}).reader(spark_schema(parse_options(LEAST)))


def test_the_schema_follows_from_the_options() -> None:
    source = DefaultSource({**LEAST, "includeKeys": "true", "includeProperties": "true"})
    assert source.schema().simpleString() == (
        "struct<offset:bigint,append_time:timestamp,client_time:timestamp,subject:string,"
        "keys:array<string>,fields:map<string,string>,properties:map<string,string>,body:binary>"
    )


def test_a_reader_refuses_the_options_of_the_other_kind_and_a_foreign_schema() -> None:
    source = DefaultSource({**LEAST, "maxRecordsPerTrigger": "5"})
    with pytest.raises(OptionError, match=r"spark\.readStream only"):
        source.reader(source.schema())
    with pytest.raises(MalamuteSourceError, match="the schema is fixed"):
        DefaultSource(LEAST).streamReader(spark_schema_with_keys())


def spark_schema_with_keys() -> StructType:
    return spark_schema(parse_options({**LEAST, "includeKeys": "true"}))
