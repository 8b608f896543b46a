"""`malamute top`: what stands on a screen of any size, its keys, and the one look of a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import pytest
from textual.pilot import Pilot

from malamute_protocol.errors import Timeout
from malamute_py import EmbeddedBroker
from malamute_py.cli import top_screen
from malamute_py.cli.looking import Look
from malamute_py.cli.screens import (
    KEYS,
    THINGS_MAX,
    VIEWS,
    Sample,
    Shown,
    above,
    rates,
    snapshot,
    table,
    tabs,
)
from malamute_py.cli.top_screen import TopScreen
from malamute_py.client.facts import (
    CursorFacts,
    GroupFacts,
    LinkFacts,
    MailboxFacts,
    MemberFacts,
    ServiceFacts,
    StreamFacts,
)
from malamute_py.health.facts import Everything, Facts
from tests.cli.running import Run
from tests.waiting import WAIT_S, until, until_async

NOW_MS = 10_000_000


def sample(at_ms: int = NOW_MS, counters: dict[str, int] | None = None, epoch: int = 1,
           links: list[LinkFacts] | None = None, **things: Any) -> Sample:  # fmt: skip
    broker = {
        "software": "malamute-py 1", "epoch": epoch, "now_ms": at_ms, "uptime_ms": 5_000,
        "gauges": {"links": 2}, "counters": counters or {},
        "disk": {"main": {"end_lsn": 50, "start_lsn": 0, "ring_bytes": 100, "full": "overwrite"}},
    }  # fmt: skip
    return Sample(Look(Everything(Facts(broker), **things), links or []), at_ms / 1000)


def head(now: Sample, before: Sample | None = None, width: int = 80, height: int = 24) -> str:
    """Return what stands above the tables."""
    return "\n".join(line.plain for line in above(now, before, "", width, height))


def names(now: Sample, shown: Shown = Shown()) -> list[str]:  # noqa: B008 - it is immutable
    return [row[0].plain for row in table(now, None, shown, 80).rows]


class Watched(NamedTuple):
    """A screen under test."""

    app: TopScreen
    pilot: Pilot[None]

    @property
    def lines(self) -> list[str]:
        """The screen as a person sees it."""
        strips = self.app.screen._compositor.render_strips()
        return ["".join(part.text for part in strip).rstrip() for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def names(self) -> list[str]:
        """Names of the rows that have room."""
        begin = next(at for at, line in enumerate(self.lines) if line.startswith(" name")) + 1
        return [line.split()[0] for line in self.lines[begin:-1] if line.strip()]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()


class Broker:
    """A broker that gives these looks, one after the other, and the last for ever."""

    def __init__(self, *looks: Sample | Exception, linked: bool = True) -> None:
        self.looks = list(looks)
        self.linked = linked
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def look(self) -> Sample:
        self.asked += 1
        self.answers.wait(WAIT_S)
        found = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(found, Exception):
            raise found
        return found


@contextlib.asynccontextmanager
async def watched(
    first: Sample, broker: Broker | None = None, every_s: float = 3600, width: int = 80,
    height: int = 24,
) -> AsyncIterator[Watched]:  # fmt: skip
    asked = broker or Broker(first)
    app = TopScreen(asked.look, lambda: asked.linked, first, every_s)
    async with app.run_test(size=(width, height)) as pilot:
        await pilot.pause()
        yield Watched(app, pilot)


def many() -> Sample:
    return sample(
        streams=[StreamFacts(name=f"t{at:02}", tail=at) for at in range(40)],
        links=[LinkFacts(link=1, software="Shop 2"), LinkFacts(link=2, software="other")],
    )


@pytest.mark.moderate
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (200, 50), (20, 5)])
async def test_a_screen_fits_the_terminal_whatever_its_size(width: int, height: int) -> None:
    busy = sample(
        streams=[StreamFacts(name=f"stream-{at}" * 5, tail=at * 10**9) for at in range(100)],
        mailboxes=[MailboxFacts(name="m", messages=10**9, oldest_ms=1)] * 50,
        services=[ServiceFacts(name="s", waiting=4, oldest_ms=1)] * 9,
        cursors=[CursorFacts(stream="t", cursor="c" * 90, lag=7)],
        groups=[GroupFacts(stream="t", group="g", kind="shared", lag=7)],
        links=[LinkFacts(link=at, software="x" * 60) for at in range(30)],
    )
    async with watched(busy, width=width, height=height) as screen:
        for key, view in zip("12345", VIEWS, strict=True):
            await screen.press(key)
            assert len(screen.lines) == height
            if width >= 60:
                assert f"[{key} {view.kind}" in screen.text
                assert screen.lines[-1].startswith(" ? Keys  q Quit  / Filter  s Sort")
                assert screen.names


@pytest.mark.moderate
async def test_a_screen_of_80_by_24_has_every_part() -> None:
    streams = [StreamFacts(name=f"t{at}", tail=at) for at in range(40)]
    services = [ServiceFacts(name="lookup", waiting=3, oldest_ms=NOW_MS - 90_000)]
    before = sample(NOW_MS - 2_000, {"records_in": 100}, streams=streams, services=services)
    now = sample(counters={"records_in": 300}, streams=streams, services=services)
    async with watched(before, Broker(now)) as screen:
        assert "rates come with the second look" in screen.text
        await screen.press("space")
        await until_async(lambda: "in 100 records/s" in screen.text)
        assert "main 50% overwrites" in screen.text
        trouble = "stuck  service lookup: 3 requests waiting for 1 min 30 s, and no worker"
        assert trouble in screen.text
        assert "[1 streams 40] 2 readers 0  3 mailboxes 0  4 services 1 " in screen.text
        assert screen.lines[-1].endswith("Space Look  Esc All")
        await screen.pilot.resize_terminal(40, 24)
        await screen.pilot.pause()
        assert trouble not in screen.text
        assert trouble in " ".join(screen.text.split()).replace("stuck ", "stuck  ")


@pytest.mark.moderate
def test_at_80_columns_no_figure_and_no_trouble_is_cut() -> None:
    def of(at_ms: int, counted: int) -> Sample:
        counters = dict.fromkeys(
            ("records_in", "records_out", "bytes_in", "bytes_out", "mail_in", "requests_in",
             "gaps"), counted,
        )  # fmt: skip
        services = [ServiceFacts(name="s" * 60, waiting=3, oldest_ms=NOW_MS - 90_000)] * 2
        streams = [StreamFacts(name=f"stream-{at}") for at in range(1_000)]
        found = sample(at_ms, counters, services=services, streams=streams,
                       mailboxes=[MailboxFacts(name="m")] * 1_000,
                       cursors=[CursorFacts(stream="t", cursor="c")] * 1_000,
                       links=[LinkFacts(link=at) for at in range(1_000)])  # fmt: skip
        found.look.broker.update(
            {"software": "malamute-py 0.1.0.dev0", "uptime_ms": 12 * 86_400_000 + 3_600_000,
             "resident_bytes": 1_023 << 20, "disk_free_bytes": 1_023 << 30,
             "gauges": {"links": 12_000}}
        )  # fmt: skip
        for at in range(30):
            found.look.broker["disk"][f"ring-{at}"] = {
                "end_lsn": at, "start_lsn": 0, "ring_bytes": 100, "full": "refuse",
            }  # fmt: skip
        return found

    before, now = of(NOW_MS - 1_000, 0), of(NOW_MS, 123_456_789)
    for width in (80, 100, 40):
        lines = [*above(now, before, "", width, 50), *tabs(now, 0, width)]
        assert all(line.cell_len <= width for line in lines)
        text = " ".join(" ".join(line.plain for line in lines).split())
        assert "…" not in text
        for part in ("in 123,456,789 records/s 117.7 MiB/s", "requests 123,456,789/s",
                     "gaps 123,456,789/s", "disk free 1023.0 GiB", "main 50% overwrites",
                     "less full", "for 1 min 30 s, and no worker", "5 clients 1,000"):  # fmt: skip
            assert part in text, (width, part)
    assert [row[0].plain for row in table(now, before, Shown(), 80).rows[:3]] == [
        "stream-0", "stream-1", "stream-10",
    ]  # fmt: skip


def test_a_narrow_table_leaves_out_the_last_columns_but_the_one_that_sorts() -> None:
    now = sample(streams=[StreamFacts(name="n" * 60, tail=10**9)])

    def titles(order: int, width: int) -> list[str]:
        found = table(now, None, Shown(order=order), width)
        assert sum(each[2] + 2 for each in found.columns) <= width
        return [title for _, title, _ in found.columns]

    assert titles(0, 80) == ["name", "records/s▼", "kept", "bytes", "tail"]
    assert titles(0, 40) == ["name", "records/s▼"]
    assert titles(3, 40) == ["name", "tail▼"]


def test_a_ring_of_a_streams_own_has_the_streams_name() -> None:
    now = sample()
    name = "stream-143732d4a6dc0104d7fa72cd6e5183a3"
    now.look.broker["disk"][name] = {"end_lsn": 90, "start_lsn": 0, "ring_bytes": 100,
                                     "full": "refuse"}  # fmt: skip
    now.look.broker["rings"] = {"main": {}, name: {"stream": "invoices"}}
    assert "rings: invoices (own) 90% refuses, main 50% overwrites" in head(now)


def test_rates_are_growth_by_the_brokers_clock_and_none_over_a_restart() -> None:
    before = sample(NOW_MS - 4_000, {"records_in": 100, "group_records_out": 8, "records_out": 2})
    now = sample(counters={"records_in": 500, "group_records_out": 10, "records_out": 4})
    assert rates(now, before)["published"] == 100.0
    assert rates(now, before)["delivered"] == 1.0
    assert rates(now, None) == {}
    assert rates(sample(epoch=2), before) == {}
    for each, uptime_ms in ((before, 9_000), (now, 1_000)):  # One that keeps nothing.
        each.look.broker["uptime_ms"] = uptime_ms
    assert rates(now, before) == {}


def test_latency_is_that_of_what_came_since_the_look_before() -> None:
    def of(counts: list[int], at_ms: int) -> Sample:
        found = sample(at_ms)
        histogram = {"bounds_s": [0.001, 0.01], "counts": counts}  # the last: above all bounds
        found.look.broker["latency"] = {"confirm": histogram}
        return found

    before, now = of([1000, 0, 5], NOW_MS - 1_000), of([1000, 50, 5], NOW_MS)
    assert "confirm p99 within 10 ms" in head(now, before)
    for quiet in (before, None):  # Nothing came since, or there is one look only.
        same = of([1000, 0, 5], NOW_MS)
        assert "p99" not in head(same, quiet)
    # Counts of a broker that keeps nothing fall at a restart.
    restarted = of([990, 3, 5], NOW_MS)
    restarted.look.broker["uptime_ms"] = 1_000
    assert "p99" not in head(restarted, before)


@pytest.mark.moderate
async def test_each_table_begins_with_the_worst_and_can_be_sorted_and_turned() -> None:
    now = sample(
        cursors=[CursorFacts(stream="t", cursor=name, lag=lag, moved_ms=moved)
                 for name, lag, moved in (("a", 1, 5), ("b", 9, 9_000_000), ("c", 5, 0))],
        groups=[GroupFacts(stream="t", group="g", kind="shared", lag=7,
                           members=[MemberFacts(held=3)])],
    )  # fmt: skip
    assert names(now, Shown(1)) == ["t/b", "t/g", "t/c", "t/a"]
    async with watched(now) as screen:
        await screen.press("2")
        assert screen.names == ["t/b", "t/g", "t/c", "t/a"]
        await screen.press("r")
        assert screen.names == ["t/a", "t/c", "t/g", "t/b"]
        await screen.press("s", "right")  # By rate, which nobody has yet, then by what is in hand.
        assert "in hand▼" in screen.text
        assert screen.names[0] == "t/g"
        await screen.press("left", "left", "left")  # The name comes before the first column.
        assert "name▲" in screen.text
        assert screen.names == ["t/a", "t/b", "t/c", "t/g"]


@pytest.mark.moderate
async def test_the_mouse_chooses_a_table_and_the_column_that_sorts() -> None:
    async with watched(many()) as screen:

        async def click(word: str) -> None:
            y = next(at for at, line in enumerate(screen.lines) if word in line)
            await screen.pilot.click(offset=(screen.lines[y].index(word) + 1, y))
            await screen.pilot.pause()

        await click("tail")
        assert "tail▼" in screen.text
        assert screen.names[0] == "t39"
        await click("tail▼")
        assert screen.names[0] == "t00"
        await click("5 clients")
        assert "[5 clients 2]" in screen.text


@pytest.mark.moderate
async def test_a_long_table_is_scrolled_by_rows_pages_and_to_its_ends() -> None:
    async with watched(many()) as screen:
        page = len(screen.names)
        assert screen.names[0] == "t00"
        for down, up in (("j", "k"), ("down", "up")):
            await screen.press(down, down)
            assert screen.names[0] == "t02"
            await screen.press(up)
            assert screen.names[0] == "t01"
            await screen.press("g")
        await screen.press("pagedown")
        assert screen.names[0] == f"t{page - 1:02}"
        await screen.press("pageup")
        assert screen.names[0] == "t00"
        for end, begin in (("end", "home"), ("G", "g")):
            await screen.press(end)
            assert screen.names[-1] == "t39"
            await screen.press("j")
            assert screen.names[-1] == "t39"
            await screen.press("space")  # A new look leaves the rows where they are.
            await until_async(lambda: screen.app._look_began_s is None)
            await screen.pilot.pause()
            assert screen.names[-1] == "t39"
            await screen.press(begin)
            assert screen.names[0] == "t00"


@pytest.mark.moderate
async def test_what_may_not_be_seen_is_said_in_its_table() -> None:
    now = Sample(Look(Everything(Facts({})), unseen={"clients": "forbidden: not you"}), 0.0)
    async with watched(now) as screen:
        await screen.press("5")
        assert "forbidden: not you" in screen.text
    assert snapshot(now, None)["unseen"] == {"clients": "forbidden: not you"}


@pytest.mark.moderate
async def test_a_filter_shows_what_has_it_in_its_name_in_every_table() -> None:
    async with watched(many()) as screen:
        await screen.press("slash", "T", "2", "q", "backspace")
        assert screen.lines[-2].strip() == "T2"
        await screen.press("enter")
        assert screen.names == [f"t{at}" for at in range(20, 30)]
        assert "filter T2 (Esc): 10 found" in screen.text
        await screen.press("5", "slash", "backspace", "backspace", *"shop", "enter")
        assert screen.names == ["anonymous"]
        await screen.press("1")
        assert "no streams with shop in the name" in screen.text
        await screen.press("escape")
        assert len(screen.names) > 10
        await screen.press("slash", "3", "escape", "3")
        assert "[3 mailboxes 0]" in screen.text


def test_a_table_of_as_many_things_as_are_looked_at_says_that_there_may_be_more() -> None:
    now = sample(cursors=[CursorFacts(stream="t", cursor=f"{at}") for at in range(THINGS_MAX)])
    assert "2 readers 1,000+" in tabs(now, 0, 80)[0].plain


@pytest.mark.moderate
async def test_help_names_each_key_and_goes_at_any() -> None:
    async with watched(many(), width=60) as screen:
        await screen.press("question_mark")
        assert set(KEYS.splitlines()) <= set(screen.lines)
        await screen.press("q")
        assert screen.names[0] == "t00"
        await screen.press("h", "escape")
        assert screen.names[0] == "t00"
        await screen.press("h", "2")
        assert "[1 streams 40]" in screen.text


@pytest.mark.moderate
async def test_pause_and_pace_stand_above_the_table() -> None:
    async with watched(many(), every_s=2.0) as screen:
        await screen.press("p", "plus")
        assert "\n paused (p)  each 4 s (+, -)\n" in screen.text
        await screen.press("p", *["minus"] * 9)
        assert "\n each 100 ms (+, -)\n" in screen.text


@pytest.mark.moderate
async def test_the_screen_goes_on_after_a_look_that_failed_and_a_link_that_was_lost() -> None:
    first, last = sample(streams=[StreamFacts(name="t")]), sample(streams=[StreamFacts(name="u")])
    broker = Broker(Timeout("no answer"))
    async with watched(first, broker, every_s=0.1) as screen:
        await until_async(lambda: "no newer look: no answer" in screen.text)
        assert screen.names == ["t"]
        broker.looks = [last]  # Only now: a busy machine may draw the failure late.
        await until_async(lambda: screen.names == ["u"])
        assert "no newer look" not in screen.text
        broker.linked = False
        await until_async(lambda: "no newer look: the link is lost; it is sought" in screen.text)
        assert screen.names == ["u"]


@pytest.mark.moderate
async def test_a_fault_in_a_look_ends_the_screen_and_is_raised_by_the_command() -> None:
    broker = Broker(ValueError("a fault"))
    async with watched(sample(), broker, every_s=0.1) as screen:
        await until_async(lambda: not screen.app.is_running)
    assert isinstance(screen.app.failure, ValueError)


@pytest.mark.moderate
async def test_a_screen_that_is_paused_stays_until_a_look_is_asked_for() -> None:
    first, last = sample(streams=[StreamFacts(name="t")]), sample(streams=[StreamFacts(name="u")])
    broker = Broker(first)
    async with watched(first, broker, every_s=0.1) as screen:
        await screen.press("p")
        broker.looks = [last]
        asked = broker.asked
        await screen.pilot.pause(0.3)
        await screen.press("5", "r", "1")
        assert broker.asked <= asked + 1  # One may have been under way.
        assert screen.names == ["t"]
        await screen.press("space")
        await until_async(lambda: screen.names == ["u"])
        assert "paused" in screen.text
        asked = broker.asked
        await screen.press("p")
        await until_async(lambda: broker.asked > asked + 1)


@pytest.mark.moderate
async def test_a_broker_that_does_not_answer_leaves_the_keys_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top_screen, "_SILENT_S", 0)
    broker = Broker(sample())
    broker.answers.clear()
    async with watched(many(), broker) as screen:
        await screen.press("space")
        await until_async(lambda: "no newer look: the broker has not answered" in screen.text)
        await screen.press("5")
        assert "[5 clients 2]" in screen.text
        await screen.press("space")
        assert broker.asked == 1
        await screen.press("q")
        assert not screen.app.is_running
    broker.answers.set()
    assert screen.app.failure is None


@pytest.mark.moderate
@pytest.mark.parametrize("typed", [(), ("slash", "x"), ("question_mark",)])
async def test_ctrl_c_ends_the_screen_whatever_is_on_it(typed: tuple[str, ...]) -> None:
    async with watched(many()) as screen:
        await screen.press(*typed, "ctrl+c")
        assert not screen.app.is_running
    assert isinstance(screen.app.failure, KeyboardInterrupt)


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, endpoint: str) -> None:
        self._ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.theirs = theirs
        self.before = termios.tcgetattr(theirs)
        self.running = subprocess.Popen(
            [sys.executable, "-m", "malamute_py", "--endpoint", endpoint, "top", "--every", "1h"],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={name: value for name, value in os.environ.items()
                 if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"},
        )  # fmt: skip
        os.set_blocking(self._ours, False)
        self.drawn = ""

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.drawn += os.read(self._ours, 1 << 16).decode("utf-8", "replace")

    def shows(self, text: str) -> None:
        """Wait until the screen shows a text that it did not show before."""

        def found() -> bool:
            self.read()
            return text in self.drawn

        until(found)
        self.drawn = ""

    def ended(self) -> int:
        def found() -> bool:
            self.read()
            return self.running.poll() is not None

        until(found)
        self.read()
        return self.running.returncode

    def close(self) -> None:
        self.running.kill()
        self.running.wait()
        os.close(self.theirs)
        os.close(self._ours)


@pytest.fixture
def terminal(broker: EmbeddedBroker) -> Iterator[Terminal]:
    found = Terminal(broker.tcp_endpoint)
    yield found
    found.close()


def by_key(key: bytes) -> Callable[[Terminal], None]:
    return lambda terminal: terminal.type(key)


def by_signal(number: int) -> Callable[[Terminal], None]:
    return lambda terminal: terminal.running.send_signal(number)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("end", "code"),
    [(by_key(b"q"), 0), (by_key(b"\x03"), 130), (by_signal(signal.SIGINT), 130),
     (by_signal(signal.SIGTERM), 143), (by_signal(signal.SIGHUP), 129)],
    ids=["q", "Ctrl-C", "SIGINT", "SIGTERM", "SIGHUP"],
)  # fmt: skip
def test_a_terminal_is_given_back_however_the_screen_ends(
    terminal: Terminal, end: Callable[[Terminal], None], code: int
) -> None:
    terminal.shows("Quit")
    assert termios.tcgetattr(terminal.theirs) != terminal.before
    end(terminal)
    assert terminal.ended() == code
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    for given_back in ("?1049l", "?25h", "?1000l"):  # The screen, the cursor, the mouse.
        assert f"\x1b[{given_back}" in terminal.drawn


@pytest.mark.moderate
def test_a_terminal_is_given_back_at_ctrl_z_and_drawn_anew_at_fg(terminal: Terminal) -> None:
    terminal.shows("Quit")
    terminal.type(b"\x1a")
    terminal.shows("\x1b[?1049l")
    _, status = os.waitpid(terminal.running.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    terminal.running.send_signal(signal.SIGCONT)
    terminal.shows("Quit")
    terminal.type(b"q")
    assert terminal.ended() == 0


@pytest.mark.moderate
def test_a_terminal_is_drawn_anew_when_its_size_changes(terminal: Terminal) -> None:
    terminal.shows("Quit")
    terminal.type(b"/no such\r")  # In one go: the text is for the filter.
    terminal.shows("filter no such (Esc): 0 found")
    termios.tcsetwinsize(terminal.theirs, (24, 40))
    terminal.running.send_signal(signal.SIGWINCH)  # The terminal is not the one of the session.
    terminal.shows("filter no such (Esc): 0 found")


@pytest.mark.moderate
def test_one_look_is_printed_where_the_screen_could_not_be_drawn(
    broker: EmbeddedBroker, stream: str
) -> None:
    """It is drawn on standard error."""
    with broker.connect_sync() as client:
        client.publish(stream, b"x")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "malamute_py", "--endpoint", broker.tcp_endpoint, "top"]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        subprocess.run(
            [*command, "--every", "100ms"], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            timeout=WAIT_S, check=True,
        )  # fmt: skip
        os.close(theirs)
        assert stream.encode() in screen.read(65_536)


@pytest.mark.moderate
def test_a_terminal_without_positions_gets_one_look(broker: EmbeddedBroker, stream: str) -> None:
    with broker.connect_sync() as client:
        client.publish(stream, b"x")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "malamute_py", "--endpoint", broker.tcp_endpoint, "top"]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        done = subprocess.run(
            [*command, "--every", "100ms"], stdin=theirs, stdout=theirs, stderr=theirs,
            timeout=WAIT_S, env={**os.environ, "TERM": "dumb"}, check=True,
        )  # fmt: skip
        os.close(theirs)
        assert done.returncode == 0
        assert stream.encode() in screen.read(65_536)


@pytest.mark.moderate
def test_a_pipe_gets_one_look(m: Run, broker: EmbeddedBroker, stream: str) -> None:
    with broker.connect_sync() as client:
        client.publish(stream, b"x")
        client.submit(f"{stream}.asked", b"x", reply_to=f"{stream}.replies")
        rows = m("top", "--every", "100ms").ok().rows
        told = m("top", "--every", "100ms", "--json").ok().json
        assert next(row[:3] for row in rows if row[0] == "stuck" and stream in row[2]) == [
            "stuck", "service", f"{stream}.asked",
        ]  # fmt: skip
        assert ["streams", stream] in [row[:2] for row in rows]
        (entry,) = [each for each in told["things"]["streams"] if each["name"] == stream]
        assert (entry["records"], entry["rate"]) == (1, 0.0)
        client.remove_service(f"{stream}.asked")
    assert m("top", "--every", "1ms").code == 2


def test_a_stream_that_was_made_again_and_a_reader_that_went_back_have_no_rate_below_zero() -> None:
    def seen(tail: int, place: int, at_ms: int = NOW_MS) -> Sample:
        return sample(
            at_ms, streams=[StreamFacts(name="s", tail=tail)],
            cursors=[CursorFacts(stream="s", cursor="c", next=place)],
        )  # fmt: skip

    things = snapshot(seen(5, 5), seen(100, 100, NOW_MS - 1_000))["things"]
    assert [row["rate"] for kind in ("streams", "readers") for row in things[kind]] == [None, None]
    things = snapshot(seen(5, 5), seen(5, 4, NOW_MS - 1_000))["things"]
    assert [row["rate"] for kind in ("streams", "readers") for row in things[kind]] == [0, 1]


@pytest.mark.moderate
def test_what_is_printed_needs_no_textual(broker: EmbeddedBroker) -> None:
    program = (
        "import sys\n"
        f"sys.argv[1:] = ['--endpoint', {broker.tcp_endpoint!r}, 'top', '--every', '100ms']\n"
        "from malamute_py.cli import main\n"
        "try:\n    main()\nfinally:\n    print('textual' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=WAIT_S, check=True)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False"
