"""Requesters and workers over the fake shell, for the tests of services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.services.service import Service
from malamute_py.changelog.records import decode_change
from malamute_py.journal.layout import control_bodies
from tests.broker.shell import Letter, Peer, Shell, Task

INBOX = 100
ALL = ["all"]
MANY = 1 << 40
LATER_MS = 200
"""A time after the first pause of a request that came back."""


class World:
    """A broker with requesters and workers; a link is named by its number."""

    def __init__(self, **settings: Any) -> None:
        self.shell = Shell(**settings)
        self.trackers = 0
        self.done: dict[int, int] = {}
        """Link of a worker -> number of requests that it has answered."""

    # --- clients --------------------------------------------------------------------------

    def client(self, link: int, identity: str = "", **fields: Any) -> Peer:
        """Open a link that reads its own mailbox."""
        self.shell.hello(link, identity=identity, **fields)
        return self.shell.send(link, wire.OpenInbox(INBOX, "", MANY, MANY), identity=identity)

    def worker(self, link: int, identity: str = "", **fields: Any) -> Peer:
        """Open a link that has not offered anything yet."""
        return self.shell.hello(link, identity=identity, **fields)

    def offer(
        self, link: int, service: str = "s", pattern: Any = ALL, *, credit: int = 1_000,
        size: int = MANY, number: int = 1, lease_ms: int = 0, **fields: Any,
    ) -> Peer:  # fmt: skip
        return self.shell.send(
            link, wire.Offer(number, service, pattern, credit, size, lease_ms, **fields)
        )

    def request(
        self, link: int, *bodies: bytes, service: str = "s", key: bytes = b"",
        subject: str = "x", level: int = 0, reply_to: str = "", timeout_ms: int = 0,
        subjects: Sequence[str] = (), **fields: Any,
    ) -> int:  # fmt: skip
        """Queue a batch of requests; returns the tracker."""
        self.trackers += 1
        options: dict[str, Any] = {"subject": subject}
        if subjects:
            table = list(dict.fromkeys(subjects))
            codes = [table.index(one) for one in subjects]
            options = {"subject_table": table, "subject_codes": codes}
        command = wire.Request(service, self.trackers, reply_to, timeout_ms, level, key, **fields)
        self.shell.send(link, command, frames=[encode(list(bodies), **options)])
        return self.trackers

    def credit(self, link: int, records: int, *, number: int = 1, size: int = MANY) -> None:
        self.shell.send(link, wire.Credit(number, records, size))

    def reply(
        self, link: int, requests: Sequence[int], *, last: bool = True, number: int = 1,
        bodies: Sequence[bytes] = (), level: int = 0, patient: bool = False,
    ) -> int:  # fmt: skip
        """Answer requests, with `re: N` unless there are bodies; returns the tracker."""
        self.trackers += 1
        texts = list(bodies) or [b"re: %d" % request for request in requests]
        command = wire.Reply(number, list(requests), self.trackers, last, level, patient)
        self.shell.send(link, command, frames=[encode(texts, subject="reply")])
        return self.trackers

    def ack(
        self, link: int, ranges: Sequence[tuple[int, int]], state: int, *, number: int = 1,
        again_ms: int = 0, reason: str = "",
    ) -> int:  # fmt: skip
        self.trackers += 1
        self.shell.send(
            link, wire.AckWork(number, list(ranges), state, self.trackers, 0, again_ms, reason)
        )
        return self.trackers

    def ask(self, link: int, command: wire.Command) -> dict[str, Any]:
        """Send a command, and return the value of its RESULT."""
        value: dict[str, Any] = self.shell.send(link, command).last(wire.Result).value
        return value

    def drop(self, link: int) -> None:
        """Lose a link."""
        self.shell.broker.link_lost(link, self.shell.now_ms)
        self.shell.run()

    # --- what came ------------------------------------------------------------------------

    def work(self, link: int, number: int = 1) -> list[Task]:
        return self.shell.peers[link].work.get(number, [])

    def numbers(self, link: int, number: int = 1) -> list[int]:
        return [task.number for task in self.work(link, number)]

    def mail(self, link: int) -> list[Letter]:
        return self.shell.peers[link].mail.get(INBOX, [])

    def replies(self, link: int) -> list[bytes]:
        return [letter.body for letter in self.mail(link)]

    def answers(self, link: int, tracker: int) -> list[wire.Command]:
        """CONFIRM and REFUSED that name a tracker."""
        return [
            command for command in self.shell.peers[link].commands
            if (isinstance(command, wire.Confirm) and command.tracker == tracker)
            or (isinstance(command, wire.Refused) and command.reference == tracker)
        ]  # fmt: skip

    def confirmed(self, link: int, tracker: int) -> wire.Confirm:
        (answer,) = self.answers(link, tracker)
        assert isinstance(answer, wire.Confirm), answer
        return answer

    def refused(self, link: int, tracker: int) -> wire.Refused:
        (answer,) = self.answers(link, tracker)
        assert isinstance(answer, wire.Refused), answer
        return answer

    def info(self, link: int, service: str = "s") -> dict[str, Any]:
        return self.ask(link, wire.ServiceInfo(99, service))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event.facts for event in self.shell.events if event.name == name]

    def counter(self, name: str) -> int:
        return self.shell.broker.counters[name]

    def service(self, name: str = "s") -> Service:
        return self.shell.broker._services._registry.by_name[name]

    def queued(self) -> int:
        """Number of requests in the tables, over all services."""
        requests = self.shell.broker._shard.queues.requests
        return sum(row.left.bit_count() for row in requests.values())


def letters(world: World, link: int, mailbox: str = "s.dead", number: int = 50) -> list[Any]:
    """Messages in a dead-letter mailbox."""
    if number not in world.shell.peers[link].mail:
        world.shell.send(link, wire.OpenInbox(number, mailbox, MANY, MANY))
    return world.shell.peers[link].mail.get(number, [])


def poisoned(world: World, attempts: int) -> None:
    """Let a request end the link of its worker `attempts` times."""
    world.ask(1, wire.EditService(7, "s", {"attempts_max": attempts, "backoff_ms": 10}))
    world.request(1, b"poison", b"bread", key=b"k", subjects=["bad", "good"])
    for link in range(10, 10 + attempts):
        world.worker(link, f"w{link}")
        world.offer(link, pattern=["topic", "bad"])
        world.drop(link)
        world.shell.wait(LATER_MS)


def pair(**settings: object) -> World:
    """Return a world with a requester (link 1) and a worker (link 2) that has no offer yet."""
    world = World(**settings)
    world.client(1)
    world.worker(2, "ann")
    return world


def logged(world: World) -> list[str]:
    """Names of the changes in the log, in order."""
    return [
        type(decode_change(body)).__name__
        for held in world.shell.rings["main"]
        if held.control_kind
        for body in control_bodies(held.data[96:])
    ]
