"""The bodies of a content: the section that holds them, decompressed, divided and checked.

Owns how a body section is read. The rule: whatever its bytes are, reading it raises BatchError or
works. Source: SPEC.md, section 5.6.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np

from malamute_protocol.codec import CODECS, decompress
from malamute_protocol.columns import I4, Array, check_offsets
from malamute_protocol.content_layout import ARROW, AT, LIST, Head
from malamute_protocol.errors import BatchError
from malamute_protocol.limits import Limits

FEW: Final = 8
"""Records up to which plain Python beats numpy's calls."""
_OFFSETS: Final = tuple(f"<{n + 1}i" for n in range(FEW + 1))


class Bodies(NamedTuple):
    """The body section without codec: Arrow's layout of a binary column, or of a list of them."""

    blob: Any
    """Bytes-like: all bodies back to back."""
    offsets: Array
    """int32[n+1]: of the blob, or, for lists, of the parts."""
    parts: Array | None
    """int32[m+1]: offsets of the blob for each part; None unless the kind is list."""


def read_bodies(head: Head, view: memoryview, at: int, limits: Limits) -> Bodies:
    """Return the bodies, decompressed if need be. Raises BatchError.

    at: position of the body section in the content, of which `view` is the bytes.
    """
    raw_bytes, most = head.body_raw_bytes, limits.batch_bytes_max
    if raw_bytes > most:
        reason = f"a body of {raw_bytes} bytes, at most {most}"
        raise BatchError("too_large", reason, AT.body_raw_bytes)
    stored = view[at : at + head.body_bytes]
    if head.codec:
        if head.codec >= len(CODECS):
            raise BatchError("bad_batch", f"unknown codec {head.codec}", AT.codec)
        section = memoryview(decompress(head.codec, stored, raw_bytes))
    else:
        section = stored
    return _split(head, section, at)


def _split(head: Head, section: Any, at: int) -> Bodies:
    """Divide a decompressed body section into offsets and bytes. Raises BatchError: they disagree.

    at: position of the section in the content, for the error. An Arrow body stays one blob: its
    message has bounds of its own.
    """
    if head.body_raw_bytes != len(section):
        reason = "the body's sizes before and after differ"
        raise BatchError("bad_batch", reason, AT.body_raw_bytes)
    if head.body_kind == ARROW:
        return Bodies(section, np.zeros(0, I4), parts=None)
    n = head.count
    # The section is n+1 offsets of 4 bytes, those of the parts of lists, and the bytes they cut.
    offsets_bytes = 4 * (n + 1)
    parts_bytes = 4 * (head.parts_count + 1) if head.body_kind == LIST else 0
    if offsets_bytes + parts_bytes > len(section):
        raise BatchError("bad_batch", "the body is too short for its offsets", at)
    offsets = np.frombuffer(section, I4, n + 1)
    blob = section[offsets_bytes + parts_bytes :]
    if head.body_kind == LIST:
        parts = np.frombuffer(section, I4, head.parts_count + 1, offsets_bytes)
        check_offsets(offsets, head.parts_count, "list", at)
        check_offsets(parts, len(blob), "part", at + offsets_bytes)
        return Bodies(blob, offsets, parts)
    check_offsets(offsets, len(blob), "body", at)
    return Bodies(blob, offsets, parts=None)


def bounds_of_few(head: Head, view: memoryview, at: int, limits: Limits) -> tuple[int, ...]:
    """Return the body offsets of a few records, checked: one unpack is a tenth of numpy's calls.

    For blobs without a codec, FEW records at most. at: position of the body section in `view`.
    Raises BatchError: they do not span the body section, fall, or a record is over the limit.
    """
    n, size, most = head.count, head.body_bytes, limits.record_bytes_max
    # The section is n+1 offsets of 4 bytes, then the bodies.
    blob_bytes = size - 4 * (n + 1)
    if blob_bytes < 0 or size != head.body_raw_bytes:
        raise BatchError("bad_batch", "the body is too short for its offsets", at)
    bounds = struct.unpack_from(_OFFSETS[n], view, at)
    if bounds[0] != 0 or bounds[-1] != blob_bytes:
        raise BatchError("bad_batch", "the body offsets do not span their data", at)
    start = 0
    for end in bounds:
        if end < start:
            raise BatchError("bad_batch", "the body offsets fall", at)
        if end - start > most:
            raise BatchError("too_large", f"a record of {end - start} bytes, at most {most}", at)
        start = end
    return bounds


def check_record_sizes(head: Head, bodies: Bodies, at: int, limits: Limits) -> None:
    """Raise BatchError if the body of some record is larger than the limit.

    For a content's checks; compressed bodies are judged once a reader has decompressed them.
    """
    most = limits.record_bytes_max
    # An Arrow message is not divided by records. Where all bodies together fit, each does.
    if len(bodies.blob) <= most or head.body_kind == ARROW:
        return
    # Of lists, `offsets` counts parts, and `parts` says at which byte each part begins.
    bounds = bodies.offsets if bodies.parts is None else bodies.parts[bodies.offsets]
    largest = int(np.diff(bounds).max())
    if largest > most:
        raise BatchError("too_large", f"a record of {largest} bytes, at most {most}", at)
