"""Cursors: named positions of streams that the broker keeps.

Owns MOVE_CURSOR, CURSOR_INFO, EDIT_CURSOR, REMOVE_CURSOR, and the position that a start by name
has. The rules: a cursor moves forward only, and only from where its owner believes that it is; a
cursor that lies outside of its stream is clamped, and the broker says which: at the start in the
log, and at a trim for all who ask (the log follows when the cursor moves); a cursor of a stream in
memory lives in memory only. Source: docs/design.md (Journal; Queues and the checkpoint); SPEC.md,
section 4.8.

A step is commands that happen together, a part what one of them adds to it; effects of a part are
called when the step is taken, and when the log has it or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.commands import (
    CursorInfo,
    EditCursor,
    MoveCursor,
    RemoveCursor,
    StartKind,
)
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.cursors.pins import Cursor, Pins
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.steps import Effect, Part, Steps, Then, changing
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.named import Named, Place
from malamute_py.broker.streams.start_positions import Begin, Starts
from malamute_py.changelog.records import Change, CursorRemoved, CursorSet
from malamute_py.changelog.settings import CursorSettings, queue_settings
from malamute_py.changelog.tables import CursorRow

CHANGES_AT_ONCE: Final = 1_000
"""Changes of cursors that one part of a step has at most, at a start and when a stream goes."""


class Cursors:
    """All cursors of one core."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        catalogue: Catalogue,
        steps: Steps,
        starts: Starts,
        answers: Answers,
        pages: Pages,
        is_group: Callable[[Place], bool],
    ) -> None:
        """is_group: whether a name is a group's, or that of one on its way into the log."""
        self._shard = shard
        self._is_group = is_group
        self._links = links
        self._catalogue = catalogue
        self._steps = steps
        self._starts = starts
        self._answers = answers
        self._pages = pages
        self._cursors: Named[Cursor, list[int]] = Named(shard.quotas, "cursors")
        """Cursors, and in `coming` the positions on their way into the log, in order: each in a
        list of its own, which tells a move from another one to the same position."""
        self.has = self._cursors.has
        self._edits: dict[Place, CursorSettings] = {}
        """Settings on their way into the log; the next edit begins from them."""
        self.pins = Pins(shard)
        self.tick = self.pins.tick

    # --- facts ------------------------------------------------------------------------------

    @property
    def gauges(self) -> dict[str, int]:
        """Counts for the metrics."""
        return {"cursors": len(self._cursors), **self.pins.gauges}

    def handlers(self) -> dict[type, Callable[[Link, Any], None]]:
        """Return the handlers of commands that are no parts of steps, for the broker's table."""
        return {
            CursorInfo: self.cursor_info,
            EditCursor: self.edit_cursor,
            RemoveCursor: self.remove_cursor,
        }

    # --- over restarts ------------------------------------------------------------------------

    def recovered(self) -> None:
        """Load the cursors from the tables, at a start.

        A power loss, or the ring's growth, may have left a cursor outside of its stream: it is
        moved to the stream's end or first record, in the log, too. Those of streams that are gone
        are removed.
        """
        changes: list[Change] = []
        for (number, name), row in list(self._shard.queues.cursors.items()):
            stream = self._catalogue.by_number(number)
            if stream is None:
                changes.append(CursorRemoved(number, name))
                continue
            end = stream.position_end(row.epoch)
            within = max(min(row.next, end), stream.begin)
            if within != row.next:
                purged = within <= stream.row.trimmed  # By TRIM, not by the ring or a bound.
                code = "rewound" if row.next > end else "purged" if purged else "retention"
                self._say_clamped(stream, name, row.next, within, code)
                row.next = within
                changes.append(
                    CursorSet(
                        number, name, within, row.moved_ms, why="clamped", by=row.by,
                        epoch=self._shard.epoch,
                    )
                )  # fmt: skip
            self._load(stream, row)
        for at in range(0, len(changes), CHANGES_AT_ONCE):
            self._steps.take([Part(changes[at : at + CHANGES_AT_ONCE])])

    def _say_clamped(self, stream: Stream, name: str, before: int, after: int, code: str) -> None:
        """Count and report a cursor that lay outside of its stream: before, and where it is now.

        code: why: `rewound`, `purged` (callers removed the records before it) or `retention`.
        """
        self._shard.counters["cursors_clamped"] += 1
        facts = {"stream": stream.name, "cursor": name, "from": before, "to": after, "code": code}
        level = "info" if code == "purged" else "warning"
        self._shard.event("cursor_clamped", level, **facts)

    def _load(self, stream: Stream, row: CursorRow) -> Cursor:
        """Load a row of the tables into its cursor, and see to the cursor's pin.

        Called for each row at a start, and whenever the log has taken a change of one.
        """
        place = stream.number, row.name
        cursor = self._cursors.get(place)
        if cursor is None:
            cursor = Cursor(stream, row)
            self._cursors.add(place, cursor, row.by)
        elif row.next != cursor.row.next or row.settings != cursor.row.settings:
            # A cursor that has moved is reported anew, and pins again.
            cursor.clamped = cursor.broken = False
        cursor.row = row
        self.pins.watch(cursor)
        return cursor

    def trimmed(self, stream: Stream) -> None:
        """Break pins and report cursors that lie before the first record that the stream has now.

        Called after each trim of a stream, also one by a caller (TRIM): then the cursor's pin goes
        on from the first record that is left.
        """
        for cursor in self._cursors.of(stream.number):
            before = cursor.row.next
            if before >= stream.begin:
                continue
            purged = stream.first <= stream.row.trimmed  # By TRIM, not by the ring or a bound.
            if purged:
                self.pins.watch(cursor)
            elif cursor.pinned_at is not None:
                # The ring had no more space for the pinned records.
                self.pins.break_pin(cursor, "the journal kept no more")
            if not cursor.clamped:
                cursor.clamped = True
                self._say_clamped(
                    stream, cursor.name, before, stream.first, "purged" if purged else "retention"
                )

    def stream_removed(self, stream: Stream) -> None:
        """Remove the cursors of a stream that was removed, here and from the log."""
        removed = self._cursors.remove_stream(stream.number)
        for cursor in removed.values():
            self.pins.unwatch(cursor)
        changes: list[Change] = [CursorRemoved(stream.number, name) for name in removed]
        for at in range(0, len(changes), CHANGES_AT_ONCE):
            self._put(stream, changes[at : at + CHANGES_AT_ONCE])

    # --- answering ----------------------------------------------------------------------------

    def _put(self, stream: Stream, changes: list[Change], *effects: Effect) -> None:
        """Put changes on their way into the log; for a stream in memory they apply at once.

        effects: called when the log has them, or refuses them.
        """
        self._steps.put(changes, *effects, memory=stream.ring.memory)

    def _stream(self, link: Link, name: str) -> Stream:
        """Return a stream whose cursors a link may move, since it may read it or manage it.

        Raises BrokerRefused: it may neither, or there is no such stream.
        """
        permit = self._shard.settings.permit
        action = "read"  # Also where it may do neither: then find() refuses it.
        if not permit(link.owner, action, name) and permit(link.owner, "manage_streams", name):
            action = "manage_streams"
        return self._catalogue.find(link.owner, name, action)

    # --- moving -------------------------------------------------------------------------------

    def prepare_move(self, link: Link, command: MoveCursor, frame: Any = None) -> Part:
        """Return the part of a step that moves a cursor, and may create it, for MOVE_CURSOR.

        A reader moves its cursor forward, and may say from where: so no other reader is overtaken
        unawares. `force` moves it anywhere. frame: MOVE_CURSOR has none. Raises BrokerRefused: the
        position is not of the stream, or the cursor stands elsewhere (`conflict`).
        """
        name = command.cursor
        stream = self._stream(link, command.stream)
        if command.force and not self._shard.settings.permit(
            link.owner, "manage_streams", command.stream
        ):
            raise BrokerRefused("forbidden", f"you may not reset cursors of '{command.stream}'")
        next = command.next
        if command.uuid and command.uuid != stream.uuid:
            raise BrokerRefused("conflict", f"stream '{stream.name}' is not the one of this uuid")
        tail = stream.next + stream.coming  # With records that the same step publishes.
        if next > tail:
            raise BrokerRefused("bad_start", f"the stream ends at {tail}")
        if command.epoch and next > stream.epoch_end(command.epoch, tail):
            raise BrokerRefused(
                "conflict", f"the log was rewound: {next} is no position of epoch {command.epoch}"
            )
        place = stream.number, name
        stands = self._next_after_moves(place)
        if stands is None:
            self._check_new(stream, name, link.owner)
        elif not command.force:
            # Positions before `first` count as equal: the records between them are gone.
            first = stream.first
            names_from = command.from_ >= 0
            if names_from and max(command.from_, first) != max(stands, first):
                raise BrokerRefused("conflict", f"cursor '{name}' stands at {stands}")
            if next <= stands:
                raise BrokerRefused("conflict", f"cursor '{name}' stands at {stands} already")
        why = "created" if stands is None else "reset" if command.force else "moved"
        change = CursorSet(
            stream.number, name, next, self._shard.now_ms, why=why, by=link.owner,
            epoch=self._shard.epoch,
        )  # fmt: skip
        memory = self._shard.queues if stream.ring.memory else None
        # Once a reset is durable it is reported as an administrator's act, of this link.
        reset = link.number if command.force else 0
        going = [next]
        moving = _Moving(self, stream, name, going, link.owner, reset=reset)
        return changing([change], [moving], memory=memory, level=stream.level)

    def _next_after_moves(self, place: Place) -> int | None:
        """Return where a cursor will stand once all moves on their way are appended.

        The next move is compared with that; None: there is no cursor, nor is one on its way.
        """
        coming = self._cursors.coming.get(place)
        if coming:
            (newest,) = coming[-1]  # A list of one position: see _begin_move().
            return newest
        cursor = self._cursors.get(place)
        return None if cursor is None else cursor.row.next

    def _check_new(self, stream: Stream, name: str, by: str) -> None:
        """Raise BrokerRefused if a stream cannot have one more cursor, or not of this name."""
        fault = name_fault(name)
        if fault:
            raise BrokerRefused("bad_name", f"cursor: {fault}")
        if self._is_group((stream.number, name)):
            raise BrokerRefused(
                "conflict",
                f"'{name}' is a group of stream '{stream.name}', which a cursor would not move:"
                " RESET_GROUP does",
            )
        self._cursors.check_room(by, self._shard.settings.cursors_max)

    def _begin_move(self, place: Place, going: list[int], by: str) -> None:
        """Note that a move is on its way into the log; a new cursor counts from now on.

        going: the position, in a list that tells this move from others. by: owner for whom a new
        cursor counts.
        """
        if not self._cursors.has(place):
            self._cursors.count_creation(place, by)
        self._cursors.coming.setdefault(place, []).append(going)

    def _end_move(self, place: Place, going: list[int]) -> None:
        """Forget a move that was on its way: the log has it or has refused it."""
        coming = self._cursors.coming
        left = [other for other in coming.pop(place) if other is not going]
        if left:
            coming[place] = left
        else:
            self._cursors.end_creation(place)

    def _load_moved(self, stream: Stream, name: str) -> None:
        """Load the row of a cursor that the log has moved or edited, from the tables."""
        if not stream.removed:
            self._load(stream, self._shard.queues.cursors[stream.number, name])

    # --- settings -----------------------------------------------------------------------------

    def edit_cursor(self, link: Link, command: EditCursor) -> None:
        """Create a cursor at a start, or change its settings; answered when that is durable.

        A start may have to be found by the journal first. Raises BrokerRefused: the link may not,
        the settings are unsound, or there cannot be such a new cursor.
        """
        stream = self._stream(link, command.stream)
        place = stream.number, command.cursor
        self._settings_after(link, place, command)  # To refuse at once what will not do.
        stands = self._next_after_moves(place)
        if stands is not None:
            self._edit(link, command, stream, stands, "edited")
            return
        self._check_new(stream, command.cursor, link.owner)
        start = command.start or [int(StartKind.EARLIEST)]
        if start[0] == StartKind.LAST_PER_SUBJECT:
            raise BrokerRefused("bad_start", "a cursor is one position")
        self._links.count_query(link)  # _create() takes the question off the count again.
        found = self._links.contained(
            link, "EDIT_CURSOR", partial(self._create, link, command, stream)
        )
        durable, every_record = False, ["all"]
        self._starts.resolve(
            stream, start, durable, every_record, found,
            end=stream.next, asker=link, wanted=lambda: link.open,
        )  # fmt: skip

    def _create(
        self, link: Link, command: EditCursor, stream: Stream, begin: Begin | BrokerRefused
    ) -> None:
        """Create a cursor where its start was found to lie, for EDIT_CURSOR.

        begin: that position, or why there is none.
        """
        link.queries -= 1
        if isinstance(begin, BrokerRefused):
            self._answers.refuse_with(link, command, begin)
        elif stream.removed:
            self._answers.refuse(link, command, "stream_removed", f"'{stream.name}' was removed")
        else:
            # Another command may have created the cursor meanwhile, or a group of its name.
            stands = self._next_after_moves((stream.number, command.cursor))
            if stands is None:
                try:
                    self._check_new(stream, command.cursor, link.owner)
                except BrokerRefused as error:
                    self._answers.refuse_with(link, command, error)
                    return
            next = max(begin.next, stream.begin) if stands is None else stands
            why = "created" if stands is None else "edited"
            self._edit(link, command, stream, next, why)

    def _settings_after(self, link: Link, place: Place, command: EditCursor) -> CursorSettings:
        """Return the settings that a cursor has after an edit, which follows on those on their way.

        With `replace`, settings that the command does not name have their defaults. Raises
        BrokerRefused: they are unsound, or the link may not pin.
        """
        cursor = self._cursors.get(place)
        known = self._edits.get(place) or (None if cursor is None else cursor.row.settings)
        defaults: dict[str, Any] | None = {} if command.replace else None
        settings = queue_settings(
            CursorSettings, command.settings, self._shard.settings.settings_bytes_max, known,
            defaults,
        )  # fmt: skip
        concerns_pin = settings != known and (settings.pin or (known is not None and known.pin))
        if concerns_pin and not self._shard.settings.permit(
            link.owner, "manage_streams", command.stream
        ):
            raise BrokerRefused("forbidden", f"you may not pin or unpin stream '{command.stream}'")
        return settings

    def _edit(self, link: Link, command: EditCursor, stream: Stream, next: int, why: str) -> None:
        """Put a cursor's new settings on their way; answer with its facts when they are durable.

        next: the position that it has, or begins at. why: `created` or `edited`, for the log.
        """
        place = stream.number, command.cursor
        try:
            settings = self._settings_after(link, place, command)
        except BrokerRefused as error:
            # Another edit came meanwhile: together they are too large, or it set a pin.
            self._answers.refuse_with(link, command, error)
            return
        change = CursorSet(
            stream.number, command.cursor, next, self._shard.now_ms, settings, why, link.owner,
            self._shard.epoch,
        )  # fmt: skip
        self._edits[place] = settings
        going = [next]
        moving = _Moving(self, stream, command.cursor, going, link.owner, settings)
        answer = Answer(self._answers, link, command, partial(self._facts_at, place))
        self._put(stream, [change], moving, answer)

    def remove_cursor(self, link: Link, command: RemoveCursor) -> None:
        """Remove a cursor and its pin; answered when that is durable.

        Raises BrokerRefused: the link may not manage the stream, or there is no such cursor.
        """
        stream = self._catalogue.find(link.owner, command.stream, "manage_streams")
        place = stream.number, command.cursor
        if self._cursors.get(place) is None:
            raise BrokerRefused("unknown_cursor", f"there is no cursor '{command.cursor}'")
        change = CursorRemoved(stream.number, command.cursor)
        answer = Answer(self._answers, link, command)
        self._put(stream, [change], Then(partial(self._drop, place)), answer)

    def _drop(self, place: Place, end_lsn: int) -> None:
        """Forget a cursor and its pin, once the log has its removal. end_lsn: not needed."""
        cursor = self._cursors.remove(place)
        if cursor is not None:
            self.pins.unwatch(cursor)

    # --- facts for clients ----------------------------------------------------------------------

    def cursor_info(self, link: Link, command: CursorInfo) -> None:
        """Answer a CURSOR_INFO with the facts about one cursor, or with a page of cursors.

        A name that ends with `*`, or none, asks for a page; no stream means all of them. Raises
        BrokerRefused.
        """
        name = command.cursor
        told_by = self._catalogue.action_for_facts(link.owner, command.stream)
        stream = None
        if command.stream:
            stream = self._catalogue.find(link.owner, command.stream, told_by)
        if stream is not None and name and not name.endswith("*"):
            cursor = self._cursors.get((stream.number, name))
            if cursor is None:
                raise BrokerRefused("unknown_cursor", f"there is no cursor '{name}'")
            self._answers.result(link, command, self._facts(cursor))
            return
        prefix = name.removesuffix("*")
        self._cursors.page(self._pages, self._catalogue, link, command, prefix, self._facts)

    def _facts_at(self, place: Place) -> dict[str, Any]:
        """Return a cursor's facts for an answer; {}: it is gone by now."""
        cursor = self._cursors.get(place)
        return {} if cursor is None else self._facts(cursor)

    def _facts(self, cursor: Cursor) -> dict[str, Any]:
        """Return a cursor's facts, for CURSOR_INFO and the answer to EDIT_CURSOR."""
        stream, row = cursor.stream, cursor.row
        self.pins.measure(cursor)  # `held_bytes` may be a second old.
        return {
            "stream": stream.name,
            "cursor": cursor.name,
            "next": cursor.next,
            "first": stream.first,
            "tail": stream.next,
            "lag": stream.next - cursor.next,
            "moved_ms": row.moved_ms,
            "by": row.by,
            "pinned": cursor.pinned_at is not None,
            "pinned_bytes": cursor.held_bytes,
            "settings": msgspec.structs.asdict(row.settings),
        }


class _Moving(Effect):
    """The effect of a move or an edit: a position on its way to a cursor, perhaps to a new one."""

    cursors: Cursors
    stream: Stream
    name: str
    going: list[int]
    """The position, in a list that tells this move from others to the same position."""
    by: str
    settings: CursorSettings | None = None
    """Settings that the cursor gets with the position."""
    reset: int = 0
    """The link of the administrator who resets the cursor; 0: it is moved by who reads."""

    @property
    def place(self) -> Place:
        """Stream and name of the cursor."""
        return self.stream.number, self.name

    def taken(self, part: Part) -> None:
        """Count the position as on its way, and a new cursor for its owner."""
        self.cursors._begin_move(self.place, self.going, self.by)

    def appended(self, part: Part, end_lsn: int) -> None:
        """Load the cursor's row from the tables, which have the new position.

        A reset is reported as an administrator's act.
        """
        self._end_move()
        self.cursors._load_moved(self.stream, self.name)
        if self.reset:
            self.cursors._shard.event(
                "administered", by=self.by, link=self.reset, command="MoveCursor",
                stream=self.stream.name, cursor=self.name,
            )  # fmt: skip

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Forget the position; the cursor stays where it was, and a new one does not come to be."""
        self._end_move()

    def _end_move(self) -> None:
        """Forget that the position, and the settings that went with it, were on their way."""
        cursors, place = self.cursors, self.place
        cursors._end_move(place, self.going)
        if self.settings is not None and cursors._edits.get(place) is self.settings:
            del cursors._edits[place]
