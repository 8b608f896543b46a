"""One run: clients, disturbances, and the verdict.

Owns the disturbances and their order, and the check that everything goes on after each. The rule:
the journal is on disk before the verdict, so that it can be judged again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from malamute_py.client.words import ConfirmAt
from malamute_py.promises.daemon import Daemon, DaemonFailed
from malamute_py.promises.history import NOTE, Book, check, read_events
from malamute_py.promises.proxy import Proxy
from malamute_py.promises.roles import Roles

JUMPING = (sys.executable, "-m", "malamute_py.promises.jumping")
"""Command of a broker whose clock jumps at each SIGUSR1."""
SETTINGS = (
    "limits.batch_bytes_max=1048576", "limits.record_bytes_max=524288",
    "journal.segment_bytes=2097152", "journal.ring_bytes=8589934592",
    "checkpoint.interval_ms=200",
)  # fmt: skip
"""Settings of a broker of its own: small segments and frequent checkpoints, so that kills happen
amid these. The ring has room for hours of a run: nothing is removed from it, so that every record
must be found."""
PATIENCE_S = 90.0
"""Time for which every kind of call may make no progress after a disturbance."""


class RunFindings(NamedTuple):
    """The findings of a run."""

    faults: list[str]
    counts: dict[str, int]
    disturbances: dict[str, int]
    seconds: float
    seed: int


class Run:
    """Disturbances of one broker and its clients."""

    def __init__(
        self,
        *,
        journal: Path,
        seed: int,
        minutes: float = 0.0,
        disturbances: int = 0,
        pause_s: float = 0.3,
        level: ConfirmAt = "synced",
        options: dict[str, Any] | None = None,
        patience_s: float = PATIENCE_S,
        told: Callable[[int, str], None] = lambda *_: None,
        after_kill: Callable[[], None] = lambda: None,
    ) -> None:
        """End after so many minutes or disturbances, whichever is given and comes first.

        journal: file that the events are written to. seed: of the choice of disturbances. pause_s:
        mean time from one to the next. level: of the confirms. options: of the clients. patience_s:
        how long a kind of call may make no progress. told: called after each disturbance, with
        their number and the last one's name. after_kill: called while the broker is dead.
        """
        self._journal = journal
        self._chance = random.Random(seed)
        self._seed = seed
        self._until = time.monotonic() + minutes * 60 if minutes else float("inf")
        self._most = disturbances or 1 << 62  # without end
        self._pause_s = pause_s
        self._level = level
        self._options = options or {}
        self._patience_s = patience_s
        self._told = told
        self._after_kill = after_kill
        self._counts: dict[str, int] = {}

    async def at(self, endpoint: str, kill_command: str = "") -> RunFindings:
        """Disturb a broker that runs already, which the user of verify-promises named.

        kill_command: has it killed and started again; empty: its network alone is disturbed.
        """
        # These are the proxy's, which stands before a broker on TCP only.
        kinds = ["cut", "stall", "delay"] if endpoint.startswith("tcp://") else []
        if kill_command:
            kinds.append("command")
        return await self._run(endpoint, kinds, None, kill_command)

    async def embedded(
        self, directory: Path, program: Sequence[str] = JUMPING, kinds: Sequence[str] = ()
    ) -> RunFindings:
        """Disturb a broker of its own, which is killed, frozen, and whose clock jumps.

        kinds: of disturbances, instead of all of them.
        """
        daemon = Daemon(directory, SETTINGS, program)
        with daemon:
            # Half of them are kills.
            kinds = list(kinds) or ["kill"] * 5 + ["cut", "stall", "delay", "freeze"]
            if program is JUMPING:
                kinds.append("jump")
            return await self._run(daemon.endpoint, kinds, daemon, "")

    async def _run(
        self, endpoint: str, kinds: list[str], daemon: Daemon | None, command: str
    ) -> RunFindings:
        """Start the roles (the clients), disturb them, and check what they wrote down.

        kinds: of disturbances; one that is there several times is chosen as often. daemon: a broker
        of the run's own; None: the broker of others. command: has their broker killed.
        """
        began = time.monotonic()
        proxy: Proxy | None = None
        if endpoint.startswith("tcp://"):
            # The clients connect to the proxy, which can cut, stall and delay.
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            proxy = Proxy(host, int(port))
            endpoint = await proxy.start()
        stuck = ""
        with Book(self._journal) as book:
            roles = Roles(book, f"promises.{self._seed}", self._level, self._options)
            try:
                await roles.start(endpoint)
                stuck = await self._disturb(book, roles, kinds, proxy, daemon, command)
                ends = await roles.finish(self._patience_s)
            except DaemonFailed as error:
                return RunFindings(
                    [f"the broker does not start again: {error}"], {}, self._counts,
                    round(time.monotonic() - began, 1), self._seed,
                )  # fmt: skip
            finally:
                await roles.close()
                if proxy is not None:
                    await proxy.close()
        # A broker of the run's own has room for all records: none may be missing.
        verdict = check(read_events(self._journal), retention=daemon is None)
        faults = verdict.faults + ends + ([stuck] if stuck else [])
        return RunFindings(
            faults, verdict.counts, self._counts, round(time.monotonic() - began, 1), self._seed
        )

    async def _disturb(
        self, book: Book, roles: Roles, kinds: list[str], proxy: Proxy | None,
        daemon: Daemon | None, command: str,
    ) -> str:  # fmt: skip
        """Disturb until it is time; returns a sentence about what stood still, "": nothing."""
        done = 0
        while done < self._most and time.monotonic() < self._until:
            # Every kind of call makes progress before the next disturbance.
            before = roles.progress()
            stuck = await self._progressed(roles, before)
            if stuck:
                return stuck
            await asyncio.sleep(self._chance.expovariate(1 / self._pause_s))
            if not kinds:  # of a broker that is not ours, and not reached by tcp
                continue
            kind = self._chance.choice(kinds)
            book.note(NOTE, "disturbance", kind)
            await self._disturb_once(kind, proxy, daemon, command)
            done += 1
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._told(done, kind)
        return await self._progressed(roles, roles.progress())

    async def _progressed(self, roles: Roles, before: dict[str, int]) -> str:
        """Wait until something of every kind was confirmed since `before`, counts by kind.

        Returns "", or after the run's patience a sentence with the kinds that were late.
        """
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:
            now = roles.progress()
            still = [kind for kind, count in now.items() if count <= before[kind]]
            if not still:
                return ""
            await asyncio.sleep(0.01)
        return f"no {', '.join(still)} was confirmed for {self._patience_s:.0f} s"

    async def _disturb_once(
        self, kind: str, proxy: Proxy | None, daemon: Daemon | None, command: str
    ) -> None:
        """Do one disturbance, to its end: a killed broker is started again, a frozen one thawed."""
        chance = self._chance
        if kind == "kill" and daemon is not None:
            daemon.kill()
            await asyncio.to_thread(self._after_kill)
            await asyncio.to_thread(daemon.start)
        elif kind == "freeze" and daemon is not None:
            daemon.signal(signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0.1, 2.0))
            daemon.signal(signal.SIGCONT)
        elif kind == "jump" and daemon is not None:
            daemon.signal(signal.SIGUSR1)
        elif kind == "command":
            shell = await asyncio.create_subprocess_shell(command)
            if await shell.wait():
                raise RuntimeError(f"the command that kills ended with {shell.returncode}")
        elif proxy is not None and kind == "cut":
            proxy.cut()
        elif proxy is not None and kind == "stall":
            proxy.stall()
            await asyncio.sleep(chance.uniform(0.1, 3.0))
            proxy.flow()
        elif proxy is not None and kind == "delay":
            proxy.delay_s = chance.choice((0.0, 0.0, 0.002, 0.02))
