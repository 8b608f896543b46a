"""Names of streams, mailboxes and services.

Owns which names are allowed. The rule: reserved names are refused today, so that they can be given
a meaning later without breaking any program. Source: SPEC.md, section 12.
"""

from __future__ import annotations

import re
from typing import Final

NAME_BYTES_MAX: Final = 255
REPLICA: Final = "{n}"
"""Text in a template of identities, as `web-{n}`, that stands for the number of a replica: one of
several processes of one program, to which the broker gives the numbers."""
REPLICA_DIGITS: Final = 7
"""Digits that a number may have beside the rest of a template."""

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=-]*", re.ASCII)


def name_fault(name: str) -> str:
    """Say why a name is not allowed; "" when it is.

    Asked of each name that a client, an option or a configuration brings.
    """
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


def is_template(identity: str) -> bool:
    """Whether an identity that is asked for is a template, which has braces as no name has."""
    return "{" in identity or "}" in identity


def template_fault(template: str) -> str:
    """Say why a template of identities is not allowed; "" when it is.

    Asked by the client that wants one, by the broker, and of a configuration.
    """
    if template.count(REPLICA) != 1 or is_template(template.replace(REPLICA, "", 1)):
        return f"{template!r}: a template has {REPLICA} once, and no other braces"
    # The longest number makes the longest name.
    return name_fault(template.replace(REPLICA, "0" * REPLICA_DIGITS))


def replica_name(template: str, number: int) -> str:
    """Return the identity that a template of identities gives to the replica of a number."""
    return template.replace(REPLICA, str(number))


def replica_number(template: str, name: str) -> int:
    """Return the number of the replica to which a template gives an identity; -1: it gives none.

    name: the identity. A broker asks whose user an identity is, and a client which number it had.
    """
    head, _, tail = template.partition(REPLICA)
    digits = name[len(head) : len(name) - len(tail)]
    if not (0 < len(digits) <= REPLICA_DIGITS and digits.isdecimal()):
        return -1
    number = int(digits)
    # Compared with the name made anew, which has no leading zeros.
    return number if replica_name(template, number) == name else -1
