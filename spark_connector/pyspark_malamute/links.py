"""Links to the broker, one a process and credential, and what a refusal means in words.

Owns the process's links. The rules: a link is made when it is first needed, never before a
fork, and serves the tasks that follow in the same process; one that failed is dropped and
never used again; the client's errors become sentences that name the option to look at.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    MalamuteError,
    ProtocolError,
    Timeout,
)
from malamute_py.client.settings import Curve, Plain
from malamute_py.client.sync.client import SyncClient, connect_sync
from pyspark_malamute.errors import SourceUnavailable
from pyspark_malamute.options import SourceOptions

_Key: TypeAlias = tuple[Any, ...]
_LINKS: Final[dict[_Key, SyncClient]] = {}
"""Pid, endpoints and credential -> link. The pid: a fork must not use its parent's sockets."""


def _key(options: SourceOptions) -> _Key:
    return (
        os.getpid(),
        options.endpoints,
        options.user,
        options.password,
        options.curve_keys,
        options.identity,
    )


def link(options: SourceOptions) -> SyncClient:
    """This process's link to the broker. Raises SourceUnavailable."""
    key = _key(options)
    found = _LINKS.get(key)
    if found is None:
        with explained(options, "connect"):
            found = _LINKS[key] = open_link(options)
    return found


def open_link(options: SourceOptions) -> SyncClient:
    """A link of the caller's own. Raises MalamuteError."""
    credential: Plain | Curve | None = None
    if options.user:
        credential = Plain(options.user, options.password)
    elif options.curve_keys[0]:
        credential = Curve(*options.curve_keys)
    return connect_sync(
        options.endpoints,
        timeout_ms=options.connect_timeout_ms,
        credential=credential,
        identity=options.identity,
        software="pyspark-malamute",
        retry_max_ms=1_000,
    )


def drop(options: SourceOptions) -> None:
    """Close this process's link, if there is one; the next use makes another."""
    found = _LINKS.pop(_key(options), None)
    if found is not None:
        with contextlib.suppress(MalamuteError):
            found.close()


@contextlib.contextmanager
def deadline(client: SyncClient, timeout_ms: int) -> Iterator[None]:
    """End the client when the block takes longer, so that its call raises; raises Timeout."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        client.abort()

    timer = threading.Timer(timeout_ms / 1000, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ConnectionLost as error:
        if late.is_set():
            raise Timeout(f"no answer within {timeout_ms} ms") from error
        raise
    finally:
        timer.cancel()


@contextlib.contextmanager
def explained(options: SourceOptions, doing: str) -> Iterator[None]:
    """Turn the client's errors into SourceUnavailable; doing: what was being tried."""
    try:
        yield
    except BrokerRefused as error:
        raise SourceUnavailable(_refusal(error, options, doing)) from error
    except (Timeout, ConnectionLost) as error:
        raise SourceUnavailable(
            f"malamute source: could not {doing} at {_place(options)}: {error}. Is the broker "
            "running there, and can the driver and the executors reach it? If it is somewhere "
            "else, correct option 'endpoint'."
        ) from error
    except ProtocolError as error:
        raise SourceUnavailable(
            f"malamute source: could not {doing} at {_place(options)}, for the protocol was "
            f"broken: {error}. Do broker and connector have versions that fit each other?"
        ) from error


def _place(options: SourceOptions) -> str:
    return ", ".join(options.endpoints)


def _refusal(error: BrokerRefused, options: SourceOptions, doing: str) -> str:
    where, stream = _place(options), options.stream
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
                f"{where} does not allow this identity to {doing} ({error.reason}). Have read "
                f"permission on stream '{stream}' given to it, or use another credential"
            )
        case "bad_pattern" | "unknown_pattern_kind":
            what = (
                f"{where} refused the pattern '{options.pattern_text}' ({error.reason}). "
                "Correct option 'pattern'"
            )
        case _:
            what = f"{where} refused to {doing}, stream '{stream}': {error}"
    return f"malamute source: {what}"
