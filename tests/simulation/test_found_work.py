"""Violations that the scenario `work` found, told without it: each as short as possible."""

from __future__ import annotations

import pytest
from msgspec import msgpack

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_protocol.stamp import CHANGE, STAMP_BYTES, Stamp
from malamute_py.broker.ready import CHANGE_STREAM, MAIL_STREAM, MAIN
from malamute_py.changelog import records as r
from malamute_py.changelog.applying import apply
from malamute_py.changelog.settings import MailboxSettings, ServiceSettings, StreamSettings
from malamute_py.changelog.tables import Queues, Tables
from tests.broker.post import Post
from tests.broker.service_world import World
from tests.simulation import records
from tests.simulation.acts import Act, Wish
from tests.simulation.model import Violation
from tests.simulation.work_log import Batch, Bundle
from tests.simulation.work_model import WorkModel, is_durable
from tests.simulation.work_state import State

SERVICE = 1


def atomic(world: World, link: int, key: bytes, *parts: wire.Command, bodies: list[bytes]) -> int:
    """Send a step; returns its tracker."""
    world.trackers += 1
    frames = [encode([body], subject="x") for body in bodies]
    head = wire.Atomic(world.trackers, len(parts), 0, key)
    world.shell.send(link, head, *parts, frames=frames)
    return world.trackers


def test_a_step_that_begins_with_a_request_is_taken_once_over_a_restart() -> None:
    world = World()
    world.client(1, "anna")
    step = wire.Request("s", 0), wire.Send("log", 0)
    first = world.confirmed(1, atomic(world, 1, b"k", *step, bodies=[b"a", b"b"]))
    world.shell.restart()
    world.client(1, "anna")
    again = world.confirmed(1, atomic(world, 1, b"k", *step, bodies=[b"a", b"b"]))
    assert (first.duplicate, again.duplicate) == (False, True)
    assert world.queued() == 1


def test_a_step_is_confirmed_by_its_own_content_and_not_by_the_notice_that_it_brings() -> None:
    world = World()
    world.client(1, "anna")
    world.worker(2, "bob")
    world.offer(2)
    world.request(1, b"a", key=b"k")
    (number,) = world.numbers(2)
    failed = wire.AckWork(1, [(number, number + 1)], 4, 0, 0, 0, "no")
    confirm = world.confirmed(
        2, atomic(world, 2, b"", failed, wire.Send("log", 0), bodies=[b"failed"])
    )
    reader = world.shell.send(2, wire.OpenInbox(9, "log", 10, 1 << 40))
    assert [letter.number for letter in reader.mail[9]] == [confirm.offset]


def test_a_request_that_was_cancelled_is_given_to_nobody() -> None:
    world = World()
    world.client(1, "anna")
    world.request(1, b"a", key=b"k")
    world.shell.send(1, wire.CancelRequest(7, "s", b"k"))
    world.worker(2, "bob")
    world.offer(2)
    assert world.numbers(2) == []


def test_a_message_that_expired_in_hand_leaves_though_its_neighbour_stays_for_long() -> None:
    post = Post()
    now_ms = post.now_ms
    post.mail(1, "box", [b"long", b"short"], expires_at_ms=[now_ms + 1_000_000, now_ms + 50])
    post.inbox(2, 7, "box", records=2)
    assert post.got(2) == [b"long", b"short"]
    post.wait(100)
    post.send(2, wire.Unsubscribe(7))
    post.inbox(2, 8, "box")
    post.wait(2_000)
    assert post.got(2, 8) == [b"long"]
    assert post.info("box")["messages"] == 1


def test_a_keyed_group_passes_over_a_batch_that_expired_in_a_member_s_hands() -> None:
    post = Post(extract_bytes_min=0)
    join = wire.JoinGroup(3, "s", "g", ["all"], "keyed", [0], 10, 1 << 40)
    post.send(2, join)
    post.publish(1, "s", [b"x" * 20_000], subject="a", expires_at_ms=[post.now_ms + 50])
    post.wait(100)
    post.send(2, wire.Unsubscribe(3))
    post.send(3, join)
    post.publish(1, "s", [b"last"], subject="a")
    assert [len(body) for _, body in post.peers[2].received[3]] == [20_000]
    assert [body for _, body in post.peers[3].received[3]] == [b"last"]


def test_what_ends_while_its_body_is_read_takes_no_credit() -> None:
    world = World(mail_hot_bytes=0, read=False)
    world.client(1, "anna")
    world.worker(2, "bob")
    world.request(1, b"a", key=b"k")
    world.request(1, b"more", service="other")
    world.offer(2, credit=1)
    assert world.shell.bodies, "the body is not in memory"
    world.shell.send(1, wire.CancelRequest(7, "s", b"k"))
    world.shell.answer_bodies()
    world.shell.run()
    world.request(1, b"b")
    world.shell.answer_bodies()
    world.shell.run()
    assert [task.body for task in world.work(2)] == [b"b"]


def test_a_dead_letter_has_no_part_in_what_was_said_of_those_of_its_batch_before() -> None:
    queues, tables = Queues(), Tables()
    put = r.RequestPut(SERVICE, 10, 3, 300, "anna", "anna", 5)
    apply(tables, queues, put)
    apply(tables, queues, r.RequestDead(SERVICE, [(10, b"\x01")], 2, "lease", 6))
    apply(tables, queues, r.MailAgain(2, [(10, b"")], 900))
    apply(tables, queues, r.RequestDead(SERVICE, [(10, b"\x06")], 2, "lease", 7))
    row = queues.messages[2, 10]
    assert row.rare is not None
    assert (row.attempts, row.not_before_ms, row.left) == (0, 0, 0b111)
    assert (row.rare.again, row.rare.tries) == ([(900, b"\x01")], [(1, b"\x01")])


@pytest.mark.parametrize("key", [b"k", b""])
def test_who_failed_a_request_was_promised_nothing_of_how_it_ended_when_it_was_revived(
    key: bytes,
) -> None:
    model = WorkModel()
    asked = Act(1, "anna", [Wish("request", "s", (5,))], b"", 0, False)
    failed = Act(2, "bob", [Wish("end", "s", (), (10,))], key, 0, bool(key), since_lsn=100)
    model.act_of[5] = asked
    model.steps["bob", b"k"] = failed
    content = records.encode([records.Sent(5, 0, "s", "a", None, 0, 8)])
    rows = [(10, b"\x01")]
    bundles: list[list[r.Change]] = [
        [
            r.ServiceSet(1, "s", ServiceSettings(), "", 0),
            r.MailboxSet(2, "s.dead", MailboxSettings(), "", 0),
            r.RequestPut(1, 10, 1, 200, "anna", "anna", 0, subjects=["a"]),
        ],
        [r.RequestDead(1, rows, 2, "failed", 0), *([r.StepTaken("bob", key, 0)] if key else [])],
        [r.RequestRevived(2, 1, rows, 0)],
        [r.RequestDone(1, rows)],
    ]
    base = 0
    for at, made in enumerate(bundles):
        frame = encode(list(map(r.encode_change, made)), subject="change")
        batches = [Batch(CHANGE_STREAM, base, len(made), CHANGE, frame)]
        if not at:
            batches.insert(0, Batch(MAIL_STREAM, 10, 1, 0, content))
        model.appended(Bundle(100 * at, 100 * at + 100, 1, batches))
        base += len(made)
    confirm = wire.Confirm(7, int(wire.Level.SYNCED), 1, 0, 0, False)
    model.told("main", 100)
    with pytest.raises(Violation, match="the disk has 100"):
        model.confirm(failed, confirm, 3)
    model.told("main", 200)
    model.confirm(failed, confirm, 3)


@pytest.mark.parametrize("ring", [MAIN, "own"])
def test_a_record_at_an_offset_is_durable_by_the_bundle_that_brought_it_there(ring: str) -> None:
    model = WorkModel()
    place = next(f"s/{n}" for n in range(100) if is_durable(f"s/{n}"))
    # The broker remembers one of its two keys: a copy sent under the first is taken again.
    model.state.keys_max = 1
    for serial, key in ((5, b"k"), (6, b"l")):
        act = Act(serial, "anna", [Wish("publish", "s", (serial,))], key, 0, True)
        model.act_of[serial] = model.steps["anna", key] = act
    contents = {n: records.encode([records.Sent(n, 0, "s", "a", None, 0, 8)]) for n in (5, 6)}
    made = r.StreamCreated(1, "s", b"u" * 16, ring, StreamSettings(), "", 0)
    model.appended(
        Bundle(0, 100, 1, [Batch(CHANGE_STREAM, 0, 1, CHANGE, encode([r.encode_change(made)]))])
    )
    beside = ring != MAIN
    taken = ((5, b"k"), (6, b"l")) if beside else ((5, b"k"), (6, b"l"), (5, b"k"))
    if beside:
        model.rings_of["s"] = ring
    for offset, (serial, key) in enumerate(taken):
        batches = [Batch(1, offset, 1, 0, contents[serial])]
        at = 100 * (offset + 1)
        if beside:
            model.appended_beside(ring, Bundle(at, at + 100, 1, batches))
            continue
        step = encode([r.encode_change(r.StepTaken("anna", key, 0))], subject="change")
        batches.append(Batch(CHANGE_STREAM, offset + 1, 1, CHANGE, step))
        model.appended(Bundle(at, at + 100, 1, batches))

    def deliver(offset: int) -> list[tuple[int, int]]:
        content = contents[taken[offset][0]]
        stamp = Stamp(
            0, 0, 0, 0, 1, offset, 0, 1, 0, STAMP_BYTES + len(content), 1, 0,
            int.from_bytes(content[8:12], "little"),
        )  # fmt: skip
        command = wire.Deliver(1, offset, offset + 1, 2)
        return model.record(
            1, place, command, [stamp.pack(), content], keyed=False, selects=lambda serial: True
        )

    model.told(ring, 200)
    assert deliver(0) == [(0, 5)]
    for offset in range(1, len(taken)):
        with pytest.raises(Violation, match=f"offset {offset} is not on the disk yet"):
            deliver(offset)


def test_a_step_whose_record_a_power_loss_took_back_from_its_own_ring_did_happen() -> None:
    model = WorkModel()
    model.rings_of["s"] = "own"
    for serial in (5, 6):
        model.act_of[serial] = Act(serial, "anna", [Wish("publish", "s", (serial,))], b"", 0, False)
    step, half = (
        Act(number, "bob", [Wish("records", "s/g", (), (0,))], key, 0, True)
        for number, key in ((7, b"k"), (8, b"l"))
    )
    model.steps["bob", b"k"], model.steps["bob", b"l"] = step, half
    changes = 0

    def logged(*made: r.Change) -> None:
        nonlocal changes
        content = encode([r.encode_change(change) for change in made], subject="change")
        batch = Batch(CHANGE_STREAM, changes, len(made), CHANGE, content)
        at = model.end_lsn
        model.appended(Bundle(at, at + 100, 1, [batch]))
        model.told(MAIN, at + 100)
        changes += len(made)

    def published(serial: int, epoch: int) -> None:
        content = records.encode([records.Sent(serial, 0, "s", "a", None, 0, 8)])
        model.appended_beside("own", Bundle(0, 100, epoch, [Batch(1, 0, 1, 0, content)]))

    def group_at_0(why: str, epoch: int) -> r.GroupSet:
        return r.GroupSet(1, "g", "shared", msgpack.encode(["all"]), 0, 0, why, "bob", epoch)

    logged(
        r.StreamCreated(1, "s", b"u" * 16, "own", StreamSettings(), "", 0),
        group_at_0("created", 1),
    )
    published(5, 1)
    confirm = wire.Confirm(7, int(wire.Level.SYNCED), -1, 0, 0, True)
    with pytest.raises(Violation, match=r"the key of .* did not happen"):
        model.confirm(step, confirm, 3)
    logged(r.GroupDone(1, "g", [(0, 1)], 1), r.StepTaken("bob", b"k", 0))
    model.confirm(step, confirm, 3)
    # The disk has the step, and not the record: the members of the group see what is not synced.
    model.recovered_beside("own", [], 0, 0, power=True)
    logged(group_at_0("clamped", 2))
    model.confirm(step, confirm, 3)
    published(6, 2)
    model.confirm(step, confirm, 3)
    # A step is judged when it is appended: this one leaves out the record that has the offset now.
    with pytest.raises(Violation, match=r"records of \[0\] in Act\(number=8"):
        logged(r.StepTaken("bob", b"l", 0))


def test_a_request_that_was_passed_over_as_late_waits_again_when_the_clock_was_set_back() -> None:
    state = State()

    def handed_out_behind_the_next(first: int, deadline_ms: int) -> None:
        for number in (first, first + 1):
            state.batches[number] = 1
            deadline = deadline_ms if number == first else 0
            put = r.RequestPut(
                SERVICE, number, 1, 8, "anna", "anna", 100, deadline, subjects=["a"]
            )  # fmt: skip
            state.apply(put, number)
        state.apply(r.WorkTaken(SERVICE, [(first + 1, b"")], "bob", 300, 50), first + 2)
        # The broker starts again before it has logged an end of the first request.
        state.apply(r.WorkTaken(SERVICE, [(first, b"")], "bob", 200, 50), first + 3)

    handed_out_behind_the_next(10, deadline_ms=300)
    with pytest.raises(Violation, match=r"request 20 of .* after 21"):
        handed_out_behind_the_next(20, deadline_ms=301)
