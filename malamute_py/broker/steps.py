"""Steps: what happens together, from commands to one bundle of ring main.

Owns every change that was taken and has not been appended, and the contents that go with
it: mail, requests and replies, a lone change of a setting, an atomic step. The rules: what one
step holds lies in one bundle, so all of it happens or nothing; the steps of one turn share
bundles and change batches; numbers are given when a bundle is handed over; a change takes
effect when it is appended, through `apply` and nothing else; a refusal undoes what was reserved.
Source: DESIGN.md, sections 4, 7 and 9.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.errors import RequestRejected
from malamute_protocol.stamp import CHANGE, STAMP_BYTES
from malamute_py.broker.confirms import DEFAULT, NONE, STORED, SYNCED, Confirms, Waiter
from malamute_py.broker.links import Link
from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIL_STREAM,
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
)
from malamute_py.broker.shard import Shard
from malamute_py.broker.streams import EPOCH_SHIFT, RingState, Settled, Stream
from malamute_py.changelog.records import Change, encode_change
from malamute_py.changelog.tables import KeyRow

Refusal = Callable[[str, str, int], None]
"""Called with code, reason and retry time."""

BUNDLE_BYTES: Final = 1 << 20
"""A bundle takes no further step once it is so large."""
BUNDLE_STEPS: Final = 4_096
"""Nor once it has so many: a change batch has at most 65,536 records."""
CHANGE_BYTES: Final = 256
"""About what a change takes: its own bytes are known when it is encoded, at the handing over."""
CRC_AT: Final = 8
"""Where a content states its checksum."""
MEMORY_KEYS_MAX: Final = 10_000
"""Keys of batches in memory that are remembered."""


class Part(msgspec.Struct, eq=False):
    """What one command adds to a step; made by a `prepare`, which has checked it all.

    `taken` reserves what the part needs, `refused` undoes that, `appended` is its effect at run
    time, after the changes were applied.
    """

    changes: list[Change] = []
    content: Content | None = None
    """Of the mail stream, checked; or of `stream`."""
    frame: Any = None
    stream: Stream | None = None
    """A PUBLISH: what it writes to."""
    based: Callable[[int], None] | None = None
    """Called with the number of the content's first record, before the changes are encoded."""
    taken: Callable[[], None] | None = None
    appended: Callable[[int], None] | None = None
    """Called with the LSN at which the bundle ends; 0 in memory."""
    refused: Refusal | None = None
    level: int = SYNCED
    """What level 0 stands for."""
    memory: bool = False
    """Nothing of it is logged: it takes effect at once."""
    base: int = -1
    """Number (or offset) of the content's first record, once it is known."""
    stamp: bytes = b""
    """Of the content, once it is appended; empty in memory."""
    time_ms: int = 0
    """Append time that was asked for; see `stamp` for what it became."""
    also: list[Part] = []
    """Further parts that happen with it."""
    notice: bool = False
    """Its content is the broker's own: the sender's confirm does not name it."""

    @property
    def size(self) -> int:
        """About the bytes that it takes in the log."""
        changes = CHANGE_BYTES * len(self.changes)
        return changes if self.content is None else changes + content_size(self.content)


def content_size(content: Content) -> int:
    """Bytes of a batch with this content."""
    return STAMP_BYTES + content.head.content_bytes


class Step(msgspec.Struct, eq=False):
    """Parts that happen together."""

    parts: list[Part]
    size: int
    waiter: Waiter | None = None
    key: tuple[str, bytes] | None = None
    followers: list[Waiter] | None = None
    """The same step, sent again while this one was on its way."""
    first: Part | None = None
    """The first of its sender's own contents: a confirm names where that went."""


class Steps:
    """The way of changes into the journal."""

    def __init__(
        self,
        shard: Shard,
        confirms: Confirms,
        main: RingState,
        change_next: int,
        mail_next: int,
        apply: Callable[[Change, int], None],
        publish: Callable[[Part, int], None],
        unpublish: Callable[[Part], None],
    ) -> None:
        """publish: a PUBLISH part was appended, up to this LSN. unpublish: it was refused."""
        self._shard = shard
        self._confirms = confirms
        self._main = main
        self.change_next = change_next
        """The next offset of the change log."""
        self.mail_next = mail_next
        """The next number of the mail stream."""
        self._memory_next = shard.epoch << EPOCH_SHIFT
        self._apply = apply
        self._publish = publish
        self._unpublish = unpublish
        self._queue: list[Step] = []
        self._urgent: list[Step] = []
        self._handed: dict[int, list[Step]] = {}
        self._under_way: dict[tuple[str, bytes], Step] = {}
        self._memory_keys: OrderedDict[tuple[str, bytes], KeyRow] = OrderedDict()
        self.unsettled_bytes = 0
        """Queued or handed to the journal; what is appended and not visible the ring knows."""
        self.pressed = False
        """Ring main is nearly full of what no checkpoint holds yet."""

    # --- taking -------------------------------------------------------------------------

    def check(self, link: Link, size: int, *, adds: bool) -> None:
        """Whether a step of this size may be taken now. adds: it brings mail or requests.

        Raises RequestRejected: `window`, `wait`, or why ring main takes nothing more.
        """
        settings = self._shard.settings
        failed = self._main.failed
        if failed is not None:
            raise RequestRejected(*failed)
        if link.unconfirmed_bytes and link.unconfirmed_bytes + size > settings.window_bytes:
            raise RequestRejected(
                "window", f"more than {settings.window_bytes} unconfirmed bytes on this link"
            )
        if adds and self.pressed:
            raise RequestRejected(
                "wait", "the log waits for its checkpoint: only what frees it is taken",
                settings.retry_ms,
            )  # fmt: skip
        if adds and self.unsettled_bytes + size > settings.unsynced_bytes_max:
            raise RequestRejected("wait", "too much waits for the disk", settings.retry_ms)

    def known(self, key: tuple[str, bytes], waiter: Waiter | None) -> bool:
        """Whether a step of this key was taken before; if so its confirm is on its way too."""
        step = self._under_way.get(key)
        if step is not None:
            if waiter is not None:
                if step.followers is None:
                    step.followers = []
                self._hold(waiter)
                waiter.duplicate = True
                step.followers.append(waiter)
            self._shard.counters["steps_duplicate"] += 1
            return True
        memory = self._memory_keys.get(key)
        row = self._shard.queues.keys.get(key) if memory is None else memory
        if row is None:
            return False
        self._shard.counters["steps_duplicate"] += 1
        if waiter is not None:
            self._hold(waiter)
            waiter.duplicate = True
            waiter.offset, waiter.append_time_ms = row.base, row.at_ms
            waiter.epoch = self._shard.epoch
            if memory is not None:
                self._confirms.confirm(waiter, NONE)
            else:
                # Its own end LSN is not remembered: the ring's end covers it.
                self._confirms.settle_by(self._main, waiter, self._main.end_lsn)
        return True

    def under_way(self, key: tuple[str, bytes]) -> bool:
        """Whether a step of this key is queued or handed over."""
        return key in self._under_way

    def number_of(self, key: tuple[str, bytes]) -> int:
        """Number of the first message or request of the batch of a key; -1: none is known."""
        row = self._memory_keys.get(key)
        if row is None:
            row = self._shard.queues.keys.get(key)
        return -1 if row is None else row.base

    def take(
        self,
        parts: list[Part],
        waiter: Waiter | None = None,
        key: tuple[str, bytes] | None = None,
        *,
        reserved: bool = False,
    ) -> None:
        """Take a step: all its parts happen, or none. reserved: `taken` was called already."""
        parts = [one for part in parts for one in (part, *part.also)]
        first = next((one for one in parts if one.content is not None and not one.notice), None)
        if not reserved:
            for part in parts:
                if part.taken is not None:
                    part.taken()
        if waiter is not None:
            self._hold(waiter)
        if all(part.memory for part in parts):
            self._happen(parts, waiter, key)
            return
        size = sum(part.size for part in parts)
        step = Step(parts, size, waiter, key, None, first)
        if key is not None:
            self._under_way[key] = step
        self.unsettled_bytes += size
        self._queue.append(step)

    def propose(
        self,
        change: Change,
        on_appended: Callable[[int], None] | None = None,
        on_refused: Refusal | None = None,
        *,
        first: bool = False,
    ) -> None:
        """Put a lone change on its way; it takes effect when it is appended.

        first: in a bundle before all that was published in this turn.
        """
        part = Part([change], appended=on_appended, refused=on_refused)
        if not first:
            self.take([part])
            return
        self.unsettled_bytes += part.size
        self._urgent.append(Step([part], part.size))

    def memory_number(self, count: int) -> int:
        """The first of `count` numbers for what is kept in memory only; never given twice."""
        number = self._memory_next
        self._memory_next += count
        return number

    def _hold(self, waiter: Waiter) -> None:
        waiter.link.unconfirmed_bytes += waiter.size

    def _happen(
        self, parts: list[Part], waiter: Waiter | None, key: tuple[str, bytes] | None
    ) -> None:
        """A step in memory takes effect at once."""
        first = 0
        now_ms = self._shard.now_ms
        for part in parts:
            if part.content is not None:
                part.base = self.memory_number(part.content.head.count)
                part.time_ms = now_ms
                if not first:
                    first = part.base
                if part.based is not None:
                    part.based(part.base)
            if part.appended is not None:
                part.appended(0)
        if key is not None:
            keys = self._memory_keys
            keys[key] = KeyRow(first, 0, now_ms)
            if len(keys) > MEMORY_KEYS_MAX:
                keys.popitem(last=False)
        if waiter is not None:
            waiter.epoch, waiter.offset, waiter.append_time_ms = self._shard.epoch, first, now_ms
            self._confirms.confirm(waiter, NONE)

    # --- handing over -------------------------------------------------------------------

    def hand_over(self) -> tuple[list[AppendBundle], list[AppendBundle]]:
        """The bundles for ring main, to be written before and behind what was published.

        Each must be answered before the next call. To be called behind the handing over of
        what was published: a stream's offsets are given in the order of the calls.
        """
        assert not self._handed, "hand_over() before every bundle of the last one was answered"
        urgent, self._urgent = self._urgent, []
        queue, self._queue = self._queue, []
        places = self.change_next, self.mail_next
        first, places = self._bundles(urgent, places)
        last, _ = self._bundles(queue, places)
        return first, last

    def _bundles(
        self, queue: list[Step], places: tuple[int, int]
    ) -> tuple[list[AppendBundle], tuple[int, int]]:
        bundles: list[AppendBundle] = []
        change_next, mail_next = places
        at = 0
        while at < len(queue):
            steps: list[Step] = []
            size = 0
            while at < len(queue) and len(steps) < BUNDLE_STEPS:
                if steps and size + queue[at].size > BUNDLE_BYTES:
                    break
                size += queue[at].size
                steps.append(queue[at])
                at += 1
            token = self._shard.token()
            batches, change_next, mail_next = self._batches(steps, change_next, mail_next)
            self._handed[token] = steps
            bundles.append(AppendBundle(self._main.name, token, batches))
        return bundles, (change_next, mail_next)

    def _batches(
        self, steps: list[Step], change_next: int, mail_next: int
    ) -> tuple[tuple[Append, ...], int, int]:
        """The batches of one bundle: contents in order, then one batch of all their changes."""
        now_ms = self._shard.now_ms
        batches: list[Append] = []
        records: list[bytes] = []
        for step in steps:
            for part in step.parts:
                content = part.content
                part.time_ms = now_ms
                if content is not None:
                    head = content.head
                    stream = part.stream
                    if stream is None:
                        number, base, keys = MAIL_STREAM, mail_next, None
                        mail_next += head.count
                    else:
                        number, base, keys = stream.number, stream.handed, content.table
                        stream.handed = base + head.count
                        part.time_ms = max(now_ms, stream.last_time_ms)
                    part.base = base
                    if part.based is not None:
                        part.based(base)
                    batches.append(
                        Append(
                            number, base, head.count, part.time_ms, part.frame,
                            head.content_crc, keys,
                        )
                    )  # fmt: skip
                records.extend(map(encode_change, part.changes))
        if records:
            frame = encode(records, subject="change")
            crc = int.from_bytes(frame[CRC_AT : CRC_AT + 4], "little")
            batches.append(
                Append(
                    CHANGE_STREAM, change_next, len(records), now_ms, frame, crc, None, CHANGE
                )
            )  # fmt: skip
            change_next += len(records)
        return tuple(batches), change_next, mail_next

    # --- answered -----------------------------------------------------------------------

    def owns(self, token: int) -> bool:
        """Whether a bundle of this token was handed over here."""
        return token in self._handed

    def appended(self, answer: Appended) -> None:
        """The journal has a bundle: its changes apply, its parts take effect."""
        steps = self._handed.pop(answer.token)
        main = self._main
        end_lsn = main.end_lsn = answer.end_lsn
        if main.memory:
            main.visible = end_lsn
        stamps = iter(answer.stamps)
        size = 0
        later: list[Waiter] = []
        for step in steps:
            size += step.size
            for part in step.parts:
                if part.content is not None:
                    part.stamp = next(stamps)
                    if part.stream is None:
                        self.mail_next = part.base + part.content.head.count
                self.change_next += len(part.changes)
            if step.key is not None:
                self._under_way.pop(step.key, None)
            for part in step.parts:
                for change in part.changes:
                    self._apply(change, end_lsn)
                if part.stream is not None:
                    self._publish(part, end_lsn)
                if part.appended is not None:
                    part.appended(end_lsn)
            if step.waiter is not None:
                self._confirm_stored(step, later)
        self.unsettled_bytes -= size
        if main.visible >= end_lsn:
            for waiter in later:
                self._confirms.confirm(waiter, SYNCED)
        else:
            self.unsettled_bytes += size
            main.unsettled.append(Settled(end_lsn, 0, None, tuple(later), self._settled(size)))
            if later:
                main.awaited = end_lsn

    def _settled(self, size: int) -> Callable[[tuple[str, str] | None], None]:
        def settled(failure: tuple[str, str] | None) -> None:
            self.unsettled_bytes -= size

        return settled

    def _confirm_stored(self, step: Step, later: list[Waiter]) -> None:
        """Confirm who asked for no more than `stored`; the others wait for the disk."""
        first = step.first
        waiters: Iterable[Waiter] = ([step.waiter] if step.waiter is not None else []) + (
            step.followers or []
        )
        for waiter in waiters:
            waiter.epoch = self._shard.epoch
            waiter.offset = first.base if first is not None else 0
            waiter.append_time_ms = (first or step.parts[0]).time_ms
            if self._main.memory:
                self._confirms.confirm(waiter, NONE)
            elif waiter.level <= STORED:
                self._confirms.confirm(waiter, STORED)
            else:
                later.append(waiter)

    def refused(self, answer: AppendRefused) -> None:
        """The journal took nothing of a bundle: undo it, and tell everybody who waits."""
        steps = self._handed.pop(answer.token)
        self._shard.counters["appends_refused"] += 1
        for step in steps:
            self._drop(step, answer.code, answer.reason, answer.retry_ms)

    def ring_failed(self, code: str, reason: str) -> None:
        """Ring main takes nothing more: what is queued will never be appended."""
        queue, self._queue = self._urgent + self._queue, []
        self._urgent = []
        for step in queue:
            self._drop(step, code, reason, 0)

    def _drop(self, step: Step, code: str, reason: str, retry_ms: int) -> None:
        self.unsettled_bytes -= step.size
        if step.key is not None:
            self._under_way.pop(step.key, None)
        for part in step.parts:
            part.base = -1
            if part.stream is not None:
                self._unpublish(part)
            if part.refused is not None:
                part.refused(code, reason, retry_ms)
        if step.waiter is not None:
            self._confirms.refuse(step.waiter, code, reason, retry_ms)
        for waiter in step.followers or ():
            self._confirms.refuse(waiter, code, reason, retry_ms)


def waiter_of(link: Link, command: Any, number: int, size: int, default: int) -> Waiter | None:
    """Who is to be told of a step; None when no answer is wanted.

    default: the level that stands for 0. Raises RequestRejected `unsupported`: no such level.
    """
    level = command.level or default
    if level not in (NONE, STORED, SYNCED):
        raise RequestRejected("unsupported", f"this broker has no confirm level {level}")
    if not command.tracker or level == NONE:
        return None
    return Waiter(link, command.tracker, level, size, command=number)


assert DEFAULT == 0, "a level of 0 stands for the default"
