"""The session against a broker that loses links, refuses and confirms late, by seed.

The model keeps what a real log would: a batch is taken when its first sequence is the
next one, known ones are confirmed as duplicates, everything after a refused one is out of
sequence. One stream takes small batches only. Replay a failure with the seed in the test's name.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import Content
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.session.events import Published
from tests.client.script import Script, bodies_of
from tests.seeds import seeds

STREAMS = ("s", "t")
SMALL_BYTES = 330
"""Most bytes of a batch of stream "t": its stamp and content, of six records or so."""


class ModelLog:
    """State of the broker: bodies a stream, and the next sequence of the producer."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.tells = chance.random() < 0.5
        """Whether the answer to OPEN_PRODUCER says how much a stream takes."""
        self.bodies: dict[str, list[bytes]] = {stream: [] for stream in STREAMS}
        self.next: dict[str, int] = dict.fromkeys(STREAMS, 0)
        self.places: dict[tuple[str, int], int] = {}
        self.poisoned: set[bytes] = set()

    def answer(self, command: c.Publish, content: Content) -> c.Command:
        head, stream = content.head, command.stream
        content.verify()
        sequence = head.first_sequence
        if sequence < self.next[stream]:
            offset = self.places[stream, sequence]
            return c.Confirm(command.tracker, 3, 1, offset, 1, True)
        if sequence > self.next[stream]:
            return c.Refused(10, command.tracker, "out_of_sequence")
        bodies = bodies_of(content)
        if stream == "t" and STAMP_BYTES + len(content.view) > SMALL_BYTES:
            return c.Refused(10, command.tracker, "too_large")
        if self.poisoned & set(bodies):
            return c.Refused(10, command.tracker, "bad_batch", "poison")
        if self.chance.random() < 0.15:
            code = self.chance.choice(["wait", "window"])
            return c.Refused(10, command.tracker, code, "", self.chance.choice([0, 50]))
        self.places[stream, sequence] = len(self.bodies[stream])
        self.bodies[stream] += bodies
        self.next[stream] += len(bodies)
        return c.Confirm(command.tracker, 3, 1, self.places[stream, sequence], 1)


class Run:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.script = Script(batch_bytes=400, retry_min_ms=10, retry_max_ms=40)
        self.log = ModelLog(self.chance)
        self.seen = 0
        self.answers: list[c.Command] = []
        self.published: dict[str, list[bytes]] = {stream: [] for stream in STREAMS}
        self.offsets: dict[bytes, int] = {}
        self.failed: list[bytes] = []

    def publish(self) -> None:
        stream = self.chance.choice(STREAMS)
        body = b"%s-%04d" % (stream.encode(), len(self.published[stream]))
        bodies = [body]
        if encoded := self.chance.random() < 0.3:
            bodies += [b"%s/%d" % (body, n) for n in range(self.chance.choice([0, 0, 11]))]
        if self.chance.random() < 0.03:
            self.log.poisoned.add(bodies[-1])
        self.published[stream] += bodies
        if encoded:
            self.script.publish_content(bodies, stream, token=bodies)
        else:
            self.script.publish(body, stream)

    def hear(self) -> None:
        """The broker works off what arrived; its answers wait to be delivered."""
        while self.seen < len(self.script.heard):
            command, frames = self.script.heard[self.seen]
            self.seen += 1
            if isinstance(command, c.Publish):
                self.answers.append(self.log.answer(command, Content(frames[0])))
            elif isinstance(command, c.OpenProducer):
                following = {name: at for name, at in self.log.next.items() if at}
                value: dict[str, Any] = {"id": 7, "epoch": 0, "next": following}
                if self.log.tells:
                    value["batch_bytes_max"] = {"t": SMALL_BYTES}
                self.answers.append(c.Result(command.request, value))
            elif isinstance(command, c.Hello):
                self.script.open(window_bytes=self.chance.choice([600, 2000, 1 << 20]))

    def tell(self, most: int) -> None:
        given, self.answers = self.answers[:most], self.answers[most:]
        if given:
            self.script.say(*given)

    def lose(self) -> None:
        """Answers under way are lost, and with luck the last commands too."""
        self.answers.clear()
        if self.chance.random() < 0.5:
            self.seen = len(self.script.heard)
        else:
            self.hear()
            self.answers.clear()
        self.script.lose()

    def settle(self) -> None:
        events = [event for event in self.script.happened if isinstance(event, Published)]
        self.script.happened.clear()
        for event in events:
            outcome, bodies = event.outcome, event.tokens
            if not event.single:
                # A part of a content: the parts are settled in their order.
                done = self.offsets.keys() | set(self.failed)
                bodies = [body for body in bodies if body not in done][: event.count]
            assert len(bodies) == event.count
            for index, body in enumerate(bodies):
                assert body not in self.offsets, "settled twice"
                assert body not in self.failed, "settled twice"
                if isinstance(outcome, BrokerRefused):
                    assert outcome.code == "bad_batch"
                    self.failed.append(body)
                else:
                    assert isinstance(outcome, c.Confirm)
                    self.offsets[body] = outcome.offset + index


@pytest.mark.parametrize("seed", seeds(12, 60))
def test_every_confirmed_record_is_in_the_log_once_in_order_and_where_it_was_said(
    seed: int,
) -> None:
    run = Run(seed)
    chance: Any = run.chance
    for _ in range(300):
        action = chance.random()
        if action < 0.5:
            run.publish()
        elif action < 0.6:
            run.script.step()
        elif action < 0.75:
            run.hear()
        elif action < 0.92:
            run.tell(chance.randint(1, 4))
        elif action < 0.94:
            run.lose()
        else:
            run.script.wait(chance.choice([1, 20, 200]))
        run.settle()
    for _ in range(2000):
        if run.script.session.publisher.idle:
            break
        run.script.wait(60)
        run.hear()
        run.tell(100)
        run.settle()
    assert run.script.session.publisher.idle, "something waits for ever"
    assert run.script.session.publisher.window.unconfirmed_bytes == 0
    assert run.script.session.publisher.window.queued_bytes == 0
    for stream in STREAMS:
        log = run.log.bodies[stream]
        kept = [body for body in run.published[stream] if body not in run.failed]
        assert log == kept, "order, and each once"
        assert [run.offsets[body] for body in kept] == list(range(len(kept)))
    spoilt = {body for body in run.failed if body not in run.log.poisoned}
    assert all(
        any(body.split(b"-")[0] == bad.split(b"-")[0] for bad in run.log.poisoned)
        for body in spoilt
    ), "only neighbours of a poisoned record in its batch may fail with it"
