"""Scenario `transactions`: open transactions over kills, power losses, refusals and timeouts.

Owns one seed: a client that stages batches for several streams over several steps, commits, rolls
back or forgets, and repeats each step that was not answered, under its key. The rules: no reader
ever gets a record of a transaction whose commit was not asked for; what was confirmed is there
whole, once and in order, and the rest is there whole or not at all; of what an operator gave up
exactly the records are missing that the operator was told, and its client is told so, over restarts
too. Two of the streams have rings
of their own, one of these keeps the last record of each subject. The journal is the fake one of
tests/broker.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.ready import MAIN
from tests.broker.shell import Shell, bodies
from tests.simulation.model import Violation
from tests.simulation.trace import Trace

OWN: dict[str, dict[str, Any]] = {
    "own": {"ring_bytes": 1 << 20},
    "kept": {"ring_bytes": 1 << 20, "keep": "last-per-subject"},
}
"""Streams with rings of their own, and their settings."""
STREAMS = ("a", "b", "c", *OWN)
ROUNDS_MAX = 40
"""Times that a step is repeated that is told to wait, or whose answer a crash took."""
OVER = {"unknown_transaction", "transaction_timed_out", "transaction_ended", "conflict", "not_held"}
"""Refusals that end a transaction for its client."""
OPEN, ASKED, COMMITTED, DROPPED = "open", "asked", "committed", "dropped"


class Load:
    """One transaction, as its client knows it."""

    def __init__(self, id: bytes) -> None:
        self.id = id
        self.state = OPEN
        self.batches: list[tuple[str, list[bytes]]] = []
        """Stream and bodies of each batch, in the order of the places."""
        self.given_up: set[str] = set()
        """Streams whose records an operator may have given up, where their rings lacked them."""
        self.lost: dict[str, int] = {}
        """Stream -> records that were given up, as the operator was told."""

    def of(self, stream: str) -> list[bytes]:
        """Return all bodies for one stream, in order."""
        return [body for name, some in self.batches if name == stream for body in some]


class TransactionsRun:
    """One seed of the scenario."""

    def __init__(self, seed: int, *, steps: int = 0, trace: Trace | None = None) -> None:
        self.rng = rng = Random(seed)
        self.trace = trace if trace is not None else Trace()
        self.steps = steps or rng.choice((60, 150, 300))
        self.shell = Shell(
            mail_hot_bytes=rng.choice((1, 4_000, 1 << 20)),
            commit_bytes=rng.choice((1, 1_000, 1 << 20)),
            transactions_max=rng.choice((2, 100)),
            hot_bytes=rng.choice((0, 8_000, 1 << 20)),
        )
        self.loads: list[Load] = []
        self.tracker = self.numbers = 0
        self.giving_up: dict[int, Load] = {}
        """Number of END_TRANSACTION -> what it gives up."""
        self._link()

    def _link(self) -> None:
        shell = self.shell
        shell.hello(1, identity="loader")
        shell.hello(2, identity="reader")
        for stream, settings in OWN.items():
            shell.send(1, wire.CreateStream(1, stream, settings))
        for number, stream in enumerate(STREAMS):
            shell.subscribe(2, 10 + number, stream)
            shell.subscribe(2, 20 + number, stream, visibility=2)

    # --- the run ------------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        shell, rng = self.shell, self.rng
        for _ in range(self.steps):
            draw = rng.random()
            open_ones = [load for load in self.loads if load.state == OPEN]
            if draw < 0.12 or not open_ones:
                self._begin()
            elif draw < 0.52:
                self._stage(rng.choice(open_ones))
            elif draw < 0.67:
                self._commit(rng.choice(open_ones))
            elif draw < 0.74:
                self._roll_back(rng.choice(open_ones))
            elif draw < 0.82:
                shell.publish(1, rng.choice(STREAMS), [b"other"], tracker=self._next())
            elif draw < 0.86:
                shell.auto_sync = not shell.auto_sync
            elif draw < 0.90:
                shell.auto_read = not shell.auto_read
            elif draw < 0.92:
                self._refuse_for_a_while()
            elif draw < 0.93:
                self._give_up(rng.choice(open_ones))
            elif draw < 0.96:
                shell.wait(rng.choice((10, 300, 3_000)))
            else:
                self._crash()
            self._check_seen()
        self._calm()
        shell.wait(61_000)
        self._crash()
        self._calm()
        self._check_seen()
        self._check_log()

    def _next(self) -> int:
        self.tracker += 1
        return self.tracker

    def _calm(self) -> None:
        """Have the journal do everything."""
        shell = self.shell
        shell.auto_sync = shell.auto_read = True
        self._have_room()
        shell.answer_reads()
        shell.answer_bodies()
        shell.run()
        shell.sync()
        shell.run()

    # --- steps --------------------------------------------------------------------------

    def _say(
        self, parts: list[Any], frames: list[bytes], level: int = 0, *, mortal: bool = False
    ) -> Any:
        """Send a step until it is answered, by CONFIRM or by a refusal that is final.

        mortal: the client may die together with the broker; returns None then.
        """
        key = self.rng.randbytes(8)
        for _ in range(ROUNDS_MAX):
            tracker = self._next()
            commands = [wire.Atomic(tracker, len(parts), level, key), *parts]
            if self.rng.random() < 0.12:
                self._crash_amid(commands, frames)
                if mortal and self.rng.random() < 0.5:
                    return None
                continue
            self.shell.send(1, *commands, frames=frames)
            answer = self._answer(tracker)
            if answer is None:
                self._calm()
                answer = self._answer(tracker)
            if answer is None:
                raise Violation("stuck", f"{parts} is not answered")
            if isinstance(answer, wire.Confirm) or answer.code in (*OVER, "limit"):
                return answer
            self._calm()
            self.shell.wait(1_000)
        raise Violation("stuck", f"{parts} is told to wait for ever")

    def _answer(self, tracker: int) -> Any:
        for one in self.shell.peers[1].commands:
            number = getattr(one, "tracker", getattr(one, "reference", 0))
            if isinstance(one, wire.Confirm | wire.Refused) and number == tracker:
                return one
        return None

    def _begin(self) -> None:
        load = Load(b"t%d" % len(self.loads))
        timeout_ms = self.rng.choice((500, 5_000, 60_000))
        answer = self._say([wire.BeginTransaction(load.id, 0, timeout_ms)], [], 2)
        self.trace.note("begin", load.id, type(answer).__name__)
        if isinstance(answer, wire.Confirm):
            self.loads.append(load)
        elif answer.code != "limit":
            raise Violation("refusal", f"a beginning: {answer}")

    def _stage(self, load: Load) -> None:
        rng = self.rng
        parts: list[Any] = []
        frames: list[bytes] = []
        batches: list[tuple[str, list[bytes]]] = []
        for _ in range(rng.randint(1, 3)):
            stream = rng.choice(STREAMS)
            some = []
            for _ in range(rng.randint(1, 3)):
                self.numbers += 1
                some.append(b"%s/%d/" % (load.id, self.numbers) + b"x" * rng.choice((0, 400)))
            place = len(load.batches) + len(batches)
            batches.append((stream, some))
            parts.append(wire.Stage(load.id, stream, place, 0))
            frames.append(encode(some, subject="s"))
        answer = self._say(parts, frames, rng.choice((2, 3)))
        self.trace.note("stage", load.id, len(parts), type(answer).__name__)
        if isinstance(answer, wire.Confirm):
            load.batches += batches
        else:
            self._over(load, answer)

    def _commit(self, load: Load) -> None:
        # From here on readers may see it: a crash may take the answer.
        load.state = ASKED
        parts = [wire.CommitTransaction(load.id, len(load.batches), 0)]
        answer = self._say(parts, [], mortal=True)
        self.trace.note("commit", load.id, type(answer).__name__)
        if answer is None:
            return
        if isinstance(answer, wire.Confirm):
            load.state = COMMITTED
        else:
            self._over(load, answer)

    def _roll_back(self, load: Load) -> None:
        answer = self._say([wire.RollBackTransaction(load.id, 0)], [])
        self.trace.note("roll back", load.id, type(answer).__name__)
        load.state = DROPPED

    def _over(self, load: Load, answer: Any) -> None:
        """Give a transaction up that was ended, or that a power loss took a part of."""
        load.state = DROPPED
        if answer.code == "conflict":
            self._roll_back(load)

    # --- faults -------------------------------------------------------------------------

    def _refuse_for_a_while(self) -> None:
        shell = self.shell
        if shell.refuse or shell.judge:
            self._have_room()
        else:
            rings = [MAIN, *(self._ring_of(stream) for stream in OWN)]
            shell.refuse[self.rng.choice(rings)] = ("wait", "the ring has no room")

    def _give_up(self, load: Load) -> None:
        """Commit while a ring is full, and have an operator give up what it puts off."""
        shell = self.shell
        shell.auto_sync = shell.auto_read = True
        ring = self._ring_of(self.rng.choice(list(OWN)))
        self._fill(ring, after=self.rng.choice((0, 0, 1, 2)))
        self._commit(load)
        shell.wait(1_000)
        put_off = [
            each for each in shell.broker._transactions.by_id.values() if ring in each.put_off
        ]
        if put_off:
            id = self.rng.choice(put_off).id
            number = self._next()
            (given,) = (one for one in self.loads if one.id == id)
            given.given_up |= set(OWN)
            self.giving_up[number] = given
            shell.send(1, wire.EndTransaction(number, id, give_up=True))
            self.trace.note("give up", id)
            if self.rng.random() < 0.3:
                self._have_room()
            if self.rng.random() < 0.7:
                shell.wait(2_000)
        if self.rng.random() < 0.7:
            self._have_room()

    def _fill(self, ring: str, after: int) -> None:
        """Have a ring refuse everything after so many bundles."""
        left = after

        def judge(bundle: Any) -> tuple[str, str] | None:
            nonlocal left
            if bundle.ring != ring:
                return None
            left -= 1
            return ("full", "the ring is full") if left < 0 else None

        self.shell.judge = judge

    def _have_room(self) -> None:
        """Have all rings take what comes."""
        self.shell.refuse.clear()
        self.shell.judge = None

    def _ring_of(self, name: str) -> str:
        stream = self.shell.broker._catalogue.get(name)
        return MAIN if stream is None else stream.ring.name

    def _crash_amid(self, commands: list[Any], frames: list[bytes]) -> None:
        """Kill the broker while it does a step."""
        shell = self.shell
        # Each ring has a sync of its own, and one may be slower than the others.
        slow = self.rng.choice(("", MAIN, *(self._ring_of(stream) for stream in OWN)))
        shell.broker.receive(1, "", commands, frames, shell.now_ms)
        for _ in range(self.rng.randint(0, 6)):
            shell._do(shell.broker.take_ready())
            if self.rng.random() < 0.5:
                shell.answer_bodies()
            if self.rng.random() < 0.5:
                for ring in sorted(set(shell.ends) - {slow}):
                    shell.sync(ring)
            if self.rng.random() < 0.1:
                # A segment ends: a start reads nothing before the next one.
                shell.sync()
                shell.snapshot_now()
        self._crash()

    def _crash(self) -> None:
        shell = self.shell
        self._check_seen()
        power = self.rng.random() < 0.4
        self.trace.note("crash", power)
        self._have_room()
        shell.restart(power_loss=power)
        self._link()

    # --- looking ------------------------------------------------------------------------

    def _load_of(self, body: bytes) -> Load | None:
        id = body.partition(b"/")[0]
        return next((load for load in self.loads if load.id == id), None)

    def _check_seen(self) -> None:
        """Check that readers have seen only what may be committed; note what was given up."""
        loader = self.shell.peers.get(1)
        for told in () if loader is None else loader.of(wire.Result):
            given = self.giving_up.pop(told.request, None)
            if given is not None:
                given.lost |= told.value["given_up"]
        peer = self.shell.peers.get(2)
        for number in range(len(STREAMS)) if peer is not None else ():
            for kind in (10, 20):
                for body in bodies(peer, kind + number):  # type: ignore[arg-type]
                    load = self._load_of(body)
                    if load is not None and load.state in (OPEN, DROPPED):
                        raise Violation("rolled_back", f"{body!r} is seen, {load.state}")

    def _check_log(self) -> None:
        """Check what the streams have at the end."""
        found = {stream: self._bodies_of(stream) for stream in STREAMS}
        for load in self.loads:
            present = {
                stream: [body for body in found[stream] if body.startswith(load.id + b"/")]
                for stream in STREAMS
            }
            wanted = {stream: load.of(stream) for stream in STREAMS}
            nothing = not any(present.values())
            if load.state == COMMITTED or not nothing:
                self._check_whole(load, present, wanted, nothing=nothing)
            if load.lost:
                self._check_told(load)
        if self.shell.broker._transactions.by_id:
            raise Violation("stuck", "a transaction is not over after its time")
        if self.shell.broker._shard.queues.staged:
            raise Violation("stuck", "something is staged after all transactions")

    def _check_told(self, load: Load) -> None:
        """Check that the client of a transaction is told that records of it were given up."""
        number = self._next()
        peer = self.shell.send(1, wire.AwaitTransaction(number, load.id))
        refused = [one.code for one in peer.of(wire.Refused) if one.reference == number]
        if refused != ["given_up"]:
            raise Violation("given_up", f"the client of {load.id!r} is not told")

    def _check_whole(
        self, load: Load, present: dict[str, list[bytes]], wanted: dict[str, list[bytes]],
        *, nothing: bool,
    ) -> None:  # fmt: skip
        if load.state in (OPEN, DROPPED):
            raise Violation("rolled_back", f"{load.id!r} is in the log, and {load.state}")
        for stream, some in present.items():
            if len(set(some)) < len(some):
                raise Violation("twice", f"of {load.id!r} stream {stream} has {some}")
            if some == wanted[stream] and not load.lost.get(stream):
                continue
            missing = len(wanted[stream]) - len(some)
            if load.lost.get(stream, missing) != missing:
                raise Violation("given_up", f"of {load.id!r} stream {stream} has {some}")
            if stream in load.given_up and some == [one for one in wanted[stream] if one in some]:
                continue
            if sorted(some) == sorted(wanted[stream]):
                raise Violation("order", f"of {load.id!r} stream {stream} has {some}")
            code = "lost" if load.state == COMMITTED or nothing else "half"
            raise Violation(code, f"of {load.id!r} stream {stream} has {some}")

    def _bodies_of(self, stream: str) -> list[bytes]:
        catalogue = self.shell.broker._catalogue.get(stream)
        found: list[bytes] = []
        for held in self.shell.rings.get(self._ring_of(stream), ()):
            if catalogue is not None and held.stamp.stream == catalogue.number:
                columns = held.content.bodies()
                offsets = columns.offsets.tolist()
                found += [bytes(columns.blob[begin:end]) for begin, end in pairwise(offsets)]
        return found
