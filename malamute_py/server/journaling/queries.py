"""Questions to a ring's index, answered in the reader thread.

Owns the way from the core's questions to the ring's methods. The rule: an answer is what
the contract in broker/ready.py says of the kind, in plain data. Source: broker/ready.py,
IndexQuery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from pyroaring import BitMap

from malamute_protocol.content import Content
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.ready import IndexQuery
from malamute_py.journal import Candidates, HeaderIndex, Plan, Ring
from malamute_py.matcher import compile_pattern

_READ_BYTES = 4 << 20

Search: TypeAlias = Callable[[Any], Any] | None
_ONLY_SUBJECTS = frozenset({"all", "topic", "prefix", "regex"})
_COMBINED = frozenset({"and", "or", "not"})


def answer_query(ring: Ring, query: IndexQuery) -> Any:
    """Return the value for IndexAnswer. Raises JournalError, OSError."""
    return _ANSWERS[query.kind](ring, query.stream, query.arguments)


class _KeyIndex:
    """A segment's header index in the form that the matcher wants: by key.

    The journal files an entry under all keys of a record together.
    """

    def __init__(self, index: HeaderIndex) -> None:
        self._index = index
        self.exact = index.exact
        self.field = index.field
        self.subject = index.subject
        self.everything = index.everything

    def subjects(self) -> Iterator[tuple[str, BitMap]]:
        for keys, bitmap in self._index.subjects():
            for key in keys:
                yield key, bitmap


def by_key(search: Search) -> Candidates | None:
    """Turn a search over the matcher's view of an index into one over the journal's."""
    if search is None:
        return None

    def candidates(index: HeaderIndex) -> BitMap:
        found: BitMap = search(_KeyIndex(index))
        return found

    return candidates


def _find_time(ring: Ring, stream: int, arguments: dict[str, Any]) -> int | None:
    end = ring.next_offset(stream)
    found = ring.closest_offset(stream, arguments["time_ms"], inclusive=arguments["inclusive"])
    return None if found >= end else found


def _find_client_time(ring: Ring, stream: int, arguments: dict[str, Any]) -> int | None:
    end = ring.next_offset(stream)
    least = arguments["time_ms"] + (0 if arguments["inclusive"] else 1)
    found = ring.closest_client_time(stream, least)
    return None if found >= end else found


def _last_per_subject(ring: Ring, stream: int, arguments: dict[str, Any]) -> Any:
    """Offsets of the latest matching record of each subject (its first key), ascending."""
    pattern, first, end = arguments["pattern"], arguments["from"], arguments["end"]
    matches = compile_pattern(pattern).matches
    latest: dict[str, int] = {}
    if _asks_subjects_only(pattern):
        for keys, offset in ring.last_per_subject(stream, by_key(arguments["candidates"]), end):
            if offset >= first and offset > latest.get(keys[0], -1) and matches(keys, ()):
                latest[keys[0]] = offset
    else:
        # The index knows the latest record of a subject, not the latest with given fields.
        position = first
        while position < end:
            found = ring.read(stream, position, end, _READ_BYTES, by_key(arguments["candidates"]))
            for run in found.runs:
                view = memoryview(run.data)
                for at, size, base, _ in run.spans:
                    content = Content(view[at + STAMP_BYTES : at + size])
                    _note_latest(content, base, first, end, matches, latest)
            if found.next <= position:
                break
            position = found.next
    return sorted(latest.values())[: arguments["limit"] + 1]


def _note_latest(
    content: Content, base: int, first: int, end: int,
    matches: Callable[..., bool], latest: dict[str, int],
) -> None:  # fmt: skip
    headers, codes = content.headers()
    low, high = max(first - base, 0), min(end - base, len(content))
    if high <= low:
        return
    if codes is None:
        last_rows = {0: high - 1}
    else:
        used, from_end = np.unique(codes[low:high][::-1], return_index=True)
        last_rows = {
            code: high - 1 - distance
            for code, distance in zip(used.tolist(), from_end.tolist(), strict=True)
        }
    for code, row in last_rows.items():
        header = headers[code]
        if matches(header.keys, header.fields):
            subject = header.keys[0]
            latest[subject] = max(latest.get(subject, -1), base + row)


def _asks_subjects_only(pattern: list[Any]) -> bool:
    kind, *rest = pattern
    if kind in _COMBINED:
        return all(map(_asks_subjects_only, rest))
    return kind in _ONLY_SUBJECTS


def _plan(ring: Ring, stream: int, arguments: dict[str, Any]) -> dict[str, Any]:
    plan: Plan = ring.plan(
        stream, arguments["from"], arguments["end"], by_key(arguments["candidates"]),
        arguments["records_max"], arguments["bytes_max"], arguments["split_bytes"],
    )  # fmt: skip
    splits = [list(split) for split in plan.splits]
    while len(splits) > arguments["splits_max"]:
        splits = [
            pair[0] if len(pair) == 1 else [pair[0][0], pair[1][1], pair[0][2] + pair[1][2]]
            for pair in (splits[at : at + 2] for at in range(0, len(splits), 2))
        ]
    return {
        "to": plan.end,
        "splits": splits,
        "records": max(0, plan.end - max(arguments["from"], ring.first_offset(stream))),
        "bytes": plan.bytes,
    }


_ANSWERS: dict[str, Callable[[Ring, int, dict[str, Any]], Any]] = {
    "find_time": _find_time,
    "find_client_time": _find_client_time,
    "last_per_subject": _last_per_subject,
    "plan": _plan,
}
