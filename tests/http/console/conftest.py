"""A broker with users, its HTTP side, and people who are logged in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from malamute_py import EmbeddedBroker, Plain, SyncClient, connect_sync
from malamute_py.server.authentication.credentials import hash_password
from tests.http.console.browsing import Browser
from tests.http.running import RunningHttp, at

ALL: dict[str, Any] = {
    name: ["*"] for name in ("read", "write", "send", "receive", "request", "work")
}
PASSWORDS = {
    "root": "root's password", "reader": "reader's password", "acme.eve": "eve's password",
    "watcher": "watcher's password", "copier": "copier's password",
}  # fmt: skip


@pytest.fixture(scope="session")
def hashes() -> dict[str, str]:
    return {user: hash_password(password) for user, password in PASSWORDS.items()}


@pytest.fixture(scope="module")
def broker(hashes: dict[str, str]) -> Iterator[EmbeddedBroker]:
    settings: dict[str, Any] = {
        "authentication.mechanism": "plain",
        "authentication.users": hashes,
        "permissions": {
            "root": {**ALL, "admin": True},
            "reader": {"read": ["open.*"]},
            "acme.eve": {**ALL, "admin": True},
            "watcher": {"read": ["closed", "open.*"], "receive": ["box"], "work": ["up"]},
            "copier": {
                "read": ["open.*"],
                "write": ["open.kept.*"],
                "write_subjects": {"open.narrow": ["allowed"]},
                "deny": {"create": ["open.kept.*"]},
            },
        },
        "namespaces": {"acme": {"quotas": {"streams": 5}}},
    }
    with EmbeddedBroker(tcp=True, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: EmbeddedBroker) -> Iterator[RunningHttp]:
    with at(broker) as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: EmbeddedBroker) -> Iterator[SyncClient]:
    """A program of root's."""
    with connect_sync(
        broker.tcp_endpoint, credential=Plain("root", PASSWORDS["root"])
    ) as connected:
        yield connected


@pytest.fixture(scope="module")
def enter(http: RunningHttp) -> Callable[[str], Browser]:
    def entered(user: str) -> Browser:
        browser = Browser(http.address)
        assert browser.log_in(user, PASSWORDS[user]).status == 200
        return browser

    return entered


@pytest.fixture(scope="module")
def root(enter: Callable[[str], Browser]) -> Browser:
    return enter("root")


@pytest.fixture(scope="module")
def reader(enter: Callable[[str], Browser]) -> Browser:
    return enter("reader")
