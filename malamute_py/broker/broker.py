"""The broker core: commands in, a Ready out.

Owns the parts of the core, the table of the handlers of commands, and the order of a turn. The
rules: nothing that a peer sends raises; a malformed message costs the peer its link and no other
peer anything; the core has no socket, clock, thread, environment or randomness of its own. Source:
docs/design.md, The core and its shell; SPEC.md, sections 3 and 4.

A bundle is batches that the journal appends in one write to a ring, a circle of segment files; an
LSN is a position there. A copy is a newest record of a subject, appended again (compaction.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from malamute_protocol import commands as wire
from malamute_protocol.commands import Command
from malamute_protocol.framing import NUMBERS, reference_of
from malamute_py.broker.administration import Administration
from malamute_py.broker.atomic import Intake
from malamute_py.broker.context import Shard
from malamute_py.broker.cursors.cursors import Cursors
from malamute_py.broker.groups.group import Group
from malamute_py.broker.groups.groups import Groups
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.confirms import Confirms
from malamute_py.broker.log.pages import Pages
from malamute_py.broker.log.ring import RingState, Settlement
from malamute_py.broker.log.steps import Steps
from malamute_py.broker.mail.mail import Mail
from malamute_py.broker.reading_ahead import ReadingAhead
from malamute_py.broker.ready import (
    CHANGE_STREAM,
    MAIN,
    AppendBundle,
    Appended,
    AppendRefused,
    BodiesFound,
    HistoryRead,
    IndexAnswer,
    ReadFailed,
    Ready,
    RecoveredState,
)
from malamute_py.broker.reception import Reception
from malamute_py.broker.services.services import Services
from malamute_py.broker.skipped_time import skip_time
from malamute_py.broker.streams.administration import StreamAdmin
from malamute_py.broker.streams.arrivals import Arrivals
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.compaction import Compaction
from malamute_py.broker.streams.conditions import Conditions
from malamute_py.broker.streams.key_commands import KeyCommands
from malamute_py.broker.streams.named import Named
from malamute_py.broker.streams.producers import Producers
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.streams.recovery import mail_next, recover, recover_queues
from malamute_py.broker.streams.removal import Removal
from malamute_py.broker.streams.retention import Retention
from malamute_py.broker.streams.start_positions import Starts
from malamute_py.broker.streams.validation import Validation
from malamute_py.broker.subscriptions.audience import Audience
from malamute_py.broker.subscriptions.lagging import Lagging
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.matching import Matching
from malamute_py.broker.subscriptions.on_demand import OnDemand
from malamute_py.broker.subscriptions.subscriptions import Subscriptions
from malamute_py.broker.transactions.administration import TransactionAdmin
from malamute_py.broker.transactions.awaiting import Awaiting
from malamute_py.broker.transactions.transactions import Transactions
from malamute_py.changelog.records import (
    Change,
    ProducerOpened,
    ProducersForgotten,
    StreamEdited,
    StreamRemoved,
)
from malamute_py.changelog.snapshots import PackedSnapshot, encode_snapshot
from malamute_py.changelog.tables import Tables


class Broker:
    """One core; ready.py has the contract with its shell."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        uuid: bytes,
        epoch: int,
        state: RecoveredState,
        random: Callable[[int], bytes],
    ) -> None:
        """epoch: higher than at any earlier opening of this log. random: count -> bytes."""
        # What all share, and what the log has of an earlier run.
        self._shard = shard = Shard(settings, uuid, epoch, random)
        shard.began_ms = state.now_ms
        self._links = Links(shard)
        self._producers = Producers(epoch)
        self._arrivals = Arrivals()
        tables = recover(state, self._producers, self._arrivals, settings.producer_batches_max)
        self._confirms = Confirms(self._links)
        self._matching = Matching(shard)
        self._delivery = Delivery(shard, self._links, self._matching)
        changes = state.rings[MAIN].streams.get(CHANGE_STREAM) if MAIN in state.rings else None
        shard.queues = recover_queues(state)
        main = RingState(MAIN, memory=False, facts=state.rings.get(MAIN))
        rings = {MAIN: main}
        self._steps = Steps(
            shard, self._confirms, main,
            changes.next if changes else 0, mail_next(state, epoch), self._apply,
        )  # fmt: skip
        # Streams, and the subscriptions that read them.
        self._retention = Retention(shard)
        self._compaction = Compaction(shard, self._retention, self._when_ring_visible)
        conditions = Conditions(shard, self._compaction.look)
        self._validation = Validation(shard)
        self._publishing = Publishing(
            shard, self._links, self._confirms, self._producers, rings, self._steps,
            conditions, self._validation, self._delivery.fan_out,
        )  # fmt: skip
        self._catalogue = Catalogue(
            shard, tables, dict(state.rings), rings, self._steps, self._publishing, conditions,
            self._validation, Audience,
        )  # fmt: skip
        self.takes_long: Final = self._validation.takes_long
        self.reads_first: Final = self._validation.reads_first
        self.ahead_bytes = self._validation.ahead_bytes  # A larger message may take long.
        self._ahead = ReadingAhead(shard, self._links, self._matching, self._validation)
        self.read_ahead: Final = self._ahead.read
        self.validating: Final = self._ahead.validating
        self.checked: Final = self._ahead.checked
        self._lagging = Lagging(shard, self._links, self._delivery, self._matching)
        self._on_demand = OnDemand(
            shard, self._links, self._delivery, self._matching, self._lagging
        )
        starts = Starts(shard, state.queues_lost)
        # Mailboxes, services, cursors, groups and transactions.
        self._bodies = Bodies(shard)
        self._answers = answers = Answers(shard, self._links, self._when_visible)
        self._pages = pages = Pages(shard, self._links, answers)
        self._mail = Mail(shard, self._links, self._steps, self._bodies, answers, pages)
        self._services = Services(
            shard, self._links, self._steps, self._bodies, self._mail.puts, answers, pages
        )  # fmt: skip
        groups: Named[Group, Any] = Named(shard.quotas, "groups")
        self._cursors = Cursors(
            shard, self._links, self._catalogue, self._steps, starts, answers, pages, groups.has
        )
        self._groups = Groups(
            shard, self._links, self._catalogue, self._steps, starts, self._delivery,
            self._matching, answers, pages, self._mail.puts, groups, self._cursors.has,
        )  # fmt: skip
        self._subscriptions = Subscriptions(
            shard, self._links, self._catalogue, self._delivery, self._lagging, starts
        )
        self._administration = Administration(
            shard, self._links, self._catalogue, self._producers, answers
        )
        self._removal = Removal(
            shard, self._catalogue, self._retention, self._when_visible, self.trimmed
        )
        self._stream_admin = StreamAdmin(
            shard, self._links, self._catalogue, self._publishing, self._producers, starts,
            self._steps, answers, pages, self._retention,
        )  # fmt: skip
        awaiting = Awaiting(self._links, answers)
        self._transactions = Transactions(
            shard, self._steps, self._bodies, self._catalogue, self._publishing,
            self._arrivals, self._groups.timers, awaiting, self._when_visible,
        )  # fmt: skip
        parts = self._mail, self._services, self._groups, self._transactions
        self.skipped: Final = partial(skip_time, shard, self._links, *parts)
        self._transaction_admin = TransactionAdmin(
            shard, self._catalogue, answers, self._transactions, awaiting
        )
        # The way of commands to those that handle them.
        self._intake = Intake(
            shard, self._links, self._steps, self._publishing, self._catalogue,
            prepares={
                **self._mail.prepares(),
                wire.Request: self._services.prepare_request,
                wire.Reply: self._services.prepare_reply,
                wire.AckWork: self._services.prepare_ack,
                wire.MoveCursor: self._cursors.prepare_move,
                wire.Trim: self._removal.prepare_trim,
                wire.PurgeSubjects: self._removal.prepare_purge,
                wire.AckRecords: self._groups.acknowledgements.prepare,
                **self._transactions.prepares(),
            },
            together={
                wire.Reply: partial(self._services.prepare_reply, together=True),
                wire.AckRecords: self._groups.acknowledgements.prepare_together,
            },
            again=self._services.request_again,
            answers=answers,
            lost=state.queues_lost,
        )  # fmt: skip
        self._key_commands = KeyCommands(
            shard, self._links, self._catalogue, self._publishing, answers, self._groups.timers,
            pages, conditions.look_if_ready,
        )  # fmt: skip
        self._reception = Reception(
            shard, self._links, self._catalogue, self._publishing, self._mail, self._intake,
            self._key_commands, answers, self._table(),
        )  # fmt: skip
        self._queues: Final = (
            self._matching.queue, self._matching.remains.parts, *self._delivery.queues,
            pages.queue.waiting, *self._on_demand.turns.queues, *self._groups.reader.turns.queues,
            *self._services.queues, *self._mail.queues,
        )  # fmt: skip
        """All queues of runnable work: while they are empty no part is asked."""
        for part in (
            self._mail, self._services, self._cursors, self._groups, self._key_commands,
            self._transactions,
        ):  # fmt: skip
            part.recovered()
        if state.queues_lost:
            self._lose_queues(state.queues_lost)
        else:
            self._arrivals.keep_only(shard.queues.staged)

    def _table(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Return the handlers of all commands but PUBLISH; the link's state was checked before."""
        return {
            **self._links.handlers(),
            wire.Subscribe: self._subscriptions.subscribe,
            **self._stream_admin.handlers(),
            **self._key_commands.handlers(),
            **self._administration.handlers(),
            **self._mail.handlers(),
            **self._services.handlers(),
            **self._cursors.handlers(),
            **self._groups.handlers(),
            **self._transaction_admin.handlers(),
        }

    def _lose_queues(self, reason: str) -> None:
        """Refuse the commands that need mailboxes, services, cursors or groups and are no steps.

        The start found the tables that have them lost; none may be changed until the operator has
        decided what becomes of them. Intake refuses the parts of steps.
        """
        for part in (
            self._mail, self._services, self._cursors, self._groups, self._transaction_admin,
        ):  # fmt: skip
            for kind in part.handlers():
                self._reception.handlers[kind] = partial(self._refuse_lost, reason)

    def _refuse_lost(self, reason: str, link: Link, command: Command) -> None:
        """Handle a command that needs what was lost: refuse it. reason: what the start found."""
        number = NUMBERS[type(command)]
        self._links.refuse(link, number, reference_of(command), "queues_lost", reason)

    # --- facts ------------------------------------------------------------------------------

    @property
    def unseen(self) -> dict[str, dict[int, int]]:
        """Return the offsets at which each ring goes on; see Catalogue.unseen."""
        return self._catalogue.unseen

    @property
    def counters(self) -> dict[str, int]:
        """Counts since the start, by name."""
        return self._shard.counters

    @property
    def latencies(self) -> dict[str, Any]:
        """Histograms of deliveries and requests, for the metrics; also from another thread."""
        shard = self._shard
        return {"delivery": shard.delivery_times.facts(), "request": shard.request_times.facts()}

    @property
    def gauges(self) -> dict[str, int]:
        """Counts of objects that come and go, by name, for the metrics."""
        return {
            "links": len(self._links),
            "streams": len(self._catalogue),
            "subscriptions": self._subscriptions.count,
            "producers": len(self._producers),
            "hot_bytes": self._delivery.hot_bytes,
            "late_bytes": self._delivery.late_bytes,
            "unsettled_bytes": self._publishing.unsettled_bytes + self._steps.unsettled_bytes,
            "reads_under_way": self._on_demand.turns.reads_under_way,
            "queries_under_way": self._shard.questions,
            **self._bodies.gauges,
            **self._mail.gauges,
            **self._services.gauges,
            **self._cursors.gauges,
            **self._groups.gauges,
            **self._transactions.gauges,
        }

    # --- from the peers ---------------------------------------------------------------------

    def receive(
        self,
        link: int,
        identity: str,
        commands: Sequence[Command],
        frames: Sequence[Any],
        now_ms: int,
    ) -> None:
        """Handle one message of a peer: commands, and the content frames that they own.

        link: number of the link, by the shell. identity: the credential of its connection. Nothing
        is raised: an error that the message causes ends its link.
        """
        shard = self._shard
        shard.advance(now_ms)
        peer = self._links.table.get(link)
        if peer is None:
            peer = self._links.heard(link, identity)
        else:
            peer.heard_ms = shard.now_ms
        reception = self._reception
        if reception.acks:  # Acknowledgements of earlier messages that were put off.
            reception.take_acks()
        if peer is not None:
            try:
                reception.receive(peer, commands, frames)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                reception.failed(peer, reception.handling, error)
        # What was read and validated ahead was of the frames of this message.
        if shard.contents:
            shard.was_read(())
        if shard.verdicts:
            shard.verdicts = {}
        if self._links.ended:
            self._forget_ended_links()

    def came_from(self, link: int, address: str, now_ms: int) -> None:
        """Note the address of a peer before its first message.

        The peer has no credential: its quotas and rates count for the address.
        """
        self._shard.advance(now_ms)
        peer = self._links.heard(link, "")
        if peer is not None:
            peer.address = address

    def reconfigure(
        self, settings: BrokerSettings, ending: Callable[[str, str], tuple[str, str] | None]
    ) -> None:
        """Go on with other settings, which the shell has read anew; links may end by them.

        settings: they differ in what is read whenever it is needed, and so takes effect at once.
        ending: (credential, owner) -> code and reason with which such links end; None: they stay.
        """
        self._shard.settings = settings
        self._shard.quotas.renew()
        for link in list(self._links):
            end = ending(link.credential, link.owner)
            if end is not None:
                self._links.close(link, "revoked", *end)
        self._forget_ended_links()

    def reloaded(self, link: int, request: int, value: dict[str, Any]) -> None:
        """Answer a RELOAD_CONFIG of a link."""
        self._administration.reloaded(link, request, value)

    def failed(self, link: int, doing: str, error: Exception, now_ms: int) -> None:
        """End the link of a peer whose message the shell could not handle or send."""
        self._shard.advance(now_ms)
        peer = self._links.get(link)
        if peer is not None:
            self._links.fail(peer, doing, error)
        else:
            self._shard.erred(doing, error, link=link)
        self._forget_ended_links()

    def malformed(self, link: int, code: str, reason: str, now_ms: int) -> None:
        """End the link of a peer whose message could not be decoded."""
        self._shard.advance(now_ms)
        self._reception.take_acks()  # They were put off, and came before.
        peer = self._links.get(link)
        if peer is None:  # It was the first message: a link is made, to be told why it ends.
            peer = self._links.heard(link, "")
        if peer is not None:
            self._reception.malformed(peer, code, reason)
        self._forget_ended_links()

    def link_lost(self, link: int, now_ms: int) -> int:
        """Forget a link whose peer the transport has lost; returns bytes as Links.lost() does."""
        self._shard.advance(now_ms)
        self._reception.take_acks()  # They were put off, and came before.
        unread_bytes = self._links.lost(link)
        self._forget_ended_links()
        return unread_bytes

    def blocked(self, link: int) -> None:
        """Note that the transport did not take all for a peer; the shell keeps the rest."""
        peer = self._links.get(link)
        if peer is not None:
            self._links.block(peer)

    def writable(self, link: int) -> None:
        """Note that the transport has taken all that it had refused for a peer."""
        peer = self._links.get(link)
        if peer is not None:
            self._links.unblock(peer)

    def drain(self, now_ms: int) -> None:
        """End every link with a BYE `draining`, before the broker stops."""
        self._shard.advance(now_ms)
        self._reception.take_acks()
        self._delivery.finish()
        for link in list(self._links):
            self._links.close(link, "draining", "draining", "the broker is about to stop")
        self._forget_ended_links()

    def _when_ring_visible(self, ring: RingState, lsn: int, settlement: Settlement) -> None:
        """Have `settlement` called once a ring is visible up to an LSN, or never will be."""
        self._publishing.when_visible(ring, lsn, settlement)

    def _when_visible(self, lsn: int, settlement: Settlement) -> None:
        """Have `settlement` called once ring main is visible up to an LSN, or never will be."""
        self._publishing.when_visible(self._catalogue.rings[MAIN], lsn, settlement)

    def _forget_ended_links(self) -> None:
        """Forget receivers and temporary mailboxes of ended links; no handler uses them now."""
        ended = self._links.ended
        while ended:
            link = ended.pop()
            self._links.forget_receivers(link)
            self._mail.link_ended(link)

    # --- from the journal -----------------------------------------------------------------------

    def appended(self, answer: Appended) -> None:
        """Take the answer that the journal has a bundle: of a step, of copies, or of publishes."""
        if self._steps.owns(answer.token):
            self._steps.appended(answer)
        elif answer.token in self._compaction.handed:
            self._compaction.appended(answer)
        else:
            self._publishing.appended(answer)

    def append_refused(self, answer: AppendRefused) -> None:
        """Take the answer that the journal refused a bundle, and later ones of its ring."""
        if self._steps.owns(answer.token):
            self._steps.refused(answer)
        elif answer.token in self._compaction.handed:
            ring = self._compaction.refused(answer)
            self._publishing.spared.add(ring)  # Clients' batches after the copies come again.
        else:
            self._publishing.refused(answer)

    def synced(self, ring: str, lsn: int, now_ms: int) -> None:
        """Take the news that all of a ring before `lsn` is on stable storage."""
        self._shard.advance(now_ms)
        state = self._catalogue.rings.get(ring)
        if state is not None:
            self._publishing.visible(state, lsn)

    def hurries(self, ring: str) -> bool:
        """Whether a peer waits for the sync of a ring, which the shell then does not put off."""
        state = self._catalogue.rings.get(ring)
        return state is None or state.awaited > state.visible

    def ring_failed(self, ring: str, code: str, reason: str) -> None:
        """Take the journal's news that a ring takes nothing more: what waits for it is refused."""
        state = self._catalogue.rings.get(ring)
        if state is not None:
            self._shard.event("ring_failed", "error", ring=ring, code=code, reason=reason)
            self._publishing.ring_failed(state, code, reason)
            if ring == MAIN:
                self._steps.ring_failed(code, reason)

    def pressed(self, on: bool) -> None:
        """Note whether ring main is nearly full (on): then only what frees room there is taken."""
        self._steps.pressed = on

    def history(self, answer: HistoryRead | ReadFailed) -> None:
        """Take the answer to a read of history."""
        if self._groups.reader.history(answer):
            pass  # A group had asked for it.
        elif isinstance(answer, ReadFailed):
            self._on_demand.failed(answer)
        else:
            self._on_demand.history(answer)
        self._forget_ended_links()

    def bodies(self, answer: BodiesFound) -> None:
        """Take the answer to a read of batches of the mail stream."""
        self._bodies.found(answer)
        self._forget_ended_links()

    def answered(self, answer: IndexAnswer) -> None:
        """Take the answer to a question to the index."""
        self._shard.answered(answer.token, answer.value)

    def trimmed(self, ring: str, firsts: Mapping[int, int]) -> None:
        """Take the news that a ring no longer has the records before these offsets.

        Called after the journal has trimmed, or given a segment back. firsts: number of a stream ->
        its first offset now. Readers that stand before it are told of a gap.
        """
        for number, first in firsts.items():
            stream = self._catalogue.by_number(number)
            if stream is not None and stream.ring.name == ring and first > stream.first:
                if not stream.settings.ring_bytes:  # Others overwrote it in the ring they share.
                    self._retention.overwritten(stream, first)
                stream.first = min(first, stream.next)
                stream.ledger.trimmed(first)
                self._delivery.forget(stream, first)
                self._cursors.trimmed(stream)
                self._groups.trimmed(stream)

    def _apply(self, change: Change, end_lsn: int) -> None:
        """Let an appended change of the log take effect: in the tables, then in what follows them.

        Called by Steps for each change. end_lsn: end of the bundle that the change lies in.
        """
        removed = self._catalogue.apply(change, end_lsn)
        self.ahead_bytes = self._validation.ahead_bytes  # A setting of a stream may change it.
        if isinstance(change, ProducerOpened):
            row = self._catalogue.tables.producers.get(change.id)
            if row is not None:
                self._producers.opened(row.id, row.identity, row.epoch)
        elif isinstance(change, ProducersForgotten):
            self._producers.forgotten(change.ids)
        elif isinstance(change, StreamEdited):
            stream = self._catalogue.take_declared(change)
            if stream is not None:
                number, message = next(reversed(stream.schemas.items()))
                self._subscriptions.schema_changed(stream, number, message)
                self._groups.schema_changed(stream, number, message)
        elif isinstance(change, StreamRemoved) and removed is not None:
            self._producers.stream_removed(removed.number)
            self._subscriptions.stream_removed(removed)
            self._cursors.stream_removed(removed)
            self._groups.stream_removed(removed)
            self._delivery.forget(removed, removed.next)
            if not removed.settings.ring_bytes:
                self._retention.trims.append((removed.ring.name, removed.number, removed.next))

    # --- time -------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Do what is due by the time of wake_at_ms(): heartbeats, expiry, retention, matching."""
        self._shard.advance(now_ms)
        self._matching.refill()
        self._delivery.refill()
        self._ahead.unread = False
        for link in self._links.beat():  # Links whose heartbeat is due.
            if not link.blocked:
                # Readers are told how far the stream was looked through for them.
                self._delivery.cover_all(link)
            self._links.keep_alive(link)
        if self._catalogue.bounded:
            self._retention.tick(self._catalogue.bounded)
        for part in (self._mail, self._services, self._cursors):
            part.tick()
        self._groups.timers.run(self._shard.now_ms)
        self._forget_ended_links()

    # --- out --------------------------------------------------------------------------------

    def take_ready(self) -> Ready:
        """Do a share of what can be done at once; return all that is to be done now.

        Each bundle is answered before the next call.
        """
        self._work()
        return self.take_outgoing()

    @property
    def has_work(self) -> bool:
        """Whether take_ready() does work for readers and queues before it returns."""
        return any(self._queues)

    def take_outgoing(self) -> Ready:
        """Return what is to be done now, without _work(): what peers wait for goes first."""
        shard, on_demand, groups = self._shard, self._on_demand.turns, self._groups.reader.turns
        links, steps, delivery = self._links, self._steps, self._delivery
        acks = self._reception.acks
        if acks and steps.idle and not links.dirty and not self._services.runnable:
            # No client waits for these acknowledgements: they are taken when all else is done.
            self._reception.take_acks()
        if links.ended:
            self._forget_ended_links()
        # A call that would return nothing is left out: this is called several times a command.
        waits = self._publishing.queue or self._compaction.queue or not steps.idle
        appends = self._appends() if waits else []
        sends, closes = links.outgoing() if any(links.leaving) else ([], [])
        if delivery.given:
            delivery.sent()
        events, shard.events = shard.events, []
        # Rings, appends, sends, reads, queries, bodies, closes, trims, events.
        ready = Ready([], appends, sends, [], [], [], closes, [], events)
        # What is wanted now and then takes no list where it is not wanted.
        if on_demand.reads or groups.reads:
            ready.reads = on_demand.reads + groups.reads
            on_demand.reads, groups.reads = [], []
        if shard.asking.waiting:
            ready.queries = shard.take_queries()
        if self._bodies.queue:
            ready.bodies = self._bodies.begin_reads()
        pins = self._cursors.pins
        if pins.changed:
            ready.pins, pins.changed = pins.changed, []
        if self._retention.trims:
            ready.trims, self._retention.trims = self._retention.trims, []
        if self._catalogue.openings:
            ready.rings, self._catalogue.openings = self._catalogue.openings, []
        if self._validation.checks:
            ready.checks, self._validation.checks = self._validation.checks, []
        return ready

    def _work(self) -> None:
        """Do a bounded share of what can be done at once: each kind of serving has a turn."""
        while fallen := self._delivery.fallen:  # Subscriptions that are not live any more.
            self._lagging.consider(fallen.popleft())
        if self._delivery.waiting:
            self._delivery.give_waiting()
        if self._on_demand.turns.runnable:
            self._on_demand.serve()
        if self._groups.reader.turns.runnable:
            self._groups.reader.serve()
        if self._services.runnable:
            self._services.hand_out()
        if self._mail.runnable:
            self._mail.deliver()
        if self._pages.queue.waiting:
            self._pages.work()
        if self._matching.queue or self._matching.remains.parts:
            # Matching comes last: readers whose batch is matched are served in the next turn.
            self._matching.work()

    def _appends(self) -> list[AppendBundle]:
        """Return the bundles for the journal: ring main's together, urgent changes first."""
        published = self._publishing.take()
        if self._compaction.queue:
            # Before what is published: a record that replaces another lies after its copy.
            published = [*self._compaction.take(), *published]
        if self._steps.idle:
            return published
        # urgent: settles the kind of a stream's bodies, before the first batch of the stream.
        urgent, last = self._steps.hand_over()
        if not urgent and not last:
            return published
        main = [bundle for bundle in published if bundle.ring == MAIN]
        others = [bundle for bundle in published if bundle.ring != MAIN]
        # Bundles of one ring stand together, in the order in which their offsets were given.
        return [*urgent, *main, *last, *others]

    def wake_at_ms(self) -> int | None:
        """When to call tick() at the latest; not after now when more can be done at once.

        The shell asks this after it has sent the messages of a Ready, which need not wait until it
        is known. Where bundles were answered since, there is more to be done anyway.
        """
        mail, services, groups = self._mail, self._services, self._groups
        if self._reception.acks or self._ahead.unread or self._links.ended or not self._steps.idle:
            return self._shard.now_ms
        # A queue may have work that waits for an answer: the second question is of what can go on.
        if any(self._queues) and (
            any(self._delivery.queues) or self._on_demand.turns.runnable or mail.runnable
            or services.runnable or groups.reader.turns.runnable or self._matching.queue
            or self._matching.remains.parts or self._pages.queue
        ):  # fmt: skip
            return self._shard.now_ms
        wake = self._links.wake_at_ms
        if self._catalogue.bounded:
            due = self._retention.due_ms
            wake = due if wake is None else min(wake, due)
        for due_ms in (
            mail.due_ms, services.due_ms, groups.timers.due_ms, self._cursors.pins.due_ms
        ):  # fmt: skip
            if due_ms is not None and (wake is None or due_ms < wake):
                wake = due_ms
        return wake

    # --- over restarts ------------------------------------------------------------------------

    def snapshot(self, ring: str = "") -> list[bytes]:
        """Return the records from which a recovery of this ring begins, for a segment's start.

        The tables go into ring main, the sequences in a stream into the stream's own ring: a small
        ring must not carry the sequences of others. A producer's sequence in a stream tells which
        of its batches the stream has, so that none is taken twice. ring: its name; empty: the
        tables and the sequences of all streams, for a log that is not divided into rings.
        """
        runs_max = self._shard.settings.snapshot_batches_max
        here = self._catalogue.numbers_in(ring)
        sequences = [
            *self._producers.sequences(here, runs_max), *self._arrivals.sequences(here)
        ]  # fmt: skip
        if ring not in ("", MAIN):
            none = Tables()
            return encode_snapshot(PackedSnapshot(none, 0, sequences)) if sequences else []
        tables = self._catalogue.tables
        return encode_snapshot(PackedSnapshot(tables, self._steps.change_next, sequences))
