"""Commands that a RESULT or a REFUSED answers.

Owns their numbers, and who waits for each. The rule: a command is sent again after a reconnect,
unless repeating it could do harm. A token is the object at which the caller of a command waits.
Source: SPEC.md, sections 4 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from malamute_protocol.commands import (
    Command,
    Kick,
    PurgeMail,
    RemoveCursor,
    RemoveGroup,
    RemoveMailbox,
    RemoveService,
    RemoveStream,
    Requeue,
    RequeueGroup,
    ResetGroup,
)
from malamute_protocol.errors import BrokerRefused, ConnectionLost, MalamuteError
from malamute_protocol.framing import NUMBERS
from malamute_py.client.arguments import checked
from malamute_py.client.session.events import Answered, Event, Inner
from malamute_py.client.session.outgoing import CommandSink

_NOT_REPEATED: Final = (
    RemoveStream, Kick, PurgeMail, RemoveMailbox, RemoveService, RemoveCursor, RemoveGroup, Requeue,
    RequeueGroup, ResetGroup,
)  # fmt: skip
"""Requests that may mean something else the second time: they fail with their link."""


ASKED_AT_ONCE: Final = 200
"""Commands that wait for their answers at one time: a broker keeps 256 answers for a link."""


class PendingCommand(msgspec.Struct, gc=False):
    """A command that waits for its answer."""

    command: Command
    token: Any
    sent: bool
    """Whether it was sent on the present link, or on the last one while there is none."""


class PendingCommands:
    """All commands that wait for their answers, by number."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        """emit: takes the events."""
        self.by_number: dict[int, PendingCommand] = {}
        self._unsent: dict[int, PendingCommand] = {}
        """Commands that wait to leave."""
        self._emit = emit
        self._number = 0

    def next_number(self) -> int:
        """Return a number for a command that a RESULT answers."""
        self._number += 1
        return self._number

    def add(self, make: Callable[[int], Command], token: Any) -> Command:
        """Add the command that `make(number)` gives, to leave with the next take(); returns it.

        token: gets the answer. Raises LocalProtocolError: an argument of the command is wrong.
        """
        number = self.next_number()
        command = checked(make(number))
        self.by_number[number] = self._unsent[number] = PendingCommand(command, token, False)
        return command

    def give_up(self, token: Any) -> None:
        """Drop a command whose answer no caller waits for: it is not sent again."""
        for number, asked in self.by_number.items():
            if asked.token is token:
                del self.by_number[number]
                self._unsent.pop(number, None)
                return

    @property
    def waits(self) -> bool:
        """Whether some commands have not left on this link: records wait for no company then."""
        return bool(self._unsent)

    def take(self, out: CommandSink) -> None:
        """Send those that were not sent on this link, as long as few enough wait for answers."""
        unsent = self._unsent
        while unsent and len(self.by_number) - len(unsent) < ASKED_AT_ONCE:
            asked = unsent.pop(next(iter(unsent)))
            asked.sent = True
            out.put(asked.command, None)

    def link_up(self) -> None:
        """Have all commands without an answer sent on the new link."""
        for asked in self.by_number.values():
            asked.sent = False
        self._unsent = self.by_number.copy()

    def link_down(self, reason: str) -> None:
        """Fail commands that the broker may have done and that cannot be repeated."""
        for number, asked in list(self.by_number.items()):
            if asked.sent and isinstance(asked.command, _NOT_REPEATED):
                del self.by_number[number]
                error = ConnectionLost(f"the link was lost before the answer: {reason}")
                self._answer(asked, error)

    def fail_all(self, error: MalamuteError) -> None:
        """Give all callers the error that ended the session."""
        for asked in self.by_number.values():
            self._answer(asked, error)
        self.by_number.clear()
        self._unsent.clear()

    def answered(self, number: int, value: Any) -> None:
        """Take the RESULT of a command; one that its caller has given up is dropped."""
        asked = self.by_number.pop(number, None)
        if asked is not None:
            self._answer(asked, value)

    def refused(self, kind: int, number: int, error: BrokerRefused) -> None:
        """Take the refusal of a command. kind: the type number of the refused command."""
        asked = self.by_number.get(number)
        # A CREDIT or an UNSUBSCRIBE may be on its way when ENDED comes: its refusal names the
        # subscription's number, which may be a command's too, and tells nothing new.
        if asked is not None and NUMBERS[type(asked.command)] == kind:
            del self.by_number[number]
            self._answer(asked, error)

    def _answer(self, asked: PendingCommand, outcome: Any) -> None:
        """Give the outcome to a token of the session's own, or by an event to the shell."""
        if isinstance(asked.token, Inner):
            asked.token.answered(outcome)
        else:
            self._emit(Answered(asked.token, outcome))
