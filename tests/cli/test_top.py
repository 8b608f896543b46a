"""`malamute top`: what stands on a screen of any size, its keys, and the one look of a pipe."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from malamute_protocol.errors import Timeout
from malamute_py import EmbeddedBroker
from malamute_py.cli import top
from malamute_py.cli.looking import Look
from malamute_py.cli.screens import KEYS, THINGS_MAX, Sample, Screen, rates, snapshot
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
from tests.waiting import WAIT_S, until

NOW_MS = 10_000_000


def sample(at_ms: int = NOW_MS, counters: dict[str, int] | None = None, epoch: int = 1,
           links: list[LinkFacts] | None = None, **things: Any) -> Sample:  # fmt: skip
    broker = {
        "software": "malamute-py 1", "epoch": epoch, "now_ms": at_ms, "uptime_ms": 5_000,
        "gauges": {"links": 2}, "counters": counters or {},
        "disk": {"main": {"end_lsn": 50, "start_lsn": 0, "ring_bytes": 100, "full": "overwrite"}},
    }  # fmt: skip
    return Sample(Look(Everything(Facts(broker), **things), links or []), at_ms / 1000)


def lines(screen: Screen, now: Sample, before: Sample | None = None, width: int = 80,
          height: int = 24, gone: str = "") -> list[str]:  # fmt: skip
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, height=height, legacy_windows=False)
    console.print(screen.drawn(now, before, width, height, gone=gone), end="")
    return out.getvalue().splitlines()


def names(shown: list[str], titles: str = "name") -> list[str]:
    begin = next(at for at, line in enumerate(shown) if line.startswith(titles)) + 1
    return [line.split()[0] for line in shown[begin:-1] if line.strip()]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (20, 5), (200, 60)])
@pytest.mark.parametrize("key", "12345")
def test_a_screen_fits_the_terminal_whatever_its_size(key: str, width: int, height: int) -> None:
    busy = sample(
        streams=[StreamFacts(name=f"stream-{at}" * 5, tail=at * 10**9) for at in range(100)],
        mailboxes=[MailboxFacts(name="m", messages=10**9, oldest_ms=1)] * 50,
        services=[ServiceFacts(name="s", waiting=4, oldest_ms=1)] * 9,
        cursors=[CursorFacts(stream="t", cursor="c" * 90, lag=7)],
        groups=[GroupFacts(stream="t", group="g", kind="shared", lag=7)],
        links=[LinkFacts(link=at, software="x" * 60) for at in range(30)],
    )
    screen = Screen()
    screen.press(key)
    shown = lines(screen, busy, width=width, height=height)
    assert len(shown) <= height
    assert all(len(line) <= width for line in shown)


def test_a_screen_of_80_by_24_has_every_part() -> None:
    streams = [StreamFacts(name=f"t{at}", tail=at) for at in range(40)]
    services = [ServiceFacts(name="lookup", waiting=3, oldest_ms=NOW_MS - 90_000)]
    before = sample(NOW_MS - 2_000, {"records_in": 100}, streams=streams, services=services)
    shown = lines(
        Screen(), sample(counters={"records_in": 300}, streams=streams, services=services), before
    )
    assert len(shown) == 24
    text = "\n".join(shown)
    assert "in 100 records/s" in text
    assert "main 50% overwrites" in text
    assert "stuck  service lookup: 3 requests waiting for 1 min 30 s, and no worker" in text
    assert "q quit" in shown[-1]
    assert "1-" in shown[-1]
    assert " of 40  ? help" in shown[-1]


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
        shown = lines(Screen(), now, before, width=width, height=50)
        text = " ".join(" ".join(shown).split())
        assert "…" not in text.partition(" 1 streams")[0]
        assert all(len(line) <= width for line in shown)
        for part in ("in 123,456,789 records/s 117.7 MiB/s", "requests 123,456,789/s",
                     "gaps 123,456,789/s", "disk free 1023.0 GiB", "main 50% overwrites",
                     "less full", "for 1 min 30 s, and no worker", "5 clients 1,000"):  # fmt: skip
            assert part in text, (width, part)
    shown = lines(Screen(), now, before)
    assert len(shown) == 24
    assert names(shown)[:3] == ["stream-0", "stream-1", "stream-10"]


def test_a_ring_of_a_streams_own_has_the_streams_name() -> None:
    now = sample()
    name = "stream-143732d4a6dc0104d7fa72cd6e5183a3"
    now.look.broker["disk"][name] = {"end_lsn": 90, "start_lsn": 0, "ring_bytes": 100,
                                     "full": "refuse"}  # fmt: skip
    now.look.broker["rings"] = {"main": {}, name: {"stream": "invoices"}}
    shown = "\n".join(lines(Screen(), now))
    assert "rings: invoices (own) 90% refuses, main 50% overwrites" in shown


def test_rates_are_growth_by_the_brokers_clock_and_none_over_a_restart() -> None:
    before = sample(NOW_MS - 4_000, {"records_in": 100, "group_records_out": 8, "records_out": 2})
    now = sample(counters={"records_in": 500, "group_records_out": 10, "records_out": 4})
    assert rates(now, before)["published"] == 100.0
    assert rates(now, before)["delivered"] == 1.0
    assert rates(now, None) == {}
    assert rates(sample(epoch=2), before) == {}


def test_latency_is_that_of_what_came_since_the_look_before() -> None:
    def of(counts: list[int], at_ms: int) -> Sample:
        found = sample(at_ms)
        histogram = {"bounds_s": [0.001, 0.01], "counts": counts}  # the last: above all bounds
        found.look.broker["latency"] = {"confirm": histogram}
        return found

    before, now = of([1000, 0, 5], NOW_MS - 1_000), of([1000, 50, 5], NOW_MS)
    assert "confirm p99 within 10 ms" in "\n".join(lines(Screen(), now, before))
    for quiet in (before, None):  # Nothing came since, or there is one look only.
        same = of([1000, 0, 5], NOW_MS)
        assert "p99" not in "\n".join(lines(Screen(), same, quiet))


def test_each_table_begins_with_the_worst_and_can_be_sorted_and_turned() -> None:
    now = sample(
        cursors=[CursorFacts(stream="t", cursor=name, lag=lag, moved_ms=moved)
                 for name, lag, moved in (("a", 1, 5), ("b", 9, 9_000_000), ("c", 5, 0))],
        groups=[GroupFacts(stream="t", group="g", kind="shared", lag=7,
                           members=[MemberFacts(held=3)])],
    )  # fmt: skip
    screen = Screen()
    screen.press("2")
    assert names(lines(screen, now)) == ["t/b", "t/g", "t/c", "t/a"]
    screen.press("r")
    assert names(lines(screen, now)) == ["t/a", "t/c", "t/g", "t/b"]
    for _ in range(2):  # By rate, which nobody has yet, then by what is in hand.
        screen.press("s")
    assert names(lines(screen, now))[0] == "t/g"
    for _ in range(4):  # By the name, after the last column.
        screen.press("s")
    assert names(lines(screen, now), "name▲") == ["t/a", "t/b", "t/c", "t/g"]


def test_a_table_is_scrolled_to_its_end_and_no_further() -> None:
    now = sample(streams=[StreamFacts(name=f"t{at:02}", tail=at) for at in range(40)])
    screen = Screen()
    assert names(lines(screen, now))[0] == "t00"
    for _ in range(100):
        screen.press("j")
        shown = lines(screen, now)
    assert names(shown)[-1] == "t39"
    assert " of 40" in shown[-1]
    screen.press("k")
    assert names(lines(screen, now))[-1] == "t38"


def test_what_may_not_be_seen_is_said_in_its_table() -> None:
    now = Sample(Look(Everything(Facts({})), unseen={"clients": "forbidden: not you"}), 0.0)
    screen = Screen()
    screen.press("5")
    assert "forbidden: not you" in "\n".join(lines(screen, now))
    assert snapshot(now, None)["unseen"] == {"clients": "forbidden: not you"}


def test_a_lost_link_is_said_above_the_last_look() -> None:
    shown = lines(Screen(), sample(streams=[StreamFacts(name="t")]), gone="the link is lost")
    assert "no newer look: the link is lost" in "\n".join(shown)
    assert names(shown) == ["t"]


def test_a_filter_shows_what_has_it_in_its_name_in_every_table() -> None:
    now = sample(
        streams=[StreamFacts(name=f"t{at:02}", tail=at) for at in range(40)],
        links=[LinkFacts(link=1, software="Shop 2"), LinkFacts(link=2, software="other")],
    )
    screen = Screen()
    for key in ("/", "T", "2", "q", "backspace"):
        screen.press(key)
    assert "filter: T2_" in lines(screen, now)[-1]
    screen.press("enter")
    assert not screen.typing
    shown = lines(screen, now)
    assert names(shown) == [f"t{at}" for at in range(20, 30)]
    assert "filter T2 (Esc)" in shown[-1]
    for key in ("5", "/", "backspace", "backspace", "s", "h", "o", "p", "enter"):
        screen.press(key)
    assert names(lines(screen, now)) == ["anonymous"]
    screen.press("1")
    assert "no streams with shop in the name" in "\n".join(lines(screen, now))
    screen.press("escape")
    assert len(names(lines(screen, now))) > 10


def test_a_long_table_is_scrolled_by_pages_and_to_its_ends() -> None:
    now = sample(streams=[StreamFacts(name=f"t{at:02}", tail=at) for at in range(40)])
    screen = Screen()
    page = len(names(lines(screen, now)))
    screen.press("page down")
    assert names(lines(screen, now))[0] == f"t{page - 1:02}"
    screen.press("end")
    shown = lines(screen, now)
    assert names(shown)[-1] == "t39"
    assert f"{41 - page}-40 of 40" in shown[-1]
    screen.press("page up")
    assert names(lines(screen, now))[-1] == f"t{40 - page:02}"
    screen.press("home")
    assert names(lines(screen, now))[0] == "t00"


def test_a_table_of_as_many_things_as_are_looked_at_says_that_there_may_be_more() -> None:
    now = sample(cursors=[CursorFacts(stream="t", cursor=f"{at}") for at in range(THINGS_MAX)])
    assert "2 readers 1,000+" in "\n".join(lines(Screen(), now))


def test_help_names_each_key_and_goes_at_any() -> None:
    screen = Screen()
    screen.press("?")
    shown = lines(screen, sample(streams=[StreamFacts(name="t")]))
    assert len(shown) == 24
    assert KEYS.splitlines()[-1] in shown
    screen.press("q")
    assert names(lines(screen, sample(streams=[StreamFacts(name="t")]))) == ["t"]


def test_pause_and_pace_stand_in_the_foot() -> None:
    screen = Screen(2.0)
    for key in ("p", "+"):
        screen.press(key)
    assert (screen.paused, screen.every_s) == (True, 4.0)
    assert lines(screen, sample())[-1].startswith("paused  each 4 s  ")
    for key in ("p", *"---------"):
        screen.press(key)
    assert (screen.paused, screen.every_s) == (False, 0.1)


def test_keys_that_come_together_or_in_parts_are_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as entry:
        monkeypatch.setattr("sys.stdin", entry)
        with top._keys() as keys:
            os.write(ours, "2s\x1b[B\x1b[A\x1b[5~\x1b[15~\u00e9\x7f\x1a".encode())
            found = [keys.next(5.0) for _ in range(9)]
            assert found == ["2", "s", "down", "up", "page up", "other", "\u00e9", "backspace",
                             "suspend"]  # fmt: skip
            assert keys.next(0.0) == ""
            os.write(ours, b"\x1b")
            assert keys.next(5.0) == "escape"
            os.kill(os.getpid(), signal.SIGWINCH)
            assert keys.next(None) == ""
        keys.wake()  # A look that ends after the screen.
    os.close(ours)


class Terminal:
    """Keys that are pressed by a test, each once the screen waits for one."""

    def __init__(self, *pressed: str) -> None:
        """pressed: empty: what ends the wait is a look, or the time."""
        self.pressed = iter(pressed)
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()

    def next(self, wait_s: float | None) -> str:
        key = next(self.pressed)
        if not key:
            self.woken.wait(WAIT_S if wait_s is None else wait_s)
            self.woken.clear()
        return key


class Watched(NamedTuple):
    gone: list[str]
    shown: list[Sample]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """Return a function that runs the screen over these looks and keys, and tells what it drew."""

    def run(looks: list[Sample | Exception], *pressed: str) -> Watched:
        coming, drew = iter(looks), Watched([], [])

        def look(client: object) -> Sample:
            found = next(coming)
            if isinstance(found, Exception):
                raise found
            return found

        class Noted(Screen):
            def drawn(self, now: Sample, *args: Any, **options: Any) -> Any:
                drew.gone.append(options["gone"])
                drew.shown.append(now)
                return super().drawn(now, *args, **options)

        @contextlib.contextmanager
        def keys() -> Iterator[Terminal]:
            yield Terminal(*pressed)

        class Client:
            linked = True

        monkeypatch.setattr(top, "_sample", look)
        monkeypatch.setattr(top, "_keys", keys)
        monkeypatch.setattr(top, "Screen", Noted)
        top._watch(Client(), 0.1)  # type: ignore[arg-type]  # it asks for nothing else
        return drew

    return run


def test_the_screen_goes_on_after_a_look_that_failed_and_ends_at_q(
    watched: Callable[..., Watched],
) -> None:
    first, last = sample(streams=[StreamFacts(name="t")]), sample()
    drew = watched([first, Timeout("no answer"), last], *[""] * 4, "3", "q")
    assert [why for why, _ in itertools.groupby(drew.gone)] == ["", "no answer", ""]
    assert drew.shown[0] is first
    assert drew.shown[-1] is last


def test_a_screen_that_is_paused_stays_until_a_look_is_asked_for(
    watched: Callable[..., Watched],
) -> None:
    first, last = sample(), sample()
    drew = watched([first, last], "p", "5", "r", " ", "", "q")
    assert drew.shown[:4] == [first] * 4
    assert drew.shown[-1] is last


def test_a_q_in_a_filter_ends_nothing(watched: Callable[..., Watched]) -> None:
    drew = watched([sample()] * 9, "/", "q", "escape", "q")
    assert len(drew.shown) == 4


def test_a_broker_that_does_not_answer_leaves_the_keys_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top, "_SILENT_S", 0)
    answer = threading.Event()
    monkeypatch.setattr(top, "_sample", lambda client: answer.wait(WAIT_S) and sample())
    looks = top._Looks(None, lambda: None)  # type: ignore[arg-type]  # nobody is asked
    assert looks.silence == ""
    looks.begin()
    assert looks.take() is None
    assert looks.silence == "the broker has not answered for 0 s"
    answer.set()
    until(lambda: looks.take() is not None)
    assert not looks.under_way


@pytest.mark.moderate
def test_a_terminal_is_drawn_anew_when_its_size_changes_and_ends_at_q(
    broker: EmbeddedBroker,
) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-m", "malamute_py", "--endpoint", broker.tcp_endpoint, "top"]
    running = subprocess.Popen(
        [*command, "--every", "1h"], stdin=theirs, stdout=theirs, start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        | {"TERM": "xterm"},
    )  # fmt: skip
    os.set_blocking(ours, False)
    drawn: list[str] = []

    def shows(text: str) -> None:
        """Wait until the screen shows a text that it did not show before."""

        def found() -> bool:
            with contextlib.suppress(BlockingIOError):
                drawn.append(os.read(ours, 1 << 16).decode("utf-8", "replace"))
            return text in "".join(drawn)

        until(found)
        drawn.clear()

    try:
        shows("q quit")
        os.write(ours, b"/no such\n")  # Whatever the other tests made, the foot is as long as this.
        shows("filter no such (Esc)")
        termios.tcsetwinsize(theirs, (24, 40))
        running.send_signal(signal.SIGWINCH)  # The terminal is not the one of the session.
        shows("? help  q quit  /…")
        os.write(ours, b"?")
        shows("any key: back to the table")
        termios.tcsetwinsize(theirs, (24, 60))
        running.send_signal(signal.SIGWINCH)
        shows("any key: back to the table")  # It is no key.
        os.write(ours, b"xq")
        assert running.wait(WAIT_S) == 0
    finally:
        running.kill()
        os.close(theirs)
        os.close(ours)


@pytest.mark.moderate
def test_a_terminal_is_given_back_when_the_command_is_ended_by_sigterm(
    broker: EmbeddedBroker,
) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    before = termios.tcgetattr(theirs)
    running = subprocess.Popen(
        [sys.executable, "-m", "malamute_py", "--endpoint", broker.tcp_endpoint, "top"],
        stdin=theirs, stdout=theirs, env={**os.environ, "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.set_blocking(ours, False)
    drawn: list[bytes] = []

    def shows(what: bytes) -> bool:
        with contextlib.suppress(BlockingIOError):
            drawn.append(os.read(ours, 1 << 16))
        return what in b"".join(drawn)

    try:
        until(lambda: shows(b"q quit"))
        assert termios.tcgetattr(theirs) != before
        running.terminate()
        until(lambda: shows(b"\x1b[?1049l"))
        assert running.wait(WAIT_S) == 128 + signal.SIGTERM
        assert termios.tcgetattr(theirs) == before
    finally:
        running.kill()
        os.close(theirs)
        os.close(ours)


@pytest.mark.moderate
def test_a_terminal_without_positions_gets_one_look(broker: EmbeddedBroker, stream: str) -> None:
    with broker.connect_sync() as client:
        client.publish(stream, b"x")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "malamute_py", "--endpoint", broker.tcp_endpoint, "top"]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        done = subprocess.run(
            [*command, "--every", "100ms"], stdin=theirs, stdout=theirs, timeout=WAIT_S,
            env={**os.environ, "TERM": "dumb"}, check=True,
        )  # fmt: skip
        os.close(theirs)
        assert done.returncode == 0
        assert stream.encode() in screen.read(65_536)


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
