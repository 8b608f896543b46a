"""An inbox as a program asks for it.

Owns the options of the reading of a mailbox. Source: SPEC.md, section 4.4.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

CREDIT_RECORDS: Final = 8192
CREDIT_BYTES: Final = 8 << 20


class InboxOptions(msgspec.Struct, frozen=True):
    """Options of the reading of a mailbox."""

    mailbox: str
    """Empty: the client's own."""
    credit_records: int = CREDIT_RECORDS
    """Messages that may wait in this client, unread."""
    credit_bytes: int = CREDIT_BYTES
    settings: dict[str, Any] = {}
