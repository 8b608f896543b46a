"""The journal of calls and promises, and the check of it.

Owns the events and the rules that they must meet. The rule: an event of an intent is written before
the call, one of a promise after it, and the check sees nothing but the events.

Words: an element is one record, message, request or step that a client of the run handed in; its id
is the producer's letters, a colon and a number that rises. A place is a stream or mailbox in which
an element must be found in the end. A fault is a broken promise, as a sentence. Source: SPEC.md,
section 8; README.md, "What is promised".
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

ASKED: Final = "asked"
"""Event: a call was made."""
CONFIRMED: Final = "confirmed"
"""Event: the call came back with a promise; `number` is the offset or number that it named."""
UNSURE: Final = "unsure"
"""Event: the call came back with an error, and may or may not have taken effect."""
SEEN: Final = "seen"
"""Event: a reader that lives through the disturbances got the element."""
DONE: Final = "done"
"""Event: the broker confirmed the acknowledgement of the element, which must not be seen again."""
FOUND: Final = "found"
"""Event: an element was there at the end; events of one place are in the order of that place."""
LOOKED: Final = "looked"
"""Event: the place was read to its end; the events FOUND are all that it holds."""
FIRST: Final = "first"
"""Event: the offset that the log began at when it was read. The check excuses missing older records
only where a stream's retention may have taken them, as the broker reported."""
NOTE: Final = "note"
"""Event: a disturbance, for people."""
PLACES: Final = {"record": ("",), "step": ("left", "right", "audit"), "request": ("answers",)}
"""Kind -> the places that hold each confirmed element."""
_NAMED_MAX: Final = 5
"""Ids that one fault names."""


class Event(NamedTuple):
    """One line of the journal."""

    what: str
    kind: str
    """Kind of the element: record, mail, request, step; or the place where it was found."""
    id: str
    number: int = -1


class Book:
    """The journal under way: events go to a file, and are counted."""

    def __init__(self, path: Path) -> None:
        """path: of the file, which is written anew."""
        self._file = path.open("w", encoding="utf-8")
        self.counts: Counter[tuple[str, str]] = Counter()
        self._began = time.monotonic()

    def note(self, what: str, kind: str, id: str, number: int = -1) -> None:
        """Write one event."""
        self.counts[what, kind] += 1
        at_s = round(time.monotonic() - self._began, 3)
        self._file.write(json.dumps([what, kind, id, number, at_s]) + "\n")

    def __enter__(self) -> Self:
        """Return the journal; nothing else is to be done."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Read the events of a journal."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            what, kind, id, number, _ = json.loads(line)
            yield Event(what, kind, id, number)


class Verdict(NamedTuple):
    """The result of a check."""

    faults: list[str]
    """Broken promises, a sentence each; empty: no promise was broken."""
    counts: dict[str, int]
    """Elements of each kind that were asked for and promised."""


class _Kind:
    """The calls, promises and findings of one kind, by the events' names; numbers are offsets."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.confirmed: dict[str, int] = {}
        """Id -> number that the confirm named; -1: it named none."""
        self.seen: dict[str, set[int]] = defaultdict(set)
        """Id -> numbers under which a reader got it."""
        self.places: dict[str, list[tuple[str, int]]] = defaultdict(list)
        """Place -> (id, number) of all that it held in the end, in its order."""
        self.looked: set[str] = set()
        """Places that were read to their end."""
        self.done: set[tuple[str, int]] = set()
        """(id, number) of what the broker took an acknowledgement of."""
        self.first = 0
        """Offset that the log began at: retention may have taken what lay before."""


def check(events: Iterable[Event], *, retention: bool = True) -> Verdict:
    """Compare the events of a run with what the broker promised. Called when the run is over.

    retention: False: nothing was to be removed, so that every log must begin with its first record.
    """
    faults: list[str] = []
    kinds: dict[str, _Kind] = defaultdict(_Kind)
    for event in events:
        name, _, place = event.kind.partition("/")  # as step/left; most kinds have one place
        of = kinds[name]
        # In the order of the file: a SEEN after a DONE is an element that came again.
        if event.what == ASKED:
            of.asked.add(event.id)
        elif event.what == CONFIRMED:
            of.confirmed[event.id] = event.number
        elif event.what == SEEN:
            if (event.id, event.number) in of.done:
                faults.append(f"{name} {event.id} came again after it was confirmed to be done")
            of.seen[event.id].add(event.number)
        elif event.what == DONE:
            of.done.add((event.id, event.number))
        elif event.what == LOOKED:
            of.looked.add(place)
        elif event.what == FOUND:
            of.places[place].append((event.id, event.number))
        elif event.what == FIRST and retention:
            of.first = event.number
        elif event.what == FIRST and event.number:
            faults.append(
                f"{name}s before {event.number} were removed, though nothing was to be removed"
            )
    for name, of in kinds.items():
        if name == "request":
            _check_requests(of, faults)
        elif name == "mail":
            _check_mail(of, faults)
        elif name in ("record", "step", "group"):
            _check_places(name, of, faults)
    counts = {}
    for name, of in sorted(kinds.items()):
        counts[f"{name}_asked"] = len(of.asked)
        counts[f"{name}_confirmed"] = len(of.confirmed)
    return Verdict(faults, counts)


def _check_places(name: str, of: _Kind, faults: list[str]) -> None:
    """Check that each place holds each confirmed element once, and all places in one order.

    name: the kind: record, step or group. of: its events. faults: gets what is broken.
    """
    orders = {}
    """Place -> ids that it holds, in its order."""
    # The places that must be there, also those without a finding, and all others.
    places = {place: of.places[place] for place in (*PLACES.get(name, ()), *of.places)}
    unread = sorted(places.keys() - of.looked)
    faults += [f"{name}s were not looked for {_where(place)}" for place in unread]
    for place, found in places.items():
        ids = [id for id, _ in found]
        orders[place] = ids
        counted = Counter(ids)
        where = _where(place)
        _say(faults, f"{name}s {where} more than once", [id for id, n in counted.items() if n > 1])
        _say(faults, f"{name}s {where} that were never asked for", set(counted) - of.asked)
        # Retention may have taken an element before the log's first offset.
        lost = [
            id
            for id, number in of.confirmed.items()
            if id not in counted and not 0 <= number < of.first
        ]
        _say(faults, f"{name}s confirmed and not {where}", lost)
        if name == "record":
            numbers = dict(found)
            renumbered = [
                id
                for id, number in of.confirmed.items()
                if number >= 0 and numbers.get(id, number) != number
            ]
            _say(faults, f"{name}s {where} at another offset than was confirmed", renumbered)
            _say(faults, f"{name}s {where} after a later one of their producer", _out_of_order(ids))
            numbered = {number: id for id, number in found}
            # What a durable reader saw must be in the log, at the same offset: another element is
            # there, or the log ends before it.
            other = [
                id
                for id, seen in of.seen.items()
                if any(numbered.get(number, id) != id or number >= len(found) + of.first
                       for number in seen)
            ]  # fmt: skip
            _say(faults, f"{name}s that a durable reader saw where the log has others", other)
    # A step is in all of its places or in none, and steps are in one order everywhere.
    first_place = next(iter(orders.values()), [])
    for place, ids in orders.items():
        if name == "step" and ids != first_place:
            apart = set(ids) ^ set(first_place)
            _say(faults, f"steps of which only a part is in {place}", apart or {"(their order)"})
    if name == "group":
        _say(faults, "records that no member of the group was given", of.asked - set(of.seen))


def _where(place: str) -> str:
    """Return a place in words; "": the stream of the records."""
    return f"in {place}" if place else "in the log"


def _out_of_order(ids: list[str]) -> list[str]:
    """Return the ids that came after a later one of the same producer."""
    last: dict[str, int] = {}
    found = []
    for id in ids:
        producer, _, number = id.rpartition(":")
        if int(number) < last.get(producer, -1):
            found.append(id)
        last[producer] = max(int(number), last.get(producer, -1))
    return found


def _check_mail(of: _Kind, faults: list[str]) -> None:
    """Add what was wrong with the mail: lost, taken twice, never sent, numbered otherwise."""
    _say(faults, "messages confirmed and never delivered", set(of.confirmed) - set(of.seen))
    _say(faults, "messages taken twice", [id for id, seen in of.seen.items() if len(seen) > 1])
    _say(faults, "messages that were never sent", set(of.seen) - of.asked)
    # Seen under just the number that was confirmed; what was never seen is a fault of its own.
    renumbered = [
        id for id, number in of.confirmed.items() if of.seen.get(id, {number}) != {number}
    ]
    _say(faults, "messages with another number than was confirmed", renumbered)


def _check_requests(of: _Kind, faults: list[str]) -> None:
    """Check that each confirmed request is answered by one message."""
    if "answers" not in of.looked:
        faults.append("requests were not looked for in answers")
    answers = Counter(id for id, _ in of.places["answers"])
    _say(faults, "requests confirmed and never answered", set(of.confirmed) - set(answers))
    _say(faults, "requests answered twice", [id for id, n in answers.items() if n > 1])
    _say(faults, "answers to what was never asked", set(answers) - of.asked)


def _say(faults: list[str], what: str, ids: Iterable[str]) -> None:
    """Add a fault about these elements, some of which it names; none: there is no fault."""
    named = sorted(ids)
    if named:
        more = f" and {len(named) - _NAMED_MAX} more" if len(named) > _NAMED_MAX else ""
        faults.append(f"{len(named)} {what}: {', '.join(named[:_NAMED_MAX])}{more}")
