"""One record, message, request or reply, from a caller's arguments to the content of a batch.

Owns the row that is gathered and the encoding of rows. The rule: a row is checked when it is made,
and costs one object: what few rows have lies in a second one (More). A row's packing is its codec,
and whether its body is a list of blobs; rows of a batch agree in it. Source: SPEC.md, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from malamute_protocol.batch import Batch, Content, Options, encode, encode_lists
from malamute_protocol.codec import CODECS
from malamute_protocol.content_layout import LIST
from malamute_protocol.limits import Limits
from malamute_protocol.stamp import STAMP_BYTES, Stamp

ROW_BYTES: Final = 24
"""Bytes that a row is assumed to cost beside its body."""


class More(msgspec.Struct, gc=False):
    """The parts of a row that most rows leave out."""

    fields: Mapping[str, str] | None = None
    client_time_ms: int | None = None
    expires_at_ms: int | None = None
    properties: Mapping[str, Any] | None = None


class Packing(NamedTuple):
    """Form of a batch's bodies, where these are not one blob each without a codec."""

    lists: bool
    """Whether a body is a list of blobs."""
    codec: int
    """Number of the codec; 0: none."""


PACKINGS: Final[dict[tuple[bool, int], Packing | None]] = {
    (lists, codec): Packing(lists, codec) if lists or codec else None
    for lists in (False, True)
    for codec in range(len(CODECS))
}
"""The one Packing of each form, so that two are compared by identity; None: the plain form."""


class OutgoingRow(msgspec.Struct, gc=False):
    """One record, message, request or reply.

    A NamedTuple takes four times as long to make. The collector does not see rows: what
    keeps one drops it at its end, since a token may refer to what keeps the row.
    """

    body: bytes | list[bytes]
    size: int
    """Bytes of the body."""
    subject: str | Sequence[str]
    token: Any
    """Object at which the caller waits; None: no caller waits for this row any more."""
    more: More | None = None
    packing: Packing | None = None
    """None: one blob, and no codec. Rows of one batch agree in it."""


def size_of(rows: Sequence[OutgoingRow]) -> int:
    """Bytes that rows are assumed to take in a batch, for the window, before they are encoded."""
    return sum(row.size + ROW_BYTES for row in rows)


def content_of(
    rows: Sequence[OutgoingRow], limits: Limits, producer: tuple[int, int, int] = (0, 0, 0)
) -> bytes:
    """Return rows of one packing, encoded as the content of a batch that is about to leave.

    producer: its id and epoch, and the sequence of the first row; zeros: none, as in all batches
    but numbered records. Raises LocalProtocolError: a row cannot be encoded.
    """
    producer_id, producer_epoch, first_sequence = producer
    first = rows[0].subject
    if len(rows) == 1:
        # Three comprehensions for one row would cost more than the rest.
        bodies: list[Any] = [rows[0].body]
        subjects, more = [first], [rows[0].more]
    else:
        bodies = [row.body for row in rows]
        subjects = [row.subject for row in rows]
        more = [row.more for row in rows]
    # One subject for all is cheaper than a column. A list is a subject with further keys.
    same = isinstance(first, str) and subjects.count(first) == len(subjects)
    options: Options = {
        "subject": first if same else subjects,
        "producer_id": producer_id,
        "producer_epoch": producer_epoch,
        "first_sequence": first_sequence,
        "limits": limits,
    }
    if more.count(None) != len(more):
        _add_columns(options, [_NO_MORE if one is None else one for one in more])
    packing = rows[0].packing
    if packing is None:
        return encode(bodies, **options)
    options["codec"] = packing.codec
    return (encode_lists if packing.lists else encode)(bodies, **options)


def _add_columns(options: Options, more: list[More]) -> None:
    """Add what few rows have to the options of the encoder, as a column with a value a row.

    A column in which no row has a value is left out.
    """
    for name in More.__struct_fields__:
        column = [getattr(one, name) for one in more]
        if column.count(None) != len(column):
            if name == "expires_at_ms":  # the encoder's word for never is 0, not None
                column = [0 if time is None else time for time in column]
            options[name] = column  # type: ignore[literal-required]


def rows_of_content(content: Any) -> list[OutgoingRow]:
    """Return the rows of an encoded content that must leave in several batches, as it is too large.

    The rows have no tokens: a caller that waits for the content waits for all of them.
    """
    parsed = Content(memoryview(content))
    # Batch reads the records, and wants the broker's stamp: this content is in no log, so zeros do.
    stamp = Stamp(
        flags=0, lsn=0, bundle_lsn=0, synced_lsn=0, epoch=0, base_offset=0, append_time_ms=0,
        stream=0, origin=0, size=STAMP_BYTES + len(content), count=parsed.head.count,
        control_kind=0, content_crc=parsed.head.content_crc,
    )  # fmt: skip
    records = list(Batch(stamp, parsed).records())
    lists = parsed.head.body_kind == LIST
    packing = PACKINGS[lists, parsed.head.codec]
    bodies = [record.parts if lists else record.body for record in records]
    return [
        OutgoingRow(
            body,
            len(body) if isinstance(body, bytes) else sum(map(len, body)),
            record.keys,
            token=None,
            more=More(
                record.fields or None,
                record.client_time_ms,
                record.expires_at_ms,
                record.properties or None,
            ),
            packing=packing,
        )
        for body, record in zip(bodies, records, strict=True)
    ]


_NO_MORE: Final = More()
