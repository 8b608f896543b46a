"""Scenario `keys`: a stream that keeps the newest record of each subject, while its ring turns.

Owns one seed: changes of keys by one client, kills, power losses, answers of the journal that come
late, and a model of what each key must be. The rule: a key is what its newest surviving record
says, wherever that record lies; the journal is the fake one of tests/broker, whose questions about
keys are answered by the code that answers them for a real one.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.keys import DELETION_FIELD
from malamute_py.broker.ready import IndexAnswer, IndexFailure
from tests.broker.shell import Shell
from tests.simulation.model import Violation
from tests.simulation.trace import Trace

SETTINGS = {"keep": "last-per-subject", "ring_bytes": 1 << 20}
ROUNDS_MAX = 20
"""Times that a command is repeated that is told to wait."""


class Entry(NamedTuple):
    """One record that the broker confirmed."""

    offset: int
    key: str
    body: bytes | None
    """Body; None: a deletion marker."""
    synced: bool


class Floors(dict[int, int]):
    """First offsets of streams, with all that they were: a crash may take back the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[dict[int, int]] = [{}]

    def __setitem__(self, stream: int, offset: int) -> None:
        super().__setitem__(stream, offset)
        self.past.append(dict(self))


class SlowReader:
    """A live reader of all records, which has little credit, over all links of its program."""

    LINK = 2

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._number = 0
        self._noted = 0
        """Records of the present link that are in `got`."""
        self.next = 1
        """Offset from which the next link goes on."""
        self.got: dict[int, bytes] = {}
        """Offset -> body of what came, on all links."""
        self.gaps = 0

    def open(self) -> None:
        """Begin a link, and go on where the last one ended."""
        self._shell.hello(self.LINK)
        self._number += 1
        self._noted = 0
        self._shell.subscribe(self.LINK, self._number, "s", start=[2, self.next], records=2)

    def give_credit(self, records: int) -> None:
        """Let some more records come."""
        self._shell.send(self.LINK, wire.Credit(self._number, records, 1 << 30))
        self.note()

    def note(self) -> None:
        """Take what has come."""
        peer = self._shell.peers[self.LINK]
        received = peer.received.get(self._number, [])
        for offset, body in received[self._noted :]:
            if offset < self.next:
                raise Violation("twice", f"the slow reader got {offset} again")
            self.got[offset] = body
        self._noted = len(received)
        self.next = max(self.next, peer.expected.get(self._number, self.next))
        self.gaps = len(peer.of(wire.Gap))
        if self.gaps:
            raise Violation("gap_called_hole", f"the slow reader got {peer.of(wire.Gap)}")

    def rewind(self, next: int) -> None:
        """Forget what a power loss took back: the stream ends before `next`."""
        self.next = min(self.next, next)
        self.got = {offset: body for offset, body in self.got.items() if offset < next}


class KeysRun:
    """One seed of the scenario."""

    def __init__(self, seed: int, *, steps: int = 0, trace: Trace | None = None) -> None:
        self.rng = rng = Random(seed)
        self.trace = trace if trace is not None else Trace()
        self.steps = steps or rng.choice((100, 250, 500))
        self.keys = [f"k{number}" for number in range(rng.choice((3, 10, 25)))]
        self.shell = Shell(
            deleted_keys_ms=rng.choice((1, 500, 1 << 40)), hot_bytes=rng.choice((0, 8_000, 1 << 20))
        )
        self.floors = Floors()
        self.shell.firsts = self.floors
        self.entries: list[Entry] = []
        self.tracker = 0
        self.last: tuple[wire.UpdateKey, bytes, int] | None = None
        """The last update that was confirmed: command, content, offset."""
        self.pinned = False
        """Whether a cursor keeps the ring from giving up segments."""
        self._link()
        self.shell.send(1, wire.CreateStream(1, "s", SETTINGS))
        self.reader = SlowReader(self.shell)
        self.reader.open()

    def _link(self) -> None:
        """Link the client anew, and resume its producer."""
        shell = self.shell
        shell.hello(1)
        known = getattr(self, "producer", (0, 0))
        peer = shell.send(1, wire.OpenProducer(2, *known))
        value = peer.last(wire.Result).value
        self.producer = value["id"], value["epoch"]
        self.sequence = value["next"].get("s", 0)

    # --- the run ------------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        for _ in range(self.steps):
            draw = self.rng.random()
            if draw < 0.62:
                self._change(self.rng.choice(self.keys))
            elif draw < 0.72:
                self._update(self.rng.choice(self.keys))
            elif draw < 0.77:
                self._two_updates(self.rng.choice(self.keys))
            elif draw < 0.80:
                self._retry()
            elif draw < 0.90:
                self._check_one(self.rng.choice(self.keys))
            elif draw < 0.93:
                self.shell.auto_ask = not self.shell.auto_ask
            elif draw < 0.95:
                self.shell.auto_sync = not self.shell.auto_sync
            elif draw < 0.96:
                self.shell.now_ms += 1_000
            elif draw < 0.964:
                self._pin()
            elif draw < 0.968:
                self._check_readers()
            elif draw < 0.978:
                self.reader.give_credit(self.rng.choice((1, 3, 20, 1_000)))
            elif draw < 0.983:
                self._burst()
            elif draw < 0.987:
                self._leave_unanswered()
            else:
                self._crash(burst=self.rng.random() < 0.5)
        self._crash()
        self._check_all()
        self._check_readers()
        self._check_slow_reader()

    def _calm(self) -> None:
        """Have the journal answer everything."""
        shell = self.shell
        shell.auto_ask = shell.auto_sync = True
        shell.answer_queries()
        shell.sync()
        shell.run()

    def _revision(self, key: str) -> int:
        newest = self._newest().get(key)
        return newest.offset if newest is not None and newest.body is not None else 0

    def _newest(self) -> dict[str, Entry]:
        return {entry.key: entry for entry in self.entries}

    # --- changes ------------------------------------------------------------------------

    def _content(self, key: str, body: bytes | None, sequence: int) -> bytes:
        return bytes(
            encode(
                [body or b""], subject=key, fields={DELETION_FIELD: ""} if body is None else None,
                producer_id=self.producer[0], producer_epoch=self.producer[1],
                first_sequence=sequence,
            )
        )  # fmt: skip

    def _answers(self, tracker: int) -> list[Any]:
        return [
            one
            for one in self.shell.peers[1].commands
            if isinstance(one, wire.Confirm | wire.Refused)
            and getattr(one, "tracker", getattr(one, "reference", 0)) == tracker
        ]

    def _say(self, key: str, body: bytes | None, command: type[Any], **fields: Any) -> Any:
        """Send one batch until it is not told to wait; returns its CONFIRM or REFUSED."""
        shell = self.shell
        for _ in range(ROUNDS_MAX):
            self.tracker += 1
            made = command("s", self.tracker, 2, **fields)
            content = self._content(key, body, self.sequence)
            shell.send(1, made, frames=[content])
            (answer,) = self._answers(self.tracker)
            if isinstance(answer, wire.Confirm):
                synced = shell.auto_sync
                self.sequence += 1
                self.entries.append(Entry(answer.offset, key, body, synced))
                if synced:
                    self.entries = [entry._replace(synced=True) for entry in self.entries]
                if command is wire.UpdateKey:
                    self.last = made, content, answer.offset
            if not isinstance(answer, wire.Refused) or answer.code != "wait":
                return answer
            self._calm()
        raise Violation("stuck", f"a change of {key} is told to wait for ever")

    def _change(self, key: str) -> None:
        size = self.rng.choice((0, 20, 200, 1_200))
        body = None if self.rng.random() < 0.1 else self.rng.randbytes(size)
        answer = self._say(key, body, wire.Publish)
        self.trace.note("change", key, size, type(answer).__name__)
        if isinstance(answer, wire.Refused) and answer.code != "full":
            raise Violation("unlawful", f"a change of {key} was refused: {answer}")

    def _update(self, key: str) -> None:
        present = self._revision(key)
        asked = present if self.rng.random() < 0.7 else max(0, present + self.rng.choice((-1, 1)))
        answer = self._say(key, self.rng.randbytes(30), wire.UpdateKey, revision=asked)
        self.trace.note("update", key, asked == present, type(answer).__name__)
        if isinstance(answer, wire.Confirm):
            if asked != present:
                raise Violation("stale", f"{key} was at {present}, and {asked} was asked for")
        elif answer.code == "conflict" and (asked == present or answer.revision != present):
            raise Violation("stale", f"{key} is at {present}: {answer}")
        elif answer.code not in ("conflict", "full"):
            raise Violation("unlawful", f"an update of {key} was refused: {answer}")

    def _two_updates(self, key: str) -> None:
        """Send two updates of one revision in one message: one of them may happen."""
        present, commands, contents = self._revision(key), [], []
        bodies = [self.rng.randbytes(10), self.rng.randbytes(10)]
        for number, body in enumerate(bodies):
            self.tracker += 1
            commands.append(wire.UpdateKey("s", self.tracker, 2, present))
            contents.append(self._content(key, body, self.sequence + number))
        self.shell.send(1, *commands, frames=contents)
        first, second = (self._answers(command.tracker)[0] for command in commands)
        self.trace.note("two", key, type(first).__name__, type(second).__name__)
        for answer, body in ((first, bodies[0]), (second, bodies[1])):
            if isinstance(answer, wire.Confirm):
                self.sequence += 1
                self.entries.append(Entry(answer.offset, key, body, self.shell.auto_sync))
        if isinstance(second, wire.Confirm):
            raise Violation("stale", f"two updates of {key} at {present} happened")

    def _burst(self) -> None:
        """Send many records in one message while the journal's answers are late.

        Whatever the broker takes of them, it must take a record afterwards: those that were taken
        before it knows how full the ring is could fill it for good.
        """
        self.shell.auto_ask = False
        count = self.rng.choice((5, 40, 80))
        if self.rng.random() < 0.5:
            keys = [self.rng.choice(self.keys) for _ in range(count)]
        else:
            keys = self.rng.sample([f"b{number}" for number in range(80)], count)
        size = self.rng.choice((100, 1_500, 2_000))
        commands: list[Any] = []
        contents, bodies = [], []
        for place, key in enumerate(keys):
            self.tracker += 1
            bodies.append(self.rng.randbytes(size))
            commands.append(wire.Publish("s", self.tracker, 2))
            contents.append(self._content(key, bodies[-1], self.sequence + place))
        self.shell.send(1, *commands, frames=contents)
        taken = 0
        for key, body, command in zip(keys, bodies, commands, strict=True):
            for answer in self._answers(command.tracker):
                if isinstance(answer, wire.Confirm):
                    taken += 1
                    self.entries.append(Entry(answer.offset, key, body, self.shell.auto_sync))
        self.sequence += taken
        self.trace.note("burst", len(keys), taken)
        self._calm()
        if self.pinned:
            return
        # A deletion needs no room for a newest record: `full` means that the ring is full for good.
        answer = self._say(self.keys[0], None, wire.Publish)
        if not isinstance(answer, wire.Confirm):
            raise Violation("stuck", f"after a burst a deletion is refused: {answer}")

    def _leave_unanswered(self) -> None:
        """Let the journal fail to answer what it is asked, once."""
        shell = self.shell
        asked, shell.queries = shell.queries, []
        for query in asked:
            if query.kind in ("oldest_segments", "copies"):
                failure = IndexFailure("journal_failed", "too many open files")
                shell.broker.answered(IndexAnswer(query.token, failure))
            else:
                shell.queries.append(query)
        shell.run()
        self.trace.note("unanswered", len(asked) - len(shell.queries))

    def _pin(self) -> None:
        """Have a cursor at the oldest record pin the stream, or remove it."""
        self._calm()
        if self.pinned:
            self._ask(wire.RemoveCursor(9, "s", "c"))
        else:
            self._ask(wire.EditCursor(9, "s", "c", {"pin": True}, [0]))
        self.pinned = not self.pinned
        self.trace.note("pin", self.pinned)

    def _retry(self) -> None:
        """Send the last update again, as after a lost link."""
        if self.last is None:
            return
        command, content, offset = self.last
        if all(entry.offset != offset for entry in self.entries):
            return
        self.tracker += 1
        again = wire.UpdateKey("s", self.tracker, 2, command.revision)
        self.shell.send(1, again, frames=[content])
        self._calm()
        (answer,) = self._answers(self.tracker)
        self.trace.note("retry", type(answer).__name__)
        if not isinstance(answer, wire.Confirm) or answer.offset not in (offset, -1):
            raise Violation("wrong_duplicate", f"the update at {offset} came again: {answer}")

    # --- crashes ------------------------------------------------------------------------

    def _crash(self, *, burst: bool = False) -> None:
        """End the broker, and start it again. burst: records come before it knows its ring."""
        rng, shell = self.rng, self.shell
        power = rng.random() < 0.5
        # What trims left is written down a little later.
        back = rng.choice((0, 0, 1, 2, 3))
        past = self.floors.past
        kept = past[max(0, len(past) - 1 - back)]
        self.floors.clear()
        self.floors.update(kept)
        shell.auto_sync, shell.auto_ask = True, not burst
        self.reader.note()
        shell.restart(power_loss=power)
        if burst:
            self._answer_all_but_ring()
        after = shell.stream("s").next
        gone = [entry for entry in self.entries if entry.offset >= after]
        self.trace.note("crash", power, back, len(gone))
        if any(entry.synced for entry in gone) or (gone and not power):
            raise Violation("lost", f"the stream ends at {after}: {gone[-1]}")
        self.entries = [
            entry._replace(synced=True) for entry in self.entries if entry.offset < after
        ]
        self.last = None if gone else self.last
        self._link()
        self.reader.rewind(after)
        self.reader.open()
        if burst:
            self._burst()
        self._check_all()

    def _answer_all_but_ring(self) -> None:
        """Have a start read its keys, while it is not told yet how full the ring is."""
        shell = self.shell
        while any(query.kind != "oldest_segments" for query in shell.queries):
            late = [query for query in shell.queries if query.kind == "oldest_segments"]
            shell.queries = [query for query in shell.queries if query.kind != "oldest_segments"]
            shell.answer_queries()
            shell.queries += late
            shell.run()

    # --- looking ------------------------------------------------------------------------

    def _ask(self, command: Any) -> Any:
        for _ in range(ROUNDS_MAX):
            heard = len(self.shell.peers[1].commands)
            peer = self.shell.send(1, command)
            self._calm()
            answer = next(
                one for one in peer.commands[heard:] if isinstance(one, wire.Result | wire.Refused)
            )
            if isinstance(answer, wire.Result):
                return answer.value
            if answer.code != "wait":
                raise Violation("key", f"{command}: {answer}")
        raise Violation("stuck", f"{command} is told to wait for ever")

    def _check_one(self, key: str) -> None:
        found = self._ask(wire.GetKey(9, "s", key))
        newest = self._newest().get(key)
        if newest is None or newest.body is None:
            if found["revision"]:
                raise Violation("key", f"{key} is deleted or never was, and has {found}")
        elif (found["revision"], found.get("body")) != (newest.offset, newest.body):
            raise Violation("key", f"{key} was set at {newest.offset} and has {found}")
        self.trace.note("get", key, found["revision"])

    def _check_all(self) -> None:
        for key in self.keys:
            self._check_one(key)
        listed = self._ask(wire.ListKeys(9, "s", ["all"]))["keys"]
        wanted = {
            key: entry.offset for key, entry in self._newest().items() if entry.body is not None
        }
        if dict(listed) != wanted:
            raise Violation("key", f"listed are {listed}, and there are {wanted}")

    def _check_slow_reader(self) -> None:
        """Let the slow reader catch up: it has each newest record, from one of its links."""
        self._calm()
        self.reader.give_credit(1 << 30)
        self._calm()
        self.reader.note()
        for key, entry in self._newest().items():
            if entry.body is not None and self.reader.got.get(entry.offset) != entry.body:
                raise Violation("key", f"the slow reader misses {key} at {entry.offset}")

    def _check_readers(self) -> None:
        """Read from the beginning, and from the newest of each subject: none may be missing."""
        self._calm()
        for start in ([0], [6]):
            self.tracker += 1
            number = self.tracker
            peer = self.shell.subscribe(1, number, "s", start=start, until="tail")
            self._calm()
            got = dict(peer.received[number])
            for key, entry in self._newest().items():
                if entry.body is not None and got.get(entry.offset) != entry.body:
                    raise Violation("key", f"a reader from {start} misses {key} at {entry.offset}")
            if peer.of(wire.Gap):
                raise Violation("gap_called_hole", f"a reader from {start} got a gap")
            self.trace.note("read", start[0], len(got))
