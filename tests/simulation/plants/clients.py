"""The planted bugs of the client's workers, groups and requests."""

from __future__ import annotations

import contextlib
from typing import Any

from malamute_py.client.session.memberships import Membership
from malamute_py.client.session.offer_options import RENEWED
from malamute_py.client.session.offering import Offering
from malamute_py.client.session.requests import OutgoingRequests
from tests.simulation.plants.planted import Planted, codes, replace


def _renewal_untold(stack: contextlib.ExitStack) -> None:
    left = []  # A call that nothing refers to is collected, and its request is given back.

    def make(original: Any) -> Any:
        def ack_lost(self: Any, ack: Any) -> bool:
            left.append(ack)
            return bool(ack.form.state != RENEWED)

        return ack_lost

    replace(stack, Offering, "ack_lost", make)


def _held_unseen(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def take(self: Any) -> Any:
            request = original(self)
            if request is not None and request.attempts > 1:
                request.begun = False
                return None
            return request

        return take

    replace(stack, Offering, "take", make)


def _hand_out_failed(stack: contextlib.ExitStack) -> None:
    replace(stack, Offering, "lost_to_others", lambda original: lambda self, numbers: None)


def _waits_for_ever(stack: contextlib.ExitStack) -> None:
    # A call that nothing refers to is collected, and the messages that it holds are given back.
    left = []

    def given_up(self: Any) -> None:
        left.append(self)

    replace(stack, OutgoingRequests, "given_up", lambda original: given_up)


def _rewind_unheard(stack: contextlib.ExitStack) -> None:
    replace(stack, Membership, "_rewind", lambda original: lambda self, command: None)


PLANTS: dict[str, Planted] = {
    "renewal-untold": Planted(
        "clients", "who renews a lease is not told when the link goes",
        _renewal_untold, codes("stuck", "unlawful"), 60, 60,
    ),
    "held-unseen": Planted(
        "clients", "a request handed out once more is held though its program is never shown it",
        _held_unseen, codes("stuck"), 60, 78,
    ),
    "hand-out-failed": Planted(
        "answers", "a step that comes again and is refused fails the hand-out after it",
        _hand_out_failed, codes("dead", "unlawful", "stuck"), 60,
    ),
    "waits-for-ever": Planted(
        "replies", "who waits for a reply that was lost waits on when its time is over",
        _waits_for_ever, codes("stuck"), 60,
    ),
    "rewind-unheard": Planted(
        "rewinds", "a member acknowledges for a record what it did with one that was lost",
        _rewind_unheard, codes("unseen"), 60,
    ),
}  # fmt: skip
