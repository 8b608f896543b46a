"""The planted bugs of the client's session: what it sends again, and where it resumes."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

from malamute_py.client.position import Position
from malamute_py.client.session.publisher import Publisher
from malamute_py.client.session.subscription import SubscriptionState
from tests.simulation.plants.planted import Planted, codes, replace


def _resumes_too_far(stack: contextlib.ExitStack) -> None:
    original: Any = vars(SubscriptionState)["_received_to"]

    def received_to(self: Any) -> Any:
        return original.fget(self)._replace(next=self.next + 1)

    stack.enter_context(patch.object(SubscriptionState, "_received_to", property(received_to)))


def _retry_with_a_new_sequence(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def renumber(self: Any, sender: Any, following: int, _renamed: bool) -> None:
            # As if the broker had not said which of them it has.
            original(self, sender, following, True)

        return renumber

    replace(stack, Publisher, "_renumber", make)


def _position_of_the_newest_epoch(stack: contextlib.ExitStack) -> None:
    def position(self: Any) -> Any:
        known = self.consumed_next >= 0
        return Position(self.stream_uuid, self.epoch, self.consumed_next) if known else None

    stack.enter_context(patch.object(SubscriptionState, "position", property(position)))


def _resend_in_reverse(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def link_down(self: Any) -> None:
            under_way = {lane: len(lane.sent) for lane in self.streams.values()}
            original(self)
            for lane, count in under_way.items():
                again = [lane.queue.popleft() for _ in range(count)]
                lane.queue.extendleft(again)

        return link_down

    replace(stack, Publisher, "link_down", make)


PLANTS: dict[str, Planted] = {
    "resume-too-far": Planted(
        "session", "a session resumes one record behind what it has received",
        _resumes_too_far, codes("start", "rewound", "gap_called_hole", "hole_called_gap"), 40,
    ),
    "retry-with-a-new-sequence": Planted(
        "session", "after a reconnect a session numbers anew what the broker may have",
        _retry_with_a_new_sequence, codes("twice", "order"), 60,
    ),
    "position-of-the-newest-epoch": Planted(
        "session", "a position behind an unconsumed rewind names the epoch after it",
        _position_of_the_newest_epoch,
        codes("rewound", "gap_called_hole"), 400, 130,
    ),
    "resend-in-reverse": Planted(
        "session", "after a reconnect a session sends what was under way in reverse",
        _resend_in_reverse, codes("order", "twice"), 60,
    ),
}  # fmt: skip
