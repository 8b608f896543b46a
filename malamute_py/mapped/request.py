"""Checked arguments of a reading of a stream.

Owns the arguments that a reading keeps. Source: LogReader.read() in reader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from malamute_protocol.commands import Start
from malamute_protocol.pattern import Pattern
from malamute_py.client.session.subscription import BegunNotice, GapNotice, RewoundNotice
from malamute_py.client.words import ReadVisibility, Until

ReadingNotice: TypeAlias = BegunNotice | GapNotice | RewoundNotice
"""Notice that a reading gives its caller beside batches."""


class Request(NamedTuple):
    """Checked arguments of a call of LogReader.read()."""

    pattern: Pattern
    start: Start
    visibility: ReadVisibility
    end: int | None
    until: Until
    client_time: tuple[int, int] | None
    copy: bool
    strict: bool
    on_notice: Callable[[ReadingNotice], None] | None
