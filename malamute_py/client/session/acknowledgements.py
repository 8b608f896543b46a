"""Acknowledgements by number, gathered into ranges.

Owns what was acknowledged and not yet said, and what was said and not yet confirmed. The
rule: whatever gathered since the last turn leaves as one command a kind; what is refused as
a whole is said again in halves, so that one number that is no longer ours costs the others
nothing; what is said of a delivery is not said of a later one of the same number. Source:
SPEC.md, sections 4.4, 4.5 and 4.8.

Words: a number is that of a message or request, or the offset of a group's record. A range is
(first, end), without `end`. An owner is the inbox, offer or membership that holds the numbers. A
form is what is said of them: done, again after a time, renewed, failed. A token is the object at
which a caller waits for the outcome; None: no caller waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from malamute_protocol.commands import Command, Confirm, Welcome, WorkState
from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_protocol.limits import RANGES_MAX
from malamute_py.client.session.events import Event, Settled
from malamute_py.client.session.outgoing import RETRY_MS, RETRYABLE, CommandSink, Trackers
from malamute_py.client.session.warnings import Warnings

Range = tuple[int, int]
_TOO_LATE: Final = BrokerRefused("not_held", "it was delivered once more before")


class AckForm(NamedTuple):
    """Facts that numbers must share to be acknowledged together."""

    state: int = 0
    """WorkState of an acknowledgement of work; 0 for mail."""
    again_ms: int = -1
    """Pause before what is given back comes again; with state 0, -1 says that it is done."""
    reason: str = ""
    silent: bool = False
    """Whether no caller wants the answer, nor is there one."""


class AckOwner(Protocol):
    """An inbox, an offer or a membership, as far as its acknowledgements go."""

    active: bool
    ended: bool

    @property
    def question(self) -> AckForm | None:
        """Form of a question: the broker confirms it of numbers that are held, and does no more.

        A membership has one: the broker may deliver refused numbers to it anew, and halves of the
        acknowledgement would be taken for those deliveries. None: an inbox or an offer says a
        refused acknowledgement again in halves at once.
        """

    def ack_command(self, form: AckForm, ranges: list[Range], tracker: int) -> Command:
        """Return the command for these numbers.

        tracker: by which the broker answers; 0: not at all.
        """

    def acked(self, form: AckForm, ranges: list[Range]) -> None:
        """Take note that the broker has taken an acknowledgement of these numbers."""

    def not_acked(self, form: AckForm, number: int, error: MalamuteError) -> None:
        """Take note that the broker refused an acknowledgement of one number for good."""

    def takes_default(self) -> bool:
        """Ask for the broker's default level from now on; False: this owner asks for no level.

        Called for each acknowledgement that the broker refused for the level it asked for: several
        may be under way.
        """

    def ack_lost(self, ack: Ack) -> bool:
        """Return whether to send an acknowledgement on the next link: this one ended unanswered."""


class Ack:
    """Numbers that are acknowledged in one command."""

    __slots__ = (
        "acks",
        "again",
        "form",
        "key",
        "owner",
        "ranges",
        "then",
        "tokens",
        "without_level",
    )

    def __init__(self, acks: Acks, owner: AckOwner, form: AckForm) -> None:
        self.acks = acks
        self.owner = owner
        self.form = form
        self.ranges: list[Range] = []
        self.again: set[int] = set()
        """Numbers that the broker has delivered once more since it left."""
        self.key = b""
        """Name under which it is sent again: drawn for an end of work that a caller waits for."""
        self.tokens: list[tuple[Any, list[Range]]] = []
        """Callers that wait, each with its numbers."""
        self.then: AckForm | None = None
        """Form of the acknowledgement that follows a question; None: this is no question."""
        self.without_level = False
        """Whether it leaves once more, without the level that the broker refused."""

    def confirmed(self, confirm: Confirm) -> None:
        """Settle an acknowledgement that the broker has done."""
        self.acks.confirmed(self, confirm)

    def refused(self, error: BrokerRefused, now_ms: int) -> None:
        """Settle, repeat or split an acknowledgement that the broker refused."""
        self.acks.refused(self, error, now_ms)


class Acks:
    """The acknowledgements of all that a session has opened."""

    def __init__(
        self,
        trackers: Trackers,
        settle: Callable[[Any, Any], None],
        new_key: Callable[[], bytes] | None = None,
    ) -> None:
        """settle: called with a token and its outcome: a Confirm, an error, or None.

        new_key: draws a random key for an acknowledgement that ends work; None: none here does.
        """
        self._new_key = new_key
        self._trackers = trackers
        self._settle = settle
        self._gathered: Final[dict[tuple[int, AckForm], Ack]] = {}
        """Acknowledgements that leave with the next turn, by the owner's id and the form."""
        self._sent: dict[Ack, None] = {}
        """Acknowledgements that the broker has not answered."""
        self.put_off: Final[dict[Ack, int]] = {}
        """Acknowledgements of which all or half leaves (again) later, and when: as the broker
        refused them, or the link has ended."""
        self.queues: Final = (self._gathered, self.put_off)
        """While all of them are empty, take() has nothing to do."""
        self._taken_ms = -1
        """Time of the last take()."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits to leave and nothing is unconfirmed."""
        return not self._gathered and not self._sent and not self.put_off

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return len(self._gathered) + len(self._sent) + len(self.put_off)

    @property
    def waits(self) -> bool:
        """Whether take() may send something that was gathered."""
        return bool(self._gathered)

    def add(self, owner: AckOwner, form: AckForm, ranges: list[Range], token: Any = None) -> None:
        """Gather numbers to be acknowledged, which leave with the next turn.

        token: what a caller waits at for the outcome; None: no caller does. The outcome goes to
        `settle` of the constructor.
        """
        ack = self._gathered.get((id(owner), form))
        if ack is None:
            ack = self._gathered[id(owner), form] = Ack(self, owner, form)
        mine = ack.ranges
        for first, end in ranges:
            last_first, last_end = mine[-1] if mine else (0, -1)
            if last_end == first:  # neighbours, as of a reader that acknowledges one by one
                mine[-1] = (last_first, end)
            else:
                mine.append((first, end))
        if token is not None:
            ack.tokens.append((token, ranges))

    def take(self, now_ms: int, out: CommandSink) -> None:
        """Send what was gathered or put off until now, of owners that are open on the link."""
        self._taken_ms = now_ms
        for ack, at_ms in list(self.put_off.items()):
            if at_ms <= now_ms and ack.owner.active:
                del self.put_off[ack]
                self._send(ack, out)
        for place, ack in list(self._gathered.items()):
            if ack.owner.active:
                del self._gathered[place]
                self._send(ack, out)

    def _send(self, ack: Ack, out: CommandSink) -> None:
        """Send one acknowledgement, in halves while it has more ranges than a command takes.

        One that ends requests of a worker leaves under a key of its own, if a caller waits for it.
        """
        ack.ranges = merged(ack.ranges)
        if len(ack.ranges) > RANGES_MAX:
            for part in self._halves(ack):
                self._send(part, out)
            return
        if ack.form.silent:
            # Without a tracker (0) the broker does not answer.
            out.put(ack.owner.ack_command(ack.form, ack.ranges, 0), None)
            return
        self._sent[ack] = None
        command = ack.owner.ack_command(ack.form, ack.ranges, self._trackers.give(ack))
        callers_wait = bool(ack.tokens)
        ends_work = ack.form.state >= WorkState.COMPLETED  # not received (1) or renewed (2)
        if callers_wait and ends_work and self._new_key is not None:
            # By its key the broker knows again an end that is sent once more after a reconnect.
            ack.key = ack.key or self._new_key()
            command = msgspec.structs.replace(command, key=ack.key)
        out.put(command, None)

    def confirmed(self, ack: Ack, confirm: Confirm) -> None:
        """Take the news that the broker took an acknowledgement, and settle its callers.

        After a question (see `Ack.then`) the acknowledgement that it stood for leaves instead.
        """
        if ack not in self._sent:
            return  # its owner has ended, or its link: it was settled then
        del self._sent[ack]
        ack.owner.acked(ack.form, ack.ranges)
        if ack.form.state == WorkState.RENEWED:
            # What was delivered again before this answer is held by that delivery alone.
            self._leave_out(ack)
        if ack.then is None:
            self.settle(ack, confirm)
        elif ack.ranges:
            ack.form, ack.then = ack.then, None
            self.put_off[ack] = self._taken_ms  # due at once

    def refused(self, ack: Ack, error: BrokerRefused, now_ms: int) -> None:
        """Send a refused acknowledgement again later or in halves, or settle its callers.

        The code decides which. The broker did nothing of it.
        """
        if ack not in self._sent:
            return  # its owner has ended, or its link: it was settled then
        del self._sent[ack]
        self._leave_out(ack)
        if not ack.ranges:
            return  # all of it was delivered once more meanwhile
        if error.code in RETRYABLE:
            self.put_off[ack] = now_ms + (error.retry_ms or RETRY_MS)
        elif error.code == "unsupported" and not ack.without_level and ack.owner.takes_default():
            # The broker refused the level alone: the numbers go again at its default level.
            ack.without_level = True
            self.put_off[ack] = now_ms
        elif _count(ack.ranges) > 1:
            # A single number may be at fault: in halves the others are taken. A question, which the
            # broker confirms of numbers that are held and does no more, may come before the halves.
            question = ack.owner.question if error.code == "not_held" else None
            if question is not None and ack.then is None and ack.form != question:
                # The refusal may have the broker deliver the numbers again to this owner, and the
                # halves would be taken for those deliveries.
                ack.form, ack.then = question, ack.form
            for part in self._halves(ack):
                self.put_off[part] = now_ms
        else:
            # A single number that the broker refuses for good.
            number, _ = ack.ranges[0]
            ack.owner.not_acked(ack.then or ack.form, number, error)
            self.settle(ack, error)

    def came_again(self, owner: AckOwner, numbers: list[int]) -> None:
        """Take note that the broker has delivered numbers once more: their leases had ended.

        numbers: in ascending order. An acknowledgement that is sent again, after a refusal, leaves
        them out: it was of the delivery before, and came too late for that.
        """
        for ack in self._sent:
            if ack.owner is owner and _overlap(ack.ranges, numbers):
                ack.again.update(numbers)
        if self.put_off:
            for ack in list(self.put_off):
                if ack.owner is owner and _overlap(ack.ranges, numbers):
                    ack.again.update(numbers)
                    self._leave_out(ack)
                    if not ack.ranges:
                        del self.put_off[ack]  # _leave_out() has settled all of its callers

    def _leave_out(self, ack: Ack) -> None:
        """Take the numbers that were delivered once more (`again`) out of an acknowledgement.

        Their callers and their owner are told that it came too late; the other numbers stay in it.
        """
        if not ack.again:
            return
        again, ack.again = ack.again, set()
        late, ack.ranges = _parted(ack.ranges, again)
        tokens, ack.tokens = ack.tokens, []
        for token, ranges in tokens:
            mine, rest = _parted(ranges, again)
            if mine and rest:
                token = _Both(token)  # the caller is told once both parts have their outcomes
            if rest:
                ack.tokens.append((token, rest))
            if mine:
                self._answer(token, _TOO_LATE)
        form = ack.then or ack.form
        if form.state != WorkState.RENEWED:  # a renewal is of no delivery: nothing was lost
            for first, end in late:
                for number in range(first, end):
                    ack.owner.not_acked(form, number, _TOO_LATE)

    def _halves(self, ack: Ack) -> list[Ack]:
        """Return two acknowledgements of half of the numbers each, with the callers of each.

        It was refused as a whole, or has too many ranges for one command.
        """
        below, above = Ack(self, ack.owner, ack.form), Ack(self, ack.owner, ack.form)
        below.ranges, above.ranges = split(ack.ranges)
        below.then = above.then = ack.then
        _, border = below.ranges[-1]
        for token, ranges in ack.tokens:
            first, end = min(ranges)[0], max(ranges)[1]  # a caller's ranges are in any order
            if end <= border:
                below.tokens.append((token, ranges))
            elif first >= border:
                above.tokens.append((token, ranges))
            else:
                # Its numbers lie in both halves: it waits for both answers.
                both = _Both(token)
                below.tokens.append((both, [(a, min(b, border)) for a, b in ranges if a < border]))
                above.tokens.append((both, [(max(a, border), b) for a, b in ranges if b > border]))
        return [below, above]

    def link_down(self) -> None:
        """Let each owner decide whether its unconfirmed acknowledgements leave on the next link."""
        pending = [*self._sent, *self.put_off]
        self._sent.clear()
        self.put_off.clear()
        for ack in pending:
            if ack.owner.ack_lost(ack) and not ack.owner.ended:
                self.put_off[ack] = 0  # due as soon as its owner is open on the next link
        for place, ack in list(self._gathered.items()):
            if not ack.owner.ack_lost(ack):
                del self._gathered[place]

    def forget(self, owner: AckOwner, error: MalamuteError) -> None:
        """Drop all acknowledgements of an owner that has ended; their callers get the error."""
        books: tuple[dict[Any, Any], ...] = (self._gathered, self._sent, self.put_off)
        for book in books:
            for place, ack in [(place, ack) for place, ack in _acks(book) if ack.owner is owner]:
                del book[place]
                self.settle(ack, error)

    def fail_all(self, error: MalamuteError) -> None:
        """Drop all acknowledgements: the session has ended, and their callers get the error."""
        for book in (self._gathered, self._sent, self.put_off):
            for _, ack in _acks(book):
                self.settle(ack, error)
        self._gathered.clear()
        self._sent.clear()
        self.put_off.clear()

    def settle(self, ack: Ack, outcome: Any) -> None:
        """Give the callers of an acknowledgement its outcome: a Confirm, an error, or None.

        A caller whose numbers were divided into halves gets the outcome once both are answered.
        """
        for token, _ in ack.tokens:
            self._answer(token, outcome)
        ack.tokens = []

    def _answer(self, token: Any, outcome: Any) -> None:
        """Settle one caller; one that waits for two halves (_Both) only with the second."""
        if type(token) is not _Both:
            self._settle(token, outcome)
        elif token.settled(outcome):
            self._answer(token.token, token.outcome)

    def next_wake(self) -> int | None:
        """Latest time of the next take(), for what was put off; None: no need."""
        at: int | None = None
        for ack, wake in self.put_off.items():
            # Those that were due at the last take() have left then.
            if ack.owner.active and wake > self._taken_ms and (at is None or wake < at):
                at = wake
        return at


class _Both:
    """Token of a caller that waits for two halves: its outcome is an error of either, if any."""

    __slots__ = ("_left", "outcome", "token")

    def __init__(self, token: Any) -> None:
        self.token = token
        self.outcome: Any = None
        self._left = 2

    def settled(self, outcome: Any) -> bool:
        """Take the answer of one half; returns whether that was the second: `outcome` is final."""
        if not isinstance(self.outcome, MalamuteError):
            self.outcome = outcome
        self._left -= 1
        return not self._left


def _acks(book: dict[Any, Any]) -> list[tuple[Any, Ack]]:
    """(key, acknowledgement) of all entries of a table, whose keys may be the acknowledgements.

    The values beside such keys are times, or None.
    """
    return [(key, key if type(key) is Ack else value) for key, value in book.items()]


def _count(ranges: list[Range]) -> int:
    """Return how many numbers lie in ranges."""
    return sum(end - first for first, end in ranges)


def _overlap(ranges: list[Range], numbers: list[int]) -> bool:
    """Whether ranges and numbers, both ascending, may have numbers in common, by their bounds."""
    (first, _), (_, end) = ranges[0], ranges[-1]
    return first <= numbers[-1] and numbers[0] < end


def _parted(ranges: list[Range], numbers: set[int]) -> tuple[list[Range], list[Range]]:
    """Divide ranges into those of the numbers that are in a set, and those of all others."""
    inside: list[Range] = []
    outside: list[Range] = []
    for first, end in ranges:
        for number in range(first, end):
            (inside if number in numbers else outside).append((number, number + 1))
    return merged(inside), merged(outside)


def merged(ranges: list[Range]) -> list[Range]:
    """Return the numbers of ranges in any order as ascending ranges that do not touch.

    So a command has as few ranges as can be. The list that was given is sorted.
    """
    if len(ranges) < 2:
        return ranges
    ranges.sort()
    found = [ranges[0]]
    for first, end in ranges[1:]:
        last_first, last_end = found[-1]
        if first > last_end:
            found.append((first, end))
        elif end > last_end:  # it overlaps the last one, or follows on
            found[-1] = (last_first, end)
    return found


def ranges_of_numbers(numbers: Iterable[int]) -> list[Range]:
    """Return numbers in any order as ascending ranges that do not touch."""
    return merged([(number, number + 1) for number in numbers])


def split(ranges: list[Range]) -> tuple[list[Range], list[Range]]:
    """Divide ascending ranges of two numbers or more into the lower and the upper half.

    A range in which the middle lies is cut there.
    """
    missing = _count(ranges) // 2  # numbers that the lower half still lacks
    lower: list[Range] = []
    for place, (first, end) in enumerate(ranges):
        size = end - first
        if size >= missing:
            middle = first + missing
            lower.append((first, middle))
            upper = ([(middle, end)] if middle < end else []) + ranges[place + 1 :]
            return lower, upper
        lower.append((first, end))
        missing -= size
    raise AssertionError("ranges without numbers")


class Acknowledging:
    """Owner of inboxes, memberships or offers, as far as their acknowledgements go."""

    def __init__(self, acks: Acks, emit: Callable[[Event], None]) -> None:
        """emit: takes the events."""
        self.acks = acks
        self.emit = emit
        self.warnings = Warnings(emit)
        self._linked = False

    def told(self, token: Any, outcome: Any) -> None:
        """Tell a caller, by an event, what became of its acknowledgement.

        Called by `acks` with the broker's answer, and by the owner of what needs none. token: what
        the caller waits at. outcome: True or a Confirm, of which the caller gets True; None, or
        a refusal `not_held`: it came too late, and the caller gets False; another error goes on as
        it is.
        """
        if isinstance(outcome, BrokerRefused) and outcome.code == "not_held":
            outcome = False
        elif not isinstance(outcome, MalamuteError):
            outcome = outcome is not None
        self.emit(Settled([(token, outcome)]))

    @property
    def idle(self) -> bool:
        """Whether every acknowledgement is confirmed."""
        return self.acks.idle

    @property
    def unanswered(self) -> int:
        """Commands that wait to leave, or for their answers."""
        return self.acks.unanswered

    @property
    def waits(self) -> bool:
        """Whether something may leave with the next take(): for Session._others_wait."""
        return self.acks.waits

    def link_up(self, welcome: Welcome) -> None:
        """Take note that a link is open."""
        self._linked = True

    def link_down(self) -> None:
        """Take note that the link has ended."""
        self._linked = False
        self.acks.link_down()

    def fail_all(self, error: MalamuteError) -> None:
        """Fail all acknowledgements, and write the warnings that wait: the session has ended."""
        self.acks.fail_all(error)
        self.warnings.flush()

    def wake(self, now_ms: int) -> None:
        """Write the warnings that are due; take() does the rest."""
        if self.warnings.gathered:
            self.warnings.wake(now_ms)

    def next_wake(self) -> int | None:
        """Latest time of the next wake() and take(); None: no need."""
        if not self.acks.put_off and self.warnings.due_ms is None:
            return None  # Asked in each step: as a rule there is nothing to ask further.
        return self.warnings.next_wake(self.acks.next_wake())
