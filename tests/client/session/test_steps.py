"""Atomic steps in the session: how they merge, and what becomes of each."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import Content, encode
from malamute_protocol.commands import Command
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
)
from malamute_protocol.limits import RANGES_MAX
from malamute_py.client.position import Confirmation, Position
from malamute_py.client.session.acknowledgements import AckForm
from malamute_py.client.session.events import Settled
from malamute_py.client.session.step import Step
from tests.client.script import STREAM_UUID, Script, bodies_of

TIME_MS = 1_700_000_000_000


class Bag:
    """A holder of numbers in hand, as an inbox is one."""

    def __init__(self, number: int, held: set[int]) -> None:
        self.number = number
        self.held = held
        self.gone: set[int] = set()
        self.back: list[int] = []

    def ack_command(self, form: AckForm, ranges: list[tuple[int, int]], tracker: int) -> Command:
        if form.state:
            again_ms = max(0, form.again_ms)
            return c.AckWork(self.number, ranges, form.state, tracker, 0, again_ms, form.reason)
        return c.AckMail(self.number, ranges, tracker, 0, form.again_ms)

    def lend(self, numbers: list[int]) -> None:
        if not self.held.issuperset(numbers):
            raise BrokerRefused("not_held")
        self.held.difference_update(numbers)

    def settled(self, numbers: list[int]) -> None:
        self.gone.update(numbers)

    def lost_to_others(self, numbers: list[int]) -> None:
        pass

    def regained(self, numbers: list[int]) -> None:
        self.held.update(numbers)

    def give_back(self, numbers: list[int]) -> None:
        self.held.difference_update(numbers)
        self.back += numbers


class Item:
    """A message or a request in hand."""

    sender, reply_to = "ann", "desk"

    def __init__(self, opened: Bag, number: int) -> None:
        self.opened = opened
        self.number = number


class Stepping(Script):
    """A session whose broker has said WELCOME, and what became of its steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.open()

    def add(self, step: Step, token: str = "") -> Step:
        self.session.steps.add(step, token)
        return step

    def sent(self) -> list[list[tuple[Command, tuple[Any, ...]]]]:
        """Every ATOMIC that was heard so far, each with its parts."""
        found = []
        for place, (command, _) in enumerate(self.heard):
            if isinstance(command, c.Atomic):
                found.append(self.heard[place : place + 1 + command.count])
        return found

    def settled(self) -> dict[str, Any]:
        """Token -> outcome, of what was settled since the last call."""
        found = [
            pair for event in self.happened if isinstance(event, Settled) for pair in event.pairs
        ]
        self.happened = [event for event in self.happened if not isinstance(event, Settled)]
        return dict(found)

    def taken(self, atomic: Command, offset: int = 70, **more: Any) -> None:
        assert isinstance(atomic, c.Atomic)
        self.say(c.Confirm(atomic.tracker, 3, 1, offset, TIME_MS, **more))

    def refuse(self, atomic: Command, code: str, retry_ms: int = 0) -> list[Command]:
        assert isinstance(atomic, c.Atomic)
        return self.say(c.Refused(66, atomic.tracker, code, "as the test wants", retry_ms))


def published(body: bytes, stream: str = "out") -> Step:
    step = Step()
    step.publish(stream, body, subject="a")
    return step


def moved(next: int, since: int | None = None, cursor: str = "c") -> Step:
    step = Step()
    step.move_cursor("in", cursor, next, since=since)
    return step


def parts(sent: list[tuple[Command, tuple[Any, ...]]]) -> list[Command]:
    return [command for command, _ in sent[1:]]


def contents(sent: list[tuple[Command, tuple[Any, ...]]]) -> list[list[bytes]]:
    return [bodies_of(Content(frame)) for _, frames in sent[1:] for frame in frames]


def code_of(outcome: Any) -> str:
    assert isinstance(outcome, BrokerRefused), outcome
    return outcome.code


def test_a_step_leaves_as_one_atomic_with_its_parts_behind_it() -> None:
    script = Stepping()
    inbox, offer = Bag(7, {4, 5}), Bag(8, {20, 21})
    step = Step("stored")
    step.publish("out", b"one", subject="a.b")
    step.send("desk", b"two", priority=3, deliver_at_ms=2_000_000_000_099)
    asked = step.request("resize", b"three", subject="png", timeout_ms=500)
    step.reply(Item(offer, 20), b"four")
    step.complete(Item(offer, 21))
    step.ack(Item(inbox, 4))
    step.move_cursor("in", "c", Position(STREAM_UUID, 1, 40), since=30)
    script.add(step, "t")
    script.step()
    [sent] = script.sent()
    atomic = sent[0][0]
    assert isinstance(atomic, c.Atomic)
    assert (atomic.count, atomic.level, len(atomic.key)) == (7, 2, 16)
    assert len(asked.key) == 16
    assert asked.row == 0
    assert parts(sent) == [
        c.Publish("out", 0),
        c.Send("desk", 0, 0, b"", 2_000_000_000_099, 3),
        c.Request("resize", 0, "", 500, 0, asked.key),
        c.Reply(8, [20], 0, True),
        c.AckWork(8, [(21, 22)], 3),
        c.AckMail(7, [(4, 5)]),
        c.MoveCursor("in", "c", 40, 0, 0, False, STREAM_UUID, 1, 30),
    ]
    assert contents(sent) == [[b"one"], [b"two"], [b"three"], [b"four"]]
    script.taken(atomic)
    assert script.settled() == {"t": Confirmation(70, 1, "synced", TIME_MS)}
    assert step.confirmation == Confirmation(70, 1, "synced", TIME_MS)
    assert (inbox.gone, offer.gone) == ({4}, {20, 21})
    assert script.session.idle


def test_steps_that_wait_together_are_merged_place_by_place() -> None:
    script = Stepping()
    inbox = Bag(7, set(range(100)))
    asked = []
    for n in range(10):
        step = published(b"p%d" % n)
        step.publish("other", b"o%d" % n)
        asked.append(step.request("resize", b"r%d" % n))
        step.ack(Item(inbox, n))
        step.move_cursor("in", "c", n + 1, since=n)
        script.add(step, str(n))
    script.step()
    [sent] = script.sent()
    publish, other, request, ack, move = parts(sent)
    assert publish == c.Publish("out", 0)
    assert other == c.Publish("other", 0)
    assert isinstance(request, c.Request)
    assert [each.about for each in asked] == [(request.key, row) for row in range(10)]
    assert ack == c.AckMail(7, [(0, 10)])
    assert move == c.MoveCursor("in", "c", 10, 0, from_=0)
    assert contents(sent) == [[b"%s%d" % (x, n) for n in range(10)] for x in (b"p", b"o", b"r")]
    script.taken(sent[0][0], 500)
    assert [outcome.offset for outcome in script.settled().values()] == list(range(500, 510))


def test_a_step_names_what_it_acknowledges_in_as_many_commands_as_it_needs() -> None:
    script = Stepping()
    script.reconnect(batch_records_max=65_536)
    numbers = range(0, 2 * RANGES_MAX + 2, 2)
    inbox = Bag(7, set(numbers))
    step = published(b"x")
    for number in numbers:
        step.ack(Item(inbox, number))
    script.add(step, "step")
    script.step()
    [sent] = script.sent()
    _, *acks = parts(sent)
    ranges = [ack.ranges for ack in acks if isinstance(ack, c.AckMail)]
    assert [len(each) for each in ranges] == [RANGES_MAX, 1]
    assert [first for each in ranges for first, _ in each] == list(numbers)


def test_a_merged_step_that_is_refused_goes_again_in_halves_until_each_has_its_own_answer() -> None:
    script = Stepping()
    inbox = Bag(7, set(range(8)))
    steps = []
    for n in range(8):
        step = published(b"%d" % n)
        step.ack(Item(inbox, n))
        steps.append(script.add(step, str(n)))
    script.step()
    open_ = script.sent()
    keys = set()
    told: dict[str, Any] = {}
    while open_:
        sent, *open_ = open_
        [rows] = contents(sent)
        atomic = sent[0][0]
        assert isinstance(atomic, c.Atomic)
        keys.add(atomic.key)
        before = len(script.sent())
        if b"5" in rows:
            script.refuse(atomic, "not_held")
        else:
            script.taken(atomic)
        open_ += script.sent()[before:]
        told |= script.settled()
    assert len(keys) == len(script.sent()) == 7
    assert code_of(told.pop("5")) == "not_held"
    assert {type(outcome) for outcome in told.values()} == {Confirmation}
    assert set(told) == set("0123467")
    assert inbox.held == {5}
    assert inbox.gone == {0, 1, 2, 3, 4, 6, 7}


def test_an_unanswered_step_leaves_again_with_the_same_bytes_under_the_same_key() -> None:
    script = Stepping()
    script.add(published(b"one"), "1")
    script.add(published(b"two"), "2")
    script.step()
    script.reconnect()
    script.add(published(b"three"), "3")
    script.step()
    first, again, new = script.sent()
    assert isinstance(first[0][0], c.Atomic)
    assert isinstance(again[0][0], c.Atomic)
    assert again[0][0].key == first[0][0].key
    assert again[1:] == first[1:]
    assert contents(new) == [[b"three"]]
    script.taken(again[0][0], duplicate=True, offset=-1)
    told = script.settled()
    assert set(told) == {"1", "2"}
    assert all(outcome.duplicate and outcome.offset == -1 for outcome in told.values())


def test_what_waited_for_a_link_is_merged_when_it_comes() -> None:
    script = Script()
    script.session.steps.add(published(b"one"), "1")
    script.session.steps.add(published(b"two"), "2")
    assert script.step() == []
    script.open()
    script.step()
    assert [type(command) for command, _ in script.heard[-2:]] == [c.Atomic, c.Publish]


def test_a_step_that_is_put_off_goes_again_when_the_broker_said() -> None:
    script = Stepping()
    script.add(published(b"one"), "1")
    script.step()
    script.refuse(script.sent()[0][0][0], "wait", 500)
    assert script.session.next_wake() == script.now_ms + 500
    assert script.wait(499) == []
    script.add(published(b"two"), "2")
    script.step()
    assert contents(script.sent()[-1]) == [[b"two"]]
    script.wait(1)
    assert contents(script.sent()[-1]) == [[b"one"]]
    script.taken(script.sent()[-1][0][0])
    assert set(script.settled()) == {"1"}


def test_a_place_that_is_full_holds_back_only_the_steps_that_need_it() -> None:
    script = Stepping()
    full = Step()
    full.send("full", b"x")
    script.add(published(b"one"), "1")
    script.add(full, "full")
    script.step()
    script.refuse(script.sent()[-1][0][0], "wait", 50)
    script.wait(50)
    _, first, second = script.sent()
    script.taken(first[0][0])
    script.refuse(second[0][0], "wait", 50)
    assert set(script.settled()) == {"1"}
    script.add(published(b"two"), "2")
    script.wait(50)
    assert [parts(each) for each in script.sent()[3:]] == [
        [c.Send("full", 0)],
        [c.Publish("out", 0)],
    ]


def test_moves_of_a_cursor_that_do_not_follow_each_other_are_not_merged() -> None:
    script = Stepping()
    for name, step in {
        "a": moved(10, 0),
        "b": moved(20, 10),
        "c": moved(30),
        "d": moved(25),
        "e": moved(40, 30),
        "f": moved(5, cursor="other"),
    }.items():
        script.add(step, name)
    script.step()
    assert [parts(sent) for sent in script.sent()] == [
        [c.MoveCursor("in", "c", 30, 0, from_=0)],
        [c.MoveCursor("in", "c", 25, 0)],
        [c.MoveCursor("in", "c", 40, 0, from_=30), c.MoveCursor("in", "other", 5, 0)],
    ]


def test_a_step_of_a_name_of_its_own_leaves_alone() -> None:
    script = Stepping()
    named = Step(key=b"order 17")
    named.publish("out", b"named")
    script.add(published(b"before"), "1")
    script.add(named, "2")
    script.add(published(b"behind"), "3")
    script.step()
    before, alone, behind = script.sent()
    assert isinstance(alone[0][0], c.Atomic)
    assert alone[0][0].key == b"order 17"
    assert [contents(each) for each in (before, alone, behind)] == [
        [[b"before"]], [[b"named"]], [[b"behind"]],
    ]  # fmt: skip


def test_steps_of_different_levels_are_not_merged() -> None:
    script = Stepping()
    script.add(published(b"one"), "1")
    stored = Step("stored")
    stored.publish("out", b"two")
    script.add(stored, "2")
    script.step()
    assert [sent[0][0].level for sent in script.sent() if isinstance(sent[0][0], c.Atomic)] == [
        0,
        2,
    ]


def test_a_row_that_cannot_be_encoded_fails_its_own_step_only() -> None:
    script = Stepping()
    bad = Step()
    bad.publish("out", b"bad", properties={"a": "x" * 70_000})
    script.add(published(b"one"), "1")
    script.add(bad, "bad")
    script.add(published(b"two"), "2")
    script.step()
    told = script.settled()
    assert list(told) == ["bad"]
    assert isinstance(told["bad"], LocalProtocolError)
    assert sorted(body for sent in script.sent() for [body] in contents(sent)) == [b"one", b"two"]


def test_a_step_that_is_withdrawn_before_it_left_does_not_leave() -> None:
    script = Stepping()
    inbox = Bag(7, {1})
    gone = published(b"gone")
    gone.ack(Item(inbox, 1))
    script.add(published(b"kept"), "1")
    script.add(gone, "2")
    script.session.steps.withdraw(gone)
    assert (inbox.held, inbox.back) == (set(), [1])
    script.step()
    [sent] = script.sent()
    assert contents(sent) == [[b"kept"]]
    script.taken(sent[0][0])
    assert set(script.settled()) == {"1"}
    assert script.session.window.queued_bytes == script.session.window.unconfirmed_bytes == 0


def test_a_step_that_is_withdrawn_after_it_left_may_still_be_taken() -> None:
    script = Stepping()
    inbox = Bag(7, {1})
    step = published(b"gone")
    step.ack(Item(inbox, 1))
    script.add(step, "1")
    script.step()
    script.session.steps.withdraw(step)
    assert inbox.held == set()
    script.taken(script.sent()[0][0][0])
    assert (inbox.gone, script.settled()) == ({1}, {})


def test_who_acknowledges_in_a_step_acknowledges_nowhere_else() -> None:
    inbox = Bag(7, {1, 2})
    first, second = Step(), Step()
    first.ack(Item(inbox, 1))
    with pytest.raises(BrokerRefused, match="not_held"):
        second.ack(Item(inbox, 1))
    first.give_up()
    second.ack(Item(inbox, 1))
    with pytest.raises(LocalProtocolError, match="given up already"):
        first.ack(Item(inbox, 2))
    with pytest.raises(LocalProtocolError, match="came from no inbox"):
        second.ack(b"something else")  # type: ignore[arg-type]


def test_one_step_moves_a_cursor_once_and_to_an_offset() -> None:
    step = moved(5)
    with pytest.raises(LocalProtocolError, match="moves cursor 'c' already"):
        step.move_cursor("in", "c", 6)
    with pytest.raises(LocalProtocolError, match="bad_start"):
        step.move_cursor("in", "d", -1)


def test_a_step_is_confirmed_or_it_is_none() -> None:
    with pytest.raises(LocalProtocolError, match="bad_setting"):
        Step("none")
    with pytest.raises(LocalProtocolError, match="too_large"):
        Step(key=b"k" * 129)


def test_many_records_go_into_a_step_column_by_column() -> None:
    script = Stepping()
    step = Step()
    step.publish_many(
        "out", [b"a", b"b", b"c"], subject=["x", "y", "x"], fields={"k": "1"}, properties=None
    )
    with pytest.raises(LocalProtocolError, match="2 values in subject for 1 records"):
        step.publish_many("out", [b"d"], subject=["x", "y"])
    step.publish_many("out", [])
    script.add(step)
    script.step()
    [sent] = script.sent()
    content = Content(sent[1][1][0])
    assert bodies_of(content) == [b"a", b"b", b"c"]
    assert content.head.subjects_count == 2


def test_the_window_holds_steps_back_until_something_is_confirmed() -> None:
    script = Stepping(window_bytes=4096)
    for n in range(4):
        script.add(published(b"%d" % n * 3000), str(n))
        script.step()
    assert len(script.sent()) == 1
    assert not script.session.window.has_room()
    for n in range(4):
        assert len(script.sent()) == n + 1
        script.taken(script.sent()[-1][0][0])
    assert len(script.settled()) == 4
    assert script.session.window.unconfirmed_bytes == script.session.window.queued_bytes == 0


def test_a_step_beyond_the_brokers_limits_is_refused_before_anything_is_sent() -> None:
    script = Stepping()
    inbox = Bag(7, {1})
    large = published(b"x" * (1 << 20))
    large.ack(Item(inbox, 1))
    many = Step()
    many.publish_many("out", [b""] * 1001)
    wide = Step()
    for n in range(100):
        wide.publish(f"s{n}", b"")
    for step in (large, many, wide):
        with pytest.raises(LocalProtocolError, match="too_large"):
            script.add(step)
    assert inbox.held == {1}
    assert script.step() == []


def test_an_encoded_content_is_a_part_as_it_is_and_its_step_is_merged_with_no_other() -> None:
    script = Stepping()
    content = encode([b"a", b"b"], subject="s")
    for name in ("1", "2", "3"):
        step = published(b"x")
        if name == "2":
            step.publish_batch("out", content)
            step.publish_batch("log", content)
        script.add(step, name)
    script.step()
    assert [len(sent) - 1 for sent in script.sent()] == [1, 3, 1]
    for sent in script.sent():
        script.taken(sent[0][0])
    parts = script.sent()[1][1:]
    assert [part.stream for part, _ in parts if isinstance(part, c.Publish)] == [
        "out", "out", "log",
    ]  # fmt: skip
    assert [bytes(frame) for frame in parts[1][1]] == [content]
    assert set(script.settled()) == {"1", "2", "3"}


def test_a_content_with_a_producer_is_refused_as_a_part() -> None:
    step = Step()
    with pytest.raises(LocalProtocolError, match="no producer"):
        step.publish_batch("out", encode([b"a"], producer_id=7))
    with pytest.raises(LocalProtocolError, match="not an encoded batch content"):
        step.publish_batch("out", b"x")
    assert not step.parts


def test_the_end_of_the_session_fails_every_step() -> None:
    script = Stepping()
    inbox = Bag(7, {1, 2})
    for number in (1, 2):
        step = Step()
        step.ack(Item(inbox, number))
        script.add(step, str(number))
        if number == 1:
            script.step()
    script.session.close()
    script.step()
    assert {type(outcome) for outcome in script.settled().values()} == {ConnectionLost}
    with pytest.raises(MalamuteError):
        script.add(published(b"late"))
    assert inbox.held == {1, 2}
    assert script.session.window.queued_bytes == script.session.window.unconfirmed_bytes == 0


def test_a_cursor_of_a_stream_in_memory_is_moved_by_a_command_alone() -> None:
    script = Stepping()
    script.add(moved(10, 3), "1")
    script.step()
    [command] = script.refuse(script.sent()[0][0][0], "cross_ring")
    assert command == c.MoveCursor("in", "c", 10, script.last(c.MoveCursor).tracker, from_=3)
    assert script.last(c.MoveCursor).tracker
    script.reconnect()
    assert len(script.sent()) == 1
    script.say(c.Confirm(script.last(c.MoveCursor).tracker, 1, 1, 0, TIME_MS))
    assert script.settled()["1"].level == "none"


def test_a_step_that_crosses_rings_is_refused_when_it_is_more_than_a_move() -> None:
    script = Stepping()
    script.add(published(b"x"), "1")
    script.step()
    script.refuse(script.sent()[0][0][0], "cross_ring")
    assert code_of(script.settled()["1"]) == "cross_ring"


def test_a_condition_of_a_move_is_not_met_by_a_move_that_was_withdrawn() -> None:
    script = Stepping()
    script.add(moved(50), "1")
    script.session.steps.withdraw(script.add(moved(100, 50), "2"))
    script.add(moved(150, 100), "3")
    script.step()
    moves = [part for sent in script.sent() for part in parts(sent)]
    assert [(move.next, move.from_) for move in moves if isinstance(move, c.MoveCursor)] == [
        (50, -1), (150, 100),
    ]  # fmt: skip


def test_a_move_for_a_stream_in_memory_leaves_alone_though_a_step_beside_it_was_withdrawn() -> None:
    script = Stepping()
    script.add(moved(10, 3), "1")
    script.session.steps.withdraw(script.add(published(b"x"), "2"))
    script.step()
    [command] = script.refuse(script.sent()[0][0][0], "cross_ring")
    assert isinstance(command, c.MoveCursor)


def test_an_acknowledgement_in_several_commands_is_done_as_a_whole_or_not_at_all() -> None:
    script = Stepping()
    script.reconnect(batch_records_max=65_536)
    numbers = range(0, 2 * RANGES_MAX + 2, 2)
    inbox = Bag(7, set(numbers))
    step = Step()
    for number in numbers:
        step.ack(Item(inbox, number))
    script.add(step, "1")
    script.step()
    assert script.refuse(script.sent()[0][0][0], "cross_ring") == []
    assert code_of(script.settled()["1"]) == "cross_ring"
    assert inbox.held == set(numbers)


def test_records_of_a_step_keep_the_order_of_the_calls_whatever_their_form() -> None:
    script = Stepping()
    script.reconnect(batch_records_max=65_536)
    step = Step()
    for number in range(6):
        step.publish("out", b"%d" % number, codec="gzip" if number % 3 else None)
    step.publish("other", b"plain")
    step.publish_batch("out", encode([b"6"]))
    step.publish("out", b"7")
    step.send("desk", b"8")
    step.send("desk", [b"9"])
    step.send("desk", b"10")
    script.add(step, "1")
    script.step()
    [sent] = script.sent()
    places = [part.stream if isinstance(part, c.Publish) else "desk" for part in parts(sent)]
    assert places == [
        "out", "out", "out", "out", "other", "out", "out", "desk", "desk", "desk",
    ]  # fmt: skip
    assert contents(sent)[:7] == [
        [b"0"], [b"1", b"2"], [b"3"], [b"4", b"5"], [b"plain"], [b"6"], [b"7"],
    ]  # fmt: skip


def test_a_reply_that_others_follow_leaves_before_the_last_one() -> None:
    script = Stepping()
    offer = Bag(8, {20, 21})
    step = Step()
    step.reply(Item(offer, 20), b"one")
    step.reply(Item(offer, 21), b"part", last=False)
    step.reply(Item(offer, 21), b"end")
    script.add(step, "1")
    script.step()
    [sent] = script.sent()
    assert parts(sent) == [c.Reply(8, [21], 0, False), c.Reply(8, [20, 21], 0, True)]


def test_a_reply_that_others_follow_leaves_before_its_request_is_done() -> None:
    """The acknowledgement of an earlier request took that of this one along, before its reply."""
    script = Stepping()
    offer = Bag(8, {20, 21, 22})
    step, before = Step(), Step()
    step.complete(Item(offer, 20))
    step.reply(Item(offer, 21), b"part", last=False)
    step.complete(Item(offer, 21))
    before.complete(Item(offer, 22))
    script.add(before, "1")
    script.add(step, "2")
    script.step()
    _, sent = script.sent()
    assert parts(sent)[0] == c.Reply(8, [21], 0, False)


@pytest.mark.parametrize("codec", [None, "gzip"])
def test_replies_to_many_requests_are_few_parts_whatever_their_turns(codec: str | None) -> None:
    """A part for each was too many for a step from 257 requests on."""
    script = Stepping()
    numbers = range(20, 30)
    offer = Bag(8, set(numbers))
    step = Step()
    step.reply(Item(offer, 20), b"first")
    for number in numbers[1:]:
        step.reply(Item(offer, number), b"part", last=False)
        step.reply(Item(offer, number), b"end", codec=codec if number == 29 else None)
    script.add(step, "1")
    script.step()
    [sent] = script.sent()
    most = [*numbers] if codec is None else [*numbers[:-1]]
    assert parts(sent) == [
        c.Reply(8, [*numbers[1:]], 0, False), c.Reply(8, most, 0, True),
        *([] if codec is None else [c.Reply(8, [29], 0, True)]),
    ]  # fmt: skip


def test_steps_are_merged_only_as_far_as_their_records_keep_their_order() -> None:
    script = Stepping()
    forms = [None, None, "gzip", "gzip", None]
    for number, codec in enumerate(forms):
        step = Step()
        step.publish("out", b"%d" % number, codec=codec)
        step.publish("other", b"%d" % number)
        script.add(step, str(number))
    script.step()
    found = [contents(sent) for sent in script.sent()]
    assert [each[0] for each in found] == [[b"0", b"1"], [b"2", b"3"], [b"4"]]


def test_a_move_by_a_command_alone_that_may_have_been_done_is_not_said_to_be_refused() -> None:
    for lost in (True, False):
        script = Stepping()
        script.add(moved(10, 3), "1")
        script.step()
        script.refuse(script.sent()[0][0][0], "cross_ring")
        if lost:
            script.reconnect()
        move = script.last(c.MoveCursor)
        script.say(c.Refused(66, move.tracker, "conflict", "cursor 'c' stands at 10"))
        told = script.settled()["1"]
        assert isinstance(told, ConnectionLost if lost else BrokerRefused)


def test_requests_of_a_step_keep_the_order_of_the_calls_where_their_terms_agree() -> None:
    script = Stepping()
    step = Step()
    for body, reply_to in ((b"a", "x"), (b"b", "y"), (b"c", "x"), (b"d", "y")):
        step.request("jobs", body, reply_to=reply_to)
    script.add(step)
    script.step()
    [sent] = script.sent()
    assert [part.reply_to for part in parts(sent) if isinstance(part, c.Request)] == ["x", "y"]
    assert contents(sent) == [[b"a", b"c"], [b"b", b"d"]]
