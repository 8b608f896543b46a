"""Selection: which subscriptions take which rows of a batch, and in which encoding.

Owns the grouping of subscriptions by what they select. The rules: a header is matched once a batch
and, seen before, is a look-up; subscriptions that select the same headers share one encoding, by
reference; the work for a batch is proportional to its headers, its groups and the subscriptions in
them, never to all subscriptions. Source: docs/design.md, Speed; SPEC.md, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.header import Header
from malamute_py.broker.batches.rows import (
    Mask,
    narrow,
    rows_of_headers,
    unexpired,
    within_client_time,
)
from malamute_py.broker.log.stream import Late, Stream
from malamute_py.broker.structures.partition import partition
from malamute_py.broker.subscriptions.matching import is_quick
from malamute_py.broker.subscriptions.subscription import Subscription
from malamute_py.matcher import Index

GROUPED_HEADERS_MAX = 8_192
"""Distinct headers of the tables of a stream whose groups are remembered, all in all."""
TABLE_HEADERS_MAX = 256
"""A larger table is not likely to come again: its groups are worked out each time."""


class Group:
    """Subscriptions that select the same headers of a table."""

    __slots__ = ("durable", "headers", "live")

    def __init__(self, headers: np.ndarray[Any, np.dtype[np.int32]] | None) -> None:
        self.headers: Any = headers
        """Places of the distinct headers; None: all of them."""
        self.live: list[Subscription] = []
        self.durable: list[Subscription] = []


Groups: TypeAlias = "list[Group]"


def known_groups(stream: Stream, content: Content) -> Groups | None:
    """Return the groups of a batch, where they are known; the list is shared, not to be changed."""
    if len(stream.everyone) == len(stream.subscriptions):
        # No subscription looks at headers, so they need not be looked at here.
        found = stream.groups.get(())
        if found is None:
            found = stream.groups[()] = _everyone(stream)
        return found
    if content.head.fieldmaps_count and not is_quick(content):
        return None
    key = content.headers_key
    if type(key) is tuple and len(key) > TABLE_HEADERS_MAX:
        return None
    return stream.groups.get(key)


def groups_of_classes(
    stream: Stream, content: Content, classes: list[tuple[BitMap, list[int]]]
) -> Groups:
    """Return the groups of a batch whose headers were just matched; kept if it may come again."""
    headers, _ = content.headers()
    found = _group(stream, len(headers), classes)
    if len(headers) <= TABLE_HEADERS_MAX and is_quick(content):
        if stream.grouped_headers + len(headers) > GROUPED_HEADERS_MAX:
            stream.regroup()
        stream.groups[content.headers_key] = found
        stream.grouped_headers += len(headers)
    return found


def groups_of_late(
    stream: Stream, late: Late, classes: list[tuple[BitMap, list[int]]] | None
) -> Groups:
    """Return the groups of a batch that came before: subscriptions that were live then and are now.

    classes: None: its groups are known. A subscription that came to the tail since then has
    read the batch.
    """
    batch = late.batch
    if classes is None:
        groups = known_groups(stream, batch.content)
        assert groups is not None
    else:
        groups = _group(stream, len(batch.content.headers()[0]), classes)
    found: Groups = []
    for group in groups:
        those = Group(group.headers)
        those.live = [sub for sub in group.live if sub.live and sub.position <= batch.base]
        those.durable = [sub for sub in group.durable if sub.live and sub.position <= batch.base]
        found.append(those)
    return found


def _everyone(stream: Stream) -> Groups:
    group = Group(None)
    _enlist(group, stream.everyone)
    return [group]


def _enlist(group: Group, subscriptions: Iterable[Subscription]) -> None:
    for subscription in subscriptions:
        (group.durable if subscription.durable else group.live).append(subscription)


def _group(stream: Stream, count: int, classes: list[tuple[BitMap, list[int]]]) -> Groups:
    groups: list[Group] = []
    all_group: Group | None = None
    for numbers, places in partition(classes):
        if len(places) == count:
            group = all_group = Group(None)
        else:
            group = Group(np.array(places, np.int32))
        for number in numbers:
            # A pattern may have gone while the headers were matched.
            _enlist(group, stream.numbers.get(number, ()))
        groups.append(group)
    if stream.everyone:
        if all_group is None:
            all_group = Group(None)
            groups.append(all_group)
        _enlist(all_group, stream.everyone)
    return groups


def header_classes(index: Index, headers: Sequence[Header]) -> list[tuple[BitMap, list[int]]]:
    """Headers that the same patterns match, together: (pattern numbers, places of the headers).

    Headers that nothing matches are in none.
    """
    if len(headers) > TABLE_HEADERS_MAX:
        return index.classes(headers)
    by_object: dict[int, list[int]] = {}
    bitmaps: list[BitMap] = []
    for place, header in enumerate(headers):
        numbers = index.match(header.keys, header.fields)
        if not numbers:
            continue
        places = by_object.get(id(numbers))
        if places is None:
            by_object[id(numbers)] = [place]
            bitmaps.append(numbers)
        else:
            places.append(place)
    by_value: dict[bytes, tuple[BitMap, list[int]]] = {}
    for numbers in bitmaps:
        value = numbers.serialize()
        known = by_value.get(value)
        if known is None:
            by_value[value] = (numbers, by_object[id(numbers)])
        else:
            known[1].extend(by_object[id(numbers)])
    return list(by_value.values())


def rows_of_group(content: Content, group: Group) -> Mask | None:
    """Mask of the rows that a group selects; None: all rows."""
    if group.headers is None:
        return None
    chosen = np.zeros(len(content.headers()[0]), np.bool_)
    chosen[group.headers] = True
    return rows_of_headers(content, chosen)


def rows_of_groups(content: Content, groups: Sequence[Group]) -> list[list[int]]:
    """The rows, ascending, that each of the groups selects; none of them selects all headers.

    One sort of the batch's rows for all of them: a mask a group would cost rows times groups.
    """
    headers, codes = content.headers()
    if codes is None:
        everything = list(range(content.head.count))
        return [everything if 0 in group.headers else [] for group in groups]
    order = np.argsort(codes, kind="stable").tolist()
    ends = np.cumsum(np.bincount(codes, minlength=len(headers))).tolist()
    found: list[list[int]] = []
    for group in groups:
        places = group.headers.tolist()
        if len(places) == 1:
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
    """Which distinct headers one subscription selects; None: all of them."""
    if subscription.everything:
        return None
    headers, _ = content.headers()
    number = subscription.pattern_number
    stream = subscription.stream
    if len(headers) == 1:
        if number in stream.index.match(*headers[0]):
            return None
        return np.zeros(1, np.bool_)
    # What is remembered for many is used; for one alone it is not worth the remembering.
    found, match = map(stream.matched.get, headers), stream.index.match
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
    """The rows of a batch that a subscription takes, before `end`: (any, mask or None for all)."""
    count = content.head.count
    mask: Mask | None = None
    prepared = subscription.prepared
    if prepared is not None and prepared.base == base:
        mask = prepared.rows
    elif not subscription.everything:
        chosen = headers_chosen(subscription, content)
        if chosen is not None:
            if not chosen.any():
                return False, None
            mask = rows_of_headers(content, chosen)
    alive = unexpired(content, now_ms)
    if alive is not None:
        mask = narrow(mask, alive)
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
