"""Records of a stream for a page: a look at some of them.

Owns what is read for one look. The rules: a look reads so many records and for so long at most,
however rare what is looked for is; nothing is consumed; a gap is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from malamute_protocol.batch import Record
from malamute_protocol.errors import CODES
from malamute_py.client.aio.client import Client
from malamute_py.client.position import LastPerSubject
from malamute_py.client.readers.copies import blobs
from malamute_py.client.readers.typed import row_of
from malamute_py.client.session.subscription import GapNotice, Notice, RewoundNotice
from malamute_py.http.console.words import (
    TEXT_BYTES_MAX,
    body_text,
    start_point,
    time_text,
    visible,
)

LOOK_S: Final = 4.0
RECORDS_MAX: Final = 200
_CREDIT_BYTES: Final = 4 << 20
_STEP: Final = 16
_SAID_MAX: Final = 5
_FIELDS_MAX: Final = 32
_CHARACTERS_MAX: Final = 300
"""Characters of a subject, or of a field's name or value, that a page shows."""
_ROW: Final = "a row of an Arrow table; the package pyarrow shows its columns"
_COLUMNS_MAX: Final = 32
"""Columns of a typed row that a page shows."""
_CELL_BYTES: Final = 200
NEWEST: Final = "newest"
SUBJECTS: Final = "subjects"


@dataclass
class Look:
    """The records that one look at a stream found."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Sentences about the look: gaps, and that it ended early."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the typed rows among them, each once."""
        return list(dict.fromkeys(name for each in self.rows for name in each["row"]))


def row(record: Record, body_bytes: int = TEXT_BYTES_MAX) -> dict[str, Any]:
    """Return one record as a page shows it: every value is visible text, cut short, or a number.

    body_bytes: of the body that are shown at most. "row": the columns of a record of a typed
    stream, which has no body in bytes: its "body" is a text of these columns.
    """
    body = blobs(record)  # None: a row of an Arrow table
    typed = (row_of(record) or {}) if body is None else {}  # {}: pyarrow is not installed
    return {
        "offset": record.offset,
        "time": time_text(record.append_time_ms),
        "subject": _short(record.subject),
        # The first key is the subject.
        "keys": [_short(key) for key in record.keys[1 : _FIELDS_MAX + 1]],
        "fields": {
            _short(name): _short(value)
            for name, value in islice(record.fields.items(), _FIELDS_MAX)
        },
        "row": {
            _short(name): body_text(_plain(value), _CELL_BYTES)
            for name, value in islice(typed.items(), _COLUMNS_MAX)
        },
        "body": body_text(_body(body, typed), body_bytes),
    }


def _body(body: Any, typed: dict[str, Any]) -> Any:
    """Return a body, or in its place the values of a typed row."""
    if body is not None:
        return body
    named = (f"{name}: {_plain(value)}" for name, value in typed.items())
    return ", ".join(named) if typed else _ROW


def _plain(value: Any) -> str:
    return "–" if value is None else str(value)


def _short(text: str) -> str:
    cut = text[:_CHARACTERS_MAX]
    return visible(cut) + ("…" if len(text) > len(cut) else "")


async def look(
    client: Client, stream: str, pattern: str, place: str, limit: int, now_ms: int
) -> Look:
    """Return some records of a stream for its page, within LOOK_S seconds.

    pattern: which records; empty: all. place: NEWEST (the last ones), SUBJECTS (the latest of each
    subject), or a start point as a person writes it. Raises NotUnderstood, PatternError,
    BrokerRefused.
    """
    found = Look()
    rows: deque[dict[str, Any]] = deque(maxlen=limit)
    try:
        async with asyncio.timeout(LOOK_S):
            if place == NEWEST:
                await _newest(client, stream, pattern, limit, rows, found)
            else:
                start = LastPerSubject() if place == SUBJECTS else start_point(place, now_ms)
                await _read(client, stream, pattern, rows, found, limit, start=start, until="tail")
    except TimeoutError:
        found.said.append(f"the look ended after {LOOK_S:.0f} s: there may be more")
    found.rows = list(rows)
    return found


async def _newest(
    client: Client, stream: str, pattern: str, limit: int, rows: deque[dict[str, Any]], found: Look
) -> None:
    """Put the last `limit` records that a pattern selects into `rows`, the oldest first.

    The broker reads forwards only. So ranges of offsets are read from the tail back, each larger
    than the one before, until enough was found. A look that is ended by its time keeps what
    whole ranges gave.
    """
    facts = await client.stream_info(stream)
    end, span = facts.tail, limit
    while len(rows) < limit and end > facts.first:
        begin = max(facts.first, end - span)
        # Keeps the last ones of the range, as many as are still wanted.
        older: deque[dict[str, Any]] = deque(maxlen=limit - len(rows))
        await _read(client, stream, pattern, older, found, 0, start=begin, end=end)
        rows.extendleft(reversed(older))  # before those of newer ranges, in their order
        end, span = begin, span * _STEP


async def _read(
    client: Client,
    stream: str,
    pattern: str,
    rows: deque[dict[str, Any]],
    found: Look,
    limit: int,
    **between: Any,
) -> None:
    """Read what a pattern selects between two places of a stream into `rows`, as a page shows it.

    found: gets sentences about gaps. limit: records after which reading ends; 0: no limit. between:
    `start`, and `until` or `end`, as of subscribe().
    """
    # Credit without a limit: for so many records that the reading seldom waits for new credit.
    credit = limit or 4 * RECORDS_MAX
    async with client.subscribe(
        stream, pattern or "#", credit_records=credit, credit_bytes=_CREDIT_BYTES,
        on_notice=_teller(found), **between,
    ) as reading:  # fmt: skip
        async for record in reading:
            rows.append(row(record))
            if limit and len(rows) >= limit:
                return


def _teller(found: Look) -> Callable[[Notice], None]:
    """Return a function that keeps notices to a reader as sentences of the look, each once."""

    def tell(notice: Notice) -> None:
        text = notice_text(notice)
        if text and len(found.said) < _SAID_MAX and text not in found.said:
            found.said.append(text)

    return tell


def notice_text(notice: Notice) -> str:
    """Return a notice to a reader as a sentence; empty: it is nothing for a person."""
    if isinstance(notice, GapNotice):
        why = notice.reason or CODES.get(notice.code, notice.code)
        return f"offsets {notice.from_offset} to {notice.to_offset - 1} are gone: {why}"
    if isinstance(notice, RewoundNotice):
        return f"the log was rewound from {notice.from_offset} to {notice.to_offset}"
    return ""
