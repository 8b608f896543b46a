# DO NOT EDIT: made from ../aio/client.py by `make sync-client` (tools/sync_client.py).
"""The synchronous client: connect, flush, close, and the groups of verbs that it is the sum of.

Owns the life of a client, as blocking calls. The rule: any thread may call any of them; a wait ends
by its timeout, or by the client's close.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import zmq

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_protocol import commands as c
from malamute_protocol.errors import ConnectionLost, MalamuteError, Timeout
from malamute_py.client.arguments import truth
from malamute_py.client.engine.waits import ACKED, OPENED
from malamute_py.client.session.attempts import LinkState
from malamute_py.client.session.events import LinkEvent, Unlinked
from malamute_py.client.settings import (
    NO_ANSWER,
    ClientOptions,
    ClientSettings,
    Wait,
    make_settings,
    no_link,
)
from malamute_py.client.sync.administration import SyncAdministrationVerbs
from malamute_py.client.sync.keys import SyncKeyView
from malamute_py.client.sync.link import ThreadLink
from malamute_py.client.sync.mail import SyncInbox, SyncMailVerbs
from malamute_py.client.sync.members import SyncMember
from malamute_py.client.sync.publishing import SyncBulkPublisher, SyncPublishVerbs
from malamute_py.client.sync.queues import SyncQueueVerbs
from malamute_py.client.sync.steps import SyncAtomicStep
from malamute_py.client.sync.streams import SyncStreamVerbs
from malamute_py.client.sync.subscription import SyncSubscription
from malamute_py.client.sync.transactions import SyncTransaction
from malamute_py.client.sync.work import SyncServed, SyncWorker, SyncWorkVerbs
from malamute_py.client.tracing import Tracing, tracing_of

__all__ = ["SyncBulkPublisher", "SyncClient", "SyncSubscription", "connect_sync"]

CONNECT_MS = 10_000
FLUSH_MS = 5_000


def connect_sync(
    endpoint: str | Sequence[str] = DEFAULT_ENDPOINT,
    *,
    wait: bool = True,
    timeout_ms: int | None = CONNECT_MS,
    context: zmq.Context[Any] | None = None,
    on_link: Callable[[LinkEvent], None] | None = None,
    tracing: bool | Tracing = False,
    **options: Unpack[ClientOptions],
) -> SyncClient:
    """Connect to a broker; use the result as a context manager, or close() it.

    endpoint: one, or several to be tried in turn. wait: keep trying until timeout_ms is over
    (None: for ever); otherwise the first failure is raised. options: fields of
    ClientSettings, which help(ClientSettings) explains.
    context: a zmq.Context, needed for inproc endpoints. on_link: told each change of the link, in
    the client's own thread. tracing: spans of OpenTelemetry, True or a Tracing; needs the extra
    `otel`.
    Raises SettingError, Timeout, ConnectionLost or BrokerRefused (a credential or version that was
    refused is final).
    """
    settings = make_settings(endpoint, options, timeout_ms)
    make = SyncClient if tracing is False else _traced(tracing)
    return _opened(make(settings, context=context, on_link=on_link), wait, timeout_ms)


def _traced(asked: Any) -> Callable[..., SyncClient]:
    """Return the maker of clients for connect(tracing=asked). Raises SettingError.

    The class with spans is imported only here: it needs OpenTelemetry.
    """
    tracing = tracing_of(asked)
    if tracing is None:
        return SyncClient
    from malamute_py.client.sync.traced import SyncTracedClient

    return partial(SyncTracedClient, tracing)


def _opened(client: SyncClient, wait: bool, timeout_ms: int | None) -> SyncClient:
    """Return the client once its link is open; give it up if the wait fails."""
    try:
        client.opened(wait=wait, timeout_ms=timeout_ms)
    except BaseException:
        client.abort()
        raise
    return client


class SyncClient(
    SyncPublishVerbs,
    SyncStreamVerbs,
    SyncMailVerbs,
    SyncWorkVerbs,
    SyncQueueVerbs,
    SyncAdministrationVerbs,
):
    """One session with a broker, with a thread of its own; for callers in any thread."""

    _subscription_type = SyncSubscription
    _keys_type = SyncKeyView
    _inbox_type = SyncInbox
    _worker_type = SyncWorker
    _member_type = SyncMember
    _step_type = SyncAtomicStep
    _transaction_type = SyncTransaction

    def __init__(
        self,
        settings: ClientSettings,
        *,
        context: zmq.Context[Any] | None = None,
        on_link: Callable[[LinkEvent], None] | None = None,
    ) -> None:
        """Begins to connect; `connect_sync` is the comfortable way, with the waiting done."""
        self.settings = settings
        self._link = ThreadLink(settings, context, on_link)
        self._session = self._link.session
        self._served: list[SyncServed] = []
        self._publisher = self._link.publisher

    # --- life --------------------------------------------------------------------------------

    def opened(self, *, wait: bool = True, timeout_ms: int | None = CONNECT_MS) -> None:
        """Return once a link is open; see connect_sync() for what is raised."""
        link, session = self._link, self._session
        truth("wait", wait)

        def ready() -> bool:
            """Whether the wait is over: by a link, by the end, or by the first failure."""
            failed = not wait and isinstance(link.last, Unlinked)
            return failed or session.state in (LinkState.LINKED, LinkState.CLOSED)

        with link.lock:
            try:
                link.until(ready, timeout_ms, OPENED, "a link")
            except Timeout:
                why = link.last.reason if isinstance(link.last, Unlinked) else NO_ANSWER
                raise no_link(self.settings, timeout_ms, why) from None
            if session.state is LinkState.CLOSED:
                raise session.error or ConnectionLost("the client is closed")
            if session.state is not LinkState.LINKED and isinstance(link.last, Unlinked):
                raise ConnectionLost(link.last.reason)

    def flush(self, timeout_ms: Wait = "default") -> None:
        """Return once nothing is unconfirmed. Raises Timeout, or what ended the session."""
        link, session = self._link, self._session
        with link.lock:
            link.wake_up()
            link.until(
                lambda: session.idle or session.state is LinkState.CLOSED,
                timeout_ms,
                ACKED,
                "everything that was sent",
            )
            if session.error is not None:
                raise session.error

    def close(
        self, *, drain: bool = False, drain_ms: int | None = None, flush_ms: int = FLUSH_MS
    ) -> None:
        """Wait for what is unconfirmed, at most flush_ms, and end the link; may be repeated.

        What was not confirmed by then fails with ConnectionLost; calls that wait end. Requests in
        hand that are not finished go to other workers. drain: workers begin nothing more, and
        close() waits first until they have finished what they have begun, drain_ms at most (None:
        as long as it takes).
        """
        offerings = self._session.offerings
        if drain and self._session.state is not LinkState.CLOSED:
            with self._link.lock:
                offerings.drain_all()
                self._link.notify()
            with contextlib.suppress(MalamuteError):
                self.flush(drain_ms)
        with self._link.lock:
            if flush_ms:  # 0: the broker gives the requests back when the link ends
                offerings.close_all()
                self._link.notify()
        if self._session.state is not LinkState.CLOSED and flush_ms and not self._session.idle:
            # Each publish that is affected raises by itself.
            with contextlib.suppress(MalamuteError):
                self.flush(flush_ms)
        self.abort()

    def abort(self) -> None:
        """End at once, without waiting for anything."""
        self._link.stop()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception without waiting for what is unconfirmed."""
        self.close(flush_ms=FLUSH_MS if kind is None else 0)

    @property
    def linked(self) -> bool:
        """A link is open now."""
        return self._session.state is LinkState.LINKED

    @property
    def welcome(self) -> c.Welcome | None:
        """Facts that the broker stated on the newest link; None before the first."""
        return self._session.welcome

    @property
    def identity(self) -> str:
        """The name by which the broker knows this client; "" before the first link, or for none.

        A replica (`identity="web-{n}"`) keeps its number over reconnects. Where it was away so long
        that the broker gave the number to another, it has a new one from then on.
        """
        return self._session.identity

    @property
    def reconnects(self) -> int:
        """Links opened beyond the first."""
        return max(0, self._session.links - 1)

    @property
    def refused_unconfirmed(self) -> int:
        """Batches that the broker refused so far of those sent with confirm="none".

        publish(), send() and the key-value view make them.
        """
        return self._publisher.unpromised_refusals
