"""Everything that a session has opened under a number.

Owns their numbers, when each is opened anew, and which are due credit. The rule: what is opened is
opened on this link and every later one, until it ends; what stands still is opened at the next call
of its program. Source: SPEC.md, sections 4 and 8.

Words: `opened` is a subscription, inbox, offer or membership. It is ending once UNSUBSCRIBE was
asked for, and active once the broker has accepted it on the present link.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from malamute_protocol.commands import Command, Ended, Subscribed
from malamute_protocol.errors import BrokerRefused, MalamuteError, RemoteProtocolError
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_py.client.arguments import checked
from malamute_py.client.session.events import Watched
from malamute_py.client.session.outgoing import CommandSink
from malamute_py.client.session.receiver import Opened

_CLEARED_MS: Final = 60_000
"""Time for which the broker's error with something that is open counts against it."""

Kind = TypeVar("Kind", bound=Opened)


class Receivers:
    """Subscriptions, inboxes, offers and memberships of a session, by number."""

    def __init__(self, arrived: dict[Watched, None], retry_min_ms: int) -> None:
        """arrived: table to which is added what has something for its consumer, or has ended.

        retry_min_ms: shortest pause before something is opened again.
        """
        self.by_number: dict[int, Opened] = {}
        self.limits = DEFAULT_LIMITS
        """The broker's, which deliveries are checked against."""
        self.again: dict[Opened, int] = {}
        """Receivers whose opening the broker put off, and the time to try again."""
        self.left_out: dict[Opened, None] = {}
        """Receivers that the present link began without."""
        self._arrived = arrived
        self._retry_min_ms = retry_min_ms
        self._number = 0
        self._credit_due: dict[Opened, None] = {}
        self._struck: dict[Opened, int] = {}
        """Time at which the broker last met an error of its own with one of these."""

    def open(self, make: Callable[[int], Kind]) -> tuple[Kind, Command]:
        """Add what `make(number)` gives; returns it and the command that opens it.

        Raises LocalProtocolError: an argument is wrong.
        """
        opened = make(self._number + 1)
        command = checked(opened.open())  # should it raise, the number is not used up
        self._number += 1
        self.by_number[self._number] = opened
        return opened, command

    def end(self, opened: Opened) -> None:
        """Forget something that has ended: no command goes out for it any more."""
        opened.ended = True
        self.by_number.pop(opened.number, None)
        self._credit_due.pop(opened, None)
        self.again.pop(opened, None)
        self.left_out.pop(opened, None)
        self._struck.pop(opened, None)
        self._arrived[opened] = None  # its consumer learns that it has ended
        opened.over()

    def fail(self, opened: Opened, error: MalamuteError) -> None:
        """End something with an error that its consumer gets."""
        opened.fail(error)
        self.end(opened)

    def end_all(self, error: MalamuteError | None) -> None:
        """End everything with the session: in order, or with an error that the consumers get."""
        for opened in list(self.by_number.values()):
            if error is not None:
                opened.fail(error)
            self.end(opened)

    def link_down(self) -> None:
        """End what was ending, and have all else opened again on the next link (link_up)."""
        self._credit_due.clear()
        self.again.clear()
        self.left_out.clear()
        for opened in list(self.by_number.values()):
            opened.link_down()
            if opened.ending:
                self.end(opened)

    def link_up(self) -> list[Command]:
        """Return the commands that open all on a new link, except members that stand still."""
        commands: list[Command] = []
        for opened in self.by_number.values():
            if opened.stands_still:
                opened.left_out = True
                self.left_out[opened] = None
            else:
                commands.append(opened.open())
        return commands

    def reopen_times(self) -> Collection[int]:
        """Return the times at which reopenings() has something to do; 0: at once."""
        if not self.left_out:
            return self.again.values()
        # A call of its program has taken the mark `left_out` away: it is opened now.
        return [*self.again.values(), *(0 for each in self.left_out if not each.left_out)]

    def reopenings(self, now_ms: int) -> list[Command]:
        """Return the commands that open what the broker had put off until now.

        What the link began without is opened, too, once its program has made a call.
        """
        commands: list[Command] = []
        for opened in [each for each in self.left_out if not each.left_out]:
            del self.left_out[opened]
            self.again[opened] = now_ms
        for opened, at_ms in list(self.again.items()):
            if now_ms >= at_ms:
                del self.again[opened]
                if not opened.ending:
                    commands.append(opened.open())
        return commands

    # --- credit ------------------------------------------------------------------------------

    def credit_later(self, opened: Opened) -> None:
        """Have CREDIT sent with the next turn, if due then; as requests of an offer finish."""
        self._credit_due[opened] = None

    def consumed(self, opened: Opened) -> bool:
        """Note that a consumer took something; True: CREDIT is due, so have a turn done soon."""
        if not opened.active or not opened.credit_due:
            return False
        self._credit_due[opened] = None
        return True

    def take(self, out: CommandSink) -> None:
        """Send CREDIT where a consumer has taken enough, in each turn."""
        for opened in self._credit_due:
            if opened.active and opened.credit_due:
                out.put(opened.credit(), None)
        self._credit_due.clear()

    # --- commands from the broker ------------------------------------------------------------

    def receive(self, command: Any, frames: Sequence[Any]) -> None:
        """Take any command of the broker that names something opened, and hand it on.

        Raises RemoteProtocolError: the broker is at fault, and the link is ended.
        """
        opened = self.by_number.get(command.subscription)
        if opened is None:
            return  # the command was on its way when the opened thing ended here
        kind = type(command)
        if kind is Ended:
            opened.end_with(command)
            self.end(opened)
            return
        if opened.ending:
            return  # its consumer has gone: all but ENDED is of no use
        if kind is not Subscribed and not opened.active:
            raise RemoteProtocolError(
                "unexpected", f"{kind.__name__} for a subscription that was not accepted"
            )
        try:
            opened.receive(command, frames, self.limits)
        except RemoteProtocolError as error:
            # The reader is told, and the link goes: what else is wrong on it is unknown.
            self.fail(opened, error)
            raise
        self._arrived[opened] = None
        if opened.consumes:
            self.consumed(opened)

    def erred(self, number: int, error: BrokerRefused, now_ms: int) -> None:
        """Open once more what the broker met an internal error with; end it the second time.

        The error may have been of the moment. A second one counts within _CLEARED_MS.
        """
        opened = self.by_number.get(number)
        if opened is None:
            return
        last_error_ms = self._struck.pop(opened, now_ms - _CLEARED_MS)  # none: long enough ago
        if opened.ending or now_ms - last_error_ms < _CLEARED_MS:
            self.fail(opened, error)
        else:
            self._struck[opened] = now_ms
            # Should the link end before, the next one opens everything again.
            self.again[opened] = now_ms + self._retry_min_ms

    def unknown(self, number: int) -> None:
        """End something whose UNSUBSCRIBE was refused: the broker does not know its number.

        It had put the opening off, so no ENDED will come.
        """
        opened = self.by_number.get(number)
        if opened is not None and opened.ending:
            self.end(opened)

    def refused(self, number: int, error: BrokerRefused, now_ms: int) -> None:
        """Open something later that the broker refused to open now, or end it with the error."""
        opened = self.by_number.get(number)
        if opened is None:
            return
        if not opened.ending and opened.refused(error):
            self.again[opened] = now_ms + max(error.retry_ms, self._retry_min_ms)
            return
        self.fail(opened, error)
