"""The forms of rows in the tables, byte for byte as earlier versions wrote them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from malamute_py.changelog.settings import (
    CursorSettings,
    GroupSettings,
    MailboxSettings,
    ServiceSettings,
)
from malamute_py.changelog.tables import (
    CursorRow,
    GroupRow,
    MailboxRow,
    ServiceRow,
    StagedRow,
    TransactionRow,
)
from malamute_py.store import forms

ID = bytes(range(16))
MAILBOX, SERVICE = MailboxSettings(ttl_ms=7), ServiceSettings(lease_ms=8)
CURSOR, GROUP = CursorSettings(pin=True), GroupSettings(attempts_max=3)


@pytest.mark.parametrize(
    ("form", "key", "row", "array"),
    [
        (forms.MAILBOXES, 4, MailboxRow(4, "desk", MAILBOX, "ann", 9),
         [4, "desk", MAILBOX, "ann", 9]),
        (forms.SERVICES, 5, ServiceRow(5, "upper", SERVICE, "", 9),
         [5, "upper", SERVICE, "", 9]),
        (forms.CURSORS, (2, "etl"), CursorRow(2, "etl", 41, CURSOR, 9, "ann", 3),
         [2, "etl", 41, CURSOR, 9, "ann", 3]),
        (forms.GROUPS, (2, "crew"),
         GroupRow(2, "crew", "keyed", b"#", 41, [(43, 45)], 9, "ann", 3, True, GROUP),
         [2, "crew", "keyed", b"#", 41, [(43, 45)], 9, "ann", 3, True, GROUP, [], None]),
        (forms.TRANSACTIONS, ID, TransactionRow(ID, "~12", "ann", 9, 500, 10),
         [ID, "~12", "ann", 9, 500, 10]),
        (forms.STAGED, 77, StagedRow(77, ID, 1, 2, 3, 400, 9),
         [77, ID, 1, 2, 3, 400, 9]),
    ],
)  # fmt: skip
def test_a_row_is_the_array_of_its_fields_in_the_order_of_earlier_versions(
    form: forms.Form[Any, Any], key: Any, row: Any, array: list[Any]
) -> None:
    packed = form.pack(key, row)
    assert packed[4:] == msgspec.msgpack.encode(array)
    assert form.unpack(packed) == (key, row)
