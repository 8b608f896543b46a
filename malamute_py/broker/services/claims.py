"""Claims: which requests a worker may answer or acknowledge.

Owns the search for the requests that a worker names. The rules: a worker may name the requests
that it holds, and of several at once all or none; one that comes back after a restart of the
broker still holds what it held before; requests that a lost link of the same holder held may be
ended as long as no other worker holds them. A holder is the worker, whichever its link; `left` is
what it held by a link that was lost, which it may still end. Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.services.absent import AbsentHolder
from malamute_py.broker.services.hand_outs import HandOuts
from malamute_py.broker.services.rows import BatchRows
from malamute_py.broker.services.service import InFlight, Offer, RequestBatch
from malamute_py.broker.structures.bitmaps import lowest, ones, places_of
from malamute_py.changelog.records import Run

NAMED_MAX: Final = 8
"""Requests that a refusal names at most."""


class Claims:
    """Finds the requests that a REPLY or an ACK_WORK names, for Replies."""

    def __init__(self, shard: Shard, hand_outs: HandOuts) -> None:
        self._shard = shard
        self._hand_outs = hand_outs

    def ranges(
        self, offer: Offer, ranges: Iterable[tuple[int, int]], left: AbsentHolder | None = None
    ) -> list[BatchRows]:
        """Return the rows that the ranges of an ACK_WORK name, by batch.

        Raises BrokerRefused unless the holder holds all.
        """
        claimed: dict[RequestBatch, int] = {}
        for first, end in ranges:
            number = first
            while number < end:
                batch, held = self._find(offer, number, left)
                if batch is None:
                    raise BrokerRefused("not_held", _named([number]))
                last = min(end, batch.base + batch.row.put.count)
                wanted = ones(last - number) << (number - batch.base)
                missing = wanted & ~held
                if missing:
                    # One more than is named: the refusal shows that there are more.
                    some = places_of(lowest(missing, NAMED_MAX + 1))
                    raise BrokerRefused("not_held", _named([batch.base + row for row in some]))
                claimed[batch] = claimed.get(batch, 0) | wanted
                number = last
        return list(claimed.items())

    def numbers(
        self, offer: Offer, numbers: list[int], left: AbsentHolder | None = None
    ) -> tuple[list[BatchRows], list[Run], bool]:
        """Return the requests that a REPLY answers, by number: (rows, runs, a number comes twice).

        The runs tell the requesters which of their requests are answered, in the order of the
        numbers: (key of the batch, first row, how many). Raises BrokerRefused unless the holder
        holds all.
        """
        first, count = numbers[0], len(numbers)
        # A run of numbers within one batch needs no loop over them.
        batch, held = self._find(offer, first, left)
        if batch is not None and (
            count == 1
            or (numbers[-1] - first == count - 1 and numbers == list(range(first, first + count)))
        ):
            row = first - batch.base
            wanted = ones(count) << row
            if row + count <= batch.row.put.count and not wanted & ~held:
                return [(batch, wanted)], [(batch.row.put.key, row, count)], False
        claimed: dict[RequestBatch, int] = {}
        runs: list[Run] = []
        missing: list[int] = []
        twice = False
        for number in numbers:
            if batch is None or not 0 <= number - batch.base < batch.row.put.count:
                batch, held = self._find(offer, number, left)
            row = 0 if batch is None else number - batch.base
            bit = 1 << row
            if batch is None or not held & bit:
                missing.append(number)
                continue
            before = claimed.get(batch, 0)
            twice = twice or bool(before & bit)
            claimed[batch] = before | bit
            key = batch.row.put.key
            run_key, begin, length = runs[-1] if runs else (None, 0, 0)
            # `is`: of the same batch.
            if run_key is key and begin + length == row:  # The row prolongs the run before it.
                runs[-1] = key, begin, length + 1
            else:
                runs.append((key, row, 1))
        if missing:
            raise BrokerRefused("not_held", _named(missing))
        return list(claimed.items()), runs, twice

    def ending(self, offer: Offer, claim: Callable[..., Any], named: Any) -> Any:
        """Return what `claim` finds, also among requests that a lost link of the holder held.

        Called where the worker ends requests: its answer may have been on its way when its link was
        lost. claim: ranges() or numbers(), called with `named`. Raises BrokerRefused `not_held`.
        """
        try:
            return claim(offer, named)
        except BrokerRefused:
            left = offer.service.absent.by_holder.get(offer.in_flight.holder)
            if left is None:
                raise
            found = claim(offer, named, left)
        self._shard.counters["requests_ended_late"] += 1
        return found

    def _find(
        self, offer: Offer, number: int, left: AbsentHolder | None = None
    ) -> tuple[RequestBatch | None, int]:
        """Return the batch that a number lies in, and the rows of it that the holder may name.

        None and 0: the holder has nothing of it.
        """
        batch, held = self._in_hand(offer, number)
        if left is not None:
            base, rows = left.rows_at(number)
            left_batch = offer.service.batches.get(base) if rows else None
            if left_batch is not None and number < base + left_batch.row.put.count:
                batch = left_batch
                # Rows that another worker holds, or is about to get, are that worker's to end.
                free = batch.unheld | self._hand_outs.handing_to(offer.in_flight.holder, batch)
                held |= rows & free
        return batch, held

    def _in_hand(self, offer: Offer, number: int) -> tuple[RequestBatch | None, int]:
        """Return the batch that a number lies in, and the rows of it that the holder holds."""
        in_flight, holder = offer.in_flight, offer.in_flight.holder
        batch = _batch_of(in_flight, number)
        if batch is None:
            orphans = offer.service.orphans.get(holder)
            batch = None if orphans is None else _batch_of(orphans, number)
            if batch is None:
                return None, 0
        held = 0
        for lease in batch.leases:
            owner = lease.in_flight
            # A holder may go on with what it held before a restart of the broker.
            is_orphan = owner.offer is None and not owner.ended
            if owner is in_flight or (is_orphan and owner.holder == holder):
                held |= lease.rows
        return batch, held


def _batch_of(in_flight: InFlight, number: int) -> RequestBatch | None:
    """Return the batch in which a number lies, if the worker holds some of it; else None."""
    leases = in_flight.leases_at(number)
    if leases is None:
        return None
    batch = leases[0].batch
    return batch if number < batch.base + batch.row.put.count else None


def _named(numbers: list[int]) -> str:
    """Return the reason of a refusal `not_held`, which names the first few of the numbers."""
    named = ", ".join(map(str, numbers[:NAMED_MAX]))
    more = " and more" if len(numbers) > NAMED_MAX else ""
    return f"not in this worker's hands (any more): {named}{more}"
