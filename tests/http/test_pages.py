"""The pages, who may see them, and what a request has to be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.http.application import HEAD_BYTES_MAX, PATH_BYTES_MAX
from malamute_py.http.serving import Serving
from malamute_py.sections import ConfigError, HttpSection, read_token
from tests.http.running import RunningHttp, at, until

TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tcp=True) as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: EmbeddedBroker) -> Iterator[RunningHttp]:
    with at(broker) as running:
        running.samples()
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.mark.moderate
@pytest.mark.parametrize(("path", "name"), [("/livez", "live"), ("/readyz", "ready")])
def test_a_healthy_broker_lives_and_is_ready(http: RunningHttp, path: str, name: str) -> None:
    answer = http.get(path)
    assert answer.status == 200
    assert json.loads(answer.text) == {name: True, "reasons": [], "warnings": []}
    assert answer.headers["connection"] == "close"
    assert answer.headers["cache-control"] == "no-store"


def test_head_is_answered_without_a_body(http: RunningHttp) -> None:
    answer = http.get("/metrics", "HEAD")
    assert (answer.status, answer.text) == (200, "")


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/nothing", "GET", {}, 404),
        ("/metrics/", "GET", {}, 404),
        ("/metrics/../livez", "GET", {}, 404),
        ("/%6detrics%00", "GET", {}, 404),
        ("//evil.example/metrics", "GET", {}, 404),
        ("/metrics", "POST", {}, 405),
        ("/metrics", "DELETE", {}, 405),
        ("/metrics", "GET", {"content_length": "5"}, 413),
        ("/metrics", "GET", {"transfer_encoding": "chunked"}, 413),
        ("/" + PATH_BYTES_MAX * "a", "GET", {}, 414),
        ("/metrics?" + PATH_BYTES_MAX * "a", "GET", {}, 414),
        ("/metrics", "GET", {"x_large": HEAD_BYTES_MAX * "a"}, 431),
        ("/metrics", "GET", {"host": "evil.example"}, 421),
        ("/metrics", "GET", {"host": "localhost.evil.example:9798"}, 421),
        ("/livez", "GET", {"host": "localhost:9798"}, 200),
        ("/livez", "GET", {"host": "[::1]:9798"}, 200),
    ],
)
def test_what_is_no_plain_question_is_refused(
    http: RunningHttp, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    answer = http.get(path, method, **headers)
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert "location" not in answer.headers


@pytest.mark.moderate
def test_metrics_and_reasons_are_for_who_brings_the_token(
    broker: EmbeddedBroker, token_file: Path
) -> None:
    with at(broker, token_file=str(token_file)) as http:
        until(lambda: http.get("/readyz").status == 200)
        for given in ("", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}"):
            answer = http.get("/metrics", **({"authorization": given} if given else {}))
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "malamute_" not in answer.text
        assert http.get("/readyz").text == '{"ready":true}'
        told = http.get("/readyz", authorization=f"bearer {TOKEN}").text
        assert json.loads(told) == {"ready": True, "reasons": [], "warnings": []}
        assert "malamute_up 1" in http.get("/metrics", authorization=f"Bearer {TOKEN}").text
        # Who has the token may name the host as he likes: a page of a browser has no token.
        assert http.get("/livez", host="metrics.example").status == 200


@pytest.mark.moderate
def test_without_a_broker_the_pages_say_so() -> None:
    with RunningHttp("tcp://127.0.0.1:1") as http:
        assert http.get("/metrics").text.splitlines()[-1] == "malamute_up 0.0"
        assert http.get("/livez").status == 200
        answer = http.get("/readyz")
        assert answer.status == 503
        (reason,) = json.loads(answer.text)["reasons"]
        assert reason["check"] == "broker"


@pytest.mark.moderate
def test_a_broker_that_comes_back_is_ready_again(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, tcp=True) as broker:
        endpoint = broker.tcp_endpoint
        http = at(broker)
        http.__enter__()
        until(lambda: http.get("/readyz").status == 200)
    try:
        until(lambda: http.get("/readyz").status == 503)
        with EmbeddedBroker(tmp_path, listen=[endpoint]):
            until(lambda: http.get("/readyz").status == 200)
    finally:
        http.__exit__(None, None, None)


def test_an_address_that_is_taken_is_refused_by_name(http: RunningHttp) -> None:
    host, port = http.address
    with pytest.raises(ConfigError, match=r"http\.bind: 127\.0\.0\.1:\d+: Address already in use"):
        Serving(HttpSection(bind=f"{host}:{port}"), [])
    with pytest.raises(ConfigError, match=r"set http\.token_file"):
        Serving(HttpSection(bind="0.0.0.0:0"), [])


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (TOKEN, 0o640, "chmod 600"),
        ("short", 0o600, "16 characters"),
        ("two words of some length", 0o600, "one word"),
        ("ümläut-ümläut-ümläut", 0o600, "plain text"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_token_that_is_no_secret_is_refused(
    tmp_path: Path, content: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        read_token(str(path))


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_the_first_line_is_the_token(tmp_path: Path, end: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(f"{TOKEN}{end}".encode())
    path.chmod(0o600)
    assert read_token(str(path)) == TOKEN


@pytest.mark.moderate
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of root's")
def test_a_token_of_root_may_be_read_by_the_group_of_a_program_that_is_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="mode 0440: others can use it"):
        read_token(str(path))
    monkeypatch.setattr(os, "geteuid", lambda: 10_001)
    assert read_token(str(path)) == TOKEN
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="others can use it"):
            read_token(str(path))


@pytest.mark.moderate
def test_a_token_in_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "token"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, Path("/dev/null")):
        with pytest.raises(ConfigError, match=f"{path} is no regular file"):
            read_token(str(path))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_token(str(tmp_path))
