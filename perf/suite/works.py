"""The works that are measured: each with its roles, its counts and its columns.

Owns the plan. A work is data: `kind` says which roles play (measure.py), `keys` are their
arguments. Works of a section share running servers. Counts follow from the known rates of a column
(Column.rates), so that a run takes about RUN_S in each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from perf.peers.peer import Column

RUN_S = 0.8
TOGETHER = frozenset({"request", "single", "alone", "latency", "round-trip"})
"""Sections that share running servers: little is left in them."""
LIGHT_S = 2.0
PACED_S = 1.5
"""Seconds at a light pace, which needs longer to have enough records for the last percentiles."""
HALF_S = 1.0
"""Seconds at half of a rate, where there are enough of them sooner."""
WILD_S = 2.0
"""Seconds with 2,000 subscriptions, which take longer to reach a steady rate."""
SIZES = (12, 140, 560, 1120, 2940, 11760)
"""Bytes a record: those that laminarmq measured (docs/design.md, References)."""
OURS = "malamute"


class Work(msgspec.Struct, frozen=True):
    """One work."""

    name: str
    """`section/...`; --only selects by it."""
    kind: str
    title: str
    roles: frozenset[str]
    """Roles that a driver must play to take part."""
    figure: str = "records_s"
    size: int = 140
    keys: tuple[tuple[str, str | int], ...] = ()
    share: float = 1.0
    """Records/s to expect as a share of the bulk form's one to one."""
    most: int = 0
    """Bound on the records; 0: no bound."""
    least: int = 200
    ceiling: int = 0
    """Bound on the records/s to expect, where waiting decides and not throughput; 0: no bound."""
    clients: tuple[str, ...] = ("python", "native")
    """Kinds of clients of the peers; ours always takes part."""
    ours_only: bool = False
    levels: tuple[str, ...] = ("synced",)
    """Levels of our columns that take part."""
    half_of: tuple[str, ...] = ()
    """Only of a paced work: works, of which the first that a column has done gives the pace: half
    of its rate."""
    seconds: float = RUN_S
    """Seconds that a run should take."""
    once: bool = False
    """True: one client of each server takes part, its fastest: the client is not measured."""
    note: str = ""

    @property
    def section(self) -> str:
        return self.name.partition("/")[0]

    @property
    def servers(self) -> str:
        """Return the name of the running servers that the work shares with others."""
        return "together" if self.section in TOGETHER else self.section

    def takes(self, column: Column) -> bool:
        """Whether a column takes part."""
        if not self.roles <= column.roles:
            return False
        if column.peer == OURS:
            return column.mode in self.levels
        return not self.ours_only and column.client in self.clients

    def count(self, column: Column, seconds: float) -> int:
        """Return the records for a run of so many seconds, by the known rate of the column."""
        rate = column.rate(self.size) * self.share
        if self.ceiling:
            rate = min(rate, self.ceiling)
        count = max(self.least, int(rate * seconds))
        return min(count, self.most) if self.most else count


def _roles(*names: str) -> frozenset[str]:
    return frozenset(names)


_STREAM = _roles("publish", "subscribe")
LIVE_NOTE = (
    "a record of ours is delivered when it is appended and need not be synced by then (visibility"
    " `live`, the default); what the run waits for besides is the confirm of every one at the level"
    " of its column"
)


def _one_to_one() -> list[Work]:
    # Records are made before the clock starts; 4 M of 12 bytes are 250 MB of Python objects.
    return [
        Work(
            name=f"one-to-one/{size}",
            kind="stream",
            title=f"one to one, {size:,} B",
            roles=_STREAM,
            size=size,
            keys=(("form", "bulk"),),
            levels=("none", "stored", "synced"),
            # A Python client does a record at a time: the largest sizes show nothing new about it.
            clients=("python", "native") if size <= 1120 else ("native",),
            most=8_000_000,
            note=LIVE_NOTE,
        )
        for size in SIZES
    ]


SINGLE_NOTE = (
    "no target; ours: publish() by 64 tasks, `async for` over records. Of peers: a call of the"
    " client's publish a record, many unconfirmed, and a call-back a record; Redis' publisher is"
    " redis-py with a pipeline of 64 commands, its reader takes what hiredis has read"
)


def _single() -> list[Work]:
    return [
        Work(
            name=f"single/{size}",
            kind="stream",
            title=f"one to one, {size:,} B, a call a record",
            roles=_STREAM,
            size=size,
            keys=(("form", "single"),),
            ceiling=80_000,
            clients=("python",),
            note=SINGLE_NOTE,
        )
        for size in (12, 140, 1120)
    ]


def _alone() -> list[Work]:
    note = (
        "from the call to its confirm, one after the other, a reader beside; who confirms nothing"
        " has no part in it; no target"
    )
    return [
        Work(
            name="alone/140",
            kind="stream",
            title="a lone publish until it is confirmed, 140 B",
            roles=_STREAM | {"alone"},
            figure="p50_us",
            keys=(("form", "single"), ("window", 1)),
            ceiling=1_500,
            clients=("python",),
            note=note,
        ),
        Work(
            name="alone/mail",
            kind="stream",
            title="a lone mail, or message to a durable queue, until it is confirmed, 140 B",
            roles=_STREAM | {"alone", "queue"},
            figure="p50_us",
            keys=(("form", "single"), ("window", 1), ("queue", 1)),
            ceiling=1_500,
            note=note,
        ),
    ]


FAN_OUT_NOTE = (
    "all subscribers are connections of one process, of every peer: where that process or its"
    " language is what is slow, the figure is the client's more than the server's (the processor"
    " times tell)"
)
WILD_NOTE = (
    "each pattern selects one of the subjects. NATS, Redis and Mosquitto hold all 2,000 on one"
    " connection, ours on two (a client may have 1,000), RabbitMQ as bindings of one queue"
)


def _fan_out() -> list[Work]:
    works = [
        Work(
            name=f"fan-out/{subscribers}",
            kind="stream",
            title=f"one to {subscribers:,}, 140 B",
            roles=_STREAM | {"fan-out"},
            figure="deliveries_s",
            keys=(("form", "bulk"), ("subscribers", subscribers)),
            share=share,
            clients=("python", "native") if subscribers == 100 else ("native",),
            note=FAN_OUT_NOTE,
        )
        for subscribers, share in ((10, 0.25), (100, 0.03), (1000, 0.003))
    ]
    works.append(
        Work(
            name="fan-out/100-single",
            kind="stream",
            title="one to 100, 140 B, a call a record",
            roles=_STREAM | {"fan-out"},
            figure="deliveries_s",
            keys=(("form", "single"), ("subscribers", 100)),
            ceiling=6_000,
            ours_only=True,
            note="a call a record: publish() by 64 tasks, `async for` by each subscriber; no"
            " target. Peers' clients give a record at a time in any form",
        )
    )
    works.append(
        Work(
            name="producers/8",
            kind="stream",
            title="eight producers to one consumer, 140 B",
            roles=_STREAM | {"producers"},
            keys=(("form", "bulk"), ("producers", 8)),
            share=0.8,
            clients=("native",),
            most=4_000_000,
        )
    )
    works.append(
        Work(
            name="wildcards/2000",
            kind="stream",
            title="2,000 subjects in turn, 2,000 wildcard subscriptions, 140 B",
            roles=_STREAM | {"wildcards"},
            keys=(("form", "bulk"), ("subjects", 2000)),
            # Brokers differ here by a factor of a hundred. A short first run is repeated, at such a
            # length that records sent before all members work do not decide the figure.
            ceiling=60_000,
            seconds=WILD_S,
            most=1_000_000,
            note=WILD_NOTE,
        )
    )
    return works


REPLAY_NOTE = (
    "by batches; read from the page cache, for everything was written a minute before. The log of a"
    " peer is what it can be filled with in 4 s, its length stands beside"
)
RARE_NOTE = (
    "of a rare subject: records of the whole log that were gone through a second. Who looks it up"
    " gains by a longer log, who reads everything does not"
)
BY_RECORD_NOTE = (
    "`async for` over records, a million of them: no target; peers' clients give a record at a time"
    " in any form"
)


def _replay() -> list[Work]:
    return [
        Work(
            name=f"replay/{select}",
            kind="replay",
            title=title,
            roles=_roles("fill", role),
            keys=(("select", select),),
            most=10_000_000,
            ours_only=select == "records",
            note=note,
        )
        for select, role, title, note in (
            ("whole", "replay", "replay from the start, 140 B", REPLAY_NOTE),
            ("rare", "replay-rare", "replay of a subject of 1 in 10,000, 140 B", RARE_NOTE),
            ("time", "replay-time", "replay from the middle by time, 140 B", ""),
            ("records", "replay", "the first million by `async for`, 140 B", BY_RECORD_NOTE),
        )
    ]  # fmt: skip


REQUEST_NOTE = (
    "nobody waits for a sync here, whatever the column is called: a request of ours is journaled,"
    " its reply is its confirm, and both leave before a sync covers them; request() with its"
    " defaults, a worker with concurrency 256, since those of peers are sent whatever comes"
)


def _requests() -> list[Work]:
    return [
        Work(
            name=f"request/{flight}x{workers}",
            kind="request",
            title=f"request and reply, {flight:,} in flight, {workers} worker"
            + ("s" if workers > 1 else ""),
            roles=_roles("request", "respond"),
            figure="round_trips_s",
            # A call for each request, as 64 callers make them: no peer may collect them into one.
            keys=(("flight", flight), ("workers", workers), ("form", "single")),
            ceiling=ceiling,
            clients=("python", "native") if workers == 1 else ("native",),
            note=REQUEST_NOTE,
        )
        for flight, workers, ceiling in (
            (1, 1, 6_000),
            (64, 1, 40_000),
            (1024, 1, 40_000),
            (1, 8, 6_000),
            (64, 8, 40_000),
            (1024, 8, 40_000),
        )
    ]


def _queues() -> list[Work]:
    works = [
        Work(
            name=f"queue/{form}",
            kind="stream",
            title=f"mail or durable queue, {words}, read and acknowledged, 140 B",
            roles=_STREAM | {"queue"},
            keys=(("form", form), ("queue", 1)),
            ceiling=ceiling,
            note="ours: a mailbox; a run is over when the reader's acknowledgements are confirmed",
        )
        for form, words, ceiling in (
            ("single", "a call a message", 200_000),
            ("bulk", "in bulk", 500_000),
        )
    ]
    works.append(
        Work(
            name="steps/512",
            kind="steps",
            title="atomic steps of four parts, 512 in flight",
            roles=_roles("steps"),
            figure="steps_s",
            size=12,
            keys=(("flight", 512),),
            ceiling=100_000,
            ours_only=True,
        )
    )
    return works


LATENCY_NOTE = (
    "from the call of publish to the consumer's hands, clocks of one machine; ours is delivered"
    " before it is synced. At 1,000/s a run is 2,000 records: p99.9 is the third worst, and"
    " processor time, which the kernel counts in hundredths of a second, comes in steps of 5 us"
)


def _latency() -> list[Work]:
    return [
        Work(
            name="latency/1000",
            kind="latency",
            title="one way at 1,000 records/s, 140 B",
            roles=_roles("pace", "listen"),
            figure="p50_us",
            keys=(("rate", 1000),),
            ceiling=1_000,
            seconds=LIGHT_S,
            note=LATENCY_NOTE,
        ),
        Work(
            name="latency/half",
            kind="latency",
            title="one way at half of the rate of single calls, 140 B",
            roles=_roles("pace", "listen"),
            figure="p50_us",
            half_of=("single/140", "one-to-one/140"),
            seconds=HALF_S,
            note="half of what the same column did in single/140, native clients in one-to-one/140,"
            " at most 50,000/s; four fifths of what it reached where it cannot keep that",
        ),
    ]


def _round_trips() -> list[Work]:
    """Return the work of one caller who asks evenly and waits for replies; it keeps its pace."""
    keys: tuple[tuple[str, str | int], ...] = (
        ("flight", 1), ("workers", 1), ("form", "single"), ("paced", 1),
    )  # fmt: skip
    return [
        Work(
            name="round-trip/1000",
            kind="round",
            title="round trip at 1,000 requests/s, 140 B",
            roles=_roles("request", "respond"),
            figure="p50_us",
            keys=(*keys, ("rate", 1000)),
            ceiling=1_000,
            seconds=LIGHT_S,
            note=REQUEST_NOTE,
        ),
        Work(
            name="round-trip/half",
            kind="round",
            title="round trip at half of one caller's top rate, 140 B",
            roles=_roles("request", "respond"),
            figure="p50_us",
            keys=keys,
            half_of=("request/1x1",),
            seconds=PACED_S,
            note="half of what the same column did in request/1x1; four fifths of what it reached"
            " where it cannot keep that",
        ),
    ]


START_NOTE = (
    "from the command to the first request that is answered, asked each 5 ms; stopped in order, and"
    " killed; afterwards all records are read. Files are in the page cache. RabbitMQ answers before"
    " its streams can be read; Redis reads a file that it never rewrote, and would read a rewritten"
    " one faster"
)


def _starts() -> list[Work]:
    return [
        Work(
            name=f"start/{records}",
            kind="start",
            title=f"start with a journal of {records:,} records of 140 B"
            if records
            else "start on an empty folder",
            roles=_roles("fill", "replay"),
            figure="start_s",
            most=max(1, records),
            least=records,
            ours_only=records > 1_000_000,
            once=True,
            note=START_NOTE,
        )
        for records in (0, 100_000, 1_000_000, 10_000_000)
    ]


MATCHING_NOTE = (
    "the matcher alone, no broker. Seconds for a million messages, from half of it; each topic was"
    " matched once before, which `compile` holds besides. The whitepaper's 26 s, and its 12 s to"
    " compile, are of its own machine of its day"
)


def _matching() -> list[Work]:
    return [
        Work(
            name=f"matching/{form}",
            kind="matching",
            title=title,
            roles=_roles("publish"),
            figure=figure,
            size=0,
            keys=(("form", form),),
            most=count,
            least=count,
            ours_only=True,
            note=note,
        )
        for form, title, figure, count, note in (
            ("whitepaper", "2,000 subscriptions, 2,000 topics, matches enumerated", "match_s",
             500_000, MATCHING_NOTE),
            ("topics", "a new subject, 100,000 topic subscriptions", "p50_us", 2_000, ""),
            ("fields", "a new header of ten fields, 100,000 subscriptions", "p50_us", 1_000, ""),
        )
    ]  # fmt: skip


WORKS: tuple[Work, ...] = (
    *_one_to_one(),
    *_replay(),
    *_fan_out(),
    *_requests(),
    *_single(),
    *_alone(),
    *_latency(),
    *_round_trips(),
    *_queues(),
    *_starts(),
    *_matching(),
)

QUICK = frozenset(
    {
        "one-to-one/12",
        "one-to-one/140",
        "one-to-one/1120",
        "fan-out/100",
        "replay/whole",
        "replay/rare",
        "request/64x1",
        "latency/1000",
        "matching/whitepaper",
        "matching/topics",
        "matching/fields",
    }
)
"""The works of --quick: those that have a target."""


def selected(patterns: Sequence[str], works: Sequence[Work] = WORKS) -> list[Work]:
    """Return the works that any pattern matches, by name, by section, or as a glob."""
    if not patterns:
        return list(works)
    return [
        work
        for work in works
        if any(pattern == work.section or fnmatchcase(work.name, pattern) for pattern in patterns)
    ]
