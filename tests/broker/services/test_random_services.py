"""Services under a seed: workers come, go, die and answer; each request ends once or is there.

The test goes step by step, against a model that knows of each request only what its requester and
its workers were told. A failure prints its seed; run it alone with `-k "seed-N"`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_protocol.encode import encode
from malamute_py.matcher import matches
from tests.broker.service_world import MANY, World

pytestmark = pytest.mark.slow

SUBJECTS = ("air", "sea", "land")
PATTERNS = (["all"], ["topic", "air"], ["topic", "sea"], ["prefix", "l"])
REQUESTER = 1
LEASE_MS = 700
DEADLY = ("failed", "lease", "died", "returned")
"""Words that the notice of a dead letter begins with."""
SLACK_MS = 10
"""A timer is late by at most its slot."""


class Life:
    """Facts of one request, as its requester and its workers were told."""

    def __init__(self, key: bytes, row: int, number: int, subject: str, deadline_ms: int) -> None:
        self.key = key
        self.row = row
        self.number = number
        self.subject = subject
        self.deadline_ms = deadline_ms
        self.attempts = 0
        self.holder: tuple[int, int] | None = None
        """Link and offer of the worker that holds the request."""
        self.until_ms = 0
        """Time until which the lease lasts at least."""
        self.ended = 0
        """Number of ends that were seen: more than one only if the request was put back between."""
        self.revived = 0
        self.cancelled = False
        self.unsure = False
        """Whether the request may have been handed out unseen when the broker was killed."""
        self.received = False
        """Whether its holder has acknowledged the receipt."""
        self.spared = False
        """Whether the last hand-out may count for nothing: its worker left before it began."""


class Game:
    """One run against the model."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(timers_max=7, hand_outs_max=5, mail_hot_bytes=2_000)
        self.lives: dict[int, Life] = {}
        self.keys: dict[bytes, tuple[str, list[str], int]] = {}
        self.workers: dict[int, dict[int, Any]] = {}
        """Link -> number of its offer -> pattern."""
        self.names: dict[int, str] = {}
        self.credits: dict[tuple[int, int], int] = {}
        self.read: dict[tuple[int, int], int] = {}
        self.lasts: dict[int, list[str]] = {}
        self.seen_mail: set[int] = set()
        self.mail_read = 0
        self.next_link = 10
        self.next_offer = 1
        self.refusing = False
        self.world.client(REQUESTER, "req")
        self.world.ask(REQUESTER, wire.EditService(1, "s", {"attempts_max": 4, "backoff_ms": 50}))

    # --- what was told --------------------------------------------------------------------

    def look(self) -> None:
        """Compare the work and the mail that came with the model."""
        came: list[tuple[int, int, int, Any, Any]] = []
        for link, offers in self.workers.items():
            for number, pattern in offers.items():
                tasks = self.world.work(link, number)
                at = self.read.get((link, number), 0)
                came += [(task.work.attempts, link, number, pattern, task) for task in tasks[at:]]
                self.read[link, number] = len(tasks)
                assert len(tasks) <= self.credits[link, number], "beyond its credit"
        for _, link, number, pattern, task in sorted(came, key=lambda one: one[0]):
            self._handed(link, number, pattern, task)
        self._look_at_mail()

    def _handed(self, link: int, number: int, pattern: Any, task: Any) -> None:
        life = self.lives[task.number]
        now_ms = self.world.shell.now_ms
        assert matches(pattern, (life.subject,), ()), "another subject"
        assert task.body == b"%d" % task.number or task.body == life.key + b"%d" % life.row
        assert life.ended <= life.revived, f"{task.number} had ended"
        assert not life.cancelled, f"{task.number} was cancelled"
        assert life.holder is None or now_ms + SLACK_MS >= life.until_ms, (
            f"{task.number} is in the hands of {life.holder}"
        )
        expected = life.attempts + 1
        likely = (expected, expected + life.unsure, expected - life.spared)
        assert task.work.attempts in likely, f"of {task.number}"
        life.attempts, life.unsure = task.work.attempts, False
        life.received = life.spared = False
        life.holder = link, number
        life.until_ms = now_ms + task.work.lease_ms

    def _look_at_mail(self) -> None:
        letters = self.world.mail(REQUESTER)
        for letter in letters[self.mail_read :]:
            if letter.number in self.seen_mail:
                continue
            self.seen_mail.add(letter.number)
        # Runs of `about` name the rows of one MAIL in order.
        place = self.mail_read
        while place < len(letters):
            mail = letters[place].mail
            rows = [(key, row + n) for key, row, count in mail.about for n in range(count)]
            for n, (key, row) in enumerate(rows):
                letter = letters[place + n]
                if mail.last:
                    self._last(key, row, letter.number, mail.why or "reply")
            place += len(rows)
        self.mail_read = len(letters)

    def _last(self, key: bytes, row: int, mail_number: int, why: str) -> None:
        base = self.keys[key][2]
        number = base + row
        told = self.lasts.setdefault(number, [])
        mark = f"{mail_number} {why}"
        if mark in told:
            return  # mail that is delivered again after a restart
        told.append(mark)
        life = self.lives[number]
        life.holder = None
        if why in ("expired", "lost") or why.split(":", maxsplit=1)[0] in DEADLY:
            life.ended += 1
            life.attempts = 0
        assert len(told) <= life.revived + 1, f"{number} was answered twice: {told}"

    # --- moves ----------------------------------------------------------------------------

    def step(self) -> None:
        moves = [
            (self.request, 6), (self.offer, 3), (self.credit, 5), (self.answer, 14),
            (self.wait, 8), (self.drop, 2), (self.withdraw, 1), (self.cancel, 2),
            (self.revive, 1), (self.restart, 1), (self.refuse, 1), (self.steal, 1),
            (self.crash, 1),
        ]  # fmt: skip
        move = self.random.choices([move for move, _ in moves], [weight for _, weight in moves])[0]
        move()
        self.look()

    def request(self, crash: bool = False) -> None:
        random, world = self.random, self.world
        count = random.randint(1, 6)
        key = b"k%d." % len(self.keys)
        subjects = [random.choice(SUBJECTS) for _ in range(count)]
        timeout_ms = random.choice([0, 0, 400, 3_000])
        bodies = [key + b"%d" % row for row in range(count)]
        if crash:
            self._send_and_crash(key, subjects, bodies, timeout_ms)
        sent_ms = world.shell.now_ms
        self.keys[key] = "s", subjects, -1
        delay_ms = 0 if crash else random.choice([0, 0, 0, 30, 1_000])
        priority = 0 if crash else random.choice([0, 0, 0, 3, 9])
        tracker = world.request(
            REQUESTER, *bodies, key=key, subjects=subjects, timeout_ms=timeout_ms,
            delay_ms=delay_ms, priority=priority,
        )  # fmt: skip
        (answer,) = world.answers(REQUESTER, tracker)
        if isinstance(answer, wire.Refused):
            assert self.refusing
            del self.keys[key]
            return
        assert isinstance(answer, wire.Confirm)
        deadline_ms = sent_ms + delay_ms + timeout_ms if timeout_ms else 0
        self.accept(key, subjects, answer.offset, deadline_ms, unsure=crash)

    def accept(
        self, key: bytes, subjects: list[str], base: int, deadline_ms: int, unsure: bool
    ) -> None:
        self.keys[key] = "s", subjects, base
        for row, subject in enumerate(subjects):
            assert base + row not in self.lives, "a number given twice"
            life = self.lives[base + row] = Life(key, row, base + row, subject, deadline_ms)
            life.unsure = unsure

    def _send_and_crash(
        self, key: bytes, subjects: list[str], bodies: list[bytes], timeout_ms: int
    ) -> None:
        """Kill the broker when the log has the batch, or just before."""
        shell = self.world.shell
        table = list(dict.fromkeys(subjects))
        codes = [table.index(one) for one in subjects]
        content = encode(bodies, subject_table=table, subject_codes=codes)
        command = wire.Request("s", 1, "", timeout_ms, 0, key)
        shell.broker.receive(REQUESTER, "", [command], [content], shell.now_ms)
        if self.random.random() < 0.7:
            ready = shell.broker.take_ready()
            ready.sends = []
            shell._do(ready)
        self._come_back()
        for life in self.lives.values():
            life.unsure = True

    def offer(self) -> None:
        random, world = self.random, self.world
        if len(self.workers) < 4 or random.random() < 0.3:
            link = self.next_link
            self.next_link += 1
            self.names[link] = random.choice(["", f"w{link}"])
            world.worker(link, self.names[link])
            self.workers[link] = {}
        link = random.choice(list(self.workers))
        number = self.next_offer
        self.next_offer += 1
        pattern = random.choice(PATTERNS)
        credit = random.randint(0, 5)
        self.credits[link, number] = credit
        self.workers[link][number] = pattern
        peer = world.offer(link, "s", pattern, credit=credit, number=number, lease_ms=LEASE_MS)
        if self.refusing and peer.of(wire.Refused):
            assert peer.last(wire.Subscribed).subscription == number

    def _some_offer(self) -> tuple[int, int] | None:
        offers = [(link, number) for link, mine in self.workers.items() for number in mine]
        return self.random.choice(offers) if offers else None

    def credit(self) -> None:
        place = self._some_offer()
        if place is not None:
            self.credits[place] += self.random.randint(1, 6)
            self.world.credit(place[0], self.credits[place], number=place[1])

    def answer(self) -> None:
        """Let a worker answer or acknowledge requests that it holds, or believes to hold."""
        random, world = self.random, self.world
        place = self._some_offer()
        if place is None:
            return
        now_ms = world.shell.now_ms
        mine = [life for life in self.lives.values() if life.holder == place]
        if not mine:
            return
        lives = random.sample(mine, random.randint(1, len(mine)))
        sure = all(
            now_ms < life.until_ms and (not life.deadline_ms or now_ms < life.deadline_ms)
            for life in lives
        )
        over = any(life.ended > life.revived for life in lives)
        state = random.choice([0, 0, 0, 0, -1, 1, 2, 3, 4, 5])
        numbers = [life.number for life in lives]
        link, offer = place
        if state <= 0:
            tracker = world.reply(link, numbers, last=state == 0, number=offer)
        else:
            ranges = [(number, number + 1) for number in sorted(numbers)]
            tracker = world.ack(
                link, ranges, state, number=offer, again_ms=random.choice([0, 0, 300])
            )
        (answer,) = world.answers(link, tracker)
        if isinstance(answer, wire.Refused):
            assert not sure or over or self.refusing, f"{answer} of what is in hand: {numbers}"
            return
        assert not over, "of what had ended"
        for life in lives:
            if state in (0, WorkState.COMPLETED):
                life.ended += 1
                life.holder = None
            elif state in (WorkState.FAILED, WorkState.RETURNED):
                life.holder = None
            else:
                life.until_ms = now_ms + LEASE_MS
                life.received = life.received or state == WorkState.RECEIVED

    def wait(self) -> None:
        self.pass_time(self.random.choice([1, 20, 60, 200, 800]))

    def pass_time(self, ms: int) -> None:
        """Let time pass in which every link sends something."""
        while ms > 0:
            for link in (REQUESTER, *self.workers):
                self.world.shell.send(link, wire.Ping(0))
            self.world.shell.wait(min(ms, 400))
            ms -= 400
            self.look()

    def drop(self) -> None:
        if self.workers:
            link = self.random.choice(list(self.workers))
            self._gone(link)
            self.world.drop(link)

    def steal(self) -> None:
        """Let another session take a worker's identity."""
        named = [link for link in self.workers if self.names[link]]
        if named:
            old = self.random.choice(named)
            link = self.next_link
            self.next_link += 1
            self.names[link] = self.names[old]
            self._gone(old)
            self.world.worker(link, self.names[old])
            assert self.world.shell.peers[old].closed
            self.workers[link] = {}

    def _gone(self, link: int) -> None:
        del self.workers[link]
        for life in self.lives.values():
            if life.holder is not None and life.holder[0] == link:
                life.holder = None

    def withdraw(self) -> None:
        place = self._some_offer()
        if place is not None:
            link, number = place
            del self.workers[link][number]
            for life in self.lives.values():
                if life.holder == place:
                    life.holder = None
                    if life.received:
                        continue
                    if self.refusing or self.world.shell.now_ms >= life.until_ms:
                        life.spared = True
                    else:
                        life.attempts -= 1
            self.world.shell.send(link, wire.Unsubscribe(number))

    def cancel(self) -> None:
        if not self.keys:
            return
        key = self.random.choice(list(self.keys))
        _, subjects, base = self.keys[key]
        row = self.random.choice([-1, *range(len(subjects))])
        rows = range(len(subjects)) if row < 0 else [row]
        before = {
            base + one for one in rows if self._there(base + one)
        }  # fmt: skip
        peer = self.world.shell.send(REQUESTER, wire.CancelRequest(90_005, "s", key, row))
        answer = [one for one in peer.commands if isinstance(one, (wire.Result, wire.Refused))][-1]
        if isinstance(answer, wire.Refused):
            assert self.refusing
            return
        assert answer.value == {"count": len(before)}
        self.look()
        for number in before:
            self.lives[number].cancelled = True
            self.lives[number].holder = None

    def _there(self, number: int) -> bool:
        """Whether the tables have a request."""
        requests = self.world.shell.broker._shard.queues.requests
        life = self.lives[number]
        row = requests.get(number - life.row)
        return row is not None and bool(row.left >> life.row & 1)

    def revive(self) -> None:
        before = {number for number in self.lives if self._there(number)}
        self.world.shell.send(REQUESTER, wire.Requeue(90_006, "s"))
        self._look_at_mail()
        for number, life in self.lives.items():
            if number not in before and self._there(number):
                life.revived += 1
                life.deadline_ms = 0
                life.holder = None
                assert life.ended == life.revived, f"{number} came back from nowhere"

    def refuse(self) -> None:
        """Let the log refuse everything for a while."""
        refuse = self.world.shell.refuse
        if self.refusing:
            refuse.clear()
        else:
            refuse["main"] = ("full", "no room")
        self.refusing = not self.refusing

    def crash(self) -> None:
        self.recover()
        self.request(crash=True)

    def restart(self) -> None:
        self.recover()
        self._come_back()

    def recover(self) -> None:
        """Let the log take everything again, and wait until what it refused is done."""
        if self.refusing:
            self.refuse()
        self.pass_time(1_100)
        self.look()

    def _come_back(self) -> None:
        """Let the workers with an identity come back to a broker that was killed."""
        world = self.world
        self.look()
        world.shell.restart()
        self.mail_read = 0
        self.seen_mail.clear()
        world.client(REQUESTER, "req")
        now_ms = world.shell.now_ms
        moved: dict[tuple[int, int], tuple[int, int]] = {}
        for link in list(self.workers):
            offers = self.workers.pop(link)
            if not self.names[link]:
                continue
            world.worker(link, self.names[link])
            self.workers[link] = {}
            for number, pattern in offers.items():
                again = self.next_offer
                self.next_offer += 1
                self.credits[link, again] = 3
                self.workers[link][again] = pattern
                moved[link, number] = link, again
                world.offer(link, "s", pattern, credit=3, number=again, lease_ms=LEASE_MS)
        for life in self.lives.values():
            if life.holder is not None and life.until_ms > now_ms:
                life.holder = moved.get(life.holder, life.holder)
                life.until_ms = now_ms + LEASE_MS
            else:
                life.holder = None

    # --- what must hold ---------------------------------------------------------------------

    def check(self) -> None:
        """Every request that is left waits or is held, and no ready worker is idle beside one."""
        broker = self.world.shell.broker
        service = self.world.service()
        queues = broker._shard.queues
        held = delayed = rows = 0
        for base, row in queues.requests.items():
            batch = service.batches[base]
            assert batch.row is row
            assert not batch.moving
            assert not batch.ending
            leased = 0
            for lease in batch.leases:
                assert not leased & lease.rows, "held twice"
                leased |= lease.rows
            assert leased == row.left & ~row.waiting, "held by the tables and by no worker"
            queued = 0
            for queue in service.by_subject.values():
                for _, some, other in [*queue.fresh, *queue.again]:
                    if other is batch:
                        queued |= some
            assert batch.free & ~queued == 0, "waits in no queue"
            for offer in service.offers:
                if offer.left_records > 0:
                    for _, some, other in self._waiting(service, offer.pattern):
                        assert not other.free & some, "a worker is ready and a request waits"
            held += leased.bit_count()
            delayed += batch.delayed.bit_count()
            rows += row.left.bit_count()
        assert len(service.batches) == len(queues.requests)
        assert (service.held, service.delayed, service.rows) == (held, delayed, rows)
        assert service.reserved_rows == 0
        for offer in service.offers:
            assert offer.load == offer.in_flight.rows
        prior = {queue for queue in service.by_subject.values() if queue.priority and queue.rows}
        assert set(service.prior) == prior
        assert (service.direct is service.offers) == (not prior)

    def _waiting(self, service: Any, pattern: Any) -> list[Any]:
        return [
            entry
            for queue in service.by_subject.values()
            if matches(pattern, (queue.subject,), ())
            for entry in [*queue.fresh, *queue.again]
        ]

    def finish(self) -> None:
        """Answer everything, and check that each request has ended as often as it had to."""
        self.recover()
        self.pass_time(61_000)
        self.look()
        for link in list(self.workers):
            self.drop_one(link)
        self.pass_time(5_000)
        self.look()
        for number, life in self.lives.items():
            told = len(self.lasts.get(number, ()))
            if life.cancelled:
                assert told == life.revived, f"{number}: {self.lasts.get(number)}"
                assert not self._there(number)
            elif self._there(number):
                assert told == life.revived, f"{number} is there: {self.lasts.get(number)}"
            else:
                assert told == life.revived + 1, f"{number}: {self.lasts.get(number)}"
        link = self.next_link
        self.world.worker(link)
        self.workers[link] = {}
        self.world.offer(link, credit=MANY)
        for _ in range(50):
            numbers = [
                number for number in self.lives if self._there(number)
            ]  # fmt: skip
            if not numbers:
                break
            self.pass_time(1_000)
            for task in self.world.work(link):
                self.world.reply(link, [task.number])
        assert self.world.queued() == 0
        assert self.world.service().rows == self.world.service().size == 0
        assert self.world.shell.broker.gauges["requests"] == 0
        assert self.world.shell.broker.gauges["request_bytes"] == 0
        owners = self.world.shell.broker._shard.quotas._owners.values()
        assert not any(usage.held["request_bytes"] for usage in owners)

    def drop_one(self, link: int) -> None:
        self._gone(link)
        self.world.drop(link)


@pytest.mark.parametrize("seed", range(24), ids=lambda seed: f"seed-{seed}")
def test_each_request_ends_once_or_is_still_there(seed: int) -> None:
    game = Game(seed)
    for turn in range(220):
        game.step()
        if turn % 10 == 0 and not game.refusing:
            game.recover()
            game.check()
    game.finish()
