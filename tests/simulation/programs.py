"""Programs over the real asyncio client: what each role does with it.

Owns the use that programs make of the client library. The rule: a program settles everything that
it is shown, sooner or later. Source: README.md; the docstrings of malamute_py.client.aio.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    LocalProtocolError,
    MalamuteError,
    Timeout,
)
from malamute_py.client.session.group_options import GroupOptions
from malamute_py.client.session.letters import RequestFailed
from malamute_py.client.words import GroupKind
from tests.simulation.acts import Act, Wish
from tests.simulation.model import Violation
from tests.simulation.process import LAWFUL, Process, Role, Told, serial_of
from tests.simulation.records import SERIAL
from tests.simulation.work_model import is_durable

FAILS = 1
"""Mood of a request whose handler fails it for good."""
GIVES_BACK = 2
"""Mood of a request that is given back the first time."""
MEMORY_NUMBERS = 1 << 40


class Deliberate(Exception):
    """A handler's own error."""


# --- who sends -------------------------------------------------------------------------------


async def sends(p: Process) -> None:
    """Send mail, one by one, several at once, in bulk, in steps."""
    rng, client = p.rng, p.client
    while p.goes_on():
        await p.pause()
        box, level, draw = rng.choice(p.world.boxes), p.level(), rng.random()
        if draw < 0.4:
            act = p.act(level=level)
            work = client.send(box, p.record(act, "send", box), confirm=level)
            await p.confirmed("send", act, work, "", level)
        elif draw < 0.6:
            acts = [p.act(level=level) for _ in range(3)]
            bodies = [p.record(act, "send", box) for act in acts]
            await asyncio.gather(*(
                p.confirmed("send", act, client.send(box, body, confirm=level), "", level)
                for act, body in zip(acts, bodies, strict=True)
            ))  # fmt: skip
        elif draw < 0.75:
            act = p.act(level=level)
            bodies = [p.record(act, "send", box) for _ in range(rng.choice((2, 6)))]
            losses = p.world.losses
            told = await p.call("send_many", client.send_many(box, bodies, confirm=level), act)
            if told.value:
                p.told(act, Told(told.value[0]), "", losses, level)
        else:
            await p.step(partial(sends_in_step, p, box))


def sends_in_step(p: Process, box: str, step: Any, act: Act) -> None:
    """Send a message as a part of a step."""
    step.send(box, p.record(act, "send", box))


async def publishes(p: Process) -> None:
    """Publish records, of every level."""
    rng, client = p.rng, p.client
    while p.goes_on():
        await p.pause()
        stream, level = rng.choice(p.world.inputs), p.level()
        for _ in range(rng.choice((1, 1, 5))):
            act = p.act(level=level)
            body = p.record(act, "publish", stream)
            if rng.random() < 0.2:
                with contextlib.suppress(BrokerRefused):  # The window is full.
                    client.publish_nowait(stream, body, confirm=level).add_done_callback(_looked_at)
            else:
                work = client.publish(stream, body, confirm=level)
                await p.confirmed("publish", act, work, stream, level)


def _looked_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


# --- who asks --------------------------------------------------------------------------------


async def requests(p: Process) -> None:
    """Send requests to services, several at once, with times and without."""
    while p.goes_on():
        await p.pause()
        await asyncio.gather(*(_request(p) for _ in range(p.rng.choice((1, 1, 3)))))


async def _request(p: Process) -> None:
    rng, client = p.rng, p.client
    service = rng.choice(p.world.services)
    act = p.act()
    mood = bytes([rng.choice((0, 0, 0, 0, 0, FAILS, GIVES_BACK))])
    body = p.record(act, "request", service, mood)
    serial = serial_of(body)
    draw = rng.random()
    bound, lawful = p.bound()
    if draw < 0.75:
        confirm = rng.choice(("none", "none", "stored", "synced"))
        if confirm == "stored" and not p.does("requests are confirmed as stored"):
            confirm = "none"
        work = client.request(service, body, confirm=confirm, **bound)
        told = await p.call(f"request of record {serial}", work, act, lawful=lawful, impatient=True)
        judge(p, serial, told)
    elif draw < 0.85:

        async def several() -> list[Any]:
            return [one async for one in client.requests(service, body, **bound)]

        told = await p.call("requests", several(), act, lawful=lawful, impatient=True)
        for reply in told.value or ():
            judge(p, serial, Told(reply))
        judge(p, serial, Told(error=told.error))
    else:
        level, key = p.level(), rng.randbytes(6)
        if p.identity:
            submitted = client.submit(service, body, key=key, confirm=level)
            await p.confirmed("submit", act, submitted, "", level)
            if rng.random() < 0.3:
                await p.pause()
                # The service may have gone with the request, in a power loss.
                await p.call("cancel", client.cancel(service, key), codes=("unknown_service",))


def judge(p: Process, serial: int, told: Told) -> None:
    """Check that the answer to a requester is what a worker said."""
    if isinstance(told.error, RequestFailed):
        p.model.failed_caller(serial, told.error.why.partition(":")[0], power=p.world.losses > 0)
    if told.value is not None and told.value.body:
        reply, answers = SERIAL.unpack_from(told.value.body), serial
        p.world.note("answer", p.name, serial, reply[0])
        p.model.answered_caller(answers, reply[0])


# --- who reads mail --------------------------------------------------------------------------


def reads(box: str | None) -> Role:
    """Read a mailbox; None: the process's own."""

    async def role(p: Process) -> None:
        rng = p.rng
        place = box if box is not None else p.holder
        while True:
            ack = rng.choice(("next", "manual"))
            left = rng.choice((2, 10, 1_000))
            credit = rng.choice((1, 3, 8192))
            try:
                async with p.client.inbox(box, ack=ack, credit_records=credit) as inbox:
                    async for mail in inbox:
                        shown(p, place, mail)
                        if rng.random() < 0.3:
                            await p.pause()
                        if ack == "manual":
                            await _settle_mail(p, place, mail)
                        left -= 1
                        if not left:
                            break
            except MalamuteError as error:
                reckoned(p, "an inbox", error)
            await p.pause()

    return role


def shown(p: Process, place: str, mail: Any) -> None:
    """Note that a program was handed a message."""
    if mail.body:
        serial = serial_of(mail.body)
        p.world.note("mail shown", p.name, place, mail.number, serial)
        p.model.show(place, serial)


async def _settle_mail(p: Process, place: str, mail: Any) -> None:
    draw = p.rng.random()
    if draw < 0.5:
        await p.call("mail.ack", mail.ack())
    elif draw < 0.65:
        await p.call("mail.nack", mail.nack(p.rng.choice((0, 20))))
    else:

        def fill(step: Any, act: Act) -> None:
            step.ack(mail)
            if mail.number < MEMORY_NUMBERS:
                act.wishes.append(Wish("ack", place, (), (mail.number,)))

        told = await p.step(fill)
        if told.error is not None and told.code != "not_held":
            # The step did not happen, and the message is the program's again.
            await p.call("mail.nack", mail.nack())


def reckoned(p: Process, what: str, error: MalamuteError) -> None:
    """Note that an iteration has ended by an error."""
    if p.closing:
        return
    p.world.note("failed", p.name, what, repr(error))
    if not isinstance(error, BrokerRefused) or error.code not in LAWFUL:
        raise Violation("unlawful", f"{p.name}: {what}: {error!r}") from error


# --- who works -------------------------------------------------------------------------------


async def _handled(p: Process, request: Any, service: str) -> bytes | None:
    """Do a handler's work; returns the reply, or None when it has finished the request."""
    p.at_work[request.number] = None
    try:
        return await _handle(p, request, service)
    finally:
        p.at_work.pop(request.number, None)


async def _handle(p: Process, request: Any, service: str) -> bytes | None:
    rng = p.rng
    serial = p.begins(request, service)
    mood = bytes(request.body)[8]
    if rng.random() < 0.7:
        await p.pause()
    if mood == FAILS:
        p.model.history.failing.add(serial)
        raise Deliberate("as it was asked for")
    if mood == GIVES_BACK and request.attempts == 1:
        await p.call("nack", request.nack(5, wait=rng.random() < 0.5), lawful=LATE)
        return None
    if rng.random() < 0.2 and p.does("handlers renew leases"):
        await p.call("renew", request.renew(), lawful=(ConnectionLost,))
    draw = rng.random()
    if draw < 0.15:
        _, body = p.answer(request)
        work = request.reply(body, last=False, wait=rng.random() < 0.5)
        await p.call("a first reply", work, lawful=LATE)
    elif draw < 0.2:
        return None
    share = 1.0 if p.does("handlers answer in steps only") else 0.5
    if rng.random() < share and p.does("handlers answer in steps"):
        told = await p.step(lambda step, act: p.reply_part(step, act, request, service))
        if told.error is not None:
            if told.code != "not_held" and not request.finished:
                await p.call("nack", request.nack(1), lawful=LATE)
            raise told.error
        return None
    return p.answer(request)[1]


LATE = (ConnectionLost, LocalProtocolError)
"""Ends of a request that was given up meanwhile, by the closing of its worker or a step."""


def serves(service: str) -> Role:
    """Run handlers through the library."""

    async def role(p: Process) -> None:
        async def handler(request: Any) -> bytes | None:
            return await _handled(p, request, service)

        def in_a_thread(request: Any) -> bytes:
            p.begins(request, service)
            return p.answer(request)[1]

        while True:
            rng = p.rng
            plain = rng.random() < 0.15
            try:
                async with p.client.worker(
                    service, concurrency=rng.choice((1, 3, 16)),
                    lease_ms=rng.choice((None, 100, 300)),
                    confirm=rng.choice(("stored", "synced")),
                ) as worker:  # fmt: skip
                    await worker.run(in_a_thread if plain else handler)
            except MalamuteError as error:
                reckoned(p, "a worker", error)
            await p.pause()

    return role


def works(service: str) -> Role:
    """Run a loop of its own over the requests."""

    async def role(p: Process) -> None:
        rng = p.rng
        while True:
            left = rng.choice((2, 10, 1_000))
            try:
                async with p.client.worker(
                    service, concurrency=rng.choice((1, 3)), lease_ms=rng.choice((None, 100, 300)),
                ) as worker:  # fmt: skip
                    while left:
                        request = await worker.next()
                        if request is None:
                            break
                        left -= 1
                        await _work(p, request, service)
            except MalamuteError as error:
                reckoned(p, "a worker", error)
            await p.pause()

    return role


async def _work(p: Process, request: Any, service: str) -> None:
    rng = p.rng
    try:
        body = await _handled(p, request, service)
    except Deliberate as error:
        await p.call("fail", request.fail(str(error), wait=rng.random() < 0.5), lawful=LATE)
        return
    except BrokerRefused:
        return
    except MalamuteError:
        # The caller of the step has lost patience, and does not know whether the step was taken.
        return
    wait = rng.random() < 0.5
    if body is not None:
        await p.call("reply", request.reply(body, wait=wait), lawful=LATE)
    elif not request.finished:
        await p.call("complete", request.complete(wait=wait), lawful=LATE)


# --- who shares a stream ---------------------------------------------------------------------


def joins(stream: str, group: str, kind: GroupKind) -> Role:
    """Be a member of a group."""

    async def role(p: Process) -> None:
        rng = p.rng
        place = f"{stream}/{group}"
        seen: dict[str, Any] = {}
        if "visibility" in GroupOptions.__struct_fields__:
            seen = {"visibility": "durable" if is_durable(place) else "live"}
        if "create" in GroupOptions.__struct_fields__:
            seen["create"] = True
        bounds = p.world.group_bounds
        while True:
            ack = rng.choice(("next", "manual"))
            left = rng.choice((2, 10, 1_000))
            try:
                async with p.client.group(
                    stream, group, kind=kind, start="earliest", ack=ack,
                    credit_records=rng.choice((1, 4, 8192)), **seen,
                    **({} if bounds is None else {"settings": bounds}),
                ) as member:  # fmt: skip
                    if bounds is not None and ack == "manual":
                        await _share(p, place, member, left)
                        continue
                    async for record in member:
                        serial = serial_of(record.body)
                        p.world.note("record shown", p.name, place, record.offset, serial)
                        p.model.show(place, serial)
                        if rng.random() < 0.3:
                            await p.pause()
                        if ack == "manual":
                            await _settle_record(p, place, member, record)
                        left -= 1
                        if not left:
                            break
            except MalamuteError as error:
                reckoned(p, "a group", error)
            await p.pause()

    return role


async def _settle_record(p: Process, place: str, member: Any, record: Any) -> None:
    draw = p.rng.random()
    if draw < 0.5:
        await p.call("member.ack", member.ack(record))
    elif draw < 0.65 or not p.does("members acknowledge in steps"):
        await p.call("member.nack", member.nack(record, p.rng.choice((0, 20))))
    else:

        def fill(step: Any, act: Act) -> None:
            step.ack(record)
            act.wishes.append(Wish("records", place, (), (record.offset,)))

        told = await p.step(fill)
        if told.error is not None and told.code != "not_held":
            await p.call("member.nack", member.nack(record))


async def _share(p: Process, place: str, member: Any, left: int) -> None:
    """Take batches, and settle their records in any order, some of them late."""
    rng = p.rng
    leases = "lease_ms" in p.world.group_bounds
    held: dict[int, Any] = {}
    while left > 0 or held:
        batch = None
        if left > 0:
            with contextlib.suppress(Timeout):
                batch = await member.next_batch(rng.choice((0, 5, 50)) if held else None)
            if batch is None and not held:
                return
        for record in batch.records() if batch is not None else ():
            serial = serial_of(record.body)
            p.world.note("record shown", p.name, place, record.offset, serial)
            p.model.show(place, serial)
            known = held.get(record.offset)
            # After a power loss the offset is another record's.
            if known is not None and known.epoch == record.epoch and not leases:
                raise Violation("two_hands", f"{place}: {record.offset} came to {p.name} again")
            held[record.offset] = record
            left -= 1
        if held and (rng.random() < 0.6 or batch is None):
            if rng.random() < 0.3:
                await p.pause()
            record = held.pop(rng.choice(sorted(held)))
            if rng.random() < 0.2:
                await p.call("member.renew", member.renew(record))
            draw = rng.random()
            if draw < 0.1:
                await p.call("member.fail", member.fail(record, "so"))
            elif draw < 0.15:
                await p.call("member.release", member.release(record))
            else:
                await _settle_record(p, place, member, record)


ROLES: dict[str, Callable[..., Role]] = {
    "sends": lambda: sends,
    "publishes": lambda: publishes,
    "requests": lambda: requests,
    "reads": reads,
    "serves": serves,
    "works": works,
    "joins": joins,
}
"""Name -> function that makes the role."""


class Program(Process):
    """One program over the asyncio client."""

    roles = ROLES
