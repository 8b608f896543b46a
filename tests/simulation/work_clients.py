"""Scripted clients of mail, services, cursors, groups and steps.

Owns one kind of client that may do all of it: how it sends, reads, works and acknowledges, and how
it repeats acts whose fate it does not know. The rules: an act with a key is repeated, with equal
bytes, until it is confirmed or refused for good; one without a key is sent once; numbers that it
was given are acknowledged in any order, in part, again, late or never. Everything that comes is
compared with the model when the broker hands it to the network (`overheard`). Source: SPEC.md,
section 4.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from random import Random
from typing import Any

import msgspec

from malamute_protocol import commands as c
from malamute_protocol.commands import WorkState
from tests.simulation.acts import Act, Wish
from tests.simulation.clients import RETRYABLE, Client
from tests.simulation.model import Violation
from tests.simulation.network import Connection
from tests.simulation.readers import selects
from tests.simulation.work_model import is_durable, rows_of
from tests.simulation.work_parts import Parts, ranges_of
from tests.simulation.work_roles import ALL, Held, Roles, Sub

GIVEN_UP = frozenset(
    {
        "not_held", "conflict", "unknown_subscription", "bad_start", "unknown_cursor",
        "unknown_mailbox", "unknown_stream", "limit",
    }
)  # fmt: skip
"""Refusals that may come, and after which nothing is tried again."""
OPERATIONS = frozenset((14, 16, 44, 45, 46, 47, 48, 55, 56, 57, 58, 59, 61, 62, 65, 67, 68, 81))
"""Numbers of commands that are no acts: their reference is no tracker."""
OPENINGS = frozenset((41, 51, 63))
NOTHING_THERE = frozenset(
    {
        "unknown_request",
        "unknown_mailbox",
        "unknown_service",
        "unknown_group",
        "unknown_cursor",
        "retention",
    }
)
TRIES = 50
"""How often a step with held things is repeated in the quiet end."""

Command = tuple[c.Command, bytes | None]
"""A command, and the content that it owns."""


class Peer(Client):
    """One client."""

    world: Any

    def __init__(
        self, world: Any, name: str, *, identity: str, roles: Roles, level: int, pace_us: int
    ) -> None:
        super().__init__(world, name)
        self.identity = identity
        self.holder = identity or "~" + blake2b(self.session, digest_size=16).hexdigest()
        self.roles = roles
        self.level = level
        self.pace_us = pace_us
        self.model = world.model
        rng = self.rng
        self.subs: list[Sub] = []
        for mailbox in roles.inboxes:
            self._sub("inbox", mailbox)
        for service, pattern in roles.offers:
            self._sub("offer", service, pattern).lease_ms = rng.choice((0, 100, 300))
        for place, kind, pattern in roles.groups:
            self._sub("group", place, pattern).group = kind
        self.trackers = 0
        self.sent: dict[tuple[int, int], Act] = {}
        """Link and tracker -> act."""
        self.pending: dict[int, Act] = {}
        """Tracker on the present link -> act."""
        self.outbox: list[Act] = []
        """Acts with a key that are not confirmed, in order."""
        self.confirmed: list[bytes] = []
        """Keys of messages and requests that were confirmed."""
        self.bytes_of: dict[int, list[Command]] = {}
        """Act -> the bytes that are sent, each time equal."""
        self.given_up: dict[int, list[tuple[Sub, Held]]] = {}
        """Act -> things that were held, and are again when the act is refused."""
        self.let_go: list[tuple[Sub, Held]] = []
        self.parts = Parts(world, roles, level)
        self.burst: tuple[list[c.Command], list[bytes]] | None = None
        """Commands that gather for one message."""
        self.faith = 0.5 if rng.random() < 0.7 else 0.05
        """How often it answers what it was given, when it is its turn."""

    def _sub(self, kind: str, place: str, pattern: list[Any] = ALL) -> Sub:
        window = self.rng.choice((1, 3, 50))
        sub = Sub(len(self.subs) + 1, kind, place, pattern, window=window)
        self.subs.append(sub)
        return sub

    def box_of(self, sub: Sub) -> str:
        """Return the name of the mailbox that an inbox reads."""
        return sub.place or self.holder

    # --- the link ----------------------------------------------------------------------

    def link_up(self, welcome: c.Welcome) -> None:
        self.pending.clear()
        for sub in self.subs:
            sub.open = False
            if sub.wanted or self.world.quiet:
                self._open(sub)
        for act in list(self.outbox):
            self._send(act)
        connection = self.connection
        self.world.after(self.rng.randint(0, self.pace_us), lambda: self._turn(connection))

    def link_down(self) -> None:
        self.pending.clear()
        for sub in self.subs:
            sub.open = False
            if sub.kind != "offer" or self.rng.random() < 0.5:
                sub.held.clear()

    def _open(self, sub: Sub) -> None:
        sub.wanted = True
        sub.got, sub.credit = 0, sub.window
        size = 1 << 40
        if sub.kind == "inbox":
            self.say(c.OpenInbox(sub.number, sub.place, sub.window, size))
        elif sub.kind == "offer":
            self.say(c.Offer(sub.number, sub.place, sub.pattern, sub.window, size, sub.lease_ms))
        else:
            stream, _, group = sub.place.partition("/")
            if sub.group == "exclusive":
                self.model.joins(sub.place, self.identity, self.session)
            self.say(
                c.JoinGroup(
                    sub.number, stream, group, sub.pattern, sub.group, [0], sub.window, size,
                    self.rng.choice((0, 20, 200)), int(is_durable(sub.place)),
                    settings={"attempts_max": self.model.state.group_attempts},
                )
            )  # fmt: skip

    def _close(self, sub: Sub) -> None:
        sub.open = sub.wanted = False
        sub.held.clear()
        if self.connection is not None:
            self.model.left((self.connection.number, sub.number))
        self.say(c.Unsubscribe(sub.number))

    # --- what comes --------------------------------------------------------------------

    def handle(self, command: c.Command, frames: list[bytes]) -> None:
        if isinstance(command, c.Subscribed):
            self.subs[command.subscription - 1].open = True
        elif isinstance(command, c.Ended):
            self.subs[command.subscription - 1].open = False
        elif isinstance(command, c.Mail | c.Work | c.Deliver):
            self._given(command, frames)
        elif isinstance(command, c.Confirm):
            act = self.pending.pop(command.tracker, None)
            if act is not None and act in self.outbox:
                self.outbox.remove(act)
                self.confirmed += self._keys_of(act)
        elif isinstance(command, c.Refused):
            self._refused(command)

    def _keys_of(self, act: Act) -> list[bytes]:
        """Return the key of a message or request that was confirmed."""
        command = self.bytes_of[act.number][0][0]
        lone = not act.atomic and isinstance(command, c.Send | c.Request)
        return [act.key] if lone and (self.holder, act.key) not in self.model.used_twice else []

    def _given(self, command: Any, frames: list[bytes]) -> None:
        sub = self.subs[command.subscription - 1]
        for number, serial in rows_of(command.rows, frames):
            sub.got += 1
            # Before it is open, what comes was given to the membership that the peer has left.
            if sub.wanted and sub.open:
                sent = self.world.records.get(serial)
                sub.held[number] = Held(
                    number, serial, getattr(command, "reply_to", ""), sent.subject if sent else ""
                )

    def _refused(self, command: c.Refused) -> None:
        self.world.note("refused", self.name, command.command, command.code)
        known = command.command not in OPENINGS | OPERATIONS
        act = self.pending.pop(command.reference, None) if known else None
        if command.command in OPENINGS:
            sub = self.subs[command.reference - 1]
            connection = self.connection
            if command.code not in RETRYABLE:
                raise Violation("refusal", f"{self.name}: {sub.kind} {sub.place}: {command}")
            self.world.after(30_000, lambda: self._reopen(sub, connection))
            return
        if command.command in OPERATIONS:
            if command.code not in RETRYABLE | NOTHING_THERE:
                raise Violation("refusal", f"{self.name}: {command}")
            return
        if act is None:
            if command.code not in RETRYABLE | GIVEN_UP:
                raise Violation("refusal", f"{self.name}: {command}")
            return
        # A step may wait for room in a mailbox that only the step itself would make.
        waits_for_itself = self.world.quiet and act.tries > TRIES and any(
            wish.numbers for wish in act.wishes
        )  # fmt: skip
        if command.code in RETRYABLE and act in self.outbox and not waits_for_itself:
            connection = self.connection
            self.world.after(
                max(1, command.retry_ms) * 1000 + self.rng.randint(0, 20_000),
                lambda: self._again(act, connection),
            )
            return
        if command.code not in RETRYABLE | GIVEN_UP:
            raise Violation("refusal", f"{self.name}: {act.wishes}: {command}")
        if act in self.outbox:
            self.outbox.remove(act)
        if not self.open:
            return
        taken = self.given_up.pop(act.number, [])
        if command.code == "not_held" and len(taken) == 1:
            return
        for sub, held in taken:
            if sub.open and sub.wanted:
                sub.held.setdefault(held.number, held)
                sub.doubtful = command.code in ("not_held", "limit")

    def _again(self, act: Act, connection: Connection | None) -> None:
        if connection is self.connection and self.open and act in self.outbox:
            self._send(act)

    def _reopen(self, sub: Sub, connection: Connection | None) -> None:
        if connection is self.connection and self.open and not sub.open and sub.wanted:
            self._open(sub)

    # --- what the broker hands to the network ------------------------------------------

    def overheard(
        self, connection: Connection, commands: list[c.Command], frames: list[bytes]
    ) -> None:
        used = 0
        model, link = self.model, connection.number
        now_ms = self.world.core_ms()
        for command in commands:
            owned = frames[used : used + command.content_frames]
            used += command.content_frames
            if isinstance(command, c.Mail):
                sub = self.subs[command.subscription - 1]
                box = self.box_of(sub)
                rows = model.mail(
                    link, box, command, owned, now_ms, self.world.readers.get(box, 0) == 1
                )
            elif isinstance(command, c.Work):
                sub = self.subs[command.subscription - 1]
                rows = model.work(
                    link, self.holder, sub.place, command, owned,
                    lambda serial, sub=sub: selects(sub.pattern, self.world.records[serial]),
                )  # fmt: skip
            elif isinstance(command, c.Deliver):
                sub = self.subs[command.subscription - 1]
                if sub.group == "exclusive":
                    model.exclusive(link, sub.place, self.identity, self.session)
                rows = model.record(
                    link, sub.place, command, owned, sub.group == "keyed",
                    lambda serial, sub=sub: selects(sub.pattern, self.world.records[serial]),
                )  # fmt: skip
            elif isinstance(command, c.Confirm):
                act = self.sent.get((link, command.tracker))
                if act is not None:
                    self.world.note("confirm", self.name, act.number, command.level,
                                    command.offset, command.duplicate)  # fmt: skip
                    model.confirm(act, command, link)
                continue
            elif isinstance(command, c.Refused):
                act = self.sent.get((link, command.reference))
                if act is not None and command.command not in OPENINGS | OPERATIONS:
                    model.refused(act, command)
                continue
            else:
                if isinstance(command, c.Subscribed):
                    model.opened((link, command.subscription))
                continue
            self.world.note(type(command).__name__.lower(), self.name, sub.place, rows)

    # --- sending -----------------------------------------------------------------------

    def _act(
        self, commands: list[Command], wishes: list[Wish], *, key: bytes = b"", level: int = 0,
        atomic: bool = False, memory: bool = False,
    ) -> Act:  # fmt: skip
        if key and not atomic and isinstance(commands[0][0], c.Send | c.Request):
            commands, key = self._mistaken(commands, key)
        act = Act(
            self.world.act_number(), self.holder, wishes, key, level, atomic, memory,
            self.model.end_lsn,
        )  # fmt: skip
        self.given_up[act.number], self.let_go = self.let_go, []
        for wish in wishes:
            for serial in wish.serials:
                self.model.act_of[serial] = act
            if wish.kind == "records":
                self.model.said_done.update((wish.place, number) for number in wish.numbers)
        if key and (atomic or isinstance(commands[0][0], c.Reply | c.AckWork)):
            self.model.steps[self.holder, key] = act
        self.bytes_of[act.number] = commands
        if key:
            self.outbox.append(act)
        self.world.note("act", self.name, act.number, [
            (wish.kind, wish.place, wish.serials, wish.numbers) for wish in wishes
        ])  # fmt: skip
        self._send(act)
        if key and self.rng.random() < 0.05:
            self._send(act)
        return act

    def _mistaken(self, commands: list[Command], key: bytes) -> tuple[list[Command], bytes]:
        """Return a message under a key that another one had, as a faulty program would send it."""
        # Apart from the other choices, so that a seed is what it was before there was this.
        apart = Random(f"mistaken {key.hex()} {self.world.seed}")
        if not self.confirmed or self.world.quiet or apart.random() > self.world.mistaken:
            return commands, key
        key = apart.choice(self.confirmed)
        self.model.used_twice.add((self.holder, key))
        ((command, frame),) = commands
        return [(msgspec.structs.replace(command, key=key), frame)], key

    def _send(self, act: Act) -> None:
        connection = self.connection
        if connection is None or not self.open:
            return
        self.trackers += 1
        act.tries += 1
        self.pending[self.trackers] = act
        self.sent[connection.number, self.trackers] = act
        commands = self.bytes_of[act.number]
        frames = [frame for _, frame in commands if frame is not None]
        if act.atomic:
            head: c.Command = c.Atomic(self.trackers, len(commands), act.level, act.key)
            self._transmit([head, *(one for one, _ in commands)], frames)
            return
        ((command, _),) = commands
        self._transmit([msgspec.structs.replace(command, tracker=self.trackers)], frames)

    def say(self, command: c.Command, *frames: bytes) -> None:
        """Send one command, alone or with others of this turn."""
        if self.connection is not None:
            self._transmit([command], list(frames))

    def _transmit(self, commands: list[c.Command], frames: list[bytes]) -> None:
        assert self.connection is not None
        if self.burst is None:
            self.world.transmit(self.connection, commands, frames)
        else:
            self.burst[0].extend(commands)
            self.burst[1].extend(frames)

    def _leave(self) -> None:
        """Send the gathered commands as one message."""
        burst, self.burst = self.burst, None
        if burst is not None and burst[0] and self.connection is not None:
            self.world.transmit(self.connection, *burst)

    def _key(self, share: float = 0.8) -> bytes:
        return self.rng.randbytes(8) if self.rng.random() < share else b""

    # --- one turn ----------------------------------------------------------------------

    def _turn(self, connection: Connection | None) -> None:
        if connection is None or connection is not self.connection or not self.open:
            return
        self.world.after(
            self.rng.randint(self.pace_us // 2, self.pace_us), lambda: self._turn(connection)
        )
        if self.world.quiet:
            self._finish()
        else:
            if self.rng.random() < 0.2:
                self.burst = [], []
            for _ in range(self.rng.randint(1, 3)):
                self._something()
            self._leave()
        for sub in self.subs:
            if sub.open and sub.credit < sub.got + sub.window:
                sub.credit = sub.got + sub.window
                self.say(c.Credit(sub.number, sub.credit, 1 << 40))

    def _finish(self) -> None:
        for sub in self.subs:
            if not sub.open:
                if not sub.wanted:
                    self._open(sub)
                continue
            held = list(sub.held.values())
            for some in [[one] for one in held] if sub.doubtful else [held] if held else []:
                self._settle(sub, some, whole=True)
            if not held:
                sub.doubtful = False

    def _something(self) -> None:
        rng, roles = self.rng, self.roles
        begin: list[Callable[[], None]] = []
        if roles.budget > 0:
            for names, action in (
                (roles.sends, self._mail), (roles.requests, self._request),
                (roles.publishes, self._publish), (roles.cursors, self._move),
            ):  # fmt: skip
                if names:
                    begin.append(action)
            begin.append(self._step)
        full = [sub for sub in self.subs if sub.open and sub.held]
        draw = rng.random()
        if full and draw < self.faith:
            sub = rng.choice(full)
            held = list(sub.held.values())
            self._settle(sub, rng.sample(held, rng.randint(1, len(held))))
        elif begin and draw < 0.9:
            roles.budget -= 1
            rng.choice(begin)()
        elif self.subs and rng.random() < 0.05:
            sub = rng.choice(self.subs)
            if sub.open:
                self._close(sub)
        elif self.subs and rng.random() < 0.5:
            sub = rng.choice(self.subs)
            if not sub.open and not sub.wanted:
                self._open(sub)
        elif rng.random() < 0.03:
            self._operate()
        elif self.parts.queued and rng.random() < 0.2:
            service, key = self.parts.queued.pop(rng.randrange(len(self.parts.queued)))
            self.say(c.CancelRequest(self.request(), service, key, rng.choice((-1, 0))))

    def _operate(self) -> None:
        """Do an operator's work."""
        rng, number = self.rng, self.request()
        boxes, services, places = self.world.places()
        box = rng.choice(boxes)
        operations: list[c.Command] = [
            c.PurgeMail(number, box, box),
            c.MailboxInfo(number, rng.choice((box, "*"))),
            c.PeekMail(number, box, -1, 10, rng.choice((0, 100))),
        ]
        if services:
            service = rng.choice(services)
            operations += [c.Requeue(number, service), c.ServiceInfo(number, service)]
        if places:
            stream, _, group = rng.choice(places).partition("/")
            operations += [c.GroupInfo(number, stream, group), c.CursorInfo(number, stream)]
            if self.model.state.group_attempts:
                operations.append(c.RequeueGroup(number, stream, group))
        operation = rng.choice(operations)
        self.world.note("operation", self.name, type(operation).__name__)
        self.say(operation)

    # --- beginning something -----------------------------------------------------------

    def _mail(self) -> None:
        mailbox = self.rng.choice(self.roles.sends)
        command, wish, frame = self.parts.mail(mailbox)
        memory = mailbox.startswith("mem")
        key = self._key()
        self._act(
            [(c.Send(mailbox, 0, 0 if memory else self.level, key, *command), frame)], [wish],
            key=key, level=0 if memory else self.level, memory=memory,
        )  # fmt: skip

    def _request(self) -> None:
        service = self.rng.choice(self.roles.requests)
        key = self._key()
        command, wish, frame = self.parts.request(service, key)
        self._act([(command, frame)], [wish], key=key, level=self.level)

    def _publish(self) -> None:
        stream = self.rng.choice(self.roles.publishes)
        frame, serials = self.parts.content(stream)
        self._act(
            [(c.Publish(stream, 0, self.level), frame)], [Wish("publish", stream, serials)],
            level=self.level,
        )  # fmt: skip

    def _move(self) -> None:
        command, wish = self.parts.move()
        self._act([(command, None)], [wish], level=self.level)

    # --- ending something --------------------------------------------------------------

    def _settle(self, sub: Sub, held: list[Held], *, whole: bool = False) -> None:
        """Acknowledge, answer, give back. whole: for good."""
        if not whole and self.rng.random() < 0.2:
            if sub.kind == "offer":
                self._unfinished(sub, held)
                return
            self._give_back(sub, held)
            return
        for commands, wishes, numbers in self._ends(sub, held, whole=whole):
            self._let_go(sub, numbers)
            keyless = self.rng.random() < 0.8
            if keyless or whole:
                for (command, frame), wish in zip(commands, wishes, strict=True):
                    level: int = getattr(command, "level", 0)
                    key = b""
                    if isinstance(command, c.Reply | c.AckWork) and self.rng.random() < 0.5:
                        # Sent again on each link until it is answered, whatever holds it by then.
                        key = self.rng.randbytes(8)
                        command = msgspec.structs.replace(command, key=key)
                    self._act([(command, frame)], [wish], key=key, level=level)
            else:
                self._atomic(commands, wishes)

    def _let_go(self, sub: Sub, numbers: Iterable[int]) -> None:
        for number in numbers:
            held = sub.held.pop(number, None)
            if held is not None:
                self.let_go.append((sub, held))

    def _ends(
        self, sub: Sub, held: list[Held], *, whole: bool
    ) -> list[tuple[list[Command], list[Wish], list[int]]]:
        """Return ways to end these: each the commands, their effects, and on which."""
        numbers = sorted(one.number for one in held)
        if sub.kind == "inbox":
            memory = numbers[0] >= 1 << 40
            ack = c.AckMail(sub.number, ranges_of(numbers), 0, 0 if memory else self.level)
            wish = Wish("ack", "" if memory else sub.place, (), tuple(numbers))
            if memory:
                self._let_go(sub, numbers)
                self._act([(ack, None)], [Wish("memory", sub.place, (), tuple(numbers))],
                          memory=True)  # fmt: skip
                return []
            return [([(ack, None)], [wish], numbers)]
        if sub.kind == "group":
            records = c.AckRecords(sub.number, ranges_of(numbers), 0, self.level)
            return [([(records, None)], [Wish("records", sub.place, (), tuple(numbers))], numbers)]
        if not whole and self.rng.random() < 0.2:
            state = self.rng.choice((3, 4))
            done = c.AckWork(sub.number, ranges_of(numbers), state, 0, self.level, 0, "so")
            return [([(done, None)], [Wish("end", sub.place, (), tuple(numbers))], numbers)]
        ends = []
        for reply_to in sorted({one.reply_to for one in held}):
            mine = sorted(one.number for one in held if one.reply_to == reply_to)
            ends.append(self._reply(sub, mine, reply_to, last=True))
        return ends

    def _reply(
        self, sub: Sub, numbers: list[int], reply_to: str, *, last: bool
    ) -> tuple[list[Command], list[Wish], list[int]]:
        frame, serials = self.parts.content(reply_to, len(numbers))
        logged = not reply_to.startswith("~")
        wish = Wish("reply", sub.place, serials if logged else (), tuple(numbers), last)
        level = self.level if logged or last else 0
        command = c.Reply(sub.number, numbers, 0, last, level)
        if not logged:
            for serial in serials:
                self.model.act_of[serial] = Act(0, self.holder, [], b"", 0, False)
        return [(command, frame)], [wish], numbers

    def _unfinished(self, sub: Sub, held: list[Held]) -> None:
        """Report on requests that stay, or go back."""
        draw = self.rng.random()
        numbers = sorted(one.number for one in held)
        if draw < 0.4:
            mine = [one.number for one in held if one.reply_to == held[0].reply_to]
            commands, wishes, _ = self._reply(sub, sorted(mine), held[0].reply_to, last=False)
            memory = held[0].reply_to.startswith("~")
            self._act(commands, wishes, level=0 if memory else self.level, memory=memory)
        elif draw < 0.7:
            self.say(c.AckWork(sub.number, ranges_of(numbers), self.rng.choice((1, 2))))
        else:
            self._let_go(sub, numbers)
            state, again_ms = self.rng.choice(((5, 0), (5, 20), (6, 0)))
            back = c.AckWork(sub.number, ranges_of(numbers), state, 0, self.level, again_ms)
            self._act([(back, None)], [Wish("return", sub.place, (), tuple(numbers))],
                      level=self.level)  # fmt: skip

    def _give_back(self, sub: Sub, held: list[Held]) -> None:
        numbers = sorted(one.number for one in held)
        again_ms = self.rng.choice((0, 5, 100))
        box = self.box_of(sub)
        for number in numbers:
            if sub.kind == "group":
                self.model.free(("record", sub.place, number))
                self.model.free(("key", sub.place, sub.held[number].subject, number))
            else:
                self.model.free(("mail", box, number))
                self.model.free(("memory", number))
        self._let_go(sub, numbers)
        if sub.kind == "group" and self.model.state.group_attempts:
            self._bring_back(sub, numbers, again_ms)
            return
        kind = c.AckRecords if sub.kind == "group" else c.AckMail
        memory = sub.kind == "group" or numbers[0] >= 1 << 40
        level = 0 if memory else self.level
        back = kind(sub.number, ranges_of(numbers), 0, level, again_ms)
        self._act([(back, None)], [Wish("again", sub.place, (), tuple(numbers))], level=level,
                  memory=memory)  # fmt: skip

    def _bring_back(self, sub: Sub, numbers: list[int], again_ms: int) -> None:
        """Give records back, give them up, or release them, which leaves no trace."""
        state = self.rng.choice((0, 0, 0, WorkState.FAILED, WorkState.RELEASED))
        memory = state == WorkState.RELEASED
        level = 0 if memory else self.level
        again_ms = -1 if state else again_ms
        back = c.AckRecords(sub.number, ranges_of(numbers), 0, level, again_ms, state, "so")
        self._act([(back, None)], [Wish("back", sub.place, (), tuple(numbers))], level=level,
                  memory=memory)  # fmt: skip

    # --- steps -------------------------------------------------------------------------

    def _step(self) -> None:
        """Make a step of some of everything."""
        rng, roles = self.rng, self.roles
        commands: list[Command] = []
        wishes: list[Wish] = []
        for sub in self.subs:
            if sub.open and sub.held and rng.random() < 0.7:
                held = list(sub.held.values())
                if sub.kind == "inbox" and held[0].number >= 1 << 40:
                    continue
                some = rng.sample(held, rng.randint(1, len(held)))
                for more, wanted, numbers in self._ends(sub, some, whole=False):
                    commands += more
                    wishes += wanted
                    self._let_go(sub, numbers)
        for stream in roles.publishes:
            # A stream with a ring of its own is no part of a step.
            if stream != "own" and rng.random() < 0.5:
                frame, serials = self.parts.content(stream)
                commands.append((c.Publish(stream, 0), frame))
                wishes.append(Wish("publish", stream, serials))
        for mailbox in roles.sends:
            if rng.random() < 0.4 and not mailbox.startswith("mem"):
                (at_ms, priority), wish, frame = self.parts.mail(mailbox)
                commands.append((c.Send(mailbox, 0, 0, self._key(0.3), at_ms, priority), frame))
                wishes.append(wish)
        for service in roles.requests:
            if rng.random() < 0.3:
                command, wish, frame = self.parts.request(service, self._key(0.3))
                commands.append((command, frame))
                wishes.append(wish)
        if roles.cursors and rng.random() < 0.5:
            command, wish = self.parts.move()
            commands.append((command, None))
            wishes.append(wish)
        if commands:
            order = list(range(len(commands)))
            rng.shuffle(order)
            self._atomic([commands[i] for i in order], [wishes[i] for i in order])

    def _atomic(self, commands: list[Command], wishes: list[Wish]) -> None:
        self._act(commands, wishes, key=self._key(), level=self.level, atomic=True)

    # --- the end -----------------------------------------------------------------------

    def owes(self) -> str:
        if self.outbox:
            return f"{self.name}: the fate of {self.outbox[0]}"
        held = [sub for sub in self.subs if sub.held]
        if held:
            return f"{self.name}: the end of {list(held[0].held.values())[:3]} of {held[0].place}"
        if not self.open:
            return f"{self.name} has no link"
        return ""


class Thief(Client):
    """Takes another's identity for a moment."""

    def __init__(self, world: Any, identity: str) -> None:
        super().__init__(world, "thief")
        self.identity = identity

    def lost(self, connection: Connection) -> None:
        """Stay away once the link is lost."""
        connection.drop()
        self.connection = None
        self.open = False

    def link_up(self, welcome: c.Welcome) -> None:
        connection = self.connection
        self.world.after(self.rng.choice((10, 20_000)), lambda: self._leave(connection))

    def _leave(self, connection: Connection | None) -> None:
        if connection is not None and connection is self.connection:
            self.say(c.Bye())
