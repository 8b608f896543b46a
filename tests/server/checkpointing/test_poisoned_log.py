"""A log with batches that no check would let in, served by the real broker to the real client.

The batches are appended to the ring's files while no broker runs, as an older version, or a bug,
could have stored them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.content import Content
from malamute_protocol.content_layout import PROPERTIES_CONSTANT
from malamute_protocol.encode import encode
from malamute_protocol.errors import BatchError
from malamute_py.broker.ready import MAIN, Append
from malamute_py.client.session.subscription import GapNotice, Notice
from malamute_py.client.sync.client import SyncClient
from malamute_py.config import Config
from malamute_py.embedded import EmbeddedBroker
from malamute_py.journal.directory import Journal
from malamute_py.server.journaling.rings import ring_settings
from tests.broker.test_containment import POISON
from tests.protocol.hostile import craft, packed
from tests.seeds import slow
from tests.waiting import WAIT_MS

GOOD = encode([b"x"])
SUBJECTS = packed(["a", "b"])
UNREADABLE = {
    **POISON,
    "properties that are none": craft(
        4, subjects=SUBJECTS, subjects_count=2, subject_codes=[0, 1, 0, 1],
        properties=(PROPERTIES_CONSTANT, b"\xc1"),
    ),
    "properties over the limit": craft(
        4, subjects=SUBJECTS, subjects_count=2, subject_codes=[0, 1, 0, 1],
        properties=(PROPERTIES_CONSTANT, packed({"k": "v" * 70_000})),
    ),
}  # fmt: skip


def poison(directory: Path, stream: int, base: int, contents: list[bytes]) -> None:
    """Append batches to ring main as they are."""
    config = Config()
    journal = Journal.open(directory)
    settings = ring_settings(config.journal, {}, config.limits.batch_bytes_max)
    ring, _ = journal.ring(MAIN, settings)
    for content in contents:
        head = Content(content).head
        ring.append(
            [Append(stream, base, head.count, 1, content, head.content_crc, Content(GOOD).table)]
        )
        base += head.count
    journal.close()


def read(client: SyncClient, pattern: Any, **more: Any) -> tuple[list[bytes], list[GapNotice]]:
    """Return all records of a pattern whose bodies are ours, and the gaps between them."""
    gaps: list[Notice] = []
    found = client.subscribe(
        "s", pattern, start="earliest", until="tail", on_notice=gaps.append, **more
    )
    got = []
    for batch in found.batches():
        # Properties of some cannot be taken apart; their bodies can, and the records after them.
        with contextlib.suppress(BatchError):
            assert batch.to_arrow().num_rows == len(batch)
        got += [body for body in batch.bodies() if body != b"x"]
    return got, [gap for gap in gaps if isinstance(gap, GapNotice)]


# tests/broker/test_containment.py has the effect of the other batches on the core alone.
QUICK = {"codes", "properties that are none", "properties over the limit"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(QUICK), *slow(sorted(UNREADABLE.keys() - QUICK))])
def test_a_poisoned_log_serves_everything_else(tmp_path: Path, name: str) -> None:
    with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as client:
        client.publish("s", b"1", subject="a")
        client.publish("s", b"2", subject="b")
        client.send("box", b"mail")
        number = broker.server._core._catalogue.get("s").number  # type: ignore[union-attr]
    poison(tmp_path, number, 2, [UNREADABLE[name]])
    for start in (1, 2):
        with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as client:
            client.publish("s", b"7", subject="a")
            client.publish("s", b"8", subject="b")
            copies = start
            for pattern, bodies in (("a", [b"1", b"7"]), ("b", [b"2", b"8"])):
                for whole in (False, True):
                    got, gaps = read(client, pattern, whole=whole)
                    assert got == [bodies[0], *bodies[1:] * copies]
                    assert all((gap.from_offset, gap.code) == (2, "damaged") for gap in gaps)
            got, gaps = read(client, "#")
            assert got == [b"1", b"2", *[b"7", b"8"] * copies]
            assert all((gap.from_offset, gap.code) == (2, "damaged") for gap in gaps)
            with client.group("s", f"g{start}", pattern="a", start="earliest") as member:
                left = [b"1", *[b"7"] * copies]
                while left:
                    batch = member.next_batch(WAIT_MS)
                    assert batch is not None
                    for body in batch.bodies():
                        assert body == b"x" or body == left.pop(0)
                    member.ack(batch)
            if start == 1:
                with client.inbox("box") as inbox:
                    assert [bytes(next(iter(inbox)).body)] == [b"mail"]
            assert broker.server.failure is None
