"""The session's link: opening, heartbeat, endings."""

from __future__ import annotations

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.framing import encode_message
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import (
    Answered,
    Closed,
    Connect,
    Disconnect,
    Linked,
    Unlinked,
)
from tests.client.script import Script, welcome


def test_hello_goes_first_and_alone_on_a_new_socket() -> None:
    script = Script(identity="me", heartbeat_ms=500)
    assert script.transport == [Connect("tcp://one:1")]
    [hello] = [command for command, _ in script.heard]
    assert isinstance(hello, c.Hello)
    assert (hello.identity, hello.heartbeat_ms, len(hello.session)) == ("me", 500, 16)


def test_welcome_opens_the_link() -> None:
    script = Script()
    script.open()
    assert script.state() is LinkState.LINKED
    assert isinstance(script.happened[-1], Linked)


def test_an_idle_client_pings_and_a_busy_one_does_not() -> None:
    script = Script()
    script.open()
    assert script.wait(999) == []
    assert script.wait(1) == [c.Ping()]
    script.say(c.Pong())
    script.wait(500)
    script.publish(b"x")
    script.step()
    assert script.wait(999) == []


def test_a_ping_is_answered_with_its_token() -> None:
    script = Script()
    script.open()
    assert script.say(c.Ping(1 << 33)) == [c.Pong(1 << 33)]


def test_a_silent_broker_is_given_up_and_tried_again() -> None:
    script = Script()
    script.open()
    assert [command.code for command in script.wait(3000) if isinstance(command, c.Bye)] == [
        "silent"
    ]
    [lost] = [event for event in script.happened if isinstance(event, Unlinked)]
    assert (lost.code, lost.was_linked) == ("silent", True)
    assert isinstance(script.transport[-1], Disconnect)
    script.wait(lost.retry_at_ms - script.now_ms)
    assert isinstance(script.transport[-1], Connect)


def test_an_attempt_without_an_answer_ends_after_its_time() -> None:
    script = Script(attempt_ms=700)
    script.wait(699)
    assert script.state() is LinkState.CONNECTING
    script.wait(1)
    assert script.state() is LinkState.WAITING


def test_a_refused_version_is_final_and_fails_everything() -> None:
    script = Script()
    script.publish(b"x")
    script.say(c.Refused(1, 0, "version", "this broker speaks 2"))
    assert script.state() is LinkState.CLOSED
    [(tokens, error)] = script.outcomes()
    assert tokens == [b"x"]
    assert isinstance(error, BrokerRefused)
    assert error.code == "version"


def test_being_fenced_or_kicked_is_final() -> None:
    for code in ("fenced", "kicked"):
        script = Script()
        script.open()
        script.say(c.Bye(code, "go"))
        closed = script.happened[-1]
        assert isinstance(closed, Closed)
        assert isinstance(closed.error, BrokerRefused)


def test_a_link_that_a_late_hello_of_the_same_session_replaced_is_made_anew() -> None:
    script = Script()
    script.open()
    script.say(c.Bye("replaced", "another link of this session took over"))
    assert script.state() is LinkState.WAITING


def test_a_draining_broker_is_tried_again_after_its_bye() -> None:
    script = Script()
    script.open()
    script.say(c.Bye("draining"))
    assert script.state() is LinkState.WAITING


def test_a_full_broker_says_when_to_come_again() -> None:
    script = Script()
    script.say(c.Refused(0, 0, "limit", "at most 10 links", 7000))
    lost = script.happened[-1]
    assert isinstance(lost, Unlinked)
    assert lost.retry_at_ms == script.now_ms + 7000


def test_a_broken_message_costs_the_broker_the_link_and_is_told() -> None:
    script = Script()
    script.open()
    script.session.receive([b"\xc1"], script.now_ms)
    assert [command.code for command in script.step() if isinstance(command, c.Bye)] == [
        "malformed"
    ]
    assert script.state() is LinkState.WAITING


def test_a_command_out_of_state_costs_the_broker_the_link() -> None:
    script = Script()
    script.say(c.Confirm(1, 3, 1, 0, 0))
    assert script.state() is LinkState.WAITING
    script.wait(10_000)
    script.open()
    script.say(welcome())
    assert script.state() is LinkState.WAITING


def test_close_says_bye_and_fails_what_is_left() -> None:
    script = Script()
    script.open()
    script.session.request(c.BrokerInfo, "info")
    script.step()
    script.session.close()
    assert script.step() == [c.Bye()]
    assert isinstance(script.transport[-1], Disconnect)
    assert [type(event) for event in script.happened[-2:]] == [Answered, Closed]
    assert script.session.next_wake() is None


def test_a_socket_that_takes_nothing_gathers_no_pings() -> None:
    script = Script()
    script.open()
    for _ in range(5):
        script.now_ms += 250
        script.session.receive(encode_message([c.Ping()], []), script.now_ms)
        script.session.wake(script.now_ms)
        wake_ms = script.session.next_wake()
        assert wake_ms is not None
        assert wake_ms > script.now_ms
    assert [type(command) for command in script.step()].count(c.Ping) == 1
