"""Services among hostile peers: the core never raises, and no request is left in limbo.

The peers send senseless numbers, requests of others, malformed patterns and settings at random;
the log refuses, and there are kills and power losses. In the end every request in the tables waits
in a queue or is held by a worker, and all counts are right.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.errors import LocalProtocolError
from malamute_py.broker.services.service import RequestBatch, Service
from tests.broker.service_world import MANY, World

pytestmark = pytest.mark.slow

NUMBERS = (0, 1, 2, 3, 5, 7, 100, -1, 1 << 40, (1 << 40) + 1, 1 << 53, 1 << 62, (1 << 63) - 1)
NAMES = ("s", "t", "u", "s.dead", "~x", "", "x" * 300, "ann")
PATTERNS: tuple[Any, ...] = (
    ["all"], ["topic", "#"], ["topic", "*.x"], ["prefix", "a"], ["not", ["all"]],
    ["and", ["all"], ["prefix", "a"]], ["field", "k", "v"], [], ["none"], [1], ["or"],
)  # fmt: skip
BOXES = ("s.dead", "box", "memo", "ann")
OFFERED: tuple[dict[str, Any], ...] = (
    {}, {}, {"memory": True}, {"x": 1}, {"lease_ms": 100},
)  # fmt: skip
STEPS = 200


def key(random: Random) -> bytes:
    return random.choice([b"", b"k%d" % random.randrange(9)])


def command(random: Random) -> tuple[wire.Command, list[bytes]]:
    """Return any command about services that a peer may send. Raises ValueError: it has no form."""
    name, offer, tracker = random.choice(NAMES), random.randint(1, 4), random.randrange(1_000)
    level = random.choice([0, 1, 2, 3])
    kind = random.choice(
        ["request"] * 4 + ["offer", "reply", "ack"] * 2
        + ["credit", "unsubscribe", "cancel", "requeue", "service", "other"]
    )  # fmt: skip
    if kind == "request":
        timeout_ms = random.choice([0, 0, 50, 1 << 53])
        reply_to = random.choice(["", "", "box", "~zz", "ann"])
        bodies = [b"x" * random.choice([1, 5_000])] * random.randint(1, 5)
        content = encode(bodies, subject=random.choice(["a", "b.x"]))
        delay_ms, priority = random.choice([0, 0, 50, 1 << 53]), random.choice([0, 0, 1, 9])
        asked = wire.Request(
            name, tracker, reply_to, timeout_ms, level, key(random), False, delay_ms, priority
        )
        return asked, [content]
    if kind == "offer":
        settings = random.choice(OFFERED)
        credit = random.choice([5, 5, 5, random.choice(NUMBERS)])
        lease_ms = random.choice([0, 0, 1, 500, 1 << 53])
        pattern = random.choice(PATTERNS)
        return wire.Offer(offer, name, pattern, credit, MANY, lease_ms, settings), []
    if kind == "reply":
        numbers = [random.randrange(60) for _ in range(random.randint(1, 4))]
        if random.random() < 0.2:
            numbers = [random.choice(NUMBERS)]
        count = len(numbers) if random.random() < 0.9 else 2
        last = random.random() < 0.6
        return wire.Reply(offer, numbers, tracker, last, level), [encode([b"r"] * count)]
    if kind == "ack":
        firsts = sorted({random.randrange(40) * 6 for _ in range(random.randint(1, 3))})
        if random.random() < 0.2:
            firsts = [random.choice(NUMBERS)]
        ranges = [(first, first + random.choice([1, 1, 2, 5])) for first in firsts]
        again_ms = random.choice([0, 0, 10, 1 << 53])
        return wire.AckWork(offer, ranges, random.randrange(7), tracker, level, again_ms), []
    if kind == "credit":
        return wire.Credit(offer, random.choice(NUMBERS), random.choice(NUMBERS)), []
    if kind == "unsubscribe":
        return wire.Unsubscribe(offer), []
    if kind == "cancel":
        return wire.CancelRequest(9, name, key(random), random.choice([-1, 0, 1, 1 << 62])), []
    if kind == "requeue":
        numbers = random.choice([[], [random.randrange(60)], [random.choice(NUMBERS)]])
        return wire.Requeue(9, name, numbers), []
    if kind == "service":
        edits: list[dict[str, Any]] = [
            {}, {"attempts_max": 1}, {"dead_letters": random.choice(BOXES)}, {"memory": True},
            {"max_requests": 3}, {"backoff_ms": 1 << 53},
        ]  # fmt: skip
        removal = wire.RemoveService(9, name, name)
        edit = wire.EditService(9, name, random.choice(edits))
        return random.choice([removal, wire.ServiceInfo(9, name or "*"), edit]), []
    box = random.choice(BOXES)
    inbox = wire.OpenInbox(random.randint(5, 7), random.choice(["", box]), 100, MANY)
    others: list[wire.Command] = [
        wire.Bye(), wire.EditMailbox(9, "memo", {"memory": True}), wire.RemoveMailbox(9, box, box),
        inbox,
    ]  # fmt: skip
    return random.choice(others), []


def message(random: Random) -> tuple[list[wire.Command], list[bytes]]:
    commands: list[wire.Command] = []
    frames: list[bytes] = []
    for _ in range(random.randint(1, 4)):
        with suppress(ValueError):
            one, owned = command(random)
            commands.append(one)
            frames += owned
    return commands, frames


def play(random: Random) -> World:
    world = World(
        attempts_max=random.choice([1, 3]), timers_max=random.choice([1, 5, 512]),
        hand_outs_max=random.choice([1, 4, 256]), backoff_ms=10,
        mail_hot_bytes=random.choice([1_000, 1 << 20]),
    )  # fmt: skip
    shell, newest = world.shell, 0
    links: list[int] = []
    for _ in range(STEPS):
        if len(links) < 4:
            newest += 1
            shell.hello(newest, identity=random.choice(["", "", "ann", "bob"]))
            links.append(newest)
        chance = random.random()
        if chance < 0.03:
            shell.refuse["main"] = ("full", "no room")
        elif chance < 0.10:
            shell.refuse.pop("main", None)
        elif chance < 0.14:
            shell.wait(random.choice([5, 50, 600]))
        elif chance < 0.16 and not shell.refuse:
            shell.restart(power_loss=random.random() < 0.5)
            links = []
            continue
        elif chance < 0.19:
            world.drop(links.pop(random.randrange(len(links))))
            continue
        link = random.choice(links)
        commands, frames = message(random)
        if commands:
            # The broker has ended the link, and ignores what it sends.
            with suppress(LocalProtocolError):
                shell.send(link, *commands, frames=frames)
        links = [one for one in links if not shell.peers[one].closed]
    shell.refuse.pop("main", None)
    for _ in range(6):
        shell.wait(1_100)
    return world


def waiting(service: Service, batch: RequestBatch) -> int:
    """Rows of a batch that wait in a subject's queue."""
    rows = 0
    for queue in service.by_subject.values():
        for _, some, whose in (*queue.fresh, *queue.again):
            rows |= some if whose is batch else 0
    return rows


@pytest.mark.parametrize("seed", range(25), ids="seed-{}".format)
def test_nothing_that_is_said_of_services_leaves_a_request_in_limbo(seed: int) -> None:
    world = play(Random(seed))
    for service in world.shell.broker._services._registry.by_name.values():
        batches = service.batches.values()
        for batch in batches:
            assert not batch.moving, "on its way into the log, which is at rest"
            assert not batch.ending
            left = batch.row.left
            assert left & ~batch.row.waiting & ~batch.leased == 0, "held by no worker"
            assert batch.free & ~waiting(service, batch) == 0, "waits in no queue"
        assert service.rows == sum(batch.row.left.bit_count() for batch in batches)
        held = [lease.rows.bit_count() for batch in batches for lease in batch.leases]
        assert service.held == sum(held)
        assert service.delayed == sum(batch.delayed.bit_count() for batch in batches)
        assert (service.reserved_rows, service.reserved_size) == (0, 0)
        for offer in service.offers:
            assert offer.load == offer.in_flight.rows
