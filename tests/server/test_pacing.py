"""For how long a turn takes up messages, by processor time that the test sets."""

from __future__ import annotations

import pytest

from malamute_py.server.pacing import Pacing

TURN_NS = 2_500_000
MOST_NS = TURN_NS // 2
WORK_NS = 1_000_000
WORK_TURNS = 64


class Processor:
    """The time that a thread used, and the pacing of its turns."""

    def __init__(self) -> None:
        self.used_ns = self.waited_ns = 0
        self.pacing = Pacing(TURN_NS // 1_000, lambda: self.used_ns)

    @property
    def meter_ns(self) -> int:
        return self.used_ns + self.waited_ns

    def work(self, used_ns: int, *, waited_ns: int = 0, before_ns: int = 0) -> int:
        """Take a turn with work for readers and queues; return for how many turns it waits now."""
        self.pacing.began_ns = self.meter_ns
        self.used_ns += before_ns
        began_ns = self.meter_ns
        self.used_ns += used_ns
        self.waited_ns += waited_ns
        self.pacing.note_work(began_ns, self.meter_ns)
        self.pacing.end(None, None, 1)
        return self.pacing.work_waits

    def turn(
        self, used_ns: int, *, taking_ns: int = 0, shares_ns: int | None = None,
        commands: int = 1_000,
    ) -> int:  # fmt: skip
        began_ns = self.used_ns + taking_ns
        self.used_ns += used_ns
        if shares_ns is None:
            return self.pacing.end(began_ns if taking_ns else None, None, commands)
        return self.pacing.end(began_ns, self.used_ns - shares_ns, commands)


def test_work_that_messages_cause_halves_the_time_for_which_they_are_taken_up() -> None:
    processor = Processor()
    assert processor.pacing.take_ns == MOST_NS
    processor.turn(MOST_NS + 1)
    assert processor.pacing.take_ns == MOST_NS // 2
    for _ in range(20):
        processor.turn(TURN_NS)
    assert processor.pacing.take_ns == MOST_NS // 16
    for _ in range(40):
        processor.turn(MOST_NS)
    assert processor.pacing.take_ns == MOST_NS


def test_the_time_of_taking_up_itself_does_not_count() -> None:
    processor = Processor()
    processor.turn(5 * TURN_NS, taking_ns=5 * TURN_NS)
    assert processor.pacing.take_ns == MOST_NS


def test_shares_of_messages_that_waited_do_not_count() -> None:
    """A turn of shares took up one message each, so that six peers waited for six turns."""
    processor = Processor()
    for _ in range(20):
        processor.turn(5 * TURN_NS, taking_ns=TURN_NS, shares_ns=4 * TURN_NS - MOST_NS)
    assert processor.pacing.take_ns == MOST_NS
    processor.turn(5 * TURN_NS, taking_ns=TURN_NS, shares_ns=4 * TURN_NS - MOST_NS - 1)
    assert processor.pacing.take_ns == MOST_NS // 2


def test_commands_are_costly_that_take_long_each_and_together() -> None:
    """64 lists in a message took 0.5 ms to be taken up, and 10 ms to be answered."""
    processor = Processor()
    costly = []
    for used_ns, commands in (
        (MOST_NS + 1, 24),
        (MOST_NS + 1, 26),
        (MOST_NS, 2),
        (10 * TURN_NS, 64),
        (10 * TURN_NS, 1),
        (10 * TURN_NS, 0),
    ):
        began_ns = processor.used_ns
        processor.used_ns += used_ns
        processor.pacing.end(began_ns, None, commands)
        costly.append(processor.pacing.was_costly)
    assert costly == [True, False, False, True, False, False], "of a lone one nobody can tell"


def test_commands_are_costly_that_take_long_to_be_taken_up() -> None:
    """64 members that joined and left a group took 5 ms, and a confirm waited for ten peers."""
    processor = Processor()
    costly = []
    for taking_ns, commands in ((64 * 51_000, 64), (64 * 49_000, 64), (MOST_NS, 2), (TURN_NS, 1)):
        processor.turn(0)  # It is forgotten.
        began_ns = processor.used_ns = processor.used_ns + taking_ns
        processor.pacing.end(began_ns, None, commands)
        costly.append(processor.pacing.was_costly)
    assert costly == [True, False, False, False]


def test_messages_are_taken_up_for_longer_where_they_mostly_wait() -> None:
    """A turn took up one message of ten peers, each of which waited: a confirm came after them."""
    processor = Processor()
    for _ in range(20):
        processor.turn(10 * TURN_NS, commands=64)
    assert processor.pacing.take_ns == MOST_NS // 3


def test_messages_are_put_aside_for_a_part_of_the_time_that_shares_take() -> None:
    """A step of 512 parts took 24 ms, and a turn took up three such messages of eleven peers."""
    processor = Processor()
    aside_ns = []
    for shares_ns in (0, 4 * MOST_NS, 12 * MOST_NS, 100 * MOST_NS):
        began_ns = processor.used_ns
        processor.used_ns += shares_ns
        processor.pacing.end(began_ns, began_ns, 1, 16)
        aside_ns.append(processor.pacing.aside_ns)
    assert aside_ns == [MOST_NS, MOST_NS, 3 * MOST_NS, 4 * MOST_NS]


def test_messages_that_are_put_aside_make_no_commands_costly() -> None:
    """Others' messages of a thousand frames were counted as cost of a few commands beside them."""
    processor = Processor()
    costly = []
    for aside in (1_000, 1_000, 2_000):
        began_ns = processor.used_ns = processor.used_ns + 4_000_000
        processor.pacing.end(began_ns, None, 5, 0, aside)
        costly.append(processor.pacing.was_costly)
    assert costly == [False, True, False], "in the second turn nothing was put aside"


def test_shares_tell_that_commands_are_costly_for_some_turns_only() -> None:
    """Other work of a turn is among them: readers that lag would have others wait without end."""
    processor = Processor()
    processor.turn(10 * TURN_NS, commands=64)
    turns = 0
    while processor.pacing.was_costly:
        processor.used_ns += TURN_NS
        processor.pacing.end(0, 0, 0, 16)
        turns += 1
    assert turns == 64


@pytest.mark.parametrize("given", [0, 2])
def test_commands_are_costly_as_long_as_the_shares_of_those_that_wait_are(given: int) -> None:
    processor = Processor()
    processor.turn(10 * TURN_NS, commands=64)
    costly = []
    for share_ns in (16 * 26_000, 16 * 26_000, 16 * 25_000, 16 * 26_000):
        at_ns = processor.used_ns if given else 0
        processor.used_ns += share_ns
        processor.pacing.end(at_ns, at_ns, given, 16)
        costly.append(processor.pacing.was_costly)
    assert costly == [True, True, False, False], "cheap shares alone do not make them costly"


def test_a_turn_of_a_tenth_of_a_second_is_told_and_the_longest_is_remembered() -> None:
    processor = Processor()
    assert processor.turn(10**12) == 0, "the first one has what the thread used before it"
    assert processor.turn(100_000_000) == 0
    assert processor.turn(100_001_000) == 100_001
    assert processor.turn(1_000_000) == 0
    assert processor.pacing.longest_us == 100_001


def test_work_that_takes_long_comes_last_for_some_turns() -> None:
    processor = Processor()
    assert not processor.work(WORK_NS)
    assert processor.work(WORK_NS + 1)
    assert not [processor.work(WORK_NS) for _ in range(WORK_TURNS)][-1]


def test_work_that_waits_for_a_processor_does_not_take_long() -> None:
    processor = Processor()
    assert not any(processor.work(WORK_NS, waited_ns=WORK_NS) for _ in range(9))


def test_what_a_turn_does_before_its_work_does_not_count_as_work() -> None:
    processor = Processor()
    assert not any(processor.work(WORK_NS, waited_ns=WORK_NS, before_ns=WORK_NS) for _ in range(9))
    assert processor.work(WORK_NS + 1, before_ns=WORK_NS)
