"""The columns of the source.

Owns the Spark schema. The rule: it follows from the options alone, since Spark fixes it
before anything is read.
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyspark_malamute.errors import MalamuteSourceError
from pyspark_malamute.options import RECORDS, SourceOptions


def spark_schema(options: SourceOptions) -> StructType:
    """Columns of a row, in order; a name that is none of ours is that of a field, a text.

    Where a row stands for a range (`counts_by_range`), column RECORDS tells how many it has.
    """
    text = StringType()
    texts = MapType(text, text, valueContainsNull=False)
    body: DataType = BinaryType()
    if options.body_type == "list":
        body = ArrayType(body, containsNull=False)
    kinds: dict[str, DataType] = {
        "stream": text,
        "offset": LongType(),
        "append_time": TimestampType(),
        "client_time": TimestampType(),
        "subject": text,
        "keys": ArrayType(text, containsNull=False),
        "fields": texts,
        "properties": texts,
        "body": body,
        **({RECORDS: LongType()} if options.counts_by_range else {}),
    }
    nullable = {"client_time", *options.field_columns}
    return StructType(
        [StructField(name, kinds.get(name, text), name in nullable) for name in options.columns]
    )


def check_schema(given: StructType, options: SourceOptions) -> SourceOptions:
    """Return the options with what a reader needs to know of the schema; for the reader's making.

    given: the schema that Spark hands back, or the user's. Raises MalamuteSourceError: the user
    gave a schema, and it is another than ours.
    """
    if options.body_type == "typed":
        from pyspark_malamute.typed import with_schema

        return with_schema(options, given)
    ours = spark_schema(options)
    if given.fieldNames() != ours.fieldNames() or [f.dataType for f in given] != [
        f.dataType for f in ours
    ]:
        raise MalamuteSourceError(
            f"malamute source: the schema is fixed, {ours.simpleString()}; remove .schema(...), "
            "and take the body apart with from_json, from_avro or cast after loading"
        )
    return options
