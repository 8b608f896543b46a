"""Pipelines that run as they are: archive, compact, history, aggregate and replay.

Owns the public names. `malamute spark` runs them at the command line. Source:
spark_connector/README.md, Pipelines; ARCHITECTURE.md, The archive.
"""

from __future__ import annotations

from pyspark_malamute.pipelines.aggregating import aggregate
from pyspark_malamute.pipelines.archiving import archive
from pyspark_malamute.pipelines.compaction import Compacted, compact
from pyspark_malamute.pipelines.reading import history, read_archive
from pyspark_malamute.pipelines.replaying import Replayed, replay

__all__ = [
    "Compacted",
    "Replayed",
    "aggregate",
    "archive",
    "compact",
    "history",
    "read_archive",
    "replay",
]
