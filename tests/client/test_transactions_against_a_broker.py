"""Open transactions of both shells against the real broker."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from malamute_protocol.batch import encode
from malamute_protocol.errors import BrokerRefused, LocalProtocolError, MalamuteError, Timeout
from malamute_protocol.limits import DEFAULT_LIMITS
from malamute_py.broker.transactions.moving import Moving
from malamute_py.broker.transactions.transactions import Transactions
from malamute_py.client.session.transactions import CHUNK_ROWS
from tests.client.shells import Connect
from tests.waiting import WAIT_MS

pytestmark = pytest.mark.slow


async def begun(shell: Any, **options: Any) -> Any:
    transaction = shell.client.transaction(**options)
    await shell.call(transaction.begin)
    return transaction


async def records(shell: Any, stream: str, **options: Any) -> list[bytes]:
    tail = (await shell.do("stream_info", stream)).tail
    async with EmbeddedReader(shell, stream, **options) as subscription:
        return [one.body for one in await shell.take(subscription, tail)]


class EmbeddedReader:
    """A subscription of a shell to a stream from its beginning to its end."""

    def __init__(self, shell: Any, stream: str, **options: Any) -> None:
        self._shell = shell
        self._subscription = shell.client.subscribe(stream, start="earliest", **options)

    async def __aenter__(self) -> Any:
        return self._subscription

    async def __aexit__(self, *_: object) -> None:
        await self._shell.call(self._subscription.close)


async def test_records_of_several_streams_appear_with_the_commit(connect: Connect) -> None:
    shell = await connect("loader")
    transaction = await begun(shell)
    await shell.call(transaction.publish, "a", b"1", subject="x")
    await shell.call(transaction.publish_many, "b", [b"2", b"3"], subject=["x", "y"])
    (facts,) = await shell.do("transactions")
    assert (facts.transaction, facts.identity, facts.state) == (transaction.id, "loader", "open")
    confirmation = await shell.call(transaction.commit)
    assert confirmation.level == "synced"
    assert await records(shell, "a") == [b"1"]
    assert await records(shell, "b") == [b"2", b"3"]
    assert await shell.do("transactions") == []


async def test_records_that_found_no_room_leave_with_the_next_call(connect: Connect) -> None:
    shell = await connect()
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "full", [b"x"] * CHUNK_ROWS)
    link = shell.client._link
    settings = link.engine.settings
    link.engine.settings = msgspec.structs.replace(settings, call_timeout_ms=50)
    link.session.window.unconfirmed_bytes += 1 << 40
    with pytest.raises(Timeout):
        await shell.call(transaction.publish, "full", b"last")
    link.session.window.unconfirmed_bytes -= 1 << 40
    link.engine.settings = settings
    await shell.call(transaction.publish, "full", b"last")
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "full")).tail == CHUNK_ROWS + 1


@pytest.mark.parametrize("count", [1, 20_000])
async def test_streams_with_rings_of_their_own_take_part(connect: Connect, count: int) -> None:
    shell = await connect()
    await shell.do("create_stream", "own", ring_bytes=8 << 20)
    transaction = await begun(shell)
    values = [b"%06d" % number for number in range(count)]
    await shell.call(transaction.publish_many, "own", values)
    await shell.call(transaction.publish, "a", b"1")
    confirmation = await shell.call(transaction.commit)
    assert confirmation.level == "synced"
    assert await records(shell, "own", visibility="committed") == values
    assert await records(shell, "a") == [b"1"]
    assert await shell.do("transactions") == []


@pytest.mark.parametrize("keep", ["", "last-per-subject"])
async def test_records_for_a_small_ring_leave_in_chunks_that_it_takes(
    connect: Connect, keep: str
) -> None:
    shell = await connect()
    settings = {"keep": keep} if keep else {}
    await shell.do("create_stream", "own", ring_bytes=2 << 20, **settings)
    transaction = await begun(shell)
    for number in range(18):
        await shell.call(transaction.publish, "own", b"%02d" % number * 20_000, subject="x")
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "own")).tail == 18 + bool(keep)
    assert await shell.do("transactions") == []


async def test_a_stream_in_memory_is_refused_by_name(connect: Connect) -> None:
    shell = await connect()
    await shell.do("create_stream", "quick", memory=True)
    transaction = await begun(shell)
    await shell.call(transaction.publish, "quick", b"1")
    with pytest.raises(BrokerRefused) as refused:
        await shell.call(transaction.commit)
    assert refused.value.code == "cross_ring"
    assert "(Stage): stream 'quick' is in memory" in refused.value.reason
    assert refused.value.reason.endswith("publish to it beside, or make it a stream on disk")
    assert await shell.do("transactions") == []
    assert (await shell.do("stream_info", "quick")).tail == 0


async def test_a_step_for_a_ring_of_its_own_is_told_to_use_a_transaction(connect: Connect) -> None:
    shell = await connect()
    await shell.do("create_stream", "own", ring_bytes=1 << 20)
    step = shell.client.atomic()
    step.publish("own", b"1")
    with pytest.raises(BrokerRefused, match="a transaction reaches both") as refused:
        await shell.call(step.commit)
    assert refused.value.code == "cross_ring"


async def test_a_large_transaction_is_staged_and_comes_in_order(connect: Connect) -> None:
    shell = await connect()
    transaction = await begun(shell)
    values = [b"%06d" % number for number in range(20_000)]
    await shell.call(transaction.publish_many, "a", values)
    (facts,) = await shell.do("transactions")
    assert facts.batches >= 3
    assert facts.streams == ["a"]
    await shell.call(transaction.commit)
    assert await records(shell, "a", visibility="committed") == values


async def test_chunks_that_are_no_batch_for_their_properties_leave_in_smaller_ones(
    connect: Connect,
) -> None:
    one = await connect("one")
    kept = [{"note": f"{n:05d}".ljust(60_000, "p")} for n in range(600)]
    bodies = [b"%d" % n for n in range(len(kept))]
    for number in (1, 2):
        tx = one.client.transaction()
        await one.call(tx.begin)
        for _ in range(number):
            await one.call(tx.publish_many, f"s{number}", bodies, properties=kept)
        if number == 2:
            await one.call(tx.publish_many, f"s{number}", [bytes(1 << 20)] * 3)
        await one.call(tx.commit)
        subscription = one.client.subscribe(f"s{number}", start="earliest", until="tail")
        records = (await one.take(subscription, 1 << 30))[: number * len(kept)]
        assert [record.properties for record in records] == kept * number
        assert [bytes(record.body) for record in records] == bodies * number


async def test_a_rollback_leaves_nothing(connect: Connect) -> None:
    shell = await connect()
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "a", [b"x" * 1000] * 5_000)
    await shell.call(transaction.roll_back)
    assert await shell.do("transactions") == []
    assert (await shell.do("stream_info", "a")).tail == 0
    with pytest.raises(LocalProtocolError):
        await shell.call(transaction.publish, "a", b"1")


async def test_an_exception_in_the_block_rolls_back(connect: Connect) -> None:
    shell = await connect()
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "a", [b"x" * 1000] * 5_000)
    leave = transaction.__aexit__ if shell.kind == "asyncio" else transaction.__exit__
    await shell.call(leave, ValueError, ValueError(), None)
    assert await shell.do("transactions") == []
    assert (await shell.do("stream_info", "a")).tail == 0


async def test_the_end_by_an_operator_is_told_by_name(connect: Connect) -> None:
    shell = await connect("loader")
    transaction = await begun(shell)
    await shell.call(transaction.publish, "a", b"1")
    await shell.do("end_transaction", transaction.id)
    with pytest.raises(BrokerRefused, match="operator") as refused:
        await shell.call(transaction.commit)
    assert refused.value.code == "transaction_ended"


async def test_a_timeout_is_told_by_name(connect: Connect) -> None:
    shell = await connect()
    transaction = await begun(shell, timeout_ms=1)
    # The broker looks at its timers in the next turn of its loop.
    while await shell.do("transactions"):
        pass
    with pytest.raises(BrokerRefused) as refused:
        await shell.call(transaction.commit)
    assert refused.value.code == "transaction_timed_out"
    with pytest.raises(BrokerRefused) as refused:
        await begun(shell, timeout_ms=10**9)
    assert refused.value.code == "limit"


# --- a commit whose time is over -------------------------------------------------------------


async def test_the_wait_for_the_streams_is_bounded_and_a_second_commit_goes_on(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = await connect()
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "late", [b"x" * 1000] * 5_000)
    with monkeypatch.context() as patch:
        patch.setattr(Moving, "_go_on", lambda *_: None)
        said = ""
        # A slow machine may take longer for the commit itself.
        while "is committed" not in said:
            with pytest.raises(Timeout) as ended:
                await shell.call(transaction.commit, timeout_ms=50)
            said = str(ended.value)
        with pytest.raises(Timeout, match=r"is committed.* within 50 ms: call commit\(\) again"):
            await shell.call(transaction.commit, timeout_ms=50)
    other = await begun(shell)
    await shell.call(other.publish, "a", b"1")
    await shell.call(other.publish_many, "b", [b"x" * 1000] * 5_000)
    await shell.call(other.commit)
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "late")).records == 5_000
    with pytest.raises(LocalProtocolError):
        await shell.call(transaction.commit)


async def test_a_commit_that_was_not_answered_in_time_is_asked_for_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = await connect()
    transaction = await begun(shell)
    await shell.call(transaction.publish, "again", b"1")

    def later(*_: Any) -> Any:
        raise BrokerRefused("wait", "not now")

    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "_find", later)
        for _ in range(2):
            with pytest.raises(Timeout, match=r"not confirmed within 150 ms.*call commit\(\)"):
                await shell.call(transaction.commit, timeout_ms=150)
    await shell.call(transaction.commit)
    assert await records(shell, "again") == [b"1"]


@pytest.mark.parametrize("count", [1, 5_000])
async def test_a_commit_whose_answer_was_lost_is_taken_once(connect: Connect, count: int) -> None:
    shell = await connect()
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "once", [b"x" * 1000] * count)
    take = transaction._take
    transaction._take = losing(shell, take)
    with pytest.raises(Timeout, match="taken as a whole, or not at all"):
        await shell.call(transaction.commit)
    transaction._take = take
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "once")).tail == count


async def unanswered(shell: Any, stream: str, count: int, *, taken: bool) -> Any:
    """Return a transaction whose commit was not answered, whether or not it was taken."""
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, stream, [b"x" * 1000] * count)
    take = transaction._take

    async def lose(*given: Any) -> Any:
        if taken or transaction._commit_unanswered is None:
            await take(*given)
        if transaction._commit_unanswered is not None:
            raise Timeout("lost")

    def lose_sync(*given: Any) -> Any:
        if taken or transaction._commit_unanswered is None:
            take(*given)
        if transaction._commit_unanswered is not None:
            raise Timeout("lost")

    transaction._take = lose if shell.kind == "asyncio" else lose_sync
    with pytest.raises(Timeout):
        await shell.call(transaction.commit)
    transaction._take = take
    return transaction


@pytest.mark.parametrize("count", [1, 5_000])
@pytest.mark.parametrize("taken", [True, False])
async def test_no_other_transaction_begins_before_the_outcome_of_a_commit_is_told(
    connect: Connect, count: int, taken: bool
) -> None:
    shell = await connect()
    transaction = await unanswered(shell, "twice", count, taken=taken)
    id = transaction.id
    enter = transaction.__aenter__ if shell.kind == "asyncio" else transaction.__enter__
    for again in (transaction.begin, enter):
        with pytest.raises(LocalProtocolError, match=r"call commit\(\) again") as refused:
            await shell.call(again)
        assert refused.value.code == "unexpected"
        assert transaction.id == id
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "twice")).tail == count
    await shell.call(transaction.begin)
    assert transaction.id != id
    await shell.call(transaction.roll_back)


async def test_no_other_transaction_begins_while_records_are_on_their_way_to_their_streams(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = await connect()
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "moving", [b"x" * 1000] * 5_000)
    with monkeypatch.context() as patch:
        patch.setattr(Moving, "_go_on", lambda *_: None)
        said = ""
        while "is committed" not in said:
            with pytest.raises(Timeout) as ended:
                await shell.call(transaction.commit, timeout_ms=50)
            said = str(ended.value)
        for call in (transaction.begin, transaction.roll_back):
            with pytest.raises(LocalProtocolError, match=r"call commit\(\) again"):
                await shell.call(call)
    # Another one has the broker go on, which the patch had stopped.
    other = await begun(shell)
    await shell.call(other.publish_many, "b", [b"x" * 1000] * 5_000)
    await shell.call(other.commit)
    await shell.call(transaction.commit)
    await shell.call(transaction.begin)
    await shell.call(transaction.roll_back)
    assert (await shell.do("stream_info", "moving")).tail == 5_000


@pytest.mark.parametrize("count", [1, 5_000])
async def test_a_commit_that_was_not_taken_is_rolled_back_and_one_that_was_is_told(
    connect: Connect, count: int
) -> None:
    shell = await connect()
    await shell.do("create_stream", "back")
    transaction = await unanswered(shell, "back", count, taken=False)
    await shell.call(transaction.roll_back)
    assert await shell.do("transactions") == []
    with pytest.raises(LocalProtocolError, match="not open"):
        await shell.call(transaction.commit)
    await shell.call(transaction.begin)
    await shell.call(transaction.roll_back)
    assert (await shell.do("stream_info", "back")).tail == 0
    transaction = await unanswered(shell, "back", count, taken=True)
    with pytest.raises(LocalProtocolError, match="may have been taken"):
        await shell.call(transaction.roll_back)
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "back")).tail == count


def losing(shell: Any, take: Any) -> Any:
    """Return a way to take steps whose answers are lost."""

    async def lose(*given: Any) -> Any:
        await take(*given)
        raise Timeout("lost")

    def lose_sync(*given: Any) -> Any:
        take(*given)
        raise Timeout("lost")

    return lose if shell.kind == "asyncio" else lose_sync


def refusing(shell: Any, take: Any, errors: list[Exception]) -> Any:
    """Return a way to take steps that raises these, one after the other, and then is as ever."""

    async def refuse(*given: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return await take(*given)

    def refuse_sync(*given: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return take(*given)

    return refuse if shell.kind == "asyncio" else refuse_sync


async def test_a_repeated_commit_that_the_broker_knows_nothing_of_may_have_been_taken(
    connect: Connect,
) -> None:
    """The broker forgets keys in time, and knows of no transaction that it has committed."""
    shell = await connect()
    transaction = await unanswered(shell, "forgotten", 1, taken=True)
    transaction._commit_unanswered.key = os.urandom(16)
    for _ in range(2):
        with pytest.raises(MalamuteError, match=r"unknown_transaction|not open"):
            await shell.call(transaction.commit)
        with pytest.raises(LocalProtocolError, match="may have been taken"):
            await shell.call(transaction.begin)
    assert (await shell.do("stream_info", "forgotten")).tail == 1


async def test_a_rollback_whose_answer_was_lost_is_asked_for_again(connect: Connect) -> None:
    shell = await connect()
    transaction = await unanswered(shell, "back", 1, taken=False)
    take = transaction._take
    transaction._take = losing(shell, take)
    with pytest.raises(Timeout):
        await shell.call(transaction.roll_back)
    transaction._take = take
    await shell.call(transaction.roll_back)
    await shell.call(transaction.begin)
    await shell.call(transaction.roll_back)


async def test_a_commit_that_was_refused_leaves_no_doubt(connect: Connect) -> None:
    shell = await connect()
    await shell.do("create_stream", "small")
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "small", [b"1", b"2"])
    errors: list[Exception] = [BrokerRefused("too_large", "for its ring"), Timeout("a half")]
    transaction._take = refusing(shell, transaction._take, errors)
    with pytest.raises(Timeout):
        await shell.call(transaction.commit)
    await shell.call(transaction.begin)
    await shell.call(transaction.publish, "small", b"3")
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "small")).tail == 1


async def test_what_is_put_off_was_told_and_another_transaction_begins(connect: Connect) -> None:
    shell = await connect()
    await shell.do("create_stream", "off", ring_bytes=1 << 20, full="refuse")
    for _ in range(20):
        try:
            await shell.do("publish", "off", os.urandom(100_000))
        except BrokerRefused:
            break
    transaction = await begun(shell)
    await shell.call(transaction.publish, "off", os.urandom(200_000))
    with pytest.raises(BrokerRefused) as refused:
        await shell.call(transaction.commit)
    assert refused.value.code == "put_off"
    await shell.call(transaction.begin)
    await shell.call(transaction.roll_back)
    await shell.do("trim", "off", 10)


async def test_a_chunk_that_is_not_confirmed_in_time_leaves_the_transaction_open(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = await connect()
    transaction = await begun(shell)

    def later(*_: Any) -> Any:
        raise BrokerRefused("wait", "not now")

    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "prepare_stage", later)
        patch.setattr(Transactions, "_find", later)
        await shell.call(transaction.publish_many, "open", [b"x" * 1000] * 1_500)
        with pytest.raises(Timeout, match="it is open, and nothing of it is committed"):
            await shell.call(transaction.commit, timeout_ms=50)
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "open")).tail == 1_500


async def test_a_refused_chunk_that_is_not_staged_in_halves_in_time_ends_the_transaction(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = await connect()
    await shell.do("create_stream", "small", ring_bytes=1 << 20)
    transaction = await begun(shell)
    for number in range(4):
        await shell.call(transaction.publish, "small", bytes([number]) * 100_000, codec="none")
    take = transaction._take
    calls: list[Any] = []

    async def lose(*given: Any) -> Any:
        calls.append(given)
        confirmation = await take(*given)
        if len(calls) == 3:
            raise Timeout("late")
        return confirmation

    def lose_sync(*given: Any) -> Any:
        calls.append(given)
        confirmation = take(*given)
        if len(calls) == 3:
            raise Timeout("late")
        return confirmation

    transaction._take = lose if shell.kind == "asyncio" else lose_sync
    with pytest.raises(Timeout, match="it is rolled back"):
        await shell.call(transaction.commit)
    with pytest.raises(LocalProtocolError):
        await shell.call(transaction.commit)
    while await shell.do("transactions"):
        pass
    assert (await shell.do("stream_info", "small")).tail == 0


async def test_a_commit_that_is_put_off_may_be_waited_for_again(connect: Connect) -> None:
    shell = await connect()
    await shell.do("create_stream", "full", ring_bytes=1 << 20, full="refuse")
    for _ in range(20):
        try:
            await shell.do("publish", "full", os.urandom(100_000))
        except BrokerRefused:
            break
    transaction = await begun(shell)
    await shell.call(transaction.publish, "full", os.urandom(200_000))
    for _ in range(2):
        with pytest.raises(BrokerRefused) as refused:
            await shell.call(transaction.commit)
        assert refused.value.code == "put_off"
    await shell.do("trim", "full", 10)
    await shell.call(transaction.commit)
    assert await shell.do("transactions") == []


async def test_a_timeout_amid_the_records_of_a_call_ends_the_transaction(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit would have the records alone that were added before it."""
    shell = await connect()
    await shell.do("create_stream", "open")
    transaction = await begun(shell)

    def late(*_: Any) -> Any:
        raise Timeout("no room in time")

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "_flush", late)
        with pytest.raises(Timeout):
            await shell.call(transaction.publish_many, "open", [b"x" * 1000] * 10_000)
    with pytest.raises(MalamuteError):
        await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "open")).tail == 0


async def test_a_beginning_whose_wait_was_over_leaves_nothing_open(connect: Connect) -> None:
    shell = await connect()
    transaction = shell.client.transaction()
    arrived = transaction._until_taken

    async def late(*given: Any) -> None:
        await arrived(*given)
        raise Timeout("late")

    def late_sync(*given: Any) -> None:
        arrived(*given)
        raise Timeout("late")

    transaction._until_taken = late if shell.kind == "asyncio" else late_sync
    with pytest.raises(Timeout):
        await shell.call(transaction.begin)
    for _ in range(100):
        if not await shell.do("transactions"):
            break
    assert await shell.do("transactions") == []
    with pytest.raises(LocalProtocolError):
        await shell.call(transaction.publish, "none", b"x")


@pytest.mark.parametrize("count", [1, 2 * CHUNK_ROWS])
async def test_a_transaction_that_is_over_begins_anew_as_another(
    connect: Connect, count: int
) -> None:
    shell = await connect()
    transaction = shell.client.transaction()
    ids = set()
    for end in (transaction.commit, transaction.roll_back, transaction.commit):
        await shell.call(transaction.begin)
        ids.add(transaction.id)
        await shell.call(transaction.publish_many, "anew", [b"x"] * count)
        await shell.call(end)
    assert len(ids) == 3
    assert (await shell.do("stream_info", "anew")).tail == 2 * count


async def test_begin_of_an_open_transaction_waits_for_the_broker_alone(connect: Connect) -> None:
    shell = await connect()
    transaction = shell.client.transaction()
    await shell.call(transaction._begin)  # as its block does
    await shell.call(transaction.begin)
    assert [facts.transaction for facts in await shell.do("transactions")] == [transaction.id]
    await shell.call(transaction.publish, "begun", b"1")
    await shell.call(transaction.begin)
    await shell.call(transaction.commit)
    assert await records(shell, "begun") == [b"1"]


async def test_a_content_of_as_many_records_as_a_batch_has_follows_other_records(
    connect: Connect,
) -> None:
    shell = await connect()
    transaction = await begun(shell)
    content = encode([b""] * DEFAULT_LIMITS.batch_records_max)
    await shell.call(transaction.publish_many, "full", [b"first"] * 10)
    await shell.call(transaction.publish_batch, "full", content)
    await shell.call(transaction.commit)
    assert (await shell.do("stream_info", "full")).tail == 10 + DEFAULT_LIMITS.batch_records_max


async def test_a_content_whose_call_was_late_is_not_in_the_transaction(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = await connect(call_timeout_ms=300)
    transaction = await begun(shell)
    content = encode([b"x" * (1 << 20)])

    def later(*_: Any) -> Any:
        raise BrokerRefused("wait", "not now")

    taken: list[None] = []

    async def go_on() -> None:
        while True:
            taken.append(await shell.call(transaction.publish_batch, "late", content))

    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "prepare_stage", later)
        patch.setattr(Transactions, "_find", later)
        with pytest.raises(Timeout):
            await go_on()
    await shell.call(transaction.publish_batch, "late", content)
    await shell.call(transaction.commit, timeout_ms=WAIT_MS)
    assert (await shell.do("stream_info", "late")).tail == len(taken) + 1


async def test_records_of_a_transaction_keep_the_order_of_the_calls_whatever_their_form(
    connect: Connect,
) -> None:
    shell = await connect()
    for repeated in (1, CHUNK_ROWS):
        stream = f"order-{repeated}"
        transaction = await begun(shell)
        for number, codec in enumerate(("none", "gzip", "none")):
            bodies = [b"%d" % number] * repeated
            await shell.call(transaction.publish_many, stream, bodies, codec=codec)
        await shell.call(transaction.publish_batch, stream, encode([b"3"]))
        await shell.call(transaction.publish, stream, b"4")
        await shell.call(transaction.commit)
        found = [int(body) for body in await records(shell, stream)]
        assert found == sorted(found)
        assert len(found) == 3 * repeated + 2


@pytest.mark.parametrize("count", [1, 3 * CHUNK_ROWS])
async def test_a_removed_stream_refuses_what_was_staged_for_it_and_is_made_anew_by_the_rest(
    connect: Connect, count: int
) -> None:
    shell = await connect()
    await shell.do("create_stream", "gone", max_records=99_999)
    transaction = await begun(shell)
    await shell.call(transaction.publish_many, "gone", [b"x"] * count)
    await shell.call(transaction.publish, "beside", b"1")
    await shell.do("remove_stream", "gone")
    if count == 1:
        await shell.call(transaction.commit)
        facts = await shell.do("stream_info", "gone")
        assert (facts.tail, facts.settings["max_records"]) == (1, 0)
        return
    with pytest.raises(BrokerRefused, match="the stream 'gone' was removed") as refused:
        await shell.call(transaction.commit)
    assert refused.value.code == "unknown_stream"
    assert await shell.do("transactions") == []
