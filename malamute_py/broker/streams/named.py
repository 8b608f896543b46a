"""Named: objects of a stream that have names of their own: its cursors and its groups.

Owns finding and listing them, and which of them are on their way into the log; what they are is for
cursors.py and groups.py. A place is the number of the stream and the name. The rule: a listing is a
page in the order of (stream, name), and costs by the page, apart from sorting one stream's names
after they have changed; streams of which the identity may not be told are left out. Source:
SPEC.md, section 4.7.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from malamute_py.broker.log.stream import Stream
from malamute_py.broker.quotas import Quotas
from malamute_py.broker.streams.catalogue import Catalogue

_T = TypeVar("_T")
_Coming = TypeVar("_Coming")

Place = tuple[int, str]
"""(number of the stream, name)."""


class Named(Generic[_T, _Coming]):
    """Objects by stream and name, each counted for its creator's quota.

    A cursor counts for the identity that moved it last, as the log knows no other; while the broker
    runs, for the identity that it was taken up for.
    """

    def __init__(self, quotas: Quotas, resource: str) -> None:
        """resource: the quota that each object counts for."""
        self._quotas = quotas
        self._resource = resource
        self._owners: dict[Place, str] = {}
        """Owner that each object counts for."""
        self._of: dict[int, dict[str, _T]] = {}
        """Number of a stream -> name -> object."""
        self._sorted: dict[int, list[str]] = {}
        """Number of a stream -> its names in order, once they were asked for."""
        self._count = 0
        self.coming: dict[Place, list[_Coming]] = {}
        """Changes on their way into the log, or callers that wait for one, by place."""
        self._creators: dict[Place, str] = {}
        """Owner that an object counts for while its creation is on its way into the log."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_T]:
        for things in self._of.values():
            yield from things.values()

    def get(self, place: Place) -> _T | None:
        """Return the object of this name in this stream; None: the log has none."""
        stream, name = place
        things = self._of.get(stream)
        return None if things is None else things.get(name)

    def has(self, place: Place) -> bool:
        """Whether there is an object of this name, or one is on its way into the log."""
        return place in self.coming or self.get(place) is not None

    def check_room(self, by: str, most: int) -> None:
        """Raise BrokerRefused if one more object would exceed the bound or its creator's quota.

        most: objects of this kind that the broker keeps; those being created count, too.
        """
        if self._count + len(self._creators) >= most:
            reason = f"at most {most} {self._resource}"
            raise self._quotas.limit_told_to(by, self._resource, reason)
        self._quotas.check(by, self._resource)

    def count_creation(self, place: Place, by: str) -> None:
        """Count an object for its creator's quota while its creation is on its way into the log."""
        self._creators[place] = by
        self._quotas.add(by, self._resource)

    def end_creation(self, place: Place) -> None:
        """End that count, as the log has or refused the creation; an object counts by itself."""
        creator = self._creators.pop(place, None)
        if creator is not None:
            self._quotas.add(creator, self._resource, -1)

    def of(self, stream: int) -> Iterable[_T]:
        """All objects of one stream."""
        things = self._of.get(stream)
        return () if things is None else things.values()

    def add(self, place: Place, thing: _T, by: str) -> None:
        """Enter an object that the log has, in the place of one of its name.

        by: owner for whose quota a new one counts.
        """
        stream, name = place
        things = self._of.setdefault(stream, {})
        if name not in things:
            self.end_creation(place)
            self._count += 1
            self._owners[place] = by
            self._quotas.add(by, self._resource)
            self._sorted.pop(stream, None)
        things[name] = thing

    def remove(self, place: Place) -> _T | None:
        """Forget an object, which the log has removed, and return it; None: there is none."""
        stream, name = place
        things = self._of.get(stream)
        thing = None if things is None else things.pop(name, None)
        if things is None or thing is None:
            return None
        self._count -= 1
        self._quotas.add(self._owners.pop(place), self._resource, -1)
        self._sorted.pop(stream, None)
        if not things:
            del self._of[stream]
        return thing

    def remove_stream(self, stream: int) -> dict[str, _T]:
        """Forget all objects of one stream; returns them by name."""
        things = self._of.pop(stream, {})
        self._sorted.pop(stream, None)
        self._count -= len(things)
        for name in things:
            self._quotas.add(self._owners.pop((stream, name)), self._resource, -1)
        return things

    def page(
        self,
        catalogue: Catalogue,
        may_list: Callable[[str], bool],
        stream: str,
        prefix: str,
        after: str,
        limit: int,
    ) -> tuple[list[tuple[Stream, _T]], bool]:
        """Return a page of the objects whose names begin with `prefix`, and whether there are more.

        Called for the listings of CURSOR_INFO and GROUP_INFO; each object comes with its stream.
        may_list: whether the asker may be told of the stream of a name. stream: its name; empty:
        all of these. after: where the page before ended, "stream/name", or a name alone in
        `stream`; empty: from the first on.
        """
        after_stream, slash, after_name = after.rpartition("/")
        if not slash:
            after_stream = stream
        page: list[tuple[Stream, _T]] = []
        names: Iterable[str] = [stream] if stream else self._streams(catalogue, after_stream)
        for name in names:
            one = catalogue.get(name)
            if one is None or not self.of(one.number) or not may_list(name):
                continue
            follow = after_name if name == after_stream else ""
            for thing in self._after(one.number, prefix, follow):
                if len(page) == limit:
                    return page, True
                page.append((one, thing))
        return page, False

    @staticmethod
    def _streams(catalogue: Catalogue, first: str) -> Iterator[str]:
        """Yield the names of streams in order from `first` on, that one included if not empty."""
        if first:
            yield first
        yield from catalogue.names_after(first, "")

    def _after(self, stream: int, prefix: str, after: str) -> Iterator[_T]:
        """Yield things of a stream whose names begin with a prefix and come after a name."""
        things = self._of[stream]
        names = self._sorted.get(stream)
        if names is None:
            names = self._sorted[stream] = sorted(things)
        # Names with the prefix lie together; an `after` before all of them says nothing.
        place = bisect_right(names, after) if after >= prefix and after else (
            bisect_left(names, prefix)
        )  # fmt: skip
        while place < len(names) and names[place].startswith(prefix):
            yield things[names[place]]
            place += 1
