"""The screen of `malamute top`, an application of textual.

Owns the keys, the pace of looks, and where things stand on the terminal; screens.py owns what they
say. The rules: one look is under way at a time, and the next begins a pause after its answer, so
that a busy broker is asked less; no key waits for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from malamute_protocol.errors import MalamuteError
from malamute_py.cli.looking import EVERY_MIN_S
from malamute_py.cli.screens import (
    KEYS,
    VIEWS,
    Sample,
    Shown,
    above,
    none_of,
    table,
    tabs,
)
from malamute_py.cli.values import count_text, duration_text

_EVERY_MAX_S: Final = 3600.0
_SILENT_S: Final = 3
"""Time without an answer from which on it is said."""
_OF_TABLE: Final = frozenset(
    {"filter", "help", "look", "next_view", "order", "pace", "page", "pause", "quit", "scroll"}
    | {"turn", "view"}
)
"""Actions of keys while the table is in use; elsewhere such a key is text of a filter, or ends
the help."""
_HELP: Final = f"""\
Keys
{KEYS}

Readers are cursors and groups. Rates are the growth between two looks. Above
each table stands what is slow or stuck, the worst first.

Any key: back to the table"""


class Looked(Message):
    """A look at the broker has ended."""

    def __init__(self, outcome: Sample | BaseException) -> None:
        self.outcome = outcome
        super().__init__()


class Help(Screen[None]):
    """The keys, until one is pressed."""

    def compose(self) -> ComposeResult:
        """Make what is on it."""
        with VerticalScroll():
            yield Static(_HELP, markup=False)

    def on_key(self, event: events.Key) -> None:
        """Go back to the table at any key but those that scroll."""
        if event.key not in ("up", "down", "pageup", "pagedown", "home", "end"):
            event.stop()  # It is no key of the table.
            self.dismiss()


class TopScreen(App[None]):
    """The state of a broker: figures and troubles above one of the tables."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #above, #tabs, #state { height: auto; padding: 0 1; }
    #state { display: none; text-style: bold; }
    DataTable { height: 1fr; min-height: 2; scrollbar-size-vertical: 1; overflow-x: hidden; }
    Input { display: none; height: 1; border: none; padding: 0 1; }
    Input:focus { border: none; }
    """
    # Those with priority act in the order of what was typed, before the next key has its widget.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(keys, action, words, show=bool(words), key_display=shown, priority=True)
        for keys, action, words, shown in (
            ("question_mark,h", "help", "Keys", "?"),
            ("q", "quit", "Quit", None),
            ("slash", "filter", "Filter", "/"),
            ("s", "order(1)", "Sort", None),
            ("right", "order(1)", "", None),
            ("left", "order(-1)", "", None),
            ("r", "turn", "Turn", None),
            ("p", "pause", "Pause", None),
            ("space", "look", "Look", "Space"),
            ("tab", "next_view", "", None),
            *((f"{at + 1}", f"view({at})", "", None) for at in range(len(VIEWS))),
            ("plus", "pace(2.0)", "", None),
            ("minus", "pace(0.5)", "", None),
            ("j", "scroll(1)", "", None),
            ("k", "scroll(-1)", "", None),
            ("pagedown", "page(1)", "", None),
            ("pageup", "page(-1)", "", None),
            ("g,home", "scroll(-1_000_000)", "", None),
            ("G,end", "scroll(1_000_000)", "", None),
            ("enter", "keep", "", None),
            ("escape", "all", "All", "Esc"),
            ("ctrl+c", "interrupt", "", None),
            ("ctrl+z", "suspend_process", "", None),
        )
    ]

    def __init__(
        self,
        look: Callable[[], Sample],
        linked: Callable[[], bool],
        first: Sample,
        every_s: float = 2.0,
    ) -> None:
        """look: asks the broker; called in a thread. linked: whether there is a link.

        first: the look that is shown at first. every_s: pause between two looks, which keys change.
        """
        super().__init__()
        self.animation_level = "none"  # A scrolled row is there at once.
        self.every_s = self._began_s = every_s
        self.paused = False
        """Whether the look that is shown stays."""
        self.failure: BaseException | None = None
        """The reason of the end; None: a person quit."""
        self.sample = first
        self._before: Sample | None = None
        self._look, self._linked = look, linked
        self._gone = ""
        """Why the last look failed; empty: it did not."""
        self._asked = False
        """Whether the person asked for a look at once, which counts also while it is paused."""
        self._look_began_s: float | None = None
        """When the look that is under way began."""
        self._view = 0
        # Of each table: the column that sorts it, and whether in the other direction.
        self._orders = [view.order for view in VIEWS]
        self._turned = [False] * len(VIEWS)
        self._above, self._tabs, self._state = (
            Static(id="above"),
            Static(id="tabs"),
            Static(id="state"),
        )
        self._things = DataTable[Text](cursor_type="none", zebra_stripes=True)
        self._filter = Input(placeholder="a text in the name; Enter keeps it, Esc shows all")

    def compose(self) -> ComposeResult:
        """Make what is on the screen."""
        yield from (self._above, self._tabs, self._state, self._things, self._filter, Footer())

    def on_mount(self) -> None:
        """Begin to look, and have signals end the screen. Called by textual when it is there."""
        # After the shell's `fg` textual draws only widgets that have changed.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        if sys.platform != "win32":  # No loop takes signals there.
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        self._things.focus()
        self._due = self.set_timer(self.every_s, self._begin)
        self.set_interval(1.0, self._draw_above)  # It says how long there has been no answer.

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._draw()

    # --- looks -------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a look, unless one is under way or the screen is paused and none was asked for."""
        self._due.stop()
        if self._look_began_s is not None or (self.paused and not self._asked):
            return
        if not self._linked():
            self._end("the link is lost; it is sought")
            return
        self._look_began_s = time.monotonic()
        # A worker of textual would be waited for at the end, however long the broker is silent.
        threading.Thread(target=self._ask, name="malamute-top", daemon=True).start()

    def _ask(self) -> None:
        """Ask the broker, in a thread of its own, and hand the outcome to the screen's loop."""
        outcome: Sample | BaseException
        try:
            outcome = self._look()
        except BaseException as error:  # noqa: BLE001 - raised where the screen has ended
            outcome = error
        with contextlib.suppress(RuntimeError):  # The screen has ended.
            self.post_message(Looked(outcome))

    def on_looked(self, message: Looked) -> None:
        """Show what a look has found, or the broker's failure; another failure ends the screen."""
        outcome = message.outcome
        if isinstance(outcome, MalamuteError):
            self._end(str(outcome))
        elif isinstance(outcome, BaseException):
            self.failure = outcome
            self.exit()
        else:
            if self._asked or not self.paused:
                self._before, self.sample = self.sample, outcome
            self._end("")

    def _end(self, gone: str) -> None:
        """End a look, and wait for the next one. gone: why it has failed."""
        self._gone, self._asked, self._look_began_s = gone, False, None
        self._wait()
        self._draw()

    def _wait(self) -> None:
        """Begin the pause before the next look anew."""
        self._due.stop()
        self._due = self.set_timer(self.every_s, self._begin)

    @property
    def gone(self) -> str:
        """Why there is no newer look; empty: there is one, or it is not due yet."""
        if self._look_began_s is not None:
            waited_s = int(time.monotonic() - self._look_began_s)
            if waited_s >= _SILENT_S:
                return f"the broker has not answered for {waited_s} s"
        return self._gone

    # --- what is drawn -------------------------------------------------------------

    @property
    def shown(self) -> Shown:
        """Choices of the person at the screen."""
        at = self._view
        return Shown(at, self._orders[at], self._turned[at], self._filter.value)

    def _draw_above(self) -> None:
        """Draw the figures and troubles above the table."""
        width, height = self.size
        lines = above(self.sample, self._before, self.gone, width - 2, height)
        self._above.update(Text("\n").join(lines))

    def _draw(self) -> None:
        """Draw everything."""
        self._draw_above()
        self._tabs.update(Text("\n").join(tabs(self.sample, self._view, self.size.width - 2)))
        columns, rows = table(self.sample, self._before, self.shown, self.size.width - 1)
        things, at = self._things, self._things.scroll_offset.y
        things.clear(columns=True)
        for place, title, width in columns:
            is_name = place == len(self.shown.fields) - 1
            label = Text(title, justify="left" if is_name else "right")
            things.add_column(label, width=width, key=f"{place}")
        things.add_rows(rows)
        things.scroll_to(y=at, animate=False)  # clear() has scrolled to the top.
        self._state.update(Text("  ".join(self._words(len(rows)))))
        self._state.display = bool(self._words(len(rows)))

    def _words(self, rows: int) -> list[str]:
        """Return words about what is not as at first: no rows, paused, another pace, a filter.

        rows: how many the table shows.
        """
        words = [none_of(self.sample, self.shown)] if not rows else []
        if self.paused:
            words.append("paused (p)")
        if self.every_s != self._began_s:
            words.append(f"each {duration_text(round(self.every_s * 1000))} (+, -)")
        if self.shown.sought and not self._filter.display:
            words.append(f"filter {self.shown.sought} (Esc): {count_text(rows)} found")
        return words

    # --- keys ----------------------------------------------------------------------
    # textual calls action_NAME() for a key of BINDINGS, with the argument that stands there.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts now: those of the table do not while a filter is typed.

        Called by textual before each action. `keep` (Enter) is the filter's alone.
        """
        if action in _OF_TABLE:
            return self.focused is self._things
        return action != "keep" or self.focused is self._filter

    def action_view(self, at: int) -> None:
        """Show a table."""
        self._view = at
        self._things.scroll_to(y=0, animate=False)
        self._draw()

    def action_next_view(self) -> None:
        """Show the next table."""
        self.action_view((self._view + 1) % len(VIEWS))

    def action_order(self, by: int) -> None:
        """Sort by a column further to the right or left; the name comes after the last one."""
        self._sort((self._orders[self._view] + by) % len(self.shown.fields))

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column whose title was pressed; a second time, in the other direction."""
        place = int(event.column_key.value or 0)
        self._sort(place, turned=place == self._orders[self._view] and not self._turned[self._view])

    def _sort(self, place: int, *, turned: bool = False) -> None:
        self._orders[self._view], self._turned[self._view] = place, turned
        self.action_view(self._view)

    def action_scroll(self, by: int) -> None:
        """Scroll by rows."""
        self._things.scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        """Scroll by pages: one row of before, and the titles, stay."""
        self.action_scroll(by * max(1, self._things.size.height - 2))

    def action_turn(self) -> None:
        """Sort in the other direction."""
        self._turned[self._view] = not self._turned[self._view]
        self._draw()

    def action_filter(self) -> None:
        """Show the line in which a text is typed that names are to have."""
        self._filter.display = True
        # Widget.focus() would do so later only, and the next key go to the table.
        self.screen.set_focus(self._filter)
        self._draw()

    def on_input_changed(self) -> None:
        """Show what has the text so far in its name."""
        self.action_view(self._view)

    def action_keep(self) -> None:
        """Go back to the table, with the filter in force; its line is hidden."""
        self._filter.display = False
        self.screen.set_focus(self._things)
        self._draw()

    def action_all(self) -> None:
        """Show all names again, or go back from the keys."""
        if isinstance(self.screen, Help):
            self.screen.dismiss()
            return
        self._filter.value = ""
        self.action_keep()

    def action_pause(self) -> None:
        """Keep the look that is shown, or look again."""
        self.paused = not self.paused
        self._begin()
        self._draw()

    def action_look(self) -> None:
        """Look at once."""
        self._asked = True
        self._begin()

    def action_pace(self, by: float) -> None:
        """Look more or less often."""
        self.every_s = min(max(self.every_s * by, EVERY_MIN_S), _EVERY_MAX_S)
        if self._look_began_s is None:
            self._wait()
        self._draw()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def action_interrupt(self) -> None:
        """End as any command does at Ctrl-C."""
        self._stop(signal.SIGINT)

    def _stop(self, number: int) -> None:
        """End at a signal, once the terminal is given back."""
        interrupted = number == signal.SIGINT
        self.failure = KeyboardInterrupt() if interrupted else SystemExit(128 + number)
        self.exit()
