"""Errors for the person who runs a broker: it did not start, or did not go on.

Owns the two errors that the shell raises to that person. The rule: each says what happened, to
what, and what to do next. Source: docs/design.md, Safety.
"""

from __future__ import annotations

from malamute_protocol.errors import MalamuteError


class StartError(MalamuteError):
    """The broker could not start; nothing that is stored was changed."""

    def __init__(self, what: str, where: str, remedy: str) -> None:
        """what: the fact. where: the endpoint, file or directory. remedy: what to do."""
        super().__init__(f"{where}: {what}; {remedy}")
        self.what = what
        self.where = where
        self.remedy = remedy


class ServerFailed(MalamuteError):
    """The broker met a bug of its own and stopped; everything confirmed is in the journal."""
