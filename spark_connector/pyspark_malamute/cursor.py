"""A query's cursor at the broker: where the operator sees how far the query is.

Owns what option cursor does. The rules: the cursor names what is in the sink, and is never read
back, for the checkpoint alone says where the query goes on; it moves forward only; a pin keeps
what the query has not read, up to a bound, so that a dead query stops no ring.
Source: SPEC.md, section 4 (cursors) and section 13.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from malamute_protocol.errors import BrokerRefused
from malamute_py.client.position import Position
from malamute_py.client.sync.client import SyncClient
from pyspark_malamute.links import Broker
from pyspark_malamute.offsets import StreamOffset
from pyspark_malamute.options import SourceOptions
from pyspark_malamute.streams import together

LOG = logging.getLogger("pyspark_malamute")


class QueryCursor:
    """The cursor of one name in each stream of a query."""

    def __init__(self, broker: Broker, options: SourceOptions) -> None:
        self._broker = broker
        self._options = options
        self._at: dict[str, StreamOffset] = {}
        """Stream -> position at which this process has created, found or moved the cursor."""

    def open(self, offsets: Mapping[str, StreamOffset]) -> None:
        """Create the cursor, and pin it, in streams where this process has not yet.

        Called before each batch is planned, so that a pin keeps what the query has yet to read.

        Raises SourceUnavailable: the broker refuses that.
        """
        fresh = {name: at for name, at in offsets.items() if self._known(name, at) is None}
        if self._options.cursor and fresh:
            together(lambda name: self._create(name, fresh[name]), fresh)
            self._at.update(fresh)

    def move(self, offsets: Mapping[str, StreamOffset]) -> None:
        """Move the cursors to where a batch ended that is in the sink. Raises SourceUnavailable."""
        nowhere = StreamOffset("", 0, 0)  # for a stream in which no cursor is known
        moved = {
            name: at
            for name, at in offsets.items()
            if at.offset > (self._known(name, at) or nowhere).offset
        }
        if self._options.cursor and moved:
            together(lambda name: self._move(name, moved[name]), moved)
            self._at.update(moved)

    def _known(self, name: str, at: StreamOffset) -> StreamOffset | None:
        """Return where this process last saw the cursor of a stream; None: it never did.

        at: a position in the stream of this name as it is now: one that was made again is another.
        """
        known = self._at.get(name)
        return known if known is not None and known.stream == at.stream else None

    def _create(self, name: str, at: StreamOffset) -> None:
        """Make the query's cursor in a stream, with a pin if the options ask for one.

        One that is there and is ahead of the query stays, and is told of: it may be another's.
        """
        pin = self._options.cursor_pin_bytes
        settings: dict[str, Any] = {"description": "moved by a Spark query"}
        if pin:
            settings |= {"pin": True, "pin_bytes_max": pin}

        def edit(client: SyncClient) -> int:
            """Make or change the cursor; return where it stands."""
            cursor = client.cursor(name, self._options.cursor)
            return cursor.edit(settings, start=_position(at)).next

        doing = "pin a cursor" if pin else "make a cursor"
        stands = self._broker.ask(doing, edit, self._options.of(name))
        if stands > at.offset:
            LOG.warning(
                "malamute source: cursor '%s' of stream '%s' stands at offset %d, and this query "
                "is at %d: does another query move it? It shows neither's lag then, and keeps "
                "nothing for the slower one. Give each query a cursor of its own",
                self._options.cursor, name, stands, at.offset,
            )  # fmt: skip

    def _move(self, name: str, at: StreamOffset) -> None:
        """Move the query's cursor in a stream; if the broker refuses, it stays."""

        def move(client: SyncClient) -> None:
            """Move the cursor, unless the broker sees a conflict."""
            try:
                client.cursor(name, self._options.cursor).move(_position(at))
            except BrokerRefused as error:
                if error.code != "conflict":
                    raise
                LOG.info("malamute source: cursor '%s' of stream '%s' stays where it is: %s",
                         self._options.cursor, name, error)  # fmt: skip

        self._broker.ask("move a cursor", move, self._options.of(name))


def _position(at: StreamOffset) -> Position:
    """Return a position of a checkpoint as the client takes it."""
    return Position(bytes.fromhex(at.stream), at.epoch, at.offset)
