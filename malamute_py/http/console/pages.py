"""Values of the pages: each asks the broker over the person's own link.

Owns one function for each page, which returns the values for its template. The rules: a page is a
bounded part of a list; what is slow or stuck comes first; a page changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_py.client.aio.client import Client
from malamute_py.client.facts import (
    RATES,
    GroupFacts,
    LinkFacts,
    NamespaceFacts,
    PeekedMail,
    PeekedRequest,
    ServiceFacts,
    SettingsInForce,
)
from malamute_py.health import troubles
from malamute_py.health.facts import in_use, ring_title
from malamute_py.health.troubles import Trouble
from malamute_py.http.console.records import NEWEST, RECORDS_MAX, SUBJECTS, Look, look
from malamute_py.http.console.sessions import Session
from malamute_py.http.console.words import TEXT_BYTES_MAX, whole_number
from malamute_py.http.source import LISTED_MAX

ROWS_MAX: Final = 50
"""Rows of one page of a list."""
VERBS: Final = (
    "read", "replay", "write", "create", "trim", "send", "receive", "purge", "request", "work",
    "manage_streams", "manage_queues", "manage_clients", "manage_users",
)  # fmt: skip
"""Verbs that a person may ask about."""
WITHOUT_NAMES: Final = ("manage_clients", "manage_users")
_LOOK_RECORDS: Final = 20

Query = Mapping[str, str]
Values = dict[str, Any]
Page = Callable[[Session, Query], Awaitable[Values]]
T = TypeVar("T")


async def overview(session: Session, query: Query) -> Values:
    """Return the values of the first page: what is slow or stuck, counts, namespaces, rings."""
    everything = await session.source.everything()
    broker = everything.facts.broker
    # No facts: the broker did not answer just now, and asking again would keep the page waiting.
    found = troubles.of_all(everything, await _links(session.client) if broker else [])
    return {
        "facts": broker,
        # "namespace" is in the answer to a user of one, who is told nothing of the whole broker.
        "namespaces": await session.client.list_namespaces(limit=LISTED_MAX)
        if "namespace" in broker
        else [],
        # A function: the template calls it for each namespace.
        "resources": _resources,
        "reason": everything.facts.reason,
        "troubles": found[: troubles.SHOWN_MAX],
        "more_troubles": max(0, len(found) - troubles.SHOWN_MAX),
        "rings": rings(broker),
    }


async def absent(session: Session, query: Query) -> Values:
    """Return nothing for the page at an address that no page has: its template has all it says."""
    return {}


def _resources(facts: NamespaceFacts) -> list[str]:
    """Return the resources that a namespace holds or that are bounded, rates excepted."""
    return sorted({*facts.held, *facts.quotas} - set(RATES))


async def streams(session: Session, query: Query) -> Values:
    """Return the values of the list of streams."""
    found = await session.client.list_streams(query.get("prefix", ""), limit=LISTED_MAX + 1)
    # Buttons that the person has no permission for.
    withheld = await _withheld(session, query, {"create-stream": ("create", "")})
    return _listed(query, ((each, []) for each in found), len(found), withheld=withheld)


async def stream(session: Session, query: Query) -> Values:
    """Return the values of a stream's page: facts, its ring, and on request some of its records.

    The person asks for these records (a look) by `place`, a key of "places" below. A page that
    refreshes itself (`poll`) does not read them again. "withheld": changes for which the person
    lacks the permission, which the page shows as not to be had.
    """
    name = query.get("name", "")
    facts = await session.client.stream_info(name)
    broker = (await session.source.facts()).broker
    now_ms = int(broker.get("now_ms", 0))
    shown = Look()
    fault = ""
    place = query.get("place", "")
    limit = whole_number(query.get("count", "") or str(_LOOK_RECORDS), 1, RECORDS_MAX, "How many")
    if place and not query.get("poll"):
        where = query.get("at", "") if place == "at" else place
        try:
            shown = await look(session.client, name, query.get("pattern", ""), where, limit, now_ms)
        except MalamuteError as error:
            fault = str(error)
    return {
        "facts": facts,
        "ring": next(
            (each for each in rings(broker) if each["name"] == facts.more.get("ring")), None
        ),
        "look": shown,
        "fault": fault,
        "looked": bool(place),
        "copy": session.copy if session.copy is not None and session.copy.stream == name else None,
        "places": {NEWEST: "the newest", SUBJECTS: "the latest of each subject", "at": "from"},
        "limit": limit,
        "withheld": await _withheld(
            session, query,
            {
                "look": ("replay", name), "tail": ("read", name), "copy": ("replay", name),
                "publish": ("write", name), "trim": ("trim", name), "purge": ("trim", name),
                "edit-stream": ("manage_streams", name),
            },
        ),
    }  # fmt: skip


async def mailboxes(session: Session, query: Query) -> Values:
    """Return the values of the list of mailboxes; those in trouble come first."""
    found = await session.client.list_mailboxes(query.get("prefix", ""), limit=LISTED_MAX + 1)
    now_ms = await session.broker_ms()
    rows = ((each, list(troubles.of_mailbox(each, now_ms))) for each in found)
    return _listed(query, rows, len(found))


async def mailbox(session: Session, query: Query) -> Values:
    """Return the values of a mailbox's page: its facts, its troubles, and some of its messages."""
    name = query.get("name", "")
    facts = await session.client.mailbox_info(name)
    after = _after(query)
    messages, fault = await _messages(session.client, name, after)
    return {
        "facts": facts,
        "troubles": list(troubles.of_mailbox(facts, await session.broker_ms())),
        "messages": messages,
        "fault": fault,
        # Number after which the next page begins; None: this one is the last.
        "following": messages[-1].number if len(messages) == ROWS_MAX else None,
        "after": after,
        "withheld": await _withheld(session, query, {"purge-mailbox": ("purge", name)}),
    }


async def services(session: Session, query: Query) -> Values:
    """Return the values of the list of service queues; those in trouble come first."""
    found = await session.client.list_services(query.get("prefix", ""), limit=LISTED_MAX + 1)
    now_ms = await session.broker_ms()
    rows = ((each, list(troubles.of_service(each, now_ms))) for each in found)
    return _listed(query, rows, len(found))


async def service(session: Session, query: Query) -> Values:
    """Return the values of a service's page: requests, workers and what they hold, dead letters.

    "unseen": why the requests are not shown. "requests_following": where the next part of them
    begins; None: this is the last one.
    """
    facts = await session.client.service_info(query.get("name", ""))
    requests, unseen = await _requests(session.client, facts, query)
    return {
        "facts": facts,
        "requests": requests,
        "unseen": unseen,
        "requests_following": requests[-1].number if len(requests) == ROWS_MAX else None,
        "troubles": list(troubles.of_service(facts, await session.broker_ms())),
        "workers": sorted(facts.workers, key=lambda each: each.since_ms)[:LISTED_MAX],
        "withheld": await _withheld(session, query, {"requeue": ("manage_queues", facts.name)}),
        **await _dead_letters(session.client, facts, query),
    }


async def groups(session: Session, query: Query) -> Values:
    """Return the values of the list of groups. The query's prefix is a stream's name."""
    found = await session.client.list_groups(query.get("prefix", ""), limit=LISTED_MAX + 1)
    now_ms = await session.broker_ms()
    rows = ((each, list(troubles.of_group(each, now_ms))) for each in found)
    return _listed(query, rows, len(found))


async def group(session: Session, query: Query) -> Values:
    """Return the values of a group's page: its progress, its members, its dead letters."""
    facts = await session.client.group_info(query.get("stream", ""), query.get("name", ""))
    # The member that holds a record longest comes first; those that hold none (0) come last.
    members = sorted(facts.members, key=lambda each: (each.oldest_ms or 1 << 62, each.identity))
    return {
        "facts": facts,
        "troubles": list(troubles.of_group(facts, await session.broker_ms())),
        "members": members[:LISTED_MAX],
        "withheld": await _withheld(
            session,
            query,
            dict.fromkeys(
                ("requeue-group", "reset-group", "remove-group"), ("manage_streams", facts.stream)
            ),
        ),
        **await _dead_letters(session.client, facts, query),
    }


async def cursors(session: Session, query: Query) -> Values:
    """Return the values of the list of cursors. The query's prefix is a stream's name."""
    found = await session.client.list_cursors(query.get("prefix", ""), limit=LISTED_MAX + 1)
    now_ms = await session.broker_ms()
    rows = ((each, list(troubles.of_cursor(each, now_ms))) for each in found)
    return _listed(query, rows, len(found))


async def cursor(session: Session, query: Query) -> Values:
    """Return the values of a cursor's page: where it stands, and its troubles."""
    facts = await session.client.cursor_info(query.get("stream", ""), query.get("name", ""))
    found = list(troubles.of_cursor(facts, await session.broker_ms()))
    needed = {"reset-cursor": ("manage_streams", facts.stream)}
    withheld = await _withheld(session, query, needed)
    return {"facts": facts, "troubles": found, "withheld": withheld}


async def clients(session: Session, query: Query) -> Values:
    """Return the values of the list of links; those that read slowly come first."""
    found = await session.client.list_links(LISTED_MAX + 1)  # It takes no prefix.
    begin = query.get("prefix", "")
    fitting = [each for each in found if each.identity.startswith(begin)]
    rows = ((each, list(troubles.of_link(each))) for each in fitting)
    return _listed(query, rows, len(found))


async def users(session: Session, query: Query) -> Values:
    """Return the values of the list of users with their permissions in force.

    With `verb` and `name` in the query: which of them may do that.
    """
    verb, name = query.get("verb", ""), query.get("name", "").strip()
    found = await session.client.list_users(verb, name)
    begin = query.get("prefix", "")
    fitting = [each for each in found if each.user.startswith(begin)]
    asked = bool(verb) and (bool(name) or verb in WITHOUT_NAMES)
    return _listed(
        query, ((each, []) for each in fitting), len(fitting),
        verbs=VERBS, asked=asked, without_names=WITHOUT_NAMES,
    )  # fmt: skip


async def settings(session: Session, query: Query) -> Values:
    """Return the values of the page of settings in force, with their origins, bounds and rings.

    Without `prefix` and `all` in the query, it shows the settings that the last reload changed or
    refused, and those that are not at their default.
    """
    facts = await session.source.facts()
    broker = facts.broker
    told, untold = SettingsInForce([], 0, []), ""  # untold: why the broker does not tell them
    try:
        told = await session.client.settings_in_force()
    except BrokerRefused as error:
        untold = str(error)
    # Each setting, and what the last reload did with it.
    rows = [(setting, told.change_of(setting.key)) for setting in told.settings]
    begin, changed_only = query.get("prefix", ""), query.get("all") != "yes"
    withheld = await _withheld(session, query, {"reload": ("manage_users", "the broker")})
    if "namespace" in broker:  # the person's user belongs to one
        withheld["reload"] = "it is for users of no namespace"
    return {
        "withheld": withheld,
        "told": told,
        "untold": untold,
        "shown": [
            (setting, change)
            for setting, change in rows
            if setting.key.startswith(begin)
            and (begin or not changed_only or change is not None or not setting.is_default)
        ],
        "facts": broker,
        "reason": facts.reason,
        "welcome": session.client.welcome,
        "bounds": _bounds(broker),
        "rings": rings(broker),
        # Refusals by their code, the most frequent first.
        "refused": sorted(
            (
                (name.removeprefix("refused_"), value)
                for name, value in broker.get("counters", {}).items()
                if name.startswith("refused_")
            ),
            key=lambda each: -each[1],
        ),
    }


# --- parts of pages ---------------------------------------------------------------------------


async def _withheld(
    session: Session, query: Query, needed: Mapping[str, tuple[str, str]]
) -> dict[str, str]:
    """Return the actions that a page must not offer, each with the permission that is missing.

    needed: for each action of the page, the permission and the name that it takes.
    """
    # A page that refreshes itself does not refresh its forms.
    if query.get("poll"):
        return {}
    asked = sorted(set(needed.values()))
    try:
        answers = await asyncio.gather(*(session.client.may(*each) for each in asked))
    except BrokerRefused:
        return {}  # The broker is an older one and does not tell: the action itself finds out.
    allowed = {each for each, may in zip(asked, answers, strict=True) if may}
    return {
        action: f"it takes the permission {verb}" + (f" on {name}" if name else "")
        for action, (verb, name) in needed.items()
        if (verb, name) not in allowed
    }


def _after(query: Query, key: str = "after", what: str = "A message") -> int:
    """Return the number after which a look begins, as a key of the query has it; -1: the oldest."""
    text = query.get(key, "")
    return whole_number(text, 0, (1 << 63) - 1, what) if text else -1


async def _messages(client: Client, mailbox: str, after: int) -> tuple[list[PeekedMail], str]:
    """Return some messages of a mailbox, and why there are none where the broker refuses it."""
    try:
        found = await client.peek(mailbox, after=after, limit=ROWS_MAX, body_bytes=TEXT_BYTES_MAX)
    except BrokerRefused as error:
        return [], str(error)
    return found, ""


async def _requests(
    client: Client, facts: ServiceFacts, query: Query
) -> tuple[list[PeekedRequest], str]:
    """Return a part of the requests of a service, for its page, and why there is none.

    The reason is empty unless the broker refuses to show them. "from" of the query: number of the
    last request of the part before.
    """
    if not facts.waiting + facts.held + facts.delayed:
        return [], ""
    after = _after(query, "from", "A request")
    try:
        return await client.peek_requests(facts.name, after=after, limit=ROWS_MAX), ""
    except BrokerRefused as error:
        return [], str(error)


async def _dead_letters(client: Client, facts: ServiceFacts | GroupFacts, query: Query) -> Values:
    """Return a part of the dead letters of a service or group, for its page.

    "following": number after which the next part begins; None: this is the last one.
    """
    # The mailboxes in which letters lie; an older broker does not tell: the one of the settings.
    places = list(facts.dead_in) or [facts.dead_letters]
    letters: list[PeekedMail] = []
    faults: list[str] = []
    if facts.dead:
        for mailbox in places:
            some, fault = await _messages(client, mailbox, _after(query))
            letters += some
            faults += [fault] if fault else []
        letters = sorted(letters, key=lambda letter: letter.number)[:ROWS_MAX]
    following = letters[-1].number if len(letters) == ROWS_MAX else None
    fault = " ".join(faults)
    return {"messages": letters, "places": places, "fault": fault, "following": following}


async def _links(client: Client) -> list[LinkFacts]:
    """Return the links of clients; none where the person may not see them."""
    try:
        return await client.list_links(LISTED_MAX)
    except BrokerRefused:
        return []


def rings(broker: Mapping[str, Any]) -> list[Values]:
    """Return each ring with what is used of it, for a page: the failed first, then the refusing.

    broker: the answer to BROKER_INFO: "disk" is what the shell tells of rings, "rings" what the
    core does. "full" is the setting: what a ring does when it has no room, overwrite or refuse.
    """
    refusing, core = broker.get("refusing", {}), broker.get("rings", {})
    found = []
    for name, facts in broker.get("disk", {}).items():
        used = facts["end_lsn"] - facts["start_lsn"]  # LSNs are counted in bytes
        capacity = facts.get("ring_bytes", 0)
        found.append(
            {
                "name": name, "title": ring_title(broker, name), "full": facts.get("full", ""),
                "used": used, "capacity": capacity,
                "share": min(1.0, used / capacity) if capacity else 0.0,
                "written": facts["end_lsn"], "unsynced": facts["end_lsn"] - facts["synced_lsn"],
                "refusing": name in refusing, "failed": core.get(name, {}).get("failed", ""),
            }
        )  # fmt: skip
    return sorted(found, key=lambda each: (not each["failed"], not each["refusing"], each["title"]))


def _bounds(broker: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return (name, use, bound) of all that has a bound, the nearest to its bound first.

    broker: the answer to BROKER_INFO.
    """
    used, bounds = in_use(broker), broker.get("bounds", {})
    found = [(name, used[name], most) for name, most in bounds.items() if name in used and most]

    def nearest(each: tuple[str, int, int]) -> tuple[float, str]:
        name, amount, most = each
        return -amount / most, name

    return sorted(found, key=nearest)


def _listed(
    query: Query, entries: Iterable[tuple[T, list[Trouble]]], count: int, **more: Any
) -> Values:
    """Return the values of one page of a list, which begins with what is in trouble.

    entries: each thing with its troubles. count: of all things that were found, of which LISTED_MAX
    are listed. more: further values of the page.
    """
    rows = list(entries)[:LISTED_MAX]  # one more was asked for, to know whether there are more

    def worst_first(row: tuple[T, list[Trouble]]) -> float:
        _, found = row
        return -max((trouble.weight for trouble in found), default=0.0)

    rows.sort(key=worst_first)
    pages = max(1, -(-len(rows) // ROWS_MAX))  # rounded up
    number = min(pages, whole_number(query.get("page", "") or "1", 1, LISTED_MAX, "The page"))
    return {
        "rows": rows[(number - 1) * ROWS_MAX : number * ROWS_MAX],
        "listed": len(rows),
        "unlisted": count > LISTED_MAX,
        "page": number,
        "pages": pages,
        **more,
    }
