"""Both shells against the real broker, in this process."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zmq

import malamute_py as malamute
from malamute_protocol.encode import encode
from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
    Timeout,
)
from malamute_py.client.session.subscription import ModeNotice
from malamute_py.embedded import EmbeddedBroker
from malamute_py.server.authentication.credentials import hash_password
from tests.client.shells import FAST, SHELLS
from tests.waiting import WAIT_S, until_async


async def offsets(shell: Any, pattern: Any, **options: Any) -> list[int]:
    subscription = shell.client.subscribe("s", pattern, until="tail", **options)
    return [record.offset for record in await shell.take(subscription, 1 << 30)]


async def test_each_level_is_confirmed_as_it_was_asked_for(shell: Any) -> None:
    levels = [
        (await shell.do("publish", "s", b"x", confirm=level)).level
        for level in ("default", "synced", "stored", "none")
    ]
    assert levels == ["synced", "synced", "stored", "none"]
    records = await shell.take(shell.client.subscribe("s", start="earliest"), 4)
    assert [record.offset for record in records] == [0, 1, 2, 3]


async def test_every_pattern_kind_selects_exactly_its_records(shell: Any) -> None:
    subjects = ["eu.fr.paris", "eu.de.bonn", "us.ny", "eu.fr"]
    fields = [{"kind": "a"}, {"kind": "b", "late": ""}, {"kind": "a"}, None]
    await shell.do("publish_many", "s", [b"x"] * 4, subjects=subjects, fields=fields)
    expected = [
        ("#", [0, 1, 2, 3]),
        ("eu.#", [0, 1, 3]),
        ("eu.fr.*", [0, 3]),
        (malamute.prefix("eu.d"), [1]),
        (malamute.regex("^(us|eu)[.](ny|fr)$"), [2, 3]),
        (malamute.fields("kind=a"), [0, 2]),
        (malamute.fields("late", "kind=a", mode="any"), [0, 1, 2]),
        (malamute.all_of(malamute.topic("eu.#"), malamute.not_(malamute.prefix("eu.f"))), [1]),
    ]
    for pattern, wanted in expected:
        assert await offsets(shell, pattern, start="earliest") == wanted, pattern


@pytest.mark.moderate
@pytest.mark.parametrize("made", SHELLS, ids=lambda shell: shell.kind)
async def test_batches_are_no_larger_than_a_small_broker_takes(made: Any) -> None:
    small: dict[str, Any] = {
        "limits.batch_bytes_max": 512 << 10,
        "limits.record_bytes_max": 256 << 10,
    }
    async with EmbeddedBroker(**small) as embedded:
        shell = made()
        await shell.connect(embedded.endpoint, context=embedded.context, **FAST)
        bodies = [bytes(1_120)] * 2_000
        await shell.do("publish_many", "s", bodies)
        batches = await shell.do("send_many", "box", bodies)
        records = await shell.take(shell.client.subscribe("s", start="earliest"), len(bodies))
        await shell.do("close", flush_ms=0)
    assert len(records) == len(bodies)
    assert 5 <= len(batches) <= 16, "2.2 MB, half a batch at a time"


@pytest.mark.parametrize("made", SHELLS, ids=lambda shell: shell.kind)
async def test_bulk_calls_keep_the_limits_that_the_broker_told(made: Any) -> None:
    limits: dict[str, Any] = {"limits.batch_records_max": 100, "limits.record_bytes_max": 1_000}
    bodies = [bytes(100)] * 250
    table = pa.table({"body": bodies, "key": [f"k{n}" for n in range(250)]})
    async with EmbeddedBroker(**limits) as embedded:
        shell = made()
        await shell.connect(embedded.endpoint, context=embedded.context, **FAST)
        for call, given in (
            ("publish_many", bodies),
            ("send_many", bodies),
            ("publish_arrow", table),
        ):
            confirmed = await shell.do(call, "s", given)
            assert [one.count for one in confirmed] == [100, 100, 50], call
        for call in ("publish_many", "send_many"):
            with pytest.raises(LocalProtocolError, match="too_large"):
                await shell.do(call, "s", [bytes(1_001)])
        await shell.do("close", flush_ms=0)


@pytest.mark.moderate
@pytest.mark.parametrize("made", SHELLS, ids=lambda shell: shell.kind)
async def test_a_table_larger_than_a_batch_is_published_in_several(made: Any) -> None:
    names = [f"k{n % 700}" for n in range(3_000)]
    bodies = [f"{n:08000d}".encode() for n in range(3_000)]
    table = pa.table({"body": bodies, "key": pa.array(names).dictionary_encode()})
    async with EmbeddedBroker() as embedded:
        shell = made()
        await shell.connect(embedded.endpoint, context=embedded.context, **FAST)
        confirmed = await shell.do("publish_arrow", "s", table, subject="key")
        assert len(confirmed) > 1
        records = await shell.take(shell.client.subscribe("s", start="earliest"), len(bodies))
        await shell.do("close", flush_ms=0)
    assert [(record.subject, bytes(record.body)) for record in records] == list(
        zip(names, bodies, strict=True)
    )


@pytest.mark.moderate
async def test_bulk_calls_cut_by_all_that_their_records_have(shell: Any) -> None:
    names = [f"{n:05d}".ljust(255, "s") for n in range(65_536)]
    wide = [{f"f{k}": f"{n:05d}".ljust(1_000, "v") for k in range(8)} for n in range(3_000)]
    kept = [{"note": f"{n:05d}".ljust(60_000, "p")} for n in range(400)]
    many = [[f"{n}", "a", "b", "c", "d"] for n in range(60_000)]
    for options in (
        {"subjects": names}, {"fields": wide}, {"properties": kept}, {"subjects": many},
    ):  # fmt: skip
        ((option, values),) = options.items()
        bodies = [b"%d" % n for n in range(len(values))]
        confirmed = await shell.do("publish_many", "s", bodies, **options)
        assert 2 <= len(confirmed) <= 4, "halves, as often as they do not fit"
        first, count = confirmed[0].offset, len(values)
        records = await shell.take(shell.client.subscribe("s", start=first), count)
        taken = [
            record.keys if option == "subjects" else getattr(record, option) for record in records
        ]
        wanted = [[value] if type(value) is str else value for value in values]
        assert list(map(list, taken)) == wanted if option == "subjects" else taken == wanted
        assert [bytes(record.body) for record in records] == bodies
        sent = await shell.do("send_many", "box", bodies, **options)
        assert sum(one.count for one in sent) == count


async def test_a_bulk_call_of_one_batch_with_a_wrong_record_sends_none_of_it(shell: Any) -> None:
    for options in (
        {"subjects": ["a", "x" * 256]},
        {"fields": [None, {"name": "v" * 1_025}]},
        {"properties": [None, {"name": "v" * 65_536}]},
    ):
        with pytest.raises(LocalProtocolError, match="too_large"):
            await shell.do("publish_many", "s", [b"1", b"2"], **options)
    assert (await shell.do("publish", "s", b"first")).offset == 0


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(), pa.string(), pa.large_binary(), pa.large_string(), pa.binary_view(),
        pa.string_view(), pa.dictionary(pa.uint8(), pa.string()),
    ],
    ids=str,
)  # fmt: skip
async def test_bodies_and_subjects_of_an_arrow_table_may_be_of_any_kind_of_text(
    shell: Any, kind: Any
) -> None:
    names = ["left out", "a", "bb", "", "a", "long enough for a view to refer to it"]
    column: Any = pa.array(names, pa.string()).cast(kind)
    table = pa.table({"body": column, "key": column}).slice(1)
    await shell.do("publish_arrow", "s", table, subject="key")
    records = await shell.take(shell.client.subscribe("s", start="earliest"), 5)
    assert [(record.subject, bytes(record.body).decode()) for record in records] == [
        (name, name) for name in names[1:]
    ]


@pytest.mark.moderate
async def test_an_arrow_table_is_cut_by_its_subjects_too(shell: Any) -> None:
    names = [f"{n:05d}".ljust(255, "s") for n in range(65_536)]
    table = pa.table({"body": [b"x"] * len(names), "key": names})
    confirmed = await shell.do("publish_arrow", "s", table, subject="key")
    assert [one.count for one in confirmed] == [32_768, 32_768]
    records = await shell.take(shell.client.subscribe("s", start="earliest"), len(names))
    assert [record.subject for record in records] == names


async def test_arrow_columns_that_cannot_be_bodies_or_subjects_are_named(shell: Any) -> None:
    bodies = pa.array([b"1", b"2"])
    null = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    wrong: Any = (
        ([pa.array([1, 2])], ["body"], "column 'body'"),
        ([pa.array([["a"], ["b"]])], ["body"], "column 'body'"),
        ([bodies, bodies], ["body", "body"], "several columns"),
        ([bodies, pa.array(["a", None])], ["body", "key"], "'key' has nulls"),
        ([bodies, null], ["body", "key"], "'key' has nulls"),
        ([bodies, pa.array([b"a", b"\xff"])], ["body", "key"], "column 'key'"),
        ([bodies, bodies, bodies], ["body", "key", "key"], "several columns"),
    )
    for columns, names, why in wrong:
        table = pa.Table.from_arrays(list(columns), names=names)
        with pytest.raises(LocalProtocolError, match=why):
            await shell.do("publish_arrow", "s", table, subject="key")
    assert await shell.do("list_streams") == []


@pytest.mark.moderate
async def test_bodies_may_be_any_sequence(shell: Any) -> None:
    bodies = [b"%d" % n for n in range(70_000)]
    for given in (deque(bodies), pd.Series(bodies, index=range(5, 70_005)), np.array(bodies)):
        subjects = deque(["a"]) * len(bodies)
        confirmed = await shell.do("publish_many", "s", given, subjects=subjects)
        assert [one.count for one in confirmed] == [65_536, 4_464]
        await shell.do("send_many", "box", given)
        start = confirmed[0].offset
        records = await shell.take(shell.client.subscribe("s", start=start), len(bodies))
        assert [bytes(record.body) for record in records] == bodies


async def test_a_bad_pattern_is_raised_before_anything_is_sent(shell: Any) -> None:
    with pytest.raises(BrokerRefused, match="bad_pattern"):
        shell.client.subscribe("s", "a*")


@pytest.mark.moderate
async def test_a_subscription_starts_where_it_was_asked_to(shell: Any) -> None:
    confirmed = []
    for number in range(4):
        confirmed.append(
            await shell.do("publish", "s", b"%d" % number, subject="even" if number % 2 else "odd")
        )
        await asyncio.sleep(0.003)
    second = confirmed[1]
    position = shell.client.subscribe("s", start="earliest", end=2)
    await shell.take(position, 2)
    starts = [
        ("earliest", [0, 1, 2, 3]),
        ("latest", []),
        (2, [2, 3]),
        (second.append_time, [1, 2, 3]),
        (malamute.AtTime(second.append_time_ms, inclusive=False), [2, 3]),
        (malamute.AfterMessage(second.id), [2, 3]),
        (malamute.AtMessage(second.id), [1, 2, 3]),
        (malamute.LastPerSubject(), [2, 3]),
        (position.position, [2, 3]),
    ]
    for start, wanted in starts:
        assert await offsets(shell, "#", start=start) == wanted, start
    assert await shell.do("find_offset", "s", second.append_time) == 1


@pytest.mark.moderate
async def test_a_late_subscriber_catches_up_and_goes_live(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"%d" % n for n in range(1000)])
    notices: list[Any] = []
    subscription = shell.client.subscribe("s", start="earliest", on_notice=notices.append)
    assert len(await shell.take(subscription, 1000)) == 1000
    await shell.do("publish", "s", b"live")
    assert [record.body for record in await shell.take(subscription, 1)] == [b"live"]
    assert subscription.live
    assert [notice.live for notice in notices if isinstance(notice, ModeNotice)][-1]


@pytest.mark.moderate
async def test_a_slow_reader_with_little_credit_loses_nothing(shell: Any) -> None:
    subscription = shell.client.subscribe(
        "s", start="earliest", credit_records=50, credit_bytes=4000, strict=True, create=True
    )
    bodies = [b"%05d" % n for n in range(3000)]
    for first in range(0, 3000, 100):
        await shell.do("publish_many", "s", bodies[first : first + 100])
    records = await shell.take(subscription, 3000)
    assert [record.body for record in records] == bodies
    assert subscription.gaps == 0


async def test_a_stream_is_not_made_by_a_typing_error_and_the_name_that_was_meant_is_said(
    shell: Any,
) -> None:
    for name in ("trades", "trades.copied", "orders"):
        await shell.do("publish", name, b"x")
    for typed, said in (
        ("trdaes", "did you mean 'trades'?"), ("order", "did you mean 'orders'?"),
        ("weather", "to publish to it makes it"),
    ):  # fmt: skip
        with pytest.raises(BrokerRefused, match="unknown_stream") as caught:
            await shell.take(shell.client.subscribe(typed), 1)
        assert said in caught.value.reason
        with pytest.raises(BrokerRefused, match="unknown_stream") as caught:
            await shell.take(shell.client.group(typed, "readers"), 1)
        assert said in caught.value.reason
    assert {each.name for each in await shell.do("list_streams")} == {
        "trades", "trades.copied", "orders",
    }  # fmt: skip
    subscription = shell.client.subscribe("weather", start="earliest", create=True)
    await shell.call(subscription.accepted)
    await shell.do("publish", "weather", b"rain")
    assert [record.body for record in await shell.take(subscription, 1)] == [b"rain"]
    member = shell.client.group("snow", "readers", create=True)
    await shell.call(member.accepted)
    await shell.do("publish", "snow", b"flake")
    assert [record.body for record in await shell.take(member, 1)] == [b"flake"]


async def test_a_group_begins_at_the_oldest_record_unless_it_is_told_otherwise(shell: Any) -> None:
    for n in range(3):
        await shell.do("publish", "s", b"%d" % n)
    member = shell.client.group("s", "readers")
    await shell.call(member.accepted)
    later = shell.client.group("s", "later", start="latest")
    await shell.call(later.accepted)
    assert [(await shell.do("group_info", "s", name)).next for name in ("readers", "later")] == [
        0, 3,
    ]  # fmt: skip
    for each in (member, later):
        await shell.call(each.close)


async def test_streams_are_made_described_changed_listed_and_removed(shell: Any) -> None:
    await shell.do("create_stream", "one", max_bytes=1 << 20)
    await shell.do("create_stream", "one", max_bytes=1 << 20)
    with pytest.raises(BrokerRefused, match="stream_exists"):
        await shell.do("create_stream", "one", max_bytes=5 << 20)
    await shell.do("edit_stream", "one", max_bytes=2 << 20)
    await shell.do("create_stream", "two", {"memory": True})
    assert (await shell.do("stream_info", "one")).settings["max_bytes"] == 2 << 20
    assert [facts.name for facts in await shell.do("list_streams")] == ["one", "two"]
    assert [facts.name for facts in await shell.do("list_streams", "t")] == ["two"]
    await shell.do("remove_stream", "one")
    with pytest.raises(BrokerRefused, match="unknown_stream"):
        await shell.do("stream_info", "one")


@pytest.mark.parametrize("at", [9, -1], ids=["checksum", "body"])
async def test_a_content_that_changed_since_it_was_made_is_refused(shell: Any, at: int) -> None:
    content = bytearray(encode([b"x" * 40, b"y" * 40], subject="s"))
    content[at] ^= 1
    with pytest.raises(LocalProtocolError, match="corrupt"):
        await shell.do("publish_batch", "batches", bytes(content))
    content[at] ^= 1
    assert (await shell.do("publish_batch", "batches", bytes(content))).count == 2


async def test_what_is_refused_without_a_confirm_is_counted(shell: Any) -> None:
    await shell.do("create_stream", "keys", keep="last-per-subject", ring_bytes=4 << 20)
    await shell.do("publish", "keys", bytes(1 << 20), confirm="none")
    await shell.do("flush")
    assert (await shell.do("stream_info", "keys")).records == 0  # The refusal came before.
    assert shell.client.refused_unconfirmed == 1


async def test_a_stream_in_memory_confirms_that_nothing_is_promised(shell: Any) -> None:
    await shell.do("create_stream", "m", memory=True)
    confirmed = await shell.do("publish", "m", b"x")
    assert (confirmed.offset, confirmed.level) == (0, "none")
    with pytest.raises(BrokerRefused):
        await shell.do("publish", "m", b"x", confirm="synced")
    assert (await shell.do("publish", "m", b"y")).offset == 1


@pytest.mark.moderate
async def test_a_read_is_planned_and_its_pieces_hold_every_record(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"x" * 1000] * 5000)
    plan = await shell.do("plan_read", "s", split_bytes=1 << 20)
    assert (plan.from_offset, plan.to_offset) == (0, 5000)
    assert len(plan.splits) > 2
    found: list[int] = []
    for split in plan.splits:
        subscription = shell.client.subscribe("s", start=split.from_offset, end=split.to_offset)
        found += [record.offset for record in await shell.take(subscription, 1 << 30)]
    assert found == list(range(5000))


async def test_the_broker_tells_of_itself_and_a_kicked_client_is_out(
    shell: Any, broker: EmbeddedBroker
) -> None:
    assert (await shell.do("broker_info")).epoch == 1
    async with broker.connect(software="victim") as victim:
        number = next(
            link.link for link in await shell.do("list_links") if link.software == "victim"
        )
        await shell.do("kick", number, "by the test")
        with pytest.raises(BrokerRefused, match="kicked"):
            async for _ in victim.subscribe("s"):
                pass


async def test_a_closed_subscription_frees_the_broker_and_keeps_its_position(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"x"] * 10)
    subscription = shell.client.subscribe("s", start="earliest")
    await shell.take(subscription, 4)
    await shell.call(subscription.close)
    assert subscription.position.next == 4
    assert (await shell.do("stream_info", "s")).subscriptions == 0
    assert await offsets(shell, "#", start=subscription.position) == [4, 5, 6, 7, 8, 9]


async def test_a_subscription_that_nobody_holds_any_more_is_ended(shell: Any) -> None:
    await shell.do("publish_many", "s", [b"x"] * 10)
    await shell.take(shell.client.subscribe("s", start="earliest"), 4)
    async with asyncio.timeout(WAIT_S):
        # The thread that read may let go a little after it has handed over what it read, and
        # the first question carries the end of the subscription with it.
        while (await shell.do("stream_info", "s")).subscriptions:
            gc.collect()


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_context_that_is_terminated_under_a_client_ends_it_in_order(
    kind: Any,
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    async with EmbeddedBroker(tcp=True) as broker:
        victim = kind()
        await victim.connect(broker.tcp_endpoint, context=context)
        subscription = victim.client.subscribe("s", create=True)
        await victim.call(subscription.accepted)
        reading = asyncio.create_task(victim.take(subscription, 1))
        # Not destroy(): that closes sockets, which is only for the thread that they belong to.
        ending = threading.Thread(target=context.term)
        ending.start()
        with pytest.raises(ConnectionLost, match="terminated"):
            await asyncio.wait_for(reading, WAIT_S)
        with pytest.raises(ConnectionLost, match="terminated"):
            await asyncio.wait_for(victim.do("publish", "s", b"x"), WAIT_S)
        await victim.do("close")
        await asyncio.to_thread(ending.join)


async def test_arrow_comes_with_every_column(shell: Any) -> None:
    pytest.importorskip("pyarrow")
    await shell.do(
        "publish", "s", b"x", subject="a", fields={"k": "v"}, client_time_ms=5, properties={"p": 1}
    )
    subscription = shell.client.subscribe("s", start="earliest", until="tail")
    table = await shell.call(subscription.to_arrow, decode=True)
    assert table.column("subject").to_pylist() == ["a"]
    assert table.column("body").to_pylist() == [b"x"]
    assert dict(table.column("fields").to_pylist()[0]) == {"k": "v"}


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_broker_restarted_amid_publishing_and_reading_has_everything_once_in_order(
    kind: Any, tmp_path: Path, endpoint: str
) -> None:
    small: dict[str, Any] = {
        "limits__record_bytes_max": 1 << 19,
        "limits__batch_bytes_max": 1 << 20,
        "journal__segment_bytes": 4 << 20,
        "journal__ring_bytes": 64 << 20,
    }

    def start() -> EmbeddedBroker:
        return EmbeddedBroker(tmp_path, listen=[endpoint], **small).start()

    broker = await asyncio.to_thread(start)
    shell = kind()
    await shell.connect(endpoint, **FAST)
    offsets: list[int] = []
    restarted = asyncio.Event()

    async def publishing() -> None:
        while not restarted.is_set() or len(offsets) < 300:
            offsets.append((await shell.do("publish", "s", b"%04d" % len(offsets))).offset)

    async def read() -> list[bytes]:
        bodies: list[bytes] = []
        while b"last" not in bodies[-1:]:
            bodies += [record.body for record in await shell.take(subscription, 1)]
        return bodies

    writing = asyncio.create_task(publishing())
    subscription = shell.client.subscribe("s", start="earliest", strict=True, create=True)
    reading = asyncio.create_task(read())
    try:
        for number in range(3):
            more = len(offsets) + 50
            await until_async(lambda: len(offsets) >= more and shell.client.reconnects >= number)  # noqa: B023
            await asyncio.to_thread(broker.stop)
            broker = await asyncio.to_thread(start)
        await until_async(lambda: shell.client.reconnects >= 3)
        restarted.set()
        await asyncio.wait_for(writing, WAIT_S)
        assert offsets == list(range(len(offsets)))
        await shell.do("publish", "s", b"last")
        bodies = await asyncio.wait_for(reading, WAIT_S)
        assert bodies == [*(b"%04d" % n for n in range(len(offsets))), b"last"]
    finally:
        await shell.do("close", flush_ms=0)
        await asyncio.to_thread(broker.stop)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_a_wrong_or_missing_password_is_final_and_the_right_one_works(
    kind: Any,
) -> None:
    users = {"ann": hash_password("secret")}
    secured = EmbeddedBroker(
        tcp=True, authentication__mechanism="plain", authentication__users=users
    )
    async with secured as broker:
        # Trying again would go on for ever and never raise.
        guess = malamute.Plain("ann", "guess")
        with pytest.raises(BrokerRefused, match="unauthenticated"):
            await kind().connect(broker.tcp_endpoint, credential=guess, timeout_ms=None, **FAST)
        # libzmq often ends the connection before it has said which credential it wants; how a
        # client takes that word is shown in test_shells_against_a_fake.py.
        told = r"unauthenticated|handshake|no answer"
        with pytest.raises((BrokerRefused, Timeout), match=told):
            await kind().connect(broker.tcp_endpoint, timeout_ms=500, **FAST)
        shell = kind()
        await shell.connect(broker.tcp_endpoint, credential=malamute.Plain("ann", "secret"))
        assert shell.client.welcome.identity == "ann"
        await shell.do("close")


@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_an_embedded_broker_that_stops_before_its_clients_ends_them_in_order(
    kind: Any,
) -> None:
    shell = kind()
    async with EmbeddedBroker() as broker:
        await shell.connect(broker.endpoint, context=broker.context, **FAST)
        subscription = shell.client.subscribe("s", create=True)
        await shell.call(subscription.accepted)
        reading = asyncio.create_task(shell.take(subscription, 1))
    with pytest.raises(MalamuteError):
        await asyncio.wait_for(reading, WAIT_S)
    await shell.do("close", flush_ms=0)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", SHELLS, ids=lambda shell: shell.kind)
async def test_curve_lets_in_whose_key_is_known_and_nobody_else(kind: Any, tmp_path: Path) -> None:
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    known, stranger = (
        malamute.Curve(server_public, *(key.decode() for key in zmq.curve_keypair()))
        for _ in range(2)
    )
    (tmp_path / "key").write_text(server_secret)
    (tmp_path / "key").chmod(0o600)
    secured = EmbeddedBroker(
        tcp=True,
        authentication__mechanism="curve",
        authentication__server_key_file=str(tmp_path / "key"),
        authentication__clients={"ann": known.public_key},
    )
    async with secured as broker:
        with pytest.raises(BrokerRefused, match="unauthenticated"):
            await kind().connect(broker.tcp_endpoint, credential=stranger, **FAST)
        shell = kind()
        await shell.connect(broker.tcp_endpoint, credential=known)
        assert shell.client.welcome.identity == "ann"
        assert (await shell.do("publish", "s", b"x")).offset == 0
        await shell.do("close")
