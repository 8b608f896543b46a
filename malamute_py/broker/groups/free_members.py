"""Free members: those of a group that may be given something, the freest first.

Owns the order of members by free credit, as a heap. The rules: each change of a member costs the
logarithm of their number, since it adds an entry and leaves the old one in the heap; such a stale
entry is dropped when it comes up. A member is filed while it has an entry that counts. Source:
docs/design.md, Queues and the checkpoint.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from malamute_py.broker.groups.member import Member

STALE_MAX: Final = 64
"""Stale entries that a heap may always have, besides one for each filed member."""


class FreeMembers:
    """Members of one group that may be given something, as far as is known.

    The group files a member when its credit, its link's room or its holdings have changed, and
    takes the first one to hand rows to it.
    """

    __slots__ = ("_heap", "count")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Member]] = []
        """Entries (negated free credit, when it was served last, when it joined, member): the
        freest first, between equals the one that has waited longest. Some are stale."""
        self.count = 0
        """Number of members that are filed."""

    def file(self, member: Member) -> None:
        """Sort a member in anew, as its credit, its link's room or its holdings have changed."""
        if not member.able:
            self.remove(member)
            return
        if not member.filed:
            member.filed = True
            self.count += 1
        heappush(self._heap, (-member.left_records, member.served, member.joined, member))
        self.trim()

    def remove(self, member: Member) -> None:
        """Let a member that leaves or is passed over be given nothing; its entry becomes stale."""
        if member.filed:
            member.filed = False
            self.count -= 1

    def trim(self) -> None:
        """Drop stale entries once they are many: they keep gone members, and links, in memory."""
        heap = self._heap
        if not self.count:
            heap.clear()
        elif len(heap) > 2 * self.count + STALE_MAX:
            # A member may have several entries: the dict keeps one of each.
            fresh = {
                one: (-one.left_records, one.served, one.joined, one)
                for *_, one in heap
                if one.filed
            }
            heap[:] = fresh.values()
            heapify(heap)

    def first(self) -> Member | None:
        """The member with the most free credit; None: no member may be given something.

        It stays filed: the caller only asks whether a read of records is worth while.
        """
        heap = self._heap
        while heap:
            negated_left, served, _, member = heap[0]
            # The entry is stale if its member has changed since, or is not filed.
            if member.filed and member.left_records == -negated_left and member.served == served:
                if member.able:
                    return member
                # Another receiver of the link took its room for frames; what brings room back files
                # the member again.
                member.filed = False
                self.count -= 1
            heappop(heap)
        return None

    def take(self) -> Member | None:
        """Take out the member with the most free credit; the caller files it again once served."""
        member = self.first()
        if member is not None:
            heappop(self._heap)
            member.filed = False
            self.count -= 1
        return member
