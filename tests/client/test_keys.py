"""The key-value view of both clients at a broker: values, conditions, watches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.errors import BrokerRefused, LocalProtocolError, RevisionConflict
from malamute_py import EmbeddedBroker
from malamute_py.client.sync.client import SyncClient, connect_sync
from tests.client.shells import FAST
from tests.waiting import WAIT_MS, until

KEEP = {"keep": "last-per-subject", "ring_bytes": 4 << 20}


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def client(broker: EmbeddedBroker, request: pytest.FixtureRequest) -> Iterator[SyncClient]:
    """A client, and a stream with keys named "s"."""
    with broker.connect_sync() as client:
        client.create_stream("s", KEEP)
        yield client
        client.remove_stream("s")


def test_a_value_that_was_put_is_got_with_its_revision(client: SyncClient) -> None:
    kv = client.kv("s")
    revision = kv.put("colour", b"red", fields={"by": "me"})
    found = kv.get("colour")
    assert found is not None
    assert (found.value, found.revision, found.fields) == (b"red", revision, {"by": "me"})
    assert kv.get("shape") is None


@pytest.mark.moderate
def test_a_value_larger_than_an_answer_is_got(broker: EmbeddedBroker) -> None:
    values = {
        "fits": bytes(400_000), "beyond.an.answer": bytes(600_000),
        "beyond.a.frame": bytes(1 << 20),
        "as.large.as.may.be": bytes(8 << 20), "with*star": bytes(2 << 20),
    }  # fmt: skip
    with broker.connect_sync() as client:
        client.create_stream("large", keep="last-per-subject", ring_bytes=512 << 20)
        kv = client.kv("large")
        revisions = {key: kv.put(key, value, fields={"of": key}) for key, value in values.items()}
        for key, value in values.items():
            found = kv.get(key)
            assert found is not None
            assert (found.key, found.revision, found.value) == (key, revisions[key], value)
            assert found.fields == {"of": key}
        kv.put("packed", bytes(8 << 20), codec="zstd")
        kv.put("packed.badly", random.Random(7).randbytes(2 << 20), codec="zstd")
        for key, size in (("packed", 8 << 20), ("packed.badly", 2 << 20)):
            found = kv.get(key)
            assert found is not None
            assert len(found.value) == size
        kv.delete("beyond.a.frame")
        assert kv.get("beyond.a.frame") is None
        assert client.reconnects == 0
        client.remove_stream("large")


@pytest.mark.parametrize("again", [None, {}, KEEP], ids=["removed", "without keys", "with keys"])
def test_a_put_makes_no_stream_where_the_keys_were_removed(
    broker: EmbeddedBroker, again: dict[str, Any] | None
) -> None:
    with broker.connect_sync() as client, broker.connect_sync() as other:
        client.create_stream("gone", KEEP)
        kv = client.kv("gone")
        kv.put("colour", b"red")
        other.remove_stream("gone")
        if again is not None:
            other.create_stream("gone", again)
        if again == KEEP:
            kv.put("colour", b"blue")
            assert kv.keys() == {"colour": 1}
        else:
            code = "unknown_stream" if again is None else "unsupported"
            for _ in range(2):
                with pytest.raises(BrokerRefused) as raised:
                    kv.put("colour", b"blue")
                assert raised.value.code == code
            assert bool(other.list_streams("gone")) == (again is not None)
            # The client publishes to the name as ever.
            client.publish("gone", b"plain")
        other.remove_stream("gone")
        other.create_stream("gone", KEEP)
        kv.put("colour", b"green")
        other.remove_stream("gone")


@pytest.mark.moderate
def test_puts_and_publishes_at_one_time_leave_in_batches_of_their_own(
    broker: EmbeddedBroker,
) -> None:
    async def go() -> None:
        async with broker.connect() as client:
            await client.create_stream("mixed", KEEP)
            kv = client.kv("mixed")
            await kv.put("first", b"")
            puts = [kv.put(f"k{number % 5}", b"%d" % number) for number in range(200)]
            plain = [client.publish("mixed", b"p", subject=f"p{number}") for number in range(200)]
            together = [each for pair in zip(puts, plain, strict=True) for each in pair]
            await asyncio.gather(*together)
            keys = await kv.keys()
            assert len(keys) == 1 + 5 + 200
            await client.remove_stream("mixed")
            lost = await asyncio.gather(
                *(kv.put("k", b"") for _ in range(20)),
                client.publish("mixed", b"p"),
                *(kv.put("k", b"") for _ in range(20)),
                return_exceptions=True,
            )
            made = [each for each in lost if not isinstance(each, BrokerRefused)]
            assert len(made) == 1
            codes = {each.code for each in lost if isinstance(each, BrokerRefused)}
            assert codes <= {"unknown_stream", "unsupported"}
            await client.remove_stream("mixed")

    asyncio.run(go())


def test_an_update_says_the_revision_that_the_key_has(client: SyncClient) -> None:
    kv = client.kv("s")
    first = kv.update("colour", b"red", revision=0)
    second = kv.update("colour", b"green", revision=first)
    with pytest.raises(RevisionConflict) as raised:
        kv.update("colour", b"blue", revision=first)
    assert raised.value.revision == second
    kv.delete("colour", revision=second)
    assert kv.get("colour") is None
    with pytest.raises(RevisionConflict) as raised:
        kv.delete("colour", revision=second)
    assert raised.value.revision == 0


@pytest.mark.parametrize("revision", [(1 << 20) + 1, (1 << 63) - 1])
def test_a_revision_may_be_any_offset(client: SyncClient, revision: int) -> None:
    kv = client.kv("s")
    known = kv.put("colour", b"red")
    with pytest.raises(RevisionConflict) as raised:
        kv.update("colour", b"blue", revision=revision)
    assert raised.value.revision == known
    with pytest.raises(RevisionConflict) as raised:
        kv.delete("colour", revision=revision)
    assert raised.value.revision == known
    with pytest.raises(LocalProtocolError, match="revision=-1: allowed is an integer from 0"):
        kv.update("colour", b"blue", revision=-1)


@pytest.mark.moderate
def test_a_key_is_updated_after_more_changes_than_a_command_has_numbers(client: SyncClient) -> None:
    kv, body = client.kv("s"), [b""] * 20_000
    while client.stream_info("s").tail <= 1 << 20:
        client.publish_many("s", body, subject="busy")
    revision = kv.put("colour", b"red")
    assert revision > 1 << 20
    assert kv.update("colour", b"green", revision=revision) == revision + 1
    kv.delete("colour", revision=revision + 1)
    assert kv.get("colour") is None


def test_keys_by_pattern_and_history(client: SyncClient) -> None:
    kv = client.kv("s")
    for number in range(3):
        kv.put("a.x", b"%d" % number)
    kv.put("a.y", b"y")
    kv.delete("a.y")
    kv.put("b*", b"b")
    assert list(kv.keys()) == ["a.x", "b*"]
    assert list(kv.keys("a.*")) == ["a.x"]
    assert list(kv.keys(limit=1)) == ["a.x"]
    with pytest.raises(LocalProtocolError, match="limit=None: allowed is an integer"):
        kv.keys(limit=None)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="fields=5: allowed is"):
        kv.put("a.x", b"", fields=5)  # type: ignore[arg-type]
    assert [entry.value for entry in kv.history("a.x")] == [b"0", b"1", b"2"]
    assert [entry.deleted for entry in kv.history("a.y")] == [False, True]
    assert [entry.value for entry in kv.history("b*")] == [b"b"]


def test_a_watch_gives_the_present_then_a_mark_then_changes(client: SyncClient) -> None:
    kv = client.kv("s")
    kv.put("a", b"1")
    kv.put("b", b"2")
    kv.put("a", b"3")
    with kv.watch() as watch:
        present = [watch.next(WAIT_MS), watch.next(WAIT_MS)]
        assert [(entry.key, entry.value) for entry in present if entry] == [
            ("b", b"2"), ("a", b"3"),
        ]  # fmt: skip
        assert watch.next(WAIT_MS) is None
        kv.delete("b")
        change = watch.next(WAIT_MS)
        assert change is not None
        assert (change.key, change.deleted) == ("b", True)


def test_a_watch_gives_the_mark_before_a_change_that_has_come_by_then(client: SyncClient) -> None:
    kv = client.kv("s")
    kv.put("a", b"1")
    kv.put("b", b"2")
    with kv.watch() as watch:
        found = [watch.next(WAIT_MS)]
        kv.put("c", b"3")
        until(lambda: watch._subscription._reading.next > 2)
        found += [watch.next(WAIT_MS) for _ in range(3)]
    assert [None if entry is None else entry.key for entry in found] == ["a", "b", None, "c"]


def test_a_watch_of_nothing_is_complete_at_once(client: SyncClient) -> None:
    with client.kv("s").watch("nothing.*") as watch:
        assert watch.next(WAIT_MS) is None


@pytest.mark.moderate
def test_a_watch_of_a_stream_that_was_made_anew_is_complete_where_the_new_one_ends(
    tmp_path: Path, endpoint: str
) -> None:
    """The watch waited for the tail of the former stream, which the new one may never have."""
    with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as other:
        other.create_stream("s", KEEP)
        other.kv("s").put("new", b"1")
    settings: dict[str, Any] = {"listen": [endpoint]}
    with EmbeddedBroker(**settings):
        client = connect_sync(endpoint, timeout_ms=WAIT_MS, **FAST)
        client.create_stream("s", keep="last-per-subject", ring_bytes=64 << 20)
        for number in range(12):
            client.kv("s").put(f"large.{number}", bytes(1 << 20))
        watch = client.kv("s").watch()
        found = [watch.next(WAIT_MS)]
        assert watch._subscription.tail == 13
    with EmbeddedBroker(tmp_path, **settings), client:
        while (entry := watch.next(WAIT_MS)) is not None:
            found.append(entry)
        client.kv("s").put("newer", b"2")
        change = watch.next(WAIT_MS)
    keys = [entry.key for entry in found if entry]
    assert keys[0] == "large.0"
    assert keys[-1] == "new"
    assert change is not None
    assert change.key == "newer"


def test_a_view_makes_no_stream_and_needs_one_with_keys(client: SyncClient) -> None:
    with pytest.raises(BrokerRefused, match="unknown_stream"):
        client.kv("nowhere").put("a", b"1")
    client.create_stream("plain")
    with pytest.raises(BrokerRefused, match="unsupported"):
        client.kv("plain").put("a", b"1")


@pytest.mark.parametrize("key", ["", "x" * 256, 5])
def test_what_is_no_key_is_refused_in_the_call(client: SyncClient, key: str) -> None:
    with pytest.raises(LocalProtocolError):
        client.kv("s").get(key)


def test_a_value_in_a_codec_is_got_as_it_was_put(client: SyncClient) -> None:
    kv = client.kv("s")
    kv.put("a", b"x" * 1000, codec="zstd")
    found = kv.get("a")
    assert found is not None
    assert found.value == b"x" * 1000


def test_lists_of_blobs_are_values_too(client: SyncClient) -> None:
    client.create_stream("lists", {**KEEP, "body_kind": "list"})
    kv = client.kv("lists")
    kv.put("a", [b"1", b"22"])
    found = kv.get("a")
    assert found is not None
    assert found.value == [b"1", b"22"]
    kv.delete("a")
    assert kv.get("a") is None


@pytest.mark.moderate
async def test_many_gets_and_puts_at_once_in_asyncio(broker: EmbeddedBroker) -> None:
    async with broker.connect() as client:
        await client.create_stream("many", KEEP)
        kv = client.kv("many")
        await asyncio.gather(*(kv.put(f"k{n % 300}", b"%d" % n) for n in range(600)))
        found = await asyncio.gather(*(kv.get(f"k{n}") for n in range(300)))
        assert [entry and entry.value for entry in found] == [b"%d" % (n + 300) for n in range(300)]


async def test_of_updates_at_once_exactly_one_succeeds(broker: EmbeddedBroker) -> None:
    async with broker.connect() as client:
        await client.create_stream("race", KEEP)
        kv = client.kv("race")
        outcomes = await asyncio.gather(
            *(kv.update("a", b"%d" % n, revision=0) for n in range(20)), return_exceptions=True
        )
        won = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert len(won) == 1
        assert all(
            isinstance(outcome, RevisionConflict) and outcome.revision == won[0]
            for outcome in outcomes
            if not isinstance(outcome, int)
        )


@pytest.mark.moderate
def test_keys_are_there_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as client:
        client.create_stream("s", KEEP)
        kv = client.kv("s")
        for number in range(1000):
            kv_revision = kv.put(f"k{number % 10}", b"%d" % number, confirm="stored")
        kv.delete("k0")
    with EmbeddedBroker(tmp_path) as broker, broker.connect_sync() as client:
        kv = client.kv("s")
        assert list(kv.keys()) == [f"k{number}" for number in range(1, 10)]
        found = kv.get("k9")
        assert found is not None
        assert (found.value, found.revision) == (b"999", kv_revision)


def test_a_stream_with_keys_is_neither_trimmed_nor_purged_and_the_refusal_says_what_to_do(
    client: SyncClient,
) -> None:
    kv = client.kv("s")
    kv.put("colour", b"red")
    with pytest.raises(BrokerRefused, match=r"^unsupported: .*delete keys instead"):
        client.trim("s", "latest")
    with pytest.raises(BrokerRefused, match=r"^unsupported: .*delete keys instead"):
        client.purge("s", "colour")
    assert [entry.value for entry in kv.history("colour")] == [b"red"]


def test_the_refusal_of_an_absent_stream_does_not_advise_a_way_that_makes_it_without_keys(
    client: SyncClient,
) -> None:
    kv = client.kv("quite-other")
    with pytest.raises(BrokerRefused, match=r"^unknown_stream: .*`create` with keep makes it"):
        kv.get("a")
    with pytest.raises(BrokerRefused, match=r"^unknown_stream: .*`create` with keep makes it"):
        kv.keys()
