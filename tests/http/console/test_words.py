"""Values that a person types: places in a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from malamute_py.client.position import AtTime
from malamute_py.http.console.actions import reset_cursor
from malamute_py.http.console.words import NotUnderstood, start_point

HOUR_MS = 3_600_000


def test_a_time_before_now_is_taken_by_the_clock_of_the_broker() -> None:
    assert start_point("now-1h", 5 * HOUR_MS) == AtTime(4 * HOUR_MS)
    assert start_point("now", 5 * HOUR_MS) == AtTime(5 * HOUR_MS)


async def test_a_cursor_stays_where_it_is_while_the_broker_does_not_tell_its_time() -> None:
    """An hour before an unknown time was taken for 1970: its readers had all records again."""

    async def broker_ms() -> int:
        return 0  # The facts of the broker did not come in time.

    session: Any = SimpleNamespace(broker_ms=broker_ms, client=None)
    with pytest.raises(NotUnderstood, match="does not tell its time"):
        await reset_cursor(session, {"stream": ["s"], "name": ["c"], "point": ["now-1h"]})
    assert start_point("2026-01-31T10:00", 0) == AtTime(1_769_853_600_000)


@pytest.mark.parametrize("text", ["9" * 30, "0" * 30 + "9" * 30, "0" * 5_000])
def test_a_number_beyond_any_offset_is_no_place_also_with_zeros_before_it(text: str) -> None:
    with pytest.raises(NotUnderstood, match="no place in a stream"):
        start_point(text, 0)
