"""Offsets as Spark writes them into a checkpoint.

Owns the one JSON form of an offset. The rules: Spark compares offsets as text, so there
is one encoder and it sorts the keys; an offset says which stream and which selection it
belongs to, and is never used with another. Source: SPEC.md, section 6 (positions).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pyspark_malamute.errors import CheckpointMismatch
from pyspark_malamute.options import SourceOptions

VERSION: Final = 1
_START_AFRESH: Final = (
    "To begin anew, give the query another checkpointLocation (and remove the sink's output, if "
    "it must not hold records twice)."
)


class StreamOffset(NamedTuple):
    """A position: everything of the selection before `offset` has been read."""

    stream: str
    """UUID of the stream, hexadecimal."""
    epoch: int
    offset: int
    selection: str
    """Hash of the pattern and the client-time window."""

    def to_json(self) -> dict[str, Any]:
        """What Spark stores, with its keys sorted."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "selection": self.selection,
            "stream": self.stream,
            "version": VERSION,
        }


def selection_of(options: SourceOptions) -> str:
    """Hash of what decides which records belong to the query; equal for equal selections."""
    selected = json.dumps([options.pattern, options.client_time], sort_keys=True)
    return hashlib.sha256(selected.encode()).hexdigest()[:16]


def read_offset(value: Mapping[str, Any], options: SourceOptions) -> StreamOffset:
    """Read an offset out of a checkpoint.

    Raises CheckpointMismatch: it is of another version or was made with another selection.
    Whether the stream is still the same one is for the broker to say: check_stream().
    """
    version = value.get("version")
    if version != VERSION:
        raise CheckpointMismatch(
            f"the checkpoint of the query on stream '{options.stream}' holds {dict(value)!r}, "
            f"which is no malamute offset of version {VERSION}. It was written by another source "
            f"or by a newer connector: use that one. {_START_AFRESH}"
        )
    try:
        offset = StreamOffset(
            str(value["stream"]), int(value["epoch"]), int(value["offset"]), str(value["selection"])
        )
    except (KeyError, TypeError, ValueError):
        raise CheckpointMismatch(
            f"the checkpoint of the query on stream '{options.stream}' holds {dict(value)!r}, "
            f"which is damaged. {_START_AFRESH}"
        ) from None
    if offset.selection != selection_of(options):
        window = "" if options.client_time is None else " with its client-time window"
        raise CheckpointMismatch(
            f"the pattern has changed: the checkpoint was made with another selection than "
            f"'{options.pattern_text}'{window} on stream '{options.stream}', and what the old one "
            f"left out before offset {offset.offset} would be missing without a word. Put the old "
            f"pattern back. {_START_AFRESH}"
        )
    return offset


def check_stream(offset: StreamOffset, stream: str, options: SourceOptions) -> None:
    """Raises CheckpointMismatch: the stream of this name is not the one that was read."""
    if offset.stream != stream:
        raise CheckpointMismatch(
            f"stream '{options.stream}' was recreated, or the endpoint is another broker's: the "
            f"checkpoint is of stream {offset.stream}, {', '.join(options.endpoints)} has "
            f"{stream}, and offset {offset.offset} means nothing there. {_START_AFRESH}"
        )
