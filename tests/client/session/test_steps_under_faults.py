"""Steps of one session while links are lost and steps refused at random, by seed.

The broker here takes a step once under its key, refuses what it likes, and forgets answers when
a link goes. What must hold: a step that was confirmed happened once, as a whole; one that was
refused did not happen; every caller hears exactly one outcome.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import Content
from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.client.position import Confirmation
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import Settled
from malamute_py.client.session.session import Session
from malamute_py.client.session.step import Step
from malamute_py.client.settings import ClientSettings
from tests.client.script import bodies_of, welcome
from tests.seeds import seeds

TIME_MS = 1_700_000_000_000
STEPS = 120


class World:
    """A session, its broker, and the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.now_ms = 0
        settings = ClientSettings(
            endpoints=("tcp://one:1",), batch_bytes=self.dice.choice((200, 4096)),
            window_bytes=self.dice.choice((1024, 1 << 20)),
        )  # fmt: skip
        self.session = Session(settings, self.dice.randbytes, 0)
        self.keys: set[bytes] = set()
        self.happened: dict[str, Counter[bytes]] = {"stream": Counter(), "mail": Counter()}
        self.cursors: dict[str, int] = {}
        self.answers: list[c.Command] = []
        self.outcomes: dict[int, list[Any]] = {}
        self.steps: list[Step] = []
        self.forbidden: set[bytes] = set()
        """Markers of steps that the broker will not take."""

    def make(self) -> None:
        """One more step: a record and a message of the same marker, sometimes a cursor's move."""
        number = len(self.steps)
        marker = b"%d" % number
        step = Step(key=b"named %d" % number if self.dice.random() < 0.1 else b"")
        step.publish("stream", marker, subject="a")
        step.send("mail", marker)
        if self.dice.random() < 0.3:
            step.move_cursor("stream", self.dice.choice("ab"), number + 1)
        if self.dice.random() < 0.1:
            self.forbidden.add(marker)
        self.steps.append(step)
        self.session.steps.add(step, number)

    def turn(self) -> None:
        """Both sides have their turn; messages and answers may be lost with the link."""
        self.now_ms += self.dice.choice((0, 1, 20, 200))
        self.session.wake(self.now_ms)
        if (
            self.answers
            and self.session.state is not LinkState.WAITING
            and self.dice.random() < 0.8
        ):
            count = self.dice.randrange(1, len(self.answers) + 1)
            said, self.answers = self.answers[:count], self.answers[count:]
            self.session.receive(encode_message(said, []), self.now_ms)
        for message in self.session.take_outgoing(self.now_ms):
            if self.dice.random() < 0.03:
                self.lose()
                break
            self.hear(message)
        self.session.take_transport()
        for event in self.session.take_events():
            if isinstance(event, Settled):
                for token, outcome in event.pairs:
                    self.outcomes.setdefault(token, []).append(outcome)
        if self.dice.random() < 0.03:
            self.lose()

    def lose(self) -> None:
        """The link goes, and what was said on it and not heard."""
        self.session.lost("closed", "the cable", self.now_ms)
        self.answers.clear()

    def hear(self, message: list[Any]) -> None:
        parts: list[tuple[c.Command, tuple[Any, ...]]] = []
        step: c.Atomic | None = None
        for command, frames in decode_message(message):
            if isinstance(command, c.Hello):
                self.answers.append(welcome(message_commands_max=20))
            elif isinstance(command, c.Atomic):
                step, parts = command, []
            elif step is not None:
                parts.append((command, frames))
                if len(parts) == step.count:
                    self.take(step, parts)
                    step = None

    def take(self, step: c.Atomic, parts: list[tuple[c.Command, tuple[Any, ...]]]) -> None:
        if step.key in self.keys:
            self.answers.append(c.Confirm(step.tracker, 3, 1, -1, TIME_MS, True))
            return
        rows: dict[str, list[bytes]] = {"stream": [], "mail": []}
        moves: dict[str, int] = {}
        for command, frames in parts:
            if isinstance(command, c.Publish):
                rows["stream"] += bodies_of(Content(frames[0]))
            elif isinstance(command, c.Send):
                rows["mail"] += bodies_of(Content(frames[0]))
            elif isinstance(command, c.MoveCursor):
                moves[command.cursor] = command.next
        code = ""
        if self.forbidden.intersection(rows["stream"]):
            code = "forbidden"
        elif any(self.cursors.get(cursor, 0) >= to for cursor, to in moves.items()):
            code = "conflict"
        elif self.dice.random() < 0.1:
            code = "wait"
        if code:
            self.answers.append(c.Refused(66, step.tracker, code, "", 30 if code == "wait" else 0))
            return
        self.keys.add(step.key)
        self.cursors |= moves
        for place, found in rows.items():
            self.happened[place].update(found)
        self.answers.append(c.Confirm(step.tracker, 3, 1, 5, TIME_MS))


@pytest.mark.parametrize("seed", seeds(20, 150))
def test_each_step_happens_once_or_not_at_all_and_its_caller_hears_which(seed: int) -> None:
    world = World(seed)
    turns = 0
    while len(world.steps) < STEPS or not world.session.idle:
        for _ in range(world.dice.choice((0, 0, 1, 3, 10))):
            if len(world.steps) < STEPS:
                world.make()
        world.turn()
        turns += 1
        assert turns < 20_000, "the session does not come to an end"
    assert sorted(world.outcomes) == list(range(STEPS))
    assert world.happened["stream"] == world.happened["mail"]
    for number, outcomes in world.outcomes.items():
        [outcome] = outcomes
        marker = b"%d" % number
        if isinstance(outcome, Confirmation):
            assert world.happened["stream"][marker] == 1, number
            assert world.steps[number].confirmation is outcome
        else:
            assert isinstance(outcome, BrokerRefused)
            assert outcome.code in ("forbidden", "conflict")
            assert world.happened["stream"][marker] == 0, number
            assert (outcome.code == "forbidden") == (marker in world.forbidden)
    window = world.session.window
    assert window.queued_bytes == window.unconfirmed_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_session_amid_its_steps_answers_everybody_once(seed: int) -> None:
    world = World(seed)
    for _ in range(40):
        world.make()
        world.turn()
    world.session.close()
    world.turn()
    assert sorted(world.outcomes) == list(range(40))
    for [outcome] in world.outcomes.values():
        assert isinstance(outcome, Confirmation | MalamuteError)
    assert set(world.happened["stream"].values()) <= {1}
    assert world.happened["stream"] == world.happened["mail"]
