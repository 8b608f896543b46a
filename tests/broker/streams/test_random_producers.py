"""Producers at random: several clients of one id that fence each other, retry and misremember.

The oracle is the log itself: a confirmed batch is in it, once, at the place of its confirm.
"""

from __future__ import annotations

import random

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.encode import encode
from tests.broker.shell import Shell, bodies
from tests.seeds import seeds

SEEDS = 60
STEPS = 120
CLIENTS = (1, 2, 3)
STREAMS = ("s", "own")


class Client:
    """One holder of the id: what it believes about its sequences, and what it has sent."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.epoch = 0
        self.next = dict.fromkeys(STREAMS, 0)
        self.sent: list[tuple[str, int, int, bytes]] = []
        """(stream, epoch, sequence, body) of each batch; a batch has one record."""


class Run:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shell = Shell(producer_batches_max=8, snapshot_batches_max=4)
        self.shell.hello(9)
        self.shell.send(9, wire.CreateStream(1, "own", {"ring_bytes": 1 << 20}))
        self.shell.send(9, wire.OpenProducer(2))
        self.id = self.shell.peers[9].last(wire.Result).value["id"]
        self.clients = [Client(link) for link in CLIENTS]
        self.tracker = 0
        self.bodies = 0
        self.asked: dict[tuple[int, int], tuple[str, bytes]] = {}
        """(stream, body) of each publish without an answer, by (link, tracker)."""
        self.confirmed: dict[bytes, tuple[str, int]] = {}
        self.epochs: set[int] = {0}
        self.hello()

    def hello(self) -> None:
        for client in self.clients:
            self.shell.hello(client.link)

    def step(self) -> None:
        draw = self.draw
        if draw.random() < 0.05:
            if draw.random() < 0.5:
                self.shell.snapshot_now()
            self.shell.restart()
            self.asked.clear()
            self.hello()
            return
        self.shell.now_ms += draw.randrange(3)
        # Several clients publish in one turn: each is answered by the log, in order.
        for client in draw.sample(self.clients, draw.randint(1, len(self.clients))):
            for _ in range(draw.randint(1, 3)):
                self.act(client)
        self.shell.run()
        self.learn()

    def act(self, client: Client) -> None:
        draw, shell = self.draw, self.shell
        self.tracker += 1
        kind = draw.random()
        if kind < 0.25:
            fence = wire.OpenProducer(self.tracker, self.id, client.epoch, fence=True)
            shell.broker.receive(client.link, "", [fence], [], shell.now_ms)
            return
        stream = draw.choice(STREAMS)
        if kind < 0.5 and client.sent:
            stream, epoch, sequence, body = draw.choice(client.sent[-12:])
        else:
            self.bodies += 1
            body = b"%d of %d" % (self.bodies, client.link)
            epoch, sequence = client.epoch, client.next[stream]
            if kind > 0.95 and sequence:
                # The client has forgotten what it sent under this sequence.
                sequence -= 1
            client.next[stream] = sequence + 1
            client.sent.append((stream, epoch, sequence, body))
        content = encode(
            [body], subject="s", producer_id=self.id, producer_epoch=epoch,
            first_sequence=sequence,
        )  # fmt: skip
        command = wire.Publish(stream, self.tracker, Level.STORED)
        self.asked[client.link, self.tracker] = stream, body
        shell.broker.receive(client.link, "", [command], [content], shell.now_ms)

    def learn(self) -> None:
        for client in self.clients:
            peer = self.shell.peers[client.link]
            for command in peer.commands:
                if isinstance(command, wire.Confirm):
                    stream, body = self.asked.pop((client.link, command.tracker))
                    known = self.confirmed.setdefault(body, (stream, command.offset))
                    if command.offset >= 0:
                        assert known[1] in (-1, command.offset), "a duplicate points elsewhere"
                        self.confirmed[body] = stream, command.offset
                elif isinstance(command, wire.Refused):
                    assert command.code in ("fenced", "out_of_sequence", "conflict"), command
                elif isinstance(command, wire.Result):
                    epoch = command.value["epoch"]
                    assert epoch not in self.epochs, "two clients were given one epoch"
                    self.epochs.add(epoch)
                    client.epoch = epoch
                    client.next = dict.fromkeys(STREAMS, 0)
            peer.commands.clear()

    def check(self) -> None:
        self.shell.hello(20)
        found: dict[str, list[bytes]] = {}
        for number, stream in enumerate(STREAMS, 1):
            found[stream] = bodies(self.shell.subscribe(20, number, stream), number)
            assert len(set(found[stream])) == len(found[stream]), "a record is in the log twice"
        for body, (stream, offset) in self.confirmed.items():
            assert body in found[stream], f"{body!r} was confirmed and is not in the log"
            assert offset in (-1, found[stream].index(body))


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(8, SEEDS))
def test_what_is_confirmed_is_in_the_log_once_in_any_order_of_fencing(seed: int) -> None:
    run = Run(seed)
    for _ in range(STEPS):
        run.step()
    run.check()
    assert len(run.confirmed) > STEPS / 4
