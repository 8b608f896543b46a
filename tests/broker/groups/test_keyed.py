"""Keyed groups: the records of a key go to one member at a time."""

from __future__ import annotations

import pytest

from malamute_protocol import commands as wire
from tests.broker.group_world import (
    MUCH,
    M,
    ack,
    got,
    info,
    join,
    lose,
    publish,
    world,
)
from tests.broker.shell import Shell


def keys(shell: Shell, link: int) -> set[str]:
    return {NAMES[offset % len(NAMES)] for offset in got(shell, link)}


NAMES = [f"key.{n}" for n in range(60)]


def test_records_of_a_key_go_to_one_member_in_order() -> None:
    shell = world()
    for link in (2, 3, 4):
        join(shell, link, "keyed")
    for _ in range(5):
        publish(shell, len(NAMES), subject=NAMES)
    parts = [keys(shell, link) for link in (2, 3, 4)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(NAMES)
    assert all(len(part) > 5 for part in parts)
    for link in (2, 3, 4):
        assert got(shell, link) == sorted(got(shell, link))


def test_the_first_key_of_a_record_decides() -> None:
    shell = world()
    for link in (2, 3, 4):
        join(shell, link, "keyed")
    for n in range(40):
        publish(shell, 1, subject=[["one", f"more.{n}"]])
    assert sorted(len(got(shell, link)) for link in (2, 3, 4)) == [0, 0, 40]


def test_a_key_moves_only_when_its_old_member_holds_none_of_it() -> None:
    shell = world()
    join(shell, 2, "keyed")
    publish(shell, len(NAMES), subject=NAMES)
    join(shell, 3, "keyed")
    publish(shell, len(NAMES), subject=NAMES)
    # Records of slots that are to move wait; the others go on.
    assert got(shell, 3) == []
    stay = {NAMES[offset % 60] for offset in got(shell, 2)[60:]}
    assert 10 < len(stay) < 50
    moving = [n for n, name in enumerate(NAMES) if name not in stay]
    assert info(shell)["waiting"] == len(moving)
    ack(shell, 2, (moving[0], moving[0] + 1))
    assert got(shell, 3) == [60 + moving[0]]
    ack(shell, 2, *[(n, n + 1) for n in moving[1:]])
    assert got(shell, 3) == [60 + n for n in moving]


def test_the_keys_of_a_member_that_died_go_to_others_from_where_it_was() -> None:
    shell = world()
    for link in (2, 3):
        join(shell, link, "keyed")
    publish(shell, len(NAMES), subject=NAMES)
    publish(shell, len(NAMES), subject=NAMES)
    mine = got(shell, 2)
    ack(shell, 2, *[(offset, offset + 1) for offset in mine[::2]])
    lose(shell, 2)
    assert got(shell, 3)[-len(mine[1::2]) :] == mine[1::2]


def test_a_keyed_member_without_credit_holds_up_its_keys_only() -> None:
    shell = world()
    join(shell, 2, "keyed", credit=0)
    join(shell, 3, "keyed")
    for _ in range(3):
        publish(shell, len(NAMES), subject=NAMES)
    theirs = set(got(shell, 3))
    assert 0 < len(theirs) < 180
    shell.evict()
    shell.send(2, wire.Credit(M, 5, MUCH))
    missing = sorted(set(range(180)) - theirs)
    assert got(shell, 2) == missing[:5]
    publish(shell, len(NAMES), subject=NAMES)
    shell.send(2, wire.Credit(M, 1_000, MUCH))
    assert got(shell, 2)[: len(missing)] == missing
    assert got(shell, 2) == sorted(got(shell, 2))


def test_a_key_waits_for_its_record_that_is_wanted_again() -> None:
    shell = world()
    join(shell, 2, "keyed")
    publish(shell, 1, subject="a")
    ack(shell, 2, (0, 1), again_ms=300)
    publish(shell, 2, subject="a")
    publish(shell, 1, subject="b")
    assert got(shell, 2) == [0, 3]
    shell.wait(300)
    assert got(shell, 2) == [0, 3, 0, 1, 2]


def test_a_keyed_group_selects_and_reads_history() -> None:
    shell = world(quantum_bytes=500)
    for _ in range(20):
        publish(shell, len(NAMES), subject=NAMES)
    shell.evict()
    pattern = ["or", *[["topic", name] for name in NAMES[:20]]]
    for link in (2, 3):
        join(shell, link, "keyed", pattern=pattern)
    expected = [n for n in range(1_200) if n % 60 < 20]
    assert sorted(got(shell, 2) + got(shell, 3)) == expected
    assert not keys(shell, 2) & keys(shell, 3)


def test_a_member_that_joins_while_the_attempts_of_a_lost_one_are_logged_gets_a_key_in_order() -> (
    None
):
    shell = world()
    join(shell, 2, "keyed", credit=1, settings={"attempts_max": 3})
    publish(shell, 2, subject="one")
    assert got(shell, 2) == [0]
    shell.hello(3)
    # Nothing runs between the loss and the next member, which gets the number of the lost one.
    shell.broker.link_lost(2, shell.now_ms)
    join(shell, 3, "keyed", hello=False)
    assert got(shell, 3) == [0, 1]


@pytest.mark.parametrize("attempts_max", [0, 3])
def test_a_record_that_is_given_back_comes_before_later_ones_of_its_key(attempts_max: int) -> None:
    """Where attempts are counted, a later one overtook it while the log was told."""
    shell = world()
    settings = {"attempts_max": attempts_max} if attempts_max else {}
    join(shell, 2, "keyed", credit=1, settings=settings)
    publish(shell, 2, subject="one")
    assert got(shell, 2) == [0]
    shell.send(2, wire.AckRecords(M, [(0, 1)], 0, 0, 0), wire.Credit(M, 5, MUCH))
    assert got(shell, 2) == [0, 0, 1]


@pytest.mark.parametrize("attempts_max", [0, 5])
def test_a_record_whose_lease_ended_comes_before_later_ones_of_its_key(attempts_max: int) -> None:
    """Its member came back in the same turn, and later records of the key overtook it."""
    shell = world()
    settings = {"lease_ms": 1_000} | ({"attempts_max": attempts_max} if attempts_max else {})
    join(shell, 2, "keyed", credit=2, settings=settings)
    publish(shell, 1, subject="one")
    publish(shell, 1, subject="two")
    publish(shell, 1, subject="one")
    assert got(shell, 2) == [0, 1]
    shell.wait(900)
    shell.send(2, wire.AckRecords(M, [(1, 2)], 0, 0, -1, 2))  # The lease of record 1 is renewed.
    run, shell.run = shell.run, lambda: None  # type: ignore[method-assign]
    shell.wait(300)
    shell.send(2, wire.AckRecords(M, [(1, 2)]), wire.Credit(M, 5, MUCH))
    shell.run = run  # type: ignore[method-assign]
    shell.run()
    order = [offset for offset in got(shell, 2)[2:] if offset != 1]
    assert order == [0, 2]
