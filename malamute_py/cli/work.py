"""`malamute work`: run a command for each request of a service.

Owns the way from a request to a run and from its end to an answer. The rules: the exit code decides
(0 done, 75 give it back, anything else failed); no run goes on for a requester that has gone;
however the worker ends, requests that it did not begin go back to the queue.
"""

from __future__ import annotations

import errno
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_protocol.errors import BrokerRefused, LocalProtocolError, MalamuteError, Timeout
from malamute_py.cli import complete, output, running
from malamute_py.cli.commands import say
from malamute_py.cli.failures import FAILED, INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.letters import key_text
from malamute_py.cli.linking import linked
from malamute_py.cli.parameters import Tracing
from malamute_py.cli.progress import Progress
from malamute_py.cli.records import ESCAPES
from malamute_py.cli.subscribe import check_kind
from malamute_py.cli.values import duration_ms, duration_text, iso_text, size_text

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient
    from malamute_py.client.sync.work import SyncRequest, SyncWorker

EPILOG: Final = """\b
Examples:
  malamute work lookup -- ./lookup.sh
  malamute work resize -c 4 --timeout 1m -- convert - -resize 50% -
  malamute work lookup --pattern 'airline.*' -- python lookup.py --all
  malamute work report --lines -- ./report.sh      each line is a reply

\b
The command gets the body on its standard input, and in its environment
MALAMUTE_SERVICE, _SUBJECT, _SENDER, _REPLY_TO, _FIELD_NAME of each field,
  MALAMUTE_NUMBER     of the request
  MALAMUTE_ATTEMPTS   how often it was handed out, this time included
  MALAMUTE_KEY        the same each time, to tell whether it is done already
  MALAMUTE_DEADLINE   when the request times out; empty: never
  TRACEPARENT         with --tracing: the trace, for `malamute pub --tracing`

\b
What it prints is the reply. Its exit code decides:
  0          done
  75         give it back: tried again after --delay (EX_TEMPFAIL)
  any other  failed, for the reason in its last line on standard error; the
             request goes to the dead letters: `mailbox peek SERVICE.dead`

In a pipe a line is printed for each: number, outcome (done, failed, returned, gone),
milliseconds, reason. Ctrl-C or SIGTERM ends it: runs come to their end, nothing else is
begun. A second one stops the runs with SIGTERM, a third with SIGKILL; their requests go back
to the queue, and that counts as no attempt."""

TEMPFAIL: Final = 75
"""Exit code of a command that wants its request tried again, by the convention of sysexits.h."""
_PATTERN_HELP: Final = "Only subjects like this: a.*.#, prefix:a., regex:^a; or fields:k=v."
_TAKE_MS: Final = 200
"""Time for which a thread waits for a request before it looks whether the worker is ending."""
_TURN_S: Final = 0.2
"""Time between two turns of the main thread, which heeds signals and shows progress."""
_ASK_EVERY_S: Final = 2.0
"""Interval at which the broker is asked whether a request that takes long is still ours."""
_ANSWER_MS: Final = 1_000
"""Time for which the broker's answer about one such request is waited for."""
_REASON_MAX: Final = 500
"""Characters of the reason that an answer carries."""
# Why a run was told to end: the worker ends, no requester waits any more, or --timeout is over.
_SHUTDOWN: Final = "shutdown"
_GONE: Final = "gone"
_LATE: Final = "late"


def work(
    ctx: typer.Context,
    service: Annotated[
        str,
        typer.Argument(metavar="SERVICE", help="The service; made when new.",
                       autocompletion=complete.services),
    ],
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="Command to run for each request."),
    ],
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", metavar="N", min=1, help="So many runs at a time.")
    ] = 1,
    pattern: Annotated[str, typer.Option("--pattern", metavar="PATTERN", help=_PATTERN_HELP)] = "#",
    lease: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Silence after which another worker gets a request."),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time of a run, after which it failed.")
    ] = None,
    delay: Annotated[
        str, typer.Option(metavar="DURATION", help="Pause after a run with exit code 75; doubles.")
    ] = "1s",
    grace: Annotated[
        str, typer.Option(metavar="DURATION", help="Between SIGTERM and SIGKILL.")
    ] = "5s",
    by_line: Annotated[
        bool, typer.Option("--lines", help="Each line that it prints is a reply.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", metavar="N", min=1, help="End after so many requests."),
    ] = None,
    tracing: Tracing = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, a line each request.")] = False,
) -> int:  # fmt: skip
    """Work for a service: run a command for each request."""
    check_kind(pattern)
    if shutil.which(command[0]) is None:
        raise CommandFailed(
            f"there is no command {command[0]!r}; write it after --, with its path if need be",
            USAGE,
        )
    if count is not None:
        concurrency = min(concurrency, count)
    # The client would log a request that was taken from us; here it is printed, as an outcome.
    logging.getLogger("malamute.client").setLevel(logging.ERROR)
    with linked(ctx, stays=True, traces=True) as client:
        told: list[int] = []  # Signals that came; _Crew looks at it.
        # Signals are counted from before the first request comes until the last is given back.
        with _signals(told), client.worker(
            service, pattern, concurrency=concurrency,
            lease_ms=None if lease is None else duration_ms(lease),
        ) as worker:  # fmt: skip
            worker.accepted()
            with (
                running.ProcessGuard() as guard,
                Progress(f"{service}: working", shown=not as_json) as progress,
            ):
                crew = _Crew(
                    client, worker, service, command, progress, guard,
                    timeout_s=None if timeout is None else duration_ms(timeout) / 1000,
                    delay_ms=duration_ms(delay), grace_s=duration_ms(grace) / 1000,
                    by_line=by_line, left=count, as_json=as_json, told=told,
                )  # fmt: skip
                crew.work(concurrency)
        crew.tell()
    if crew.error is not None:
        raise crew.error
    return INTERRUPTED if told and told[0] == signal.SIGINT else 0


class _Crew:
    """The threads that run the command, and counts of what they have done."""

    def __init__(
        self,
        client: SyncClient,
        worker: SyncWorker,
        service: str,
        command: list[str],
        progress: Progress,
        guard: running.ProcessGuard,
        *,
        timeout_s: float | None,
        delay_ms: int,
        grace_s: float,
        by_line: bool,
        left: int | None,
        as_json: bool,
        told: list[int],
    ) -> None:
        """Take the options.

        timeout_s: of a run. delay_ms: pause after exit code 75. grace_s: between SIGTERM and
        SIGKILL. by_line: each line of output is a reply. left: requests to do; None: no bound.
        told: gets the signals as they come.
        """
        self._told = told
        self._client = client
        self._worker = worker
        self._service = service
        self._command = command
        self._progress = progress
        self._guard = guard
        self._timeout_s = timeout_s
        self._timeout_text = "" if timeout_s is None else duration_text(round(timeout_s * 1000))
        self._delay_ms = delay_ms
        self._grace_s = grace_s
        self._by_line = by_line
        self._left = left
        self._json = as_json
        self._lines = as_json or not output.on_terminal()
        """Whether each outcome is a line; a person is told of failures only."""
        welcome = client.welcome
        self._reply_bytes_max = welcome.record_bytes_max if welcome is not None else 1 << 20
        self._ending = threading.Event()
        """True: no request is begun any more."""
        self._stopping = threading.Event()
        """True: the runs are stopped."""
        self._lock = threading.Lock()
        self._running: dict[SyncRequest, float] = {}
        """Requests whose command runs, and when it began: one number may come again meanwhile."""
        self._counts = {"done": 0, "failed": 0, "returned": 0, "gone": 0}
        self.error: BaseException | None = None
        """The error with which it cannot go on."""

    def work(self, concurrency: int) -> None:
        """Run the command for requests in so many threads, until these have ended.

        The main thread heeds signals, shows progress, and renews leases meanwhile.
        """
        threads = [
            threading.Thread(target=self._take_all, name=f"malamute-run-{n}", daemon=True)
            for n in range(concurrency)
        ]
        for thread in threads:
            thread.start()
        asked_at = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_TURN_S / concurrency)
            # The first signal lets the runs end, the second ends them, the third at once.
            if self._told:
                self._ending.set()
            if len(self._told) > 1:
                self._stopping.set()
            if len(self._told) > 2:
                self._grace_s = 0.0
            self._show()
            if time.monotonic() - asked_at >= _ASK_EVERY_S:
                self._ask()
                asked_at = time.monotonic()

    def tell(self) -> None:
        """Tell a person at the end what was done."""
        if sys.stderr.isatty() and not self._json:
            say(f"{self._service}: {self._summary()}")

    def _summary(self) -> str:
        """Say how many requests had which outcome; gone: no requester waits for them any more."""
        counts = self._counts
        parts = [f"{counts['done']:,} done", f"{counts['failed']:,} failed"]
        if counts["returned"]:
            parts.append(f"{counts['returned']:,} given back")
        if counts["gone"]:
            parts.append(f"{counts['gone']:,} gone")
        return ", ".join(parts)

    def _show(self) -> None:
        """Show on the progress line what was done and what runs now."""
        self._progress.update(
            self._counts["done"], f"{self._summary()}, {len(self._running):,} in hand"
        )

    def _ask(self) -> None:
        """Ask the broker whether requests that run long are still ours, by renewing their leases.

        The client notes those that it has taken away: cancelled() is true of them then, and _over()
        ends their run.
        """
        now = time.monotonic()
        with self._lock:
            long = [each for each, began in self._running.items() if now - began >= _ASK_EVERY_S]
        for request in long:
            # While there is no link, each would be waited for in vain, and no signal be heeded; the
            # client renews all of them when there is one.
            if not self._client.linked:
                return
            with suppress(MalamuteError):
                request.renew(_ANSWER_MS)

    # --- in the threads ------------------------------------------------------------------------

    def _take_all(self) -> None:
        """Run one thread: request after request, until the worker stops or has done its number."""
        try:
            while not self._ending.is_set() and self._one_more():
                request = self._next()
                if request is None:
                    return
                self._handle(request)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            self.error = self.error or error
            self._ending.set()
            self._stopping.set()

    def _one_more(self) -> bool:
        """Whether this thread may take another request, which counts as taken from now on."""
        with self._lock:
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0

    def _next(self) -> SyncRequest | None:
        """Wait for a request; None: the worker is ending, or gets none any more."""
        while not self._ending.is_set():
            try:
                return self._worker.next(_TAKE_MS)
            except Timeout:
                continue
        return None

    def _handle(self, request: SyncRequest) -> None:
        """Run the command for one request, and note the outcome."""
        began = time.monotonic()
        with self._lock:
            self._running[request] = began
        try:
            outcome, reason = self._run_traced(request, began)
        finally:
            with self._lock:
                del self._running[request]
        self._note(request, outcome, reason, round((time.monotonic() - began) * 1000))

    def _run_traced(self, request: SyncRequest, began: float) -> tuple[str, str]:
        """Run the command within the request's span, where the worker has spans (--tracing).

        Returns the outcome and its reason.
        """
        working = getattr(self._worker, "working", None)
        if working is None:
            return self._run(request, began, {})
        from malamute_py.cli.tracing import failed, variables

        with working(request) as span:
            outcome, reason = self._run(request, began, variables())
            if outcome == "failed":
                failed(span, reason)
        return outcome, reason

    def _run(self, request: SyncRequest, began: float, trace: Mapping[str, str]) -> tuple[str, str]:
        """Run the command for one request and answer it; returns the outcome and its reason.

        began: time.monotonic() at the start. trace: variables by which the command continues the
        request's trace. Raises CommandFailed: the command cannot be run at all.
        """
        # A command has one standard input.
        blobs = request.parts
        if len(blobs) != 1:
            return self._failed(request, f"its body is a list of {len(blobs)} blobs, not one")
        replies = _Replies(request) if self._by_line else None
        words = _Words(self._progress)
        try:
            ran = running.run(
                self._command, blobs[0], {**_variables(request), **trace},
                over=lambda: self._over(request, began),
                on_output=None if replies is None else replies.take,
                on_words=words.take,
                output_bytes_max=self._reply_bytes_max, grace_s=lambda: self._grace_s,
                guard=self._guard,
            )  # fmt: skip
        except (BrokerRefused, LocalProtocolError) as error:  # A reply by line was refused.
            return self._failed(request, str(error))
        except MalamuteError:
            raise  # A reply could not be sent; Timeout and ConnectionLost are OSErrors, too.
        except OSError as error:
            request.nack()  # The request is not at fault: another worker may have the command.
            raise CommandFailed(
                f"{self._command[0]}: cannot be run: {(error.strerror or str(error)).lower()}"
                + (
                    "; does its first line name what runs it, as #!/bin/sh?"
                    if error.errno == errno.ENOEXEC
                    else ""
                ),
                FAILED,
            ) from None
        words.end()
        if ran.stopped == _GONE:
            request.nack()  # The broker may think that the request is still ours.
            return "gone", "no requester waits for it any more"
        if ran.stopped == _LATE:
            return self._failed(request, f"it did not end within {self._timeout_text}")
        if ran.stopped == running.TOO_MUCH:
            most = size_text(self._reply_bytes_max)
            return self._failed(request, f"its reply is larger than {most}; --lines sends parts")
        if ran.code == 0:
            return self._done(request, ran.output, replies)
        if ran.stopped == _SHUTDOWN:
            # Given back now, it could be handed to this worker again. Requests that it still holds
            # go back when it is closed.
            return "returned", ran.last_words
        if ran.code == TEMPFAIL:
            pause_ms = request.retry_ms(self._delay_ms)
            kept = request.nack(pause_ms, reason=ran.last_words[:_REASON_MAX], wait=True)
            return ("returned" if kept else "gone"), ran.last_words
        return self._failed(request, ran.last_words or _ending(ran.code))

    def _over(self, request: SyncRequest, began: float) -> str:
        """Return why a running command has to stop: request gone, late, worker ends; empty: not."""
        if request.cancelled():
            return _GONE
        if self._timeout_s is not None and time.monotonic() - began >= self._timeout_s:
            return _LATE
        return _SHUTDOWN if self._stopping.is_set() else ""

    def _done(self, request: SyncRequest, body: bytes, replies: _Replies | None) -> tuple[str, str]:
        """Send what the command wrote as the reply; return the outcome and its reason.

        replies: has sent all lines but the last one (--lines); None: body is the one reply.
        """
        try:
            taken = (
                replies.end() if replies is not None else request.reply(body, wait=True) is not None
            )
        except (BrokerRefused, LocalProtocolError) as error:
            return self._failed(request, f"its reply was refused: {error}")
        return ("done", "") if taken else ("gone", "the reply came too late")

    def _failed(self, request: SyncRequest, reason: str) -> tuple[str, str]:
        """Tell the broker that a request failed; return the outcome and its reason."""
        short = reason[:_REASON_MAX]
        return ("failed" if request.fail(short, wait=True) else "gone"), short

    def _note(self, request: SyncRequest, outcome: str, reason: str, spent_ms: int) -> None:
        """Count and print the outcome of one request."""
        with self._lock:
            self._counts[outcome] += 1
            if self._json:
                output.print_json(
                    {
                        "number": request.number, "outcome": outcome, "duration_ms": spent_ms,
                        "subject": request.subject, "sender": request.sender,
                        "attempts": request.attempts, **({"reason": reason} if reason else {}),
                    },
                    compact=True,
                )  # fmt: skip
            elif self._lines:
                print(f"{request.number}\t{outcome}\t{spent_ms}\t{' '.join(reason.split())}")
            elif outcome != "done":
                words = f": {reason}" if reason else ""
                self._progress.say(f"request {request.number} {outcome}{words}".translate(ESCAPES))
            sys.stdout.flush()


def _ending(code: int) -> str:
    """Return how a command ended in words. code: its exit code; negative: a signal ended it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


class _Replies:
    """Sends lines of the output as replies.

    One line is held back: whether it is the last reply is known at the output's end.
    """

    def __init__(self, request: SyncRequest) -> None:
        self._request = request
        self._rest = b""
        self._held: bytes | None = None
        self._taken = True
        """False: the request is not ours any more, and its replies are not sent."""

    def take(self, data: bytes) -> None:
        """Take some output, and send its lines but the last one. Raises BrokerRefused."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        """Hold this line back, and send the one that was held: it is not the last reply."""
        if self._held is not None and self._taken:
            self._taken = self._request.reply(self._held, last=False, wait=True) is not None
        self._held = line

    def end(self) -> bool:
        """Send the last reply; False: the request is not ours any more."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if not self._taken:
            return False
        if self._held is None:
            return self._request.complete(wait=True)
        return self._request.reply(self._held, wait=True) is not None


class _Words:
    """Passes on what a command writes to standard error, in whole lines.

    So that lines of commands that run at the same time, and the progress line, do not mix.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Take some of the text, and pass on its whole lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)

    def end(self) -> None:
        """Pass on the rest: no more text comes."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""

    def _line(self, line: bytes) -> None:
        """Print a line that the command wrote to its standard error."""
        if sys.stderr.isatty():
            self._progress.say(line.decode("utf-8", "backslashreplace").translate(ESCAPES))
        else:
            with suppress(OSError, ValueError):
                sys.stderr.write(line.decode("utf-8", "backslashreplace") + "\n")
                sys.stderr.flush()


def _variables(request: SyncRequest) -> dict[str, str]:
    """Return the variables about the request in the command's environment."""
    key, row = request.key
    found: dict[str, Any] = {
        "SERVICE": request.service,
        "SUBJECT": request.subject,
        "SENDER": request.sender,
        "REPLY_TO": request.reply_to,
        "NUMBER": request.number,
        "ATTEMPTS": request.attempts,
        "KEY": f"{key_text(key)}/{row}" if key else "",
        "DEADLINE": iso_text(request.deadline_ms) if request.deadline_ms else "",
    }
    for name, value in request.fields.items():
        # A variable's name has letters, digits and _ only.
        plain = "".join(each if each.isascii() and each.isalnum() else "_" for each in name)
        found[f"FIELD_{plain.upper()}"] = value
    # The system takes no NUL in a variable.
    return {f"MALAMUTE_{name}": str(value).replace("\0", "") for name, value in found.items()}


@contextmanager
def _signals(told: list[int]) -> Iterator[None]:
    """Count SIGINT and SIGTERM, and do nothing else: one drains, two stop the runs, three kill."""

    def handle(number: int, frame: Any) -> None:
        told.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
