"""The checkpoint as the loop sees it: what there is to follow, when, and how full the ring is.

Owns the parts of ring main that the tables do not have yet, the hold on the ring, the water
marks, and the process that writes (store/follow.py). The rules: nothing here waits: a thread
that sleeps speaks to the process; the tables are sent only where the ring is synced; the ring is
held from the first part that they lack; a process that dies is started again, later each time,
and one that has something to do and does nothing (it was stopped, or waits for what never comes)
is killed, and dies so; an orderly stop lets the tables catch up, within a bound.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

import msgspec

import malamute_protocol
from malamute_protocol.errors import MalamuteError
from malamute_py.config import CheckpointSection
from malamute_py.server.journaling.keeper import Died, Inbox
from malamute_py.store.checkpoint import Abandoned, Done
from malamute_py.store.follow import (
    Began,
    Failed,
    Follow,
    Stepped,
    failed,
    following,
    read_answer,
    write_frame,
)
from malamute_py.store.reading import MAIL_STREAM

_NEAR_BYTES: Final = 64 << 10
"""Parts of the log this close to each other are followed as one."""
_PARTS_MAX: Final = 1_000
_RELIEF_PERCENT: Final = 5
"""How far the use has to fall below a mark before it counts as left."""
_SLOW_MS: Final = 30_000
"""A step that takes longer is said. It is not killed for that: a step that is merely long would
begin anew, and never end."""
_LOOKS: Final = 8
"""So many looks in a row, spread over stall_ms, have to find that the process did nothing: a
broker that slept itself, with the whole machine, has looked once when it wakes."""
_SAID_BYTES: Final = 2_000

Report = Callable[[str, str, dict[str, Any]], None]
"""(name, level, facts) of an event."""


class Held(Protocol):
    """What is asked of ring main."""

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
    """The parts of the log that may hold something for the queues, and are in no table yet."""

    def __init__(self) -> None:
        self._parts: deque[list[int]] = deque()
        """[from, to), ascending."""
        self.bytes = 0

    def add(self, lsn: int, end_lsn: int) -> None:
        """A bundle concerns the queues; bundles come in order."""
        parts = self._parts
        if parts and (lsn - parts[-1][1] <= _NEAR_BYTES or len(parts) >= _PARTS_MAX):
            if end_lsn > parts[-1][1]:
                self.bytes += end_lsn - parts[-1][1]
                parts[-1][1] = end_lsn
        else:
            parts.append([lsn, end_lsn])
            self.bytes += end_lsn - lsn

    def upto(self, lsn: int) -> list[tuple[int, int]]:
        """What lies before a position, which is the end of a bundle."""
        return [(first, min(stop, lsn)) for first, stop in self._parts if first < lsn]

    def drop(self, lsn: int) -> None:
        """What lies before a position is in the tables."""
        parts = self._parts
        while parts and parts[0][1] <= lsn:
            first, stop = parts.popleft()
            self.bytes -= stop - first
        if parts and parts[0][0] < lsn:
            self.bytes -= lsn - parts[0][0]
            parts[0][0] = lsn

    @property
    def first(self) -> int | None:
        """Where the first of them begins."""
        return self._parts[0][0] if self._parts else None


class Checkpointed(NamedTuple):
    """The tables have come to a position (to the loop)."""

    done: Done
    took_ms: int
    restarted: int
    """The process that did it took the place of one that died, the so-manieth; 0: it did not."""
    said: str = ""
    """What it wrote to its standard error meanwhile."""


class CheckpointFailed(NamedTuple):
    """The tables are where they were (to the loop)."""

    code: str
    reason: str
    said: str = ""


class Checkpoints:
    """See the module. For the loop thread, but for start and stop."""

    def __init__(
        self,
        directory: Path,
        ring: Held,
        config: CheckpointSection,
        inbox: Inbox,
        *,
        parts: Parts,
        lsn: int,
        report: Report,
        press: Callable[[bool], None],
    ) -> None:
        """parts: what the log had after the tables at the start. lsn: where the tables are.

        report: takes events. press: told when new mail and requests have to wait, or may go on.
        """
        self.parts = parts
        self.lsn = lsn
        self.pressed = False
        self.failures = 0
        self.restarts = 0
        self.took_ms = 0
        self._ring = ring
        self._capacity = max(ring.capacity_bytes, 1)
        self._config = config
        self._report = report
        self._press = press
        self._visible = ring.synced_lsn
        self._asked = False
        self._asked_ms = 0
        self._slow = False
        self._progress: tuple[int, ...] | None = None
        """What the process had done when it was looked at last."""
        self._look_ms = 0
        self._idle_looks = 0
        self.hangs = 0
        self._clock_ms: int | None = None
        self._now_ms = 0
        self._since_ms: int | None = None
        """When the first part was seen that the tables lack."""
        self._done_ms: int | None = None
        self._not_before_ms = 0
        self._backoff_ms = 0
        self._forced = False
        self._held = 0
        self._keeper = _Keeper(directory, config, inbox)
        self._directory = directory
        self._hold()

    # --- the loop ----------------------------------------------------------------------

    def synced(self, lsn: int) -> None:
        """Ring main is synced up to here."""
        self._visible = max(lsn, self._visible)
        self._hold()

    def tick(self, now_ms: int) -> None:
        """Time has passed, something was appended or synced: see what is to be done."""
        now_ms = self._advance(now_ms)
        config = self._config
        percent = 100 * self._use()
        if percent >= config.pressure_percent or self.pressed:
            self._weigh(percent)
        parts = self.parts
        if parts.bytes and self._since_ms is None:
            self._since_ms = now_ms
        if self._asked:
            if not self._slow and now_ms - self._asked_ms >= _SLOW_MS:
                self._slow = True
                self._report(
                    "checkpoint_slow", "warning",
                    {"pid": self.pid, "since_ms": _SLOW_MS, "lag_bytes": parts.bytes},
                )  # fmt: skip
            if self._config.stall_ms and now_ms >= self._look_ms:
                self._watch(now_ms)
            return
        if now_ms < self._not_before_ms:
            return
        if not parts.bytes:
            self._idle(now_ms)
            return
        forced = percent >= config.force_percent
        due = (
            forced
            or parts.bytes >= config.log_bytes
            or (self._since_ms is not None and now_ms - self._since_ms >= config.interval_ms)
        )
        if not due:
            return
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
        """Kill the process when it has done nothing for stall_ms although a step is under way."""
        stall_ms = self._config.stall_ms
        self._look_ms = now_ms + max(stall_ms // _LOOKS, 1)
        progress = self._keeper.progress()
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
            self._keeper.kill()

    def _advance(self, clock_ms: int) -> int:
        """Time that never goes back, whatever the clock does."""
        if self._clock_ms is not None and clock_ms > self._clock_ms:
            self._now_ms += clock_ms - self._clock_ms
        self._clock_ms = clock_ms
        return self._now_ms

    def _use(self) -> float:
        """How much of the ring waits for the tables; 1: as much as it takes.

        What waits for the disk only is not theirs, and has a bound of its own.
        """
        first = self.parts.first
        if first is None:
            return 0.0
        return (self._ring.end_lsn - first) / self._capacity

    def relieve(self) -> bool:
        """The ring found no room: sync it here and now, so that the hold may move; True: it did.

        As the ring does by itself where nothing is held: what was never synced is not lapped.
        Raises JournalFailed.
        """
        before = self._held
        self.synced(self._ring.sync())
        return self._held > before

    def _idle(self, now_ms: int) -> None:
        """Nothing for the queues: now and then only the position is written.

        Not for the hold's sake, which has moved on, but for the next start's: it reads the log
        from there.
        """
        if self._done_ms is None:
            self._done_ms = now_ms
        if (
            self._visible - self.lsn >= self._config.log_bytes
            and now_ms - self._done_ms >= self._config.idle_ms
        ):
            self._ask([])

    def _ask(self, ranges: list[tuple[int, int]]) -> None:
        self._asked, self._asked_ms, self._slow = True, self._now_ms, False
        self._progress, self._idle_looks, self._look_ms = None, 0, self._now_ms
        self._keeper.ask(Follow(self._visible, ranges))

    def take(self, answer: Checkpointed | CheckpointFailed, now_ms: int) -> None:
        """The process answered."""
        now_ms = self._advance(now_ms)
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
        level = "info" if self._backoff_ms else "debug"
        self._backoff_ms = 0
        if answer.restarted:
            self.restarts = answer.restarted
            self._report("checkpoint_process_restarted", "warning", {"restarts": answer.restarted})
        self.lsn = done.lsn
        self.took_ms = answer.took_ms
        self._done_ms = now_ms
        self.parts.drop(done.lsn)
        self._since_ms = None
        self._hold()
        if done.mail_next and self._ring.settings.full == "refuse":
            # Nothing else would ever give the bodies' room back in such a ring.
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
        first = self.parts.first
        self._held = self._visible if first is None else min(first, self._visible)
        self._ring.hold(self._held)

    def _weigh(self, percent: float) -> None:
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
        """For BROKER_INFO and metrics; from any thread."""
        return {
            "lsn": self.lsn,
            "lag_bytes": self.parts.bytes,
            "seconds": self.took_ms / 1000,
            "step_seconds": (self._now_ms - self._asked_ms) / 1000 if self._asked else 0.0,
            "failures_total": self.failures,
            "restarts_total": self.restarts,
            "hangs_total": self.hangs,
            "ring_use": round(self._use(), 4),
            "pressed": self.pressed,
        }

    @property
    def pid(self) -> int:
        """Number of the process; 0 while there is none."""
        return self._keeper.pid

    # --- the end -----------------------------------------------------------------------

    def stop(self) -> None:
        """Let the tables catch up and end the process, within stop_ms; the loop has ended."""
        deadline = time.monotonic() + self._config.stop_ms / 1000
        visible = self._ring.synced_lsn
        self._visible = visible
        answer = self._keeper.last(deadline)
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
                    done = checkpoint.step(
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
            # Nothing is lost: the next start reads the log from where the tables are.
            fault = failed(error)
            self._report("checkpoint_failed", "error", {"code": fault.code, "reason": fault.reason})


class _Keeper:
    """The thread that speaks to the process, and the process."""

    def __init__(self, directory: Path, config: CheckpointSection, inbox: Inbox) -> None:
        self._directory = directory
        self._config = config
        self._inbox = inbox
        self._jobs: SimpleQueue[Follow | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._replaces = False
        self._errors = -1
        """The file to which the process's standard error goes."""
        self._words = ""
        """What the process said and the loop has not heard yet."""
        self._answer: Checkpointed | CheckpointFailed | None = None
        """The last one, for stop()."""

    @property
    def pid(self) -> int:
        process = self._process
        return 0 if process is None else process.pid

    def progress(self) -> tuple[int, ...] | None:
        """What the process has done so far, to be compared; from the loop.

        None: there is none, or it waits for the disk, which no other process would do sooner.
        """
        pid = self.pid
        if not pid:
            return None
        try:
            # The name, in parentheses, may have spaces. Source: proc_pid_stat(5), proc_pid_io(5).
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            io = Path(f"/proc/{pid}/io").read_text().split()
        except OSError:
            return None
        user, system = fields[10:12]
        return None if state == "D" else (pid, int(user), int(system), *map(int, io[1::2]))

    def kill(self) -> None:
        """End the process; the thread that waits for its answer finds it dead. From the loop."""
        process = self._process
        if process is not None:
            process.kill()

    def ask(self, job: Follow) -> None:
        """Have a step done; from the loop."""
        if self._thread is None:
            # Only now: a broker that has nothing to follow has neither thread nor process.
            self._thread = threading.Thread(
                target=self._run, name="malamute-checkpoint", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def last(self, deadline: float) -> Checkpointed | CheckpointFailed | None:
        """End thread and process; returns the last answer. A step under way may be finished."""
        thread = self._thread
        if thread is None:
            return None
        self._jobs.put(None)
        thread.join(max(deadline - time.monotonic(), 0.0))
        while thread.is_alive():
            # Again and again: it may be starting one just now.
            process = self._process
            if process is not None:
                process.kill()
            thread.join(0.05)
        return self._answer

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._answer = answer = self._step(job)._replace(said=self._said())
                self._inbox.put(answer)
        except BaseException as error:  # noqa: BLE001 - told to the loop, which stops the daemon
            self._inbox.put(Died("checkpoint", error, traceback.format_exc()))
        finally:
            self._end()

    def _next(self) -> Follow | None:
        while True:
            try:
                return self._jobs.get(timeout=None if self._process is None else _LOOK_S)
            except Empty:
                process = self._process
                if process is not None and process.poll() is not None:
                    # Not left lying about until something is to be done.
                    self._words += f"{self._died('').reason}\n"

    def _said(self) -> str:
        """What the process, or the one before it, said since the last time."""
        self._listen()
        said, self._words = self._words, ""
        return said.strip()

    def _listen(self) -> None:
        """Take what is in the file to which the process's standard error goes."""
        if self._errors >= 0:
            size = os.fstat(self._errors).st_size
            if size:
                data = os.pread(self._errors, _SAID_BYTES, max(size - _SAID_BYTES, 0))
                os.ftruncate(self._errors, 0)
                self._words += data.decode("utf-8", "replace")

    def _step(self, job: Follow) -> Checkpointed | CheckpointFailed:
        restarted = 0
        try:
            if self._process is None:
                fault = self._start()
                if fault is not None:
                    return fault
                restarted, self._replaces = self._deaths if self._replaces else 0, False
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            write_frame(process.stdin, job)  # type: ignore[arg-type]
            answer = read_answer(process.stdout)  # type: ignore[arg-type]
        except (OSError, msgspec.MsgspecError) as error:
            return self._died(str(error))
        if isinstance(answer, Stepped):
            return Checkpointed(answer.done, answer.took_ms, restarted)
        if isinstance(answer, Failed):
            # Whatever it was: a new process begins from what is on the disk.
            self._end()
            return CheckpointFailed(answer.code, answer.reason)
        return self._died("")

    def _start(self) -> CheckpointFailed | None:
        options = ["--accept-lost"] if self._config.lost_changes == "accept" else []
        # Not a pipe, which would fill up and stop the process.
        self._errors = os.memfd_create("malamute-checkpoint")
        fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)
        self._process = process = subprocess.Popen(
            [
                sys.executable, "-P", "-m", "malamute_py.store.follow",
                str(self._directory), str(os.getpid()), *options,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            # What a terminal sends to its group is the broker's to answer.
            env=_environment(), process_group=0,
        )  # fmt: skip
        assert process.stdout is not None
        answer = read_answer(process.stdout)  # type: ignore[arg-type]
        if isinstance(answer, Began):
            return None
        if isinstance(answer, Failed):
            self._end()
            return CheckpointFailed(answer.code, answer.reason)
        return self._died("")

    def _died(self, reason: str) -> CheckpointFailed:
        process = self._process
        if process is None:
            self._close()
            return CheckpointFailed("died", f"no process could be started: {reason}")
        process.kill()
        code = process.wait()
        self._close()
        self._deaths += 1
        self._replaces = True
        reason = reason or self._words.strip().rpartition("\n")[2]
        what = f"the process that writes the tables ended ({code})"
        return CheckpointFailed("died", f"{what}: {reason}" if reason else what)

    def _end(self) -> None:
        """Have the process end: by the end of its input, or else."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._close()

    def _close(self) -> None:
        """The process is gone: keep what it said, and nothing else of it."""
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout) if process is not None else ():
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._errors >= 0:
            self._listen()
            os.close(self._errors)
            self._errors = -1


_END_S: Final = 5.0
"""How long a process without work may take to end."""
_LOOK_S: Final = 60.0
"""How often it is looked whether a process without work lives."""


def _environment() -> dict[str, str]:
    """Ours, and where this program lies: it may have been found by a path set in it only."""
    protocol = malamute_protocol.__file__
    homes = [str(Path(__file__).resolve().parents[3])]
    if protocol:
        homes.append(str(Path(protocol).resolve().parents[1]))
    known = os.environ.get("PYTHONPATH", "")
    paths = list(dict.fromkeys([*homes, *([known] if known else [])]))
    return {
        # Nothing is multiplied: the threads that OpenBLAS starts would spin, while a broker works.
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
