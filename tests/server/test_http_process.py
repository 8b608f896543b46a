"""The HTTP side that a broker starts: its credential, and its life beside the broker's."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from malamute_py import EmbeddedBroker, connect_sync
from malamute_py.client.settings import Plain
from malamute_py.config import from_table
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.credentials import hash_password
from malamute_py.server.http_process import USER, HttpCredential, admit, first_line
from malamute_py.server.sockets import parse_endpoint
from tests.http.console.browsing import Browser
from tests.http.running import parsed, until
from tests.server.daemon import Daemon
from tests.server.fakes import Lines

LOCAL = {"http": {"bind": "127.0.0.1:0"}}
HASH = hash_password("secret")


class Listening:
    """The part of a listener that the first line is made of."""

    def __init__(self, text: str, authenticated: bool = False) -> None:
        self.endpoint = parse_endpoint(text)
        self.name = text
        self.authenticated = authenticated


def told(*listeners: Listening, credential: HttpCredential = HttpCredential()) -> dict[str, Any]:  # noqa: B008
    http = from_table(LOCAL).http
    line = first_line(http, listeners, credential, "key of the broker")  # type: ignore[arg-type]
    start: dict[str, Any] = msgspec.json.decode(line)
    return start


# --- the credential ----------------------------------------------------------------------------


def test_without_an_address_nothing_changes() -> None:
    config = from_table({})
    assert admit(config) == (config, HttpCredential())


@pytest.mark.moderate
def test_with_passwords_the_http_side_is_a_user_of_this_run() -> None:
    config = from_table({**LOCAL, "authentication": {"mechanism": "plain", "users": {"a": HASH}}})
    (one, first), (_, second) = admit(config), admit(config)
    assert one.authentication.users.keys() == {"a", USER}
    assert first.password != second.password
    assert first.password not in str(one)
    assert admit(config, first)[0] == one, "a configuration that is read anew keeps it"


def test_with_curve_the_http_side_has_a_key_of_this_run() -> None:
    key = 40 * "a"
    config = from_table({**LOCAL, "authentication": {"mechanism": "curve", "clients": {"a": key}}})
    changed, credential = admit(config)
    assert changed.authentication.clients == {"a": key, USER: credential.public_key}


def test_it_may_look_and_not_write_unless_the_configuration_says_otherwise() -> None:
    changed, _ = admit(from_table({**LOCAL, "permissions": {"a": {"read": ["x"]}}}))
    grant = changed.permissions[USER]
    assert (grant.read, grant.receive, grant.request) == (["*"], ["*"], ["*"])
    assert (grant.write, grant.send, grant.work, grant.admin) == ([], [], [], False)
    own = from_table({**LOCAL, "permissions": {USER: {"read": ["x"]}}})
    assert admit(own)[0].permissions == own.permissions


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"listen": ["inproc://x"]}, "needs a tcp or ipc endpoint"),
        ({"authentication": {"mechanism": "plain", "users": {USER: HASH}}}, "HTTP side's"),
        ({"authentication": {"mechanism": "curve", "clients": {USER: 40 * "a"}}}, "HTTP side's"),
    ],
)
def test_a_broker_whose_http_side_could_not_work_does_not_start(
    table: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        admit(from_table({**LOCAL, **table}))


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("tcp://0.0.0.0:9797", "tcp://127.0.0.1:9797"),
        ("tcp://[::]:9797", "tcp://[::1]:9797"),
        ("tcp://10.1.2.3:9797", "tcp://10.1.2.3:9797"),
        ("ipc:///run/malamute.sock", "ipc:///run/malamute.sock"),
    ],
)
def test_a_wildcard_is_asked_at_this_machine(endpoint: str, reached: str) -> None:
    assert told(Listening("inproc://x"), Listening(endpoint))["endpoint"] == reached


def test_the_credential_goes_with_an_endpoint_that_asks_for_it() -> None:
    open_one, guarded = Listening("ipc:///x"), Listening("tcp://127.0.0.1:1", authenticated=True)
    plain = told(open_one, guarded, credential=HttpCredential(password="p"))
    assert (plain["endpoint"], plain["user"], plain["password"]) == (guarded.name, USER, "p")
    curve = told(guarded, credential=HttpCredential(public_key="a", secret_key="b"))
    assert (curve["server_key"], curve["secret_key"]) == ("key of the broker", "b")
    assert "password" not in told(open_one, credential=HttpCredential(password="p"))


# --- the process ---------------------------------------------------------------------------------


def page(url: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def settings_of(mechanism: str, tmp_path: Path) -> dict[str, Any]:
    if mechanism == "none":
        return {}
    settings: dict[str, Any] = {
        "authentication.mechanism": mechanism,
        "permissions": {"a": {"read": ["*"], "write": ["*"]}},
    }
    if mechanism == "plain":
        return settings | {"authentication.users": {"a": HASH}}
    return settings | {
        "authentication.server_key_file": str(tmp_path / "key"),
        "authentication.clients": {"a": 40 * "a"},
    }


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("mechanism", ["none", "plain", "curve"])
def test_a_broker_shows_its_streams_whatever_it_asks_of_clients(
    mechanism: str, tmp_path: Path
) -> None:
    settings = settings_of(mechanism, tmp_path)
    with EmbeddedBroker(tcp=True, **{"http.bind": "127.0.0.1:0", **settings}) as broker:
        until(lambda: broker.server.http_url != "")
        url = broker.server.http_url
        until(lambda: page(url, "/readyz")[0] == 200)
        if mechanism == "plain":
            with connect_sync(broker.tcp_endpoint, credential=Plain("a", "secret")) as client:
                client.publish("trades", b"1")
            until(lambda: 'stream="trades"' in page(url, "/metrics")[1])
        assert parsed(page(url, "/metrics")[1])["malamute_up"] == 1
    assert page(url, "/livez")[0] == 0, "it goes with the broker"


@pytest.mark.slow
@pytest.mark.system
def test_people_log_in_at_the_http_side_that_a_broker_started(tmp_path: Path) -> None:
    settings = settings_of("plain", tmp_path)
    with EmbeddedBroker(tcp=True, **{"http.bind": "127.0.0.1:0", **settings}) as broker:
        until(lambda: broker.server.http_url != "")
        parts = urlsplit(broker.server.http_url)
        assert parts.hostname is not None
        assert parts.port is not None
        person = Browser((parts.hostname, parts.port))
        assert person.log_in("a", "wrong").status == 401
        assert person.log_in("", "").status == 401
        assert person.log_in(USER, "").status == 401
        with connect_sync(broker.tcp_endpoint, credential=Plain("a", "secret")) as client:
            client.publish("trades", b"1")
        assert person.log_in("a", "secret").status == 200
        assert "trades" in person.get("streams").words
        # A user who is no administrator is none here, either.
        assert person.get("clients").status == 403


@pytest.mark.slow
@pytest.mark.system
def test_a_process_that_dies_is_replaced_and_the_broker_does_not_notice(tmp_path: Path) -> None:
    with Daemon(tmp_path, http__bind="127.0.0.1:0") as daemon:
        first = daemon.wait_for("http_listening")
        os.kill(first["pid"], signal.SIGKILL)
        daemon.wait_for("http_ended")

        def again() -> list[dict[str, Any]]:
            return [each for each in daemon.lines if each["event"] == "http_listening"][1:]

        until(lambda: bool(again()))
        until(lambda: page(again()[0]["url"], "/readyz")[0] == 200)
        assert daemon.terminate() == 0
        assert page(again()[0]["url"], "/livez")[0] == 0


@pytest.mark.slow
@pytest.mark.system
def test_the_process_ends_with_a_broker_that_is_killed(tmp_path: Path) -> None:
    with Daemon(tmp_path, http__bind="127.0.0.1:0") as daemon:
        url = daemon.wait_for("http_listening")["url"]
        daemon.kill()
        until(lambda: page(url, "/livez")[0] == 0)


@pytest.mark.slow
@pytest.mark.system
def test_an_address_that_is_taken_is_told_and_tried_again(tmp_path: Path) -> None:
    with EmbeddedBroker(tcp=True, http__bind="127.0.0.1:0") as broker:
        until(lambda: broker.server.http_url != "")
        log = Lines()
        taken = broker.server.http_url.removeprefix("http://")
        with EmbeddedBroker(tcp=True, log=log, http__bind=taken):
            until(lambda: bool(log.of("http_ended")))
    (ended, *_) = log.of("http_ended")
    assert ended["code"] == 1
    assert "Address already in use" in ended["said"]
