"""Ends of receivers whose opening the broker had put off."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.framing import NUMBERS
from malamute_py.client.session.group_options import GroupOptions
from malamute_py.client.session.inbox_options import InboxOptions
from malamute_py.client.session.offer_options import OfferOptions
from malamute_py.client.session.offering import RequestBase
from malamute_py.client.session.receiver import Opened
from malamute_py.client.session.session import Session
from malamute_py.client.session.subscription import SubscribeOptions
from tests.client.script import STREAM_UUID
from tests.client.session.conversation import of, opened


def _subscription(session: Session) -> tuple[Any, Any]:
    reading = session.subscribe(SubscribeOptions("s", ["all"], [1]))
    return reading, lambda: session.unsubscribe(reading)


def _membership(session: Session) -> tuple[Any, Any]:
    member = session.memberships.join(GroupOptions("s", "g", ["all"]).check())
    return member, lambda: session.memberships.leave(member)


def _inbox(session: Session) -> tuple[Any, Any]:
    view = session.mailboxes.read(InboxOptions("box"))
    return view.mailbox, lambda: session.mailboxes.close(view)


def _offer(session: Session) -> tuple[Any, Any]:
    offering = session.offerings.offer(OfferOptions("svc", ["all"]), RequestBase)
    return offering, lambda: session.offerings.close(offering)


@pytest.mark.parametrize("opening", [_subscription, _membership, _inbox, _offer])
def test_what_is_closed_while_the_broker_puts_its_opening_off_is_not_opened_again(
    opening: Any,
) -> None:
    script = opened()
    receiver, close = opening(script.session)
    [command] = script.step()
    script.say(c.Subscribed(receiver.number, STREAM_UUID, 1, 0, 0, 0))
    script.reconnect()
    script.say(c.Refused(NUMBERS[type(command)], receiver.number, "wait", "busy", 300))
    close()
    assert of(script.step(), c.Unsubscribe) == [c.Unsubscribe(receiver.number)]
    assert of(script.wait(300), type(command)) == []
    number = NUMBERS[c.Unsubscribe]
    script.say(c.Refused(number, receiver.number, "unknown_subscription", "no subscription"))
    assert isinstance(receiver, Opened)
    assert receiver.ended
    assert receiver.error is None
    assert script.session.idle
    assert not script.session.receivers.by_number
