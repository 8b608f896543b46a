"""A reader's place amid a batch of mail.

Owns what the inboxes of both shells share. The rule: a message is acknowledged when the
reader says so or, if it was asked for so, when the next one is asked for; whatever becomes
of the reader's loop, what was not acknowledged goes to the next reader.

Words: the view is this reader's half of a mailbox that the session has open, which several readers
of the client may share. A delivery is what the broker sent together: batches, or some of their
messages. The batch at hand is the one whose messages are being handed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any, Final, Generic, TypeVar

from malamute_protocol.batch import Batch
from malamute_py.client.arguments import integer, name_of, one_of, settings_of
from malamute_py.client.session.inbox_options import InboxOptions
from malamute_py.client.session.letters import HandedOut, HandoutBatch, chosen, ranges_of, rows_of
from malamute_py.client.session.mailboxes import MailboxView, OpenedMailboxes
from malamute_py.client.words import AckWhen

ACKS: Final = ("next", "manual")
"""Ways to acknowledge mail: by asking for the next, or by a call of the reader's."""

One = TypeVar("One")


def inbox_options(
    mailbox: str | None,
    credit_records: int,
    credit_bytes: int,
    settings: Mapping[str, Any] | None,
    ack: AckWhen,
) -> InboxOptions:
    """Options of an inbox, checked. Raises LocalProtocolError `bad_setting`."""
    one_of("ack", ack, ACKS)
    if mailbox is not None:
        name_of("mailbox", mailbox)
    return InboxOptions(
        mailbox or "",
        integer("credit_records", credit_records, 1),
        integer("credit_bytes", credit_bytes, 1),
        settings_of(settings),
    )


class MailBatchBase(HandedOut, Generic[One]):
    """Messages of one sender that were sent together, less those delivered elsewhere."""

    __slots__ = ("_letter", "_of", "_reader", "batch")

    def __init__(self, letter: Any, batch: Batch, of: HandoutBatch, reader: Any) -> None:
        """letter: class of one message. of: the delivery that they came in. reader: the inbox."""
        self.batch = batch
        """The columns; its offsets are the messages' numbers."""
        self._letter = letter
        self._of = of
        self._reader = reader

    def __len__(self) -> int:
        return len(self.batch)

    def __iter__(self) -> Iterator[One]:
        """Yield the messages; map() makes each without a call of a function of Python."""
        return map(
            self._letter,
            repeat(self.batch),
            rows_of(self.batch),
            repeat(self._of),
            repeat(self._reader),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} number={self.batch.base_offset} messages={len(self)}>"

    @property
    def opened(self) -> Any:
        """Mailbox by which an atomic step acknowledges the messages."""
        return self._reader.opened

    @property
    def numbers(self) -> list[int]:
        """Numbers by which the broker knows the messages."""
        numbers: list[int] = self.batch.offsets.tolist()
        return numbers

    def bodies(self) -> list[bytes]:
        """All bodies; the quick way when nothing else is wanted."""
        return self.batch.bodies()


class InboxBase(Generic[One]):
    """Base of the inboxes of both shells."""

    _letter: Any
    """Class of one message."""

    def __init__(self, mailboxes: OpenedMailboxes, asked: InboxOptions, ack: AckWhen) -> None:
        """Open the mailbox. Raises what ended the session."""
        self._view: MailboxView = mailboxes.read(asked)
        self._mailboxes = mailboxes
        self._acks_next = ack == "next"
        self._batch: Batch | None = None
        """The batch at hand, and the delivery and the rows left of it."""
        self._of: HandoutBatch | None = None
        self._rows: Iterator[int] = iter(())
        self._left = 0
        """Messages of the batch that were not handed over yet."""
        self._last = -1
        """Number of the message handed over last and not acknowledged yet; -1: none."""
        self._last_batch: Batch | None = None
        """Batch handed over last and not acknowledged yet."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._view.ended

    @property
    def opened(self) -> Any:
        """Mailbox as the session has it; a batch hands it to the step that acknowledges it."""
        return self._view.mailbox

    @property
    def not_held(self) -> int:
        """Acknowledgements of this client that came when another reader had the message."""
        return self._mailboxes.not_held

    def _begin(self, delivered: HandoutBatch, batch: Batch) -> None:
        """Begin to iterate the messages of a batch. delivered: the delivery that they came in."""
        self._batch, self._of = batch, delivered
        self._left = len(batch)
        # Not an iterator of messages: it would refer to this reader, which was then given up only
        # when the collector comes, and an idle program's held mail until then.
        self._rows = iter(rows_of(batch))

    def _next_at_hand(self) -> One:
        """Return the next message at hand; the caller has made sure that there is one."""
        mail: One = self._letter(self._batch, next(self._rows), self._of, self)
        self._left -= 1
        if self._acks_next:
            self._last = mail.number  # type: ignore[attr-defined]
        return mail

    def _done_with_last(self) -> bool:
        """Count what was handed over last as read; returns whether there was anything to count.

        With ack="next" the shells call it before they hand over more.
        """
        if self._last >= 0:
            self._view.done(self._last)  # acknowledged together with its neighbours
            self._last = -1
            return True
        if self._last_batch is not None:
            self._view.collect()  # single messages before it go first
            self._view.mailbox.ack(ranges_of(self._last_batch))
            self._last_batch = None
            return True
        return False

    def _rest(self) -> tuple[HandoutBatch, Batch] | None:
        """Take what is left of the batch at hand: (its delivery, the rows left); None: nothing."""
        if not self._left or self._batch is None or self._of is None:
            return None
        batch, of = self._batch, self._of
        if self._left < len(batch):
            rows_left = list(rows_of(batch))[-self._left :]
            batch = chosen(batch, rows_left)
        self._left = 0
        self._rows = iter(())
        return of, batch

    def _handed(self, batch: Batch) -> None:
        """Note the batch that is handed to the caller, to acknowledge it at the next call."""
        if self._acks_next:
            self._last_batch = batch

    def _close(self) -> None:
        """Close the view, which gives back what was not acknowledged."""
        self._left = 0
        self._rows = iter(())
        self._last, self._last_batch = -1, None
        self._mailboxes.close(self._view)
