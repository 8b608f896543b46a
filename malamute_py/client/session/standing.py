"""Whether the program of a member of a group goes on, or stands still with what it has.

Owns what the program's last word was, and whether a new link begins without the member. The rule: a
member that is passed over, and whose program has said nothing since, joins again once the program
says a word: the broker would hand it the same records, unseen, and count an attempt of them.
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
        self.starved = False
        """Whether its program has asked for records, and got none since."""

    @property
    def stands_still(self) -> bool:
        """Whether it is passed over, and its program has said nothing since."""
        return self.passed_over and not self.progressed and not self.starved

    def speak(self) -> bool:
        """Take note of a word of the program; returns whether it has the member join again."""
        self.progressed = True
        joins, self.left_out = self.left_out, False
        return joins
