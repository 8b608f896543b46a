"""One run of one work by one column: the roles that play, the proof, the figures.

Owns the beginning and end of each timed span. The rule: a figure exists only when every record was
seen by each reader that should see it, once and in order, and confirmed at the level asked for;
otherwise NotVerified says what was wrong.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from perf.peers.driver import rare_places
from perf.peers.peer import Column, Peer, Server
from perf.suite.results import Run
from perf.suite.roles import Role
from perf.suite.works import OURS, Work

READY_S = 90.0
RESULT_S = 45.0
SETTLE_S = 5.0
SETTLE_STEP_S = 0.1
MATCHING = (sys.executable, "-m", "perf.suite.matching")
QUANTILES = ("p50_us", "p99_us", "p999_us")
RARE = 10_000
BY_RECORDS = 1_000_000
"""Records that are read one by one: all ten million would give the same figure, ten times as
slowly."""
SEED = 7
HELD = 0.95
"""Share of its rate that a paced run must reach: otherwise it says nothing about latency at that
rate."""
HALF_MOST = 50_000


class NotVerified(Exception):
    """A run whose records were not all proved."""


class NotKept(NotVerified):
    """A paced run that did not keep its pace."""

    def __init__(self, rate: float, reached: float) -> None:
        super().__init__(f"paced at {rate:,.0f} a second it reached {reached:,.0f}")
        self.reached = reached


class Left(Exception):
    """A work that cannot be done here, which is no failure: the text says why."""


class Filled(msgspec.Struct, frozen=True):
    """A log that replays read."""

    subject: str
    count: int
    rare: int
    middle: int
    middle_ns: int


class Bench:
    """The running server of a column, and the data that earlier runs left in it."""

    def __init__(self, peer: Peer, column: Column, folder: Path) -> None:
        self.peer = peer
        self.column = column
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self.server: Server | None = None
        self.filled: dict[str, Filled] = {}
        self.client_version: dict[str, str] = {}

    def start(self) -> float:
        """Start the server on the folder's data; returns the seconds that it took."""
        begun = time.monotonic()
        self.server = self._stack.enter_context(self.peer.server(self.column, self.folder))
        return time.monotonic() - begun

    def stop(self) -> None:
        """Stop the server in order."""
        self.server = None
        self._stack.close()

    def kill(self) -> None:
        """Kill the server (SIGKILL), then end the rest of the block."""
        if self.server is not None:
            self.server.kill()
        self.stop()

    @property
    def running(self) -> Server:
        assert self.server is not None
        return self.server


class Cost:
    """The server's cost between two moments."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._since = time.time()
        self._cpu_s = server.cpu_s()
        self._disk = server.disk_bytes()

    def figures(
        self, records: int, *, disk_bytes: float | None, persistent: bool
    ) -> dict[str, float]:
        """Return the figures. records: over which processor time and disk are spread.

        disk_bytes: as the server counts what the records take; else its files' growth. A server
        that says so allocates files ahead and uses them again: the blocks of all its files that
        were written to are shown as well.
        """
        figures = {
            "server_cpu_us": (self._server.cpu_s() - self._cpu_s) / records * 1e6,
            "rss_mib": self._server.rss_bytes() / (1 << 20),
        }
        grown = self._server.disk_bytes() - self._disk if disk_bytes is None else disk_bytes
        if persistent and grown > 0:
            figures["disk_bytes"] = grown / records
            blocks = grown if disk_bytes is None else self._server.disk_bytes(self._since)
            figures["disk_blocks"] = blocks / records
        return figures


def settle(servers: Sequence[Server]) -> None:
    """Return when all is at rest: dirty pages written, servers idle; SETTLE_S at most."""
    os.sync()
    deadline = time.monotonic() + SETTLE_S
    before = sum(server.cpu_s() for server in servers)
    while time.monotonic() < deadline:
        time.sleep(SETTLE_STEP_S)
        now = sum(server.cpu_s() for server in servers)
        # The kernel counts in hundredths of a second.
        if now - before <= 0.02:
            return
        before = now


def _ready(bench: Bench, *roles: Role) -> None:
    for role in roles:
        bench.client_version[bench.column.name] = role.ready(READY_S)


def _end(*roles: Role) -> None:
    for role in roles:
        role.end()


def _check_received(facts: Mapping[str, Any], expected: int) -> None:
    bad = {
        name: facts.get(name)
        for name, right in (
            ("received", expected),
            ("missing", 0),
            ("duplicates", 0),
            ("misordered", 0),
        )
        if facts.get(name) != right
    }
    if bad:
        raise NotVerified(
            f"{expected} records were due: " + ", ".join(f"{k} {v}" for k, v in bad.items())
        )


def _confirmed(column: Column, facts: Mapping[str, Any], count: int) -> None:
    if column.persistent and facts.get("confirmed") != count:
        raise NotVerified(f"{count} records published, {facts.get('confirmed')} confirmed")


def _check_pace(rate: float, reached: float) -> None:
    if reached < HELD * rate:
        raise NotKept(rate, reached)


class Measure:
    """Runs works; `idle` gives the servers that should rest meanwhile."""

    def __init__(self, idle: Callable[[], Sequence[Server]]) -> None:
        self._idle = idle
        self._serial = 0
        self._kinds: dict[str, Callable[[Work, Bench, Column, int, float], Run]] = {
            "stream": self._stream,
            "replay": self._replay,
            "request": self._request,
            "round": self._request,
            "latency": self._latency,
            "steps": self._steps,
            "start": self._start,
            "matching": self._matching,
        }

    def run(self, work: Work, bench: Bench, column: Column, count: int, rate: float = 0.0) -> Run:
        """Do one run. rate: of a paced work. Raises RoleFailed, NotVerified, ServerFailed."""
        return self._kinds[work.kind](work, bench, column, count, rate)

    def _subject(self) -> str:
        """Return a name that no earlier run had, fit for every peer."""
        self._serial += 1
        return f"perf{os.getpid()}n{self._serial}"

    def _keys(self, bench: Bench, column: Column, size: int, count: int) -> dict[str, object]:
        keys: dict[str, object] = {
            "url": bench.running.url, "mode": column.mode, "size": size, "count": count
        }  # fmt: skip
        if column.window:
            keys["window"] = column.window
        return keys

    def _stream(self, work: Work, bench: Bench, column: Column, count: int, rate: float) -> Run:
        own = dict(work.keys)
        producers, subscribers = int(own.get("producers", 1)), int(own.get("subscribers", 1))
        each = max(1, count // producers)
        keys = {**self._keys(bench, column, work.size, each), **own, "subject": self._subject()}
        with contextlib.ExitStack() as stack:
            # One after the other: two that would both create a queue come into each other's way.
            consumer = stack.enter_context(Role(column.command, "subscribe", **keys))
            _ready(bench, consumer)
            makers = [
                stack.enter_context(Role(column.command, "publish", **keys, producer=number))
                for number in range(producers)
            ]
            _ready(bench, *makers)
            settle(self._idle())
            cost = Cost(bench.running)
            consumer.go()
            for maker in makers:
                maker.go()
            made = [maker.result(RESULT_S) for maker in makers]
            taken = consumer.result(RESULT_S)
            total = each * producers
            deliveries = total * subscribers
            told = taken.get("disk_bytes")
            figures = cost.figures(
                deliveries if subscribers > 1 else total,
                disk_bytes=told,
                # Our files are allocated ahead and used again: their growth says nothing.
                persistent=column.persistent and (told is not None or column.peer != OURS),
            )
            _end(*makers, consumer)
        for facts in made:
            _confirmed(column, facts, each)
        _check_received(taken, deliveries)
        begun = min(facts["begun_ns"] for facts in made)
        published_s = (max(facts["ended_ns"] for facts in made) - begun) / 1e9
        # Over when the last confirm and the last record are there, whichever is later.
        seconds = max(published_s, (taken["ended_ns"] - begun) / 1e9)
        figures |= {
            "seconds": seconds,
            "records_s": total / seconds,
            "mb_s": total * work.size / seconds / 1e6,
            "published_s": total / published_s,
            "publisher_cpu_us": sum(facts["cpu_s"] for facts in made) / total * 1e6,
            "consumer_cpu_us": taken["cpu_s"] / deliveries * 1e6,
        }
        # One publish after the other: from each call to its confirm.
        figures |= {name: made[0][name] for name in QUANTILES if name in made[0]}
        if subscribers > 1:
            figures["deliveries_s"] = deliveries / seconds
        return Run(total, figures)

    def _fill(self, work: Work, bench: Bench, column: Column, count: int) -> Filled:
        """Return the log of this column, written the first time that a run asks for it."""
        filled = bench.filled.get(column.name)
        if filled is not None:
            return filled
        rare = RARE if "replay-rare" in column.roles else 0
        subject = self._subject()
        keys = self._keys(bench, column, work.size, count)
        maker = Role(column.command, "fill", **keys, subject=subject, rare=rare, seed=SEED)
        with maker:
            _ready(bench, maker)
            maker.go()
            # The fill may be slow: the figure is of reading.
            facts = maker.result(3 * RESULT_S)
            maker.end()
        _confirmed(column, facts, count)
        filled = Filled(
            subject, count, rare, int(facts.get("middle", 0)), int(facts.get("middle_ns", 0))
        )
        bench.filled[column.name] = filled
        return filled

    def _replay(self, work: Work, bench: Bench, column: Column, count: int, rate: float) -> Run:
        filled = self._fill(work, bench, column, count)
        select = str(dict(work.keys)["select"])
        expected = {
            "whole": filled.count,
            "rare": len(rare_places(filled.count, RARE, SEED)),
            "time": filled.count - filled.middle,
            "records": min(BY_RECORDS, filled.count),
        }[select]
        if not expected:
            raise NotVerified(f"{filled.count} records are too few to have any to select")
        taken, go_ns, cost = self._read(work, bench, column, filled, select, expected)
        seconds = (taken["ended_ns"] - go_ns) / 1e9
        # A rare subject is as fast as the log that it need not read is long.
        gone_through = filled.count if select == "rare" else expected
        return Run(
            expected if select == "records" else filled.count,
            {
                **cost.figures(gone_through, disk_bytes=0, persistent=False),
                "seconds": seconds,
                "records_s": gone_through / seconds,
                "mb_s": expected * work.size / seconds / 1e6,
                "consumer_cpu_us": taken["cpu_s"] / gone_through * 1e6,
            },
        )

    def _read(
        self, work: Work, bench: Bench, column: Column, filled: Filled, select: str, expected: int
    ) -> tuple[dict[str, Any], int, Cost]:
        reader = Role(
            column.command,
            "replay",
            **self._keys(bench, column, work.size, filled.count),
            subject=filled.subject,
            start="first",
            select=select,
            rare=filled.rare,
            seed=SEED,
            first=filled.middle if select == "time" else 0,
            expected=expected,
            from_ns=filled.middle_ns if select == "time" else 0,
        )
        with reader:
            _ready(bench, reader)
            settle(self._idle())
            cost = Cost(bench.running)
            go_ns = time.monotonic_ns()
            reader.go()
            taken = reader.result(RESULT_S)
            reader.end()
        _check_received(taken, expected)
        return taken, go_ns, cost

    def _request(self, work: Work, bench: Bench, column: Column, count: int, rate: float) -> Run:
        keys = {
            **self._keys(bench, column, work.size, count),
            **dict(work.keys),
            "subject": self._subject(),
        }
        if rate:
            keys["rate"] = rate
        worker = Role(column.command, "respond", **keys)
        with worker:
            _ready(bench, worker)
            asker = Role(column.command, "request", **keys)
            with asker:
                _ready(bench, asker)
                settle(self._idle())
                cost = Cost(bench.running)
                asker.go()
                asked = asker.result(RESULT_S)
                figures = cost.figures(count, disk_bytes=0, persistent=False)
                worker.go()
                worked = worker.result(RESULT_S)
                _end(asker, worker)
        seconds = (asked["ended_ns"] - asked["begun_ns"]) / 1e9
        if rate:
            _check_pace(rate, (count - 1) / seconds)
        return Run(
            count,
            {
                **figures,
                "seconds": seconds,
                "round_trips_s": count / seconds,
                **({"rate_s": rate} if rate else {}),
                **{name: asked[name] for name in QUANTILES},
                "requester_cpu_us": asked["cpu_s"] / count * 1e6,
                "worker_cpu_us": worked["cpu_s"] / count * 1e6,
            },
        )

    def _latency(self, work: Work, bench: Bench, column: Column, count: int, rate: float) -> Run:
        keys = {
            **self._keys(bench, column, work.size, count),
            "rate": rate,
            "subject": self._subject(),
        }
        with contextlib.ExitStack() as stack:
            ear = stack.enter_context(Role(column.command, "listen", **keys))
            _ready(bench, ear)
            mouth = stack.enter_context(Role(column.command, "pace", **keys))
            _ready(bench, mouth)
            settle(self._idle())
            cost = Cost(bench.running)
            ear.go()
            mouth.go()
            said = mouth.result(RESULT_S)
            heard = ear.result(RESULT_S)
            figures = cost.figures(count, disk_bytes=0, persistent=False)
            _end(mouth, ear)
        if heard["received"] != count:
            raise NotVerified(f"{count} records were due: received {heard['received']}")
        seconds = (said["ended_ns"] - said["begun_ns"]) / 1e9
        reached = (count - 1) / seconds
        _check_pace(rate, reached)
        return Run(
            count,
            {
                **figures,
                "seconds": seconds,
                "rate_s": reached,
                **{name: heard[name] for name in QUANTILES},
            },
        )

    def _steps(self, work: Work, bench: Bench, column: Column, count: int, rate: float) -> Run:
        keys = {
            **self._keys(bench, column, work.size, count),
            **dict(work.keys),
            "subject": self._subject(),
        }
        stepper = Role(column.command, "steps", **keys)
        with stepper:
            _ready(bench, stepper)
            settle(self._idle())
            cost = Cost(bench.running)
            stepper.go()
            facts = stepper.result(RESULT_S)
            figures = cost.figures(count, disk_bytes=0, persistent=False)
            stepper.end()
        _confirmed(column, facts, count)
        seconds = (facts["ended_ns"] - facts["begun_ns"]) / 1e9
        return Run(
            count,
            {
                "seconds": seconds,
                "steps_s": count / seconds,
                **figures,
                "publisher_cpu_us": facts["cpu_s"] / count * 1e6,
            },
        )

    def _matching(self, work: Work, bench: Bench, column: Column, count: int, rate: float) -> Run:
        """Measure the matcher alone, in a process of its own, without a broker."""
        program = Role(MATCHING, "match", **dict(work.keys), count=count)
        with program:
            _ready(bench, program)
            settle(self._idle())
            program.go()
            facts = program.result(RESULT_S)
            program.end()
        return Run(count, {name: float(value) for name, value in facts.items()})

    def _start(self, work: Work, bench: Bench, column: Column, count: int, rate: float) -> Run:
        """Start after an orderly stop, then after SIGKILL; afterwards all records are there."""
        filled = self._fill(work, bench, column, count) if count else None
        bench.stop()
        orderly_s = bench.start()
        rss = bench.running.rss_bytes()
        bench.kill()
        killed_s = bench.start()
        if filled is not None:
            self._read(work, bench, column, filled, "whole", filled.count)
        return Run(
            count,
            {
                "seconds": orderly_s + killed_s,
                "start_s": orderly_s,
                "start_after_kill_s": killed_s,
                "rss_mib": rss / (1 << 20),
            },
        )
