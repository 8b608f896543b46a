"""The session's publishing to streams that take smaller batches than WELCOME says."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode, encode_arrow, encode_lists, iter_batches
from malamute_protocol.content import Content
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.events import Published
from malamute_py.client.session.publisher import level_number
from tests.client.script import Script, bodies_of, stamped

LIMIT = 600
"""Most bytes of a batch of stream "s", as far as the broker tells it."""


def ready(**options: Any) -> Script:
    """A linked session whose producer 7 is open, if it has one."""
    script = Script(**options)
    script.open()
    script.publish(b"first")
    script.step()
    if options.get("idempotent", True):
        told(script, None)
    script.wait(options.get("linger_ms", 0))
    [publish] = publishes(script)
    script.confirm(publish, 0)
    script.wait(10)
    script.happened.clear()
    script.heard.clear()
    return script


def numbers(count: int) -> list[bytes]:
    return [b"%04d" % number for number in range(count)]


def publishes(script: Script) -> list[c.Publish]:
    """Batches that were sent since the last call."""
    found = [command for command, _ in script.heard if isinstance(command, c.Publish)]
    script.heard.clear()
    return found


def told(script: Script, most: int | None, **following: int) -> list[c.Command]:
    """Answer OPEN_PRODUCER; most: bytes of a batch of stream "s", 0: as WELCOME says."""
    asked = script.last(c.OpenProducer)
    script.heard.clear()
    value: dict[str, Any] = {"id": 7, "epoch": 0, "next": following}
    if most is not None:
        value["batch_bytes_max"] = {"s": most} if most else {}
    return script.say(c.Result(asked.request, value))


def refuse(script: Script, publish: c.Publish, code: str = "too_large") -> list[c.Command]:
    return script.say(c.Refused(10, publish.tracker, code, "a small ring"))


def sizes(script: Script) -> list[int]:
    return [STAMP_BYTES + len(content.view) for content in script.contents()]


def sent(script: Script) -> list[tuple[int, list[bytes]]]:
    """First sequence and bodies of each batch, all of them whole."""
    for content in script.contents():
        content.verify()
    return [(content.head.first_sequence, bodies_of(content)) for content in script.contents()]


def settled(script: Script) -> list[Published]:
    found = [event for event in script.happened if isinstance(event, Published)]
    script.happened.clear()
    return found


def follow(batches: list[tuple[int, list[bytes]]], first: int, bodies: list[bytes]) -> None:
    """Assert that batches have these bodies in order, under sequences from `first` on."""
    for sequence, group in batches:
        assert sequence == first
        first += len(group)
    assert [body for _, group in batches for body in group] == bodies


@pytest.mark.parametrize("most", [None, LIMIT], ids=["untold", "told"])
def test_records_that_are_too_large_together_leave_in_parts(most: int | None) -> None:
    script = ready()
    bodies = numbers(100)
    for body in bodies:
        script.publish(body)
    script.step()
    [size] = sizes(script)
    [publish] = publishes(script)
    refuse(script, publish)
    told(script, most, s=1)
    assert max(sizes(script)) <= (most or size // 2)
    batches = sent(script)
    follow(batches, 1, bodies)
    for (first, group), part in zip(batches, publishes(script), strict=True):
        script.confirm(part, 10 * first)
        [event] = settled(script)
        assert event.tokens == group, "each caller gets the place of its own record"
        assert isinstance(event.outcome, c.Confirm)
        assert event.outcome.offset == 10 * first
    window = script.session.publisher.window
    assert (window.unconfirmed_bytes, window.queued_bytes) == (0, 0)
    assert script.session.publisher.idle


@pytest.mark.parametrize("most", [None, LIMIT], ids=["untold", "told"])
def test_a_content_that_is_too_large_leaves_in_parts_with_all_columns(most: int | None) -> None:
    script = ready()
    bodies = numbers(100)
    columns: Any = {
        "subject": [f"s.{number % 7}" for number in range(100)],
        "fields": [{"n": str(number)} if number % 3 else None for number in range(100)],
        "client_time_ms": list(range(100)),
        "expires_at_ms": [10**13 + number for number in range(100)],
        "properties": [{"p": number} for number in range(100)],
        "codec": "zstd",
    }
    content = encode_lists([[body, b"x"] for body in bodies], **columns)
    script.session.publisher.add_content("s", level_number("synced"), content, 100, "theirs")
    script.step()
    [publish] = publishes(script)
    refuse(script, publish)
    told(script, most, s=1)
    row = 0
    for cut in script.contents():
        cut.verify()
        assert cut.head.first_sequence == 1 + row
        assert cut.head.codec
        [batch] = iter_batches(stamped(bytes(cut.view), 0))
        for record in batch.records():
            assert [bytes(blob) for blob in record.parts] == [bodies[row], b"x"]
            assert record.subject == columns["subject"][row]
            assert record.fields == (columns["fields"][row] or {})
            assert record.client_time_ms == row
            assert record.expires_at_ms == columns["expires_at_ms"][row]
            assert record.properties == {"p": row}
            row += 1
    assert row == 100
    parts = publishes(script)
    assert len(parts) > 1
    for part in parts:
        script.confirm(part, 0)
    events = settled(script)
    assert {event.tokens for event in events} == {"theirs"}
    assert sum(event.count for event in events) == 100


def test_later_batches_are_held_to_what_the_stream_takes_and_others_are_not() -> None:
    script = ready()
    script.publish_content(numbers(100), token="t")
    script.step()
    refuse(script, publishes(script)[0])
    told(script, LIMIT, s=1)
    for part in publishes(script):
        script.confirm(part, 0)
    script.wait(10)
    for body in numbers(100):
        script.publish(body)
    script.publish_content(numbers(100), token="t")
    script.step()
    follow(sent(script), 101, numbers(100) * 2)
    assert max(sizes(script)) <= LIMIT
    gathered = sent(script)[:9]
    assert [len(group) for _, group in gathered] == [11] * 9, "filled to half, not cut afterwards"
    script.heard.clear()
    script.publish_content(numbers(100), "other", token="t")
    script.step()
    [size] = sizes(script)
    assert size > LIMIT
    assert script.session.publisher.batch_bytes_of("s") == LIMIT // 2
    assert script.session.publisher.batch_bytes_of("other") == 4096


def test_batches_behind_the_refused_one_keep_their_order_and_leave_in_parts() -> None:
    script = ready()
    bodies = numbers(250)
    for first in range(0, 200, 50):
        script.publish_content(bodies[first : first + 50], token=first)
    script.step()
    [large, *behind] = publishes(script)
    refuse(script, large)
    script.publish_content(bodies[200:], token=200)
    script.step()
    assert not script.contents(), "nothing leaves before the batches under way are answered"
    for publish in behind:
        refuse(script, publish, "out_of_sequence")
    told(script, LIMIT, s=1)
    follow(sent(script), 1, bodies)
    assert max(sizes(script)) <= LIMIT
    for part in publishes(script):
        script.confirm(part, 0)
    events = settled(script)
    assert [event.tokens for event in events] == sorted(event.tokens for event in events)
    assert not any(isinstance(event.outcome, BrokerRefused) for event in events)


@pytest.mark.parametrize("lost", ["refusal", "parts"])
def test_a_link_lost_amid_the_division_repeats_no_record(lost: str) -> None:
    script = ready()
    bodies = numbers(100)
    script.publish_content(bodies[:50], token="a")
    script.publish_content(bodies[50:], token="b")
    script.step()
    first, second = publishes(script)
    taken = 0
    if lost == "parts":
        refuse(script, first)
        refuse(script, second, "out_of_sequence")
        told(script, None, s=1)
        # The broker takes the first part, and its confirm is lost.
        taken = len(sent(script)[0][1])
    script.reconnect()
    told(script, LIMIT if lost == "parts" else None, s=1 + taken)
    if lost == "refusal":
        again, behind = publishes(script)
        refuse(script, again)
        refuse(script, behind, "out_of_sequence")
        told(script, LIMIT, s=1)
    batches = sent(script)
    follow(batches, 1, bodies)
    if taken:
        assert batches[0] == (1, bodies[:taken]), "the same bytes again: a duplicate"
    for part in publishes(script):
        script.confirm(part, 0)
    assert sum(event.count for event in settled(script)) == 100
    assert script.session.publisher.idle


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("most", [None, LIMIT], ids=["untold", "told"])
def test_every_part_of_puts_makes_no_stream_also_on_the_next_link(
    most: int | None, idempotent: bool
) -> None:
    script = ready(idempotent=idempotent)
    for body in numbers(100):
        script.publish(body, keyed=True)
    script.step()
    [puts] = publishes(script)
    refuse(script, puts)
    if idempotent:
        told(script, most, s=1)
    parts = publishes(script)
    script.reconnect()
    if idempotent:
        told(script, most, s=1)
    again = publishes(script)
    assert len(again) == len(parts) > 1
    assert all(part.keyed for part in [puts, *parts, *again])


def test_a_put_and_a_plain_record_leave_in_batches_of_their_own() -> None:
    script = ready()
    for body, keyed in ((b"1", True), (b"2", False), (b"3", True)):
        script.publish(body, keyed=keyed)
    script.step()
    assert [batch for _, batch in sent(script)] == [[b"1"], [b"2"], [b"3"]]
    assert [publish.keyed for publish in publishes(script)] == [True, False, True]


def test_a_batch_that_the_log_has_is_not_divided_by_what_is_told_later() -> None:
    script = ready()
    script.publish_content(numbers(100), token="t")
    script.step()
    [before] = sent(script)
    script.reconnect()
    told(script, LIMIT, s=101)
    assert sent(script) == [before]


def test_a_batch_that_waited_in_doubt_is_not_divided_while_the_log_may_have_it() -> None:
    script = ready()
    script.publish_content(numbers(100), token="t")
    script.step()
    [before] = sent(script)
    script.reconnect()
    told(script, None, s=101)
    refuse(script, publishes(script)[0], "wait")
    script.wait(100)
    told(script, LIMIT, s=101)
    assert sent(script) == [before]


@pytest.mark.parametrize("waits", [False, True])
def test_a_doubtful_batch_over_the_limits_of_a_new_link_fails_rather_than_come_twice(
    waits: bool,
) -> None:
    script = ready()
    script.publish_content(numbers(100), token="t")
    script.step()
    script.reconnect(batch_bytes_max=1000)
    told(script, None, s=101)
    if waits:
        refuse(script, publishes(script)[0], "wait")
        script.wait(100)
        told(script, None, s=101)
    refuse(script, publishes(script)[0])
    [event] = settled(script)
    assert isinstance(event.outcome, BrokerRefused)


def test_only_a_record_that_does_not_fit_alone_is_refused() -> None:
    script = ready()
    bodies = [b"a", b"x" * 2000, b"b"]
    for body in bodies:
        script.publish(body)
    script.step()
    refuse(script, publishes(script)[0])
    told(script, LIMIT, s=1)
    outcomes: dict[bytes, Any] = {}
    for _ in range(10):
        for size, part in zip(sizes(script), publishes(script), strict=True):
            if size > LIMIT:
                refuse(script, part)
            elif b"x" * 2000 in outcomes or b"a" not in outcomes:
                script.confirm(part, 0)
            else:
                refuse(script, part, "out_of_sequence")
        for event in settled(script):
            outcomes |= dict.fromkeys(event.tokens, event.outcome)
        if script.session.publisher.idle:
            break
        if script.heard and isinstance(script.heard[-1][0], c.OpenProducer):
            told(script, LIMIT, s=2)
    assert isinstance(outcomes[b"x" * 2000], BrokerRefused)
    assert isinstance(outcomes[b"a"], c.Confirm)
    assert isinstance(outcomes[b"b"], c.Confirm)


def test_a_record_that_a_codec_makes_fit_leaves_whole() -> None:
    script = ready()
    script.publish_content(numbers(100), token="t")
    script.step()
    refuse(script, publishes(script)[0])
    told(script, LIMIT, s=1)
    for part in publishes(script):
        script.confirm(part, 0)
    content = encode([bytes(5000), bytes(5000)], subject="a", codec="zstd")
    script.session.publisher.add_content("s", level_number("synced"), content, 2, "t")
    script.session.publisher.take_sizes("s", {"s": 260})
    script.step()
    assert max(sizes(script)) <= 260
    assert [content.head.count for content in script.contents()] == [1, 1]


def test_a_stream_takes_large_batches_again_once_the_broker_says_so() -> None:
    script = ready()
    script.publish_content(numbers(100), token="t")
    script.step()
    refuse(script, publishes(script)[0])
    told(script, LIMIT, s=1)
    for part in publishes(script):
        script.confirm(part, 0)
    script.publish_content(numbers(100), token="t")
    script.reconnect()
    told(script, 0, s=101)
    script.publish_content(numbers(100), token="t")
    script.step()
    assert script.contents()[-1].head.count == 100


def test_a_size_that_the_broker_tells_and_refuses_all_the_same_ends_in_halves() -> None:
    script = ready()
    script.publish_content(numbers(64), token="t")
    script.step()
    taken: list[tuple[int, list[bytes]]] = []
    refused = True
    while refused:
        refused = False
        found = list(zip(sizes(script), sent(script), strict=True))
        for publish, (size, batch) in zip(publishes(script), found, strict=True):
            if refused:
                refuse(script, publish, "out_of_sequence")
            elif size > 400:
                refuse(script, publish)
                refused = True
            else:
                script.confirm(publish, batch[0])
                taken.append(batch)
        if refused:
            told(script, 1 << 20, s=1 + sum(len(bodies) for _, bodies in taken))
    follow(taken, 1, numbers(64))


def test_a_batch_that_is_refused_for_what_it_holds_makes_no_other_smaller() -> None:
    """The code comes for other reasons than the stream's ring, too."""
    script = ready()
    script.publish_content(numbers(64), token="t")
    script.step()
    refuse(script, publishes(script)[0])
    told(script, 0, s=1)
    assert [len(bodies) for _, bodies in sent(script)] == [32, 32]
    for publish, (first, _) in zip(publishes(script), [(1, 0), (33, 0)], strict=True):
        script.confirm(publish, first)
    script.publish_content(numbers(64), token="u")
    script.step()
    assert [len(bodies) for _, bodies in sent(script)] == [64]


def test_a_change_of_a_key_behind_a_divided_batch_gets_the_next_sequence() -> None:
    """Its old one was another record's by then: that record was refused as a conflict."""
    script = ready()
    script.publish_content(numbers(50), token="t")
    row = make_row(b"new", "k", None, None, None, None, "u", None)
    script.session.publisher.add_update("s", level_number("default"), row, 3)
    script.publish(b"tail")
    script.step()
    first, update, last = [command for command, _ in script.heard]
    assert isinstance(update, c.UpdateKey)
    script.heard.clear()
    refuse(script, first)  # type: ignore[arg-type]
    for command in (update, last):
        refuse(script, command, "out_of_sequence")  # type: ignore[arg-type]
    told(script, LIMIT, s=1)
    found = [Content(memoryview(frames[0])).head for _, frames in script.heard if frames]
    assert [(head.first_sequence, head.count) for head in found] == [
        (1, 25), (26, 25), (51, 1), (52, 1)
    ]  # fmt: skip


def test_without_a_producer_the_parts_leave_once_the_rest_is_answered() -> None:
    script = ready(idempotent=False)
    script.publish_content(numbers(100), token="t")
    script.step()
    refuse(script, publishes(script)[0])
    script.wait(1)
    assert len(sent(script)) > 1
    assert [body for _, group in sent(script) for body in group] == numbers(100)


@pytest.mark.parametrize("kind", ["arrow", "theirs"])
def test_what_cannot_be_divided_fails_whole(kind: str) -> None:
    script = ready(idempotent=kind == "arrow")
    if kind == "arrow":
        content = encode_arrow(b"x" * 800, 2, schema_id=1, subject="a")
    else:
        content = encode([b"a", b"b"], subject="a", producer_id=77, first_sequence=0)
    script.session.publisher.add_content("s", level_number("synced"), content, 2, "t")
    script.step()
    refuse(script, publishes(script)[0])
    [event] = settled(script)
    assert (event.tokens, event.count) == ("t", 2)
    assert isinstance(event.outcome, BrokerRefused)
    assert event.outcome.code == "too_large"


@pytest.mark.parametrize("sizes", [[], 5, {"s": "large"}, {"s": None}])
def test_sizes_that_are_none_end_the_link(sizes: Any) -> None:
    script = ready()
    script.publish(b"a")
    script.reconnect()
    asked = script.last(c.OpenProducer)
    value = {"id": 7, "epoch": 0, "next": {"s": 1}, "batch_bytes_max": sizes}
    script.say(c.Result(asked.request, value))
    assert script.state() is LinkState.WAITING


def test_a_size_that_holds_no_record_holds_one_at_a_time() -> None:
    script = ready()
    script.publish_content(numbers(3), token="t")
    script.reconnect()
    told(script, -5, s=1)
    follow(sent(script), 1, numbers(3))
    assert len(script.contents()) == 3


def test_a_batch_that_is_full_for_its_stream_does_not_linger() -> None:
    script = ready(linger_ms=1000)
    script.session.publisher.take_sizes("s", {"s": LIMIT})
    for body in numbers(11):
        script.publish(body)
    script.step()
    assert [len(group) for _, group in sent(script)] == [11]
    script.publish(b"few")
    assert script.step() == []


def test_contents_that_became_too_large_are_made_rows_as_they_leave() -> None:
    """All that was queued was read in one turn: 100 MB of it held up the loop of its caller."""
    script = Script(window_bytes=1 << 16)
    script.open()
    queued = [
        encode([b"%d.%d" % (batch, row) for row in range(100)], subject="x") for batch in range(200)
    ]
    for content in queued:
        script.session.publisher.add_content("s", level_number("stored"), content, 100, object())
    script.session.publisher.take_sizes("s", {"s": LIMIT})
    lane = script.session.publisher.streams["s"]
    assert sum(bool(batch.rows) for batch in lane.queue) == 0
    script.step()
    told(script, LIMIT)
    assert max(sizes(script)) <= LIMIT
    assert sum(bool(batch.content) for batch in lane.queue) > 100
