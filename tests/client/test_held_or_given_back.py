"""A worker's requests are known to its program, or given back; nothing is worked on twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_py.client.engine.engine import clock_ms
from malamute_py.client.session.offer_options import RETURNED
from malamute_py.client.session.step import Step
from malamute_py.embedded import EmbeddedBroker
from tests.client.script import Script
from tests.client.session.conversation import accept, confirm, of, opened, outcomes, warnings
from tests.client.session.test_offerings import reply, take_all, work, working
from tests.client.shells import SHELLS, AsyncShell, SyncShell
from tests.waiting import WAIT_S, until_async

FAST: dict[str, Any] = {"retry_min_ms": 5, "retry_max_ms": 20}


def cut(client: Any) -> None:
    """The cable is cut, as the transport would notice it."""
    lock = getattr(client._link, "lock", None) or contextlib.nullcontext()
    with lock:
        client._session.lost("closed", "the cable", clock_ms())
        client._link.wake_up()


@pytest.fixture(params=SHELLS, ids=lambda shell: shell.kind)
async def worker_shell(
    request: pytest.FixtureRequest, broker: EmbeddedBroker
) -> AsyncIterator[Any]:
    made: AsyncShell | SyncShell = request.param()
    await made.connect(broker.endpoint, context=broker.context, identity="worker", **FAST)
    yield made
    await made.do("close", flush_ms=0)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before it leaves", "under way", "twice"])
async def test_a_handler_that_answers_in_a_step_while_the_link_is_cut_costs_no_request(
    worker_shell: Any, broker: EmbeddedBroker, moment: str
) -> None:
    client = worker_shell.client
    runs: list[bytes] = []

    def filled(request: Any) -> Any:
        runs.append(bytes(request.body))
        step = client.atomic()
        step.publish("done", bytes(request.body))
        step.reply(request, b"re:" + bytes(request.body))
        return step

    async def in_a_task(request: Any) -> None:
        step = filled(request)
        if moment == "before it leaves":
            cut(client)
        committing = asyncio.ensure_future(step.commit())
        for _ in range(2 if moment == "twice" else 1):
            await asyncio.sleep(0)
            cut(client)
            await asyncio.sleep(0.002)
        await committing

    def in_a_thread(request: Any) -> None:
        step = filled(request)
        if moment == "before it leaves":
            cut(client)
        pending = step.commit_nowait()
        for _ in range(2 if moment == "twice" else 1):
            cut(client)
        pending.result()

    handler: Any = in_a_task if worker_shell.kind == "asyncio" else in_a_thread
    client.serve("svc", concurrency=2)(handler)
    running = asyncio.ensure_future(worker_shell.do("run"))
    async with broker.connect(identity="asker") as asker:
        for n in range(10):
            answer = await asker.request("svc", b"%d" % n, timeout_ms=20_000)
            assert bytes(answer.body) == b"re:%d" % n
        facts = await asker.service_info("svc")
        assert (facts.dead, facts.held, facts.waiting) == (0, 0, 0)
        records = asker.subscribe("done", start="earliest", until="tail")
        done = [bytes(record.body) async for record in records]
    assert sorted(done) == [b"%d" % n for n in range(10)], "each step was taken once"
    running.cancel()
    await worker_shell.do("close", flush_ms=0)
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.slow
@pytest.mark.parametrize("told_by", ["the step", "the renewal"])
async def test_what_another_worker_took_is_shown_again_when_it_comes_back(
    worker_shell: Any, broker: EmbeddedBroker, told_by: str
) -> None:
    client, call = worker_shell.client, worker_shell.call
    worker = client.worker("svc", concurrency=1)
    async with broker.connect(identity="asker") as asker, broker.connect() as other:
        asking = asyncio.ensure_future(asker.request("svc", b"q", timeout_ms=20_000))
        mine = await call(worker.next)
        thief = other.worker("svc")
        await thief.accepted()
        cut(client)
        taken = await thief.next()
        assert taken is not None
        await until_async(lambda: client.linked)
        step = client.atomic()
        if told_by == "the step":
            with contextlib.suppress(BrokerRefused):  # it may be known already
                step.reply(mine, b"from the first")
                with pytest.raises(BrokerRefused, match="not_held"):
                    await call(step.commit)
        else:
            await until_async(mine.cancelled)
            with pytest.raises(BrokerRefused, match="not_held"):
                step.reply(mine, b"from the first")
        # The program still has the name `mine`: what comes back is shown to it all the same.
        await taken.nack()
        await thief.close()
        again = await call(worker.next)
        assert again.number == mine.number
        assert again.attempts > mine.attempts
        await call(again.reply, b"from the second", wait=True)
        assert bytes((await asking).body) == b"from the second"
    await call(worker.close)


@pytest.mark.moderate
async def test_a_request_that_the_program_drops_is_given_back(
    worker_shell: Any, broker: EmbeddedBroker
) -> None:
    client, call = worker_shell.client, worker_shell.call
    # Its lease ends without a renewal; on a slow machine the lease of the next one must not.
    worker = client.worker("svc", concurrency=4, lease_ms=1_500)
    async with broker.connect(identity="asker") as asker:
        asking = asyncio.ensure_future(asker.request("svc", b"q", timeout_ms=20_000))
        # All that stays of it is its body.
        assert bytes((await call(worker.next)).body) == b"q"
        again = await call(worker.next)
        assert again.attempts == 2
        await call(again.reply, b"r", wait=True)
        assert bytes((await asking).body) == b"r"
    await call(worker.close)


@pytest.mark.moderate
async def test_an_end_that_was_taken_before_the_link_went_is_told_as_taken(
    worker_shell: Any, broker: EmbeddedBroker
) -> None:
    """The broker took it, and its confirm was lost with the link."""
    client, call = worker_shell.client, worker_shell.call
    worker = client.worker("svc", concurrency=8)
    ends: list[Callable[[Any], Any]] = [
        lambda request: call(request.reply, b"r", wait=True),
        lambda request: call(request.complete, wait=True),
        lambda request: call(request.fail, "why", wait=True),
    ]
    async with broker.connect(identity="asker") as asker:
        for n, end in enumerate(ends):
            await asker.submit("svc", b"%d" % n)
            request = await call(worker.next)
            deafen(client)
            ending = asyncio.ensure_future(end(request))
            async with asyncio.timeout(WAIT_S):
                while (await asker.service_info("svc")).held:  # noqa: ASYNC110 - of the broker
                    await asyncio.sleep(0.005)
            hear_again(client)
            cut(client)
            told = await ending
            assert told is not False, n
            assert told is not None, n
        assert worker.not_held == 0
        assert (await asker.service_info("svc")).waiting == 0
    await call(worker.close)


def deafen(client: Any) -> None:
    """Drop what the broker sends from now on."""
    session = client._session
    session.receive = lambda frames, now_ms: None


def hear_again(client: Any) -> None:
    del client._session.receive


# --- the same without sockets, where each order of events can be had -----------------------------


def refuse_step(script: Script, atomic: c.Atomic, code: str = "not_held") -> list[c.Command]:
    return script.say(c.Refused(66, atomic.tracker, code))


def step_with(script: Script, job: Any) -> c.Atomic:
    step = Step()
    step.reply(job, b"in a step")
    script.session.steps.add(step, "step")
    [atomic] = of(script.step(), c.Atomic)
    made: c.Atomic = atomic
    return made


def test_a_second_hand_out_waits_until_the_handler_of_the_first_has_ended() -> None:
    script = opened()
    offering = working(script, 1)
    [job] = take_all(offering)
    job.running = True  # a handler that the client runs
    refuse_step(script, step_with(script, job))
    assert isinstance(outcomes(script)["step"], BrokerRefused)
    assert job.lost
    work(script, offering, 1, attempts=2)
    assert take_all(offering) == [], "its handler is still at it"
    job.running = False
    offering.ran(job)
    [again] = take_all(offering)
    assert (again.number, again.attempts) == (job.number, 2)
    assert again is not job
    assert reply(script, again)
    confirm(script, of(script.step(), c.Reply)[0])
    assert script.session.idle
    assert not offering.in_hand


def test_a_handler_that_goes_on_answers_for_the_second_hand_out() -> None:
    script = opened()
    offering = working(script, 1)
    [job] = take_all(offering)
    script.reconnect()
    accept(script, c.Offer)
    work(script, offering, 1, attempts=2)
    assert take_all(offering) == [], "it is in hand, and known by its number"
    assert job.attempts == 2
    assert reply(script, job)
    [said] = of(script.step(), c.Reply)
    assert said.requests == [job.number]


def test_what_was_refused_for_another_reason_stays_in_hand() -> None:
    script = opened()
    offering = working(script, 1)
    [job] = take_all(offering)
    refuse_step(script, step_with(script, job), "conflict")
    assert not job.lost
    assert reply(script, job)


def test_no_lease_is_renewed_of_what_the_program_let_go_of() -> None:
    script = opened()
    offering = working(script, 3)
    kept, _, finished = take_all(offering)
    del _
    reply(script, finished)
    script.step()
    commands = script.wait(1_000)
    [back] = [ack for ack in of(commands, c.AckWork) if ack.state == RETURNED]
    [renewed] = [ack for ack in of(commands, c.AckWork) if ack.state != RETURNED]
    assert back.ranges == [(1, 2)]
    assert renewed.ranges == [(0, 1), (2, 3)]
    assert kept.number == 0
    confirm(script, back)
    [line] = warnings(script)
    assert "dropped without an answer, and given back: request 1 of svc" in line


def test_a_renewal_that_a_caller_waits_for_is_said_again_on_the_next_link() -> None:
    script = opened()
    offering = working(script, 1)
    [job] = take_all(offering)
    assert script.session.offerings.report(job, 2, "renewed")
    script.step()
    script.reconnect()
    assert outcomes(script) == {}
    for ack in of(accept(script, c.Offer), c.AckWork):
        confirm(script, ack)
    assert outcomes(script) == {"renewed": True}


def test_an_end_that_a_caller_waits_for_has_a_key_and_keeps_it() -> None:
    script = opened()
    offering = working(script, 3)
    answered, completed, silent = take_all(offering)
    reply(script, answered, who="reply")
    script.session.offerings.end(completed, 3, token="complete")
    script.session.offerings.end(silent, 3)
    sent = script.step()
    [first_reply] = of(sent, c.Reply)
    # Both ends leave as one command, and its key is for who waits.
    [first_end] = of(sent, c.AckWork)
    assert len(first_reply.key) == len(first_end.key) == 16
    script.reconnect()
    sent = accept(script, c.Offer)
    [second_reply] = of(sent, c.Reply)
    [second_end] = [ack for ack in of(sent, c.AckWork) if ack.state == 3]
    assert (second_reply.key, second_end.key) == (first_reply.key, first_end.key)
    script.say(c.Confirm(second_reply.tracker, 3, 1, -1, 0, True))
    script.say(c.Confirm(second_end.tracker, 3, 1, -1, 0, True))
    told = outcomes(script)
    assert told["complete"] is True
    assert told["reply"].duplicate
    assert offering.not_held == 0
