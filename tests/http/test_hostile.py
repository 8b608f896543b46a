"""Attacks on the HTTP side: its bounds hold, and the broker does not notice.

The rule: the deadline of a connection is an hour unless a test is about it, so that nothing here
hangs on how fast the machine is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.http.application import application
from malamute_py.http.connections import INCOMPLETE_BYTES_MAX
from malamute_py.http.source import Source
from tests.http.running import RunningHttp, at, until

HOUR_MS = 3_600_000
MOST = 8
REQUEST = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tcp=True) as running:
        yield running


@pytest.fixture
def patient(broker: EmbeddedBroker) -> Iterator[RunningHttp]:
    with at(broker, connections_max=MOST, request_ms=HOUR_MS) as running:
        running.samples()
        yield running


@pytest.fixture
def hurried(broker: EmbeddedBroker) -> Iterator[RunningHttp]:
    with at(broker, request_ms=200) as running:
        yield running


def ended(connection: socket.socket) -> bytes:
    """Return the bytes that come until the connection ends."""
    found = b""
    try:
        while data := connection.recv(65_536):
            found += data
    except ConnectionError:
        pass
    return found


@pytest.mark.moderate
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /livez", REQUEST[:-2], b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"],
    ids=["nothing", "a line that does not end", "a head that does not end", "a body that is late"],
)
def test_a_connection_that_does_not_come_to_the_point_ends(
    hurried: RunningHttp, sent: bytes
) -> None:
    with hurried.connect() as connection:
        connection.sendall(sent)
        assert b"200 OK" not in ended(connection)
    until(lambda: len(hurried.serving.bounds) == 0)


@pytest.mark.moderate
def test_a_client_that_sends_a_byte_now_and_then_gets_no_more_time(hurried: RunningHttp) -> None:
    with hurried.connect() as connection:
        sent = 0
        try:
            while True:
                connection.sendall(REQUEST[sent : sent + 1])
                sent = min(sent + 1, len(REQUEST) - 2)
                connection.settimeout(0.01)
                try:
                    if connection.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
        except ConnectionError:
            pass
    until(lambda: len(hurried.serving.bounds) == 0)
    assert hurried.serving.bounds.cut >= 1


@pytest.mark.moderate
def test_a_client_that_does_not_read_its_answer_loses_it(hurried: RunningHttp) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with connection:
        connection.connect(hurried.address)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: len(hurried.serving.bounds) == 0)


@pytest.mark.moderate
def test_a_head_without_end_is_refused_once_it_is_too_long(patient: RunningHttp) -> None:
    with patient.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        line = b"x-filler: " + 1_000 * b"a" + b"\r\n"
        try:
            for _ in range(2 * INCOMPLETE_BYTES_MAX // len(line)):
                connection.sendall(line)
        except ConnectionError:
            pass
        assert ended(connection)[:12] in (b"HTTP/1.1 400", b"")
    until(lambda: len(patient.serving.bounds) == 0)


@pytest.mark.moderate
def test_a_body_is_neither_read_nor_kept(patient: RunningHttp) -> None:
    with patient.connect() as connection:
        connection.sendall(
            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999\r\n\r\n"
        )
        try:
            for _ in range(64):
                connection.sendall(65_536 * b"a")
        except ConnectionError:
            pass
        assert ended(connection)[:12] in (b"HTTP/1.1 413", b"")
    until(lambda: len(patient.serving.bounds) == 0)


async def test_zeros_before_the_length_of_a_body_do_not_hide_it_where_the_parser_takes_them() -> (
    None
):
    answered: list[Any] = []

    async def send(message: Any) -> None:
        answered.append(message)

    async def receive() -> Any:
        raise AssertionError("the body was read")

    await application(Source(1), "")(
        {
            "type": "http", "method": "GET", "path": "/livez", "raw_path": b"/livez",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-length", b"0" * 20 + b"9")],
        },
        receive, send,
    )  # fmt: skip
    assert answered[0]["status"] == 413


@pytest.mark.moderate
@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\xfe garbage \r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS greeting\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_the_connection_ends(
    patient: RunningHttp, sent: bytes
) -> None:
    with patient.connect() as connection:
        connection.sendall(sent)
        assert ended(connection)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 505", b"")


@pytest.mark.moderate
def test_requests_that_follow_on_one_connection_are_not_answered(patient: RunningHttp) -> None:
    with patient.connect() as connection:
        connection.sendall(100 * REQUEST)
        assert ended(connection).count(b"HTTP/1.1 200") == 1


@pytest.mark.moderate
def test_an_upgrade_is_not_taken_up(patient: RunningHttp) -> None:
    with patient.connect() as connection:
        connection.sendall(
            b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert b"101" not in ended(connection).splitlines()[0]


@pytest.mark.moderate
def test_connections_that_say_nothing_keep_nobody_out(patient: RunningHttp) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(patient.connect()) for _ in range(4 * MOST)]
        assert patient.get("/livez").status == 200
        assert len(patient.serving.bounds) <= MOST
        # The oldest went, and went at once.
        assert ended(silent[0]) == b""
    until(lambda: len(patient.serving.bounds) == 0)


@pytest.mark.moderate
def test_a_crowd_from_one_address_takes_nothing_from_another(patient: RunningHttp) -> None:
    with ExitStack() as stack:
        quiet = socket.create_connection(patient.address, source_address=("127.0.0.2", 0))
        stack.enter_context(quiet)
        for _ in range(4 * MOST):
            stack.enter_context(patient.connect())
        until(lambda: len(patient.serving.bounds) == MOST)
        quiet.sendall(REQUEST)
        assert b"200 OK" in ended(quiet)


@pytest.mark.moderate
def test_the_broker_answers_one_question_a_second_whoever_asks(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_at: list[float] = []
    monkeypatch.setattr(
        "malamute_py.http.serving.Source",
        partial(Source, clock=lambda: stands_at[0] if stands_at else time.monotonic()),
    )

    def messages() -> int:
        return int(broker.server.metrics()["shell"]["messages_in_total"])

    with at(broker) as http, broker.connect_sync() as client:
        http.samples()
        stands_at.append(time.monotonic())
        for second in range(3):
            stands_at[0] += 1
            asked = messages()
            assert http.get("/metrics").status == 200
            before = messages()
            assert before > asked
            for _ in range(100):
                assert http.get("/metrics").status == 200
            # Each question is of several messages; some are signs of life.
            assert messages() - before < 100
            assert client.publish("trades", b"x").offset == second
