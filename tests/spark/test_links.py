"""Connecting: what is told soon, what is waited for, and how long."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from malamute_protocol.errors import ConnectionLost
from malamute_py.client.session.events import Unlinked
from malamute_py.client.settings import Curve, Plain
from malamute_py.config import Authentication
from malamute_py.server import Server
from pyspark_malamute import links
from pyspark_malamute.errors import SourceUnavailable
from pyspark_malamute.kept_links import KEPT
from pyspark_malamute.option_values import LinkOptions
from pyspark_malamute.options import SourceOptions, parse_options
from pyspark_malamute.sink_options import SinkOptions, parse_sink_options
from tests.ports import Port
from tests.spark.conftest import serve
from tests.spark.scripted import Clock

LONG = {"connectTimeoutMs": "600000"}
"""A test that ends by it does not end."""


def options(endpoint: str, **more: str) -> SourceOptions:
    return parse_options({"endpoint": endpoint, "stream": "s", **more})


def sink_options(endpoint: str, **more: str) -> SinkOptions:
    given = {"endpoint": endpoint, "stream": "s", **more}
    return parse_sink_options(given, streaming=False)


BOTH_SIDES = pytest.mark.parametrize("side", [options, sink_options])


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Pauses between attempts cost no time."""
    clock = Clock()
    monkeypatch.setattr("pyspark_malamute.links.sleep", clock.sleep)
    monkeypatch.setattr("pyspark_malamute.links.monotonic", clock.read)
    return clock


@pytest.fixture(autouse=True)
def nothing_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_REACHED", OrderedDict())


class Attempts:
    """connect_sync() whose attempts fail in the ways that are listed; the last one goes on."""

    def __init__(self, *codes: str) -> None:
        self._codes = list(codes)
        self.endpoints: list[str] = []
        self.asked: dict[str, Any] = {}

    def connect(self, endpoints: tuple[str, ...], **asked: Any) -> Any:
        assert asked["wait"] is False
        self.asked = asked
        self.endpoints.append(endpoints[0])
        code = self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]
        if code == "linked":
            return self
        asked["on_link"](Unlinked(code, "a reason", 0, False))
        raise ConnectionLost("a reason")

    def close(self) -> None:
        pass


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Any:
    def script(*codes: str) -> Attempts:
        made = Attempts(*codes)
        monkeypatch.setattr(links, "connect_sync", made.connect)
        return made

    return script


@BOTH_SIDES
def test_a_broker_that_is_not_there_yet_is_tried_until_the_time_is_over(
    attempts: Any, clock: Clock, side: Callable[..., LinkOptions]
) -> None:
    made = attempts(*["closed"] * 9, "linked")
    assert links.link(side("tcp://a:1", **LONG)) is made
    KEPT.forget()
    began_s = clock.now_s
    attempts("closed")
    with pytest.raises(SourceUnavailable, match="Is the broker running there"):
        links.link(side("tcp://b:1", connectTimeoutMs="20000"))
    assert 18 < clock.now_s - began_s <= 20


@BOTH_SIDES
def test_a_broker_that_was_reached_is_waited_for_as_long_as_an_outage_may_be(
    attempts: Any, clock: Clock, side: Callable[..., LinkOptions]
) -> None:
    attempts("closed")
    began_s = clock.now_s
    given = side("tcp://c:1", connectTimeoutMs="5", brokerOutageMs="40000")
    with pytest.raises(SourceUnavailable, match="Is the broker running there"):
        links.link(given, reached_broker=True)
    assert 38 < clock.now_s - began_s <= 40


@BOTH_SIDES
def test_what_the_options_say_of_a_link_is_asked_for(
    attempts: Any, side: Callable[..., LinkOptions]
) -> None:
    made = attempts("linked")
    links.link(side("tcp://a:1", requestTimeoutMs="1234", user="ann", password="of ann"))
    assert made.asked["call_timeout_ms"] == 1234
    assert made.asked["credential"] == Plain("ann", "of ann")
    links.link(options("tcp://a:1", identity="spark-1"))
    assert made.asked["identity"] == "spark-1"
    key = "k" * 39
    curve = {"curveServerKey": f"{key}1", "curvePublicKey": f"{key}2", "curveSecretKey": f"{key}3"}
    links.link(side("tcp://a:1", **curve))
    assert made.asked["credential"] == Curve(f"{key}1", f"{key}2", f"{key}3")
    KEPT.forget()


def test_several_endpoints_are_tried_in_turn(attempts: Any) -> None:
    made = attempts("closed", "closed", "closed", "linked")
    links.link(parse_options({"endpoints": "tcp://a:1,tcp://b:2", "stream": "s"}))
    KEPT.forget()
    assert made.endpoints == ["tcp://a:1", "tcp://b:2"] * 2


def test_a_handshake_that_fails_once_is_a_broker_that_is_about_to_go(attempts: Any) -> None:
    made = attempts(*["handshake", "closed"] * 9, "linked")
    assert links.link(options("tcp://a:1", **LONG)) is made
    KEPT.forget()


@pytest.mark.parametrize("code", ["handshake", "unknown_host", "closed"])
def test_a_broker_that_was_reached_is_waited_for_whatever_its_absence_looks_like(
    attempts: Any, clock: Clock, code: str
) -> None:
    chosen = options("tcp://a:1", connectTimeoutMs="1000", brokerOutageMs="90000")
    for reach in ("by this process", "by another"):
        if reach == "by this process":
            attempts("linked")
            links.link(chosen)
            links.drop(chosen)
        began_s = clock.now_s
        attempts(code)
        with pytest.raises(SourceUnavailable):
            links.link(chosen, reached_broker=reach == "by another")
        assert 88 < clock.now_s - began_s <= 90
        assert links.is_away(chosen, reached_broker=reach == "by another")
        links._REACHED.clear()
    assert not links.is_away(chosen)


@pytest.mark.moderate
def test_threads_that_need_the_link_of_a_credential_at_once_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    made: list[str] = []

    def connect(endpoints: tuple[str, ...], **_: object) -> Any:
        made.append(endpoints[0])
        begun.release()
        assert may_end.wait(60)
        return Attempts("linked")

    monkeypatch.setattr(links, "connect_sync", connect)
    with ThreadPoolExecutor(3) as threads:
        first, second = (threads.submit(links.link, options("tcp://a:1")) for _ in range(2))
        # One of another key does not wait for them.
        threads.submit(links.link, options("tcp://b:1"))
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60)
        assert not begun.acquire(timeout=0.2)
        with pytest.raises(SourceUnavailable, match="another thread of this process"):
            links.link(options("tcp://a:1", connectTimeoutMs="1"))
        may_end.set()
        assert first.result(60) is second.result(60)
    assert sorted(made) == ["tcp://a:1", "tcp://b:1"]
    assert not KEPT._turns
    KEPT.forget()


def test_the_brokers_that_were_reached_last_are_known(
    attempts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_REACHED_MAX", 2)
    attempts("linked")
    for name in "abac":
        links.link(options(f"tcp://{name}:1"))
        links.drop(options(f"tcp://{name}:1"))
    assert [key[0] for key in links._REACHED] == [("tcp://a:1",), ("tcp://c:1",)]


def test_a_host_without_address_is_told_soon_and_by_name() -> None:
    with pytest.raises(
        SourceUnavailable, match=r"no-such-host\.invalid.* has no address"
    ) as caught:
        links.link(options("tcp://no-such-host.invalid:9797", **LONG))
    assert "Correct option 'endpoint'" in str(caught.value)


class Guarded:
    """A broker that asks for CURVE, and the keys that it takes."""

    def __init__(self, directory: Path) -> None:
        self.public, secret = (key.decode() for key in zmq.curve_keypair())
        self.pair = [key.decode() for key in zmq.curve_keypair()]
        key_file = directory / "key"
        key_file.write_text(secret)
        key_file.chmod(0o600)
        section = Authentication(
            mechanism="curve", server_key_file=str(key_file), clients={"reader": self.pair[0]}
        )
        self.server: Server = serve(directory / "data", authentication=section)

    def options(self, server_key: str) -> dict[str, str]:
        return {
            "curveServerKey": server_key, "curvePublicKey": self.pair[0],
            "curveSecretKey": self.pair[1],
        }  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    with made.server:
        yield made


@pytest.mark.moderate
def test_a_wrong_key_of_the_broker_is_told_soon_and_by_name(guarded: Guarded) -> None:
    endpoint = guarded.server.endpoints[0]
    other = zmq.curve_keypair()[0].decode()
    with pytest.raises(SourceUnavailable, match="Is curveServerKey the public key of that broker"):
        links.link(options(endpoint, **LONG, **guarded.options(other)))
    right = options(endpoint, **guarded.options(guarded.public))
    assert links.link(right).linked
    links.drop(right)


@pytest.mark.moderate
def test_a_credential_of_another_kind_is_told_soon_and_by_name(guarded: Guarded) -> None:
    endpoint = guarded.server.endpoints[0]
    for more, given in (({}, "no credential"), ({"user": "u", "password": "p"}, "user and pass")):
        with pytest.raises(SourceUnavailable, match=rf"refused the credential|than {given}"):
            links.link(options(endpoint, **LONG, **more))


@pytest.mark.moderate
def test_a_broker_that_starts_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Port() as port:
        server = serve(tmp_path / "broker", port.endpoint)
        monkeypatch.setattr("pyspark_malamute.links.sleep", lambda _: server.start())
        chosen = options(port.endpoint, **LONG)
        assert links.link(chosen).linked
        links.drop(chosen)
        server.stop()
