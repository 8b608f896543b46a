"""Errors that the source raises when it cannot go on.

Owns the connector's error types. The rule: a message says what happened, to what, and
what to do next, because Spark shows it to a person who sees nothing else of the connector.
"""

from __future__ import annotations


class MalamuteSourceError(Exception):
    """Base of what this source raises; Spark passes the text on."""


class OptionError(MalamuteSourceError, ValueError):
    """An option is unknown, missing or cannot work; `option` names it."""

    def __init__(self, option: str, why: str, side: str = "source") -> None:
        """why: what is wrong with it and what would be right. side: "source" or "sink"."""
        super().__init__(f"malamute {side}, option '{option}': {why}")
        self.option = option


class CheckpointMismatch(MalamuteSourceError):
    """The checkpoint's offset belongs to another stream, another selection or another version."""


class DataLoss(MalamuteSourceError):
    """Records that the query has not read cannot be read any more."""


class UnwritableRows(MalamuteSourceError):
    """Rows, or a frame's columns, cannot be records of a stream."""


class BatchChanged(MalamuteSourceError):
    """A batch that was written in part came again with other rows."""


class SourceUnavailable(MalamuteSourceError):
    """The broker could not be reached, refused, or did not answer in time."""


class StreamMissing(SourceUnavailable):
    """The broker has no stream of this name, or none any more."""
