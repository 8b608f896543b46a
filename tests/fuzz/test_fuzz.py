"""The fuzzers find planted bugs, and find nothing else in a bounded run.

A planted bug is one that the code once had, or one of its kind. Source: tests/fuzz/inside.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.content import Content
from malamute_protocol.link import CLIENT_COMMANDS
from malamute_py.broker import Broker
from malamute_py.broker.ready import Ready, Send
from malamute_py.broker.reception import Reception
from tests.fuzz.inside import Found, minimised, replay, run
from tests.fuzz.messages import Step, read_steps, write_steps

CORPUS = Path(__file__).parent / "corpus" / "live"
FINDS = sorted(CORPUS.glob("*.steps"))


@pytest.mark.parametrize("path", FINDS, ids=[path.stem for path in FINDS])
def test_what_was_found_once_is_survived(path: Path) -> None:
    replay(read_steps(path))


@pytest.mark.moderate
def test_a_few_hostile_messages_end_nothing() -> None:
    assert run(1, 1_500) >= 1_500


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_hostile_messages_end_nothing(seed: int) -> None:
    assert run(seed, 5_000) >= 5_000


@pytest.mark.moderate
def test_a_seed_makes_the_same_messages_again_and_a_file_keeps_them(tmp_path: Path) -> None:
    first: list[Step] = []
    second: list[Step] = []
    run(3, 500, first)
    run(3, 500, second)
    assert first == second
    write_steps(tmp_path / "steps", first, ["for a person"])
    assert read_steps(tmp_path / "steps") == first


# --- planted bugs -----------------------------------------------------------------------------


def _codes_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Content, "check_codes", lambda self: None)


def _a_property_is_read(patch: pytest.MonkeyPatch) -> None:
    """Have the core parse properties, which only consumers should."""
    check = Content.check

    def checked(self: Content, *args: Any, **named: Any) -> None:
        check(self, *args, **named)
        if self.sections.properties >= 0:
            bytes(self.view[self.sections.properties :][:40]).decode("ascii")

    patch.setattr(Content, "check", checked)


def _a_number_overflows(patch: pytest.MonkeyPatch) -> None:
    """Have an answer add to a number that a peer chose."""
    receive = Reception._dispatch

    def dispatch(self: Reception, link: Any, kind: Any, command: Any) -> None:
        if kind is wire.Ping:
            command = wire.Ping(command.token + 1)
        receive(self, link, kind, command)

    patch.setattr(Reception, "_dispatch", dispatch)


def _a_confirm_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    synced, calls = Broker.synced, Counter[Broker]()

    def sometimes(self: Broker, ring: str, lsn: int, now_ms: int) -> None:
        calls[self] += 1
        if calls[self] % 97:
            synced(self, ring, lsn, now_ms)

    patch.setattr(Broker, "synced", sometimes)


def _a_delivery_is_dropped(patch: pytest.MonkeyPatch) -> None:
    take, calls = Broker.take_outgoing, [0]

    def without(self: Broker) -> Ready:
        ready = take(self)
        for send in list(ready.sends):
            if any(type(command) is wire.Deliver for command in send.commands):
                calls[0] += 1
                if calls[0] % 20 == 0:
                    ready.sends.remove(send)
        return ready

    patch.setattr(Broker, "take_outgoing", without)


def _a_link_is_told_more_after_its_end(patch: pytest.MonkeyPatch) -> None:
    take = Broker.take_outgoing

    def more(self: Broker) -> Ready:
        ready = take(self)
        for send in list(ready.sends):
            if type(send.commands[-1]) is wire.Bye:
                ready.sends.append(Send(send.link, [wire.Ping(1)], []))
        return ready

    patch.setattr(Broker, "take_outgoing", more)


PLANTS = [
    _codes_are_not_checked, _a_property_is_read, _a_number_overflows, _a_confirm_is_forgotten,
    _a_delivery_is_dropped, _a_link_is_told_more_after_its_end,
]  # fmt: skip


def run_all(seeds: range, steps: list[Step] | None = None) -> None:
    """Run the seeds; steps: filled with those of the last."""
    for seed in seeds:
        if steps is not None:
            steps.clear()
        run(seed, 3_000, steps)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=[plant.__name__ for plant in PLANTS])
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Found):
        run_all(range(5))


@pytest.mark.slow
def test_a_find_is_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    _a_number_overflows(monkeypatch)
    steps: list[Step] = []
    with pytest.raises(Found) as found:
        run_all(range(20), steps)
    short = minimised(steps, found.value.about)
    assert len(short) <= 5 < len(steps), "a greeting, the message that asks, and little else"
    with pytest.raises(Found):
        replay(short)


@pytest.mark.slow
def test_the_messages_reach_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[type[wire.Command]] = set()
    receive = Broker.receive

    def noted(self: Broker, link: int, identity: str, commands: Any, *rest: Any) -> None:
        made.update(map(type, commands))
        receive(self, link, identity, commands, *rest)

    monkeypatch.setattr(Broker, "receive", noted)
    for seed in range(10):
        run(seed, 1_000)
        if made >= set(CLIENT_COMMANDS):
            return
    pytest.fail(f"not made: {set(CLIENT_COMMANDS) - made}")
