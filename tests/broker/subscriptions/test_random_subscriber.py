"""In any order of credit, appends, syncs, reads and blocks: exactly the matching records.

The oracle is the list of what was published. The shell asserts on every command that the covers of
a subscription join, and that offsets rise.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from malamute_protocol import commands as wire
from malamute_py.matcher import matches
from tests.broker.shell import Shell
from tests.seeds import examples

SUBJECTS = ["a.x", "a.y", "b.x", "b.y.z"]
PATTERNS: list[Any] = [
    ["all"],
    ["topic", "a.*"],
    ["topic", "#.z"],
    ["not", ["prefix", "a"]],
    ["or", ["topic", "a.x"], ["topic", "b.x"]],
]

publishes = st.tuples(
    st.just("publish"),
    st.lists(st.integers(0, len(SUBJECTS) - 1), min_size=1, max_size=40),
    st.sampled_from([0, 10, 300]),
)
steps = st.lists(
    st.one_of(
        publishes,
        publishes,
        st.tuples(st.just("credit"), st.integers(0, 3), st.integers(1, 30)),
        st.tuples(st.sampled_from(["sync", "read", "evict", "block", "unblock", "wait", "pong"])),
        st.tuples(st.just("subscribe"), st.integers(0, 50)),
    ),
    max_size=60,
)


@pytest.mark.moderate
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=steps,
    patterns=st.lists(st.integers(0, len(PATTERNS) - 1), min_size=4, max_size=4),
    durable=st.lists(st.booleans(), min_size=4, max_size=4),
    quantum=st.sampled_from([100, 2_000, 1 << 20]),
    gathered=st.booleans(),
    together=st.sampled_from([2, 1_000]),
)
def test_a_subscriber_receives_exactly_what_matches_once_and_in_order(
    steps: list[Any],
    patterns: list[int],
    durable: list[bool],
    quantum: int,
    gathered: bool,
    together: int,
) -> None:
    shell = Shell(
        sync=False, read=False, quantum_bytes=quantum, step_bytes=4 * quantum, hot_bytes=20_000,
        share_min_bytes=20_000, share_max_bytes=20_000, extract_bytes_min=500, reads_max=2,
        heartbeat_ms=1_000, expiry_beats=1_000, shared_window_min=together,
        shared_read_min=together,
    )  # fmt: skip
    run = Random(shell, patterns, durable, gathered)
    for step in steps:
        getattr(run, step[0])(*step[1:])
        run.check_credit()
    run.settle()
    run.check()


class Random:
    """One run: a publisher on link 1, subscriptions 0 to 3 on link 2."""

    def __init__(
        self, shell: Shell, patterns: list[int], durable: list[bool], gathered: bool
    ) -> None:
        self.shell = shell
        self.published: list[tuple[str, bytes]] = []
        self.patterns = [PATTERNS[place] for place in patterns]
        self.durable = durable
        self.gathered = gathered
        self.starts: dict[int, int] = {}
        self.credits = [0, 0, 0, 0]
        self.answered = 0
        shell.hello(1)
        self.peer = shell.hello(2)

    def publish(self, places: list[int], width: int) -> None:
        subjects = [SUBJECTS[place] for place in places]
        records = []
        for subject in subjects:
            body = str(len(self.published)).encode() + bytes(width)
            self.published.append((subject, body))
            records.append(body)
        self.shell.publish(1, "s", records, subject=subjects)

    def subscribe(self, position: int) -> None:
        number = len(self.starts)
        if number < 4:
            self.starts[number] = min(position, len(self.published))
            self.shell.send(
                2,
                wire.Subscribe(
                    number, "s", self.patterns[number], [2, self.starts[number]], 5, 1 << 40,
                    visibility=int(self.durable[number]),
                    gathered=self.gathered,
                ),
            )  # fmt: skip
            self.credits[number] = 5

    def credit(self, number: int, records: int) -> None:
        if number in self.starts:
            self.credits[number] += records
            self.shell.send(2, wire.Credit(number, self.credits[number], 1 << 40))

    def sync(self) -> None:
        self.shell.sync()
        self.shell.run()

    def read(self) -> None:
        self.shell.answer_reads()
        self.shell.run()

    def evict(self) -> None:
        self.shell.evict()

    def block(self) -> None:
        self.shell.broker.blocked(2)

    def unblock(self) -> None:
        self.shell.broker.writable(2)
        self.shell.run()

    def wait(self) -> None:
        self.shell.wait(1_000)

    def pong(self) -> None:
        pings = [ping for ping in self.peer.of(wire.Ping) if ping.token]
        for ping in pings[self.answered :]:
            self.shell.send(2, wire.Pong(ping.token))
        self.answered = len(pings)

    def settle(self) -> None:
        """Let the run go on until all records have come and nothing moves."""
        while len(self.starts) < 4:
            self.subscribe(0)
        self.unblock()
        for _ in range(10_000):
            before = len(self.peer.commands)
            for number in range(4):
                self.credit(number, 1_000_000)
            self.sync()
            self.read()
            self.pong()
            if len(self.peer.commands) == before and not self.shell.reads:
                break
        self.wait()

    def check_credit(self) -> None:
        """A delivery may overdraw by less than one batch, and no batch has more than 40 rows."""
        for number, received in self.peer.received.items():
            assert len(received) < self.credits[number] + 40

    def check(self) -> None:
        for rewound in self.peer.of(wire.Rewound):
            # The start of a durable reader lay beyond what was durable.
            self.starts[rewound.subscription] = rewound.to
        for number, start in self.starts.items():
            expected = [
                (offset, body)
                for offset, (subject, body) in enumerate(self.published)
                if offset >= start and matches(self.patterns[number], (subject,), ())
            ]
            assert self.peer.received[number] == expected
            assert self.peer.expected[number] == max(start, len(self.published))
        shell = self.shell
        assert shell.broker.gauges["reads_under_way"] == 0
        assert shell.broker.gauges["unsettled_bytes"] == 0
