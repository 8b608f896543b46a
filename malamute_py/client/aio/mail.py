"""Mail and requests in asyncio: send, read, ask a service.

Owns the verbs as awaitables. The rule: a cancelled call leaves the link and all other
calls as they were; a request whose caller was cancelled is cancelled at the broker, too.

Words: the window bounds the bytes that are sent and not confirmed; link.room() waits until it has
room. link.wake_up() has leave what the session was given. A row is one message with what belongs to
it, and with the token by which its outcome finds its caller. until_ms is the time at which the
session gives up trying again; 0: never.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from malamute_protocol.commands import CancelRequest
from malamute_protocol.errors import BrokerRefused
from malamute_py.client.aio.link import AsyncVerbs, LoopLink
from malamute_py.client.arguments import duration, key_of, later_of, ranges_of_messages
from malamute_py.client.engine.engine import clock_ms
from malamute_py.client.engine.waits import ACKED, ANSWER, NOTHING, OPENED
from malamute_py.client.position import Confirmation
from malamute_py.client.readers.mail import InboxBase, MailBatchBase, inbox_options
from malamute_py.client.session.calls import (
    ZERO,
    Bodies,
    Body,
    Bulk,
    Fields,
    Properties,
    Time,
    make_row,
    request_terms,
)
from malamute_py.client.session.inbox_options import CREDIT_BYTES, CREDIT_RECORDS, InboxOptions
from malamute_py.client.session.letters import Letter, Reply, ranges_of
from malamute_py.client.session.outbox import Tally
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.requests import PLAIN, Replies
from malamute_py.client.settings import DEFAULT_WAIT, Wait
from malamute_py.client.words import AckWhen, ConfirmAt

_PAUSE_EVERY: Final = 256  # asyncio only
"""Messages after which the event loop gets its turn, though more are at hand."""
_NO_PRODUCER: Final = (0, 0, 0)
"""Producer id, epoch and sequence of a batch of mail, which the broker tells by its key."""


class MailVerbs(AsyncVerbs):
    """Verbs for mailboxes, and for those that ask a service."""

    _inbox_type: type[Inbox]

    # --- sending -------------------------------------------------------------------------------

    async def send(
        self,
        mailbox: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        expires_at_ms: Time | None = None,
        deliver_at_ms: Time | None = None,
        priority: int = 0,
        key: bytes | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> Confirmation:
        """Put one message into a mailbox and wait for the broker's confirm.

        body, codec: as of publish(). expires_at_ms, deliver_at_ms: milliseconds since 1970, or a
        datetime. priority: -128 to 127, higher goes first. key: at most 128 bytes that name
        the message, so that it is taken once even if another process of the same identity
        sends it again (the Confirmation says duplicate=True; replicas are several identities),
        and another message under it is refused as `conflict`; without it, retries of this
        client are told apart all the same.
        confirm: "synced" (default), "stored" or "none". A full mailbox is tried
        again until timeout_ms is over; None: for ever; by default the client's settings say
        how long.
        Returns a Confirmation whose offset is the message's number.
        Raises BrokerRefused (it is not in the mailbox), LocalProtocolError (never sent),
        Timeout (it may still be taken) or ConnectionLost (the client was closed).
        """
        link, settings = self._link, self._session.settings
        future: asyncio.Future[Confirmation] = link.loop.create_future()
        row = make_row(body, subject, fields, None, expires_at_ms, properties, future, codec)
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                timeout_ms = await link.room(row.size, timeout_ms, mailbox)
            # Almost all calls wait by default: those need no look at what they ask for.
            wait_ms = (
                settings.call_timeout_ms
                if timeout_ms is DEFAULT_WAIT
                else settings.wait_ms(timeout_ms)
            )
            self._session.outbox.send(
                mailbox,
                row,
                level_number(confirm),
                priority=priority,
                deliver_at_ms=0
                if deliver_at_ms is None
                else later_of("deliver_at_ms", deliver_at_ms),
                key=b"" if key is None else key_of(key),
                until_ms=0 if wait_ms is None else clock_ms() + wait_ms,
            )
            link.wake_up()
        return await future

    def send_nowait(
        self,
        mailbox: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        expires_at_ms: Time | None = None,
        deliver_at_ms: Time | None = None,
        priority: int = 0,
        key: bytes | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> asyncio.Future[Confirmation]:
        """Put one message into a mailbox without waiting; the future is its confirm.

        What was not sent when the program ends is lost: flush() or close() before that.
        Raises BrokerRefused `window` when too much is unconfirmed: nothing was taken;
        otherwise as send().
        """
        link, wait_ms = self._link, self._session.settings.wait_ms(timeout_ms)
        future: asyncio.Future[Confirmation] = link.loop.create_future()  # asyncio only
        # sync: pending: Pending[Confirmation] = link.pending_type(link)
        row = make_row(body, subject, fields, None, expires_at_ms, properties, future, codec)
        if link.is_here():  # sync: with link.lock:
            if not self._session.window.has_room():
                raise BrokerRefused("window", "too much is unconfirmed: await some of it first")
            # From here on as send(), again: a function for both would be one call more a message.
            self._session.outbox.send(
                mailbox,
                row,
                level_number(confirm),
                priority=priority,
                deliver_at_ms=0
                if deliver_at_ms is None
                else later_of("deliver_at_ms", deliver_at_ms),
                key=b"" if key is None else key_of(key),
                until_ms=0 if wait_ms is None else clock_ms() + wait_ms,
            )
            link.wake_up()
        return future

    async def send_many(
        self,
        mailbox: str,
        bodies: Bodies,
        *,
        subject: str = "",
        subjects: Sequence[str | Sequence[str]] | None = None,
        fields: Fields | Sequence[Fields | None] | None = None,
        properties: Properties | Sequence[Properties | None] | None = None,
        expires_at_ms: int | Sequence[int] | None = None,
        deliver_at_ms: Time | None = None,
        priority: int = 0,
        codec: str | None = None,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> list[Confirmation]:
        """Put many messages into a mailbox, in order, in as few batches as their sizes allow.

        subjects, and fields, properties or expires_at_ms given as a sequence: one a message.
        Returns one Confirmation a batch, in order, each with its `count`. Raises as send();
        batches other than the one that failed may be in the mailbox.
        """
        link, session = self._link, self._session
        wait_ms = session.settings.wait_ms(timeout_ms)
        bulk = Bulk(
            bodies,
            batch_bytes=session.batch_bytes,
            limits=session.outbox.limits,
            subject=None if subjects is not None else subject,
            subjects=subjects,
            options={
                "fields": fields,
                "properties": properties,
                "expires_at_ms": expires_at_ms,
                "codec": codec,
            },
        )
        if not len(bodies):
            return []
        level = level_number(confirm)
        future: asyncio.Future[list[Confirmation]] = link.loop.create_future()
        # It gathers the confirms of all batches, and settles the caller's wait with the last one.
        tally = Tally(future)
        tally.left = len(bodies)
        until_ms = 0 if wait_ms is None else clock_ms() + wait_ms
        at_ms = 0 if deliver_at_ms is None else later_of("deliver_at_ms", deliver_at_ms)
        for first, end in bulk.cuts():
            # sync: # Encoded outside the lock: the link's thread goes on sending meanwhile.
            content = bulk.encode(first, end, _NO_PRODUCER)
            if content is None:  # too large: bulk cuts it in two, which come next
                continue
            if link.is_here():  # sync: with link.lock:
                if not link.has_room():
                    timeout_ms = await link.room(session.batch_bytes, timeout_ms, mailbox)
                session.outbox.send_content(
                    mailbox,
                    content,
                    level,
                    tally,
                    end - first,
                    priority=priority,
                    deliver_at_ms=at_ms,
                    until_ms=until_ms,
                )
                link.wake_up()
            # The link sends this batch while the next one is encoded.
            await asyncio.sleep(0)  # asyncio only
        return await future

    # --- reading -------------------------------------------------------------------------------

    def inbox(
        self,
        mailbox: str | None = None,
        *,
        ack: AckWhen = "next",
        credit_records: int = CREDIT_RECORDS,
        credit_bytes: int = CREDIT_BYTES,
        settings: Mapping[str, Any] | None = None,
        # sync: timeout_ms: int | None = None,
    ) -> Inbox:
        """Read a mailbox; None: the client's own, which has the name of its identity.

        ack="next": a message is acknowledged when the next one is asked for, and at the end
        of an `async with` that was left without an exception. ack="manual": by mail.ack().
        What is not acknowledged goes to another reader, or to this one the next time, with
        `attempts` one higher. credit: what may wait in this client. settings: for a mailbox
        that does not exist yet. Replies to requests of this client do not show here, replies
        to those of an earlier process with the same identity do: see mail.about.
        Raises LocalProtocolError; a refusal is raised by the iteration.
        """
        asked = inbox_options(mailbox, credit_records, credit_bytes, settings, ack)
        return self._inbox_type(
            self._link,
            asked,
            ack,
            # sync: timeout_ms,
        )

    # --- asking a service ------------------------------------------------------------------------

    async def request(
        self,
        service: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        timeout_ms: Wait = "default",
        key: bytes | None = None,
        reply_to: str = "",
        need_workers: bool = False,
        delay_ms: int = 0,
        priority: int = 0,
        confirm: ConfirmAt = "none",
    ) -> Reply:
        """Ask a service and wait for the (first) reply of a worker.

        body, codec: as of publish(). subject: what workers' patterns are matched with. timeout_ms:
        after it the broker takes the request from its holder, and no worker gets it any more; None:
        never; by default the client's settings say when. delay_ms: time before which no worker gets
        the request; timeout_ms begins after it. priority: 0 to 9; requests of a higher one are
        handed out before those of a lower one. key: at most 128 bytes that name
        the request, so that it is taken once even if another process of the same identity sends it
        again; replicas are several identities. reply_to: a mailbox to be read for replies; empty:
        the client's own, temporary when it has no identity (replies to it are lost while the broker
        is away).
        need_workers: raises BrokerRefused `no_workers` at once when no worker offers the service
        for the subject; by default the request waits for one.
        confirm: by default the reply is the confirm: until it comes the request is sent again
        after each reconnect, and taken once; "stored" or "synced" for a service whose replies
        may take long: then it is sent again only to a broker that was started anew and may have
        lost the request ("stored"), or the temporary mailbox of its reply.
        Raises Timeout, RequestFailed (a worker gave it up, or too many did), BrokerRefused
        (it was not queued), LocalProtocolError or ConnectionLost.
        """
        link, session = self._link, self._session
        # Almost all calls wait by default: those need no look at what they ask for.
        wait_ms = (
            session.settings.call_timeout_ms
            if timeout_ms is DEFAULT_WAIT
            else session.settings.wait_ms(timeout_ms)
        )
        future: asyncio.Future[Reply] = link.loop.create_future()
        # Most have none. By identity, which costs least: request_terms() takes other zeros, too.
        terms = PLAIN
        if need_workers is not False or delay_ms is not ZERO or priority is not ZERO:
            terms = request_terms(need_workers, delay_ms, priority)
        row = make_row(body, subject, fields, None, None, properties, future, codec)
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                left = await link.room(row.size, timeout_ms, service)
                wait_ms = session.settings.wait_ms(left)
            session.requests.request(
                service,
                row,
                level_number(confirm),
                reply_to=reply_to,
                timeout_ms=wait_ms or 0,
                key=b"" if key is None else key_of(key),
                terms=terms,
                until_ms=0 if wait_ms is None else clock_ms() + terms.delay_ms + wait_ms,
            )
            link.leave_with_others()
        try:
            return await future
        except asyncio.CancelledError:
            if link.is_here():  # sync: with link.lock:
                session.requests.give_up(future)
                link.wake_up()
            raise

    async def requests(
        self,
        service: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        timeout_ms: Wait = "default",
        key: bytes | None = None,
        reply_to: str = "",
        need_workers: bool = False,
        delay_ms: int = 0,
        priority: int = 0,
        confirm: ConfirmAt = "none",
    ) -> AsyncGenerator[Reply, None]:
        """Ask a service for several replies: iterate to the last of them.

        A loop that is left early cancels the request once the iterator is closed: at once in
        `async with contextlib.aclosing(client.requests(...)) as replies`, else when it is
        collected. Replies that came and were not iterated yet wait in memory, however many.
        Arguments and errors as of request(); timeout_ms is for all of them together.
        """
        link, session = self._link, self._session
        wait_ms = session.settings.wait_ms(timeout_ms)
        replies = Replies()
        terms = PLAIN
        if need_workers is not False or delay_ms is not ZERO or priority is not ZERO:
            terms = request_terms(need_workers, delay_ms, priority)
        row = make_row(body, subject, fields, None, None, properties, replies, codec)
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                left = await link.room(row.size, timeout_ms, service)
                wait_ms = session.settings.wait_ms(left)
            session.requests.request(
                service,
                row,
                level_number(confirm),
                reply_to=reply_to,
                timeout_ms=wait_ms or 0,
                key=b"" if key is None else key_of(key),
                terms=terms,
                until_ms=0 if wait_ms is None else clock_ms() + terms.delay_ms + wait_ms,
            )
            link.wake_up()
        # sync: return self._replies(replies)
        async with aclosing(self._replies(replies)) as answers:  # asyncio only
            async for reply in answers:
                yield reply

    async def _replies(self, replies: Replies) -> AsyncGenerator[Reply, None]:
        """Yield the replies of a request until the last; let go of it at any end.

        replies: the token of the request, which the session puts its replies into.
        """
        link = self._link
        try:
            while True:
                if link.is_here():  # sync: with link.lock:
                    await link.until(
                        lambda: bool(replies.queue) or replies.ended, replies, None, ANSWER
                    )
                while replies.queue:
                    yield replies.queue.popleft()
                if replies.error is not None:
                    raise replies.error
                if replies.ended:
                    return
        finally:
            # Cancels what is not answered. The collector may come here, too, amid any other call.
            link.let_go(replies)

    async def submit(
        self,
        service: str,
        body: Body,
        *,
        subject: str | Sequence[str] = "",
        fields: Fields | None = None,
        properties: Properties | None = None,
        codec: str | None = None,
        request_timeout_ms: int | None = None,
        key: bytes | None = None,
        reply_to: str = "",
        need_workers: bool = False,
        delay_ms: int = 0,
        priority: int = 0,
        confirm: ConfirmAt = "default",
        timeout_ms: Wait = "default",
    ) -> Confirmation:
        """Queue a request without waiting for a reply; returns when the broker has taken it.

        request_timeout_ms: after it the broker gives the request up; it begins after delay_ms.
        priority: as in request(). Replies are mail of
        `reply_to`, by default the client's own mailbox; mail.about is (key, 0) then, so give
        a key to know them by. need_workers: as in request().
        timeout_ms: for the broker's confirm. The Confirmation's offset
        is the request's number. Raises as send().
        """
        link, session = self._link, self._session
        wait_ms = session.settings.wait_ms(timeout_ms)
        future: asyncio.Future[Confirmation] = link.loop.create_future()
        terms = PLAIN
        if need_workers is not False or delay_ms is not ZERO or priority is not ZERO:
            terms = request_terms(need_workers, delay_ms, priority)
        row = make_row(body, subject, fields, None, None, properties, future, codec)
        if link.is_here():  # sync: with link.lock:
            if not link.has_room():
                left = await link.room(row.size, timeout_ms, service)
                wait_ms = session.settings.wait_ms(left)
            session.requests.request(
                service,
                row,
                level_number(confirm),
                reply_to=reply_to,
                timeout_ms=0
                if request_timeout_ms is None
                else duration("request_timeout_ms", request_timeout_ms),
                key=b"" if key is None else key_of(key),
                terms=terms,
                until_ms=0 if wait_ms is None else clock_ms() + wait_ms,
                waits=False,  # for a reply: the confirm is what the caller gets
            )
            link.wake_up()
        return await future

    async def cancel(self, service: str, key: bytes) -> int:
        """Give up a request that was sent with this key; returns how many were cancelled.

        0: it was answered already, or there is no such request. Raises BrokerRefused.
        """
        try:
            value = await self._link.ask(lambda number: CancelRequest(number, service, key))
        except BrokerRefused as error:
            if error.code != "unknown_request":
                raise
            return 0
        return int(value.get("count", 0))


class Mail(Letter, frozen=True, eq=False, gc=False):
    """One message of a mailbox, not acknowledged yet."""

    _inbox: Inbox

    @property
    def opened(self) -> Any:
        """Mailbox by which an atomic step acknowledges the message."""
        return self._inbox.opened

    async def ack(self, timeout_ms: Wait = "default") -> bool:
        """Acknowledge the message for good; returns when the broker has confirmed that.

        False: this inbox was closed, which gave it back; or the link was lost in between: should
        the broker hand it to this client again, it is acknowledged without being shown.
        Raises BrokerRefused `not_held` (it went to another reader meanwhile), Timeout (it may
        still be acknowledged), or what ended the inbox or the client.
        """
        number = self.number
        return await self._inbox._acknowledge([(number, number + 1)], timeout_ms=timeout_ms)

    async def nack(self, delay_ms: int = 0, timeout_ms: Wait = "default") -> bool:
        """Have the message delivered again, to any reader, after so many milliseconds."""
        number = self.number
        again_ms = duration("delay_ms", delay_ms)
        return await self._inbox._acknowledge([(number, number + 1)], again_ms, timeout_ms)


class MailBatch(MailBatchBase[Mail]):
    """Messages that were sent together."""

    async def ack(self, timeout_ms: Wait = "default") -> bool:
        """Acknowledge all of the messages for good; see Mail.ack()."""
        acked: bool = await self._reader._acknowledge(ranges_of(self.batch), timeout_ms=timeout_ms)
        return acked

    async def nack(self, delay_ms: int = 0, timeout_ms: Wait = "default") -> bool:
        """Have all of the messages delivered again after so many milliseconds."""
        acked: bool = await self._reader._acknowledge(
            ranges_of(self.batch), duration("delay_ms", delay_ms), timeout_ms
        )
        return acked


class Inbox(InboxBase[Mail]):
    """A mailbox as an async iterator of Mail; for one task at a time."""

    _letter = Mail

    def __init__(
        self, link: LoopLink, asked: InboxOptions, ack: AckWhen, timeout_ms: int | None = None
    ) -> None:
        """See Client.inbox(). Raises what ended the session."""
        self._link = link
        self._timeout_ms = timeout_ms
        self._until_pause = _PAUSE_EVERY  # asyncio only
        if link.is_here():  # sync: with link.lock:
            super().__init__(link.session.mailboxes, asked, ack)
            link.wake_up()
        # `async for mail in client.inbox(...)` with a break leaves no caller that closes it.
        self._finalizer = weakref.finalize(self, link.dropped, self._view)
        self._finalizer.atexit = False

    async def accepted(self, timeout_ms: Wait = "default") -> None:
        """Wait until the broker has opened the mailbox. Raises the refusal, or Timeout."""
        view, mailbox = self._view, self._view.mailbox
        if self._link.is_here():  # sync: with self._link.lock:
            await self._link.until(
                lambda: mailbox.accepted or view.ended, view, timeout_ms, OPENED, "the inbox"
            )
        if not mailbox.accepted:
            raise mailbox.error or BrokerRefused("cancelled")

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Mail:
        if self._link.is_here():  # sync: with self._link.lock:
            if self._done_with_last():  # with ack="next" the message before is acknowledged
                self._link.wake_up()
            self._until_pause -= 1  # asyncio only
            if self._until_pause <= 0:  # asyncio only
                self._until_pause = _PAUSE_EVERY
                await asyncio.sleep(0)
            if not self._left and not await self._fill(self._timeout_ms):
                raise StopAsyncIteration
        return self._next_at_hand()

    async def next(self, timeout_ms: int | None = None) -> Mail | None:
        """The next message; None when the inbox was closed.

        Raises Timeout (nothing is lost) or the broker's refusal.
        """
        if self._link.is_here():  # sync: with self._link.lock:
            if self._done_with_last():
                self._link.wake_up()
            if not self._left and not await self._fill(timeout_ms):
                return None
        return self._next_at_hand()

    async def next_batch(self, timeout_ms: int | None = None) -> MailBatch | None:
        """The next messages that were sent together; None when the inbox was closed.

        With ack="next" all of them are acknowledged when more is asked for. Raises as next().
        """
        if self._link.is_here():  # sync: with self._link.lock:
            if self._done_with_last():
                self._link.wake_up()
            item = self._rest()
            if item is None:
                if not await self._fill(timeout_ms):
                    return None
                item = self._rest()
        assert item is not None
        delivered, batch = item
        self._handed(batch)  # to be acknowledged with the next call
        return MailBatch(Mail, batch, delivered, self)

    async def _fill(self, timeout_ms: int | None) -> bool:
        """Wait until messages of a batch are at hand; False: there will be none any more."""
        view, mailbox, link = self._view, self._view.mailbox, self._link
        while True:
            item = view.take()
            if item is not None:
                self._begin(*item)
                if link.session.consumed(mailbox):  # credit is to be given back
                    link.wake_up()
                return True
            if view.ended:
                if mailbox.error is not None and not view.closed:
                    raise mailbox.error
                return False
            timeout_ms = await link.until(
                lambda: bool(mailbox.queue) or view.ended, view, timeout_ms, NOTHING, "message"
            )

    async def acknowledge(
        self,
        ranges: list[tuple[int, int]],
        again_ms: int = -1,
        timeout_ms: Wait = "default",
    ) -> bool:
        """Acknowledge messages by their numbers, as half-open ranges; see Mail.ack().

        again_ms: have them delivered again after so long, as by nack(); -1: they are done.
        """
        again_ms = duration("again_ms", again_ms, -1)
        return await self._acknowledge(ranges_of_messages(ranges), again_ms, timeout_ms)

    async def _acknowledge(
        self, ranges: list[tuple[int, int]], again_ms: int = -1, timeout_ms: Wait = "default"
    ) -> bool:
        """Acknowledge messages in ranges that are known to be right; see acknowledge()."""
        link = self._link
        wait_ms = link.engine.settings.wait_ms(timeout_ms)
        future: asyncio.Future[bool] = link.loop.create_future()
        if link.is_here():  # sync: with link.lock:
            if self._view.closed:
                return False
            self._view.collect()  # what ack="next" was to acknowledge goes first
            self._view.mailbox.ack(ranges, again_ms, future)
            link.wake_up()
        return await link.limit(future, wait_ms, ACKED, "an acknowledgement")

    async def close(self) -> None:
        """Stop reading, also under a task that waits for mail.

        What was not acknowledged goes to other readers at once.
        """
        self._finalizer.detach()
        if self._link.is_here():  # sync: with self._link.lock:
            self._close()
            self._link.notify(self._view)
            self._link.wake_up()

    async def __aenter__(self) -> Inbox:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; the message at hand counts as read unless the block raised."""
        if self._link.is_here():  # sync: with self._link.lock:
            if kind is None:
                self._done_with_last()
        await self.close()
