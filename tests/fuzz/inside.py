"""The broker's loop, core and rings over memory, in one thread, under hostile messages.

Owns a world without sockets, processor threads and real time, so that a seed repeats it and
thousands of messages a second go through it. The rules: the loop's own code handles each message;
any error is a find; a witness beside the hostile peers publishes, reads, asks and works, and misses
nothing. Source: SPEC.md, sections 2, 8 and 15.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from malamute_protocol import commands as wire
from malamute_protocol.batch import iter_batches
from malamute_protocol.encode import encode
from malamute_protocol.errors import RemoteProtocolError
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.broker import Broker
from malamute_py.broker.limits import no_reload
from malamute_py.broker.ready import MAIN, RecoveredState, Send
from malamute_py.config import load
from malamute_py.journal import MemoryStorage
from malamute_py.journal.directory import Journal
from malamute_py.server.checkpointing.recovered import ring_facts
from malamute_py.server.core_settings import core_settings
from malamute_py.server.journaling.journal_threads import Synced
from malamute_py.server.journaling.rings import Rings, ring_settings
from malamute_py.server.loop import Loop
from malamute_py.server.result_queue import ResultQueue
from tests.fuzz.messages import Messages, Step

SETTINGS: Final[dict[str, Any]] = {
    "data_directory": "",
    "limits.batch_bytes_max": 1 << 20,
    "limits.record_bytes_max": 1 << 19,
    "journal.segment_bytes": 4 << 20,
    "journal.ring_bytes": 32 << 20,
    "links.expiry_beats": 2,
    "groups.window_records": 512,
    "quotas.links_s": 0,
}
"""Small limits: they are exceeded often, at little cost. But many links are opened."""
START_MS: Final = 1_700_000_000_000
WITNESS: Final = 1
WITNESS_EVERY: Final = 100
"""Steps from one look at the witness to the next."""
_FIRST_LINK: Final = 10_000
_ASKED_NS: Final = 10_000
"""Nanoseconds by which the broker's meter goes on each time that it is asked."""
ERRORS: Final = frozenset({"internal_error", "batch_quarantined", "read_erred"})
"""Events that report an error of the broker's own, which it contained."""


class Found(Exception):
    """An outcome that no message may cause; `about` says where it was, to tell finds apart."""

    def __init__(self, what: str, about: str) -> None:
        """what: for a person. about: equal for equal faults."""
        super().__init__(what)
        self.about = about


def place_of(error: BaseException) -> str:
    """Return the innermost place of the project in an error's trace, and the error's kind."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "malamute_p" in frame.filename or "pyspark_malamute" in frame.filename
    ]
    where = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].name}" if frames else "outside"
    return f"{type(error).__name__} in {where}"


@contextmanager
def _whatever_raises_is_found() -> Iterator[None]:
    """Make an error of any kind a find: it would have ended the loop."""
    try:
        yield
    except Found:
        raise
    except Exception as error:
        trace = traceback.format_exc()
        raise Found(f"the loop would have ended:\n{trace}", place_of(error)) from error


class _Log:
    """A log in which an error of the broker's own is a find."""

    def debug(self, event: str, **facts: Any) -> None:
        if event in ERRORS:
            self.critical(event, **facts)

    info = warning = error = debug

    def critical(self, event: str, **facts: Any) -> None:
        raise Found(f"the log has an error: {event} {facts}", f"event {event}")


class _Rings(Rings):
    """Rings whose threads' work is done by the thread that asks for it."""

    def __init__(self, journal: Journal, config: Any, results: ResultQueue, **bounds: Any) -> None:
        super().__init__(journal, config, results, **bounds)
        self._opener.put = self._open_or_remove  # type: ignore[assignment, method-assign]
        self._syncer.ask = self._sync_now  # type: ignore[method-assign]
        self._left: ResultQueue = results

    def _sync_now(self, name: str, ring: Any) -> bool:
        self._left.put(Synced(name, ring.sync()))
        return True

    def work(self) -> bool:
        """Do the work of the reader's thread; True: there was some."""
        did = False
        while any(self._turns):
            did = True
            answer = self._take_turn(True)
            if answer is not None:
                self._left.put(answer)
        return did


class _Loop(Loop):
    """The loop without sockets: its messages go to `told`."""

    told: Callable[[Send, int], None]
    ended: Callable[[int], None]

    def _send(self, send: Send, now_ms: int) -> None:
        self.told(send, now_ms)

    def _close(self, number: int) -> None:
        self.ended(number)


class Inside:
    """One broker and its peers."""

    def __init__(self, seed: int = 0, settings: dict[str, Any] | None = None) -> None:
        """seed: of the broker's own random numbers, such as the ids of its streams."""
        chance = random.Random(seed)
        config = load(overrides=SETTINGS | (settings or {}))
        self.now_ms = START_MS
        # Work is counted and not timed: a seed makes equal messages on any machine, slices
        # included.
        bound = msgspec.structs.replace(
            core_settings(config, no_reload, dict, dict), meter=partial(next, count(0, _ASKED_NS))
        )
        self.limits = bound.limits
        self._results = ResultQueue()
        journal = Journal.open(MemoryStorage(), entropy=chance.randbytes)
        batch_bytes_max = config.limits.batch_bytes_max
        ring, recovery = journal.ring(MAIN, ring_settings(config.journal, {}, batch_bytes_max))
        while ring.prepare_step():
            pass
        facts = ring_facts(MAIN, ring, recovery)
        self.core = Broker(
            bound, uuid=journal.uuid, epoch=journal.epoch,
            state=RecoveredState({MAIN: facts}), random=chance.randbytes,
        )  # fmt: skip
        self.rings = _Rings(
            journal, config.journal, self._results, batch_bytes_max=batch_bytes_max,
            snapshot=self.core.snapshot,
        )  # fmt: skip
        nothing: Any = None
        unwatched: Any = SimpleNamespace(connections=None)
        self.loop = _Loop(
            config, core=self.core, rings=self.rings, listeners=[], guard=unwatched,
            results=self._results, limits=self.limits, clock=lambda: self.now_ms, log=_Log(),
            counters=defaultdict(int), meter=lambda: 0, worked=lambda: 0,
            watchdog=nothing, validate=nothing, reloaded=nothing,
        )  # fmt: skip
        self.loop.told = self._told
        self.loop.ended = self._ended
        self.links: dict[int, int] = {}
        """Peer -> number of its link."""
        self._next = _FIRST_LINK
        self._numbers: dict[int, int] = {}
        """Number of a link -> its peer."""
        self._said_bye: set[int] = set()
        self.heard: Callable[[int, Sequence[Any], Sequence[Any]], None] = lambda *_: None
        """Callback that gets each message to a peer."""
        self.messages = 0
        self._witness = Witness(self)

    def close(self) -> None:
        """Give back descriptors and files."""
        self._results.close()

    # --- what happens -----------------------------------------------------------------------

    def play(self, step: Step) -> None:
        """Do one step. Raises Found."""
        with _whatever_raises_is_found():
            if step.kind == "wait":
                self.wait(step.ms)
            elif step.kind == "lost":
                number = self.links.pop(step.peer, None)
                if number is not None:
                    self._numbers.pop(number)
                    self.core.link_lost(number, self.now_ms)
                    self._settle()
            else:
                number = self.links.get(step.peer, 0)
                if not number:
                    number = self.links[step.peer] = self._next
                    self._numbers[number] = step.peer
                    self._next += 1
                self.receive(number, step.frames, more=step.kind == "more")

    def receive(self, number: int, frames: Sequence[bytes], *, more: bool = False) -> None:
        """Take one message of a link, as the loop does; more: its turn takes another after it.

        In a turn of several messages, unfinished commands of several links meet.
        """
        self.messages += 1
        self.now_ms += 1
        try:
            messages = decode_message(frames, self.limits)
        except RemoteProtocolError as error:
            self.core.malformed(number, error.code, error.reason, self.now_ms)
        else:
            commands = [command for command, _ in messages]
            self.core.receive(number, "", commands, frames[1:], self.now_ms)
        if not more:
            self._settle()

    def wait(self, ms: int) -> None:
        """Let time go by."""
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            at_ms = self.core.wake_at_ms()
            self.now_ms = until_ms if at_ms is None else min(max(at_ms, self.now_ms + 1), until_ms)
            if (at_ms or until_ms) <= self.now_ms:
                self.core.tick(self.now_ms)
            self._settle()
        self.rings._do_housekeeping()
        self._settle()

    def look(self) -> None:
        """Let the witness do its round. Raises Found when it misses something."""
        with _whatever_raises_is_found():
            self._settle()
            self._witness.round()

    def leave(self) -> None:
        """End all links but the witness'; their state must be gone. Raises Found."""
        for peer in list(self.links):
            self.play(Step(peer, "lost"))
        for _ in range(20):
            self.look()
            self.wait(30_000)
        gauges = self.core.gauges
        left = {name: gauges[name] for name in ("links", "subscriptions") if gauges[name] != 1}
        busy = {
            name: gauges[name]
            for name in ("reads_under_way", "queries_under_way", "unsettled_bytes")
            if gauges[name]
        }
        if left or busy:
            raise Found(f"the peers are gone, and there is left: {left | busy}", "left behind")

    def _settle(self) -> None:
        for turn in range(1000):
            # Work that is due at once is done in the next turn of the loop, a little later.
            self.now_ms += turn % 8 == 7
            at_ms = self.core.wake_at_ms()
            if turn and at_ms is not None and at_ms <= self.now_ms:
                self.core.tick(self.now_ms)
            self.loop.settle(self.now_ms)
            self.loop.sync(self.now_ms)
            worked = self.rings.work()
            if not self._results._results:
                if not worked and not self.loop._busy:
                    return
                self.loop._busy = False
                continue
            self.loop._take_results(self.now_ms)
        raise Found("the core never comes to rest", "never at rest")

    # --- what the broker says ---------------------------------------------------------------

    def _told(self, send: Send, now_ms: int) -> None:
        if send.link in self._said_bye:
            raise Found(f"link {send.link} was sent something after BYE", "after bye")
        frames = [bytes(frame) for frame in encode_message(send.commands, send.frames)]
        try:
            # A client's limits for what it receives are wider than a broker's for what it takes.
            commands = [command for command, _ in decode_message(frames)]
        except RemoteProtocolError as error:
            if error.code != "too_large":
                text = f"no client can read what the broker sends: {error}"
                raise Found(text, f"unreadable {type(send.commands[-1]).__name__}") from error
            commands = list(send.commands)
        if type(commands[-1]) is wire.Bye:
            self._said_bye.add(send.link)
        self._check(commands, frames[1:])
        if send.link == WITNESS:
            self._witness.told(commands, frames[1:])
        peer = self._numbers.get(send.link)
        if peer is not None:
            self.heard(peer, commands, frames[1:])

    def _check(self, commands: Sequence[Any], frames: Sequence[bytes]) -> None:
        at = 0
        for command in commands:
            owned = list(frames[at : at + command.content_frames])
            at += command.content_frames
            if type(command) is wire.Deliver:
                for batch in iter_batches(owned):
                    offsets = batch.offsets
                    if not command.from_ <= int(offsets[0]) <= int(offsets[-1]) < command.next:
                        whole = command.rows is not None or len(owned) > 2
                        if not whole:
                            raise Found(f"{command} brings {offsets}", "offsets outside a cover")

    def _ended(self, number: int) -> None:
        peer = self._numbers.pop(number, None)
        if peer is not None:
            self.links.pop(peer, None)


class Witness:
    """An honest client of all kinds at once: publisher, reader, requester, worker."""

    def __init__(self, world: Inside) -> None:
        """world: just made; the witness connects at once."""
        self._world = world
        self._tracker = 0
        self._told: list[Any] = []
        self._frames: list[bytes] = []
        self.rounds = 0
        world._witness = self
        hello = wire.Hello((1, 1), b"witness" + bytes(9), "witness", "", 60_000)
        self._say([hello])
        self._say(
            [
                wire.Subscribe(1, "witness", ["all"], [0], 1 << 40, 1 << 50),
                wire.OpenInbox(2, "witness", 1 << 40, 1 << 50),
                wire.Offer(3, "witness", ["all"], 1 << 40, 1 << 50),
            ]
        )

    def told(self, commands: Sequence[Any], frames: Sequence[bytes]) -> None:
        """Take a message of the broker."""
        self._told += commands
        self._frames += frames
        if any(type(command) is wire.Bye for command in commands):
            raise Found(f"the witness' link was ended: {commands}", "the witness was ended")

    def round(self) -> None:
        """Publish, ask, work and read, once each. Raises Found when something is missing."""
        self.rounds += 1
        body = b"round %d" % self.rounds
        self._say([wire.Ping(self.rounds)])
        got = self._ask(wire.Publish("witness", self._number(), 3), body)
        self._expect(got, wire.Confirm, wire.Deliver)
        got = self._ask(wire.Request("witness", self._number(), "witness", 0, 2), body)
        work = self._expect(got, wire.Confirm, wire.Work)[-1]
        batch = next(iter_batches(self._frames))
        numbers = [int(batch.offsets[0])]
        got = self._ask(wire.Reply(3, numbers, self._number(), True, 2), body)
        self._expect(got, wire.Confirm, wire.Mail)
        batch = next(iter_batches(self._frames))
        first = int(batch.offsets[0])
        self._say([wire.AckMail(2, [(first, first + 1)])])
        if work.attempts != 1:
            raise Found("the witness' request was handed out twice", "witness attempts")

    def _number(self) -> int:
        self._tracker += 1
        return self._tracker

    def _say(self, commands: list[wire.Command], frames: Sequence[bytes] = ()) -> list[Any]:
        self._told, self._frames = [], []
        self._world.receive(WITNESS, [bytes(frame) for frame in encode_message(commands, frames)])
        return self._told

    def _ask(self, command: wire.Command, body: bytes) -> list[Any]:
        """Send a command with one record; returns the answers, at most a second later."""
        self._say([command], [encode([body], subject="w")])
        for _ in range(5):
            bodies = [
                each.bodies() for each in iter_batches(self._frames) if each.content.head.count == 1
            ]
            if [body] in bodies and any(type(told) is wire.Confirm for told in self._told):
                break
            self._world.wait(200)
        else:
            kinds = [type(told).__name__ for told in self._told]
            raise Found(
                f"the witness sent {type(command).__name__} and missed its own record: it got"
                f" {kinds} {self._told[-3:]}",
                f"witness {type(command).__name__}",
            )
        return list(self._told)

    def _expect(self, told: list[Any], *kinds: type[wire.Command]) -> list[Any]:
        found = []
        for kind in kinds:
            of_kind = [command for command in told if type(command) is kind]
            if len(of_kind) != 1:
                raise Found(f"the witness got {told} instead of one {kind.__name__}", "witness")
            found += of_kind
        return found


def run(
    seed: int, messages: int, steps: list[Step] | None = None, slow_s: float = 0.0,
    settings: dict[str, Any] | None = None,
) -> int:  # fmt: skip
    """Play so many hostile messages of a seed; returns how many were taken. Raises Found.

    steps: filled with those played. slow_s: a step that takes longer is a find; 0: none is.
    """
    world = Inside(seed, settings)
    try:
        source = Messages(seed)

        def heard(peer: int, commands: Sequence[Any], frames: Sequence[Any]) -> None:
            source.views[peer].take(commands, frames, source.shared)

        world.heard = heard
        played = 0
        while world.messages < messages:
            step = source.step()
            if steps is not None:
                steps.append(step)
            began = time.monotonic()
            world.play(step)
            took = time.monotonic() - began
            if slow_s and took > slow_s:
                raise Found(f"one step took {took:.1f} s", "slow")
            source.shared.links = list(world.links.values())
            played += 1
            if played % WITNESS_EVERY == 0:
                world.look()
        world.leave()
        return world.messages
    finally:
        world.close()


def replay(steps: Iterable[Step], settings: dict[str, Any] | None = None) -> None:
    """Play the steps of a file, and the witness's round at the end. Raises Found."""
    world = Inside(0, settings)
    try:
        for step in steps:
            world.play(step)
        world.look()
        world.leave()
    finally:
        world.close()


def minimised(
    steps: list[Step], about: str, settings: dict[str, Any] | None = None, seconds: float = 60.0
) -> list[Step]:
    """Return a short list of steps that still leads to the find named by `about`.

    seconds: time after which a list that is short enough will do.
    """
    until = time.monotonic() + seconds

    def leads(candidate: list[Step]) -> bool:
        if time.monotonic() > until:
            return False
        try:
            replay(candidate, settings)
        except Found as found:
            return found.about == about
        return False

    # Most finds need the messages of their own peer, and little else.
    own = [step for step in steps if step.peer == steps[-1].peer]
    if leads(own):
        steps = own
    size = max(1, len(steps) // 2)
    while size and time.monotonic() < until:
        at, before = 0, len(steps)
        while at < len(steps):
            shorter = steps[:at] + steps[at + size :]
            if leads(shorter):
                steps = shorter
            else:
                at += size
        # After one step is gone, the next look may find that others can go.
        size = size // 2 or int(len(steps) < before)
    return steps
