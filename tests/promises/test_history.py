"""The check of a history finds each kind of broken promise, and nothing in a whole one."""

from __future__ import annotations

from malamute_py.promises.history import (
    ASKED,
    CONFIRMED,
    DONE,
    FIRST,
    FOUND,
    LOOKED,
    SEEN,
    Event,
    check,
)


def whole() -> list[Event]:
    """A short history in which all promises were kept."""
    events = []
    for n in range(4):
        events += [
            Event(ASKED, "record", f"a:{n}"), Event(CONFIRMED, "record", f"a:{n}", n),
            Event(SEEN, "record", f"a:{n}", n),
            Event(ASKED, "mail", f"m:{n}"), Event(CONFIRMED, "mail", f"m:{n}", 10 + n),
            Event(SEEN, "mail", f"m:{n}", 10 + n), Event(DONE, "mail", f"m:{n}", 10 + n),
            Event(ASKED, "request", f"q:{n}"), Event(CONFIRMED, "request", f"q:{n}"),
            Event(SEEN, "work", f"q:{n}"), Event(DONE, "work", f"q:{n}"),
            Event(FOUND, "request/answers", f"q:{n}", 50 + n),
            Event(ASKED, "step", f"s:{n}"), Event(CONFIRMED, "step", f"s:{n}"),
            Event(ASKED, "group", f"s:{n}"), Event(SEEN, "group", f"s:{n}", n),
            Event(DONE, "group", f"s:{n}", n),
        ]  # fmt: skip
    events.append(Event(LOOKED, "request/answers", ""))
    for place in ("record/", "step/left", "step/right", "step/audit"):
        events.append(Event(LOOKED, place, ""))
        kind = "a" if place == "record/" else "s"
        events += [Event(FOUND, place, f"{kind}:{n}", n) for n in range(4)]
    return events


def faults(events: list[Event]) -> str:
    return " | ".join(check(events).faults)


def without(what: str, kind: str, id: str) -> list[Event]:
    return [event for event in whole() if event[:3] != (what, kind, id)]


def test_a_whole_history_has_no_fault() -> None:
    verdict = check(whole())
    assert verdict.faults == []
    assert verdict.counts["record_confirmed"] == 4


def test_what_was_confirmed_and_is_not_there_is_found() -> None:
    assert "records confirmed and not in the log: a:2" in faults(without(FOUND, "record/", "a:2"))
    assert "messages confirmed and never delivered: m:1" in faults(without(SEEN, "mail", "m:1"))
    answers = without(FOUND, "request/answers", "q:3")
    assert "requests confirmed and never answered: q:3" in faults(answers)
    assert "steps of which only a part" in faults(without(FOUND, "step/right", "s:1"))
    assert "no member of the group was given: s:0" in faults(without(SEEN, "group", "s:0"))


def test_what_was_overwritten_by_the_ring_is_excused() -> None:
    events = [*without(FOUND, "record/", "a:0"), Event(FIRST, "record", "", 1)]
    assert faults(events) == ""
    strict = check(events, retention=False).faults
    assert strict[0] == "records before 1 were removed, though nothing was to be removed"
    assert strict[1] == "1 records confirmed and not in the log: a:0"


def test_a_place_that_is_empty_or_was_not_read_is_found() -> None:
    for place, kind in (("record/", "records"), ("step/left", "steps"), ("step/audit", "steps")):
        empty = [event for event in whole() if event[:2] != (FOUND, place)]
        assert f"4 {kind} confirmed and not in" in faults(empty)
        unread = [event for event in empty if event[:2] != (LOOKED, place)]
        assert f"{kind} were not looked for in" in faults(unread)
    unread = [event for event in whole() if event[:2] != (LOOKED, "request/answers")]
    assert "requests were not looked for in answers" in faults(unread)
    no_answers = [event for event in whole() if event[:2] != (FOUND, "request/answers")]
    assert "4 requests confirmed and never answered" in faults(no_answers)


def test_what_is_there_twice_is_found() -> None:
    assert "more than once: a:1" in faults([*whole(), Event(FOUND, "record/", "a:1", 4)])
    assert "taken twice: m:1" in faults([*whole(), Event(SEEN, "mail", "m:1", 99)])
    assert "answered twice: q:1" in faults([*whole(), Event(FOUND, "request/answers", "q:1", 99)])


def test_what_comes_again_after_it_was_done_is_found() -> None:
    for kind, id, number in (("mail", "m:1", 11), ("work", "q:1", -1), ("group", "s:1", 1)):
        again = faults([*whole(), Event(SEEN, kind, id, number)])
        assert f"{kind} {id} came again after it was confirmed to be done" in again


def test_what_nobody_asked_for_and_what_moved_is_found() -> None:
    assert "never asked for: x:0" in faults([*whole(), Event(FOUND, "record/", "x:0", 4)])
    moved = [*without(CONFIRMED, "record", "a:1"), Event(CONFIRMED, "record", "a:1", 3)]
    assert "at another offset than was confirmed: a:1" in faults(moved)
    seen = [*whole(), Event(SEEN, "record", "a:0", 2)]
    assert "a durable reader saw where the log has others: a:0" in faults(seen)


def test_another_order_is_found() -> None:
    events = [event for event in whole() if event[:2] != (FOUND, "record/")]
    events += [Event(FOUND, "record/", f"a:{id}", n) for n, id in enumerate((0, 2, 1, 3))]
    assert "after a later one of their producer: a:1" in faults(events)
