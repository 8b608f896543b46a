"""`malamute bench ...`: how much the broker at hand does, and how long each thing takes.

Owns the loads and what is timed in each. The rules: a load is closed (each task waits for its own
before it goes on); what a bench makes has a name of its own and is removed afterwards; what is
sent and read is counted, and a bench that did not get all of it fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import typer

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli import output
from malamute_py.cli.commands import group
from malamute_py.cli.failures import CommandFailed
from malamute_py.cli.linking import linked_in_loop
from malamute_py.cli.measuring import (
    Leave,
    Measure,
    left_behind,
    measured,
    name_for,
    removed,
    show,
)
from malamute_py.cli.progress import Progress
from malamute_py.cli.values import count_text, size_bytes, size_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from malamute_py.client.aio.client import Client
    from malamute_py.client.aio.mail import Inbox
    from malamute_py.client.aio.subscription import Subscription
    from malamute_py.client.aio.work import Request

app = group("bench")

_STAMP_BYTES: Final = 8
"""Length of the time of sending, by this process's clock, that a body begins with."""
_SILENCE_MS: Final = 30_000
"""Time without anything new after which a reader gives up."""
_MADE_BY: Final = "made by malamute bench"
_CLOSING: Final = """

A bench writes to ring main as others do: a full ring then drops as much of its oldest history.
--memory and --ring-bytes, where there are, spare it. Clients of a bench are one Python process,
whose own time is part of what is measured.

In a pipe a line has, with tabs between: what, count, a second, bytes a second, p50, p90, p99 and
max in milliseconds."""

Count: TypeAlias = Annotated[
    int, typer.Option("--count", "-n", metavar="N", min=1, help="How many in all.")
]
Size: TypeAlias = Annotated[
    str, typer.Option(metavar="SIZE", help="Size of a body, at least 8 bytes: 4KiB.")
]
Tasks: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="Tasks, each with one (batch) under way.")
]
BatchOf: TypeAlias = Annotated[
    int, typer.Option("--batch", metavar="N", min=1, help="Published together; 1: each alone.")
]
Level: TypeAlias = Annotated[
    Literal["stored", "synced"] | None,
    typer.Option(
        "--confirm",
        metavar="LEVEL",
        help="Level of the confirms: stored, or synced (default where a disk is).",
    ),
]

Memory: TypeAlias = Annotated[bool, typer.Option("--memory", help="In memory only.")]
Report: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write an HTML page with plots over the run."),
]
RingBytes: TypeAlias = Annotated[
    str, typer.Option(metavar="SIZE", help="A ring of its own, which takes no space of ring main.")
]


@dataclass(frozen=True)
class Load:
    """How much is sent, and how."""

    count: int
    size: int
    tasks: int
    batch: int = 1
    level: Literal["stored", "synced"] | None = None
    """Level of the confirms; None: a request, whose reply confirms it, or a load in memory."""
    memory: bool = False
    ring_bytes: int = 0
    """Bytes of a ring of its own; 0: it shares ring main."""
    noun: str = "record"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the stream or mailbox that is made for this load."""
        asked = {"memory": self.memory, "ring_bytes": self.ring_bytes}
        return {"description": _MADE_BY, **{name: value for name, value in asked.items() if value}}

    def body(self) -> bytes:
        """Return a body that is sent now: its time, filled up with zeros to the load's size."""
        return time.perf_counter_ns().to_bytes(_STAMP_BYTES, "big").ljust(self.size, b"\0")

    def title(self, verb: str) -> str:
        """Return the title of the figures: the bench's name and the load in words."""
        parts = [
            f"{verb}: {count_text(self.count, self.noun)} of {size_text(self.size)}",
            f"{count_text(self.tasks, 'task')}",
        ]
        if self.batch > 1:
            parts.append(f"batches of {count_text(self.batch)}")
        if self.level is not None:
            parts.append(f"confirms {self.level}")
        if self.memory:
            parts.append("in memory")
        return ", ".join(parts)

    def conditions(self, verb: str) -> dict[str, Any]:
        """Return the load by name of its fields, for JSON and the report."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        del known["noun"]  # A word of title(), and no condition.
        return {"bench": verb, **known}


def _bytes(size: str) -> int:
    return max(_STAMP_BYTES, size_bytes(size))


def _level(
    asked: Literal["stored", "synced"] | None, memory: bool
) -> Literal["stored", "synced"] | None:
    """Return the level that is asked for; else synced, but None in memory, where no disk is."""
    return asked or (None if memory else "synced")


def _ring(size: str) -> int:
    return size_bytes(size) if size else 0


@app.command(
    "pub",
    epilog="""\b
Examples:
  malamute bench pub                        a million, batches of 1,000
  malamute bench pub --batch 1 --tasks 64   each alone, 64 under way
  malamute bench pub --batch 1 --tasks 1 --count 1000 --confirm stored
  malamute bench pub --report pub.html      percentiles, as plots"""
    + _CLOSING,
)
def pub(
    ctx: typer.Context,
    count: Count = 1_000_000,
    size: Size = "128",
    tasks: Tasks = 4,
    batch: BatchOf = 1000,
    level: Level = None,
    memory: Memory = False,
    ring_bytes: RingBytes = "",
    report: Report = None,
    leave: Leave = False,
    as_json: output.Json = False,
) -> int:
    """Publish records until the last is confirmed."""
    load = Load(count, _bytes(size), tasks, batch, _level(level, memory), memory, _ring(ring_bytes))
    removal = "" if leave else "manage_streams"
    return _run(ctx, "pub", load, _publishing, as_json, report, removal)


@app.command(
    "sub",
    epilog="""\b
Examples:
  malamute bench sub                     published and read at the same time
  malamute bench sub --readers 10        each of ten clients reads all of it
  malamute bench sub --history           read after all was published
  malamute bench sub --batch 1 --tasks 1 --count 1000     one at a time"""
    + _CLOSING,
)
def sub(
    ctx: typer.Context,
    count: Count = 1_000_000,
    size: Size = "128",
    tasks: Tasks = 4,
    batch: BatchOf = 1000,
    readers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Clients that read all of it.")
    ] = 1,
    history: Annotated[
        bool, typer.Option("--history", help="Publish first, and measure the reading alone.")
    ] = False,
    level: Level = None,
    memory: Memory = False,
    ring_bytes: RingBytes = "",
    report: Report = None,
    leave: Leave = False,
    as_json: output.Json = False,
) -> int:
    """Read records while they are published, or from the start."""

    async def read(
        ctx: typer.Context, client: Client, name: str, load: Load, bar: Progress,
        found: list[Measure],
    ) -> None:  # fmt: skip
        """Run the bench that was chosen: a `Bench` with the number of readers filled in."""
        reading = _reading_history if history else _reading
        await reading(ctx, client, name, load, bar, found, readers)

    load = Load(count, _bytes(size), tasks, batch, _level(level, memory), memory, _ring(ring_bytes))
    removal = "" if leave else "manage_streams"
    return _run(ctx, "sub", load, read, as_json, report, removal, readers=readers, history=history)


@app.command(
    "request",
    epilog="""\b
Examples:
  malamute bench request                  64 requests under way
  malamute bench request --tasks 1 --count 1000     how long one takes"""
    + _CLOSING,
)
def request(
    ctx: typer.Context,
    count: Count = 100_000,
    size: Size = "128",
    tasks: Tasks = 64,
    report: Report = None,
    leave: Leave = False,
    as_json: output.Json = False,
) -> int:
    """Ask a worker of this process, which replies with the body."""
    load = Load(count, _bytes(size), tasks, noun="request")
    removal = "" if leave else "manage_queues"
    return _run(ctx, "request", load, _asking, as_json, report, removal)


@app.command(
    "mail",
    epilog="""\b
Examples:
  malamute bench mail                     100,000 messages, 64 under way
  malamute bench mail --tasks 1 --count 1000 --confirm stored"""
    + _CLOSING,
)
def mail(
    ctx: typer.Context,
    count: Count = 100_000,
    size: Size = "128",
    tasks: Tasks = 64,
    level: Level = None,
    memory: Memory = False,
    report: Report = None,
    as_json: output.Json = False,
) -> int:
    """Send messages to a mailbox while a reader takes them out."""
    # A mailbox in memory has no level but its own, unless one is asked for.
    load = Load(
        count, _bytes(size), tasks, level=_level(level, memory), memory=memory, noun="message"
    )
    return _run(ctx, "mail", load, _mailing, as_json, report)


# --- one bench ---------------------------------------------------------------------------------

Bench: TypeAlias = Callable[
    [typer.Context, "Client", str, Load, Progress, list[Measure]], Awaitable[None]
]
"""Makes the load over a client, in a stream, service or mailbox of the given name.

Each Measure goes into the list before it is complete, so that Ctrl-C leaves the figures so far."""


def _run(
    ctx: typer.Context,
    verb: str,
    load: Load,
    bench: Bench,
    as_json: bool,
    report: Path | None,
    removal: str = "",
    **more: Any,
) -> int:
    """Run one bench over a link of its own, and show its figures.

    report: the HTML file that gets them, too; None: none does. removal: the permission to remove
    what the bench makes; without it the bench is refused. Empty: none is needed, or --leave was
    given. more: further conditions, shown with those of the load. Returns the exit code.
    """
    if report is not None:
        report.touch()  # A file that cannot be written is told before the bench.

    found: list[Measure] = []

    async def measure() -> None:
        """Make the load, unless what it makes could not be removed afterwards."""
        async with linked_in_loop(ctx) as client:
            name = await name_for(client, "bench")
            if removal and (why := await left_behind(client, removal, name)):
                raise CommandFailed(why)
            with Progress(verb, total=load.count) as bar:
                await bench(ctx, client, name, load, bar, found)

    whole = measured(measure())  # False: Ctrl-C ended it; the figures so far are shown.
    title = load.title(verb)
    if more.get("history"):
        title += ", from the start"
    conditions = {**load.conditions(verb), **more}
    if report is not None:
        from malamute_py.cli.bench_report import page

        title_there = f"malamute bench {title}{'' if whole else ', interrupted'}"
        report.write_text(page(title_there, conditions, found), "utf-8")
    return show(conditions, found, title, as_json=as_json, whole=whole)


async def _publishing(
    ctx: typer.Context, client: Client, name: str, load: Load, bar: Progress, found: list[Measure]
) -> None:
    """Measure publishing into a stream that is made for it and removed: `bench pub`."""
    async with _stream(client, name, load):
        await _published(client, name, load, bar, found)


async def _published(
    client: Client, name: str, load: Load, bar: Progress | None, found: list[Measure]
) -> None:
    """Measure how long records, or batches of them, wait for their confirms."""

    async def publish(many: int) -> None:
        """Publish one record, or one batch of `many`, and wait for its confirm."""
        body, level = load.body(), load.level or "default"
        if load.batch == 1:
            await client.publish(name, body, confirm=level)
        else:
            await client.publish_many(name, [body] * many, confirm=level)

    what = "confirm of one record" if load.batch == 1 else "confirm of a batch"
    await _in_flight(what, publish, load, bar, found)


async def _reading(
    ctx: typer.Context, client: Client, name: str, load: Load, bar: Progress, found: list[Measure],
    readers: int,
) -> None:  # fmt: skip
    """Publish while each reader, with a link of its own, reads all of it: `bench sub`."""
    count = load.count * readers
    measure = Measure("delivery", count=count, size=count * load.size)

    async def read(subscription: Subscription, shown: bool) -> None:
        """Read all records, and note of each batch how long ago its first record was sent.

        shown: the progress bar shows this reader's count; one reader's is enough.
        """
        got = 0
        while got < load.count:
            batch = await subscription.next_batch(_SILENCE_MS)
            assert batch is not None, "only an end that was asked for ends a subscription"
            bodies = batch.bodies()
            measure.add(_since(bodies[0]))
            measure.done += len(bodies)
            got += len(bodies)
            if shown:
                bar.update(got)

    async with _stream(client, name, load), _links(ctx, readers) as links:
        subscriptions = [each.subscribe(name, strict=True) for each in links]
        for each in subscriptions:
            await each.accepted()  # A subscription gets what is published after its acceptance.
        with measure.timed():
            # The bar shows what is read, so the publishing has none.
            works = [_published(client, name, load, None, found)]
            works += [read(each, shown=at == 0) for at, each in enumerate(subscriptions)]
            try:
                await _all(works)
            finally:
                found.append(measure)  # After the measure of publishing, in the order shown.


async def _reading_history(
    ctx: typer.Context, client: Client, name: str, load: Load, bar: Progress, found: list[Measure],
    readers: int,
) -> None:  # fmt: skip
    """Publish all of it, then have each reader, with a link of its own, read it (--history)."""
    count = load.count * readers
    measure = Measure("reading", count=count, size=count * load.size)

    async def read(link: Client, shown: bool) -> None:
        """Read the stream from its start to the end of the load.

        shown: the progress bar shows this reader's count; one reader's is enough.
        """
        subscription = link.subscribe(name, start="earliest", end=load.count, strict=True)
        got = 0
        # None: the end that was asked for. A silence or a gap raises, so that none is left out.
        while (batch := await subscription.next_batch(_SILENCE_MS)) is not None:
            count = len(batch.bodies())
            measure.done += count
            got += count
            if shown:
                bar.update(got)

    async with _stream(client, name, load), _links(ctx, readers) as links:
        bar.title("publishing what is to be read")
        await _published(client, name, load, bar, found=[])  # Its figures are not asked for.
        bar.title("sub")
        found.append(measure)
        with measure.timed():
            await _all([read(each, shown=at == 0) for at, each in enumerate(links)])


async def _asking(
    ctx: typer.Context, client: Client, name: str, load: Load, bar: Progress, found: list[Measure]
) -> None:
    """Measure requests until a worker on a second link has echoed them: `bench request`."""

    async def ask(many: int) -> None:
        await client.request(name, load.body())

    async with linked_in_loop(ctx, first=False) as server:
        # A worker with fewer than `tasks` at once would have requests wait for it.
        worker = server.worker(name, concurrency=max(16, load.tasks))
        await worker.accepted()
        working = asyncio.create_task(worker.run(_echo))
        try:
            await _in_flight("request until its reply", ask, load, bar, found)
        finally:
            await worker.close()
            await asyncio.gather(working, return_exceptions=True)
            await removed(client, name, client.remove_service(name))
            if client.linked:
                # An interrupted bench may leave dead letters in the service's own mailbox for
                # them; without a dead letter there is no such mailbox.
                with suppress(BrokerRefused):
                    await client.remove_mailbox(f"{name}.dead")


async def _echo(asked: Request) -> bytes:
    return asked.body


async def _mailing(
    ctx: typer.Context, client: Client, name: str, load: Load, bar: Progress, found: list[Measure]
) -> None:
    """Measure messages until their confirms, and until a second link has them: `bench mail`."""

    async def send(many: int) -> None:
        await client.send(name, load.body(), confirm=load.level or "default")

    measure = Measure("delivery", count=load.count, size=load.count * load.size)

    async def read(inbox: Inbox) -> None:
        """Read all messages, and note how old each one is."""
        got = 0
        while got < load.count:
            batch = await inbox.next_batch(_SILENCE_MS)
            assert batch is not None, "only close() ends an inbox"
            bodies = batch.bodies()
            for body in bodies:
                measure.add(_since(body))
            measure.done += len(bodies)
            got += len(bodies)
            bar.update(got)

    await client.edit_mailbox(name, load.settings)  # Makes it.
    try:
        async with linked_in_loop(ctx, first=False) as link, link.inbox(name) as inbox:
            await inbox.accepted()
            with measure.timed():
                sending = _in_flight("confirm of one message", send, load, None, found)
                try:
                    await _all([sending, read(inbox)])
                finally:
                    found.append(measure)
    finally:
        await removed(client, name, client.remove_mailbox(name))


# --- parts ---------------------------------------------------------------------------------------


async def _in_flight(
    what: str,
    one: Callable[[int], Awaitable[None]],
    load: Load,
    bar: Progress | None,
    found: list[Measure],
) -> None:
    """Send the load in `load.tasks` concurrent loops, and time each call of one().

    what: the name of the measure. one: sends this many (`load.batch`, or the rest) and returns when
    they are answered. bar: None: another part of the bench moves it. found: gets the measure.
    """
    measure = Measure(what, count=load.count, size=load.count * load.size)
    found.append(measure)
    left = load.count

    async def repeat() -> None:
        """Call one() again and again, and note how long each call takes, until the load is done."""
        nonlocal left
        while left > 0:
            many = min(load.batch, left)
            left -= many  # Before the await, so that no other loop takes the same ones.
            began = time.perf_counter_ns()
            await one(many)
            measure.add(time.perf_counter_ns() - began)
            measure.done += many
            if bar is not None:
                bar.update(load.count - left)

    with measure.timed():
        await _all([repeat() for _ in range(load.tasks)])


async def _all(works: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run works to their end; the first failure ends all, and is raised."""
    tasks = [asyncio.create_task(each) for each in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _since(body: bytes) -> int:
    """Return the nanoseconds since a body of Load.body() was made."""
    return time.perf_counter_ns() - int.from_bytes(body[:_STAMP_BYTES], "big")


@asynccontextmanager
async def _links(ctx: typer.Context, count: int) -> AsyncIterator[list[Client]]:
    """Link so many further clients, without an identity: one identity has one link."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(linked_in_loop(ctx, first=False)) for _ in range(count)
        ]


@asynccontextmanager
async def _stream(client: Client, name: str, load: Load) -> AsyncIterator[None]:
    """Make the stream of a bench, and remove it afterwards."""
    await client.create_stream(name, load.settings)
    try:
        yield
    finally:
        await removed(client, name, client.remove_stream(name))
