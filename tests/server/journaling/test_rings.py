"""The rings by themselves: when each answer comes, and rings that are not ready."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_py.broker.ready import (
    MAIN,
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
    BodiesRead,
    HistoryRead,
    IndexAnswer,
    IndexQuery,
    ReadRange,
)
from malamute_py.config import JournalSection, from_table
from malamute_py.journal import DiskFull, Ring
from malamute_py.journal.directory import RINGS, Journal
from malamute_py.journal.mapping import FilePart
from malamute_py.server.journaling.journal_threads import RingEvent, Synced
from malamute_py.server.journaling.rings import Rings, ring_settings
from malamute_py.server.result_queue import Died, ResultQueue
from tests.server.storages import TroubledStorage, Troubles
from tests.waiting import WAIT_S

SMALL = JournalSection(segment_bytes=2 << 20, ring_bytes=32 << 20)
OWN: dict[str, Any] = {"memory": False, "ring_bytes": 16 << 20, "full": "overwrite"}


class Bench:
    """Rings over a directory that fails on demand, and what they tell the loop."""

    def __init__(self, directory: Path) -> None:
        self.troubles = Troubles()
        self.storage = TroubledStorage(directory, self.troubles)
        self.journal = Journal.open(self.storage, mapped=True)
        self.results = ResultQueue()
        ring, _ = self.journal.ring(MAIN, ring_settings(SMALL, {}, 16 << 10))
        while ring.prepare_step():
            pass
        self.rings = Rings(self.journal, SMALL, self.results, 16 << 10, snapshot=lambda ring: ())
        self.rings.start()
        self.offsets: dict[str, int] = {}

    def bundle(self, ring: str, token: int, body: bytes = b"x") -> AppendBundle:
        content = Content(encode([body]))
        offset = self.offsets.get(ring, 0)
        append = Append(
            1, offset, 1, 1, content.buffer, content.head.content_crc, content.table
        )  # fmt: skip
        return AppendBundle(ring, token, (append,))

    def append(self, ring: str) -> Appended | AppendRefused:
        (answer,) = self.rings.append([self.bundle(ring, 1)])
        if isinstance(answer, Appended):
            self.offsets[ring] = self.offsets.get(ring, 0) + 1
        return answer

    def appended(self, ring: str, wait_s: float = WAIT_S) -> list[AppendRefused]:
        """Append until it is taken; returns the refusals before."""
        refusals = []
        deadline = time.monotonic() + wait_s
        while isinstance(answer := self.append(ring), AppendRefused):
            refusals.append(answer)
            assert time.monotonic() < deadline, answer
            time.sleep(0.01)
        return refusals

    def close(self) -> None:
        self.rings.stop_threads()
        self.journal.close()
        self.results.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "data")
    yield bench
    bench.close()


def test_the_core_has_the_answers_of_one_write_before_the_next_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    append = Ring.append

    def noted(ring: Ring, batches: Any) -> Any:
        done.append(f"write of {len(batches)}")
        return append(ring, batches)

    monkeypatch.setattr(Ring, "append", noted)
    first = bench.bundle(MAIN, 1)
    bench.offsets[MAIN] = 1
    second = bench.bundle(MAIN, 2)
    for answer in bench.rings.append([first, bench.bundle("none", 9), second]):
        kind = type(answer).__name__
        done.append(f"{kind} {answer.token}")
    assert done == ["write of 1", "Appended 1", "AppendRefused 9", "write of 1", "Appended 2"]


def test_a_batch_behind_one_that_no_segment_holds_comes_again(bench: Bench) -> None:
    first = bench.bundle(MAIN, 1)
    bench.offsets[MAIN] = 1
    large = bench.bundle(MAIN, 2, bytes(SMALL.segment_bytes))
    bench.offsets[MAIN] = 2
    behind = bench.bundle(MAIN, 3)
    taken, *refused = bench.rings.append([first, large, behind])
    assert isinstance(taken, Appended)
    codes = [(each.token, each.code) for each in refused if isinstance(each, AppendRefused)]
    assert codes == [(2, "too_large"), (3, "wait")]


@pytest.mark.moderate
def test_a_new_ring_is_opened_beside_the_loop_and_its_appends_wait(bench: Bench) -> None:
    # The outcome may not depend on another ring's turn.
    with bench.rings._rings[MAIN]._space.preparing:
        bench.troubles.may_create.clear()
        bench.rings.open("own", OWN)
        first = bench.append("own")
        assert isinstance(first, AppendRefused)
        bench.troubles.may_create.set()
        refusals = [first, *bench.appended("own")]
    assert {(refusal.code, refusal.retry_ms) for refusal in refusals} == {("wait", 100)}
    assert bench.rings.facts()["own"]["prepared_in_append_total"] == 0


@pytest.mark.moderate
def test_a_question_about_a_ring_that_is_being_opened_may_come_again(bench: Bench) -> None:
    bench.troubles.may_create.clear()
    bench.rings.open("own", OWN)
    codes: dict[int, str] = {}
    bench.rings.ask(IndexQuery("own", 1, 1, "oldest_segments", {}))
    bench.rings.ask(IndexQuery("none", 1, 2, "oldest_segments", {}))
    deadline = time.monotonic() + WAIT_S
    while len(codes) < 2:
        assert time.monotonic() < deadline
        found = [one for one in bench.results.take() if isinstance(one, IndexAnswer)]
        codes |= {one.token: one.value.code for one in found}
        time.sleep(0.01)
    bench.troubles.may_create.set()
    bench.appended("own")
    assert codes == {1: "wait", 2: "journal_failed"}


def test_a_question_amid_which_a_ring_gets_open_may_come_again(bench: Bench) -> None:
    class Slow(dict[str, Ring]):
        """Rings that are looked up so slowly that one is open meanwhile."""

        def get(self, name: str, default: Any = None) -> Any:
            found = super().get(name, default)
            if name == "own" and found is None:
                bench.troubles.may_create.set()
                while name in bench.rings._unready:
                    time.sleep(0.001)
            return found

    bench.troubles.may_create.clear()
    bench.rings.open("own", OWN)
    bench.journal.rings = bench.rings._rings = Slow(bench.rings._rings)
    answer = bench.rings._read(IndexQuery("own", 1, 1, "oldest_segments", {}))
    assert isinstance(answer, IndexAnswer)
    assert answer.value.code == "wait"


def test_a_sync_is_due_until_the_loop_has_what_came_of_it(bench: Bench) -> None:
    def sync() -> int:
        """Return how many syncs are due at once after one was asked for, and await them."""
        bench.rings.sync(lambda ring: True, 0)
        due = bench.rings.syncs_due
        while bench.rings.syncs_due > 0:
            assert bench.results.wait(WAIT_S * 1_000)
            for result in bench.results.take():
                if isinstance(result, Synced):
                    bench.rings.sync_ended(result.ring, result.lsn)
        return due

    assert sync() == 0, "nothing was appended"
    for _ in range(3):
        bench.appended(MAIN)
        assert sync() == 1
    bench.rings._syncer._asked.add(MAIN)  # a sync is to begin, which covers the next append
    bench.appended(MAIN)
    assert sync() == 0
    bench.rings._syncer._asked.clear()


def test_a_pin_that_comes_while_its_ring_is_being_opened_holds(bench: Bench) -> None:
    with bench.rings._rings[MAIN]._space.preparing:
        bench.troubles.may_create.clear()
        bench.rings.open("own", OWN)
        for name, offset in (("one", 0), ("two", 0), ("two", None)):
            bench.rings.pin("own", name, 1, offset)
        bench.troubles.may_create.set()
        bench.appended("own")
    ring = bench.rings._rings["own"]
    assert ring._space._pins == {"one": (1, 0)}
    bench.rings.pin("own", "one", 1, 1)
    bench.appended("own")
    assert ring._space._pins == {"one": (1, 1)}


@pytest.mark.moderate
def test_a_ring_that_could_not_be_opened_is_tried_again(bench: Bench) -> None:
    bench.troubles.full = True
    bench.rings.open("own", OWN)
    deadline = time.monotonic() + WAIT_S
    while not isinstance(answer := bench.append("own"), Appended) and answer.code == "wait":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(answer, AppendRefused)
    assert answer.code == "disk_full"
    assert "free space" in answer.reason
    assert answer.retry_ms > 0
    events = [event for event in bench.results.take() if isinstance(event, RingEvent)]
    assert ("own", "ring_not_opened") in {(event.ring, event.name) for event in events}
    bench.troubles.full = False
    bench.appended("own")


@pytest.mark.moderate
def test_a_full_disk_is_said_once_by_housekeeping_however_much_is_free(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def full(ring: Ring, budget_bytes: int, now_ms: int) -> bool:
        tries.append(now_ms)
        raise DiskFull(f"{len(tries)} bytes are free")

    monkeypatch.setattr(Ring, "prepare_step", full)
    deadline = time.monotonic() + WAIT_S
    while len(tries) < 4:
        assert time.monotonic() < deadline
        bench.rings._housekeeper.nudge()
        time.sleep(0.01)
    events = [event for event in bench.results.take() if isinstance(event, RingEvent)]
    assert [event.name for event in events].count("segment_not_prepared") == 1


@pytest.mark.moderate
def test_a_ring_that_is_removed_while_it_is_opened_leaves_nothing_behind(bench: Bench) -> None:
    bench.rings.open("own", OWN)
    bench.rings.open("own", {"remove": True})
    place = bench.storage.child(RINGS)
    deadline = time.monotonic() + WAIT_S
    while (
        "own" in bench.rings._unready
        or "own" in bench.rings.facts()
        or bench.rings._removals
        or "own" in place.children()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(bench.append("own"), AppendRefused)


@pytest.mark.moderate
def test_files_of_a_removed_ring_that_cannot_be_removed_yet_are_removed_later(
    bench: Bench,
) -> None:
    """One that could not be removed ended the housekeeping thread, and the broker with it."""
    for name in ("own", "other"):
        bench.rings.open(name, OWN)
        bench.appended(name)
    bench.troubles.failing_remove = True
    bench.rings.open("own", {"remove": True})
    bench.rings.open("other", {"remove": True})
    results: list[Any] = []
    deadline = time.monotonic() + WAIT_S
    while (
        sum(isinstance(each, RingEvent) and each.name == "ring_not_removed" for each in results) < 2
    ):
        assert not any(isinstance(each, Died) for each in results)
        assert time.monotonic() < deadline
        time.sleep(0.01)
        results += bench.results.take()
    assert isinstance(bench.append(MAIN), Appended)
    bench.troubles.failing_remove = False
    place = bench.storage.child(RINGS)
    while place.children() != [MAIN]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    results += bench.results.take()
    told = [each for each in results if isinstance(each, RingEvent)]
    assert [each.name for each in told].count("ring_not_removed") == 2
    assert not any(isinstance(each, Died) for each in results)


@pytest.mark.moderate
def test_a_removed_ring_in_memory_takes_none_once_it_is_removed(bench: Bench) -> None:
    """Its last read, which the next reader might have wanted, kept the whole ring."""
    rings = bench.rings
    rings.open("memory-own", {"memory": True, "ring_bytes": 4 << 20})
    bench.appended("memory-own")
    ring = weakref.ref(rings._rings["memory-own"])
    rings.read(ReadRange("memory-own", 1, 7, 0, 1, 1 << 20, shared=True))
    deadline = time.monotonic() + WAIT_S
    while not any(isinstance(each, HistoryRead) for each in bench.results.take()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rings.open("memory-own", {"remove": True})
    while ring() is not None:
        gc.collect()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.moderate
def test_what_nobody_waits_for_is_synced_a_little_later_and_a_removed_ring_never(
    bench: Bench,
) -> None:
    rings = bench.rings
    rings.open("own", OWN)
    bench.appended("own")
    bench.appended(MAIN)
    rings.sync(lambda ring: ring == MAIN, 1_000)  # A client waits for this one.
    due_ms = rings.sync_at_ms
    assert due_ms is not None
    assert 1_000 < due_ms <= 1_010
    rings.sync(lambda ring: False, due_ms - 1)
    assert due_ms == (rings.sync_at_ms or 0)
    rings.open("own", {"remove": True})
    rings.sync(lambda ring: False, due_ms - 1)
    # Or the loop would be due for ever, with nothing to do.
    assert rings.sync_at_ms is None
    bench.appended(MAIN)
    rings.sync(lambda ring: False, due_ms)
    rings.sync(lambda ring: False, due_ms + 10)
    deadline = time.monotonic() + WAIT_S
    while rings.facts()[MAIN]["synced_lsn"] < rings.facts()[MAIN]["end_lsn"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_question_that_nobody_waits_for_is_not_asked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "malamute_py.server.journaling.rings.answer_query",
        lambda ring, query: asked.append(query.token),
    )
    for token, wanted in ((1, True), (2, False)):
        bench.rings.ask(IndexQuery(MAIN, 1, token, "find_time", {}, partial(bool, wanted)))
    answers: list[Any] = []
    deadline = time.monotonic() + WAIT_S
    while len(answers) < 2:
        assert time.monotonic() < deadline
        answers += [one for one in bench.results.take() if isinstance(one, IndexAnswer)]
        time.sleep(0.01)
    assert asked == [1]
    assert answers[1].value.code == "cancelled"


@pytest.mark.moderate
def test_reads_of_history_do_not_wait_for_all_questions_before_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(ring: Ring, query: IndexQuery) -> None:
        begun.set()
        go.wait(WAIT_S)

    monkeypatch.setattr("malamute_py.server.journaling.rings.answer_query", slow)
    for token in range(5):
        bench.rings.ask(IndexQuery(MAIN, 1, token, "find_time", {}))
    assert begun.wait(WAIT_S)
    bench.rings.read(ReadRange(MAIN, 1, 77, 0, 1, 1000))
    go.set()
    answers: list[Any] = []
    deadline = time.monotonic() + WAIT_S
    while len(answers) < 6:
        assert time.monotonic() < deadline
        answers += [one for one in bench.results.take() if hasattr(one, "token")]
        time.sleep(0.01)
    assert [answer.token for answer in answers].index(77) <= 2


@pytest.mark.moderate
def test_history_that_several_want_is_read_once_and_one_alone_lets_go_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        bench.append(MAIN)
    read: list[int] = []
    ring = bench.journal.rings[MAIN]
    plainly = ring.read

    def noted(stream: int, first: int, *rest: Any) -> Any:
        read.append(first)
        return plainly(stream, first, *rest)

    monkeypatch.setattr(ring, "read", noted)

    def ask(*, shared: bool = False, alone: bool = False) -> int:
        """Return how far the answer to a read of everything goes."""
        bench.rings.read(ReadRange(MAIN, 1, 5, 0, 4, 1 << 20, shared=shared, alone=alone))
        deadline = time.monotonic() + WAIT_S
        while True:
            for answer in bench.results.take():
                if isinstance(answer, HistoryRead):
                    return answer.next
            assert time.monotonic() < deadline
            time.sleep(0.01)

    assert [ask(shared=True) for _ in range(3)] == [4, 4, 4]
    assert read == [0]
    # Neither a reader that selects nor a lone one is given it; after the latter it is not held any
    # more.
    assert ask() == ask(shared=True) == 4
    assert read == [0, 0]
    assert ask(alone=True) == ask(shared=True) == 4
    assert read == [0, 0, 0, 0]


def answer_to(bench: Bench, wanted: ReadRange) -> HistoryRead:
    bench.rings.read(wanted)
    deadline = time.monotonic() + WAIT_S
    while True:
        for answer in bench.results.take():
            if isinstance(answer, HistoryRead):
                return answer
        assert time.monotonic() < deadline
        time.sleep(0.001)


def sealed_segment(bench: Bench) -> None:
    """Fill the first segment of ring `own`, and wait until it is sealed."""
    bench.rings.open("own", OWN)
    bench.appended("own")
    for _ in range(3):
        number = bench.offsets["own"]
        (answer,) = bench.rings.append([bench.bundle("own", 1, bytes(900_000))])
        assert isinstance(answer, Appended)
        bench.offsets["own"] = number + 1
    ring = bench.journal.rings["own"]
    ring.sync()
    deadline = time.monotonic() + WAIT_S
    while ring._space.segments[0].file is not None:
        assert time.monotonic() < deadline
        bench.rings._housekeeper.nudge()
        time.sleep(0.001)


@pytest.mark.moderate
def test_removing_a_ring_gives_what_clients_have_not_read_of_it_memory_of_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed_segment(bench)
    held = answer_to(bench, ReadRange("own", 1, 5, 0, 2, 1 << 20))
    assert isinstance(held.runs[0].data.obj, FilePart)
    detached = threading.Event()
    monkeypatch.setattr(FilePart, "detach", lambda _: detached.set())
    bench.rings.open("own", {"remove": True})
    assert detached.wait(WAIT_S)


@pytest.mark.moderate
def test_a_recent_read_is_done_again_when_its_pages_cannot_be_brought_in_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed_segment(bench)
    wanted = ReadRange("own", 1, 5, 0, 2, 1 << 20, shared=True)
    held = answer_to(bench, wanted)
    assert answer_to(bench, wanted).runs[0].data is held.runs[0].data

    def populate(_: FilePart) -> None:
        raise OSError(errno.EFAULT, "Bad address")

    monkeypatch.setattr(FilePart, "populate", populate)
    again = answer_to(bench, wanted)
    assert again.runs[0].data == held.runs[0].data
    assert not isinstance(again.runs[0].data.obj, FilePart)


@pytest.mark.parametrize(
    ("ring_bytes", "segment_bytes"),
    [
        (12 << 20, 4 << 20),
        (13 << 20, 4 << 20),
        (24 << 20, 4 << 20),
        (64 << 20, 4 << 20),
        (6 << 20, 2 << 20),
        (1 << 20, 1 << 20),
    ],
)
def test_a_small_ring_has_segments_for_the_largest_batch_or_of_a_third_of_it(
    ring_bytes: int, segment_bytes: int
) -> None:
    config = JournalSection(segment_bytes=4 << 20, ring_bytes=64 << 20)
    found = ring_settings(config, {"ring_bytes": ring_bytes}, 2 << 20)
    assert found.segment_bytes == segment_bytes
    assert found.ring_bytes >= 3 * segment_bytes
    found.check()


def test_a_ring_main_that_passes_the_check_takes_the_largest_batch(tmp_path: Path) -> None:
    config = from_table(
        {
            "limits": {"batch_bytes_max": 2 << 20, "record_bytes_max": 2 << 20},
            "links": {"window_bytes": 1 << 20},
            "journal": {"segment_bytes": 4 << 20, "ring_bytes": 12 << 20},
        }
    )
    journal = Journal.open(tmp_path)
    batch_bytes_max = config.limits.batch_bytes_max
    ring, _ = journal.ring("main", ring_settings(config.journal, {}, batch_bytes_max))
    content = Content(encode([b"x" * ((2 << 20) - 1_000)], subject="s"))
    for base in range(6):
        ring.append(
            [Append(9, base, 1, 0, content.buffer, content.head.content_crc, content.table)]
        )
    assert ring.next_offset(9) == 6
    journal.close()


@pytest.mark.moderate
def test_an_error_in_one_read_is_told_who_asked_and_the_reader_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*_: Any, **__: Any) -> Any:
        raise IndexError("planted")

    ring = bench.journal.rings[MAIN]
    plainly = ring.read
    monkeypatch.setattr(ring, "read", planted)
    monkeypatch.setattr(ring, "read_batches", planted)
    monkeypatch.setattr("malamute_py.server.journaling.rings.answer_query", planted)
    bench.rings.read(ReadRange(MAIN, 1, 1, 0, 1, 1000))
    bench.rings.ask(IndexQuery(MAIN, 1, 2, "find_time", {}))
    bench.rings.read_bodies(BodiesRead(3, (0,)))
    answers: dict[int, Any] = {}
    events: list[RingEvent] = []
    deadline = time.monotonic() + WAIT_S

    def gather(count: int) -> None:
        while len(answers) < count:
            assert time.monotonic() < deadline
            for one in bench.results.take():
                assert not isinstance(one, Died)
                if isinstance(one, RingEvent):
                    events.append(one)
                elif hasattr(one, "token"):
                    answers[one.token] = one
            time.sleep(0.01)

    gather(3)
    assert answers[1].code == answers[2].value.code == "internal"
    assert "IndexError" in answers[3].failed
    assert answers[3].batches == {}
    erred = [event for event in events if event.name == "read_erred"]
    assert sorted(event.facts["doing"] for event in erred) == ["bodies", "find_time", "read"]
    monkeypatch.setattr(ring, "read", plainly)
    bench.rings.read(ReadRange(MAIN, 1, 4, 0, 1, 1000))
    gather(4)
    assert isinstance(answers[4], HistoryRead)
