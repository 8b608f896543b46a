"""One record of a batch, as a consumer sees it.

Owns nothing but a row number: every attribute is read from the batch's columns when it
is asked for. The rule: iterating builds no more than the rows' own objects.
Source: SPEC.md, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from malamute_protocol.stamp import message_id

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch


class Record(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A row of a batch; keeps the batch alive, so copy `body` out to keep only that."""

    _batch: Batch
    _row: int
    """In the batch as it came, not among the delivered rows."""

    @property
    def batch(self) -> Batch:
        """The batch that it lies in."""
        return self._batch

    @property
    def offset(self) -> int:
        """Position in the stream."""
        return self._batch.offset_of(self._row)

    @property
    def epoch(self) -> int:
        """Epoch of the log when it was appended."""
        return self._batch.stamp.epoch

    @property
    def append_time_ms(self) -> int:
        """The broker's clock at the append."""
        return self._batch.append_time_of(self._row)

    @property
    def id(self) -> bytes:
        """16 bytes that sort in the order of the stream."""
        return message_id(self.append_time_ms, self.offset)

    @property
    def subject(self) -> str:
        """The first key."""
        return self._batch.keys_of(self._row)[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """The subject and further keys."""
        return self._batch.keys_of(self._row)

    @property
    def fields(self) -> Mapping[str, str]:
        """Field values by name, empty when there are none; shared: not to be changed."""
        return self._batch.fields_of(self._row)

    @property
    def body(self) -> bytes:
        """The body. Raises TypeError when the body kind is not blob: use `parts`, `to_arrow`."""
        return self._batch.body_of(self._row)

    @property
    def parts(self) -> list[bytes]:
        """The blobs of the body: one unless the body kind is list."""
        return self._batch.parts_of(self._row)

    @property
    def client_time_ms(self) -> int | None:
        """The producer's time, if it gave one."""
        return self._batch.client_time_of(self._row)

    @property
    def expires_ms(self) -> int | None:
        """When the record expires; None: never."""
        return self._batch.expiry_of(self._row)

    @property
    def properties(self) -> Mapping[str, Any]:
        """What travels with the record and is not matched."""
        return self._batch.properties_of(self._row)

    def __repr__(self) -> str:
        return f"<Record offset={self.offset} subject={self.subject!r}>"
