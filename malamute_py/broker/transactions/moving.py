"""Appending what committed transactions have staged to its streams.

Owns the way of staged batches from the mail stream into their streams. The rules: it begins once
the log has the commit, in the same ring, so that nothing of it can survive without the commit; a
bundle has the batches and the change that says so, so that none is appended twice or left out over
a crash; for each ring one bundle is on its way at a time and transactions take turns, so that none
holds a turn of the loop for longer than a bundle takes; a batch of a stream that was removed is
dropped with that stream. For a ring of a stream's own it begins once the commit is durable; the
change that says so comes once the batches are durable there, and their marks (arrivals.py) tell a
start which of them are. What a ring puts off is given up on an operator's word alone, in the turn
of its lane, so that no batch is given up while it is on its way. Source: ARCHITECTURE.md,
Decisions; SPEC.md, section 4.11.

Staged batches lie in the mail stream, aside from their streams. A lane is the way into one ring.
What is for a ring of a stream's own is `apart`. A ring that refuses what it is given puts it off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from malamute_protocol.content import Content
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.log.answers import Answer
from malamute_py.broker.log.bodies import Bodies, Body
from malamute_py.broker.log.ring import RingState, Settlement
from malamute_py.broker.log.steps import Effect, Part, Steps, Then
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.ready import MAIN
from malamute_py.broker.streams.arrivals import Arrival, Arrivals, marked
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.structures.timers import Timers
from malamute_py.broker.transactions.transaction import PutOff, Transaction
from malamute_py.changelog.records import TransactionEnded, TransactionMoved, TransactionStaged
from malamute_py.changelog.tables import StagedRow

BATCHES_MAX: Final = 256
"""Batches that one bundle appends at most."""
AHEAD_BYTES: Final = 64 << 20
"""Bytes that were appended and not yet synced from which on the next bundle waits for the disk."""
_WAITS_MAX: Final = 10
"""How often a ring may answer `wait` before callers are told that it takes nothing."""
Staged: TypeAlias = StagedRow | TransactionStaged


class _Lane(msgspec.Struct, eq=False):
    """Transactions with batches for one ring, in their turns."""

    ring: str
    queue: deque[Transaction]
    busy: bool = False
    """Whether a bundle is being read, or is on its way to the log, or waits for the disk."""
    told: str = ""
    """Code by which the ring has refused since it took something last, and which was reported."""
    waited: int = 0
    """How often the ring has asked for patience since then."""


class _Bundle(msgspec.Struct, eq=False):
    """Batches of one transaction that are appended together."""

    lane: _Lane
    transaction: Transaction
    batches: list[Staged]
    bodies: list[Body | None]
    missing: int
    """Bodies that are still being read, or batches on their way to a ring of their stream's own."""
    failed: str = ""
    refusal: tuple[str, str] | None = None
    """Code and reason, once a ring of a stream's own has refused a batch."""
    ring: RingState | None = None
    """Ring that the batches were appended to; None: ring main, or no ring."""
    lost: list[tuple[Stream | None, Staged]] = []
    """Batches that damage has taken, with their streams."""
    given_up: list[tuple[Stream, Staged]] = []
    """Batches that an operator gives up, with their streams."""


class Moving:
    """Committed transactions whose batches are being appended, one bundle of each lane at a time.

    A bundle goes from _go_on(), which has it read, to moved(), or to _later() and from its start.
    """

    def __init__(
        self,
        shard: Shard,
        steps: Steps,
        bodies: Bodies,
        catalogue: Catalogue,
        publishing: Publishing,
        arrivals: Arrivals,
        timers: Timers,
        when_visible: Callable[[int, Settlement], None],
        ended: Callable[[Transaction, int], None],
        put_off: Callable[[Transaction, str, str], None],
        weigh: Callable[[Transaction, int], None],
    ) -> None:
        """ended: called with a transaction of which all is appended, and the LSN of its end.

        put_off: called with a transaction of which a ring takes nothing for now, and why. weigh:
        called with bytes that are staged no more, as a negative number.
        """
        self._shard = shard
        self._steps = steps
        self._bodies = bodies
        self._catalogue = catalogue
        self._publishing = publishing
        self._arrivals = arrivals
        self._timers = timers
        self._when_visible = when_visible
        self._ended = ended
        self._put_off = put_off
        self._weigh = weigh
        self._lanes: dict[str, _Lane] = {}

    def begin(self, transaction: Transaction, commit_lsn: int = 0) -> None:
        """Append all of a transaction, whose commit the log has, in its turn.

        Called when a commit is appended, and at a start. commit_lsn: end of the bundle with the
        commit; 0: it is durable.
        """
        if not transaction.staged:  # A start found the commit, and all batches in their streams.
            self._end(transaction)
        for ring in transaction.rings():
            if ring == MAIN:
                self._enter(transaction, ring, failure=None)
            else:
                # A power loss could take the commit from ring main and leave batches elsewhere.
                self._when_visible(commit_lsn, partial(self._enter, transaction, ring))

    def _enter(self, transaction: Transaction, ring: str, failure: tuple[str, str] | None) -> None:
        """Queue a transaction for a ring, unless its commit will never be durable."""
        if failure is not None:
            # Ring main has failed before the commit was durable: a start finds the commit or not.
            self._note_put_off(transaction, MAIN, *failure)
            return
        lane = self._lanes.get(ring)
        if lane is None:
            lane = self._lanes[ring] = _Lane(ring, deque())
        lane.queue.append(transaction)
        self._go_on(lane)

    def _go_on(self, lane: _Lane) -> None:
        """Read the staged batches of a lane's next bundle, from the transaction whose turn it is.

        Called when a transaction joins the lane, and when its last bundle is done. One bundle of a
        lane is under way at a time; `_found` puts together what is read.
        """
        if lane.busy:
            return
        if not lane.queue:
            self._lanes.pop(lane.ring, None)
            return
        lane.busy = True
        transaction = lane.queue.popleft()
        if lane.ring in transaction.giving_up:
            # Batches that an operator gives up are not read: the bundle needs no bodies.
            # `_drop_apart` counts down the one that is missing.
            every = transaction.in_order(lane.ring)
            self._drop_apart(_Bundle(lane, transaction, every, bodies=[], missing=1))
            return
        batches: list[Staged] = []
        size, most = 0, self._shard.settings.commit_bytes
        for batch in transaction.in_order(lane.ring):
            if batches and (size + batch.size > most or len(batches) >= BATCHES_MAX):
                break
            batches.append(batch)
            size += batch.size
        bundle = _Bundle(lane, transaction, batches, [None] * len(batches), len(batches))
        for at, batch in enumerate(batches):
            self._bodies.want(batch.base, batch.size, partial(self._found, bundle, at))

    def _found(self, bundle: _Bundle, at: int, body: Body | None) -> None:
        """Note a body of a bundle that was read; append the bundle once it has all.

        at: index of the batch in the bundle. body: None: it is lost, or could not be read now.
        """
        bundle.bodies[at] = body
        if body is None and self._bodies.failed:  # The read failed, and is tried again.
            bundle.failed = self._bodies.failed
        bundle.missing -= 1
        if bundle.missing:
            return
        if bundle.failed:
            self._later(bundle)
        elif bundle.lane.ring == MAIN:
            self._append(bundle)
        else:
            self._append_apart(bundle)

    def _later(self, bundle: _Bundle) -> None:
        """Try a bundle again in a while: its bodies could not be read, or a ring refused it.

        The lane stands still until then. Its transaction mostly stays the next one.
        """
        lane, refusal = bundle.lane, bundle.refusal
        pause_ms = 10 * self._shard.settings.retry_ms
        code = "" if refusal is None else refusal[0]
        if not code or lane.ring in bundle.transaction.giving_up:
            lane.queue.appendleft(bundle.transaction)
        elif code == "wait":
            lane.queue.appendleft(bundle.transaction)
            pause_ms = self._shard.settings.retry_ms
        else:
            # The ring may take what others have: they have their turn before this one has another.
            lane.queue.append(bundle.transaction)
        self._timers.set(self._shard.now_ms + pause_ms, partial(self._resume, bundle.lane))

    def _resume(self, lane: _Lane) -> None:
        """Begin a lane's next bundle: the last one is done."""
        lane.busy = False
        self._go_on(lane)

    # --- into ring main ---------------------------------------------------------------------

    def _append(self, bundle: _Bundle) -> None:
        """Append the batches of a bundle to ring main, and take them out of what is staged.

        Both happen in one step, so that a crash finds each batch in one place. What damage has
        taken, or what was for a removed stream, only leaves what is staged.
        """
        parts: list[Part] = []
        for batch, body in zip(bundle.batches, bundle.bodies, strict=True):
            stream = self._catalogue.by_number(batch.stream)
            if body is None:
                bundle.lost.append((stream, batch))
            elif stream is not None and not stream.removed:
                parts.append(self._publishing.later_part(stream, body.content, body.frame))
        self._take_out(bundle, parts)

    def _take_out(self, bundle: _Bundle, parts: list[Part]) -> None:
        """Have the log take a bundle's batches out of the table of what is staged.

        parts: those that append the batches in the same bundle; none where a ring of the stream's
        own has them, or where they are given up. With the last batches the transaction ends.
        """
        transaction = bundle.transaction
        bases = [batch.base for batch in bundle.batches]
        whole = len(bases) == len(transaction.staged)
        if whole:
            change: Any = self._end_change(transaction, bases, gave_up=bool(bundle.given_up))
        else:
            given_up_ms = self._shard.now_ms if bundle.given_up else 0
            change = TransactionMoved(transaction.id, bases, given_up_ms)
        self._steps.take([*parts, Part([change], effects=[_Moved(self, bundle, whole)])])

    def _end_change(
        self, transaction: Transaction, bases: list[int], *, gave_up: bool = False
    ) -> TransactionEnded:
        """Return the change that ends a committed transaction, all in its streams or given up.

        bases: numbers of the batches that leave with it. gave_up: an operator gave up some of them.
        """
        # What an operator gave up before, perhaps before a restart, the tables know.
        known = gave_up or transaction.id in self._shard.queues.ends
        why = "given_up" if known else "committed"
        return TransactionEnded(transaction.id, bases, why, self._shard.now_ms)

    def _lost(self, transaction: Transaction, stream: Stream | None, batch: Staged) -> None:
        """Report a staged batch whose body is lost; the rest of its transaction is appended."""
        self._shard.counters["staged_records_lost"] += batch.count
        self._shard.event(
            "staged_records_lost", "error", transaction=transaction.id.hex(),
            stream="" if stream is None else stream.name, number=batch.base, count=batch.count,
        )  # fmt: skip

    def moved(self, bundle: _Bundle, whole: bool, end_lsn: int) -> None:
        """Take the batches of a bundle out of what is staged, and go on with the lane.

        Called when the log has the change that says so. whole: the bundle was all that was still
        staged when that change was made.
        """
        transaction, lane = bundle.transaction, bundle.lane
        if bundle.given_up:
            self._gave_up(transaction, lane.ring, bundle.given_up)
        else:  # The ring has taken something: its next refusal is news again.
            lane.told, lane.waited = "", 0
        transaction.put_off.pop(lane.ring, None)
        for stream, batch in bundle.lost:
            self._lost(transaction, stream, batch)
        for batch in bundle.batches:
            self._bodies.drop(batch.base)
            transaction.remove(batch)
            self._weigh(transaction, -batch.size)
        if lane.ring in transaction.giving_up and lane.ring not in transaction.rings():
            self._stop_giving_up(transaction, lane.ring, end_lsn)
        if whole:  # The change of this bundle has ended the transaction.
            self._ended(transaction, end_lsn)
        elif not transaction.staged:
            # Bundles of two rings were on their way together, and neither was all of it.
            self._end(transaction)
        elif lane.ring in transaction.rings():
            lane.queue.append(transaction)
        if lane.ring != MAIN:
            # A start asks for the marks of batches until this change is durable.
            self._when_visible(end_lsn, partial(self._forget, bundle.batches))
        if self._steps.unsettled_bytes + self._publishing.unsettled_bytes > AHEAD_BYTES:
            # The disk is behind: the lane goes on once it has this bundle.
            self._when_visible(end_lsn, partial(self._settled, lane))
        else:
            self._resume(lane)

    def _settled(self, lane: _Lane, failure: tuple[str, str] | None) -> None:
        """Go on once the last bundle is durable, or its ring failed."""
        # A ring that has failed refuses the next bundle by name, and each later one.
        self._resume(lane)

    def refused(self, bundle: _Bundle, code: str, reason: str) -> None:
        """Try a bundle again later that the log refused.

        If an operator gives it up, the END_TRANSACTION is refused, and nothing more is given up.
        """
        transaction = bundle.transaction
        if bundle.lane.ring in transaction.giving_up:
            transaction.giving_up.clear()
            if transaction.ender is not None:
                transaction.ender.refuse(code, reason)
                transaction.ender = None
        self._later(bundle)

    def _end(self, transaction: Transaction) -> None:
        """Have the log end a transaction of which all is in its streams."""
        then = Then(
            partial(self._ended, transaction), lambda *_: self._end_later(transaction)
        )  # fmt: skip
        self._steps.propose(self._end_change(transaction, []), then)

    def _end_later(self, transaction: Transaction) -> None:
        """Try the end of a transaction again in a while, which the log refused."""
        pause_ms = 10 * self._shard.settings.retry_ms
        self._timers.set(self._shard.now_ms + pause_ms, partial(self._end, transaction))

    # --- into a ring of a stream's own --------------------------------------------------------

    def _append_apart(self, bundle: _Bundle) -> None:
        """Hand the batches of a bundle to their ring, but those that it has.

        From here on `bundle.batches` has those that the ring has or that nothing can be done for:
        they leave what is staged once the ring is durable. The others are tried again.
        """
        batches, bundle.batches = bundle.batches, []
        bundle.missing = 1  # One for this method, so that the bundle is not whole before its end.
        for batch, body in zip(batches, bundle.bodies, strict=True):
            stream = self._catalogue.by_number(batch.stream)
            if stream is None or stream.removed:
                bundle.batches.append(batch)
                continue
            bundle.ring = stream.ring
            if (batch.stream, batch.base) in self._arrivals:  # It arrived before a restart.
                bundle.batches.append(batch)
            elif body is None:
                bundle.lost.append((stream, batch))
                bundle.batches.append(batch)
            elif not self._hand_over(bundle, batch, stream, body):
                break  # Batches of a stream are appended in order, so those after it wait, too.
        self._count_down(bundle)

    def _hand_over(self, bundle: _Bundle, batch: Staged, stream: Stream, body: Body) -> bool:
        """Hand one batch to its ring; False: it is refused, and so are those after it.

        The batch carries a mark with its number, by which a start finds whether the ring has it.
        """
        frame = marked(body.frame, batch.base)
        content = Content(frame)
        # The marks are no part of the header table: a large one is not read a second time.
        content.share(body.content.table)
        try:
            self._publishing.append_staged(
                stream, content, frame, Arrival(partial(self._arrived, bundle, batch))
            )
        except BrokerRefused as error:
            bundle.refusal = error.code, error.reason
            return False
        bundle.missing += 1
        return True

    def _arrived(self, bundle: _Bundle, batch: Staged, refusal: tuple[str, str] | None) -> None:
        """Take the news that a ring has a batch of _hand_over(), or has refused it."""
        if refusal is None:
            self._arrivals.add(batch.stream, batch.base, batch.count)
            bundle.batches.append(batch)
        elif bundle.refusal is None:
            bundle.refusal = refusal
        self._count_down(bundle)

    def _count_down(self, bundle: _Bundle) -> None:
        """Wait for the disk once all batches of a bundle are in their ring, or refused."""
        bundle.missing -= 1
        if bundle.missing:
            return
        if not bundle.batches:  # Each was refused.
            self._refused_apart(bundle)
        elif bundle.ring is None:  # Their streams are gone, or they are given up: no ring has any.
            self._take_out(bundle, [])
        else:
            self._publishing.when_visible(
                bundle.ring, bundle.ring.end_lsn, partial(self._durable, bundle)
            )

    def _durable(self, bundle: _Bundle, failure: tuple[str, str] | None) -> None:
        """Take batches out of what is staged, once no power loss can take them from their ring.

        failure: why the ring will never have them durably; of a removed stream that does not
        matter.
        """
        if failure is None or self._removed(bundle):
            self._take_out(bundle, [])
        else:
            bundle.refusal = failure
            self._refused_apart(bundle)

    def _removed(self, bundle: _Bundle) -> bool:
        """Whether the streams of all batches of a bundle are gone: then nothing waits for them."""
        return all(self._catalogue.by_number(batch.stream) is None for batch in bundle.batches)

    def _refused_apart(self, bundle: _Bundle) -> None:
        """Tell all callers that wait why a ring takes nothing for now; try again in a while.

        A ring that asks for patience, as one that is being opened, is given some first.
        """
        code, reason = bundle.refusal or ("wait", "the ring takes nothing")
        transaction, lane = bundle.transaction, bundle.lane
        if code == "wait" and lane.waited < _WAITS_MAX:
            lane.waited += 1
            self._later(bundle)
            return
        if lane.told != code:  # The same reason is reported once until the ring takes something.
            lane.told = code
            self._shard.counters["transactions_put_off"] += 1
            self._shard.event(
                "transaction_put_off", "warning", transaction=transaction.id.hex(),
                ring=lane.ring, code=code, reason=reason,
            )  # fmt: skip
        for waiting in (transaction, *lane.queue):
            self._note_put_off(waiting, lane.ring, code, reason)
        self._later(bundle)

    def _note_put_off(self, transaction: Transaction, ring: str, code: str, reason: str) -> None:
        """Note why a ring takes nothing of a transaction for now, and tell all that wait for it."""
        known = transaction.put_off.get(ring)
        since_ms = self._shard.now_ms if known is None else known.since_ms
        transaction.put_off[ring] = PutOff(code, reason, since_ms)
        self._put_off(transaction, code, reason)

    # --- what an operator gives up ------------------------------------------------------------

    def give_up(self, transaction: Transaction, ender: Answer) -> None:
        """Take what rings put off out of what is staged; ender: answered once that is durable.

        Called on an operator's command. The work is done in the next turn of each ring's lane, so
        that no batch on its way is given up, and nothing of a ring that takes all before that.
        """
        transaction.ender = ender
        transaction.giving_up = {ring for ring in transaction.put_off if ring != MAIN}
        for ring in transaction.giving_up:
            queue = self._lanes[ring].queue
            if transaction in queue:  # Its turn comes next.
                queue.remove(transaction)
                queue.appendleft(transaction)

    def _drop_apart(self, bundle: _Bundle) -> None:
        """Give up the batches of a bundle that no stream has; all of them leave what is staged.

        bundle: all that the transaction still has for one ring.
        """
        for batch in bundle.batches:
            stream = self._catalogue.by_number(batch.stream)
            if stream is None or stream.removed:  # It is dropped with its stream, not given up.
                continue
            if (batch.stream, batch.base) in self._arrivals and stream.ring.failed is None:
                # The ring has taken it: what is left is to wait for the disk.
                bundle.ring = stream.ring
            else:
                bundle.given_up.append((stream, batch))
        self._count_down(bundle)

    def _gave_up(
        self, transaction: Transaction, ring: str, batches: list[tuple[Stream, Staged]]
    ) -> None:
        """Report batches of one ring that an operator gave up, once the log has that.

        All are of one stream, as a ring beside ring main has one.
        """
        stream, _ = batches[0]
        count = sum(batch.count for _, batch in batches)
        transaction.given_up[stream.name] = count
        why, ender = transaction.put_off[ring], transaction.ender
        self._shard.counters["given_up_records"] += count
        self._shard.event(
            "transaction_given_up", "error", transaction=transaction.id.hex(),
            by="" if ender is None else ender.link.owner, identity=transaction.row.holder,
            stream=stream.name, records=count, code=why.code, reason=why.reason,
        )  # fmt: skip

    def _stop_giving_up(self, transaction: Transaction, ring: str, end_lsn: int) -> None:
        """Note that a ring has nothing left to be given up; the last one answers the operator."""
        transaction.giving_up.discard(ring)
        if not transaction.giving_up and transaction.ender is not None:
            transaction.ender.after(end_lsn)
            transaction.ender = None

    def _forget(self, batches: list[Staged], failure: tuple[str, str] | None) -> None:
        """Drop the marks of batches that are staged no more, durably: no start asks for them."""
        if failure is None:
            for batch in batches:
                self._arrivals.drop(batch.stream, batch.base)


class _Moved(Effect):
    """Batches that leave a transaction for their streams."""

    moving: Moving
    bundle: _Bundle
    whole: bool

    def appended(self, part: Part, end_lsn: int) -> None:
        """Drop the staged batches, which their streams have now, and go on with the next bundle."""
        self.moving.moved(self.bundle, self.whole, end_lsn)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Try the bundle again later."""
        self.moving.refused(self.bundle, code, reason)
