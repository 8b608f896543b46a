"""A model of a broker's mailboxes and services: what a client may rely on, and no more.

Pure: commands in, commands out. It keeps the promises of the specification in the plainest
way (one entry a message, scanned), so that a client can be tried against it under any fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from malamute_protocol import commands as c
from malamute_protocol.batch import Content
from malamute_protocol.commands import Command
from tests.client.script import stamped
from tests.rows import bitmap_of_rows

LEASE_MS = 600
Answer = tuple[Any, Command, Any]
"""(link, command, content frames)"""


class Entry:
    """One message or request."""

    def __init__(self, number: int, base: int, content: bytes, sender: str) -> None:
        self.number = number
        self.base = base
        self.content = content
        self.sender = sender
        self.holder: Any = None
        """(link, subscription) of mail, (holder's name, subscription) of work."""
        self.attempts = 0
        self.about: tuple[bytes, int] | None = None
        self.last = False
        self.why = ""
        self.reply_to = ""
        self.key = b""
        self.deadline_ms = 0
        self.lease_until_ms = 0

    @property
    def row(self) -> int:
        return self.number - self.base


class Opened:
    """An inbox or an offer on one link."""

    def __init__(self, link: Any, command: Any, place: str) -> None:
        self.link = link
        self.number = command.subscription
        self.place = place
        self.credit = command.credit_records
        self.given = 0


class QueueModel:
    """All mailboxes and services, and the links that use them."""

    def __init__(self) -> None:
        self.mail: dict[str, list[Entry]] = defaultdict(list)
        self.work: dict[str, list[Entry]] = defaultdict(list)
        self.dead: dict[str, list[tuple[bytes, str]]] = defaultdict(list)
        self.accepted: list[tuple[str, bytes]] = []
        """(mailbox, body) of all mail that was ever taken."""
        self.acked: list[tuple[str, bytes]] = []
        self.completed: list[bytes] = []
        self.keys: dict[tuple[str, bytes], int] = {}
        self.holders: dict[Any, str] = {}
        self.inboxes: list[Opened] = []
        self.offers: list[Opened] = []
        self.next = 0
        self.now_ms = 0
        self.room = 1 << 30
        self.refuse: Callable[[Command], c.Refused | None] = lambda _: None
        """Asked before anything is done."""

    # --- links -----------------------------------------------------------------------------

    def link_up(self, link: Any, hello: c.Hello) -> None:
        self.holders[link] = hello.identity or f"~{hello.session.hex()}"

    def link_down(self, link: Any, *, restart: bool = False) -> list[Answer]:
        """restart: the broker's own: then work stays with whom it was."""
        holder = self.holders.pop(link, None)
        self.inboxes = [inbox for inbox in self.inboxes if inbox.link != link]
        self.offers = [offer for offer in self.offers if offer.link != link]
        for entries in self.mail.values():
            for entry in entries:
                if entry.holder is not None and entry.holder[0] == link:
                    entry.holder = None
        if not restart:
            for entries in self.work.values():
                for entry in entries:
                    if entry.holder is not None and entry.holder[0] == holder:
                        entry.holder = None
        return self._pump()

    # --- commands --------------------------------------------------------------------------

    def answer(self, link: Any, command: Command, contents: Any) -> list[Answer]:
        refused = self.refuse(command)
        if refused is not None:
            return [(link, refused, ())]
        answers = self._do(link, command, contents)
        return [*answers, *self._pump()]

    def _do(self, link: Any, command: Command, contents: Any) -> list[Answer]:
        match command:
            case c.Ping():
                return [(link, c.Pong(command.token), ())]
            case c.Send():
                return self._send(link, command, bytes(contents[0]))
            case c.Request():
                return self._request(link, command, bytes(contents[0]))
            case c.OpenInbox():
                mailbox = command.mailbox or self.holders[link]
                self.inboxes.append(Opened(link, command, mailbox))
                return [(link, c.Subscribed(command.subscription, b"", 1, 0, 0, 0), ())]
            case c.Offer():
                self.offers.append(Opened(link, command, command.service))
                return [(link, c.Subscribed(command.subscription, b"", 1, 0, 0, 0), ())]
            case c.Credit():
                for opened in self._of(link, command.subscription):
                    opened.credit = max(opened.credit, command.credit_records)
                return []
            case c.Unsubscribe():
                return self._unsubscribe(link, command.subscription)
            case c.AckMail():
                return self._ack_mail(link, command)
            case c.AckWork():
                return self._ack_work(link, command)
            case c.Reply():
                return self._reply(link, command, bytes(contents[0]), command.tracker)
            case c.CancelRequest():
                return self._cancel(link, command)
            case _:
                return []

    def _of(self, link: Any, number: int) -> list[Opened]:
        return [
            opened
            for opened in (*self.inboxes, *self.offers)
            if opened.link == link and opened.number == number
        ]

    def _taken(self, link: Any, command: Any, count: int) -> tuple[int, Answer | None]:
        """(base number, its CONFIRM); the number is -1 when it was there already."""
        name = (self.holders[link], command.key)
        if command.key and name in self.keys:
            confirm = c.Confirm(command.tracker, 3, 1, self.keys[name], 1, True)
            return -1, None if command.level == 1 else (link, confirm, ())
        base = self.next
        self.next += count
        if command.key:
            self.keys[name] = base
        if not command.tracker or command.level == 1:
            return base, None
        return base, (link, c.Confirm(command.tracker, 3, 1, base, 1), ())

    def _send(self, link: Any, command: c.Send, content: bytes) -> list[Answer]:
        Content(content).verify()
        count = Content(content).head.count
        if count > self.room:
            return [(link, c.Refused(40, command.tracker, "limit", "too many at once"), ())]
        if len(self.mail[command.mailbox]) + count > self.room:
            return [(link, c.Refused(40, command.tracker, "wait", "full", 20), ())]
        base, confirm = self._taken(link, command, count)
        if base >= 0:
            self._put(command.mailbox, base, content, self.holders[link])
        return [] if confirm is None else [confirm]

    def _put(self, mailbox: str, base: int, content: bytes, sender: str) -> list[Entry]:
        entries = []
        for row, body in enumerate(bodies(content)):
            entries.append(Entry(base + row, base, content, sender))
            self.accepted.append((mailbox, body))
        self.mail[mailbox] += entries
        return entries

    def _request(self, link: Any, command: c.Request, content: bytes) -> list[Answer]:
        Content(content).verify()
        count = Content(content).head.count
        base, confirm = self._taken(link, command, count)
        if base >= 0:
            for row in range(count):
                entry = Entry(base + row, base, content, self.holders[link])
                entry.reply_to = command.reply_to or self.holders[link]
                entry.key = command.key
                self.work[command.service].append(entry)
        return [] if confirm is None else [confirm]

    def _unsubscribe(self, link: Any, number: int) -> list[Answer]:
        if not self._of(link, number):
            return [(link, c.Refused(14, number, "unknown_subscription"), ())]
        for entries in (*self.mail.values(), *self.work.values()):
            for entry in entries:
                if entry.holder in ((link, number), (self.holders[link], number)):
                    entry.holder = None
        self.inboxes = [o for o in self.inboxes if (o.link, o.number) != (link, number)]
        self.offers = [o for o in self.offers if (o.link, o.number) != (link, number)]
        return [(link, c.Ended(number, 0, "cancelled"), ())]

    def _ack_mail(self, link: Any, command: c.AckMail) -> list[Answer]:
        numbers = {n for first, end in command.ranges for n in range(first, end)}
        held = {
            entry.number: (name, entry)
            for name, entries in self.mail.items()
            for entry in entries
            if entry.holder == (link, command.subscription) and entry.number in numbers
        }
        if len(held) != len(numbers):
            reference = command.tracker or command.subscription
            return [(link, c.Refused(43, reference, "not_held"), ())]
        for name, entry in held.values():
            if command.again_ms >= 0:
                entry.holder = None
            else:
                self.mail[name].remove(entry)
                self.acked.append((name, body_of(entry)))
        return self._confirm(link, command.tracker)

    def _confirm(self, link: Any, tracker: int) -> list[Answer]:
        return [(link, c.Confirm(tracker, 3, 1, 0, 1), ())] if tracker else []

    def _held(self, link: Any, numbers: set[int]) -> dict[int, tuple[str, Entry]]:
        return {
            entry.number: (name, entry)
            for name, entries in self.work.items()
            for entry in entries
            if entry.number in numbers
            and entry.holder is not None
            and entry.holder[0] == self.holders[link]
        }

    def _ack_work(self, link: Any, command: c.AckWork) -> list[Answer]:
        numbers = {n for first, end in command.ranges for n in range(first, end)}
        held = self._held(link, numbers)
        if len(held) != len(numbers):
            return [(link, c.Refused(53, command.tracker, "not_held"), ())]
        for name, entry in held.values():
            entry.lease_until_ms = self.now_ms + LEASE_MS
            if command.state == 5:
                entry.holder = None
            elif command.state in (3, 4):
                self.work[name].remove(entry)
                if command.state == 4:
                    self.dead[name].append((body_of(entry), command.reason))
                self._notice(entry, "completed" if command.state == 3 else "failed")
        return self._confirm(link, command.tracker)

    def _notice(self, entry: Entry, why: str) -> None:
        from malamute_protocol.batch import encode

        if entry.key:
            [notice] = self._put(entry.reply_to, self.next, encode([b""], subject=""), "")
            self.next += 1
            notice.about, notice.last, notice.why = (entry.key, entry.row), True, why

    def _reply(self, link: Any, command: c.Reply, content: bytes, tracker: int) -> list[Answer]:
        held = self._held(link, set(command.requests))
        if len(held) != len(command.requests):
            return [(link, c.Refused(54, tracker, "not_held"), ())]
        count = Content(content).head.count
        assert count == len(command.requests)
        first = held[command.requests[0]][1]
        base = self.next
        self.next += count
        replies = self._put(first.reply_to, base, content, self.holders[link])
        for number, reply in zip(command.requests, replies, strict=True):
            name, entry = held[number]
            assert entry.reply_to == first.reply_to
            reply.about = (entry.key, entry.row) if entry.key else None
            reply.last = command.last
            if command.last:
                self.work[name].remove(entry)
                self.completed.append(body_of(entry))
        return self._confirm(link, tracker)

    def _cancel(self, link: Any, command: c.CancelRequest) -> list[Answer]:
        entries = self.work[command.service]
        gone = [
            entry
            for entry in entries
            if entry.key == command.key and command.row in (-1, entry.row)
        ]
        for entry in gone:
            entries.remove(entry)
        return [(link, c.Result(command.request, {"count": len(gone)}), ())]

    def step(self, link: Any, command: c.Atomic, part: Any, content: bytes) -> list[Answer]:
        """A step of one REPLY."""
        name = (self.holders[link], command.key)
        if name in self.keys:
            return [(link, c.Confirm(command.tracker, 3, 1, 0, 1, True), ())]
        answers = self._reply(link, part, content, 0)
        if answers:
            return [(link, c.Refused(66, command.tracker, "not_held"), ())]
        self.keys[name] = 0
        return [*self._confirm(link, command.tracker), *self._pump()]

    # --- out -------------------------------------------------------------------------------

    def _pump(self) -> list[Answer]:
        answers: list[Answer] = []
        for work in self.work.values():
            for entry in work:
                if entry.holder is not None and self.now_ms >= entry.lease_until_ms:
                    entry.holder = None
        for inbox in self.inboxes:
            for entries in runs(self.mail[inbox.place], inbox.credit - inbox.given):
                for entry in entries:
                    entry.holder = (inbox.link, inbox.number)
                    entry.attempts += 1
                inbox.given += len(entries)
                one = entries[0]
                about = [(*entry.about, 1) for entry in entries if entry.about]
                mail = c.Mail(
                    inbox.number, one.sender, one.attempts, 2, rows_of(entries),
                    about, one.last, one.why,
                )  # fmt: skip
                answers.append((inbox.link, mail, stamped(one.content, one.base)))
        for offer in self.offers:
            for entries in runs(self.work[offer.place], offer.credit - offer.given):
                for entry in entries:
                    entry.holder = (self.holders[offer.link], offer.number)
                    entry.lease_until_ms = self.now_ms + LEASE_MS
                    entry.attempts += 1
                offer.given += len(entries)
                one = entries[0]
                handed = c.Work(
                    offer.number, one.sender, one.reply_to, one.deadline_ms, one.attempts,
                    LEASE_MS, 2, rows_of(entries), one.key,
                )  # fmt: skip
                answers.append((offer.link, handed, stamped(one.content, one.base)))
        return answers


def runs(entries: list[Entry], most: int) -> list[list[Entry]]:
    """Free entries, at most so many, together as far as one delivery may hold them."""
    found: list[list[Entry]] = []
    for entry in entries:
        if most <= 0:
            break
        if entry.holder is not None:
            continue
        most -= 1
        last = found[-1][-1] if found else None
        if last is not None and alike(last) == alike(entry) and last.number < entry.number:
            found[-1].append(entry)
        else:
            found.append([entry])
    return found


def alike(entry: Entry) -> tuple[Any, ...]:
    return entry.base, entry.attempts, entry.last, entry.why, entry.about is None, entry.reply_to


def rows_of(entries: list[Entry]) -> bytes | None:
    count = Content(entries[0].content).head.count
    if len(entries) == count:
        return None
    return bitmap_of_rows([entry.row for entry in entries], count)


def bodies(content: bytes) -> list[bytes]:
    column = Content(content).bodies()
    ends = column.offsets.tolist()
    return [bytes(column.blob[i:j]) for i, j in pairwise(ends)]


def body_of(entry: Entry) -> bytes:
    return bodies(entry.content)[entry.row]
