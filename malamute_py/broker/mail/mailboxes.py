"""Mailboxes: what lies in them, what each may hold, and the life of a message.

Owns the mailboxes at run time, their bounds, and every change of what lies in them: puts, leaving,
expiry, delay. The rules: the tables of the change log say what there is, and what is kept here
besides is who holds a row, what waits in which order and what is due when; a full mailbox answers
`wait` and never drops; what a step will put is counted when it is taken; a message is looked at
when something happens to it, never because another moves. What is in memory only lives in tables of
its own, changed by the same `apply`. Source: docs/design.md, Queues and the checkpoint; SPEC.md,
section 4.8; the Malamute whitepaper's direct messaging (docs/design.md, References).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from malamute_protocol.address import name_fault
from malamute_protocol.commands import Level, Send
from malamute_protocol.content import ARROW, Content
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.stamp import STAMP_BYTES, Stamp
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Link, Links
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.ring import EPOCH_SHIFT
from malamute_py.broker.log.steps import NO_TABLES, Counting, Effect, Part, Steps, Then, changing
from malamute_py.broker.mail.mailbox import (
    CREATING,
    DRAFT,
    GONE,
    STANDING,
    Mailbox,
    Out,
    expired,
    temporary_name,
)
from malamute_py.broker.mail.parts import (
    Burying,
    Late,
    Leaver,
    Leaving,
    Losing,
    Putting,
    Reviving,
    done_of,
)
from malamute_py.broker.ready import MAIL_STREAM
from malamute_py.broker.structures.sorted_values import Ordered, Place, Schedule
from malamute_py.changelog.records import (
    Change,
    MailboxSet,
    MailDone,
    MailPut,
    RequestDead,
    RequestRevived,
    Run,
)
from malamute_py.changelog.settings import MailboxSettings, queue_settings
from malamute_py.changelog.tables import MailboxRow, MessageRow, Queues, apply, rows_of

DUE_STEP: Final = 1_024
"""Puts that one tick delivers late, or lets expire."""
REVIVED_MAX: Final = 1_000
"""Puts that one revival looks at."""
TELL_MS: Final = 10_000
"""An event about the messages of a mailbox comes at most so often; their counter is exact."""
EASED: Final = 0.9
"""Below this share of its bounds a mailbox that was full is not any more."""
NOTICES_MAX: Final = 256
"""Contents of notices that are remembered, by their count of rows."""


class Mailboxes:
    """All mailboxes of one core."""

    def __init__(self, shard: Shard, links: Links, steps: Steps, bodies: Bodies) -> None:
        self._shard = shard
        self._links = links
        self._steps = steps
        self.bodies = bodies
        self._queues = shard.queues
        self.quotas = shard.quotas
        self._in_memory = Queues()
        """Tables of what is in memory only."""
        self._names: dict[str, Mailbox] = {}
        self._numbers: dict[int, Mailbox] = {}
        self.names: Ordered[str] = Ordered()
        self._drafts: Final[dict[str, Mailbox]] = {}
        """Made for a part that has not been taken."""
        self._next_number = 0
        self._default: MailboxSettings | None = None
        self._notices: dict[int, bytes] = {}
        self.bytes = 0
        """In the log, what is on its way included."""
        self.memory_bytes = 0
        self.messages = 0
        self.hungry: Final[deque[Mailbox]] = deque()
        """Mailboxes that may have something for a reader."""
        self.queues: Final = (self._drafts, self.hungry)
        """While all of them are empty, nothing can be done at once."""
        self.delays = Schedule()
        self.expiries = Schedule()
        self.endings = Schedule()
        """When temporary mailboxes whose link was lost end."""
        self._sessions: dict[int, bytes] = {}
        """The session of each of these."""
        self._born: dict[int, tuple[int, int, set[int]]] = {}
        """For each temporary mailbox: the next numbers when it was made, in the log and in memory,
        and the batches of requests of before whose lost answers it was told of."""
        self.temporaries = 0
        self.on_ending: Callable[[Mailbox], None] | None = None
        """Called with a temporary mailbox that has ended: it is to be emptied in steps."""

    # --- facts ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._names)

    @property
    def gauges(self) -> dict[str, int]:
        """How much there is."""
        return {
            "mailboxes": len(self._names),
            "temporary_mailboxes": self.temporaries,
            "mail_messages": self.messages,
            "mail_bytes": self.bytes + self.memory_bytes,
        }

    @property
    def now_ms(self) -> int:
        """The time."""
        return self._shard.now_ms

    def get(self, name: str) -> Mailbox | None:
        """The mailbox of this name, also one that is being created."""
        return self._names.get(name)

    def number(self) -> int:
        """A number for a mailbox or a service; never given twice."""
        number = max(self._next_number, self._queues.next_number)
        self._next_number = number + 1
        return number

    def apply(self, change: Change) -> None:
        """Let a change of what is in memory only take effect."""
        apply(NO_TABLES, self._in_memory, change)

    def stamp(self, content: Content, base: int) -> bytes:
        """The stamp of a batch that is in memory only."""
        shard = self._shard
        head = content.head
        return Stamp(
            1, 0, 0, 0, shard.epoch, base, shard.now_ms, MAIL_STREAM, 0,
            STAMP_BYTES + head.content_bytes, head.count, 0, head.content_crc,
        ).pack()  # fmt: skip

    # --- start ----------------------------------------------------------------------------------

    def recovered(self) -> None:
        """Take up what the tables hold; to be called once, before anything else."""
        queues = self._queues
        for row in queues.mailboxes.values():
            self._recover(row)
        numbers = self._numbers
        lost = 0
        for (number, base), message in queues.messages.items():
            mailbox = numbers.get(number)
            if mailbox is None:
                lost += 1
                continue
            mailbox.order.add(base)
            count = message.left.bit_count()
            mailbox.messages += count
            mailbox.bytes += message.size
            self.messages += count
            self.bytes += message.size
            self.quotas.weigh(message.weighs_on, mailbox.resource, message.size)
            if message.expires_at_ms:
                self.expiries.set((number, base), message.expires_at_ms)
            rare = message.rare
            if message.not_before_ms or (rare is not None and rare.again):
                self._delay_of(mailbox, message)
            if mailbox.free(message):
                mailbox.push(base, message.priority)
        if lost:
            # What a removal had not finished with: the mailbox is gone, and nothing names them.
            self._shard.counters["mail_without_mailbox"] += lost

    def _recover(self, row: MailboxRow) -> None:
        settings = row.settings
        rows = (self._in_memory if settings.memory else self._queues).messages
        mailbox = Mailbox(row.number, row.name, rows, settings, row.by, row.created_ms)
        mailbox.state = STANDING
        self._enlist(mailbox)

    def _delay_of(self, mailbox: Mailbox, row: MessageRow) -> None:
        """Rows of a put that the tables say to be delayed."""
        out = mailbox.out_of(row)
        for at_ms, rows in times_of(row):
            if at_ms:
                # Only a recipient asks for a pause; a sender's time stays a time.
                out.delay(rows, self._shard.resumed(at_ms, row.pause_ms))
        if out.times:
            mailbox.delayed += out.delayed.bit_count()
            self.delays.set((mailbox.number, row.base), min(out.times))

    def _enlist(self, mailbox: Mailbox) -> None:
        self._names[mailbox.name] = mailbox
        self._numbers[mailbox.number] = mailbox
        self.names.add(mailbox.name)
        if not mailbox.temporary:
            self.quotas.add(mailbox.created_by, "mailboxes")

    def _delist(self, mailbox: Mailbox) -> None:
        if self._names.get(mailbox.name) is mailbox:
            del self._names[mailbox.name]
            self.names.discard(mailbox.name)
        known = self._numbers.pop(mailbox.number, None)
        if known is not None and not mailbox.temporary:
            self.quotas.add(mailbox.created_by, "mailboxes", -1)

    # --- first use ------------------------------------------------------------------------------

    def use(self, name: str, by: str, wanted: MailboxSettings | None = None) -> Mailbox:
        """The mailbox of this name, or one that its first part creates.

        wanted: its settings then; None: those of the broker.
        Raises BrokerRefused: no such name may come into being.
        """
        mailbox = self._names.get(name)
        if mailbox is None and wanted is None:
            # Another who asks for settings is not bound to those of a part that was refused.
            mailbox = self._drafts.get(name)
        if mailbox is not None:
            if mailbox.removing:
                raise BrokerRefused("wait", f"mailbox '{name}' is being removed")
            return mailbox
        if name.startswith("~"):
            raise BrokerRefused("unknown_mailbox", f"mailbox '{name}' has ended")
        fault = name_fault(name)
        if fault:
            raise BrokerRefused("bad_name", fault)
        settings = self._shard.settings
        if not settings.auto_create:
            raise BrokerRefused("unknown_mailbox", f"there is no mailbox '{name}'")
        if wanted is not None:
            return self.draft(name, by, wanted)
        if self._default is None:
            self._default = queue_settings(
                MailboxSettings, settings.default_mailbox, settings.settings_bytes_max, None
            )
        return self.draft(name, by, self._default)

    def draft(self, name: str, by: str, settings: MailboxSettings) -> Mailbox:
        """A mailbox that nothing has created yet; it is forgotten when no part takes it up."""
        most = self._shard.settings.mailboxes_max
        if len(self._names) + len(self._drafts) - (name in self._drafts) >= most:
            raise BrokerRefused("limit", f"at most {most} mailboxes")
        if not name.startswith("~"):
            self.quotas.check(by, "mailboxes", 1 + len(self._drafts))
        rows = (self._in_memory if settings.memory else self._queues).messages
        mailbox = Mailbox(self.number(), name, rows, settings, by, self._shard.now_ms)
        self._drafts[name] = mailbox
        return mailbox

    @property
    def drafted(self) -> bool:
        """Whether mailboxes were made that no part has taken up."""
        return bool(self._drafts)

    def forget_drafts(self) -> None:
        """What was made for parts that were never taken is forgotten."""
        self._drafts.clear()

    def need(self, mailbox: Mailbox) -> None:
        """A step that needs a mailbox was taken."""
        mailbox.pending += 1
        if mailbox.state == DRAFT and self._drafts.pop(mailbox.name, None) is not None:
            self._enlist(mailbox)

    def create(self, mailbox: Mailbox, *effects: Effect) -> None:
        """Put the settings of a mailbox into the log."""
        self.need(mailbox)
        creating = Then(partial(self._created, mailbox), partial(self._not_created, mailbox))
        self._steps.propose(self.set_of(mailbox), creating, *effects)

    def _created(self, mailbox: Mailbox, _: int) -> None:
        mailbox.pending -= 1
        self.stands(mailbox)

    def _not_created(self, mailbox: Mailbox, *_: Any) -> None:
        mailbox.pending -= 1
        self.unused(mailbox)

    def unused(self, mailbox: Mailbox) -> None:
        """A step was refused: forget a mailbox that no step has created."""
        if mailbox.state == DRAFT and not mailbox.pending and not mailbox.readers:
            self._delist(mailbox)

    def create_in(self, part: Part, mailbox: Mailbox) -> bool:
        """Add the creation of a mailbox to a part that is about to be handed over.

        Decided at the handing over, so that a bundle that was refused takes the creation with
        it and leaves it to the next one that needs it.
        """
        if mailbox.state != DRAFT:
            return False
        part.changes.insert(0, self.set_of(mailbox))
        mailbox.state = CREATING
        return True

    def set_of(self, mailbox: Mailbox) -> MailboxSet:
        """The record that makes a mailbox what it is."""
        return MailboxSet(
            mailbox.number, mailbox.name, mailbox.settings, mailbox.created_by, mailbox.created_ms
        )

    def stands(self, mailbox: Mailbox) -> None:
        """A mailbox is in the log."""
        if mailbox.state == STANDING:
            return
        mailbox.state = STANDING
        self._shard.counters["mailboxes_created"] += 1
        self._shard.event(
            "mailbox_created", mailbox=mailbox.name, number=mailbox.number, by=mailbox.created_by
        )

    def remove(self, mailbox: Mailbox) -> None:
        """A mailbox is gone, and nothing lies in it."""
        mailbox.state = GONE
        self._delist(mailbox)

    # --- temporary ones -------------------------------------------------------------------------

    def temporary(self, link: Link) -> str:
        """The name of a session's temporary mailbox, which this makes when there is none.

        Raises BrokerRefused `limit`.
        """
        name = temporary_name(link)
        if name not in self._names:
            settings = self._shard.settings
            mailbox = self.draft(
                name, link.owner,
                MailboxSettings(memory=True, max_bytes=settings.temporary_bytes_max),
            )  # fmt: skip
            del self._drafts[name]
            mailbox.temporary = True
            mailbox.state = STANDING
            self._enlist(mailbox)
            self.temporaries += 1
            self._born[mailbox.number] = self._steps.mail_next, self._steps.memory_next, set()
            self._shard.counters["temporary_mailboxes_created"] += 1
        return name

    def answers_lost(self, name: str, base: int) -> bool:
        """Whether answers to a batch of requests may have ended with an older mailbox of a name.

        True once in the life of the temporary mailbox that there is now.
        """
        mailbox = self._names.get(name)
        born = None if mailbox is None else self._born.get(mailbox.number)
        if born is None:
            return False
        logged, in_memory, told = born
        if base in told or base >= (in_memory if base >= 1 << EPOCH_SHIFT else logged):
            return False
        told.add(base)
        return True

    def link_ended(self, link: Link) -> None:
        """A link is gone: with BYE its temporary mailbox ends, else it is kept for a while."""
        if not link.session:
            return
        mailbox = self._names.get(temporary_name(link))
        if mailbox is None or not mailbox.temporary:
            return
        if link.happened == "bye":
            self._end(mailbox)
        else:
            self._keep(mailbox, link)

    def _keep(self, mailbox: Mailbox, link: Link) -> None:
        self._sessions[mailbox.number] = link.session
        self.endings.set((mailbox.number, 0), self._shard.now_ms + link.expiry_ms)

    def _end(self, mailbox: Mailbox) -> None:
        """A temporary mailbox ends: nothing is put into it any more."""
        mailbox.removing = True
        self.endings.drop((mailbox.number, 0))
        self._sessions.pop(mailbox.number, None)
        self._born.pop(mailbox.number, None)
        if self._names.get(mailbox.name) is mailbox:
            del self._names[mailbox.name]
            self.names.discard(mailbox.name)
        self.temporaries -= 1
        if self.on_ending is not None:
            self.on_ending(mailbox)

    # --- room -----------------------------------------------------------------------------------

    def reserve(self, mailbox: Mailbox, count: int, size: int) -> None:
        """A step that puts so much was taken."""
        self.need(mailbox)
        mailbox.coming += count
        mailbox.coming_bytes += size
        if mailbox.memory:
            self.memory_bytes += size
        else:
            self.bytes += size

    def unreserve(self, mailbox: Mailbox, count: int, size: int) -> None:
        """That step has come to its end; what it put is counted by then."""
        mailbox.pending -= 1
        mailbox.coming -= count
        mailbox.coming_bytes -= size
        if mailbox.memory:
            self.memory_bytes -= size
        else:
            self.bytes -= size

    def bounds(self, mailbox: Mailbox) -> tuple[int, int]:
        """The most messages and bytes of a mailbox."""
        settings = self._shard.settings
        return (
            mailbox.settings.max_messages or settings.mailbox_messages_max,
            mailbox.settings.max_bytes or settings.mailbox_bytes_max,
        )

    def _check_room(self, mailbox: Mailbox, count: int, size: int) -> None:
        """Raises BrokerRefused: `limit` when it can never be, `wait` when it is full."""
        settings = self._shard.settings
        has = mailbox.settings
        count_max = has.max_messages or settings.mailbox_messages_max
        bytes_max = has.max_bytes or settings.mailbox_bytes_max
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
            self._full(mailbox)
            raise BrokerRefused(
                "wait",
                f"mailbox '{mailbox.name}' is full: it has {mailbox.messages} of at most "
                f"{count_max} messages, {mailbox.bytes} of {bytes_max} bytes; "
                f"{count} of {size} bytes are too much",
                settings.retry_ms,
            )
        if mailbox.memory:
            if size > settings.mail_memory_bytes_max:
                raise BrokerRefused(
                    "limit", f"at most {settings.mail_memory_bytes_max} bytes in memory"
                )
            if self.memory_bytes + size > settings.mail_memory_bytes_max:
                self._shard.counters["mail_memory_full"] += 1
                raise BrokerRefused("wait", "the mailboxes in memory are full", settings.retry_ms)
        elif self.bytes + size > settings.mail_bytes_max:
            self._shard.counters["mail_full"] += 1
            raise BrokerRefused("wait", "the mailboxes are full", settings.retry_ms)

    def _full(self, mailbox: Mailbox) -> None:
        """Count that a mailbox took something not; say so once until it is eased."""
        self._shard.counters["mailbox_full"] += 1
        if not mailbox.told_full:
            mailbox.told_full = True
            self._shard.event(
                "mailbox_full", "warning", mailbox=mailbox.name, messages=mailbox.messages,
                bytes=mailbox.bytes,
            )  # fmt: skip

    # --- putting --------------------------------------------------------------------------------

    def prepare_send(self, link: Link, command: Send, frame: Any) -> Part:
        """A SEND as part of a step. Raises BrokerRefused: nothing was done."""
        shard = self._shard
        settings = shard.settings
        name = command.mailbox
        if not settings.permit(link.owner, "send", name):
            raise BrokerRefused("forbidden", f"you may not send to mailbox '{name}'")
        try:
            content = self._shard.content(frame)
            content.check(settings.limits)
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
        about: Sequence[Run] = (),
        last: bool = False,
        why: str = "",
        force: bool = False,
        asked_by: str = "",
    ) -> Part:
        """One batch of messages for a mailbox, as part of a step.

        content: checked. asked_by: for a reply or a notice, who sent the request. force: beyond
        the bounds, for what must not be lost and was bounded before. In memory, the part says so;
        see `later`.
        Raises BrokerRefused: `wait`, `limit`, `bad_name`, `unknown_mailbox`.
        """
        mailbox = self._names.get(name)
        if mailbox is None or mailbox.removing:
            mailbox = self.use(name, self.quotas.owner_of(asked_by) if asked_by else by)
        head = content.head
        count = head.count
        size = STAMP_BYTES + head.content_bytes
        if not force:
            self._check_room(mailbox, count, size)
            self.quotas.check_sent(asked_by or sender, mailbox.resource, size)
        now_ms = self._shard.now_ms
        put = MailPut(
            mailbox.number, -1, count, size, sender, now_ms, key, priority,
            deliver_at_ms if deliver_at_ms > now_ms else 0,
        )  # fmt: skip
        if head.earliest_expiry_ms or mailbox.settings.ttl_ms:
            _set_expiry(put, content, mailbox.settings.ttl_ms, now_ms)
        if about:
            put.about = list(about)
        put.last = last
        put.why = why
        put.asked_by = asked_by
        putting = Putting(self, mailbox, put)
        part = Part(content=content, frame=frame, effects=[putting], level=mailbox.level)
        if mailbox.memory and mailbox.state == STANDING:
            part.memory = True
            part.level = int(Level.NONE)
        elif mailbox.memory:
            # Its messages are not logged, but that there is such a mailbox is: what is
            # confirmed as `none` must not wait for the disk, nor pretend that it did.
            if not mailbox.pending:
                self.create(mailbox)
            raise BrokerRefused(
                "wait", f"mailbox '{name}' is being created", self._shard.settings.retry_ms
            )
        else:
            part.changes = [put]
        return part

    def later(self, part: Part) -> Part:
        """A put into memory as a piece of a step that is logged: it happens when that is."""
        assert part.memory
        assert part.content is not None
        part.effects.insert(0, Late(self._steps, part.content))
        part.content, part.memory = None, False
        return part

    def notice(self, name: str, *, asked_by: str, about: Sequence[Run], why: str) -> Part | None:
        """Say that requests will have no answer; None when there is no client to be told.

        It goes beyond the bounds: each stands for a request that was bounded.
        """
        count = sum(run[2] for run in about)
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
        """Let requests become messages of a dead-letter mailbox, as part of a step.

        rows: (number of a put, its rows as a mask). size: bytes of these puts.
        Raises BrokerRefused as `put` does, and `cross_ring` for a mailbox in memory.
        """
        mailbox = self.use(name, by)
        if mailbox.memory:
            raise BrokerRefused("cross_ring", f"mailbox '{name}' is in memory only")
        count = sum(mask.bit_count() for _, mask in rows)
        if not force:
            self._check_room(mailbox, count, size)
        named = [(base, rows_of(mask)) for base, mask in rows]
        change = RequestDead(service, named, mailbox.number, why, self._shard.now_ms)
        changes: list[Change] = [change]
        if mailbox.state != STANDING:
            # Again by a command on the way: the second record says what the first did.
            changes.insert(0, self.set_of(mailbox))
        burying = Burying(self, mailbox, rows, count, size)
        counting = Counting(self._shard.counters, count, ("dead_letters",))
        return Part(changes, effects=[burying, counting], level=mailbox.level)

    def revive(self, name: str, *, service: int, numbers: Sequence[int] = ()) -> Part | None:
        """Let dead letters of a service that no reader holds become requests again.

        numbers: which; none: all, as far as one step goes. None: there is no such one.
        """
        mailbox = self._names.get(name)
        if mailbox is None or mailbox.memory:
            return None
        found: dict[int, int] = {}
        if numbers:
            for number in numbers:
                base = mailbox.order.floor(number)
                if base is not None and number < base + mailbox.rows[mailbox.number, base].count:
                    found[base] = found.get(base, 0) | 1 << (number - base)
        else:
            for at, base in enumerate(mailbox.order):
                if at == REVIVED_MAX:
                    break
                found[base] = -1
        rows: list[Leaver] = []
        for base, wanted in found.items():
            row = mailbox.rows[mailbox.number, base]
            rare = row.rare
            if rare is None or rare.request is None or rare.request.service != service:
                continue
            mask = mailbox.free(row) & wanted
            if mask:
                rows.append((base, mask, row))
        if not rows:
            return None
        change = RequestRevived(
            mailbox.number, service, [(base, rows_of(mask)) for base, mask, _ in rows],
            self._shard.now_ms,
        )  # fmt: skip
        return self.part(mailbox, change, Reviving(self, mailbox, rows))

    def part(self, mailbox: Mailbox, change: Change, *effects: Effect) -> Part:
        """A step's part that changes what lies in a mailbox; in memory it takes effect at once."""
        memory = self._in_memory if mailbox.memory else None
        level = int(Level.NONE) if mailbox.memory else mailbox.level
        return changing([change], effects, memory=memory, level=level)

    # --- the life of a message ------------------------------------------------------------------

    def arrived(self, mailbox: Mailbox, base: int, mask: int) -> None:
        """A put (0: all of it) or more rows of one lie in a mailbox, by the tables."""
        place = mailbox.number, base
        row = mailbox.rows[place]
        count = mask.bit_count() if mask else row.count
        if not mask or mailbox.order.floor(base) != base:
            # Of a batch of dead letters, others may have come or gone in this very bundle.
            mailbox.order.add(base)
            mailbox.bytes += row.size
            if mailbox.memory:
                self.memory_bytes += row.size
            else:
                self.bytes += row.size
            if mask:
                # A put was weighed when it was taken; requests become dead letters here.
                self.quotas.weigh(row.weighs_on, mailbox.resource, row.size)
        mailbox.messages += count
        self.messages += count
        self._shard.counters["mail_in"] += count
        if row.expires_at_ms:
            self.expiries.set(place, row.expires_at_ms)
        if row.not_before_ms > self._shard.now_ms:
            mailbox.out_of(row).delay(mask or row.left, row.not_before_ms)
            mailbox.delayed += count
            self.delays.set(place, row.not_before_ms)
            return
        mailbox.push(base, row.priority)
        if mailbox.able and not mailbox.queued:
            mailbox.queued = True
            self.hungry.append(mailbox)

    def wake(self, mailbox: Mailbox) -> None:
        """A mailbox may have something for a reader."""
        if not mailbox.queued and mailbox.able and mailbox.waits:
            mailbox.queued = True
            self.hungry.append(mailbox)

    def leaving(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Rows that were free, or delayed, are on their way out: no reader gets them."""
        out = mailbox.out_of(row)
        late = out.delayed & mask
        if late:
            self._undelay(mailbox, row, out, late)
        out.held |= mask
        mailbox.held += mask.bit_count()
        if not row.left & ~(out.held | out.delayed):
            mailbox.pull(row.base, row.priority)

    def _undelay(self, mailbox: Mailbox, row: MessageRow, out: Out, mask: int) -> None:
        mailbox.delayed -= mask.bit_count()
        place = mailbox.number, row.base
        following = out.undelay(mask)
        if following:
            self.delays.set(place, following)
        else:
            self.delays.drop(place)

    def left(self, mailbox: Mailbox, base: int, mask: int, row: MessageRow) -> None:
        """Rows that were held or leaving are gone from the tables."""
        count = mask.bit_count()
        mailbox.messages -= count
        mailbox.held -= count
        self.messages -= count
        place = mailbox.number, base
        if place in mailbox.rows:
            mailbox.out[base].held &= ~mask
            return
        del mailbox.out[base]
        mailbox.order.discard(base)
        mailbox.bytes -= row.size
        if mailbox.memory:
            self.memory_bytes -= row.size
        else:
            self.bytes -= row.size
        self.quotas.weigh(row.weighs_on, mailbox.resource, -row.size)
        self.bodies.drop(base)
        if row.expires_at_ms:
            self.expiries.drop(place)
        if mailbox.told_full:
            self._ease(mailbox)

    def _ease(self, mailbox: Mailbox) -> None:
        count_max, bytes_max = self.bounds(mailbox)
        if mailbox.messages <= EASED * count_max and mailbox.bytes <= EASED * bytes_max:
            mailbox.told_full = False

    def release(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Rows that were held or leaving wait again."""
        out = mailbox.out[row.base]
        out.held &= ~mask
        mailbox.held -= mask.bit_count()
        if mailbox.state == GONE:
            return
        mailbox.push(row.base, row.priority)
        self._freed(mailbox, row)
        self.wake(mailbox)

    def _freed(self, mailbox: Mailbox, row: MessageRow) -> None:
        """Let rows wait that no reader holds any more: they may have expired meanwhile."""
        if row.expires_at_ms and row.expires_at_ms <= self._shard.now_ms:
            # Also when others of the put expire later: these rows are over now.
            self.expiries.set((mailbox.number, row.base), self._shard.now_ms)

    def stay(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """Rows that were leaving wait again, each for the time that the tables say."""
        rest = mask
        for at_ms, rows in times_of(row):
            some = rows & rest
            rest &= ~some
            if some and at_ms > self._shard.now_ms:
                self.postpone(mailbox, row, some, at_ms)
            elif some:
                self.release(mailbox, row, some)

    def expire_soon(self, mailbox: Mailbox, row: MessageRow) -> None:
        """A put has free rows that have expired: look at it, unless that is about to be done.

        Others of its rows may expire far later, and what the log refused is tried again soon.
        """
        place = mailbox.number, row.base
        due_ms, now_ms = self.expiries.time(place), self._shard.now_ms
        if due_ms is None or due_ms > self.much_later_ms:
            self.expiries.set(place, now_ms)

    def postpone(self, mailbox: Mailbox, row: MessageRow, mask: int, at_ms: int) -> None:
        """Rows that were held wait again, and not before a time."""
        out = mailbox.out[row.base]
        out.held &= ~mask
        count = mask.bit_count()
        mailbox.held -= count
        mailbox.delayed += count
        self.delays.set((mailbox.number, row.base), out.delay(mask, at_ms))
        self._freed(mailbox, row)

    @property
    def much_later_ms(self) -> int:
        """When what the log refused, or could not be read, is tried again."""
        return self._shard.now_ms + 10 * self._shard.settings.retry_ms

    def lost(self, mailbox: Mailbox, row: MessageRow, mask: int) -> None:
        """The bodies of rows that are held are nowhere: they can only be given up, aloud."""
        count = mask.bit_count()
        self._shard.counters["mail_lost"] += count
        self._shard.event(
            "mail_lost", "error", mailbox=mailbox.name, number=row.base, count=count,
            sender=row.sender,
        )  # fmt: skip
        rows: list[Leaver] = [(row.base, mask, row)]
        change = MailDone(mailbox.number, done_of(rows), "lost")
        self._steps.take([self.part(mailbox, change, Losing(self, mailbox, rows))])

    # --- time -----------------------------------------------------------------------------------

    @property
    def due_ms(self) -> int | None:
        """When something is to be done next."""
        due_ms = self.delays.due_ms
        for schedule in (self.expiries, self.endings):
            at_ms = schedule.due_ms
            if at_ms is not None and (due_ms is None or at_ms < due_ms):
                due_ms = at_ms
        return due_ms

    def tick(self) -> None:
        """Deliver what is due, let expire what is over; the rest of a large number next time."""
        now_ms = self._shard.now_ms
        for _ in range(DUE_STEP):
            place = self.delays.take(now_ms)
            if place is None:
                break
            self._due(place)
        over: dict[int, list[Leaver]] = {}
        for _ in range(DUE_STEP):
            place = self.expiries.take(now_ms)
            if place is None:
                break
            self._expire(place, over)
        for number, rows in over.items():
            self._give_up(self._numbers[number], rows)
        while (place := self.endings.take(now_ms)) is not None:
            self._end_kept(place[0])

    def _due(self, place: Place) -> None:
        mailbox = self._numbers.get(place[0])
        if mailbox is None:
            return
        row = mailbox.rows.get(place)
        out = mailbox.out.get(place[1])
        if row is None or out is None or out.times is None:
            return
        now_ms = self._shard.now_ms
        mask = 0
        for at_ms, rows in out.times.items():
            if at_ms <= now_ms:
                mask |= rows
        mailbox.delayed -= mask.bit_count()
        following = out.undelay(mask)
        if following:
            self.delays.set(place, following)
        if mask & row.left & ~out.held:
            mailbox.push(place[1], row.priority)
            self.wake(mailbox)

    def _expire(self, place: Place, over: dict[int, list[Leaver]]) -> None:
        mailbox = self._numbers.get(place[0])
        row = None if mailbox is None else mailbox.rows.get(place)
        if mailbox is None or row is None:
            return
        mask, following = expired(mailbox, row, self._shard.now_ms)
        if following:
            self.expiries.set(place, following)
        out = mailbox.out.get(place[1])
        if out is not None:
            # What a reader holds stays with it; when it comes back it is looked at again.
            mask &= ~out.held
        if mask:
            self.leaving(mailbox, row, mask)
            over.setdefault(place[0], []).append((place[1], mask, row))

    def _give_up(self, mailbox: Mailbox, rows: list[Leaver]) -> None:
        change = MailDone(mailbox.number, done_of(rows), "expired")
        count = sum(mask.bit_count() for _, mask, _ in rows)
        told = partial(self._expired, mailbox, count), partial(self._expire_later, mailbox, rows)
        self._steps.take([self.part(mailbox, change, Leaving(self, mailbox, rows), Then(*told))])

    def _expire_later(self, mailbox: Mailbox, rows: list[Leaver], *_: Any) -> None:
        for base, _mask, _row in rows:
            self.expiries.set((mailbox.number, base), self.much_later_ms)

    def _expired(self, mailbox: Mailbox, count: int, _: int) -> None:
        """Count messages that expired, and say so: at once, then now and again how many since."""
        self._shard.counters["mail_expired"] += count
        mailbox.expired += count
        now_ms = self._shard.now_ms
        if now_ms >= mailbox.tell_expired_ms:
            self._shard.event("mail_expired", mailbox=mailbox.name, count=mailbox.expired)
            mailbox.expired = 0
            mailbox.tell_expired_ms = now_ms + TELL_MS

    def _end_kept(self, number: int) -> None:
        mailbox = self._numbers.get(number)
        session = self._sessions.pop(number, b"")
        if mailbox is not None and self._links.session(session) is None:
            self._end(mailbox)


def times_of(row: MessageRow) -> list[tuple[int, int]]:
    """When the rows of a put may be delivered, by the tables: (time or 0, rows as a mask)."""
    rest = row.left
    found: list[tuple[int, int]] = []
    for at_ms, rows in () if row.rare is None else row.rare.again:
        mask = int.from_bytes(rows, "little") & rest
        rest &= ~mask
        if mask:
            found.append((at_ms, mask))
    if rest:
        found.append((row.not_before_ms, rest))
    return found


def _set_expiry(put: MailPut, content: Content, after_ms: int, now_ms: int) -> None:
    """When the rows of a put expire: as each says, else as the mailbox does at this time."""
    default = now_ms + after_ms if after_ms else 0
    column = content.expiries
    if column is None:
        put.expires_at_ms = default
        return
    times = [at_ms or default for at_ms in column.tolist()]
    named = [at_ms for at_ms in times if at_ms]
    put.expires_at_ms = min(named, default=0)
    if len(named) != len(times) or max(named) != put.expires_at_ms:
        put.expiries = times
