"""A small broker on a ROUTER in a thread: enough to try the shells against, and to be nasty.

Keeps streams as lists of batches in memory; everything is confirmed at once; delivery
ignores credit. It survives stop() and start() on the same port, as a broker on disk would.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from malamute_protocol import commands as c
from malamute_protocol.batch import Content
from malamute_protocol.commands import Command
from malamute_protocol.framing import decode_message, encode_message
from tests.client.script import STREAM_UUID, stamped, welcome
from tests.ports import Port
from tests.waiting import WAIT_S


class FakeBroker:
    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._port = Port()
        self.epoch = 0
        self.streams: dict[str, list[tuple[int, bytes]]] = {}
        self.sequences: dict[tuple[int, str], int] = {}
        self.producers = 0
        self.confirming = True
        """False: publishes are swallowed without an answer, and forgotten."""
        self.refusing = ""
        """A code that every HELLO is refused with."""
        self.heard: list[Command] = []
        self.links = 0
        self._readers: list[tuple[bytes, int, str]] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._bound = threading.Event()
        self.start()

    @property
    def endpoint(self) -> str:
        return self._port.endpoint

    def start(self) -> None:
        self.epoch += 1
        self._stop.clear()
        self._bound.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(WAIT_S)

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.stop()
        self.context.term()
        self._port.close()

    def wait_for(self, heard: Callable[[list[type[Command]]], bool]) -> None:
        """Wait until what was heard is as the test wants."""
        deadline = time.monotonic() + WAIT_S
        while not heard([type(command) for command in list(self.heard)]):
            assert time.monotonic() < deadline, "the broker did not hear it"
            time.sleep(0.005)

    def next(self, stream: str) -> int:
        return sum(Content(content).head.count for _, content in self.streams.get(stream, []))

    def _run(self) -> None:
        socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.router_mandatory = True
        self._bind(socket)
        self._bound.set()
        self._readers = []
        while not self._stop.is_set():
            if socket.poll(5):
                link, *frames = socket.recv_multipart()
                for command, contents in decode_message(frames):
                    self.heard.append(command)
                    for to, answer, payload in self._answer(link, command, contents):
                        with contextlib.suppress(zmq.ZMQError):  # the peer may be gone
                            socket.send_multipart([to, *encode_message([answer], payload)])
        socket.close()

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        """Bind to the one port: the end of the socket before comes a little after its close."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                socket.bind(self.endpoint)
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def _answer(self, link: bytes, command: Command, contents: Any) -> list[Any]:
        match command:
            case c.Hello() if self.refusing:
                return [(link, c.Refused(1, 0, self.refusing, "as the test wants"), ())]
            case c.Hello():
                self.links += 1
                # No client counts as silent because the machine gives a thread no turn for seconds.
                facts = {"heartbeat_ms": 5_000, "expiry_ms": 60_000, "batch_records_max": 65536}
                return [(link, welcome(epoch=self.epoch, **facts), ())]
            case c.Ping():
                return [(link, c.Pong(command.token), ())]
            case c.OpenProducer():
                if not command.id:
                    self.producers += 1
                number = command.id or self.producers
                following = {
                    stream: sequence
                    for (producer, stream), sequence in self.sequences.items()
                    if producer == number
                }
                value = {"id": number, "epoch": 0, "next": following}
                return [(link, c.Result(command.request, value), ())]
            case c.Publish():
                return self._publish(link, command, contents[0])
            case c.Subscribe():
                return self._subscribe(link, command)
            case c.Unsubscribe():
                self._readers = [
                    entry for entry in self._readers if entry[1] != command.subscription
                ]
                return [(link, c.Ended(command.subscription, 0, "cancelled"), ())]
            case c.StreamInfo() if command.stream not in self.streams:
                refusal = c.Refused(33, command.request, "unknown_stream", command.stream)
                return [(link, refusal, ())]
            case c.StreamInfo():
                value = {"uuid": STREAM_UUID, "tail": self.next(command.stream), "odd": 1}
                return [(link, c.Result(command.request, value), ())]
            case _:
                return []

    def _publish(self, link: bytes, command: c.Publish, content: bytes) -> list[Any]:
        if not self.confirming:
            return []
        head = Content(content).head
        Content(content).verify()
        answers: list[Any] = []
        key = (head.producer_id, command.stream)
        duplicate = head.producer_id and head.first_sequence < self.sequences.get(key, 0)
        if head.producer_id and head.first_sequence > self.sequences.get(key, 0):
            refusal = c.Refused(10, command.tracker, "out_of_sequence")
            return [(link, refusal, ())]
        base = self.next(command.stream)
        if not duplicate:
            self.sequences[key] = head.first_sequence + head.count
            self.streams.setdefault(command.stream, []).append((base, content))
            for reader, number, stream in self._readers:
                if stream == command.stream:
                    deliver = c.Deliver(number, base, base + head.count, 2)
                    answers.append((reader, deliver, stamped(content, base)))
        if command.tracker:
            confirm = c.Confirm(command.tracker, 3, self.epoch, base, 1_700_000_000_000)
            answers.append((link, confirm, ()))
        return answers

    def _subscribe(self, link: bytes, command: c.Subscribe) -> list[Any]:
        number = command.subscription
        if command.stream == "forbidden":
            return [(link, c.Refused(12, number, "forbidden", "not yours"), ())]
        tail = self.next(command.stream)
        begin = {0: 0, 1: tail}.get(command.start[0], command.start[1:2])
        first = begin[0] if isinstance(begin, list) else begin
        end = tail if command.until == "tail" else command.end
        answers: list[Any] = [
            (link, c.Subscribed(number, STREAM_UUID, self.epoch, first, 0, tail, end), ())
        ]
        for base, content in self.streams.get(command.stream, []):
            if base >= first:
                count = Content(content).head.count
                deliver = c.Deliver(number, base, base + count, 2)
                answers.append((link, deliver, stamped(content, base)))
        if end >= 0:
            answers.append((link, c.Ended(number, tail), ()))
        else:
            self._readers.append((link, number, command.stream))
        return answers
