"""The daemon: start, run, stop.

Owns the order in which the parts come up and go down. The rules: nothing listens before what is
stored was recovered; anything wrong at the start is one StartError or ConfigError that says what to
do, and leaves everything as it was; a stop first confirms what was taken, then says goodbye, then
closes the journal with a mark; a bug stops the daemon aloud. Source: docs/design.md (The core and
its shell; Journal; Safety).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import zmq

from malamute_py.broker import Broker, BrokerSettings
from malamute_py.broker.ready import MAIN, RecoveredState, RingFacts
from malamute_py.config import Config
from malamute_py.config_check import Examined
from malamute_py.form import form, version
from malamute_py.journal import FileStorage, JournalFailed, Storage
from malamute_py.journal.directory import Journal
from malamute_py.server.authentication.authenticator import Authenticator
from malamute_py.server.authentication.namespaces import check_namespaces, doubts
from malamute_py.server.authentication.permissions import permission_doubts
from malamute_py.server.authentication.users_file import credential_doubts
from malamute_py.server.checkpointing.checkpoints import Checkpoints
from malamute_py.server.checkpointing.recovered import QueuesFound, QueuesLost, find_queues
from malamute_py.server.clock import Clock
from malamute_py.server.collector import Collector
from malamute_py.server.connections.descriptors import (
    Room,
    backlog,
    counts_bytes,
    lowest_free,
    raise_open_files,
    room,
)
from malamute_py.server.connections.guard import Guard
from malamute_py.server.connections.watchdog import Watchdog
from malamute_py.server.core_settings import core_settings
from malamute_py.server.defaults import check_defaults
from malamute_py.server.errors import ServerFailed, StartError
from malamute_py.server.http_process import HttpCredential, HttpProcess, first_line
from malamute_py.server.journaling.rings import Rings
from malamute_py.server.loop import Loop
from malamute_py.server.rereading import Rereading
from malamute_py.server.result_queue import ResultQueue
from malamute_py.server.sockets import Endpoint, Listener, check_public, parse_endpoint
from malamute_py.server.stored_rings import StoredRings, open_journal
from malamute_py.server.supervisor import Supervisor
from malamute_py.server.validating import Validator
from malamute_py.store.bodies import StoredBodies
from malamute_py.store.database import DATABASE
from malamute_py.telemetry import Limiter, Log, open_log

EXIT_OK = 0
EXIT_BUG = 70
"""Exit code EX_SOFTWARE of sysexits.h, an internal software error: a supervisor starts the broker
again."""
_KEPT_BYTES = 4 << 20
_FILES_LATER = 16
_FILES_LISTENER = 8
"""Descriptors that the parts open after the guard begins, in all and for each listener."""
_SWITCH_S = 0.001
"""Interval after which a thread of Python has to let others run: the loop shares the lock with
threads that hand over results, and 5 ms would be added to a confirm."""


class Server:
    """One broker in this process."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        log: Log | None = None,
        storage: Storage | None = None,
        clock: Callable[[], int] | None = None,
        reread: Callable[[], Examined] | None = None,
    ) -> None:
        """Note what the broker is made of; start() makes and starts it.

        context: shared with clients in this process; None: one of its own. storage: instead of the
        data directory of the configuration. clock: milliseconds since 1970; None: the system's, see
        clock.py. reread: reads the configuration anew for a reload; None: only the users file is
        read anew.
        """
        config = config or Config()
        self.failure: BaseException | None = None
        """The error that stopped the broker, when that was not stop()."""
        self.log: Log = log or open_log(config.log.level, config.log.form)
        self._context = context
        self.rereading = Rereading(config, reread, self.log, lambda: self._stopping)
        self._storage = storage
        self._clock = Clock() if clock is None else clock
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._denials = Limiter()
        """Bounds the lines of the log that peers cause."""
        self._stopping = False
        self._parts = contextlib.ExitStack()
        """Calls that close what _open() made, the last first."""
        self._thread: threading.Thread | None = None
        self._listeners: list[Listener] = []
        self._started_ms = 0
        self._queues_lost = ""
        """Why mailboxes and services could not be recovered; empty: they were."""
        self._found: StoredRings
        self._results: ResultQueue
        self._rings: Rings
        self._core: Broker
        self._loop: Loop
        self._authenticator: Authenticator | None = None
        self._guard: Guard
        self._journal: Journal
        self._checkpoints: Checkpoints | None = None
        self._http: HttpProcess | None = None
        self._supervisor = Supervisor({})
        self._collector: Collector | None = None
        """None: the process is not the broker's own."""

    # --- life ------------------------------------------------------------------------

    def start(self) -> Self:
        """Open all and serve in a thread, within a program. Raises StartError, ConfigError."""
        self._open()
        self._announce()
        self._thread = threading.Thread(target=self._serve, name="malamute-loop", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the broker that start() began, in order. Raises ServerFailed if it had failed."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.failure is not None:
            raise ServerFailed(f"the broker had failed: {self.failure!r}") from self.failure

    def run(self) -> int:
        """Serve in this thread, the main one, until SIGTERM or SIGINT; returns the exit code.

        For the command `malamute broker`, whose process is the broker's own. SIGHUP has the
        configuration read anew. Raises StartError, ConfigError.
        """
        self._supervisor = Supervisor(os.environ)
        soft, hard = raise_open_files()
        self._collector = Collector()
        self._open()
        sys.setswitchinterval(_SWITCH_S)  # Python's own 5 ms would be added to confirms.
        self.log.info("open_files", limit=hard, before=soft)
        # A terminal that is closed sends SIGHUP: a broker in a terminal ends with it.
        in_terminal = sys.stdin is not None and sys.stdin.isatty()
        handlers = {
            signal.SIGTERM: self._on_signal,
            signal.SIGINT: self._on_signal,
            signal.SIGHUP: self._on_signal if in_terminal else self.rereading.on_signal,
        }
        before = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # glibc gives a freed block back to the system at once if it is larger than any freed before
        # (within bounds), and each batch would have its pages faulted in and cleared anew. One
        # block of this size, made and freed here, has smaller ones kept.
        bytes(_KEPT_BYTES)
        self._collector.begin()
        # A program that reads that the broker listens may end it at once: the handler is there by
        # then.
        self._announce()
        try:
            self._serve()
        finally:
            for number, former in before.items():
                signal.signal(number, former)
        return EXIT_OK if self.failure is None else EXIT_BUG

    def request_stop(self) -> None:
        """Have the broker stop; from any thread, and from a signal handler."""
        self._stopping = True
        with contextlib.suppress(AttributeError):  # It was never opened.
            self._results.wake()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Have the broker stop in order at a signal, and end the process at a second one."""
        if self._stopping:
            # Asked twice: do not wait for any client. Everything confirmed is on disk.
            os._exit(128 + number)
        self.request_stop()

    def __enter__(self) -> Self:
        """Start the broker."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the broker."""
        self.stop()

    # --- facts -----------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """Return the configuration in force, without the users file."""
        return self.rereading.reading.config

    @property
    def endpoints(self) -> list[str]:
        """Return the endpoints where it listens, with the ports that were found for port 0."""
        return [listener.name for listener in self._listeners]

    @property
    def http_url(self) -> str:
        """Where the HTTP side serves; empty while it does not."""
        return self._http.url if self._http is not None else ""

    @property
    def public_key(self) -> str:
        """Return the public key that clients need for CURVE; empty without it."""
        return self._authenticator.public_key.decode() if self._authenticator else ""

    def metrics(self) -> dict[str, Any]:
        """Return counters and gauges by the names of deploy/metrics.md; from any thread."""
        facts = self._facts()
        return {"core": {**self._core.counters, **facts.pop("gauges")}, **facts}

    def _facts(self) -> dict[str, Any]:
        """Return the shell's part of the answer to BROKER_INFO; the core adds its own."""
        return {
            "endpoints": self.endpoints,
            "data": self._journal.storage.describe(),
            "uptime_ms": self._clock() - self._started_ms,
            "resident_bytes": self._guard.memory.rss,
            **self._loop.facts(),
            **self._guard.facts(),
            "gauges": self._gauges(),
            "shell": dict(self._counters),
            "disk": self._rings.facts(),
            **self._disk_facts(),
            "damage": self._found.damage,
            "bounds": self._bounds(),
            "latency": {**self._rings.latencies.facts(), **self._core.latencies},
            **self._checkpoint_facts(),
            **({} if self._collector is None else self._collector.facts()),
        }

    def _core_settings(self, config: Config) -> BrokerSettings:
        """Return the core's settings by a configuration, with the calls by which it asks us."""
        return core_settings(config, self.rereading.request, self._facts, self.rereading.told)

    def _gauges(self) -> dict[str, int]:
        """Return the core's gauges; also from a thread beside the loop."""
        while True:
            try:
                return self._core.gauges
            except RuntimeError:  # Something came or went while it was counted.
                continue

    def _disk_facts(self) -> dict[str, int]:
        free_bytes = None if self._directory is None else self._rings.free_bytes
        return {} if free_bytes is None else {"disk_free_bytes": free_bytes}

    def _bounds(self) -> dict[str, int]:
        """Return the bound of what each gauge of the same name counts, for BROKER_INFO."""
        config = self.config
        return {
            "links": config.links.links_max,
            "connections": self._guard.connections.most,
            "unread_bytes": config.limits.unread_bytes_max,
            "streams": config.streams.streams_max,
            "rings": config.streams.rings_max,
            "subscriptions": config.streams.subscriptions_max,
            "producers": config.streams.producers_max,
            "mailboxes": config.mailboxes.mailboxes_max,
            "mail_bytes": config.mailboxes.all_bytes_max,
            "mail_memory_bytes": config.mailboxes.memory_bytes_max,
            "services": config.services.services_max,
            "request_bytes": config.services.all_bytes_max,
            "offers": config.services.offers_max,
            "cursors": config.groups.cursors_max,
            "groups": config.groups.groups_max,
            "transactions": config.transactions.transactions_max,
            "staged_bytes": config.transactions.all_bytes_max,
        }

    def _checkpoint_facts(self) -> dict[str, Any]:
        """Return facts about the tables; none where the data is in memory, which has no tables."""
        checkpoints = self._checkpoints
        if checkpoints is None and self._queues_lost:
            return {"checkpoint": {"lost": True, "reason": self._queues_lost}}
        return {} if checkpoints is None else {"checkpoint": {"lost": False, **checkpoints.facts()}}

    # --- opening ---------------------------------------------------------------------

    def _check_counts(self, endpoints: list[Endpoint]) -> None:
        """Refuse public endpoints on a kernel that does not count a connection's received bytes.

        Without the count the guard cannot see how much memory a peer fills. Raises StartError for
        an endpoint that other machines can reach; else the log has a warning.
        """
        if not any(endpoint.transport == "tcp" for endpoint in endpoints) or counts_bytes():
            return
        for endpoint in endpoints:
            if endpoint.is_public:
                raise StartError(
                    "this kernel does not count the bytes of a connection, so that one peer could "
                    "fill the memory",
                    endpoint.text,
                    "use Linux 4.1 or later, outside of a sandbox, or listen on 127.0.0.1",
                )
        self.log.warning(
            "bytes_uncounted",
            do="any client of this machine can fill the memory: use Linux 4.1 or later",
        )

    def _open(self) -> None:
        """Open and start every part, in order; a part that fails closes those before it.

        Raises StartError, ConfigError.
        """
        # What the configuration alone tells.
        config, credential = self.rereading.first()
        endpoints = [parse_endpoint(text) for text in config.listen]
        check_public(endpoints, config)
        check_defaults(config)
        check_namespaces(config)
        for doubt in credential_doubts(config):
            self.log.warning("nobody_may_connect", key=doubt.key, reason=doubt.why)
        for doubt in doubts(config):
            self.log.warning("namespace_doubted", key=doubt.key, reason=doubt.why)
        for doubt in permission_doubts(config.permissions):
            self.log.warning("permission_doubted", key=doubt.key, reason=doubt.why)
        self._check_counts(endpoints)
        self._started_ms = self._clock()
        with contextlib.ExitStack() as parts:
            context = self._context
            if context is None:
                context = zmq.Context()
                parts.callback(context.term)
            self._results = ResultQueue()
            parts.callback(self._results.close)
            # The journal and the core, with what is stored.
            self._journal = open_journal(config, self._storage)
            parts.callback(self._close_journal)
            directory, batch_bytes_max = self._directory, config.limits.batch_bytes_max
            self._found = StoredRings(self._journal, config.journal, batch_bytes_max, self.log)
            facts = self._found.recover(self._clock(), held=directory is not None)
            queues: QueuesFound | None = None
            try:
                queues = self._find_queues(facts)
                now_ms = self._clock()
                state = RecoveredState(facts, now_ms=now_ms)
                if queues is not None:
                    state = RecoveredState(facts, queues.queues, queues.changes, now_ms=now_ms)
                self._core = self._make_core(config, state)
            except QueuesLost as error:
                queues = None
                self._core = self._make_core(config, self._without_queues(facts, error))
            # The core knows from ring main which offsets streams gave; where damage left nothing of
            # a stream, its ring does not know, and would give them a second time.
            for name, offsets in self._core.unseen.items():
                self._journal.rings[name].go_on(offsets)
            self._checkpoints = checkpoints = None
            bodies: StoredBodies | None = None
            if queues is not None:
                assert directory is not None
                self._checkpoints = checkpoints = self._follow(directory, queues)
                parts.callback(checkpoints.stop)
                bodies = StoredBodies(directory / DATABASE)
                parts.callback(bodies.close)
            # Where the queues were lost, the log keeps their mail and requests for a repair, until
            # a ring without room needs theirs.
            lost = self._give_up_queues_log if self._queues_lost else None
            self._rings = Rings(
                self._journal,
                config.journal,
                self._results,
                batch_bytes_max,
                snapshot=self._core.snapshot,
                noted=None if checkpoints is None else checkpoints.parts.add,
                relieve=lost if checkpoints is None else checkpoints.relieve,
                bodies=bodies,
                damaged=self._found.damaged,
                rests=self._found.rests,
            )
            # The sockets, and what watches over them. They listen from here on; what comes waits
            # for the loop.
            self._guard = Guard(
                config,
                self._room_for(config, endpoints),
                count=self._count,
                report=self._report_connection,
            )
            parts.callback(self._guard.close)
            watchdog = Watchdog(self._guard, config.limits.unread_share_bytes_max // 4)
            parts.callback(watchdog.stop)
            if config.authentication.mechanism != "none":
                self._authenticator = Authenticator(
                    context, config.authentication, self._clock, self._denied, self._paused,
                    self._attempt_erred,
                )  # fmt: skip
                parts.callback(self._authenticator.close)
            self._listeners = []
            for endpoint in endpoints:
                listener = Listener(context, endpoint, config, self._authenticator)
                self._listeners.append(listener)
                parts.callback(listener.close, config.loop.drain_ms)
            # The threads, and the loop over all of it.
            parts.callback(self._rings.stop_threads)
            self._rings.start()
            validator = Validator(self._results, config.limits.of_messages())
            parts.callback(validator.stop)
            watchdog.start()
            self._loop = Loop(
                config,
                core=self._core,
                rings=self._rings,
                listeners=self._listeners,
                guard=self._guard,
                results=self._results,
                limits=config.limits.of_messages(),
                clock=self._clock,
                log=self.log,
                counters=self._counters,
                meter=time.perf_counter_ns,
                worked=time.thread_time_ns,
                watchdog=watchdog,
                validate=validator.put,
                reloaded=self.rereading.taken_up,
                checkpoints=self._checkpoints,
                collector=self._collector,
            )
            self.rereading.serve(
                self._core, self._loop, self._authenticator, self._results, self._core_settings
            )
            if config.http.bind:
                self._start_http(config, credential, parts)
            # From here on _serve() undoes all of this, the last first.
            self._parts = parts.pop_all()
        if config.authentication.mechanism == "plain" and any(e.is_public for e in endpoints):
            self.log.warning(
                "passwords_in_clear",
                do='anyone on the way can read them; authentication.mechanism = "curve" encrypts',
            )

    def _start_http(
        self, config: Config, credential: HttpCredential, parts: contextlib.ExitStack
    ) -> None:
        """Start the HTTP side's process; its link to the broker waits for the loop to turn."""
        first = first_line(config.http, self._listeners, credential, self.public_key)
        self._http = HttpProcess(first, self.log, self._count, self._clock)
        self._http.start()
        parts.callback(self._http.stop)

    def _announce(self) -> None:
        """Log that the broker listens, and tell systemd that it is ready: the end of a start.

        form: whether the installed package is compiled or plain Python.
        """
        self.log.info(
            "listening",
            endpoints=self.endpoints,
            data=self._journal.storage.describe(),
            epoch=self._journal.epoch,
            version=version(),
            form=form(),
            # Only with CURVE: clients need the key to connect.
            **({"server_key": self.public_key} if self.public_key else {}),
        )
        self._supervisor.tell(f"READY=1\nSTATUS=listens on {', '.join(self.endpoints)}")

    # --- the queues and their tables -----------------------------------------------------

    @property
    def _directory(self) -> Path | None:
        """Return where the data is; None when nothing of it outlives the process."""
        storage = self._journal.storage
        return Path(storage.describe()) if isinstance(storage, FileStorage) else None

    def _find_queues(self, facts: dict[str, RingFacts]) -> QueuesFound | None:
        """Load the tables and the changes after them; None: the data is in memory.

        Raises QueuesLost.
        """
        if self._directory is None:
            return None
        uuid, main = self._journal.uuid, self._journal.rings[MAIN]
        return find_queues(self._directory, uuid, main, facts[MAIN], self.config.checkpoint)

    def _make_core(self, config: Config, state: RecoveredState) -> Broker:
        """Make the core, which applies the log after the tables. Raises QueuesLost: it cannot."""
        return Broker(
            self._core_settings(config),
            uuid=self._journal.uuid,
            epoch=self._journal.epoch,
            state=state,
            random=os.urandom,
        )

    def _without_queues(self, facts: dict[str, RingFacts], lost: QueuesLost) -> RecoveredState:
        """Return the state of a core that serves streams alone, as the queues could not be read.

        The log, BROKER_INFO and metrics tell it, and the core refuses commands of queues.
        """
        self._queues_lost = str(lost)
        self.log.error("queues_lost", reason=str(lost), do=lost.remedy)
        self._found.note_damage(f"{DATABASE}: {lost}")
        return RecoveredState(facts, queues_lost=str(lost))

    def _give_up_queues_log(self) -> bool:
        """Give up what ring main kept for the lost queues, as it is full: streams come first.

        True: it gave something up, so that the append may be tried again.
        """
        main = self._journal.rings[MAIN]
        if main.held_lsn is None:
            return False
        main.hold(None)
        self.log.error("queues_log_given_up", lsn=main.start_lsn)
        return True

    def _follow(self, directory: Path, found: QueuesFound) -> Checkpoints:
        """Log how the queues were recovered, and make what has their tables follow from now on.

        Called at a start, when the core has applied the part of the log that the tables lack.
        """
        if found.rebuilt:  # why the tables were made anew from the log
            lost = (
                "see queues_loss_accepted" if found.accepted else "nothing: the log had all of it"
            )
            self.log.warning("queues_rebuilt", reason=found.rebuilt, lost=lost)
            self._found.note_damage(f"{DATABASE} was made anew ({found.rebuilt}); lost: {lost}")
        if found.accepted:  # what the operator has accepted as lost
            self.log.error("queues_loss_accepted", reason=found.accepted)
            self._found.note_damage(f"{DATABASE}: accepted: {found.accepted}")
        for damage in found.damages:
            self.log.error("checkpoint_met_damage", damage=damage)
        checkpoints = Checkpoints(
            directory, self._journal.rings[MAIN], self.config.checkpoint, self._results,
            parts=found.parts, lsn=found.position.lsn, report=self._checkpoint_event,
            press=self._core.pressed,
        )  # fmt: skip
        self.log.info(
            "queues_recovered", lsn=found.position.lsn, new=found.new,
            lag_bytes=checkpoints.parts.bytes, mailboxes=len(found.queues.mailboxes),
            services=len(found.queues.services), messages=len(found.queues.messages),
            requests=len(found.queues.requests),
        )  # fmt: skip
        return checkpoints

    def _checkpoint_event(self, name: str, level: str, facts: dict[str, Any]) -> None:
        self._counters[f"{name}_total"] += 1
        getattr(self.log, level)(name, **facts)

    def _room_for(self, config: Config, endpoints: list[Endpoint]) -> Room:
        """Return how many connections may be open so that descriptors are left for our own files.

        Where there are listeners over ipc half of all are left, too: local peers may come faster
        than the guard can cut them. The log has a warning where that is less than the configuration
        allows.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # the limit of open files in force
        own = lowest_free() + _FILES_LATER + _FILES_LISTENER * len(endpoints)
        found = room(files, own, local=any(each.transport == "ipc" for each in endpoints))
        if found.connections < config.links.connections_max:
            self.log.warning(
                "connections_bounded", connections=found.connections,
                configured=config.links.connections_max,
                backlog=backlog(config.links.backlog, files),
                do=f"raise the limit of open files (ulimit -n), which is {files}",
            )  # fmt: skip
        return found

    def _report_connection(self, name: str, facts: dict[str, object]) -> None:
        self._loop.report(name, facts)

    def _count(self, name: str) -> None:
        self._counters[name] += 1

    def _denied(self, mechanism: str, address: str, why: str) -> None:
        """Count and log a connection that was turned away (the authenticator's thread)."""
        self._counters["denied_total"] += 1
        self._counters[f"denied_{why}_total"] += 1
        if self._denials.allows("denied", self._clock()):
            self.log.warning("denied", mechanism=mechanism, address=address, why=why)

    def _paused(self, user: str, address: str, pause_ms: int) -> None:
        """Log a name at an address that was wrong too often (the authenticator's thread)."""
        self._counters["password_pauses_total"] += 1
        if self._denials.allows("password_pause", self._clock()):
            self.log.warning("password_pause", user=user, address=address, pause_ms=pause_ms)

    def _attempt_erred(self, error: Exception) -> None:
        """Log an attempt that met an error which no code foresaw (the authenticator's threads)."""
        self._counters["authentication_errors_total"] += 1
        if self._denials.allows("internal_error", self._clock()):
            trace = "".join(traceback.format_exception(error))
            self.log.error("internal_error", doing="authentication", error=repr(error), trace=trace)

    # --- serving and closing -------------------------------------------------------------

    def _serve(self) -> None:
        """Run the loop until it is asked to stop, then end in order (the broker's thread)."""
        loop = self._loop
        try:
            while not self._stopping:
                loop.turn()
                self._supervisor.alive()
            begun_s = time.monotonic()
            self.log.info("stopping", links=self._core.gauges["links"])
            self._supervisor.tell("STOPPING=1\nSTATUS=confirms what was taken, and ends")
            # Number of links that could not be told of the end in time.
            untold = loop.finish(self.config.loop.drain_ms)
        except BaseException as error:  # noqa: BLE001 - a bug: said aloud, and the daemon ends
            self.failure = error
            self.log.critical("failed", error=repr(error), trace=traceback.format_exc())
            loop.abandon()
        try:
            self._parts.close()
        except BaseException as error:  # noqa: BLE001 - a bug, too: said aloud
            # Closing may fail because the loop did: that error tells more.
            self.failure = self.failure or error
            self.log.critical("failed_at_end", error=repr(error), trace=traceback.format_exc())
        if self.failure is None:
            took_ms = round(1_000 * (time.monotonic() - begun_s))
            self.log.info("stopped", took_ms=took_ms, untold_links=untold)

    def _close_journal(self) -> None:
        """Close the rings, at the end of all."""
        try:
            self._journal.close()
        except JournalFailed as error:
            # Its cause was logged when the ring failed; the next start deals with it.
            self.log.error("ring_not_closed", reason=str(error))
