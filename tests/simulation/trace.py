"""Events of a run: a hash over all of them, and the last ones in words.

Owns the trace. The rule: everything that a run decides or sees goes through `note`, so that two
runs of a seed with one hash did the same.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A hash to which nothing is added."""

    digest: str

    def hexdigest(self) -> str:
        """Return the digest, as hashlib does."""
        return self.digest


class Trace:
    """The events of one run."""

    def __init__(self, *, keep: int = 40, echo: bool = False) -> None:
        self._hash: Any = hashlib.blake2b(digest_size=8)
        self._last: deque[tuple[object, ...]] = deque(maxlen=keep)
        self._echo = echo
        self.count = 0
        self.kinds: dict[str, int] = {}
        """How often each kind of event happened: what a range of seeds has exercised."""

    def note(self, kind: str, *facts: object) -> None:
        """Enter one event; the facts must have a stable repr."""
        self.count += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        event = (kind, *facts)
        self._hash.update(repr(event).encode())
        self._last.append(event)
        if self._echo:
            print(" ", self.count, *event)

    def __getstate__(self) -> dict[str, Any]:
        """Return the part that another process may have: nothing is to be noted any more."""
        last = deque((event,) for event in self.last())
        return {**self.__dict__, "_hash": _Sealed(self.digest()), "_last": last}

    def digest(self) -> str:
        """Return the hash over all events so far."""
        return str(self._hash.hexdigest())

    def last(self) -> list[str]:
        """Return the last events, oldest first."""
        return [" ".join(map(str, event)) for event in self._last]
