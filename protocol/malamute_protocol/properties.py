"""Properties of records: their MessagePack, taken apart and parsed.

Owns what properties may be: maps from strings to scalars. Source: SPEC.md, section 5.5.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from malamute_protocol.errors import BatchError
from malamute_protocol.header import claimed_length

_PROPERTY_MAP = msgspec.msgpack.Decoder(dict[str, Any])
_PROPERTY_MAPS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_SCALARS: Final = frozenset({str, bytes, int, float, bool, type(None)})


def parse_properties(data: bytes) -> dict[str, Any]:
    """Parse one record's properties from their MessagePack, for a reader that asks for them.

    Raises BatchError when they are not a map from strings to scalars.
    """
    try:
        properties = _PROPERTY_MAP.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError("bad_batch", f"the properties: {error}") from error
    for name, value in properties.items():
        if type(value) not in _SCALARS:
            raise BatchError("bad_batch", f"property {name!r} is not a scalar")
    return properties


def split_maps(data: bytes, most: int) -> list[bytes]:
    """Split a MessagePack array of property maps, which rows share, into its unparsed entries.

    Raises BatchError: no such array; `too_large`: it claims more than `most` entries.
    """
    claimed = claimed_length(data)
    if claimed > most:
        raise BatchError("too_large", f"{claimed} property maps, at most {most}")
    try:
        return list(map(bytes, _PROPERTY_MAPS.decode(data)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError("bad_batch", f"the properties: {error}") from error
