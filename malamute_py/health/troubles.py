"""Slow and stuck things: sentences about things of the broker that a person should look at.

Owns when a thing counts as one. of_all() asks about everything, and each page of the console about
the things on it. The rules: only what the broker told is judged; each trouble names the thing, what
is wrong with it and since when, and is weighed, so that the worst comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from malamute_py.client.facts import (
    CursorFacts,
    GroupFacts,
    LinkFacts,
    MailboxFacts,
    ServiceFacts,
)
from malamute_py.health.facts import Everything
from malamute_py.health.readiness import ready
from malamute_py.health.words import many, size, span

STUCK: Final = "stuck"
SLOW: Final = "slow"
WAITING_S: Final = 60.0
"""Age from which a request that waits, or a message that no reader takes, is slow."""
HELD_S: Final = 300.0
"""Time from which a request or record in hand is slow."""
UNMOVED_S: Final = 300.0
"""Time from which a cursor or group that lags and does not move is slow."""
UNREAD_BYTES: Final = 6 << 20
"""Bytes that a client has not read yet from which on it is slow; clients that keep up give half of
their credit of 8 MiB back at once."""
SHOWN_MAX: Final = 50

# How bad a trouble is, the worst first: Trouble.weight begins with it.
_NOT_READY: Final = 1e12
"""The broker itself is not ready."""
_WARNED: Final = 1e11
"""The broker is ready, with a warning."""
_UNSERVED: Final = 1e9
"""Requests wait, and no worker is there."""
_UNREAD: Final = 1e8
"""Records or messages wait, and no reader is there; or a client reads nothing."""
_BEHIND: Final = 1e7
"""A group does not move, or there are dead letters."""
_WAITS: Final = 1e6
"""Something waits, or is in hand, for long; or a cursor that lags holds back a ring."""
_CURSOR_LAGS: Final = 1e5
_READS_SLOWLY: Final = 1e4


class Trouble(NamedTuple):
    """One thing to look at."""

    weight: float
    """The larger comes first: a power of ten for how bad it is, and added how long or how many."""
    kind: str
    """STUCK or SLOW."""
    what: str
    """Kind of the thing, as its page is called."""
    name: tuple[str, ...]
    """Name of the thing; with the stream before it for cursors and groups."""
    words: str


def of_all(everything: Everything, links: Iterable[LinkFacts] = ()) -> list[Trouble]:
    """Return what is slow or stuck, the worst first.

    For the console's first page, `malamute watch` and `malamute top`. links: of clients; none: they
    are not looked at.
    """
    now_ms = float(everything.facts.broker.get("now_ms", 0))
    found = [
        *_of_the_broker(everything),
        *(each for facts in everything.services for each in of_service(facts, now_ms)),
        *(each for facts in everything.mailboxes for each in of_mailbox(facts, now_ms)),
        *(each for facts in everything.groups for each in of_group(facts, now_ms)),
        *(each for facts in everything.cursors for each in of_cursor(facts, now_ms)),
        *(each for facts in links for each in of_link(facts)),
    ]
    return sorted(found, key=lambda each: (-each.weight, each.what, each.name))


def _of_the_broker(everything: Everything) -> Iterator[Trouble]:
    """Yield why the broker is not ready, and its warnings, as troubles."""
    verdict = ready(everything.facts)
    for check, reason in verdict.reasons:
        yield Trouble(_NOT_READY, STUCK, "broker", (check,), reason)
    for check, reason in verdict.warnings:
        yield Trouble(_WARNED, SLOW, "broker", (check,), reason)


def of_service(facts: ServiceFacts, now_ms: float) -> Iterator[Trouble]:
    """Yield troubles of a service queue; the worst is that it has no worker.

    The first value of a trouble is its weight: how bad it is, and added how long or how many.
    """
    name, age_s = (facts.name,), seconds_since(facts.oldest_ms, now_ms)
    if facts.waiting and not facts.offers:
        words = (
            f"{many(facts.waiting, 'request')} waiting for {span(age_s)}, and no worker is there"
        )
        yield Trouble(_weight(_UNSERVED, age_s), STUCK, "service", name, words)
    elif facts.waiting and not facts.credit and age_s > WAITING_S:
        words = f"{many(facts.waiting, 'request')} waiting for {span(age_s)}: all workers are busy"
        yield Trouble(_weight(_WAITS, age_s), SLOW, "service", name, words)
    for worker in facts.workers:
        held_s = seconds_since(worker.since_ms, now_ms)
        if worker.held and held_s > HELD_S:
            words = (
                f"{worker.holder} has had {many(worker.held, 'request')} in hand for {span(held_s)}"
            )
            yield Trouble(_weight(_WAITS, held_s), SLOW, "service", name, words)
    if facts.dead:
        yield Trouble(
            _weight(_BEHIND, facts.dead), SLOW, "service", name, many(facts.dead, "dead letter")
        )


def of_mailbox(facts: MailboxFacts, now_ms: float) -> Iterator[Trouble]:
    """Yield the trouble of a mailbox, if its oldest message waits for long."""
    age_s = seconds_since(facts.oldest_ms, now_ms)
    waiting = facts.messages - facts.delayed
    if waiting > 0 and age_s > WAITING_S:
        reader = "no reader" if not facts.readers else "the readers do not keep up"
        kind = SLOW if facts.readers else STUCK
        words = f"{many(waiting, 'message')}, the oldest for {span(age_s)}: {reader}"
        yield Trouble(
            _weight(_WAITS if facts.readers else _UNREAD, age_s),
            kind,
            "mailbox",
            (facts.name,),
            words,
        )


def of_group(facts: GroupFacts, now_ms: float) -> Iterator[Trouble]:
    """Yield troubles of a group: it lags, has dead letters, or a member holds records for long.

    The first value of a trouble is its weight: how bad it is, and added how long or how many.
    """
    name = (facts.stream, facts.group)
    unmoved_s = seconds_since(facts.moved_ms, now_ms)
    if facts.lag and not facts.members:
        words = f"{many(facts.lag, 'record')} behind, and it has no members"
        yield Trouble(_weight(_UNREAD, facts.lag), STUCK, "group", name, words)
    elif facts.lag and unmoved_s > UNMOVED_S:
        words = f"{many(facts.lag, 'record')} behind, and has not moved for {span(unmoved_s)}"
        yield Trouble(_weight(_BEHIND, unmoved_s), SLOW, "group", name, words)
    if facts.dead:
        yield Trouble(
            _weight(_BEHIND, facts.dead), SLOW, "group", name, many(facts.dead, "dead letter")
        )
    for member in facts.members:
        held_s = seconds_since(member.oldest_ms, now_ms)
        if member.held and held_s > HELD_S:
            who = member.identity or f"link {member.link}"
            words = f"{who} has had {many(member.held, 'record')} in hand for {span(held_s)}"
            yield Trouble(_weight(_WAITS, held_s), SLOW, "group", name, words)


def of_cursor(facts: CursorFacts, now_ms: float) -> Iterator[Trouble]:
    """Yield the trouble of a cursor, if it lags and does not move."""
    unmoved_s = seconds_since(facts.moved_ms, now_ms)
    if facts.lag and unmoved_s > UNMOVED_S:
        words = f"{many(facts.lag, 'record')} behind, and has not moved for {span(unmoved_s)}"
        if facts.pinned_bytes:
            words += f"; it holds back {size(facts.pinned_bytes)}"
        weight = _WAITS if facts.pinned_bytes else _CURSOR_LAGS
        yield Trouble(
            _weight(weight, unmoved_s), SLOW, "cursor", (facts.stream, facts.cursor), words
        )


def of_link(facts: LinkFacts) -> Iterator[Trouble]:
    """Yield the trouble of a client's link, if the client does not read, or slowly."""
    unread = int(facts.more.get("unread_bytes", 0))
    name = (str(facts.link),)
    who = facts.identity or "anonymous"
    if facts.more.get("blocked"):
        words = f"{who} does not read: {size(unread)} delivered and not consumed"
        yield Trouble(_weight(_UNREAD, unread), STUCK, "client", name, words)
    elif unread > UNREAD_BYTES:
        words = f"{who} reads slowly: {size(unread)} delivered and not consumed"
        # In gigabytes: a count of bytes would be beyond what this weight may grow by.
        yield Trouble(_weight(_READS_SLOWLY, unread / 1e9), SLOW, "client", name, words)


def _weight(badness: float, much: float) -> float:
    """Return a trouble's weight, which stays below that of each worse kind of trouble.

    much: how long or how many it is. The badness of each kind is at least ten times the next one's.
    """
    return badness + min(much, 8 * badness)


def seconds_since(at_ms: float, now_ms: float) -> float:
    """Seconds since then; 0 when it never was."""
    return max(0.0, now_ms - at_ms) / 1_000 if at_ms else 0.0
