"""A shell for tests: appends to lists in memory, syncs when told, reads what it has.

It keeps the contract of ready.py as the real one does, and it is a client besides: what is
sent to a link is kept decoded, and each DELIVER is taken apart as a client would.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from malamute_protocol import commands as wire
from malamute_protocol.batch import iter_batches
from malamute_protocol.commands import Command
from malamute_protocol.content import Content
from malamute_protocol.content_layout import ARROW
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError, LocalProtocolError
from malamute_protocol.framing import encode_message
from malamute_protocol.link import Link, Side
from malamute_protocol.stamp import Stamp, rows_from_bitmap
from malamute_py.broker import (
    Appended,
    AppendRefused,
    Broker,
    BrokerSettings,
    Event,
    HistoryRead,
    HistoryRun,
    IndexAnswer,
    IndexQuery,
    ReadRange,
    Ready,
    RecoveredState,
    RingFacts,
    StreamFacts,
)
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import MAIL_STREAM, MAIN, AppendBundle, BodiesFound, BodiesRead
from malamute_py.changelog.snapshots import ProducerFact
from malamute_py.journal import History, RingSettings, Run
from malamute_py.journal.layout import control_bodies
from malamute_py.matcher import matches
from malamute_py.server.journaling.queries import answer_query, copies_at
from malamute_py.server.validating import validate

KEY_QUESTIONS = frozenset({"batch", "keys", "moved_keys", "copies", "oldest_segments"})
"""Kinds of questions that a fake ring answers by the code that answers them for a real one."""
CONTAINED = frozenset({"internal_error", "batch_quarantined"})
"""Events of errors that no code foresees."""


class Held:
    """One batch in the fake journal."""

    def __init__(self, stamp: bytes, content: bytes, end_lsn: int, control_kind: int) -> None:
        self.stamp = Stamp.unpack(stamp)
        self.data = stamp + content
        self.content = Content(content)
        self.base = self.stamp.base_offset
        self.next = self.stamp.next_offset
        self.end_lsn = end_lsn
        self.control_kind = control_kind


class Letter(NamedTuple):
    """One message as an inbox got it."""

    number: int
    body: bytes
    mail: wire.Mail


class Task(NamedTuple):
    """One request as a worker got it."""

    number: int
    body: bytes
    work: wire.Work


class Peer:
    """One client's receipts: commands in order, and records of its subscriptions."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.received: dict[int, list[tuple[int, bytes]]] = {}
        """Subscription -> (offset, body) in the order of arrival."""
        self.expected: dict[int, int] = {}
        """Subscription -> `from` of its next cover."""
        self.members: set[int] = set()
        """Subscriptions that are memberships: their covers need not touch."""
        self.told: list[tuple[Command, list[bytes]]] = []
        """Each command, and the bodies that came with it."""
        self.mail: dict[int, list[Letter]] = {}
        """Inbox -> its messages in the order of arrival."""
        self.work: dict[int, list[Task]] = {}
        """Offer -> the requests that were handed to it, in the order of arrival."""
        self.closed = False
        self.tolerant = False
        """A malformed batch is counted, and the rest of its delivery lost, instead of an error."""
        self.damaged = 0
        self.link = Link(Side.CLIENT)
        """State of this link by the protocol's table of states."""

    def take(self, commands: Sequence[Command], frames: Sequence[Any]) -> None:
        place = 0
        for command in commands:
            owned = list(frames[place : place + command.content_frames])
            place += command.content_frames
            if type(command) is wire.Result:
                # The broker has encoded its value, which a real peer decodes.
                value = msgspec.msgpack.decode(cast("msgspec.Raw", command.value))
                command = wire.Result(command.request, value)
            self.commands.append(command)
            self.link.received(command)
            before = sum(map(len, self.received.values()))
            try:
                self._one(command, owned)
            except BatchError:
                self.damaged += 1
                if not self.tolerant:
                    raise
            came = sum(map(len, self.received.values())) - before
            bodies = (
                [body for _, body in self.received[command.subscription][-came:]]
                if (came > 0 and isinstance(command, wire.Deliver))
                else []
            )
            self.told.append((command, bodies))
        assert place == len(frames), "frames that no command owns"

    def _one(self, command: Command, frames: list[Any]) -> None:
        match command:
            case wire.Subscribed() if command.stream:
                self.expected[command.subscription] = command.next
                self.received[command.subscription] = []
            case wire.Deliver() if command.subscription in self.members:
                self._deliver(command, frames, ascending=False)
            case wire.Gap() | wire.Ended() if command.subscription in self.members:
                pass
            case wire.Deliver():
                assert self.expected[command.subscription] == command.from_
                self.expected[command.subscription] = command.next
                self._deliver(command, frames)
            case wire.Cover():
                assert self.expected[command.subscription] == command.from_ < command.next
                self.expected[command.subscription] = command.next
            case wire.Gap():
                assert self.expected[command.subscription] == command.from_ < command.to
                self.expected[command.subscription] = command.to
            case wire.Rewound():
                self.expected[command.subscription] = command.to
            case wire.Mail():
                self._mail(command, frames)
            case wire.Work():
                self._work(command, frames)
            case wire.Ended() if command.subscription in self.expected:
                assert self.expected.pop(command.subscription) == command.next

    def _deliver(self, command: wire.Deliver, frames: list[Any], ascending: bool = True) -> None:
        received = self.received[command.subscription]
        for batch in iter_batches([bytes(frame) for frame in frames]):
            offsets = batch.offsets
            typed = batch.content.head.body_kind == ARROW
            bodies = [b""] * len(batch) if typed else batch.bodies()
            if command.rows is not None:
                mask = rows_from_bitmap(command.rows, len(batch.content))
                offsets = offsets[mask]
                bodies = [body for body, kept in zip(bodies, mask, strict=True) if kept]
            for offset, body in zip(offsets.tolist(), bodies, strict=True):
                assert command.from_ <= offset < command.next
                assert not received or received[-1][0] < offset or not ascending
                received.append((offset, body))

    def _mail(self, command: wire.Mail, frames: list[Any]) -> None:
        self.mail.setdefault(command.subscription, []).extend(
            Letter(number, body, command) for number, body in _numbered(command.rows, frames)
        )

    def _work(self, command: wire.Work, frames: list[Any]) -> None:
        self.work.setdefault(command.subscription, []).extend(
            Task(number, body, command) for number, body in _numbered(command.rows, frames)
        )

    def of(self, kind: type[Command]) -> list[Any]:
        return [command for command in self.commands if type(command) is kind]

    def last(self, kind: type[Command]) -> Any:
        return self.of(kind)[-1]


def _numbered(rows: bytes | None, frames: list[Any]) -> list[tuple[int, bytes]]:
    """(number, body) of the rows of the one batch in these frames."""
    (batch,) = iter_batches([bytes(frame) for frame in frames])
    numbers, bodies = batch.offsets.tolist(), batch.bodies()
    if rows is not None:
        mask = rows_from_bitmap(rows, len(batch.content))
        numbers = [number for number, kept in zip(numbers, mask, strict=True) if kept]
        bodies = [body for body, kept in zip(bodies, mask, strict=True) if kept]
    return [(number, bytes(body)) for number, body in zip(numbers, bodies, strict=True)]


class HeldRing:
    """A ring of the fake journal, as far as questions about keys look at it."""

    def __init__(self, shell: Shell, name: str) -> None:
        self.held = shell.rings.get(name, [])
        self.firsts = shell.firsts
        self.size, self.segments = shell.segment_bytes, shell.segments
        self.end_lsn = shell.ends.get(name, 0)
        self.settings = RingSettings(
            segment_bytes=self.size, ring_bytes=self.size * self.segments, full="refuse"
        )

    def read_batches(self, stream: int, offsets: Sequence[int]) -> list[bytes | None]:
        first = self.firsts.get(stream, 0)
        batches = {
            offset: one.data
            for one in self.held
            if one.stamp.stream == stream
            for offset in range(max(one.base, first), one.next)
        }
        return [batches.get(offset) for offset in offsets]

    def read(self, stream: int, start: int, end: int, bytes_max: int) -> History:
        data, spans, next = b"", [], end
        for one in self.held:
            if one.stamp.stream != stream or one.next <= start:
                continue
            if len(data) >= bytes_max:
                next = one.base
                break
            spans.append((len(data), len(one.data), one.base, one.next - one.base))
            data += one.data
        return History((Run(data, tuple(spans)),) if spans else (), next)

    def _ends(self) -> dict[int, dict[int, int]]:
        ends: dict[int, dict[int, int]] = {}
        for one in self.held:
            if one.next > self.firsts.get(one.stamp.stream, 0):
                end = -(-one.end_lsn // self.size) * self.size
                ends.setdefault(end, {})[one.stamp.stream] = one.next
        return ends

    @property
    def start_lsn(self) -> int:
        return min(self._ends(), default=self.size) - self.size

    def oldest_segments(self, most: int) -> list[tuple[int, dict[int, int]]]:
        return sorted(self._ends().items())[:-1][:most]


class Shell:
    """A broker with a fake journal and fake clients, one virtual clock."""

    def __init__(
        self, *, sync: bool = True, read: bool = True, ask: bool = True, **settings: Any
    ) -> None:
        """sync, read, ask: whether the journal does it at once, or when told."""
        self.settings = BrokerSettings(**settings)
        self.now_ms = 1_000_000
        self.uuid = b"B" * 16
        self.epoch = 0
        self.auto_sync, self.auto_read, self.auto_ask = sync, read, ask
        self.rings: dict[str, list[Held]] = {}
        self.ends: dict[str, int] = {}
        self.synced_to: dict[str, int] = {}
        self.ring_settings: dict[str, dict[str, Any]] = {}
        self.unclean = False
        """Whether a restart finds that the log was not closed in order."""
        self.planted = False
        """Errors that the core contains are what the test is about."""
        self.refuse: dict[str, tuple[str, str]] = {}
        """Ring -> code and reason with which it refuses everything."""
        self.judge: Callable[[AppendBundle], tuple[str, str] | None] | None = None
        """Called with each bundle: returns why its ring refuses it, or None."""
        self.reads: list[ReadRange] = []
        self.queries: list[IndexQuery] = []
        self.bodies: list[BodiesRead] = []
        self.events: list[Event] = []
        self.trims: list[tuple[str, int, int]] = []
        self.pins: dict[tuple[str, str], tuple[int, int]] = {}
        """(ring, name) -> (stream, offset) of what is kept."""
        self.firsts: dict[int, int] = {}
        self.peers: dict[int, Peer] = {}
        self.readies: list[Ready] = []
        self.blocked: set[int] = set()
        self.kept: dict[int, list[Any]] = {}
        self.snapshots: dict[str, tuple[int, tuple[bytes, ...]]] = {}
        """Ring -> (how many batches are before it, the snapshot)."""
        self.segment_bytes, self.segments = 4096, 16
        """Segments of a ring that keeps the last record of each subject."""
        self._randoms = itertools.count(1)
        self.open()

    # --- the life of the broker -----------------------------------------------------------

    def open(self) -> None:
        self.epoch += 1
        self.broker = Broker(
            self.settings,
            uuid=self.uuid,
            epoch=self.epoch,
            state=self._recovered(),
            random=lambda count: next(self._randoms).to_bytes(count, "big"),
        )
        self.run()

    def restart(self, *, power_loss: bool = False) -> None:
        """Kill the broker and open it again; a power loss takes what was not synced."""
        for ring in list(self.rings):
            if self.ring_settings.get(ring, {}).get("memory"):
                del self.rings[ring]
                self.ends.pop(ring, None)
                self.synced_to.pop(ring, None)
            elif power_loss:
                synced = self.synced_to.get(ring, 0)
                self.rings[ring] = [held for held in self.rings[ring] if held.end_lsn <= synced]
                self.ends[ring] = synced
            else:
                self.synced_to[ring] = self.ends[ring]
        self.peers.clear()
        self.pins.clear()
        self.reads.clear()
        self.queries.clear()
        self.bodies.clear()
        self.open()

    def snapshot_now(self) -> None:
        """Take a snapshot, as at the start of a segment: a restart reads nothing before it."""
        for ring, held in self.rings.items():
            self.snapshots[ring] = (len(held), tuple(self.broker.snapshot(ring)))

    def _recovered(self) -> RecoveredState:
        facts: dict[str, RingFacts] = {}
        for ring, held in self.rings.items():
            streams: dict[int, StreamFacts] = {}
            changes: list[tuple[int, bytes]] = []
            producers: list[ProducerFact] = []
            for number in {one.stamp.stream for one in held}:
                mine = [one for one in held if one.stamp.stream == number]
                epochs: list[tuple[int, int]] = []
                for one in mine:
                    if not epochs or epochs[-1][0] != one.stamp.epoch:
                        epochs.append((one.stamp.epoch, one.base))
                kept = [one for one in mine if one.next > self.firsts.get(number, 0)]
                streams[number] = StreamFacts(
                    kept[0].base if kept else mine[-1].next,
                    mine[-1].next,
                    sum(len(one.data) for one in kept),
                    kept[0].stamp.append_time_ms if kept else 0,
                    mine[-1].stamp.append_time_ms,
                    tuple(epochs),
                )
            after, snapshot = self.snapshots.get(ring, (0, ()))
            for one in held[after:]:
                head = one.content.head
                if one.control_kind == 6:
                    changes += enumerate(control_bodies(one.data[96:]), one.base)
                elif head.producer_id and one.stamp.stream != MAIL_STREAM:
                    producers.append(
                        ProducerFact(
                            one.stamp.stream, head.producer_id, head.producer_epoch,
                            head.first_sequence, head.count, one.base, one.stamp.append_time_ms,
                            head.content_crc,
                        )
                    )  # fmt: skip
            facts[ring] = RingFacts(
                self.ends[ring], snapshot, tuple(changes), tuple(producers), streams,
                not self.unclean,
            )  # fmt: skip
        log = [
            change
            for one in self.rings.get(MAIN, [])
            if one.control_kind == 6
            for change in enumerate(control_bodies(one.data[96:]), one.base)
        ]
        return RecoveredState(facts, queue_changes=log, now_ms=self.now_ms)

    # --- doing what the core wants --------------------------------------------------------

    def run(self) -> None:
        """Until there is nothing left to do at once."""
        for _ in range(10_000):
            ready = self.broker.take_ready()
            wanted = bool(ready)
            self.readies.append(ready)
            self._do(ready)
            if self.auto_read:
                self.answer_reads()
            if self.auto_ask:
                asked = len(self.queries)
                self.answer_queries()
                # What the answers bring about is done in a further turn.
                wanted = wanted or len(self.queries) < asked
            if self.auto_read:
                self.answer_bodies()
            if self.auto_sync:
                self.sync()
            if not wanted:
                at_ms = self.broker.wake_at_ms()
                if at_ms is None or at_ms > self.now_ms:
                    return
                self.broker.tick(self.now_ms)
        raise AssertionError("the core never comes to rest")

    def _do(self, ready: Ready) -> None:
        for ring, settings in ready.rings:
            if settings.get("remove"):
                self.rings.pop(ring, None)
            else:
                self.ring_settings[ring] = settings
        refused: dict[str, tuple[str, str]] = {}
        for bundle in ready.appends:
            problem = refused.get(bundle.ring) or self.refuse.get(bundle.ring)
            if problem is None and self.judge is not None:
                problem = self.judge(bundle)
            if problem is not None:
                refused[bundle.ring] = problem
                self.broker.append_refused(AppendRefused(bundle.token, *problem))
                continue
            self.broker.appended(self._append(bundle))
        for send in ready.sends:
            encode_message(send.commands, send.frames)  # which any number must survive
            if send.link in self.blocked:
                self.kept.setdefault(send.link, []).append(send)
                self.broker.blocked(send.link)
                continue
            self.peers.setdefault(send.link, Peer()).take(send.commands, send.frames)
        for check in ready.checks:
            self.broker.checked(validate(check, self.settings.limits))
        for link in ready.closes:
            self.peers.setdefault(link, Peer()).closed = True
        self.reads += ready.reads
        self.queries += ready.queries
        self.bodies += ready.bodies
        for ring, pin, stream, offset in ready.pins:
            self.pins.pop((ring, pin), None)
            if offset is not None:
                self.pins[ring, pin] = (stream, offset)
        self.events += ready.events
        for event in ready.events:
            if event.name in CONTAINED and not self.planted:
                # The core lives on, which is no reason for a test to pass.
                raise event.facts["error"]
        for ring, stream, offset in ready.trims:
            self.trims.append((ring, stream, offset))
            self.firsts[stream] = offset
            self.broker.trimmed(ring, {stream: offset})

    def _append(self, bundle: Any) -> Appended:
        held = self.rings.setdefault(bundle.ring, [])
        stamps = []
        lsn = self.ends.get(bundle.ring, 0)
        for batch in bundle.batches:
            content = bytes(batch.content)
            # As the real one: over all streams of a ring, append time never goes back.
            time_ms = max(batch.append_time_ms, held[-1].stamp.append_time_ms if held else 0)
            end = lsn + 96 + len(content)
            stamp = Stamp(
                1, lsn, lsn, self.synced_to.get(bundle.ring, 0), self.epoch, batch.base_offset,
                time_ms, batch.stream, 0, 96 + len(content), batch.count,
                batch.control_kind, batch.content_crc,
            ).pack()  # fmt: skip
            held.append(Held(stamp, content, end, batch.control_kind))
            stamps.append(stamp)
            lsn = end
        self.ends[bundle.ring] = lsn
        return Appended(bundle.token, tuple(stamps), lsn)

    def sync(self, only: str = "") -> None:
        """Make everything appended durable, or that of one ring, and tell the core."""
        for ring, end in self.ends.items():
            if only not in ("", ring):
                continue
            if self.synced_to.get(ring, 0) < end and ring not in self.refuse:
                self.synced_to[ring] = end
                self.broker.synced(ring, end, self.now_ms)

    def answer_reads(self) -> None:
        reads, self.reads = self.reads, []
        for read in reads:
            self.broker.history(self._read(read))

    def _read(self, read: ReadRange) -> HistoryRead:
        if read.places:
            found = zip(
                read.places,
                copies_at(HeldRing(self, read.ring), read.places),  # type: ignore[arg-type]
                strict=True,
            )
            copies = [(place, copy, Stamp.unpack(copy)) for place, copy in found if copy]
            return HistoryRead(
                read.token,
                tuple(
                    HistoryRun(copy, ((0, len(copy), stamp.base_offset, stamp.count),), place)
                    for place, copy, stamp in copies
                ),
                len(read.places),
            )
        held = [one for one in self.rings.get(read.ring, []) if one.stamp.stream == read.stream]
        first = self.firsts.get(read.stream, 0)
        aged = [one.next for one in held if one.stamp.append_time_ms < read.oldest_ms]
        first = max(first, min(max(aged, default=0), read.pinned, read.end_offset))
        data = b""
        spans: list[tuple[int, int, int, int]] = []
        next = read.end_offset
        for one in held:
            if one.next <= max(read.from_offset, first) or one.base >= read.end_offset:
                continue
            if spans and len(data) >= read.bytes_max:
                next = one.base
                break
            spans.append((len(data), len(one.data), one.base, one.next - one.base))
            data += one.data
        gaps: tuple[tuple[int, int, str, str], ...] = ()
        if read.from_offset < first:
            gaps = ((read.from_offset, first, "retention", ""),)
        runs = (HistoryRun(data, tuple(spans)),) if spans else ()
        return HistoryRead(read.token, runs, next, gaps)

    def answer_bodies(self) -> None:
        wanted, self.bodies = self.bodies, []
        for read in wanted:
            found = {
                one.base: one.data
                for one in self.rings.get(MAIN, [])
                if one.stamp.stream == MAIL_STREAM and one.base in read.numbers
            }
            self.broker.bodies(BodiesFound(read.token, found))

    def answer_queries(self) -> None:
        queries, self.queries = self.queries, []
        for query in queries:
            self.broker.answered(IndexAnswer(query.token, self._answer(query)))

    def _records(self, query: IndexQuery) -> list[tuple[int, int, Any, Any]]:
        """(offset, append time, header, client time) of a stream's records."""
        found = []
        for one in self.rings.get(query.ring, []):
            if one.stamp.stream != query.stream:
                continue
            headers, codes = one.content.headers()
            times = one.content.client_times
            for row in range(one.next - one.base):
                header = headers[0 if codes is None else int(codes[row])]
                time = None if times is None else int(times[row])
                found.append((one.base + row, one.stamp.append_time_ms, header, time))
        return [record for record in found if record[0] >= self.firsts.get(query.stream, 0)]

    def _answer(self, query: IndexQuery) -> Any:
        records = self._records(query)
        asked = query.arguments
        if query.kind in ("find_time", "find_client_time"):
            column = 1 if query.kind == "find_time" else 3
            for record in records:
                time = record[column]
                if time is None:
                    continue
                if time > asked["time_ms"] or (asked["inclusive"] and time == asked["time_ms"]):
                    return record[0]
            return None
        if query.kind == "last_per_subject":
            last: dict[str, int] = {}
            for offset, _, header, _ in records:
                if asked["from"] <= offset < asked["end"] and matches(
                    asked["pattern"], header.keys, header.fields
                ):
                    last[header.subject] = offset
            return sorted(last.values())
        if query.kind in KEY_QUESTIONS:
            return self._answer_about_keys(query)
        assert query.kind == "plan"
        found = [
            one
            for one in self.rings.get(query.ring, [])
            if one.stamp.stream == query.stream
            and one.next > asked["from"]
            and one.base < asked["end"]
        ]
        splits = [
            [max(one.base, asked["from"]), min(one.next, asked["end"]), len(one.data)]
            for one in found
        ]
        return {
            "young": 0, "to": asked["end"], "splits": splits,
            "begin": min((one.base for one in found), default=asked["from"]),
            "records": len(records), "bytes": sum(split[2] for split in splits),
        }  # fmt: skip

    def _answer_about_keys(self, query: IndexQuery) -> Any:
        return answer_query(HeldRing(self, query.ring), query)  # type: ignore[arg-type]

    # --- clients --------------------------------------------------------------------------

    def send(
        self, link: int, *commands: Command, frames: Sequence[Any] = (), identity: str = ""
    ) -> Peer:
        peer = self.peers.setdefault(link, Peer())
        for command in commands:
            with contextlib.suppress(LocalProtocolError):  # some tests break the rules
                peer.link.sent(command)
            if isinstance(command, wire.JoinGroup):
                peer.members.add(command.subscription)
        if any(map(self.broker.reads_first, frames)):
            while not self.broker.read_ahead(link, commands, frames, self.now_ms):
                self.run()
        self.broker.receive(link, identity, commands, frames, self.now_ms)
        self.run()
        return peer

    def hello(self, link: int, *, session: bytes | None = None, **fields: Any) -> Peer:
        session = session if session is not None else link.to_bytes(16, "big")
        return self.send(link, wire.Hello((1, 1), session, **fields))

    def publish(
        self, link: int, stream: str, bodies: Sequence[bytes], *, tracker: int = 1,
        level: int = 0, **options: Any,
    ) -> Peer:  # fmt: skip
        options.setdefault("subject", "s")
        content = encode(bodies, **options)
        return self.send(link, wire.Publish(stream, tracker, level), frames=[content])

    def subscribe(
        self, link: int, number: int, stream: str, pattern: Any = None, start: Any = None,
        *, records: int = 1 << 40, size: int = 1 << 50, **fields: Any,
    ) -> Peer:  # fmt: skip
        return self.send(
            link,
            wire.Subscribe(
                number, stream, pattern or ["all"], start or [0], records, size, **fields
            ),
        )

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.broker.tick(self.now_ms)
        self.run()

    def stream(self, name: str) -> Stream:
        """A stream at run time."""
        found = self.broker._catalogue.get(name)
        assert found is not None
        return found

    def events_of(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def evict(self) -> None:
        """Empty the hot window, so that everything old has to be read."""
        for stream in self.broker._catalogue:
            stream.hot.clear()
        self.broker._delivery._hot.clear()
        self.broker._delivery.hot_bytes = 0


def bodies(peer: Peer, subscription: int) -> list[bytes]:
    return [body for _, body in peer.received.get(subscription, [])]


def offsets(peer: Peer, subscription: int) -> list[int]:
    return [offset for offset, _ in peer.received.get(subscription, [])]


def array(values: Sequence[int]) -> Any:
    return np.array(values, np.int64)
