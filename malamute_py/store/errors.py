"""Errors of the checkpoint: what happened, to what, and what to do next.

Owns the exception types and nothing else. The rule: whatever is raised, the tables are as the last
commit left them. Source: docs/design.md, Safety.
"""

from __future__ import annotations

from malamute_protocol.errors import MalamuteError


class StoreError(MalamuteError):
    """Base of everything that the store raises; `code` names it in events and metrics."""

    code = "failed"


class StoreDamaged(StoreError):
    """The tables cannot be read as they were written."""

    code = "damaged"


class StoreLocked(StoreError):
    """Another process writes these tables."""

    code = "conflict"


class StoreMoved(StoreError):
    """The tables or the log are not where this writer left them, or not of one directory."""

    code = "moved"


class ChangesLost(StoreError):
    """The log lacks changes between those in the tables and those that follow."""

    code = "lost"
