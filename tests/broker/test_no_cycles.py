"""Objects of the broker go by themselves: none of them waits for Python's collector.

A real core does some thousand random things for clients who come and go while the collector is off.
Each object that the collector then finds stood in a cycle, and a collector that has cycles to find
stops the loop.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from types import FunctionType, GeneratorType, MethodType
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.shell import Shell
from tests.seeds import slow

OURS = ("malamute_py", "malamute_protocol")
MANY = 1 << 40
LINKS = range(1, 9)
STREAMS = ("events", "orders", "fleeting")
INBOX, OFFER, MEMBER, READER = 10, 20, 30, 40
"""First numbers of a link's receivers."""
WORK_STATES = (1, 2, 3, 3, 4, 5, 5, 6)


class Bustle:
    """Clients who do all that a client can do, some of it wrongly."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.shell = Shell(
            hot_bytes=2_000, lease_min_ms=10, lease_ms=2_000, attempts_max=3, group_flush_ms=50,
            backoff_ms=5, default_stream={"max_bytes": 40_000},
        )  # fmt: skip
        self.trackers = 0
        self.open: set[int] = set()
        self.come_all()

    # --- links ------------------------------------------------------------------------------

    def come_all(self) -> None:
        for link in LINKS:
            if link not in self.open:
                self.come(link)

    def come(self, link: int) -> None:
        self.open.add(link)
        self.shell.peers.pop(link, None)
        self.shell.hello(link, identity=f"c{link}" if link % 2 else "")

    def one(self) -> int:
        if not self.open:
            self.come_all()
        return self.dice.choice(sorted(self.open))

    def leave(self) -> None:
        link = self.one()
        self.open.discard(link)
        if self.dice.random() < 0.5:
            self.shell.send(link, wire.Bye())
        else:
            self.shell.broker.link_lost(link, self.shell.now_ms)
            self.shell.run()
        # A new connection has another number, as the transport gives it.
        self.come(link)

    def say(self, *commands: wire.Command, frames: Any = (), link: int = 0) -> int:
        link = link or self.one()
        self.shell.send(link, *commands, frames=frames)
        return link

    def tracker(self) -> int:
        self.trackers += 1
        return self.trackers

    def key(self) -> bytes:
        # Some come again.
        return self.dice.choice([b"", self.dice.randbytes(8), b"%d" % self.dice.randrange(50)])

    def content(self, most: int = 3) -> bytes:
        bodies = [b"x" * self.dice.choice([1, 100, 600])] * self.dice.randint(1, most)
        subjects = ["a.b", "a.c", "d"]
        return encode(bodies, subject=self.dice.choice(subjects))

    # --- mail -------------------------------------------------------------------------------

    def mailbox(self) -> str:
        return self.dice.choice(["c1", "c3", "box", "quick", "s.dead"])

    def send(self) -> None:
        later = self.dice.choice([0, 0, 0, self.shell.now_ms + 50])
        command = wire.Send(self.mailbox(), self.tracker(), 0, self.key(), later)
        self.say(command, frames=[self.content()])

    def inbox(self) -> None:
        number = INBOX + self.dice.randrange(3)
        name = self.dice.choice(["", "", "~", "box", "quick", "s.dead"])
        self.say(wire.OpenInbox(number, name, self.dice.choice([1, 5, MANY]), MANY))

    def ack_mail(self) -> None:
        link = self.one()
        for number, letters in list(self.shell.peers[link].mail.items()):
            if not letters:
                continue
            some = letters[: self.dice.randint(1, 3)]
            del letters[: len(some)]
            ranges = [(one.number, one.number + 1) for one in sorted(some)]
            again_ms = self.dice.choice([-1, -1, -1, 0, 20])
            self.say(
                wire.AckMail(number, ranges, self.tracker(), 0, again_ms), link=link
            )  # fmt: skip

    # --- services ---------------------------------------------------------------------------

    def service(self) -> str:
        return self.dice.choice(["s", "s", "fast"])

    def request(self) -> None:
        timeout_ms = self.dice.choice([0, 0, 0, 30])
        reply_to = self.dice.choice(["", "", "box"])
        command = wire.Request(
            self.service(), self.tracker(), reply_to, timeout_ms, 0, self.key(),
            self.dice.random() < 0.1,
        )  # fmt: skip
        self.say(command, frames=[self.content()])

    def offer(self) -> None:
        number, pattern = (
            OFFER + self.dice.randrange(2),
            self.dice.choice([["all"], ["topic", "a.#"]]),
        )
        credit = self.dice.choice([1, 3, 1_000])
        lease_ms = self.dice.choice([0, 20])
        self.say(wire.Offer(number, self.service(), pattern, credit, MANY, lease_ms))

    def work(self, link: int) -> tuple[int, list[int]] | None:
        for number, tasks in self.shell.peers[link].work.items():
            if tasks:
                some = tasks[: self.dice.randint(1, 3)]
                del tasks[: len(some)]
                return number, sorted({task.number for task in some})
        return None

    def reply(self) -> None:
        link = self.one()
        found = self.work(link)
        if found is not None:
            number, requests = found
            last = self.dice.random() < 0.8
            content = encode([b"y"] * len(requests), subject="reply")
            command = wire.Reply(number, requests, self.tracker(), last, key=self.key())
            self.say(command, frames=[content], link=link)

    def ack_work(self) -> None:
        link = self.one()
        found = self.work(link)
        if found is not None:
            number, requests = found
            ranges = [(one, one + 1) for one in requests]
            state = self.dice.choice(WORK_STATES)
            again_ms = self.dice.choice([0, 0, 20])
            self.say(
                wire.AckWork(number, ranges, state, self.tracker(), 0, again_ms, "why"), link=link
            )

    # --- streams, cursors, groups -----------------------------------------------------------

    def publish(self) -> None:
        stream = self.dice.choice(STREAMS)
        for _ in range(self.dice.choice([1, 1, 5])):
            self.say(wire.Publish(stream, self.tracker()), frames=[self.content()])

    def subscribe(self) -> None:
        number = READER + self.dice.randrange(3)
        start = self.dice.choice([[0], [1], [1]])
        pattern = self.dice.choice([["all"], ["topic", "a.*"], ["topic", "d"]])
        self.say(
            wire.Subscribe(
                number, self.dice.choice(STREAMS), pattern, start,
                self.dice.choice([2, 100, MANY]), MANY, self.dice.choice([0, 1]),
            )
        )  # fmt: skip

    def join(self) -> None:
        number = MEMBER + self.dice.randrange(3)
        kind = self.dice.choice(["shared", "keyed", "exclusive"])
        self.say(
            wire.JoinGroup(
                number, self.dice.choice(STREAMS), kind, ["all"], kind, [0],
                self.dice.choice([3, MANY]), MANY,
            )
        )  # fmt: skip

    def ack_records(self) -> None:
        link = self.one()
        peer = self.shell.peers[link]
        for number in sorted(peer.members):
            held = peer.received.get(number)
            if held:
                offset = held.pop(0)[0]
                again_ms = self.dice.choice([-1, -1, -1, 0, 20])
                tracker = self.dice.choice([0, self.tracker()])
                ranges = [(offset, offset + 1)]
                self.say(wire.AckRecords(number, ranges, tracker, 0, again_ms), link=link)

    def move(self) -> None:
        stream, cursor = self.dice.choice(STREAMS), self.dice.choice(["one", "two"])
        next = self.dice.randrange(60)
        self.say(wire.MoveCursor(stream, cursor, next, self.tracker(), force=True))

    def step(self) -> None:
        parts: list[wire.Command] = []
        frames: list[bytes] = []
        for _ in range(self.dice.randint(1, 4)):
            part, framed = self.dice.choice(
                [
                    (wire.Send(self.mailbox(), 0, key=self.key()), True),
                    (wire.Publish(self.dice.choice(STREAMS), 0), True),
                    (wire.Request("s", 0, key=self.key()), True),
                    (wire.MoveCursor("orders", "step", self.dice.randrange(99), 0), False),
                ]
            )
            parts.append(part)
            frames += [self.content()] if framed else []
        atomic = wire.Atomic(self.tracker(), len(parts), key=self.key())
        self.say(atomic, *parts, frames=frames)

    # --- ends, administration, time -----------------------------------------------------------

    def unsubscribe(self) -> None:
        first = self.dice.choice([INBOX, OFFER, MEMBER, READER])
        self.say(wire.Unsubscribe(first + self.dice.randrange(3)))

    def administrate(self) -> None:
        stream, cursor = self.dice.choice(STREAMS), self.dice.choice(["one", "two"])
        group = self.dice.choice(["shared", "keyed", "exclusive"])
        box, request = self.mailbox(), self.tracker()
        choices: list[wire.Command] = [
            wire.EditMailbox(request, box, {"max_messages": 50}),
            wire.EditMailbox(request, "quick", {"memory": True}),
            wire.EditService(request, "fast", {"memory": True}),
            wire.EditService(request, "s", {"attempts_max": self.dice.randint(1, 4)}),
            wire.EditCursor(request, stream, cursor, {"pin": self.dice.random() < 0.5}),
            wire.EditStream(request, stream, {"description": str(request)}),
            wire.CreateStream(request, "fleeting", {"memory": True}),
            wire.CreateStream(request, f"own{self.dice.randrange(3)}", {"ring_bytes": 1 << 28}),
            wire.RemoveStream(request, self.dice.choice(["own0", "own1", "orders", "fleeting"])),
            wire.RemoveCursor(request, stream, cursor),
            wire.RemoveGroup(request, stream, group),
            wire.RemoveMailbox(request, box, box),
            wire.RemoveService(request, "s", "s"),
            wire.PurgeMail(request, box, box),
            wire.PeekMail(request, box),
            wire.Requeue(request, "s"),
            wire.CancelRequest(request, "s", b"%d" % self.dice.randrange(50)),
            wire.FindOffset(request, stream, [2, self.shell.now_ms - 100]),
            wire.PlanRead(request, stream, ["all"], [0]),
            wire.OpenProducer(request),
            wire.MailboxInfo(request, "*"),
            wire.ServiceInfo(request, "*"),
            wire.GroupInfo(request, stream, "*"),
            wire.Kick(request, self.dice.choice(LINKS)),
        ]
        self.say(self.dice.choice(choices))
        self.open = {link for link in self.open if not self.shell.peers[link].closed}
        self.come_all()

    def wait(self) -> None:
        self.shell.wait(self.dice.choice([1, 10, 100, 3_000]))
        for link in self.open:
            self.shell.send(link, wire.Ping(0))

    def refuse(self) -> None:
        """The disk is full for a few things to do."""
        self.shell.refuse["main"] = "full", "no room"
        for _ in range(3):
            self.do(self.dice.choice([self.send, self.request, self.reply, self.step, self.move]))
        self.shell.refuse.clear()

    def linger(self) -> None:
        """The journal answers nothing while links come and go."""
        shell = self.shell
        shell.evict()
        shell.auto_sync = shell.auto_read = shell.auto_ask = False
        for _ in range(6):
            self.do(
                self.dice.choice(
                    [self.subscribe, self.join, self.leave, self.administrate, self.ack_mail]
                )
            )
        shell.auto_sync = shell.auto_read = shell.auto_ask = True
        shell.run()

    def block(self) -> None:
        """A link takes nothing for a while, and may end so."""
        link = self.one()
        self.shell.broker.blocked(link)
        for _ in range(4):
            self.do(self.dice.choice([self.publish, self.send, self.request, self.leave]))
        self.shell.broker.writable(link)
        self.shell.run()

    def do(self, what: Callable[[], None]) -> None:
        what()
        self.shell.events.clear()
        self.shell.readies.clear()
        for peer in self.shell.peers.values():
            peer.told.clear()
            peer.commands.clear()

    def run(self, times: int) -> None:
        often = [
            self.send, self.request, self.reply, self.reply, self.ack_mail, self.ack_mail,
            self.ack_work, self.publish, self.ack_records, self.ack_records, self.step,
        ]  # fmt: skip
        seldom = [
            self.inbox, self.offer, self.subscribe, self.join, self.move, self.leave, self.wait,
            self.unsubscribe, self.administrate, self.refuse, self.linger, self.block,
        ]  # fmt: skip
        for _ in range(times):
            self.do(self.dice.choice(self.dice.choice([often, often, seldom])))


def is_ours(thing: Any) -> str:
    """Return the name of the broker's class or function behind a thing; empty: it is foreign."""
    kind: Any = type(thing)
    if isinstance(thing, MethodType):
        thing, kind = thing.__func__, thing.__func__
    if isinstance(thing, FunctionType):
        kind = thing
    module = kind.__module__ or ""
    return f"{module}.{kind.__qualname__}" if module.split(".")[0] in OURS else ""


@pytest.mark.moderate
@pytest.mark.parametrize("seed", [0, *slow([1, 2])])
def test_nothing_of_the_broker_waits_for_the_collector(seed: int) -> None:
    bustle = Bustle(seed)
    bustle.run(300)
    gc.collect()
    before = gc.get_debug()
    gc.disable()
    try:
        bustle.run(2_000)
        # The collector closes a suspended generator before it counts: what hangs on it is freed.
        suspended = [
            (weakref.ref(thing), thing.__qualname__)
            for thing in gc.get_objects()
            if type(thing) is GeneratorType
        ]
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(filter(None, map(is_ours, gc.garbage)))
        found.update(name for known, name in suspended if known() is None)
    finally:
        gc.set_debug(before)
        gc.garbage.clear()
        gc.enable()
    assert not found, found.most_common()
