"""The checkpoint as the loop sees it: what there is to follow, when, and how full the ring is.

Owns the parts of ring main that the tables do not have yet, the hold on the ring, the water marks,
and when the process (process.py) makes an advance: brings the tables up to the synced end of the
log. The rules: nothing here waits; the tables follow only where the ring is synced; the ring is
held from the first part that they lack; a process that died is started again, later each time, and
one that has work and makes no progress (it was stopped, or waits for what never comes) is killed,
which counts as a death; an orderly stop lets the tables catch up, within a bound. Source:
docs/design.md (Queues and the checkpoint).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from malamute_protocol.errors import MalamuteError
from malamute_py.config import CheckpointSection
from malamute_py.server.checkpointing.process import (
    Checkpointed,
    CheckpointFailed,
    CheckpointProcess,
)
from malamute_py.server.result_queue import ResultQueue
from malamute_py.store.checkpoint import Abandoned
from malamute_py.store.follow import Follow, failed, following
from malamute_py.store.reading import MAIL_STREAM

_NEAR_BYTES: Final = 64 << 10
"""Parts of the log this close to each other are followed as one."""
_PARTS_MAX: Final = 1_000
_RELIEF_PERCENT: Final = 5
"""Percent by which the use has to fall below a mark before it counts as left."""
_SLOW_MS: Final = 30_000
"""Duration from which on an advance is logged. It is not killed for that: one that is merely long
would begin anew, and never end."""
_LOOKS: Final = 8
"""Number of looks in a row, spread over stall_ms, that must find no progress of the process. A
broker that slept itself, with the whole machine, has looked once when it wakes."""

Report = Callable[[str, str, dict[str, Any]], None]
"""Callback for an event: (name, level, facts)."""


class Held(Protocol):
    """The part of ring main that is used here."""

    @property
    def end_lsn(self) -> int: ...  # noqa: D102
    @property
    def capacity_bytes(self) -> int: ...  # noqa: D102
    @property
    def synced_lsn(self) -> int: ...  # noqa: D102
    @property
    def settings(self) -> Any: ...  # noqa: D102
    def hold(self, lsn: int | None) -> None: ...  # noqa: D102
    def sync(self) -> int: ...  # noqa: D102
    def remove_before(  # noqa: D102
        self, stream: int, *, offset: int | None = None, time_ms: int | None = None
    ) -> int: ...


class Parts:
    """Parts of the log that may hold something for the queues, and that no table has yet."""

    def __init__(self) -> None:
        self._parts: deque[list[int]] = deque()
        """LSNs [from, to) of each part, ascending."""
        self.bytes = 0
        """Bytes of all parts."""

    def add(self, lsn: int, end_lsn: int) -> None:
        """Add the bounds of a bundle with changes of queues, which the tables lack; in order.

        Called for each bundle that is appended, and at a start for those that the log has.
        """
        parts = self._parts
        last_end = parts[-1][1] if parts else 0
        # A part near the last one, or one too many, makes the last one longer.
        if parts and (lsn - last_end <= _NEAR_BYTES or len(parts) >= _PARTS_MAX):
            if end_lsn > last_end:
                self.bytes += end_lsn - last_end
                parts[-1][1] = end_lsn
        else:
            parts.append([lsn, end_lsn])
            self.bytes += end_lsn - lsn

    def upto(self, lsn: int) -> list[tuple[int, int]]:
        """Return the parts before a position, which is the end of a bundle."""
        return [(first, min(stop, lsn)) for first, stop in self._parts if first < lsn]

    def drop(self, lsn: int) -> None:
        """Drop the parts before a position, up to which the tables have the log by now."""
        parts = self._parts
        while parts:
            first, stop = parts[0]
            if stop > lsn:
                if first < lsn:  # the position is amid this part, whose rest stays
                    self.bytes -= lsn - first
                    parts[0][0] = lsn
                break
            parts.popleft()
            self.bytes -= stop - first

    @property
    def first(self) -> int | None:
        """Return where the first part begins."""
        return self._parts[0][0] if self._parts else None


class Checkpoints:
    """Decides when the tables follow; used by the loop's thread, but for start and stop."""

    def __init__(
        self,
        directory: Path,
        ring: Held,
        config: CheckpointSection,
        results: ResultQueue,
        *,
        parts: Parts,
        lsn: int,
        report: Report,
        press: Callable[[bool], None],
    ) -> None:
        """directory: the data directory. ring: main. lsn: up to which the tables have the log.

        parts: what the log has beyond that at the start. results: where the process's answers come.
        report: takes events. press: called with True when new mail and requests have to wait, and
        with False when they may go on.
        """
        self.parts = parts
        self.lsn = lsn
        self.pressed = False
        """The ring is so full that new mail and requests have to wait."""
        self.failures = 0
        """Advances that failed."""
        self.restarts = 0
        """Processes that took the place of one that had died."""
        self.took_ms = 0
        """How long the last advance took."""
        self._ring = ring
        self._capacity = max(ring.capacity_bytes, 1)
        self._config = config
        self._report = report
        self._press = press
        self._visible = ring.synced_lsn
        """Position up to which ring main is synced, so that the tables may follow."""
        self._asked = False
        """The process is at work on an advance."""
        self._asked_ms = 0
        """Time at which the advance was asked for."""
        self._slow = False
        """The advance has been reported as slow."""
        self._progress: tuple[int, ...] | None = None
        """Progress of the process at the last look."""
        self._look_ms = 0
        """Time of the next look whether the process still gets on."""
        self._idle_looks = 0
        """Looks in a row that saw no progress."""
        self.hangs = 0
        """Processes that were killed as they made no progress."""
        self._clock_ms: int | None = None
        """The wall clock at the last look; `_now_ms` adds up its steps forward alone."""
        self._now_ms = 0
        self._since_ms: int | None = None
        """Time at which the first part was seen that the tables lack."""
        self._done_ms: int | None = None
        """Time of the last advance; an idle broker makes the next one idle_ms later."""
        self._not_before_ms = 0
        """Time before which no advance is asked for, as the last one failed."""
        self._backoff_ms = 0
        self._forced = False
        """The log is so full that an advance does not wait for its time."""
        self._held = 0
        """Position from which on ring main is held back for the tables."""
        self._process = CheckpointProcess(directory, config, results)
        self._directory = directory
        self._hold()

    # --- the loop ----------------------------------------------------------------------

    def synced(self, lsn: int) -> None:
        """Note that ring main is synced up to this position: the tables may follow so far."""
        self._visible = max(lsn, self._visible)
        self._hold()

    def tick(self, now_ms: int) -> None:
        """Look what is to be done for the tables; the loop calls it at the end of each turn.

        An advance (the process brings the tables up to date) that is under way is watched.
        Otherwise one is asked for where the parts of the log that the tables lack are large or old,
        or fill so much of the ring that the advance is forced.
        """
        now_ms = self._steady_ms(now_ms)
        config, parts = self._config, self.parts
        percent = 0.0  # of ring main: the parts that the tables lack
        if parts.bytes or self.pressed:
            percent = 100 * self._share_held()
            if percent >= config.pressure_percent or self.pressed:
                self._begin_or_end_pressure(percent)
            if parts.bytes and self._since_ms is None:
                self._since_ms = now_ms
        if self._asked:  # an advance is under way
            if not self._slow and now_ms - self._asked_ms >= _SLOW_MS:
                self._slow = True
                self._report(
                    "checkpoint_slow", "warning",
                    {"pid": self.pid, "since_ms": _SLOW_MS, "lag_bytes": parts.bytes},
                )  # fmt: skip
            if self._config.stall_ms and now_ms >= self._look_ms:
                self._watch(now_ms)
            return
        if now_ms < self._not_before_ms:  # the last advance failed
            return
        if not parts.bytes:  # the tables lack nothing
            self._write_position(now_ms)
            return
        forced = percent >= config.force_percent
        due = (
            forced
            or parts.bytes >= config.log_bytes
            or (self._since_ms is not None and now_ms - self._since_ms >= config.interval_ms)
        )
        if not due:
            return
        # Only what is synced: the tables never have what a power loss can take from the log.
        ranges = parts.upto(self._visible)
        if not ranges:
            return
        if forced and not self._forced:
            self._report(
                "checkpoint_forced", "warning",
                {"ring_use": round(percent / 100, 3), "lag_bytes": parts.bytes},
            )  # fmt: skip
        self._forced = forced
        self._ask(ranges)

    def _watch(self, now_ms: int) -> None:
        """Kill the process when it has made no progress for stall_ms although it has work.

        Called by each turn of the loop whose time for a look has come: _LOOKS in stall_ms.
        """
        stall_ms = self._config.stall_ms
        self._look_ms = now_ms + max(stall_ms // _LOOKS, 1)
        progress = self._process.progress()
        if progress is None or progress != self._progress:
            self._progress, self._idle_looks = progress, 0
            return
        self._idle_looks += 1
        if self._idle_looks >= _LOOKS:
            self._idle_looks = 0
            self.hangs += 1
            self._report(
                "checkpoint_process_hung", "error",
                {"pid": self.pid, "stall_ms": stall_ms, "lag_bytes": self.parts.bytes},
            )  # fmt: skip
            self._process.kill()

    def _steady_ms(self, clock_ms: int) -> int:
        """Return a time that never goes back: it adds up the forward steps of the clock."""
        if self._clock_ms is not None and clock_ms > self._clock_ms:
            self._now_ms += clock_ms - self._clock_ms
        self._clock_ms = clock_ms
        return self._now_ms

    def _share_held(self) -> float:
        """Return the share of the ring's room that is held back for the tables; 1: all of it.

        Bytes that only wait to be synced are left out, as they have a bound of their own.
        """
        first = self.parts.first
        if first is None:
            return 0.0
        return (self._ring.end_lsn - first) / self._capacity

    def relieve(self) -> bool:
        """Sync ring main, as an append finds no room, so that its hold may move; True: it moved.

        A ring does this by itself where nothing is held: what was never synced is not overwritten.
        Raises JournalFailed.
        """
        before = self._held
        self.synced(self._ring.sync())
        return self._held > before

    def _write_position(self, now_ms: int) -> None:
        """Have the tables' position alone written now and then, while the log has nothing for them.

        The next start reads the log from this position on: without the write, it would read all
        that was published to streams meanwhile.
        """
        if self._done_ms is None:
            self._done_ms = now_ms
        if (
            self._visible - self.lsn >= self._config.log_bytes
            and now_ms - self._done_ms >= self._config.idle_ms
        ):
            self._ask([])  # no parts

    def _ask(self, ranges: list[tuple[int, int]]) -> None:
        """Have the process bring the tables up to the synced position by these parts of the log."""
        self._asked, self._asked_ms, self._slow = True, self._now_ms, False
        self._progress, self._idle_looks, self._look_ms = None, 0, self._now_ms
        self._process.ask(Follow(self._visible, ranges))

    def take(self, answer: Checkpointed | CheckpointFailed, now_ms: int) -> None:
        """Take up how far the tables have come, or why the process failed; the log tells of both.

        The loop hands over the process's answer to an advance.
        """
        now_ms = self._steady_ms(now_ms)
        self._asked = False
        if answer.said:
            self._report("checkpoint_process_said", "warning", {"text": answer.said})
        if isinstance(answer, CheckpointFailed):
            self.failures += 1
            config = self._config
            self._backoff_ms = min(max(2 * self._backoff_ms, config.retry_ms), config.retry_max_ms)
            self._not_before_ms = now_ms + self._backoff_ms
            self._report("checkpoint_failed", "error", {
                "code": answer.code, "reason": answer.reason, "lag_bytes": self.parts.bytes,
                "retry_ms": self._backoff_ms,
            })  # fmt: skip
            return
        done = answer.done
        level = "info" if self._backoff_ms else "debug"  # The log has a success after a failure.
        self._backoff_ms = 0
        if answer.restarted:
            self.restarts = answer.restarted
            self._report("checkpoint_process_restarted", "warning", {"restarts": answer.restarted})
        self.lsn = done.lsn
        self.took_ms = answer.took_ms
        self._done_ms = now_ms
        self.parts.drop(done.lsn)
        # The parts that are left, if any, count from the next look on.
        self._since_ms = None
        self._hold()
        if done.mail_next and self._ring.settings.full == "refuse":
            # The tables have these bodies. A ring that overwrites nothing would never have their
            # room back otherwise.
            self._ring.remove_before(MAIL_STREAM, offset=done.mail_next)
        self._report("checkpoint_done", level, {
            "lsn": done.lsn, "changes": done.changes, "rows": done.rows, "bodies": done.bodies,
            "took_ms": answer.took_ms,
        })  # fmt: skip
        if done.missing or done.damages or done.lost:
            self._report("checkpoint_met_damage", "error", {
                "bodies_missing": done.missing, "changes_lost": done.lost,
                "damages": list(done.damages[:10]),
            })  # fmt: skip

    def _hold(self) -> None:
        """Have the ring overwrite nothing from the first part on that the tables lack.

        Called when it is synced further, and when the tables have followed.
        """
        first = self.parts.first
        self._held = self._visible if first is None else min(first, self._visible)
        self._ring.hold(self._held)

    def _begin_or_end_pressure(self, percent: float) -> None:
        """Begin or end the pressure, in which new mail and requests wait until ring main has room.

        percent: of the ring's room that may not be overwritten, as the tables do not have all of it
        yet. The pressure ends well below where it begins, so that it does not come and go.
        """
        if not self.pressed and percent >= self._config.pressure_percent:
            self.pressed = True
            self._press(True)
            self._report(
                "pressure_begins", "warning",
                {"ring_use": round(percent / 100, 3), "lag_bytes": self.parts.bytes},
            )  # fmt: skip
        elif self.pressed and percent <= max(self._config.pressure_percent - _RELIEF_PERCENT, 0):
            self.pressed = False
            self._press(False)
            self._report("pressure_ends", "info", {"ring_use": round(percent / 100, 3)})

    # --- facts -------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return facts for BROKER_INFO and metrics; from any thread.

        `lag_bytes`: of the log that the tables lack. `ring_use`: the share of ring main that is
        held back for the tables. `hangs_total`: processes that were killed since they got no
        further.
        """
        return {
            "lsn": self.lsn,
            "lag_bytes": self.parts.bytes,
            # Of the last advance; of the one under way.
            "seconds": self.took_ms / 1000,
            "step_seconds": (self._now_ms - self._asked_ms) / 1000 if self._asked else 0.0,
            "failures_total": self.failures,
            "restarts_total": self.restarts,
            "hangs_total": self.hangs,
            "ring_use": round(self._share_held(), 4),
            "pressed": self.pressed,
            "failing": self._backoff_ms > 0,
        }

    @property
    def pid(self) -> int:
        """Return the number of the process; 0 while there is none."""
        return self._process.pid

    # --- the end -----------------------------------------------------------------------

    def stop(self) -> None:
        """Let the tables catch up and end the process, within stop_ms; called at the broker's end.

        What the tables lack after the process's last answer is brought to them here, in this
        thread, in the time that is left, so that the next start has less to read.
        """
        deadline = time.monotonic() + self._config.stop_ms / 1000
        visible = self._ring.synced_lsn
        self._visible = visible
        answer = self._process.stop(deadline)
        if isinstance(answer, Checkpointed):
            self.lsn = answer.done.lsn
            self.parts.drop(self.lsn)
        try:
            if visible > self.lsn and time.monotonic() < deadline:
                accept_lost = self._config.lost_changes == "accept"
                with following(
                    self._directory,
                    accept_lost=accept_lost,
                    wait_s=max(deadline - time.monotonic(), 0.0),
                ) as checkpoint:
                    done = checkpoint.advance(
                        visible,
                        self.parts.upto(visible),
                        going_on=lambda: time.monotonic() < deadline,
                    )
                self.lsn = done.lsn
                self.parts.drop(done.lsn)
        except Abandoned:
            self._report(
                "checkpoint_left_behind", "info",
                {"lag_bytes": self.parts.bytes, "stop_ms": self._config.stop_ms},
            )  # fmt: skip
        except (MalamuteError, OSError) as error:
            # Nothing is lost: the next start reads the log from the position of the tables.
            fault = failed(error)
            self._report("checkpoint_failed", "error", {"code": fault.code, "reason": fault.reason})
