"""Offsets as Spark writes them into a checkpoint.

Owns the one JSON form of an offset: a position in each stream of the query. The rules: Spark
compares offsets as text, so there is one encoder and it sorts the keys; an offset says which
streams and which selection it belongs to, and is never used with others. Source: SPEC.md, section 6
(positions).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pyspark_malamute.errors import CheckpointMismatch
from pyspark_malamute.options import SourceOptions

VERSION: Final = 2
_SINGLE: Final = 1
"""Version of the offsets of a query that could read one stream only."""
_START_AFRESH: Final = (
    "To begin anew, give the query another checkpointLocation (and remove the sink's output, if "
    "it must not hold records twice)."
)


NEVER_READ: Final = (0, 0)
"""Epoch and offset of a position in a stream that was found while the query ran: it is read from
its oldest record on, and what retention took before that is not lost to the query."""


class StreamOffset(NamedTuple):
    """A position in one stream: everything of the selection before `offset` has been read."""

    stream: str
    """UUID of the stream, hexadecimal."""
    epoch: int
    offset: int


def to_json(offsets: Mapping[str, StreamOffset], options: SourceOptions) -> dict[str, Any]:
    """Return the JSON object that Spark stores: positions by the streams' names, keys sorted."""
    return {
        "selection": selection_of(options),
        "streams": {
            name: {"epoch": at.epoch, "offset": at.offset, "stream": at.stream}
            for name, at in sorted(offsets.items())
        },
        "version": VERSION,
    }


def selection_of(options: SourceOptions) -> str:
    """Return a hash of the options that select records, by which a checkpoint knows its query."""
    selected = json.dumps([options.pattern, options.client_time], sort_keys=True)
    return hashlib.sha256(selected.encode()).hexdigest()[:16]


def read_offsets(value: Mapping[str, Any], options: SourceOptions) -> dict[str, StreamOffset]:
    """Read the positions out of a checkpoint, by the streams' names.

    Raises CheckpointMismatch: they are of another version, were made with another selection, or
    are of a single stream whose name they do not say. Whether the streams are still the same ones
    is for the broker to say: check_stream().
    """
    version = value.get("version")
    if version not in (VERSION, _SINGLE):
        raise CheckpointMismatch(
            f"the checkpoint of the query on {options.reads} holds {dict(value)!r}, "
            f"which is no malamute offset of version {VERSION}. It was written by another source "
            f"or by a newer connector: use that one. {_START_AFRESH}"
        )
    try:
        # An older connector wrote a single position, without the stream's name.
        stored = {options.stream: value} if version == _SINGLE else value["streams"]
        offsets = {
            str(name): StreamOffset(str(at["stream"]), int(at["epoch"]), int(at["offset"]))
            for name, at in stored.items()
        }
        selection = str(value["selection"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointMismatch(
            f"the checkpoint of the query on {options.reads} holds {dict(value)!r}, "
            f"which is damaged. {_START_AFRESH}"
        ) from None
    if selection != selection_of(options):
        window = "" if options.client_time is None else " with its client-time window"
        raise CheckpointMismatch(
            f"the pattern has changed: the checkpoint was made with another selection than "
            f"'{options.pattern_text}'{window} on {options.reads}, and what the old one "
            f"left out before its position would be missing without a word. Put the old "
            f"pattern back. {_START_AFRESH}"
        )
    if options.stream and options.stream not in offsets:
        raise CheckpointMismatch(
            f"the checkpoint is of {', '.join(map(repr, offsets))}, and option 'stream' names "
            f"'{options.stream}'. Put the old name back. {_START_AFRESH}"
        )
    if "" in offsets:
        raise CheckpointMismatch(
            "the checkpoint was written by an older connector, of a query on a single stream. Read "
            f"that stream with option 'stream' first, for one batch. {_START_AFRESH}"
        )
    return offsets


def check_stream(offset: StreamOffset, stream: str, options: SourceOptions) -> None:
    """Raise CheckpointMismatch where the stream of this name is not the one that was read.

    offset: the position in the stream that was read. stream: UUID of the one that is there now.
    """
    if offset.stream != stream:
        raise CheckpointMismatch(
            f"stream '{options.stream}' was recreated, or the endpoint is another broker's: the "
            f"checkpoint is of stream {offset.stream}, {', '.join(options.endpoints)} has "
            f"{stream}, and offset {offset.offset} means nothing there. {_START_AFRESH}"
        )
