"""A cursor's name, checked in the call that was made."""

from __future__ import annotations

import pytest

from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.readers.cursor_name import CursorName


def test_a_cursors_name_is_checked_before_anything_is_asked() -> None:
    with pytest.raises(LocalProtocolError, match="bad_name"):
        CursorName("s", "~hidden")
    assert repr(CursorName("s", "c")) == "<CursorName s/c>"
