"""Passwords to check: the order in which they are hashed, and pauses after wrong ones.

Owns the order, for one hash takes 50 ms and any peer may ask for one, and the pauses after wrong
passwords. The rules: each address has its turn, and within an address each name, whether a user has
it or not; an attempt for a name that no user has takes no place of those for users, and where it
needs no hash, its turn costs the others nothing. A pause is for a name at an address, whether a
user has the name or not: neither the user at another address nor the address's other users wait for
it, and the pauses tell no names of users. All tables have a bound. No clock and no threads: time is
an argument. A stranger is an attempt for a name that no user has. Source: ARCHITECTURE.md, "What a
peer may cost".
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

Job = TypeVar("Job")

_WRONG_UNTIL_PAUSE: Final = 5
"""Wrong passwords for a name from an address of which the last begins the first pause."""
_PAUSE_MIN_MS: Final = 500
_PAUSE_MAX_MS: Final = 60_000
_FORGOTTEN_MS: Final = 600_000
"""Time without a wrong password after which a name at an address begins anew."""
_PAUSES_MAX: Final = 10_000


class Origin(NamedTuple):
    """The address of an attempt and its name, or a digest of it: pauses and turns are by both."""

    address: str
    name: str


class _Wrong:
    """Wrong passwords for one name at one address, the time of the last, and the pause's end."""

    __slots__ = ("at_ms", "count", "until_ms")

    def __init__(self) -> None:
        self.count = 0
        self.at_ms = self.until_ms = 0


class Pauses:
    """Names at addresses that must wait before another of their passwords is hashed.

    An origin here is an address with a name's digest; or with "", for all names there that no user
    has: their attempts need no hash, and are answered as late as if they had one.
    """

    def __init__(self) -> None:
        self._wrong: OrderedDict[Origin, _Wrong] = OrderedDict()

    def __len__(self) -> int:
        return len(self._wrong)

    def holds(self, origin: Origin, now_ms: int) -> bool:
        """Whether a pause holds for a name at an address: its passwords are denied unhashed."""
        wrong = self._wrong.get(origin)
        return wrong is not None and now_ms < wrong.until_ms

    def failed(self, origin: Origin, now_ms: int) -> int:
        """Count a wrong password for a name at an address; returns the pause that begins, or 0 ms.

        Of too many names, the one whose last wrong password is longest ago is forgotten.
        """
        # Taken out and put in again: the dictionary is in the order of last wrong passwords.
        wrong = self._wrong.pop(origin, None)
        if wrong is None or now_ms - wrong.at_ms > _FORGOTTEN_MS:
            wrong = _Wrong()
        self._wrong[origin] = wrong
        while len(self._wrong) > _PAUSES_MAX:
            self._wrong.popitem(last=False)
        wrong.at_ms = now_ms
        wrong.count += 1
        if wrong.count < _WRONG_UNTIL_PAUSE:
            return 0
        # Each further pause is twice as long.
        pause_ms = min(_PAUSE_MAX_MS, _PAUSE_MIN_MS << min(wrong.count - _WRONG_UNTIL_PAUSE, 16))
        wrong.until_ms = now_ms + pause_ms
        return pause_ms

    def succeeded(self, origin: Origin) -> None:
        """Forget the wrong passwords for a name at an address: the right one has come."""
        self._wrong.pop(origin, None)


class _Waiting(Generic[Job]):
    """Attempts of one address, by the name that they gave."""

    __slots__ = ("known", "names")

    def __init__(self) -> None:
        self.names: OrderedDict[str, deque[tuple[int, Job]]] = OrderedDict()
        """Name -> (number, attempt) of each; the first name has the address's next turn."""
        self.known = 0
        """How many of them are for users."""


class Turns(Generic[Job]):
    """Attempts that wait for a hash: addresses in turn, and the names of each in turn."""

    def __init__(
        self, *, all_max: int, address_max: int, origin_max: int, strangers_max: int
    ) -> None:
        """Note how many attempts may wait.

        all_max, address_max: for users, in all and of one address. origin_max: for one name at one
        address. strangers_max: for names that no user has.
        """
        self._bounds = all_max, address_max, origin_max
        self._strangers_max = strangers_max
        self._addresses: OrderedDict[str, _Waiting[Job]] = OrderedDict()
        """Attempts that wait, by address; the first address has the next turn."""
        self._known = 0
        """Attempts for users that wait."""
        self._serial = 0
        """Number of the newest attempt."""
        self._strangers: OrderedDict[int, Origin] = OrderedDict()
        """Number of each attempt for a name that no user has -> its address and name, the oldest
        first."""

    def __len__(self) -> int:
        return self._known + len(self._strangers)

    def put(self, origin: Origin, job: Job, *, known: bool) -> Job | None:
        """Have an attempt wait for its turn; returns one that does not wait (any longer), or None.

        That is this one where its name or its address has too many already. Else, where too many
        wait in all: of attempts for users the last one of the address that has most of them; of
        attempts for names that no user has, the oldest. known: whether a user has the name.
        """
        all_max, address_max, origin_max = self._bounds
        waiting = self._addresses.setdefault(origin.address, _Waiting())
        queue = waiting.names.setdefault(origin.name, deque())
        if len(queue) >= origin_max or (known and waiting.known >= address_max):
            return job
        self._serial += 1
        queue.append((self._serial, job))
        if not known:
            self._strangers[self._serial] = origin
            return self.give_up() if len(self._strangers) > self._strangers_max else None
        waiting.known += 1
        self._known += 1
        if self._known <= all_max:
            return None
        largest = max(self._addresses.values(), key=attrgetter("known"))
        # Its user with the most attempts loses the last one. All attempts for one name are for a
        # user, or none is: the first one tells.
        longest: deque[tuple[int, Job]] = deque()
        for attempts in largest.names.values():
            if not attempts:
                continue
            first_serial, _ = attempts[0]
            if first_serial not in self._strangers and len(attempts) > len(longest):
                longest = attempts
        largest.known -= 1
        self._known -= 1
        _, dropped = longest.pop()
        return dropped

    def give_up(self) -> Job | None:
        """Take out the oldest attempt for a name that no user has, whatever its turn.

        put() calls it where too many of them wait; the caller answers the attempt without a hash.
        None: no such attempt waits.
        """
        if not self._strangers:
            return None
        _, origin = self._strangers.popitem(last=False)
        names = self._addresses[origin.address].names
        # The oldest of all is the first in the queue of its own name.
        _, job = names[origin.name].popleft()
        if not names[origin.name]:
            del names[origin.name]
        return job

    def take(self, is_free: Callable[[Job], bool]) -> tuple[list[Job], Job | None]:
        """Take the attempts whose turns come next, up to the first that needs a hash.

        is_free: whether an attempt for a name that no user has needs no hash. Returns the attempts
        before the one that needs a hash, and this one; None: no such attempt waits.
        """
        free: list[Job] = []
        while self._addresses:
            # The first address has its turn, and in it the first name; both go to the end then.
            address, waiting = self._addresses.popitem(last=False)
            names = waiting.names
            while names:
                name, queue = names.popitem(last=False)
                if not queue:
                    continue
                serial, job = queue.popleft()
                if queue:
                    names[name] = queue
                stranger = self._strangers.pop(serial, None) is not None
                if stranger and is_free(job):
                    free.append(job)
                    continue  # it costs nothing, so that the address still has its turn
                if not stranger:
                    waiting.known -= 1
                    self._known -= 1
                if names:
                    self._addresses[address] = waiting
                return free, job
        return free, None


class Answers(Generic[Job]):
    """Attempts whose answers wait for the time that a hash would have taken."""

    def __init__(self, hashers: int, most: int) -> None:
        """hashers: passwords of one name that could be hashed at a time. most: answers, at most."""
        self._hashers = hashers
        self._most = most
        self._due: list[tuple[int, int, Job]] = []
        """(time, number, answer), a heap by time; the number keeps the order of equal times."""
        self._last: OrderedDict[Origin, int] = OrderedDict()
        """Time of the last answer for each name at an address: it has one after the other."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def put(self, origin: Origin, job: Job, now_ms: int, hash_ms: int) -> Job | None:
        """Have the answer to an attempt that was not hashed wait for as long as a hash takes.

        So its time does not tell that no user has the name; answers for one name follow each other
        as if all threads hashed for it. Returns the answer that is due first where there are too
        many, else None.
        """
        # Several threads that hash for one name would end one after the other.
        after = self._last.pop(origin, now_ms) + max(1, hash_ms // self._hashers)
        due = self._last[origin] = max(now_ms + hash_ms, after)
        self._count += 1
        heapq.heappush(self._due, (due, self._count, job))
        # Times that are over delay no other answer.
        while self._last and next(iter(self._last.values())) <= now_ms:
            self._last.popitem(last=False)
        return self._pop() if len(self._due) > self._most else None

    def take(self, now_ms: int) -> Job | None:
        """Take an answer whose time has come, to be sent; None: there is none."""
        if not self._due:
            return None
        due_ms, _, _ = self._due[0]
        return self._pop() if due_ms <= now_ms else None

    def _pop(self) -> Job:
        _, _, job = heapq.heappop(self._due)
        return job

    def wait_ms(self, now_ms: int) -> int | None:
        """Return the time until the next answer, in milliseconds; None: none waits."""
        return max(0, self._due[0][0] - now_ms) if self._due else None
