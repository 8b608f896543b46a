"""One run of a command: its input, its output, and its end.

Owns the child process and what flows to and from it. The rules: it never blocks on a pipe, keeps at
most so much of the output, and when the run is to end the child's whole group gets SIGTERM and,
after the grace, SIGKILL; and when this process is killed, a guard kills it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final, NamedTuple, Self

_POLL_S: Final = 0.1
_READ_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 4096
"""Bytes of the command's standard error that are kept for the reason of its failure."""

TOO_MUCH: Final = "too much"
"""Ran.stopped of a command that printed more than output_bytes_max."""


class Ran(NamedTuple):
    """The end of a run, and what it printed."""

    code: int
    """Exit code; negative: the signal that ended it."""
    output: bytes
    last_words: str
    """The last line that it wrote to standard error."""
    stopped: str
    """Why the run was told to end; empty: it ended by itself."""


_GUARDING: Final = """held=" "
while read -r what group; do
  case $what in
    +) held="$held$group ";;
    -) held="${held%%" $group "*} ${held#*" $group "}";;
  esac
done
for group in $held; do kill -s KILL -- "-$group"; done
"""
"""Program of a shell: it is told of each group that begins and ends, and kills those that are left
when the pipe that tells it closes, as it does however this process ends."""


class ProcessGuard:
    """Kills the commands that run when this process is killed and cannot do it itself."""

    def __init__(self) -> None:
        """Start the shell. Raises OSError when there is none."""
        self._lock = threading.Lock()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDING], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def held(self, group: int) -> None:
        """Tell the guard that a process group runs."""
        self._tell(f"+ {group}\n")

    def left(self, group: int) -> None:
        """Tell the guard that a process group has ended."""
        self._tell(f"- {group}\n")

    def _tell(self, line: str) -> None:
        """Send a line to the guarding shell."""
        pipe = self._shell.stdin
        assert pipe is not None
        # A guard that was killed by another process is of no use any more, and no reason to stop.
        with self._lock, contextlib.suppress(OSError):
            pipe.write(line.encode())
            pipe.flush()

    def close(self) -> None:
        """End the guard; nothing runs any more."""
        pipe = self._shell.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
        self._shell.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(
    command: Sequence[str],
    body: bytes,
    variables: Mapping[str, str],
    *,
    over: Callable[[], str],
    on_output: Callable[[bytes], None] | None,
    on_words: Callable[[bytes], None],
    output_bytes_max: int,
    grace_s: Callable[[], float],
    guard: ProcessGuard,
) -> Ran:
    """Run a command to its end, for a worker that has one request.

    body: its standard input. variables: beside those of this process. over: returns why the run
    has to end now, or empty; asked several times a second. on_output: gets what it prints; None:
    that is kept for Ran, and more than output_bytes_max of it ends the run. on_words: gets what it
    says on standard error. grace_s: returns the time between SIGTERM and SIGKILL. guard: ends the
    child's group when this process is killed. What the callables raise ends the child at once.
    Raises OSError: it cannot be started.
    """
    child = subprocess.Popen(
        list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A session of its own is a process group: what the command starts is ended with it.
        env={**os.environ, **variables}, start_new_session=True,
    )  # fmt: skip
    guard.held(child.pid)
    try:
        return _Run(child, body, over, on_output, on_words, output_bytes_max, grace_s).finish()
    finally:
        if child.poll() is None:
            _signal(child, signal.SIGKILL)
            child.wait()
        guard.left(child.pid)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Run:
    """A run of a command; its arguments are those of run()."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        body: bytes,
        over: Callable[[], str],
        on_output: Callable[[bytes], None] | None,
        on_words: Callable[[bytes], None],
        output_bytes_max: int,
        grace_s: Callable[[], float],
    ) -> None:
        """Take the arguments of run()."""
        self._child = child
        self._rest = memoryview(body)
        self._over = over
        self._on_output = on_output
        self._on_words = on_words
        self._max = output_bytes_max
        self._grace_s = grace_s
        self._kept: list[bytes] = []
        self._size = 0
        """Bytes of output that were kept."""
        self._tail = b""
        """End of what the command said on standard error."""
        self._stopped = ""
        """Why the command was told to end; empty: it was not."""
        self._stopped_at = 0.0

    def finish(self) -> Ran:
        """Feed the command and read from it until it has ended, and end it when it has to.

        No pipe blocks: a command that neither reads nor writes still is looked at.
        """
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        with selectors.DefaultSelector() as selector:
            for pipe in (child.stdout, child.stderr):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(child.stdin.fileno(), False)
            selector.register(child.stdin, selectors.EVENT_WRITE)
            reading = 2  # outputs that the command has not closed
            # Until all three pipes are closed: a command may close its outputs and read on.
            while reading or not child.stdin.closed:
                # Asked before the pipes: what it wrote before its end is in them by then.
                ended = child.poll() is not None
                ready = selector.select(0 if ended else _POLL_S)
                for key, _ in ready:
                    pipe = key.fileobj  # type: ignore[assignment]
                    if pipe is child.stdin:
                        self._feed(selector, pipe)
                    elif not self._read(pipe, is_output=pipe is child.stdout):
                        selector.unregister(pipe)
                        reading -= 1
                if ended and not any(key.fileobj is not child.stdin for key, _ in ready):
                    break  # Processes that the command left running may keep its pipes open.
                self._end_if_over()
        while True:  # It has closed its pipes, and may still run.
            try:
                code = child.wait(_POLL_S)
                break
            except subprocess.TimeoutExpired:
                self._end_if_over()
        if self._stopped:
            _signal(child, signal.SIGKILL)  # Kill the processes of its group that are left.
        words = self._tail.decode("utf-8", "replace").strip().splitlines()
        return Ran(code, b"".join(self._kept), words[-1] if words else "", self._stopped)

    def _end_if_over(self) -> None:
        """Signal a command that has to end: SIGTERM once, and SIGKILL after the grace time."""
        now = time.monotonic()
        if not self._stopped:
            why = self._over() or (TOO_MUCH if self._size > self._max else "")
            if why:
                self._stopped = why
                self._stopped_at = now
                _signal(self._child, signal.SIGTERM)
        elif now - self._stopped_at >= self._grace_s():
            _signal(self._child, signal.SIGKILL)

    def _feed(self, selector: selectors.BaseSelector, pipe: IO[bytes]) -> None:
        """Write more of the input to the command, and close its input after the last."""
        if self._rest:
            try:
                self._rest = self._rest[os.write(pipe.fileno(), self._rest[:_READ_BYTES]) :]
            except BlockingIOError:
                return  # The pipe is full: the selector tells when it takes more.
            except OSError:
                self._rest = self._rest[:0]  # The command does not want to read on.
        if not self._rest:
            selector.unregister(pipe)
            with contextlib.suppress(OSError):
                pipe.close()

    def _read(self, pipe: IO[bytes], *, is_output: bool) -> bool:
        """Read what is there; False: the command has closed this pipe.

        is_output: True: its standard output; False: its standard error.
        """
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if not is_output:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            self._on_words(data)
        elif self._on_output is not None:
            self._on_output(data)
        elif self._size <= self._max:  # Beyond it the run is ended, and more is thrown away.
            self._size += len(data)
            self._kept.append(data)
        return True


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the child's whole group, which may have ended or become another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
