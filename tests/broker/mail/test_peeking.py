"""Peeking: PEEK_MAIL describes messages, in bounded pages, and changes nothing."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode_lists
from malamute_py.broker.mail.peeking import Peeking
from malamute_py.broker.ready import BodiesFound
from tests.broker.post import Post, code


def test_peeking_shows_messages_and_consumes_nothing() -> None:
    post = Post()
    post.mail(1, "bert", [b"body one", b"two"], subject=["a", "b"], fields={"f": "v"})
    post.mail(3, "bert", [b"urgent"], priority=5, expires_at_ms=post.now_ms + 99_000)
    page = post.ask(2, wire.PeekMail, "bert", body_bytes=4)
    assert page["more"] is False
    assert [message["number"] for message in page["messages"]] == [0, 1, 2]
    first, _, last = page["messages"]
    assert (first["subject"], first["fields"], first["body"], first["bytes"]) == (
        "a", {"f": "v"}, b"body", 8,
    )  # fmt: skip
    assert (first["sender"], first["held"], first["attempts"]) == ("anna", False, 0)
    assert (last["sender"], last["priority"]) == ("carla", 5)
    assert last["expires_at_ms"] == post.now_ms + 99_000
    assert "body" not in post.ask(2, wire.PeekMail, "bert")["messages"][0]
    post.inbox(2)
    assert sorted(post.got(2)) == [b"body one", b"two", b"urgent"]
    assert all(message["held"] for message in post.ask(2, wire.PeekMail, "bert")["messages"])
    assert post.ask(2, wire.PeekMail, "bert")["messages"][0]["attempts"] == 1


def test_peeking_goes_page_by_page() -> None:
    post = Post(mail_hot_bytes=1)
    for number in range(5):
        post.mail(1, "bert", [b"%d.%d" % (number, row) for row in range(3)])
    seen: list[bytes] = []
    after, more = -1, True
    while more:
        page = post.ask(2, wire.PeekMail, "bert", after, 4, 100)
        seen += [message["body"] for message in page["messages"]]
        after, more = page["messages"][-1]["number"], page["more"]
    assert seen == [b"%d.%d" % (number, row) for number in range(5) for row in range(3)]


@pytest.mark.parametrize("after", [-(2**63), -1, 2, 3, 2**63, 2**64 - 1])
def test_peeking_after_any_number(after: int) -> None:
    post = Post()
    post.mail(1, "bert", [b"a", b"b"])
    post.mail(1, "bert", [b"c", b"d"])
    page = post.ask(2, wire.PeekMail, "bert", after)
    numbers = [number for number in range(4) if number > after]
    assert [message["number"] for message in page["messages"]] == numbers
    assert not page["more"]


def test_peeking_at_lists_and_at_bodies_that_are_gone() -> None:
    post = Post()
    frame = encode_lists([[b"a", b"bc"]], subject="s")
    post.send(1, wire.Send("box", 1), frames=[frame])
    (message,) = post.ask(1, wire.PeekMail, "box", body_bytes=99)["messages"]
    assert (message["bytes"], message["body"]) == (3, msgspec.msgpack.encode([b"a", b"bc"]))
    assert code(post.ask(1, wire.PeekMail, "none")) == "unknown_mailbox"


def test_peeking_shows_delays_and_when_each_row_expires() -> None:
    post = Post()
    at_ms, over_ms = post.now_ms + 5_000, post.now_ms + 9_000
    post.mail(1, "bert", [b"a"], deliver_at_ms=at_ms)
    post.mail(1, "bert", [b"b", b"c"], expires_at_ms=[over_ms, 0])
    messages = post.ask(2, wire.PeekMail, "bert")["messages"]
    assert [message["not_before_ms"] for message in messages] == [at_ms, 0, 0]
    assert [message["expires_at_ms"] for message in messages] == [0, over_ms, 0]
    assert post.ask(2, wire.PeekMail, "bert", 1 << 50)["messages"] == []


def test_a_page_of_a_peek_is_bounded_in_the_bytes_it_reads_and_sends() -> None:
    post = Post(peek_bytes_max=3_000)
    for number in range(4):
        post.mail(1, "bert", [b"%d" % number * 1_000])
    page = post.ask(2, wire.PeekMail, "bert")
    assert (len(page["messages"]), page["more"]) == (2, True)
    big = Post()
    big.mail(1, "bert", [bytes(520_000), bytes(600_000)])
    page = big.ask(2, wire.PeekMail, "bert", body_bytes=1 << 30)
    assert (len(page["messages"]), page["more"]) == (1, True)
    rest = big.ask(2, wire.PeekMail, "bert", page["messages"][0]["number"], body_bytes=1 << 30)
    assert (len(rest["messages"][0]["body"]), rest["more"]) == (512 << 10, False)
    lists = Post()
    frame = encode_lists([[bytes(3_000_000)]], subject="s")
    lists.send(1, wire.Send("bert", 4), frames=[frame])
    page = lists.ask(2, wire.PeekMail, "bert", body_bytes=1 << 30)
    assert len(page["messages"][0]["body"]) == 512 << 10


def test_a_link_has_a_bound_of_unanswered_peeks() -> None:
    post = Post(link_queries_max=1, read=False, mail_hot_bytes=1)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "bert", [b"b"])
    post.send(2, wire.PeekMail(900, "bert"), wire.PeekMail(901, "bert"))
    refused = post.peers[2].last(wire.Refused)
    assert (refused.command, refused.reference, refused.code) == (44, 901, "wait")
    post.answer_bodies()
    post.run()
    assert post.peers[2].last(wire.Result).request == 900


def test_peeks_go_one_at_a_time_and_by_turns_of_links() -> None:
    post = Post(read=False, mail_hot_bytes=1)
    for body in (b"a", b"b", b"c"):
        post.mail(1, "bert", [body])
    peeks = [wire.PeekMail(900 + at, "bert", -1, 10, 10) for at in range(20)]
    post.send(2, *peeks)
    post.send(1, wire.PeekMail(950, "bert", -1, 10, 10))
    post.send(3, wire.PeekMail(960, "bert", -1, 10, 10))
    order = []
    while post.bodies:
        [wanted] = post.bodies
        assert set(wanted.numbers) <= {0, 1}, "the newest is in memory"
        before = {link: len(post.peers[link].of(wire.Result)) for link in (1, 2, 3)}
        post.answer_bodies()
        post.run()
        order += [
            link for link in (1, 2, 3) if len(post.peers[link].of(wire.Result)) > before[link]
        ]
    assert order[:4] == [2, 2, 1, 3]
    assert order[4:] == [2] * 18
    assert all(len(one.value["messages"]) == 3 for one in post.peers[2].of(wire.Result))


def test_a_link_that_ends_while_its_peeks_wait_keeps_no_other_waiting() -> None:
    post = Post(read=False, mail_hot_bytes=1)
    post.mail(1, "bert", [b"a"])
    post.send(2, *[wire.PeekMail(900 + at, "bert") for at in range(3)])
    post.send(1, wire.PeekMail(950, "bert"))
    post.lose(2)
    while post.bodies:
        post.answer_bodies()
        post.run()
    assert post.peers[1].last(wire.Result).request == 950
    assert not post.broker._mail.admin._peeks


def test_an_error_in_a_peek_costs_its_link_and_the_next_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = Post()
    post.planted = True
    post.mail(1, "bert", [b"a"])

    def planted(*_: Any) -> Any:
        raise IndexError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Peeking, "_entry", planted)
        post.send(2, wire.PeekMail(900, "bert"))
    assert post.peers[2].closed
    post.send(1, wire.PeekMail(950, "bert"))
    assert post.peers[1].last(wire.Result).request == 950


def test_a_peek_at_a_body_that_cannot_be_read_describes_the_message() -> None:
    post = Post(read=False, mail_hot_bytes=1)
    post.mail(1, "bert", [b"a"])
    post.mail(1, "other", [b"b"])
    post.send(2, wire.PeekMail(900, "bert", -1, 10, 10))
    (read,) = post.bodies
    post.bodies.clear()
    post.broker.bodies(BodiesFound(read.token, {}, "no disk"))
    post.run()
    (message,) = post.peers[2].last(wire.Result).value["messages"]
    assert (message["number"], message["sender"], message["subject"]) == (0, "anna", "")


def test_a_client_may_not_peek_into_the_temporary_mailbox_of_another() -> None:
    post = Post()
    post.hello(8)
    post.inbox(8)
    post.mail(1, post.ask(8, wire.MailboxInfo, "~*")["entries"][0]["name"], [b"secret"])
    name = post.ask(1, wire.MailboxInfo, "~*")["entries"][0]["name"]
    assert post.ask(1, wire.PeekMail, name, body_bytes=9).code == "forbidden"
    assert post.ask(8, wire.PeekMail, name, body_bytes=9)["messages"][0]["body"] == b"secret"


def test_peeks_for_a_peer_that_does_not_read_have_a_bound() -> None:
    post = Post(link_results_max=2)
    post.mail(1, "m", [b"x"])
    post.broker.blocked(2)
    peeks = [wire.PeekMail(request, "m", -1, 5) for request in range(501, 506)]
    post.broker.receive(2, "", peeks, [], post.now_ms)
    post.run()
    link = post.broker._links.table[2]
    answers = [type(command) for command in link.out if not isinstance(command, wire.Ping)]
    assert answers == [wire.Result] * 2 + [wire.Refused] * 3
    assert link.queries == 0


def peeks(post: Post, first: int, count: int) -> list[str]:
    """Have link 2 peek so often at 1,000 bytes; return the answers: "", or codes of refusals."""
    peer = post.peers[2]
    before = len(peer.commands)
    post.send(2, *[wire.PeekMail(first + at, "m", -1, 1, 1_000) for at in range(count)])
    return [
        getattr(command, "code", "") for command in peer.commands[before:]
        if isinstance(command, wire.Result | wire.Refused)
    ]  # fmt: skip


def test_answers_that_a_peer_has_not_read_have_a_bound_in_bytes() -> None:
    """20 links that asked for pages and read none had the broker grow by 1,100 MiB."""
    post = Post(share_min_bytes=10_000, share_max_bytes=10_000)
    post.mail(1, "m", [b"x" * 1_000])
    answers = [code for at in range(20) for code in peeks(post, 500 + at, 1)]
    assert 7 < answers.count("") < 11
    assert answers == sorted(answers), "the first ones are answered, and all others refused"
    assert set(answers) == {"", "wait"}
    pong = wire.Pong(post.peers[2].last(wire.Ping).token)
    post.send(2, pong)
    assert peeks(post, 600, 1) == [""]
    post.broker.link_lost(2, post.now_ms)
    post.run()
    assert post.broker._links.unread_answers == sum(
        link.unread_answers for link in post.broker._links
    )


def test_a_peer_that_reads_its_answers_may_ask_without_end() -> None:
    post = Post(share_min_bytes=10_000, share_max_bytes=10_000)
    post.mail(1, "m", [b"x" * 1_000])
    link = post.broker._links.table[2]
    for at in range(100):
        assert peeks(post, 500 + at, 1) == [""]
        if link.probe:
            post.send(2, wire.Pong(link.probe))


def test_a_share_bounds_unread_answers_only_where_all_links_have_left_too_many() -> None:
    post = Post(share_min_bytes=2_000, share_max_bytes=100_000, outstanding_bytes=6_000)
    post.mail(1, "m", [b"x" * 1_000])
    # Its share is 2,000 bytes, which it may pass while others leave nothing.
    answers = peeks(post, 500, 20)
    assert 4 <= answers.count("") <= 6
    assert set(answers) == {"", "wait"}
    assert post.ask(3, wire.PeekMail, "m", -1, 1, 1_000)["messages"], "it is within its share"


def test_deliveries_that_are_not_read_refuse_no_question() -> None:
    post = Post(share_min_bytes=10_000, share_max_bytes=10_000)
    post.mail(1, "m", [b"x"])
    post.broker._links.table[2].room = 0
    assert peeks(post, 500, 1) == [""]


def first_of(post: Post, place: int) -> int:
    """Return the number of the message at a place of mailbox `m`, of which each put has ten."""
    mailbox = post.broker._mail.mailboxes.by_name["m"]
    return list(mailbox.order.after(-1))[place // 10] + place % 10


def test_a_page_of_many_messages_is_described_over_turns() -> None:
    """A thousand held a turn for 10 to 20 ms, and a confirm waited for those of ten links."""
    post = Post(meter=itertools.count().__next__, matching_share=10)
    for at in range(10):
        post.mail(1, "m", [b"%d" % one for one in range(10 * at, 10 * at + 10)])
    peer = post.peers[2]
    post.broker.receive(2, "", [wire.PeekMail(7, "m", -1, 1_000, 9)], [], post.now_ms)
    post.broker.receive(
        2, "", [wire.PeekMail(8, "m", first_of(post, 90) - 1, 1_000, 9)], [], post.now_ms
    )
    turns = 0
    while not peer.of(wire.Result):
        post._do(post.broker.take_ready())
        turns += 1
    assert turns > 8
    post.run()
    first, second = [result.value["messages"] for result in peer.of(wire.Result)]
    assert [entry["body"] for entry in first] == [b"%d" % at for at in range(100)]
    assert [entry["body"] for entry in second] == [b"%d" % at for at in range(90, 100)]
    assert post.broker._links.table[2].queries == 0
