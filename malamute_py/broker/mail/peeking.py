"""Peeking: PEEK_MAIL, which describes messages of a mailbox and changes nothing.

Owns one PEEK_MAIL from the choice of its messages to its answer. The rules: messages and bytes are
bounded; bodies on the disk are read first, and the answer describes the messages that are there
then; a turn describes messages while its share lasts. Source: SPEC.md, section 4.4.

A put is the messages of one batch in one mailbox: one row of the tables (MessageRow), under the
number of its first message (`base`). Its messages are its rows, and a set of them is a mask: an
integer whose lowest bit is the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from malamute_protocol.commands import PeekMail
from malamute_protocol.content_layout import ARROW
from malamute_protocol.errors import BatchError, BrokerRefused, MalamuteError
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.bodies import Bodies, Body
from malamute_py.broker.log.pages import PAGE_BYTES, Entries
from malamute_py.broker.mail.mailbox import Mailbox
from malamute_py.broker.mail.telling import why_of
from malamute_py.broker.structures.bitmaps import places_of
from malamute_py.changelog.records import mask_of
from malamute_py.changelog.tables import MessageRow


class Peeking:
    """One PEEK_MAIL, which waits for its turn and then for bodies."""

    def __init__(
        self, shard: Shard, links: Links, bodies: Bodies, answers: Answers, link: Link,
        command: PeekMail, mailbox: Mailbox, ready: Callable[[Peeking], None],
    ) -> None:  # fmt: skip
        """ready: takes it when no body is waited for any more: then go_on() makes the answer."""
        self._shard = shard
        self._links = links
        self._bodies = bodies
        self._answers = answers
        self._ready = ready
        self._bytes_max = shard.settings.peek_bytes_max
        self.link = link
        self._command = command
        self._mailbox = mailbox
        self._limit = max(1, min(command.limit, shard.settings.page_max))
        self._page: Entries[dict[str, Any]] = Entries(self._limit, self._limit)
        self._rows: list[MessageRow] = []
        """The chosen messages."""
        self._places = _messages(self._rows, command.after)
        """Messages of the chosen puts that are not described yet."""
        self._found: dict[int, Body | None] = {}
        """Number of a batch -> its body; None: it is lost."""
        self._waiting = 1
        """Bodies that have not come, and one for begin()."""
        self._more = False
        """Further messages do not fit into this answer."""

    def begin(self) -> None:
        """Choose the messages, and ask for their bodies; called when the PEEK_MAIL is the next."""
        if not self.link.open:
            self._arrived()  # A link that has ended is not answered; the next PEEK_MAIL may begin.
            return
        mailbox, after = self._mailbox, self._command.after
        table, number = mailbox.rows, mailbox.number
        count = size = 0
        first = mailbox.order.floor(after) if after >= 0 else None
        # The put in which the number `after` lies may have rows after it: the walk begins with it.
        before_first = -1 if first is None else first - 1
        for base in mailbox.order.after(before_first):
            row = table[number, base]
            left = _rows_to_show(row, after)
            if not left:
                continue
            # One put is taken however large it is, so that each page gets further.
            if count >= self._limit or (self._rows and size + row.size > self._bytes_max):
                self._more = True
                break
            self._rows.append(row)
            count += left.bit_count()
            size += row.size
        for row in self._rows:
            self._waiting += 1
            taken = self._links.contained(
                self.link, "PEEK_MAIL", partial(self._body_came, row.base)
            )
            self._bodies.want(row.base, row.size, taken)
        self._arrived()

    def _body_came(self, base: int, body: Body | None) -> None:
        """Keep the body of a batch; None: it is lost."""
        self._found[base] = body
        self._arrived()

    def _arrived(self) -> None:
        """Call `ready` once the last body that it waits for was found or is lost."""
        self._waiting -= 1
        if not self._waiting:
            self._ready(self)

    def go_on(self) -> bool:
        """Describe messages while the share of the turn lasts; False: it is answered, or no more.

        A page of a thousand messages took 10 to 20 ms.
        """
        link = self.link
        try:
            if link.open:
                if not self._page.found:
                    self._answers.check(link)  # It was within the bound when it asked.
                lasts = self._shard.share()
                # Of the messages one fits, however large: the caller gets on.
                for row, place in self._places:
                    if not self._page.add(self._entry(row, place)):
                        self._more = True
                        break
                    if not lasts():
                        return True
        except BrokerRefused as error:
            link.queries -= 1
            self._answers.refuse_with(link, self._command, error)
            return False
        link.queries -= 1
        value = {"messages": self._page.found, "more": self._more}
        self._answers.result(link, self._command, value)
        return False

    def _entry(self, row: MessageRow, place: int) -> dict[str, Any]:
        """Return the facts that the answer of a PEEK_MAIL shows of one message.

        row: the put that the message is of. place: the message's row within the put.
        """
        # rare: facts that few puts have. progress: None while no row of the put was handed out.
        rare, progress = row.rare, self._mailbox.progress.get(row.base)
        bit = 1 << place
        not_before_ms = 0
        attempts = row.attempts
        held = False
        if progress is not None:
            held = bool(progress.held & bit)
            next_attempt, _ = progress.attempt(bit)
            attempts = next_attempt - 1
            for at_ms, rows in (progress.times or {}).items():
                if rows & bit:
                    not_before_ms = at_ms
        elif rare is not None:  # Rows that were given back apart have attempts of their own.
            attempts += sum(times for times, rows in rare.tries if mask_of(rows, bit))
        expires_at_ms = row.expires_at_ms
        if rare is not None and rare.expiries:
            expires_at_ms = rare.expiries[place]
        entry: dict[str, Any] = {
            "number": row.base + place,
            "sender": row.sender,
            "at_ms": row.at_ms,
            "bytes": 0,
            "subject": "",
            "fields": {},
            "priority": row.priority,
            "attempts": attempts,
            "held": held,
            "not_before_ms": not_before_ms,
            "expires_at_ms": expires_at_ms,
            "why": "" if rare is None else why_of(rare, bit),
        }
        if rare is not None and rare.origin is not None:
            origin = rare.origin
            entry["origin"] = {
                "stream": origin.stream, "group": origin.group, "epoch": origin.epoch,
                "offset": origin.offsets[place], "attempts": origin.attempts,
            }  # fmt: skip
        body = self._found.get(row.base)
        if body is not None:
            try:
                self._look_into(entry, body, place)
            except (BatchError, MalamuteError) as error:
                entry["why"] = entry["why"] or f"unreadable: {error}"
        return entry

    def _look_into(self, entry: dict[str, Any], body: Body, place: int) -> None:
        """Add a message's subject, fields and the beginning of its body to its entry.

        Raises BatchError or MalamuteError: the batch cannot be read; the entry stays without them.
        """
        content = body.content
        headers, codes = content.headers()
        # codes: each row's number in the header table; None: all rows have the only header.
        header = headers[0 if codes is None else int(codes[place])]
        entry["subject"] = header.subject
        entry["fields"] = dict(header.fields)
        if content.head.body_kind == ARROW:
            entry["bytes"] = content.head.body_raw_bytes
            return
        bodies = content.bodies()
        shown = min(self._command.body_bytes, PAGE_BYTES)
        first, end = int(bodies.offsets[place]), int(bodies.offsets[place + 1])
        parts = bodies.parts
        if parts is not None:  # Each body is a list of pieces, and `first` and `end` number these.
            pieces = [
                bytes(bodies.blob[int(parts[at]) : int(parts[at + 1])]) for at in range(first, end)
            ]
            entry["bytes"] = sum(map(len, pieces))
            if shown > 0:
                entry["body"] = msgspec.msgpack.encode(pieces)[:shown]
            return
        entry["bytes"] = end - first
        if shown > 0:
            entry["body"] = bytes(bodies.blob[first : min(end, first + shown)])


def _messages(rows: list[MessageRow], after: int) -> Iterator[tuple[MessageRow, int]]:
    """Yield the messages to describe that are there by now, as a put and a row of it.

    rows: the puts. after: the last number that the caller has seen.
    """
    for row in rows:
        for place in places_of(_rows_to_show(row, after)):
            yield row, place


def _rows_to_show(row: MessageRow, after: int) -> int:
    """Return the bitmap of the messages of a put that the caller has not seen on earlier pages.

    after: the last number that the caller has seen.
    """
    left = row.left
    if row.base <= after:
        seen = min(after + 1 - row.base, row.count)
        left = left >> seen << seen  # clears the lowest `seen` bits
    return left
