"""Links between tasks: used ones stay, idle ones are closed, a fork has none of its parent's."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from malamute_py.client.sync.client import SyncClient
from pyspark_malamute import links
from pyspark_malamute.fetch import fetch_all
from pyspark_malamute.kept_links import IDLE_S, KEPT, KeptLinks
from pyspark_malamute.options import SourceOptions, parse_options
from pyspark_malamute.planning import Range
from tests.spark.scripted import Clock
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEY = ("a broker",)


class Closable:
    """A link that counts how often it was closed."""

    def __init__(self) -> None:
        self.closings = 0

    def close(self) -> None:
        self.closings += 1


class Watched:
    """Links whose thread is this test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.kept = KeptLinks(self.clock.read)
        self.watches = 0
        monkeypatch.setattr("threading.Thread.start", self._started)

    def _started(self, *_: object) -> None:
        self.watches += 1

    def put(self, key: tuple[str, ...] = KEY) -> Closable:
        link: Any = Closable()
        self.kept.put(key, link)
        return link  # type: ignore[no-any-return]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_link_that_no_task_used_for_long_is_closed(watched: Watched) -> None:
    kept, clock = watched.kept, watched.clock
    with kept.in_use(KEY):
        link = watched.put()
        assert kept.close_idle() is None
    assert watched.watches == 1
    clock.now_s += IDLE_S - 1
    assert kept.close_idle() == pytest.approx(1)
    assert link.closings == 0
    assert kept.get(KEY) is not None
    clock.now_s += 1
    assert kept.close_idle() is None
    assert link.closings == 1
    assert kept.get(KEY) is None


def test_a_link_in_use_is_not_closed_however_long_it_takes(watched: Watched) -> None:
    kept, clock = watched.kept, watched.clock
    link = watched.put()
    with kept.in_use(KEY):
        with kept.in_use(KEY):
            clock.now_s += 10 * IDLE_S
        assert kept.close_idle() is None
        assert link.closings == 0
    clock.now_s += IDLE_S / 2
    with kept.in_use(KEY):
        clock.now_s += 10 * IDLE_S
        assert kept.close_idle() is None
    clock.now_s += IDLE_S / 2
    assert kept.close_idle() == pytest.approx(IDLE_S / 2)
    assert link.closings == 0


def test_each_idle_link_has_its_own_time_and_one_thread_watches_them(watched: Watched) -> None:
    kept, clock = watched.kept, watched.clock
    first, second = watched.put(("a",)), watched.put(("b",))
    with kept.in_use(("a",)):
        pass
    clock.now_s += 10
    with kept.in_use(("b",)):
        pass
    assert watched.watches == 1
    clock.now_s += IDLE_S - 10
    assert kept.close_idle() == pytest.approx(10)
    assert (first.closings, second.closings) == (1, 0)
    clock.now_s += 10
    assert kept.close_idle() is None
    assert second.closings == 1
    watched.put(("c",))
    with kept.in_use(("c",)):
        pass
    assert watched.watches == 2


# --- at a broker -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    KEPT.close()


def options(endpoint: str, stream: str, **more: str) -> SourceOptions:
    return parse_options({"endpoint": endpoint, "stream": stream, **more})


def whole(client: SyncClient, stream: str) -> Range:
    plan = client.plan_read(stream)
    return Range(stream, plan.stream.hex(), plan.epoch, plan.from_offset, plan.to_offset)


def read(chosen: SourceOptions, part: Range) -> list[int]:
    pieces = fetch_all(chosen, part)
    return [offset for piece in pieces for offset in piece.column("offset").to_pylist()]


def sockets(process: int | str = "self") -> int:
    found = 0
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(descriptor.readlink()).startswith(("socket:", "pipe:", "anon_inode:"))
    return found


@pytest.mark.moderate
def test_fifty_tasks_leave_as_many_sockets_as_one(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    client.publish_many(stream, [b"x"] * 100)
    part, chosen = whole(client, stream), options(endpoint, stream)
    assert read(chosen, part) == list(range(100))
    before = sockets()
    for _ in range(50):
        assert read(chosen, part) == list(range(100))
    # What earlier tests left may end meanwhile.
    until(lambda: sockets() <= before)


@pytest.mark.moderate
def test_queries_with_other_options_of_the_link_have_another_one(
    endpoint: str, client: SyncClient, stream: str
) -> None:
    one = links.link(options(endpoint, stream))
    assert links.link(options(endpoint, stream, fetchTimeoutMs="9", columns="offset")) is one
    patient = links.link(options(endpoint, stream, requestTimeoutMs="90000"))
    assert patient is not one
    assert patient.settings.call_timeout_ms == 90_000


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_child_of_a_fork_makes_a_link_of_its_own_and_the_parents_goes_on(
    endpoint: str, client: SyncClient, stream: str, tmp_path: Path
) -> None:
    client.publish_many(stream, [b"x"] * 100)
    part, chosen = whole(client, stream), options(endpoint, stream)
    assert len(read(chosen, part)) == 100
    kept = links.link(chosen)
    before = len(client.list_links())
    child = os.fork()
    if not child:  # pragma: no cover - another process
        status = 1
        try:
            status = 0 if len(read(chosen, part)) == 100 and links.link(chosen) is not kept else 2
            KEPT.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert links.link(chosen) is kept
    assert len(read(chosen, part)) == 100
    # The broker hears of the child's goodbye when it comes to it.
    until(lambda: len(client.list_links()) <= before)


# --- in Spark ------------------------------------------------------------------------------------


def inodes_to(port: int) -> set[str]:
    """Sockets of this machine that are connected to a port, as links in /proc name them."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}")}


def worker_descriptors() -> dict[str, list[str]]:
    """Return the descriptors of each Python worker of the session."""
    found: dict[str, list[str]] = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if b"pyspark.daemon" in (process / "cmdline").read_bytes():
                links = (process / "fd").iterdir()
                found[process.name] = [str(each.readlink()) for each in links]
    return found


@pytest.mark.spark
def test_after_fifty_triggers_a_worker_has_one_link_and_as_many_descriptors_as_after_five(
    read_stream: Callable[..., DataFrame],
    endpoint: str,
    client: SyncClient,
    stream: str,
    tmp_path: Path,
) -> None:
    frame = read_stream(maxRecordsPerTrigger="2", maxRecordsPerPartition="1")
    port = int(endpoint.rpartition(":")[2])

    def run(triggers: int) -> dict[str, int]:
        """Number of descriptors of each worker that has a link, after so many more triggers."""
        client.publish_many(stream, [b"x"] * 2 * triggers)
        sink = frame.writeStream.format("noop")
        query = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        # Spark ends the worker of a task that runs when its query is stopped.
        query.processAllAvailable()
        ran = [progress for progress in query.recentProgress if progress["numInputRows"]]
        query.stop()
        assert len(ran) == triggers
        ours = inodes_to(port)
        has = {worker: ours & set(links) for worker, links in worker_descriptors().items()}
        assert max(map(len, has.values())) == 1
        # A worker that was at a task has a descriptor more until it has put that away.
        looks: list[dict[str, int]] = []
        while len(looks) < 5 or any(look != looks[-1] for look in looks[-5:]):
            assert len(looks) < 300, looks[-5:]
            time.sleep(0.1)
            found = worker_descriptors().items()
            looks.append({worker: len(links) for worker, links in found if has.get(worker)})
        return looks[-1]

    before = run(5)
    assert before
    after = run(45)
    both = before.keys() & after.keys()
    assert both
    # A worker may have put more away meanwhile, and leaves nothing behind.
    assert all(after[worker] <= before[worker] for worker in both)
