"""Authentication at the socket: which clients are let in, as which user, and which are not."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import zmq

from malamute_py.config import Authentication, Config, Grant, from_table
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.attempts import Answers, Origin, Pauses, Turns
from malamute_py.server.authentication.authenticator import ZAP_DOMAIN, ZAP_ENDPOINT, Authenticator
from malamute_py.server.authentication.credentials import (
    PlainTable,
    hash_password,
    read_server_key,
    read_users_file,
)
from malamute_py.server.authentication.permissions import MEMO_MAX, Permissions, QuotaTable
from malamute_py.server.errors import StartError
from malamute_py.server.sockets import Listener, parse_endpoint
from tests.waiting import WAIT_MS, WAIT_S

Denials = list[tuple[str, str]]
REFUSED_MS = 400
"""Time without a message that counts as a refusal; a slow machine would pass for one."""


@contextlib.contextmanager
def listening(
    settings: Authentication, endpoint: str = "tcp://127.0.0.1:0"
) -> Iterator[tuple[Listener, Authenticator, Denials]]:
    denials: Denials = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = Authenticator(
        context,
        settings,
        lambda: time.monotonic_ns() // 1_000_000,
        lambda mechanism, address, why: denials.append((mechanism, address)),
        lambda user, address, pause_ms: None,
        lambda error: None,
    )
    try:
        config = Config(authentication=settings)
        listener = Listener(context, parse_endpoint(endpoint), config, authenticator)
        try:
            yield listener, authenticator, denials
        finally:
            listener.close(0)
    finally:
        authenticator.close()
        context.term()


@contextlib.contextmanager
def dealer(endpoint: str, **options: object) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close(0)
        context.term()


def identity_seen(
    listener: Listener, client: zmq.Socket[bytes], wait_ms: int = WAIT_MS
) -> str | None:
    """Return the identity that arrives with a message of the client; None: none arrived."""
    client.send(b"hello")
    if not listener.socket.poll(wait_ms):
        return None
    head = listener.socket.recv(copy=False)
    listener.socket.recv()
    return str(head.get("User-Id"))


def denial(denials: Denials) -> tuple[str, str]:
    """Return the first denial, which the authenticator's thread reports a little later."""
    deadline = time.monotonic() + WAIT_S
    while not denials:
        assert time.monotonic() < deadline, "nobody was denied"
        time.sleep(0.005)
    return denials[0]


def curve_client() -> tuple[bytes, bytes]:
    return zmq.curve_keypair()


@pytest.mark.moderate
def test_plain_lets_a_user_in_under_its_name() -> None:
    settings = Authentication(mechanism="plain", users={"alice": hash_password("secret")})
    with (
        listening(settings) as (listener, _, denials),
        dealer(listener.name, plain_username=b"alice", plain_password=b"secret") as client,
    ):
        assert identity_seen(listener, client) == "alice"
        assert denials == []


@pytest.mark.moderate
@pytest.mark.parametrize(("user", "password"), [(b"alice", b"wrong"), (b"bob", b"secret")])
def test_plain_with_a_wrong_password_or_name_is_refused(user: bytes, password: bytes) -> None:
    settings = Authentication(mechanism="plain", users={"alice": hash_password("secret")})
    with (
        listening(settings) as (listener, _, denials),
        dealer(listener.name, plain_username=user, plain_password=password) as client,
    ):
        client.send(b"hello")
        assert denial(denials) == ("PLAIN", "127.0.0.1")
        assert not listener.socket.poll(REFUSED_MS)


@pytest.mark.moderate
def test_an_anonymous_client_is_refused_where_a_password_is_asked() -> None:
    settings = Authentication(mechanism="plain", users={"alice": hash_password("secret")})
    with listening(settings) as (listener, _, _), dealer(listener.name) as client:
        assert identity_seen(listener, client, REFUSED_MS) is None


@pytest.mark.moderate
@pytest.mark.parametrize("known", [True, False])
def test_curve_lets_a_known_key_in_under_its_identity_and_no_other(
    tmp_path: Path, known: bool
) -> None:
    public, secret = curve_client()
    settings = Authentication(
        mechanism="curve",
        server_key_file=str(tmp_path / "server.key"),
        clients={"sensor": (public if known else curve_client()[0]).decode()},
    )
    with (
        listening(settings) as (listener, authenticator, denials),
        dealer(
            listener.name, curve_publickey=public, curve_secretkey=secret,
            curve_serverkey=authenticator.public_key,
        ) as client,
    ):  # fmt: skip
        if known:
            assert identity_seen(listener, client) == "sensor"
            assert denials == []
        else:
            client.send(b"hello")
            assert denial(denials) == ("CURVE", "127.0.0.1")
            assert not listener.socket.poll(REFUSED_MS)


@pytest.mark.moderate
def test_an_anonymous_or_plain_client_is_refused_where_a_key_is_asked(tmp_path: Path) -> None:
    settings = Authentication(
        mechanism="curve",
        server_key_file=str(tmp_path / "server.key"),
        clients={"sensor": curve_client()[0].decode()},
    )
    with listening(settings) as (listener, _, _):
        with dealer(listener.name) as client:
            assert identity_seen(listener, client, REFUSED_MS) is None
        with dealer(listener.name, plain_username=b"sensor", plain_password=b"x") as client:
            assert identity_seen(listener, client, REFUSED_MS) is None


@pytest.mark.moderate
def test_ipc_asks_for_a_credential_too(tmp_path: Path) -> None:
    settings = Authentication(mechanism="plain", users={"alice": hash_password("secret")})
    with (
        listening(settings, f"ipc://{tmp_path}/socket") as (listener, _, _),
        dealer(listener.name) as client,
    ):
        assert identity_seen(listener, client, REFUSED_MS) is None


@pytest.mark.moderate
def test_a_context_with_a_handler_of_its_own_is_refused() -> None:
    settings = Authentication(mechanism="plain", users={"alice": hash_password("secret")})
    with zmq.Context() as context:
        other = context.socket(zmq.REP)
        other.bind("inproc://zeromq.zap.01")
        with pytest.raises(StartError, match="context of its own"):
            Authenticator(
                context, settings, lambda: 0, lambda *_: None, lambda *_: None, lambda _: None
            )
        other.close(0)


@pytest.mark.moderate
def test_a_right_password_is_remembered_for_an_hour_and_a_wrong_one_is_not() -> None:
    table = PlainTable({"alice": hash_password("secret")})
    assert table.fits("alice", b"secret")
    assert not table.is_remembered("alice", b"secret", 0)
    table.remember("alice", b"secret", 0)
    assert table.is_remembered("alice", b"secret", 3_599_999)
    assert not table.is_remembered("alice", b"secret", 3_600_000)
    assert not table.is_remembered("alice", b"guess", 1)
    assert not table.fits("alice", b"guess")
    assert not table.fits("", b"secret")
    assert table.name(b"alice") == "alice"
    assert table.name(b"bob") == ""


@pytest.mark.moderate
def test_what_is_wrong_too_often_waits_alone_and_longer_each_time() -> None:
    pauses = Pauses()
    guessed = Origin("10.0.0.1", "alice")
    assert [pauses.failed(guessed, 0) for _ in range(7)] == [0, 0, 0, 0, 500, 1_000, 2_000]
    assert pauses.holds(guessed, 1_999)
    assert not pauses.holds(guessed, 2_000)
    assert not pauses.holds(Origin("10.0.0.1", "bob"), 0), "a neighbour"
    assert not pauses.holds(Origin("10.0.0.2", "alice"), 0), "the user elsewhere"
    assert [pauses.failed(guessed, 2_000) for _ in range(8)][-2:] == [60_000, 60_000]
    pauses.succeeded(guessed)
    assert not pauses.holds(guessed, 2_001)
    for number in range(20_000):
        pauses.failed(Origin(f"address {number}", ""), 0)
    assert len(pauses) == 10_000


def turns_of(**bounds: int) -> Turns[str]:
    least = {"all_max": 8, "address_max": 6, "origin_max": 4, "strangers_max": 100}
    return Turns(**{**least, **bounds})


def order_of(turns: Turns[str], free: str = "?") -> list[str]:
    """Jobs in the order of their turns; those that begin with `free` need no hash."""
    order: list[str] = []
    while True:
        unhashed, job = turns.take(lambda job: job.startswith(free))
        order += unhashed
        if job is None:
            return order
        order.append(job)


def test_addresses_and_their_names_have_their_turns() -> None:
    turns = turns_of()

    def put(address: str, name: str, job: str) -> str | None:
        return turns.put(Origin(address, name), job, known=True)

    for number in range(4):
        assert put("flood", "alice", f"alice {number}") is None
    assert put("flood", "alice", "alice 4") == "alice 4", "no place for the name"
    assert put("flood", "bob", "bob 0") is None
    assert put("flood", "bob", "bob 1") is None
    assert put("flood", "bob", "bob 2") == "bob 2", "no place for the address"
    assert put("quiet", "carol", "carol 0") is None
    assert put("other", "dave", "dave 0") is None
    assert put("third", "erin", "erin 0") == "alice 3", "the largest gives way"
    assert order_of(turns) == [
        "alice 0", "carol 0", "dave 0", "erin 0", "bob 0", "alice 1", "bob 1", "alice 2",
    ]  # fmt: skip
    assert len(turns) == 0


def test_a_name_that_no_user_has_waits_its_turn_as_a_user_does() -> None:
    turns = turns_of()
    for name in ("alice", "?x", "bob", "?y", "carol"):
        turns.put(Origin("flood", name), name, known=not name.startswith("?"))
    turns.put(Origin("quiet", "dave"), "dave", known=True)
    # One that needs no hash costs its address no turn, nor does a turn of another address go by.
    assert order_of(turns) == ["alice", "dave", "?x", "bob", "?y", "carol"]
    for number in range(6):
        left = turns.put(Origin("flood", "?x"), f"?{number}", known=False)
        assert left == (None if number < 4 else f"?{number}"), "a name has as many places"


def test_names_that_no_user_has_take_no_place_of_users() -> None:
    turns = turns_of(strangers_max=50)
    for number in range(80):
        left = turns.put(Origin("flood", f"?{number}"), f"?{number}", known=False)
        assert left == (None if number < 50 else f"?{number - 50}"), "the oldest gives way"
    for number in range(6):
        assert turns.put(Origin("flood", "alice"), "alice", known=True) == (
            None if number < 4 else "alice"
        )
    assert len(turns) == 54
    assert order_of(turns) == [*(f"?{number}" for number in range(30, 80)), *["alice"] * 4]
    assert len(turns) == 0
    assert turns.give_up() is None


def test_names_that_no_user_has_are_hashed_in_turn_where_that_is_asked() -> None:
    turns = turns_of()
    for name in ("?x", "?y"):
        turns.put(Origin("a", name), name, known=False)
    assert turns.take(lambda _: False) == ([], "?x")
    assert turns.take(lambda _: True) == (["?y"], None)


def test_an_answer_without_a_hash_comes_when_one_with_a_hash_would() -> None:
    answers: Answers[str] = Answers(2, 3)
    mallory, eve = Origin("a", "mallory"), Origin("a", "eve")
    assert answers.wait_ms(0) is None
    for number in range(2):
        assert answers.put(mallory, f"mallory {number}", 1_000, 50) is None
    assert answers.put(eve, "eve", 1_010, 50) is None
    assert answers.wait_ms(1_020) == 30
    assert answers.take(1_049) is None
    assert answers.take(1_050) == "mallory 0"
    # Two hashes of a name are under way at a time: the next of it come in half the time.
    assert [answers.take(1_075), answers.take(1_075), answers.take(1_075)] == [
        "eve", "mallory 1", None,
    ]  # fmt: skip
    for number in range(4):
        early = answers.put(Origin("a", str(number)), str(number), 2_000, 50)
    assert (early, len(answers)) == ("0", 3)
    assert len(answers._last) == 4


@pytest.mark.slow
def test_wrong_passwords_of_one_name_keep_no_other_user_of_the_address_out() -> None:
    users = {"alice": hash_password("secret"), "bob": hash_password("bobs")}
    settings = Authentication(mechanism="plain", users=users)
    with listening(settings) as (listener, _, denials):
        for _ in range(25):
            with dealer(listener.name, plain_username=b"alice", plain_password=b"no") as guesser:
                guesser.send(b"hello")
                seen = len(denials)
                deadline = time.monotonic() + WAIT_S
                while len(denials) == seen:
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
        with dealer(listener.name, plain_username=b"bob", plain_password=b"bobs") as neighbour:
            assert identity_seen(listener, neighbour) == "bob"


class Asking:
    """A peer that asks the handler as libzmq does, from one address."""

    def __init__(self, settings: Authentication) -> None:
        self.now_ms = 1_000
        self.paused: list[str] = []
        self.errors: list[Exception] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handler = Authenticator(
            self.context, settings, lambda: self.now_ms, lambda *_: None,
            lambda user, *_: self.paused.append(user), self.errors.append,
        )  # fmt: skip
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self.socket.connect(ZAP_ENDPOINT)

    def ask(self, user: str, password: bytes = b"wrong") -> None:
        name = user.encode()
        question = [b"1.0", name, ZAP_DOMAIN, b"10.0.0.9", b"", b"PLAIN", name, password]
        self.socket.send_multipart([b"", *question])

    def told(self) -> tuple[str, bytes]:
        """Return the next answer: for which name, and its code."""
        _, _, number, code, *_ = self.socket.recv_multipart()
        return number.decode(), code

    def code(self, user: str, password: bytes = b"wrong") -> bytes:
        self.ask(user, password)
        return self.told()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.handler.close()
        self.socket.close(0)
        self.context.term()


@pytest.mark.slow
def test_answers_to_wrong_passwords_do_not_tell_who_is_a_user() -> None:
    users = {"alice": hash_password("secret")}
    with Asking(Authentication(mechanism="plain", users=users)) as asking:
        for number in range(6):
            asking.code(f"stranger{number}")
        told = {}
        for name in ("alice", "mallory"):
            told[name] = [asking.code(name) for _ in range(7)]
            asking.now_ms += 700
            told[name] += [asking.code(name) for _ in range(2)]
        assert told["alice"] == told["mallory"] == [b"400"] * 5 + [b"300"] * 2 + [b"400", b"300"]
        assert asking.code("alice", b"secret") == b"300"
        asking.now_ms += 60_000
        assert asking.code("alice", b"secret") == b"200"
        assert "alice" in asking.paused
        assert "" in asking.paused


@pytest.mark.slow
def test_a_flood_from_the_same_address_does_not_tell_who_is_a_user() -> None:
    """The names are asked for amid a flood, each as often as the first pause lets them."""
    users = {"alice": hash_password("secret")}
    with Asking(Authentication(mechanism="plain", users=users)) as asking:
        names = [f"stranger{number}" for number in range(150)]
        names[70], names[71] = "alice", "mallory"
        asked = [*names, *(["alice", "mallory"] * 3)]
        for name in asked:
            asking.ask(name)
        told = [asking.told() for _ in asked]
        assert {code for _, code in told} == {b"400"}
        assert sorted(name for name, _ in told) == sorted(asked)


@pytest.mark.slow
def test_a_user_beside_a_flood_of_names_that_no_user_has_is_let_in() -> None:
    users = {"alice": hash_password("secret")}
    with Asking(Authentication(mechanism="plain", users=users)) as asking:
        for number in range(1_000):
            asking.ask(f"stranger{number}")
        asking.ask("alice", b"secret")
        told = [asking.told() for _ in range(1_001)]
        assert [(name, code) for name, code in told if code != b"400"] == [("alice", b"200")]


@pytest.mark.slow
def test_a_flood_of_names_that_no_user_has_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    scrypt = hashlib.scrypt

    def counted(password: bytes, **parameters: Any) -> bytes:
        hashed.append(password)
        return scrypt(password, **parameters)

    users = {"alice": hash_password("secret")}
    with Asking(Authentication(mechanism="plain", users=users)) as asking:
        monkeypatch.setattr(hashlib, "scrypt", counted)
        assert {asking.code(f"stranger{number}", b"guess") for number in range(30)} == {b"400"}
        assert hashed == [b"guess"] * 5
        assert asking.code("alice", b"secret") == b"200"


@pytest.mark.moderate
def test_an_error_in_one_attempt_denies_that_attempt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: Any) -> Any:
        raise IndexError("planted")

    users = {"alice": hash_password("secret")}
    with Asking(Authentication(mechanism="plain", users=users)) as asking:
        with monkeypatch.context() as patch:
            patch.setattr(PlainTable, "name", planted)
            assert asking.code("alice", b"secret") == b"500"
        with monkeypatch.context() as patch:
            patch.setattr(PlainTable, "fits", planted)
            assert asking.code("alice", b"secret") == b"400"
        assert [str(error) for error in asking.errors] == ["planted", "planted"]
        assert asking.code("alice", b"secret") == b"200"


@pytest.mark.moderate
def test_a_user_who_was_right_before_needs_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Authentication(mechanism="plain", users={"alice": hash_password("secret")})
    hashed: list[bytes] = []
    scrypt = hashlib.scrypt

    def counted(password: bytes, **parameters: Any) -> bytes:
        hashed.append(password)
        return scrypt(password, **parameters)

    with listening(settings) as (listener, _, _):
        monkeypatch.setattr(hashlib, "scrypt", counted)
        for _ in range(3):
            with dealer(listener.name, plain_username=b"alice", plain_password=b"secret") as client:
                assert identity_seen(listener, client) == "alice"
    assert hashed == [b"secret"]


@pytest.mark.parametrize("text", ["secret", "scrypt:99:8:1:AAAA:AAAA", "scrypt:14:8:1:*:*", ""])
def test_something_that_is_no_hash_is_refused_and_never_printed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"authentication\.users\.alice") as caught:
        PlainTable({"alice": text})
    assert not text or text not in caught.value.why


@pytest.mark.moderate
def test_a_users_file_is_read_by_lines(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.touch(0o640)
    file.write_text(f"# people\n\nalice {hash_password('a')}\n")
    assert PlainTable(read_users_file(str(file))).fits("alice", b"a")
    file.write_text("alice\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_users_file(str(file))


@pytest.mark.parametrize(
    ("mode", "says"), [(0o666, "write"), (0o660, "write"), (0o602, "write"), (0o644, "read")]
)
def test_a_users_file_that_others_can_write_or_read_is_refused(
    mode: int, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "users"
    file.write_text(f"alice {hash_password('a')}\n")
    file.chmod(0o640)
    assert read_users_file(str(file))
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}: others can {says} it; type: chmod 640"):
        read_users_file(str(file))


def test_a_file_of_another_kind_or_owner_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_users_file(str(tmp_path / "fifo"))
    with pytest.raises(ConfigError, match="not a regular file"):
        read_server_key(str(tmp_path / "fifo"))
    file = tmp_path / "users"
    file.write_text("")
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, 12345, 0)
        with pytest.raises(ConfigError, match="type: chown 0"):
            read_users_file(str(file))


def test_a_socket_file_that_every_user_can_use_is_refused(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Each has a name of its own: libzmq gives one up a little later.
    first, second, third = (parse_endpoint(f"ipc://{tmp_path}/{number}") for number in range(3))
    before = os.umask(0)
    try:
        with pytest.raises(StartError, match="umask 077"):
            Listener(context, first, Config(), None)
    finally:
        os.umask(before)
    tmp_path.chmod(0o777)
    with pytest.raises(StartError, match="chmod o-w"):
        Listener(context, second, Config(), None)
    tmp_path.chmod(0o1777)
    Listener(context, third, Config(), None).close(0)
    context.term()


def test_the_server_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    first = read_server_key(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_server_key(str(path)) == first
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_server_key(str(path))
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="40 characters"):
        read_server_key(str(path))


@pytest.mark.moderate
def test_two_identities_with_one_key_are_refused(tmp_path: Path) -> None:
    public = curve_client()[0].decode()
    settings = Authentication(
        mechanism="curve",
        server_key_file=str(tmp_path / "key"),
        clients={"a": public, "b": public},
    )
    with zmq.Context() as context, pytest.raises(ConfigError, match="one key, one identity"):
        Authenticator(
            context, settings, lambda: 0, lambda *_: None, lambda *_: None, lambda _: None
        )


def test_permissions_allow_what_is_named_and_nothing_else() -> None:
    permit = Permissions(
        {
            "sensor": Grant(write=["measurements.*"]),
            "boss": Grant(read=["*"], write=["*"], admin=True),
            "*": Grant(read=["public"]),
        }
    )
    assert permit("sensor", "write", "measurements.north")
    assert permit("sensor", "create", "measurements.north")
    assert not permit("sensor", "write", "measurements")
    assert not permit("sensor", "write", "measurementsx")
    assert not permit("sensor", "read", "measurements.north")
    assert not permit("sensor", "admin", "")
    assert permit("boss", "read", "any")
    assert permit("boss", "admin", "")
    assert permit("guest", "read", "public")
    assert not permit("guest", "write", "public")


@pytest.mark.slow
def test_permissions_remember_a_bounded_number_of_answers_and_no_name_that_is_none() -> None:
    permit = Permissions({"*": Grant(write=["*"])})
    tracemalloc.start()
    for number in range(4):
        assert not permit("guest", "write", f"{number:08}" * (1 << 17))
    held, _ = tracemalloc.get_traced_memory()
    assert held < 1 << 20, "names of 1 MiB are refused and not kept"
    for number in range(3 * MEMO_MAX):
        assert permit("guest", "write", f"s{number}")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < MEMO_MAX * 600


def test_quotas_are_those_of_the_name_then_of_the_first_pattern_then_of_all() -> None:
    quotas = from_table(
        {
            "quotas": {
                "streams": 50,
                "identities": {
                    "web-*": {"streams": 5, "messages_s": 100},
                    "*-7": {"streams": 6},
                    "web-1": {"streams": 7},
                },
            }
        }
    ).quotas
    table = QuotaTable(quotas)
    assert [table.of(name).streams for name in ("", "web", "web-2", "web-7", "a-7", "web-1")] == [
        50, 50, 5, 5, 6, 7,
    ]  # fmt: skip
    assert (table.of("web-2").messages_s, table.of("web-1").messages_s) == (100, 0)
    assert table.of("web-2").cursors == quotas.cursors


def test_a_quota_that_there_is_not_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"quotas\.identities\.web\.steams: .*streams"):
        from_table({"quotas": {"identities": {"web": {"steams": 5}}}})


def test_nobody_takes_another_identity_than_its_credential_carries() -> None:
    for permit in (Permissions({}), Permissions({"*": Grant(read=["*"])})):
        assert permit("alice", "identity", "alice")
        assert not permit("alice", "identity", "bob")
    # Without authentication and lists a name is only a label; with lists it would be a key.
    assert Permissions({})("", "identity", "bob")
    assert not Permissions({"bob": Grant(admin=True)})("", "identity", "bob")
