"""`malamute namespace`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from malamute_py import EmbeddedBroker, Plain, connect_sync
from malamute_py.server.authentication.credentials import hash_password
from tests.cli.running import Run, as_user, broker_of


@pytest.fixture(scope="module")
def tenants() -> Iterator[EmbeddedBroker]:
    password = hash_password("pw")
    settings: dict[str, Any] = {
        "authentication.mechanism": "plain",
        "authentication.users": dict.fromkeys(("acme.ann", "bob", "ops"), password),
        "permissions": {"ops": {"admin": True}, "*": {"write": ["*"]}},
        "namespaces": {
            "acme": {
                "quotas": {"streams": 4, "settings_bytes": 1 << 20, "messages_s": 1_000},
                "default_stream": {"max_age_ms": 1_000},
            },
            "beta": {},
        },
    }
    with EmbeddedBroker(tcp=True, **settings) as running:
        with connect_sync(running.tcp_endpoint, credential=Plain("acme.ann", "pw")) as ann:
            ann.publish("acme.orders", b"x")
        yield running


@pytest.fixture
def run(m: Run, tenants: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MALAMUTE_ENDPOINT", tenants.tcp_endpoint)
    monkeypatch.setenv("MALAMUTE_PASSWORD", "pw")
    monkeypatch.setenv("MALAMUTE_USER", "ops")
    return m


@pytest.mark.moderate
def test_namespaces_are_listed_with_what_they_hold(run: Run) -> None:
    assert run("namespace", "ls").ok().rows == [
        ["acme", "acme.", "acme.*", "streams 1 of 4"],
        ["beta", "beta.", "beta.*", ""],
    ]
    acme, beta = run("namespace", "ls", "--json").ok().json
    assert acme["held"]["streams"] == 1
    assert acme["quotas"] == {"streams": 4, "settings_bytes": 1 << 20, "messages_s": 1_000}
    assert acme["default_stream"] == {"max_age_ms": 1_000}
    assert beta["held"] == {}


@pytest.mark.moderate
def test_one_is_shown_with_its_bounds(run: Run) -> None:
    rows = run("namespace", "show", "acme").ok().rows
    assert ["streams", "1", "4"] in rows
    assert ["messages_s", "", "1000"] in rows
    assert run("namespace", "show", "acme", "--json").ok().json["prefix"] == "acme."
    assert run("namespace", "show", "beta").ok().rows == []
    assert "did you mean acme?" in run("namespace", "show", "amce").err


@pytest.mark.moderate
def test_a_user_of_one_sees_that_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALAMUTE_USER", "acme.ann")
    assert [row[0] for row in run("namespace", "ls").ok().rows] == ["acme"]
    assert "namespace ls` lists them" in run("namespace", "show", "beta").err
    monkeypatch.setenv("MALAMUTE_USER", "bob")
    assert "forbidden" in run("namespace", "ls").err


@pytest.mark.parametrize("user", ["ops", "acme.ann"])
def test_commands_about_the_broker_work_for_a_user_of_a_namespace(
    run: Run, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALAMUTE_USER", user)
    for words in (("info",), ("stream", "ls"), ("transaction", "ls"), ("rtt", "--count", "1")):
        assert run(*words).code == 0, words


@pytest.mark.moderate
@pytest.mark.parametrize(
    "words", [("rtt",), ("bench", "pub"), ("bench", "sub"), ("bench", "request"), ("bench", "mail")]
)
def test_the_administrator_of_a_namespace_measures_within_it(words: tuple[str, ...]) -> None:
    grants = {"acme-ann": {"admin": True, **{verb: ["*"] for verb in ("read", "write", "create",
              "send", "receive", "request", "work")}}}  # fmt: skip
    with broker_of(grants, namespaces={"acme": {"prefix": "acme-"}}) as running:
        told = as_user(running, "acme-ann")(*words, "--count", "10", "--json").ok().json
        with running.connect_sync() as client:
            left = [each.name for each in client.list_streams()]
            left += [each.name for each in client.list_mailboxes()]
            left += [each.name for each in client.list_services()]
    assert not told.get("not_measured")
    assert [name for name in left if "malamute" in name] == []


@pytest.mark.moderate
def test_counts_that_a_user_of_one_is_not_told_are_unknown_to_check(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (("--clients-most", "50"), ("--clients-least", "0"), ("--headroom", "1%"))
    for words in asked:
        assert run("check", *words).code == 0
    monkeypatch.setenv("MALAMUTE_USER", "acme.ann")
    for words in asked:
        told = run("check", *words)
        assert (told.code, "namespace" in told.out) == (3, True)
