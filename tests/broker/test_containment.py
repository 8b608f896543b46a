"""An error that no code foresees costs the link or the batch that it came of, and nothing else.

Errors are planted where no input is known to cause one; batches that no check would let in are
written into the fake journal, as an older version could have stored them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.content import Content
from malamute_protocol.content_layout import EXPIRY, PROPERTIES_COLUMN
from malamute_protocol.encode import encode
from malamute_protocol.stamp import Stamp
from malamute_py.broker.batches import encoding, rows
from malamute_py.broker.context import Inconsistent
from malamute_py.broker.groups import group
from malamute_py.broker.groups.selection import GroupSelection
from malamute_py.broker.ready import MAIL_STREAM, MAIN, ReadFailed
from malamute_py.broker.subscriptions import selection
from malamute_py.broker.subscriptions.audience import Audience
from tests.broker.post import Post
from tests.broker.shell import Held, Shell, bodies
from tests.protocol.hostile import claim, craft, ints, packed

SUBJECTS = packed(["a", "b"])
POISON = {
    "codes": craft(4, subjects=SUBJECTS, subjects_count=2, subject_codes=[0, 1, 7, -9]),
    "field codes": craft(
        4, fieldmaps=packed([{"k": "v"}]), fieldmaps_count=1, field_codes=[0, 5, -7, 0]
    ),
    "no table": craft(4, subjects=b"\xc1", subjects_count=2, subject_codes=[0, 1, 0, 1]),
    "a large table": craft(
        4, subjects=claim(1 << 21) + b"\xa0" * (1 << 21), subjects_count=2,
        subject_codes=[0, 1, 0, 1],
    ),
    "body": craft(
        4, subjects=SUBJECTS, subjects_count=2, subject_codes=[0, 1, 0, 1],
        body=ints([0, 9, 3, 900, 4]) + b"xxxx",
    ),
    "properties": craft(
        4, subjects=SUBJECTS, subjects_count=2, subject_codes=[0, 1, 0, 1],
        properties=(PROPERTIES_COLUMN, ints([0, 900, -5, 7, 3]) + b"abc"),
    ),
    "expiry": craft(
        4, subjects=SUBJECTS, subjects_count=2, subject_codes=[0, 1, 0, 1], earliest_ms=1
    ),
    "expiry column": craft(4, flags=EXPIRY, expiries=None, earliest_ms=1, body=b""),
}  # fmt: skip
MAIL = packed({"k": "v"})


def poison(shell: Shell, stream: int, base: int, data: bytes) -> None:
    """Write a batch into the log that no check has seen."""
    head = Content(data).head
    lsn = shell.ends[MAIN]
    held = shell.rings[MAIN]
    stamp = Stamp(
        1, lsn, lsn, 0, shell.epoch, base, held[-1].stamp.append_time_ms, stream, 0,
        96 + len(data), head.count, 0, head.content_crc,
    )  # fmt: skip
    held.append(Held(stamp.pack(), data, lsn + 96 + len(data), 0))
    shell.ends[MAIN] = lsn + 96 + len(data)


def boom(*_: Any, **__: Any) -> Any:
    raise IndexError("planted")


def shell_of(links: int = 3, **settings: Any) -> Shell:
    shell = Shell(extract_bytes_min=0, **settings)
    shell.planted = True
    for link in range(1, links + 1):
        shell.hello(link)
    return shell


def planted_post(**settings: Any) -> Post:
    post = Post(**settings)
    post.planted = True
    return post


# --- what a peer sends ------------------------------------------------------------------------


def test_an_error_in_a_publish_behind_another_command_is_the_publishs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = shell_of()
    shell.publish(1, "s", [b"x"])
    monkeypatch.setattr(shell.broker._publishing, "publish", boom)
    commands = [wire.Subscribe(4, "s", ["all"], [0]), wire.Publish("s", 9)]
    peer = shell.send(1, *commands, frames=[encode([b"x"])])
    assert [(one.command, one.reference) for one in peer.of(wire.Refused)] == [(10, 9)]
    assert shell.events_of("internal_error")[-1].facts["doing"] == "PUBLISH"


def test_an_error_in_an_acknowledgement_that_was_put_off_is_its_own() -> None:
    post = planted_post()
    post.hello(7, session=b"7" * 16)
    post.send(7, wire.OpenInbox(1, "", 1 << 40, 1 << 40))
    post.inbox(3)
    post.broker._intake._prepares[wire.AckMail] = boom
    # Put off, and taken before the next command.
    post.send(7, wire.AckMail(1, [(5, 6)]), wire.Ping(2))
    events = [event.facts for event in post.events if event.name == "internal_error"]
    assert {(facts["link"], facts["doing"]) for facts in events} == {(7, "ACKMAIL")}
    assert post.peers[7].closed
    assert not post.peers[3].closed


@pytest.mark.moderate
@pytest.mark.parametrize("frames", [0, 1])
def test_an_error_while_a_command_is_handled_ends_its_link_and_no_other(
    monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    shell = shell_of()
    shell.subscribe(2, 1, "s")
    with monkeypatch.context() as planted:
        planted.setattr(shell.broker._publishing, "publish", boom)
        planted.setattr(shell.broker._stream_admin, "stream_info", boom)
        shell.broker._reception.handlers = shell.broker._table()
        if frames:
            peer = shell.publish(1, "s", [b"x"], tracker=9)
        else:
            peer = shell.send(1, wire.StreamInfo(9, "s"), wire.Ping(4))
    refused, bye = peer.commands[-2:]
    assert isinstance(refused, wire.Refused)
    assert isinstance(bye, wire.Bye)
    assert (refused.command, refused.reference) == ((10, 9) if frames else (33, 9))
    assert refused.code == bye.code == "internal"
    assert peer.closed
    (event,) = shell.events_of("internal_error")
    assert event.facts["link"] == 1
    assert isinstance(event.facts["error"], IndexError)
    assert event.facts["doing"] == ("PUBLISH" if frames else "STREAMINFO")
    assert shell.broker.counters["internal_errors"] == 1
    shell.publish(3, "s", [b"y"])
    assert bodies(shell.peers[2], 1) == [b"y"]
    assert not shell.peers[2].closed


def test_an_error_in_what_waited_for_a_stream_ends_who_sent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first PUBLISH and SUBSCRIBE are handled when the creation of their stream is stored."""
    shell = shell_of()
    monkeypatch.setattr(shell.broker._publishing, "publish", boom)
    assert shell.publish(1, "new", [b"x"]).closed
    monkeypatch.setattr(shell.broker._subscriptions, "begin", boom)
    assert shell.subscribe(2, 1, "newer").closed
    assert not shell.peers[3].closed
    assert shell.stream("new").next == shell.stream("newer").next == 0


def test_a_step_that_raises_is_refused_gives_back_what_it_had_reserved_and_ends_its_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = planted_post()
    post.ask(1, wire.EditMailbox, "box", {"max_messages": 1})
    with monkeypatch.context() as planted:
        planted.setattr(post.broker._publishing, "prepare", boom)
        peer = post.send(
            2, wire.Atomic(8, 2), wire.Send("box", 0), wire.Publish("s", 0),
            frames=[encode([b"m"]), encode([b"x"])],
        )  # fmt: skip
    refused = peer.last(wire.Refused)
    assert (refused.command, refused.reference, refused.code) == (66, 8, "internal")
    assert peer.closed
    # The room of the one message that the box takes is free.
    assert isinstance(post.mail(3, "box", [b"y"]), wire.Confirm)
    post.inbox(1, 7, "box")
    assert post.got(1) == [b"y"]


def test_an_error_amid_a_change_of_what_all_share_is_not_contained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = planted_post()
    post.ask(1, wire.EditMailbox, "box", {"memory": True})
    monkeypatch.setattr(post.broker._steps, "_happen", boom)
    with pytest.raises(Inconsistent):
        post.mail(1, "box", [b"x"])
    other = planted_post()
    monkeypatch.setattr(other.broker._publishing, "_stored", boom)
    with pytest.raises(IndexError):
        other.publish(1, "s", [b"x"])


# --- what is delivered ------------------------------------------------------------------------


def fails_on(body: bytes, of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises for a batch whose bodies begin with `body`, else calls `of`."""

    def planted(*arguments: Any) -> Any:
        for argument in arguments:
            content = getattr(argument, "content", argument)
            if isinstance(content, Content) and bytes(content.bodies().blob).startswith(body):
                raise IndexError("planted")
        return of(*arguments)

    return planted


@pytest.mark.parametrize("durable", [0, 1])
def test_a_batch_that_cannot_be_given_live_is_damage_to_whom_it_is_and_nothing_else_is_lost(
    monkeypatch: pytest.MonkeyPatch, durable: int
) -> None:
    shell = shell_of()
    for number, pattern in enumerate((["all"], ["topic", "a"], ["topic", "z"], ["topic", "b"])):
        shell.subscribe(2, number, "s", pattern, visibility=durable)
    subjects = ["a", "b"]
    shell.publish(1, "s", [b"1", b"2"], subject=subjects)
    monkeypatch.setattr(Audience, "known_groups", fails_on(b"bad", Audience.known_groups))
    monkeypatch.setattr(selection, "headers_chosen", fails_on(b"bad", selection.headers_chosen))
    shell.publish(1, "s", [b"bad", b"bad"], subject=subjects, tracker=7)
    assert shell.peers[1].last(wire.Confirm).tracker == 7
    shell.publish(1, "s", [b"5", b"6"], subject=subjects)
    peer = shell.peers[2]
    assert [len(bodies(peer, number)) for number in range(4)] == [6, 2, 0, 2]
    assert {(gap.subscription, gap.from_, gap.to, gap.code) for gap in peer.of(wire.Gap)} == {
        (number, 2, 4, "damaged") for number in (1, 2, 3)
    }
    (event,) = shell.events_of("batch_quarantined")
    assert {name: event.facts[name] for name in ("stream", "from", "to", "link")} == {
        "stream": "s", "from": 2, "to": 4, "link": 2,
    }  # fmt: skip
    assert shell.broker.counters["batches_quarantined"] == 1
    assert not peer.closed
    # And they are live again.
    assert all(mode.live for mode in peer.of(wire.Mode)[-3:])


def test_a_subscription_whose_pattern_raises_goes_without_and_the_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = shell_of()
    for number, pattern in enumerate((["topic", "a"], ["topic", "b"])):
        shell.subscribe(2, number, "s", pattern)
    right = selection.headers_chosen

    def planted(sub: Any, *rest: Any) -> Any:
        return boom() if sub.number == 0 else right(sub, *rest)

    monkeypatch.setattr(Audience, "known_groups", boom)
    monkeypatch.setattr(selection, "headers_chosen", planted)
    for _ in range(3):
        shell.publish(1, "s", [b"x", b"y"], subject=["a", "b"])
    assert bodies(shell.peers[2], 1) == [b"y"] * 3
    assert bodies(shell.peers[2], 0) == []
    assert [gap.to for gap in shell.peers[2].of(wire.Gap)] == [2, 4, 6]


def test_an_error_does_not_bring_a_reader_of_latest_records_back_to_older_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = shell_of()
    for _ in range(4):
        shell.publish(1, "s", [b"x" * 40] * 40, subject=["a"] + ["c"] * 38 + ["b"])
    every = ["not", ["topic", "z"]]
    peer = shell.subscribe(2, 5, "s", every, [6], records=0, gathered=True)
    monkeypatch.setattr(selection, "headers_chosen", fails_on(b"bad", selection.headers_chosen))
    shell.publish(1, "s", [b"bad", b"bad"], subject=["a", "b"])
    shell.send(2, wire.Credit(5, 1 << 20, 1 << 20))
    assert [offset for offset, _ in peer.received[5]] == [120, 158, 159]
    (gap,) = peer.of(wire.Gap)
    assert (gap.from_, gap.to) == (160, 162)


def test_many_who_cannot_be_served_together_are_served_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from malamute_py.broker.subscriptions import shared_window

    shell = shell_of(shared_window_min=2, shared_read_min=2)
    for _ in range(3):
        shell.publish(1, "s", [b"x", b"y"], subject=["a", "b"])
    monkeypatch.setattr(shared_window.SharedWindow, "share_out", boom)
    for hot in (True, False):
        if not hot:
            shell.evict()
        for number in range(4):
            number += 10 * hot
            command = wire.Subscribe(number, "s", ["topic", "a"], [0], 99, 1 << 20, gathered=True)
            shell.broker.receive(2, "", [command], [], shell.now_ms)
        shell.run()
    for number in (0, 1, 2, 3, 10, 11, 12, 13):
        assert bodies(shell.peers[2], number) == [b"x"] * 3
    assert not shell.peers[2].of(wire.Gap)


@pytest.mark.parametrize("kind", ["shared", "exclusive", "keyed"])
@pytest.mark.parametrize("where", ["take_in", "frames"])
def test_a_group_passes_over_a_batch_that_it_cannot_handle_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    shell = shell_of()
    for link in (2, 3):
        shell.send(link, wire.JoinGroup(1, "s", "g", ["all"], kind, [0], 99, 1 << 20))
    if where == "take_in":
        monkeypatch.setattr(GroupSelection, "of_table", fails_on(b"bad", GroupSelection.of_table))
        monkeypatch.setattr(group, "unexpired", fails_on(b"bad", rows.unexpired))
    else:
        right = encoding.PartEncodings.frames

        def frames(self: encoding.PartEncodings, mask: int) -> Any:
            return fails_on(b"bad", lambda _: right(self, mask))(self._batch)

        monkeypatch.setattr(encoding.PartEncodings, "frames", frames)
    for body in (b"1", b"bad", b"3"):
        shell.publish(1, "s", [body] * 4, subject=["a", "b", "c", "d"])
    got = [body for link in (2, 3) for body in bodies(shell.peers[link], 1)]
    assert sorted(got) == [b"1"] * 4 + [b"3"] * 4
    for link in (2, 3):
        (gap,) = shell.peers[link].of(wire.Gap)
        assert (gap.from_, gap.to, gap.code) == (4, 8, "damaged")
        for first, end in ((0, 4), (8, 12)):
            mine = [o for o, _ in shell.peers[link].received[1] if first <= o < end]
            if mine:
                shell.send(link, wire.AckRecords(1, [(o, o + 1) for o in mine], 5, 1))
    info = shell.send(2, wire.GroupInfo(6, "s", "g")).last(wire.Result).value
    assert (info["next"], info["held"], info["waiting"]) == (12, 0, 0)
    assert len(shell.events_of("batch_quarantined")) == 1


def test_mail_whose_rows_cannot_be_taken_out_leaves_with_its_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from malamute_py.broker.log import bodies as module

    post = planted_post(extract_bytes_min=0)
    monkeypatch.setattr(module, "extract", boom)
    post.mail(1, "box", [b"%d" % n for n in range(40)])
    post.inbox(2, 7, "box", records=2)
    post.inbox(3, 7, "box", records=1, size=10)
    assert post.got(2) == [b"0", b"1"]
    post.ack(2, (0, 2))
    post.credit(3, 7, 40, 1 << 20)
    # One more for the second, which had none in hand.
    assert sorted(post.numbers(2) + post.numbers(3)) == list(range(40))
    assert len(post.events_of("batch_quarantined")) == 1
    assert not post.events_of("internal_error")


def test_an_error_in_giving_mail_or_work_ends_its_reader_and_the_next_one_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = planted_post()
    inboxes = post.broker._mail.inboxes
    delivery = post.broker._services._delivery
    send, work = inboxes._send, delivery._work

    def planted(one: Any, *arguments: Any) -> None:
        if one.link.number == 2:
            boom()
        (send if hasattr(one, "mailbox") else work)(one, *arguments)

    monkeypatch.setattr(inboxes, "_send", planted)
    monkeypatch.setattr(delivery, "_work", planted)
    post.inbox(2, 7, "box")
    post.mail(1, "box", [b"x"])
    assert post.peers[2].closed
    post.inbox(3, 7, "box")
    assert post.got(3) == [b"x"]
    del post.peers[2]
    post.hello(2, identity="bert")
    post.send(2, wire.Offer(8, "service", ["all"], 9, 1 << 20))
    post.send(1, wire.Request("service", 1), frames=[encode([b"r"], subject="q")])
    assert post.peers[2].closed
    post.send(3, wire.Offer(8, "service", ["all"], 9, 1 << 20))
    post.wait(1_000)
    assert [task.body for task in post.peers[3].work[8]] == [b"r"]


def test_a_reader_of_the_journal_that_erred_reads_without_a_selection() -> None:
    shell = shell_of(read=False)
    shell.publish(1, "s", [b"x", b"y"], subject=["a", "b"])
    shell.evict()
    shell.subscribe(2, 1, "s", ["topic", "b"], gathered=True)
    shell.send(3, wire.JoinGroup(1, "s", "g", ["topic", "b"], "shared", [0], 9, 1 << 20))
    reads, shell.reads = shell.reads, []
    assert len(reads) == 2
    for read in reads:
        assert read.candidates is not None
        shell.broker.history(ReadFailed(read.token, "internal", "planted"))
    shell.run()
    assert [(read.candidates, read.matches) for read in shell.reads] == [(None, None)] * 2
    shell.answer_reads()
    shell.run()
    assert bodies(shell.peers[2], 1) == bodies(shell.peers[3], 1) == [b"y"]
    # One that cannot be read at all ends its reader, as before.
    shell.evict()
    shell.subscribe(2, 2, "s", ["topic", "b"])
    for _ in range(2):
        (read,), shell.reads = shell.reads, []
        shell.broker.history(ReadFailed(read.token, "internal", "planted"))
        shell.run()
    assert shell.peers[2].last(wire.Ended).code == "internal"


# --- what is stored ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", POISON)
def test_a_log_with_a_batch_that_no_check_saw_serves_everything_else(name: str) -> None:
    shell = shell_of()
    shell.publish(1, "s", [b"1", b"2"], subject=["a", "b"])
    number = shell.stream("s").number
    poison(shell, number, 2, POISON[name])
    shell.restart()
    for link in (1, 2, 3):
        shell.hello(link).tolerant = True
    shell.publish(1, "s", [b"7", b"8"], subject=["a", "b"])
    for gathered in (False, True):
        for subject in ("a", "b"):
            at = 2 * gathered + (subject == "b")
            shell.subscribe(2, at, "s", ["topic", subject], gathered=gathered)
            got = [body for body in bodies(shell.peers[2], at) if body != b"x"]
            assert got == ([b"1", b"7"] if subject == "a" else [b"2", b"8"])
    for place, kind in enumerate(("shared", "exclusive", "keyed")):
        join = wire.JoinGroup(place, "s", kind, ["topic", "a"], kind, [0], 99, 1 << 20)
        shell.send(3, join)
        got = [body for body in bodies(shell.peers[3], place) if body != b"x"]
        assert got == [b"1", b"7"]
    for link in (1, 2, 3):
        assert not shell.peers[link].closed
    gaps = shell.peers[2].of(wire.Gap) + shell.peers[3].of(wire.Gap)
    assert all((gap.from_, gap.to, gap.code) == (2, 6, "damaged") for gap in gaps)
    assert len(shell.events_of("batch_quarantined")) == bool(gaps)


@pytest.mark.parametrize("name", [name for name in POISON if "table" not in name])
def test_mail_that_no_check_saw_ends_no_broker(name: str) -> None:
    """Stored whole with the changes that name it, and wanted in part by two readers."""
    post = planted_post(extract_bytes_min=0)
    post.mail(1, "box", [b"x"] * 4)
    held = [one for one in post.rings[MAIN] if one.stamp.stream == MAIL_STREAM]
    (old,) = held
    data = POISON[name]
    stamp = old.stamp._replace(content_crc=Content(data).head.content_crc, size=96 + len(data))
    old.data, old.content = stamp.pack() + data, Content(data)
    post.restart()
    for link in (2, 3):
        post.peers[link].tolerant = True
        post.inbox(link, 7, "box", records=1)
    answer = post.ask(1, wire.PeekMail, "box")
    assert isinstance(answer, dict)
    assert isinstance(post.mail(1, "box", [b"good"]), wire.Confirm)
    for link in (1, 2, 3):
        assert not post.peers[link].closed
    assert not post.events_of("internal_error")


def test_a_group_is_not_held_up_by_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = shell_of()
    shell.publish(1, "s", [b"1"], subject="a")
    number = shell.stream("s").number
    for at in range(3):
        poison(shell, number, 1 + 4 * at, POISON["codes"])
    shell.restart()
    for link in (1, 2):
        shell.hello(link)
    shell.publish(1, "s", [b"2"], subject="a")
    shell.send(2, wire.JoinGroup(1, "s", "g", ["topic", "a"], "keyed", [0], 99, 1 << 20))
    assert bodies(shell.peers[2], 1) == [b"1", b"2"]
    assert [gap.from_ for gap in shell.peers[2].of(wire.Gap)] == [1, 5, 9]
    assert np.all(shell.broker._groups._groups.get((number, "g")).slots.waiting == 0)  # type: ignore[union-attr]


def test_a_group_that_could_not_be_created_can_be_by_the_next_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = shell_of(ask=False)
    shell.publish(1, "s", [b"x"])
    join = wire.JoinGroup(1, "s", "g", ["all"], "shared", [3, 0], 9, 1 << 20)
    with monkeypatch.context() as planted:
        planted.setattr(shell.broker._groups, "_create", boom)
        for link in (1, 2):
            shell.send(link, join)
        shell.answer_queries()
        shell.run()
    assert shell.peers[1].closed
    assert not shell.peers[2].closed
    assert shell.peers[2].last(wire.Refused).code == "internal"
    shell.send(2, join)
    shell.answer_queries()
    shell.run()
    assert bodies(shell.peers[2], 1) == [b"x"]
