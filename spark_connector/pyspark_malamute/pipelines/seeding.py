"""Spark's checkpoint of a query that begins at a given position.

Owns the three files of a checkpoint that the archive writes and the one that it reads. The rule: a
position that is kept elsewhere goes through the source's own checks (the stream is the same,
nothing is missing), which it makes of checkpoints only. Source: Spark's OffsetSeqLog and CommitLog,
version 1.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

_OFFSETS = '{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{}}'
_COMMIT = '{"nextBatchWatermarkMs":0}'
"""Text that Spark's files of a batch have beside the source's offset, of a query without state."""


def seed(checkpoint: Path, position: dict[str, Any]) -> None:
    """Write the checkpoint of a query that has done its first batch up to a position.

    A query that is started with it goes on after the position.
    """
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    (checkpoint / "offsets" / "0").write_text(f"v1\n{_OFFSETS}\n{json.dumps(position)}")
    (checkpoint / "commits" / "0").write_text(f"v1\n{_COMMIT}")


def position_after(checkpoint: Path, batch_id: int) -> dict[str, Any]:
    """The source's offset at the end of a batch that has begun, without its tasks.

    The archive keeps it, to go on after the batch; Spark writes it into the checkpoint before the
    batch is run.
    """
    line = (checkpoint / "offsets" / str(batch_id)).read_text().splitlines()[-1]
    found: dict[str, Any] = json.loads(line)
    found.pop("tasks", None)
    return found
