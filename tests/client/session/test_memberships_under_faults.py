"""A lone member of a group while links are lost and acknowledgements refused at random, by seed.

The broker here hands out what is not held, takes an acknowledgement only of what this link holds,
and forgets who held what when a link goes. A second one also ends leases, and other members then do
some of what it takes back. What must hold: every record is done in the end; one is handed over
again only when its reader asked for it or its lease had ended, and never after ack() confirmed it;
what ack() confirmed is done.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import Settled
from malamute_py.client.session.group_options import DONE, GroupOptions
from malamute_py.client.session.held_batches import HeldBatch
from malamute_py.client.session.session import Session
from malamute_py.client.settings import ClientSettings
from tests.client.script import STREAM_UUID, stamped, welcome
from tests.rows import bitmap_of_rows
from tests.seeds import seeds

TIME_MS = 1_700_000_000_000
RECORDS = 200
BATCH = 20


class World:
    """A session with one membership, its reader, its broker, and the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.now_ms = 0
        settings = ClientSettings(endpoints=("tcp://one:1",))
        self.session = Session(settings, self.dice.randbytes, 0)
        credit = self.dice.choice((7, 40, 1000))
        joining = GroupOptions("s", "g", ["all"], credit_records=credit)
        self.member = self.session.memberships.join(joining)
        self.said: list[tuple[c.Command, list[bytes]]] = []
        # the broker's side
        self.waiting = set(range(RECORDS))
        self.held: set[int] = set()
        self.done: set[int] = set()
        self.credit = -1
        """Records that may be delivered now."""
        self.granted = 0
        # the reader's side
        self.in_hand: list[int] = []
        self.handed: Counter[int] = Counter()
        self.again: Counter[int] = Counter()
        self.acks: dict[int, list[int]] = {}
        self.outcomes: dict[int, Any] = {}

    def turn(self) -> None:
        self.now_ms += self.dice.choice((0, 5, 150))
        self.session.wake(self.now_ms)
        self.read()
        while (
            self.said and self.session.state is not LinkState.WAITING and self.dice.random() < 0.9
        ):
            command, frames = self.said.pop(0)
            self.session.receive(encode_message([command], frames), self.now_ms)
        for message in self.session.take_outgoing(self.now_ms):
            if self.dice.random() < 0.02:
                self.lose()
                break
            for command, _ in decode_message(message):
                self.hear(command)
        self.session.take_transport()
        self.hear_outcomes()
        self.hand_out()
        if self.dice.random() < 0.02:
            self.lose()
            self.hear_outcomes()

    def hear_outcomes(self) -> None:
        for event in self.session.take_events():
            if isinstance(event, Settled):
                for token, outcome in event.pairs:
                    assert token not in self.outcomes
                    self.outcomes[token] = outcome

    def lose(self) -> None:
        self.session.lost("closed", "the cable", self.now_ms)
        self.said.clear()
        self.credit = -1

    # --- the reader -------------------------------------------------------------------------

    def read(self) -> None:
        if self.dice.random() < 0.7 and isinstance(item := self.member.take(), HeldBatch):
            self.in_hand += [number for number in item.numbers if number not in self.in_hand]
            self.handed.update(item.numbers)
        self.session.consumed(self.member)
        if self.in_hand and self.dice.random() < 0.7:
            count = self.dice.randrange(1, len(self.in_hand) + 1)
            self.dice.shuffle(self.in_hand)
            some, self.in_hand = self.in_hand[:count], self.in_hand[count:]
            token = len(self.acks)
            if self.dice.random() < 0.1:
                self.again.update(some)
                self.acks[token] = []
                self.member.ack(some, AckForm(0, self.dice.choice((0, 50))), token)
            else:
                self.acks[token] = some
                self.member.ack(some, DONE, token)

    # --- the broker -------------------------------------------------------------------------

    def say(self, command: c.Command, frames: list[bytes] | None = None) -> None:
        self.said.append((command, frames or []))

    def hear(self, command: c.Command) -> None:
        if isinstance(command, c.Hello):
            self.say(welcome())
        elif isinstance(command, c.JoinGroup):
            self.waiting |= self.held
            self.held.clear()
            self.credit = self.granted = command.credit_records
            self.say(c.Subscribed(command.subscription, STREAM_UUID, 1, 0, 0, RECORDS))
        elif isinstance(command, c.Credit):
            self.credit += max(0, command.credit_records - self.granted)
            self.granted = max(self.granted, command.credit_records)
        elif isinstance(command, c.AckRecords):
            self.acknowledge(command)

    def acknowledge(self, command: c.AckRecords) -> None:
        offsets = {n for first, end in command.ranges for n in range(first, end)}
        if self.dice.random() < 0.1:
            self.say(c.Refused(64, command.tracker, "wait", "", 10))
        elif not offsets <= self.held:
            self.say(c.Refused(64, command.tracker, "not_held"))
        else:
            self.held -= offsets
            if command.again_ms < 0:
                self.done |= offsets
            else:
                self.waiting |= offsets
            self.say(c.Confirm(command.tracker, 3, 1, 0, TIME_MS))

    def hand_out(self) -> None:
        if self.credit <= 0 or not self.waiting:
            return
        base = min(self.waiting) // BATCH * BATCH
        rows = sorted(n - base for n in self.waiting if base <= n < base + BATCH)[: self.credit]
        self.credit -= len(rows)
        self.waiting -= {base + row for row in rows}
        self.held |= {base + row for row in rows}
        frames = stamped(encode([b"%d" % n for n in range(base, base + BATCH)]), base)
        deliver = c.Deliver(self.member.number, base, base + BATCH, 2, bitmap_of_rows(rows, BATCH))
        self.say(deliver, frames)


@pytest.mark.parametrize("seed", seeds(15, 100))
def test_each_record_is_handed_over_once_and_done_in_the_end(seed: int) -> None:
    world = World(seed)
    turns = 0
    while len(world.done) < RECORDS or not world.session.idle:
        world.turn()
        turns += 1
        assert turns < 20_000, "the group does not come to an end"
    assert world.done == set(range(RECORDS))
    for offset, times in world.handed.items():
        assert times <= 1 + world.again[offset], offset
    assert sorted(world.handed) == list(range(RECORDS))
    for token, outcome in world.outcomes.items():
        assert outcome in (True, False)
        if outcome:
            assert world.done.issuperset(world.acks[token])
    assert world.outcomes.keys() == world.acks.keys()


class LeasedWorld(World):
    """A world in which leases end, and other members do some of the records."""

    aside = False

    def hear(self, command: c.Command) -> None:
        if isinstance(command, c.JoinGroup):
            self.aside = False
            self.waiting |= self.held
            self.held.clear()
            self.credit = self.granted = command.credit_records
            number = command.subscription
            self.say(c.Subscribed(number, STREAM_UUID, 1, 0, 0, RECORDS, -1, 900))
            return
        super().hear(command)
        if isinstance(command, c.AckRecords) and self.aside:
            self.aside = False
            self.say(c.Mode(self.member.number, True, 0))

    def acknowledge(self, command: c.AckRecords) -> None:
        offsets = {n for first, end in command.ranges for n in range(first, end)}
        if command.state != c.WorkState.RENEWED:
            super().acknowledge(command)
        elif offsets <= self.held:
            self.say(c.Confirm(command.tracker, 3, 1, 0, TIME_MS))
        else:
            self.say(c.Refused(64, command.tracker, "not_held"))

    def hand_out(self) -> None:
        if self.held and self.credit >= 0 and not self.aside and self.dice.random() < 0.05:
            lost = {offset for offset in self.held if self.dice.random() < 0.5}
            self.held -= lost
            others = {offset for offset in lost if self.dice.random() < 0.3}
            self.done |= others
            self.waiting |= lost - others
            self.aside = True
            self.say(c.Mode(self.member.number, False, 0))
        if not self.aside:
            super().hand_out()

    def read(self) -> None:
        before = Counter(self.handed)
        confirmed = {
            offset for token, good in self.outcomes.items() if good for offset in self.acks[token]
        }
        super().read()
        assert not confirmed.intersection(self.handed - before), "handed over once more"


@pytest.mark.parametrize("seed", seeds(15, 100))
def test_nothing_that_is_done_is_handed_over_when_leases_end(seed: int) -> None:
    world = LeasedWorld(seed)
    turns = 0
    while len(world.done) < RECORDS or not world.session.idle:
        world.turn()
        turns += 1
        assert turns < 20_000, "the group does not come to an end"
    assert world.done == set(range(RECORDS))
    assert all(
        world.done.issuperset(world.acks[token]) for token, good in world.outcomes.items() if good
    )
