"""The session's subscriptions: covers, credit, notices, resuming."""

from __future__ import annotations

from malamute_protocol import commands as c
from malamute_protocol.errors import BatchError, BrokerRefused, RemoteProtocolError
from malamute_py.client.position import Position
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.subscription import (
    Arrival,
    BegunNotice,
    GapNotice,
    Item,
    ModeNotice,
    RewoundNotice,
    SubscriptionState,
)
from tests.client.script import STREAM_UUID, Script
from tests.rows import bitmap_of_rows


def reading_script(**changes: object) -> tuple[Script, SubscriptionState]:
    script = Script()
    script.open()
    reading = script.subscribe(**changes)
    script.accept(reading)
    return script, reading


def taken(reading: SubscriptionState) -> list[Item]:
    items = []
    while (item := reading.take()) is not None:
        items.append(item)
    return items


def offsets(reading: SubscriptionState) -> list[int]:
    return [
        int(offset)
        for item in taken(reading)
        if isinstance(item, Arrival) and item.batch is not None
        for offset in item.batch.offsets
    ]


def test_records_come_in_order_and_move_the_position() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0)
    script.deliver(reading, [b"c"], 2)
    assert offsets(reading) == [0, 1, 2]
    assert reading.position == Position(STREAM_UUID, 1, 3)


def test_an_empty_cover_moves_the_position_behind_what_waits() -> None:
    script, reading = reading_script()
    script.say(c.Cover(reading.number, 0, 10))
    assert reading.position == Position(STREAM_UUID, 1, 10)
    script.deliver(reading, [b"a"], 10)
    script.say(c.Cover(reading.number, 11, 20))
    assert reading.position == Position(STREAM_UUID, 1, 10)
    taken(reading)
    assert reading.position == Position(STREAM_UUID, 1, 20)


def test_a_cover_that_does_not_begin_where_the_last_ended_ends_reader_and_link() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a"], 0)
    script.deliver(reading, [b"c"], 2)
    assert script.state() is LinkState.WAITING
    assert [item.next for item in taken(reading) if isinstance(item, Arrival)] == [1]
    assert isinstance(reading.error, RemoteProtocolError)
    assert reading.ended


def test_another_subscription_survives_the_broken_one() -> None:
    script, reading = reading_script()
    other = script.subscribe()
    script.accept(other)
    script.deliver(reading, [b"c"], 2)
    script.wait(60_000)
    resumed = [command for command in script.open() if isinstance(command, c.Subscribe)]
    assert [command.subscription for command in resumed] == [other.number]


def test_rows_outside_their_cover_are_an_error() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0, next=1)
    assert isinstance(reading.error, RemoteProtocolError)


def test_selected_rows_lie_in_their_cover() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b", b"c"], 0, rows=bitmap_of_rows([1], 3), next=2)
    assert offsets(reading) == [1]
    assert reading.next == 2


def test_a_corrupt_batch_reaches_nobody() -> None:
    script, reading = reading_script()
    frames = [b"\0" * 96, b"\0" * 136]
    script.say(c.Deliver(reading.number, 0, 1, 2), frames=frames)
    assert isinstance(reading.error, BatchError)
    assert taken(reading) == []


def test_credit_is_given_back_at_half_of_the_window_and_only_for_what_was_consumed() -> None:
    script, reading = reading_script(credit_records=10)
    for base in range(0, 8, 2):
        assert script.deliver(reading, [b"a", b"b"], base) == []
    given = []
    for _ in range(5):
        reading.take()
        script.session.consumed(reading)
        given += script.step()
    assert [type(command) for command in given] == [c.Credit]
    # six of eight were consumed: the item taken last still counts as being worked on
    assert given[0].credit_records == 16  # type: ignore[attr-defined]


def test_credit_by_bytes_works_alone() -> None:
    script, reading = reading_script(credit_bytes=1000, credit_records=1_000_000)
    script.deliver(reading, [b"x" * 600], 0)
    reading.take()
    assert not script.session.consumed(reading)
    reading.take()
    assert script.session.consumed(reading)
    [credit] = script.step()
    assert isinstance(credit, c.Credit)
    assert credit.credit_bytes > 1600


def test_a_reconnect_resumes_after_the_last_record_received() -> None:
    script, reading = reading_script(credit_records=100)
    script.deliver(reading, [b"a", b"b"], 0)
    [resumed] = script.reconnect()
    assert isinstance(resumed, c.Subscribe)
    assert resumed.start == [2, 2, 1, STREAM_UUID]
    assert resumed.credit_records == 98, "two records wait unconsumed"
    script.accept(reading, next=2, epoch=2)
    script.deliver(reading, [b"c"], 2)
    assert offsets(reading) == [0, 1, 2]
    assert reading.position == Position(STREAM_UUID, 2, 3)


def test_a_subscription_that_was_never_accepted_starts_as_it_was_asked_for() -> None:
    script = Script()
    script.open()
    script.subscribe(start="latest", until="tail")
    [again] = script.reconnect()
    assert isinstance(again, c.Subscribe)
    assert (again.start, again.until) == ([1], "tail")


def test_a_bounded_read_keeps_its_end_over_a_reconnect() -> None:
    script = Script()
    script.open()
    reading = script.subscribe(until="tail")
    script.accept(reading, tail=5, end=5)
    script.deliver(reading, [b"a"], 0)
    [again] = script.reconnect()
    assert isinstance(again, c.Subscribe)
    assert (again.until, again.end) == ("", 5)


def test_a_gap_a_rewind_and_a_mode_come_as_notices_in_their_place() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a"], 0)
    script.say(c.Gap(reading.number, 1, 5, "retention"))
    script.deliver(reading, [b"b"], 5)
    script.say(c.Mode(reading.number, True, 6))
    items = taken(reading)
    assert items[1] == GapNotice(1, 5, "retention")
    assert items[3] == ModeNotice(True, 6)
    assert reading.live


def test_a_rewound_log_is_told_once_and_reading_goes_on_there() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0)
    taken(reading)
    script.reconnect()
    script.accept(reading, next=1, epoch=2)
    script.say(c.Rewound(reading.number, 2, 1, 2))
    script.deliver(reading, [b"c"], 1)
    items = taken(reading)
    assert items[0] == RewoundNotice(2, 1, 2)
    assert isinstance(items[1], Arrival)
    assert len(items) == 2


def test_a_position_before_an_unconsumed_rewind_names_the_epoch_it_was_seen_in() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0)
    script.deliver(reading, [b"c", b"d"], 2)
    reading.take()
    assert reading.position == Position(STREAM_UUID, 1, 2)
    script.reconnect()
    # The log lost 1 to 4 and grows again: (epoch 2, offset 2) would be a place beyond them.
    script.accept(reading, next=1, epoch=2)
    assert reading.position == Position(STREAM_UUID, 1, 2)
    script.say(c.Rewound(reading.number, 4, 1, 2))
    assert reading.position == Position(STREAM_UUID, 1, 2)
    reading.take()
    assert reading.position == Position(STREAM_UUID, 1, 4)
    assert reading.take() == RewoundNotice(4, 1, 2)
    assert reading.position == Position(STREAM_UUID, 2, 1)


def test_the_position_of_a_closed_reading_keeps_its_epoch() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0)
    script.reconnect()
    script.accept(reading, next=1, epoch=2)
    script.say(c.Rewound(reading.number, 2, 1, 2))
    reading.closed_at(reading.position)
    assert reading.position == Position(STREAM_UUID, 1, 0)


def test_a_first_subscription_that_is_rewound_is_where_the_broker_put_it() -> None:
    script = Script()
    script.open()
    reading = script.subscribe(start=Position(STREAM_UUID, 1, 9))
    script.accept(reading, next=4, epoch=2)
    script.say(c.Rewound(reading.number, 9, 4, 2))
    assert reading.position == Position(STREAM_UUID, 2, 4)
    assert taken(reading) == [RewoundNotice(9, 4, 2)]


def test_a_rewind_to_behind_the_own_place_is_told_as_a_rewind_only() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0)
    taken(reading)
    script.reconnect()
    # The epoch ended at 1, and retention has taken everything before 7 since.
    script.accept(reading, next=7, first=7, epoch=2)
    script.say(c.Rewound(reading.number, 2, 7, 2))
    assert taken(reading) == [RewoundNotice(2, 7, 2)]
    assert reading.position == Position(STREAM_UUID, 2, 7)


def test_a_rewind_and_the_gap_behind_it_are_told_apart() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0)
    taken(reading)
    script.reconnect()
    # The epoch ended at 1, and retention has taken everything before 7 since.
    script.accept(reading, next=1, first=7, epoch=2)
    script.say(c.Rewound(reading.number, 2, 1, 2))
    script.say(c.Gap(reading.number, 1, 7, "retention", ""))
    assert reading.position == Position(STREAM_UUID, 1, 2)
    assert taken(reading) == [RewoundNotice(2, 1, 2), GapNotice(1, 7, "retention")]
    assert reading.position == Position(STREAM_UUID, 2, 7)


def test_another_stream_under_the_same_name_is_a_rewind_not_a_gap() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a", b"b"], 0)
    script.reconnect()
    script.say(c.Subscribed(reading.number, b"t" * 16, 2, 7, 7, 9))
    assert reading.position == Position(STREAM_UUID, 1, 0)
    script.say(c.Rewound(reading.number, 2, 7, 2))
    assert [item for item in taken(reading) if not isinstance(item, Arrival)] == [
        RewoundNotice(2, 7, 2)
    ]
    assert reading.position == Position(b"t" * 16, 2, 7)


def test_a_resume_behind_the_oldest_record_is_a_gap_even_when_nobody_names_it() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a"], 0)
    script.reconnect()
    script.accept(reading, next=9, first=9)
    assert taken(reading)[-1] == GapNotice(1, 9, "retention")


def test_a_gap_named_after_the_resume_is_told_once() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a"], 0)
    script.reconnect()
    script.accept(reading, next=9, first=9)
    script.say(c.Gap(reading.number, 1, 9, "damaged", "sector"))
    notices = [item for item in taken(reading) if isinstance(item, GapNotice)]
    assert notices == [GapNotice(1, 9, "damaged", "sector")]


def test_a_refused_subscription_fails_its_reader_only() -> None:
    script = Script()
    script.open()
    reading = script.subscribe()
    script.say(c.Refused(12, reading.number, "forbidden", "not yours"))
    assert isinstance(reading.error, BrokerRefused)
    assert reading.ended
    assert script.state() is LinkState.LINKED


def test_a_resume_that_must_wait_is_tried_again() -> None:
    script, reading = reading_script()
    script.reconnect()
    assert script.say(c.Refused(12, reading.number, "wait", "busy", 300)) == []
    [again] = script.wait(300)
    assert isinstance(again, c.Subscribe)
    assert not reading.ended


def test_the_end_comes_after_what_waits() -> None:
    script, reading = reading_script()
    script.deliver(reading, [b"a"], 0)
    script.say(c.Ended(reading.number, 1, "end"))
    assert reading.ended
    assert offsets(reading) == [0]
    assert reading.error is None


def test_a_stream_removed_under_a_reader_is_its_error() -> None:
    script, reading = reading_script()
    script.say(c.Ended(reading.number, 0, "stream_removed"))
    assert isinstance(reading.error, BrokerRefused)


def test_what_crosses_an_unsubscribe_is_left_alone() -> None:
    script, reading = reading_script()
    script.session.unsubscribe(reading)
    assert script.step() == [c.Unsubscribe(reading.number)]
    script.deliver(reading, [b"late"], 0)
    assert not reading.inbox
    script.say(c.Ended(reading.number, 0, "cancelled"))
    script.deliver(reading, [b"later"], 1)
    assert script.state() is LinkState.LINKED
    assert reading.number not in script.session.receivers.by_number


def test_a_reader_from_earliest_is_told_what_retention_took_and_told_once() -> None:
    script = Script()
    script.open()
    reading = script.subscribe()
    script.accept(reading, next=7, first=7, tail=9)
    script.deliver(reading, [b"a"], 7)
    assert [type(item) for item in taken(reading)] == [BegunNotice, Arrival]
    script.reconnect()
    script.accept(reading, next=8, first=8, tail=9)
    assert taken(reading) == []


def test_a_reader_of_a_stream_that_begins_at_1_is_told_nothing_of_what_never_was() -> None:
    script = Script()
    script.open()
    reading = script.subscribe()
    script.say(c.Subscribed(reading.number, STREAM_UUID, 1, 1, 1, 9, begin=1))
    assert taken(reading) == []


def test_a_reader_from_elsewhere_or_of_a_whole_stream_is_told_nothing() -> None:
    for start, next in ((3, 7), ("latest", 7), ("earliest", 0)):
        script = Script()
        script.open()
        reading = script.subscribe(start=start)
        script.accept(reading, next=next, first=next, tail=9)
        assert not any(isinstance(item, BegunNotice) for item in taken(reading))
