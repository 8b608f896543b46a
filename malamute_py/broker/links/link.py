"""A client link: its facts, and what it has under its numbers.

Owns the state of one connected client, its window, room and outbox, and a receiver's credit. The
rule: credit is cumulative and only rises. Links (links.py) changes both; the owners of receivers
serve them within their credit. Source: SPEC.md, sections 2 and 8; docs/design.md (Flow control).
"""

from __future__ import annotations

from typing import Any, Protocol

from malamute_protocol.commands import Command
from malamute_protocol.content import Content
from malamute_protocol.link import State
from malamute_py.broker.context import Verdict
from malamute_py.broker.quotas import UNMETERED

FEW_DELIVERIES = 512
"""Deliveries of a few rows after which a link is asked how far it has read; meanwhile it gets
at most twice as many. Such a delivery costs a client as much as several KiB do."""
_OVERRUN_PART = 64
"""Part of its window that a client keeps which sent beyond it."""


class Link:
    """One connected client."""

    __slots__ = (
        "address",
        "ask_below",
        "blocked",
        "cleared_bytes",
        "conflicted",
        "credential",
        "delivered_bytes",
        "expiry_ms",
        "frames",
        "happened",
        "heard_ms",
        "heartbeat_ms",
        "holder",
        "identity",
        "later",
        "named",
        "number",
        "opened_ms",
        "out",
        "owner",
        "probe",
        "probe_answers",
        "probe_bytes",
        "publishing",
        "queries",
        "quota_owner",
        "reading",
        "receivers",
        "requesting",
        "results",
        "room",
        "said_ms",
        "session",
        "software",
        "state",
        "template",
        "timer",
        "typed",
        "unconfirmed_bytes",
        "unread_answers",
        "usage",
        "verdicts",
        "window_bytes",
    )

    def __init__(self, number: int, credential: str, now_ms: int) -> None:
        self.number = number
        self.credential = credential
        """The credential that the shell authenticated; "" without one."""
        self.identity = credential
        self.owner = credential
        """Name whose permissions and quotas it has: its credential, else its template or
        identity."""
        self.address = ""
        """Network address, or local user, of a peer without a credential; "": not known."""
        self.quota_owner = credential
        """Name for which its rates count, and what ends with it: its owner, else its address."""
        self.template = ""
        """Template that its identity was derived from; empty: from none."""
        self.holder = ""
        """Name by which it sends mail and holds work: its identity, or `~` and a digest of its
        session."""
        self.state = State.NEW
        self.session = b""
        """Secret of its client, by which that takes up again what an earlier link had."""
        self.software = ""
        self.typed = False
        """Its client understands SCHEMA."""
        self.opened_ms = now_ms
        self.heard_ms = now_ms
        """Time at which the peer sent something last."""
        self.said_ms = now_ms
        """Time at which something was sent to the peer last."""
        self.heartbeat_ms = 0
        self.expiry_ms = 0
        """Silence of the peer after which the link ends."""
        self.out: list[Command] = []
        """Outbox: commands that leave at the end of the turn."""
        self.frames: list[Any] = []
        """Content frames of the commands in the outbox, in their order."""
        self.later: list[Command] = []
        """Commands that no peer waits for, as confirms of patient senders: they leave with the next
        message, or when LATER_MS are over (Links.say_later)."""
        self.blocked = False
        """Whether the shell holds messages back for the peer, whose socket takes no more."""
        self.room = 0
        """Bytes of records that the link may still be given; none while it is blocked."""
        self.ask_below = 0
        """Room below which the link is asked how far it has read."""
        self.delivered_bytes = 0
        """Bytes of records and of RESULTs that it was given so far."""
        self.cleared_bytes = 0
        """Delivered bytes that the peer has shown to have read."""
        self.probe = 0
        """Token of the PING that asks how far the peer has read; 0: none is under way."""
        self.probe_bytes = 0
        """Bytes that the link had been given when that PING was sent."""
        self.unread_answers = 0
        """Bytes of RESULTs that it was given and has not shown to have read."""
        self.probe_answers = 0
        """Bytes of RESULTs, among the unread ones, that left before that PING."""
        self.unconfirmed_bytes = 0
        """Bytes that its client has sent and that are neither confirmed nor refused."""
        self.window_bytes = 0
        """Most unconfirmed bytes that are taken: WELCOME's window, or less after an overrun."""
        self.publishing: dict[str, Any] = {}
        """Streams that the link was found to be allowed to write to. A reload that narrows what its
        owner may do ends the link, so that this stays right, as does `requesting`."""
        self.receivers: dict[int, Receiver] = {}
        """Number -> receiver, in the order of their opening."""
        self.requesting: dict[str, Any] = {}
        """Services that the link was found to be allowed to send requests to."""
        self.named = False
        """Whether HELLO asked for its identity by name: no other session has the identity then."""
        self.conflicted = False
        """Whether the operator was told that it used a key for two things."""
        self.happened = ""
        """End of the link: `bye`, `lost`, `fenced`, ...; empty before."""
        self.reading: list[Content] = []
        """Contents of its next message whose header tables are read in steps."""
        self.verdicts: dict[int, Verdict | None] | None = None
        """Outcomes for the batches of its next message that are validated in full, by the identity
        of their frame; an outcome is None until it is known."""
        self.queries = 0
        """Questions to the journal that the link waits for."""
        self.results = 0
        """Count of RESULTs in the outbox, which may be large."""
        self.timer = 0
        """Number of its valid timer; earlier ones in the heap are void."""
        self.usage = UNMETERED
        """Use of the quotas by its owner; known once the link is open."""

    @property
    def open(self) -> bool:
        """Whether the link was welcomed and has not ended."""
        return self.state is State.OPEN

    def overrun(self, window_bytes: int) -> str:
        """Narrow the window of a client that does not keep it; return the reason of the refusal.

        window_bytes: what WELCOME said. The window stays narrow as long as the link: a client that
        sends without regard to it would otherwise always have a whole window before the disk, and
        every other client's confirm waits for that to be synced (compression-bombs: 100 ms).
        """
        reason = f"more than {self.window_bytes} unconfirmed bytes on this link"
        self.window_bytes = window_bytes // _OVERRUN_PART
        return reason

    def owns(self, mailbox: str) -> bool:
        """Whether a mailbox is of the link's own identity or credential: no permission is asked."""
        return mailbox == self.identity or mailbox == self.credential != ""


class Owner(Protocol):
    """A part of the broker that serves the receivers of one kind, and ends them."""

    def resume(self, receiver: Any) -> None:
        """Give a receiver a turn: it has more credit, or its link has more room."""

    def end(self, receiver: Any, code: str) -> None:
        """Send ENDED with a code, and forget the receiver."""

    def link_ended(self, link: Link, receivers: list[Any]) -> None:
        """Forget all receivers of this kind of a link that has ended."""


class Receiver:
    """A subscription, an inbox, an offer or a membership: anything that a link has under a number.

    A receiver is served within its credit, which is cumulative: SPEC.md, section 8.
    """

    __slots__ = (
        "covered",
        "credit_bytes",
        "credit_records",
        "ended",
        "left_bytes",
        "left_records",
        "link",
        "number",
        "owner",
    )

    def __init__(
        self, owner: Owner, link: Link, number: int, credit_records: int, credit_bytes: int
    ) -> None:
        self.owner = owner
        self.link = link
        self.number = number
        self.credit_records = credit_records
        """All records that the client has ever allowed it; `credit_bytes`: all bytes."""
        self.credit_bytes = credit_bytes
        self.left_records = credit_records
        """Credit that is left, what was sent subtracted; below zero if it was overdrawn."""
        self.left_bytes = credit_bytes
        self.covered = 0
        """Offset up to which deliveries have accounted for the stream; 0: it reads no stream."""
        self.ended = False

    def leave(self) -> None:
        """Give the number back to the link: the receiver has ended."""
        self.ended = True
        del self.link.receivers[self.number]


def cost_of_few(link: Link) -> int:
    """Return the room of a link that a delivery of a few rows takes beside its bytes.

    A client pays for each delivery, however small: so many of them use up the room as bytes do.
    """
    # Half of the room is enough for one such delivery to each receiver of the link.
    return link.ask_below // max(FEW_DELIVERIES, 2 * len(link.receivers))
