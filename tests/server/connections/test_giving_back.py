"""The guard gives back the memory that unread bytes took: when, how often, and until when."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from malamute_py.server.connections import memory
from tests.server.connections.watched import Watched


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Return how often memory was given back, by the argument of malloc_trim()."""
    given = Counter[int]()
    monkeypatch.setattr(memory, "_trim", lambda pad: given.update([pad]))
    return given


def test_memory_of_cut_connections_is_given_back_while_others_go_on(
    given: Counter[int],
) -> None:
    with Watched() as watched:
        watched.look()
        watched.grows(300 << 20)
        watched.look(drained=False)
        assert not given, "no connection was cut"
        watched.guard.cut(watched.connection, "planted")
        watched.look(drained=False)
        watched.trimmed()
        assert given[0] == 1


def test_memory_of_what_lost_peers_had_not_read_is_given_back(given: Counter[int]) -> None:
    """875 MiB stayed: nothing that came in was unread, so that growth was taken as honest."""
    with Watched() as watched:
        watched.look()
        watched.grows(300 << 20)
        watched.look()
        memory = watched.guard.memory
        memory.note_freed(1 << 20)
        watched.look()
        assert not given, "so little is not worth a thread"
        memory.note_freed(150 << 20)
        memory.note_freed(100 << 20)
        assert memory.before == memory.rss - (251 << 20)
        watched.look()
        watched.trimmed()
        assert given[0] == 1
        watched.grows(50 << 20)
        for _ in range(2):
            watched.look()
        assert not memory.has_filled
        memory.note_freed(1 << 20)
        assert not memory.has_filled, "it is counted anew"


def test_memory_that_cannot_be_given_back_is_tried_less_and_less_often_until_the_next_cut(
    given: Counter[int],
) -> None:
    with Watched() as watched:
        guard, other = watched.guard, watched.another()
        other.delivers(frames=1, frame_bytes=100)
        watched.look()
        guard.cut(watched.connection, "planted")
        watched.grows(300 << 20)

        def tries(looks: int) -> int:
            before = given[0]
            for _ in range(looks):
                watched.look(drained=False)
                if guard.memory._trimming is not None:
                    guard.memory._trimming.join()
            return given[0] - before

        assert tries(1_000) < 15, "the looks are a second apart"
        guard.cut(other.connection, "planted")
        assert tries(1) == 1
        before = given[0]
        watched.look()
        assert given[0] == before + 1, "what the loop has dropped since is given back once more"
        for _ in range(20):
            watched.look()
        assert not guard.memory.has_filled, "the rest is what honest clients fill"
        assert given[0] < before + 8
        other.__exit__()


def test_memory_is_given_back_each_second_while_it_shrinks(given: Counter[int]) -> None:
    """2.5 of 3 GiB were still there after 30 s: each try doubled the time until the next one."""
    with Watched() as watched:
        watched.look()
        watched.guard.cut(watched.connection, "planted")
        for left in range(30, 10, -1):
            watched.grows(left * (10 << 20))
            before = given[0]
            for _ in range(2):
                watched.look(drained=False)
                if watched.guard.memory._trimming is not None:
                    watched.trimmed()
            assert given[0] > before, "the looks are a second apart"


def test_memory_is_given_back_once_nothing_is_unread_however_often_it_was_tried_before(
    given: Counter[int],
) -> None:
    """477 MiB stayed for good: the last try had been made while messages were still dropped."""
    with Watched() as watched:
        guard = watched.guard
        watched.look()
        guard.cut(watched.connection, "planted")
        watched.grows(300 << 20)
        for _ in range(100):
            watched.look(drained=False)
            watched.trimmed()
        before = given[0]
        watched.look()
        watched.trimmed()
        assert given[0] == before + 1
        watched.look()
        assert not guard.memory.has_filled
        assert guard.memory.before == guard.memory.rss


def test_memory_of_connections_that_end_by_themselves_is_given_back(
    given: Counter[int],
) -> None:
    """305 MiB stayed: a peer that had sent much more than was taken up went before it was cut."""
    with Watched() as watched:
        guard = watched.guard
        watched.delivers(frames=300, frame_bytes=130)
        watched.look()
        for _ in range(2):
            watched.arrives(8 << 20)
            watched.grows(100 << 20)
            watched.look(drained=False)
        assert watched.cuts == []
        before = given[0]
        guard._forget(watched.connection)
        watched.look()
        watched.trimmed()
        assert given[0] == before + 1


def test_memory_that_is_freed_after_it_was_given_back_is_given_back_as_well(
    given: Counter[int],
) -> None:
    """341 MiB of 425 stayed: the loop still held them when the thread began."""
    with Watched() as watched:
        guard = watched.guard
        watched.look()
        guard.cut(watched.connection, "planted")
        for times in (1, 2):
            watched.grows(300 << 20)
            watched.look()
            watched.trimmed()
            assert given[0] == times
        watched.grows(1 << 20)
        watched.look()
        assert not guard.memory.has_filled


def test_a_system_without_room_for_a_thread_costs_a_try_to_give_memory_back_only(
    monkeypatch: pytest.MonkeyPatch, given: Counter[int]
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Watched() as watched:
        watched.look()
        watched.grows(300 << 20)
        watched.guard.cut(watched.connection, "planted")
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            watched.look(drained=False)
            watched.look(drained=True)
        assert watched.counts["trims_failed_total"] == 2
        assert not given
        watched.look(drained=True)
        watched.trimmed()
        assert given[0] == 1
