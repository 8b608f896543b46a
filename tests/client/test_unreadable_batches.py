"""Batches that are none, though they came as they are stored: each is named and passed over."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode, row_bitmap
from malamute_protocol.stamp import DERIVED, Stamp
from malamute_py.client.mailboxes import Asked
from malamute_py.client.reading import Arrival, GapNotice
from malamute_py.client.work import Job, Offered
from tests.client.script import Script, stamped
from tests.client.test_groups import Grouped
from tests.client.test_session_mail import accept, opened, warnings
from tests.protocol.hostile import craft, ints, packed

BAD = craft(4, subjects=packed(["a", "b"]), subjects_count=2, subject_codes=[0, 1, 7, -9])
BOMB = craft(4, body=b"", body_raw=1 << 31, codec=1)
FALLS = craft(4, body=ints([0, 9, 3, 900, 4]) + b"xxxx")


def run(*contents: tuple[int, bytes]) -> list[bytes]:
    """Batches back to back, as a read of history leaves."""
    return [b"".join(part for base, content in contents for part in stamped(content, base))]


def good(count: int) -> bytes:
    return encode([b"g"] * count, subject="a")


def items(reading: Any) -> list[Any]:
    found: list[Any] = []
    while (item := reading.take()) is not None:
        if isinstance(item, Arrival):
            found.append((None if item.batch is None else item.batch.span(), item.next))
        elif isinstance(item, GapNotice):
            found.append((item.from_offset, item.to_offset, item.code))
    return found


@pytest.mark.parametrize("bad", [BAD, BOMB, FALLS], ids=["codes", "bomb", "offsets"])
def test_a_batch_that_is_none_is_a_gap_between_those_around_it(bad: bytes) -> None:
    script = Script()
    script.open()
    reading = script.subscribe()
    script.accept(reading)
    frames = run((0, good(2)), (2, bad), (6, good(1)), (9, bad))
    script.say(c.Deliver(reading.number, 0, 15, 1), frames=frames)
    assert items(reading) == [
        ((0, 2), 2), (2, 6, "damaged"), ((6, 7), 7), (9, 13, "damaged"), (None, 15),
    ]  # fmt: skip
    # Live, alone, with a bitmap; and what follows.
    script.say(c.Deliver(reading.number, 15, 19, 2, b"\x03"), frames=stamped(bad, 15))
    script.deliver(reading, [b"x"], 19)
    assert items(reading) == [(15, 19, "damaged"), ((19, 20), 20)]
    assert reading.error is None
    # What it took of the credit is the broker's again: 4 + 4 + 2 records in batches that are none.
    assert reading.credit().credit_records == 100 + 2 + 1 + 4 + 4 + 2 + 1


def test_a_bitmap_that_does_not_fit_its_batch_is_a_gap_too() -> None:
    script = Script()
    script.open()
    reading = script.subscribe()
    script.accept(reading)
    script.say(c.Deliver(reading.number, 0, 2, 2, b"\xff"), frames=stamped(good(2), 0))
    script.deliver(reading, [b"x"], 2)
    assert items(reading) == [(0, 2, "damaged"), ((2, 3), 3)]


def test_of_a_derived_batch_that_is_none_all_up_to_the_next_is_a_gap() -> None:
    script = Script()
    script.open()
    reading = script.subscribe()
    script.accept(reading)
    stamp, content = stamped(BAD, 1)
    derived = Stamp.unpack(stamp)._replace(flags=DERIVED).pack()
    frames = [derived + content, *stamped(good(2), 20)]
    script.say(c.Deliver(reading.number, 0, 25, 3), frames=frames)
    assert items(reading) == [(1, 20, "damaged"), ((20, 22), 25)]


def test_what_was_damaged_on_its_way_ends_the_link_and_is_asked_for_again() -> None:
    script = Script()
    script.open()
    reading = script.subscribe()
    script.accept(reading)
    stamp, content = stamped(good(2), 0)
    broken = content[:-1] + b"?"
    script.say(c.Deliver(reading.number, 0, 2, 2), frames=[stamp, broken])
    assert items(reading) == []
    assert reading.error is not None


def test_a_member_names_records_that_nobody_can_read_and_is_done_with_them() -> None:
    script = Grouped()
    rows = row_bitmap([True, False, True, True])
    out = script.say(c.Deliver(script.member.number, 4, 8, 2, rows), frames=stamped(BAD, 4))
    out += script.step()
    (ack,) = [command for command in out if isinstance(command, c.AckRecords)]
    assert (ack.ranges, ack.again_ms) == ([(4, 5), (6, 8)], -1)
    gap = script.member.take()
    assert isinstance(gap, GapNotice)
    assert (gap.from_offset, gap.to_offset, gap.code) == (4, 8, "damaged")
    script.hand(1, 8)
    assert script.take().base_offset == 8


def test_mail_that_no_reader_can_read_is_named_and_keeps_nothing_else_back() -> None:
    script = opened()
    view = script.session.mailboxes.read(Asked("box", 10, 1 << 20, {}))
    script.step()
    accept(script)
    number = script.last(c.OpenInbox).subscription
    for base, content in ((0, BAD), (4, good(1))):
        script.say(c.Mail(number, "bob", 1, 2), frames=stamped(content, base))
    found = view.mailbox.queue.popleft()
    assert found[1].base_offset == 4
    assert not view.mailbox.queue
    (line,) = warnings(script)
    assert "cannot be read" in line
    assert "4 from 0 of box" in line
    assert not [command for command, _ in script.heard if isinstance(command, c.AckMail)]


def test_requests_that_no_worker_can_read_are_failed_by_name() -> None:
    script = opened()
    offering = script.session.workings.offer(Offered("svc", ["all"], 4), Job)
    script.step()
    accept(script, c.Offer)
    work = c.Work(offering.number, "bob", "", 0, 1, 30_000, 2, b"\x05", b"k")
    out = script.say(work, frames=stamped(BAD, 8)) + script.step()
    (ack,) = [command for command in out if isinstance(command, c.AckWork)]
    assert (ack.ranges, ack.state) == ([(8, 9), (10, 11)], c.WorkState.FAILED)
    assert ack.reason.startswith("unreadable: ")
    assert "cannot be read" in warnings(script)[0]
    work = c.Work(offering.number, "bob", "", 0, 1, 30_000, 2, None, b"k")
    script.say(work, frames=stamped(good(1), 12))
    assert [job.number for job in offering.queue] == [12]
