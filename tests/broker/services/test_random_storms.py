"""Services under a seed, with everything under way at once: each request ends once.

There the log and the mailbox of the requester must agree in the end. A failure prints its seed; run
it alone with `-k "seed-N"`. test_random_services.py goes step by step, against a model.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.errors import LocalProtocolError
from malamute_py.broker.structures.bitmaps import places_of
from malamute_py.changelog.records import (
    RequestDead,
    RequestDone,
    RequestPut,
    RequestRevived,
    decode_change,
)
from malamute_py.journal.layout import control_bodies
from tests.broker.service_world import MANY, World
from tests.broker.shell import Peer

pytestmark = pytest.mark.slow
SUBJECTS = ("air", "sea", "land")
PATTERNS = (["all"], ["topic", "air"], ["topic", "sea"], ["prefix", "l"])
REQUESTER = 1
LEASE_MS = 700


class Storm:
    """One run with commands, timers, answers of the journal and kills in any order."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(timers_max=5, hand_outs_max=4, mail_hot_bytes=1_500)
        self.keys: dict[bytes, tuple[wire.Request, bytes]] = {}
        self.tracker = 1_000
        self.offers: dict[int, list[int]] = {}
        self.next_link = 10
        self.told: dict[tuple[bytes, int], set[int]] = {}
        """Request -> numbers of the last mails about it."""
        self._greet()
        self.world.ask(REQUESTER, wire.EditService(1, "s", {"attempts_max": 5, "backoff_ms": 20}))

    def _greet(self) -> None:
        self.world.client(REQUESTER, "req")

    def say(self, link: int, *commands: wire.Command, frames: Any = ()) -> None:
        shell = self.world.shell
        peer = shell.peers.setdefault(link, Peer())
        if peer.closed:
            return
        for command in commands:
            with suppress(LocalProtocolError):  # the link may not have been welcomed yet
                peer.link.sent(command)
        shell.broker.receive(link, "", commands, frames, shell.now_ms)

    def step(self) -> None:
        moves = [
            (self.request, 4), (self.again, 1), (self.join, 4), (self.credit, 6),
            (self.answer, 12), (self.pump, 12), (self.time, 2), (self.leave, 0.5),
            (self.cancel, 1), (self.kill, 0.2), (self.requeue, 0.5),
        ]  # fmt: skip
        self.random.choices([move for move, _ in moves], [weight for _, weight in moves])[0]()

    def request(self) -> None:
        random = self.random
        key = b"k%d" % len(self.keys)
        count = random.randint(1, 5)
        self.tracker += 1
        command = wire.Request("s", self.tracker, "", random.choice([0, 0, 0, 900]), 0, key)
        table = list(SUBJECTS)
        codes = [random.randrange(3) for _ in range(count)]
        content = encode([b"%d" % row for row in range(count)], subject_table=table,
                         subject_codes=codes)  # fmt: skip
        self.keys[key] = command, content
        self.say(REQUESTER, command, frames=[content])

    def again(self) -> None:
        """Send a request again, whether or not the first was taken."""
        if self.keys:
            command, content = self.keys[self.random.choice(list(self.keys))]
            self.say(REQUESTER, command, frames=[content])

    def join(self) -> None:
        random = self.random
        if len(self.offers) < 4:
            link = self.next_link
            self.next_link += 1
            self.offers[link] = []
            name = random.choice(["ann", "", "bob"])
            self.say(link, wire.Hello((1, 1), link.to_bytes(16, "big"), name))
            return
        link = random.choice(list(self.offers))
        number = len(self.offers[link]) + 1
        self.offers[link].append(number)
        pattern, credit = random.choice(PATTERNS), random.randint(0, 4)
        self.say(link, wire.Offer(number, "s", pattern, credit, MANY, LEASE_MS))

    def _offer(self) -> tuple[int, int] | None:
        places = [(link, number) for link, mine in self.offers.items() for number in mine]
        return self.random.choice(places) if places else None

    def credit(self) -> None:
        place = self._offer()
        if place is not None:
            self.say(place[0], wire.Credit(place[1], self.random.randint(1, 200), MANY))

    def answer(self) -> None:
        """Let a worker answer something that it was given at any time, held or not."""
        place = self._offer()
        peer = None if place is None else self.world.shell.peers.get(place[0])
        if place is None or peer is None or not peer.work.get(place[1]):
            return
        tasks = peer.work[place[1]][-8:]
        some = self.random.sample(tasks, self.random.randint(1, len(tasks)))
        numbers = sorted({task.number for task in some})
        state = self.random.choice([0, 0, 0, -1, 1, 2, 3, 4, 5])
        self.tracker += 1
        if state <= 0:
            content = encode([b"re"] * len(numbers), subject="r")
            command = wire.Reply(place[1], numbers, self.tracker, state == 0)
            self.say(place[0], command, frames=[content])
        else:
            ranges = [(number, number + 1) for number in numbers]
            self.say(place[0], wire.AckWork(place[1], ranges, state, self.tracker))

    def pump(self) -> None:
        """Let the journal answer once; now and then it refuses."""
        shell = self.world.shell
        if self.random.random() < 0.1:
            shell.refuse["main"] = ("full", "no room")
        shell._do(shell.broker.take_ready())
        shell.refuse.clear()
        if self.random.random() < 0.7:
            shell.answer_bodies()
        if self.random.random() < 0.7:
            shell.sync()
        self.look()

    def look(self) -> None:
        for link in [link for link in self.offers if self.world.shell.peers[link].closed]:
            del self.offers[link]
        letters = self.world.mail(REQUESTER)
        place = 0
        while place < len(letters):
            mail = letters[place].mail
            rows = [(key, row + n) for key, row, count in mail.about for n in range(count)]
            for n, request in enumerate(rows):
                if mail.last:
                    self.told.setdefault(request, set()).add(letters[place + n].number)
            place += len(rows)

    def time(self) -> None:
        shell = self.world.shell
        shell.now_ms += self.random.choice([1, 30, 100, 400])
        self.say(REQUESTER, wire.Ping(0))
        for link in self.offers:
            self.say(link, wire.Ping(0))
        shell.broker.tick(shell.now_ms)

    def leave(self) -> None:
        if self.offers:
            link = self.random.choice(list(self.offers))
            del self.offers[link]
            self.world.shell.broker.link_lost(link, self.world.shell.now_ms)

    def cancel(self) -> None:
        if self.keys:
            key = self.random.choice(list(self.keys))
            self.say(REQUESTER, wire.CancelRequest(3, "s", key, self.random.randint(-1, 3)))

    def requeue(self) -> None:
        numbers = self.random.sample(range(60), 5)
        self.say(REQUESTER, wire.Requeue(4, "s", numbers))

    def kill(self) -> None:
        self.look()
        self.world.shell.restart()
        self.offers.clear()
        self._greet()

    def finish(self) -> None:
        """End all links, answer what is left, and read in the log how each request ended."""
        world, shell = self.world, self.world.shell
        shell.run()
        while self.offers:
            self.leave()
        shell.run()
        for _ in range(3):
            self.time()
            shell.run()
        link = self.next_link
        world.worker(link)
        world.offer(link, credit=MANY)
        done = 0
        for _ in range(200):
            if not world.queued():
                break
            self.offers = {link: []}
            self.time()
            shell.run()
            for task in world.work(link)[done:]:
                world.reply(link, [task.number])
            done = len(world.work(link))
        assert world.queued() == 0
        self.look()
        service = world.service()
        assert service.rows == service.held == service.delayed == service.size == 0
        assert not service.batches
        self._agree()

    def _agree(self) -> None:
        puts: dict[int, RequestPut] = {}
        ends: dict[int, list[str]] = {}
        for held in self.world.shell.rings["main"]:
            for body in control_bodies(held.data[96:]) if held.control_kind == 6 else ():
                change = decode_change(body)
                if isinstance(change, RequestPut):
                    assert change.base not in puts
                    puts[change.base] = change
                elif isinstance(change, RequestDone | RequestDead):
                    for base, rows in change.rows:
                        for row in places_of(int.from_bytes(rows, "little")):
                            ends.setdefault(base + row, []).append(change.why)
                elif isinstance(change, RequestRevived):
                    for base, rows in change.rows:
                        for row in places_of(int.from_bytes(rows, "little")):
                            ends[base + row].append("revived")
        assert len({put.key for put in puts.values()}) == len(puts), "a key was taken twice"
        for put in puts.values():
            for row in range(put.count):
                ended = ends.pop(put.base + row)
                revived = ended.count("revived")
                assert len(ended) == 2 * revived + 1, ended
                told = self.told.get((put.key, row), set())
                silent = ended.count("cancelled")
                assert len(told) == revived + 1 - silent, (put.base + row, ended, told)
        assert not ends


@pytest.mark.parametrize("seed", range(24), ids=lambda seed: f"seed-{seed}")
def test_in_any_order_of_things_each_request_ends_once(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(400):
        storm.step()
    storm.finish()
