"""Planted bugs: mutations that the simulator must catch, or it is worth nothing.

Owns the one table of them. The rule: a plant changes the code under test only while it is planted,
in a way in which a programmer could get it wrong, and names the violations that count as catching
it. Source: docs/robustness.md, "What each harness has shown to find".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

Plant = Callable[[contextlib.ExitStack], None]


class Planted(NamedTuple):
    """One planted bug."""

    scenario: str
    what: str
    plant: Plant
    caught_as: frozenset[str]
    seeds: int
    """Number of seeds within which it must be caught."""
    first: int = 0
    """Where the search begins: a rare one is not sought from the start in every test."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for a while."""
    with contextlib.ExitStack() as stack:
        PLANTS[name].plant(stack)
        yield


def _put(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put make(original) in the place of an attribute."""
    stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))


# --- keys ------------------------------------------------------------------------------------


def _content_not_compared(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker import atomic

    _put(stack, atomic, "differ", lambda original: lambda one, other: False)


def _digest_not_kept(stack: contextlib.ExitStack) -> None:
    from malamute_py.changelog import tables

    def make(original: Any) -> Any:
        def remember(queues: Any, sender: str, key: bytes, row: Any) -> None:
            row.digest = 0
            original(queues, sender, key, row)

        return remember

    _put(stack, tables, "_remember", make)


# --- transactions ----------------------------------------------------------------------------


def _staged_in_the_stream(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.transactions.transactions import Transactions

    def make(original: Any) -> Any:
        def prepare_stage(self: Any, link: Any, command: Any, frame: Any) -> Any:
            part = original(self, link, command, frame)
            stream = self._catalogue.get(command.stream)
            if stream.ring.name == "main":
                part.also = [self._publishing.later_part(stream, part.content, frame)]
            return part

        return prepare_stage

    _put(stack, Transactions, "prepare_stage", make)


def _commit_not_resumed(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.transactions.moving import Moving
    from malamute_py.broker.transactions.transactions import Transactions

    def make(original: Any) -> Any:
        def recovered(self: Any) -> None:
            with patch.object(Moving, "begin", lambda *_: None):
                original(self)

        return recovered

    _put(stack, Transactions, "recovered", make)


def _moved_twice(stack: contextlib.ExitStack) -> None:
    from malamute_py.changelog import records, tables

    effects = {records.TransactionMoved: lambda *_: None}
    stack.enter_context(patch.dict(tables._EFFECTS, effects))


def _places_ignored(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.transactions.transaction import Transaction

    def make(original: Any) -> Any:
        return lambda self, ring: sorted(original(self, ring), key=lambda batch: -batch.base)

    _put(stack, Transaction, "in_order", make)


def _marks_not_recovered(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.arrivals import Arrivals

    _put(stack, Arrivals, "witness", lambda original: lambda *_: None)


def _marks_not_in_snapshots(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.arrivals import Arrivals

    _put(stack, Arrivals, "sequences", lambda original: lambda *_: iter(()))


def _apart_before_the_commit_is_durable(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.transactions.moving import Moving

    def make(original: Any) -> Any:
        return lambda self, transaction, commit_lsn=0: original(self, transaction)

    _put(stack, Moving, "begin", make)


def _moved_before_it_is_durable_apart(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.transactions.moving import Moving

    def make(original: Any) -> Any:
        def count_down(self: Any, bundle: Any) -> None:
            bundle.ring = None
            original(self, bundle)

        return count_down

    _put(stack, Moving, "_count_down", make)


# --- removal ---------------------------------------------------------------------------------


def _trim_comes_back(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.stream import Stream

    def make(original: Any) -> Any:
        def init(self: Any, row: Any, *more: Any) -> None:
            original(self, msgspec.structs.replace(row, trimmed=0), *more)
            self.row = row

        return init

    _put(stack, Stream, "__init__", make)


def _trim_takes_one_more(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.removal import Removal

    def make(original: Any) -> Any:
        def trim(self: Any, stream: Any, before: int, *more: Any) -> None:
            original(self, stream, before + 1, *more)

        return trim

    _put(stack, Removal, "_trim", make)


def _purge_comes_back(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.purges import NO_PURGES
    from malamute_py.broker.log.stream import Stream

    def make(original: Any) -> Any:
        def init(self: Any, *more: Any) -> None:
            original(self, *more)
            self.purges = NO_PURGES

        return init

    _put(stack, Stream, "__init__", make)


def _purge_takes_later_ones(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.purges import Purges

    def make(original: Any) -> Any:
        def init(self: Any, marks: Any) -> None:
            original(self, [(pattern, before + 5) for pattern, before in marks])

        return init

    _put(stack, Purges, "__init__", make)


def _aged_delivered(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.batches import bounds
    from malamute_py.broker.subscriptions import on_demand

    def first_within_bounds(stream: Any, answer: Any, now_ms: int) -> int:
        return int(stream.first)

    for module in (bounds, on_demand):
        stack.enter_context(patch.object(module, "first_within_bounds", first_within_bounds))


# --- the journal ---------------------------------------------------------------------------


def _newest_not_copied(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.newest import Keys

    def make(original: Any) -> Any:
        def before(self: Any, offset: int, copy: int, most: int, bytes_max: int) -> Any:
            found = original(self, offset, copy, most, bytes_max)
            return [one for one in found if one[1] % 5]

        return before

    _put(stack, Keys, "before", make)


def _stale_update(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.newest import Keys

    def make(original: Any) -> Any:
        def revision(self: Any, subject: str) -> int:
            offset, deletion = self.find(subject) or (0, True)
            return 0 if deletion else offset

        return revision

    _put(stack, Keys, "revision", make)


def _copies_unread(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.newest import Keys

    _put(stack, Keys, "enter_copy", lambda original: lambda self, *row: None)


def _ghost(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal.recovery import Scan
    from tests.simulation.ring_run import RingRun

    stack.enter_context(patch.object(RingRun, "tight_share", 1.0))

    def make(original: Any) -> Any:
        def fault(self: Any, found: Any) -> Any:
            epoch = self.epoch
            if not isinstance(found, str):
                self.epoch = min(epoch, found.stamp.epoch)
            try:
                return original(self, found)
            finally:
                self.epoch = epoch

        return fault

    _put(stack, Scan, "_fault", make)


def _half_bundle(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal import recovery

    def make(original: Any) -> Any:
        def take(self: Any, segment: Any, found: Any, data: Any) -> None:
            original(self, segment, found, data)
            self._flush()
            self._bundle = recovery._ANY_BUNDLE
            self._complete = self._boundary(found.end)

        return take

    _put(stack, recovery.Scan, "_take", make)


def _too_short(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal.recovery import Scan

    def make(original: Any) -> Any:
        def fault(self: Any, found: Any) -> Any:
            if not isinstance(found, str) and found.stamp.lsn - found.stamp.bundle_lsn > 12_000:
                return "so long a bundle must be torn"
            return original(self, found)

        return fault

    _put(stack, Scan, "_fault", make)


def _damage_ends_the_log(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal.recovery import Scan

    _put(stack, Scan, "_proven", lambda _: lambda _self, _lsn, _at: False)


def _epoch_from_the_log(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal.ring import Ring

    opened = Ring.open

    def open_(storage: Any, *, epoch: int, **more: Any) -> Any:
        for lower in range(max(1, epoch - 3), epoch):
            with contextlib.suppress(ValueError):
                return opened(storage, epoch=lower, **more)
        return opened(storage, epoch=epoch, **more)

    stack.enter_context(patch.object(Ring, "open", staticmethod(open_)))


def _sync_claims_more(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal.ring import Ring

    def make(original: Any) -> Any:
        def sync(self: Any) -> int:
            original(self)
            self._synced = self.end_lsn
            return int(self._synced)

        return sync

    _put(stack, Ring, "sync", make)


def _sync_tried_again(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal.errors import JournalFailed
    from malamute_py.journal.layout import FAILED_FILE
    from malamute_py.journal.ring import Ring

    def make(original: Any) -> Any:
        def sync(self: Any) -> int:
            try:
                return int(original(self))
            except JournalFailed:
                self._failure = None
                if hasattr(self, "_appender"):
                    self._appender.failure = None
                self._storage.remove(FAILED_FILE)
                return int(original(self))

        return sync

    _put(stack, Ring, "sync", make)


def _names_not_synced(stack: contextlib.ExitStack) -> None:
    from tests.simulation.storage import SimulatedStorage

    _put(stack, SimulatedStorage, "sync_directory", lambda _: lambda _self: None)


def _mapped_bytes_overwritten(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal.mapping import Mappings

    _put(stack, Mappings, "detach", lambda _: lambda _self, _segment: True)


# --- the core ------------------------------------------------------------------------------


def _confirm_before_sync(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.broker import Broker
    from malamute_py.broker.log.confirms import SYNCED

    def make(original: Any) -> Any:
        def appended(self: Any, answer: Any) -> None:
            original(self, answer)
            for ring in self._catalogue.rings.values():
                for settled in ring.unsettled:
                    for waiter in settled.waiters or ():
                        self._confirms.confirm(waiter, SYNCED)
                    settled.waiters = ()

        return appended

    _put(stack, Broker, "appended", make)


def _gap_instead_of_reading(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.subscriptions.on_demand import OnDemand

    def read(self: Any, sub: Any) -> None:
        self._gap(sub, min(sub.tail, sub.stop, sub.stream.hot_first), "retention", "")
        self.consider(sub)

    _put(stack, OnDemand, "_read", lambda _: read)


def _cover_instead_of_gap(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.subscriptions.on_demand import OnDemand

    def gap(self: Any, sub: Any, to: int, _code: str, _reason: str) -> None:
        sub.position = to
        self._delivery.cover(sub)

    _put(stack, OnDemand, "_gap", lambda _: gap)


def _slow_reader_skips(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.subscriptions.live import Delivery

    def make(original: Any) -> Any:
        def fall_behind(self: Any, sub: Any, _position: int) -> None:
            original(self, sub, sub.tail)

        return fall_behind

    _put(stack, Delivery, "fall_behind", make)


def _duplicate_accepted(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.publishing import Publishing

    def make(original: Any) -> Any:
        def in_sequence(self: Any, *arguments: Any) -> bool:
            counters = self._shard.counters
            before = counters["publishes_duplicate"]
            return bool(original(self, *arguments)) or counters["publishes_duplicate"] > before

        return in_sequence

    _put(stack, Publishing, "_in_sequence", make)


def _duplicate_points_elsewhere(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.producers import ProducerStream

    def make(original: Any) -> Any:
        def found(self: Any, sequence: int) -> Any:
            place = original(self, sequence)
            return place._replace(offset=place.offset + 1) if place.offset >= 0 else place

        return found

    _put(stack, ProducerStream, "original", make)


def _durable_sees_all(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.subscriptions.subscription import Subscription

    stack.enter_context(patch.object(Subscription, "tail", property(lambda sub: sub.stream.next)))


def _group_sees_all(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.group import Group

    stack.enter_context(patch.object(Group, "tail", property(lambda group: group.stream.next)))


def _rewind_forgotten(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.stream import Stream

    _put(stack, Stream, "epoch_end", lambda _: lambda _self, _epoch, tail: tail)


def _credit_ignored(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.subscriptions.portion import Portion

    stack.enter_context(patch.object(Portion, "open", True))


def _expired_is_everything(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.subscriptions import selection

    def make(original: Any) -> Any:
        def unexpired(content: Any, now_ms: int) -> Any:
            mask = original(content, now_ms)
            return None if mask is None else mask & False

        return unexpired

    _put(stack, selection, "unexpired", make)


# --- the client library ----------------------------------------------------------------------


def _resumes_too_far(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.subscription import SubscriptionState

    original: Any = vars(SubscriptionState)["_received_to"]

    def received_to(self: Any) -> Any:
        return original.fget(self)._replace(next=self.next + 1)

    stack.enter_context(patch.object(SubscriptionState, "_received_to", property(received_to)))


def _retry_with_a_new_sequence(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.publisher import Publisher

    def make(original: Any) -> Any:
        def settle(self: Any, sender: Any, following: int, _renamed: bool) -> None:
            # As if the broker had not said which of them it has.
            original(self, sender, following, True)

        return settle

    _put(stack, Publisher, "_settle", make)


def _position_of_the_newest_epoch(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.position import Position
    from malamute_py.client.session.subscription import SubscriptionState

    def position(self: Any) -> Any:
        known = self.consumed_next >= 0
        return Position(self.stream_uuid, self.epoch, self.consumed_next) if known else None

    stack.enter_context(patch.object(SubscriptionState, "position", property(position)))


def _resend_in_reverse(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.publisher import Publisher

    def make(original: Any) -> Any:
        def link_down(self: Any) -> None:
            under_way = {lane: len(lane.sent) for lane in self.streams.values()}
            original(self)
            for lane, count in under_way.items():
                again = [lane.queue.popleft() for _ in range(count)]
                lane.queue.extendleft(again)

        return link_down

    _put(stack, Publisher, "link_down", make)


# --- mail, services, groups and steps, and their checkpoint --------------------------------------


def _checkpoint_runs_ahead(stack: contextlib.ExitStack) -> None:
    from malamute_py.store.follow import Follow
    from tests.simulation.work_machine import WorkMachine

    def make(original: Any) -> Any:
        def step(self: Any, job: Any, **named: Any) -> Any:
            end = self.rings["main"].end_lsn
            return original(self, Follow(end, [(0, end)]), **named)

        return step

    _put(stack, WorkMachine, "checkpoint_advance", make)


def _hold_before_commit(stack: contextlib.ExitStack) -> None:
    from malamute_py.server.checkpointing.checkpoints import Checkpoints

    def make(original: Any) -> Any:
        def ask(self: Any, ranges: Any) -> None:
            original(self, ranges)
            self.parts.drop(self._visible)
            self._hold()

        return ask

    _put(stack, Checkpoints, "_ask", make)


def _half_a_checkpoint(stack: contextlib.ExitStack) -> None:
    from malamute_py.store import checkpoint
    from tests.simulation.work_machine import WorkMachine

    def make(original: Any) -> Any:
        return lambda connection: contextlib.nullcontext()

    _put(stack, checkpoint, "writing", make)
    stack.enter_context(patch.object(WorkMachine, "kill_share", 0.7))


def _bodies_not_copied(stack: contextlib.ExitStack) -> None:
    from malamute_py.store.checkpoint import Checkpoint

    _put(stack, Checkpoint, "_copy_bodies", lambda original: lambda self, *rest: (0, 0))


def _keys_forgotten(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.steps import Steps

    def make(original: Any) -> Any:
        def known(self: Any, key: Any, waiter: Any) -> Any:
            return key in self._under_way and original(self, key, waiter)

        return known

    _put(stack, Steps, "known", make)


def _ack_confirmed_at_once(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.confirms import SYNCED
    from malamute_py.broker.log.steps import Steps

    def make(original: Any) -> Any:
        def take(self: Any, parts: Any, waiter: Any = None, *rest: Any, **named: Any) -> None:
            if waiter is not None and not any(part.content is not None for part in parts):
                waiter.size = 0
                self._confirms.confirm(waiter, SYNCED)
                waiter = None
            original(self, parts, waiter, *rest, **named)

        return take

    _put(stack, Steps, "take", make)


def _synced_when_appended(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log.steps import Steps

    def make(original: Any) -> Any:
        def confirm_stored(self: Any, step: Any, later: Any) -> None:
            waiting: list[Any] = []
            original(self, step, waiting)
            for waiter in waiting:
                self._confirms.confirm(waiter, 3)

        return confirm_stored

    _put(stack, Steps, "_confirm_stored", make)


def _work_taken_not_logged(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.services import hand_outs, requests
    from malamute_py.changelog.records import WorkReceived

    def make(original: Any) -> Any:
        return lambda service, rows, holder, at_ms, lease_ms: WorkReceived(service, rows)

    _put(stack, hand_outs, "WorkTaken", make)
    _put(stack, requests, "WorkTaken", make)


def _return_not_logged(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.services import returns
    from malamute_py.changelog.records import WorkReceived

    def make(original: Any) -> Any:
        def returned(service: Any, rows: Any, why: str, *more: Any) -> Any:
            logged = why != "lease"
            return original(service, rows, why, *more) if logged else WorkReceived(service, rows)

        return returned

    _put(stack, returns, "WorkReturned", make)


def _attempts_not_counted(stack: contextlib.ExitStack) -> None:
    from malamute_py.changelog import tables

    def make(original: Any) -> Any:
        def count(row: Any, mask: int) -> None:
            row.attempts = row.attempts or {1: mask}

        return count

    _put(stack, tables, "_count", make)


def _step_in_two_bundles(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.log import steps
    from tests.simulation.machine import Machine

    def make(original: Any) -> Any:
        def take(self: Any, parts: Any, *rest: Any, **named: Any) -> None:
            if len(parts) > 1 and named.get("reserved"):
                original(self, parts[:1], reserved=True)
                parts = parts[1:]
            original(self, parts, *rest, **named)

        return take

    _put(stack, steps.Steps, "take", make)
    stack.enter_context(patch.object(steps, "BUNDLE_STEPS", 1))
    # Otherwise one write would hide that they are two.
    _put(
        stack, Machine, "_neighbours", lambda original: lambda self, bundles: [[b] for b in bundles]
    )


def _expired_delivered(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.mail import inboxes

    _put(stack, inboxes, "expired", lambda original: lambda mailbox, row, now_ms: (0, 0))


def _group_done_over_a_hole(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups import acknowledgements, groups, progress

    def make(original: Any) -> Any:
        def done(stream: int, name: str, ranges: Any, epoch: int) -> Any:
            return original(stream, name, [(ranges[0][0], ranges[-1][1])], epoch)

        return done

    for module in (acknowledgements, groups, progress):
        _put(stack, module, "GroupDone", make)


def _record_attempts_dropped(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.groups import Groups

    def make(original: Any) -> Any:
        def recovered(self: Any) -> None:
            for row in self._shard.queues.groups.values():
                row.tries = []
            original(self)

        return recovered

    _put(stack, Groups, "recovered", make)


def _holder_forgotten(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.holders import Holders

    _put(stack, Holders, "take_up", lambda original: lambda self, group, give_up: None)


def _holder_not_logged(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.holders import Holders

    def make(original: Any) -> Any:
        def settle(self: Any, group: Any) -> None:
            group.sure = True
            self._begin(group)

        return settle

    _put(stack, Holders, "settle", make)


def _record_attempts_in_memory(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.holdings import ranges_of
    from malamute_py.broker.groups.returns import Returns
    from malamute_py.changelog.tables import with_tries

    def make(original: Any) -> Any:
        def count(self: Any, group: Any, picked: Any, why: str) -> None:
            group.row.tries = with_tries(group.row.tries, ranges_of(picked), why)
            self._reader.back(group, picked, 0)

        return count

    _put(stack, Returns, "count", make)


def _dead_record_not_done(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.dead_letters import _Burying

    _put(stack, _Burying, "add_change", lambda original: lambda self, part: None)


def _dead_record_not_put(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.dead_letters import DeadLetters

    def make(original: Any) -> Any:
        def without(self: Any, group: Any, batch: Any, bits: int, back: Any) -> int:
            for _, rows in group.dying_of(batch.base, bits):
                bits ^= rows
                group.close(batch.base, rows)
                self.progress.flush_later(group)
            return bits

        return without

    _put(stack, DeadLetters, "without", make)


def _delay_forgotten(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.services.recovery import Recovery

    def make(original: Any) -> Any:
        def recovered(self: Any) -> None:
            for row in self._shard.queues.requests.values():
                row.delayed = {}
            original(self)

        return recovered

    _put(stack, Recovery, "recovered", make)


def _priority_ignored(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.services.dispatch import Dispatch

    def make(original: Any) -> Any:
        def queue_of(self: Any, subject: str, priority: int = 0, *, waits: bool = True) -> Any:
            return original(self, subject, 0, waits=waits)

        return queue_of

    _put(stack, Dispatch, "queue_of", make)


def _notices_forgotten(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.mail.puts import Puts

    _put(stack, Puts, "notice", lambda original: lambda self, name, **named: None)


def _cancelled_waits_on(stack: contextlib.ExitStack) -> None:
    from malamute_py.changelog import tables

    def make(original: Any) -> Any:
        def leave(queues: Any, base: int, rows: bytes) -> Any:
            row = queues.requests.get(base)
            waiting = 0 if row is None else row.waiting
            left = original(queues, base, rows)
            if left is not None and not left[0].left:
                left[0].waiting = waiting
            return left

        return leave

    _put(stack, tables, "_leave", make)


# --- what needs two at once, a second ring, or a bound that is near -------------------------------


def _stamp_left(stack: contextlib.ExitStack) -> None:
    from malamute_py.journal import repair
    from tests.simulation.ring_run import RingRun

    stack.enter_context(patch.object(RingRun, "tight_share", 1.0))
    stack.enter_context(patch.object(RingRun, "edge_share", 1.0))
    _put(stack, repair, "_clear_end", lambda original: lambda storage, scan: None)


def _duplicate_overtakes(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.publishing import Publishing

    def make(original: Any) -> Any:
        def duplicate(
            self: Any, link: Any, command: Any, stream: Any, place: Any, again: Any
        ) -> None:
            under_way, place.under_way = place.under_way, {}
            try:
                original(self, link, command, stream, place, again)
            finally:
                place.under_way = under_way

        return duplicate

    _put(stack, Publishing, "_duplicate", make)


def _fence_forgets(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.services.returns import Returns

    def make(original: Any) -> Any:
        def give_back_all(self: Any, in_flight: Any, why: str) -> None:
            if why != "fenced":
                original(self, in_flight, why)

        return give_back_all

    _put(stack, Returns, "give_back_all", make)


def _done_beyond_the_end(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.groups.groups import Groups
    from malamute_py.changelog.records import GroupDone
    from malamute_py.changelog.tables import with_done

    def make(original: Any) -> Any:
        def clamp(self: Any, stream: Any, row: Any) -> Any:
            done = row.done
            changes = original(self, stream, row)
            if changes and done:
                kept = [part for part in done if part[1] > row.next]
                changes.append(GroupDone(row.stream, row.name, kept or done[-1:]))
                row.next, row.done = with_done(row.next, [], kept)
            return changes

        return clamp

    _put(stack, Groups, "_clamp", make)


def _one_attempt_less(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.services.returns import Returns

    def make(original: Any) -> Any:
        def most(self: Any, service: Any) -> int:
            return int(original(self, service)) - 1

        return most

    _put(stack, Returns, "attempts_max", make)


def _since_ignored(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.cursors.cursors import Cursors

    def make(original: Any) -> Any:
        def prepare_move(self: Any, link: Any, command: Any, frame: Any = None) -> Any:
            return original(self, link, msgspec.structs.replace(command, from_=-1), frame)

        return prepare_move

    _put(stack, Cursors, "prepare_move", make)


def _coming_forgotten(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.mail.puts import Puts

    def make(original: Any) -> Any:
        def check_room(self: Any, mailbox: Any, count: int, size: int) -> None:
            coming, mailbox.coming = mailbox.coming, 0
            try:
                original(self, mailbox, count, size)
            finally:
                mailbox.coming = coming

        return check_room

    _put(stack, Puts, "_check_room", make)


def _newest_key_dropped(stack: contextlib.ExitStack) -> None:
    from malamute_py.changelog.shares import Shares

    def make(original: Any) -> Any:
        def turn(self: Any, owner: str, entry: Any) -> Any:
            self.add(owner, entry)
            loser, _ = self.next_out()
            newest = next(reversed(self._owners[loser]))
            self.drop(loser, newest)
            return newest

        return turn

    _put(stack, Shares, "turn", make)


# --- the client library's workers and groups ------------------------------------------------------


def _renewal_untold(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.offer import RENEWED
    from malamute_py.client.session.offering import Offering

    left = []  # A call that nothing refers to is collected, and its request is given back.

    def make(original: Any) -> Any:
        def ack_lost(self: Any, ack: Any) -> bool:
            left.append(ack)
            return bool(ack.form.state != RENEWED)

        return ack_lost

    _put(stack, Offering, "ack_lost", make)


def _held_unseen(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.offering import Offering

    def make(original: Any) -> Any:
        def take(self: Any) -> Any:
            request = original(self)
            if request is not None and request.attempts > 1:
                request.begun = False
                return None
            return request

        return take

    _put(stack, Offering, "take", make)


def _hand_out_failed(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.offering import Offering

    _put(stack, Offering, "lost_to_others", lambda original: lambda self, numbers: None)


def _waits_for_ever(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.requests import OutgoingRequests

    # A call that nothing refers to is collected, and the messages that it holds are given back.
    left = []

    def given_up(self: Any) -> None:
        left.append(self)

    _put(stack, OutgoingRequests, "given_up", lambda original: given_up)


def _rewind_unheard(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.memberships import Membership

    _put(stack, Membership, "_rewind", lambda original: lambda self, command: None)


# --- the synchronous client's shell ---------------------------------------------------------------


def _one_is_told(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.sync.link import ThreadLink
    from tests.simulation.threads import Condition

    class One(Condition):
        def notify_all(self) -> None:
            for thread in self._waiting:
                del self._waiting[thread]
                self._threads.ready(thread)
                return

    def make(original: Any) -> Any:
        def begin(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            self._happened = One(self.lock)

        return begin

    _put(stack, ThreadLink, "__init__", make)


def _dropped_unheard(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.sync.link import ThreadLink

    _put(stack, ThreadLink, "dropped", lambda original: lambda self, opened: None)


def _read_at_once(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.sync.mail import SyncInbox

    def make(original: Any) -> Any:
        def begin(self: Any, delivered: Any, batch: Any) -> None:
            original(self, delivered, batch)
            if self._acks_next:
                for number in batch.offsets.tolist():
                    self._view.done(number)

        return begin

    _put(stack, SyncInbox, "_begin", make)


def _none_completes_nothing(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.sync.handlers import HandlerRun

    left = []  # A request that nothing refers to is given back.

    def make(original: Any) -> Any:
        def answer(self: Any, request: Any, result: Any) -> None:
            if result is not None:
                original(self, request, result)
            else:
                left.append(request)

        return answer

    _put(stack, HandlerRun, "_answer", make)


def _first_settled(stack: contextlib.ExitStack) -> None:
    from malamute_py.client.session.events import Settled
    from malamute_py.client.sync.link import ThreadLink

    def make(original: Any) -> Any:
        def handle(self: Any, event: Any) -> bool:
            if isinstance(event, Settled):
                event = Settled(event.pairs[:1])
            return bool(original(self, event))

        return handle

    _put(stack, ThreadLink, "_handle", make)


def _codes(*names: str) -> frozenset[str]:
    return frozenset(names)


PLANTS: dict[str, Planted] = {
    "key-with-another-body": Planted(
        "work", "a key that comes again with another body is taken for a duplicate",
        _content_not_compared, _codes("wrong_confirm", "wrong_duplicate"), 30,
    ),
    "digest-not-kept": Planted(
        "work", "the digest of a key's content is not kept beside its number",
        _digest_not_kept, _codes("wrong_confirm", "wrong_duplicate"), 30,
    ),
    "ghost-batch": Planted(
        "journal", "recovery takes a batch of an older epoch in a rewritten tail",
        _ghost, _codes("ghost"), 300,
    ),
    "half-bundle": Planted(
        "journal", "recovery keeps the part of a bundle that it finds",
        _half_bundle, _codes("half_bundle", "ghost"), 40,
    ),
    "truncates-too-much": Planted(
        "journal", "recovery takes long bundles for torn ones",
        _too_short, _codes("lost"), 40,
    ),
    "damage-ends-the-log": Planted(
        "journal", "damage before the tail is taken for a torn tail",
        _damage_ends_the_log, _codes("lost"), 120,
    ),
    "offset-reused": Planted(
        "journal", "the epoch is counted from the log, which a power loss shortens",
        _epoch_from_the_log, _codes("reused"), 60,
    ),
    "sync-claims-more": Planted(
        "journal", "a sync claims what was appended while it ran",
        _sync_claims_more, _codes("lost"), 120,
    ),
    "sync-tried-again": Planted(
        "journal", "a failed sync is tried again, and succeeds",
        _sync_tried_again, _codes("lost"), 200,
    ),
    "names-not-synced": Planted(
        "journal", "directory entries are never synced",
        _names_not_synced, _codes("lost", "broken", "ghost"), 40,
    ),
    "mapped-bytes-overwritten": Planted(
        "journal", "a segment is written over while a peer has mapped bytes of it to read",
        _mapped_bytes_overwritten, _codes("changed"), 60,
    ),
    "confirm-before-sync": Planted(
        "broker", "a batch is confirmed as synced when it is appended",
        _confirm_before_sync, _codes("lost"), 60,
    ),
    "hole-called-gap": Planted(
        "broker", "history that is there is announced as a gap",
        _gap_instead_of_reading, _codes("hole_called_gap"), 40,
    ),
    "gap-called-hole": Planted(
        "broker", "what retention took is covered without a word",
        _cover_instead_of_gap, _codes("gap_called_hole"), 120,
    ),
    "slow-reader-skips": Planted(
        "broker", "a live reader without credit loses the batch at which it falls behind",
        _slow_reader_skips, _codes("gap_called_hole"), 40,
    ),
    "duplicate-accepted": Planted(
        "broker", "a batch that comes again is appended again",
        _duplicate_accepted, _codes("twice", "order"), 60,
    ),
    "duplicate-points-elsewhere": Planted(
        "broker", "the confirm of a duplicate names another offset than the original's",
        _duplicate_points_elsewhere, _codes("wrong_duplicate"), 60,
    ),
    "durable-ignores-the-sync": Planted(
        "broker", "durable readers see what is only appended",
        _durable_sees_all, _codes("early", "lost_seen", "start"), 40,
    ),
    "rewind-forgotten": Planted(
        "broker", "a resume beyond its epoch's end is taken as it is",
        _rewind_forgotten, _codes("rewound", "start"), 400,
    ),
    "credit-ignored": Planted(
        "broker", "readers on demand are given more than their credit",
        _credit_ignored, _codes("credit"), 40,
    ),
    "expiry-takes-neighbours": Planted(
        "broker", "one expired record hides the others of its batch",
        _expired_is_everything, _codes("gap_called_hole"), 120,
    ),
    "resume-too-far": Planted(
        "session", "a session resumes one record behind what it has received",
        _resumes_too_far, _codes("start", "rewound", "gap_called_hole", "hole_called_gap"), 40,
    ),
    "retry-with-a-new-sequence": Planted(
        "session", "after a reconnect a session numbers anew what the broker may have",
        _retry_with_a_new_sequence, _codes("twice", "order"), 60,
    ),
    "resend-in-reverse": Planted(
        "session", "after a reconnect a session sends what was under way in reverse",
        _resend_in_reverse, _codes("order", "twice"), 60,
    ),
    "position-of-the-newest-epoch": Planted(
        "session", "a position behind an unconsumed rewind names the epoch after it",
        _position_of_the_newest_epoch,
        _codes("rewound", "gap_called_hole"), 400, 110,
    ),
    "checkpoint-runs-ahead": Planted(
        "work", "the tables follow what is not on disk yet",
        _checkpoint_runs_ahead, _codes("checkpoint", "tables"), 60,
    ),
    "hold-before-commit": Planted(
        "work", "the ring lets go of what the tables were only asked to take",
        _hold_before_commit, _codes("checkpoint", "bodies"), 150,
    ),
    "half-a-checkpoint": Planted(
        "work", "a step of the checkpoint is no transaction",
        _half_a_checkpoint, _codes("checkpoint", "tables", "bodies", "broken"), 150,
    ),
    "bodies-not-copied": Planted(
        "work", "bodies go with the segment that they lie in",
        _bodies_not_copied, _codes("bodies", "stuck"), 100,
    ),
    "keys-forgotten": Planted(
        "work", "a key that was taken is taken again",
        _keys_forgotten, _codes("twice"), 40,
    ),
    "ack-before-append": Planted(
        "work", "an acknowledgement is confirmed before it is in the log",
        _ack_confirmed_at_once, _codes("wrong_confirm", "early"), 20,
    ),
    "step-confirmed-before-sync": Planted(
        "work", "a step is confirmed as synced when it is appended",
        _synced_when_appended, _codes("early"), 20,
    ),
    "work-taken-not-logged": Planted(
        "work", "work is handed out without a record of it",
        _work_taken_not_logged, _codes("two_hands"), 20,
    ),
    "lease-not-logged": Planted(
        "work", "the end of a lease is no record",
        _return_not_logged, _codes("two_hands", "attempts", "stuck"), 60,
    ),
    "attempts-not-counted": Planted(
        "work", "a second attempt counts as the first",
        _attempts_not_counted, _codes("attempts", "tables"), 40,
    ),
    "step-in-two-bundles": Planted(
        "work", "the first part of a step has a bundle of its own",
        _step_in_two_bundles, _codes("half_step"), 20,
    ),
    "expired-delivered": Planted(
        "work", "nobody asks whether a message has expired when it is handed out",
        _expired_delivered, _codes("expired"), 60,
    ),
    "group-done-over-a-hole": Planted(
        "work", "a group's position passes over what was not acknowledged",
        _group_done_over_a_hole, _codes("after_end", "stuck", "half_step"), 60,
    ),
    "record-attempts-dropped": Planted(
        "work", "a start forgets the attempts of a group's records",
        _record_attempts_dropped, _codes("tables", "attempts", "dead"), 60, 40,
    ),
    "holder-forgotten": Planted(
        "work", "a start forgets which member has the place of an exclusive group",
        _holder_forgotten, _codes("place"), 60,
    ),
    "holder-not-logged": Planted(
        "work", "the holder of an exclusive group is given records before the log has it",
        _holder_not_logged, _codes("place"), 60,
    ),
    "record-attempts-in-memory": Planted(
        "work", "an attempt that a lost link has ended is counted in memory only",
        _record_attempts_in_memory, _codes("attempts", "dead"), 60, 40,
    ),
    "dead-record-not-done": Planted(
        "work", "a record is put among the dead letters, and comes to be put again",
        _dead_record_not_done, _codes("half_step"), 60,
    ),
    "dead-record-not-put": Planted(
        "work", "a record whose attempts are used up is done without a dead letter",
        _dead_record_not_put, _codes("lost"), 60,
    ),
    "group-ignores-the-sync": Planted(
        "work", "members of a durable group see what is only appended",
        _group_sees_all, _codes("early"), 60,
    ),
    "delay-forgotten": Planted(
        "work", "a start forgets until when requests are delayed",
        _delay_forgotten, _codes("expired", "tables"), 60,
    ),
    "priority-ignored": Planted(
        "work", "requests with a priority wait among the others",
        _priority_ignored, _codes("order"), 60,
    ),
    "notices-forgotten": Planted(
        "work", "requests end without a word to who asked",
        _notices_forgotten, _codes("lost"), 60,
    ),
    "cancelled-waits-on": Planted(
        "work", "a request that was cancelled is handed out",
        _cancelled_waits_on, _codes("ended_twice", "after_end"), 60,
    ),
    "trim-comes-back": Planted(
        "removal", "a start knows only the trims that the rings have noted",
        _trim_comes_back, _codes("removed", "start"), 60,
    ),
    "trim-takes-one-too-many": Planted(
        "removal", "a trim takes the record at its offset, too",
        _trim_takes_one_more, _codes("too_many", "hole_called_gap", "gap_called_hole"), 20,
    ),
    "purge-comes-back": Planted(
        "removal", "a start forgets what was purged by subject",
        _purge_comes_back, _codes("removed"), 40,
    ),
    "purge-takes-later-ones": Planted(
        "removal", "a purge takes records of its subjects that were published after it, too",
        _purge_takes_later_ones, _codes("gap_called_hole"), 40,
    ),
    "aged-delivered": Planted(
        "removal", "records are as young when they are handed out as when they were asked for",
        _aged_delivered, _codes("aged"), 60,
    ),
    "stamp-left": Planted(
        "journal", "the stamp of a dropped batch stays where the next one is written",
        _stamp_left, _codes("ghost", "lost", "half_bundle"), 200, 150,
    ),
    "duplicate-overtakes": Planted(
        "broker", "a duplicate is confirmed before its original is in the log",
        _duplicate_overtakes, _codes("wrong_confirm", "wrong_duplicate", "lost", "early"), 120, 40,
    ),
    "fence-forgets": Planted(
        "work", "what a fenced link had in hand comes back by its lease only",
        _fence_forgets, _codes("late"), 100,
    ),
    "done-beyond-the-end": Planted(
        "work", "a group keeps what was done of records that a power loss took back",
        _done_beyond_the_end, _codes("done_before"), 100, 920,
    ),
    "staged-in-the-stream": Planted(
        "transactions", "a batch is in its stream as soon as it is staged",
        _staged_in_the_stream, _codes("rolled_back"), 10,
    ),
    "commit-not-resumed": Planted(
        "transactions", "a start forgets what a commit has not appended yet",
        _commit_not_resumed, _codes("lost", "half"), 20,
    ),
    "moved-twice": Planted(
        "transactions", "the tables do not know which batches of a commit were appended",
        _moved_twice, _codes("twice"), 20,
    ),
    "marks-not-recovered": Planted(
        "transactions", "a start does not know which batches a stream's own ring has",
        _marks_not_recovered, _codes("twice"), 20,
    ),
    "marks-not-in-snapshots": Planted(
        "transactions", "a mark is forgotten with the segment that has the batch",
        _marks_not_in_snapshots, _codes("twice"), 40,
    ),
    "apart-before-the-commit": Planted(
        "transactions", "a stream's own ring gets records of a commit that a power loss takes back",
        _apart_before_the_commit_is_durable, _codes("half"), 10, 75,
    ),
    "moved-before-it-is-durable": Planted(
        "transactions", "a batch is staged no more before its own ring has it on the disk",
        _moved_before_it_is_durable_apart, _codes("lost", "half"), 40,
    ),
    "places-ignored": Planted(
        "transactions", "batches of a transaction are appended newest first",
        _places_ignored, _codes("order"), 10,
    ),
    "newest-not-copied": Planted(
        "keys", "a segment is given up without copies of some newest records",
        _newest_not_copied, _codes("key"), 40,
    ),
    "stale-update": Planted(
        "keys", "an update passes whose revision another update of the turn has replaced",
        _stale_update, _codes("stale"), 20,
    ),
    "copies-unread": Planted(
        "keys", "a start does not know the newest records that have moved",
        _copies_unread, _codes("key"), 40,
    ),
    "one-attempt-less": Planted(
        "work", "a request dies with one attempt left",
        _one_attempt_less, _codes("dead"), 40,
    ),
    "since-ignored": Planted(
        "work", "a cursor is moved from wherever it stands",
        _since_ignored, _codes("since"), 40,
    ),
    "coming-forgotten": Planted(
        "work", "a mailbox's limit counts only what is in the log",
        _coming_forgotten, _codes("limit"), 60, 140,
    ),
    "newest-key-dropped": Planted(
        "work", "a window of keys that is full drops the newest instead of the oldest",
        _newest_key_dropped, _codes("twice", "tables"), 20,
    ),
    "renewal-untold": Planted(
        "clients", "who renews a lease is not told when the link goes",
        _renewal_untold, _codes("stuck", "unlawful"), 60, 60,
    ),
    "held-unseen": Planted(
        "clients", "a request handed out once more is held though its program is never shown it",
        _held_unseen, _codes("stuck"), 60, 60,
    ),
    "hand-out-failed": Planted(
        "clients", "a step that comes again and is refused fails the hand-out after it",
        _hand_out_failed, _codes("dead"), 60, 1_380,
    ),
    "waits-for-ever": Planted(
        "clients", "who waits for a reply that was lost waits on when its time is over",
        _waits_for_ever, _codes("stuck"), 60, 480,
    ),
    "rewind-unheard": Planted(
        "clients", "a member acknowledges for a record what it did with one that was lost",
        _rewind_unheard, _codes("unseen"), 100,
    ),
    "one-is-told": Planted(
        "threads", "of several threads that wait for a client's answers one is woken",
        _one_is_told, _codes("stuck"), 20,
    ),
    "dropped-unheard": Planted(
        "threads", "what a program dropped unclosed holds on to what it had",
        _dropped_unheard, _codes("stuck"), 60,
    ),
    "read-at-once": Planted(
        "threads", "messages are acknowledged when they come to an inbox, before they are read",
        _read_at_once, _codes("unseen"), 60,
    ),
    "none-completes-nothing": Planted(
        "threads", "a handler that returns nothing leaves its request in hand",
        _none_completes_nothing, _codes("stuck", "unlawful"), 40,
    ),
    "first-settled": Planted(
        "threads", "of several calls that end by one message one is told",
        _first_settled, _codes("stuck"), 60, 70,
    ),
}  # fmt: skip
"""Name -> planted bug. `python -m tests.simulation --plant list` prints it."""
