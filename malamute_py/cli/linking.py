"""The link to the broker that a command talks to.

Owns how a command waits for the link, and what it does when the link is lost. The rules: a command
that asks one thing ends when its link is lost (exit code 3); one that streams goes on when the
broker is back, and says both on standard error; one that asks for no confirm tells of refusals that
came before its end.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import typer

from malamute_protocol.errors import BrokerRefused, ConnectionLost, Timeout
from malamute_py.cli.commands import say
from malamute_py.cli.failures import CommandFailed, unreachable
from malamute_py.cli.options import options
from malamute_py.cli.values import duration_ms, go_by_broker

if TYPE_CHECKING:
    from malamute_py.client.aio.client import Client
    from malamute_py.client.session.events import LinkEvent
    from malamute_py.client.settings import Credential
    from malamute_py.client.sync.client import SyncClient

CONNECT_TIMEOUT: Final = "3s"
LAST_WAIT_MS: Final = 5_000
"""How long an interrupted command still waits for the confirms of what it has sent."""


class _Watch:
    """The state of the link, as the client's thread reports it by calling this."""

    def __init__(self, stays: bool) -> None:
        self.client: SyncClient | Client | None = None
        self.reason = ""
        """Why there is no link, as the client's thread told last; empty: it told nothing."""
        self._stays = stays
        """True: the command goes on when the link is back; False: it ends with the link."""
        self._lost = False

    def __call__(self, event: LinkEvent) -> None:
        """Tell the person that the link was lost or is back; end a command that does not wait.

        Called by the client's thread.
        """
        from malamute_py.client.session.events import Linked, Unlinked

        if isinstance(event, Unlinked):
            self.reason = event.reason
            if self.client is None:
                return  # The first link is not there yet: connecting raises with the reason.
            if not self._stays:
                self.client.abort()  # Its calls then raise ConnectionLost.
            elif event.was_linked:
                self._lost = True
                say(f"link lost ({event.reason}); trying again")
        elif isinstance(event, Linked) and self._lost:
            self._lost = False
            say("linked again")


@contextmanager
def linked(
    ctx: typer.Context, *, stays: bool = False, anonymous: str = "", traces: bool = False
) -> Iterator[SyncClient]:
    """Connect a client to the chosen broker, for the block of one command.

    stays: True: go on when a lost link is back; False: the block ends with ConnectionLost.
    anonymous: identity for a client without a credential that was given none. traces: the command
    takes --tracing, for which the context has the default.
    Raises CommandFailed: no broker answers, or tracing lacks a package; BrokerRefused;
    ConnectionLost.
    """
    from malamute_py.client.sync.client import connect_sync

    watch = _Watch(stays)
    endpoints, asked = _connect_options(ctx, watch)
    if asked["credential"] is None:
        asked["identity"] = asked["identity"] or anonymous
    with ExitStack() as outer:
        if traces and _is_traced(ctx):
            from malamute_py.cli.tracing import telling

            asked["tracing"] = outer.enter_context(telling())
        with _telling_why_unreachable(endpoints, watch, asked["credential"]):
            client = connect_sync(endpoints, **asked)
        if client.welcome is not None and client.welcome.now_ms:
            go_by_broker(client.welcome.now_ms)
        watch.client = client
        if not stays and not client.linked:
            client.abort()  # The link was lost before the watch had the client to end.
        with _telling_why_lost(watch), client:
            yield client


def check_unconfirmed(
    client: SyncClient, name: str, question: Callable[[str], object], *,
    beside: Exception | None = None,
) -> None:  # fmt: skip
    """Raise CommandFailed when the broker refused something that was sent without a confirm.

    It answers that only when it refuses it. name: of the stream or mailbox; question: any about it.
    beside: another failure of the command, which is told as well. Raises MalamuteError, too.
    """
    client.flush()
    # Answers come in order: with that to a later question, all refusals are there. A refusal is an
    # answer, too: a user may write to a stream that it is told nothing of.
    with suppress(BrokerRefused):
        question(name)
    if client.refused_unconfirmed:
        if beside is not None:
            say(str(beside))
        raise CommandFailed(
            f"{name}: the broker refused some of it ({client.refused_unconfirmed} batches);"
            " send with --confirm stored to learn why"
        )


@asynccontextmanager
async def linked_in_loop(ctx: typer.Context, *, first: bool = True) -> AsyncIterator[Client]:
    """Connect a client of the running event loop; it ends when its link is lost.

    first: False for a further client of the command, which gets no identity: one identity has one
    link. Raises as linked().
    """
    from malamute_py.client.aio.client import connect

    watch = _Watch(stays=False)
    endpoints, asked = _connect_options(ctx, watch)
    if not first:
        asked["identity"] = ""
    with _telling_why_unreachable(endpoints, watch, asked["credential"]):
        client = await connect(endpoints, **asked)
    watch.client = client
    if not client.linked:
        client.abort()  # The link was lost before the watch had the client to end.
    with _telling_why_lost(watch):
        async with client:
            yield client


def _connect_options(ctx: typer.Context, watch: _Watch) -> tuple[Any, dict[str, Any]]:
    """Return the endpoints of the chosen broker, and the options to connect with.

    May ask the person for a password. watch: is told of the link.
    """
    from malamute_py.cli.contexts import chosen

    context = chosen(options(ctx))
    # The watch tells the person of the link: log lines would tell it twice.
    logging.getLogger("malamute.client.link").setLevel(logging.ERROR)
    return context.endpoints, {
        "timeout_ms": duration_ms(options(ctx).get("connect_timeout", CONNECT_TIMEOUT)),
        "on_link": watch,
        "credential": context.credential(),
        "identity": options(ctx).get("identity", context.identity),
        "software": "malamute command",
    }


def _is_traced(ctx: typer.Context) -> bool:
    """Whether the command is to be traced: the option says it, else the context."""
    from malamute_py.cli.contexts import chosen

    asked: bool | None = options(ctx).get("tracing")
    return bool(chosen(options(ctx)).tracing) if asked is None else asked


@contextmanager
def _telling_why_unreachable(
    endpoints: Any, watch: _Watch, credential: Credential
) -> Iterator[None]:
    """Turn a failed attempt to connect into CommandFailed, which says why no broker answered."""
    try:
        yield
    except (Timeout, ConnectionLost):
        from malamute_py.client.settings import NO_ANSWER, PAUSED, Plain

        # Silence may also mean that the broker makes those who gave a wrong password wait.
        following = PAUSED if not watch.reason and isinstance(credential, Plain) else ""
        raise unreachable(", ".join(endpoints), watch.reason or NO_ANSWER, following) from None


@contextmanager
def _telling_why_lost(watch: _Watch) -> Iterator[None]:
    """Raise ConnectionLost with the reason that the watch was told, in place of a vaguer one."""
    try:
        yield
    except ConnectionLost as error:
        if watch.reason:
            raise ConnectionLost(watch.reason) from error
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; a second one is not held back.

    For work that must not be torn apart, such as printing a record and noting that it is printed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone.
        return
    came: list[int] = []

    def interrupted(number: int, frame: Any) -> None:
        """Note Ctrl-C for the end of the block; called by Python for each signal."""
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
