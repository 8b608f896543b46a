"""Batches that are none, though they came as they are stored: each is named and passed over."""

from __future__ import annotations

import random
import zlib
from typing import Any

import google_crc32c
import pytest

from malamute_protocol import codec
from malamute_protocol import commands as c
from malamute_protocol.batch import encode, row_bitmap
from malamute_protocol.errors import BatchError
from malamute_protocol.stamp import DERIVED, Stamp
from malamute_py.client.session.inbox_options import InboxOptions
from malamute_py.client.session.letters import RequestFailed
from malamute_py.client.session.offer_options import OfferOptions
from malamute_py.client.session.offering import RequestBase
from malamute_py.client.session.subscription import Arrival, GapNotice
from tests.client.script import Script, stamped
from tests.client.session.conversation import accept, opened, outcomes, warnings
from tests.client.session.grouped import Grouped
from tests.client.session.test_mail import ask
from tests.protocol.hostile import craft, ints, packed

BAD = craft(4, subjects=packed(["a", "b"]), subjects_count=2, subject_codes=[0, 1, 7, -9])
BOMB = craft(4, body=b"", body_raw=1 << 31, codec=1)
FALLS = craft(4, body=ints([0, 9, 3, 900, 4]) + b"xxxx")
RUBBISH = craft(4, body=b"g" * 400, body_raw=100, codec=1)
SHORT = craft(4, body=zlib.compress(ints(range(5)), wbits=31), body_raw=24, codec=1)
FALLS_INSIDE = craft(
    4, body=zlib.compress(ints([0, 9, 3, 900, 4]) + b"xxxx", wbits=31), body_raw=24, codec=1
)
UNREADABLE = pytest.mark.parametrize(
    "bad", [BAD, BOMB, FALLS, RUBBISH, SHORT, FALLS_INSIDE],
    ids=["codes", "bomb", "offsets", "rubbish", "short", "offsets inside"],
)  # fmt: skip


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


@UNREADABLE
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
    assert reading.credit().credit_bytes == reading.request.credit_bytes + sum(
        map(len, (*frames, *stamped(bad, 15), *stamped(encode([b"x"], subject="a"), 19)))
    )


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


def test_of_a_derived_batch_that_is_none_a_member_is_told_all_that_it_may_have_had() -> None:
    script = Grouped()
    stamp, content = stamped(BAD, 4)
    derived = Stamp.unpack(stamp)._replace(flags=DERIVED).pack()
    script.say(c.Deliver(script.member.number, 4, 25, 2), frames=[derived, content])
    gap = script.member.take()
    assert isinstance(gap, GapNotice)
    assert (gap.from_offset, gap.to_offset) == (4, 25)
    derived = Stamp.unpack(stamp)._replace(flags=DERIVED, base_offset=30).pack()
    frames = [derived + content, *stamped(good(2), 40)]
    script.say(c.Deliver(script.member.number, 30, 50, 3), frames=frames)
    gap = script.member.take()
    assert isinstance(gap, GapNotice)
    assert (gap.from_offset, gap.to_offset) == (30, 40), "the next batch is no part of it"


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


@UNREADABLE
def test_a_member_names_records_that_nobody_can_read_and_is_done_with_them(bad: bytes) -> None:
    script = Grouped()
    before = script.member.credit()
    rows = row_bitmap([True, False, True, True])
    frames = stamped(bad, 4)
    out = script.say(c.Deliver(script.member.number, 4, 8, 2, rows), frames=frames)
    after = script.member.credit()
    assert after.credit_records - before.credit_records == 3
    assert after.credit_bytes - before.credit_bytes == sum(map(len, frames))
    out += script.step()
    (ack,) = [command for command in out if isinstance(command, c.AckRecords)]
    assert (ack.ranges, ack.again_ms) == ([(4, 5), (6, 8)], -1)
    gap = script.member.take()
    assert isinstance(gap, GapNotice)
    assert (gap.from_offset, gap.to_offset, gap.code) == (4, 8, "damaged")
    script.hand(1, 8)
    assert script.take().base_offset == 8


@UNREADABLE
def test_mail_that_no_reader_can_read_is_named_and_keeps_nothing_else_back(bad: bytes) -> None:
    script = opened()
    view = script.session.mailboxes.read(InboxOptions("box", 10, 1 << 20, {}))
    script.step()
    accept(script)
    number = script.last(c.OpenInbox).subscription
    for base, content in ((0, bad), (4, good(1))):
        script.say(c.Mail(number, "bob", 1, 2), frames=stamped(content, base))
    found = view.take()
    assert found is not None
    # All was taken, and the broker may send as much again, in records and in bytes.
    came = sum(len(frame) for frame in (*stamped(bad, 0), *stamped(good(1), 4)))
    credit = view.mailbox.credit()
    assert (credit.credit_records, credit.credit_bytes) == (10 + 5, (1 << 20) + came)
    assert found[1].base_offset == 4
    assert not view.mailbox.queue
    (line,) = warnings(script)
    assert "cannot be read" in line
    assert "4 from 0 of box" in line
    assert not [command for command, _ in script.heard if isinstance(command, c.AckMail)]


@UNREADABLE
def test_requests_that_no_worker_can_read_are_failed_by_name(bad: bytes) -> None:
    script = opened()
    offering = script.session.offerings.offer(OfferOptions("svc", ["all"], 4), RequestBase)
    script.step()
    accept(script, c.Offer)
    work = c.Work(offering.number, "bob", "", 0, 1, 30_000, 2, b"\x05", b"k")
    before = offering.credit()
    out = script.say(work, frames=stamped(bad, 8)) + script.step()
    after = offering.credit()
    assert after.credit_records - before.credit_records == 2
    assert after.credit_bytes - before.credit_bytes == sum(map(len, stamped(bad, 8)))
    (ack,) = [command for command in out if isinstance(command, c.AckWork)]
    assert (ack.ranges, ack.state) == ([(8, 9), (10, 11)], c.WorkState.FAILED)
    assert ack.reason.startswith("unreadable: ")
    assert "cannot be read" in warnings(script)[0]
    work = c.Work(offering.number, "bob", "", 0, 1, 30_000, 2, None, b"k")
    script.say(work, frames=stamped(good(1), 12))
    assert [job.number for job in offering.queue] == [12]


@UNREADABLE
def test_a_reply_that_cannot_be_read_fails_its_request_by_name(bad: bytes) -> None:
    script = opened()
    for n in range(4):
        ask(script, b"%d" % n)
    script.step()
    accept(script)
    script.step()
    request = script.last(c.Request)
    number = script.last(c.OpenInbox).subscription
    mail = c.Mail(number, "bob", 1, 2, None, [(request.key, 0, 4)], last=True)
    out = script.say(mail, frames=stamped(bad, 0)) + script.step()
    found = outcomes(script)
    assert len(found) == 4
    assert all(isinstance(error, RequestFailed) for error in found.values())
    assert all(error.why.startswith("unreadable: ") for error in found.values())
    assert [ack.ranges for ack in out if isinstance(ack, c.AckMail)] == [[(0, 4)]]
    assert not script.session.awaited.asked


def test_a_codec_without_its_package_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> bytes:
        raise ImportError(name="zstandard")

    monkeypatch.setitem(codec._DECODERS, 4, missing)
    script = Script()
    script.open()
    reading = script.subscribe()
    script.accept(reading)
    content = encode([b"g" * 100] * 4, subject="a", codec=1)
    as_zstd = bytearray(content)
    as_zstd[20] = 4
    as_zstd[8:12] = google_crc32c.value(bytes(as_zstd[12:])).to_bytes(4, "little")
    script.say(c.Deliver(reading.number, 0, 4, 2), frames=stamped(bytes(as_zstd), 0))
    arrival = reading.take()
    assert isinstance(arrival, Arrival)
    assert arrival.batch is not None
    with pytest.raises(BatchError, match=r"pip install 'malamute-py\[codecs\]'"):
        arrival.batch.bodies()


@pytest.mark.parametrize(("body", "times"), [(random.Random(1).randbytes(64), 1), (b"g" * 4000, 2)])
def test_bodies_are_decompressed_once_unless_that_would_take_much_more_than_the_credit(
    body: bytes, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    gunzip = codec._DECODERS[1]

    def counted(*given: Any) -> bytes:
        calls.append(given)
        return bytes(gunzip(*given))

    monkeypatch.setitem(codec._DECODERS, 1, counted)
    script = Script()
    script.open()
    reading = script.subscribe()
    script.accept(reading)
    content = encode([body] * 4, subject="a", codec=1)
    script.say(c.Deliver(reading.number, 0, 4, 2), frames=stamped(content, 0))
    arrival = reading.take()
    assert isinstance(arrival, Arrival)
    assert arrival.batch is not None
    assert [record.body for record in arrival.batch] == [body] * 4
    assert arrival.batch.bodies() == [body] * 4
    assert len(calls) == times
