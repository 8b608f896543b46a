"""Segments at the ends of a ring that its manifest names and its directory does not have.

Owns the comparison. The rule: no false alarm beside a broker that makes and removes segments
meanwhile. The manifest is read before and after the look, and what both say alike was there all the
time: a segment is in it after its file has its name, and out of it before the file is touched. Only
the newest may still have the name of the one before the oldest, or the header of it: the broker
uses the oldest file again as the newest segment, by renaming it. Source: FORMAT.md, sections 8
and 13.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from malamute_py.journal.directory import expected_of
from malamute_py.journal.manifest import Expected
from malamute_py.journal.storage import FileStorage
from malamute_py.mapped.segments import Segments
from malamute_py.mapped.tail import locate

_LOOKS_MAX: Final = 4
"""Looks of which one finds the manifest at rest: it is written once in a segment."""


class Missing(NamedTuple):
    """Segments that should be there and are not; "": none."""

    oldest: str
    """Segments before the first one that is there."""
    newest: str
    """Segments in which the log went on after the last one that is there."""
    streams: dict[int, tuple[int, int]]
    """Stream -> (next offset, first offset) when the manifest was written, as far as it says."""

    def next(self, stream: int) -> int:
        """Return the stream's next offset; 0: not known."""
        return self.streams.get(stream, (0, 0))[0]

    def first(self, stream: int) -> int:
        """Return the stream's first offset; 0: not known."""
        return self.streams.get(stream, (0, 0))[1]


NOTHING: Final = Missing("", "", {})


def find_missing(segments: Segments, directory: FileStorage, ring: str, end_lsn: int) -> Missing:
    """Return which segments a ring's manifest names and its directory lacks. Raises OSError.

    Called when a reading begins. directory: the data directory. ring: its name. end_lsn: where the
    walk to the end of the log stopped.
    """
    for _ in range(_LOOKS_MAX):
        expected = expected_of(directory, ring)
        if expected is None or expected.ring != segments.uuid:
            return NOTHING
        found = _compare(segments, expected, end_lsn)
        # What is missing counts only if the broker has not changed the manifest meanwhile.
        if found is NOTHING or expected_of(directory, ring) == expected:
            return found
    return NOTHING


def _compare(segments: Segments, expected: Expected, end_lsn: int) -> Missing:
    """Find the segments that the manifest names and the directory lacks, at both ends of the ring.

    expected: what the manifest says. end_lsn: how far the log was read.
    """
    first = first_there = expected.first
    # If the one before it is there, its file is about to be used again and as good as ever: then
    # none is missing in front.
    if not segments.is_there(first - 1):
        while _is_missing(segments, expected, first_there):
            first_there += 1
    end, _ = locate(end_lsn, segments.segment_bytes)
    if end_lsn <= first_there * segments.segment_bytes:
        # Nothing was read after those: the log may have ended in them, so they count as newest.
        first_there, end = first, max(first, end)
    newest_end = end
    while _is_missing(segments, expected, newest_end):
        newest_end += 1
    if first_there == first and newest_end == end:
        return NOTHING
    return Missing(_text(first, first_there), _text(end, newest_end), expected.streams or {})


def _is_missing(segments: Segments, expected: Expected, number: int) -> bool:
    """Whether a segment that should hold something is not there under any of its names."""
    if not expected.has(number):
        return False
    if number < expected.last:
        return segments.map(number) is None
    # It may still have its older name, and its header may not be written yet. In this order: it
    # is not seen under the one name before it is renamed, and under the other one after it was.
    return not (segments.is_there(expected.first - 1) or segments.is_there(number))


def _text(first: int, end: int) -> str:
    """Return the sentence about missing segments [first, end); "": there are none."""
    if first == end:
        return ""
    what = f"segment {first} is" if end == first + 1 else f"segments {first} to {end - 1} are"
    return f"{what} missing, which the ring's manifest names"
