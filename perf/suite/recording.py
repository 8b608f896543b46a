"""A whole recording: all works, columns interleaved, kept after every run.

Owns the order of the runs and the servers that are up. The rule: run 1 of all columns, then run 2
of all, so that a slow minute of the machine hits all alike; a run that fails is recorded with its
reason, its server begins anew, and the recording goes on.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from perf.peers.peer import Column, Peer, Server, ServerFailed
from perf.suite.measure import HALF_MOST, Bench, Left, Measure, NotKept, NotVerified
from perf.suite.results import (
    ColumnFacts,
    Measured,
    Results,
    Run,
    WorkFacts,
    placeless,
    rounded,
    save,
)
from perf.suite.roles import RoleFailed
from perf.suite.works import OURS, Work

SCALED = frozenset({"stream", "request", "steps"})
"""Kinds of work whose counts follow from the time that the run before took."""
LONG = 1.6
"""Factor: a run that took so many times too long is followed by one with fewer records."""
PACE_TRIES = 3
PACE_KEPT = 0.8
FAILURES_MOST = 2
"""Failures at one work after which a column is not asked again."""
FILL_S = 4.0
USUAL_S = {"replay": 2.3, "start": 2.5, "matching": 3.0}
"""Seconds of a run whose length the work does not set; a share of the filling included."""
OVERHEAD_S = 0.6
"""Seconds of a run besides its work: two interpreters start, the disk comes to rest."""
SERVERS_S = 5.0


class Plan(msgspec.Struct, frozen=True):
    """The plan of a recording."""

    works: tuple[Work, ...]
    columns: tuple[Column, ...]
    runs: int
    scale: float = 1.0
    """Share of the usual length of a run."""
    counts: int = 0
    """Records of every run, whatever its work: for tests; 0: as the work wants."""

    def columns_of(self, work: Work) -> list[Column]:
        found = [column for column in self.columns if work.takes(column)]
        if not work.once:
            return found
        fastest: dict[tuple[str, str], Column] = {}
        for column in found:
            known = fastest.setdefault((column.peer, column.server or column.mode), column)
            if column.rate(work.size) > known.rate(work.size):
                fastest[column.peer, column.server or column.mode] = column
        return list(fastest.values())

    def pairs(self) -> Iterator[tuple[Work, int, Column]]:
        """Yield every run in its order."""
        for work in self.works:
            for run in range(self.runs):
                for column in self.columns_of(work):
                    yield work, run, column

    def count(self, work: Work, column: Column) -> int:
        if self.counts:
            return min(self.counts, work.most) if work.most else self.counts
        if work.kind == "replay":
            # As much as can be filled in a while; ours fills all of it.
            seconds = FILL_S if column.peer != OURS else 1e9
            return int(work.count(column, seconds) * (min(1, self.scale)))
        if work.kind == "start":
            return work.least
        return work.count(column, work.seconds * self.scale)

    def seconds(self, work: Work) -> float:
        """Return the seconds that a run of a work is expected to take."""
        return USUAL_S.get(work.kind, work.seconds) * self.scale + OVERHEAD_S

    def total_s(self) -> float:
        servers = len({work.servers for work in self.works})
        return sum(self.seconds(work) for work, _, _ in self.pairs()) + SERVERS_S * servers


class Listener:
    """Base of those that are told of the progress: the screen, or a log. This one does nothing."""

    def begins(self, work: Work, run: int, column: Column) -> None: ...

    def ends(self, work: Work, run: int, column: Column, outcome: Run) -> None: ...

    def skips(self, work: Work, run: int, column: Column) -> None: ...

    def says(self, text: str) -> None: ...


class Recording:
    """Runs a plan into results."""

    def __init__(
        self,
        plan: Plan,
        peers: Mapping[str, Peer],
        results: Results,
        out: Path,
        data: Path,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """out: folder for the results. data: folder for the servers' data, on a disk."""
        self._plan = plan
        self._peers = peers
        self._results = results
        self._out = out
        self._data = data
        self._listener = listener
        self._clock = clock
        self._benches: dict[str, Bench] = {}
        self._measure = Measure(self._up)

    def _up(self) -> list[Server]:
        return [bench.server for bench in self._benches.values() if bench.server is not None]

    def run(self) -> None:
        """Do the rest of the plan; results are saved after every run."""
        since = self._clock()
        self._describe()
        servers = ""
        try:
            for work, run, column in self._plan.pairs():
                if work.servers != servers:
                    self._close()
                    servers = work.servers
                if self._done(work, run, column):
                    self._listener.skips(work, run, column)
                    continue
                self._listener.begins(work, run, column)
                outcome = self._one(work, run, column)
                outcome.figures = rounded(outcome.figures)
                outcome.error = placeless(outcome.error)
                self._kept(work, column).runs.append(outcome)
                self._results.seconds += self._clock() - since
                since = self._clock()
                save(self._results, self._out)
                self._listener.ends(work, run, column, outcome)
        finally:
            self._close()

    def _describe(self) -> None:
        """Add columns and works that are new to these results."""
        for column in self._plan.columns:
            if self._results.column(column.name) is None:
                self._results.columns.append(
                    ColumnFacts(
                        name=column.name,
                        peer=column.peer,
                        mode=column.mode,
                        client=column.client,
                        label=column.label,
                        persistent=column.persistent,
                        synced=column.synced,
                        note=placeless(column.note),
                    )
                )
        for work in self._plan.works:
            if self._results.work(work.name) is None:
                self._results.works.append(
                    WorkFacts(
                        work.name, work.section, work.title, work.figure, work.size, work.note
                    )
                )

    def _kept(self, work: Work, column: Column) -> Measured:
        measured = self._results.of(work.name, column.name)
        if measured is None:
            measured = Measured(work.name, column.name)
            self._results.measured.append(measured)
        return measured

    def _done(self, work: Work, run: int, column: Column) -> bool:
        measured = self._results.of(work.name, column.name)
        if measured is None:
            return False
        failures = len(measured.runs) - len(measured.good)
        return len(measured.runs) > run or failures >= FAILURES_MOST

    # --- one run ---------------------------------------------------------------------------

    def _one(self, work: Work, run: int, column: Column) -> Run:
        count = self._count(work, column)
        try:
            rate = self._rate(work, column)
            bench = self._bench(work, column)
            if rate:
                outcome = self._paced(work, bench, column, rate)
            else:
                outcome = self._measure.run(work, bench, column, count)
            outcome = self._again_if_short(work, run, bench, column, outcome)
            self._versions(bench, column)
        except Left as why:
            return Run(0, error=str(why))
        except (RoleFailed, NotVerified, ServerFailed, OSError) as error:
            return Run(count, error=self._failure(work, column, error))
        except KeyError as error:
            missing = RoleFailed(f"a driver's result lacks {error}")
            return Run(count, error=self._failure(work, column, missing))
        return outcome

    def _paced(self, work: Work, bench: Bench, column: Column, rate: float) -> Run:
        """Make a run at a pace.

        Where the pace is half of a rate which this client reaches by other means only, the run is
        at a pace that it can keep: four fifths of the rate that it reached.
        """
        for _ in range(PACE_TRIES if work.half_of else 1):
            count = max(work.least, int(rate * work.seconds * self._plan.scale))
            try:
                return self._measure.run(work, bench, column, self._plan.counts or count, rate)
            except NotKept as error:
                kept = error
                rate = PACE_KEPT * min(rate, error.reached)
        raise kept

    def _again_if_short(
        self, work: Work, run: int, bench: Bench, column: Column, outcome: Run
    ) -> Run:
        """Repeat a first run that was far shorter than it should be, with more records."""
        wanted = work.seconds * self._plan.scale
        took = outcome.figures.get("seconds", wanted)
        fixed = work.kind not in SCALED or self._plan.counts
        if run or fixed or took >= wanted / 2:
            return outcome
        count = int(outcome.count * min(20.0, wanted / max(took, 1e-3)))
        if work.most:
            count = min(count, work.most)
        if count < 1.5 * outcome.count:
            return outcome
        return self._measure.run(work, bench, column, count)

    def _count(self, work: Work, column: Column) -> int:
        """Return the count of the last good run, less when it took too long; else by the rates."""
        measured = self._results.of(work.name, column.name)
        if measured is not None and measured.good and not self._plan.counts:
            last = measured.good[-1]
            wanted = work.seconds * self._plan.scale
            took = last.figures.get("seconds", wanted)
            if work.kind in SCALED and took > LONG * wanted:
                return max(work.least, int(last.count * wanted / took))
            return last.count
        return self._plan.count(work, column)

    def _rate(self, work: Work, column: Column) -> float:
        """Return records/s of a paced work; 0 for others. Raises Left."""
        if not work.half_of:
            return float(dict(work.keys).get("rate", 0))
        before = self._results.figure(work.name, column.name, "rate_s")
        if before is not None:
            return before
        for other in work.half_of:
            for figure in ("records_s", "round_trips_s"):
                top = self._results.figure(other, column.name, figure)
                if top is not None:
                    return min(HALF_MOST, top / 2)
        words = " or ".join(work.half_of)
        raise Left(f"half of which rate? {words} has no figure of this column")

    def _failure(self, work: Work, column: Column, error: Exception) -> str:
        """Begin anew with an empty server; returns the reason to report."""
        text = str(error) or type(error).__name__
        bench = self._benches.pop(self._key(work, column), None)
        if bench is not None:
            if bench.server is not None and not bench.server.alive():
                text += f"\nits server had ended:\n{bench.server.tail()}"
            self._end(bench)
        return text

    def _versions(self, bench: Bench, column: Column) -> None:
        facts = self._results.column(column.name)
        assert facts is not None
        if facts.server_version and facts.client_version:
            return
        place = self._results.columns.index(facts)
        self._results.columns[place] = msgspec.structs.replace(
            facts,
            server_version=bench.running.version,
            client_version=bench.client_version.get(column.name, ""),
            settings=tuple(map(placeless, bench.running.settings)),
        )

    # --- servers ---------------------------------------------------------------------------

    def _key(self, work: Work, column: Column) -> str:
        # A journal whose start is timed belongs to one column alone.
        if work.kind == "start":
            return f"{work.name.replace('/', '-')}-{column.name}"
        return f"{column.peer}-{column.server or column.mode}"

    def _bench(self, work: Work, column: Column) -> Bench:
        key = self._key(work, column)
        bench = self._benches.get(key)
        if bench is not None and bench.server is not None and not bench.server.alive():
            self._end(self._benches.pop(key))
            bench = None
        if bench is None:
            if work.kind == "start":
                # One journal at a time: they are large.
                for other in [name for name in self._benches if name.startswith("start-")]:
                    if not other.startswith(work.name.replace("/", "-") + "-"):
                        self._end(self._benches.pop(other))
            bench = Bench(self._peers[column.peer], column, self._data / key)
            bench.start()
            self._benches[key] = bench
        bench.column = column
        return bench

    def _end(self, bench: Bench) -> None:
        with contextlib.suppress(Exception):
            bench.stop()
        shutil.rmtree(bench.folder, ignore_errors=True)

    def _close(self) -> None:
        while self._benches:
            _, bench = self._benches.popitem()
            self._end(bench)


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def sections(works: Sequence[Work] | Sequence[WorkFacts]) -> list[str]:
    return list(dict.fromkeys(work.section for work in works))
