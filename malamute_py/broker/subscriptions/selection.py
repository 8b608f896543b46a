"""Selection: which rows of a batch a subscription, or a selection group, takes.

A header is the subject and fields of a record. A batch has its distinct headers in a table, and for
each row a code: the place of its header there. A mask is a numpy array of a bool for each row. Owns
the way from chosen headers to rows. The rule: a header that was seen of late is a look-up. Source:
SPEC.md, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from malamute_protocol.content import Content
from malamute_py.broker.batches.rows import (
    Mask,
    narrow,
    rows_of_headers,
    unexpired,
    within_client_time,
)
from malamute_py.broker.subscriptions.audience import SelectionGroup, audience_of
from malamute_py.broker.subscriptions.subscription import Subscription


def rows_of_group(content: Content, group: SelectionGroup) -> Mask | None:
    """Return a mask of the rows that a selection group takes of a batch, for a live delivery.

    None: all rows.
    """
    if group.headers is None:
        return None
    chosen = np.zeros(len(content.headers()[0]), np.bool_)
    chosen[group.headers] = True
    return rows_of_headers(content, chosen)


def rows_of_groups(content: Content, groups: Sequence[SelectionGroup]) -> list[list[int]]:
    """Return the rows of a batch, ascending, that each group selects.

    groups: none of them selects all headers. The rows are sorted by header once for all groups:
    masks would cost rows times groups.
    """
    headers, codes = content.headers()
    if codes is None:  # All rows have the one header.
        everything = list(range(content.head.count))
        return [everything if 0 in group.headers else [] for group in groups]
    # `codes` has the place of each row's header among the headers. In `order` the rows of one
    # header stand together; those of the header at a place end at ends[place], and begin where
    # those of the header before it end.
    order = np.argsort(codes, kind="stable").tolist()
    ends = np.cumsum(np.bincount(codes, minlength=len(headers))).tolist()
    found: list[list[int]] = []
    for group in groups:
        places = group.headers.tolist()
        if len(places) == 1:  # The usual case; its rows are in order already.
            place = places[0]
            found.append(order[ends[place - 1] if place else 0 : ends[place]])
            continue
        rows: list[int] = []
        for place in places:
            rows += order[ends[place - 1] if place else 0 : ends[place]]
        rows.sort()
        found.append(rows)
    return found


def headers_chosen(subscription: Subscription, content: Content) -> Mask | None:
    """Return a mask of a batch's distinct headers that one subscription selects; None: all.

    For subscriptions that are served alone, on demand.
    """
    if subscription.everything:
        return None
    headers, _ = content.headers()
    number = subscription.pattern_number
    audience = audience_of(subscription.stream)
    match = audience.index.match
    if len(headers) == 1:
        if number in match(*headers[0]):
            return None
        return np.zeros(1, np.bool_)
    # Matches that shared windows remember of recent headers are used; for one subscription it does
    # not pay to remember more.
    found = map(audience.matched.get, headers)
    chosen = np.fromiter(
        (
            number in (match(*header) if known is None else known.numbers)
            for header, known in zip(headers, found, strict=True)
        ),
        np.bool_,
        len(headers),
    )
    return None if chosen.all() else chosen


def select(
    subscription: Subscription, content: Content, base: int, end: int, now_ms: int
) -> tuple[bool, Mask | None]:
    """Return which rows of a batch a subscription takes: (whether any, their mask).

    For subscriptions that are served alone, and live ones at their end. The mask is None where all
    rows are taken, and where none is. A row is taken if the pattern selects its header, it has not
    expired and was not purged, and it lies within the client-time window, from the position up to
    `end`, and among the offsets wanted. base: the first row's offset.
    """
    count = content.head.count
    mask: Mask | None = None
    prepared = subscription.prepared
    if prepared is not None and prepared.base == base:
        mask = prepared.rows  # The headers were matched over several turns.
    elif not subscription.everything:
        chosen = headers_chosen(subscription, content)
        if chosen is not None:
            if not chosen.any():
                return False, None
            mask = rows_of_headers(content, chosen)
    alive = unexpired(content, now_ms)
    if alive is not None:
        mask = narrow(mask, alive)
    not_purged = subscription.stream.purges.left(content, base)
    if not_purged is not None:
        mask = narrow(mask, not_purged)
    if subscription.client_time is not None:
        inside = within_client_time(content, subscription.client_time)
        if inside is not None:
            mask = narrow(mask, inside)
    position = subscription.position
    if base < position or base + count > end:
        offsets = np.arange(base, base + count)
        mask = narrow(mask, (offsets >= position) & (offsets < end))
    if subscription.wanted is not None:
        offsets = np.arange(base, base + count)
        mask = narrow(mask, np.isin(offsets, subscription.wanted))
    if mask is None:
        return True, None
    if mask.all():
        return True, None
    return bool(mask.any()), mask
