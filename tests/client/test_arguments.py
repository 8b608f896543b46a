"""A caller's mistake is refused in the call that was made, and harms no other call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest

from malamute_protocol import commands as c
from malamute_protocol.batch import encode_bulk, encode_fixed
from malamute_protocol.errors import LocalProtocolError
from malamute_protocol.framing import COMMANDS, check_command, decode_message, encode_message
from malamute_py.client.arguments import column_time
from malamute_py.client.position import AfterMessage, AtTime, Position, as_datetime

Wrong = tuple[str, str, tuple[Any, ...], dict[str, Any]]
SOON: float = time.time() * 1000 + 5000
BEFORE = datetime(1, 1, 1)  # noqa: DTZ001 - local, as a program may well have it
"""A time that no calendar has before it, which the look for its zone needs."""

TOO_DEEP: list[Any] = []
for _ in range(5_000):
    TOO_DEEP = [TOO_DEEP]

CALLS: list[Wrong] = [
    # (what the error names, the verb, its arguments)
    ("pattern=array", "purge", ("s", np.array([])), {}),
    ("stream=(list that cannot be shown)", "publish", (TOO_DEEP, b""), {}),
    ("properties", "publish", ("s", b""), {"properties": {"a": TOO_DEEP}}),
    ("priority", "send", ("m", b""), {"priority": 1000}),
    ("priority", "send", ("m", b""), {"priority": "high"}),
    ("priority", "send", ("m", b""), {"priority": True}),
    ("priority", "send_many", ("m", [b""]), {"priority": 128}),
    ("key", "send", ("m", b""), {"key": b"k" * 129}),
    ("key", "send", ("m", b""), {"key": "abc"}),
    ("deliver_at_ms", "send", ("m", b""), {"deliver_at_ms": -1}),
    ("deliver_at_ms", "send", ("m", b""), {"deliver_at_ms": SOON}),
    ("deliver_at_ms", "send_many", ("m", [b""]), {"deliver_at_ms": SOON}),
    ("deliver_at_ms=500", "send", ("m", b""), {"deliver_at_ms": 500}),
    ("expires_at_ms=500", "send", ("m", b""), {"expires_at_ms": 500}),
    ("expires_at_ms=1700000000", "publish", ("s", b""), {"expires_at_ms": 1_700_000_000}),
    ("expires_at_ms=500", "publish_many", ("s", [b""]), {"expires_at_ms": 500}),
    ("or a datetime, not a timedelta", "send", ("m", b""), {"expires_at_ms": timedelta(seconds=5)}),
    ("mailbox", "send", (None, b""), {}),
    ("mailbox", "send", (["m"], b""), {}),
    ("mailbox", "send", ("m\ud800", b""), {}),
    ("mailbox", "send", ("m" * 256, b""), {}),
    ("confirm", "send", ("m", b""), {"confirm": "loud"}),
    ("confirm", "send", ("m", b""), {"confirm": ["synced"]}),
    ("confirm", "publish", ("s", b""), {"confirm": "replicated"}),
    ("stream", "publish", (5, b""), {}),
    ("stream", "publish", ({}, b""), {}),
    ("body", "publish", ("s", 5), {}),
    ("body", "publish", ("s", "\ud800"), {}),
    ("subject", "publish", ("s", b""), {"subject": None}),
    ("subject", "publish", ("s", b""), {"subject": b"a"}),
    ("subject", "publish", ("s", b""), {"subject": []}),
    ("subject", "publish", ("s", b""), {"subject": ["a"] * 17}),
    ("subject", "publish", ("s", b""), {"subject": "a" * 256}),
    ("subject", "publish", ("s", b""), {"subject": "\udcff"}),
    ("fields", "publish", ("s", b""), {"fields": "abc"}),
    ("fields['a']", "publish", ("s", b""), {"fields": {"a": 1}}),
    ("name of a field", "publish", ("s", b""), {"fields": {1: "a"}}),
    ("properties", "publish", ("s", b""), {"properties": ["a"]}),
    ("properties['a']", "publish", ("s", b""), {"properties": {"a": {}}}),
    ("client_time_ms", "publish", ("s", b""), {"client_time_ms": 1.5}),
    ("client_time_ms", "publish", ("s", b""), {"client_time_ms": 2**63}),
    ("expires_at_ms", "publish", ("s", b""), {"expires_at_ms": "tomorrow"}),
    ("bodies", "publish_many", ("s", b"abc"), {}),
    ("bodies", "publish_many", ("s", 5), {}),
    ("bodies", "publish_many", ("s", [b"a", 5]), {}),
    ("subject", "publish_many", ("s", [b"a"]), {"subject": 5}),
    ("client_time_ms", "publish_many", ("s", [b"a"]), {"client_time_ms": [2**70]}),
    ("subjects=5: allowed is a sequence", "publish_many", ("s", [b"a"]), {"subjects": 5}),
    ("subjects='a': allowed is a sequence", "send_many", ("m", [b"a"]), {"subjects": "a"}),
    ("2 values in subjects", "publish_many", ("s", [b"a"]), {"subjects": ["a", "b"]}),
    ("stream=[]: allowed is a str", "publish_many", ([], [b"a"]), {}),
    ("limit=1.5: allowed is an integer", "list_streams", (), {"limit": 1.5}),
    ("limit=b'x': allowed is an integer", "list_cursors", (), {"limit": b"x"}),
    ("limit=None: allowed is an integer", "list_groups", (), {"limit": None}),
    ("limit=-1: allowed is an integer", "list_mailboxes", (), {"limit": -1}),
    ("limit=True: allowed is an integer", "list_services", (), {"limit": True}),
    ("codec=True: allowed is one of 'none'", "publish", ("s", b""), {"codec": True}),
    ("codec=3: allowed is", "send", ("m", b""), {"codec": 3}),
    ("codec=b'zstd': allowed is", "publish", ("s", [b"a"]), {"codec": b"zstd"}),
    ("codec=True: allowed is", "publish_many", ("s", [b"a"]), {"codec": True}),
    ("codec=['zstd']: allowed is", "publish_many", ("s", [b"a"]), {"codec": ["zstd"]}),
    ("codec=3: allowed is", "send_many", ("m", [b"a"]), {"codec": 3}),
    ("request_timeout_ms", "submit", ("v", b""), {"request_timeout_ms": -1}),
    ("request_timeout_ms", "submit", ("v", b""), {"request_timeout_ms": 0.5}),
    ("key", "submit", ("v", b""), {"key": b"k" * 129}),
    ("service", "request", (None, b""), {}),
    ("reply_to", "request", ("v", b""), {"reply_to": None}),
    ("key", "atomic", (), {"key": "abc"}),
    ("key", "atomic", (), {"key": b"k" * 129}),
    ("stream", "stream_info", (None,), {}),
    ("start", "find_offset", ("s", 2**70), {}),
    ("next of the position", "find_offset", ("s", Position(b"u" * 16, 1, -1)), {}),
    ("stream of the position", "find_offset", ("s", Position("u", 1, 1)), {}),  # type: ignore[arg-type]
    ("id", "find_offset", ("s", AfterMessage("id")), {}),  # type: ignore[arg-type]
    ("time", "find_offset", ("s", AtTime(1.5)), {}),  # type: ignore[arg-type]
    ("start", "find_offset", ("s", [2, [[]] * 40, object()]), {}),
    ("inclusive of AtTime='no'", "find_offset", ("s", AtTime(1, "no")), {}),  # type: ignore[arg-type]
    ("transaction='t': allowed is bytes", "end_transaction", ("t",), {}),
    ("settings", "create_stream", ("s", ["memory"]), {}),
    ("settings", "create_stream", ("s",), {"memory": object()}),
    ("name of a setting=1: allowed is a str", "create_stream", ("s", {1: True}), {}),
    ("stream=None: allowed is a str, not a NoneType", "remove_stream", (None,), {}),
    ("stream=['s']: allowed is a str, not a list", "stream_info", (["s"],), {}),
    ("stream=5: allowed is a str, not a int", "create_stream", (5,), {}),
    ("service={}: allowed is a str, not a dict", "cancel", ({}, b"k"), {}),
    ("service=<object", "cancel", (object(), b"k"), {}),
    ("mailbox='\\ud800': allowed is text that UTF-8 can", "purge_mailbox", ("\ud800",), {}),
    ("time=datetime", "find_offset", ("s", AtTime(BEFORE)), {}),
    ("expires_at_ms=datetime", "send", ("m", b""), {"expires_at_ms": BEFORE}),
    ("client_time_ms=datetime", "publish", ("s", b""), {"client_time_ms": BEFORE}),
    ("visibility", "subscribe", ("s",), {"visibility": "replicated"}),
    ("visibility", "subscribe", ("s",), {"visibility": None}),
    ("create", "subscribe", ("s",), {"create": "yes"}),
    ("create", "group", ("s", "g"), {"create": 1}),
    ("until", "subscribe", ("s",), {"until": "now"}),
    ("end", "subscribe", ("s",), {"end": 1.5}),
    ("end", "subscribe", ("s",), {"end": -1}),
    ("credit_records", "subscribe", ("s",), {"credit_records": 0}),
    ("credit_bytes", "subscribe", ("s",), {"credit_bytes": 2**64}),
    ("client_time", "subscribe", ("s",), {"client_time": 5}),
    ("strict='a b': allowed is True or False", "subscribe", ("s",), {"strict": "a b"}),
    ("strict=5: allowed is True or False", "group", ("s", "g"), {"strict": 5}),
    ("whole='yes': allowed is True or False", "subscribe", ("s",), {"whole": "yes"}),
    ("on_notice=5: allowed is a function or None", "subscribe", ("s",), {"on_notice": 5}),
    ("on_notice='a': allowed is", "group", ("s", "g"), {"on_notice": "a"}),
    ("visibility={}: allowed is one of", "group", ("s", "g"), {"visibility": {}}),
    ("visibility='': allowed is one of", "group", ("s", "g"), {"visibility": ""}),
    ("ack={}: allowed is one of", "group", ("s", "g"), {"ack": {}}),
    ("stream", "subscribe", (None,), {}),
    ("pattern", "subscribe", ("s", 5), {}),
    ("create", "subscribe", ("s",), {"create": "yes"}),
    ("visibility", "plan_read", ("s",), {"visibility": "replicated"}),
    ("records_max", "plan_read", ("s",), {"records_max": 1.5}),
    ("end=-1", "plan_read", ("s",), {"end": -1}),
    ("ack", "inbox", ("m",), {"ack": "never"}),
    ("mailbox", "inbox", (5,), {}),
    ("settings", "inbox", ("m",), {"settings": 5}),
    ("concurrency", "worker", ("v",), {"concurrency": 0}),
    ("lease_ms", "worker", ("v",), {"lease_ms": 1.5}),
    ("service", "worker", (None,), {}),
    ("service 'x y'", "serve", ("x y",), {}),
    ("on_error", "serve", ("v",), {"on_error": "ignore"}),
    ("kind", "group", ("s", "g"), {"kind": "several"}),
    ("hold_ms", "group", ("s", "g"), {"hold_ms": -1}),
    ("group", "group", ("s", None), {}),
    ("name", "cursor", ("s", None), {}),
    ("prefix", "list_cursors", ("s", None), {}),
    ("prefix", "list_mailboxes", (5,), {}),
    ("after", "peek", ("m",), {"after": "x"}),
    ("numbers", "requeue", ("v", None), {}),
    ("subject=<memory", "send", ("m", b""), {"subject": memoryview(b"a")}),
    ("numbers=<memory", "requeue", ("v", memoryview(bytes(4)).cast("B", (2, 2))), {}),
    ("limit='all': allowed is an integer", "transactions", (), {"limit": "all"}),
    ("limit=1.5: allowed is an integer", "transactions", (), {"limit": 1.5}),
    ("not a int64", "publish_many", ("s", np.int64(5)), {}),
    ("bodies=<memory", "publish_many", ("s", memoryview(b"abc")), {}),
    ("bodies=array", "send_many", ("m", np.array(5)), {}),
    ("not a int8", "publish_many", ("s", [b"a"]), {"subjects": np.int8(3)}),
    ("fields=array", "send_many", ("m", [b"a"]), {"fields": np.array(5)}),
    ("start", "find_offset", ("s", np.array([1, 2])), {}),
    ("start", "trim", ("s", np.array([b"a"])), {}),
    ("confirm=<memory", "publish", ("s", b""), {"confirm": memoryview(bytearray(b"synced"))}),
    ("confirm=<memory", "atomic", (), {"confirm": memoryview(bytearray(b"synced"))}),
    ("timeout_ms=array", "submit", ("v", b""), {"timeout_ms": np.array([1, 2])}),
    ("need_workers='no'", "submit", ("v", b""), {"need_workers": "no"}),
    ("client_time=<memory", "subscribe", ("s",), {"client_time": memoryview(bytes(2))}),
    ("numbers", "requeue", ("v", ["1"]), {}),
    ("numbers=array(5): allowed is several integers", "requeue", ("v", np.array(5)), {}),
    ("numbers=array(5)", "requeue_group", ("s", "g", np.array(5)), {}),
    ("need_workers=array", "request", ("v", b""), {"need_workers": np.array([1, 2])}),
    ("delay_ms=array", "submit", ("v", b""), {"delay_ms": np.array([1, 2])}),
    ("priority=array", "request", ("v", b""), {"priority": np.array([1, 2])}),
    ("reply_to=array", "request", ("v", b""), {"reply_to": np.array([1, 2])}),
    ("timeout_ms=array", "send", ("m", b""), {"timeout_ms": np.array([1, 2])}),
    ("wait=array", "opened", (), {"wait": np.array([1, 2])}),
    ("reason", "kick", (5, 5), {}),
    ("link", "kick", ("5",), {}),
    ("limit", "list_links", (None,), {}),
    ("key", "cancel", ("v", "abc"), {}),
    ("key", "cancel", ("v", b"k" * 129), {}),
]

STEPS: list[tuple[str, Callable[[Any], Any]]] = [
    ("stream", lambda step: step.publish(None, b"")),
    ("bodies", lambda step: step.publish_many("s", b"abc")),
    ("codec", lambda step: step.publish("s", b"", codec=3)),
    ("subject=1.5", lambda step: step.publish_many("s", [b"a"], subject=1.5)),
    ("client_time_ms=1.5", lambda step: step.publish_many("s", [b"a"], client_time_ms=1.5)),
    ("mailbox", lambda step: step.send(5, b"")),
    ("priority", lambda step: step.send("m", b"", priority=1000)),
    ("deliver_at_ms", lambda step: step.send("m", b"", deliver_at_ms=SOON)),
    ("service", lambda step: step.request(None, b"")),
    ("timeout_ms", lambda step: step.request("v", b"", timeout_ms=-1)),
    ("key", lambda step: step.request("v", b"", key="abc")),
    ("reply_to", lambda step: step.request("v", b"", reply_to=None)),
    ("priority=array", lambda step: step.request("v", b"", priority=np.array([1, 2]))),
    ("request", lambda step: step.reply(b"no request", b"")),
    ("request", lambda step: step.complete(5)),
    ("cursor", lambda step: step.move_cursor("s", None, 1)),
    ("next", lambda step: step.move_cursor("s", "c", 1.5)),
    ("next", lambda step: step.move_cursor("s", "c", -1)),
    ("since", lambda step: step.move_cursor("s", "c", 1, since="0")),
]


async def done(shell: Any, verb: str, arguments: tuple[Any, ...], options: Any) -> Any:
    """Make a call of either kind: one that waits, or one that gives something to iterate."""
    called = getattr(shell.client, verb)
    if verb in ("subscribe", "inbox", "worker", "serve", "group", "cursor", "atomic"):
        return called(*arguments, **options)
    return await shell.do(verb, *arguments, **options)


@pytest.mark.moderate
async def test_each_wrong_argument_is_named_and_every_other_call_goes_on(shell: Any) -> None:
    session = shell.client._session
    for named, verb, arguments, options in CALLS:
        with pytest.raises(LocalProtocolError) as caught:
            await done(shell, verb, arguments, options)
        assert named in caught.value.reason, (verb, options, caught.value)
        # Nothing of it waits to be sent, now or after a reconnect.
        assert session.idle, (verb, options)
        assert not session.pending.by_number, (verb, options)
    for named, put in STEPS:
        step = shell.client.atomic()
        with pytest.raises(LocalProtocolError) as caught:
            put(step)
        assert named in caught.value.reason, caught.value
        assert not step.parts, named
    assert not session.receivers.by_number
    assert (await shell.do("publish", "s", b"fine")).offset == 0
    assert (await shell.do("send", "m", b"fine")).count == 1
    assert shell.client.reconnects == 0


async def test_a_wrong_wait_or_count_of_a_receiver_is_named(shell: Any) -> None:
    worker, subscription = shell.client.worker("v"), shell.client.subscribe("s")
    with pytest.raises(LocalProtocolError, match="timeout_ms=b'x': allowed is an integer"):
        await shell.call(worker.next, b"x")
    with pytest.raises(LocalProtocolError, match=r"records=1\.5: allowed is an integer"):
        await shell.call(subscription.to_arrow, 1.5)


@pytest.mark.parametrize(
    ("named", "ranges", "options"),
    [
        ("ranges=5: allowed is several half-open ranges", 5, {}),
        ("ranges=None: allowed is", None, {}),
        ("ranges='ab': allowed is", "ab", {}),
        ("ranges=array(5): allowed is", np.array(5), {}),
        ("ranges=[7]: allowed is", [7], {}),
        ("ranges=['ab']: allowed is", ["ab"], {}),
        ("ranges=[(1, 2, 3)]: allowed is", [(1, 2, 3)], {}),
        ("first of ranges=-1: allowed is", [(-1, 2)], {}),
        ("first of ranges=None: allowed is", [(None, 2)], {}),
        ("end of ranges=1: allowed is an integer from 2", [(2, 1)], {}),
        ("end of ranges=1.5: allowed is", [(0, 1.5)], {}),
        ("again_ms='x': allowed is", [(0, 1)], {"again_ms": "x"}),
        ("again_ms=-2: allowed is", [(0, 1)], {"again_ms": -2}),
        ("timeout_ms='x': allowed is", [(0, 1)], {"timeout_ms": "x"}),
    ],
)
async def test_what_cannot_be_acknowledged_is_named_and_acknowledges_nothing(
    shell: Any, named: str, ranges: Any, options: dict[str, Any]
) -> None:
    await shell.do("send", "box", b"1")
    inbox = shell.client.inbox("box", ack="manual")
    mail = await shell.call(inbox.next, 10_000)
    with pytest.raises(LocalProtocolError) as caught:
        await shell.call(inbox.acknowledge, ranges, **options)
    assert named in caught.value.reason
    assert await shell.call(mail.ack) is True


async def test_a_range_of_any_length_acknowledges_what_was_handed_out(shell: Any) -> None:
    for body in (b"1", b"2"):
        await shell.do("send", "box", body)
    inbox = shell.client.inbox("box", ack="manual")
    for _ in range(2):
        await shell.call(inbox.next, 10_000)
    assert await shell.call(inbox.acknowledge, np.array([[0, 2**62]]), timeout_ms=10_000) is True
    assert (await shell.do("mailbox_info", "box")).messages == 0


async def test_what_is_no_arrow_table_is_named(shell: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"a": [b"x"]})
    for named, given, options in (
        ("table={}: allowed is a pyarrow table or record batch, not a dict", {}, {}),
        ("body=5: allowed is a str, not a int", table, {"body": 5}),
        ("subject=None: allowed is a str", table, {"body": "a", "subject": None}),
    ):
        with pytest.raises(LocalProtocolError) as caught:
            await shell.do("publish_arrow", "s", given, **options)
        assert named in caught.value.reason


async def test_columns_of_a_table_that_are_no_bodies_or_subjects_are_named(shell: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    null = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["a", None]))
    for named, column, subjects in (
        ("column 'body' has no bodies, but int64", pa.array([1, 2]), pa.array(["a", "b"])),
        ("column 's' has no subjects, but int64", pa.array([b"", b""]), pa.array([1, 2])),
        ("column 's' has nulls", pa.array([b"", b""]), pa.array(["a", None])),
        ("column 's' has nulls", pa.array([b"", b""]), null),
    ):
        table = pa.table({"body": column, "s": subjects})
        with pytest.raises(LocalProtocolError) as caught:
            await shell.do("publish_arrow", "s", table, subject="s")
        assert named in caught.value.reason
    unused = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), null.dictionary)
    table = pa.table({"body": pa.array([b"1", b"2"]), "s": unused})
    (confirmation,) = await shell.do("publish_arrow", "subjects", table, subject="s")
    assert confirmation.count == 2


async def test_whatever_counts_as_an_integer_is_one(shell: Any) -> None:
    three = np.int64(3)
    await shell.do("publish_many", "s", [b"a"] * 5)
    cursor = shell.client.cursor("s", "c")
    assert (await shell.call(cursor.move, three)) is not None
    assert (await shell.call(cursor.info)).next == 3
    assert (await shell.do("find_offset", "s", np.uint8(2))) == 2
    at = datetime(2020, 1, 1, tzinfo=UTC)
    await shell.do("send", "m", b"", priority=three, deliver_at_ms=np.int64(1000 * at.timestamp()))
    [peeked] = await shell.do("peek", "m", limit=three)
    assert peeked.priority == 3
    await shell.do("publish", "s", b"", client_time_ms=three, expires_at_ms=np.int32(0))
    subscription = shell.client.subscribe(
        "s", start=three, end=np.int16(4), credit_records=np.int64(100)
    )
    assert [record.offset for record in await shell.take(subscription, 9)] == [3]


class Name(str):
    """A text of a program's own kind, as numpy.str_ is one."""

    __slots__ = ()


@pytest.mark.moderate
@pytest.mark.parametrize("kind", [np.str_, Name])
async def test_other_kinds_of_text_and_numbers_are_the_plain_ones(shell: Any, kind: Any) -> None:
    stream, mailbox, a = kind("s"), kind("m"), kind("a")
    said = {kind("k"): kind("v"), "n": np.float64(2.5), kind("b"): np.bytes_(b"x")}
    await shell.do("publish", stream, b"1", subject=a, fields={a: a}, properties=said)
    await shell.do("publish_many", stream, [b"2"], subjects=[[a, kind("b")]], fields=[{a: a}])
    [one, two] = await shell.take(shell.client.subscribe(stream, a, start="earliest"), 2)
    assert (one.subject, two.keys, two.fields) == ("a", ("a", "b"), {"a": "a"})
    assert {type(text) for text in (one.subject, *two.keys, *two.fields.values())} == {str}
    assert one.properties == {"k": "v", "n": 2.5, "b": b"x"}
    assert (await shell.do("stream_info", stream)).name == "s"
    await shell.do("edit_stream", stream, description=kind("of mine"))
    await shell.do("send", mailbox, b"")
    assert [info.name for info in await shell.do("list_mailboxes", mailbox)] == ["m"]
    assert (await shell.do("submit", kind("v"), b"")).count == 1
    cursor = shell.client.cursor(stream, kind("c"))
    await shell.call(cursor.move, 1)
    assert (await shell.call(cursor.info)).next == 1


async def test_one_time_of_numpy_for_all_records_of_a_step_is_one(shell: Any) -> None:
    step = shell.client.atomic()
    step.publish_many("s", [b"a", b"b"], client_time_ms=np.int64(3), expires_at_ms=np.int32(0))
    await shell.call(step.commit)
    read = await shell.take(shell.client.subscribe("s", start="earliest"), 2)
    assert [record.client_time_ms for record in read] == [3, 3]
    with pytest.raises(LocalProtocolError, match="client_time_ms"):
        shell.client.atomic().publish_many("s", [b"a"], client_time_ms=np.float64(1.5))


async def test_an_offset_before_which_to_stop_is_looked_at(shell: Any) -> None:
    reader = shell.client.subscribe("s", create=True)
    with pytest.raises(LocalProtocolError, match="before='x': allowed is an integer"):
        await shell.call(partial(reader.next_record, before="x"))


async def test_options_of_a_window_and_of_encoders_that_are_unknown_are_named(shell: Any) -> None:
    window = shell.client.publisher("s")
    with pytest.raises(LocalProtocolError, match="client_times"):
        await shell.call(window.publish_many, [b"a"], client_times=[1])
    encoders: list[Callable[..., Any]] = [
        partial(encode_fixed, b"abcd", 2),
        partial(encode_bulk, [bytes(1 << 17)], np.array([0, 1 << 17])),
    ]
    for encode in encoders:
        with pytest.raises(LocalProtocolError, match="client_times"):
            encode(client_times=[1, 2])


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.__name__)
def test_no_value_of_any_field_of_a_command_is_an_error_of_another_kind(
    command: type[c.Command],
) -> None:
    hostile: list[Any] = [None, -1, 2**70, 1.5, True, "\ud800", b"x" * 200, [[]], {1: 2}, object()]
    for value in hostile:
        names = command.__struct_fields__
        # Ranges are looked at as they are made, ours as well as a peer's.
        made = command(**{name: [(0, 1)] if name == "ranges" else value for name in names})
        try:
            checked = check_command(made)
        except LocalProtocolError as error:
            assert command.__name__ in error.reason  # noqa: PT017 - most raise, not all
            continue
        assert type(checked) is command
        if not checked.content_frames and not isinstance(checked, c.Atomic):
            assert decode_message(encode_message([checked]))[0][0] == checked


class Fickle(Mapping[str, str]):
    """A mapping that can be read so often and not once more."""

    def __init__(self, looks: int = 1) -> None:
        self.looks = looks

    def __iter__(self) -> Iterator[str]:
        self.looks -= 1
        if self.looks < 0:
            raise ZeroDivisionError("as the test wants")
        return iter(["a"])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> str:
        return "b"


async def test_a_value_that_only_encoding_finds_wrong_fails_its_own_call(shell: Any) -> None:
    with pytest.raises(LocalProtocolError, match="as the test wants"):
        await shell.do("publish", "s", b"", fields=Fickle())
    with pytest.raises(LocalProtocolError, match="as the test wants"):
        await shell.do("request", "v", b"", properties=Fickle())
    with pytest.raises(LocalProtocolError, match="as the test wants"):
        await shell.do("publish_many", "s", [b"a"], fields=Fickle(looks=0))
    assert (await shell.do("publish", "s", b"fine")).offset == 0
    assert shell.client.reconnects == 0


def test_a_datetime_is_told_to_the_millisecond() -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    # Of each of these a float of seconds had the millisecond before.
    for at_ms in (543_865_850_504, 4_315_298_395_662, 139_225_120_294_391, -272_906_741_886):
        time = epoch + timedelta(milliseconds=at_ms)
        assert (column_time("time", time), as_datetime(at_ms)) == (at_ms, time)
