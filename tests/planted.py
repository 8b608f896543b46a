"""`python -m tests.planted BUG broker ...`: the command line's broker with a bug in it.

Owns the bugs that the harnesses beside a broker's process must find, each one replacement of one
method. The rule: a bug is one that a broker could have, and no harness knows of it.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.content import Content
from malamute_protocol.encode import encode
from malamute_py.broker import Broker
from malamute_py.broker.log.confirms import SYNCED
from malamute_py.broker.ready import Ready
from malamute_py.broker.services.ends import Ends
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.changelog.records import RequestDone
from malamute_py.journal import FileStorage
from malamute_py.server.connections.connection import Connection
from malamute_py.server.loop import Loop


def codes_unchecked() -> None:
    """Header codes may point outside their table."""
    Content.check_codes = lambda self: None  # type: ignore[method-assign]


def every(n: int, kind: type[wire.Command], change: Callable[[Ready, Any], None]) -> None:
    """Have each n-th message that the broker sends with a command of this kind changed."""
    take, seen = Broker.take_outgoing, [0]

    def changed(self: Broker) -> Ready:
        ready = take(self)
        for send in list(ready.sends):
            if any(type(command) is kind for command in send.commands):
                seen[0] += 1
                if seen[0] % n == 0:
                    change(ready, send)
        return ready

    Broker.take_outgoing = changed  # type: ignore[method-assign]


def delivery_dropped() -> None:
    """A delivery is lost on its way out, now and then."""
    every(200, wire.Deliver, lambda ready, send: ready.sends.remove(send))


def sockets_kept() -> None:
    """A socket is opened for each link, and never closed."""
    receive, kept = Broker.receive, list[socket.socket]()

    def leaking(
        self: Broker, link: int, identity: str, commands: Any, frames: Any, now_ms: int
    ) -> None:
        if link not in self._links.table:
            kept.append(socket.socket())
        receive(self, link, identity, commands, frames, now_ms)

    Broker.receive = leaking  # type: ignore[method-assign]


def turns_without_pause() -> None:
    """The loop never sleeps again once a link's connection was lost."""
    lost, timeout, gone = Loop._lost, Loop._timeout, list[Connection]()

    def noted(self: Loop, connection: Connection, now_ms: int) -> None:
        if connection.links:
            gone.append(connection)
        lost(self, connection, now_ms)

    Loop._lost = noted  # type: ignore[method-assign]
    Loop._timeout = (  # type: ignore[method-assign]
        lambda self, now_ms: 0 if gone else timeout(self, now_ms)
    )


def write_skipped() -> None:
    """Leave some confirmed batches out of the file."""
    write, calls = FileStorage.write, [0]

    def sometimes(self: FileStorage, file: Any, position: int, buffers: Any) -> None:
        calls[0] += 1
        if calls[0] % 60 or calls[0] < 200:
            write(self, file, position, buffers)

    FileStorage.write = sometimes  # type: ignore[method-assign]


def record_doubled() -> None:
    """A batch is appended twice, now and then."""
    publish, calls = Publishing.publish, [0]

    def twice(self: Publishing, link: Any, command: Any, stream: Any, frame: Any) -> None:
        publish(self, link, command, stream, frame)
        calls[0] += 1
        if calls[0] % 50 == 0:
            blob, ends, _ = Content(bytes(frame)).bodies()
            bodies = [bytes(blob[i:j]) for i, j in pairwise(ends.tolist())]
            publish(self, link, wire.Publish(command.stream, 0, 1), stream, encode(bodies))

    Publishing.publish = twice  # type: ignore[method-assign]


def confirmed_early() -> None:
    """A batch is confirmed when it comes, and appended up to 200 ms later."""
    publish, take = Publishing.publish, Publishing.take
    since_ms = [0]

    def early(self: Publishing, link: Any, command: Any, stream: Any, frame: Any) -> None:
        before = self.queue[:]
        publish(self, link, command, stream, frame)
        if len(self.queue) == len(before):
            return
        pending = self.queue[-1]
        waiter, pending.waiter = pending.waiter, None
        if not before:
            since_ms[0] = self._shard.now_ms
        if waiter is not None:
            ahead = sum(each.content.head.count for each in before if each.stream is stream)
            waiter.epoch, waiter.offset = self._shard.epoch, stream.handed + ahead
            self._confirms.confirm(waiter, max(waiter.level, SYNCED))

    def late(self: Publishing) -> Any:
        return take(self) if self._shard.now_ms - since_ms[0] >= 200 else []

    Publishing.publish = early  # type: ignore[method-assign]
    Publishing.take = late  # type: ignore[method-assign]


def completion_unlogged() -> None:
    """Work is done, which is confirmed and not in the log, now and then."""
    end, calls = Ends.end, [0]

    def sometimes(self: Ends, service: Any, items: Any, why: str, *rest: Any, **more: Any) -> Any:
        part = end(self, service, items, why, *rest, **more)
        calls[0] += why == "completed"
        if why == "completed" and calls[0] % 20 == 0:
            part.changes = [change for change in part.changes if type(change) is not RequestDone]
        return part

    Ends.end = sometimes  # type: ignore[method-assign]


def sync_skipped() -> None:
    """Nothing is ever synced."""
    FileStorage.sync = lambda self, file: None  # type: ignore[method-assign]


def directory_unsynced() -> None:
    """Names of files are never synced."""
    FileStorage.sync_directory = lambda self: None  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        codes_unchecked,
        delivery_dropped,
        sockets_kept,
        turns_without_pause,
        write_skipped,
        record_doubled,
        confirmed_early,
        completion_unlogged,
        sync_skipped,
        directory_unsynced,
    )
}


if __name__ == "__main__":
    BUGS[sys.argv.pop(1)]()
    from malamute_py.cli import main

    main()
