"""Administration of streams: make, change and remove them, facts, plans, producers.

Owns the commands about streams and producers that a RESULT answers; a handler raises BrokerRefused,
and the broker answers with it. Facts about a stream are told to those who may read, trim or manage
it. The rules: each list is bounded and paged; a change is answered when it is durable; a question
to the journal is answered when the journal has answered. Source: SPEC.md, section 4;
docs/design.md, Safety.

A call that comes later is wrapped by contained(): an error in it ends the link that asked, and not
the broker. `link.queries` counts a link's questions that are not answered, which are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from malamute_protocol.commands import (
    Command,
    CreateStream,
    EditStream,
    FindOffset,
    ListStreams,
    OpenProducer,
    PlanRead,
    RemoveStream,
    StartKind,
    StreamInfo,
    StreamSchemas,
)
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answer, Answers
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.steps import Steps, Then
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import IndexFailure
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.conditions import batch_bytes_most
from malamute_py.broker.streams.moved_plans import MovedPart, fewer, plan_moved
from malamute_py.broker.streams.producers import Producer, Producers
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.streams.retention import Retention
from malamute_py.broker.streams.start_positions import Begin, Starts, may_match
from malamute_py.changelog.records import ProducerOpened
from malamute_py.matcher import compile_pattern

EPOCHS_TOLD: Final = 64
"""Epochs of a stream that STREAM_INFO tells, the newest."""
_PLAIN_STARTS: Final = (
    StartKind.EARLIEST, StartKind.LATEST, StartKind.OFFSET, StartKind.TIME,
)  # fmt: skip
"""Kinds of starts that are found without a look at what records hold."""


class StreamAdmin:
    """The commands about streams and producers that a RESULT answers."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        catalogue: Catalogue,
        publishing: Publishing,
        producers: Producers,
        starts: Starts,
        steps: Steps,
        answers: Answers,
        pages: Pages,
        retention: Retention,
    ) -> None:
        self._shard = shard
        self._links = links
        self._catalogue = catalogue
        self._publishing = publishing
        self._producers = producers
        self._starts = starts
        self._steps = steps
        self._answers = answers
        self._pages = pages
        self._retention = retention
        self._opening = 0
        """New producers on their way into the log: they count among those that there may be."""

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Return the handler of each command, for the broker's table of commands."""
        return {
            OpenProducer: self.open_producer,
            CreateStream: self.create_stream,
            EditStream: self.edit_stream,
            RemoveStream: self.remove_stream,
            StreamInfo: self.stream_info,
            StreamSchemas: self.stream_schemas,
            ListStreams: self.list_streams,
            FindOffset: self.find_offset,
            PlanRead: self.plan_read,
        }

    # --- streams ----------------------------------------------------------------------------

    def create_stream(self, link: Link, command: CreateStream) -> None:
        """Create a stream; the answer follows when the creation is durable."""
        if not self._shard.settings.permit(link.owner, "create", command.stream):
            raise BrokerRefused("forbidden", f"you may not create stream '{command.stream}'")
        self._catalogue.create(
            command.stream, command.settings, link.owner, partial(self._created, link, command),
            partial(self._answers.refuse, link, command),
        )  # fmt: skip

    def _created(self, link: Link, command: CreateStream, stream: Stream) -> None:
        """Answer a CREATE_STREAM with the stream's facts once its creation is durable."""
        facts = partial(self._facts, stream)
        Answer(self._answers, link, command, facts).after(stream.created_lsn)

    def edit_stream(self, link: Link, command: EditStream) -> None:
        """Change settings of a stream; the answer follows when the change is durable."""
        stream = self._catalogue.find(link.owner, command.stream, "manage_streams")
        answer = Answer(self._answers, link, command, partial(self._facts, stream))
        self._catalogue.edit(
            stream, command.settings, answer, link.owner, replace=command.replace
        )  # fmt: skip

    def remove_stream(self, link: Link, command: RemoveStream) -> None:
        """Remove a stream; the answer follows when the removal is durable."""
        stream = self._catalogue.find(link.owner, command.stream, "manage_streams")
        self._catalogue.remove(stream, Answer(self._answers, link, command))

    def stream_info(self, link: Link, command: StreamInfo) -> None:
        """Answer a STREAM_INFO with the facts about one stream.

        Where only the journal knows which records are past the stream's bound of age, it is asked
        first: these are not told as kept, although they still take space.
        """
        action = self._catalogue.action_for_facts(link.owner, command.stream)
        stream = self._catalogue.find(link.owner, command.stream, action)

        if not self._retention.asks_for_age(stream):
            self._answers.result(link, command, self._facts(stream))
            return
        self._links.count_query(link)  # Raises where the link has too many questions under way.

        def measured(young: int, aged_bytes: int) -> None:
            """Answer with what the journal found.

            young: the first record that the stream keeps by its age. aged_bytes: of those before.
            """
            link.queries -= 1
            facts = self._facts(stream)
            if young > facts["first"]:
                facts["first"], facts["aged_bytes"] = young, aged_bytes
            self._answers.result(link, command, facts)

        then = self._links.contained(link, "STREAM_INFO", measured)
        self._retention.measure_aged(stream, link, then, lambda: link.open)

    def stream_schemas(self, link: Link, command: StreamSchemas) -> None:
        """Answer a STREAM_SCHEMAS with what a client needs to know to write to or read a stream.

        These are its uuid, its settings keep and body_kind, the versions of its schema and, where
        its ring is small, how large a batch may be. A link may ask that may read it, or write to
        it, be it under some subjects alone.
        """
        owner, name, settings = link.owner, command.stream, self._shard.settings
        if settings.permit(owner, "write", name) or settings.subjects(owner, name) is not None:
            stream = self._catalogue.get(name)
            if stream is None:
                raise BrokerRefused("unknown_stream", f"there is no stream '{name}'")
        else:
            # Refused `forbidden` where the owner may not read it.
            stream = self._catalogue.find(owner, name, "read")
        value = {
            "stream": stream.uuid, "keep": stream.settings.keep,
            "body_kind": stream.settings.body_kind, "schemas": list(stream.schemas.items()),
        }  # fmt: skip
        self._answers.result(link, command, value | self._batch_bounds([stream]))

    def _facts(self, stream: Stream) -> dict[str, Any]:
        """Return all facts of one stream, for the answers to STREAM_INFO and to changes of it."""
        audience = stream.audience
        return {
            **_short(stream, self._shard.now_ms),
            "epoch": self._shard.epoch,
            "epochs": [list(pair) for pair in stream.epochs[-EPOCHS_TOLD:]],
            "ring": stream.ring.name,
            "visible": stream.visible_next,
            "last_time_ms": stream.newest_ms,
            "trimmed": stream.row.trimmed,
            "purges": [
                [msgspec.msgpack.decode(pattern), before]
                for pattern, before in stream.purges.marks
                if before > stream.first
            ],
            "settings": _settings(stream),
            "subscriptions": audience.count,
            "live": audience.live,
            "patterns": audience.patterns,
            "created_ms": stream.row.created_ms,
            "created_by": stream.row.by,
            **_keys(stream),
        }

    def list_streams(self, link: Link, command: ListStreams) -> None:
        """Answer a LIST_STREAMS with one page of names and short facts."""
        self._pages.begin(
            link, command, "streams", command.after,
            partial(self._catalogue.names_after, command.prefix),
            partial(self._listed, link.owner),
        )  # fmt: skip

    def _listed(self, owner: str, name: str) -> dict[str, Any] | None:
        """Return what a list tells an owner of a stream; None: nothing."""
        stream = self._catalogue.get(name)
        if stream is None or not self._catalogue.may_have_facts(owner, name):
            return None
        return _short(stream, self._shard.now_ms)

    # --- positions --------------------------------------------------------------------------

    def find_offset(self, link: Link, command: FindOffset) -> None:
        """Answer FIND_OFFSET: the offset at which a reader with this start would begin."""
        # Positions that say nothing of what records hold are among the facts of a stream, which are
        # also for those who may only trim or manage it. The first item of a start is its kind.
        plain = command.start and command.start[0] in _PLAIN_STARTS
        action = self._catalogue.action_for_facts(link.owner, command.stream) if plain else "read"
        stream = self._catalogue.find(link.owner, command.stream, action)
        self._links.count_query(link)  # found() takes the question off the count again.

        def found(begin: Begin | BrokerRefused) -> None:
            """Answer the FIND_OFFSET with the position that was found, or refuse it."""
            link.queries -= 1
            if isinstance(begin, BrokerRefused):
                self._answers.refuse(link, command, begin.code, begin.reason)
                return
            self._answers.result(
                link, command,
                {
                    "stream": stream.uuid, "epoch": self._shard.epoch, "offset": begin.next,
                    "first": stream.first_to_read(self._shard.now_ms), "tail": stream.next,
                    "rewound": begin.rewound_from is not None,
                },
            )  # fmt: skip

        durable, every_record = False, ["all"]
        self._starts.resolve(
            stream, command.start, durable, every_record,
            self._links.contained(link, "FIND_OFFSET", found),
            end=stream.next, asker=link, wanted=lambda: link.open,
        )  # fmt: skip

    def plan_read(self, link: Link, command: PlanRead) -> None:
        """Answer a PLAN_READ: how much a reader such as Spark would read, and in which ranges.

        First the start is resolved, then the read is planned from there (_plan()).
        """
        stream = self._catalogue.find(link.owner, command.stream, "read")
        if command.visibility not in (0, 1, 2):
            raise BrokerRefused("unsupported", f"no visibility {command.visibility}")
        compile_pattern(command.pattern)  # Raises where it is unsound.
        self._links.count_query(link)
        live = 0  # All else, `durable` and `committed`, is of what no power loss can take back.
        durable = command.visibility != live

        def found(begin: Begin | BrokerRefused) -> None:
            """Plan the read from the start that was found, or refuse the command."""
            if isinstance(begin, BrokerRefused):
                link.queries -= 1
                self._answers.refuse(link, command, begin.code, begin.reason)
            else:
                self._plan(link, command, stream, begin, durable)

        self._starts.resolve(
            stream, command.start, durable, command.pattern,
            self._links.contained(link, "PLAN_READ", found),
            end=stream.next, asker=link, wanted=lambda: link.open,
        )  # fmt: skip

    def _plan(
        self, link: Link, command: PlanRead, stream: Stream, begin: Begin, durable: bool
    ) -> None:
        """Answer a PLAN_READ: the end of the read and its splits, within the command's caps.

        begin: the start that was found. A split is a range of offsets with its bytes. Newest
        records that have moved into copies, whose offsets are the lowest, are planned from memory
        (moved_plans.py), all others by the journal's index; the two plans are joined.
        """
        tail = stream.visible_next if durable else stream.next
        end = tail if command.end < 0 else min(command.end, tail)
        now_ms, keys = self._shard.now_ms, stream.keys
        kept = stream.first_to_read(now_ms)
        first = max(begin.next, kept)
        value: dict[str, Any] = {
            "stream": stream.uuid, "epoch": self._shard.epoch, "first": kept,
            "trimmed": stream.row.trimmed, "tail": tail, "from": begin.next,
            "to": max(end, begin.next), "splits": [], "records": 0, "bytes": 0,
            "unbroken": [], "rewound": begin.rewound_from is not None,
        }  # fmt: skip
        moved: MovedPart | None = None
        if keys is not None and first < min(stream.first, end):
            moved = plan_moved(keys, first, min(stream.first, end), command)
            first = moved.to
            splits = fewer(moved.splits, self._shard.settings.splits_max)
            value |= {"splits": splits, "records": moved.records, "bytes": moved.bytes}
            if moved.ended:
                value["to"] = end = moved.to  # The plan ends here, and the index has no part in it.
        if first >= end:
            link.queries -= 1
            self._answers.result(link, command, value)
            return

        def planned(answer: Any) -> None:
            """Add what the index answered to the plan, and answer the command."""
            link.queries -= 1
            if isinstance(answer, IndexFailure):
                self._answers.refuse(link, command, answer.code, answer.reason)
                return
            try:  # Answers to other questions may have come to wait since it was asked.
                self._answers.check(link)
            except BrokerRefused as error:
                self._answers.refuse_with(link, command, error)
                return
            young = answer.pop("young")  # First offset that the stream keeps by its age; 0: any.
            del answer["begin"]  # For retention alone.
            if keys is not None:
                _add_given_up(answer, first)  # Ranges of which the index knows no batch any more.
                # Ranges that have every record: the index does not know which were replaced.
                answer["unbroken"] = []
            if moved is not None:
                splits = value["splits"] + answer["splits"]
                answer["splits"] = fewer(splits, self._shard.settings.splits_max)
                answer["records"] += moved.records
                answer["bytes"] += moved.bytes
            answer["first"] = max(kept, young)
            self._answers.result(link, command, {**value, **answer})

        self._shard.ask(
            stream.ring.name, stream.number, "plan",
            {
                "from": first, "end": end, "pattern": command.pattern,
                "candidates": partial(may_match, command.pattern),
                # What has moved counts against the bounds of the command; 0: there is no bound.
                "records_max": command.records_max and command.records_max - value["records"],
                "bytes_max": command.bytes_max and command.bytes_max - value["bytes"],
                "split_bytes": command.split_bytes, "client_time": command.client_time,
                "splits_max": self._shard.settings.splits_max, "purges": stream.purges.marks,
                "oldest_ms": stream.oldest_ms(now_ms), "pinned": stream.pinned, "now_ms": now_ms,
            },
            self._links.contained(link, "PLAN_READ", planned), link, lambda: link.open,
        )  # fmt: skip

    # --- producers --------------------------------------------------------------------------

    def open_producer(self, link: Link, command: OpenProducer) -> None:
        """Give a client a new producer id, or let it go on with the one that it has.

        The answer has the id, its epoch and its next sequences; it follows when a change is
        durable. With `fence` the epoch of the id rises, so that an earlier client with it, which
        may still run, is refused from now on.
        """
        producers = self._producers
        if command.id == 0:  # A new producer is asked for.
            publishing = self._publishing
            # Producers that are being forgotten still count in `producers`.
            most = self._shard.settings.producers_max + publishing.forgetting
            if len(producers) + self._opening >= most:
                # The identity with the most producers loses those that it has not used for longest.
                if publishing.forgetting or not len(producers):
                    raise BrokerRefused("wait", "producers that were long unused make room")
                publishing.forget_producers(producers.in_the_way())
            self._opening += 1
            self._open(link, command, ProducerOpened(producers.mint(), link.identity, epoch=0))
            return
        known = producers.get(command.id)
        if known is None or known.identity != link.identity:
            self._refuse_unknown(link, command)
        elif command.fence:
            self._open(
                link, command, ProducerOpened(known.id, link.identity, known.epoch, fence=True)
            )
        elif command.epoch != known.epoch:
            code = "fenced" if command.epoch < known.epoch else "unknown_producer"
            raise BrokerRefused(code, f"the producer is at epoch {known.epoch}")
        else:
            producers.used(known.id)
            self._answers.result(link, command, self._producer_facts(known))

    def _open(self, link: Link, command: OpenProducer, change: ProducerOpened) -> None:
        """Put the opening or fencing of a producer on its way; the answer follows when durable."""
        answer = Answer(self._answers, link, command)
        opened = partial(self._opened, change, answer), partial(self._not_opened, change, answer)
        self._steps.propose(change, Then(*opened))

    def _opened(self, change: ProducerOpened, answer: Answer, end_lsn: int) -> None:
        """Answer an OPEN_PRODUCER whose change the log has, with the epoch and the sequences."""
        if not change.fence:  # A new producer, which counts by itself from now on.
            self._opening -= 1
        producer = self._producers.get(change.id)
        if producer is None:
            self._refuse_unknown(answer.link, answer.command)
            return
        # The epoch is the one that this change sets: the next change may raise it before this one
        # is durable.
        answer.value = partial(dict, self._producer_facts(producer))
        answer.after(end_lsn)

    def _not_opened(self, change: ProducerOpened, answer: Answer, *why: Any) -> None:
        """Refuse an OPEN_PRODUCER whose change the log refused. why: code, reason, retry time."""
        if not change.fence:
            self._opening -= 1
        answer.refuse(*why)

    def _refuse_unknown(self, link: Link, command: OpenProducer) -> None:
        """Refuse an OPEN_PRODUCER for a producer of another identity, or of none."""
        self._answers.refuse(
            link, command, "unknown_producer",
            f"there is no producer {command.id} of this identity",
        )  # fmt: skip

    def _producer_facts(self, producer: Producer) -> dict[str, Any]:
        """Return the facts of a producer for its client.

        `next`: by stream the sequence at which it goes on, of the streams that it wrote to in the
        present epoch; in any other it begins at 0.
        """
        next: dict[str, int] = {}
        streams: list[Stream] = []
        for number, place in producer.streams.items():
            stream = self._catalogue.by_number(number)
            if stream is not None and place.epoch == producer.epoch:
                next[stream.name] = place.next
                streams.append(stream)
        facts = {"id": producer.id, "epoch": producer.epoch, "next": next}
        return facts | self._batch_bounds(streams)

    def _batch_bounds(self, streams: Iterable[Stream]) -> dict[str, Any]:
        """Return the fact `batch_bytes_max`: most bytes of a batch, of streams with small rings.

        The other streams take as much as WELCOME says.
        """
        most = self._shard.settings.limits.batch_bytes_max
        sizes = {stream.name: batch_bytes_most(stream.settings, most) for stream in streams}
        return {"batch_bytes_max": {name: size for name, size in sizes.items() if size < most}}


def _add_given_up(plan: dict[str, Any], first: int) -> None:
    """Let a plan of the index begin at `first`, where the ring gave up segments in the meantime.

    Newest records of these segments have moved into copies since the plan of what has moved was
    made: the reader asks for their offsets all the same, so that it misses none. Their number is at
    most that of the offsets, and their bytes are not known: 1.
    """
    splits = plan["splits"]
    begin = plan["to"]
    if splits:
        begin, _end, _bytes = splits[0]
    if begin > first:
        splits.insert(0, [first, begin, 1])
        plan["records"] += begin - first
        plan["bytes"] += 1


def _keys(stream: Stream) -> dict[str, int]:
    """Return the facts about the keys of a stream, without deleted ones; {}: it has no keys."""
    keys = stream.keys
    if keys is None:
        return {}
    return {"keys": len(keys) - len(keys.deleted), "keys_bytes": keys.bytes}


def _settings(stream: Stream) -> dict[str, Any]:
    """Return all settings of a stream by name, for an answer."""
    settings = stream.settings
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def _short(stream: Stream, now_ms: int) -> dict[str, Any]:
    """Return the facts of a stream that a list of streams shows.

    Records beyond its bounds that still take space are not kept: `first` comes after them, and
    `aged_bytes` has their bytes.
    """
    first = stream.first_at(now_ms)
    return {
        "name": stream.name,
        "uuid": stream.uuid,
        "number": stream.number,
        "generation": stream.row.generation,
        "first": first,
        "tail": stream.next,
        "bytes": stream.ledger.bytes,
        "aged_bytes": stream.aged_bytes(first),
        "memory": stream.ring.memory,
    }
