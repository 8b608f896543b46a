"""The loop: sockets in, core, journal, sockets out.

Owns the one thread that touches the sockets, the core and the rings' appends. The rule: a turn
takes a bounded burst from each socket without waiting, does what the core asks for in the order of
Ready, and asks for a sync; the more messages have gathered, the less each costs. A body is never
copied here: what was received as a frame is stored from and sent as that frame. Source:
docs/design.md (Speed; The core and its shell).
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from typing import Any

import zmq

from malamute_protocol.commands import Bye
from malamute_protocol.framing import encode_message
from malamute_protocol.limits import Limits
from malamute_py.broker.links.messages import COMMAND_BYTES_MAX, halves
from malamute_py.broker.ready import (
    MAIN,
    Appended,
    AppendRefused,
    BatchCheck,
    BatchChecked,
    BodiesFound,
    HistoryRead,
    IndexAnswer,
    ReadFailed,
    Send,
)
from malamute_py.config import Config
from malamute_py.events import LEVELS
from malamute_py.server.checkpointing.checkpoints import Checkpoints
from malamute_py.server.checkpointing.process import Checkpointed, CheckpointFailed
from malamute_py.server.collector import COMMANDS_A_LOOK, Collector
from malamute_py.server.connections.connection import Connection
from malamute_py.server.connections.guard import EVENTS_A_TURN, SUSPECT_MS, Guard
from malamute_py.server.connections.watchdog import Watchdog
from malamute_py.server.errors import ServerFailed
from malamute_py.server.inbound import Inbound
from malamute_py.server.journaling.journal_threads import RingEvent, Synced, SyncFailed, Trimmed
from malamute_py.server.pacing import Pacing
from malamute_py.server.parts import Core, Journaled
from malamute_py.server.peers import Peer, Peers, Unreachable
from malamute_py.server.reloading import Reread
from malamute_py.server.result_queue import Died, ResultQueue
from malamute_py.server.sockets import Listener
from malamute_py.telemetry import Limiter, Log, Refusals

_GRACE_MS = 500
"""How long an ended link's connection may take to read its BYE."""
_OFFENCES_MAX = 3
"""Links that one connection may lose by breaking the protocol before it is cut at once."""
_ORDERLY = frozenset({"closed", "draining", "silent", "fenced", "kicked", "replaced", "version"})
"""Reasons with which a link ends that are no offence."""
_STEPS_MAX = 64
"""Turns of Ready that are done without a look at the sockets."""
_BLOCKED_POLL_MS = 2
_POLL_MS_MAX = 60_000
_SYNC_MS = 2
"""Time for which a turn waits at most for the sync of what small messages sent."""
_REST_MS = 1_000
"""Time without a message after which the loop rests."""
_SKIPPED_MS = 1_000
"""Time between two turns, beyond the wait for messages, that counts for no silence of a peer."""


class Loop:
    """The sockets, core and rings of one shard, driven turn by turn."""

    def __init__(
        self,
        config: Config,
        *,
        core: Core,
        rings: Journaled,
        listeners: list[Listener],
        guard: Guard,
        results: ResultQueue,
        limits: Limits,
        clock: Callable[[], int],
        log: Log,
        counters: defaultdict[str, int],
        meter: Callable[[], int],
        worked: Callable[[], int],
        watchdog: Watchdog,
        validate: Callable[[BatchCheck], None],
        reloaded: Callable[[Any, int], None],
        checkpoints: Checkpoints | None = None,
        collector: Collector | None = None,
    ) -> None:
        """Take the parts that the loop drives; no other thread uses them, except for `results`.

        results: the queue in which other threads and processes leave what they have done. clock:
        milliseconds since 1970. meter: nanoseconds from any beginning. worked: nanoseconds of a
        processor that this thread has used. validate: has a typed batch checked by a thread, whose
        outcome comes with the results. reloaded: called with a Reread (a configuration that was
        read anew) and the time. checkpoints: None: no tables are written, as the journal is in
        memory or the queues are lost. collector: None: Python itself decides when to collect.
        """
        self._collector = collector
        self._reloaded = reloaded
        self._validate = validate
        self._checkpoints = checkpoints
        self._core = core
        self._rings = rings
        self._listeners = listeners
        self._guard = guard
        self._watchdog = watchdog
        self._results = results
        self._clock = clock
        self._log = log
        self._limiter = Limiter()
        self._refused_appends = Refusals()
        self._counters = counters
        self._peers = Peers(guard.connections)
        self._inbound = Inbound(
            config, core=core, guard=guard, peers=self._peers, limits=limits, counters=counters,
            meter=meter, report=self.report,
        )  # fmt: skip
        self._meter = meter
        self._pacing = Pacing(config.loop.turn_us, worked)
        self._turn_until = sys.maxsize
        self._turns = 0
        self._guard_ms = config.loop.guard_ms
        self._pending_bytes_max = config.links.pending_bytes_max
        self._poller = zmq.Poller()
        self._poller.register(results.fd, zmq.POLLIN)
        for listener in listeners:
            self._poller.register(listener.socket, zmq.POLLIN)
            if listener.monitor is not None:
                self._poller.register(listener.monitor, zmq.POLLIN)
        self._wake_at_ms: int | None = 0
        self._now_ms = sys.maxsize
        """Time of the last turn; before the first there is none."""
        self._guard_at_ms = 0
        """Time of the next check of the connections."""
        self._waiting: dict[int, Peer] = {}
        """Link -> peer for whom messages are held because its socket was full."""
        self._drained_ms = 0
        """Time of the last look at the connections after a drain, made once a second at least."""
        self._active_ms = 0
        """Time at which the last message came."""
        self._graces: list[tuple[int, Connection]] = []
        """(time, connection that is cut off then): until then its peer may leave by itself."""
        self._offences: defaultdict[int, Counter[bytes]] = defaultdict(Counter)
        """Links that ended by an offence: inode of the connection -> routing id -> how many. An id
        is one connection's. A descriptor may be another's by the time its inode is asked for."""
        self._busy = False
        """The next turn begins at once, as work is left."""
        self._finishing = False
        """The broker ends in order: the core does all that is left."""
        self._awaits_syncs = True
        """Whether a sync is worth a wait: False after one in vain, until a sync ends."""
        self._told_of_loss = False
        """True: in the middle of a Ready the core was told that a link is lost."""

    def facts(self) -> dict[str, Any]:
        """For BROKER_INFO and metrics."""
        return {
            "longest_turn_us": self._pacing.longest_us,
            "blocked_links": len(self._waiting),
            "refusing": self._refused_appends.last(self._clock()),
        }

    @property
    def peers(self) -> Peers:
        """The links as the shell sees them."""
        return self._peers

    # --- one pass ------------------------------------------------------------------

    def turn(self) -> None:
        """Wait for something to happen and do all that follows from it, once.

        In this order: messages are taken up; what came in small ones is settled, and a share of the
        others done; results of threads are given to the core, connections looked at, and the core's
        Ready is done (settle()); then what no peer waits for. What was appended is synced last.
        """
        timeout = 0 if self._busy else self._timeout(self._clock())
        ready = dict(self._poller.poll(timeout))
        # The watchdog sees the number of the turn: no message is taken up until it ends.
        self._turns += 1
        self._watchdog.turn = self._turns
        now_ms = self._clock()
        # A clock was set forward, the machine slept, or the process was stopped: no peer was heard.
        skipped_ms = now_ms - self._now_ms - timeout
        self._now_ms = now_ms
        if skipped_ms > _SKIPPED_MS:
            self._core.skipped(skipped_ms, now_ms)
        inbound, pacing = self._inbound, self._pacing
        pacing.began_ns = began = self._meter()
        inbound.begin(pacing, began)
        self._turn_until = began + pacing.turn_ns
        drained = local_drained = True  # the sockets, or those of local peers, are read empty
        commands, behind = inbound.commands, bool(inbound.queued)
        for listener in self._listeners:
            # Its monitor tells which connections came and went, before their messages are taken up.
            if listener.monitor is not None and listener.monitor in ready:
                inbound.ended += self._guard.drain(
                    listener.monitor, now_ms, EVENTS_A_TURN, authenticated=listener.authenticated
                )
                if listener.numbering is not None:
                    listener.numbering.ask(now_ms)
            has_messages = listener.socket in ready or listener in inbound.held
            if has_messages and not inbound.drain(listener, now_ms):
                drained = False
                local_drained = local_drained and not listener.is_local
        if drained and inbound.ended:
            # A connection that ended since the poll may have left its last messages after it.
            for listener in self._listeners:
                if not inbound.drain(listener, now_ms):
                    drained = False
                    local_drained = local_drained and not listener.is_local
        # Processor time at which the work begins and ends that messages cause; None: with the turn.
        work_began = work_ended = 0 if inbound.queued else None
        read, given, shared = drained, inbound.commands - commands, 0
        if inbound.queued:
            if given:
                work_began = pacing.worked()
                self.settle(now_ms)
                self.sync(now_ms)
                work_ended = pacing.worked()
                if behind and self._awaits_syncs:
                    self._await_syncs()
            shared = inbound.catch_up(now_ms, small=given > 0)
            read, drained = drained and not inbound.queued, False  # Others may have come since.
        elif given > 1:  # A lone message is not worth the question.
            work_began = pacing.worked()
        # After the messages: what was synced while they were taken up is confirmed in this turn.
        if self._results.fd in ready or self._results.waiting:
            self._take_results(now_ms)
        self._busy = not drained or bool(inbound.queued)
        # Under a load that never ends, each peer still had its turn within a second, so that a
        # message that is partial then is truly partial.
        if read and now_ms < self._guard_at_ms and not inbound.ended and not inbound.cut_off:
            self._drained_ms = now_ms  # Nothing came or went: most turns.
        elif read or now_ms - self._drained_ms > 1000:
            self._after_drain(now_ms, read, drained, local_drained)
        elif now_ms >= self._guard_at_ms and self._guard_is_due(now_ms):
            # What a connection sent that ended by itself is still taken up before its loss is told.
            inbound.ended += self._watch(now_ms, drained=False, local_drained=local_drained)
        if self._wake_at_ms is not None and now_ms >= self._wake_at_ms:
            self._core.tick(now_ms)
        self.settle(now_ms)
        # After the messages: no peer that waits for one waits for this.
        if self._checkpoints is not None:
            self._checkpoints.tick(now_ms)
        if self._waiting:
            self._retry(now_ms)
        if self._peers.freeing:
            self._peers.free()
            self._busy = True
        if ready:
            self._active_ms = now_ms
        if self._collector is not None:
            if inbound.commands >= COMMANDS_A_LOOK:
                inbound.commands = 0
                self._collector.look()
            if now_ms - self._active_ms >= _REST_MS:
                self._collector.rest(now_ms)
        long_us = pacing.end(work_began, work_ended, given, shared, inbound.aside)
        if long_us:
            self._counters["long_turns_total"] += 1
            self._event("long_turn", "warning", {"ms": long_us // 1_000}, now_ms)
        self._watchdog.turn = 0
        if self._watchdog.holds:
            self._release(now_ms)
        # The thread that syncs asks for the interpreter, which the loop gives up when it waits.
        self.sync(now_ms)

    def _release(self, now_ms: int) -> None:
        """Let connections go on that the watchdog held back during the turn, and report them."""
        count = self._watchdog.release()
        self._counters["connections_held_total"] += count
        self._event("connections_held", "warning", {"connections": count}, now_ms)
        error, self._watchdog.error = self._watchdog.error, None
        if error is not None:
            facts = {"doing": "holding floods back", "error": error}
            self._event("internal_error", "error", facts, now_ms)

    def _await_syncs(self) -> None:
        """Wait a little for syncs that are under way, and send the confirms that they allow.

        Called before shares of large messages are done, which would keep a processor busy: the
        thread that syncs gets one at once while the loop is idle.
        """
        began = now = self._meter()
        until = began + _SYNC_MS * 1_000_000
        while self._rings.syncs_due > 0 and now < until:
            if self._results.wait((until - now) / 1_000_000):
                self._take_results(self._now_ms)
                self.settle(self._now_ms)
                self.sync(self._now_ms)
            now = self._meter()
        self._awaits_syncs = self._rings.syncs_due == 0
        # The wait takes no time from the shares, nor from what follows them.
        self._inbound.until += now - began
        self._turn_until += now - began

    def _timeout(self, now_ms: int) -> int:
        """Return how many milliseconds the loop may sleep at most."""
        at_ms = self._guard_at_ms
        for due_ms in self._wake_at_ms, self._rings.sync_at_ms:
            if due_ms is not None and due_ms < at_ms:
                at_ms = due_ms
        if self._waiting:
            at_ms = min(at_ms, now_ms + _BLOCKED_POLL_MS)
        # A clock before 1970, for example, would ask for more than poll() can count.
        return max(0, min(at_ms - now_ms, _POLL_MS_MAX))

    def _after_drain(self, now_ms: int, read: bool, drained: bool, local_drained: bool) -> None:
        """Tell the core of connections that ended, and have the guard look at others if it is due.

        After all messages were taken up, so that the core has the last ones of a link before its
        loss. read: False: they were not; under a load that never ends it is done once a second.
        drained, local_drained: as for _watch().
        """
        self._drained_ms = now_ms
        if drained and self._inbound.cut_off:
            self._inbound.cut_off.clear()
        ended, self._inbound.ended = self._inbound.ended, []
        for connection in ended:
            self._lost(connection, now_ms)
        if now_ms < self._guard_at_ms or not self._guard_is_due(now_ms):
            return
        ended = self._watch(now_ms, drained, local_drained)
        if read and ended:
            # What they sent last may have come since the sockets were read: the next turn reads it.
            self._inbound.ended += ended
            self._busy = True
        else:
            for connection in ended:
                self._lost(connection, now_ms)
        while self._graces:  # connections whose link has ended: _goodbye()
            due_ms, connection = self._graces[0]
            if due_ms > now_ms:
                break
            del self._graces[0]
            if not connection.links:
                self._cut(connection, "its link ended")
        for name, count in self._limiter.suppressed(now_ms).items():
            self._log.warning("log_lines_suppressed", name=name, count=count)
        for ring, code, count in self._refused_appends.counts(now_ms):
            self._log.warning("appends_still_refused", ring=ring, code=code, count=count)

    def _guard_is_due(self, now_ms: int) -> bool:
        """Whether the guard looks at connections, as is due: calm suspects may wait once more."""
        if self._guard.suspects and self._guard.is_calm(now_ms):
            self._guard_at_ms = now_ms + SUSPECT_MS
            return False
        return True

    def _watch(self, now_ms: int, drained: bool, local_drained: bool) -> list[Connection]:
        """Have the guard look at connections; returns ended ones whose loss is still to be told.

        drained: the sockets have been read until they had nothing more. local_drained: those of
        local peers have.
        """
        ended = self._guard.check(now_ms, drained=drained, local_drained=local_drained)
        untold: list[Connection] = []
        # Local peers that may fill the memory are sent a PING: the silent ones are cut then.
        doubted, self._guard.local.doubted = self._guard.local.doubted, []
        for connection in doubted:
            self._peers.ask(connection.links)
        for connection in ended:
            if connection.error is not None:  # our own, met while the guard judged it
                link = min(connection.links, default=0)
                self._core.failed(link, "guarding", connection.error, now_ms)
            if connection.is_cut and self._peers.are_numbered(connection.links):
                # Its messages are dropped from here on: to take them up first would copy all that
                # filled the memory, for a link that is over.
                self._lost(connection, now_ms)
            else:
                untold.append(connection)
        soon = self._guard.suspects
        self._guard_at_ms = now_ms + (SUSPECT_MS if soon else self._guard_ms)
        return untold

    def _lost(self, connection: Connection, now_ms: int) -> None:
        """Tell the core that the links of an ended connection are lost."""
        for number in list(connection.links):
            peer = self._peers.get(number)
            if peer is not None:
                self._gone(peer, now_ms)
        self._offences.pop(connection.inode, None)

    def _gone(self, peer: Peer, now_ms: int) -> None:
        """Tell the core that a peer's connection is lost; its last messages may still come."""
        self._inbound.note_lost(peer)
        self._guard.memory.note_freed(self._core.link_lost(peer.number, now_ms))

    def _unreached(self, peer: Peer, now_ms: int) -> bool:
        """Tell the core that libzmq has no such peer any more; False: the core is told later.

        Later where the guard has the connection: the guard will be told of its end, and the core
        then learns of it after the peer's last messages, among which may be a goodbye.
        """
        connection = peer.connection
        if connection is not None and (
            self._guard.connections.get(connection.fd) is connection
            or connection in self._inbound.ended
        ):
            return False
        self._gone(peer, now_ms)
        return True

    def _take_results(self, now_ms: int) -> None:
        """Give what threads and processes have done since the last turn to who asked for it.

        Raises ServerFailed when a thread has ended by a bug: the daemon then stops.
        """
        core = self._core
        for result in self._results.take():
            kind = type(result)
            if kind is Synced:
                core.synced(result.ring, result.lsn, now_ms)
                self._rings.sync_ended(result.ring, result.lsn)
                self._awaits_syncs = True
                if self._checkpoints is not None and result.ring == MAIN:
                    self._checkpoints.synced(result.lsn)
            elif kind is HistoryRead or kind is ReadFailed:
                core.history(result)
            elif kind is IndexAnswer:
                core.answered(result)
            elif kind is BodiesFound:
                core.bodies(result)
            elif kind is BatchChecked:
                self._inbound.validated(core.checked(result))
            elif kind is Checkpointed or kind is CheckpointFailed:
                if self._checkpoints is not None:
                    self._checkpoints.take(result, now_ms)
            elif kind is Trimmed:
                core.trimmed(result.ring, result.first_offsets)
            elif kind is RingEvent:
                self._counters[f"{result.name}_total"] += 1
                facts = {"ring": result.ring, **result.facts}
                self._event(result.name, LEVELS[result.name], facts, now_ms)
            elif kind is Reread:
                self._reloaded(result, now_ms)
            elif kind is SyncFailed:
                self._log.critical(
                    "ring_failed", ring=result.ring, code=result.code, reason=result.reason
                )
                core.ring_failed(result.ring, result.code, result.reason)
                self._rings.sync_ended(result.ring, 0)
                self._awaits_syncs = True
            elif kind is Died:
                self._log.critical("thread_died", thread=result.thread, trace=result.trace)
                raise ServerFailed(
                    f"the {result.thread} thread met a bug: {result.error!r}"
                ) from result.error
            else:
                raise AssertionError(f"no part of the loop expects {kind}")

    # --- what the core wants ---------------------------------------------------------

    def settle(self, now_ms: int) -> None:
        """Do what the core's Ready asks for until it asks for nothing; sync() comes after it.

        What the core is told of it (that a batch was appended, say) may make it want more at once.
        A turn whose time is over leaves the rest to the next one.
        """
        core, rings, pacing = self._core, self._rings, self._pacing
        for step in range(_STEPS_MAX):
            if (has_work := core.has_work) and step == 1:
                # The disk works meanwhile. Without other work it has to wait: its thread would ask
                # for the interpreter while the loop still has a little to do.
                self.sync(now_ms)
            if has_work and (step or not pacing.work_waits):
                began = self._meter()
                ready = core.take_ready()
                pacing.note_work(began, self._meter())
            else:
                ready = core.take_outgoing()
            for name, settings in ready.rings:
                rings.open(name, settings)
                if settings.get("remove"):
                    self._refused_appends.ends(name)
            if ready.appends:
                answers = rings.append(ready.appends)
                for answer, bundle in zip(answers, ready.appends, strict=True):
                    if isinstance(answer, Appended):
                        self._taken(bundle.ring, now_ms)
                        core.appended(answer)
                    else:
                        self._refused(bundle.ring, answer, now_ms)
                        core.append_refused(answer)
            for send in ready.sends:
                self._send(send, now_ms)
            for read in ready.reads:
                rings.read(read)
            for query in ready.queries:
                rings.ask(query)
            for wanted in ready.bodies:
                rings.read_bodies(wanted)
            for check in ready.checks:
                self._validate(check)
            for pin in ready.pins:
                rings.pin(*pin)
            for number in ready.closes:
                self._close(number)
            for trim in ready.trims:
                rings.trim(*trim)
            for event in ready.events:
                self._event(event.name, event.level, event.facts, now_ms)
            # Answers that the core was given meanwhile may have it want something new at once.
            told, self._told_of_loss = bool(ready.appends) or self._told_of_loss, False
            if not told:
                self._wake_at_ms = at_ms = core.wake_at_ms()
                if at_ms is None or at_ms > now_ms or (step and not ready):
                    break
            if step and self._meter() >= self._turn_until:
                # The rest has its next turn after other peers' messages.
                self._busy = True
                break
        else:
            self._busy = True
        if self._wake_at_ms is not None and self._wake_at_ms <= now_ms:
            self._busy = True

    def sync(self, now_ms: int) -> None:
        """Have synced what was appended; at the broker's end a peer waits for each ring's sync."""
        self._rings.sync((lambda ring: True) if self._finishing else self._core.hurries, now_ms)

    def _refused(self, ring: str, answer: AppendRefused, now_ms: int) -> None:
        """Count a refused append; the first of a kind is an event."""
        self._counters["appends_refused_total"] += 1
        if self._refused_appends.begins(ring, answer.code, now_ms):
            level = "info" if answer.code == "wait" else "error"  # wait: it passes by itself
            facts = {"ring": ring, "code": answer.code, "reason": answer.reason}
            self._event("append_refused", level, facts, now_ms)

    def _taken(self, ring: str, now_ms: int) -> None:
        """Report that a ring that had refused appends takes them again."""
        ended = self._refused_appends.ends(ring)
        if ended is not None:
            code, count = ended
            facts = {"ring": ring, "code": code, "count": count}
            self._event("appends_taken_again", "info", facts, now_ms)

    def report(self, name: str, facts: dict[str, Any]) -> None:
        """Log an event of another part of this thread; too many of one name are only counted."""
        self._event(name, LEVELS[name], facts, self._clock())

    def revoke(self, users: Container[str], now_ms: int) -> None:
        """End the connections of users whose credential counts no more, and silent ones.

        A connection that has sent nothing yet may have shown such a credential; an honest client of
        another user connects again.
        """
        for connection in self._guard.connections.all():
            if connection.user in users:
                connection.revoked = True
                self._graces.append((now_ms + _GRACE_MS, connection))  # time to read its BYE
        self._guard.cut_silent("users were removed, and it may be one of them")

    def _event(self, name: str, level: str, facts: dict[str, Any], now_ms: int) -> None:
        """Log an event, unless there are too many of its name; an error with its trace."""
        if self._limiter.allows(name, now_ms):
            error = facts.get("error")
            if isinstance(error, BaseException):
                trace = "".join(traceback.format_exception(error))
                facts = {**facts, "error": repr(error), "trace": trace}
            getattr(self._log, level)(name, **facts)

    # --- out -----------------------------------------------------------------------

    def _send(self, send: Send, now_ms: int) -> None:
        """Send one message of a Ready to its peer, or hold it if the socket takes no more now."""
        peer = self._peers.get(send.link)
        if peer is None:
            return  # its link ended meanwhile
        try:
            frames = encode_message(send.commands, send.frames)
            if len(frames[0]) > COMMAND_BYTES_MAX and (parts := halves(send)):
                for part in parts:
                    self._send(part, now_ms)
                return
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            # A number that no wire carries, for example: the message to this link is gone.
            self._core.failed(peer.number, "sending", error, now_ms)
            self._told_of_loss = True
            return
        counters = self._counters
        try:
            # Behind held messages, so that the order stays.
            if peer.pending or not peer.put(frames):
                self._hold(peer, frames, now_ms)
            counters["messages_out_total"] += 1
            for frame in send.frames:
                counters["content_bytes_out_total"] += len(frame)
        except Unreachable:
            if self._unreached(peer, now_ms):
                self._told_of_loss = True
        last = send.commands[-1]
        if isinstance(last, Bye) and peer.connection is not None:
            self._goodbye(peer, peer.connection, last.code, now_ms)

    def _hold(self, peer: Peer, frames: list[Any], now_ms: int) -> None:
        """Keep a message that the peer's socket did not take, for _retry(), and tell the core.

        A peer for which more than links.pending_bytes_max are kept is cut.
        """
        if not peer.pending:
            self._core.blocked(peer.number)  # the core gives it nothing more, until writable()
            self._waiting[peer.number] = peer
        peer.hold(frames, now_ms)
        if peer.pending_bytes > self._pending_bytes_max:
            self._counters["overflowed_total"] += 1
            self._gone(peer, now_ms)
            self._told_of_loss = True  # settle() then asks the core once more
            if peer.connection is not None:
                self._cut(peer.connection, "it does not read its messages")
            self._close(peer.number)

    def _retry(self, now_ms: int) -> None:
        """Send messages that are held for peers, where the time to try again has come."""
        for number, peer in list(self._waiting.items()):
            if self._peers.get(number) is not peer:
                del self._waiting[number]  # the link has ended
            elif peer.retry_at_ms <= now_ms:
                try:
                    if peer.flush(now_ms):
                        del self._waiting[number]
                        self._core.writable(number)
                        self._busy = True
                except Unreachable:
                    del self._waiting[number]
                    peer.pending.clear()
                    peer.pending_bytes = 0
                    if self._unreached(peer, now_ms):
                        self._busy = True

    def _goodbye(self, peer: Peer, connection: Connection, code: str, now_ms: int) -> None:
        """End the connection of an ended link, unless it opens another in time."""
        if code not in _ORDERLY:
            offences = self._offences[connection.inode]
            offences[peer.routing_id] += 1  # by id, as the inode may be another connection's
            if offences[peer.routing_id] >= _OFFENCES_MAX:
                self._cut(connection, "it broke the protocol again and again")
                return
        self._graces.append((now_ms + _GRACE_MS, connection))

    def _cut(self, connection: Connection, reason: str) -> None:
        """End a connection and forget its offences: the guard does not tell of this end again."""
        self._guard.cut(connection, reason)
        self._offences.pop(connection.inode, None)

    def _close(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._peers.remove(number)

    # --- the end -------------------------------------------------------------------

    def finish(self, drain_ms: int) -> int:
        """End the loop in order: confirm what was taken, say goodbye, and wait until that has left.

        drain_ms: for which it waits at most. Returns how many links did not take all of it by then.
        """
        until_ms = self._clock() + drain_ms
        self._finishing = True
        self._turn_until = sys.maxsize
        # All of it counts as one turn, in which no messages are taken up any more.
        self._turns += 1
        self._watchdog.turn = self._turns
        for listener in self._listeners:
            self._poller.unregister(listener.socket)
        self.settle(self._clock())
        self.sync(self._clock())
        while self._rings.syncing() and self._clock() < until_ms:
            self._wait()
        self._wait()  # The last answer may be on its way.
        now_ms = self._clock()
        self._core.drain(now_ms)  # a BYE for each link
        self.settle(now_ms)
        self.sync(now_ms)
        while self._waiting and self._clock() < until_ms:
            self._retry(self._clock())
            self._wait()
        self._watchdog.turn = 0
        if self._watchdog.holds:
            self._release(self._clock())
        return len(self._waiting)

    def abandon(self) -> None:
        """Tell every peer that can be told, after a bug, so that none waits for its expiry."""
        # The code is not `internal`, for which a client looks for the cause in what it sent itself.
        frames = encode_message([Bye("draining", "the broker met an error and stops")], ())
        for number in self._peers.numbers():
            peer = self._peers.get(number)
            if peer is not None:
                with contextlib.suppress(Unreachable, zmq.ZMQError):
                    peer.put(frames)

    def _wait(self) -> None:
        """Wait a few milliseconds for results of threads, when the loop is about to end."""
        ready = dict(self._poller.poll(5))
        now_ms = self._clock()
        if self._results.fd in ready:
            self._take_results(now_ms)
        self.settle(now_ms)
        self.sync(now_ms)
