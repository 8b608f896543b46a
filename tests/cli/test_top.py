"""`malamute top`: what stands on a screen of any size, its keys, and the one look of a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.cli import top
from malamute_py.cli.looking import Look
from malamute_py.cli.screens import Sample, Screen, rates, snapshot
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
from tests.waiting import WAIT_S

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
    assert "more below" in shown[-1]


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
    assert "more below" not in shown[-1]
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


def test_keys_that_come_together_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as entry:
        monkeypatch.setattr("sys.stdin", entry)
        with top._keys() as key:
            os.write(ours, b"2s\x1b[B\x1b[A\x1b[15~q")
            assert [key(5.0) for _ in range(6)] == ["2", "s", "j", "k", "?", "q"]
            assert key(0.0) == ""
    os.close(ours)


def test_the_screen_goes_on_after_a_look_that_failed_and_ends_at_q(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from malamute_protocol.errors import Timeout

    looks: Iterator[Sample | Timeout] = iter(
        [sample(streams=[StreamFacts(name="t")]), Timeout("no answer"), sample()]
    )
    pressed = iter(["", "", "3", "q"])
    gone: list[str] = []

    class Client:
        linked = True

    def look(client: object) -> Sample:
        found = next(looks)
        if isinstance(found, Timeout):
            raise found
        return found

    class Noted(Screen):
        def drawn(self, *args: Any, **options: Any) -> Any:
            gone.append(options["gone"])
            return super().drawn(*args, **options)

    @contextlib.contextmanager
    def keys() -> Iterator[Any]:
        yield lambda wait_s: next(pressed)

    monkeypatch.setattr(top, "_sample", look)
    monkeypatch.setattr(top, "_keys", keys)
    monkeypatch.setattr(top, "Screen", Noted)
    top._watch(Client(), 1.0)  # type: ignore[arg-type]  # it asks for nothing else
    assert gone == ["", "no answer", "", ""]


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
