"""Contexts: which broker a command talks to, and with which credential."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from malamute_protocol.errors import ConnectionLost
from malamute_py import EmbeddedBroker
from malamute_py.cli import contexts, linking
from malamute_py.cli.options import remember
from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.config import ENVIRONMENT_PREFIX, KEYS, load
from malamute_py.server.authentication.credentials import hash_password
from tests.cli.running import Run, run_cli
from tests.waiting import WAIT_S

NOWHERE = "tcp://127.0.0.1:1"


@pytest.mark.moderate
def test_contexts_are_added_listed_used_and_removed(m: Run) -> None:
    m("context", "add", "one", "--endpoint", "tcp://one:9797").ok()
    m("context", "add", "two", "--endpoint", "tcp://two:9797", "--user", "ann").ok()
    rows = m("context", "ls", "--json").ok().json
    assert [(row["name"], row["current"]) for row in rows] == [("one", True), ("two", False)]
    m("context", "use", "two").ok()
    assert ["endpoint", "tcp://two:9797"] in m("context", "show", "two").ok().rows
    assert [row[0] for row in m("context", "ls").ok().rows] == ["no", "yes"]
    m("context", "rm", "two").ok()
    assert [row["name"] for row in m("context", "ls", "--json").ok().json] == ["one"]


def test_a_key_pair_is_made_once_and_fits_its_context(m: Run, tmp_path: Path) -> None:
    file = tmp_path / "ann.key"
    (public,) = m("key", "new", str(file)).ok().lines
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    m("context", "add", "far", "--server-key", "k" * 40, "--secret-key-file", str(file)).ok()
    credential: Any = contexts.Contexts.load().get("far").credential()
    assert credential.public_key == public
    secret = file.read_text()
    assert m("key", "new", str(file)).code == 1
    assert file.read_text() == secret
    for no_file in (".", "", "/"):
        told = m("key", "new", no_file)
        assert (told.code, told.err.count("\n")) == (1, 1), told.err


def test_the_file_is_for_its_owner_and_holds_no_password(m: Run) -> None:
    m("context", "add", "one", "--user", "ann", "--password-env", "SECRET").ok()
    assert stat.S_IMODE(contexts.file().stat().st_mode) == 0o600
    assert '"password"' not in contexts.file().read_text()


def test_a_power_loss_leaves_the_old_file_or_the_new_one(
    m: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file's bytes are on the disk, whole, before it gets the name of the old one."""
    m("context", "add", "one", "--endpoint", "tcp://one:9797").ok()
    old = contexts.file().read_bytes()
    synced: dict[str, bytes] = {}
    replaced: list[tuple[bytes | None, bytes]] = []
    fsync, replace = os.fsync, Path.replace

    def noting_sync(fd: int) -> None:
        fsync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path != str(contexts.file().parent):
            synced[path] = Path(path).read_bytes()

    def noting_replace(path: Path, target: Path) -> Path:
        replaced.append((synced.get(str(path)), target.read_bytes()))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    m("context", "add", "two", "--endpoint", "tcp://two:9797").ok()
    assert replaced == [(contexts.file().read_bytes(), old)]
    assert list(contexts.file().parent.iterdir()) == [contexts.file()]


def test_a_link_to_the_file_stays(m: Run, tmp_path: Path) -> None:
    m("context", "add", "one").ok()
    kept = contexts.file().rename(tmp_path / "kept.json")
    contexts.file().symlink_to(kept)
    m("context", "add", "two").ok()
    assert contexts.file().readlink() == kept
    assert '"two"' in kept.read_text()


def test_what_cannot_be_written_leaves_nothing_beside_the_file(
    m: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    m("context", "add", "one").ok()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert m("context", "add", "two").code == 1
    assert list(contexts.file().parent.iterdir()) == [contexts.file()]
    assert '"two"' not in contexts.file().read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["add", "x", "--endpoint", "http://x"], "does not begin with"),
        (["add", "x", "--endpoint", "localhost:9797"], "did you mean tcp://localhost:9797?"),
        (["add", "x", "--server-key", "k" * 40], "go together"),
        (["add", "x", "--server-key", "k", "--secret-key-file", "f"], "nor a file with one"),
        (["add", "x", "--password-env", "P"], "needs a --user"),
        (["add", "x", "--identity", "web-{x}"], "a template has {n} once"),
        (["use", "onne"], "did you mean one?"),
        (["rm", "zzz"], "context ls"),
    ],
)
def test_wrong_contexts_are_refused_with_code_2(m: Run, args: list[str], says: str) -> None:
    m("context", "add", "one").ok()
    told = m("context", *args)
    assert told.code == 2
    assert says in told.err


def test_a_context_is_not_replaced_by_accident(m: Run) -> None:
    m("context", "add", "one").ok()
    assert m("context", "add", "one").code == 1
    m("context", "add", "one", "--endpoint", "tcp://b:1", "--force").ok()


def test_a_broken_file_is_named(m: Run) -> None:
    contexts.file().parent.mkdir(parents=True)
    contexts.file().write_text("{")
    told = m("context", "ls")
    assert told.code == 1
    assert str(contexts.file()) in told.err


@pytest.mark.moderate
def test_precedence(m: Run, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    here = broker.tcp_endpoint
    quick = ("--connect-timeout", "100ms")
    m("context", "add", "here", "--endpoint", here).ok()
    m("context", "add", "nowhere", "--endpoint", NOWHERE).ok()
    monkeypatch.delenv("MALAMUTE_ENDPOINT")
    m("stream", "ls").ok()  # The context in use.
    monkeypatch.setenv("MALAMUTE_CONTEXT", "nowhere")
    assert m("stream", "ls", *quick).code == 3
    monkeypatch.setenv("MALAMUTE_ENDPOINT", here)
    m("stream", "ls").ok()
    assert m("--context", "nowhere", "stream", "ls", *quick).code == 3
    m("stream", "ls", "--context", "nowhere", "--endpoint", here).ok()
    assert m("stream", "ls", "--endpoint", NOWHERE, *quick).code == 3
    assert m("--endpoint", NOWHERE, "stream", "ls", "--endpoint", here).code == 0


@pytest.mark.moderate
def test_a_command_connects_under_the_identity_of_its_line_or_its_context(
    m: Run, broker: EmbeddedBroker
) -> None:
    with broker.connect_sync(identity="desk-{n}") as other:
        assert other.identity == "desk-0"
        m("send", "desk-1", "for the next").ok()
        template = ("--identity", "desk-{n}")
        assert m("inbox", "--count", "1", "--json", *template).ok().json["body"] == "for the next"
        m("context", "add", "here", "--endpoint", broker.tcp_endpoint, *template).ok()
        # The command before may not have ended for the broker yet.
        found = m("client", "ls", "--json", "--context", "here").ok().json
        assert {each["identity"] for each in found} & {"desk-1", "desk-2"}
        plain = m("client", "ls", "--json", "--context", "here", "--identity", "ann").ok().json
        assert {each["identity"] for each in plain} >= {"desk-0", "ann"}
        assert other.reconnects == 0


def test_our_variables_are_no_keys_of_the_brokers_configuration() -> None:
    names = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper() for key in KEYS}
    ours = {contexts.ENDPOINT, contexts.CONTEXT, contexts.USER, contexts.PASSWORD}
    assert not names & ours
    load(environment=dict.fromkeys(ours, "x"))


@pytest.mark.moderate
def test_nobody_there_is_code_3_and_says_what_to_do(m: Run) -> None:
    told = m("pub", "s", "x", "--endpoint", NOWHERE, "--connect-timeout", "50ms")
    assert told.code == 3
    assert f"no broker answers at {NOWHERE}" in told.err
    assert "malamute broker" in told.err


def test_a_link_lost_under_a_question_ends_it() -> None:
    with EmbeddedBroker(tcp=True) as broker:
        ctx: Any = SimpleNamespace(meta={})
        remember(ctx, SimpleNamespace(name="endpoint"), broker.tcp_endpoint)  # type: ignore[arg-type]
        with pytest.raises(ConnectionLost), linking.linked(ctx) as client:  # noqa: PT012
            broker.stop()
            client.list_streams()


def test_a_link_lost_before_the_question_is_asked_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedBroker(tcp=True) as broker:

        def connect_and_lose(*arguments: Any, **options: Any) -> SyncClient:
            client = connect_sync(*arguments, **options)
            broker.stop()
            deadline = time.monotonic() + WAIT_S
            while client.linked:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            return client

        monkeypatch.setattr("malamute_py.client.sync.client.connect_sync", connect_and_lose)
        ctx: Any = SimpleNamespace(meta={})
        remember(ctx, SimpleNamespace(name="endpoint"), broker.tcp_endpoint)  # type: ignore[arg-type]
        with pytest.raises(ConnectionLost), linking.linked(ctx) as client:
            client.list_streams()


@pytest.mark.moderate
def test_passwords_come_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("MALAMUTE_ENDPOINT", raising=False)
    secret = tmp_path / "secret"
    secret.write_text("pw\n")
    settings: dict[str, Any] = {
        "authentication.mechanism": "plain",
        "authentication.users": {"ann": hash_password("pw")},
    }
    with EmbeddedBroker(tcp=True, **settings) as guarded:
        at = ("--endpoint", guarded.tcp_endpoint)
        run_cli("context", "add", "f", *at, "--user", "ann", "--password-file", str(secret)).ok()
        run_cli("stream", "ls").ok()
        secret.write_text("\npw\n")
        told = run_cli("stream", "ls")
        assert told.code == 2
        assert "its first line is empty" in told.err
        run_cli("context", "add", "e", *at, "--user", "ann", "--password-env", "PW", "--use").ok()
        assert run_cli("stream", "ls").code == 2
        monkeypatch.setenv("PW", "wrong")
        refused = run_cli("stream", "ls")
        assert refused.code == 1
        assert "unauthenticated" in refused.err
        monkeypatch.setenv("MALAMUTE_ENDPOINT", guarded.tcp_endpoint)
        monkeypatch.setenv("MALAMUTE_USER", "ann")
        assert run_cli("stream", "ls", stdin="").code == 2  # There is no person to ask.
        monkeypatch.setenv("MALAMUTE_PASSWORD", "pw")
        run_cli("stream", "ls").ok()


@pytest.mark.moderate
def test_a_hash_of_a_password_is_what_the_broker_takes(m: Run) -> None:
    hashed = m("user", "hash", stdin="pw\n").ok().lines[0]
    load(overrides={"authentication.mechanism": "plain", "authentication.users": {"a": hashed}})
    assert m("user", "hash", stdin="").code == 2


@pytest.mark.moderate
def test_a_broker_that_does_not_answer_a_password_may_pause_its_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALAMUTE_USER", "ann")
    monkeypatch.setenv("MALAMUTE_PASSWORD", "secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        told = run_cli("--endpoint", endpoint, "--connect-timeout", "200ms", "stream", "ls")
    assert told.code == 3
    assert "no answer; after wrong passwords a broker does not answer" in told.err


def test_a_group_that_the_person_is_not_in_and_that_may_not_read_is_no_hindrance(
    m: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    m("context", "add", "one").ok()

    def refused(fd: int, *owner: int) -> None:
        raise PermissionError(errno.EPERM, "operation not permitted")

    monkeypatch.setattr(os, "getegid", lambda: 54_321)
    monkeypatch.setattr(os, "fchown", refused)
    m("context", "add", "two").ok()
    contexts.file().chmod(0o640)
    told = m("context", "add", "three")  # of a file that its readers would lose
    assert told.code == 1
    assert told.err == (
        f"error: {contexts.file()}: you may not give a new file its owner and group\n"
    )
    assert list(contexts.Contexts.load().contexts) == ["one", "two"]


@pytest.mark.moderate
def test_commands_that_change_contexts_at_once_do_so_one_after_the_other(
    m: Run, tmp_path: Path
) -> None:
    m("context", "add", "one").ok()
    contexts.file().rename(tmp_path / "elsewhere.json")
    contexts.file().symlink_to(tmp_path / "elsewhere.json")
    added = threading.Thread(target=lambda: m("context", "add", "three"))
    with contexts.Contexts.changing() as kept:
        added.start()
        added.join(0.2)
        assert added.is_alive()
        kept.contexts["two"] = contexts.Context()
    added.join(WAIT_S)
    assert list(contexts.Contexts.load().contexts) == ["one", "three", "two"]
