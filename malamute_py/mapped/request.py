"""Checked arguments of a reading of a stream.

Owns the arguments that a reading keeps. Source: LogReader.read() in reader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from malamute_protocol.commands import Start
from malamute_protocol.pattern import Pattern
from malamute_py.client.session.subscription import GapNotice, RewoundNotice
from malamute_py.client.words import ReadVisibility, Until


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
    on_notice: Callable[[GapNotice | RewoundNotice], None] | None
