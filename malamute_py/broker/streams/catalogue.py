"""The catalogue: the streams and rings there are, and how they come and go.

A stream's records lie in a ring, a circle of segment files: in ring main, which holds the change
log, too, or in one of its own. Owns the streams by name and number. The rules: a stream exists once
its creation is in the log, and a stream with a ring of its own takes records only when its creation
is synced, since the two rings are synced apart; commands that need a stream that is being created
wait for it, within a bound. Source: docs/design.md (Journal; Queues and the checkpoint).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.content_layout import ARROW
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.log.ring import EPOCH_SHIFT, RingState, ring_name
from malamute_py.broker.log.steps import Effect, Steps, Then
from malamute_py.broker.log.stream import AudienceFacts, Stream
from malamute_py.broker.ready import MAIN, RingFacts, StreamFacts
from malamute_py.broker.streams.conditions import Conditions
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.streams.validation import CANNOT, Validation
from malamute_py.broker.structures.sorted_values import names_after
from malamute_py.changelog.applying import apply
from malamute_py.changelog.copies import MOVED_STREAM
from malamute_py.changelog.declared import declared, evolved, is_version
from malamute_py.changelog.records import Change, StreamCreated, StreamEdited, StreamRemoved
from malamute_py.changelog.settings import (
    FIXED_SETTINGS,
    FULL,
    StreamSettings,
    encode_settings,
    settings_of,
)
from malamute_py.changelog.tables import StreamRow, Tables

Use: TypeAlias = Callable[[Stream], None]
Refusal: TypeAlias = Callable[[str, str, int], None]
"""Called with code, reason and retry time, of a command that cannot have its stream."""
TOLD_TO: Final = ("read", "trim", "manage_streams")
"""Actions of which each gives the facts of a stream, with those of its cursors and groups."""
NAMES_AROUND: Final = 8
"""Streams before and after a name in alphabetical order among which a misspelt name is looked for:
with many streams, looking at all would take a turn of the loop."""


_TOO_MANY_WAIT: Final = "too much waits for streams to be created"


class Catalogue:
    """All streams of one core."""

    def __init__(
        self,
        shard: Shard,
        tables: Tables,
        facts: dict[str, RingFacts],
        rings: dict[str, RingState],
        steps: Steps,
        publishing: Publishing,
        conditions: Conditions,
        validation: Validation,
        audience: Callable[[], AudienceFacts],
    ) -> None:
        """rings: with ring main; the others are added. audience: makes that of each stream."""
        self._shard = shard
        self._steps = steps
        self._publishing = publishing
        self._conditions = conditions
        self._validation = validation
        self._audience = audience
        self._declaring: dict[int, StreamSettings] = {}
        """Number of a stream -> settings with another schema that are on their way into the log."""
        self.tables = tables
        self.rings = rings
        self.openings: list[tuple[str, dict[str, Any]]] = []
        """Rings that the shell is to open, with their settings, or to remove."""
        self.unseen: dict[str, dict[int, int]] = {}
        """For each ring the next offset of each stream of which damage left the ring nothing.

        The shell lets each ring go on there: a later start may know nothing of the damage.
        """
        self._numbers: dict[int, Stream] = {}
        self._names: dict[str, Stream] = {}
        self._sorted: list[str] | None = None
        """All names in order; None: to be sorted at the next question."""
        self._waiting: dict[str, list[tuple[Use, Refusal]]] = {}
        """Name of a stream that is being created -> what is to be done with it, or in its place."""
        self._waiting_count = 0
        """Calls in all these lists."""
        self._next_number = tables.next_number
        self.bounded: set[Stream] = set()
        """Streams with a bound of bytes, age or records of their own."""
        self._sizes: dict[int, tuple[str, int]] = {}
        """Number of a stream -> its creator, and the bytes that its settings count for."""
        for row in tables.streams.values():
            self._enter(row, facts)
            self._count(row.by, row.settings, sign=1)
            self._recount_settings(row.number)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._names.values())

    def get(self, name: str) -> Stream | None:
        """Return the stream of this name; None: there is none, or none yet."""
        return self._names.get(name)

    def find(self, owner: str, name: str, action: str, doing: str = "") -> Stream:
        """Return a stream, for a command of an identity that may do this action with it.

        owner: the identity. doing: the action in words, with what it is done to. Raises
        BrokerRefused: it may not (`forbidden`), or there is no such stream.
        """
        if not self._shard.settings.permit(owner, action, name):
            words = doing or f"{action.partition('_')[0]} stream"  # manage_streams: manage stream
            raise BrokerRefused("forbidden", f"you may not {words} '{name}'")
        stream = self._names.get(name)
        if stream is None:
            raise BrokerRefused("unknown_stream", f"there is no stream '{name}'")
        return stream

    def action_for_facts(self, owner: str, name: str) -> str:
        """Return an action by which an identity may be told the facts of a stream.

        The caller hands it to find(), which checks it. `read`, where the identity may do none of
        TOLD_TO: find() then refuses with "you may not read stream".
        """
        permit = self._shard.settings.permit
        return next((each for each in TOLD_TO if permit(owner, each, name)), "read")

    def may_have_facts(self, owner: str, name: str) -> bool:
        """Whether a listing tells an identity of a stream: it may read, trim or manage it."""
        permit = self._shard.settings.permit
        return any(permit(owner, each, name) for each in TOLD_TO)

    def by_number(self, number: int) -> Stream | None:
        """Return the stream of this number; None: it was removed."""
        return self._numbers.get(number)

    def numbers_in(self, ring: str) -> Collection[int]:
        """Return the numbers of the streams in a ring, for its snapshot; "": of all streams."""
        if not ring:
            return self._numbers
        state = self.rings.get(ring)
        return () if state is None else state.numbers

    def owner_of(self, ring: RingState) -> Stream | None:
        """Return the stream whose own ring it is, for the ring's facts; None: streams share it."""
        number = next(iter(ring.numbers), None)
        stream = None if number is None else self.by_number(number)
        return stream if stream is not None and stream.row.settings.ring_bytes else None

    def names_after(self, prefix: str, after: str) -> Iterable[str]:
        """Yield names in order that begin with `prefix` and come after `after`, for listings."""
        if self._sorted is None:
            self._sorted = sorted(self._names)
        return names_after(self._sorted, prefix, after)

    def absent(self, owner: str, name: str, needed: str = "") -> str:
        """Return the reason for a refusal since there is no such stream, and a hint for the caller.

        The hint is names that it may have meant, of streams that it may read, or else how the
        stream is made. owner: whose permissions hold. needed: setting that the command needs, which
        a stream made by publishing does not have.
        """
        from difflib import get_close_matches  # Here: only a refusal needs this module.

        if self._sorted is None:
            self._sorted = sorted(self._names)
        place = bisect_left(self._sorted, name)
        some = self._sorted[max(0, place - NAMES_AROUND) : place + NAMES_AROUND]
        permit = self._shard.settings.permit
        readable = [each for each in some if permit(owner, "read", each)]
        near = get_close_matches(name, readable, n=2, cutoff=0.7)
        meant = " or ".join(f"'{each}'" for each in near)
        made = (
            f"`create` with {needed} makes it"
            if needed
            else "to publish to it makes it, and `create` does"
        )
        hint = f"did you mean {meant}?" if near else made
        return f"there is no stream '{name}'; {hint}"

    def expects(self, name: str) -> bool:
        """Whether there is a stream of a name, or one is being created."""
        return name in self._names or name in self._waiting

    def with_keys(self, owner: str, name: str) -> tuple[Stream, Keys]:
        """Return a stream with its keys. Raises BrokerRefused unless there is one and has keys.

        owner: identity that asks; the refusal hints at streams that it may read.
        """
        stream = self._names.get(name)
        if stream is None and name in self._waiting:
            raise BrokerRefused("wait", f"stream '{name}' is being created")
        if stream is None:
            raise BrokerRefused("unknown_stream", self.absent(owner, name, "keep"))
        return stream, stream.needed_keys()

    # --- rings and streams at run time ---------------------------------------------------

    def _ring(self, row: StreamRow, facts: RingFacts | None) -> RingState:
        """Return the ring of a stream, and have the shell open it if it is not known yet.

        facts: what a start found in the ring; None: it is new.
        """
        settings = row.settings
        ring = self.rings.get(row.ring)
        if ring is None:
            ring = self.rings[row.ring] = RingState(row.ring, settings.memory, facts)
            self.openings.append(
                (
                    row.ring,
                    {
                        "memory": settings.memory,
                        "ring_bytes": settings.ring_bytes,
                        "full": settings.full,
                        "keep": bool(settings.keep),
                    },
                )
            )
        return ring

    def _count(self, by: str, settings: StreamSettings, sign: int) -> None:
        """Count a stream and its ring for the quotas of its creator. sign: 1; -1: no longer."""
        add = self._shard.quotas.add
        add(by, "streams", sign)
        if settings.ring_bytes:
            add(by, "rings", sign)
            add(by, _ring_quota(settings), sign * settings.ring_bytes)

    def _check_quotas(self, by: str, wanted: StreamSettings) -> None:
        """Raise BrokerRefused `limit` unless quotas leave room for a new stream and its ring.

        by: its creator, whose quotas count, beside the bounds of all rings together. wanted: its
        settings; without ring_bytes it has no ring of its own.
        """
        quotas, settings = self._shard.quotas, self._shard.settings
        quotas.check(by, "streams")
        size = wanted.ring_bytes
        if not size:
            return
        quotas.check(by, "rings")
        quotas.check_total("rings", 1, settings.rings_max, "streams.rings_max", by)
        resource = _ring_quota(wanted)
        quotas.check(by, resource, size)
        if wanted.memory:
            bound, key = settings.rings_memory_bytes_max, "streams.rings_memory_bytes_max"
        else:
            bound, key = settings.rings_bytes_max, "streams.rings_bytes_max"
        quotas.check_total(resource, size, bound, key, by)

    def _enter(self, row: StreamRow, facts: dict[str, RingFacts]) -> Stream:
        """Enter a stream that the log has, with what its ring holds of it.

        Called for each stream at a start, and for one that was created. facts: what the start found
        in all rings; empty: the stream was created just now.
        """
        ring_facts = facts.get(row.ring)
        ring = self._ring(row, ring_facts)
        found = ring_facts.streams.get(row.number) if ring_facts else None
        if found is None and ring_facts is not None and ring_facts.unseen_next:
            # Damage may have held records of the stream: no offset that it may have had is given
            # again.
            found = StreamFacts(0, ring_facts.unseen_next)
            self.unseen.setdefault(row.ring, {})[row.number] = found.next
        stream = Stream(row, ring, found, self._audience())
        if ring.memory and facts:
            # The ring was emptied by the restart. Offsets go on after all that an earlier run, of a
            # lower epoch, can have given.
            base = self._shard.epoch << EPOCH_SHIFT
            stream.first = stream.next = stream.visible_next = stream.lost_before = base
            stream.handed = stream.trim_asked = base
        ring.numbers.add(row.number)
        self._numbers[row.number] = stream
        if self._sorted is not None and row.name not in self._names:
            insort(self._sorted, row.name)
        self._names[row.name] = stream
        self._watch(stream)
        keys = stream.keys
        if keys is not None:
            copies = ring_facts.streams.get(MOVED_STREAM) if ring_facts else None
            if copies is not None:
                keys.copies_first, keys.copies_next = copies.first, copies.next
                # Even where the stream's own records are all gone, copies are still to be read.
                keys.ready = keys.ready and copies.first == copies.next
            self._conditions.enter(stream)
        return stream

    def _watch(self, stream: Stream) -> None:
        """Have retention look at a stream with bounds, and validation at one that wants it.

        Called when a stream is entered and when its settings have changed.
        """
        self._validation.watch(stream)
        settings = stream.settings
        if settings.max_bytes or settings.max_age_ms or settings.max_records:
            self.bounded.add(stream)
            stream.ledger.keep_fine(settings.max_bytes)
        else:
            self.bounded.discard(stream)

    # --- first use ---------------------------------------------------------------------------

    def use(self, name: str, by: str, then: Use, refused: Refusal) -> None:
        """Call `then` with the stream of this name, which is created at its first use.

        Called for commands such as PUBLISH that may make their stream. `then` is called at once,
        or when the creation is in the log. by: owner that a new stream counts for. refused: called
        instead where there can be no such stream, with code, reason and time to wait.
        """
        stream = self._names.get(name)
        if stream is not None:
            then(stream)
            return
        settings = self._shard.settings
        waiting = self._waiting.get(name)
        if waiting is None and not settings.auto_create:
            refused("unknown_stream", f"there is no stream '{name}'", 0)
            return
        if waiting is None and not settings.permit(by, "create", name):
            refused("forbidden", f"you may not create stream '{name}'", 0)
            return
        if self._waiting_count >= settings.waiting_commands_max:
            refused("wait", _TOO_MANY_WAIT, 0)
            return
        if waiting is None:
            try:
                default = settings.default_of("stream", name)
                wanted = settings_of(default, settings.settings_bytes_max)
                self._propose_creation(name, wanted, by)
            except BrokerRefused as error:
                refused(error.code, error.reason, 0)
                return
            waiting = self._waiting[name]
        waiting.append((then, refused))
        self._waiting_count += 1

    def create(
        self, name: str, values: dict[str, Any], by: str, then: Use, refused: Refusal
    ) -> None:
        """Create a stream with settings, for CREATE_STREAM; the same settings again succeed.

        values: settings that the caller named; the others have their defaults. by: owner that it
        counts for. then: called with the stream once it is there. refused: called instead, with
        code, reason and time to wait.
        """
        settings = self._shard.settings
        try:
            wanted = declared(
                settings_of(
                    {**settings.default_of("stream", name), **values}, settings.settings_bytes_max
                )
            )
            stream = self._names.get(name)
            if stream is not None:
                other = _other_settings(stream.settings, wanted)
                if other:
                    raise BrokerRefused(
                        "stream_exists",
                        f"stream '{name}' exists with other settings: {', '.join(other)}",
                    )
                then(stream)
                return
            if self._waiting_count >= settings.waiting_commands_max:
                raise BrokerRefused("wait", _TOO_MANY_WAIT)
            if name in self._waiting:
                # Another caller's creation is on its way, perhaps with other settings.
                again = partial(self._create_after_wait, name, values, by, then, refused)
                self._waiting[name].append((again, refused))
                self._waiting_count += 1
                return
            self._propose_creation(name, wanted, by)
            self._waiting[name].append((then, refused))
            self._waiting_count += 1
        except BrokerRefused as error:
            refused(error.code, error.reason, 0)

    def _create_after_wait(
        self,
        name: str,
        values: dict[str, Any],
        by: str,
        then: Use,
        refused: Refusal,
        stream: Stream,
    ) -> None:
        """Repeat a `create` that waited for another one of the name; settings are compared now.

        stream: not needed; those that wait are called with it.
        """
        self.create(name, values, by, then, refused)

    def _propose_creation(self, name: str, wanted: StreamSettings, by: str) -> None:
        """Put the creation of a stream on its way into the log.

        From now on the stream counts for its creator, and callers may wait for it in `_waiting`.
        Raises BrokerRefused: the name is none, or a quota or bound leaves no room for the stream.
        """
        shard = self._shard
        wrong = name_fault(name)
        if wrong:
            raise BrokerRefused("bad_name", wrong)
        no_stream_yet = 0
        size = self._check_settings(no_stream_yet, by, by, wanted)
        if len(self._names) + len(self._waiting) >= shard.settings.streams_max:
            reason = f"at most {shard.settings.streams_max} streams"
            raise shard.quotas.limit_told_to(by, "streams", reason)
        self._check_quotas(by, wanted)
        number = self._next_number
        self._next_number += 1
        uuid = shard.random(16)
        ring = ring_name(wanted, uuid)
        created = StreamCreated(number, name, uuid, ring, wanted, by, shard.now_ms)
        self._waiting[name] = []
        self._count(by, wanted, sign=1)
        self._count_coming_settings(number, by, size)
        creating = Then(partial(self._created, created), partial(self._not_created, created))
        self._steps.propose(created, creating)

    def _created(self, created: StreamCreated, lsn: int) -> None:
        """Call those that waited for a stream's creation, which the log has and apply() entered."""
        stream = self._numbers[created.number]
        for then, _ in self._waited(created.name):
            then(stream)

    def _not_created(self, created: StreamCreated, code: str, reason: str, retry_ms: int) -> None:
        """Refuse those that waited for a stream's creation, which the log refused."""
        self._count(created.by, created.settings, sign=-1)
        self._recount_settings(created.number)
        for _, refuse in self._waited(created.name):
            refuse(code, reason, retry_ms)

    def _check_settings(self, number: int, by: str, asker: str, wanted: StreamSettings) -> int:
        """Return the bytes of a stream's new settings, where quotas leave room for them.

        number: of the stream, whose settings so far make room; one that no stream has (0): it is
        new. by: its creator. asker: who sets them. Raises BrokerRefused: `limit`: the settings of
        this creator's streams, or of all streams, would take too much; `unsupported`: batches
        cannot be validated here.
        """
        if wanted.validate == FULL and not self._shard.settings.validates:
            raise BrokerRefused("unsupported", CANNOT)
        quotas, most = self._shard.quotas, self._shard.settings.all_settings_bytes_max
        size = len(encode_settings(wanted))
        _, before = self._sizes.get(number, ("", 0))
        if size > before:
            quotas.check(by, "settings_bytes", size - before, asker)
            key = "streams.all_settings_bytes_max"
            quotas.check_total("settings_bytes", size - before, most, key, asker)
        return size

    def _count_coming_settings(self, number: int, by: str, size: int) -> None:
        """Count settings on their way into the log for a stream's creator.

        Smaller ones than those that hold count only when the log has them: it may refuse them.
        """
        _, before = self._sizes.get(number, ("", 0))
        if size > before:
            self._sizes[number] = by, size
            self._shard.quotas.add(by, "settings_bytes", size - before)

    def _recount_settings(self, number: int) -> None:
        """Count a stream's settings as the tables have them; none when the stream is gone.

        Called when the log has taken or refused a change of them.
        """
        add = self._shard.quotas.add
        row = self.tables.streams.get(number)
        by, size = self._sizes.pop(number, ("", 0))
        if size:
            add(by, "settings_bytes", -size)
        if row is not None:
            size = len(encode_settings(row.settings))
            self._sizes[number] = row.by, size
            add(row.by, "settings_bytes", size)

    def _waited(self, name: str) -> list[tuple[Use, Refusal]]:
        """Take the calls that wait for a stream of this name out of `_waiting`."""
        waiting = self._waiting.pop(name, [])
        self._waiting_count -= len(waiting)
        return waiting

    # --- changing ----------------------------------------------------------------------------

    def edit(
        self, stream: Stream, values: dict[str, Any], effect: Effect, asker: str, *,
        replace: bool = False,
    ) -> None:  # fmt: skip
        """Put a change of a stream's settings on its way into the log, for EDIT_STREAM.

        values: the settings that the caller named. effect: answers the caller. asker: identity that
        sets them. replace: settings that are not named go back to their defaults, but for
        KEPT_SETTINGS. Raises BrokerRefused: a setting is unsound or cannot be changed, quotas leave
        no room, or another change of the schema is on its way (`wait`).
        """
        # An edit on its way into the log comes before this one.
        old = stream.edited or stream.settings
        settings = self._shard.settings
        bytes_max = settings.settings_bytes_max
        if stream.number in self._declaring:
            raise BrokerRefused("wait", "the stream's schema is being changed")
        defaults = settings.default_of("stream", stream.name) if replace else None
        # Evolved: a new schema is a version after those so far, if it may follow on them.
        wanted = evolved(old, settings_of(values, bytes_max, old, defaults), bytes_max)
        for name in FIXED_SETTINGS:
            if getattr(wanted, name) != getattr(old, name):
                raise BrokerRefused(
                    "bad_setting", f"{name} cannot be changed: records lie where they lie"
                )
        settled = old.body_kind or stream.body_kind >= 0  # By a setting, or by the first batch.
        if wanted.body_kind != old.body_kind and settled:
            if wanted.schema != old.schema:
                # Declaring a schema makes the body kind Arrow.
                raise BrokerRefused("bad_schema", "the stream has records of another body kind")
            raise BrokerRefused("bad_setting", "body_kind cannot be changed once it is settled")
        size = self._check_settings(stream.number, stream.row.by, asker, wanted)
        self._count_coming_settings(stream.number, stream.row.by, size)
        edited = StreamEdited(stream.number, wanted, self._shard.now_ms)
        if wanted.schema != old.schema:
            # Until the log has it, further edits are refused `wait`: one that knows nothing of this
            # schema would take it back.
            self._declaring[stream.number] = wanted
            if stream.body_kind < 0:
                # A first batch of another kind may not settle the kind while the schema is coming.
                stream.body_kind = ARROW
        stream.edited = wanted
        editing = Then(
            partial(self._edited, stream, wanted), partial(self._not_edited, stream, wanted)
        )
        self._steps.propose(edited, editing, effect)

    def _edited(self, stream: Stream, wanted: StreamSettings, *_: Any) -> None:
        """End the way of an edit into the log, which has it; apply() has made it hold."""
        if stream.edited is wanted:  # Else a later edit is on its way.
            stream.edited = None

    def _not_edited(self, stream: Stream, wanted: StreamSettings, *_: Any) -> None:
        """Go back to the settings that hold, since the log refused an edit."""
        self._edited(stream, wanted)
        self._recount_settings(stream.number)
        if self._declaring.get(stream.number) is wanted:
            del self._declaring[stream.number]
            stream.settle(stream.settings)  # The body kind that edit() set ahead may be wrong.

    def take_declared(self, change: StreamEdited) -> Stream | None:
        """Return the stream that a change just applied gave a new schema; None: it gave none.

        The caller tells the stream's readers of the new version.
        """
        if self._declaring.get(change.number) is not change.settings:
            return None
        del self._declaring[change.number]
        return self._numbers.get(change.number)

    def remove(self, stream: Stream, effect: Effect) -> None:
        """Put the removal of a stream and its records on its way. effect: answers the caller."""
        self._steps.propose(StreamRemoved(stream.number, self._shard.now_ms), effect)

    def apply(self, change: Change, end_lsn: int) -> Stream | None:
        """Let a change that the log has just taken hold, in the tables and in the running streams.

        Called for every kind of change; those of no stream only change the tables. end_lsn: where
        the change ends in ring main. Returns the stream that it removed, of which other parts
        have things to forget.
        """
        apply(self.tables, self._shard.queues, change)
        if isinstance(change, StreamCreated | StreamEdited | StreamRemoved):
            self._recount_settings(change.number)
        if isinstance(change, StreamCreated):
            stream = self._enter(self.tables.streams[change.number], facts={})
            stream.created_lsn = end_lsn
            self._shard.event("stream_created", stream=change.name, number=change.number)
        elif isinstance(change, StreamEdited):
            edited = self._numbers.get(change.number)
            if edited is not None:
                kind = edited.body_kind
                edited.settle(edited.settings)
                if edited.body_kind < 0:
                    # These settings leave the kind to the first batch, which may have settled it
                    # meanwhile, by a change that is still on its way.
                    edited.body_kind = kind
                self._watch(edited)
        elif isinstance(change, StreamRemoved):
            removed = self._numbers.pop(change.number, None)
            if removed is not None:
                self._remove(removed, end_lsn)
            return removed
        return None

    def _remove(self, stream: Stream, end_lsn: int) -> None:
        """Forget a stream whose removal the log has taken, and its own ring once that is durable.

        end_lsn: where the removal ends in ring main.
        """
        stream.removed = True
        self._count(stream.row.by, stream.settings, sign=-1)
        stream.ring.numbers.discard(stream.number)
        if self._names.get(stream.name) is stream:
            del self._names[stream.name]
            if self._sorted is not None:
                del self._sorted[bisect_left(self._sorted, stream.name)]
        self.bounded.discard(stream)
        self._validation.watch(stream)
        self._conditions.leave(stream)
        self._shard.event("stream_removed", stream=stream.name, number=stream.number)
        ring = stream.ring
        if not stream.settings.ring_bytes:
            return
        removed = partial(self._remove_ring, ring, stream.name)
        self._publishing.when_visible(self.rings[MAIN], end_lsn, removed)

    def _remove_ring(self, ring: RingState, name: str, failure: tuple[str, str] | None) -> None:
        """Have the shell remove the ring of a removed stream, once the removal is durable.

        Else a power loss could bring back the stream without its records. failure: code and reason
        where the removal is not durable: the files stay.
        """
        if failure is None:
            self.openings.append((ring.name, {"remove": True}))
            self.rings.pop(ring.name, None)
            # The shell will not say of this ring that it is synced: publishes that wait for that
            # are refused.
            self._publishing.ring_failed(ring, "stream_removed", f"stream '{name}' was removed")


def _ring_quota(settings: StreamSettings) -> str:
    """The quota that a ring of a stream's own counts for."""
    return "rings_memory_bytes" if settings.memory else "rings_bytes"


def _other_settings(has: StreamSettings, wanted: StreamSettings) -> list[str]:
    """Return the names of the settings of an existing stream that are not as a `create` wants them.

    A `create` that names no body kind takes that which the first batch settled; a schema is as
    wanted if it is one of the stream's versions. Raises BrokerRefused: the schema is unsound.
    """
    passed_over: dict[str, Any] = {}
    if not wanted.body_kind:
        passed_over["body_kind"] = ""
    if has.schema and wanted.schema and is_version(has, wanted.schema):
        passed_over.update(schema=wanted.schema, former_schemas=())
    has = msgspec.structs.replace(has, **passed_over)
    return [key for key in has.__struct_fields__ if getattr(has, key) != getattr(wanted, key)]
