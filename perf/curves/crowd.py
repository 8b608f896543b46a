"""Many clients in one process: links that are open, subscribe, and answer heartbeats.

python -m perf.curves.crowd ENDPOINT CLIENTS SUBSCRIPTIONS STREAM FIRST

Owns so many DEALER sockets of libzmq and no client of ours on top: 10,000 of those would take the
machine, and the broker is to be measured. On the wire they look like idle clients: a HELLO,
subscriptions that match nothing, a PONG for each PING. Prints `ready` when all are welcomed and
subscribed; ends with standard input; at a line with `bye` all links end at once and without a
goodbye.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from typing import Any

import zmq

from malamute_protocol import commands as wire
from malamute_protocol.framing import decode_message, encode_message

SUBSCRIBES_A_MESSAGE = 100
WELCOMING_MAX = 200
"""Links that are opened at a time: more would only wait in the listener's backlog."""
CREDIT = 1 << 40
PATIENCE_S = 120


class Crowd:
    """The links of one process."""

    def __init__(self, endpoint: str, subscriptions: int, stream: str) -> None:
        self._endpoint = endpoint
        self._subscriptions = subscriptions
        self._stream = stream
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 16)
        self._selector = selectors.DefaultSelector()
        self._left: dict[Any, int] = {}
        """Socket -> answers that it waits for."""

    def open(self, number: int) -> None:
        """Connect one client, and send all its commands."""
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(self._endpoint)
        session = os.urandom(16)
        client.send_multipart(encode_message([wire.Hello((1, 1), session, software="crowd")]))
        self._left[client] = 1 + self._subscriptions
        for first in range(0, self._subscriptions, SUBSCRIBES_A_MESSAGE):
            last = min(first + SUBSCRIBES_A_MESSAGE, self._subscriptions)
            client.send_multipart(
                encode_message(
                    [
                        wire.Subscribe(
                            n, self._stream, ["topic", f"idle.{number}.{n}.*"], [1], CREDIT, CREDIT
                        )
                        for n in range(first, last)
                    ]
                )
            )
        descriptor = int(client.getsockopt(zmq.FD))
        self._selector.register(descriptor, selectors.EVENT_READ, client)
        self._drain(client)

    def _drain(self, client: Any) -> None:
        """Take the messages that have come; the descriptor tells of an edge only."""
        while True:
            try:
                frames = client.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for command, _ in decode_message(frames):
                if isinstance(command, wire.Ping):
                    client.send_multipart(encode_message([wire.Pong(command.token)]))
                elif isinstance(command, wire.Welcome | wire.Subscribed):
                    self._left[client] -= 1
                    if not self._left[client]:
                        del self._left[client]
                elif isinstance(command, wire.Refused | wire.Bye):
                    raise SystemExit(f"the broker refused an idle client: {command}")

    def turn(self, timeout_s: float) -> bool:
        """Answer the messages that have come; False when standard input has ended."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is sys.stdin:
                return False
            self._drain(key.data)
        return True

    def run(self, clients: int, first: int) -> None:
        """Open so many links, report it, and hold them until standard input ends."""
        until = time.monotonic() + PATIENCE_S
        number = first
        while number < first + clients or self._left:
            if number < first + clients and len(self._left) < WELCOMING_MAX:
                self.open(number)
                number += 1
                self.turn(0)
            else:
                self.turn(0.05)
                for client in list(self._left):
                    self._drain(client)
            if time.monotonic() > until:
                raise SystemExit(f"{len(self._left)} clients were not answered in {PATIENCE_S} s")
        print("ready", flush=True)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while self.turn(None):  # type: ignore[arg-type]
            pass
        os._exit(0)


def main() -> None:
    endpoint, clients, subscriptions, stream, first = sys.argv[1:]
    Crowd(endpoint, int(subscriptions), stream).run(int(clients), int(first))


if __name__ == "__main__":
    main()
