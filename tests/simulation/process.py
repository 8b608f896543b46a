"""A process with a client of the real library: its life, its calls, and what it was told.

Owns what every program knows: which call waits, what it was shown, what it was told. The rules: a
call ends by a value or by an error that its documentation names, and until then it is listed as
open; the process may be stopped, killed and begun anew at any moment, and then knows nothing of
before. Source: README.md; the docstrings of malamute_py.client.aio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused, ConnectionLost, MalamuteError, Timeout
from malamute_py.client.aio.client import Client
from malamute_py.client.session.letters import RequestFailed
from malamute_py.client.settings import ClientOptions, ClientSettings, make_settings
from malamute_py.client.words import ConfirmAt
from tests.simulation.acts import LEVEL_STORED, LEVEL_SYNCED, Act, Wish
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.model import Violation
from tests.simulation.network import Connection, Message
from tests.simulation.records import SERIAL
from tests.simulation.sockets import Context, DealerSocket, Signalling

_DECODER = msgspec.msgpack.Decoder(list[c.AnyCommand])
LEVELS = {"default": LEVEL_SYNCED, "synced": LEVEL_SYNCED, "stored": LEVEL_STORED}
LAWFUL = frozenset(
    {"not_held", "conflict", "journal_failed", "full", "disk_full", "limit", "window", "wait"}
)
"""Codes of refusals that a program has to reckon with."""

Role = Callable[["Process"], Coroutine[Any, Any, None]]
Cast = tuple[str, *tuple[Any, ...]]
"""A role by name and its details; see Process.roles."""


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

    roles: Mapping[str, Callable[..., Role]] = {}
    """Name -> function that makes the role, for the roles of this kind of process."""

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
            self._watched(self.loop.run_coroutine(self.roles[name](*details)(self)))
        for name, *details in self.asks:
            task = self.loop.run_coroutine(self.roles[name](*details)(self))
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
