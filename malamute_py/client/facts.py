"""What a broker tells about itself, typed.

Owns the client's types for the answers to administration commands. The rule: a field that
this version does not know is kept in `more`, and one that a broker leaves out has a default.
Source: SPEC.md, section 4.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from malamute_protocol.errors import RemoteProtocolError

Uuid: TypeAlias = bytes
"""16 bytes. An alias, because facts have a field that is called `bytes`."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Base: facts by name, and those without a field of their own in `more`."""

    more: dict[str, Any] = {}


class StreamFacts(Facts, frozen=True, kw_only=True):
    """One stream."""

    name: str = ""
    uuid: Uuid = b""
    epoch: int = 0
    first: int = 0
    """Oldest offset that can be read."""
    tail: int = 0
    """Offset after the newest record."""
    bytes: int = 0
    settings: dict[str, Any] = {}
    subscriptions: int = 0

    @property
    def records(self) -> int:
        """Records that can be read."""
        return self.tail - self.first


class BrokerFacts(Facts, frozen=True, kw_only=True):
    """The broker."""

    software: str = ""
    uuid: Uuid = b""
    epoch: int = 0
    counters: dict[str, int] = {}


class LinkFacts(Facts, frozen=True, kw_only=True):
    """One link of a client."""

    link: int = 0
    identity: str = ""
    software: str = ""
    state: str = ""
    subscriptions: int = 0


class Split(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a planned read: offsets [from_offset, to_offset) and its bytes in the journal."""

    from_offset: int
    to_offset: int
    bytes: int


class ReadPlan(Facts, frozen=True, kw_only=True, rename={"from_offset": "from", "to_offset": "to"}):
    """A bounded read, planned by the broker from its index."""

    stream: Uuid = b""
    """UUID of the stream."""
    epoch: int = 0
    first: int = 0
    tail: int = 0
    from_offset: int = 0
    to_offset: int = 0
    splits: list[Split] = []
    records: int = 0
    bytes: int = 0
    rewound: bool = False


Kind = TypeVar("Kind", bound=Facts)


def facts(kind: type[Kind], value: Mapping[str, Any]) -> Kind:
    """The facts of an answer. Raises RemoteProtocolError: a known one is of another type."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    plain = {name: fact for name, fact in value.items() if name in known}
    plain["more"] = {name: fact for name, fact in value.items() if name not in known}
    try:
        return msgspec.convert(plain, kind, strict=False)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(
            "malformed", f"the facts of a {kind.__name__}: {error}"
        ) from error


def fact_list(kind: type[Kind], value: Mapping[str, Any], name: str) -> list[Kind]:
    """A list of facts under `name`. Raises RemoteProtocolError as facts() does."""
    entries = value.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RemoteProtocolError("malformed", f"the answer has no list of maps {name!r}")
    return [facts(kind, entry) for entry in entries]
