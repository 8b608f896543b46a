"""Programs over the real asyncio client, each in a process of its own.

Owns the use that programs make of the client library, and their knowledge: which call waits, what
they were shown, what they were told. The rules: a program settles everything that it is shown,
sooner or later; a call ends by a value or by an error that its documentation names, and until then
it is listed as open; the process may be stopped, killed and begun anew at any moment, and then
knows nothing of before. Source: README.md; the docstrings of malamute_py.client.aio.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from malamute_protocol import commands as c
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
    Timeout,
)
from malamute_py.client.aio.client import Client
from malamute_py.client.session.letters import RequestFailed
from malamute_py.client.session.group_options import GroupOptions
from malamute_py.client.settings import ClientOptions, ClientSettings, make_settings
from malamute_py.client.words import ConfirmAt, GroupKind
from tests.simulation.acts import LEVEL_STORED, LEVEL_SYNCED, Act, Wish
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.model import Violation
from tests.simulation.network import Connection, Message
from tests.simulation.records import SERIAL
from tests.simulation.sockets import Context, DealerSocket, Signalling
from tests.simulation.work_model import is_durable

_DECODER = msgspec.msgpack.Decoder(list[c.AnyCommand])
LEVELS = {"default": LEVEL_SYNCED, "synced": LEVEL_SYNCED, "stored": LEVEL_STORED}
LAWFUL = frozenset(
    {"not_held", "conflict", "journal_failed", "full", "disk_full", "limit", "window", "wait"}
)
"""Codes of refusals that a program has to reckon with."""
FAILS = 1
"""Mood of a request whose handler fails it for good."""
GIVES_BACK = 2
"""Mood of a request that is given back the first time."""
MEMORY_NUMBERS = 1 << 40


Role = Callable[["Process"], Coroutine[Any, Any, None]]
Cast = tuple[str, *tuple[Any, ...]]
"""A role by name and its details; see ROLES."""


class Deliberate(Exception):
    """A handler's own error."""


class Told(NamedTuple):
    """The end of a call."""

    value: Any = None
    error: MalamuteError | None = None

    @property
    def code(self) -> str:
        """Return the refusal's code, or empty."""
        return self.error.code if isinstance(self.error, BrokerRefused) else ""


class Process:
    """One program, from its start to its death, and again."""

    def __init__(
        self, world: Any, name: str, identity: str, asks: list[Cast], serves: list[Cast]
    ) -> None:
        """asks: roles that end once there is nothing new. serves: roles that go on for ever."""
        self.world = world
        self.rng = world.rng
        self.name = name
        self.identity = identity
        self.asks = asks
        self.serves = serves
        self.budget = self.rng.choice((3, 10, 25))
        """New things that it begins, all its lives together."""
        self.pace_us = self.rng.choice((500, 3_000, 20_000))
        self.model = world.model
        self.loop: Any = None
        self.client: Client = None  # type: ignore[assignment]
        self.dead = True
        self.closing = False
        self.calls: dict[int, str] = {}
        """Calls that have not returned."""
        self.attempts: dict[int, int] = {}
        """Serial of a request -> the attempts that this process was told last."""
        self.at_work: dict[int, None] = {}
        """Requests that handlers are amid."""
        self.requests = 0
        """Roles that have not ended."""
        self.sockets: list[DealerSocket] = []
        self._fds = 0
        self._calls = 0

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new process."""
        self.dead = self.closing = False
        self.calls.clear()
        self.sockets.clear()
        self.attempts.clear()
        self.at_work.clear()
        self.requests = len(self.asks) + 1
        self._begin()

    def _begin(self) -> None:
        self.loop = SimulatedLoop(
            lambda: self.world.clock.now_us, self.after, lambda: self.draw_us(1, 40), self._broken
        )
        self._watched(self.loop.run_coroutine(self._main()))

    def settings(self) -> ClientSettings:
        """Return settings of its client."""
        rng = self.rng
        options = ClientOptions(
            identity=self.identity,
            retry_min_ms=5,
            retry_max_ms=60,
            attempt_ms=rng.choice((50, 300)),
            window_bytes=rng.choice((2_000, 8 << 20)),
        )
        return make_settings("inproc://simulated", options)

    async def _main(self) -> None:
        self.client = Client(self.settings(), context=Context(self))  # type: ignore[arg-type]
        await self.client.opened(timeout_ms=None)
        for name, *details in self.serves:
            self._watched(self.loop.run_coroutine(ROLES[name](*details)(self)))
        for name, *details in self.asks:
            task = self.loop.run_coroutine(ROLES[name](*details)(self))
            self._watched(task)
            task.add_done_callback(self._asked)
        self.requests -= 1

    def _asked(self, _: Any) -> None:
        self.requests -= 1

    def _watched(self, task: asyncio.Task[Any]) -> None:
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self.dead or (error := task.exception()) is None:
            return
        self.world.fail(self.name, error)

    def _broken(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.world.fail(self.name, error or RuntimeError(str(context.get("message"))))

    def kill(self) -> None:
        """Kill the process; the operating system closes its connections."""
        if self.dead:
            return
        self.dead = True
        for socket in self.sockets:
            if socket.connection is not None and not socket.closed:
                connection = socket.connection
                connection.drop()
                self.world.after(self.draw_us(10, 20_000), lambda k=connection: self.parted(k))
        self.loop.bury()
        self.calls.clear()

    def freeze(self, for_us: int) -> None:
        """Stop the process for a while."""
        if not self.dead:
            self.loop.frozen_until_us = self.world.clock.now_us + for_us

    def finish(self) -> None:
        """End in order: cancel roles that go on, then close the client."""
        if not self.dead:
            self.loop.run_coroutine(self._finish())

    async def _finish(self) -> None:
        self.closing = True
        mine = asyncio.current_task()
        for task in list(self.loop.tasks):
            if task is not mine:
                task.cancel()
        if self.client is not None:
            await self.call("close", self.client.close())
        self.closing = False

    def unfinished(self) -> str:
        """Say in words what has not ended after the end."""
        return next((f"{self.name}: {call}" for call in self.calls.values()), "")

    def owes(self) -> str:
        """Say in words what is still to come; empty when nothing is."""
        if self.dead:
            return ""
        if self.calls:
            calls = ", ".join(self.calls.values())
            return f"{self.name} ({self.identity or 'no identity'}) waits for {calls}"
        if self.requests:
            return f"{self.name} has not asked for everything"
        return ""

    # --- what its sockets see --------------------------------------------------------------------

    @property
    def late_hellos(self) -> bool:
        """Whether the HELLO of an attempt that was given up may arrive after the next one's."""
        return self.does("late hellos")

    def descriptor(self) -> int:
        """Return a number for a descriptor."""
        self._fds += 1
        return self._fds

    def opened(self, end: Signalling) -> None:
        """Note that a descriptor was opened."""
        self.loop.descriptors[end.fd] = end
        if isinstance(end, DealerSocket):
            self.sockets = [socket for socket in self.sockets if not socket.closed]
            self.sockets.append(end)

    def woken(self) -> None:
        """Note that a descriptor can be read."""
        self.loop.wake()

    def connect(self, socket: DealerSocket) -> Connection | None:
        """Return a connection for a socket."""
        connection: Connection | None = None if self.dead else self.world.connect(socket)
        return connection

    def parted(self, connection: Connection) -> None:
        """Have the broker's host notice that a connection is gone."""
        self.world.machine.dropped(connection)

    def after(self, delay_us: int, action: Callable[[], None]) -> None:
        """Schedule something."""
        self.world.clock.after(delay_us, action)

    def draw_us(self, low: int, high: int) -> int:
        """Draw a time."""
        return int(low + self.rng.random() * (high - low))

    def chance(self, share: float) -> bool:
        """Whether something happens."""
        return bool(self.rng.random() < share)

    def said(self, connection: Connection, message: Message) -> None:
        """Note that the library sends a message."""
        if not self.dead:
            self.world.said(self, connection, _DECODER.decode(message[0]))

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        """Note that the broker hands a message to the network."""
        self.world.overheard(self, connection, commands, frames)

    # --- what its roles stand on -----------------------------------------------------------------

    @property
    def holder(self) -> str:
        """Return the name by which the broker knows it."""
        return self.identity or anonymous(self.client._session.id)

    def goes_on(self) -> bool:
        """Whether something new may be begun."""
        if self.world.quiet or self.budget <= 0:
            return False
        self.budget -= 1
        return True

    async def pause(self) -> None:
        """Let time pass."""
        await asyncio.sleep(self.draw_us(self.pace_us // 2, self.pace_us) / 1_000_000)

    async def call(
        self,
        what: str,
        work: Awaitable[Any],
        act: Act | None = None,
        *,
        lawful: tuple[type[MalamuteError], ...] = (),
        codes: tuple[str, ...] = (),
        impatient: bool = False,
    ) -> Told:
        """Await a call of the library, which is open until it has ended.

        lawful, codes: errors and refusals that it may end by, beside LAWFUL. impatient: the call
        may be cancelled.
        """
        number = self.opens(what)
        try:
            if impatient and self.rng.random() < 0.1:
                try:
                    async with asyncio.timeout(self.draw_us(10, 60_000) / 1_000_000):
                        return Told(await work)
                except TimeoutError:
                    return Told(error=Timeout("the caller has lost patience"))
            return Told(await work)
        except MalamuteError as error:
            return self.failed(what, act, error, lawful, codes)
        finally:
            self.calls.pop(number, None)

    def opens(self, what: str) -> int:
        """Note that a call begins; returns its number."""
        self._calls += 1
        self.calls[self._calls] = f"{what} since {self.world.clock.now_us} us"
        return self._calls

    def failed(
        self,
        what: str,
        act: Act | None,
        error: MalamuteError,
        lawful: tuple[type[MalamuteError], ...],
        codes: tuple[str, ...],
    ) -> Told:
        """Judge the error by which a call has ended."""
        if isinstance(error, BrokerRefused):
            self.world.note("rejected", self.name, what, error.code)
            if act is not None:
                self.model.caller_refused(act, error.code)
            if error.code in LAWFUL or error.code in codes or self.closing:
                return Told(error=error)
        else:
            self.world.note("failed", self.name, what, type(error).__name__)
            if isinstance(error, lawful) or self.closing:
                return Told(error=error)
        raise Violation("unlawful", f"{self.name}: {what}: {error!r}") from error

    def bound(self) -> tuple[dict[str, Any], tuple[type[MalamuteError], ...]]:
        """Return how long a request may take, and the errors that it may end by."""
        options: tuple[dict[str, Any], ...] = ({}, {}, {"timeout_ms": 30}, {"timeout_ms": 400})
        bound = self.rng.choice(options)
        lawful: tuple[type[MalamuteError], ...] = (RequestFailed,)
        if bound:
            lawful += (Timeout,)
        if not self.identity:
            lawful += (ConnectionLost,)
        return bound, lawful

    def act(self, *, level: str = "default", atomic: bool = False) -> Act:
        """Make an act that is about to be asked for."""
        return Act(
            self.world.act_number(), self.holder, [], b"", LEVELS[level], atomic,
            since_lsn=self.model.end_lsn,
        )  # fmt: skip

    def record(self, act: Act, kind: str, place: str, more: bytes = b"") -> bytes:
        """Return the body of a new record of an act."""
        serial: int = self.world.serial_of()
        act.wishes.append(Wish(kind, place, (serial,)))
        self.model.act_of[serial] = act
        self.model.subjects[serial] = ""
        if kind == "send":
            self.model.history.mails.add(serial)
        size = self.rng.choice((10, 60, 400))
        return SERIAL.pack(serial) + more.ljust(size, b"\xa5")

    def told(self, act: Act, told: Told, stream: str, losses: int, level: str) -> None:
        """Note that a call that is confirmed has ended."""
        if told.value is not None:
            sure = losses == self.world.losses
            offset = told.value.offset
            self.model.caller_confirmed(act, stream, offset, LEVELS[level], sure=sure)

    def does(self, habit: str) -> bool:
        """Whether programs of this run have a habit."""
        return habit in self.world.habits

    def level(self) -> ConfirmAt:
        """Draw a level of confirms."""
        levels: tuple[ConfirmAt, ...] = ("default", "synced", "stored")
        level: ConfirmAt = self.rng.choice(levels)
        return level

    async def confirmed(
        self, what: str, act: Act, work: Awaitable[Any], stream: str, level: str
    ) -> Told:
        """Await a call that a confirm ends, and judge that."""
        losses = self.world.losses
        told = await self.call(what, work, act, impatient=True)
        self.told(act, told, stream, losses, level)
        return told

    # --- steps -----------------------------------------------------------------------------------

    async def step(self, fill: Callable[[Any, Act], None]) -> Told:
        """Make one atomic step; fill puts its parts into the step and the act."""
        level = self.level()
        act = self.act(level=level, atomic=True)
        losses = self.world.losses

        async def work() -> Any:
            async with self.client.atomic(confirm=level) as step:
                fill(step, act)
                self.more(step, act)
            return step.confirmation

        told = await self.call("a step", work(), act, impatient=True)
        if told.value is not None:
            self.model.caller_confirmed(
                act, "", -1, LEVELS[level], sure=losses == self.world.losses
            )
        return told

    def more(self, step: Any, act: Act) -> None:
        """Add parts that any step may have."""
        if self.rng.random() < 0.5:
            stream = self.rng.choice(self.world.outputs)
            step.publish(stream, self.record(act, "publish", stream))
        if self.rng.random() < 0.3:
            box = self.rng.choice(self.world.boxes)
            step.send(box, self.record(act, "send", box))

    def reply_part(self, step: Any, act: Act, request: Any, service: str) -> None:
        """Add the last reply to a request that the program holds."""
        serial, body = self.answer(request, act)
        step.reply(request, body)
        logged = (serial,) if not request.reply_to.startswith("~") else ()
        act.wishes.append(Wish("reply", service, logged, (request.number,), last=True))

    def answer(self, request: Any, act: Act | None = None) -> tuple[int, bytes]:
        """Return a new reply to a request: its serial, and its body."""
        serial: int = self.world.serial_of()
        asked = SERIAL.unpack_from(request.body)[0]
        self.model.act_of[serial] = act or self.act()
        self.model.subjects[serial] = ""
        self.model.history.replies[serial] = asked
        return serial, SERIAL.pack(serial) + SERIAL.pack(asked)

    def begins(self, request: Any, service: str) -> int:
        """Note that a handler begins; returns the request's serial."""
        serial: int = SERIAL.unpack_from(request.body)[0]
        self.world.note("begins", self.name, request.number, request.attempts)
        told = self.attempts.get(serial, 1)
        self.attempts[serial] = request.attempts
        if request.attempts < told and not self.world.losses:
            raise Violation("attempts", f"record {serial}: {request.attempts}, {told} before")
        self.model.show(service, serial)
        return serial


def anonymous(session: bytes) -> str:
    """Return the broker's name for a client without an identity."""
    return "~" + blake2b(session, digest_size=16).hexdigest()


def serial_of(body: Any) -> int:
    """Return the serial that a body begins with."""
    return int(SERIAL.unpack_from(body)[0])


# --- who sends -------------------------------------------------------------------------------


async def sends(p: Process) -> None:
    """Send mail, one by one, several at once, in bulk, in steps."""
    rng, client = p.rng, p.client
    while p.goes_on():
        await p.pause()
        box, level, draw = rng.choice(p.world.boxes), p.level(), rng.random()
        if draw < 0.4:
            act = p.act(level=level)
            work = client.send(box, p.record(act, "send", box), confirm=level)
            await p.confirmed("send", act, work, "", level)
        elif draw < 0.6:
            acts = [p.act(level=level) for _ in range(3)]
            bodies = [p.record(act, "send", box) for act in acts]
            await asyncio.gather(*(
                p.confirmed("send", act, client.send(box, body, confirm=level), "", level)
                for act, body in zip(acts, bodies, strict=True)
            ))  # fmt: skip
        elif draw < 0.75:
            act = p.act(level=level)
            bodies = [p.record(act, "send", box) for _ in range(rng.choice((2, 6)))]
            losses = p.world.losses
            told = await p.call("send_many", client.send_many(box, bodies, confirm=level), act)
            if told.value:
                p.told(act, Told(told.value[0]), "", losses, level)
        else:
            await p.step(partial(sends_in_step, p, box))


def sends_in_step(p: Process, box: str, step: Any, act: Act) -> None:
    """Send a message as a part of a step."""
    step.send(box, p.record(act, "send", box))


async def publishes(p: Process) -> None:
    """Publish records, of every level."""
    rng, client = p.rng, p.client
    while p.goes_on():
        await p.pause()
        stream, level = rng.choice(p.world.inputs), p.level()
        for _ in range(rng.choice((1, 1, 5))):
            act = p.act(level=level)
            body = p.record(act, "publish", stream)
            if rng.random() < 0.2:
                with contextlib.suppress(BrokerRefused):  # The window is full.
                    client.publish_nowait(stream, body, confirm=level).add_done_callback(_looked_at)
            else:
                work = client.publish(stream, body, confirm=level)
                await p.confirmed("publish", act, work, stream, level)


def _looked_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


# --- who asks --------------------------------------------------------------------------------


async def requests(p: Process) -> None:
    """Send requests to services, several at once, with times and without."""
    while p.goes_on():
        await p.pause()
        await asyncio.gather(*(_request(p) for _ in range(p.rng.choice((1, 1, 3)))))


async def _request(p: Process) -> None:
    rng, client = p.rng, p.client
    service = rng.choice(p.world.services)
    act = p.act()
    mood = bytes([rng.choice((0, 0, 0, 0, 0, FAILS, GIVES_BACK))])
    body = p.record(act, "request", service, mood)
    serial = serial_of(body)
    draw = rng.random()
    bound, lawful = p.bound()
    if draw < 0.75:
        confirm = rng.choice(("none", "none", "stored", "synced"))
        if confirm == "stored" and not p.does("requests are confirmed as stored"):
            confirm = "none"
        work = client.request(service, body, confirm=confirm, **bound)
        told = await p.call(f"request of record {serial}", work, act, lawful=lawful, impatient=True)
        judge(p, serial, told)
    elif draw < 0.85:

        async def several() -> list[Any]:
            return [one async for one in client.requests(service, body, **bound)]

        told = await p.call("requests", several(), act, lawful=lawful, impatient=True)
        for reply in told.value or ():
            judge(p, serial, Told(reply))
        judge(p, serial, Told(error=told.error))
    else:
        level, key = p.level(), rng.randbytes(6)
        if p.identity:
            submitted = client.submit(service, body, key=key, confirm=level)
            await p.confirmed("submit", act, submitted, "", level)
            if rng.random() < 0.3:
                await p.pause()
                # The service may have gone with the request, in a power loss.
                await p.call("cancel", client.cancel(service, key), codes=("unknown_service",))


def judge(p: Process, serial: int, told: Told) -> None:
    """Check that the answer to a requester is what a worker said."""
    if isinstance(told.error, RequestFailed):
        p.model.failed_caller(serial, told.error.why.partition(":")[0], power=p.world.losses > 0)
    if told.value is not None and told.value.body:
        reply, answers = SERIAL.unpack_from(told.value.body), serial
        p.world.note("answer", p.name, serial, reply[0])
        p.model.answered_caller(answers, reply[0])


# --- who reads mail --------------------------------------------------------------------------


def reads(box: str | None) -> Role:
    """Read a mailbox; None: the process's own."""

    async def role(p: Process) -> None:
        rng = p.rng
        place = box if box is not None else p.holder
        while True:
            ack = rng.choice(("next", "manual"))
            left = rng.choice((2, 10, 1_000))
            credit = rng.choice((1, 3, 8192))
            try:
                async with p.client.inbox(box, ack=ack, credit_records=credit) as inbox:
                    async for mail in inbox:
                        shown(p, place, mail)
                        if rng.random() < 0.3:
                            await p.pause()
                        if ack == "manual":
                            await _settle_mail(p, place, mail)
                        left -= 1
                        if not left:
                            break
            except MalamuteError as error:
                reckoned(p, "an inbox", error)
            await p.pause()

    return role


def shown(p: Process, place: str, mail: Any) -> None:
    """Note that a program was handed a message."""
    if mail.body:
        serial = serial_of(mail.body)
        p.world.note("mail shown", p.name, place, mail.number, serial)
        p.model.show(place, serial)


async def _settle_mail(p: Process, place: str, mail: Any) -> None:
    draw = p.rng.random()
    if draw < 0.5:
        await p.call("mail.ack", mail.ack())
    elif draw < 0.65:
        await p.call("mail.nack", mail.nack(p.rng.choice((0, 20))))
    else:

        def fill(step: Any, act: Act) -> None:
            step.ack(mail)
            if mail.number < MEMORY_NUMBERS:
                act.wishes.append(Wish("ack", place, (), (mail.number,)))

        told = await p.step(fill)
        if told.error is not None and told.code != "not_held":
            # The step did not happen, and the message is the program's again.
            await p.call("mail.nack", mail.nack())


def reckoned(p: Process, what: str, error: MalamuteError) -> None:
    """Note that an iteration has ended by an error."""
    if p.closing:
        return
    p.world.note("failed", p.name, what, repr(error))
    if not isinstance(error, BrokerRefused) or error.code not in LAWFUL:
        raise Violation("unlawful", f"{p.name}: {what}: {error!r}") from error


# --- who works -------------------------------------------------------------------------------


async def _handled(p: Process, request: Any, service: str) -> bytes | None:
    """Do a handler's work; returns the reply, or None when it has finished the request."""
    p.at_work[request.number] = None
    try:
        return await _handle(p, request, service)
    finally:
        p.at_work.pop(request.number, None)


async def _handle(p: Process, request: Any, service: str) -> bytes | None:
    rng = p.rng
    serial = p.begins(request, service)
    mood = bytes(request.body)[8]
    if rng.random() < 0.7:
        await p.pause()
    if mood == FAILS:
        p.model.history.failing.add(serial)
        raise Deliberate("as it was asked for")
    if mood == GIVES_BACK and request.attempts == 1:
        await p.call("nack", request.nack(5, wait=rng.random() < 0.5), lawful=LATE)
        return None
    if rng.random() < 0.2 and p.does("handlers renew leases"):
        await p.call("renew", request.renew(), lawful=(ConnectionLost,))
    draw = rng.random()
    if draw < 0.15:
        _, body = p.answer(request)
        work = request.reply(body, last=False, wait=rng.random() < 0.5)
        await p.call("a first reply", work, lawful=LATE)
    elif draw < 0.2:
        return None
    share = 1.0 if p.does("handlers answer in steps only") else 0.5
    if rng.random() < share and p.does("handlers answer in steps"):
        told = await p.step(lambda step, act: p.reply_part(step, act, request, service))
        if told.error is not None:
            if told.code != "not_held" and not request.finished:
                await p.call("nack", request.nack(1), lawful=LATE)
            raise told.error
        return None
    return p.answer(request)[1]


LATE = (ConnectionLost, LocalProtocolError)
"""Ends of a request that was given up meanwhile, by the closing of its worker or a step."""


def serves(service: str) -> Role:
    """Run handlers through the library."""

    async def role(p: Process) -> None:
        async def handler(request: Any) -> bytes | None:
            return await _handled(p, request, service)

        def in_a_thread(request: Any) -> bytes:
            p.begins(request, service)
            return p.answer(request)[1]

        while True:
            rng = p.rng
            plain = rng.random() < 0.15
            try:
                async with p.client.worker(
                    service, concurrency=rng.choice((1, 3, 16)),
                    lease_ms=rng.choice((None, 100, 300)),
                    confirm=rng.choice(("stored", "synced")),
                ) as worker:  # fmt: skip
                    await worker.run(in_a_thread if plain else handler)
            except MalamuteError as error:
                reckoned(p, "a worker", error)
            await p.pause()

    return role


def works(service: str) -> Role:
    """Run a loop of its own over the requests."""

    async def role(p: Process) -> None:
        rng = p.rng
        while True:
            left = rng.choice((2, 10, 1_000))
            try:
                async with p.client.worker(
                    service, concurrency=rng.choice((1, 3)), lease_ms=rng.choice((None, 100, 300)),
                ) as worker:  # fmt: skip
                    while left:
                        request = await worker.next()
                        if request is None:
                            break
                        left -= 1
                        await _work(p, request, service)
            except MalamuteError as error:
                reckoned(p, "a worker", error)
            await p.pause()

    return role


async def _work(p: Process, request: Any, service: str) -> None:
    rng = p.rng
    try:
        body = await _handled(p, request, service)
    except Deliberate as error:
        await p.call("fail", request.fail(str(error), wait=rng.random() < 0.5), lawful=LATE)
        return
    except BrokerRefused:
        return
    except MalamuteError:
        # The caller of the step has lost patience, and does not know whether the step was taken.
        return
    wait = rng.random() < 0.5
    if body is not None:
        await p.call("reply", request.reply(body, wait=wait), lawful=LATE)
    elif not request.finished:
        await p.call("complete", request.complete(wait=wait), lawful=LATE)


# --- who shares a stream ---------------------------------------------------------------------


def joins(stream: str, group: str, kind: GroupKind) -> Role:
    """Be a member of a group."""

    async def role(p: Process) -> None:
        rng = p.rng
        place = f"{stream}/{group}"
        seen: dict[str, Any] = {}
        if "visibility" in GroupOptions.__struct_fields__:
            seen = {"visibility": "durable" if is_durable(place) else "live"}
        if "create" in GroupOptions.__struct_fields__:
            seen["create"] = True
        while True:
            ack = rng.choice(("next", "manual"))
            left = rng.choice((2, 10, 1_000))
            try:
                async with p.client.group(
                    stream, group, kind=kind, start="earliest", ack=ack,
                    credit_records=rng.choice((1, 4, 8192)), **seen,
                ) as member:  # fmt: skip
                    async for record in member:
                        serial = serial_of(record.body)
                        p.world.note("record shown", p.name, place, record.offset, serial)
                        p.model.show(place, serial)
                        if rng.random() < 0.3:
                            await p.pause()
                        if ack == "manual":
                            await _settle_record(p, place, member, record)
                        left -= 1
                        if not left:
                            break
            except MalamuteError as error:
                reckoned(p, "a group", error)
            await p.pause()

    return role


async def _settle_record(p: Process, place: str, member: Any, record: Any) -> None:
    draw = p.rng.random()
    if draw < 0.5:
        await p.call("member.ack", member.ack(record))
    elif draw < 0.65 or not p.does("members acknowledge in steps"):
        await p.call("member.nack", member.nack(record, p.rng.choice((0, 20))))
    else:

        def fill(step: Any, act: Act) -> None:
            step.ack(record)
            act.wishes.append(Wish("records", place, (), (record.offset,)))

        told = await p.step(fill)
        if told.error is not None and told.code != "not_held":
            await p.call("member.nack", member.nack(record))


ROLES: dict[str, Callable[..., Role]] = {
    "sends": lambda: sends,
    "publishes": lambda: publishes,
    "requests": lambda: requests,
    "reads": reads,
    "serves": serves,
    "works": works,
    "joins": joins,
}
"""Name -> function that makes the role."""
