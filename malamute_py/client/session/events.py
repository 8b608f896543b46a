"""Events and wishes of a session, for its shell.

Owns the types of the events and of the wishes about the socket. The rule: they are plain
data, and a shell needs nothing else to know what became of what a caller asked for. A token is the
object at which a caller waits; the shell made it, and the event brings it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from malamute_protocol.commands import Confirm, Welcome
from malamute_protocol.errors import MalamuteError


class Connect(msgspec.Struct, frozen=True, gc=False):
    """To the shell: drop the socket, if any, and connect a new one to this endpoint."""

    endpoint: str


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """To the shell: send what is left, then close the socket."""


class Linked(msgspec.Struct, frozen=True, gc=False):
    """Event: a link is open."""

    welcome: Welcome
    first: bool


class Unlinked(msgspec.Struct, frozen=True, gc=False):
    """Event: an attempt failed or the link was lost; another attempt follows."""

    code: str
    reason: str
    retry_at_ms: int
    was_linked: bool


class Closed(msgspec.Struct, frozen=True, gc=False):
    """Event: the session is over; `error` says why unless close() was called."""

    error: MalamuteError | None


LinkEvent: TypeAlias = Linked | Unlinked | Closed
"""Events that `on_link` of connect() is called with."""


class Published(msgspec.Struct, frozen=True, gc=False):
    """Event: records of one batch were confirmed, or failed for good."""

    tokens: Any
    """One a record when `single`; else the one of a content that its caller had encoded."""
    count: int
    single: bool
    outcome: Confirm | MalamuteError


class Answered(msgspec.Struct, frozen=True, gc=False):
    """Event: a request was answered, refused, or lost with its link."""

    token: Any
    outcome: Mapping[str, Any] | MalamuteError


class Confirmed(msgspec.Struct, frozen=True, gc=False):
    """Event: what these tokens wait for, row by row of one content, was confirmed or failed."""

    tokens: Sequence[Any]
    """One a row, None where no caller waits."""
    outcome: Confirm | MalamuteError


class Settled(msgspec.Struct, frozen=True, gc=False):
    """Event: each of these tokens has its outcome: a value, or a MalamuteError."""

    pairs: Sequence[tuple[Any, Any]]


class Warned(msgspec.Struct, frozen=True, gc=False):
    """Event: something went wrong that no caller waits for; the log should have it."""

    message: str
    link: bool = False
    """Whether it is about the link: a program that shows changes of the link may leave it out."""


class Inner(ABC):
    """A token of the session's own: its answer goes to it instead of to the shell."""

    @abstractmethod
    def answered(self, outcome: Any) -> None:
        """Take the value of RESULT, or a MalamuteError."""


class Watched(Protocol):
    """An object at which a caller waits: a subscription, a reader of mail, an offer, replies."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """Event: it was accepted, has something to take, or ended."""

    opened: Watched


Event: TypeAlias = (
    Linked | Unlinked | Closed | Published | Answered | Confirmed | Settled | Warned | Arrived
)
