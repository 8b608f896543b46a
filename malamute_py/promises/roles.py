"""The clients whose promises are checked: each writes down its calls and their outcomes.

Owns one run's names and its clients. The rules: every record, message, request and step has an id
of its own; an error of a call is written down as unsure, and the role goes on; each element that
was handed out is acknowledged by its own confirm, so that it is known when it must not come again.

Words: a role is what one client does all the time: it writes (publishes, sends, asks, steps), or
reads. An element is one record, message, request or step. The book is the journal of the run;
ASKED, CONFIRMED, SEEN and others are its events (history.py). A disturbance is a kill of the broker
or the like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from operator import itemgetter
from typing import Any

from malamute_protocol.errors import MalamuteError
from malamute_py.client.aio.client import Client, connect
from malamute_py.client.aio.work import Request
from malamute_py.client.session.subscription import BegunNotice, Notice
from malamute_py.client.words import ConfirmAt
from malamute_py.promises.history import (
    ASKED,
    CONFIRMED,
    DONE,
    FIRST,
    FOUND,
    LOOKED,
    SEEN,
    UNSURE,
    Book,
)

_IN_FLIGHT = 32
"""Calls of one writer that are under way at once, at most."""
_BEHIND_MAX = 200
"""Confirmed elements that may wait for a reader before the writer pauses: were they many, most
would wait in the broker while disturbances are to meet them on their way."""
_PAUSE_S = 0.002
"""Pause of a writer between two calls."""
_AGAIN_S = 0.05
"""Time between two looks of a writer whose reader is behind."""
PROGRESS = ("record", "mail", "request", "step", "group", "call")
"""Kinds of which something must be confirmed after every disturbance."""


class Roles:
    """All clients of one run."""

    def __init__(self, book: Book, name: str, level: ConfirmAt, options: dict[str, Any]) -> None:
        """name: begins the names of its streams and queues. level: of the confirms."""
        self._book = book
        self._level = level
        # These clients look more often than others would for a broker that is killed every second.
        self._options = {"timeout_ms": None, "retry_max_ms": 400, "attempt_ms": 2_000, **options}
        self._records, self._loose = f"{name}.records", f"{name}.loose"
        self._left, self._right, self._audit = f"{name}.left", f"{name}.right", f"{name}.audit"
        self._mail, self._service = f"{name}.mail", f"{name}.sums"
        self._answers = f"{name}.answers"
        self._group = f"{name}.group"
        self._clients: list[Client] = []
        self._writing: list[asyncio.Task[None]] = []
        self._reading: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        """Set when the writers are to end."""
        self._beside: set[asyncio.Task[None]] = set()
        """Acknowledgements under way."""
        self._answered: list[tuple[str, int]] = []
        """(id, number) of the messages in the mailbox of answers to requests."""
        self._audited: list[tuple[str, int]] = []
        """(id, number) of the messages that steps put into their mailbox."""
        self._mails: set[str] = set()
        """Ids of mail that the reader was given."""
        self._grouped: set[str] = set()
        """Ids of steps' records that a member of the group was given."""
        self._owed: dict[str, set[str]] = {"mail": set(), "request": set(), "step": set()}
        """Kind -> ids that readers must have been given in the end."""
        self.failures: list[str] = []
        """Errors of a reader that no disturbance explains."""

    async def start(self, endpoint: str) -> None:
        """Connect all clients, and let them begin."""

        async def client() -> Client:
            """Return one more client of the run."""
            made = await connect(endpoint, **self._options)
            self._clients.append(made)
            return made

        first = await client()
        for stream in (self._records, self._left, self._right):
            await first.create_stream(stream)
        readers = (
            self._read_records(await client()),
            self._read_mail(await client()),
            self._work(await client()),
            self._work(await client()),
            self._read_once(await client(), self._answers, self._answered),
            self._read_group(await client()),
            self._read_group(await client()),
            self._read_once(await client(), self._audit, self._audited),
        )
        self._reading = [asyncio.create_task(self._must_outlive(each)) for each in readers]
        # The kind of its elements, the letter that their ids begin with, and the call.
        writers = (
            self._keep_going(await client(), "record", "a", self._publish),
            self._keep_going(await client(), "record", "b", self._publish_many),
            self._keep_going(await client(), "mail", "m", self._send),
            self._keep_going(await client(), "request", "q", self._submit),
            self._keep_going(await client(), "call", "c", self._call),
            self._keep_going(await client(), "step", "s", self._step),
            self._keep_going(await client(), "loose", "l", self._publish_loose),
        )
        self._writing = [asyncio.create_task(each) for each in writers]

    def progress(self) -> dict[str, int]:
        """Return how many of each kind were confirmed so far, to tell whether calls go on."""
        counts = self._book.counts
        made = {kind: counts[CONFIRMED, kind] for kind in PROGRESS}
        made["group"] = counts[DONE, "group"]  # of a group the acknowledgements
        return made

    async def finish(self, patience_s: float) -> list[str]:
        """End the writers, write down what is there, and wait until the readers have all of it.

        Returns what did not come to its end.
        """
        self._stopped.set()
        stuck = []
        _, late = await asyncio.wait(self._writing, timeout=patience_s)
        if late:
            stuck.append(f"{len(late)} of the writers' calls never ended")
        # Before the readers are waited for: what is found is what the group's members owe.
        reader = self._clients[0]
        for kind, stream in (
            ("record/", self._records),
            ("step/left", self._left),
            ("step/right", self._right),
        ):
            await self._note_found(reader, kind, stream)
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        # An Event would not do: several readers give what is waited for.
        while loop.time() < until and not self._all_given():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        tasks = (*self._writing, *self._reading, *self._beside)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._book.note(LOOKED, "step/audit", "")
        for id, number in sorted(self._audited, key=itemgetter(1)):
            self._book.note(FOUND, "step/audit", id, number)
        self._book.note(LOOKED, "request/answers", "")
        for id, number in self._answered:
            self._book.note(FOUND, "request/answers", id, number)
        return stuck + self.failures

    async def close(self) -> None:
        """Disconnect all clients, and remove nothing; what finish() has not ended is cancelled."""
        self._stopped.set()
        tasks = (*self._writing, *self._reading, *self._beside)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(each.close() for each in self._clients), return_exceptions=True)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _all_given(self) -> bool:
        """Whether everything confirmed, and all that the left stream holds, reached its readers.

        By id: a call whose confirm was lost may have been done as well, and is no substitute for
        another.
        """
        audited = {id for id, _ in self._audited}
        return (
            self._yet_to_be_read("record") <= 0
            and self._owed["mail"] <= self._mails
            and self._owed["request"] <= {id for id, _ in self._answered}
            and self._owed["step"] <= self._grouped
            and self._owed["step"] <= audited
        )

    def _yet_to_be_read(self, kind: str) -> int:
        """Return how many confirmed elements of a kind their readers were not given yet.

        Calls and loose records have no reader: their count is 0.
        """
        counts = self._book.counts
        reached = {
            "record": counts[SEEN, "record"],
            "mail": len(self._mails),
            "request": len(self._answered),
            "step": min(len(self._grouped), len(self._audited)),
            "call": counts[CONFIRMED, "call"],
            "loose": counts[CONFIRMED, "loose"],
        }
        return counts[CONFIRMED, kind] - reached[kind]

    def _beside_reading(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a call beside the reader's next read; finish() cancels those that have not ended."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    # --- writers ------------------------------------------------------------------------------

    async def _keep_going(
        self, client: Client, kind: str, name: str, call: Callable[[Client, str], Awaitable[None]]
    ) -> None:
        """Be a writer: make one call after the other, several in flight, until finish() ends it.

        kind: of the elements. name: the letter that their ids begin with. call: makes one call for
        an id, and writes down that it was made and confirmed.
        """
        inflight: set[asyncio.Task[None]] = set()
        number = 0

        async def guarded(id: str) -> None:
            """Make one call; an error of it is no fault, as it may have been done or not."""
            try:
                await call(client, id)
            except MalamuteError as error:
                self._book.note(UNSURE, kind, f"{id}: {error!r}")

        try:
            while not self._stopped.is_set():
                task = asyncio.create_task(guarded(f"{name}:{number}"))
                number += 1
                inflight.add(task)
                task.add_done_callback(inflight.discard)
                await asyncio.sleep(_PAUSE_S)
                # The readers of what was confirmed may catch up. An Event would not do: several of
                # them move the counts that are waited for.
                while self._yet_to_be_read(kind) > _BEHIND_MAX and not self._stopped.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(_AGAIN_S)
                if len(inflight) >= _IN_FLIGHT:
                    await asyncio.wait(inflight, return_when=asyncio.FIRST_COMPLETED)
            if inflight:
                await asyncio.wait(inflight)
        finally:
            for left in list(inflight):
                left.cancel()

    async def _publish(self, client: Client, id: str) -> None:
        """Publish one record, and write down the offset that the confirm names."""
        self._book.note(ASKED, "record", id)
        done = await client.publish(self._records, id.encode(), confirm=self._level)
        self._book.note(CONFIRMED, "record", id, done.offset)

    async def _publish_many(self, client: Client, id: str) -> None:
        """Publish twenty records in one call, and write down each one's asking and confirm."""
        # Each call is a producer of its own: calls in flight have no order among each other.
        ids = [f"{id.replace(':', '.')}:{n}" for n in range(20)]
        for each in ids:
            self._book.note(ASKED, "record", each)
        await client.publish_many(
            self._records, [each.encode() for each in ids], confirm=self._level
        )
        for each in ids:
            # The call names the first offset of each batch only: -1 is not compared.
            self._book.note(CONFIRMED, "record", each)

    async def _publish_loose(self, client: Client, id: str) -> None:
        """Publish records that a power loss may take; they are not checked.

        They lie in the log among those that it may not take.
        """
        bodies = [id.encode().ljust(500)] * 40
        await client.publish_many(self._loose, bodies, confirm="stored")

    async def _send(self, client: Client, id: str) -> None:
        """Send one message; once it is confirmed, the mailbox's reader must be given it."""
        self._book.note(ASKED, "mail", id)
        done = await client.send(self._mail, id.encode(), confirm=self._level)
        self._book.note(CONFIRMED, "mail", id, done.offset)
        self._owed["mail"].add(id)

    async def _submit(self, client: Client, id: str) -> None:
        """Queue one request, whose answer comes into the mailbox of the answers."""
        self._book.note(ASKED, "request", id)
        await client.submit(self._service, id.encode(), reply_to=self._answers, confirm=self._level)
        self._book.note(CONFIRMED, "request", id)
        self._owed["request"].add(id)

    async def _call(self, client: Client, id: str) -> None:
        """Ask the service, and check that its reply is the request's own."""
        self._book.note(ASKED, "call", id)
        reply = await client.request(self._service, id.encode(), timeout_ms=30_000)
        if bytes(reply.body) != id.encode():
            self.failures.append(f"call {id} was answered {bytes(reply.body)!r}")
        self._book.note(CONFIRMED, "call", id)

    async def _step(self, client: Client, id: str) -> None:
        """Publish to two streams and send to a mailbox, all in one atomic step."""
        self._book.note(ASKED, "step", id)
        body = id.encode()
        async with client.atomic(confirm=self._level) as step:
            step.publish(self._left, body)
            step.publish(self._right, body)
            step.send(self._audit, body)
        self._book.note(CONFIRMED, "step", id)
        self._owed["step"].add(id)

    # --- readers ------------------------------------------------------------------------------

    async def _must_outlive(self, reader: Awaitable[None]) -> None:
        """Run a reader, which must outlive every disturbance: an error that ends it is a fault."""
        try:
            await reader
        except MalamuteError as error:
            self.failures.append(f"a reader ended: {error!r}")

    async def _read_records(self, client: Client) -> None:
        """Read all records, and write down where each was seen."""
        subscription = client.subscribe(
            self._records, start="earliest", create=True,
            visibility="durable" if self._durable else "live",
        )  # fmt: skip
        async for record in subscription:
            self._book.note(SEEN, "record", record.body.decode(), record.offset)

    @property
    def _durable(self) -> bool:
        """Whether what was confirmed survives a power loss, and readers see nothing else."""
        return self._level == "synced"

    async def _read_mail(self, client: Client) -> None:
        """Read the mailbox, write down what was seen, and acknowledge it while the next is read."""
        async with client.inbox(self._mail, ack="manual") as inbox:
            async for mail in inbox:
                id = bytes(mail.body).decode()
                self._book.note(SEEN, "mail", id, mail.number)
                self._mails.add(id)
                self._beside_reading(self._acknowledge("mail", [(id, mail.number)], mail.ack))

    async def _acknowledge(
        self, kind: str, what: list[tuple[str, int]], ack: Callable[[], Awaitable[object]]
    ) -> None:
        """Acknowledge, and write down what the broker confirmed; the others come again.

        what: (id, number) of the elements to write down; -1: none. ack: the call that does it.
        """
        try:
            confirmed = await ack()
        except MalamuteError:
            return
        # An acknowledgement's True, or the Confirmation of a reply.
        if confirmed is not None and confirmed is not False:
            for id, number in what:
                self._book.note(DONE, kind, id, number)

    async def _work(self, client: Client) -> None:
        """Answer each request, and write down that it was handed out and that it is done."""
        async with client.worker(self._service, concurrency=16) as worker:
            async for request in worker:
                id = bytes(request.body).decode()
                self._book.note(SEEN, "work", id)
                self._beside_reading(
                    self._acknowledge("work", [(id, -1)], partial(self._reply, request))
                )

    async def _reply(self, request: Request) -> object:
        """Answer a request with its own body; returns the broker's confirm, or None: too late."""
        return await request.reply(request.body, wait=True)

    async def _read_once(self, client: Client, mailbox: str, into: list[tuple[str, int]]) -> None:
        """Read a mailbox of answers, or of steps; each counts once, though it may come again."""
        known: set[int] = set()
        async with client.inbox(mailbox, ack="manual") as inbox:
            async for mail in inbox:
                if mail.number not in known:
                    known.add(mail.number)
                    into.append((bytes(mail.body).decode(), mail.number))
                self._beside_reading(self._acknowledge("", [], mail.ack))

    async def _read_group(self, client: Client) -> None:
        """Read the steps' left stream as a member of a group; write down what is seen and done."""
        async with client.group(self._left, self._group, start="earliest") as group:
            while (batch := await group.next_batch()) is not None:
                pairs = list(zip(batch.bodies(), batch.offsets.tolist(), strict=True))
                for body, offset in pairs:
                    self._book.note(SEEN, "group", body.decode(), offset)
                    self._grouped.add(body.decode())
                done = [(body.decode(), offset) for body, offset in pairs]
                # The next look at the group would acknowledge it without a trace.
                await self._acknowledge("group", done, partial(group.ack, batch))

    async def _note_found(self, client: Client, kind: str, stream: str) -> None:
        """Write down what a stream holds, and where it begins if its retention took records.

        kind: of its elements, and after the slash the place.
        """
        name, _, _ = kind.partition("/")

        def noticed(notice: Notice) -> None:
            """Write down the offset that the log begins at."""
            if isinstance(notice, BegunNotice):
                self._book.note(FIRST, name, "", notice.offset)

        self._book.note(LOOKED, kind, "")
        records = client.subscribe(stream, start="earliest", until="tail", on_notice=noticed)
        try:
            async for record in records:
                self._book.note(FOUND, kind, record.body.decode(), record.offset)
                if kind == "step/left":  # the stream that the group reads
                    self._book.note(ASKED, "group", record.body.decode())
                    self._owed["step"].add(record.body.decode())
        except MalamuteError as error:
            self.failures.append(f"the stream {stream} cannot be read in the end: {error!r}")
