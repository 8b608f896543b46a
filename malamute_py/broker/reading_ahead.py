"""Messages that are read before they are received, over several turns where they are large.

Owns what of a link's next message is still to be read: its large header tables, within each turn's
share, and the batches that a thread of the shell validates. The rule: a message that waits delays
its own link alone. Source: docs/design.md, Matching; SPEC.md, section 5.9.

A header table has each distinct header of a batch once; a large one takes long to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malamute_protocol.commands import Command
from malamute_protocol.content import Content
from malamute_protocol.content_layout import has_large_table
from malamute_protocol.errors import BatchError
from malamute_py.broker.context import Shard
from malamute_py.broker.links.links import Links
from malamute_py.broker.ready import BatchChecked
from malamute_py.broker.streams.validation import Validation
from malamute_py.broker.subscriptions.matching import Matching


class ReadingAhead:
    """The messages that wait to be received until they are read."""

    def __init__(
        self, shard: Shard, links: Links, matching: Matching, validation: Validation
    ) -> None:
        self._shard = shard
        self._links = links
        self._matching = matching
        self._validation = validation
        self.unread = False
        """Whether header tables of a message that waits are still to be read in steps."""

    def read(
        self, link: int, commands: Sequence[Command], frames: Sequence[Any], now_ms: int
    ) -> bool:
        """Read large header tables of a peer's next message, within this turn's share.

        Called by the shell for a large message before Broker.receive(), so that the message takes
        no turn of the loop for itself. Batches that are to be validated in full are put on their
        way to a thread. frames: the content frames of that message. False: they are still to be
        read; the message is to be received when a later turn says True, with the same frames.
        """
        self._shard.advance(now_ms)
        peer = self._links.get(link)
        if peer is None:
            return True
        try:
            if not peer.reading:  # The first call for this message.
                peer.reading = list(map(Content, filter(has_large_table, frames)))
            for content in peer.reading:
                if not self._matching.read(content):
                    self.unread = True
                    return False
            if not self._validation.validated(peer, commands, frames):
                return False
        except BatchError:
            pass  # Broker.receive() refuses the message by that name.
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            self._links.fail(peer, "reading headers", error)
        self._shard.was_read(peer.reading)  # receive() finds these contents by their frames.
        peer.reading = []
        return True

    def validating(self, link: int) -> bool:
        """Whether a peer's next message waits for a thread that validates its batches.

        The shell then gives the peer no turn before the answer.
        """
        peer = self._links.get(link)
        return peer is not None and peer.verdicts is not None

    def checked(self, answer: BatchChecked) -> int:
        """Take the answer to a BatchCheck.

        Returns the number of the link that sent the batch: the shell gives it turns again.
        """
        link = self._validation.checked(answer)
        if answer.error is not None and link.open:
            self._links.fail(link, "validating a batch", answer.error)
        return link.number
