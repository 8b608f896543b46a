"""`format("malamute")` of spark.readStream, spark.read, df.writeStream and df.write.

Owns the name by which Spark finds the source: PySpark imports every package called
pyspark_* and registers its DefaultSource. The rule: importing this package imports
pyspark and nothing else, since one failing import here would hide every other source of
the session as well.
"""

from __future__ import annotations

from pyspark_malamute.counting import count_records, read
from pyspark_malamute.foreach_batch import write_batch
from pyspark_malamute.source import DefaultSource

__all__ = ["DefaultSource", "count_records", "read", "write_batch"]
