"""Whether the program of a member of a group goes on, or stands still with what it has.

Owns whether the program still takes, acknowledges or renews records, and whether a new link begins
without the member. The rule: a member that is passed over, and whose program has made none of these
calls since and waits in none, joins a new link at the next of them. If it joined before, the broker
would hand it the same records, which no program sees, and would count an attempt of them.
Source: SPEC.md, section 4.8.
"""

from __future__ import annotations

from malamute_py.client.session.receiver import Opened


class Standing(Opened):
    """A member, as far as it matters whether its program goes on."""

    def __init__(self, number: int, credit_records: int, credit_bytes: int) -> None:
        super().__init__(number, credit_records, credit_bytes)
        self.progressed = False
        """Whether its program has asked for records, acknowledged or renewed some since the last
        renewal of all."""
        self.passed_over = False
        """Whether it is given nothing, since a lease of its records has ended."""
        self.waits = False
        """Whether its program waits for a record, as its last take() (of a record) found none."""

    @property
    def stands_still(self) -> bool:
        """Whether it is passed over, and its program has made no call since, and is in none."""
        return self.passed_over and not self.progressed and not self.waits

    def note_progress(self) -> bool:
        """Note that the program made a call; return whether the member has to join the link now.

        It has where the link began without it, as its program stood still.
        """
        self.progressed = True
        joins, self.left_out = self.left_out, False
        return joins
