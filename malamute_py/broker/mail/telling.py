"""Telling: what a MAIL says of rows of a put beside their content.

Owns the reasons, the records and the requests that rows of dead letters, notices and replies are
told with. The rules: one MAIL tells one reason for all of its rows; the requests that it names have
a bound in bytes, since a client takes no larger command. Source: SPEC.md, sections 4.4 and 4.8.

A put is the messages of one batch in a mailbox; its messages are its rows, and a mask is a set of
them.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.limits import KEY_BYTES_MAX
from malamute_py.broker.log.pages import PAGE_BYTES
from malamute_py.broker.structures.bitmaps import lowest, places_of
from malamute_py.changelog.records import Run
from malamute_py.changelog.tables import Rare

RUN_BYTES: Final = 14
"""Bytes that a run of requests takes in a MAIL beside its key, at most."""
ALWAYS_NAMED: Final = PAGE_BYTES // (KEY_BYTES_MAX + RUN_BYTES)
"""Rows of which one MAIL can name the requests, whatever their keys are."""


def same_why(rare: Rare, mask: int) -> int:
    """Return the first rows of a mask that have the same reason to lie in the mailbox.

    A MAIL tells one reason for all of its rows. Of several reasons of a row the newest counts.
    """
    first = mask & -mask  # The lowest bit: the first row.
    seen = 0
    for rows, _ in reversed(rare.why):
        some = int.from_bytes(rows, "little") & ~seen
        if some & first:
            # The rows before the first one with another reason: the bits below that row's.
            others = mask & ~some
            return mask & ((others & -others) - 1) if others else mask
        seen |= some
    return mask


def why_of(rare: Rare, mask: int) -> str:
    """Return the reason why the first row of a mask lies in the mailbox, for a MAIL or a peek."""
    first = mask & -mask  # The lowest bit: the first row.
    for rows, why in reversed(rare.why):  # The newest reason of a row counts.
        if int.from_bytes(rows, "little") & first:
            return why
    return ""


def origin_of(rare: Rare, mask: int) -> tuple[str, str, int, list[int]] | None:
    """Return which records of a group the rows of a put of dead letters were, as MAIL has it."""
    origin = rare.origin
    if origin is None:
        return None
    offsets = [origin.offsets[place] for place in places_of(mask)]
    return origin.stream, origin.group, origin.attempts, offsets


def about_of(about: list[Run], mask: int, count: int) -> list[Run]:
    """Return which requests some rows of a put of replies answer, for their MAIL.

    about: runs of requests (key of their batch, first row in it, how many), which the rows of the
    put answer one by one, in order. mask: the rows. count: rows of the put.
    """
    if not about or mask == (1 << count) - 1:
        return about
    runs: list[Run] = []
    at = 0  # The row of the put that answers the first request of the run at hand.
    for key, first, length in about:
        for place in range(length):
            if mask >> (at + place) & 1:
                # A request that follows on the last one found makes that run longer.
                last_key, begin, so_far = runs[-1] if runs else (None, 0, 0)
                if last_key == key and begin + so_far == first + place:
                    runs[-1] = key, begin, so_far + 1
                else:
                    runs.append((key, first + place, 1))
        at += length
    return runs


def named_rows(rare: Rare, mask: int, count: int) -> int:
    """Return the first rows of a mask of which one MAIL can name the requests.

    Called for more than ALWAYS_NAMED rows. count: rows of the put.
    """
    if rare.expiries:  # Rows that expire before the others are told make more runs of these.
        return lowest(mask, ALWAYS_NAMED)
    room, rows = PAGE_BYTES, 0
    for key, _, length in about_of(rare.about, mask, count):
        room -= len(key) + RUN_BYTES
        if room < 0:
            return lowest(mask, rows)
        rows += length
    return mask
