"""Passwords to check: the order in which they are hashed, and pauses after wrong ones.

Owns the order, for one hash takes 50 ms and any peer may ask for one, and the pauses after wrong
passwords. The rules: each address has its turn, and within an address each name; names that no user
has share one turn. A pause is for a name at an address, whether a user has the name or not: neither
the user at another address nor the address's other users wait for it, and the pauses tell no names
of users. Both tables have a bound. No clock and no threads: time is an argument. Source:
ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, Final, Generic, NamedTuple, TypeVar

Job = TypeVar("Job")

_FREE: Final = 5
"""Wrong passwords for a name from an address before the first pause."""
_PAUSE_MIN_MS: Final = 500
_PAUSE_MAX_MS: Final = 60_000
_FORGOTTEN_MS: Final = 600_000
"""Time without a wrong password after which a name at an address begins anew."""
_PAUSES_MAX: Final = 10_000


class Origin(NamedTuple):
    """The address and the name of an attempt: pauses and turns are kept by both."""

    address: str
    name: str


class _Wrong:
    __slots__ = ("at_ms", "count", "until_ms")

    def __init__(self) -> None:
        self.count = 0
        self.at_ms = self.until_ms = 0


class Pauses:
    """Names at addresses that must wait before another of their passwords is hashed."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[Origin, _Wrong] = OrderedDict()

    def __len__(self) -> int:
        return len(self._wrong)

    def holds(self, place: Origin, now_ms: int) -> bool:
        """Whether a password is denied without being hashed."""
        wrong = self._wrong.get(place)
        return wrong is not None and now_ms < wrong.until_ms

    def failed(self, place: Origin, now_ms: int) -> int:
        """Count a wrong password; returns the pause that begins, in milliseconds, or 0."""
        wrong = self._wrong.pop(place, None)
        if wrong is None or now_ms - wrong.at_ms > _FORGOTTEN_MS:
            wrong = _Wrong()
        self._wrong[place] = wrong
        while len(self._wrong) > _PAUSES_MAX:
            self._wrong.popitem(last=False)
        wrong.at_ms = now_ms
        wrong.count += 1
        if wrong.count < _FREE:
            return 0
        pause_ms = min(_PAUSE_MAX_MS, _PAUSE_MIN_MS << min(wrong.count - _FREE, 16))
        wrong.until_ms = now_ms + pause_ms
        return pause_ms

    def succeeded(self, place: Origin) -> None:
        """Forget the wrong passwords of a place."""
        self._wrong.pop(place, None)


class Turns(Generic[Job]):
    """Attempts that wait for a hash: addresses in turn, and the names of each in turn."""

    def __init__(self, *, all_max: int, address_max: int, place_max: int) -> None:
        """Bounds of the attempts that wait: in all, of one address, for one name at one address."""
        self._bounds = all_max, address_max, place_max
        self._addresses: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, place: Origin, job: Job) -> Job | None:
        """Have an attempt wait; returns one that must not wait any longer, this one or another.

        When all places are taken, the address with the most attempts loses its last one.
        """
        all_max, address_max, place_max = self._bounds
        names = self._addresses.setdefault(place.address, OrderedDict())
        waiting = names.setdefault(place.name, deque())
        if len(waiting) >= place_max or _size(names) >= address_max:
            return job
        waiting.append(job)
        self._count += 1
        if self._count <= all_max:
            return None
        largest = max(self._addresses.values(), key=_size)
        longest = max(largest.values(), key=len)
        self._count -= 1
        return longest.pop()

    def take(self) -> Job | None:
        """Take the next attempt; None: no attempt waits."""
        while self._addresses:
            address, names = self._addresses.popitem(last=False)
            while names:
                name, waiting = names.popitem(last=False)
                if waiting:
                    job = waiting.popleft()
                    self._count -= 1
                    names[name] = waiting
                    self._addresses[address] = names
                    return job
        return None


def _size(names: OrderedDict[str, deque[Any]]) -> int:
    return sum(map(len, names.values()))
