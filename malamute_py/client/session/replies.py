"""Replies that leave this client for the requests of one offer.

Owns how replies are sent together, and what becomes of a refused one. The rule: a reply that
others follow is not overtaken by them. Source: SPEC.md, section 4.5.

Words: an offering is the worker's offer, through which it was handed the requests. A row is one
reply; its token (ReplyToken) names the request, and the caller that waits for the CONFIRM, or None.
A last reply ends its request. A broken request has a reply that came too late, so that what follows
would leave a hole.
"""

from __future__ import annotations

from typing import Any, Final

from malamute_protocol.commands import Atomic, Confirm
from malamute_protocol.commands import Reply as ReplyCommand
from malamute_protocol.errors import BrokerRefused, MalamuteError, ProtocolError
from malamute_py.client.session.events import Settled
from malamute_py.client.session.lanes import Lane
from malamute_py.client.session.offering import Offering, RequestBase
from malamute_py.client.session.outbox import KeyedBatch
from malamute_py.client.session.outgoing import CommandSink
from malamute_py.client.session.publisher import confirmation
from malamute_py.client.session.rows import OutgoingRow

_AT_ONCE_MS: Final = 1
"""Shortest pause before replies leave again; 0 would mean the usual pause of a refusal."""


class OutgoingReplies(KeyedBatch):
    """Replies to requests of one offer with one sender and one reply_to."""

    __slots__ = ("as_step", "awaited", "last", "offering")

    def __init__(self, lane: Lane[Any], level: int, offering: Offering, last: bool) -> None:
        """last: whether the replies end their requests; all of a batch do, or none does."""
        super().__init__(lane, level)
        self.offering = offering
        self.last = last
        # A reply that others follow must not be overtaken by them.
        self.one_by_one = not last
        self.awaited = False
        """Whether a caller waits for the confirm."""
        self.as_step = False
        """Whether the replies, when they left, were a step with a key."""

    def empty_like(self) -> OutgoingReplies:
        """Make an empty batch for the same place and terms, which part() fills."""
        alike = OutgoingReplies(self.lane, self.level, self.offering, self.last)
        alike.awaited = self.awaited
        return alike

    def send(self, out: CommandSink, tracker: int) -> None:
        """Hand over REPLY.

        A reply that others follow, and whose confirm is awaited, is a step with a key: were the
        link lost, it could else come twice.
        """
        offering = self.offering
        numbers = [row.token.request.number for row in self.rows]
        # offering.plain: the service is in memory, which no step can be of. tracker 0: no confirm.
        self.as_step = not (self.last or offering.plain or not tracker)
        if not self.as_step:
            # With room in the window, a confirm that no caller waits for may come with later ones.
            patient = not self.awaited and self.lane.owner.is_roomy
            # A caller that waits gets the outcome also when the reply has to be sent again; for all
            # others the broker need not remember it.
            key = self.key if self.awaited and self.last else b""
            reply = ReplyCommand(
                offering.number, numbers, tracker, self.last, self.level, patient, key
            )
            out.put(reply, self.content)
        else:
            step = Atomic(tracker, 1, self.level, self.key)
            part = ReplyCommand(offering.number, numbers, 0, False, 0)
            out.put_together([step, part], [self.content])

    def refused(self, error: BrokerRefused, now_ms: int) -> None:
        """Settle, repeat or give up replies that the broker refused.

        A service in memory takes no steps and no level: the replies leave again without them, for
        which the refusal becomes `wait`. A key that was used for another reply (`conflict`) is told
        as `not_held`.
        """
        if self.as_step and error.code in ("cross_ring", "unsupported"):
            # A service in memory: its requests cannot be part of a step. Other replies may be under
            # way as steps, too.
            self.offering.plain = True
            error = BrokerRefused("wait", error.reason, _AT_ONCE_MS)
        elif error.code == "unsupported" and self.level:
            self.level = 0  # a service or a mailbox in memory
            error = BrokerRefused("wait", error.reason, _AT_ONCE_MS)
        elif error.code == "conflict":
            error = BrokerRefused("not_held", error.reason)
        super().refused(error, now_ms)

    def live_rows(self) -> list[OutgoingRow]:
        """Return the replies of requests none of whose earlier replies is missing."""
        return [row for row in self.rows if not row.token.request.broken]

    def settle(self, outcome: Confirm | MalamuteError) -> None:
        """Give the callers of the replies their outcome, and end or keep the requests.

        A caller gets a Confirmation, an error, or None: another worker has the request by now,
        which is no error (`not_held`). An end that waited for these replies leaves afterwards.
        """
        if self.last and not self.awaited and isinstance(outcome, Confirm):
            # Most replies are such: no caller waits, and nothing follows.
            in_hand = self.offering.in_hand
            for row in self.rows:
                answered: RequestBase = row.token.request
                answered.replying -= 1
                if in_hand.get(answered.number) is answered:
                    del in_hand[answered.number]
            return
        pairs: list[tuple[Any, Any]] = []
        for index, row in enumerate(self.rows):
            request, token = row.token.request, row.token.caller
            told: Any = None
            if isinstance(outcome, Confirm):
                if self.last:
                    self.offering.done(request)
                if token is None:
                    continue
                told = confirmation(outcome, index, 1)
            elif isinstance(outcome, BrokerRefused) and outcome.code == "not_held":
                self.offering.too_late(request, outcome, row if self.last else None, self.last)
            else:
                told = outcome
                if self.last:
                    self.offering.reopened(request)  # the reply was to end it, and did not
                none_can_end_it = token is None or request.finished
                if none_can_end_it and isinstance(outcome, ProtocolError | BrokerRefused):
                    # No caller is left that could end it otherwise, and replies with a hole would
                    # look whole to the requester.
                    self.offering.offerings.give_up(request, outcome)
            if token is not None:
                pairs.append((token, told))
        if pairs:
            self.lane.owner.emit(Settled(pairs))
        # Afterwards, so that all replies of a request in this batch are settled before its end.
        for row in self.rows:
            request = row.token.request
            request.replying -= 1
            if request.end is not None and not request.replying:
                self.offering.offerings.end_at_last(request)
