"""Pages: answers that list what a caller may be told of, within bounds.

Owns the bounds of every page (Entries), and the pages of streams, mailboxes, services, cursors,
groups, keys and requests, which several turns put together; each part says which names there are
and what it tells of each. The rules: a page is bounded in entries and bytes, and is empty only
where no entry follows (one of keys also looks at a bounded number of them); a turn looks at names
while its share lasts, and at a bounded number, since a caller may see few of many; links have their
turns, and the pages of one link are answered in the order asked; `more` says that the caller may
see a further entry, and nothing of others. Source: SPEC.md, section 4.7, Pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

import msgspec

from malamute_protocol.errors import BrokerRefused
from malamute_protocol.framing import NUMBERS, reference_of
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.structures.fair_queue import FairQueue

PIECE_NAMES: Final = 2_000
"""Names that one turn looks at, at most."""
PAGE_BYTES: Final = 512 << 10
"""Bytes of a page's entries, unless the first one has more: a command frame has a bound."""

Name = TypeVar("Name")
"""A name, or a pair of names."""
Entry = TypeVar("Entry")


class Entries(Generic[Entry]):
    """The entries of a page, within its bounds."""

    __slots__ = ("_left", "_limit", "found")

    def __init__(self, limit: int, page_max: int, bytes_max: int | None = None) -> None:
        """limit: entries that the caller asks for; page_max: those that a page has at most.

        bytes_max: bytes of them; None: those of a page.
        """
        self.found: Final[list[Entry]] = []
        self._limit = max(1, min(limit, page_max))
        self._left = PAGE_BYTES if bytes_max is None else bytes_max

    def add(self, entry: Entry) -> bool:
        """Add an entry; False: the page is full, and the entry is the first of the next page."""
        self._left -= len(msgspec.msgpack.encode(entry))
        if len(self.found) == self._limit or (self.found and self._left < 0):
            return False
        self.found.append(entry)
        return True

    def add_all(self, entries: Iterable[Entry]) -> bool:
        """Add entries until the page is full; returns `more`: whether one was not added."""
        return not all(map(self.add, entries))


class Page(msgspec.Struct, eq=False):
    """A page that is being put together."""

    link: Link
    command: Any
    listed: str
    """Key of the entries in the answer."""
    after: Any
    """The last name that was looked at."""
    names_after: Callable[[Any], Iterable[Any]]
    facts: Callable[[Any], Any]
    """Returns the entry of a name; None: it is left out."""
    entries: Entries[Any]
    left: int | None = None
    """Names that the page may still look at, of one whose answer has `after`; None: all."""


class Pages:
    """The pages of one core that are being put together."""

    def __init__(self, shard: Shard, links: Links, answers: Answers) -> None:
        self._shard = shard
        self._links = links
        self._answers = answers
        self.queue: Final[FairQueue[Link, Page]] = FairQueue()
        """Pages that go on in the next turns, by the link that asked."""

    def begin(
        self, link: Link, command: Any, listed: str, after: Name,
        names_after: Callable[[Name], Iterable[Name]],
        facts: Callable[[Name], dict[str, Any] | None],
    ) -> None:  # fmt: skip
        """Have a command answered with a page, which one turn or several put together.

        listed: key of the entries in the answer. after: the name after which the page begins.
        names_after: yields the names after one, in order; there may be others in each turn. facts:
        returns the entry of a name; None: the caller may not be told, or nothing has the name.
        Raises BrokerRefused `wait`: the link has too many unanswered questions.
        """
        entries: Entries[dict[str, Any]] = Entries(command.limit, self._shard.settings.page_max)
        self.add(Page(link, command, listed, after, names_after, facts, entries))

    def add(self, page: Page) -> None:
        """Have a command answered with a page that the caller has made.

        Raises BrokerRefused `wait`: the link has too many unanswered questions.
        """
        self._links.count_query(page.link)
        self.queue.add(page.link, page)

    def work(self) -> None:
        """Go on with one page of those that wait; an error in it ends the link that asked."""
        page = self.queue.turn()
        kind = type(page.command)
        self._links.contained(
            page.link, kind.__name__.upper(), self._go_on, NUMBERS[kind],
            reference_of(page.command),
        )(page)  # fmt: skip

    def _go_on(self, page: Page) -> None:
        """Look at names for a page; it waits no longer if it is answered, or an error ended it."""
        goes_on = False
        try:
            goes_on = self._look(page)
        finally:
            if not goes_on:
                self.queue.discard(page.link, page)
                page.link.queries -= 1

    def _look(self, page: Page) -> bool:
        """Look at names while the share of the turn lasts; returns whether the page goes on.

        It is answered if it is whole or has no asker left.
        """
        link = page.link
        try:  # Results of other questions may have come to wait since the page was begun.
            self._answers.check(link)
        except BrokerRefused as error:
            self._answers.refuse_with(link, page.command, error)
            return False
        lasts = self._shard.share()
        more = False
        for looked, name in enumerate(page.names_after(page.after) if link.open else ()):
            # One name is looked at however short the share is, so that each turn gets further.
            if looked == PIECE_NAMES or (looked and not lasts()):
                return True
            more = page.left == 0
            if not more:
                entry = page.facts(name)
                more = entry is not None and not page.entries.add(entry)
            if more:
                break
            page.after = name
            if page.left is not None:
                page.left -= 1
        value: dict[str, Any] = {page.listed: page.entries.found}
        if page.left is not None:
            value["after"] = page.after
        value["more"] = more
        self._answers.result(link, page.command, value)
        return False
