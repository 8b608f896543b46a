"""The broker's time, whatever is done to the system's clock."""

from __future__ import annotations

from malamute_py.server.clock import Clock

MS = 1_000_000


class Clocks:
    """A wall clock that may be set, and one that cannot."""

    def __init__(self) -> None:
        self.wall = 1_700_000_000_000 * MS
        self.steady = 5 * MS
        self.clock = Clock(lambda: self.wall, lambda: self.steady)

    def after(self, ms: int) -> int:
        self.wall += ms * MS
        self.steady += ms * MS
        return self.clock()


def test_it_is_the_wall_clock() -> None:
    clocks = Clocks()
    begin = clocks.clock()
    assert begin == 1_700_000_000_000
    assert clocks.after(1) == begin + 1
    clocks.wall += 3_600_000 * MS  # Set forward, or asleep.
    assert clocks.after(1) == begin + 3_600_002


def test_a_wall_clock_that_is_set_back_slows_it_until_it_has_caught_up() -> None:
    clocks = Clocks()
    begin = clocks.clock()
    clocks.wall -= 3_600_000 * MS
    assert [clocks.after(1_000) - begin for _ in range(4)] == [500, 1_000, 1_500, 2_000]
    assert clocks.after(7_196_000) == begin + 3_600_000
    assert clocks.after(10_000) == begin + 3_610_000


def test_asked_often_it_still_goes_on() -> None:
    clocks = Clocks()
    begin = clocks.clock()
    clocks.wall -= 60_000 * MS
    for _ in range(10_000):
        clocks.wall += 1
        clocks.steady += 3 * MS // 1_000
        clocks.clock()
    assert clocks.clock() == begin + 15
