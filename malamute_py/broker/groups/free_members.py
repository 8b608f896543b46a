"""Free members: those of a group that may be given something, the freest first.

Owns the order of members by free credit. The rules: each change of a member costs the logarithm of
their number; the entry that a change makes stale is dropped when it comes up. Source:
docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from malamute_py.broker.groups.member import Member

STALE_MAX: Final = 64
"""Stale entries in the order of a group's members, besides one for each free member."""


class FreeMembers:
    """Members that may be given something, as far as is known."""

    __slots__ = ("_heap", "count")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Member]] = []
        """An entry for each of them, the freest first, and stale entries."""
        self.count = 0

    def file(self, member: Member) -> None:
        """Give a member its place after its credit, its link's room or its holdings changed."""
        if not member.able:
            self.remove(member)
            return
        if not member.filed:
            member.filed = True
            self.count += 1
        heappush(self._heap, (-member.left_records, member.served, member.joined, member))
        self.trim()

    def remove(self, member: Member) -> None:
        """Give a member nothing more; its entry becomes stale."""
        if member.filed:
            member.filed = False
            self.count -= 1

    def trim(self) -> None:
        """Drop stale entries: they keep members, and links, that have gone."""
        heap = self._heap
        if not self.count:
            heap.clear()
        elif len(heap) > 2 * self.count + STALE_MAX:
            fresh = {
                one: (-one.left_records, one.served, one.joined, one)
                for *_, one in heap
                if one.filed
            }
            heap[:] = fresh.values()
            heapify(heap)

    def first(self) -> Member | None:
        """The member with the most free credit; None: no member may be given something."""
        heap = self._heap
        while heap:
            left, served, _, member = heap[0]
            # The entry is stale if its member has changed since, or is not filed.
            if member.filed and member.left_records == -left and member.served == served:
                if member.able:
                    return member
                # Another receiver took the link's room; what brings room back files the member
                # again.
                member.filed = False
                self.count -= 1
            heappop(heap)
        return None

    def take(self) -> Member | None:
        """Take out the member with the most free credit, to be filed again."""
        member = self.first()
        if member is not None:
            heappop(self._heap)
            member.filed = False
            self.count -= 1
        return member
