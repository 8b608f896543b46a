"""Commands without sense, alone and in steps, refused, lost and restarted: nothing is left over.

The tests compare with the log: after each run the tables are those that a replay of the log gives,
also over a checkpoint in its middle; the counts kept at run time are those of the tables; nothing
stays reserved, held without a holder, or in a window.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.mail.mailbox import STANDING, Inbox, expired
from malamute_py.broker.ready import MAIN
from malamute_py.broker.streams.recovery import recover_queues
from malamute_py.changelog import tables
from malamute_py.changelog.applying import STREAM_CHANGES, apply
from malamute_py.changelog.records import decode_change
from malamute_py.changelog.tables import Queues, Tables
from tests.broker.shell import Shell

pytestmark = pytest.mark.slow

BOXES = ("one", "two", "quick", "jobs.dead", "c1", "")
SERVICES = ("jobs", "chores")
NONE = (0, 0, 0, 1, 2, 3)


def test_commands_without_sense_leave_the_tables_of_the_log_and_nothing_else(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "KEYS_MAX", 12)
    run = Nonsense(seed)
    for _ in range(200):
        run.happen()
    run.rest()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(30))


class Nonsense:
    """One run: three links with identities, two without."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shell = Shell(
            sync=False, heartbeat_ms=1_000, expiry_beats=1_000_000, mail_hot_bytes=2_000,
            window_bytes=20_000, attempts_max=3, lease_ms=200, backoff_ms=10,
            service_requests_max=60, mailbox_messages_max=80,
        )  # fmt: skip
        self.links: list[int] = []
        self.next = 0
        self.trackers = 0
        self.checkpoint: tuple[int, Queues] | None = None
        for who in range(5):
            self.connect(who)
        self.send(self.links[0], [(wire.EditMailbox(1, "quick", {"memory": True}), None)])
        self.shell.sync()
        self.shell.run()

    def connect(self, who: int) -> None:
        self.next += 1
        link = 10 * self.next + who
        if who == len(self.links):
            self.links.append(link)
        self.links[who] = link
        self.shell.hello(link, session=bytes([who + 1]) * 16, identity=f"c{who}" if who < 3 else "")
        # Readers and workers from the beginning, so that there is something to be acknowledged.
        self.shell.send(
            link, wire.OpenInbox(1, "", 300, 90_000),
            wire.OpenInbox(2, self.draw.choice(BOXES), 300, 90_000),
            wire.Offer(4, "jobs", ["all"], 300, 90_000),
        )  # fmt: skip

    def send(self, link: int, parts: list[tuple[wire.Command, bytes | None]]) -> None:
        frames = [frame for _, frame in parts if frame is not None]
        self.shell.broker.receive(
            link, "", [command for command, _ in parts], frames, self.shell.now_ms
        )
        if self.draw.random() < 0.8:
            self.shell.run()

    # --- commands ---------------------------------------------------------------------------

    def frame(self, rows: int = 0) -> bytes:
        draw = self.draw
        rows = rows or draw.choice([1, 1, 2, 5, 70])
        options: dict[str, Any] = {}
        if draw.random() < 0.3:
            now_ms = self.shell.now_ms
            options["expires_at_ms"] = [
                draw.choice([0, now_ms, now_ms + 1, now_ms + 150, -3]) for _ in range(rows)
            ]
        if draw.random() < 0.05:
            options["producer_id"] = 1 << 32 | 1
            options["first_sequence"] = 0
        return encode([b"b" * draw.choice([0, 3, 40])] * rows, subject="s", **options)

    def key(self) -> bytes:
        return self.draw.choice([b"", b"", b"k%d" % self.draw.randrange(20)])

    def ranges(self, subscription: int, link: int) -> list[tuple[int, int]]:
        draw = self.draw
        known = self.shell.broker._links.get(link)
        inbox = None if known is None else known.receivers.get(subscription)
        if isinstance(inbox, Inbox) and inbox.held and draw.random() < 0.8:
            base, mask = draw.choice(list(inbox.held.items()))
            rows = [row for row in range(mask.bit_length()) if mask >> row & 1]
            return [
                (base + row, base + row + 1)
                for row in sorted(draw.sample(rows, draw.randint(1, len(rows))))
            ]
        peer = self.shell.peers.get(link)
        seen: list[Any] = []
        if peer is not None:
            seen = [*peer.mail.get(subscription, []), *peer.work.get(subscription, [])]
        if seen and draw.random() < 0.9:
            numbers = sorted({draw.choice(seen[-4:]).number for _ in range(draw.randint(1, 4))})
            return [(number, number + 1) for number in numbers]
        first = draw.choice([0, 1, 7, self.shell.epoch << 40, (1 << 63) - 100])
        return [(first, first + draw.choice([1, 3, 90]))]

    def command(self, link: int, *, part: bool) -> tuple[wire.Command, bytes | None]:
        draw = self.draw
        tracker = 0
        if not part and draw.random() < 0.8:
            self.trackers += 1
            tracker = self.trackers
        level = 0 if part else draw.choice([0, 0, 0, 1, 2, 3])
        now_ms = self.shell.now_ms
        kind = draw.choice("mmmaaaaarrpwwwwc" if part else "mmmmmmaaaaaaarrrrpwwwwwwcnnooxxqeiiu")
        sub = draw.choice([1, 1, 1, 2, 2, 3])
        if kind == "m":
            at_ms = draw.choice([0, 0, 0, now_ms + 120, 1 << 53])
            box = draw.choice((*BOXES, *BOXES, *BOXES, "~nobody"))
            command = wire.Send(box, tracker, level, self.key(), at_ms, draw.choice([0, 0, 9, -1]))
            return command, self.frame()
        if kind == "a":
            again_ms = draw.choice([-1, -1, -1, 0, 90, 1 << 53])
            return wire.AckMail(sub, self.ranges(sub, link), tracker, level, again_ms), None
        if kind == "r":
            to = draw.choice(["", "", "one", "two", "quick"])
            return (
                wire.Request(
                    draw.choice(SERVICES), tracker, to, draw.choice([0, 0, 50]), level, self.key()
                ),
                self.frame(draw.choice([1, 1, 3])),
            )
        if kind == "p":
            return wire.Publish(draw.choice("st"), tracker, level), self.frame()
        if kind == "w":
            sub += 3
            ranges = self.ranges(sub, link)
            if draw.random() < 0.5:
                state = draw.choice([3, 4, 5] if part else [1, 2, 3, 4, 5])
                again_ms = draw.choice([0, 70])
                return wire.AckWork(sub, ranges, state, tracker, level, again_ms, "why"), None
            numbers = [first for first, _ in ranges]
            return wire.Reply(sub, numbers, tracker, draw.random() < 0.7, level), self.frame(
                len(numbers) if draw.random() < 0.9 else 2
            )
        if kind == "c":
            return wire.MoveCursor("s", draw.choice("xy"), draw.choice([0, 1, 2]), tracker), None
        if kind == "n":
            credit = draw.choice([0, 1, 3, 200])
            return wire.OpenInbox(sub, draw.choice(BOXES), credit, credit * 300), None
        if kind == "o":
            credit = draw.choice([0, 1, 50])
            return wire.Offer(sub + 3, draw.choice(SERVICES), ["all"], credit, credit * 300), None
        if kind == "x":
            credit = draw.choice([5, 60, 900])
            return wire.Credit(draw.randint(1, 6), credit, credit * 300), None
        if kind == "q":
            name = draw.choice(BOXES)
            if draw.random() < 0.6:
                return wire.PurgeMail(1, name, name), None
            return wire.RemoveMailbox(1, name, name), None
        if kind == "e":
            settings: dict[str, Any] = draw.choice(
                [{}, {"max_messages": 3}, {"max_bytes": 900}, {"ttl_ms": 100},
                 {"memory": True}, {"level": "stored"}, {"max_messages": 0, "max_bytes": 0}]
            )  # fmt: skip
            return wire.EditMailbox(1, draw.choice(BOXES), settings), None
        if kind == "i":
            name = draw.choice(BOXES)
            return draw.choice(
                [wire.PeekMail(1, name), wire.MailboxInfo(1, "*"), wire.MailboxInfo(1, name),
                 wire.Requeue(1, "jobs", []), wire.CancelRequest(1, "jobs", b"k1")]
            ), None  # fmt: skip
        return wire.Unsubscribe(draw.randint(1, 6)), None

    # --- what happens -----------------------------------------------------------------------

    def happen(self) -> None:
        draw, shell = self.draw, self.shell
        what = draw.random()
        if shell.refuse and draw.random() < 0.3:
            shell.refuse = {}
        if what < 0.76:
            link = draw.choice(self.links)
            parts = []
            for _ in range(draw.choice([1, 1, 1, 2, 4])):
                if draw.random() < 0.25:
                    inner = [
                        self.command(link, part=True) for _ in range(draw.choice([1, 1, 2, 4]))
                    ]
                    self.trackers += 1
                    tracker = draw.choice([0, self.trackers])
                    parts += [(wire.Atomic(tracker, len(inner), 0, self.key()), None), *inner]
                else:
                    parts.append(self.command(link, part=False))
            self.send(link, parts)
        elif what < 0.84:
            shell.wait(draw.choice([1, 60, 150, 300]))
        elif what < 0.91:
            if not shell.refuse:
                shell.sync()
                shell.run()
        elif what < 0.94:
            code = draw.choice(["disk_full", "wait"])
            shell.refuse = {} if shell.refuse else {MAIN: (code, "not now")}
        elif what < 0.955:
            who = draw.randrange(5)
            shell.broker.link_lost(self.links[who], shell.now_ms)
            self.connect(who)
        elif what < 0.96:
            shell.broker.pressed(draw.random() < 0.3)
        elif what < 0.985:
            self.rest()
        else:
            shell.refuse = {}
            if draw.random() < 0.5:
                self.take_checkpoint()
            shell.restart(power_loss=draw.random() < 0.5)
            if self.checkpoint is not None and self.checkpoint[0] > self.log_length():
                self.checkpoint = None
            for who in range(5):
                self.connect(who)
            self.look()

    def rest(self) -> None:
        """Let everything come to its end, and look."""
        shell = self.shell
        shell.refuse = {}
        shell.broker.pressed(False)
        for _ in range(4):
            shell.run()
            shell.sync()
            shell.run()
            shell.wait(1)
        shell.sync()
        shell.run()
        self.look()
        for link in shell.broker._links:
            assert link.unconfirmed_bytes == 0
            assert link.queries == 0
        steps = shell.broker._steps
        assert steps.unsettled_bytes == 0
        assert not steps._under_way

    def changes(self) -> list[Any]:
        return [decode_change(body) for _, body in self.shell._recovered().queue_changes]

    def log_length(self) -> int:
        return len(self.changes())

    def take_checkpoint(self) -> None:
        """Keep the tables that the log gives up to here, as the checkpoint's process has them."""
        self.shell.sync()
        self.checkpoint = self.log_length(), recover_queues(self.shell._recovered())

    def look(self) -> None:
        replayed = recover_queues(self.shell._recovered())
        queues = self.shell.broker._shard.queues
        assert plain(queues) == plain(replayed)
        if self.checkpoint is not None:
            length, kept = self.checkpoint
            again, nothing = copy.deepcopy(kept), Tables()
            for change in self.changes()[length:]:
                if not isinstance(change, STREAM_CHANGES):
                    apply(nothing, again, change)
            assert plain(again) == plain(queues)
        boxes = self.shell.broker._mail.mailboxes
        held: dict[tuple[int, int], int] = {}
        for link in self.shell.broker._links:
            for inbox in (one for one in link.receivers.values() if isinstance(one, Inbox)):
                assert inbox.outstanding == sum(map(int.bit_count, inbox.held.values()))
                for base, mask in inbox.held.items():
                    place = inbox.mailbox.number, base
                    assert not held.get(place, 0) & mask, "held by two"
                    held[place] = held.get(place, 0) | mask
        total = 0
        for mailbox in boxes.by_number.values():
            rows = [row for (number, _), row in mailbox.rows.items() if number == mailbox.number]
            assert mailbox.state == STANDING
            assert list(mailbox.order) == sorted(row.base for row in rows)
            assert mailbox.messages == sum(row.left.bit_count() for row in rows)
            assert mailbox.bytes == sum(row.size for row in rows)
            assert (mailbox.coming, mailbox.coming_bytes, mailbox.pending) == (0, 0, 0)
            assert mailbox.held == sum(
                progress.held.bit_count() for progress in mailbox.progress.values()
            )
            assert mailbox.delayed == sum(
                progress.delayed.bit_count() for progress in mailbox.progress.values()
            )
            assert set(mailbox.progress) <= {row.base for row in rows}
            total += mailbox.messages
            for row in rows:
                progress = mailbox.progress.get(row.base)
                has = 0 if progress is None else progress.held
                assert has == held.get((mailbox.number, row.base), 0)
                assert not has & ~row.left
                if progress is not None:
                    assert not progress.held & progress.delayed
                    assert not progress.delayed & ~row.left
                free = mailbox.free(row)
                over = expired(mailbox, row, self.shell.now_ms)[0] if row.expires_at_ms else 0
                ready = (
                    mailbox.ready
                    if not row.priority
                    else (mailbox.by_priority or {}).get(row.priority, ())
                )
                assert not free & ~over or row.base in set(ready)
        assert boxes.messages == total
        assert sum(boxes.stored_bytes) == sum(m.bytes for m in boxes.by_number.values())


def plain(queues: Queues) -> dict[str, Any]:
    """The tables as something to compare: in the order of the log."""
    found = {name: getattr(queues, name) for name in queues.__struct_fields__}
    return {
        name: [(key, repr(row)) for key, row in value.items()] if hasattr(value, "items") else value
        for name, value in found.items()
    }
