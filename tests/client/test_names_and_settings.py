"""The public names, the settings, positions and the cutting of bulks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Unpack, cast, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import malamute_py as malamute
from malamute_protocol.errors import BrokerRefused, LocalProtocolError
from malamute_protocol.limits import Limits
from malamute_py.changelog.settings import (
    CursorSettings,
    GroupSettings,
    MailboxSettings,
    ServiceSettings,
    StreamSettings,
)
from malamute_py.client.aio.cursors import StreamCursor
from malamute_py.client.position import (
    AfterMessage,
    AtClientTime,
    AtMessage,
    AtTime,
    LastPerSubject,
    Position,
    start_on_wire,
)
from malamute_py.client.session.calls import Bulk, content_count
from malamute_py.client.settings import ClientSettings, SettingError, make_settings
from malamute_py.client.sync.cursors import SyncStreamCursor


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, malamute_py; print(sorted({'zmq', 'numpy', 'asyncio'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert set(malamute.__all__) <= set(dir(malamute))
    for name in malamute.__all__:
        assert getattr(malamute, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        malamute.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"retry_min_ms": 0}, "retry_min_ms"),
        ({"retry_min_ms": 50, "retry_max_ms": 10}, "retry_max_ms"),
        ({"linger_ms": -1}, "linger_ms"),
        ({"colour": "red"}, "colour"),
        ({"identity": 5}, "identity"),
        ({"identity": "a b"}, "identity"),
        ({"software": None}, "software"),
        ({"credential": ("ann", "secret")}, "credential"),
        ({"credential": malamute.Plain("ann", 5)}, "credential.password"),  # type: ignore[arg-type]
        ({"heartbeat_ms": "often"}, "heartbeat_ms"),
        ({"window_bytes": 1.5}, "window_bytes"),
        ({"call_timeout_ms": "5"}, "call_timeout_ms"),
        ({"idempotent": 1}, "idempotent"),
        ({"credential": malamute.Curve("short", "x" * 40, "y" * 40)}, "credential.server_key"),
    ],
)
def test_a_setting_that_cannot_work_is_named(options: Any, key: str) -> None:
    with pytest.raises(SettingError) as caught:
        make_settings("tcp://127.0.0.1:1", options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "endpoint", ["tcp://h", "tcp://h:", "tcp://h/", "tcp://h:979797", "tcp://h:port"]
)
def test_an_endpoint_without_a_port_is_refused_with_one(endpoint: str) -> None:
    with pytest.raises(SettingError, match="names no port; write tcp://h:9797"):
        make_settings(endpoint, {})


@pytest.mark.parametrize("connect", [malamute.connect, malamute.connect_sync])
@pytest.mark.parametrize("wrong", ["5", 0, True, 1.5])
def test_the_time_for_connecting_is_checked_before_there_is_a_socket(
    connect: Any, wrong: Any
) -> None:
    with pytest.raises(SettingError, match=r"timeout_ms: .* is not milliseconds as an integer"):
        connect(timeout_ms=wrong)


def test_help_explains_each_option_of_connect() -> None:
    explained = malamute.ClientSettings.__doc__ or ""
    for name in ClientSettings.__struct_fields__:
        assert re.search(rf"^    (\w+, )*{name}[:,]", explained, re.MULTILINE), name
    assert "help(ClientSettings)" in (malamute.connect.__doc__ or "")


def test_the_options_of_connect_are_the_settings_with_their_types() -> None:
    """A type checker tells of a wrong option before the program runs."""
    settings = get_type_hints(ClientSettings)
    del settings["endpoints"]
    assert get_type_hints(malamute.ClientOptions) == settings
    for connect in (malamute.connect, malamute.connect_sync):
        assert get_type_hints(connect)["options"] == Unpack[malamute.ClientOptions]


@pytest.mark.parametrize("member", [malamute.Member, malamute.SyncMember])
@pytest.mark.parametrize("verb", ["ack", "nack", "release", "renew", "fail", "ack_nowait"])
def test_a_type_checker_knows_what_a_member_acknowledges(member: Any, verb: str) -> None:
    held = get_type_hints(getattr(member, verb))["held"]
    assert set(get_args(held)) == {malamute.HeldBatch, malamute.Record}


@pytest.mark.parametrize("client", [malamute.Client, malamute.SyncClient])
def test_a_type_checker_knows_the_settings_that_the_broker_has(client: Any) -> None:
    cursor = StreamCursor if client is malamute.Client else SyncStreamCursor
    kept_as: list[tuple[tuple[Any, ...], Any, Any]] = [
        ((client.create_stream, client.edit_stream), malamute.StreamOptions, StreamSettings),
        ((client.edit_mailbox,), malamute.MailboxOptions, MailboxSettings),
        ((client.edit_service,), malamute.ServiceOptions, ServiceSettings),
        ((client.edit_group,), malamute.GroupOptions, GroupSettings),
        ((cursor.edit,), malamute.CursorOptions, CursorSettings),
    ]
    for methods, options, kind in kept_as:
        for method in methods:
            assert get_type_hints(method)["more"] == Unpack[options]
        named, kept = get_type_hints(options), get_type_hints(kind)
        kept.pop("former_schemas", None)  # No client may set them.
        assert named.keys() == kept.keys()
        for name, allowed in named.items():
            words = get_args(allowed)
            if not words:
                assert allowed in (kept[name], Any), name
                continue
            room: dict[str, Any] = {"ring_bytes": 1 << 20} if name in ("full", "keep") else {}
            typed: dict[str, Any] = {"schema": b"\0"} if name == "validate" else {}
            for word in words:
                kind(**room, **typed, **{name: word}).check()
            with pytest.raises(BrokerRefused, match=f"{name} is"):
                kind(**{name: "no such word"}).check()


@pytest.mark.parametrize("client", [malamute.Client, malamute.SyncClient])
def test_help_explains_each_setting_of_what_the_broker_keeps(client: Any) -> None:
    cursor = StreamCursor if client is malamute.Client else SyncStreamCursor
    for method, kind in (
        (client.create_stream, StreamSettings),
        (client.edit_mailbox, MailboxSettings),
        (client.edit_service, ServiceSettings),
        (cursor.edit, CursorSettings),
    ):
        for name in kind.__struct_fields__:
            assert re.search(rf"\b{name}\b", str(method.__doc__)), (method, name)


def test_no_secret_is_shown() -> None:
    settings = ClientSettings(credential=malamute.Plain("ann", "hush"))
    assert "hush" not in repr(settings)
    assert "s" * 40 not in repr(malamute.Curve("k" * 40, "p" * 40, "s" * 40))


@pytest.mark.moderate
@given(st.binary(min_size=16, max_size=16), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_a_position_reads_back_from_its_text(stream: bytes, epoch: int, following: int) -> None:
    position = Position(stream, epoch, following)
    assert Position.parse(str(position)) == position


def test_text_that_is_no_position_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="bad_start"):
        Position.parse("12")


def test_starts_have_the_wire_form_of_the_specification() -> None:
    noon = datetime(2013, 1, 1, 12, tzinfo=UTC)
    milliseconds = int(noon.timestamp() * 1000)
    table: list[tuple[Any, list[Any]]] = [
        ("earliest", [0]),
        ("latest", [1]),
        (7, [2, 7]),
        (Position(b"u" * 16, 3, 9), [2, 9, 3, b"u" * 16]),
        (noon, [3, milliseconds, True]),
        (AtTime(5, inclusive=False), [3, 5, False]),
        (AtClientTime(noon), [4, milliseconds, True]),
        (AfterMessage(b"i" * 16), [5, b"i" * 16]),
        (AtMessage(b"i" * 16), [5, b"i" * 16, True]),
        (LastPerSubject(), [6]),
    ]
    for start, wire in table:
        assert start_on_wire(start) == wire
    wrong: list[Any] = [
        -1, True, "newest", None, 1.5,
        AfterMessage(b"i" * 15), AtMessage(b""), AfterMessage(b"\xff" * 16),
        AtTime(5, inclusive=cast("Any", "no")), AtClientTime(5, inclusive=cast("Any", None)),
        AtTime(cast("Any", "x")), AtClientTime(cast("Any", 1.5)),
    ]  # fmt: skip
    for start in wrong:
        with pytest.raises(LocalProtocolError, match="bad_start"):
            start_on_wire(start)


class Walked(list[bytes]):
    """A list that counts what an iterator over it has passed."""

    passed = 0

    def __iter__(self) -> Iterator[bytes]:
        for body in super().__iter__():
            self.passed += 1
            yield body


def _bulk(bodies: Any, batch_bytes: int) -> Bulk:
    return Bulk(
        bodies, batch_bytes=batch_bytes, limits=Limits(), subject="a", subjects=None, options={}
    )


def test_the_bodies_before_a_cut_are_not_walked_through_for_it() -> None:
    bodies = Walked([b""] * 300_000)
    cuts = list(_bulk(bodies, 1).cuts())
    assert cuts[-1][1] == len(bodies)
    assert bodies.passed <= len(bodies)


@pytest.mark.parametrize(
    ("settings", "taken", "target"),
    [
        ({}, 64 << 20, 2 << 20),
        ({}, 1 << 20, 512 << 10),
        ({"window_bytes": 1 << 20}, 64 << 20, 256 << 10),
        ({"batch_bytes": 4096}, 64 << 20, 4096),
        ({"window_bytes": 3}, 64 << 20, 1),
    ],
)
def test_a_batch_leaves_room_in_the_window_and_in_what_the_broker_takes(
    settings: dict[str, int], taken: int, target: int
) -> None:
    limits = Limits(batch_bytes_max=taken)
    assert ClientSettings(**settings).batch_target(limits) == target  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=80), st.integers(1, 500))
def test_a_bulk_is_cut_without_loss_into_batches_of_the_size_asked_for(
    sizes: list[int], batch_bytes: int
) -> None:
    bodies = [bytes(size) for size in sizes]
    bulk = _bulk(bodies, batch_bytes)
    cuts = list(bulk.cuts())
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(bodies)
    assert all(before[1] == after[0] for before, after in pairwise(cuts))
    for first, end in cuts:
        assert end == first + 1 or sum(sizes[first:end]) <= batch_bytes
        assert content_count(bulk.encode(first, end, (0, 0, 0))) == end - first


def test_what_is_no_content_is_refused_before_it_is_queued() -> None:
    for wrong in (b"", b"short", b"x" * 200):
        with pytest.raises(LocalProtocolError, match="bad_batch"):
            content_count(wrong)
