"""The process that writes the tables, and the thread that speaks to it.

Owns how the process is started, asked, watched and ended. The rules: the loop waits for none of it,
the thread sleeps instead; a process that dies is replaced when there is something to do; each
request has one result, which comes to the loop. Source: store/follow.py, the other end of the
pipes.
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
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

import msgspec

import malamute_protocol
from malamute_py.config import CheckpointSection
from malamute_py.server.result_queue import Died, ResultQueue
from malamute_py.store.checkpoint import Done
from malamute_py.store.follow import (
    Advanced,
    Began,
    Failed,
    Follow,
    read_answer,
    write_frame,
)

_SAID_BYTES: Final = 2_000
"""Bytes of the process's standard error that are kept, the last ones."""
_END_S: Final = 5.0
"""How long a process without work may take to end."""
_LOOK_S: Final = 60.0
"""How often the thread looks whether a process without work lives."""


class Checkpointed(NamedTuple):
    """Result for the loop: the tables have come to a position."""

    done: Done
    took_ms: int
    restarted: int
    """Processes that had died, if the one that did this took the place of another; else 0."""
    said: str = ""
    """Text that the process wrote to its standard error meanwhile."""


class CheckpointFailed(NamedTuple):
    """Result for the loop: the tables have not moved."""

    code: str
    reason: str
    said: str = ""


class CheckpointProcess:
    """The process, and the thread that speaks to it."""

    def __init__(self, directory: Path, config: CheckpointSection, results: ResultQueue) -> None:
        """directory: the data directory. results: where the loop gets answers.

        The first ask() starts thread and process.
        """
        self._directory = directory
        self._config = config
        self._results = results
        self._jobs: SimpleQueue[Follow | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        """Processes that have died so far."""
        self._replaces = False
        """Whether the next process takes the place of one that died."""
        self._errors = -1
        """Descriptor of the file to which the process's standard error goes; -1: there is none."""
        self._words = ""
        """Text that the process wrote to its standard error and the loop has not taken yet."""
        self._answer: Checkpointed | CheckpointFailed | None = None
        """The last answer, for stop()."""

    @property
    def pid(self) -> int:
        """Return the number of the process; 0 while there is none."""
        child = self._child
        return 0 if child is None else child.pid

    def progress(self) -> tuple[int, ...] | None:
        """Return what the kernel counted of the process's work; equal twice: it made no progress.

        Called by the loop. None: there is no process, or it waits for the disk, for which another
        process would wait as long.
        """
        pid = self.pid
        if not pid:
            return None
        try:
            # After the name, which is in parentheses and may have spaces. Source:
            # proc_pid_stat(5), proc_pid_io(5).
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            io = Path(f"/proc/{pid}/io").read_text().split()
        except OSError:
            return None
        user, system = fields[10:12]  # ticks of the processor in user and system mode
        waits_for_disk, counts = state == "D", io[1::2]  # io: names and counts in turn
        return None if waits_for_disk else (pid, int(user), int(system), *map(int, counts))

    def kill(self) -> None:
        """Kill the process; the thread that waits for its answer finds it dead. From the loop."""
        child = self._child
        if child is not None:
            child.kill()

    def ask(self, job: Follow) -> None:
        """Have the process make an advance of the tables; the result comes to the loop's queue."""
        if self._thread is None:
            # The process starts only now: a broker that has nothing to follow has neither thread
            # nor process.
            thread = threading.Thread(target=self._run, name="malamute-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # The system has no room for a thread.
                self._results.put(CheckpointFailed("died", f"no thread could be started: {error}"))
                return
            self._thread = thread
        self._jobs.put(job)

    def stop(self, deadline: float) -> Checkpointed | CheckpointFailed | None:
        """End thread and process by a deadline (time.monotonic()), and return the last answer.

        Work under way may be finished until then; after it the process is killed.
        """
        thread = self._thread
        if thread is None:
            return None
        self._jobs.put(None)
        thread.join(max(deadline - time.monotonic(), 0.0))
        while thread.is_alive():
            # It waits for an answer of the process, which is killed; several times, as the thread
            # may be starting a process just now.
            child = self._child
            if child is not None:
                child.kill()
            thread.join(0.05)
        return self._answer

    def _run(self) -> None:
        """Run the thread: one job after the other, each with one answer for the loop."""
        try:
            while (job := self._next()) is not None:
                self._answer = answer = self._do(job)._replace(said=self._said())
                self._results.put(answer)
        except BaseException as error:  # noqa: BLE001 - told to the loop, which stops the daemon
            self._results.put(Died("checkpoint", error, traceback.format_exc()))
        finally:
            self._end()

    def _next(self) -> Follow | None:
        """Wait for a job; None: end. A process that dies meanwhile is reaped."""
        while True:
            try:
                return self._jobs.get(timeout=None if self._child is None else _LOOK_S)
            except Empty:
                child = self._child
                if child is not None and child.poll() is not None:
                    # The dead process is reaped and not left until something is to be done.
                    self._words += f"{self._died('').reason}\n"

    def _said(self) -> str:
        """Return what processes wrote to standard error since the last call."""
        self._read_errors()
        said, self._words = self._words, ""
        return said.strip()

    def _read_errors(self) -> None:
        """Read what is in the file to which the process's standard error goes."""
        if self._errors >= 0:
            size = os.fstat(self._errors).st_size
            if size:
                data = os.pread(self._errors, _SAID_BYTES, max(size - _SAID_BYTES, 0))
                os.ftruncate(self._errors, 0)
                self._words += data.decode("utf-8", "replace")

    def _do(self, job: Follow) -> Checkpointed | CheckpointFailed:
        """Have the process make one advance of the tables; start a process first if there is none.

        Runs in the thread, which waits for the answer.
        """
        restarted = 0  # for the result: processes that had died, if this is the first job since
        try:
            if self._child is None:
                fault = self._start()
                if fault is not None:
                    return fault
                if self._replaces:
                    restarted, self._replaces = self._deaths, False
            child = self._child
            assert child is not None
            assert child.stdin is not None
            assert child.stdout is not None
            write_frame(child.stdin, job)  # type: ignore[arg-type]
            answer = read_answer(child.stdout)  # type: ignore[arg-type]
        except (OSError, msgspec.MsgspecError) as error:
            return self._died(str(error))
        if isinstance(answer, Advanced):
            return Checkpointed(answer.done, answer.took_ms, restarted)
        if isinstance(answer, Failed):
            # Any error may have ended it: a new process begins from what is on the disk.
            self._end()
            return CheckpointFailed(answer.code, answer.reason)
        # None: its output has ended.
        return self._died("")

    def _start(self) -> CheckpointFailed | None:
        """Start the process and wait for its first answer; return why it failed, or None."""
        # The operator's word that changes which the log has lost may be missing in the tables.
        options = ["--accept-lost"] if self._config.lost_changes == "accept" else []
        # A file and not a pipe, which would fill up and stop the process.
        self._errors = os.memfd_create("malamute-checkpoint")
        fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)
        self._child = child = subprocess.Popen(
            [
                # -P: the current directory brings in no modules. The process ends with the broker,
                # whose number it is given.
                sys.executable, "-P", "-m", "malamute_py.store.follow",
                str(self._directory), str(os.getpid()), *options,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            # A signal that a terminal sends to its process group is for the broker to answer.
            env=environment(), process_group=0,
        )  # fmt: skip
        assert child.stdout is not None
        answer = read_answer(child.stdout)  # type: ignore[arg-type]
        if isinstance(answer, Began):
            return None
        if isinstance(answer, Failed):
            self._end()
            return CheckpointFailed(answer.code, answer.reason)
        # None: its output has ended.
        return self._died("")

    def _died(self, reason: str) -> CheckpointFailed:
        """Clean up after a process that has died, or could not be started; return the failure.

        reason: empty: the last line that the process wrote is the reason.
        """
        child = self._child
        if child is None:
            self._close()
            return CheckpointFailed("died", f"no process could be started: {reason}")
        child.kill()  # its output has ended, and it may still run
        code = child.wait()
        self._close()
        self._deaths += 1
        self._replaces = True  # the next process is reported as a restart
        reason = reason or self._words.strip().rpartition("\n")[2]
        what = f"the process that writes the tables ended ({code})"
        return CheckpointFailed("died", f"{what}: {reason}" if reason else what)

    def _end(self) -> None:
        """End the process by closing its input; kill it when it takes longer than _END_S."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._close()

    def _close(self) -> None:
        """Close the pipes of a process that is gone, and keep only what it wrote."""
        child, self._child = self._child, None
        for pipe in (child.stdin, child.stdout) if child is not None else ():
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._errors >= 0:
            self._read_errors()
            os.close(self._errors)
            self._errors = -1


def environment() -> dict[str, str]:
    """Return the broker's environment for a child process, which is to find the same code.

    PYTHONPATH begins with the directories of this package and of malamute_protocol.
    """
    protocol = malamute_protocol.__file__
    homes = [str(Path(__file__).resolve().parents[3])]  # the directory of malamute_py
    if protocol:
        homes.append(str(Path(protocol).resolve().parents[1]))
    known = os.environ.get("PYTHONPATH", "")
    paths = list(dict.fromkeys([*homes, *([known] if known else [])]))  # each once, in order
    return {
        # numpy's OpenBLAS starts threads for matrices, which would spin beside a busy broker; the
        # process multiplies none. A value that the operator has set goes before.
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
