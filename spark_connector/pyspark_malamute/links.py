"""Links to the broker, one a process and credential, and what a refusal means in words.

Owns how a link is made, and how long a broker is waited for. The rules: a link is made when it is
first needed, by one thread, and serves the tasks that follow in the same process; one that failed
is dropped and never used again; a broker that this query has reached may be away for
brokerOutageMs, and one that it never reached for connectTimeoutMs; a host name without address and
a broken handshake end the first attempt early; the client's errors become sentences that name the
option to look at.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Final, TypeVar

from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    ProtocolError,
    Timeout,
)
from malamute_py.client.session.events import LinkEvent, Unlinked
from malamute_py.client.settings import Curve, Plain
from malamute_py.client.sync.client import SyncClient, connect_sync
from pyspark_malamute.errors import SourceUnavailable, StreamMissing
from pyspark_malamute.kept_links import KEPT, Key
from pyspark_malamute.option_values import LinkOptions

LOG = logging.getLogger("pyspark_malamute")

_REACHED: Final[OrderedDict[Key, None]] = OrderedDict()
"""Keys of which a link was open in this process: such a broker is away, not misspelt."""
_REACHED_MAX: Final = 1_000
"""Keys of which that is known, those that were linked last."""
_PAUSES_S: Final = (0.1, 1.0)
"""Pause after the first attempt to connect, doubled with each further one, and the longest."""
_HOPELESS_ATTEMPTS: Final = 4
"""Attempts at each endpoint that may fail in a way that seldom passes, before that is told: a
broker that dies amid a handshake looks once like one of another key."""
_HOPELESS: Final = frozenset({"unknown_host", "handshake"})

Answer = TypeVar("Answer")


def _link_key(options: LinkOptions) -> Key:
    """Return what the links of two queries must have in common to be one."""
    return (
        options.endpoints,
        options.user,
        options.password,
        options.curve_keys,
        options.identity,
        options.request_timeout_ms,
    )


def in_use(options: LinkOptions) -> contextlib.AbstractContextManager[None]:
    """Keep this process's link from being closed as idle while the body runs."""
    return KEPT.in_use(_link_key(options))


def link(options: LinkOptions, *, reached_broker: bool = False) -> SyncClient:
    """This process's link to the broker; reached_broker: the query has reached it from elsewhere.

    Raises SourceUnavailable.
    """
    key = _link_key(options)
    found = KEPT.get(key)
    if found is None:
        # A broker that was reached before is waited for longer: it is away, not misspelt.
        reached = reached_broker or key in _REACHED
        patience_ms = options.broker_outage_ms if reached else 0
        until_s = monotonic() + max(patience_ms, options.connect_timeout_ms) / 1000
        with explained(options, "connect"), KEPT.making(key, until_s - monotonic()):
            found = KEPT.get(key)  # Another thread may have made it meanwhile.
            if found is None:
                left_ms = int((until_s - monotonic()) * 1000)
                found = open_link(options, left_ms, reached=reached)
                KEPT.put(key, found)
        _reach(key)
    return found


def _reach(key: Key) -> None:
    """Take note that a link of a key was open."""
    _REACHED.pop(key, None)  # Now it is the last one.
    _REACHED[key] = None
    if len(_REACHED) > _REACHED_MAX:
        _REACHED.popitem(last=False)


def open_link(options: LinkOptions, timeout_ms: int, *, reached: bool = False) -> SyncClient:
    """A link of the caller's own, by as many attempts as the time allows.

    reached: wait for the broker whatever its absence looks like. Raises MalamuteError: the last
    attempt failed. Raises SourceUnavailable: further ones would fail, too.
    """
    credential: Plain | Curve | None = None
    if options.user:
        credential = Plain(options.user, options.password)
    elif options.curve_keys[0]:
        credential = Curve(*options.curve_keys)
    until_s = monotonic() + timeout_ms / 1000
    pause_s, pause_max_s = _PAUSES_S
    attempts = hopeless = 0
    endpoints = options.endpoints
    while True:
        told: list[LinkEvent] = []
        first = attempts % len(endpoints)  # each attempt begins with another endpoint
        try:
            return connect_sync(
                endpoints[first:] + endpoints[:first],
                wait=False,  # One attempt: this loop makes the next one.
                timeout_ms=max(1, int((until_s - monotonic()) * 1000)),
                on_link=told.append,
                credential=credential,
                identity=options.identity,
                software="pyspark-malamute",
                retry_max_ms=1_000,
                call_timeout_ms=options.request_timeout_ms,
            )
        except ConnectionLost:
            # How the attempt ended, as the client has told it.
            code = next((event.code for event in told if isinstance(event, Unlinked)), "")
            attempts += 1
            hopeless = hopeless + 1 if code in _HOPELESS else 0
            if hopeless >= _HOPELESS_ATTEMPTS * len(endpoints) and not reached:
                raise SourceUnavailable(_hopeless(code, options)) from None
            if monotonic() + pause_s > until_s:
                raise
        sleep(pause_s)
        pause_s = min(2 * pause_s, pause_max_s)


def is_away(options: LinkOptions, *, reached_broker: bool = False) -> bool:
    """Whether a broker that was reached has no link to this process now.

    A task gives up by the time of such an absence, and by its attempts otherwise.
    """
    key = _link_key(options)
    found = KEPT.get(key)
    return (reached_broker or key in _REACHED) and (found is None or not found.linked)


def drop(options: LinkOptions) -> None:
    """Close this process's link, if there is one; the next use makes another."""
    KEPT.drop(_link_key(options))


def drop_failed(options: LinkOptions, cause: BaseException | None) -> None:
    """Close this process's link, unless it serves others still: the next use makes another.

    cause: the client's error. After a Timeout the client makes its link anew by itself; a link that
    is open after ConnectionLost is another one, made since.
    """
    key = _link_key(options)
    found = KEPT.get(key)
    if found is None or not isinstance(cause, Timeout | ConnectionLost):
        return
    may_serve = isinstance(cause, Timeout) or found.linked
    if not (may_serve and KEPT.is_used(key)):
        drop(options)


class Broker:
    """The broker as the driver asks it: a question waits while the broker is away."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._client: SyncClient | None = None
        self._opening = threading.Lock()
        """Several threads ask at once."""
        self._uses = False
        """The process's link is in use here, and not idle between two questions."""
        self._closed = False

    def ask(
        self,
        doing: str,
        question: Callable[[SyncClient], Answer],
        asker: LinkOptions | None = None,
    ) -> Answer:
        """The answer to one question; doing: what is being tried, in words.

        asker: the options for the stream that the question is about.
        Raises SourceUnavailable: it was refused, the broker was away for more than
        brokerOutageMs, or it was there and did not answer within requestTimeoutMs.
        """
        options = self._options
        until_s = monotonic() + options.broker_outage_ms / 1000
        while True:
            client = self._opened()
            with explained(asker or options, doing):
                try:
                    return question(client)
                except (Timeout, ConnectionLost) as error:
                    if isinstance(error, Timeout) and client.linked:
                        raise  # The broker is there, and does not answer.
                    left_ms = int((until_s - monotonic()) * 1000)
                    if left_ms <= 0 or self._closed:
                        raise
                    LOG.warning(
                        "malamute %s: the broker at %s is away (%s); waiting for it, "
                        "%d s at most (option brokerOutageMs)",
                        options.side, _addresses(options), error, left_ms // 1000,
                    )  # fmt: skip
                    if isinstance(error, Timeout):
                        client.opened(timeout_ms=left_ms)  # The client makes its link anew.
                        continue
            # The client itself is over: the next time round makes another one.
            self._forget(client)

    def _opened(self) -> SyncClient:
        """Return the client, linked at the first use; from then on its link is in use here."""
        with self._opening:
            if not self._uses:
                self._uses = True
                KEPT.acquire(_link_key(self._options))
            if self._client is None:
                self._client = link(self._options)
            return self._client

    def _forget(self, client: SyncClient) -> None:
        """Give up a client that is over, unless another thread has done so already."""
        with self._opening:
            if self._client is client:
                self._client = None
                KEPT.drop(_link_key(self._options), client)

    @property
    def asked(self) -> bool:
        """Whether there was a question before."""
        return self._client is not None

    def close(self) -> None:
        """End the process's link to this broker for all that use it, as a streaming query stops.

        Questions under way end. A `with` block only gives the link back.
        """
        self._closed = True
        with self._opening:
            if self._client is not None:
                self._client = None
                drop(self._options)
            self._leave()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        """End the questions; the link stays, for what the process does next, until it is idle.

        Others of the process may be using it, as the links of one credential are one.
        """
        self._closed = True
        with self._opening:
            self._client = None
            self._leave()

    def _leave(self) -> None:
        """End this object's use of the process's link; the caller has the lock."""
        if self._uses:
            self._uses = False
            KEPT.release(_link_key(self._options))


@contextlib.contextmanager
def explained(options: LinkOptions, doing: str) -> Iterator[None]:
    """Turn the client's errors within the body into SourceUnavailable, which says what to do.

    doing: what was being tried, as a verb with its object. Raises StreamMissing: the broker has no
    such stream.
    """
    try:
        yield
    except BrokerRefused as error:
        missing = error.code in ("unknown_stream", "stream_removed")
        kind = StreamMissing if missing else SourceUnavailable
        raise kind(_refusal(error, options, doing)) from error
    except (Timeout, ConnectionLost) as error:
        raise SourceUnavailable(
            f"malamute {options.side}: could not {doing} at {_addresses(options)}: {error}. Is the "
            "broker running there, and can the driver and the executors reach it? If it is "
            "somewhere else, correct option 'endpoint'."
        ) from error
    except ProtocolError as error:
        raise SourceUnavailable(
            f"malamute {options.side}: could not {doing} at {_addresses(options)}, for the "
            f"protocol was broken: {error}. Do broker and connector have versions that fit each "
            "other?"
        ) from error


def _hopeless(code: str, options: LinkOptions) -> str:
    """Return the error text for a link that will never come about, with the option to correct.

    That is known after _HOPELESS_ATTEMPTS that fail so: one may be of a broker that dies. code: of
    _HOPELESS, as the client told the end of its attempts.
    """
    where = _addresses(options)
    if code == "unknown_host":
        what = (
            f"the host name in {where} has no address on this machine; is it spelt right? "
            "Correct option 'endpoint'"
        )
    elif options.curve_keys[0]:
        what = (
            f"the handshake with {where} failed. Is curveServerKey the public key of that broker, "
            "and does it ask for CURVE?"
        )
    else:
        given = "user and password" if options.user else "no credential"
        what = (
            f"the handshake with {where} failed: it asks for another kind of credential than "
            f"{given}. Give the options curveServerKey, curvePublicKey and curveSecretKey, or "
            "user and password"
        )
    return f"malamute {options.side}: {what}"


def _addresses(options: LinkOptions) -> str:
    """Return the broker's addresses, for errors and the log."""
    return ", ".join(options.endpoints)


def _refusal(error: BrokerRefused, options: LinkOptions, doing: str) -> str:
    """Return the error text for a refusal by the broker, with what to do about it.

    doing: what was asked for, as a verb with its object.
    """
    where, stream = _addresses(options), options.stream
    match error.code:
        case "unknown_stream" | "stream_removed":
            what = (
                f"there is no stream '{stream}' at {where}. Correct option 'stream', or create it: "
                f"malamute stream create {stream}"
            )
        case "unauthenticated":
            what = (
                f"{where} refused the credential ({error.reason}). Check the options user and "
                "password, or curveServerKey, curvePublicKey and curveSecretKey"
            )
        case "forbidden":
            what = (
                f"{where} does not allow this identity to {doing} ({error.reason}). Have "
                f"{options.permission} given to it, or use another credential"
            )
        case "bad_pattern" | "unknown_pattern_kind":
            what = (
                f"{where} refused the pattern '{options.pattern_text}' ({error.reason}). "
                "Correct option 'pattern'"
            )
        case "cross_ring":
            what = (
                f"{where} could not {doing}: an atomic step reaches streams of ring main only, and "
                "one of these is in memory or has a ring of its own. Write into a stream of main"
            )
        case _:
            named = f", stream '{stream}'" if stream else ""
            what = f"{where} refused to {doing}{named}: {error}"
    return f"malamute {options.side}: {what}"
