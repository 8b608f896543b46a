"""The verbs over cursors, groups, steps, mailboxes and services, in asyncio.

Owns these verbs as awaitables. The rule: as in client.py: a cancelled call leaves all others as
they were. link.ask() sends a command, made with the number by which its answer is known, and
returns the fields of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Unpack

from malamute_protocol import commands as c
from malamute_protocol.pattern import Pattern
from malamute_py.client import options
from malamute_py.client.aio.cursors import StreamCursor
from malamute_py.client.aio.members import JOINING, Member
from malamute_py.client.aio.pages import PagedVerbs
from malamute_py.client.aio.steps import AtomicStep
from malamute_py.client.aio.transactions import Transaction
from malamute_py.client.arguments import (
    beginning,
    key_of,
    numbers_of_requests,
    settings_of,
    truth,
)
from malamute_py.client.engine.waits import ACKED, OPENED
from malamute_py.client.facts import (
    CursorFacts,
    GroupFacts,
    MailboxFacts,
    PeekedMail,
    PeekedRequest,
    Purged,
    ServiceFacts,
    TransactionFacts,
    fact_list,
    facts,
)
from malamute_py.client.position import Position, StartPoint, found_at, start_on_wire
from malamute_py.client.session.calls import make_pattern, purge_pattern
from malamute_py.client.session.group_options import (
    CREDIT_BYTES,
    CREDIT_RECORDS,
    GroupOptions,
    group_visibility,
)
from malamute_py.client.session.memberships import decided, has_left
from malamute_py.client.session.subscription import Notice
from malamute_py.client.words import AckWhen, ConfirmAt, GroupKind, GroupVisibility

LEAVING: Final = "the end of the membership"


class QueueVerbs(PagedVerbs):
    """Verbs over cursors, groups, steps, mailboxes and services."""

    _member_type: type[Member]
    _step_type: type[AtomicStep]
    _transaction_type: type[Transaction]

    # --- steps -----------------------------------------------------------------------------

    def atomic(self, *, confirm: ConfirmAt = "default", key: bytes = b"") -> AtomicStep:
        """One atomic step: `async with client.atomic() as step`, then `step.publish(...)` etc.

        All that was put into it happens or none of it, when the block ends; step.confirmation
        tells of it. Steps of tasks that wait at the same time go to the broker together.
        confirm: "synced" or "stored". key: a name of its own, to be taken once however often
        it is tried, by this or a later process of the same identity. Replicas are several
        identities: what they may all be asked for is created by kv.update(key, value, revision=0).
        Raises LocalProtocolError: a key, and the client has no identity.
        """
        return self._step_type(self._link, confirm, key)

    # --- transactions ------------------------------------------------------------------------

    def transaction(self, *, timeout_ms: int = 0, confirm: ConfirmAt = "default") -> Transaction:
        """Open a transaction: `async with client.transaction() as tx`, then `tx.publish(...)` etc.

        It may stay open while the caller does other work, and hold more than one step could: no
        reader sees a record of it before its commit, and none ever if it is rolled back, or open
        for longer than timeout_ms (0: the broker's default). confirm: "synced" or "stored". A
        refusal to open it is raised by a later call, the commit at the latest; begin() waits for
        it.
        """
        return self._transaction_type(self._link, timeout_ms, confirm)

    async def transactions(self, *, limit: int = 0) -> list[TransactionFacts]:
        """Facts about the transactions that are open or being appended, oldest first.

        Needs manage_clients; without it the client is told of its own. limit: at most; 0: all.
        """
        return await self._pages(
            TransactionFacts, c.ListTransactions, limit, listed="transactions", first=b""
        )

    async def end_transaction(self, transaction: bytes, *, give_up: bool = False) -> dict[str, int]:
        """Roll back a transaction of any client; needs the permission manage_clients.

        transaction: its id. give_up: where it is committed and rings put off some of its records,
        these are dropped for good, and its client is told (`given_up`). Returns the records that
        were, by stream. Raises BrokerRefused `unknown_transaction`, or `conflict` when it is
        committed already, and the reason says what is put off.
        """
        id = key_of(transaction, "transaction")
        value = await self._link.ask(lambda number: c.EndTransaction(number, id, give_up))
        return dict(value.get("given_up", {}))

    # --- removal -----------------------------------------------------------------------------

    async def trim(self, stream: str, before: StartPoint) -> int:
        """Remove a stream's records before an offset, a time or another start point, for good.

        Returns the offset of the first record that stays; the confirm says that no crash brings the
        others back. Needs the permission `trim`; a start point other than an offset or a Position
        is looked up, and by client time or message id that needs the permission `read`. Raises
        BrokerRefused.
        """
        found = await self._found(stream, before)
        step = AtomicStep(self._link)
        step.trim(stream, found)
        await step.commit()
        return found.next if isinstance(found, Position) else found  # next: its offset

    async def purge(
        self, stream: str, pattern: str | Pattern, *, before: StartPoint = "latest"
    ) -> int:
        """Remove the records of some subjects, until now or before a start point, for good.

        pattern: on subjects; a str is a topic. Returns the offset from which on records of these
        subjects stay: a record published later is delivered. Needs the permissions as trim().
        Raises BrokerRefused: `bad_pattern`, also for "" ("#" is every subject), or `limit` when too
        many purges of the stream still hide records.
        """
        purge_pattern(pattern)  # before the broker is asked for the offset
        found = await self._found(stream, before)
        step = AtomicStep(self._link)
        step.purge(stream, pattern, found)
        await step.commit()
        return found.next if isinstance(found, Position) else found  # next: its offset

    async def _found(self, stream: str, start: StartPoint) -> Position | int:
        """Return the place of a start point: the offset, or a position of the stream.

        An offset and a Position are places; others are looked up at the broker. A Position also
        tells the broker which stream of the name is meant.
        """
        if isinstance(start, Position):
            return start
        wire = start_on_wire(start)
        # A caller's own list in the form of the wire goes to the broker, which checks it.
        if wire is not start and wire[:1] == [c.StartKind.OFFSET]:
            _, offset = wire
            return int(offset)
        value = await self._link.ask(lambda number: c.FindOffset(number, stream, wire))
        return found_at(stream, start, value)

    # --- cursors -----------------------------------------------------------------------------

    def cursor(self, stream: str, name: str) -> StreamCursor:
        """A cursor by name; it comes into being when it is moved or edited."""
        return StreamCursor(self._link, stream, name)

    async def cursor_info(self, stream: str, cursor: str) -> CursorFacts:
        """Facts about one cursor. Raises BrokerRefused `unknown_cursor`."""
        return await self.cursor(stream, cursor).info()

    async def list_cursors(
        self, stream: str = "", prefix: str = "", *, limit: int = 0
    ) -> list[CursorFacts]:
        """Facts about the cursors of a stream (empty: of all), whose names begin so.

        limit: at most so many, the first by name; 0: all.
        """
        return await self._pages(
            CursorFacts,
            lambda number, after: c.CursorInfo(number, stream, beginning(prefix), after),
            limit,
        )

    # --- groups ------------------------------------------------------------------------------

    def group(
        self,
        stream: str,
        group: str,
        *,
        kind: GroupKind = "shared",
        pattern: str | Pattern = "#",
        start: StartPoint = "earliest",
        ack: AckWhen = "next",
        credit_records: int = CREDIT_RECORDS,
        credit_bytes: int = CREDIT_BYTES,
        hold_ms: int = 0,
        visibility: GroupVisibility | None = None,
        create: bool = False,
        settings: Mapping[str, Any] | None = None,
        strict: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
        # sync: timeout_ms: int | None = None,
    ) -> Member:
        """Become a member of a group: `async with client.group(...) as member`, and iterate.

        kind: "shared" (each record to one member), "keyed" (each subject to one member, in
        order) or "exclusive" (one member at a time, whose place is kept for hold_ms). start:
        where a new group begins; by default at the oldest record, so that it misses none. ack:
        "next": what was handed over is done when the next is asked for; "manual": only ack() says
        so. credit_records: how many may be in hand. visibility: "durable" (only what no power
        loss takes back) or "live"; None: as the group has it, and "durable" for a new one.
        create: make the stream when there is none; by default a name that is no stream's is
        refused `unknown_stream`. settings: of a new group, as edit_group() has them. A rewind is
        told as a subscription tells it: on_notice, or GapError when strict.
        Raises PatternError or LocalProtocolError; a refusal is raised by the iteration.
        """
        asked = GroupOptions(
            stream, group, make_pattern(pattern), kind, start_on_wire(start),
            credit_records, credit_bytes, hold_ms, group_visibility(visibility), create,
            settings_of(settings, {}),
        ).check()  # fmt: skip
        return self._member_type(
            self._link,
            asked,
            ack=ack,
            strict=strict,
            on_notice=on_notice,
            # sync: timeout_ms=timeout_ms,
        )

    async def group_info(self, stream: str, group: str) -> GroupFacts:
        """Lag, members and what each holds. Raises BrokerRefused `unknown_group`."""
        value = await self._link.ask(lambda number: c.GroupInfo(number, stream, group))
        return facts(GroupFacts, {"stream": stream, "group": group, **value})

    async def list_groups(
        self, stream: str = "", prefix: str = "", *, limit: int = 0
    ) -> list[GroupFacts]:
        """Facts about the groups of a stream (empty: of all), whose names begin so.

        limit: at most so many, the first by name; 0: all.
        """
        return await self._pages(
            GroupFacts,
            lambda number, after: c.GroupInfo(number, stream, beginning(prefix), after),
            limit,
        )

    async def edit_group(
        self,
        stream: str,
        group: str,
        settings: Mapping[str, Any] | None = None,
        /,
        *,
        replace: bool = False,
        **more: Unpack[options.GroupOptions],
    ) -> GroupFacts:
        """Change the settings of a group; those not named stay.

        replace: those not named go back to what a new one has.
        settings, by name or as a mapping: attempts_max (attempts before a record is a dead letter;
        0: none are counted, and a record comes again for ever), dead_letters (name of their
        mailbox; "": STREAM.GROUP.dead), lease_ms (silence of a member about a record before another
        gets it, for members that join from then on; 0: none), description. Raises BrokerRefused.
        """
        named, anew = settings_of(settings, more), truth("replace", replace)
        # The first member makes the group, and its command may be on its way yet.
        await self._link.until_members(stream, group, decided, OPENED, JOINING)
        value = await self._link.ask(lambda number: c.EditGroup(number, stream, group, named, anew))
        return facts(GroupFacts, {"stream": stream, "group": group, **value})

    async def requeue_group(self, stream: str, group: str, numbers: Sequence[int] = ()) -> int:
        """Have members get the records of dead letters again; returns how many.

        numbers: of the messages in the group's dead-letter mailbox; none: all of them. A dead
        letter whose record the stream has no longer stays where it is. Raises BrokerRefused:
        `unknown_request` when there is no such letter, `retention` when the stream has none of
        their records any more.
        """
        listed = numbers_of_requests(numbers)
        value = await self._link.ask(lambda number: c.RequeueGroup(number, stream, group, listed))
        return int(value.get("count", 0))

    async def reset_group(
        self, stream: str, group: str, start: StartPoint, *, force: bool = False
    ) -> GroupFacts:
        """Have a group stand at a start point, wherever it stands; `more["before"]` says where.

        What was done from there on comes again, and attempts are counted anew; dead letters stay.
        force: members are no hindrance: their memberships end (`group_reset`), and they may join
        again. Raises BrokerRefused: `in_use` when there are members, `bad_start`, `unknown_group`.
        """
        at = start_on_wire(start)
        await self._link.until_members(stream, group, has_left, ACKED, LEAVING)
        value = await self._link.ask(lambda number: c.ResetGroup(number, stream, group, at, force))
        return facts(GroupFacts, {"stream": stream, "group": group, **value})

    async def remove_group(self, stream: str, group: str) -> None:
        """Forget a group without members. Raises BrokerRefused `in_use`, `unknown_group`."""
        # Members of this client's may be leaving just now, and would be a hindrance.
        await self._link.until_members(stream, group, has_left, ACKED, LEAVING)
        await self._link.ask(lambda number: c.RemoveGroup(number, stream, group))

    # --- mailboxes ---------------------------------------------------------------------------

    async def list_mailboxes(self, prefix: str = "", *, limit: int = 0) -> list[MailboxFacts]:
        """Facts about all mailboxes whose name begins so, in name order.

        limit: at most so many, the first by name; 0: all.
        """
        return await self._pages(
            MailboxFacts,
            lambda number, after: c.MailboxInfo(number, beginning(prefix), after),
            limit,
        )

    async def mailbox_info(self, mailbox: str) -> MailboxFacts:
        """Facts about one mailbox. Raises BrokerRefused `unknown_mailbox`."""
        value = await self._link.ask(lambda number: c.MailboxInfo(number, mailbox))
        return facts(MailboxFacts, {"name": mailbox, **value})

    async def peek(
        self, mailbox: str, *, after: int = -1, limit: int = 100, body_bytes: int = 1024
    ) -> list[PeekedMail]:
        """Look at messages without taking them, those with a number above `after`.

        body_bytes: how much of a body is shown, 512 KiB at most. Fewer than `limit` come where all
        have more; the next ones follow after the last number. Raises BrokerRefused.
        """
        value = await self._link.ask(
            lambda number: c.PeekMail(number, mailbox, after, limit, body_bytes)
        )
        return fact_list(PeekedMail, value, "messages")

    async def purge_mailbox(self, mailbox: str) -> Purged:
        """Take out all that no reader has in hand. Raises BrokerRefused."""
        value = await self._link.ask(lambda number: c.PurgeMail(number, mailbox, mailbox))
        return facts(Purged, value)

    async def edit_mailbox(
        self,
        mailbox: str,
        settings: Mapping[str, Any] | None = None,
        /,
        *,
        replace: bool = False,
        **more: Unpack[options.MailboxOptions],
    ) -> MailboxFacts:
        """Create a mailbox or change its settings; those not named stay.

        replace: those not named go back to what a new one has.
        settings, by name or as a mapping; 0 is the broker's bound: memory=True (in memory only),
        max_messages and max_bytes (a sender beyond them waits), ttl_ms (time to live of
        messages that name no expiry; 0: they do not expire), level ("synced" or "stored",
        what confirm="default" means), description. Raises BrokerRefused `bad_setting`.
        """
        named, anew = settings_of(settings, more), truth("replace", replace)
        value = await self._link.ask(lambda number: c.EditMailbox(number, mailbox, named, anew))
        return facts(MailboxFacts, {"name": mailbox, **value})

    async def remove_mailbox(self, mailbox: str) -> int:
        """Remove a mailbox and what lies in it; returns how much that was."""
        value = await self._link.ask(lambda number: c.RemoveMailbox(number, mailbox, mailbox))
        return int(value.get("count", 0))

    # --- services ----------------------------------------------------------------------------

    async def list_services(self, prefix: str = "", *, limit: int = 0) -> list[ServiceFacts]:
        """Facts about all service queues whose name begins so, in name order.

        limit: at most so many, the first by name; 0: all.
        """
        return await self._pages(
            ServiceFacts,
            lambda number, after: c.ServiceInfo(number, beginning(prefix), after),
            limit,
        )

    async def service_info(self, service: str) -> ServiceFacts:
        """Facts about one service queue. Raises BrokerRefused `unknown_service`."""
        value = await self._link.ask(lambda number: c.ServiceInfo(number, service))
        return facts(ServiceFacts, {"name": service, **value})

    async def peek_requests(
        self, service: str, *, after: int = -1, limit: int = 100
    ) -> list[PeekedRequest]:
        """Look at requests without taking them, those with a number above `after`.

        A broker may give fewer; the next ones follow after the last number. Raises BrokerRefused.
        """
        value = await self._link.ask(lambda number: c.PeekRequests(number, service, after, limit))
        return fact_list(PeekedRequest, value, "requests")

    async def edit_service(
        self,
        service: str,
        settings: Mapping[str, Any] | None = None,
        /,
        *,
        replace: bool = False,
        **more: Unpack[options.ServiceOptions],
    ) -> ServiceFacts:
        """Create a service queue or change its settings; those not named stay.

        replace: those not named go back to what a new one has.
        settings, by name or as a mapping; 0 is the broker's default: memory=True (in memory only),
        max_requests and max_bytes (a requester beyond them waits), attempts_max (hand-outs before a
        request is a dead letter), lease_ms (silence of a worker before its request goes to
        another), backoff_ms and backoff_max_ms (pause before a request is handed out again;
        doubles), timeout_ms (of requests that name none), dead_letters (name of their mailbox;
        "": SERVICE.dead), level, description. Raises BrokerRefused.
        """
        named, anew = settings_of(settings, more), truth("replace", replace)
        value = await self._link.ask(lambda number: c.EditService(number, service, named, anew))
        return facts(ServiceFacts, {"name": service, **value})

    async def requeue(self, service: str, numbers: Sequence[int] = ()) -> int:
        """Put dead letters, or requests that workers hold, back into the queue.

        numbers: which; none: all dead letters. Returns how many. Raises BrokerRefused:
        `unknown_request` when there is none.
        """
        listed = numbers_of_requests(numbers)
        value = await self._link.ask(lambda number: c.Requeue(number, service, listed))
        return int(value.get("count", 0))

    async def remove_service(self, service: str) -> int:
        """Remove a service queue and what lies in it; returns how much that was."""
        value = await self._link.ask(lambda number: c.RemoveService(number, service, service))
        return int(value.get("count", 0))
