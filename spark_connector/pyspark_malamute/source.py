"""The data source that Spark instantiates.

Owns the entry points, and nothing else. The rule: module scope imports pyspark only;
whatever else the source needs is imported when a query uses it.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Records of streams of a Malamute broker.

    See options.py for the options of the source, sink_options.py for those of the sink.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "malamute"

    def schema(self) -> StructType:
        """Columns; wrong options are refused here, at load(). Raises OptionError.

        Of a typed stream the broker is asked for them. Raises MalamuteSourceError: a table of
        Spark's catalog asks.
        """
        from pyspark_malamute.options import parse_options, refuse_a_table
        from pyspark_malamute.schema import spark_schema

        if self.options:  # Without any, parse_options() says which are missing.
            refuse_a_table(self.options)
        options = parse_options(self.options)
        if options.body_type == "typed":
            from pyspark_malamute.typed import typed_schema

            return typed_schema(options)
        return spark_schema(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what spark.read plans and reads with. Raises OptionError, MalamuteSourceError.

        schema: as schema() gave it, or as the user did, which is refused where it differs.
        """
        from pyspark_malamute.batch_reader import MalamuteReader
        from pyspark_malamute.options import parse_options, refuse_a_table, refuse_options_of
        from pyspark_malamute.schema import check_schema

        refuse_a_table(self.options)
        options = parse_options(self.options)
        refuse_options_of("readStream", self.options)
        options = check_schema(schema, options)
        if options.push_filters:  # Spark may refuse such a reader: see pushed.py.
            from pyspark_malamute.pushed import FilteredReader

            return FilteredReader(options)
        return MalamuteReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return what spark.readStream plans and reads with. Raises as reader()."""
        from pyspark_malamute.options import parse_options, refuse_options_of
        from pyspark_malamute.schema import check_schema
        from pyspark_malamute.stream_reader import MalamuteStreamReader

        options = parse_options(self.options)
        refuse_options_of("read", self.options)
        options = check_schema(schema, options)
        return MalamuteStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return what df.write publishes with. Raises OptionError, UnwritableRows.

        overwrite: whether mode is overwrite, which is refused.
        """
        from pyspark_malamute.sink import MalamuteWriter, check_columns, refuse_overwriting
        from pyspark_malamute.sink_options import parse_sink_options

        options = parse_sink_options(self.options, streaming=False)
        refuse_overwriting(overwrite)
        check_columns(schema, options)
        return MalamuteWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return what df.writeStream publishes with. Raises as writer()."""
        from pyspark_malamute.sink import MalamuteStreamWriter, check_columns, refuse_overwriting
        from pyspark_malamute.sink_options import parse_sink_options

        options = parse_sink_options(self.options, streaming=True)
        refuse_overwriting(overwrite)
        check_columns(schema, options)
        return MalamuteStreamWriter(options)
