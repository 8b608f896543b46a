"""The commands of mailboxes (feature MAIL).

Owns the commands 40 to 49. Source: SPEC.md, section 4.
"""

from __future__ import annotations

from malamute_protocol.commands.command import Command, WithContent
from malamute_protocol.commands.fields import (
    Again,
    Key,
    Priority,
    Ranges,
    Runs,
    Settings,
    Time,
    check_ranges,
)


class Send(WithContent, tag=40, frozen=True):
    """Put a batch of messages into a mailbox; owns one content frame.

    Answered by CONFIRM (tracker): its offset is the number of the first message, the others
    follow on. REFUSED `wait` with a retry time when the mailbox is full.
    """

    mailbox: str
    tracker: int
    level: int = 0
    key: Key = b""
    """Name of this batch: when it is sent again with the same key, it is accepted once. Empty:
    none."""
    deliver_at_ms: Time = 0
    priority: Priority = 0


class OpenInbox(Command, tag=41, frozen=True):
    """Read a mailbox under credit; its deliveries carry the subscription number."""

    subscription: int
    mailbox: str
    credit_records: int = 0
    credit_bytes: int = 0
    settings: Settings = {}
    """Settings for a mailbox that does not exist yet."""


class Mail(Command, tag=42, frozen=True):
    """Messages of a mailbox; owns `frames` content frames: one batch, stamp and content.

    The number of the message in row i is base_offset + i (or + its offset delta).
    """

    subscription: int
    sender: str
    attempts: int
    frames: int
    rows: bytes | None = None
    """Bitmap of the delivered rows of the batch (LSB first); None: all."""
    about: Runs = []
    """Replies only: the requests that the delivered rows answer, in order, as runs of (key of the
    request's batch, row of the first, how many); empty for other mail."""
    last: bool = False
    """True: each of these replies is the last to its request."""
    why: str = ""
    """Dead letters only: why the request or record came here. Notices only: why there will be no
    answer."""
    origin: tuple[str, str, int, list[int]] | None = None
    """Dead letters of a group only: [stream, group, attempts, offset of each delivered row]."""

    @property
    def content_frames(self) -> int:
        """Return how many the command names."""
        return self.frames


class AckMail(Command, tag=43, frozen=True):
    """Messages were received for good (or, with a delay, are wanted again later)."""

    subscription: int
    ranges: Ranges
    tracker: int = 0
    level: int = 0
    again_ms: Again = -1
    """-1: done; otherwise deliver again after this time."""

    def __post_init__(self) -> None:
        """Raise ValueError where the ranges are invalid, which fails the decoding."""
        check_ranges(self.ranges)


class PeekMail(Command, tag=44, frozen=True):
    """Look into a mailbox without consuming; answered by RESULT."""

    request: int
    mailbox: str
    after: int = -1
    limit: int = 100
    body_bytes: int = 0
    """Bytes of each body that are shown at most; 0: none."""


class PurgeMail(Command, tag=45, frozen=True):
    """Empty a mailbox; `confirm` repeats its name."""

    request: int
    mailbox: str
    confirm: str


class MailboxInfo(Command, tag=46, frozen=True):
    """Facts about one mailbox, or a page of them when the name ends in `*`."""

    request: int
    mailbox: str
    after: str = ""
    limit: int = 1000


class EditMailbox(Command, tag=47, frozen=True):
    """Create a mailbox or change its settings."""

    request: int
    mailbox: str
    settings: Settings
    replace: bool = False
    """True: settings that are not named go back to their defaults."""


class RemoveMailbox(Command, tag=48, frozen=True):
    """Remove a mailbox with its messages; `confirm` repeats its name."""

    request: int
    mailbox: str
    confirm: str
