"""Pages: answers that list what a caller may be told of, put together over several turns.

Owns the pages of streams, mailboxes, services, cursors and groups; each part says which names there
are and what it tells of each. The rules: a turn looks at a bounded number of names, since a caller
may see few of many; links have their turns; a page is bounded in entries and bytes, and is empty
only where no entry follows; `more` says that the caller may see a further entry, and nothing of
others. Source: SPEC.md, section 4.7, Pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from malamute_protocol.framing import NUMBERS, reference_of
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.structures.fair_queue import FairQueue

PIECE_NAMES: Final = 2_000
"""Names that one turn looks at."""
PAGE_BYTES: Final = 512 << 10
"""Bytes of a page's entries, unless the first one has more: a command frame has a bound."""

Name = TypeVar("Name")
"""A name, or a pair of names."""


class Page(msgspec.Struct, eq=False):
    """A page that is being put together."""

    link: Link
    command: Any
    listed: str
    """Key of the entries in the answer."""
    after: Any
    """The last name that was looked at."""
    names_after: Callable[[Any], Iterable[Any]]
    facts: Callable[[Any], dict[str, Any] | None]
    entries: list[dict[str, Any]] = []
    size: int = 0
    """Bytes of the entries."""


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
        self._links.count_query(link)
        self.queue.add(link, Page(link, command, listed, after, names_after, facts))

    def work(self) -> None:
        """Go on with one page, if there is any; an error in it ends the link that asked."""
        if self.queue:
            page = self.queue.take()
            kind = type(page.command)
            self._links.contained(
                page.link, kind.__name__.upper(), self._go_on, NUMBERS[kind],
                reference_of(page.command),
            )(page)  # fmt: skip

    def _go_on(self, page: Page) -> None:
        """Look at PIECE_NAMES names for a page, and answer if it is whole or has no asker left."""
        link, command, entries = page.link, page.command, page.entries
        link.queries -= 1
        limit = max(1, min(command.limit, self._shard.settings.page_max))
        more = False
        for looked, name in enumerate(page.names_after(page.after) if link.open else ()):
            if looked == PIECE_NAMES:
                link.queries += 1
                self.queue.add(link, page)
                return
            page.after = name
            entry = page.facts(name)
            if entry is None:
                continue
            page.size += len(msgspec.msgpack.encode(entry))
            if len(entries) == limit or (entries and page.size > PAGE_BYTES):
                more = True
                break
            entries.append(entry)
        self._answers.result(link, command, {page.listed: entries, "more": more})
