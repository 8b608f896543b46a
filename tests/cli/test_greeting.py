"""The greeting by which `malamute broker` tells a person at a terminal what was started."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_py.cli.broker import _Greeting
from malamute_py.config import Authentication, Config
from malamute_py.sections import HttpSection
from malamute_py.telemetry import open_log

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def greeted(
    capsys: pytest.CaptureFixture[str], config: Config, endpoint: str = "", **facts: Any
) -> str:
    greeting = _Greeting(open_log("info", "console"), config)
    endpoints = [endpoint or "tcp://127.0.0.1:9797"]
    greeting.info("listening", endpoints=endpoints, data="/data", version="1", **facts)
    return capsys.readouterr().err


def test_a_broker_without_authentication_shows_a_first_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = greeted(capsys, Config())
    assert "malamute pub hello" in told
    assert "context add" not in told
    assert "--endpoint" not in told
    assert "hello --start earliest --endpoint tcp://h:1" in greeted(capsys, Config(), "tcp://h:1")


@pytest.mark.parametrize(
    ("mechanism", "facts", "login"),
    [
        ("plain", {}, "--user USER"),
        ("curve", {"server_key": KEY}, f"--server-key '{KEY}' --secret-key-file USER.key"),
    ],
)
def test_a_broker_with_users_shows_how_one_of_them_connects(
    mechanism: Any, facts: dict[str, str], login: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(authentication=Authentication(mechanism=mechanism))
    told = greeted(capsys, config, "tcp://h:1", **facts)
    assert f"malamute context add USER {login} --endpoint tcp://h:1" in told
    assert "malamute pub" not in told


@pytest.mark.parametrize(
    ("http", "line"),
    [
        (HttpSection(bind="127.0.0.1:9798"), "  console    http://127.0.0.1:9798/\n"),
        (HttpSection(bind="127.0.0.1:9798", console="off"),
         "  metrics    http://127.0.0.1:9798/metrics\n"),
    ],
)  # fmt: skip
def test_the_page_of_the_http_side_is_named_once_it_serves(
    http: HttpSection, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    greeting = _Greeting(open_log("info", "console"), Config(http=http))
    greeting.info("http_listening", url="http://127.0.0.1:9798", pid=1)
    assert capsys.readouterr().err == line
