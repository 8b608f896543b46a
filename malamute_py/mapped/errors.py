"""Errors of a reader that opens a broker's files: each says what happened, and what to do next.

Owns the exception types and nothing else. The rule: an error never hides what was handed over
before it, and reading can go on after `Overwritten`. Source: docs/design.md, Journal.
"""

from __future__ import annotations

from malamute_py.journal.errors import JournalError


class NoJournal(JournalError):
    """The path is no broker's data directory."""

    code = "bad_setting"


class UnknownStream(JournalError):
    """The log has no such stream, or has it in the broker's memory only."""

    code = "unknown_stream"


class StreamRemoved(JournalError):
    """The stream was removed while it was read."""

    code = "stream_removed"


class Overwritten(JournalError):
    """The ring came round while a batch was looked at: what was taken from it may be wrong.

    Its offsets are [from_offset, to_offset). The reading goes on after them.
    """

    code = "retention"

    def __init__(self, from_offset: int, to_offset: int) -> None:
        """from_offset, to_offset: the batch's."""
        super().__init__(
            f"offsets {from_offset} to {to_offset - 1} were overwritten while they were read: the"
            " broker's ring came round; read faster, read copies (copy=True), or give the stream a"
            " larger ring"
        )
        self.from_offset = from_offset
        self.to_offset = to_offset
