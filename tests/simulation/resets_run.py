"""Scenario `resets`: groups that stand elsewhere, streams made again, and settings replaced.

Owns one seed: an operator who resets groups, removes the stream under its readers, groups and
cursors and makes it again, and edits settings with `replace` and without; members and a reader that
come back with positions of what is gone; kills, and power losses that take one ring back and not
the other. The journal is the fake one of tests/broker. The rule: what the broker answered as
durable holds after each crash, and what it did not answer holds whole or not at all.
"""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.commands import WorkState
from malamute_py.broker.ready import MAIN
from tests.broker.shell import Shell
from tests.simulation.model import Violation
from tests.simulation.resets_model import Edited, GroupState, ResetsModel, StreamState
from tests.simulation.resets_seats import Position, Seat
from tests.simulation.resets_settings import CHOICES, MADE, STREAM_DEFAULTS
from tests.simulation.trace import Trace
from tests.simulation.work_parts import ranges_of

OPERATOR, READER = 1, 5
MEMBERS = (2, 3, 4)
MEMBERSHIP = 5
MUCH = 1 << 40
LETTERS = "letters"
"""Mailbox of all dead letters."""
NAMES = ("a", "b")
"""Names that groups and cursors have; each is a group's or a cursor's."""


class ResetsRun:
    """One seed of the scenario."""

    def __init__(self, seed: int, *, steps: int = 0, trace: Trace | None = None) -> None:
        self.rng = rng = Random(seed)
        self.trace = trace if trace is not None else Trace()
        self.steps = steps or rng.choice((60, 120, 240))
        self.own = rng.random() < 0.5
        """The stream has a ring of its own."""
        self.shell = Shell(
            default_stream=STREAM_DEFAULTS, hot_bytes=rng.choice((0, 2_000, 1 << 20)),
            group_flush_ms=rng.choice((1, 50)),
        )  # fmt: skip
        self.model = ResetsModel({kind: Edited(MADE[kind]) for kind in ("mailbox", "service")})
        self.serial = 0
        self.requests = 100
        self.unanswered: list[int] = []
        """Commands of the operator that are answered when they are durable."""
        self.coming = False
        """The stream is being made, and takes no records before that is durable."""
        self.stale: list[Position] = []
        """Positions in generations that are gone."""
        self.seats = {link: Seat() for link in MEMBERS}
        self.reader: Position | None = None
        self.reads = False
        self.reader_heard = 0
        self.firsts: dict[int, int] = {}
        """First offsets of streams as of the newest sync: the journal notes them with its changes,
        so a power loss takes back those of a removal that it takes back."""
        self._link()
        self._ask(wire.EditMailbox(self._request(), "m", {}))
        self._ask(wire.EditService(self._request(), "w", {}))
        self._make()
        self._settle()

    def _link(self) -> None:
        self.shell.hello(OPERATOR)
        self.seats = {link: Seat(seen=seat.seen) for link, seat in self.seats.items()}
        for link in (*MEMBERS, READER):
            self.shell.hello(link)
        self.reads, self.reader_heard = False, 0
        self.unanswered.clear()

    def _request(self) -> int:
        self.requests += 1
        return self.requests

    # --- the run ------------------------------------------------------------------------

    def run(self) -> None:
        """Run the seed. Raises Violation."""
        for _ in range(self.steps):
            self._step()
            self._settle()
        self._sync()
        self._settle()
        self._look()
        self._crash(power=True)
        self._settle()
        self._look()

    def _step(self) -> None:
        draw = self.rng.random()
        if draw < 0.18:
            self._publish()
        elif draw < 0.36:
            self._join()
        elif draw < 0.54:
            self._acknowledge()
        elif draw < 0.64:
            self._reset()
        elif draw < 0.69:
            self._leave()
        elif draw < 0.74:
            self._read()
        elif draw < 0.80:
            self._move_cursor()
        elif draw < 0.86:
            self._edit()
        elif draw < 0.89:
            self._make() if self.model.now.stream is None else self._remove()
        elif draw < 0.94:
            self._sync_or_not()
        elif draw < 0.955:
            self._look()
        elif draw < 0.98:
            self._lose_acknowledged()
        else:
            self._crash(power=self.rng.random() < 0.6)

    # --- the disk -----------------------------------------------------------------------

    def _sync_or_not(self) -> None:
        if self.shell.auto_sync:
            self.shell.auto_sync = False
            self.trace.note("sync", "off")
        elif self.rng.random() < 0.5:
            self._sync_main()
        else:
            self._sync()

    def _sync(self) -> None:
        self.shell.auto_sync = True
        self.coming = False
        self.model.sync_records()
        self.shell.sync()
        self.shell.run()
        self._changes_synced()
        self.trace.note("sync", "all")
        self._answered()

    def _sync_main(self) -> None:
        """Have ring main on the disk, and not the ring of the stream."""
        shell, model = self.shell, self.model
        self.coming = False
        shell.synced_to[MAIN] = shell.ends[MAIN]
        if not self.own:
            model.sync_records()
        shell.broker.synced(MAIN, shell.ends[MAIN], shell.now_ms)
        shell.run()
        self._changes_synced()
        self.trace.note("sync", "main")
        self._answered()

    def _changes_synced(self) -> None:
        self.model.sync_changes()
        self.firsts = dict(self.shell.firsts)

    def _answered(self) -> None:
        """Judge that all that was to be durable was answered."""
        answers = {one.request for one in self.shell.peers[OPERATOR].of(wire.Result)}
        for request in self.unanswered:
            if request not in answers:
                raise Violation("stuck", f"command {request} is durable, and was not answered")
        self.unanswered.clear()
        for link, seat in self.seats.items():
            self._hear(link, seat)
            if seat.group and not seat.within:
                raise Violation("stuck", f"link {link} waits to join group {seat.group}")

    def _crash(self, *, power: bool) -> None:
        shell, model = self.shell, self.model
        if self.reads and self.reader is not None and self.reader.next:
            self._remember(self.reader)
        was = model.now.stream
        model.crash(shell.epoch, power=power)
        if power:
            shell.firsts.clear()
            shell.firsts.update(self.firsts)
        shell.auto_sync = True
        shell.restart(power_loss=power)
        self.coming = False
        self.trace.note("crash", power, len(model.log))
        if was is not model.now.stream and self.reader is not None:
            self._remember(self.reader)
        self._link()

    def _remember(self, position: Position) -> None:
        self.stale = [*self.stale[-5:], position]

    # --- the stream ---------------------------------------------------------------------

    def _make(self) -> None:
        model, request = self.model, self._request()
        settings = {"ring_bytes": 1 << 20} if self.own else {}
        given = self._some("stream")
        self.shell.send(OPERATOR, wire.CreateStream(request, "s", {**settings, **given}))
        stream = self.shell.stream("s")
        state = model.now
        generation = stream.row.generation
        if generation <= state.generation:
            raise Violation("generation", f"{generation} comes after {state.generation}")
        if stream.uuid in model.logs:
            raise Violation("generation", "a stream made again has the uuid of another")
        state.generation = generation
        state.stream = StreamState(stream.uuid, generation, Edited(MADE["stream"], given))
        model.logs[stream.uuid] = []
        self.unanswered.append(request)
        self.coming = self.own and not self.shell.auto_sync
        self.trace.note("make", generation)

    def _remove(self) -> None:
        stream = self.model.now.stream
        assert stream is not None
        if self.coming:
            return
        for seat in self.seats.values():
            if seat.group:
                seat.owed = "stream_removed"
                seat.held.clear()
        if self.reads and self.reader is not None:
            self._remember(self.reader)
        self._remember(Position(stream.uuid, self.shell.epoch, self.rng.randint(0, 5)))
        self.model.now.stream = None
        self._tell(wire.RemoveStream(self._request(), "s"))
        self.trace.note("remove", stream.generation)
        if self.reads:
            ended = self.shell.peers[READER].of(wire.Ended)
            if not ended or ended[-1].code != "stream_removed":
                raise Violation("untold", "the reader of a stream that was removed")
            self.reads = False
            self.reader_heard = len(self.shell.peers[READER].told)
        if self.rng.random() < 0.7:
            self._make()

    def _publish(self) -> None:
        if self.model.now.stream is None or self.coming:
            return
        count = self.rng.randint(1, 4)
        records = list(range(self.serial, self.serial + count))
        self.serial += count
        self.model.log.extend(records)
        if self.shell.auto_sync:
            self.model.sync_records()
        self.shell.publish(OPERATOR, "s", [b"%d" % one for one in records], tracker=0, level=2)
        self.trace.note("publish", count)

    # --- members ------------------------------------------------------------------------

    def _groups(self) -> dict[str, GroupState]:
        stream = self.model.now.stream
        return {} if stream is None else stream.groups

    def _seated(self, name: str) -> list[int]:
        return [link for link, seat in self.seats.items() if seat.group == name and seat.within]

    def _join(self) -> None:
        stream, rng, model = self.model.now.stream, self.rng, self.model
        link = rng.choice(MEMBERS)
        seat, name = self.seats[link], rng.choice(NAMES)
        if seat.group or self.coming:
            return
        if stream is None:
            peer = self.shell.send(link, self._joining(name, GroupState(0, True, Edited({})), None))
            if peer.last(wire.Refused).code != "unknown_stream":
                raise Violation("untold", "a member of a stream that was removed")
            seat.heard = len(peer.told)
            return
        if name in stream.cursors:
            return
        group = stream.groups.get(name)
        if group is None:
            given = self._some("group") | {
                "attempts_max": rng.choice((0, 2, 1_000)), "dead_letters": LETTERS,
            }  # fmt: skip
            group = GroupState(0, rng.random() < 0.5, Edited(MADE["group"], given))
            group.counted = bool(given["attempts_max"])
            stream.groups[name] = group
        seen = rng.choice([seat.seen, *self.stale]) if rng.random() < 0.6 else None
        seat.group, seat.seen = name, seen
        self.shell.send(link, self._joining(name, group, seen))
        self.trace.note("join", link, name, seen is not None)
        if model.now.stream is not stream:
            raise Violation("broken", "the stream went meanwhile")

    def _joining(self, name: str, group: GroupState, seen: Position | None) -> wire.JoinGroup:
        return wire.JoinGroup(
            MEMBERSHIP, "s", name, ["all"], "shared", [0], MUCH, 1 << 50,
            visibility=int(group.durable), create=False, settings=dict(group.settings),
            seen=None if seen is None else (seen.next, seen.epoch, seen.uuid),
        )  # fmt: skip

    def _acknowledge(self) -> None:
        rng, link = self.rng, self.rng.choice(MEMBERS)
        seat = self.seats[link]
        if not seat.within or not seat.held:
            return
        some = rng.sample(sorted(seat.held), rng.randint(1, len(seat.held)))
        released = {"state": int(WorkState.RELEASED)}
        self._end(link, some, rng.choice(({}, {}, {}, {"again_ms": 0}, released)))

    def _lose_acknowledged(self) -> None:
        """Lose records that a live member has acknowledged, while the log has that they are done.

        The member still holds older ones, so that what is done lies ahead of the group's position.
        """
        groups = self._groups()
        live = [
            link for link, seat in self.seats.items()
            if seat.within and seat.held and not groups[seat.group].durable
        ]  # fmt: skip
        if not live or self.coming:
            return
        link = self.rng.choice(live)
        self.shell.auto_sync = False
        self._publish()
        self._settle()
        self._end(link, [max(self.seats[link].held)], {})
        self._settle()
        self._sync_main()
        self._crash(power=True)
        self._publish()

    def _end(self, link: int, some: list[int], fields: dict[str, Any]) -> None:
        """Have a member acknowledge records, or give them back."""
        seat = self.seats[link]
        group = self._groups()[seat.group]
        offsets = sorted(self.model.log.index(one) for one in some)
        seat.held -= set(some)
        for one in some:
            if not fields:
                group.done.add(one)
                group.tries.pop(one, None)
            elif "again_ms" in fields:
                self.model.returned(group, one)
        peer = self.shell.peers[link]
        before = len(peer.of(wire.Refused))
        self.shell.send(
            link,
            wire.AckRecords(
                MEMBERSHIP, ranges_of(offsets), 0 if fields else self._request(),
                0 if fields else 2,
                **fields,
            ),
        )  # fmt: skip
        if len(peer.of(wire.Refused)) > before:
            raise Violation("refusal", f"{peer.last(wire.Refused)}")
        self.trace.note("acknowledge", link, len(some), *fields)

    def _leave(self) -> None:
        """Have a member leave in order, or lose its link."""
        link = self.rng.choice(MEMBERS)
        seat = self.seats[link]
        if not seat.within:
            return
        group, held = self._groups()[seat.group], seat.held
        lost = self.rng.random() < 0.5
        seat.vacate()
        if lost:
            for one in held:
                self.model.returned(group, one)
            self.shell.broker.link_lost(link, self.shell.now_ms)
            self.shell.run()
            self.shell.peers.pop(link)
            seat.heard = 0
            self.shell.hello(link)
        else:
            self.shell.send(link, wire.Unsubscribe(MEMBERSHIP))
            seat.heard = len(self.shell.peers[link].told)
        self.trace.note("leave", link, lost)

    # --- resets -------------------------------------------------------------------------

    def _reset(self) -> None:
        """Reset a group; a member may acknowledge, and another one join, in the same turn."""
        stream, rng, model = self.model.now.stream, self.rng, self.model
        if stream is None or self.coming:
            return
        name = rng.choice(NAMES)
        group = stream.groups.get(name)
        request, force = self._request(), rng.random() < 0.6
        if group is None:
            self._refused(wire.ResetGroup(request, "s", name, [0], True), "unknown_group")
            return
        tail = len(model.visible(group))
        start, next = rng.choice(
            (([0], 0), ([1], tail), ([2, at := rng.randint(0, tail)], at), ([2, tail + 1], -1))
        )
        seated = self._seated(name)
        if next >= 0 and any(seat.group == name for seat in self.seats.values()) and not seated:
            force = True  # Members that wait for the group may be in it or not.
        command = wire.ResetGroup(request, "s", name, start, force)
        if seated and not force:
            self._refused(command, "in_use")
            return
        if next < 0:
            self._refused(command, "bad_start")
            return
        shell = self.shell
        before = model.position(group)
        group.reset(next)
        late = {link: set(self.seats[link].held) for link in seated}
        for link in seated:
            self.seats[link].owed = "group_reset"
            self.seats[link].held.clear()
        shell.broker.receive(OPERATOR, "", [command], [], shell.now_ms)
        for link, held in late.items():
            if held and rng.random() < 0.5:
                # It crossed the reset on its way, and must not count.
                offset = model.log.index(min(held))
                ack = wire.AckRecords(MEMBERSHIP, [(offset, offset + 1)], 0)
                shell.broker.receive(link, "", [ack], [], shell.now_ms)
        free = [link for link, seat in self.seats.items() if not seat.group]
        if free and rng.random() < 0.5:
            link = rng.choice(free)
            self.seats[link].group, self.seats[link].seen = name, None
            shell.broker.receive(link, "", [self._joining(name, group, None)], [], shell.now_ms)
            shell.peers[link].members.add(MEMBERSHIP)
        shell.run()
        self.unanswered.append(request)
        self.trace.note("reset", name, start, before, len(seated))

    # --- cursors ------------------------------------------------------------------------

    def _move_cursor(self) -> None:
        stream, rng = self.model.now.stream, self.rng
        if stream is None or self.coming:
            return
        name = rng.choice(NAMES)
        tail = len(self.model.log)
        if name in stream.groups:
            return
        stands = stream.cursors.get(name, -1)
        next, tracker = rng.randint(0, tail), self._request()
        old = rng.choice(self.stale).uuid if self.stale and rng.random() < 0.3 else stream.uuid
        code = ""
        if old != stream.uuid or next <= stands:
            code = "conflict"
        command = wire.MoveCursor("s", name, next, tracker, 2, uuid=old)
        peer = self.shell.send(OPERATOR, command)
        refused = [one for one in peer.of(wire.Refused) if one.reference == tracker]
        told = refused[0].code if refused else ""
        if told != code:
            what = f"a move of a cursor from {stands} to {next} in {old.hex()}"
            raise Violation("generation", f"{what}: {told!r}, not {code!r}")
        if not code:
            stream.cursors[name] = next
            stream.cursor_settings.setdefault(name, Edited(MADE["cursor"]))
        self.trace.note("cursor", name, next, code)

    # --- the reader ---------------------------------------------------------------------

    def _read(self) -> None:
        """Have the reader subscribe where it stood, or where it once stood."""
        rng, model = self.rng, self.model
        if self.reads or self.coming:
            return
        at = rng.choice([self.reader, *self.stale])
        start = [0] if at is None else [2, at.next, at.epoch, at.uuid]
        peer = self.shell.subscribe(READER, 7, "s", start=start, create=False)
        if model.now.stream is None:
            if peer.last(wire.Refused).code != "unknown_stream":
                raise Violation("untold", "a reader of a stream that was removed")
            self.reader_heard = len(peer.told)
            return
        told = [one for one, _ in peer.told[self.reader_heard :]]
        rewound = None if at is None else model.rewound(at.uuid, at.epoch, at.next)
        wanted = None if at is None or rewound is None else (at.next, rewound)
        notices = [(one.from_, one.to) for one in told if isinstance(one, wire.Rewound)]
        if notices != ([] if wanted is None else [wanted]):
            raise Violation("rewound", f"a reader from {at} was told {notices}, not {wanted}")
        self.reads = True
        next = 0 if at is None else at.next if rewound is None else rewound
        self.reader = Position(model.now.stream.uuid, self.shell.epoch, next)
        self.trace.note("read", start[0], next, wanted is not None)

    def _hear_reader(self) -> None:
        peer = self.shell.peers[READER]
        told, self.reader_heard = peer.told[self.reader_heard :], len(peer.told)
        if not self.reads or self.reader is None:
            return
        uuid, epoch, next = self.reader
        log = self.model.logs[uuid]
        for command, bodies in told:
            if isinstance(command, wire.Gap):
                raise Violation("hole_called_gap", f"{command}")
            if not isinstance(command, wire.Deliver):
                continue
            shown = [int(body) for body in bodies]
            if command.from_ != next or shown != log[next : command.next]:
                raise Violation("wrong_record", f"{shown} at {command.from_}, the log is {log}")
            next = command.next
        self.reader = Position(uuid, epoch, next)
        if next != len(log):
            raise Violation("gap_called_hole", f"the reader is at {next} of {len(log)}")

    # --- settings -----------------------------------------------------------------------

    def _some(self, kind: str) -> dict[str, Any]:
        names = [name for name in MADE[kind] if name in CHOICES and self.rng.random() < 0.4]
        return {name: self.rng.choice(CHOICES[name]) for name in names}

    def _edit(self) -> None:
        rng, state, request = self.rng, self.model.now, self._request()
        replace, kind = rng.random() < 0.5, rng.choice(tuple(MADE))
        given, stream, command = self._some(kind), state.stream, wire.Command()
        name = rng.choice(NAMES)
        if kind == "mailbox":
            command = wire.EditMailbox(request, "m", given, replace)
            settings = state.edited[kind]
        elif kind == "service":
            command = wire.EditService(request, "w", given, replace)
            settings = state.edited[kind]
        elif stream is None or self.coming:
            return
        elif kind == "stream":
            command = wire.EditStream(request, "s", given, replace)
            settings = stream.settings
        elif kind == "group" and name in stream.groups:
            if replace:
                given["dead_letters"] = LETTERS
            command = wire.EditGroup(request, "s", name, given, replace)
            settings = stream.groups[name].settings
        elif kind == "cursor" and name in stream.cursors:
            command = wire.EditCursor(request, "s", name, given, replace=replace)
            settings = stream.cursor_settings[name]
        else:
            return
        if kind == "group" and stream is not None:
            self.model.bury(stream.groups[name])  # by the bound that holds until now
        settings.edit(given, replace=replace)
        if kind == "group" and stream is not None:
            group = stream.groups[name]
            group.counted = group.counted and bool(group.settings["attempts_max"])
        self._tell(command)
        self.trace.note("edit", kind, replace, *given)

    # --- looking ------------------------------------------------------------------------

    def _tell(self, command: Any) -> None:
        """Send a command of the operator that is not refused."""
        peer = self.shell.peers[OPERATOR]
        before = len(peer.of(wire.Refused))
        self.shell.send(OPERATOR, command)
        if len(peer.of(wire.Refused)) > before:
            raise Violation("refusal", f"{command}: {peer.last(wire.Refused)}")
        self.unanswered.append(command.request)

    def _refused(self, command: Any, code: str) -> None:
        answer = self.shell.send(OPERATOR, command).commands[-1]
        if not isinstance(answer, wire.Refused) or answer.code != code:
            raise Violation("refused_kept", f"{command} was answered by {answer}, not {code}")

    def _ask(self, command: Any) -> Any:
        answer = self.shell.send(OPERATOR, command).commands[-1]
        if not isinstance(answer, wire.Result):
            raise Violation("refusal", f"{command}: {answer}")
        return answer.value

    def _settle(self) -> None:
        """Judge what came, and that nothing is missing."""
        if self.shell.auto_sync:
            self.model.sync_records()
        for link, seat in self.seats.items():
            self._hear(link, seat)
        for name, group in self._groups().items():
            if not self._seated(name):
                continue
            self.model.bury(group)
            held = {one for link in self._seated(name) for one in self.seats[link].held}
            missing = [one for one in self.model.owed(group) if one not in held]
            if missing:
                raise Violation("lost", f"records {missing[:5]} never come to group {name}")
        self._hear_reader()
        if self.shell.auto_sync:
            self._changes_synced()
            self._answered()

    def _hear(self, link: int, seat: Seat) -> None:
        """Judge what came to a member."""
        peer, model = self.shell.peers[link], self.model
        told, seat.heard = peer.told[seat.heard :], len(peer.told)
        for command, bodies in told:
            if isinstance(command, wire.Subscribed):
                self._entered(link, seat, command)
            elif isinstance(command, wire.Rewound):
                if seat.rewound != (command.from_, command.to):
                    raise Violation("rewound", f"link {link}: {command}, not {seat.rewound}")
                seat.rewound = None
            elif isinstance(command, wire.Deliver) and seat.within and not seat.owed:
                stream = model.now.stream
                assert stream is not None
                for body in bodies:
                    record = int(body)
                    holder = next(
                        (other for other in self._seated(seat.group)
                         if record in self.seats[other].held), None,
                    )  # fmt: skip
                    model.delivered(seat.group, record, command.attempts, holder)
                    seat.held.add(record)
                seat.seen = Position(stream.uuid, self.shell.epoch, command.next)
            elif isinstance(command, wire.Gap):
                raise Violation("hole_called_gap", f"link {link}: {command}")
            elif isinstance(command, wire.Ended | wire.Refused):
                self._out(link, seat, command)
        if seat.owed and seat.within:
            raise Violation("untold", f"link {link}, whose group {seat.group} is {seat.owed}")
        if seat.rewound is not None:
            raise Violation("rewound", f"link {link} was not told {seat.rewound}")

    def _entered(self, link: int, seat: Seat, command: wire.Subscribed) -> None:
        stream = self.model.now.stream
        if stream is None or command.stream != stream.uuid:
            raise Violation("generation", f"link {link} is in a stream that is gone")
        group = stream.groups[seat.group]
        least = self.model.position(group)
        self.model.bury(group)
        wanted = self.model.position(group)
        if not least <= command.next <= wanted:
            raise Violation("start", f"link {link} begins at {command.next}, not {wanted}")
        seat.within = True
        if seat.seen is not None:
            to = self.model.rewound(seat.seen.uuid, seat.seen.epoch, seat.seen.next)
            seat.rewound = None if to is None else (seat.seen.next, to)

    def _out(self, link: int, seat: Seat, command: Any) -> None:
        if not seat.owed:
            if isinstance(command, wire.Refused) and command.command != 63:
                return  # An acknowledgement that crossed a reset.
            raise Violation("refusal", f"link {link}: {command}")
        if command.code != seat.owed:
            raise Violation("untold", f"link {link}: {command}, not {seat.owed}")
        seat.vacate()

    def _look(self) -> None:
        """Compare what the broker tells of the stream, its groups and cursors, and settings."""
        state, stream = self.model.now, self.model.now.stream
        told = self._ask(wire.MailboxInfo(self._request(), "m"))
        state.edited["mailbox"].check("mailbox", told["settings"])
        told = self._ask(wire.ServiceInfo(self._request(), "w"))
        state.edited["service"].check("service", told["settings"])
        if stream is None:
            self._refused(wire.StreamInfo(self._request(), "s"), "unknown_stream")
            return
        if self.coming:
            return
        told = self._ask(wire.StreamInfo(self._request(), "s"))
        if (told["uuid"], told["generation"]) != (stream.uuid, stream.generation):
            raise Violation("generation", f"{told['generation']}, not {stream.generation}")
        stream.settings.check("the stream", told["settings"])
        for name in NAMES:
            self._look_at(stream, name)

    def _look_at(self, stream: StreamState, name: str) -> None:
        group, cursor = stream.groups.get(name), stream.cursors.get(name)
        info = wire.GroupInfo(self._request(), "s", name)
        if group is None:
            self._refused(info, "unknown_group")
        else:
            told = self._ask(info)
            group.settings.check(f"group {name}", told["settings"])
            if told["next"] not in self._positions(group):
                wanted = self.model.position(group)
                raise Violation("done_before", f"group {name} is at {told['next']}, not {wanted}")
        where = wire.CursorInfo(self._request(), "s", name)
        if cursor is None:
            self._refused(where, "unknown_cursor")
        else:
            told = self._ask(where)
            stream.cursor_settings[name].check(f"cursor {name}", told["settings"])
            if told["next"] != cursor:
                raise Violation("done_before", f"cursor {name} is at {told['next']}, not {cursor}")

    def _positions(self, group: GroupState) -> tuple[int, int]:
        """Return where a group may stand: records may be dying that no member has met."""
        found, dying = self.model.position(group), deepcopy(group)
        self.model.bury(dying)
        return found, self.model.position(dying)
