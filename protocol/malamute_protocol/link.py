"""The states of a link, and which command either side may send in each.

Owns the TRANSITIONS table: nothing else decides what is in order. The rule: a command
that the table does not name for its side and state is an error of the side that sent
it, and ends the link. Source: SPEC.md, section 2.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeAlias

from malamute_protocol import commands as c
from malamute_protocol.commands import Command
from malamute_protocol.errors import LocalProtocolError, RemoteProtocolError


class State(enum.Enum):
    """The state of a link; both sides use the same words."""

    NEW = "new"
    """The transport is there, and no command was sent."""
    GREETED = "greeted"
    """HELLO was sent and not yet answered."""
    OPEN = "open"
    CLOSED = "closed"
    """BYE was sent or received: nothing follows, and commands that still arrive are ignored."""


class Side(enum.Enum):
    """The side that sends a command."""

    CLIENT = "client"
    BROKER = "broker"


CLIENT_COMMANDS: Final[tuple[type[Command], ...]] = (
    c.Hello, c.Ping, c.Pong, c.Bye,
    c.Publish, c.Subscribe, c.Unsubscribe, c.Credit, c.OpenProducer,
    c.CreateStream, c.EditStream, c.RemoveStream, c.StreamInfo, c.ListStreams, c.FindOffset,
    c.PlanRead, c.BrokerInfo, c.ListLinks, c.Kick,
    c.Send, c.OpenInbox, c.AckMail, c.PeekMail, c.PurgeMail, c.MailboxInfo, c.EditMailbox,
    c.RemoveMailbox,
    c.Request, c.Offer, c.AckWork, c.Reply, c.CancelRequest, c.ServiceInfo, c.EditService,
    c.Requeue, c.RemoveService,
    c.MoveCursor, c.CursorInfo, c.RemoveCursor, c.JoinGroup, c.AckRecords, c.GroupInfo, c.Atomic,
    c.EditCursor, c.RemoveGroup, c.Trim, c.PurgeSubjects, c.EditGroup, c.RequeueGroup,
    c.PeekRequests, c.ResetGroup, c.UpdateKey, c.GetKey, c.ListKeys, c.StreamSchemas,
    c.ReloadConfig, c.ListUsers, c.ListNamespaces,
    c.BeginTransaction, c.Stage, c.CommitTransaction, c.RollBackTransaction, c.ListTransactions,
    c.EndTransaction, c.AwaitTransaction,
)  # fmt: skip
"""Commands that a client may send at all."""

BROKER_COMMANDS: Final[tuple[type[Command], ...]] = (
    c.Welcome, c.Ping, c.Pong, c.Bye, c.Refused, c.Result,
    c.Confirm, c.Subscribed, c.Ended, c.Deliver, c.Cover, c.Gap, c.Rewound, c.Mode,
    c.Mail, c.Work, c.Schema,
)  # fmt: skip
"""Commands that a broker may send at all."""

CONTENT_COMMANDS: Final = (c.Publish, c.UpdateKey, c.Send, c.Request, c.Reply, c.Stage, c.Atomic)
"""Client commands bound by what WELCOME states, for which they wait."""

Moves: TypeAlias = Mapping[type[Command], State]

TRANSITIONS: Final[dict[State, dict[Side, Moves]]] = {
    State.NEW: {
        Side.CLIENT: {c.Hello: State.GREETED, c.Bye: State.CLOSED},
        Side.BROKER: {c.Refused: State.NEW, c.Bye: State.CLOSED},
    },
    State.GREETED: {
        Side.CLIENT: {
            command: State.GREETED
            for command in CLIENT_COMMANDS
            if command not in (c.Hello, *CONTENT_COMMANDS)
        }
        | {c.Bye: State.CLOSED},
        Side.BROKER: {
            c.Welcome: State.OPEN,
            c.Refused: State.GREETED,
            c.Ping: State.GREETED,
            c.Pong: State.GREETED,
            c.Bye: State.CLOSED,
        },
    },
    State.OPEN: {
        Side.CLIENT: {command: State.OPEN for command in CLIENT_COMMANDS if command is not c.Hello}
        | {c.Bye: State.CLOSED},
        Side.BROKER: {
            command: State.OPEN for command in BROKER_COMMANDS if command is not c.Welcome
        }
        | {c.Bye: State.CLOSED},
    },
    State.CLOSED: {Side.CLIENT: {}, Side.BROKER: {}},
}
"""state -> side that sends -> command -> next state. SPEC.md holds the same table."""


class Link:
    """The state of one link, from the point of view of one side."""

    __slots__ = ("side", "state")

    def __init__(self, side: Side) -> None:
        """side: ours; it decides which side is to blame for a wrong command."""
        self.side = side
        self.state = State.NEW

    def sent(self, command: Command) -> None:
        """Change the state by a command that we are about to send.

        Raises LocalProtocolError `unexpected`: it must not be sent in this state.
        """
        following = TRANSITIONS[self.state][self.side].get(type(command))
        if following is None:
            raise LocalProtocolError("unexpected", self._complain(command, self.side))
        self.state = following

    def received(self, command: Command) -> None:
        """Change the state by a command that arrived.

        Raises RemoteProtocolError `unexpected`: the peer must not send it in this state. Once the
        link is closed nothing is an error: commands that arrive were on their way.
        """
        if self.state is State.CLOSED:
            return
        peer = Side.BROKER if self.side is Side.CLIENT else Side.CLIENT
        following = TRANSITIONS[self.state][peer].get(type(command))
        if following is None:
            raise RemoteProtocolError("unexpected", self._complain(command, peer))
        self.state = following

    def _complain(self, command: Command, side: Side) -> str:
        """Say which command came from a side that may not send it in this state."""
        return (
            f"{type(command).__name__} from the {side.value} on a link that is {self.state.value}"
        )
