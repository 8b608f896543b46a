"""Bound keys: whether a writer that is bound to subjects may publish all keys of a batch.

Owns the comparison of a batch's keys with the permission `write_subjects`. The rules: one record
under another key refuses the whole batch; a batch has at most as many keys as one turn of the loop
has time to compare. Source: docs/design.md, Safety.
"""

from __future__ import annotations

from collections.abc import Callable

from malamute_protocol.content import Content
from malamute_protocol.errors import BrokerRefused

BOUND_KEYS_MAX = 8_192
"""Keys and fields of one batch of a writer that is bound to subjects: each key is compared."""


def foreign_key(content: Content, may_publish: Callable[[str], bool]) -> str | None:
    """Return a key of a batch under which its writer may not publish; None: there is none.

    A key is a subject of a record, or a further key of its header. Raises BrokerRefused
    `too_large`: there are too many to compare.
    """
    if content.table.entries > BOUND_KEYS_MAX:
        raise BrokerRefused(
            "too_large", f"at most {BOUND_KEYS_MAX} keys and fields a batch for a bound writer"
        )
    no_subject = ("",)  # What a record without a key is published under.
    for keys in content.table.keys or [no_subject]:
        for key in keys or no_subject:
            if not may_publish(key):
                return key
    return None


def not_under(stream: str, key: str) -> str:
    """Return the reason for which a batch with a foreign key is refused."""
    return f"you may not write to stream '{stream}' under '{key}'"
