"""A member's reader: what was handed over last, and whose records are acknowledged."""

from __future__ import annotations

import pytest

from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.readers.group import MemberBase, numbers_of
from tests.client.session.grouped import Grouped, rewound_after


def test_what_was_handed_over_last_is_looked_at_when_it_is_done() -> None:
    script = Grouped()
    old = rewound_after(script, 2)
    handed = MemberBase("next", False, None)
    handed._handing(old, [1, 2])
    assert handed._take_handed() == [1, -3]
    assert handed._take_handed() == []


def test_a_record_of_another_member_is_not_this_ones_to_acknowledge() -> None:
    script = Grouped()
    other = script.join(group="other")
    script.hand(1, 0)
    batch = script.take()
    for held in (batch, next(iter(batch)), b"something"):
        with pytest.raises(LocalProtocolError, match="did not come from this member"):
            numbers_of(held, other)
