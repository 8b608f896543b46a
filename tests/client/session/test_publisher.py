"""The session's publishing: gathering, window, sequences, retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import Content, encode
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_protocol.framing import NUMBERS, encode_message
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.outgoing import RETRY_MS
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.rows import OutgoingRow
from tests.client.script import Script, bodies_of


def opened(**options: object) -> Script:
    script = Script(**options)
    script.open()
    return script


def ready(**options: object) -> Script:
    """A linked session whose producer 7 is open."""
    script = opened(**options)
    script.publish(b"first")
    script.step()
    [publish] = script.open_producer() or script.wait(100)
    assert isinstance(publish, c.Publish)
    script.confirm(publish, 0)
    script.outcomes()
    script.heard.clear()
    return script


def publishes(commands: list[c.Command]) -> list[c.Publish]:
    return [command for command in commands if isinstance(command, c.Publish)]


def test_records_gathered_since_the_last_step_leave_as_one_batch_in_order() -> None:
    script = ready()
    for number in range(5):
        script.publish(b"%d" % number, subject=f"s.{number % 2}", fields={"n": str(number)})
    [publish] = publishes(script.step())
    content = script.contents()[-1]
    content.verify()
    assert bodies_of(content) == [b"0", b"1", b"2", b"3", b"4"]
    script.confirm(publish, 40)
    [(tokens, confirm)] = script.outcomes()
    assert tokens == [b"0", b"1", b"2", b"3", b"4"]
    assert confirm.offset == 40


def test_a_gathering_is_cut_at_the_batch_size_and_by_level() -> None:
    script = ready(batch_bytes=1000)
    for _ in range(3):
        script.publish(b"x" * 400)
    script.publish(b"y", confirm="stored")
    assert [publish.level for publish in publishes(script.step())] == [3, 3, 2]


def test_linger_waits_for_company_and_no_longer() -> None:
    script = ready(linger_ms=20)
    script.publish(b"a")
    assert script.step() == []
    assert script.session.next_wake() == script.now_ms + 20
    script.wait(10)
    script.publish(b"b")
    assert script.step() == []
    [publish] = publishes(script.wait(10))
    assert bodies_of(script.contents()[-1]) == [b"a", b"b"]
    assert publish.tracker


def test_records_that_come_fast_gather_until_a_confirm() -> None:
    script = ready()
    script.wait(1)
    for body in (b"a", b"b"):
        script.publish(body)
        assert len(publishes(script.step())) == 1
    first = publishes([command for command, _ in script.heard])[0]
    for body in (b"c", b"d"):
        script.publish(body)
        assert script.step() == []
    script.confirm(first, 1)
    assert bodies_of(script.contents()[-1]) == [b"c", b"d"]


def test_records_that_come_fast_gather_for_a_millisecond_at_most() -> None:
    script = ready()
    script.wait(1)
    for body in (b"a", b"b", b"c"):
        script.publish(body)
        script.step()
    assert script.session.next_wake() == script.now_ms + 1
    assert len(publishes(script.wait(1))) == 1
    # However long a sync takes: who publishes once a millisecond is never held up.
    for body in (b"d", b"e", b"f"):
        script.wait(1)
        script.publish(body)
        script.step()
        assert bodies_of(script.contents()[-1]) == [body]


def test_records_that_nobody_confirms_never_wait_for_company() -> None:
    script = ready()
    script.wait(1)
    for body in (b"a", b"b", b"c", b"d"):
        script.publish(body, confirm="none")
        script.step()
        assert bodies_of(script.contents()[-1]) == [body]


def test_records_that_gather_are_not_overtaken_by_what_is_asked_for_later() -> None:
    script = ready()
    script.wait(1)
    session = script.session
    asks: list[Callable[[], Any]] = [
        lambda: session.request(lambda request: c.StreamInfo(request, "s"), None),
        lambda: session.outbox.send("box", OutgoingRow(b"m", 1, "", b"m"), 3),
    ]
    for ask in asks:
        for body in (b"a", b"b", b"held"):
            script.publish(body)
            script.step()
        assert bodies_of(script.contents()[-1]) == [b"b"]
        ask()
        sent = script.step()
        assert isinstance(sent[0], c.Publish)
        assert len(sent) == 2
        script.wait(1)


def test_what_gathered_for_many_streams_leaves_in_one_turn() -> None:
    script = ready()
    script.wait(1)
    streams = [f"s{number}" for number in range(50)]
    for turn in range(3):
        for stream in streams:
            script.publish(b"%d" % turn, stream)
        assert len(publishes(script.step())) == (50 if turn < 2 else 0)
    assert len(publishes(script.wait(1))) == 50


def test_enough_records_wait_for_no_more_company() -> None:
    script = ready()
    script.wait(1)
    for size in (1, 1, 1 << 16):
        script.publish(b"x" * size)
        assert len(publishes(script.step())) == 1


def test_the_producer_is_opened_once_and_sequences_count_per_stream() -> None:
    script = opened()
    script.publish(b"a", "one")
    assert [type(command) for command in script.step()] == [c.OpenProducer]
    script.publish(b"b", "one")
    script.open_producer()
    script.publish(b"c", "two")
    script.publish(b"d", "one")
    script.step()
    heads = [content.head for content in script.contents()]
    assert [head.producer_id for head in heads] == [7, 7, 7]
    assert [(head.first_sequence, head.count) for head in heads] == [(0, 2), (0, 1), (2, 1)]


def test_nothing_is_published_beyond_the_window_and_a_confirm_opens_it() -> None:
    script = ready()
    script.reconnect(window_bytes=1000)
    for number in range(3):
        script.publish_content([b"x" * 300], token=number)
    assert not script.session.window.has_room()
    script.step()
    [first] = publishes(script.open_producer(s=1))
    assert script.step() == []
    [second] = publishes(script.confirm(first, 0))
    assert second.tracker > first.tracker
    assert script.session.publisher.window.unconfirmed_bytes <= 1000


def test_a_stream_that_always_has_more_does_not_starve_another() -> None:
    script = ready()
    script.reconnect(window_bytes=1000)
    for _ in range(5):
        script.publish_content([b"x" * 600], "greedy")
    script.publish_content([b"x" * 600], "modest")
    script.step()
    sent = publishes(script.open_producer())
    for offset in range(2):
        script.publish_content([b"x" * 600], "greedy")
        sent += publishes(script.confirm(sent[-1], offset))
    assert "modest" in [publish.stream for publish in sent]


def test_one_batch_larger_than_the_window_goes_when_nothing_else_is_unconfirmed() -> None:
    script = ready()
    script.reconnect(window_bytes=100)
    script.publish_content([b"x" * 300])
    script.step()
    assert len(publishes(script.open_producer(s=1))) == 1


def test_unconfirmed_batches_are_sent_again_with_the_same_bytes_after_a_reconnect() -> None:
    script = ready()
    script.publish(b"a")
    script.step()
    script.publish(b"b")
    script.step()
    before = [bytes(content.view) for content in script.contents()]
    script.heard.clear()
    [asked] = script.reconnect()
    assert isinstance(asked, c.OpenProducer)
    assert (asked.id, asked.fence) == (7, False)
    # the broker has the first of them already
    again = publishes(script.open_producer(s=2))
    assert [bytes(content.view) for content in script.contents()] == before
    script.confirm(again[0], 1, duplicate=True)
    script.confirm(again[1], 2)
    assert [(tokens, outcome.offset) for tokens, outcome in script.outcomes()] == [
        ([b"a"], 1),
        ([b"b"], 2),
    ]


def test_a_log_that_lost_confirmed_records_gets_the_sequence_that_it_expects() -> None:
    script = ready()
    script.publish(b"a")
    script.step()
    script.reconnect()
    script.open_producer()  # sequence 0 was confirmed, but a power loss took it
    assert script.contents()[-1].head.first_sequence == 0
    script.contents()[-1].verify()


@pytest.mark.parametrize("code", ["unknown_producer", "too_large"])
def test_a_producer_that_cannot_go_on_is_replaced_and_counted(code: str) -> None:
    """A client of very many streams, whose sequences no answer can have, wrote nothing any more."""
    script = ready()
    script.publish(b"a")
    script.step()
    [asked] = script.reconnect()
    assert isinstance(asked, c.OpenProducer)
    [fresh] = script.say(c.Refused(22, asked.request, code, "who?"))
    assert isinstance(fresh, c.OpenProducer)
    assert fresh.id == 0
    script.open_producer(number=9)
    head = script.contents()[-1].head
    assert (head.producer_id, head.first_sequence) == (9, 0)
    assert script.session.publisher.producers_lost == 1


def test_a_refused_batch_fails_and_its_successors_take_its_sequences() -> None:
    script = ready()
    for body in (b"bad", b"two", b"three"):
        script.publish(body)
        script.wait(1)
    bad, two, three = publishes([command for command, _ in script.heard])
    script.say(c.Refused(10, bad.tracker, "bad_batch", "not today"))
    script.say(c.Refused(10, two.tracker, "out_of_sequence"))
    assert script.outcomes()[0][0] == [b"bad"]
    [asked] = script.say(c.Refused(10, three.tracker, "out_of_sequence"))
    assert isinstance(asked, c.OpenProducer)
    again = publishes(script.open_producer(s=1))
    contents = script.contents()[-2:]
    assert [bodies_of(content) for content in contents] == [[b"two"], [b"three"]]
    assert [content.head.first_sequence for content in contents] == [1, 2]
    for content in contents:
        content.verify()
    for offset, publish in enumerate(again):
        script.confirm(publish, offset)
    assert [tokens for tokens, _ in script.outcomes()] == [[b"two"], [b"three"]]


def test_a_batch_that_must_wait_is_sent_again_later_with_the_same_bytes() -> None:
    script = ready()
    script.publish(b"a")
    script.step()
    script.publish(b"b")
    script.step()
    first, second = publishes([command for command, _ in script.heard])
    before = [bytes(content.view) for content in script.contents()]
    script.say(c.Refused(10, first.tracker, "wait", "busy", 500))
    script.publish(b"c")
    assert script.step() == []
    assert script.say(c.Refused(10, second.tracker, "out_of_sequence")) == []
    assert script.session.next_wake() == script.now_ms + 500
    [asked] = script.wait(500)
    assert isinstance(asked, c.OpenProducer)
    again = publishes(script.open_producer(s=1))
    assert [bytes(content.view) for content in script.contents()[2:4]] == before
    assert len(again) == 3
    assert all(publish.tracker > second.tracker for publish in again)
    assert script.outcomes() == []


def test_a_link_lost_amid_a_refusal_keeps_the_order() -> None:
    script = ready()
    for body in (b"a", b"b", b"c"):
        script.publish(body)
        script.step()
    first, *_ = publishes([command for command, _ in script.heard])
    script.say(c.Refused(10, first.tracker, "wait", "busy", 500))
    script.heard.clear()
    script.reconnect()
    script.open_producer(s=1)
    assert [bodies_of(content) for content in script.contents()] == [[b"a"], [b"b"], [b"c"]]
    assert [content.head.first_sequence for content in script.contents()] == [1, 2, 3]


def test_a_fenced_producer_ends_publishing_for_good() -> None:
    script = ready()
    script.publish(b"a")
    [publish] = publishes(script.step())
    script.publish(b"b")
    script.say(c.Refused(10, publish.tracker, "fenced", "newer epoch"))
    assert [tokens for tokens, _ in script.outcomes()] == [[b"a"], [b"b"]]
    with pytest.raises(BrokerRefused, match="fenced"):
        script.publish(b"c")


def test_publishing_without_confirm_needs_no_producer_and_no_tracker() -> None:
    script = opened()
    script.publish(b"a", confirm="none")
    [publish] = script.step()
    assert isinstance(publish, c.Publish)
    assert (publish.tracker, publish.level) == (0, 1)
    assert script.contents()[0].head.producer_id == 0
    [(tokens, confirm)] = script.outcomes()
    assert (tokens, confirm.offset) == ([b"a"], -1)
    script.say(c.Refused(10, 0, "wait"))
    assert script.session.publisher.unpromised_refusals == 1


@pytest.mark.parametrize("code", ["unknown_producer", "out_of_sequence", "fenced"])
def test_a_producer_of_the_callers_that_is_refused_is_the_callers_to_mend(code: str) -> None:
    script = opened(idempotent=False)
    content = encode([b"x"], subject="a", producer_id=77, first_sequence=0)
    level = level_number("synced")
    script.session.publisher.add_content("s", level, content, 1, "theirs")
    [publish] = publishes(script.step())
    assert script.say(c.Refused(10, publish.tracker, code, "who?")) == []
    [(_, refused)] = script.outcomes()
    assert isinstance(refused, BrokerRefused)
    assert refused.code == code
    assert script.wait(500) == []
    script.publish(b"mine")
    assert len(publishes(script.step())) == 1


def test_a_client_that_is_not_idempotent_sends_at_once() -> None:
    script = opened(idempotent=False)
    script.publish(b"a")
    [publish] = publishes(script.step())
    assert script.contents()[0].head.producer_id == 0
    script.say(c.Refused(10, publish.tracker, "wait", "", 100))
    [again] = publishes(script.wait(100))
    assert again.tracker > publish.tracker


def test_batches_of_a_callers_own_producer_follow_the_one_that_is_sent_again() -> None:
    script = opened(idempotent=False)
    for sequence in (0, 1):
        content = encode([b"a"], subject="a", producer_id=77, first_sequence=sequence)
        script.session.publisher.add_content("s", level_number("synced"), content, 1, sequence)
    first, second = publishes(script.step())
    script.say(c.Refused(10, first.tracker, "wait", "", 100))
    script.say(c.Refused(10, second.tracker, "out_of_sequence"))
    assert len(publishes(script.wait(100))) == 2
    assert [content.head.first_sequence for content in script.contents()[-2:]] == [0, 1]
    assert not script.outcomes()


def test_a_producer_that_is_forgotten_again_and_again_is_asked_for_with_pauses() -> None:
    script = ready()
    began_ms = script.now_ms
    script.publish(b"a")
    heard: list[c.Command] = script.step()
    refused = 0
    for _ in range(200):
        if not heard:
            heard = script.wait(RETRY_MS // 4)
        elif isinstance(heard[0], c.OpenProducer):
            heard = script.open_producer(number=100 + refused)
        else:
            [publish] = publishes(heard)
            heard = script.say(c.Refused(10, publish.tracker, "unknown_producer"))
            refused += 1
    assert 2 <= refused <= (script.now_ms - began_ms) // RETRY_MS + 1


def test_an_encoded_batch_gets_the_producer_and_keeps_its_bytes_otherwise() -> None:
    script = ready()
    original = Content(script.publish_content([b"one", b"two"], token="t"))
    [publish] = publishes(script.step())
    sent = script.contents()[-1]
    sent.verify()
    assert bodies_of(sent) == bodies_of(original)
    assert (sent.head.producer_id, sent.head.first_sequence) == (7, 1)
    script.confirm(publish, 1)
    assert script.outcomes()[0][0] == "t"


def test_expected_sequences_spare_the_restamping() -> None:
    script = ready()
    publisher = script.session.publisher
    script.publish(b"waiting")
    assert publisher.expected("s", 3) == (7, 0, 2)
    assert publisher.expected("other", 3) == (7, 0, 0)
    assert publisher.expected("s", 1) == (0, 0, 0)


def test_a_record_that_cannot_be_encoded_fails_alone() -> None:
    script = ready()
    script.publish(b"good")
    row = make_row(b"bad", "a", None, None, None, {"too much": "x" * 70_000}, b"bad")
    script.session.publisher.add("s", level_number("synced"), row)
    script.publish(b"fine")
    assert len(publishes(script.step())) == 2
    [(tokens, error)] = script.outcomes()
    assert tokens == [b"bad"]
    assert isinstance(error, LocalProtocolError)
    assert [bodies_of(content) for content in script.contents()] == [[b"good"], [b"fine"]]
    assert [content.head.first_sequence for content in script.contents()] == [1, 2]


def test_a_record_over_the_limit_is_raised_at_once_and_nothing_is_taken() -> None:
    script = ready()
    with pytest.raises(LocalProtocolError, match="too_large"):
        script.publish(b"x" * ((1 << 20) + 1))
    assert script.session.publisher.idle


def test_records_published_before_the_link_leave_with_it() -> None:
    script = Script()
    script.publish(b"early")
    assert [type(command) for command, _ in script.heard] == [c.Hello]
    assert [type(command) for command in script.open()] == [c.OpenProducer]
    assert len(publishes(script.open_producer())) == 1


def test_a_window_refusal_is_retried() -> None:
    script = ready()
    script.publish(b"a")
    [publish] = publishes(script.step())
    script.say(c.Refused(10, publish.tracker, "window"))
    script.wait(100)
    assert len(publishes(script.open_producer(s=1))) == 1


def test_a_window_that_is_full_asks_for_no_wake_in_the_past() -> None:
    script = ready(linger_ms=20)
    script.reconnect(window_bytes=1000)
    script.publish_content([b"x" * 800], token="large")
    script.step()
    [large] = publishes(script.open_producer(s=1))
    script.publish(b"y" * 300)
    script.step()
    script.wait(30)
    wake_ms = script.session.next_wake()
    assert wake_ms is not None
    assert wake_ms > script.now_ms
    assert publishes(script.confirm(large, 1))


def test_a_producer_that_must_wait_is_asked_for_again_and_nothing_fails() -> None:
    script = opened()
    script.publish(b"a")
    script.step()
    asked = script.last(c.OpenProducer)
    number = NUMBERS[c.OpenProducer]
    assert script.say(c.Refused(number, asked.request, "wait", "many questions", 50)) == []
    assert script.session.next_wake() == script.now_ms + 50
    assert script.wait(49) == []
    [again] = script.wait(1)
    assert isinstance(again, c.OpenProducer)
    assert publishes(script.open_producer())
    assert script.outcomes() == []


def test_a_producer_refused_for_now_fails_what_waits_and_is_asked_for_again() -> None:
    script = Script()
    script.open()
    script.publish(b"a")
    script.step()
    asked = script.last(c.OpenProducer)
    script.say(c.Refused(22, asked.request, "journal_failed", "a sync failed"))
    [(tokens, outcome)] = script.outcomes()
    assert tokens == [b"a"]
    assert isinstance(outcome, BrokerRefused)
    assert script.session.publisher.window.queued_bytes == 0
    script.publish(b"b")
    assert [type(command) for command in script.step()] == [c.OpenProducer]
    script.open_producer()
    assert script.last(c.Publish).stream == "s"


def test_what_nobody_confirms_keeps_within_the_window_by_pongs() -> None:
    script = Script(idempotent=False)
    script.open(window_bytes=10_000)
    for number in range(10):
        script.publish(bytes(2_000), stream=f"s{number}", confirm="none")
    sent = script.step()
    assert [type(command) for command in sent] == [c.Publish] * 4 + [c.Ping]
    rounds = 1
    while isinstance(sent[-1], c.Ping):
        assert script.step() == [], "nothing more without a PONG"
        sent = [*sent, *(script.say(c.Pong(sent[-1].token)) or [c.Bye()])]
        rounds += 1
    assert len(publishes(sent)) == 10
    assert rounds == 4
    # A link that is lost takes along what was on its way: the next one has the whole window.
    script.publish(bytes(2_000), stream="s", confirm="none")
    script.step()
    assert script.session.window.passing_bytes
    script.lose()
    assert not script.session.window.passing_bytes


def test_a_content_larger_than_the_window_that_nobody_confirms_leaves_alone() -> None:
    script = Script(idempotent=False)
    script.open(window_bytes=2_000)
    for number, size in enumerate((10, 3_000, 10)):
        script.publish(bytes(size), stream=f"s{number}", confirm="none")
    for _ in range(3):
        sent = script.step()
        # What follows is held back: a PING comes after the little that left, too.
        assert [type(command) for command in sent[:2]] == [c.Publish, c.Ping][: len(sent)]
        script.session.receive(
            encode_message([c.Pong(script.session._suspects._probe)]), script.now_ms
        )
    assert not script.session.window.queued_bytes
