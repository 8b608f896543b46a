"""Subscriptions: where they begin, what they see, how they end."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Visibility
from malamute_protocol.stamp import message_id
from tests.broker.shell import Shell, bodies, offsets


def filled(shell: Shell, batches: int = 5, size: int = 2, **options: Any) -> Any:
    """A stream `s` with batches of records, a millisecond apart; returns its publisher."""
    shell.hello(1)
    for n in range(batches):
        shell.now_ms += 1
        records = [f"{n}.{row}".encode() for row in range(size)]
        shell.publish(1, "s", records, tracker=n + 1, **options)
    return shell.peers[1]


def after_a_power_loss() -> tuple[Shell, Any]:
    """A stream `s` with 4 records, and the link of its publisher; 4 more were taken back."""
    shell = Shell(sync=False)
    filled(shell, batches=2)
    shell.sync()
    shell.publish(1, "s", [b"lost"] * 4, tracker=9)
    shell.restart(power_loss=True)
    peer = shell.hello(1)
    return shell, peer


# --- where they begin ---------------------------------------------------------------------


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize(
    ("start", "first"),
    [
        ([0], 0),
        ([1], 10),
        ([2, 3], 3),
        ([2, 4, 1], 4),
        ([2, 10, 1], 10),
        ([3, 1_000_003, True], 4),
        ([3, 1_000_003, False], 6),
        ([3, 0, True], 0),
        ([3, 9_000_000], 10),
        ([4, 70, True], 4),
        ([4, 70, False], 6),
        ([4, 1_000, True], 10),
        ([5, message_id(1_000_003, 5)], 6),
        ([5, message_id(1_000_005, 9)], 10),
    ],
)
def test_every_kind_of_start_begins_where_it_says(start: list[Any], first: int, hot: bool) -> None:
    shell = Shell()
    shell.hello(1)
    for n in range(5):
        shell.now_ms += 1
        shell.publish(1, "s", [b"x"] * 2, tracker=n + 1, client_time_ms=50 + 10 * n)
    if not hot:
        shell.evict()
    peer = shell.subscribe(1, 1, "s", start=start)
    subscribed = peer.last(wire.Subscribed)
    assert (subscribed.next, subscribed.first, subscribed.tail) == (first, 0, 10)
    assert offsets(peer, 1) == list(range(first, 10))
    shell.publish(1, "s", [b"new"], tracker=50)
    assert bodies(peer, 1)[-1] == b"new"


@pytest.mark.parametrize("inclusive", [False, True])
def test_an_id_from_before_the_stream_was_made_is_of_an_earlier_one_of_its_name(
    inclusive: bool,
) -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"old"] * 2)
    identifier = message_id(shell.now_ms, 0)
    shell.now_ms += 5
    shell.send(1, wire.RemoveStream(3, "s"))
    shell.publish(1, "s", [b"new"] * 4, tracker=2)
    peer = shell.subscribe(1, 1, "s", start=[5, identifier, inclusive])
    rewound = peer.last(wire.Rewound)
    assert (rewound.from_, rewound.to) == (0 if inclusive else 1, 0)
    assert offsets(peer, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "start",
    [[], [9], ["0"], [2], [2, -1], [2, 1, "x"], [3], [3, "now"], [5], [5, b"short"], [2, 1 << 70]],
)
def test_a_start_that_cannot_be_understood_is_refused(start: list[Any]) -> None:
    shell = Shell()
    filled(shell)
    peer = shell.send(1, wire.Subscribe(1, "s", ["all"], start, 10, 1000))
    assert peer.last(wire.Refused).code == "bad_start"
    assert shell.broker.gauges["subscriptions"] == 0


def test_the_answer_to_subscribe_states_the_streams_uuid_and_the_epoch() -> None:
    shell = Shell()
    filled(shell)
    shell.restart()
    peer = shell.hello(1)
    shell.subscribe(1, 1, "s")
    subscribed = peer.last(wire.Subscribed)
    assert len(subscribed.stream) == 16
    assert subscribed.epoch == 2


def test_a_stream_is_created_by_its_first_subscriber() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "new")
    assert peer.last(wire.Subscribed).next == 0
    shell.publish(1, "new", [b"x"])
    assert bodies(peer, 1) == [b"x"]


def test_without_create_an_unknown_stream_is_refused() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "new", create=False)
    assert peer.last(wire.Refused).code == "unknown_stream"


def test_a_resume_beyond_the_end_of_its_epoch_is_rewound() -> None:
    shell, peer = after_a_power_loss()
    shell.publish(1, "s", [b"after"] * 10, tracker=1)
    shell.subscribe(1, 1, "s", start=[2, 8, 1])
    rewound = peer.last(wire.Rewound)
    assert (rewound.from_, rewound.to) == (8, 4)
    assert offsets(peer, 1) == list(range(4, 14))


@pytest.mark.parametrize("first", [6, 8, 10])
def test_a_rewind_leads_to_the_end_of_its_epoch_and_a_gap_over_what_is_gone_since(
    first: int,
) -> None:
    shell, peer = after_a_power_loss()
    shell.publish(1, "s", [b"after"] * 10, tracker=1)
    shell.broker.trimmed("main", {1: first})
    shell.subscribe(1, 1, "s", start=[2, 8, 1])
    # All that the reader has from offset 4 on is void, though the log begins later.
    assert peer.last(wire.Subscribed).next == 4
    rewound, gap = peer.last(wire.Rewound), peer.last(wire.Gap)
    assert (rewound.from_, rewound.to) == (8, 4)
    assert (gap.from_, gap.to, gap.code) == (4, first, "retention")
    assert offsets(peer, 1) == list(range(first, 14))


def test_what_was_rewound_once_is_not_rewound_again_without_cause() -> None:
    shell, peer = after_a_power_loss()
    shell.subscribe(1, 1, "s", ["topic", "rare"], [2, 8, 1])
    rewound = peer.last(wire.Rewound)
    shell.publish(1, "s", [b"after"] * 10, tracker=1)
    shell.send(1, wire.Unsubscribe(1))
    # Only covers moved the position: it has the epoch that REWOUND stated.
    resume = [2, peer.last(wire.Ended).next, rewound.epoch]
    shell.subscribe(1, 2, "s", ["topic", "rare"], resume)
    assert [one.subscription for one in peer.of(wire.Rewound)] == [1]


def test_a_resume_within_its_epoch_is_not_rewound() -> None:
    shell = Shell()
    filled(shell, batches=2)
    shell.restart()
    peer = shell.hello(1)
    shell.publish(1, "s", [b"after"], tracker=1)
    shell.subscribe(1, 1, "s", start=[2, 3, 1])
    assert not peer.of(wire.Rewound)
    assert offsets(peer, 1) == [3, 4]


def test_a_resume_beyond_the_tail_is_rewound_to_it() -> None:
    shell = Shell()
    filled(shell)
    peer = shell.subscribe(1, 1, "s", start=[2, 99])
    rewound = peer.last(wire.Rewound)
    assert (rewound.from_, rewound.to) == (99, 10)


def test_a_resume_in_a_stream_that_was_made_anew_is_rewound_to_its_first() -> None:
    shell = Shell()
    filled(shell)
    peer = shell.subscribe(1, 1, "s", start=[2, 5, 1, b"another uuid 16b"])
    rewound = peer.last(wire.Rewound)
    assert (rewound.from_, rewound.to) == (5, 0)
    assert len(bodies(peer, 1)) == 10


def test_a_start_below_the_first_record_is_told_of_the_gap() -> None:
    shell = Shell()
    filled(shell)
    shell.firsts[1] = 4
    shell.broker.trimmed("main", {1: 4})
    peer = shell.subscribe(1, 1, "s", start=[2, 1])
    gap = peer.last(wire.Gap)
    assert (gap.from_, gap.to, gap.code) == (1, 4, "retention")
    assert offsets(peer, 1) == list(range(4, 10))


def test_last_per_subject_gives_the_latest_of_each_and_goes_on_without_a_gap() -> None:
    shell = Shell()
    shell.hello(1)
    for n, subject in enumerate(["a", "b", "a", "c", "b"], start=1):
        shell.publish(1, "s", [f"{subject}{n}".encode()], tracker=n, subject=subject)
    for hot in (True, False):
        if not hot:
            shell.evict()
        number = 1 if hot else 2
        peer = shell.subscribe(1, number, "s", start=[6])
        assert bodies(peer, number) == [b"a3", b"c4", b"b5"]
    shell.publish(1, "s", [b"a6"], tracker=9, subject="a")
    assert bodies(peer, 1)[-1] == bodies(peer, 2)[-1] == b"a6"


def test_last_per_subject_heeds_the_pattern_and_what_comes_meanwhile() -> None:
    shell = Shell(ask=False)
    shell.hello(1)
    for n, subject in enumerate(["a.x", "b.x", "a.x"], start=1):
        shell.publish(1, "s", [f"{subject}{n}".encode()], tracker=n, subject=subject)
    peer = shell.subscribe(1, 1, "s", ["topic", "a.*"], [6])
    shell.publish(1, "s", [b"a.x4"], tracker=9, subject="a.x")
    assert not peer.of(wire.Subscribed)
    shell.answer_queries()
    shell.run()
    assert bodies(peer, 1) == [b"a.x3", b"a.x4"]


def test_too_many_subjects_for_last_per_subject_are_refused() -> None:
    shell = Shell(last_per_subject_max=2)
    shell.hello(1)
    shell.publish(1, "s", [b"x"] * 3, subject=["a", "b", "c"])
    peer = shell.subscribe(1, 1, "s", start=[6])
    assert peer.last(wire.Refused).code == "limit"
    assert shell.broker.gauges["subscriptions"] == 0


def test_a_subscription_cancelled_while_its_start_is_looked_up_never_begins() -> None:
    shell = Shell(ask=False)
    filled(shell)
    peer = shell.subscribe(1, 1, "s", start=[3, 1_000_002, True])
    shell.send(1, wire.Unsubscribe(1))
    shell.answer_queries()
    shell.run()
    assert peer.last(wire.Ended).code == "cancelled"
    assert not peer.of(wire.Subscribed)
    assert not peer.of(wire.Deliver)


def test_credit_that_comes_before_the_start_is_known_counts() -> None:
    shell = Shell(ask=False)
    filled(shell)
    peer = shell.subscribe(1, 1, "s", start=[3, 0, True], records=0, size=0)
    shell.send(1, wire.Credit(1, 100, 100_000))
    shell.answer_queries()
    shell.run()
    assert len(bodies(peer, 1)) == 10


# --- patterns -----------------------------------------------------------------------------


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (["all"], [0, 1, 2, 3]),
        (["topic", "#"], [0, 1, 2, 3]),
        (["topic", "a.*"], [0, 2]),
        (["prefix", "b"], [1, 3]),
        (["regex", "z$"], [2, 3]),
        (["fields", "all", [["k", "1"]]], [0, 1]),
        (["and", ["prefix", "b"], ["fields", "any", [["k", "2"]]]], [3]),
        (["not", ["prefix", "b"]], [0, 2]),
        (["topic", "nothing"], []),
    ],
)
def test_a_pattern_selects_the_same_live_from_memory_and_from_history(
    pattern: list[Any], expected: list[int], hot: bool
) -> None:
    shell = Shell()
    shell.hello(1)
    live = shell.subscribe(1, 1, "s", pattern)
    subjects, fields = (
        ["a.y", "b.y", "a.z", "b.z"],
        [{"k": "1"}, {"k": "1"}, {"k": "2"}, {"k": "2"}],
    )
    shell.publish(1, "s", [b"0", b"1", b"2", b"3"], tracker=1, subject=subjects, fields=fields)
    for n in range(4):
        shell.publish(
            1, "s", [str(4 + n).encode()], tracker=2 + n, subject=subjects[n], fields=fields[n]
        )
    if not hot:
        shell.evict()
    shell.subscribe(1, 2, "s", pattern)
    everything = expected + [4 + n for n in expected]
    assert offsets(live, 1) == everything
    assert offsets(live, 2) == everything


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        (["regex", "("], "bad_pattern"),
        (["mystery", 1], "unknown_pattern_kind"),
        ([], "bad_pattern"),
    ],
)
def test_a_pattern_that_cannot_be_compiled_is_refused(pattern: list[Any], code: str) -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.send(1, wire.Subscribe(1, "s", pattern, [0], 1, 1))
    assert peer.last(wire.Refused).code == code
    assert shell.broker.gauges["subscriptions"] == 0


# --- what is masked -----------------------------------------------------------------------


@pytest.mark.parametrize("hot", [True, False])
def test_expired_records_are_not_delivered(hot: bool) -> None:
    shell = Shell()
    shell.hello(1)
    soon = shell.now_ms + 10
    shell.publish(1, "s", [b"soon", b"late"], tracker=1, expires_at_ms=[soon, 0])
    shell.publish(1, "s", [b"gone"], tracker=2, expires_at_ms=soon)
    shell.now_ms += 10
    if not hot:
        shell.evict()
    peer = shell.subscribe(1, 1, "s")
    assert bodies(peer, 1) == [b"late"]


def test_a_record_that_expired_on_its_way_is_not_delivered_live() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", start=[1])
    shell.publish(1, "s", [b"dead", b"alive"], tracker=1, expires_at_ms=[5, 0])
    assert bodies(peer, 1) == [b"alive"]


@pytest.mark.parametrize("hot", [True, False])
def test_a_client_time_window_selects_rows(hot: bool) -> None:
    shell = Shell()
    shell.hello(1)
    live = shell.subscribe(1, 1, "s", client_time=(20, 40))
    shell.publish(1, "s", [b"10", b"20", b"30", b"40"], client_time_ms=[10, 20, 30, 40])
    shell.publish(1, "s", [b"none"], tracker=2)
    if not hot:
        shell.evict()
    shell.subscribe(1, 2, "s", client_time=(20, 40))
    assert bodies(live, 1) == bodies(live, 2) == [b"20", b"30"]


# --- ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hot", [True, False])
def test_a_bounded_read_stops_before_its_end_and_says_so(hot: bool) -> None:
    shell = Shell()
    filled(shell, batches=3, size=4)
    if not hot:
        shell.evict()
    peer = shell.subscribe(1, 1, "s", start=[2, 1], end=7)
    assert offsets(peer, 1) == [1, 2, 3, 4, 5, 6]
    assert peer.last(wire.Ended) == wire.Ended(1, 7, "end")
    assert shell.broker.gauges["subscriptions"] == 0


def test_a_bounded_read_beyond_the_tail_goes_live_and_ends_there() -> None:
    shell = Shell()
    peer = filled(shell, batches=1)
    shell.subscribe(1, 1, "s", ["topic", "s"], end=5)
    assert not peer.of(wire.Ended)
    shell.publish(1, "s", [b"2", b"3", b"4", b"5", b"6"], tracker=9)
    assert offsets(peer, 1) == [0, 1, 2, 3, 4]
    assert peer.last(wire.Ended).next == 5


def test_a_bounded_read_ends_when_nothing_that_matches_comes() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", ["topic", "other"], end=3)
    shell.publish(1, "s", [b"x"] * 3)
    assert peer.last(wire.Ended).next == 3
    assert peer.last(wire.Cover) == wire.Cover(1, 0, 3)


def test_until_tail_stops_where_the_tail_was() -> None:
    shell = Shell()
    peer = filled(shell)
    shell.subscribe(1, 1, "s", until="tail")
    assert peer.last(wire.Subscribed).end == 10
    assert len(bodies(peer, 1)) == 10
    assert peer.last(wire.Ended).next == 10


def test_until_tail_of_an_empty_stream_ends_at_once() -> None:
    shell = Shell()
    shell.hello(1)
    peer = shell.subscribe(1, 1, "s", until="tail", records=0, size=0)
    assert peer.last(wire.Ended) == wire.Ended(1, 0, "end")


def test_unsubscribe_covers_what_was_seen_and_ends() -> None:
    shell = Shell()
    shell.hello(1)
    shell.subscribe(1, 1, "s", ["topic", "other"])
    shell.publish(1, "s", [b"x"] * 3)
    peer = shell.send(1, wire.Unsubscribe(1))
    assert peer.of(wire.Cover) == [wire.Cover(1, 0, 3)]
    assert peer.last(wire.Ended) == wire.Ended(1, 3, "cancelled")
    shell.publish(1, "s", [b"y"], tracker=2, subject="other")
    assert not peer.of(wire.Deliver)


@pytest.mark.parametrize("command", [wire.Unsubscribe(9), wire.Credit(9, 1, 1)])
def test_commands_about_an_unknown_subscription_are_refused(command: wire.Command) -> None:
    shell = Shell()
    shell.hello(1)
    assert shell.send(1, command).last(wire.Refused).code == "unknown_subscription"


def test_a_number_in_use_is_refused_and_the_first_subscription_stays() -> None:
    shell = Shell()
    shell.hello(1)
    shell.subscribe(1, 1, "s")
    peer = shell.subscribe(1, 1, "t")
    assert peer.last(wire.Refused).code == "subscription_exists"
    shell.publish(1, "s", [b"x"])
    assert bodies(peer, 1) == [b"x"]


def test_subscriptions_beyond_the_limit_are_refused_by_its_name() -> None:
    shell = Shell(link_subscriptions_max=2, subscriptions_max=3)
    for link in (1, 2):
        shell.hello(link)
        for number in (1, 2, 3):
            shell.subscribe(link, number, "s")
    assert [len(shell.peers[link].of(wire.Subscribed)) for link in (1, 2)] == [2, 1]
    assert {r.code for link in (1, 2) for r in shell.peers[link].of(wire.Refused)} == {"limit"}


def test_who_may_not_read_is_refused() -> None:
    shell = Shell(permit=lambda identity, action, name: action != "read")
    shell.hello(1)
    assert shell.subscribe(1, 1, "s").last(wire.Refused).code == "forbidden"


def test_the_end_of_a_stream_ends_its_subscriptions_by_name() -> None:
    shell = Shell()
    filled(shell)
    peer = shell.subscribe(1, 1, "s")
    shell.send(1, wire.RemoveStream(5, "s"))
    assert peer.last(wire.Ended) == wire.Ended(1, 10, "stream_removed")
    assert peer.last(wire.Result).request == 5


# --- visibility ---------------------------------------------------------------------------


@pytest.mark.parametrize("visibility", [-1, 3])
def test_a_visibility_that_is_unknown_is_refused(visibility: int) -> None:
    shell = Shell()
    shell.hello(1)
    shell.publish(1, "s", [b"a"], tracker=1)
    peer = shell.subscribe(1, 2, "s", start=[0], visibility=visibility)
    assert peer.last(wire.Refused).code == "unsupported"
    shell.send(1, wire.PlanRead(3, "s", ["all"], [0], visibility=visibility))
    assert [refused.code for refused in peer.of(wire.Refused)] == ["unsupported"] * 2


def test_a_durable_reader_sees_only_what_a_power_loss_cannot_take_back() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    live = shell.subscribe(1, 1, "s", start=[0])
    shell.subscribe(1, 2, "s", start=[0], visibility=int(Visibility.DURABLE))
    shell.publish(1, "s", [b"a"], tracker=1)
    assert bodies(live, 1) == [b"a"]
    assert bodies(live, 2) == []
    shell.sync()
    shell.publish(1, "s", [b"b"], tracker=2)
    assert bodies(live, 2) == [b"a"]
    shell.sync()
    shell.run()
    assert bodies(live, 2) == [b"a", b"b"]


def test_a_durable_reader_that_comes_late_reads_up_to_the_synced_tail_and_goes_on() -> None:
    shell = Shell(sync=False)
    shell.hello(1)
    for n in range(4):
        shell.publish(1, "s", [b"x"], tracker=n + 1)
        if n == 1:
            shell.sync()
    shell.evict()
    peer = shell.subscribe(1, 1, "s", visibility=1)
    assert peer.last(wire.Subscribed).tail == 2
    assert offsets(peer, 1) == [0, 1]
    shell.sync()
    shell.run()
    assert offsets(peer, 1) == [0, 1, 2, 3]


def synced_behind_retention() -> Shell:
    """Make a stream s of 6 records: the broker knows 2 as durable, and retention removed 4."""
    shell = Shell(sync=False)
    shell.hello(1)
    for n in range(6):
        shell.publish(1, "s", [b"x"], tracker=n + 1)
        if n == 1:
            shell.sync()
    shell.firsts[1] = 4
    shell.broker.trimmed("main", {1: 4})
    return shell


@pytest.mark.parametrize("start", [[0], [1], [2, 1, 1]])
def test_a_durable_reader_is_not_told_that_something_is_gone_before_it_would_have_seen_it(
    start: list[int],
) -> None:
    shell = synced_behind_retention()
    peer = shell.subscribe(1, 1, "s", start=start, visibility=1)
    begun = peer.last(wire.Subscribed)
    assert begun.next <= begun.tail == 2
    assert all(gap.to <= 2 for gap in peer.of(wire.Gap))
    # The reader's position is one at which it may go on.
    shell.subscribe(1, 2, "s", start=[2, 2, begun.epoch], visibility=1)
    assert not peer.of(wire.Rewound)
    shell.sync()
    shell.run()
    assert offsets(peer, 1) == offsets(peer, 2) == [2, 3, 4, 5]


def test_a_durable_reader_without_credit_is_told_of_what_is_gone_when_the_disk_had_it() -> None:
    shell = synced_behind_retention()
    peer = shell.subscribe(1, 1, "s", start=[0], visibility=1, records=0)
    shell.sync()
    shell.run()
    shell.send(1, wire.Credit(1, 10, 1 << 40))
    (gap,) = peer.of(wire.Gap)
    assert (gap.from_, gap.to, gap.code) == (2, 4, "retention")
    assert offsets(peer, 1) == [4, 5]


def test_a_durable_reader_from_a_cursor_that_retention_moved_is_not_rewound() -> None:
    shell = synced_behind_retention()
    shell.send(1, wire.MoveCursor("s", "c", 1, 9))
    shell.sync()
    shell.run()
    shell.publish(1, "s", [b"x"], tracker=10)
    shell.publish(1, "s", [b"x"], tracker=11)
    shell.firsts[1] = 7
    shell.broker.trimmed("main", {1: 7})
    peer = shell.subscribe(1, 1, "s", start=[7, "c"], visibility=1)
    assert not peer.of(wire.Rewound)
    assert peer.last(wire.Subscribed).next == 6
    shell.sync()
    shell.run()
    assert offsets(peer, 1) == [6, 7]


# --- memory streams -----------------------------------------------------------------------


def test_a_stream_in_memory_goes_on_after_a_restart_with_no_offset_twice() -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "ram", {"memory": True}))
    shell.publish(1, "ram", [b"x"] * 5)
    shell.restart()
    peer = shell.hello(1)
    shell.subscribe(1, 1, "ram", start=[2, 3, 1])
    gap = peer.last(wire.Gap)
    assert (gap.from_, gap.to, gap.code) == (3, 2 << 40, "lost")
    shell.publish(1, "ram", [b"y"])
    assert offsets(peer, 1) == [2 << 40]


def test_a_bounded_read_of_what_a_restart_took_from_memory_is_one_gap() -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "ram", {"memory": True}))
    shell.publish(1, "ram", [b"x"] * 5)
    shell.restart()
    peer = shell.hello(1)
    shell.subscribe(1, 1, "ram", start=[2, 1], end=4)
    assert [(gap.from_, gap.to, gap.code) for gap in peer.of(wire.Gap)] == [(1, 4, "lost")]
    assert peer.last(wire.Ended).next == 4


def test_what_patterns_take_is_bounded_one_by_one_and_in_all() -> None:
    shell = Shell(pattern_bytes_max=1000, all_patterns_bytes_max=1500)
    peer = shell.hello(1)
    large = ["or", *(["topic", f"topic.number.{number}"] for number in range(30))]
    shell.subscribe(1, 1, "s", ["or", *large[1:], *large[1:]])
    assert peer.last(wire.Refused).code == "too_large"
    shell.subscribe(1, 2, "s", large)
    shell.subscribe(1, 3, "s", large)
    shell.subscribe(1, 4, "s", large)
    refused = peer.of(wire.Refused)[1:]
    assert [(one.reference, one.code) for one in refused] == [(4, "limit")]
    shell.send(1, wire.Unsubscribe(2))
    shell.subscribe(1, 5, "s", large)
    assert peer.last(wire.Subscribed).subscription == 5


def test_a_question_for_a_subscription_that_ended_is_not_wanted_any_more() -> None:
    shell = Shell(ask=False)
    shell.hello(1)
    shell.publish(1, "s", [b"x"])
    for number in range(3):
        shell.subscribe(1, number, "s", start=[6])
    assert [query.wanted() for query in shell.queries if query.wanted] == [True] * 3
    shell.send(1, wire.Unsubscribe(1))
    assert [query.wanted() for query in shell.queries if query.wanted] == [True, False, True]
    shell.send(1, wire.Bye())
    assert not any(query.wanted() for query in shell.queries if query.wanted)
    shell.answer_queries()


def test_only_names_that_the_peer_may_read_are_offered_for_one_that_is_no_streams() -> None:
    shell = Shell(permit=lambda owner, action, name: (action, name) != ("read", "secret.one"))
    shell.hello(1)
    for stream in ("secret.one", "secret.two"):
        shell.send(1, wire.CreateStream(1, stream, {}))
    shell.send(1, wire.Subscribe(1, "secret.onn", ["all"], [0], create=False))
    refused = shell.peers[1].last(wire.Refused)
    assert refused.code == "unknown_stream"
    assert "'secret.one'" not in refused.reason


def test_a_misspelt_name_is_compared_with_few_names_however_many_there_are() -> None:
    asked: list[str] = []

    def permit(owner: str, action: str, name: str) -> bool:
        if action == "read":
            asked.append(name)
        return True

    shell = Shell(permit=permit)
    shell.hello(1)
    for number in range(100):
        shell.send(1, wire.CreateStream(number + 1, f"stream-{number:03}", {}))
    asked.clear()
    shell.send(1, wire.Subscribe(1, "stream-05", ["all"], [0], create=False))
    assert "did you mean 'stream-05" in shell.peers[1].last(wire.Refused).reason
    assert len(asked) <= 17
