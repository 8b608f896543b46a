"""Commands about keys: one key, a page of keys, and the reading of all keys at a start.

Owns the answers to GET_KEY and LIST_KEYS. A key is a subject of a stream made with `keep`, its
value the newest record of the subject, its revision that record's offset; a value that has moved
lies in a copy (compaction.py). The rules: a value is answered once no power loss can take it back;
one key costs no search, however many there are; a page looks at a bounded number of keys; a stream
answers nothing about its keys before a start has read them all. Source: SPEC.md, sections 4 and 8.

A call that comes later is wrapped by contained(): an error in it ends the link that asked, and not
the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from malamute_protocol.commands import Command, GetKey, ListKeys, UpdateKey
from malamute_protocol.content import Content
from malamute_protocol.content_layout import LIST
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.stamp import STAMP_BYTES, Stamp, append_time_of
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.newest import Keys
from malamute_py.broker.log.pages import Entries, Page, Pages
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import IndexFailure
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.conditions import check_ready
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.structures.timers import Timers
from malamute_py.matcher import CompiledPattern, asks_subjects_only, compile_pattern

LOOKED_AT = 2_000
"""Keys that one page looks at."""
LOOKED_AT_SLOWLY = 50
"""Keys that one page looks at with a pattern for which one subject may take long."""
VALUE_BYTES_MAX = 512 << 10
"""Bytes of a value, or of the batch that holds it, up to which they are part of an answer."""
READ_BYTES = 256 << 10
"""Bytes of records of which a start enters the keys at once: some 5 ms of the loop."""
READ_AGAIN_MS = 10_000
"""Time after which a start asks again for keys that the journal could not read."""
TRIES_MAX = 3
"""Times that a value is looked for whose record was replaced, or has moved, meanwhile."""


class KeyCommands:
    """The commands about keys."""

    def __init__(
        self, shard: Shard, links: Links, catalogue: Catalogue, publishing: Publishing,
        answers: Answers, timers: Timers, pages: Pages, look_if_ready: Callable[[Stream], None],
    ) -> None:  # fmt: skip
        """look_if_ready: of Conditions, called with a stream of which a start has read all keys."""
        self._shard = shard
        self._timers = timers
        self._pages = pages
        self._look_if_ready = look_if_ready
        self._unread: set[Stream] = set()
        """Streams whose keys a start could not read yet, as an event has told."""
        self._links = links
        self._catalogue = catalogue
        self._publishing = publishing
        self._answers = answers

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Return the handlers of the commands that look at keys."""
        return {GetKey: self.get_key, ListKeys: self.list_keys}

    def _stream(self, link: Link, command: Any, *actions: str) -> tuple[Stream, Keys]:
        """Return the stream of a command, with its keys.

        actions: all that the link has to be permitted. Raises BrokerRefused: it is not, or there is
        no such stream with keys, or a start still reads them (`wait`).
        """
        name = command.stream
        for action in actions:
            if not self._shard.settings.permit(link.owner, action, name):
                raise BrokerRefused("forbidden", f"you may not {action} stream '{name}'")
        stream, keys = self._catalogue.with_keys(link.owner, name)
        check_ready(stream, keys)
        return stream, keys

    # --- changing one -------------------------------------------------------------------

    def update_key(self, link: Link, command: UpdateKey, frame: Any) -> None:
        """Publish one record if its subject is at the command's revision, for UPDATE_KEY.

        The answer is a CONFIRM or a refusal, as to a PUBLISH. The revision is compared when the
        batch is taken.
        """
        try:
            if command.revision < 0:
                raise BrokerRefused("malformed", "a revision below 0")
            bound = None  # Whether a writer that is bound to subjects may publish under one.
            if not self._shard.settings.permit(link.owner, "write", command.stream):
                bound = self._shard.settings.subjects(link.owner, command.stream)
            # A bound writer has no permission for the stream as a whole: none is asked for.
            actions = ["write"] if bound is None else []
            stream, _ = self._stream(link, command, *actions)
        except BrokerRefused as error:
            self._publishing.refuse(link, command, error.code, error.reason, error.retry_ms)
            return
        if bound is None:
            self._publishing.publish(link, command, stream, frame)
        else:
            self._publishing.publish_bound(link, command, stream, frame, bound)

    # --- one value ----------------------------------------------------------------------

    def get_key(self, link: Link, command: GetKey) -> None:
        """Answer a GET_KEY with the newest record of a subject, at once or when it is durable."""
        self._get(link, command, TRIES_MAX)

    def _get(self, link: Link, command: GetKey, tries: int) -> None:
        """Answer with a key's newest value: from memory if it is there, else from the journal.

        tries: how often the key may be looked up: its record may move while the journal reads it.
        The answer is given once the record is durable.
        """
        try:
            stream, keys = self._stream(link, command, "read", "replay")
        except BrokerRefused as error:
            self._answers.refuse_with(link, command, error)
            return
        found = keys.find(command.subject)
        if found is None:
            self._answers.result(link, command, {"revision": 0})
            return
        offset, deletion = found
        hot = stream.hot
        if deletion:
            value = {"revision": 0, "deleted": offset}
            answer = partial(self._answers.result, link, command, value)
        elif hot and hot[0].base <= offset:
            batch = hot[stream.hot_place(offset)]
            # The value is taken out of its batch later: many that wait would fill memory.
            value_now = partial(
                value_of, batch.content, offset - batch.base, append_time_of(batch.stamp)
            )
            answer = partial(self._tell_value, link, command, offset, value_now)
        else:
            answer = partial(self._answer_from_journal, link, command, stream, offset, tries)
        if offset < stream.visible_next:
            answer()
        else:
            # The record's own end in the ring is not remembered: the ring's end covers it.
            settled = partial(self._settled, link, command, answer)
            self._publishing.when_visible(stream.ring, stream.ring.end_lsn, settled)

    def _settled(
        self, link: Link, command: GetKey, answer: Callable[[], None],
        failure: tuple[str, str] | None,
    ) -> None:  # fmt: skip
        """Answer a GET_KEY as its record is durable; failure: code and reason why it never is."""
        if failure is None:
            answer()
        else:
            self._answers.refuse(link, command, *failure)

    def _tell_value(
        self, link: Link, command: GetKey, offset: int, value_now: Callable[[], dict[str, Any]]
    ) -> None:
        """Answer with a value, unless answers of the meantime have left the link no room.

        value_now: makes the value, with its `bytes`, which is not done for a link that is gone.
        """
        try:
            self._answers.check(link)
        except BrokerRefused as error:
            self._answers.refuse_with(link, command, error)
            return
        if link.open:
            value = value_now()
            if value["bytes"] > VALUE_BYTES_MAX:
                # The client is told the size alone, and reads the record as a subscriber.
                value = {"bytes": value["bytes"], "time_ms": value["time_ms"]}
            else:
                del value["bytes"]
            self._answers.result(link, command, {"revision": offset, **value})

    def _answer_from_journal(
        self, link: Link, command: GetKey, stream: Stream, offset: int, tries: int
    ) -> None:
        """Ask the journal for a record that is not in memory, or for its copy, and answer with it.

        tries: how often the key may be looked up anew.
        """
        keys = stream.keys
        assert keys is not None
        copy = keys.copy_of(command.subject)

        def found(batch: Any) -> None:
            """Answer a GET_KEY with the record that was read.

            batch: its batch as the journal has it; None: it was not there, and is sought anew.
            """
            if isinstance(batch, IndexFailure):
                self._answers.refuse(link, command, batch.code, batch.reason)
            elif batch is None:
                self._not_found(link, command, stream, offset, copy, tries)
            else:
                view = memoryview(batch)
                stamp, content = Stamp.unpack(view, verify=False), Content(view[STAMP_BYTES:])
                # A copy has only some rows of its batch, and says which.
                row = content.row_of(offset - stamp.base_offset)
                value = partial(value_of, content, row, stamp.append_time_ms)
                self._tell_value(link, command, offset, value)

        self._shard.ask(
            stream.ring.name, stream.number, "batch",
            {"offset": offset, "copy": copy},
            self._links.contained(link, "GET_KEY", found), link, lambda: link.open,
        )  # fmt: skip

    def _not_found(
        self, link: Link, command: GetKey, stream: Stream, offset: int, copy: int | None, tries: int
    ) -> None:
        """Look again for a value that the journal does not have, or refuse the GET_KEY `damaged`.

        offset: of the record that was sought. copy: where its copy lay; None: it had not moved. A
        record that was replaced or has moved meanwhile is not damaged.
        """
        keys, subject = stream.keys, command.subject
        assert keys is not None
        not_deleted = (offset, False)
        still_there = keys.find(subject) == not_deleted and keys.copy_of(subject) == copy
        if tries > 1 and not still_there:
            self._get(link, command, tries - 1)
        else:
            reason = f"the record at {offset} of stream '{stream.name}' cannot be read"
            self._answers.refuse(link, command, "damaged", reason)

    # --- many names ---------------------------------------------------------------------

    def list_keys(self, link: Link, command: ListKeys) -> None:
        """Have a LIST_KEYS answered with a page of keys and their revisions, in later turns.

        The page may end early, or be empty, since a bounded number of keys is looked at: `after` is
        the last one, and `more` says that the caller may go on from there. Raises BrokerRefused:
        the link may not read the stream, it has no keys, the pattern asks for more than keys, or
        too many questions of the link wait (`wait`).
        """
        _, keys = self._stream(link, command, "read", "replay")
        compiled = compile_pattern(command.pattern)
        if not asks_subjects_only(command.pattern):
            raise BrokerRefused("bad_pattern", "keys are found by their subjects only")
        most = self._shard.settings.page_max
        left = LOOKED_AT_SLOWLY if compiled.slow else LOOKED_AT
        entries: Entries[list[Any]] = Entries(command.limit if command.limit > 0 else most, most)
        page = Page(
            link, command, "keys", command.after, keys.names.after,
            partial(_listed, keys, compiled), entries, left,
        )  # fmt: skip
        self._pages.add(page)

    # --- at a start ---------------------------------------------------------------------

    def recovered(self) -> None:
        """Begin to read the keys of all streams that have some from the journal, at a start."""
        for stream in self._catalogue:
            keys = stream.keys
            if keys is not None and not keys.ready:
                # Copies come first: what replaced their records lies in the stream itself, and is
                # to replace them again.
                if keys.copies_first < keys.copies_next:
                    self._read_on(stream, keys, "moved_keys", keys.copies_first)
                else:
                    self._read_on(stream, keys, "keys", stream.first)

    def _read_on(self, stream: Stream, keys: Keys, kind: str, offset: int) -> None:
        """Have the journal read the keys of the next part of a stream, for _enter_page().

        kind: the question: `moved_keys`, to the hidden stream of copies; `keys`, to the stream's
        own records. offset: where the part begins.
        """
        end = stream.next if kind == "keys" else keys.copies_next
        self._shard.ask(
            stream.ring.name, stream.number, kind,
            {"from": offset, "end": end, "bytes": READ_BYTES},
            partial(self._enter_page, stream, keys, kind, offset, end),
        )  # fmt: skip

    def _read_again(self, stream: Stream, keys: Keys, kind: str, offset: int) -> None:
        """Ask once more for a part that the journal could not read, unless the stream is gone."""
        if stream.removed:
            self._unread.discard(stream)
        else:
            self._read_on(stream, keys, kind, offset)

    def _enter_page(
        self, stream: Stream, keys: Keys, kind: str, offset: int, end: int, value: Any
    ) -> None:
        """Enter a page of keys that the journal found, and ask for the next one.

        kind: `moved_keys`: of the hidden stream of copies, which is read first; `keys`: of the
        stream's own records. offset, end: the part that was asked for. value: the page, with the
        `next` offset after it, or an IndexFailure: the part is asked for again. Once all is read,
        commands on the keys are answered, and writers let in.
        """
        if stream.removed:
            self._unread.discard(stream)
            return
        if isinstance(value, IndexFailure):
            if stream not in self._unread:
                self._unread.add(stream)
                self._shard.event(
                    "keys_not_read", "error", stream=stream.name, code=value.code,
                    reason=value.reason,
                )  # fmt: skip
            again = partial(self._read_again, stream, keys, kind, offset)
            self._timers.set(self._shard.now_ms + READ_AGAIN_MS, again)
            return
        if kind == "moved_keys":
            keys.enter_copies(value["rows"])
        else:
            keys.enter_many(value["newest"])
        if value["next"] < end:
            self._read_on(stream, keys, kind, value["next"])
            return
        # The stream's own records come last: none is older than the copy of its subject.
        if kind == "moved_keys" and stream.first < stream.next:
            self._read_on(stream, keys, "keys", stream.first)
            return
        keys.ready = True
        self._look_if_ready(stream)
        self._unread.discard(stream)
        self._shard.event("keys_read", stream=stream.name, keys=len(keys))


def _listed(keys: Keys, pattern: CompiledPattern, subject: str) -> list[Any] | None:
    """Return what LIST_KEYS tells of a key; None: it does not match, or is deleted."""
    offset, deletion = keys.find(subject) or (0, True)
    return None if deletion or not pattern.matches((subject,), ()) else [subject, offset]


def value_of(content: Content, row: int, time_ms: int) -> dict[str, Any]:
    """Return one record for a RESULT, and its `bytes`, by which a value that is too large is found.

    row: of the record in its batch. time_ms: its append time. A body in a codec goes out in its
    whole batch, with the row: the broker decompresses nothing.
    """
    head = content.head
    if head.codec:
        batch = bytes(content.view)
        return {"time_ms": time_ms, "batch": batch, "row": row, "bytes": len(batch)}
    fields = {}
    if head.fieldmaps_count:
        # All subjects of the batch are read for this: 90 us where there are 5,000.
        headers, codes = content.headers()
        fields = dict(headers[0 if codes is None else int(codes[row])].fields)
    few = content.few_bodies()
    body: Any
    if few is not None:  # In a small batch the bounds of bodies are found without numpy.
        blob, bounds = few
        body = blob[bounds[row] : bounds[row + 1]]
    else:
        bodies = content.bodies()
        begin, end = int(bodies.offsets[row]), int(bodies.offsets[row + 1])
        if head.body_kind == LIST:
            assert bodies.parts is not None
            bounds = bodies.parts[begin : end + 1].tolist()
            body = [bytes(bodies.blob[low:high]) for low, high in pairwise(bounds)]
        else:
            body = bytes(bodies.blob[begin:end])
    # msgpack has up to 5 bytes before each part of a list, and a RESULT about 100 beside the body.
    size = sum(map(len, body)) + 5 * len(body) if isinstance(body, list) else len(body)
    return {"time_ms": time_ms, "body": body, "fields": fields, "bytes": size + 100}
