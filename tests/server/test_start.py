"""Starting: each fault is one message that says what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import malamute_py as malamute
from malamute_protocol.commands import Confirm, Publish
from malamute_protocol.encode import encode
from malamute_py.config import PUBLIC_WORDS, Authentication, Config, Grant, NamespaceSection
from malamute_py.journal import MemoryStorage
from malamute_py.sections import ConfigError
from malamute_py.server import Server, StartError
from malamute_py.server.authentication.credentials import hash_password
from malamute_py.server.clock import Clock
from malamute_py.server.connections import descriptors
from malamute_py.server.connections.listening import ASIDE
from malamute_py.server.journaling.rings import Rings
from malamute_py.server.sockets import check_public, parse_endpoint
from tests.server.fakes import Lines
from tests.server.peer import RawPeer
from tests.server.storages import TroubledStorage, Troubles
from tests.waiting import WAIT_MS, until


def config(data: object = "", *listen: str) -> Config:
    return Config(data_directory=str(data), listen=list(listen) or ["tcp://127.0.0.1:0"])


def refusal(wanted: Config) -> str:
    """Return the message of a start that is refused."""
    server = Server(wanted, log=Lines())
    with pytest.raises((StartError, ConfigError)) as caught:
        server.start()
    return str(caught.value)


def test_port_zero_takes_a_free_one_and_says_which() -> None:
    with Server(config(), log=Lines()) as server:
        (endpoint,) = server.endpoints
        assert endpoint.startswith("tcp://127.0.0.1:")
        assert not endpoint.endswith((":0", "*"))
        RawPeer(endpoint).close()


def test_an_address_in_use_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        text = refusal(config("", endpoint))
    assert endpoint in text
    assert "in use" in text
    assert "--listen" in text


@pytest.mark.moderate
def test_an_ipc_path_in_use_is_not_taken_from_its_owner(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/socket"
    with Server(config("", endpoint), log=Lines()):
        assert "another process listens" in refusal(config("", endpoint))
        RawPeer(endpoint).close()
    with Server(config("", endpoint), log=Lines()):  # Free again.
        RawPeer(endpoint).close()


def test_the_socket_file_of_a_dead_broker_is_taken_over_and_any_other_file_is_not(
    tmp_path: Path,
) -> None:
    stale = tmp_path / "stale"
    for name in (stale, tmp_path / f"stale{ASIDE}"):  # One died while it kept local peers out.
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(name))
    with Server(config("", f"ipc://{stale}"), log=Lines()):
        RawPeer(f"ipc://{stale}").close()
        assert not (tmp_path / f"stale{ASIDE}").exists()
    with socket.socket(socket.AF_UNIX) as lives:
        lives.bind(str(tmp_path / f"full{ASIDE}"))
        lives.listen()
        assert "another process listens" in refusal(config("", f"ipc://{tmp_path}/full"))
    precious = tmp_path / "precious"
    precious.write_text("data")
    assert "not a socket" in refusal(config("", f"ipc://{precious}"))
    assert precious.read_text() == "data"


@pytest.mark.moderate
def test_a_second_broker_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    with Server(config(tmp_path), log=Lines()):
        text = refusal(config(tmp_path))
    assert text.count(str(tmp_path)) == 1
    assert "in use by process" in text
    with Server(config(tmp_path), log=Lines()):  # Free again when the first has stopped.
        pass


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:9797", "tcp://0.0.0.0:9797", "tcp://[::]:9797", "tcp://eth0:9797",
                 "tcp://10.1.2.3:9797", "tcp://example.org:9797"],
)  # fmt: skip
def test_a_public_address_without_authentication_is_refused_unless_in_words(endpoint: str) -> None:
    text = refusal(config("", endpoint))
    assert endpoint in text
    assert PUBLIC_WORDS in text
    said = Config(listen=[endpoint], listen_public_without_authentication=PUBLIC_WORDS)
    check_public([parse_endpoint(endpoint)], said)
    half_said = Config(listen=[endpoint], listen_public_without_authentication="yes")
    with pytest.raises(ConfigError):
        check_public([parse_endpoint(endpoint)], half_said)
    secured = Config(
        listen=[endpoint],
        authentication=Authentication(mechanism="plain", users={"a": hash_password("b")}),
    )
    check_public([parse_endpoint(endpoint)], secured)


def test_where_the_kernel_counts_no_bytes_other_machines_are_not_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert descriptors.counts_bytes()
    monkeypatch.setattr(descriptors, "_BYTES_RECEIVED_AT", 4096)
    assert not descriptors.counts_bytes()
    public = Config(
        data_directory="", listen=["tcp://127.0.0.1:0", "tcp://0.0.0.0:0"],
        listen_public_without_authentication=PUBLIC_WORDS,
    )  # fmt: skip
    text = refusal(public)
    assert "tcp://0.0.0.0:0: this kernel does not count" in text
    assert "Linux 4.1" in text
    lines = Lines()
    with Server(config(), log=lines):
        assert "bytes_uncounted" in [event for _, event, _ in lines.lines]
    lines = Lines()
    with Server(config("", "inproc://none-to-count"), log=lines):
        assert "bytes_uncounted" not in [event for _, event, _ in lines.lines]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1",
                                      "ipc:///run/x", "inproc://x", "tcp://lo:1"])  # fmt: skip
def test_an_address_of_this_machine_only_is_not_public(endpoint: str) -> None:
    assert not parse_endpoint(endpoint).is_public


@pytest.mark.parametrize(
    ("endpoint", "hint"),
    [("127.0.0.1:9797", "tcp://"), ("udp://x:1", "tcp://"), ("tcp://127.0.0.1", "no port"),
     ("tcp://127.0.0.1:http", "number"), ("tcp://127.0.0.1:99999", "below 65536")],
)  # fmt: skip
def test_a_bad_endpoint_is_named_with_what_to_write(endpoint: str, hint: str) -> None:
    text = refusal(config("", endpoint))
    assert text.startswith("listen:")
    assert hint in text


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    text = refusal(config(file / "data"))
    assert str(file / "data") in text


def test_a_directory_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("malamute_py.journal.storage.FileStorage.lock", denied)
    text = refusal(config(tmp_path))
    assert "no permission" in text
    assert "owner of the directory" in text


@pytest.mark.moderate
def test_a_full_disk_refuses_the_start_and_leaves_nothing_half(tmp_path: Path) -> None:
    troubles = Troubles()
    storage = TroubledStorage(tmp_path, troubles)
    Server(config(tmp_path), log=Lines(), storage=storage).start().stop()
    troubles.full = True
    with pytest.raises(StartError, match="full"):
        Server(config(tmp_path), log=Lines(), storage=storage).start()
    troubles.full = False
    Server(config(tmp_path), log=Lines(), storage=storage).start().stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(mount)],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    yield mount
    # Lazily: the refused server may still be in a traceback, its files open.
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.system
def test_a_disk_too_small_for_the_first_segment_refuses_the_start(small_disk: Path) -> None:
    text = refusal(config(small_disk / "data"))
    assert "free" in text
    assert str(small_disk) in text
    assert not any((small_disk / "data").rglob("*.segment"))


@pytest.mark.moderate
def test_a_damaged_epoch_is_made_anew_and_said(tmp_path: Path) -> None:
    with Server(config(tmp_path), log=Lines()) as server:
        before = server._journal.epoch
    (tmp_path / "epoch").write_bytes(b"damaged")
    log = Lines()
    with Server(config(tmp_path), log=log) as server:
        assert server._journal.epoch > before
        (event,) = log.of("file_restored")
        assert event["file"] == "epoch"
        assert server.metrics()["damage"] == [f"epoch: {event['reason']}"]


@pytest.mark.moderate
def test_a_damaged_identity_of_which_nothing_tells_refuses_the_start(tmp_path: Path) -> None:
    Server(config(tmp_path), log=Lines()).start().stop()
    for name in ("epoch", "journal"):
        (tmp_path / name).write_bytes(b"damaged")
    text = refusal(config(tmp_path))
    assert "journal" in text
    assert (tmp_path / "journal").read_bytes() == b"damaged"


def test_a_directory_that_cannot_be_locked_is_not_said_to_be_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    text = refusal(config(tmp_path))
    assert f"{tmp_path}/lock cannot be locked (No locks available)" in text
    assert "malamute broker --data DIRECTORY" in text
    assert "in use" not in text


@pytest.mark.moderate
def test_a_directory_that_its_group_may_change_is_served_with_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)  # As a volume of Kubernetes with an fsGroup.
    log = Lines()
    with Server(config(tmp_path), log=log):
        (event,) = log.of("directory_exposed")
    assert event["reason"].startswith("every user of group")
    assert f"chown -R {os.geteuid()} {tmp_path} && chmod -R go-rwx {tmp_path}." in event["do"]


@pytest.mark.moderate
def test_a_file_that_is_not_ours_is_left_alone_and_named(tmp_path: Path) -> None:
    Server(config(tmp_path), log=Lines()).start().stop()
    (tmp_path / "notes.txt").write_text("mine")
    log = Lines()
    with Server(config(tmp_path), log=log):
        assert log.of("file_left_alone")[0]["file"] == "notes.txt"
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.moderate
def test_the_epoch_rises_with_each_start_and_the_uuid_stays(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        with Server(config(tmp_path), log=Lines()) as server, RawPeer(server.endpoints[0]) as peer:
            assert peer.welcome is not None
            seen.append((peer.welcome.broker, peer.welcome.epoch))
    assert seen[0][0] == seen[1][0]
    assert seen[1][1] == seen[0][1] + 1


class Ahead(Clock):
    """A clock that is ahead by an hour."""

    def __call__(self) -> int:
        """Return the time in an hour."""
        return super().__call__() + 3_600_000


@pytest.mark.moderate
def test_a_log_that_was_written_with_a_clock_that_was_ahead_is_told_of(tmp_path: Path) -> None:
    for clock in (Ahead(), None):
        log = Lines()
        with (
            Server(config(tmp_path), log=log, clock=clock) as server,
            RawPeer(server.endpoints[0]) as peer,
        ):
            peer.send(Publish("s", 1), frames=(encode([b"x"]),))
            peer.get(Confirm)
        told = log.of("log_ahead")
        assert len(told) == (clock is None)
    assert told[0]["ring"] == "main"
    assert 3_500_000 < told[0]["ms"] < 3_700_000


@pytest.mark.moderate
def test_each_ring_that_was_written_with_a_clock_that_was_ahead_is_told_of(tmp_path: Path) -> None:
    with (
        Server(config(tmp_path), log=Lines(), clock=Ahead()) as server,
        malamute.connect_sync(server.endpoints[0], timeout_ms=WAIT_MS) as client,
    ):
        client.create_stream("own", ring_bytes=8 << 20)
        client.publish("own", b"x")
    log = Lines()
    with Server(config(tmp_path), log=log):
        told = {one["ring"]: one["ms"] for one in log.of("log_ahead")}
    rings = [path.name for path in (tmp_path / "rings").iterdir()]
    assert len(rings) == 2
    assert sorted(told) == sorted(rings)
    assert all(3_500_000 < ms < 3_700_000 for ms in told.values())


@pytest.mark.moderate
def test_a_start_that_failed_leaves_the_directory_free(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refusal(config(tmp_path, f"tcp://127.0.0.1:{taken.getsockname()[1]}"))
    with Server(config(tmp_path), log=Lines()):
        pass


def test_a_storage_of_ones_own_takes_the_place_of_the_directory() -> None:
    with Server(config("nowhere"), log=Lines(), storage=MemoryStorage()) as server:
        RawPeer(server.endpoints[0]).close()
    assert not Path("nowhere").exists()


def removed(data: Path) -> bool:
    """Whether no ring but main has a file."""
    return not [path for path in (data / "rings").glob("*/*") if path.parent.name != "main"]


def with_a_removed_ring(data: Path) -> None:
    """A broker makes a stream with a ring of its own, removes it, and is stopped."""
    with (
        Server(config(data), log=Lines()) as server,
        malamute.connect_sync(server.endpoints[0], timeout_ms=WAIT_MS) as client,
    ):
        client.create_stream("own", ring_bytes=8 << 20)
        client.publish("own", b"x")
        client.remove_stream("own")


@pytest.mark.moderate
def test_a_removed_ring_leaves_nothing_that_a_later_start_tells_of(tmp_path: Path) -> None:
    """Its empty directory was told of as a stranger's by each start."""
    with_a_removed_ring(tmp_path)
    for _ in range(2):
        log = Lines()
        with Server(config(tmp_path), log=log):
            until(lambda: removed(tmp_path))
    assert not log.of("file_left_alone")
    assert not log.of("ring_left_alone")


@pytest.mark.moderate
def test_a_stop_amid_the_removal_of_a_ring_leaves_the_rest_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files lay there for good, however many: `ring_left_alone` at each start."""
    with monkeypatch.context() as patched:
        patched.setattr(Rings, "_do_housekeeping", lambda self: False)
        with_a_removed_ring(tmp_path)
    assert not removed(tmp_path)
    log = Lines()
    with Server(config(tmp_path), log=log):
        until(lambda: removed(tmp_path))
    assert not log.of("ring_left_alone")


@pytest.mark.moderate
@pytest.mark.parametrize("manifest", [True, False], ids=["untouched", "without its manifest"])
def test_a_crash_amid_the_removal_of_a_ring_leaves_it_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: bool
) -> None:
    """Its files lay there for good, however many: `ring_left_alone` at each start."""
    crashed = tmp_path / "crashed"
    with monkeypatch.context() as patched:
        patched.setattr(Rings, "_do_housekeeping", lambda self: False)
        with (
            Server(config(tmp_path / "data"), log=Lines()) as server,
            malamute.connect_sync(server.endpoints[0], timeout_ms=WAIT_MS) as client,
        ):
            client.create_stream("kept", ring_bytes=8 << 20)
            client.publish("kept", b"x")
            client.create_stream("own", ring_bytes=8 << 20)
            client.publish("own", b"x")
            name = f"stream-{client.stream_info('own').uuid.hex()}"
            client.remove_stream("own")
            # The files of a process that is killed now.
            shutil.copytree(tmp_path / "data", crashed)
    if not manifest:
        (crashed / "manifest" / name).unlink()
    log = Lines()
    with Server(config(crashed), log=log) as server:
        until(lambda: not (crashed / "rings" / name).exists())
        with malamute.connect_sync(server.endpoints[0], timeout_ms=WAIT_MS) as client:
            assert client.stream_info("kept").tail == 1
    assert [each["ring"] for each in log.of("ring_removal_resumed")] == [name]
    assert not log.of("ring_left_alone")


@pytest.mark.moderate
def test_a_directory_beside_the_rings_with_another_file_is_no_removed_ring(tmp_path: Path) -> None:
    Server(config(tmp_path), log=Lines()).start().stop()
    for name, file in (("mine", "notes.txt"), ("whole", "ring")):
        place = tmp_path / "rings" / name
        place.mkdir()
        (place / file).write_text("mine")
    saved = tmp_path / "rings" / "saved" / "000000000000.seg"
    saved.parent.mkdir()
    saved.write_text("mine")
    empty = tmp_path / "rings" / f"stream-{'ab' * 16}"
    empty.mkdir()
    log = Lines()
    with Server(config(tmp_path), log=log):
        assert [each["file"] for each in log.of("file_left_alone")] == ["rings/mine/"]
        assert [each["ring"] for each in log.of("ring_left_alone")] == ["saved", "whole"]
        assert [each["ring"] for each in log.of("ring_removal_resumed")] == [empty.name]
        until(lambda: not empty.exists())
    assert saved.read_text() == "mine"
    assert (tmp_path / "rings" / "mine" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "rings" / "whole" / "ring").read_text() == "mine"


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["malamute-zap", "malamute-hash-1", "malamute-reader", "watchdog"])
def test_a_start_without_room_for_a_thread_ends_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A broker with authentication hung: the context waited for the socket of its handler."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    users = {"ann": hash_password("a", salt=bytes(16))}
    wanted = msgspec.structs.replace(
        config(), authentication=Authentication(mechanism="plain", users=users)
    )
    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises((RuntimeError, StartError), match="can't start new thread"):
            Server(wanted, log=Lines()).start()
    until(lambda: threading.active_count() <= before)
    with Server(wanted, log=Lines()):
        pass


def test_a_start_tells_of_a_pattern_that_fits_no_name() -> None:
    wanted = Config(
        data_directory="", listen=["inproc://patterns"],
        permissions={"ann": Grant(read=["a b", "*"])},
    )  # fmt: skip
    lines = Lines()
    with Server(wanted, log=lines):
        [told] = [fields for _, event, fields in lines.lines if event == "permission_doubted"]
    assert told["key"] == "permissions.ann.read"
    assert "'a b' fits no name" in told["reason"]


@pytest.mark.moderate
def test_a_start_tells_of_a_user_who_is_nearly_in_a_namespace() -> None:
    users = {"acmee.eve": hash_password("x"), "acme.ann": hash_password("y")}
    tenants = Config(
        data_directory="", listen=["inproc://tenants"],
        authentication=Authentication(mechanism="plain", users=users),
        namespaces={"acme": NamespaceSection()},
    )  # fmt: skip
    lines = Lines()
    with Server(tenants, log=lines):
        [told] = [fields for _, event, fields in lines.lines if event == "namespace_doubted"]
    assert told["key"] == "namespaces.acme.users"
    assert "acmee.eve" in told["reason"]
