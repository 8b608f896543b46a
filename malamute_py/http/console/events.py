"""Event streams for pages: live rates, and the tail of a stream.

Owns what a browser is sent without asking again, and how much. The rules: one event at a time is
made and sent, and the next one is not made before the browser took it, so that a slow browser costs
a socket's buffer; a tail shows at most ROWS_MAX records each TICK_S and begins at the tail anew
where it fell behind, with the count of what it passed over, so that no browser makes the broker
read or keep anything; each event stream ends after lasting_s, and browsers come again. Source:
HTML, Server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from malamute_protocol.batch import Record
from malamute_protocol.errors import MalamuteError, Timeout
from malamute_py.health.facts import was_started
from malamute_py.http.console.records import notice_text, row
from malamute_py.http.console.rendering import HEADERS
from malamute_py.http.console.sessions import Session
from malamute_py.http.source import Source

STREAMS_MAX: Final = 24
"""Event streams of all sessions."""
SESSION_STREAMS_MAX: Final = 6
LASTING_S: Final = 600.0
ROWS_MAX: Final = 100
TICK_S: Final = 0.25
BODY_BYTES_MAX: Final = 500
"""Bytes of a body that a tail shows."""
_BEAT_MS: Final = 5_000
"""Silence of a tail after which the browser is sent a comment, so that its loss is noticed."""
_CREDIT_RECORDS: Final = 512
_CREDIT_BYTES: Final = 1 << 20
_COMMENT: Final = b":\n\n"
_LAST_S: Final = 1.0
_RATES: Final = {
    "published": ("records_in",),
    "delivered": ("records_out", "group_records_out"),
    "bytes_in": ("bytes_in",),
    "bytes_out": ("bytes_out",),
    "mail": ("mail_in",),
    "requests": ("requests_in",),
}
"""Rates by name, and the counters of the broker that they are the growth of."""

Events = AsyncGenerator[bytes, None]


def event(kind: str, value: object) -> bytes:
    """Return one event for the browser, which a blank line ends: its JSON has no line breaks."""
    data = msgspec.json.encode(value, enc_hook=str)
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


class EventStreams:
    """The event streams that are open, and their bounds."""

    def __init__(
        self,
        lengthen: Callable[[Scope, float], None],
        *,
        most: int = STREAMS_MAX,
        lasting_s: float = LASTING_S,
    ) -> None:
        """lengthen: has a connection last so many seconds from now on, beyond its usual bound.

        most: event streams that may be open at one time. lasting_s: after which each is ended.
        """
        self.open = 0
        self._lengthen = lengthen
        self._most = most
        self._lasting_s = lasting_s

    def answer(self, session: Session, events: Events) -> EventAnswer | None:
        """Return the answer that sends the events; None: too many event streams are open."""
        if self.open >= self._most or session.streams >= SESSION_STREAMS_MAX:
            return None
        return EventAnswer(self, session, events)

    async def send(self, answer: EventAnswer, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an event stream until the browser goes, the session ends or its time is over.

        scope, receive, send: of ASGI.
        """
        session = answer.session
        # The server bounds how long a connection may last, for other answers far more closely.
        self._lengthen(scope, self._lasting_s + _LAST_S)
        sending = asyncio.ensure_future(answer.send(send))
        leaving = asyncio.ensure_future(_left(receive))

        def end() -> None:
            sending.cancel()

        session.closings.add(end)  # called when the session ends
        # No other answer came in between since answer() looked at the bounds: nothing was awaited.
        self.open += 1
        session.streams += 1
        try:
            await asyncio.wait(
                {sending, leaving}, timeout=self._lasting_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self.open -= 1
            session.streams -= 1
            session.closings.discard(end)
            left = leaving.done()  # the browser has gone
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()  # raises the error that ended it, if one did
        elif not left:
            # The session ended or its time was over: the browser is told that the answer is whole.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await send({"type": "http.response.body", "body": b""})


class EventAnswer:
    """The answer to a request for an event stream, as an ASGI application."""

    def __init__(self, streams: EventStreams, session: Session, events: Events) -> None:
        self.session = session
        self._streams = streams
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, within the bounds of all event streams."""
        await self._streams.send(self, scope, receive, send)

    async def send(self, send: Send) -> None:
        """Send the head and the events, to their end; a task of EventStreams.send()."""
        # x-accel-buffering: a proxy such as nginx passes each event on at once.
        headers = {**HEADERS, "content-type": "text/event-stream", "x-accel-buffering": "no"}
        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": named})
        async with aclosing(self._events) as events:
            async for each in events:
                await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    """Wait until the browser has gone, as ASGI tells by a message."""
    while (await receive())["type"] != "http.disconnect":
        pass


# --- rates ----------------------------------------------------------------------------------


async def rates(source: Source, every_s: float = 1.0) -> Events:
    """Yield the events of the first page's curves: each second, rates of records, bytes and mail.

    A rate is the growth of the broker's counters since the second before. While the broker does not
    answer, an event `gone` tells why.
    """
    before: dict[str, int] | None = None
    before_s = 0.0
    former: Mapping[str, Any] = {}
    while True:
        facts = await source.facts()
        broker = facts.broker
        if not broker:
            before = None  # it may count from 0 again when it is back
            yield event("gone", facts.reason)
        else:
            now_s = broker.get("now_ms", 0) / 1_000
            counters: Mapping[str, int] = broker.get("counters", {})
            counted = {
                name: sum(counters.get(each, 0) for each in sources)
                for name, sources in _RATES.items()
            }
            if was_started(broker, former):
                before = None
            former = broker
            # The same time as before: the source gave the same answer once more.
            if before is not None and now_s > before_s:
                spent_s = now_s - before_s
                found: dict[str, float] = {
                    name: max(0, value - before[name]) / spent_s for name, value in counted.items()
                }
                found["t"] = now_s
                found["links"] = broker.get("gauges", {}).get("links", 0)
                yield event("rates", found)
            if before is None or now_s > before_s:
                before, before_s = counted, now_s
        await asyncio.sleep(every_s)


# --- the tail of a stream -------------------------------------------------------------------


async def tail(session: Session, stream: str, pattern: str) -> Events:
    """Yield the events of a stream's tail on its page: records as they come.

    Where more come than a person can read, only their count is told of some.
    """
    reached = -1
    try:
        while True:  # it ends where it fell behind, and begins at the tail anew
            async for each, place in _following(session, stream, pattern, reached):
                reached = place
                yield each
    except MalamuteError as error:
        yield event("end", str(error))


async def _following(
    session: Session, stream: str, pattern: str, reached: int
) -> AsyncGenerator[tuple[bytes, int], None]:
    """Subscribe at a stream's tail and yield events with its records, until it falls behind.

    Each event comes with the offset after it. When the generator ends, the caller begins anew at
    the tail of then. reached: offset up to which the browser was told by the tail before this one;
    -1: there was none.
    """
    said: list[str] = []
    reading = session.client.subscribe(
        stream, pattern or "#", start="latest", credit_records=_CREDIT_RECORDS,
        credit_bytes=_CREDIT_BYTES, on_notice=lambda notice: said.append(notice_text(notice)),
    )  # fmt: skip
    async with reading:
        begun = (await reading.accepted()).next
        skipped = max(0, begun - reached) if reached >= 0 else 0
        yield event("begun", {"offset": begun, "skipped": skipped}), begun
        place = begun
        while True:
            # What has come since the last event: the newest ROWS_MAX are shown, the others counted.
            newest: deque[Record] = deque(maxlen=ROWS_MAX)
            came = 0
            with contextlib.suppress(Timeout):
                batch = await reading.next_batch(_BEAT_MS)
                while batch is not None:
                    newest.extend(batch.records())
                    came += len(batch)
                    if came >= ROWS_MAX:
                        break
                    batch = await reading.next_batch(0)
                else:
                    return  # the subscription ended: there is no next batch
            position = reading.position
            place = position.next if position is not None else place
            told = [text for text in said if text]
            said.clear()
            if came or told:
                rows = [row(record, BODY_BYTES_MAX) for record in newest]
                over = came - len(rows)
                yield event("records", {"rows": rows, "skipped": over, "said": told}), place
            else:
                yield _COMMENT, place  # a browser that is gone is noticed by it
            await asyncio.sleep(TICK_S)
            if came >= ROWS_MAX and not reading.live:
                return  # it fell behind: the broker reads the log for it
