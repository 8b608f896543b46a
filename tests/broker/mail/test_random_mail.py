"""Random mail: sends, reads, acknowledgements, losses, refusals and restarts, against a model.

The oracle is a list of what the broker confirmed, cut at the last sync by a power loss. Every
delivery is compared with it: the message lies in the mailbox, no other reader has it, it is due and
has not expired, and its body, order and attempt are right. In the end exactly the messages that are
due are left.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode
from tests.broker.shell import Letter, Shell

pytestmark = pytest.mark.slow

BOXES = ("east", "west")
STORED = int(Level.STORED)

sends = st.tuples(
    st.just("mail"), st.integers(0, 1), st.integers(1, 6), st.sampled_from([0, 0, 0, 3, -1]),
    st.sampled_from([0, 0, 0, 50, 500]), st.sampled_from([0, 0, 0, 200]),
    st.sampled_from([0, 300]),
)  # fmt: skip
slots = st.integers(0, 3)
steps = st.lists(
    st.one_of(
        sends,
        sends,
        st.tuples(st.just("open"), slots, st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.just("credit"), slots, st.integers(1, 9)),
        st.tuples(st.just("ack"), slots, st.integers(1, 255), st.sampled_from([-1, -1, -1, 0, 70])),
        st.tuples(st.just("lose"), slots),
        st.tuples(st.just("leave"), slots),
        st.tuples(st.just("purge"), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.sampled_from([1, 60, 250])),
        st.tuples(st.just("refuse"), st.booleans()),
        st.tuples(st.just("restart"), st.booleans()),
        st.tuples(st.just("sync")),
    ),
    max_size=50,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps, hot=st.sampled_from([1, 2_000, 1 << 20]), reads=st.sampled_from([1, 512]))
def test_mail_is_delivered_to_one_reader_at_a_time_until_it_is_acknowledged(
    steps: list[Any], hot: int, reads: int
) -> None:
    run = Random(
        Shell(
            sync=False, mail_hot_bytes=hot, inbox_reads=reads, extract_bytes_min=500,
            heartbeat_ms=1_000, expiry_beats=1_000_000,
        )
    )  # fmt: skip
    for step in steps:
        getattr(run, step[0])(*step[1:])
        run.look()
    run.settle()


@pytest.mark.parametrize("seed", range(40))
def test_long_runs_keep_their_word_too(seed: int) -> None:
    draw = random.Random(seed)
    run = Random(
        Shell(
            sync=False, mail_hot_bytes=draw.choice([1, 2_000, 1 << 20]),
            inbox_reads=draw.choice([1, 3, 512]), extract_bytes_min=500, heartbeat_ms=1_000,
            expiry_beats=1_000_000,
        )
    )  # fmt: skip
    for _ in range(150):
        name, *arguments = drawn(draw)
        getattr(run, name)(*arguments)
        run.look()
    run.settle()


def drawn(draw: random.Random) -> tuple[Any, ...]:
    """Draw one event; most often a send, an acknowledgement or a credit."""
    slot = draw.randrange(4)
    kind = draw.choices(
        ["mail", "open", "credit", "ack", "lose", "leave", "purge", "wait", "refuse", "restart",
         "sync"],
        [12, 6, 6, 14, 2, 1, 0.5, 5, 1.5, 1, 4],
    )[0]  # fmt: skip
    match kind:
        case "mail":
            return (
                kind, draw.randrange(2), draw.randint(1, 40), draw.choice([0, 0, 0, 3, -1]),
                draw.choice([0, 0, 0, 50, 500]), draw.choice([0, 0, 200]),
                draw.choice([0, 30, 300]),
            )  # fmt: skip
        case "open":
            return kind, slot, draw.randrange(2), draw.choice([0, 1, 5, 50, 500])
        case "credit":
            return kind, slot, draw.choice([1, 7, 40])
        case "ack":
            return kind, slot, draw.choice([1, 85, 255]), draw.choice([-1, -1, -1, 0, 70])
        case "lose" | "leave":
            return kind, slot
        case "purge":
            return kind, draw.randrange(2)
        case "wait":
            return kind, draw.choice([1, 60, 250])
        case "refuse":
            return kind, draw.random() < 0.4
        case "restart":
            return kind, draw.random() < 0.5
    return (kind,)


class Message(NamedTuple):
    """One message as the model knows it."""

    box: int
    body: bytes
    priority: int
    due_ms: int
    expires_at_ms: int


class Reader:
    """An inbox, the only one of its link."""

    def __init__(self, link: int, box: int, credit: int) -> None:
        self.link = link
        self.box = box
        self.credit = credit
        self.seen = 0
        self.held: list[int] = []


class Random:
    """One run: a sender on link 1, readers on links of their own."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.log: list[tuple[Any, ...]] = []
        """Confirmed events: (put, number, message), (done, numbers), (again, numbers, due)."""
        self.synced = 0
        self.readers: dict[int, Reader] = {}
        self.links = 10
        self.trackers = 0
        self.tried: dict[int, int] = {}
        """Deliveries since the start, and give-backs before it, by number."""
        shell.hello(1)

    # --- the model --------------------------------------------------------------------------

    def lying(self) -> dict[int, Message]:
        """Return the messages in the mailboxes, expired or not."""
        found: dict[int, Message] = {}
        for kind, what, *rest in self.log:
            if kind == "put":
                found[what] = rest[0]
            elif kind == "done":
                for number in what:
                    del found[number]
            else:
                for number in what:
                    found[number] = found[number]._replace(due_ms=rest[0])
        return found

    def due(self, message: Message) -> bool:
        return message.due_ms <= self.shell.now_ms and not self.over(message)

    def over(self, message: Message) -> bool:
        return 0 < message.expires_at_ms <= self.shell.now_ms

    def look(self) -> None:
        """Compare the deliveries since the last look with the model."""
        lying = self.lying()
        held = {number for reader in self.readers.values() for number in reader.held}
        for reader in self.readers.values():
            letters = self.shell.peers[reader.link].mail.get(7, [])[reader.seen :]
            assert letters == sorted(
                letters, key=lambda letter: (-lying[letter.number].priority, letter.number)
            )
            for letter in letters:
                self.check(reader, letter, lying, held)
                held.add(letter.number)
                reader.held.append(letter.number)
                reader.seen += 1
                self.tried[letter.number] = self.tried.get(letter.number, 0) + 1
                assert letter.mail.attempts == self.tried[letter.number]

    def check(
        self, reader: Reader, letter: Letter, lying: dict[int, Message], held: set[int]
    ) -> None:
        message = lying[letter.number]
        assert message.box == reader.box
        assert message.body == letter.body
        assert letter.number not in held
        assert self.due(message)
        assert reader.seen < reader.credit or not reader.held

    # --- what happens -----------------------------------------------------------------------

    def said(self, link: int, command: Any, frames: Any = ()) -> Any:
        self.shell.send(link, command, frames=frames)
        for answer in reversed(self.shell.peers[link].commands):
            if isinstance(answer, wire.Confirm) and answer.tracker == self.trackers:
                return answer
            if isinstance(answer, wire.Refused) and answer.reference == self.trackers:
                return answer
        raise AssertionError("no answer")

    def mail(self, box: int, rows: int, priority: int, delay: int, expiry: int, width: int) -> None:
        self.trackers += 1
        now_ms = self.shell.now_ms
        due_ms = now_ms + delay if delay else 0
        expires = [now_ms + expiry if expiry and row % 2 == 0 else 0 for row in range(rows)]
        bodies = [b"%d.%d" % (self.trackers, row) + bytes(width) for row in range(rows)]
        options: dict[str, Any] = {"expires_at_ms": expires} if expiry else {}
        command = wire.Send(BOXES[box], self.trackers, STORED, b"", due_ms, priority)
        answer = self.said(1, command, [encode(bodies, subject="s", **options)])
        if isinstance(answer, wire.Confirm):
            for row, body in enumerate(bodies):
                message = Message(box, body, priority, due_ms, expires[row])
                self.log.append(("put", answer.offset + row, message))
        else:
            assert self.shell.refuse

    def open(self, slot: int, box: int, credit: int) -> None:
        if slot in self.readers or self.shell.refuse:
            return
        self.links += 1
        self.shell.hello(self.links)
        self.shell.send(self.links, wire.OpenInbox(7, BOXES[box], credit, credit << 20))
        self.readers[slot] = Reader(self.links, box, credit)

    def credit(self, slot: int, more: int) -> None:
        reader = self.readers.get(slot)
        if reader is not None:
            reader.credit += more
            self.shell.send(reader.link, wire.Credit(7, reader.credit, reader.credit << 20))

    def ack(self, slot: int, chosen: int, again_ms: int) -> None:
        reader = self.readers.get(slot)
        if reader is None:
            return
        numbers = [
            number for place, number in enumerate(sorted(reader.held)) if chosen >> place % 8 & 1
        ]
        if not numbers:
            return
        self.trackers += 1
        ranges = [(number, number + 1) for number in numbers]
        reader.held = [number for number in reader.held if number not in numbers]
        due_ms = self.shell.now_ms + again_ms if again_ms > 0 else 0
        command = wire.AckMail(7, joined(ranges), self.trackers, STORED, again_ms)
        answer = self.said(reader.link, command)
        if isinstance(answer, wire.Confirm):
            if again_ms < 0:
                self.log.append(("done", numbers))
            else:
                self.log.append(("again", numbers, due_ms))
        else:
            assert answer.code == "disk_full"
            # The refused rows were not outstanding meanwhile, so one message was allowed.
            self.look()
            reader.held += numbers

    def lose(self, slot: int) -> None:
        reader = self.readers.pop(slot, None)
        if reader is not None:
            self.shell.broker.link_lost(reader.link, self.shell.now_ms)
            self.shell.run()

    def leave(self, slot: int) -> None:
        reader = self.readers.pop(slot, None)
        if reader is not None:
            self.shell.send(reader.link, wire.Unsubscribe(7))

    def purge(self, box: int) -> None:
        held = {number for reader in self.readers.values() for number in reader.held}
        lying = self.lying()
        if self.shell.refuse:
            return
        self.trackers += 1
        self.shell.send(1, wire.PurgeMail(self.trackers, BOXES[box], BOXES[box]))
        gone = [
            number for number, message in lying.items() if message.box == box and number not in held
        ]
        if gone:
            self.log.append(("done", gone))

    def wait(self, ms: int) -> None:
        self.shell.wait(ms)

    def refuse(self, on: bool) -> None:
        self.shell.refuse = {"main": ("disk_full", "no space")} if on else {}

    def sync(self) -> None:
        if not self.shell.refuse:
            self.shell.sync()
            self.shell.run()
            self.synced = len(self.log)

    def restart(self, power_loss: bool) -> None:
        self.shell.restart(power_loss=power_loss)
        if power_loss:
            del self.log[self.synced :]
        self.synced = len(self.log)
        self.readers.clear()
        self.tried.clear()
        for kind, numbers, *_ in self.log:
            if kind == "again":
                for number in numbers:
                    self.tried[number] = self.tried.get(number, 0) + 1
        self.shell.hello(1)

    def settle(self) -> None:
        """Have one reader of each mailbox receive and acknowledge all that is left."""
        self.refuse(False)
        for slot in list(self.readers):
            self.lose(slot)
            self.look()
        for _ in range(4):
            self.wait(2_000)
            self.sync()
        for box in range(2):
            self.open(box, box, 1 << 30)
        self.look()
        left = {number: m for number, m in self.lying().items() if not self.over(m)}
        assert {number for reader in self.readers.values() for number in reader.held} == set(left)
        for slot in list(self.readers):
            self.ack(slot, 255, -1)
        self.wait(2_000)
        self.sync()
        gauges = self.shell.broker.gauges
        for name in ("mail_messages", "mail_bytes", "mail_hot_bytes", "mail_reads_under_way"):
            assert gauges[name] == 0, name
        assert not self.shell.broker.counters["mail_lost"]


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch."""
    found: list[tuple[int, int]] = []
    for first, end in ranges:
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], end
        else:
            found.append((first, end))
    return found
