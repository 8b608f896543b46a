"""Names of streams, mailboxes and services, and their addresses as URIs.

Owns which names are allowed. The rule: what is reserved is refused today, so that it
can be given a meaning later without breaking anyone. Source: SPEC.md, section 12.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from malamute_protocol.errors import LocalProtocolError

NAME_BYTES_MAX: Final = 255
KINDS: Final = ("stream", "mailbox", "service")
SCHEME: Final = "malamute://"

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=-]*", re.ASCII)


class Address(NamedTuple):
    """A place at a broker: malamute://BROKER/KIND/NAME."""

    broker: str
    """Host with an optional port, as the user wrote it."""
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.broker}/{self.kind}/{self.name}"


def name_fault(name: str) -> str:
    """Why a name is not allowed; "" when it is."""
    if not name:
        return "a name must not be empty"
    if len(name) > NAME_BYTES_MAX:
        return f"a name has at most {NAME_BYTES_MAX} bytes, not {len(name)}"
    for reserved in "{}~":
        if reserved in name:
            return f"{reserved!r} in a name is reserved"
    if not _NAME.fullmatch(name):
        return (
            f"{name!r}: a name is made of letters, digits and _ . : @ + = - and starts with a "
            "letter, a digit or _"
        )
    return ""


def parse_address(text: str) -> Address:
    """The parts of an address.

    Raises LocalProtocolError `bad_name`: not an address, or its name is not allowed.
    """
    parts = text.removeprefix(SCHEME).split("/") if text.startswith(SCHEME) else []
    if len(parts) != 3 or parts[1] not in KINDS or not parts[0]:
        raise LocalProtocolError(
            "bad_name", f"{text!r} is no address; write {SCHEME}BROKER/stream/NAME"
        )
    fault = name_fault(parts[2])
    if fault:
        raise LocalProtocolError("bad_name", fault)
    return Address(*parts)
