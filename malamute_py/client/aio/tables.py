"""Tables on their way into typed streams, in asyncio.

Owns the schemas that one caller's tables are cast to. The rule: where a table does not fit the
schema that is known, the broker is asked once more, since the schema may have grown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Unpack

from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.schema import Schemas
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.streams import stream_schemas
from malamute_py.client.session.calls import Properties
from malamute_py.client.session.tables import TableOptions, TableRows


class Tables:
    """The tables that one caller publishes into typed streams."""

    __slots__ = ("_known", "_link")

    def __init__(self, link: LoopLink) -> None:
        self._link = link
        self._known: dict[str, Schemas] = {}
        """Schemas of each stream that a table went to."""

    async def encoded(
        self,
        stream: str,
        table: Any,
        properties: Properties | None,
        **options: Unpack[TableOptions],
    ) -> list[bytes]:
        """Return the contents of all batches of a table: one that is refused gives none.

        Arguments, and what is raised: as of contents(). The event loop has its turn meanwhile.
        """
        encoded = []
        for content, _ in await self.contents(stream, table, properties, **options):
            encoded.append(content)
            await asyncio.sleep(0)  # asyncio only
        return encoded

    async def contents(
        self,
        stream: str,
        table: Any,
        properties: Properties | None,
        **options: Unpack[TableOptions],
    ) -> Iterator[tuple[bytes, int]]:
        """Return the content and the count of records of each batch of a table.

        Arguments: as of Client.publish_table(). Raises LocalProtocolError `bad_schema`: the table
        does not fit the newest schema; BrokerRefused: the stream has no schema, or there is none.
        """
        rows = None
        known = self._known.get(stream)
        if known is not None:
            # Without a question to the broker, where the table fits what is known.
            try:
                rows = TableRows(table, known, **options)
            except LocalProtocolError as error:
                if error.code != "bad_schema":
                    raise
        if rows is None:
            known = self._known[stream] = await stream_schemas(self._link, stream)
            rows = TableRows(table, known, **options)
        publisher = self._link.publisher
        return rows.contents(
            publisher.batch_bytes_of(stream),
            publisher.limits,
            properties,
            publisher.content_bytes_of(stream),
        )
