"""The configuration of a running broker, read anew by a thread and taken up by the loop.

Owns the configuration in force, and one reading at a time. The rules: a signal that comes amid a
reading has the configuration read once more; the broker's parts are told of a new one in the loop's
thread alone. What of it is taken up: reloading.py. Source: SPEC.md, section 4.3, RELOAD_CONFIG.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from malamute_py.broker import Broker, BrokerSettings
from malamute_py.config import Config
from malamute_py.config_check import Examined, in_force, of_program
from malamute_py.server.authentication.authenticator import Authenticator
from malamute_py.server.authentication.namespaces import doubts
from malamute_py.server.authentication.permissions import permission_doubts
from malamute_py.server.authentication.users_file import credential_doubts, with_users
from malamute_py.server.http_process import HttpCredential, admit
from malamute_py.server.loop import Loop
from malamute_py.server.reloading import (
    APPLIED,
    CHANGES_SHOWN,
    REFUSED,
    RESTART,
    Change,
    Reading,
    Reread,
    lost_credentials,
    narrowed,
    take_up,
)
from malamute_py.server.result_queue import ResultQueue
from malamute_py.telemetry import Log


class Rereading:
    """The configuration in force, and the thread that reads it anew."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Examined] | None,
        log: Log,
        stopping: Callable[[], bool],
    ) -> None:
        """config: in force at the start. stopping: whether the broker is about to stop.

        read: reads the configuration anew, file and variables; None: a program gave it, so that a
        reload reads only the users file anew.
        """
        self.read = read
        self._log = log
        self._stopping = stopping
        self._busy = threading.Lock()
        """Held while a thread reads the configuration anew, until the loop has taken it up."""
        self._again = False
        """Whether SIGHUP came while a thread read the configuration: it is read once more."""
        self.reading = Reading(config, config, [])
        self._http_credential: HttpCredential | None = None
        # serve() is given these, before anything can be read anew.
        self._core: Broker
        self._loop: Loop
        self._authenticator: Authenticator | None
        self._results: ResultQueue
        self._core_settings: Callable[[Config], BrokerSettings]

    # --- the start -----------------------------------------------------------------------

    def first(self) -> tuple[Config, HttpCredential]:
        """Return the configuration that a start uses, and the HTTP side's credential.

        It is the one that was given, with the users of the users file and the broker's own HTTP
        user. Raises ConfigError.
        """
        config = self.reading.config
        complete, credential = admit(with_users(config))
        self._http_credential = credential
        # Where each setting comes from, for BROKER_INFO: a program, or what read() finds anew.
        settings = of_program(config)
        if self.read is not None:
            settings = in_force(config, settings, self.read().settings)
        self.reading = Reading(config, complete, [], settings)
        return complete, credential

    def serve(
        self,
        core: Broker,
        loop: Loop,
        authenticator: Authenticator | None,
        results: ResultQueue,
        core_settings: Callable[[Config], BrokerSettings],
    ) -> None:
        """Note the parts of a broker that are told of what is read anew; called by its start.

        core_settings: makes the core's settings of a complete configuration.
        """
        self._core, self._loop, self._authenticator = core, loop, authenticator
        self._results, self._core_settings = results, core_settings

    def told(self) -> dict[str, Any]:
        """Return the settings in force, for BROKER_INFO."""
        return self.reading.told()

    # --- reading anew --------------------------------------------------------------------

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Have the configuration read anew, at SIGHUP; once more if a reading is under way.

        That reading may have passed over what has been changed since.
        """
        self._again = self._busy.locked()
        self.request()

    def request(self, link: int = 0, request: int = 0) -> str:
        """Have a thread read the configuration anew; returns why that is not done, or "".

        The loop takes up what was read when the thread's result comes. link, request: of the
        RELOAD_CONFIG that asked; 0: a signal or the embedding program did.
        """
        if self._stopping():
            return "the broker is about to stop"
        if not self._busy.acquire(blocking=False):  # released when the loop has taken it up
            return "the configuration is being read anew already"
        reading = threading.Thread(
            target=self._read_anew, args=(link, request), name="malamute-reload", daemon=True
        )
        try:
            reading.start()
        except RuntimeError as error:  # The system has no room for a thread.
            self._busy.release()
            # Not logged here: a signal may have come amid a line of the log.
            self._results.put(Reread(self.reading, link, request, str(error)))
            return str(error)
        return ""

    def _read_anew(self, link: int, request: int) -> None:
        """Read the configuration and its users, in a thread of its own, and give it to the loop.

        Nothing changes here: take_up() reckons what would be in force.
        """
        before = self.reading
        try:
            # Without a way to read it anew, the configuration is the same; its users file is not.
            examined = Examined(before.config, [], [], str) if self.read is None else self.read()
            reading = take_up(before, examined, self._complete)
            # Doubts are logged here: with many users they take longer than a turn of the loop has.
            if reading.complete != before.complete:
                for doubt in credential_doubts(reading.complete):
                    self._log.warning("nobody_may_connect", key=doubt.key, reason=doubt.why)
                for doubt in doubts(reading.complete):
                    self._log.warning("namespace_doubted", key=doubt.key, reason=doubt.why)
                for doubt in permission_doubts(reading.complete.permissions):
                    self._log.warning("permission_doubted", key=doubt.key, reason=doubt.why)
        except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
            trace = traceback.format_exc()
            self._log.error("internal_error", doing="reload", error=repr(error), trace=trace)
            reading = before._replace(changes=[Change("", REFUSED, f"internal: {error!r}")])
        self._results.put(Reread(reading, link, request))

    def _complete(self, config: Config) -> Config:
        return admit(with_users(config), self._http_credential)[0]

    def taken_up(self, reread: Reread, now_ms: int) -> None:
        """Take up a configuration that was read anew, in the loop's thread, and log each change.

        The core, the authenticator and open links are told; a link that asked gets its answer.
        """
        if reread.failed:
            self._log.warning("reload_failed", link=reread.link, reason=reread.failed)
            return
        before, reading = self.reading, reread.reading
        after = reading.complete
        if reread.link:
            # First: the link that asked may be one of those that end.
            self._core.reloaded(reread.link, reread.request, reading.changes_told())
        gone = lost_credentials(before.complete, after)
        self.reading = reading._replace(at_ms=now_ms)
        if after != before.complete:
            if self._authenticator is not None:
                self._authenticator.renew(after.authentication)
            verdicts: dict[tuple[str, str], tuple[str, str] | None] = {}

            def ending(credential: str, owner: str) -> tuple[str, str] | None:
                """Return code and reason to end a link after a reload; None: it goes on.

                The core asks for each link. Ended are links of users that are gone, or that may do
                less than before. credential: the user, owner: whose permissions the link has.
                """
                who = credential, owner
                # Users have many links, and to compare permissions takes time.
                if who not in verdicts:
                    verdicts[who] = None
                    if credential in gone:
                        verdicts[who] = "unauthenticated", "your credential counts no more"
                    elif narrowed(before.complete, after, owner):
                        verdicts[who] = "permissions_changed", "open a link with what you may do"
                return verdicts[who]

            self._core.reconfigure(self._core_settings(after), ending)
            if gone:
                self._loop.revoke(gone, now_ms)  # ends their connections, besides the links
        self._busy.release()
        if self._again:  # SIGHUP came meanwhile
            self._again = False
            self.request()
        changes = reading.changes
        counts = Counter(change.outcome for change in changes)
        for change in changes[:CHANGES_SHOWN]:
            if change.outcome == REFUSED:
                self._log.warning("setting_reloaded", **change._asdict())
            else:
                self._log.info("setting_reloaded", **change._asdict())
        self._log.info(
            "configuration_reloaded", link=reread.link, applied=counts[APPLIED],
            refused=counts[REFUSED], restart=counts[RESTART],
        )  # fmt: skip
