"""`malamute check`: one verdict about the broker, for monitoring systems.

Owns the thresholds and the exit codes of monitoring plugins, which are not those of the other
commands: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN. The rules: whether the broker is ready is always
judged; a thing that is named and not there, or may not be seen, is UNKNOWN, never OK; the output is
one line, however many things there are. Source: the guidelines of the Monitoring Plugins project.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import typer
from typer.core import TyperCommand

from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_py.cli import output
from malamute_py.cli.failures import USAGE, CommandFailed, explained
from malamute_py.cli.linking import linked
from malamute_py.cli.looking import COUNTS, Look, look
from malamute_py.cli.values import count_text, duration_ms, duration_text
from malamute_py.client.facts import MailboxFacts, ServiceFacts
from malamute_py.health.facts import ring_title
from malamute_py.health.readiness import ready
from malamute_py.health.troubles import of_link, seconds_since

OK: Final = 0
WARNING: Final = 1
CRITICAL: Final = 2
UNKNOWN: Final = 3
_WORDS: Final = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_WORST_FIRST: Final = (CRITICAL, WARNING, UNKNOWN, OK)
_SAID_MAX: Final = 5
"""Findings that the line names; it counts the others."""

EPILOG: Final = """\b
Examples:
  malamute check                                     ready for work?
  malamute check --lag 10000,100000                  each cursor and group
  malamute check --lag trades/etl=1000,5000 --depth desk=,500
  malamute check --oldest 5m,1h --waiting-age lookup=30s,2m --dead 0
  malamute check --headroom 20%,10% --clients-least 5,1

A threshold is WARN,CRIT for all of a kind, or NAME=WARN,CRIT for one of it; either may be left
out: `100` warns above 100, `,100` is critical above 100. A thing with a threshold of its own is
not judged by that for all. Options may be repeated.

Exit codes: 0 OK, 1 WARNING, 2 CRITICAL (also without a broker), 3 UNKNOWN."""


class Finding(NamedTuple):
    """One thing that was judged."""

    state: int
    words: str


class Datum(NamedTuple):
    """A figure for graphs."""

    label: str
    value: float
    unit: str
    warn: float | None
    crit: float | None


class Threshold(NamedTuple):
    """Values beyond which a thing is bad."""

    name: str
    """The one thing; empty: all of its kind."""
    warn: float | None
    crit: float | None


class Kind(NamedTuple):
    """Values of one kind of thing that a threshold can judge."""

    option: str
    of: Callable[[Look], dict[str, float]]
    """Returns the value by name of the thing, from the listings that look() fetched."""
    listings: tuple[str, ...]
    """Names of the listings that look() fetches for it."""
    said: Callable[[float], str]
    """Writes a value for a person."""
    read: Callable[[str], float]
    """Reads a limit that was given on the command line; raises ValueError."""
    unit: str = ""
    low: bool = False
    """True: small values are bad."""
    alone: bool = False
    """True: there is one value for the whole broker; `of` gives it the empty name."""


def _lags(seen: Look) -> dict[str, float]:
    """Return lags; of a cursor and a group of one name that of the one farther behind."""
    found: dict[str, float] = {}
    cursors = ((each.stream, each.cursor, each.lag) for each in seen.everything.cursors)
    groups = ((each.stream, each.group, each.lag) for each in seen.everything.groups)
    for stream, reader, lag in chain(cursors, groups):
        name = f"{stream}/{reader}"
        found[name] = max(found.get(name, 0.0), float(lag))
    return found


def _dead(seen: Look) -> dict[str, float]:
    """Return the counts of dead letters of services and groups."""
    found = {each.name: float(each.dead) for each in seen.everything.services}
    groups = seen.everything.groups
    return found | {f"{each.stream}/{each.group}": float(each.dead) for each in groups}


def _oldest(things: Iterable[MailboxFacts | ServiceFacts], seen: Look) -> dict[str, float]:
    """Return the age in seconds of the oldest entry of each thing."""
    return {each.name: seconds_since(each.oldest_ms, seen.now_ms) for each in things}


def _headrooms(seen: Look) -> dict[str, float]:
    """Share that is left of each ring that refuses when full, and of ring main before it waits.

    The ring of one stream has the stream's name.
    """
    # A ring that overwrites its oldest history when it is full cannot run out of room.
    found = {
        _name_of_ring(seen.broker, name): 1
        - (facts["end_lsn"] - facts["start_lsn"]) / facts["ring_bytes"]
        for name, facts in seen.broker.get("disk", {}).items()
        if facts.get("full") == "refuse" and facts.get("ring_bytes")
    }
    # Ring main waits instead when the checkpoint lags so far that segments cannot be reused.
    checkpoint = seen.broker.get("checkpoint", {})
    if "ring_use" in checkpoint:
        found["main"] = 1 - checkpoint["ring_use"]
    return {name: max(0.0, share) * 100 for name, share in found.items()}


def _name_of_ring(broker: dict[str, Any], ring: str) -> str:
    """Return the name that a threshold gives a ring: its stream's, unless a ring has that name."""
    stream = broker.get("rings", {}).get(ring, {}).get("stream")
    return stream if stream and stream not in broker["disk"] else ring_title(broker, ring)


def _clients(seen: Look) -> dict[str, float]:
    """Count the links, without that of this command."""
    return {"": float(max(0, seen.broker.get("gauges", {}).get("links", 0) - 1))}


def _slow(seen: Look) -> dict[str, float]:
    """Count the links with a trouble of slow reading; the broker's one count has the empty name."""
    return {"": float(sum(any(of_link(each)) for each in seen.links))}


def _number(text: str) -> float:
    """Read a count of an option. Raises ValueError."""
    if not text.isdigit():
        raise ValueError(f"{text!r} is not a count")
    return float(text)


def _share(text: str) -> float:
    """Read a percentage of an option. Raises ValueError."""
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = math.nan
    if not 0 <= share <= 100:
        raise ValueError(f"{text!r} is not a share such as 20%")
    return share


def _seconds(text: str) -> float:
    return duration_ms(text) / 1000


def _span(seconds: float) -> str:
    return duration_text(int(seconds * 1000))


_COUNTED: Final = ("broker", COUNTS)
KINDS: Final = (
    Kind("lag", _lags, ("cursors", "groups"),
         lambda value: f"{count_text(int(value), 'record')} behind", _number),
    Kind("depth", lambda seen: {e.name: float(e.messages) for e in seen.everything.mailboxes},
         ("mailboxes",), lambda value: count_text(int(value), "message"), _number),
    Kind("oldest",
         lambda seen: _oldest(seen.everything.mailboxes, seen),
         ("mailboxes",), lambda value: f"oldest message for {_span(value)}", _seconds, "s"),
    Kind("waiting", lambda seen: {e.name: float(e.waiting) for e in seen.everything.services},
         ("services",), lambda value: f"{count_text(int(value), 'request')} waiting", _number),
    Kind("waiting-age",
         lambda seen: _oldest(seen.everything.services, seen),
         ("services",), lambda value: f"oldest request for {_span(value)}", _seconds, "s"),
    Kind("dead", _dead, ("services", "groups"),
         lambda value: count_text(int(value), "dead letter"), _number),
    Kind("headroom", _headrooms, _COUNTED, lambda value: f"{value:.1f}% left", _share, "%",
         low=True),
    Kind("clients-least", _clients, _COUNTED, lambda value: count_text(int(value), "client"),
         _number, low=True, alone=True),
    Kind("clients-most", _clients, _COUNTED, lambda value: count_text(int(value), "client"),
         _number, alone=True),
    Kind("slow-clients", _slow, ("clients",), lambda value: count_text(int(value), "slow client"),
         _number, alone=True),
)  # fmt: skip
_NOUNS: Final = {
    "lag": "cursor or group", "depth": "mailbox", "oldest": "mailbox", "waiting": "service",
    "waiting-age": "service", "dead": "service or group", "headroom": "ring",
}  # fmt: skip

_LOW: Final = frozenset(kind.option for kind in KINDS if kind.low)

Thresholds: TypeAlias = list[str] | None


def _option(text: str, metavar: str = "[NAME=]WARN,CRIT") -> Any:
    return typer.Option(metavar=metavar, help=text)


def tell_usage(words: str, args: Sequence[str]) -> int:
    """Print that a command line is wrong, as UNKNOWN.

    Exit code 2, which other commands end with then, means CRITICAL to a monitoring system.
    args: the command line. Returns the exit code.
    """
    return _tell([Finding(UNKNOWN, words)], [], as_json="--json" in args)


class _Parser(TyperCommand):
    """Reads the command line; one that is wrong is UNKNOWN."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, or end with the exit code UNKNOWN; called by the framework."""
        try:
            # Parsing takes the arguments out of the list.
            return super().parse_args(ctx, list(args))
        except typer.TyperException as error:
            told = explained(error)
            assert told is not None, "a wrong command line is an expected failure"
            raise typer.Exit(tell_usage(told[0], args)) from None


PARSER: Final = _Parser


def check(
    ctx: typer.Context,
    lag: Annotated[Thresholds, _option("Records behind: STREAM/CURSOR, STREAM/GROUP.")] = None,
    depth: Annotated[Thresholds, _option("Messages in a mailbox.")] = None,
    oldest: Annotated[
        Thresholds, _option("Age of a mailbox's oldest message that is due: 5m,1h.")
    ] = None,
    waiting: Annotated[Thresholds, _option("Requests that wait for a service.")] = None,
    waiting_age: Annotated[
        Thresholds, _option("Age of a service's oldest waiting request.")
    ] = None,
    dead: Annotated[Thresholds, _option("Dead letters: SERVICE, STREAM/GROUP.")] = None,
    headroom: Annotated[
        Thresholds,
        _option("Share left of a ring that refuses when full, and of ring main before it waits."),
    ] = None,
    clients_least: Annotated[Thresholds, _option("Clients, at least.", "WARN,CRIT")] = None,
    clients_most: Annotated[Thresholds, _option("Clients, at most.", "WARN,CRIT")] = None,
    slow_clients: Annotated[
        Thresholds, _option("Clients that do not read what they get.", "WARN,CRIT")
    ] = None,
    as_json: output.Json = False,
) -> int:
    """Judge the broker: one line and an exit code for monitoring systems."""
    # In the order of KINDS.
    given = (lag, depth, oldest, waiting, waiting_age, dead, headroom, clients_least,
             clients_most, slow_clients)  # fmt: skip
    findings: list[Finding]
    data: list[Datum] = []
    try:
        wanted = [
            (kind, [threshold(kind, text) for text in texts])
            for kind, texts in zip(KINDS, given, strict=True)
            if texts
        ]
        with linked(ctx) as client:
            seen = look(client, {each for kind, _ in wanted for each in kind.listings})
        findings, data = judged(seen, wanted)
    except (CommandFailed, MalamuteError) as error:
        told = explained(error)
        assert told is not None, "both errors are expected failures"
        words, code = told
        # A refusal or a wrong option says nothing about the broker's state; no answer at all does.
        unknown = isinstance(error, BrokerRefused) or code == USAGE
        findings = [Finding(UNKNOWN if unknown else CRITICAL, words)]
    return _tell(findings, data, as_json)


def threshold(kind: Kind, text: str) -> Threshold:
    """Read `NAME=WARN,CRIT`, of which the name and one of the values may be missing.

    Raises CommandFailed: the text is no threshold of this kind.
    """
    name, equals, values = text.rpartition("=")
    warn, _, crit = values.partition(",")
    try:
        if equals and kind.alone:
            raise ValueError("it has no name")
        if not warn and not crit:
            raise ValueError("it has no value")
        read = [kind.read(each.strip()) if each.strip() else None for each in (warn, crit)]
        given = [each for each in read if each is not None]
        # CRIT is farther than WARN, in the direction that is bad.
        if given != sorted(given, reverse=kind.low):
            raise ValueError(f"CRIT is {'above' if kind.low else 'below'} WARN")
    except (ValueError, CommandFailed) as error:
        raise CommandFailed(
            f"--{kind.option} {text}: {error}; write it as {'' if kind.alone else '[NAME=]'}"
            "WARN,CRIT",
            USAGE,
        ) from None
    return Threshold(name, *read)


def judged(
    seen: Look, wanted: Sequence[tuple[Kind, Sequence[Threshold]]]
) -> tuple[list[Finding], list[Datum]]:
    """Judge what look() fetched by thresholds: findings in words, and figures for graphs.

    seen.unseen: the reasons why a listing is incomplete for this user, by listing. Each threshold
    gives one figure: the worst value that it judges.
    """
    findings = list(_readiness(seen))
    data: list[Datum] = []
    for kind, thresholds in wanted:
        values = kind.of(seen)
        named = {each.name for each in thresholds if each.name}
        for each in thresholds:
            listings = [listing for listing in kind.listings if _may_hold(listing, each.name)]
            hidden = [seen.unseen[listing] for listing in listings if listing in seen.unseen]
            if each.name in values and len(listings) == 1:
                # The named thing was seen although others are hidden, as a user's own mailbox. With
                # two listings another thing of this name may be in the hidden one.
                hidden = []
            if each.name:
                meant = {each.name: values[each.name]} if each.name in values else {}
            else:  # For all, but for those with a threshold of their own.
                meant = {name: value for name, value in values.items() if name not in named}
            bad = list(_against(kind, each, meant))
            findings += bad
            label = f"{kind.option} {each.name}".strip()
            if hidden and not (bad and each.name):
                # A hidden thing may be bad; a named one that was found bad is judged already.
                findings.append(Finding(UNKNOWN, f"{label}: {hidden[0]}"))
            elif each.name and not meant:
                what = _NOUNS[kind.option]
                findings.append(Finding(UNKNOWN, f"there is no {what} {each.name}"))
            worst = (min if kind.low else max)(meant.values(), default=None)
            if worst is not None:
                data.append(Datum(label, worst, kind.unit, each.warn, each.crit))
    return findings, data


def _may_hold(listing: str, name: str) -> bool:
    """Whether a listing may have a thing of this name; of cursors and groups it is STREAM/NAME."""
    return not name or ("/" in name) == (listing in ("cursors", "groups"))


def _readiness(seen: Look) -> Iterator[Finding]:
    """Yield findings about whether the broker is ready for work."""
    if "broker" in seen.unseen:
        yield Finding(UNKNOWN, f"readiness: {seen.unseen['broker']}")
        return
    verdict = ready(seen.everything.facts)
    yield from (Finding(CRITICAL, f"not ready: {words}") for _, words in verdict.reasons)
    yield from (Finding(WARNING, words) for _, words in verdict.warnings)
    if verdict.holds:
        yield Finding(OK, "ready")


def _against(kind: Kind, bound: Threshold, values: dict[str, float]) -> Iterator[Finding]:
    """Yield a finding for each value beyond a bound, worst first. values: by name of the thing."""
    for name, value in sorted(values.items(), key=lambda item: item[1], reverse=not kind.low):
        # The graver limit first: a value beyond both is CRITICAL, and not WARNING, too.
        for state, limit in ((CRITICAL, bound.crit), (WARNING, bound.warn)):
            if limit is not None and (value < limit if kind.low else value > limit):
                side = "below" if kind.low else "above"
                yield Finding(
                    state,
                    f"{name}: {kind.said(value)}".removeprefix(": ")  # The name may be empty.
                    + f" ({_WORDS[state].lower()} {side} {_limit(kind, limit)})",
                )
                break


def _limit(kind: Kind, limit: float) -> str:
    return _span(limit) if kind.unit == "s" else f"{limit:g}{kind.unit}"


def _tell(findings: Sequence[Finding], data: Sequence[Datum], as_json: bool) -> int:
    """Print the verdict as monitoring systems read it, with the figures; return the exit code."""
    there = {each.state for each in findings}  # Never empty: readiness is always judged.
    state = next(each for each in _WORST_FIRST if each in there)
    ordered = sorted(findings, key=lambda each: _WORST_FIRST.index(each.state))
    if as_json:
        output.print_json(
            {
                "state": _WORDS[state],
                "findings": [
                    {"state": _WORDS[each.state], "words": each.words} for each in ordered
                ],
                "data": [each._asdict() for each in data],
            }
        )
        return state
    bad = [each for each in ordered if each.state != OK] or ordered
    said = "; ".join(each.words for each in bad[:_SAID_MAX])
    if len(bad) > _SAID_MAX:
        said += f"; and {len(bad) - _SAID_MAX} more"
    # In a plugin's line "|" separates the words from the figures, so the words have none.
    line = f"MALAMUTE {_WORDS[state]} - {' '.join(said.split()).replace('|', '/')}"
    print(line + (" | " + " ".join(map(_performance, data)) if data else ""))
    return state


def _performance(datum: Datum) -> str:
    """Write a figure as monitoring plugins do: 'label'=value[unit];warn;crit;least."""
    # Characters that the plugins' syntax gives a meaning.
    label = datum.label.replace("'", "_").replace("=", "_").replace("|", "_")
    bounds = ["" if each is None else f"{each:g}" for each in (datum.warn, datum.crit)]
    option = label.partition(" ")[0]
    if option in _LOW:  # In the plugins' syntax `5:` alarms below 5, and `5` above it.
        bounds = [f"{each}:" if each else "" for each in bounds]
    value = f"{datum.value:.3f}".rstrip("0").rstrip(".")
    return f"'{label}'={value}{datum.unit};{bounds[0]};{bounds[1]};0"
