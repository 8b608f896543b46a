"""A progress line on standard error, for a person only.

Owns how a long command shows how far it is. The rule: without a terminal, or in its background
(`malamute work ... &`), there is none, and it never mixes with what a command prints.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from malamute_protocol.errors import MalamuteError
from malamute_py.cli.commands import say
from malamute_py.cli.values import size_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_EVERY_S = 0.1
"""Time between two drawings of the line."""
_ASK_EVERY_S = 0.3
"""Time between two questions to the broker how much is left."""

Answer = TypeVar("Answer")


class Progress:
    """Counts done, of a total when it is known; a context manager."""

    def __init__(self, title: str, *, total: int | None = None, shown: bool = True) -> None:
        """shown: False where the terminal is needed for what the command prints."""
        self._title = title
        self._total = total
        self._shown = shown and sys.stderr.isatty() and _in_the_foreground()
        self._bar: Bar | None = None
        self._task: Any = None
        self._next = 0.0

    def __enter__(self) -> Self:
        """Draw the line, where a person sees it: a bar, or a spinner where no total is known."""
        if self._shown:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                SpinnerColumn,
                TaskProgressColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            text = TextColumn("{task.description}")
            detail = TextColumn("{task.fields[detail]}", style="dim")
            columns = (
                (SpinnerColumn(), text, detail, TimeElapsedColumn())
                if self._total is None
                else (text, BarColumn(), TaskProgressColumn(), detail, TimeRemainingColumn())
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total, detail="")
            self._bar.start()
        return self

    @property
    def shown(self) -> bool:
        """Whether a person sees the line."""
        return self._shown

    def update(self, done: int, detail: str = "", *, total: int | None = None) -> None:
        """Set how much is done; cheap, so that a loop may call it for each piece.

        detail: text beside the bar. total: a new total, when it became known.
        """
        if self._bar is None:
            return
        now = time.monotonic()
        if now < self._next and done != self._total:
            return  # Drawn a moment ago; the end is always drawn.
        self._next = now + _EVERY_S
        if total is not None:
            self._bar.update(self._task, total=total)
        self._bar.update(self._task, completed=done, detail=detail)

    def bytes(self, done: int, what: str) -> None:
        """Set how many bytes are done, and of which file."""
        self.update(done, f"{size_text(done)}  {what}")

    def title(self, text: str) -> None:
        """Set what is being done."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def say(self, text: str) -> None:
        """Write one line to standard error, above the progress line when there is one."""
        if self._bar is None:
            say(text)
            return
        from rich.text import Text

        self._bar.console.print(Text(text))

    def stop(self) -> None:
        """Remove the line to make room for the command's output; may be repeated."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.stop()


def _in_the_foreground() -> bool:
    """Whether this command has the terminal; False: it runs in the background of another one."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # This is a terminal, but not the one that controls us: no person types there.
        return True


def watched(title: str, total: int, ask: Callable[[], Answer], left: Callable[[], int]) -> Answer:
    """Return what ask() returns, and show its progress to a person.

    total: how much there is to do. left: asks how much of it is left; it is called from this thread
    while ask() runs in another. Raises what ask() raises.
    """
    with Progress(title, total=total) as progress:
        if not progress.shown:
            return ask()
        from concurrent.futures import ThreadPoolExecutor
        from concurrent.futures import wait as wait_for

        thread = ThreadPoolExecutor(1)
        try:
            answer = thread.submit(ask)
            while not wait_for([answer], _ASK_EVERY_S).done:  # Until ask() has ended.
                with contextlib.suppress(MalamuteError):  # The error of ask() says more.
                    progress.update(max(0, total - left()))
            return answer.result()
        finally:
            # After an interrupt ask() still runs, and ends when the client is closed.
            thread.shutdown(wait=False)
