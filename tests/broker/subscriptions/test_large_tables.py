"""Large header tables: read, made and matched in slices, each within its share of a turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol import header
from malamute_protocol.content_layout import has_large_table
from malamute_protocol.encode import encode
from malamute_protocol.header import STEP_ENTRIES, HeaderTable
from malamute_protocol.limits import Limits
from malamute_py.broker.subscriptions.audience import Audience
from malamute_py.matcher import Index
from tests.broker.sliced import Sliced
from tests.broker.subscriptions.test_matching import batch, expected, offsets


class Watched:
    """Numbers of headers that are read, made and matched in one turn of a broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shell: Sliced) -> None:
        self.most = self._now = self._inside = 0
        for name in ("take_ready", "history", "appended", "synced", "tick", "receive"):
            monkeypatch.setattr(shell.broker, name, self._entered(getattr(shell.broker, name)))
        self._count(monkeypatch, HeaderTable, "extend", lambda _, keys, maps: len(keys) + len(maps))
        self._count(monkeypatch, Index, "classes", lambda _, headers: len(headers))
        self._count(monkeypatch, Index, "match", lambda *_: 1)
        self._count(monkeypatch, Audience, "match", lambda *_: 1)
        self._count(monkeypatch, header, "parse_table", lambda subjects, *_: len(subjects) // 40)

    def _entered(self, right: Callable[..., Any]) -> Callable[..., Any]:
        """Work of peers and of the journal is not the broker's."""

        def entered(*given: Any) -> Any:
            self._inside += 1
            try:
                return right(*given)
            finally:
                self._inside -= 1

        return entered

    def _count(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, size: Callable[..., int]
    ) -> None:
        right = getattr(owner, name)

        def counted(*given: Any, **named: Any) -> Any:
            if self._inside:
                self._now += size(*given)
            return right(*given, **named)

        monkeypatch.setattr(owner, name, counted)

    def turn(self, shell: Sliced) -> bool:
        """One turn of the broker, watched."""
        self._now = 0
        more = shell.turn()
        self.most = max(self.most, self._now)
        return more


LARGE = [f"large.number-{at % 7}.{at:05}.and-so-that-it-is-long" for at in range(2_500)]


def large() -> bytes:
    frame = encode([b"x"] * len(LARGE), subject_table=LARGE, subject_codes=range(len(LARGE)))
    assert has_large_table(frame)
    return frame


def wants(number: int) -> Any:
    """A few of the headers, some of which others select, too."""
    return ["topic", f"large.*.{number * 7:05}.*"] if number else ["prefix", "large.number-3"]


def wanted(number: int) -> list[int]:
    """Places of the headers that wants() selects."""
    return [number * 7] if number else list(range(3, len(LARGE), 7))


@pytest.mark.moderate
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("durable", [0, 1])
def test_many_who_are_served_together_wait_for_new_headers_that_are_matched_in_slices(
    monkeypatch: pytest.MonkeyPatch, durable: int, *, evicted: bool
) -> None:
    """65,536 new headers and 2,000 subscriptions took one turn of 0.4 s."""
    shell = Sliced(share=1)
    for link in (1, 2, 3):
        shell.hello(link)
    shell.publish(2, "s", [b"first"])
    for number in range(120):
        shell.subscribe(
            1, number, "s", wants(number), [1], records=0, gathered=True, visibility=durable
        )
    shell.send(2, wire.Publish("s", 7), frames=[large()])
    if evicted:
        shell.evict()
    watched = Watched(monkeypatch, shell)
    credit = [wire.Credit(number, 1 << 40, 1 << 50) for number in range(120)]
    shell.broker.receive(1, "", credit, [], shell.now_ms)
    turns = answered = 0
    while watched.turn(shell):
        turns += 1
        if turns == 4:
            shell.broker.receive(3, "", [wire.Ping(5)], [], shell.now_ms)
        if not answered and shell.peers[3].of(wire.Pong):
            answered = turns
    # It was 2,500 at once before; a step is 1,024 of a table, or 64 that are matched.
    assert watched.most <= 2 * STEP_ENTRIES
    assert turns > 10
    assert answered <= 6
    for number in range(0, 120, 40):
        assert wanted(number) == expected(wants(number), LARGE)
    for number in range(120):
        assert offsets(shell, 1, number) == [1 + at for at in wanted(number)]
    assert not shell.broker._on_demand._cohorts._ahead
    # The batch is matched for the subscription that takes a large part of it alone, and once or
    # twice for the others: those that came before and while it was matched.
    assert shell.broker.counters["matching_put_off"] <= 4
    # All subscriptions go on together.
    shell.send(2, wire.Publish("s", 8), frames=[batch(["large.x.00007.y"])])
    shell.run()
    assert offsets(shell, 1, 1)[-1] == len(LARGE) + 1


@pytest.mark.moderate
@pytest.mark.parametrize("reader", ["alone", "gathered", "fields", "shared", "keyed", "all"])
def test_a_large_table_that_is_read_back_is_read_and_matched_in_slices(
    monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    shell = Sliced(share=1)
    for link in (1, 2):
        shell.hello(link)
    fields: list[dict[str, str]] | None = None
    if reader == "fields":
        fields = [{"n": f"{at % 50}", "m": f"{at}"} for at in range(len(LARGE))]
    frame = encode([b"x"] * len(LARGE), subject=LARGE, fields=fields)
    shell.send(2, wire.Publish("s", 7), frames=[frame])
    shell.evict()
    watched = Watched(monkeypatch, shell)
    pattern: Any = ["prefix", "large.number-3"]
    wanted = expected(pattern, LARGE)
    if reader in ("shared", "keyed", "all"):
        if reader == "all":
            pattern, wanted = ["all"], list(range(len(LARGE)))
        kind = "shared" if reader == "shared" else "keyed"
        join = wire.JoinGroup(1, "s", "g", pattern, kind, [0], 1 << 40, 1 << 50)
        shell.peers[1].members.add(1)
        shell.broker.receive(1, "", [join], [], shell.now_ms)
    else:
        if reader == "fields":
            pattern, wanted = ["fields", "all", [["n", "7"]]], list(range(7, len(LARGE), 50))
        subscribe = wire.Subscribe(
            1, "s", pattern, [0], 1 << 40, 1 << 50, gathered=reader == "gathered"
        )
        shell.broker.receive(1, "", [subscribe], [], shell.now_ms)
    while watched.turn(shell):
        pass
    assert watched.most <= 2 * STEP_ENTRIES
    assert offsets(shell, 1, 1) == wanted


@pytest.mark.moderate
def test_who_ends_while_a_batch_is_surveyed_is_not_given_it_and_the_others_are() -> None:
    shell = Sliced(share=1)
    for link in (1, 2, 3):
        shell.hello(link)
    shell.publish(2, "s", [b"first"])
    for number in range(20):
        link = 1 + 2 * (number % 2)
        shell.subscribe(link, number, "s", wants(number), [1], records=0, gathered=True)
    shell.send(2, wire.Publish("s", 7), frames=[large()])
    for number in range(20):
        command = wire.Credit(number, 1 << 40, 1 << 50)
        shell.broker.receive(1 + 2 * (number % 2), "", [command], [], shell.now_ms)
    for _ in range(4):
        shell.turn()
    assert shell.broker._on_demand._cohorts._ahead
    shell.broker.receive(1, "", [wire.Unsubscribe(4)], [], shell.now_ms)
    shell.broker.link_lost(3, shell.now_ms)
    shell.run()
    assert not offsets(shell, 1, 4)
    for number in (2, 6, 18):
        assert offsets(shell, 1, number) == expected(wants(number), LARGE, 1)
    assert not shell.broker._on_demand._cohorts._ahead


def test_a_table_that_cannot_be_read_is_refused_by_name_when_its_turn_comes() -> None:
    shell = Sliced(share=20, limits=Limits(header_entries_max=1_000))
    shell.hello(1)
    shell.publish(1, "s", [b"first"])
    maps = [{f"n{at}": f"v{number}" for at in range(64)} for number in range(200)]
    frame = encode([b"x"] * 200, fields=maps)
    while not shell.broker.read_ahead(1, [], [frame], shell.now_ms):
        shell.turn()
    shell.broker.receive(1, "", [wire.Publish("s", 7)], [frame], shell.now_ms)
    shell.turn()
    (refused,) = shell.peers[1].of(wire.Refused)
    assert (refused.code, refused.reference) == ("too_large", 7)
