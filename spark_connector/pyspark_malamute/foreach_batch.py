"""foreachBatch into a stream: the sink as a function.

Owns what a batch of foreachBatch is known by. The rule: module scope imports pyspark only, for the
package does so too.
"""

from __future__ import annotations

import zlib
from typing import Any

from pyspark.sql import DataFrame

_QUERY_ID = "sql.streaming.queryId"


def write_batch(frame: DataFrame, batch_id: int, **options: Any) -> None:
    """Publish the rows of a micro-batch once, however often foreachBatch is run for it.

    frame, batch_id: as foreachBatch gives them. options: those of the sink. Without sinkId the
    batch is known by the id in the query's checkpoint and the stream, so that several writes into
    one stream, in one call of foreachBatch, need a sinkId each. Raises OptionError: Spark gives no
    such id here.
    """
    from pyspark_malamute.sink_options import TABLE

    given = {name: str(value) for name, value in options.items()}
    names = {name.lower() for name in given}
    if "sinkid" not in names:
        query = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        if not query:
            raise TABLE.error(
                "sinkId",
                "is missing, and Spark gives no id of a streaming query here; name what is "
                "written, another name for each query and checkpointLocation",
            )
        # Two writes of one call, into two streams, are two batches of the sink.
        stream = next((given[name] for name in given if name.lower() in ("stream", "topic")), "")
        given["sinkId"] = f"{query}-{zlib.crc32(stream.encode()):08x}"
    writer = frame.write.format("malamute").mode("append")
    writer.options(**given, batchId=str(batch_id)).save()
