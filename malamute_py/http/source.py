"""Facts about the broker, asked for once however many clients of the HTTP side want them.

Owns the questions to the broker and how long an answer is used. The rules: one question is under
way at a time, and an answer serves all clients that ask within a second, so that no client of the
HTTP side decides how much the broker has to do; of each kind of thing the first LISTED_MAX by name
are looked at, and a metric says how many are not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Generic, TypeVar

from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_py.client.aio.client import Client
from malamute_py.health.facts import Everything, Facts

LISTED_MAX: Final = 1_000
"""Streams, mailboxes and so on that are looked at: one page of a listing of the broker."""
OTHER: Final = "other"
"""Label of the things that have none of their own."""
SELDOM_S: Final = 15.0
"""A broker that was asked this long ago at most is silent from its last answer on. Before a
longer pause without a question it may have been well, so that its silence begins this long before
the question that it did not answer."""
_KEEP_S: Final = 1.0
_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


Name = tuple[str, ...]
"""Name of a thing, or its names where it has several, as a group of a stream has."""


class Labels:
    """Names that have a label of their own; a name keeps its label while the thing exists."""

    def __init__(self, most: int) -> None:
        """most: labels of one kind."""
        self._most = most
        self._named: dict[str, dict[Name, None]] = {}

    def of(self, kind: str, names: Iterable[Name]) -> frozenset[Name]:
        """Return the names that have a label of their own in the metrics, at most labels_max.

        names: those of a kind that there are now. A name that had a label keeps it as long as there
        is such a thing, so that its series in Prometheus goes on; others get one as they come.
        """
        there = dict.fromkeys(names)  # in order, each once
        kept = [name for name in self._named.get(kind, {}) if name in there]
        taken = dict.fromkeys(kept)
        for name in there:
            if len(taken) >= self._most:
                break
            if OTHER not in name:  # the label of all that have none
                taken[name] = None
        self._named[kind] = taken
        return frozenset(taken)


class Shared(Generic[T]):
    """A question whose answer is shared by all callers that ask within keep_s."""

    def __init__(
        self, ask: Callable[[], Awaitable[T]], keep_s: float, clock: Callable[[], float]
    ) -> None:
        self._ask = ask
        self._keep_s = keep_s
        self._clock = clock
        self._answer: T | None = None
        self._at = 0.0
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the answer if it is fresh, or wait for the next one, which all callers share."""
        if self._answer is not None and self._clock() - self._at < self._keep_s:
            return self._answer
        if self._asking is None:
            self._asking = asyncio.create_task(self._run())
        # A caller that goes away does not take the answer from the others.
        return await asyncio.shield(self._asking)

    def put(self, answer: T) -> T:
        """Keep an answer, such as one that tells of a failure, as if just asked for; return it."""
        self._answer, self._at = answer, self._clock()
        return answer

    async def _run(self) -> T:
        """Ask, and keep the answer with its time; the waiting callers share this task."""
        try:
            return self.put(await self._ask())
        finally:
            self._asking = None


class Source:
    """Asks one broker."""

    def __init__(
        self,
        labels_max: int,
        *,
        keep_s: float = _KEEP_S,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """labels_max: labels in the metrics for one kind of thing; 0: the source is for no metrics.

        keep_s: how long an answer of the broker is used. timeout_s: how long one is waited for.
        """
        self.labels = Labels(labels_max)
        self.client: Client | None = None
        """The client of the broker; None: there is no session."""
        self.unlinked = "the broker has not been reached yet"
        """Reason why there is no link, for as long as there is none."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._silent_since: float | None = None
        """Time of the question since which the broker has not answered; None: it answers."""
        self._answered_at: float | None = None
        """Time of its last answer."""
        # One question at a time, whose answer all who ask within keep_s share.
        self._facts = Shared(self._ask_facts, keep_s, clock)
        self._everything = Shared(self._ask_everything, keep_s, clock)

    async def facts(self) -> Facts:
        """Return the facts of BROKER_INFO, at most keep_s old."""
        return await self._facts.get()

    async def everything(self) -> Everything:
        """Return all that the metrics are made of, at most keep_s old."""
        return await self._everything.get()

    async def _ask_facts(self) -> Facts:
        """Ask for BROKER_INFO; where no answer comes, return facts with the reason alone."""
        asked_at = self._clock()
        client = self.client
        if client is None or not client.linked:
            return self._fails(self.unlinked, asked_at)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await client.broker_info()
        except TimeoutError:
            return self._fails(f"the broker did not answer within {self._timeout_s:g} s", asked_at)
        except MalamuteError as error:
            return self._fails(str(error), asked_at)
        self._silent_since, self._answered_at = None, self._clock()
        # As BROKER_INFO has it, where the client's class has three facts by themselves.
        return Facts(
            {
                "software": found.software, "epoch": found.epoch, "counters": found.counters,
                **found.more,
            }
        )  # fmt: skip

    def _fails(self, reason: str, asked_at: float) -> Facts:
        """Return facts without figures: the reason, and for how long the broker has been silent.

        asked_at: time of the question that failed.
        """
        if self._answered_at is None:
            return Facts({}, reason)
        if self._silent_since is None:
            # Before the failed question no page may have asked: that was no silence of the broker.
            self._silent_since = max(self._answered_at, asked_at - SELDOM_S)
        return Facts({}, reason, self._clock() - self._silent_since)

    async def _ask_everything(self) -> Everything:
        """Ask for all listings, and for details of the streams that have a label of their own.

        For metrics and the first page. A listing that the broker refuses counts as empty. Where the
        broker does not answer in time, the answer has the facts only.
        """
        began = self._clock()
        facts = await self.facts()
        client = self.client
        if not facts.broker or client is None:
            return Everything(facts)
        try:
            async with asyncio.timeout(self._timeout_s):
                streams, mailboxes, services, cursors, groups, namespaces = await asyncio.gather(
                    _allowed(client.list_streams(limit=LISTED_MAX)),
                    _allowed(client.list_mailboxes(limit=LISTED_MAX)),
                    _allowed(client.list_services(limit=LISTED_MAX)),
                    _allowed(client.list_cursors(limit=LISTED_MAX)),
                    _allowed(client.list_groups(limit=LISTED_MAX)),
                    _allowed(client.list_namespaces(limit=LISTED_MAX)),
                )
                named = self.labels.of("stream", ((each.name,) for each in streams))
                details = await asyncio.gather(
                    *(_allowed(_alone(client.stream_info(name))) for (name,) in sorted(named))
                )
        # put(): until the next question, those who ask for the facts alone are told of it, too.
        except TimeoutError:
            reason = f"the broker took over {self._timeout_s:g} s to answer"
            return Everything(self._facts.put(self._fails(reason, began)))
        except MalamuteError as error:
            return Everything(self._facts.put(self._fails(str(error), began)))
        return Everything(
            facts, self._clock() - began, streams,
            {each.name: each for found in details for each in found},
            mailboxes, services, cursors, groups, namespaces,
        )  # fmt: skip


async def _allowed(listing: Awaitable[list[T]]) -> list[T]:
    """Return a listing; empty where the broker refuses it: no permission, or no such thing."""
    try:
        return await listing
    except BrokerRefused:
        return []


async def _alone(one: Awaitable[T]) -> list[T]:
    return [await one]
