"""The asyncio client: connect, flush, close, and the groups of verbs that it is the sum of.

Owns the life of a client, as awaitables. The rule: a cancelled call leaves the link and all
other calls as they were.
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
from malamute_py.client.aio.administration import AdministrationVerbs
from malamute_py.client.aio.keys import KeyView
from malamute_py.client.aio.link import LoopLink
from malamute_py.client.aio.mail import Inbox, MailVerbs
from malamute_py.client.aio.members import Member
from malamute_py.client.aio.opening import Opening  # asyncio only
from malamute_py.client.aio.publishing import BulkPublisher, PublishVerbs
from malamute_py.client.aio.queues import QueueVerbs
from malamute_py.client.aio.steps import AtomicStep
from malamute_py.client.aio.streams import StreamVerbs
from malamute_py.client.aio.subscription import Subscription
from malamute_py.client.aio.transactions import Transaction
from malamute_py.client.aio.work import Served, Worker, WorkVerbs
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
from malamute_py.client.tracing import Tracing, tracing_of

__all__ = ["BulkPublisher", "Client", "Connecting", "Subscription", "connect"]  # asyncio only
# sync: __all__ = ["SyncBulkPublisher", "SyncClient", "SyncSubscription", "connect_sync"]

CONNECT_MS = 10_000
FLUSH_MS = 5_000


class Connecting(Opening["Client"]):  # asyncio only
    """Result of connect(): `client = await connect()` or `async with connect() as client`."""


def connect(
    endpoint: str | Sequence[str] = DEFAULT_ENDPOINT,
    *,
    wait: bool = True,
    timeout_ms: int | None = CONNECT_MS,
    context: zmq.Context[Any] | None = None,
    on_link: Callable[[LinkEvent], None] | None = None,
    tracing: bool | Tracing = False,
    **options: Unpack[ClientOptions],
) -> Connecting:  # sync: ) -> Client:
    """Connect to a broker; await it, or use it with `async with`.

    endpoint: one, or several to be tried in turn. wait: keep trying until timeout_ms is over
    (None: for ever); otherwise the first failure is raised. options: fields of
    ClientSettings, which help(ClientSettings) explains.
    context: a zmq.Context, needed for inproc endpoints. on_link: told each change of the link.
    tracing: spans of OpenTelemetry, True or a Tracing; needs the extra `otel`.
    Raises SettingError at once; Timeout, ConnectionLost or BrokerRefused (a credential or
    version that was refused is final) when awaited.
    """
    settings = make_settings(endpoint, options, timeout_ms)
    make = Client if tracing is False else _traced(tracing)
    # sync: return _opened(make(settings, context=context, on_link=on_link), wait, timeout_ms)

    async def open_client() -> Client:  # asyncio only
        client = make(settings, context=context, on_link=on_link)
        return await _opened(client, wait, timeout_ms)

    return Connecting(open_client)  # asyncio only


def _traced(asked: Any) -> Callable[..., Client]:
    """Return the maker of clients for connect(tracing=asked). Raises SettingError.

    The class with spans is imported only here: it needs OpenTelemetry.
    """
    tracing = tracing_of(asked)
    if tracing is None:
        return Client
    from malamute_py.client.aio.traced import TracedClient

    return partial(TracedClient, tracing)


async def _opened(client: Client, wait: bool, timeout_ms: int | None) -> Client:
    """Return the client once its link is open; give it up if the wait fails."""
    try:
        await client.opened(wait=wait, timeout_ms=timeout_ms)
    except BaseException:
        client.abort()
        raise
    return client


class Client(PublishVerbs, StreamVerbs, MailVerbs, WorkVerbs, QueueVerbs, AdministrationVerbs):
    """One session with a broker, in the event loop that made it; use it from that loop only."""

    _subscription_type = Subscription
    _keys_type = KeyView
    _inbox_type = Inbox
    _worker_type = Worker
    _member_type = Member
    _step_type = AtomicStep
    _transaction_type = Transaction

    def __init__(
        self,
        settings: ClientSettings,
        *,
        context: zmq.Context[Any] | None = None,
        on_link: Callable[[LinkEvent], None] | None = None,
    ) -> None:
        """Begins to connect; `connect` is the comfortable way, with the waiting done."""
        self.settings = settings
        self._link = LoopLink(settings, context, on_link)
        self._session = self._link.session
        self._served: list[Served] = []
        self._publisher = self._link.publisher

    # --- life --------------------------------------------------------------------------------

    async def opened(self, *, wait: bool = True, timeout_ms: int | None = CONNECT_MS) -> None:
        """Return once a link is open; see connect() for what is raised."""
        link, session = self._link, self._session
        truth("wait", wait)

        def ready() -> bool:
            """Whether the wait is over: by a link, by the end, or by the first failure."""
            failed = not wait and isinstance(link.last, Unlinked)
            return failed or session.state in (LinkState.LINKED, LinkState.CLOSED)

        if link.is_here():  # sync: with link.lock:
            try:
                await link.until(ready, link.engine, timeout_ms, OPENED, "a link")
            except Timeout:
                why = link.last.reason if isinstance(link.last, Unlinked) else NO_ANSWER
                raise no_link(self.settings, timeout_ms, why) from None
            if session.state is LinkState.CLOSED:
                raise session.error or ConnectionLost("the client is closed")
            if session.state is not LinkState.LINKED and isinstance(link.last, Unlinked):
                raise ConnectionLost(link.last.reason)

    async def flush(self, timeout_ms: Wait = "default") -> None:
        """Return once nothing is unconfirmed. Raises Timeout, or what ended the session."""
        link, session = self._link, self._session
        if link.is_here():  # sync: with link.lock:
            link.wake_up()
            await link.until(
                lambda: session.idle or session.state is LinkState.CLOSED,
                session,
                timeout_ms,
                ACKED,
                "everything that was sent",
            )
            if session.error is not None:
                raise session.error

    async def close(
        self, *, drain: bool = False, drain_ms: int | None = None, flush_ms: int = FLUSH_MS
    ) -> None:
        """Wait for what is unconfirmed, at most flush_ms, and end the link; may be repeated.

        What was not confirmed by then fails with ConnectionLost. Requests in hand that are not
        finished go to other workers. drain: workers begin nothing more, and close() waits first
        until they have finished what they have begun, drain_ms at most (None: as long as it
        takes).
        """
        if self._link.loop.is_closed():  # asyncio only
            self.abort()
            return
        self._link.check_loop()  # asyncio only
        offerings = self._session.offerings
        if drain and self._session.state is not LinkState.CLOSED:
            if self._link.is_here():  # sync: with self._link.lock:
                offerings.drain_all()
                # sync: self._link.notify()
            with contextlib.suppress(MalamuteError):
                await self.flush(drain_ms)
        if self._link.is_here():  # sync: with self._link.lock:
            if flush_ms:  # 0: the broker gives the requests back when the link ends
                offerings.close_all()
                # sync: self._link.notify()
        if self._session.state is not LinkState.CLOSED and flush_ms and not self._session.idle:
            # Each publish that is affected raises by itself.
            with contextlib.suppress(MalamuteError):
                await self.flush(flush_ms)
        self.abort()

    def abort(self) -> None:
        """End at once, without waiting for anything."""
        self._link.stop()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception without waiting for what is unconfirmed."""
        await self.close(flush_ms=FLUSH_MS if kind is None else 0)

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
