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
        """Write one event as a line, with the time since the run began, and count it."""
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
    """Yield the events of a journal in their order, for check()."""
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
        facts = kinds[name]
        # In the order of the file: a SEEN after a DONE is an element that came again.
        if event.what == ASKED:
            facts.asked.add(event.id)
        elif event.what == CONFIRMED:
            facts.confirmed[event.id] = event.number
        elif event.what == SEEN:
            if (event.id, event.number) in facts.done:
                faults.append(f"{name} {event.id} came again after it was confirmed to be done")
            facts.seen[event.id].add(event.number)
        elif event.what == DONE:
            facts.done.add((event.id, event.number))
        elif event.what == LOOKED:
            facts.looked.add(place)
        elif event.what == FOUND:
            facts.places[place].append((event.id, event.number))
        elif event.what == FIRST and retention:
            facts.first = event.number
        elif event.what == FIRST and event.number:
            faults.append(
                f"{name}s before {event.number} were removed, though nothing was to be removed"
            )
    for name, facts in kinds.items():
        if name == "request":
            _check_requests(facts, faults)
        elif name == "mail":
            _check_mail(facts, faults)
        elif name in ("record", "step", "group"):
            _check_places(name, facts, faults)
    counts = {}
    for name, facts in sorted(kinds.items()):
        counts[f"{name}_asked"] = len(facts.asked)
        counts[f"{name}_confirmed"] = len(facts.confirmed)
    return Verdict(faults, counts)


def _check_places(name: str, facts: _Kind, faults: list[str]) -> None:
    """Check that each place holds each confirmed element once, and all places in one order.

    name: the kind: record, step or group. facts: what its events tell. faults: gets what is broken.
    """
    orders = {}
    """Place -> ids that it holds, in its order."""
    # The places that must be there, also those without a finding, and all others.
    places = {place: facts.places[place] for place in (*PLACES.get(name, ()), *facts.places)}
    unread = sorted(places.keys() - facts.looked)
    faults += [f"{name}s were not looked for {_where(place)}" for place in unread]
    for place, found in places.items():
        ids = [id for id, _ in found]
        orders[place] = ids
        counted = Counter(ids)
        where = _where(place)
        _add_fault(
            faults, f"{name}s {where} more than once", [id for id, n in counted.items() if n > 1]
        )
        _add_fault(faults, f"{name}s {where} that were never asked for", set(counted) - facts.asked)
        # Retention may have taken an element before the log's first offset.
        lost = [
            id
            for id, number in facts.confirmed.items()
            if id not in counted and not 0 <= number < facts.first
        ]
        _add_fault(faults, f"{name}s confirmed and not {where}", lost)
        if name == "record":
            numbers = dict(found)
            renumbered = [
                id
                for id, number in facts.confirmed.items()
                if number >= 0 and numbers.get(id, number) != number
            ]
            _add_fault(faults, f"{name}s {where} at another offset than was confirmed", renumbered)
            _add_fault(
                faults, f"{name}s {where} after a later one of their producer", _out_of_order(ids)
            )
            numbered = {number: id for id, number in found}
            # What a durable reader saw must be in the log, at the same offset: another element is
            # there, or the log ends before it.
            other = [
                id
                for id, seen in facts.seen.items()
                if any(numbered.get(number, id) != id or number >= len(found) + facts.first
                       for number in seen)
            ]  # fmt: skip
            _add_fault(faults, f"{name}s that a durable reader saw where the log has others", other)
    # A step is in all of its places or in none, and steps are in one order everywhere.
    first_place = next(iter(orders.values()), [])
    for place, ids in orders.items():
        if name == "step" and ids != first_place:
            apart = set(ids) ^ set(first_place)
            _add_fault(
                faults, f"steps of which only a part is in {place}", apart or {"(their order)"}
            )
    if name == "group":
        _add_fault(
            faults, "records that no member of the group was given", facts.asked - set(facts.seen)
        )


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


def _check_mail(facts: _Kind, faults: list[str]) -> None:
    """Add what was wrong with the mail: lost, taken twice, never sent, numbered otherwise."""
    _add_fault(
        faults, "messages confirmed and never delivered", set(facts.confirmed) - set(facts.seen)
    )
    _add_fault(
        faults, "messages taken twice", [id for id, seen in facts.seen.items() if len(seen) > 1]
    )
    _add_fault(faults, "messages that were never sent", set(facts.seen) - facts.asked)
    # Seen under just the number that was confirmed; what was never seen is a fault of its own.
    renumbered = [
        id for id, number in facts.confirmed.items() if facts.seen.get(id, {number}) != {number}
    ]
    _add_fault(faults, "messages with another number than was confirmed", renumbered)


def _check_requests(facts: _Kind, faults: list[str]) -> None:
    """Check that each confirmed request is answered by one message."""
    if "answers" not in facts.looked:
        faults.append("requests were not looked for in answers")
    answers = Counter(id for id, _ in facts.places["answers"])
    _add_fault(faults, "requests confirmed and never answered", set(facts.confirmed) - set(answers))
    _add_fault(faults, "requests answered twice", [id for id, n in answers.items() if n > 1])
    _add_fault(faults, "answers to what was never asked", set(answers) - facts.asked)


def _add_fault(faults: list[str], what: str, ids: Iterable[str]) -> None:
    """Add a fault about these elements, some of which it names; none: there is no fault."""
    named = sorted(ids)
    if named:
        more = f" and {len(named) - _NAMED_MAX} more" if len(named) > _NAMED_MAX else ""
        faults.append(f"{len(named)} {what}: {', '.join(named[:_NAMED_MAX])}{more}")
