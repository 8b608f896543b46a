"""Puts: SEND, replies, notices and dead letters as parts of a step, and what is refused.

Owns the checks of a put before its step is taken, and the bounds of mailboxes. The rules: a full
mailbox answers `wait` and never drops a message; room is reserved when a step is taken. Source:
docs/design.md (Flow control; Queues and the checkpoint); SPEC.md, section 4.8; the Malamute
whitepaper's direct messaging (docs/design.md, References).

A put is the messages of one batch in one mailbox: one row of the tables (MessageRow), under the
number of its first message (`base`). Its messages are its rows, and a set of them is a mask: an
integer whose lowest bit is the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from malamute_protocol.commands import Level, Send
from malamute_protocol.content import Content
from malamute_protocol.content_layout import ARROW
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.bodies import OnBody
from malamute_py.broker.log.keys import digest_of
from malamute_py.broker.log.steps import Counting, Part, Steps
from malamute_py.broker.mail.mailbox import STANDING, Mailbox
from malamute_py.broker.mail.messages import Messages, RowsOfPut
from malamute_py.broker.mail.parts import Burying, DeferredPut, Putting, Reviving
from malamute_py.changelog.records import (
    Change,
    MailPut,
    Origin,
    RequestDead,
    RequestRevived,
    Run,
    rows_of,
)
from malamute_py.changelog.tables import Rare

REVIVED_MAX: Final = 1_000
"""Puts that one portion of a search looks at, at most."""
NOTICES_MAX: Final = 256
"""Encoded notices that are kept, by their count of rows."""


class Puts:
    """The way into the mailboxes of one core.

    The parts that it returns take effect when their callers have them taken into a step.
    """

    def __init__(self, shard: Shard, steps: Steps, messages: Messages) -> None:
        self._shard = shard
        self._quotas = shard.quotas
        self._steps = steps
        self._messages = messages
        self.mailboxes = messages.mailboxes
        self._notices: dict[int, bytes] = {}
        """Number of rows -> the encoded notice with so many."""

    # --- putting --------------------------------------------------------------------------------

    def prepare_send(self, link: Link, command: Send, frame: Any) -> Part:
        """Return the part of a step that a SEND becomes, once all about it is checked.

        frame: the content that came with it. Raises BrokerRefused: nothing was put.
        """
        shard = self._shard
        settings = shard.settings
        name = command.mailbox
        if not settings.permit(link.owner, "send", name):
            raise BrokerRefused("forbidden", f"you may not send to mailbox '{name}'")
        try:
            content = shard.content(frame)
        except BatchError as error:
            raise BrokerRefused(error.code, error.reason) from error
        head = content.head
        if head.producer_id:
            raise BrokerRefused("unsupported", "mail is named by its key: it has no producer")
        if head.body_kind == ARROW:
            raise BrokerRefused("bad_batch", "the bodies of mail are blobs or lists of them")
        if head.count > settings.mail_rows_max:
            raise BrokerRefused(
                "too_large", f"{head.count} messages in a batch, at most {settings.mail_rows_max}"
            )
        shard.counters["mail_sends"] += 1
        return self.put(
            name, sender=link.holder, content=content, frame=frame, by=link.owner,
            priority=command.priority, deliver_at_ms=command.deliver_at_ms, key=command.key,
            digest=digest_of(content) if command.key else 0,
        )  # fmt: skip

    def put(
        self,
        name: str,
        *,
        sender: str,
        content: Content,
        frame: Any,
        by: str = "",
        priority: int = 0,
        deliver_at_ms: int = 0,
        key: bytes = b"",
        digest: int = 0,
        about: Sequence[Run] = (),
        last: bool = False,
        why: str = "",
        force: bool = False,
        asked_by: str = "",
        origin: Origin | None = None,
        rows: int = 0,
    ) -> Part:
        """Return the part of a step that puts one batch of messages into a mailbox.

        For mail of a SEND, for replies and notices, and for dead letters of groups.
        sender: as recipients see it. content, frame: the batch, checked, and its bytes.
        by: owner who would create the mailbox. key, digest: as SEND names the batch, for repeats.
        about, last: of a reply, the requests that it answers, and whether it is the last one.
        asked_by: requester, for a reply or a notice; creator of a group, for its dead letters; the
        bytes count on its quota instead of the sender's. why, origin: of dead letters, the reason,
        and the records that they were. rows: those that are messages; 0: all.
        force: put it even into a full mailbox, for messages that must not be lost and whose
        requests were bounded. The part has `memory` set for a mailbox in memory; see `deferred`.
        Raises BrokerRefused: `wait` (full, or being made), `limit`, `bad_name`, `unknown_mailbox`.
        """
        mailbox = self.mailboxes.by_name.get(name)
        if mailbox is None or mailbox.removing:
            if asked_by:
                # It is made for the requester or the group's creator: the sender needs no permit.
                by = self._quotas.owner_of(asked_by)
            else:
                self.mailboxes.check_creation(name, by)
            mailbox = self.mailboxes.use(name, by)
        head = content.head
        count = head.count
        size = STAMP_BYTES + head.content_bytes  # as a delivery has it: with the broker's stamp
        if not force:
            self._check_room(mailbox, rows.bit_count() if rows else count, size)
            self._quotas.check_sent(asked_by or sender, mailbox.resource, size)
        now_ms = self._shard.now_ms
        # The number is -1 until the put gets one, in its bundle: `based` sets it.
        put = MailPut(
            mailbox.number, -1, count, size, sender, now_ms, key, priority,
            deliver_at_ms if deliver_at_ms > now_ms else 0,
        )  # fmt: skip
        if digest:
            put.digest = digest
        if origin is not None:
            # Expiries that the batch has were meant for the stream's readers, not for dead letters.
            put.origin, put.rows = origin, rows_of(rows)
            if mailbox.settings.ttl_ms:
                put.expires_at_ms = now_ms + mailbox.settings.ttl_ms
        elif head.earliest_expiry_ms or mailbox.settings.ttl_ms:
            _set_expiry(put, content, mailbox.settings.ttl_ms, now_ms)
        if about:
            put.about = list(about)
        if asked_by or why or last:  # Mail of a SEND has none of these, and is the most.
            put.last, put.why, put.asked_by = last, why, asked_by
        putting = Putting(self._messages, mailbox, put, rows)
        part = Part(
            content=content, frame=frame, effects=[putting], level=mailbox.level,
            place=mailbox.number, digest=digest,
        )  # fmt: skip
        if mailbox.memory and mailbox.state == STANDING:
            part.memory = True
            part.level = int(Level.NONE)
        elif mailbox.memory:
            # The mailbox itself is logged, its messages are not: a put that is confirmed as
            # `none` must not wait for the disk, nor pretend that it did.
            if not mailbox.pending:
                self.mailboxes.create(mailbox)
            raise BrokerRefused("wait", f"mailbox '{name}' is being created")
        else:
            part.changes = [put]
        return part

    def deferred(self, part: Part) -> Part:
        """Turn a put into memory into a part of a logged step: it happens when the step does.

        For a reply or notice into a mailbox in memory: the log gets the end of the request, and the
        message is put once it has that. The log is given no content; DeferredPut restores it.
        """
        assert part.memory
        assert part.content is not None
        part.effects.insert(0, DeferredPut(self._steps, part.content))
        part.content, part.memory = None, False
        return part

    def notice(self, name: str, *, asked_by: str, about: Sequence[Run], why: str) -> Part | None:
        """Return a part that notifies a requester that requests will have no reply, and why.

        name: the mailbox that it wanted the replies in. about: the requests, as runs (key of their
        batch, first row, how many). A notice goes into a full mailbox, too: each stands for a
        request that was bounded. None: the requester has no mailbox any more.
        """
        # A message without a body for each request; frames of the same count are alike, and kept.
        count = sum(length for _, _, length in about)
        frame = self._notices.get(count)
        if frame is None:
            frame = encode([b""] * count, subject="notice")
            if len(self._notices) < NOTICES_MAX:
                self._notices[count] = frame
        try:
            part = self.put(
                name, sender="", content=Content(frame), frame=frame, about=about, last=True,
                why=why, force=True, asked_by=asked_by,
            )  # fmt: skip
        except BrokerRefused:
            return None
        part.notice = True
        return part

    # --- dead letters ---------------------------------------------------------------------------

    def bury(
        self,
        name: str,
        *,
        service: int,
        rows: Sequence[tuple[int, int]],
        size: int,
        why: str,
        by: str = "",
        force: bool = False,
    ) -> Part:
        """Return a part by which requests of a service become messages of a dead-letter mailbox.

        Their batches stay where they are: the mailbox refers to them by number.
        rows: (number of a put, its rows as a mask). size: bytes of these puts. why: the reason, as
        readers are told it. by: owner who would create the mailbox. force: see `put`.
        Raises BrokerRefused as `put` does, and `cross_ring` for a mailbox in memory: the log
        cannot move requests there in one step.
        """
        mailbox = self.mailboxes.use(name, by)
        if mailbox.memory:
            raise BrokerRefused("cross_ring", f"mailbox '{name}' is in memory only")
        count = sum(mask.bit_count() for _, mask in rows)
        if not force:
            self._check_room(mailbox, count, size)
        named = [(base, rows_of(mask)) for base, mask in rows]
        change = RequestDead(service, named, mailbox.number, why, self._shard.now_ms)
        changes: list[Change] = [change]
        if mailbox.state != STANDING:
            # Another step on its way may create the mailbox as well, with the same record.
            changes.insert(0, mailbox.creation())
        burying = Burying(self._messages, mailbox, rows, count, size)
        counting = Counting(self._shard.counters, count, ("dead_letters",))
        return Part(changes, effects=[burying, counting], level=mailbox.level)

    def next_letters(
        self, search: LetterSearch, is_wanted: Callable[[Rare], bool]
    ) -> tuple[Mailbox, list[RowsOfPut]] | None:
        """Look at the next puts of a search for dead letters; None: all were looked at.

        Returns the mailbox and their messages that no reader holds and that are wanted: there may
        be none among them while later ones follow. Called by REQUEUE, portion by portion.
        is_wanted: asked with the facts that dead letters have beside a message (Rare).
        """
        while search.mailboxes:
            mailbox = self.mailboxes.by_name.get(search.mailboxes[0])
            puts = {} if mailbox is None or mailbox.memory else search.next_puts(mailbox)
            if mailbox is not None and puts:
                return mailbox, [
                    (base, mask, row) for base, mask, row in _free(mailbox, puts)
                    if row.rare is not None and is_wanted(row.rare)
                ]  # fmt: skip
            search.end_mailbox()
        return None

    def still_free(self, mailbox: Mailbox, found: RowsOfPut) -> int:
        """Return the rows of a letter that are still in the mailbox, and that no reader holds.

        For a REQUEUE of a group's dead letters, after their bodies were read.
        """
        base, mask, row = found
        if mailbox.removing or mailbox.rows.get((mailbox.number, base)) is not row:
            return 0
        return mailbox.free(row) & mask

    def read(self, letter: RowsOfPut, call: OnBody) -> None:
        """Have the batch of a dead letter read, for `call`; None: it cannot be read.

        For REQUEUE_GROUP: the batch alone tells whether a purge by subject took a record.
        """
        base, _, row = letter
        self._messages.bodies.want(base, row.size, call)

    def revive(self, mailbox: Mailbox, rows: list[RowsOfPut], service: int) -> Part:
        """Return a part by which dead letters become requests of a service, for its REQUEUE."""
        change = RequestRevived(
            mailbox.number, service, [(base, rows_of(mask)) for base, mask, _ in rows],
            self._shard.now_ms,
        )  # fmt: skip
        return self._messages.part(mailbox, change, Reviving(self._messages, mailbox, rows))

    def reviving(self, mailbox: Mailbox, rows: list[RowsOfPut]) -> Reviving:
        """Return the effect by which a group's dead letters leave their mailbox, for REQUEUE_GROUP.

        The change that the log is told is the group's: it names letters and records.
        """
        return Reviving(self._messages, mailbox, rows)

    # --- room -----------------------------------------------------------------------------------

    def check_room(self, name: str, count: int, size: int) -> None:
        """Raise BrokerRefused where a mailbox has no room for messages that come as several puts.

        For a REPLY to several requesters, before its parts are made. name: of the mailbox; one that
        is not there yet has room. count, size: of all the puts.
        """
        mailbox = self.mailboxes.by_name.get(name)
        if mailbox is not None and not mailbox.removing:
            self._check_room(mailbox, count, size)

    def check_beside(self, part: Part, beside: dict[str, int]) -> None:
        """Raise BrokerRefused where a namespace has no room for a put beside others of its step.

        For each part of a REPLY to several requesters. part: of the put, with `asked_by`. beside:
        bytes of the others by namespace; gets this one.
        """
        putting = part.effects[0]
        assert isinstance(putting, Putting)
        put = putting.put
        self._quotas.check_beside(put.asked_by, putting.mailbox.resource, put.size, beside)

    def _check_room(self, mailbox: Mailbox, count: int, size: int) -> None:
        """Raise BrokerRefused `limit` for a put that never fits, `wait` where there is no room now.

        The mailbox has bounds of messages and bytes; all mailboxes together have one of bytes, and
        those in memory another. What steps on their way will put (`coming`) counts.
        """
        settings = self._shard.settings
        count_max, bytes_max = mailbox.bounds(settings)
        if (
            mailbox.messages + mailbox.coming + count > count_max
            or mailbox.bytes + mailbox.coming_bytes + size > bytes_max
        ):
            if count > count_max or size > bytes_max:
                raise BrokerRefused(
                    "limit",
                    f"mailbox '{mailbox.name}' takes at most {count_max} messages and "
                    f"{bytes_max} bytes, not {count} of {size} at once",
                )
            self._report_full(mailbox)
            raise BrokerRefused(
                "wait",
                f"mailbox '{mailbox.name}' is full: it has {mailbox.messages} of at most "
                f"{count_max} messages, {mailbox.bytes} of {bytes_max} bytes; "
                f"{count} of {size} bytes are too much",
            )
        stored_bytes = self.mailboxes.stored_bytes[mailbox.memory] + size
        if mailbox.memory:
            if size > settings.mail_memory_bytes_max:
                raise BrokerRefused(
                    "limit", f"at most {settings.mail_memory_bytes_max} bytes in memory"
                )
            if stored_bytes > settings.mail_memory_bytes_max:
                self._shard.counters["mail_memory_full"] += 1
                raise BrokerRefused("wait", "the mailboxes in memory are full")
        elif stored_bytes > settings.mail_bytes_max:
            self._shard.counters["mail_full"] += 1
            raise BrokerRefused("wait", "the mailboxes are full")

    def _report_full(self, mailbox: Mailbox) -> None:
        """Count a refusal by a full mailbox; report the first until the mailbox has room again."""
        self._shard.counters["mailbox_full"] += 1
        if not mailbox.full_reported:
            mailbox.full_reported = True
            self._shard.event(
                "mailbox_full", "warning", mailbox=mailbox.name, messages=mailbox.messages,
                bytes=mailbox.bytes,
            )  # fmt: skip


class LetterSearch(msgspec.Struct):
    """How far a REQUEUE has looked for dead letters, a portion of puts after the other."""

    mailboxes: list[str]
    """Mailboxes that were not looked through yet; the search is in the first of them."""
    numbers: Sequence[int]
    """Messages that are looked for; empty: all."""
    _after: int = -1
    """Number of the last put of that mailbox that was looked at."""

    def next_puts(self, mailbox: Mailbox) -> dict[int, int]:
        """Return the next puts, each with the rows to look at as a mask; empty: none is left."""
        found: dict[int, int] = {}
        if not self.numbers:
            every = -1  # All bits are set: every row of a put is looked at.
            found = dict.fromkeys(islice(mailbox.order.after(self._after), REVIVED_MAX), every)
            self._after = max(found, default=-1)
        elif self._after < 0:
            self._after = 0  # One portion looks at all numbers.
            for number in self.numbers:
                base = mailbox.order.floor(number)
                if base is not None and number < base + mailbox.rows[mailbox.number, base].count:
                    found[base] = found.get(base, 0) | 1 << (number - base)
        return found

    def end_mailbox(self) -> None:
        """Go on with the next mailbox, since this one was looked through or is not there."""
        del self.mailboxes[0]
        self._after = -1


def _free(mailbox: Mailbox, puts: Mapping[int, int]) -> list[RowsOfPut]:
    """Return those of the wanted rows of some puts that no reader holds. puts: {number: rows}."""
    rows: list[RowsOfPut] = []
    for base, wanted in puts.items():
        row = mailbox.rows[mailbox.number, base]
        mask = mailbox.free(row) & wanted
        if mask:
            rows.append((base, mask, row))
    return rows


def _set_expiry(put: MailPut, content: Content, after_ms: int, now_ms: int) -> None:
    """Set when the rows of a put expire: each at its sender's time, else after the mailbox's ttl.

    after_ms: the ttl; 0: none, so that rows without a time stay until they are taken.
    """
    default = now_ms + after_ms if after_ms else 0
    column = content.expiries
    if column is None:
        put.expires_at_ms = default
        return
    times = [at_ms or default for at_ms in column.tolist()]
    named = [at_ms for at_ms in times if at_ms]
    put.expires_at_ms = min(named, default=0)
    # Rows that all expire at the same time need no time each.
    if len(named) != len(times) or max(named) != put.expires_at_ms:
        put.expiries = times
