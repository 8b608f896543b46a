"""`malamute top`: the broker as it is now, drawn anew every few seconds.

Owns the terminal: keys, the pace, and what is drawn where. screens.py owns what is on a screen. The
rules: one look is under way at a time, and the next begins a pause after its answer, so that a busy
broker is asked less; no key waits for an answer; the terminal is given back however the command
ends; without a terminal one look is printed.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from malamute_protocol.errors import MalamuteError
from malamute_py.cli import output
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.linking import linked
from malamute_py.cli.looking import look
from malamute_py.cli.screens import (
    EVERY_MIN_S,
    KEYS,
    THINGS_MAX,
    Sample,
    Screen,
    snapshot,
    troubles_of,
)
from malamute_py.cli.values import duration_ms

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient

EPILOG: Final = f"""\b
Examples:
  malamute top                    each 2 s
  malamute top --every 500ms
  malamute top --once             the state once, and the rates of one period
  malamute top --json | jq '.troubles'

\b
Keys:
{KEYS}

What is slow or stuck stands above the table, the worst first. In a pipe there is one look: what is
slow or stuck, then a line for each thing, with tabs between, which begins with its kind."""

_KEY: Final = re.compile(r"\x1b[\[O]([0-9;]*[A-Za-z~])|(.)", re.DOTALL)
_BEGUN: Final = re.compile(r"\x1b([\[O][0-9;]*)?$")
_REST_S: Final = 0.05
"""Time within which the rest of a special key comes."""
_SPECIAL: Final = {
    "A": "up", "B": "down", "C": "right", "D": "left", "5~": "page up", "6~": "page down",
    "H": "home", "1~": "home", "7~": "home", "F": "end", "4~": "end", "8~": "end",
}  # fmt: skip
_PLAIN: Final = {
    "\x1b": "escape", "\n": "enter", "\r": "enter", "\x7f": "backspace", "\b": "backspace",
    "\x1a": "suspend",
}  # fmt: skip
_SILENT_S: Final = 3
"""Time without an answer from which on it is said."""
_CHARACTERS: Final = 6
"""Place of the special characters among the attributes of a terminal."""


def top(
    ctx: typer.Context,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="Pause between two looks.")
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Print one look, as in a pipe.")] = False,
    as_json: output.Json = False,
) -> None:
    """Watch the broker: rates, lags, rings, and what is slow or stuck."""
    every_s = duration_ms(every) / 1000
    if every_s < EVERY_MIN_S:
        raise CommandFailed("--every is at least 100ms", USAGE)
    live = output.on_terminal() and sys.stdin.isatty() and not (once or as_json)
    # Nothing can be drawn on a terminal without positions: it gets one look, as a pipe does.
    live = live and not output.console().is_dumb_terminal
    with linked(ctx, stays=live) as client:
        if live:
            _watch(client, every_s)
            return
        before = _sample(client)
        time.sleep(min(every_s, 1.0))
        after = _sample(client)
    if as_json:
        output.print_json(snapshot(after, before))
        return
    for trouble in troubles_of(after):
        print(f"{trouble.kind}\t{trouble.what}\t{'/'.join(trouble.name)}\t{trouble.words}")
    for kind, rows in snapshot(after, before)["things"].items():
        for row in rows:
            print(
                "\t".join([kind, *("" if value is None else f"{value}" for value in row.values())])
            )


def _sample(client: SyncClient) -> Sample:
    return Sample(look(client, limit=THINGS_MAX), time.monotonic())


class _Looks:
    """Looks at the broker by a thread, one at a time, so that keys act while a broker is silent."""

    def __init__(self, client: SyncClient, done: Callable[[], None]) -> None:
        """done: called by the thread after each look."""
        self._client = client
        self._done = done
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._outcome: Sample | BaseException | None = None

    @property
    def under_way(self) -> bool:
        """Whether a look has begun whose outcome was not taken."""
        return self._thread is not None

    @property
    def silence(self) -> str:
        """Sentence about a look that lasts long; empty: it does not."""
        waited_s = int(time.monotonic() - self._began_s)
        silent = self.under_way and waited_s >= _SILENT_S
        return f"the broker has not answered for {waited_s} s" if silent else ""

    def begin(self) -> None:
        """Begin a look."""
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="malamute-top", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        try:
            self._outcome = _sample(self._client)
        except BaseException as error:  # noqa: BLE001 - raised where the outcome is taken
            self._outcome = error
        self._done()

    def take(self) -> Sample | None:
        """Return the outcome of a look, once; None: there is none. Raises what the look raised."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            self._thread = None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def _watch(client: SyncClient, every_s: float) -> None:
    """Draw the screen until a person quits; keys act at once, figures come every `every_s`."""
    from rich.live import Live

    console = output.console()
    screen = Screen(every_s)
    sample, before, gone, asked = _sample(client), None, "", False
    due_s = time.monotonic() + every_s
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        looks = _Looks(client, keys.wake)
        while True:
            now_s = time.monotonic()
            try:
                taken = looks.take()
            except MalamuteError as error:
                gone, asked, due_s = str(error), False, now_s + screen.every_s
            else:
                if taken is not None and (asked or not screen.paused):
                    sample, before, gone, asked = taken, sample, "", False
                    due_s = now_s + screen.every_s
            if not looks.under_way and (asked or (now_s >= due_s and not screen.paused)):
                if client.linked:
                    looks.begin()
                else:
                    gone, asked = "the link is lost; it is sought", False
                    due_s = now_s + screen.every_s
            drawn = screen.drawn(sample, before, *console.size, gone=looks.silence or gone)
            live.update(drawn, refresh=True)
            # While a look is under way its silence is to be seen, each second.
            wait_s = 1.0 if looks.under_way else max(0.0, due_s - now_s)
            pressed = keys.next(None if screen.paused and not looks.under_way else wait_s)
            if pressed == "hangup" or (pressed == "q" and not screen.typing):
                return
            if pressed == "suspend":
                live.stop()
                keys.give_back()
                os.kill(0, signal.SIGTSTP)
                keys.take()
                live.start()
            elif pressed == " " and not screen.typing:
                asked = True
            elif pressed:
                screen.press(pressed)


class _Keys:
    """Keys of the terminal, one by one, and what else ends a wait for one."""

    def __init__(self, entry: int) -> None:
        import termios

        self._entry = entry
        self._kept = termios.tcgetattr(entry)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[str] = []
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)

    def take(self) -> None:
        """Take the terminal: keys come as they are pressed, also Ctrl-Z."""
        import termios
        import tty

        tty.setcbreak(self._entry)
        taken = termios.tcgetattr(self._entry)
        taken[_CHARACTERS][termios.VSUSP] = b"\0"
        termios.tcsetattr(self._entry, termios.TCSADRAIN, taken)

    def give_back(self) -> None:
        """Give the terminal back as it was."""
        import termios

        termios.tcsetattr(self._entry, termios.TCSADRAIN, self._kept)

    def close(self) -> None:
        """Close what wakes."""
        os.close(self._woken)
        waker, self._waker = self._waker, -1
        os.close(waker)

    def wake(self) -> None:
        """End the wait for a key; for any thread, and for handlers of signals."""
        # Full: it wakes already. Closed: a look ended after the screen.
        with contextlib.suppress(OSError):
            os.write(self._waker, b"!")

    def next(self, wait_s: float | None) -> str:
        """Return the next key within a time (None: any); empty: none, or something else happened.

        A key is its sign, or the name of a special one; `hangup`: the terminal is gone.
        """
        if not self._waiting:
            ready, _, _ = select.select([self._entry, self._woken], [], [], wait_s)
            if self._woken in ready:
                os.read(self._woken, 4_096)
            if self._entry in ready:
                self._read()
        return self._waiting.pop(0) if self._waiting else ""

    def _read(self) -> None:
        """Read what was typed."""
        text = ""
        while True:
            entered = os.read(self._entry, 1_024)
            if not entered:
                self._waiting.append("hangup")
                return
            text += self._decoder.decode(entered)
            # The rest of a special key may be on its way; Esc alone has none.
            begun = _BEGUN.search(text) is not None
            if not (begun and select.select([self._entry], [], [], _REST_S)[0]):
                break
        for special, plain in _KEY.findall(text):
            self._waiting.append(_PLAIN.get(plain, plain) or _SPECIAL.get(special, "other"))


@contextlib.contextmanager
def _keys() -> Iterator[_Keys]:
    """Take the keys of the terminal, as they are pressed; it is given back at the end."""
    keys = _Keys(sys.stdin.fileno())

    def resized(number: int, frame: FrameType | None) -> None:
        keys.wake()

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = [
        (number, signal.signal(number, handler))
        for number, handler in ((signal.SIGWINCH, resized), (signal.SIGTERM, ended))
    ]
    try:
        keys.take()
        yield keys
    finally:
        for number, before in former:
            signal.signal(number, before)
        keys.give_back()
        keys.close()
