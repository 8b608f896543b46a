"""`malamute watch`: what happens at the broker, a line each.

Owns which differences of two looks are events. The rules: the broker is asked again and again, and
tells no events itself; what it counts is complete (gaps, dead letters, refusals); a client or a
trouble that came and went between two looks is not seen, and the help says so; an event is said
once, when it begins.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple

import typer

from malamute_protocol.errors import MalamuteError
from malamute_py.cli import output
from malamute_py.cli.commands import say
from malamute_py.cli.letters import sender_text
from malamute_py.cli.linking import linked
from malamute_py.cli.looking import KINDS, Look, look, pause_s
from malamute_py.cli.values import count_text, iso_text, time_text
from malamute_py.health.facts import was_started
from malamute_py.health.troubles import of_all

EPILOG: Final = """\b
Examples:
  malamute watch
  malamute watch --every 5s --json >> events.jsonl
  malamute watch --count 1        until something happens

\b
linked, unlinked      a client came or went
gap, dead, refused, expired, error, lost     growth of the broker's counters
stuck, slow, over     a trouble began or ended, as `malamute top` shows them
started               the broker was started anew

The broker is asked each --every. Times are those of the look that saw it, and a client or trouble
that came and went between two looks is not seen; the counters miss nothing. In a pipe a line has,
with tabs between: time, kind, words."""

COUNTERS: Final = {
    "gaps": ("gap", "gaps told to readers"),
    "group_records_lost": ("gap", "records overwritten before their group had them"),
    "records_overwritten": ("lost", "records overwritten in a full shared ring"),
    "mail_lost": ("lost", "messages whose body is nowhere"),
    "requests_lost": ("lost", "requests whose body is nowhere"),
    "dead_letters": ("dead", "dead letters"),
    "mail_expired": ("expired", "messages whose time was over"),
    "requests_expired": ("expired", "requests whose time was over"),
    "leases_expired": ("expired", "leases of silent workers"),
    "appends_refused_total": ("refused", "appends refused by rings"),
    "connections_refused_total": ("refused", "connections refused"),
    "cut_total": ("refused", "connections cut"),
    "denied_total": ("refused", "connections turned away by their credentials"),
    "refused_forbidden": ("refused", "commands that permissions forbid"),
    "internal_errors": ("error", "internal errors of the broker"),
}
"""Counter of the broker -> the kind of event that its growth is, and what it counts."""
_LINKS_MAX: Final = 1000
"""Links that one look has; where there may be more, none is said to come or go."""


class Happened(NamedTuple):
    """One event."""

    kind: str
    words: str


def watch(
    ctx: typer.Context,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="Pause between two looks.")
    ] = "1s",
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=0, help="End after so many; 0: never.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, a line each.")] = False,
) -> None:
    """Print what happens: links, gaps, dead letters, errors, troubles."""
    every_s = pause_s(every)
    with linked(ctx, stays=True) as client:
        before = look(client, links_max=_LINKS_MAX)
        for kind, why in before.unseen.items():
            # The user's own mailbox is watched, though no other is.
            say(f"{kind}: {why}" if _own_alone(kind, why) else f"{kind}: not watched: {why}")
        if len(before.links) >= _LINKS_MAX:
            say(f"clients: more than {_LINKS_MAX - 1}, so that none is said to come or go")
        kinds = _watched(before)
        if len(kinds) < len(KINDS):
            # What is not permitted is not asked again: each refusal would raise the counter of
            # forbidden commands, and so be told as an event.
            before = look(client, kinds, links_max=_LINKS_MAX)
        said = 0
        while not count or said < count:
            time.sleep(every_s)
            if not client.linked:
                continue
            try:
                now = look(client, kinds, links_max=_LINKS_MAX)
            except MalamuteError as error:
                say(f"no look: {error}")
                continue
            for event in happened(now, before):
                _print(now.now_ms, event, as_json)
                said += 1
                if said == count:
                    break
            before = now


def _watched(look: Look) -> list[str]:
    """Return the kinds of things to look at again: not those that this user is not permitted.

    A listing that was refused for another reason, as `wait`, is asked for again. The words are the
    broker's refusal, or look()'s for an empty listing: this user may see no streams.
    """
    return [
        kind
        for kind in KINDS
        for why in [look.unseen.get(kind, "")]  # Empty: it was seen.
        if _own_alone(kind, why) or not why.startswith(("forbidden", "this user"))
    ]


def _own_alone(kind: str, why: str) -> bool:
    """Whether a user is shown its own mailbox and no other. why: as Look.unseen has it."""
    return kind == "mailboxes" and why.startswith("this user")


def happened(now: Look, before: Look) -> Iterator[Happened]:
    """Yield what happened between two looks: a start, links, what was counted, troubles."""
    anew = was_started(now.broker, before.broker)
    if anew:
        yield Happened("started", f"the broker was started anew, epoch {now.broker.get('epoch')}")
    yield from _links(now, before)
    counted: dict[str, int] = now.broker.get("counters", {})
    # A new process counts from 0.
    stood: dict[str, int] = {} if anew else before.broker.get("counters", {})
    for counter, (kind, what) in COUNTERS.items():
        more = counted.get(counter, 0) - stood.get(counter, 0)
        if more > 0:
            names = _dead(now, before) if counter == "dead_letters" else []
            where = f" ({', '.join(names)})" if names else ""
            yield Happened(kind, f"{what}: {count_text(more)}{where}")
    # A trouble is told when it begins or changes its kind, as from slow to stuck, and when it ends.
    new, old = _troubles(now), _troubles(before)
    for key, (kind, words) in new.items():
        former_kind, _ = old.get(key, ("", ""))
        if former_kind != kind:
            yield Happened(kind, f"{_thing_text(key)}: {words}")
    for key in sorted(old.keys() - new.keys()):
        yield Happened("over", _thing_text(key))


def _links(now: Look, before: Look) -> Iterator[Happened]:
    """Yield links that came and went between two looks, unless there are too many to list."""
    if max(len(now.links), len(before.links)) >= _LINKS_MAX:
        return

    def named(each: Any) -> str:
        who = sender_text(each.identity) if each.identity else "anonymous"
        return f"{who} ({each.software}, link {each.link})"

    there, stood = ({each.link: each for each in seen.links} for seen in (now, before))
    for link in sorted(stood.keys() - there.keys()):
        yield Happened("unlinked", named(stood[link]))
    for link in sorted(there.keys() - stood.keys()):
        yield Happened("linked", named(there[link]))


def _dead(now: Look, before: Look) -> list[str]:
    """Return the services and groups that have more dead letters than before."""

    def counts(seen: Look) -> dict[str, int]:
        """Return the count of dead letters of each service and group, by its kind and name."""
        found = {f"service {each.name}": each.dead for each in seen.everything.services}
        return found | {
            f"group {each.stream}/{each.group}": each.dead for each in seen.everything.groups
        }

    stood = counts(before)
    return [name for name, dead in counts(now).items() if dead > stood.get(name, 0)]


def _troubles(seen: Look) -> dict[tuple[str, ...], tuple[str, str]]:
    """Return kind and words of the troubles that a look shows, by the thing that has them."""
    if "broker" in seen.unseen:
        return {}
    return {
        (each.what, *each.name): (each.kind, each.words)
        for each in of_all(seen.everything, seen.links)
    }


def _thing_text(key: tuple[str, ...]) -> str:
    """Return a key of _troubles() as text: what it is, and its name."""
    return f"{key[0]} {'/'.join(key[1:])}"


def _print(at_ms: int, event: Happened, as_json: bool) -> None:
    """Print one line about something that happened."""
    if as_json:
        output.print_json({"time": iso_text(at_ms), **event._asdict()}, compact=True)
    elif output.on_terminal():
        print(f"{time_text(at_ms)}  {event.kind:8}  {event.words}")
    else:
        print(f"{iso_text(at_ms)}\t{event.kind}\t{event.words}")
    sys.stdout.flush()
