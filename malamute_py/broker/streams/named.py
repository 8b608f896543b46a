"""Named: objects of a stream that have names of their own: its cursors and its groups.

Owns finding and listing them, and which of them are on their way into the log; what they are is for
cursors.py and groups.py. A place is the number of the stream and the name. The rule: a listing is a
page in the order of (stream, name), which sorts one stream's names after they have changed; streams
of which the identity may not be told are left out. Source: SPEC.md, section 4.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from malamute_py.broker.links.link import Link
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.quotas import Quotas
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.structures.sorted_values import names_after

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
        self, pages: Pages, catalogue: Catalogue, link: Link, command: Any, prefix: str,
        facts: Callable[[_T], dict[str, Any]],
    ) -> None:  # fmt: skip
        """Answer CURSOR_INFO or GROUP_INFO with a page of the objects that begin with a prefix.

        `stream` of the command: its name; empty: all of which the link may be told. `after`: where
        the page before ended, "stream/name", or a name alone in `stream`. facts: entry of an
        object. Raises BrokerRefused.
        """
        after_stream, slash, after_name = command.after.rpartition("/")

        def facts_of(name: tuple[str, str]) -> dict[str, Any] | None:
            """Return the entry of (stream, name); None: there is no such object."""
            stream = catalogue.get(name[0])
            thing = None if stream is None else self.get((stream.number, name[1]))
            return None if thing is None else facts(thing)

        pages.begin(
            link, command, "entries", (after_stream if slash else command.stream, after_name),
            partial(self._after, catalogue, link.owner, command.stream, prefix), facts_of,
        )  # fmt: skip

    def _after(
        self, catalogue: Catalogue, owner: str, stream: str, prefix: str, after: tuple[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Yield (stream, name) in order, after such a pair, of which an owner may be told.

        stream: its name; empty: all. Each stream comes with an empty name first, so that a page
        counts those that have no objects, or may not be told, as looked at.
        """
        after_stream, after_name = after
        begun = (after_stream,) if after_stream else ()
        streams = (stream,) if stream else chain(begun, catalogue.names_after("", after_stream))
        for each in streams:
            if each != after_stream:
                yield each, ""
            found = catalogue.get(each)
            things = None if found is None else self._of.get(found.number)
            if found is None or things is None or not catalogue.may_have_facts(owner, each):
                continue
            names = self._sorted.get(found.number)
            if names is None:
                names = self._sorted[found.number] = sorted(things)
            follow = after_name if each == after_stream else ""
            for name in names_after(names, prefix, follow):
                yield each, name
