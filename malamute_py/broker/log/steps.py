"""Steps: what happens together, from commands to one bundle of ring main.

Owns every change that was accepted and has not been appended, and the contents that go with it:
mail, requests and replies, a lone change of a setting, an atomic step. The rules: a step lies in
one bundle, so that all of it happens or nothing; the steps of one turn share bundles and change
batches; numbers are given when a bundle is handed over; a change takes effect when it is appended,
through `apply` and nothing else; the effects of a part do the rest, in their order, and undo their
reservations when the part is refused; an effect is given its part and never holds it; a key is
accepted once, whether it names a step or a part of one. Source: docs/design.md (The core and its
shell; Promises; Queues and the checkpoint).

A part is what one command adds to a step: changes of the tables, a content (a batch), effects. A
waiter is a client that is to be confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from malamute_protocol.commands import Command
from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.stamp import CHANGE, STAMP_BYTES
from malamute_py.broker.context import Inconsistent, Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.confirms import NONE, STORED, SYNCED, Confirms
from malamute_py.broker.log.keys import use_of
from malamute_py.broker.log.ring import EPOCH_SHIFT, RingState, Unsettled, Waiter
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIL_STREAM,
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
)
from malamute_py.changelog.applying import apply
from malamute_py.changelog.records import Change, encode_change
from malamute_py.changelog.tables import Key, KeyRow, Keys, Queues, Tables

BUNDLE_BYTES: Final = 1 << 20
"""Bytes of a bundle from which on no further step is added."""
BUNDLE_STEPS: Final = 4_096
"""Steps that a bundle has at most."""
BUNDLE_CHANGES: Final = 32_768
"""Changes from which on no step is added: a change batch has at most 65,536 records."""
STEP_CHANGES: Final = 65_536
"""Changes that a step has at most."""
STEP_CHANGE_BYTES: Final = 8 << 20
"""Bytes that the changes of a step have at most: the bound of a record."""
CHANGE_BYTES: Final = 256
"""Bytes, about, of a change: the exact count is known when it is encoded and handed over."""
CRC_AT: Final = 8
"""Position of the checksum in a content."""
MEMORY_KEYS_MAX: Final = 65_536
"""Keys of batches in memory that are kept: the fewest that SPEC.md, section 4.8, allows."""


class Effect(msgspec.Struct):
    """Work that a part of a step does at run time beside its changes, at four moments.

    An effect is given its part and never holds it: both are freed without Python's collector.
    """

    def taken(self, part: Part) -> None:
        """Reserve what the part needs."""

    def based(self, part: Part) -> None:
        """Take note of the part's base; its changes are not encoded yet."""

    def appended(self, part: Part, end_lsn: int) -> None:
        """Take effect after the changes were applied. end_lsn: end of the bundle; 0 in memory."""

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Undo what `taken` reserved."""


class Applying(Effect):
    """Applies changes of tables that are in memory only."""

    queues: Queues
    changes: list[Change]

    def appended(self, part: Part, end_lsn: int) -> None:
        """Apply the changes to the tables in memory."""
        for change in self.changes:
            apply(NO_TABLES, self.queues, change)


class Then(Effect):
    """Calls for a change: one with the LSN when it is appended, another when it is refused."""

    done: Callable[[int], None] | None = None
    failed: Callable[[str, str, int], None] | None = None

    def appended(self, part: Part, end_lsn: int) -> None:
        """Call `done`, if it is set."""
        if self.done is not None:
            self.done(end_lsn)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Call `failed` with the reason, if it is set."""
        if self.failed is not None:
            self.failed(code, reason, retry_ms)


class Counting(Effect):
    """Counts a change, for the metrics, when it is appended."""

    counters: dict[str, int]
    count: int
    names: tuple[str, ...]

    def appended(self, part: Part, end_lsn: int) -> None:
        """Add to each counter."""
        for name in self.names:
            self.counters[name] += self.count


class Part(msgspec.Struct):
    """The contribution of one command to a step. A `prepare` method checks all and makes it."""

    changes: list[Change] = []
    content: Content | None = None
    """Content of the mail stream, checked; or of `stream`."""
    frame: Any = None
    stream: Stream | None = None
    """Stream that a PUBLISH writes to; None: the content is mail."""
    effects: list[Effect] = []
    """Effects, in the order in which each moment is passed to them."""
    level: int = SYNCED
    """Level that a command without a level asks for."""
    memory: bool = False
    """Whether nothing of the part is logged, so that it takes effect at once."""
    base: int = -1
    """Number (or offset) of the content's first record, once it is known."""
    stamp: bytes = b""
    """Stamp of the content, once it is appended; empty in memory."""
    time_ms: int = 0
    """Append time that was asked for; the stamp has the time that was given."""
    also: list[Part] = []
    """Further parts that happen with this one."""
    notice: bool = False
    """Whether the content is the broker's own, so that no confirm names it."""
    key: Key | None = None
    """Key of a batch within a step, which has another key or none."""
    command: Command | None = None
    """Command that `key` names."""
    place: int = 0
    """Number of the mailbox or service that the content goes to; 0: it is a stream, or there is no
    content."""
    digest: int = 0
    """Digest of the content of a batch that has a key."""

    @property
    def size(self) -> int:
        """Bytes, about, of the part in the log."""
        changes = CHANGE_BYTES * len(self.changes)
        return changes if self.content is None else changes + content_size(self.content)

    def reserve(self) -> None:
        """Reserve what the part, and those with it, need, since an ATOMIC has just prepared it."""
        for part in (self, *self.also):
            for effect in part.effects:
                effect.taken(part)

    def undo(self, code: str, reason: str, retry_ms: int) -> None:
        """Give back what reserve() reserved, since another part of the ATOMIC was refused."""
        for part in (self, *self.also):
            for effect in part.effects:
                effect.refused(part, code, reason, retry_ms)


def changing(
    changes: list[Change],
    effects: Iterable[Effect] = (),
    *,
    memory: Queues | None,
    level: int = SYNCED,
) -> Part:
    """Return a part that changes tables. memory: those in memory, at once; None: the log's."""
    if memory is None:
        return Part(changes, effects=[*effects], level=level)
    return Part(effects=[Applying(memory, changes), *effects], level=level, memory=True)


def content_size(content: Content) -> int:
    """Return the bytes of a batch in the log, stamp and content: what room, quota, rate count."""
    return STAMP_BYTES + content.head.content_bytes


class Step(msgspec.Struct):
    """Parts that happen together."""

    parts: list[Part]
    size: int
    waiter: Waiter | None = None
    keys: dict[Key, Part | None] | None = None
    """Key of the step -> None, and key of a batch within it -> its part."""
    followers: list[tuple[Waiter, Part | None]] | None = None
    """Waiters of the same step, or of a batch of it, that came again meanwhile."""
    command: Command | None = None
    """Command that the key of the step names."""
    first: Part | None = None
    """Part with the first content of the sender; a confirm names its number."""
    digest: int = 0
    """Digest of what the key of the step names."""


class Steps:
    """The way of steps into the journal."""

    def __init__(
        self,
        shard: Shard,
        confirms: Confirms,
        main: RingState,
        change_next: int,
        mail_next: int,
        apply: Callable[[Change, int], None],
    ) -> None:
        self._shard = shard
        self._confirms = confirms
        self._main = main
        self.change_next = change_next
        """The next offset of the change log."""
        self.mail_next = mail_next
        """The next number of the mail stream."""
        self._memory_next = shard.epoch << EPOCH_SHIFT
        """The next number of a message or request in memory alone."""
        self._apply = apply
        self._queue: list[Step] = []
        self._urgent: list[tuple[Step, Callable[[], Change | None]]] = []
        """Steps of the broker's own that go before the queue, and what makes the change of each."""
        self._handed: dict[int, list[Step]] = {}
        """Token of a bundle that the journal has not answered -> the steps in it."""
        self._under_way: dict[Key, Step] = {}
        """Key -> the step that named it and that the log does not have yet."""
        self._memory_keys = Keys()
        self.unsettled_bytes = 0
        """Bytes of steps that are queued, handed to the journal, or appended and not visible."""
        self.pressed = False
        """Whether ring main is nearly full of changes that no checkpoint holds yet."""

    # --- taking -------------------------------------------------------------------------

    def check(self, link: Link, size: int, *, adds: bool, awaited: bool) -> None:
        """Raise BrokerRefused unless a step may be taken now.

        adds: whether the step brings mail, requests or records. size: bytes of its contents, with
        what the window counts for each; 0: it has none. awaited: whether it will be confirmed, so
        that the window counts it.
        Codes: `window`, `wait`, or the reason why ring main refuses every append.
        """
        settings = self._shard.settings
        self.check_ring()
        waiting = link.unconfirmed_bytes
        if awaited and size and waiting and waiting + size > link.window_bytes:
            raise BrokerRefused("window", link.overrun(settings.window_bytes))
        if adds and self.pressed:
            raise BrokerRefused(
                "wait", "the log waits for its checkpoint: only what frees it is taken"
            )
        if size and self.unsettled_bytes + size > settings.unsynced_bytes_max:
            raise BrokerRefused("wait", "too much waits for the disk")

    def check_ring(self) -> None:
        """Raise BrokerRefused when ring main refuses every append."""
        failed = self._main.failed
        if failed is not None:
            raise BrokerRefused(*failed)

    def known(self, key: Key, waiter: Waiter | None) -> bool:
        """Whether a key was accepted before: the command is a repeat, and must not happen twice.

        The waiter is confirmed then: now, or with the step while that is on its way.
        """
        step = self._under_way.get(key)
        if step is not None:
            if waiter is not None:
                if step.followers is None:
                    step.followers = []
                self._hold(waiter)
                waiter.duplicate = True
                assert step.keys is not None
                step.followers.append((waiter, step.keys[key]))
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
                # The LSN of the step is not kept: the end of the ring covers it.
                self._confirms.settle_by(self._main, waiter, self._main.end_lsn)
        return True

    def accepted_for(self, key: Key) -> tuple[Command | KeyRow | None, int]:
        """Return what a key was accepted for, and the digest of the contents.

        The command while it is on its way, then its row; None: the key is not kept. Another command
        or digest under the same key is a conflict.
        """
        step = self._under_way.get(key)
        if step is None:
            row = self.row_of(key)
            return row, 0 if row is None else row.digest
        assert step.keys is not None
        part = step.keys[key]  # None: the key is that of the step, not of a batch in it.
        return (step.command, step.digest) if part is None else (part.command, part.digest)

    def under_way(self, key: Key) -> bool:
        """Whether the batch or step of a key is queued or handed over."""
        return key in self._under_way

    def row_of(self, key: Key) -> KeyRow | None:
        """Return what is kept of a key that was accepted, in the log or memory; None: nothing."""
        row = self._memory_keys.get(key)
        return self._shard.queues.keys.get(key) if row is None else row

    def take(
        self,
        parts: list[Part],
        waiter: Waiter | None = None,
        key: Key | None = None,
        *,
        reserved: bool = False,
        command: Command | None = None,
        digest: int = 0,
    ) -> None:
        """Queue a step: all its parts happen, or none.

        A step whose parts are all in memory happens at once instead. waiter: who is confirmed;
        None: no client waits. reserved: whether the effects of the parts were called (`taken`) as
        each was prepared. command: the one that the key names. digest: of the contents that the
        key names.
        """
        # Plain loops: generators were a third of the time of this method.
        for part in parts:
            if part.also:  # Parts that belong to others become parts of the step like those.
                parts = [one for part in parts for one in (part, *part.also)]
                break
        if not reserved:
            for part in parts:
                for effect in part.effects:
                    effect.taken(part)
        if waiter is not None:
            self._hold(waiter)
        first: Part | None = None
        memory = True
        size = 0
        for part in parts:
            if first is None and part.content is not None and not part.notice:
                first = part  # A confirm names the number of this part's content.
            memory = memory and part.memory
            size += part.size
        if memory:
            try:
                self._happen(parts, waiter, key, command, digest)
            except Exception as error:
                raise Inconsistent("a step in memory took effect in part") from error
            return
        keys: dict[Key, Part | None] | None = None if key is None else {key: None}
        if reserved:  # Only an atomic step, which reserves its parts itself, has keys of parts.
            for part in parts:
                if part.key is not None:
                    keys = {} if keys is None else keys
                    keys[part.key] = part
        step = Step(parts, size, waiter, keys, command=command, first=first, digest=digest)
        if keys is not None:
            for one in keys:
                self._under_way[one] = step
        self.unsettled_bytes += size
        self._queue.append(step)

    def propose(self, change: Change, *effects: Effect) -> None:
        """Queue a lone change; it takes effect when it is appended."""
        self.take([Part([change], effects=[*effects])])

    def propose_first(self, change: Callable[[], Change | None], effect: Effect) -> None:
        """Queue a lone change for the bundle before all publishes of the next hand-over.

        For the body kind of a stream, which its first batch settles and the log has before that
        batch. change: makes it then, by what the tables have after all answers until then; it
        returns None where the change is not wanted any more.
        """
        self.unsettled_bytes += CHANGE_BYTES
        self._urgent.append((Step([Part(effects=[effect])], CHANGE_BYTES), change))

    def put(self, changes: list[Change], *effects: Effect, memory: bool) -> None:
        """Queue changes for the log. memory: apply them at once, to what is in memory only."""
        self.take([changing(changes, effects, memory=self._shard.queues if memory else None)])

    @property
    def memory_next(self) -> int:
        """The next number of a message or request in memory."""
        return self._memory_next

    def memory_number(self, count: int) -> int:
        """Give `count` successive numbers to messages or requests in memory; returns the first."""
        number = self._memory_next
        self._memory_next += count
        return number

    def _hold(self, waiter: Waiter) -> None:
        """Count a waiter's bytes in its link's window, until it is confirmed or refused."""
        waiter.link.unconfirmed_bytes += waiter.size

    def _happen(
        self,
        parts: list[Part],
        waiter: Waiter | None,
        key: Key | None,
        command: Command | None,
        digest: int,
    ) -> None:
        """Let a step in memory take effect at once; its parts have no place in a log (LSN 0).

        Only mail and requests whose mailbox or service is in memory make such a step. The
        arguments are those of `take`.
        """
        first = count = 0  # Number and count of the first content: a confirm and the key name it.
        now_ms = self._shard.now_ms
        for part in parts:
            if part.content is not None:
                part.base = self.memory_number(part.content.head.count)
                part.time_ms = now_ms
                if not first:
                    first, count = part.base, part.content.head.count
                for effect in part.effects:
                    effect.based(part)
            for effect in part.effects:
                effect.appended(part, 0)
        if key is not None:
            assert command is not None
            row = KeyRow(first, count, now_ms, use_of(command, parts[0].place), digest)
            self._memory_keys.remember(key, row, MEMORY_KEYS_MAX)
        if waiter is not None:
            waiter.epoch, waiter.offset, waiter.append_time_ms = self._shard.epoch, first, now_ms
            self._confirms.confirm(waiter, NONE)

    # --- handing over -------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether there is nothing to hand over."""
        return not self._queue and not self._urgent

    def hand_over(self) -> tuple[list[AppendBundle], list[AppendBundle]]:
        """Return the bundles for ring main: those to write before the publishes, and those after.

        Bundles of the first kind settle the body kinds of streams, which the log has before any
        batch of those streams. Each bundle must be answered before the next call. Publishes must
        have been handed over before: the offsets of a stream are given in the order of the calls.
        """
        assert not self._handed, "hand_over() before every bundle of the last one was answered"
        urgent: list[Step] = []
        for step, make_change in self._urgent:
            change = make_change()
            if change is None:
                self.unsettled_bytes -= step.size
            else:
                step.parts[0].changes = [change]
                urgent.append(step)
        self._urgent = []
        queue, self._queue = self._queue, []
        # `change_next` and `mail_next` of this object move when the journal answers; until then
        # the bundles number on from each other.
        numbers = self.change_next, self.mail_next
        before_publishes, numbers = self._bundles(urgent, numbers)
        after_publishes, _ = self._bundles(queue, numbers)
        return before_publishes, after_publishes

    def _bundles(
        self, queue: list[Step], next_numbers: tuple[int, int]
    ) -> tuple[list[AppendBundle], tuple[int, int]]:
        """Lay queued steps into bundles of bounded size; returns these and the next numbers.

        next_numbers: the next offset of the change log, and the next number of the mail stream.
        """
        bundles: list[AppendBundle] = []
        change_next, mail_next = next_numbers
        # Of the bundle at hand: its steps, their contents, and their encoded changes.
        steps: list[Step] = []
        batches: list[Append] = []
        records: list[bytes] = []
        size = 0
        for step in queue:
            contents, changes, mail_after = self._lay(step, mail_next)
            change_bytes = sum(map(len, changes))
            if change_bytes > STEP_CHANGE_BYTES or len(changes) > STEP_CHANGES:
                self._refuse_large(step, len(changes), change_bytes)
                continue
            # The bytes of changes were guessed when the step was taken; some name many rows.
            step_bytes = step.size + max(0, change_bytes - CHANGE_BYTES * len(changes))
            if steps and (
                size + step_bytes > BUNDLE_BYTES
                or len(steps) == BUNDLE_STEPS
                or len(records) + len(changes) > BUNDLE_CHANGES
            ):
                bundles.append(self._bundle(steps, batches, records, change_next))
                change_next += len(records)
                steps, batches, records, size = [], [], [], 0
            steps.append(step)
            batches += contents
            records += changes
            size += step_bytes
            mail_next = mail_after
        if steps:
            bundles.append(self._bundle(steps, batches, records, change_next))
            change_next += len(records)
        return bundles, (change_next, mail_next)

    def _bundle(
        self, steps: list[Step], batches: list[Append], records: list[bytes], change_next: int
    ) -> AppendBundle:
        """Return a bundle: the contents of steps in order, then one batch of all their changes."""
        if records:
            frame = encode(records, subject="change")
            crc = int.from_bytes(frame[CRC_AT : CRC_AT + 4], "little")  # as encode() computed it
            batches.append(
                Append(
                    CHANGE_STREAM, change_next, len(records), self._shard.now_ms, frame, crc,
                    keys=None, control_kind=CHANGE,
                )
            )  # fmt: skip
        token = self._shard.token()
        self._handed[token] = steps
        return AppendBundle(self._main.name, token, tuple(batches))

    def _lay(self, step: Step, mail_next: int) -> tuple[list[Append], list[bytes], int]:
        """Return the contents and encoded changes of a step, and the mail stream's next number.

        Each content gets its number or offset here, and the effects of its part are told it
        (`based`): some make their changes by it.
        """
        now_ms = self._shard.now_ms
        batches: list[Append] = []
        records: list[bytes] = []
        for part in step.parts:
            content = part.content
            part.time_ms = now_ms
            if content is not None:
                head = content.head
                stream = part.stream
                if stream is None:  # Mail, a request, a reply, or a staged batch.
                    number, base, table = MAIL_STREAM, mail_next, None
                    mail_next += head.count
                else:
                    number, base, table = stream.number, stream.handed, content.table
                    stream.handed = base + head.count
                    part.time_ms = max(now_ms, stream.last_time_ms)
                part.base = base
                for effect in part.effects:
                    effect.based(part)
                batches.append(
                    Append(
                        number, base, head.count, part.time_ms, part.frame,
                        head.content_crc, table,
                    )
                )  # fmt: skip
            records.extend(map(encode_change, part.changes))
        return batches, records, mail_next

    def _refuse_large(self, step: Step, count: int, size: int) -> None:
        """Refuse a step whose changes are too large together; the next step gets its numbers."""
        for part in step.parts:
            if part.stream is not None and part.content is not None:
                part.stream.handed -= part.content.head.count
        self._drop(
            step, "too_large",
            f"{count} changes of {size} bytes: at most {STEP_CHANGES} of {STEP_CHANGE_BYTES} go "
            "together", retry_ms=0,
        )  # fmt: skip

    # --- answered -----------------------------------------------------------------------

    def owns(self, token: int) -> bool:
        """Whether a bundle of this token was handed over here."""
        return token in self._handed

    def appended(self, answer: Appended) -> None:
        """Apply the changes of a bundle that the journal has, and let its parts take effect.

        Waiters are confirmed now where the bundle counts as durable at once, as that of a ring in
        memory does, and otherwise when a sync has covered it.
        """
        steps = self._handed.pop(answer.token)
        main = self._main
        end_lsn = main.end_lsn = answer.end_lsn
        if main.memory:
            main.visible = end_lsn
        # The journal stamps each content of the bundle, in the order in which they were laid.
        stamps = iter(answer.stamps)
        size = 0
        later: list[Waiter] = []  # Waiters that are confirmed when the bundle is durable.
        for step in steps:
            size += step.size
            for part in step.parts:
                if part.content is not None:
                    part.stamp = next(stamps)
                    if part.stream is None:
                        self.mail_next = part.base + part.content.head.count
                self.change_next += len(part.changes)
            for key in step.keys or ():
                self._under_way.pop(key, None)
            for part in step.parts:
                for change in part.changes:
                    self._apply(change, end_lsn)
                for effect in part.effects:
                    effect.appended(part, end_lsn)
            if step.waiter is not None or step.followers is not None:
                self._confirm_stored(step, later)
        if main.visible >= end_lsn:
            self.unsettled_bytes -= size
            for waiter in later:
                self._confirms.confirm(waiter, SYNCED)
        else:
            # Publishing counts off the bytes of an entry; those of steps the call counts off.
            settled = partial(self._settled, size)
            main.unsettled.append(Unsettled(end_lsn, bytes=0, waiters=tuple(later), call=settled))
            if later:
                main.awaited = end_lsn

    def _settled(self, size: int, failure: tuple[str, str] | None) -> None:
        """Count bytes of steps as settled: they are durable, or never will be."""
        self.unsettled_bytes -= size

    def _confirm_stored(self, step: Step, later: list[Waiter]) -> None:
        """Confirm the waiters that asked for `stored` at most; the others wait for the disk.

        later: gets those others. Senders that repeated the step, or a batch of it, while it was on
        its way (`followers`) are confirmed as well, with the number of what they named.
        """
        first = step.first
        waiters = [] if step.waiter is None else [(step.waiter, first)]
        for waiter, batch in step.followers or ():
            waiters.append((waiter, first if batch is None else batch))
        for waiter, named in waiters:
            waiter.epoch = self._shard.epoch
            waiter.offset = named.base if named is not None else 0
            waiter.append_time_ms = (named or step.parts[0]).time_ms
            if self._main.memory:
                self._confirms.confirm(waiter, NONE)
            elif waiter.level <= STORED:
                self._confirms.confirm(waiter, STORED)
            else:
                later.append(waiter)

    def refused(self, answer: AppendRefused) -> None:
        """Undo a bundle that the journal refused, and refuse the commands of all that wait."""
        steps = self._handed.pop(answer.token)
        self._shard.counters["appends_refused"] += 1
        for step in steps:
            for part in step.parts:
                if part.stream is not None:  # The offsets that it had been given are free again.
                    part.stream.handed = part.stream.next
            self._drop(step, answer.code, answer.reason, answer.retry_ms)

    def ring_failed(self, code: str, reason: str) -> None:
        """Refuse the queued steps: ring main has failed, and refuses every append from now on."""
        queue, self._queue = [step for step, _ in self._urgent] + self._queue, []
        self._urgent = []
        for step in queue:
            self._drop(step, code, reason, retry_ms=0)

    def _drop(self, step: Step, code: str, reason: str, retry_ms: int) -> None:
        """Take back what a step reserved that the log has refused, and tell its senders."""
        self.unsettled_bytes -= step.size
        for key in step.keys or ():
            self._under_way.pop(key, None)
        for part in step.parts:
            part.base = -1
            for effect in part.effects:
                effect.refused(part, code, reason, retry_ms)
        if step.waiter is not None:
            self._confirms.refuse(step.waiter, code, reason, retry_ms)
        for waiter, _ in step.followers or ():
            self._confirms.refuse(waiter, code, reason, retry_ms)


NO_TABLES: Final = Tables()
"""Tables for `apply`, where a change concerns queues only and touches none of them."""
