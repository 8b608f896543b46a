"""The data source that Spark instantiates.

Owns the entry points, and nothing else. The rule: module scope imports pyspark only;
whatever else the source needs is imported when a query uses it.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Records of one stream of a Malamute broker; see options.py for the options."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "malamute"

    def schema(self) -> StructType:
        """Columns; wrong options are refused here, at load(). Raises OptionError."""
        from pyspark_malamute.options import parse_options, refuse_a_table
        from pyspark_malamute.schema import spark_schema

        if self.options:
            refuse_a_table(self.options)
        return spark_schema(parse_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For spark.read."""
        from pyspark_malamute.batch_reader import MalamuteReader
        from pyspark_malamute.options import parse_options, refuse_a_table, refuse_options_of
        from pyspark_malamute.schema import check_schema

        refuse_a_table(self.options)
        options = parse_options(self.options)
        refuse_options_of("readStream", self.options)
        check_schema(schema, options)
        if options.push_filters:
            from pyspark_malamute.pushed import FilteredReader

            return FilteredReader(options)
        return MalamuteReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For spark.readStream."""
        from pyspark_malamute.options import parse_options, refuse_options_of
        from pyspark_malamute.schema import check_schema
        from pyspark_malamute.stream_reader import MalamuteStreamReader

        options = parse_options(self.options)
        refuse_options_of("read", self.options)
        check_schema(schema, options)
        return MalamuteStreamReader(options)
