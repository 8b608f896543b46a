"""Bitmaps over pages give the same answers as a dictionary of offsets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from malamute_py.broker.groups.holdings import (
    FEW_RANGES,
    PAGE,
    Holdings,
    _closed_runs,
    _few_closed_runs,
)
from malamute_py.broker.structures.bitmaps import ones
from malamute_py.changelog.ranges import with_done
from tests.seeds import seeds


def places(bits: int, base: int = 0) -> list[int]:
    digits = bin(bits)[:1:-1]
    return [base + place for place, digit in enumerate(digits) if digit == "1"]


@pytest.mark.moderate
def test_runs_are_the_same_one_by_one_and_by_array() -> None:
    dice = random.Random(2)
    for _ in range(2_000):
        limit = dice.choice([5, 64, 500, PAGE])
        mask = dice.getrandbits(limit) & dice.getrandbits(limit)
        if dice.random() < 0.5:
            mask &= dice.getrandbits(limit) & dice.getrandbits(limit)
        mask = mask or 1 << dice.randrange(limit)
        still_open = dice.getrandbits(limit) & ~mask
        if dice.random() < 0.3:
            still_open &= dice.getrandbits(limit) & ones(limit // 2)
        found = _few_closed_runs(still_open, mask, limit)
        assert found == _closed_runs(still_open, mask, limit)


@pytest.mark.parametrize("count", [5, FEW_RANGES, FEW_RANGES + 1, 300])
def test_ranges_over_several_pages_are_picked_by_pages(count: int) -> None:
    holdings = Holdings(0)
    holdings.take_in(0, ones(3 * PAGE))
    holdings.read = 3 * PAGE
    holdings.hand(0, ones(3 * PAGE), "a", 1)
    step = 2 * PAGE // count
    ranges = [(n * step + 7, n * step + 9) for n in range(count)]
    ranges.append((2 * PAGE - 5, 2 * PAGE + 5))
    picked = holdings.pick("a", ranges, False)
    assert picked is not None
    wanted = sorted(offset for first, end in ranges for offset in range(first, end))
    assert [offset for page, mask in picked for offset in places(mask, page.base)] == wanted
    holdings.release({"a"})
    holdings.hand(0, ones(PAGE + 7), "a", 1)
    assert holdings.pick("a", ranges, False) is None
    assert holdings.pick("a", ranges, True) == picked


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(2, 5))
def test_what_is_done_is_merged_like_a_set_of_offsets(seed: int) -> None:
    dice = random.Random(seed)
    next, done, model = 0, list[tuple[int, int]](), set[int]()
    for _ in range(400):
        first = dice.randrange(next // 2, next + 3_000)
        starts = sorted(dice.sample(range(first, first + 500), dice.randint(1, 20)))
        ranges = [(start, start + dice.choice([1, 1, 3, 60])) for start in starts]
        before = done[:]
        kept = done
        next, done = with_done(next, done, ranges)
        assert kept == before, "the row of an earlier state is not touched"
        model.update(offset for start, end in ranges for offset in range(start, end))
        low = 0
        while low in model:
            low += 1
        runs = [(start, end) for start, end in runs_of(model) if start > low]
        assert (next, done) == (low, runs)


def runs_of(numbers: set[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def test_offsets_that_are_not_held_are_not_picked() -> None:
    holdings = Holdings(0)
    holdings.take_in(0, (1 << 100) - 1)
    holdings.read = 100
    holdings.hand(0, (1 << 50) - 1, "a", 1)
    assert holdings.pick("a", [(0, 50)], False) is not None
    assert holdings.pick("a", [(0, 51)], False) is None
    assert holdings.pick("a", [(0, 51)], True) is not None
    assert holdings.pick("b", [(0, 1)], False) is None
    assert holdings.pick("a", [(0, 10), (PAGE, PAGE + 1)], False) is None
    far = [(2**64 - 100 + n, 2**64 - 99 + n) for n in range(0, 90, 2)]
    assert holdings.pick("a", far, True) is None
    assert holdings.pick("a", [(0, 1), *far], True) is None


def test_what_is_done_beside_is_said_to_be_done_too() -> None:
    holdings = Holdings(10)
    # Of 10 to 30 only 15 and 20 are selected.
    holdings.take_in(10, 1 << 5 | 1 << 10)
    holdings.read = 30
    holdings.hand(10, 1 << 5 | 1 << 10, "a", 1)
    picked = holdings.pick("a", [(20, 21)], False)
    assert picked is not None
    assert holdings.ranges(picked, 10) == [(16, 30)]
    picked = holdings.pick("a", [(15, 16), (20, 21)], False)
    assert picked is not None
    assert holdings.ranges(picked, 10) == [(10, 30)]


class Model:
    """Accounting of a group's records in a dictionary: offset -> state."""

    def __init__(self) -> None:
        self.where: dict[int, Any] = {}
        self.read = 0

    def of(self, *where: Any) -> list[int]:
        return sorted(offset for offset, place in self.where.items() if place in where)

    @property
    def low(self) -> int:
        return min(self.where, default=self.read)


@pytest.mark.moderate
@pytest.mark.parametrize("seed", seeds(3, 8))
def test_holdings_agree_with_a_dictionary(seed: int) -> None:
    dice = random.Random(seed)
    holdings, model = Holdings(0), Model()
    logged: tuple[int, list[tuple[int, int]]] = (0, [])
    for _ in range(60):
        match dice.choice(["read", "hand", "hand", "done", "done", "back", "leave", "gone"]):
            case "read":
                count = dice.choice([1, 40, 900, 5_000])
                bits = dice.choice([(1 << count) - 1, dice.getrandbits(count)])
                if bits:
                    holdings.take_in(model.read, bits)
                model.where |= dict.fromkeys(places(bits, model.read), "waiting")
                model.read += count + dice.choice([0, 0, 3, 6_000])
                holdings.read = model.read
            case "hand" if model.of("waiting"):
                base = dice.choice(model.of("waiting"))
                end = base + dice.choice([1, 30, 5_000])
                bits = holdings.waiting_in(base, end)
                chosen = [offset for offset in model.of("waiting") if base <= offset < end]
                assert places(bits, base) == chosen
                member = dice.choice("abc")
                holdings.hand(base, bits, member, 1)
                model.where |= dict.fromkeys(chosen, member)
            case "done" | "back" as what:
                member = dice.choice("abc")
                mine = model.of(member)
                if not mine:
                    continue
                some = sorted(dice.sample(mine, dice.randint(1, min(len(mine), 60))))
                if dice.random() < 0.5:
                    first = dice.choice(mine)
                    some = [offset for offset in mine if first <= offset < first + 3_000]
                picked = holdings.pick(member, [(offset, offset + 1) for offset in some], False)
                assert picked is not None
                if what == "done":
                    logged = with_done(*logged, holdings.ranges(picked, logged[0]))
                for page, mask in picked:
                    held, waited = holdings.unhand(page, member, mask)
                    assert (held, waited) == (mask, 0)
                    if what == "back":
                        holdings.wait(page, mask)
                        continue
                    holdings.withhold(page, mask)
                    holdings.finish(page, mask)
                for offset in some:
                    if what == "done":
                        del model.where[offset]
                    else:
                        model.where[offset] = "waiting"
                holdings.tidy()
            case "leave":
                member = dice.choice("abc")
                holdings.release({member})
                model.where |= dict.fromkeys(model.of(member), "waiting")
            case "gone":
                first = model.low + dice.choice([0, 10, 2_000])
                closed = holdings.close_waiting(model.low, first)
                gone = [offset for offset in model.of("waiting") if offset < first]
                assert sum(mask.bit_count() for _, mask in closed) == len(gone)
                for offset in gone:
                    del model.where[offset]
        assert holdings.low == model.low
        assert holdings.waiting == len(model.of("waiting"))
        assert holdings.held == len(model.of("a", "b", "c"))
        # The log may lag; it never has an open offset as done.
        next, done = logged
        assert next <= model.low
        assert not any(first <= offset < end for first, end in done for offset in model.where)
    assert holdings.since("a") == (1 if model.of("a") else 0)


def test_everything_acknowledged_needs_no_page() -> None:
    holdings = Holdings(0)
    for base in range(0, 40_000, 1_000):
        holdings.take_in(base, (1 << 1_000) - 1)
        holdings.read = base + 1_000
        holdings.hand(base, (1 << 1_000) - 1, "a", 1)
        picked = holdings.pick("a", [(base, base + 1_000)], False)
        assert picked is not None
        assert holdings.ranges(picked, base) == [(base, base + 1_000)]
        for page, mask in picked:
            holdings.unhand(page, "a", mask)
            holdings.withhold(page, mask)
            holdings.finish(page, mask)
        holdings.tidy()
        assert len(holdings.pages) <= 1
    assert holdings.low == holdings.read == 40_000
