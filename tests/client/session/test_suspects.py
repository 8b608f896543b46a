"""One command that cannot be sent, or that the broker cannot read, costs its own caller only."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_protocol.framing import decode_message, encode_message
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import Answered, Closed
from malamute_py.client.session.offer_options import OfferOptions
from malamute_py.client.session.pending import PendingCommand
from malamute_py.client.session.rows import OutgoingRow
from tests.client.script import Script, welcome
from tests.client.session.conversation import ask_about, opened


def answers(script: Script) -> dict[Any, Any]:
    found = {event.token: event.outcome for event in script.happened if isinstance(event, Answered)}
    script.happened = [event for event in script.happened if not isinstance(event, Answered)]
    return found


def sneak_in(script: Script, token: str, command: Any) -> None:
    """A command that got past all checks."""
    pending = script.session.pending
    number = pending.next_number()
    asked = PendingCommand(command(number), token, False)
    pending.by_number[number] = pending._unsent[number] = asked


def kinds(commands: list[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def test_a_command_that_cannot_be_encoded_fails_alone() -> None:
    script = opened()
    ask_about(script, "one")
    sneak_in(script, "bad", lambda number: c.StreamInfo(number, object()))  # type: ignore[arg-type]
    script.session.outbox.send("m", OutgoingRow(b"x", 1, "", "mail"), 0)
    ask_about(script, "two")
    sent = script.step()
    assert sorted(kinds(sent)) == ["Send", "StreamInfo", "StreamInfo"]
    [(token, error)] = answers(script).items()
    assert token == "bad"
    assert isinstance(error, BrokerRefused)
    assert error.code == "malformed"
    assert "stream=<object" in error.reason
    assert script.state() is LinkState.LINKED
    ask_about(script, "three")
    assert kinds(script.step()) == ["StreamInfo"]


def test_a_step_of_which_a_part_cannot_be_encoded_fails_whole() -> None:
    script = opened()
    tracked: list[Any] = []

    class Waiting:
        def confirmed(self, confirm: c.Confirm) -> None:
            raise AssertionError

        def refused(self, error: BrokerRefused, now_ms: int) -> None:
            tracked.append(error)

    tracker = script.session.trackers.give(Waiting())
    bad: list[c.Command] = [
        c.Atomic(tracker, 2),
        c.MoveCursor("s", "c", 2**70, 0),
        c.MoveCursor("s", "d", 5, 0),
    ]
    script.session._commands += bad
    ask_about(script, "one")
    assert kinds(script.step()) == ["StreamInfo"]
    [error] = tracked
    assert "MoveCursor: next=" in str(error)


def test_messages_keep_within_the_bytes_that_a_command_frame_may_have() -> None:
    script = Script()
    script.open(message_commands_max=4096)
    for n in range(64):
        ask_about(script, f"s{n}", c.CreateStream, settings={"description": "d" * 50_000})
    messages = script.session.take_outgoing(script.now_ms)
    assert all(len(frames[0]) <= DEFAULT_LIMITS.command_frame_bytes_max for frames in messages)
    sent = [command for frames in messages for command, _ in decode_message(frames)]
    assert kinds(sent) == ["CreateStream"] * 64
    assert len(messages) < 16, "they still leave together as far as they may"


def test_messages_keep_within_the_frames_that_one_may_have() -> None:
    script = Script(idempotent=False)
    script.open(message_commands_max=4096)
    for n in range(4096):
        script.publish(b"x", stream=f"s{n}", confirm="none")
    messages = script.session.take_outgoing(script.now_ms)
    # What a broker refuses to read, this would raise for.
    sent = [command for frames in messages for command, _ in decode_message(frames)]
    assert [kind for kind in kinds(sent) if kind != "Ping"] == ["Publish"] * 4096


def end_as_malformed(script: Script) -> None:
    """End the link as a broker does for a malformed command: REFUSED does not name its tracker."""
    refused = c.Refused(0, 0, "malformed", "command 3 (StreamInfo): as the test wants")
    script.session.receive(
        encode_message([refused, c.Bye("malformed", refused.reason)]), script.now_ms
    )
    script.step()


def greet(script: Script) -> None:
    """The link opens; what leaves then is for the test to take."""
    script.wait(60_000)
    script.session.receive(encode_message([welcome()]), script.now_ms)


def take_as_a_broker(script: Script, bad: str) -> tuple[list[str], bool]:
    """Read message by message, as a broker that cannot understand a name; what was understood."""
    understood: list[str] = []
    for frames in script.session.take_outgoing(script.now_ms):
        commands = [command for command, _ in decode_message(frames)]
        if any(getattr(command, "stream", "") == bad for command in commands):
            end_as_malformed(script)
            return understood, False
        for command in commands:
            understood.append(type(command).__name__)
            if isinstance(command, c.Ping):
                script.session.receive(encode_message([c.Pong(command.token)]), script.now_ms)
    return understood, True


@pytest.mark.parametrize("place", range(5))
def test_what_ended_the_link_is_found_and_never_sent_again(place: int) -> None:
    script = Script()
    script.open()
    names = [f"good{n}" for n in range(4)]
    names.insert(place, "bad")
    for name in names:
        ask_about(script, name)
    understood, whole = take_as_a_broker(script, "bad")
    assert (understood, whole) == ([], False)
    assert answers(script) == {}, "nobody knows yet which of them it was"
    links = 1
    while True:
        greet(script)
        links += 1
        understood, whole = take_as_a_broker(script, "bad")
        if whole:
            break
        assert links < 4, "the command goes on ending links"
    assert links == 3
    [(token, error)] = answers(script).items()
    assert token == "bad"
    assert isinstance(error, BrokerRefused)
    assert error.code == "malformed"
    assert understood == ["StreamInfo"] * 4, "all others go on, and together again"


def test_an_offer_that_ends_the_link_ends_its_worker_by_name() -> None:
    script = Script()
    script.open()
    # Another version's broker might not read what this one's commands have.
    offering = script.session.offerings.offer(OfferOptions("bad", ["all"]), object)  # type: ignore[arg-type]
    ask_about(script, "good")
    script.step()
    end_as_malformed(script)
    greet(script)
    messages = script.session.take_outgoing(script.now_ms)
    [offer, _, asked, ping] = [
        command for frames in messages for command, _ in decode_message(frames)
    ]
    assert kinds([offer, asked, ping]) == ["Offer", "StreamInfo", "Ping"]
    end_as_malformed(script)
    assert isinstance(offering.error, BrokerRefused)
    script.wait(60_000)
    assert kinds(script.open()) == ["StreamInfo"]


def test_a_hello_that_no_broker_reads_ends_the_client_by_name() -> None:
    script = Script()
    end_as_malformed(script)
    assert script.state() is LinkState.CLOSED
    closed = script.happened[-1]
    assert isinstance(closed, Closed)
    assert isinstance(closed.error, BrokerRefused)
    assert closed.error.code == "malformed"


def test_a_wrong_argument_of_a_question_is_raised_in_the_call() -> None:
    script = opened()
    with pytest.raises(LocalProtocolError, match="stream"):
        ask_about(script, None)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="credit_records"):
        script.session.offerings.offer(OfferOptions("v", ["all"], 2**80), object)  # type: ignore[arg-type]
    assert script.step() == []
    assert not script.session.receivers.by_number
