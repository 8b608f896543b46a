"""The scenes with mailboxes, services, groups and atomic steps: work that survives deaths.

Owns what is shown and in which order; see scenes.py. Processes die here by SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random

from malamute_protocol.errors import Timeout
from malamute_py.client.aio.client import Client, connect
from malamute_py.demo.scenes import STREAM, Stage, row_of

WORKERS = 4
"""Workers of the look-ups, and members that the group has in all."""
LOOKUPS = 4_000
"""Delayed departures that are looked up, at most."""
CREW = 500
"""Messages that wait for the crew."""
ENRICHER_DEATHS = 3
CREDIT = 4_096
"""Records that a member of the group holds at one time."""
PAUSE_S = 0.005
"""Time that a member spends on a batch."""
PATIENCE_S = 120.0
"""Longest time that a scene waits for what is to come."""


@contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start one of crew.py's programs for the body; it is killed at the end if it still runs.

    words: name of the program and its arguments.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "malamute_py.demo.crew", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()  # The program has begun.
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def lookups(stage: Stage) -> None:
    """Have four workers answer requests, and kill one that has requests in hand.

    The check: each request is answered once, and rightly.
    """
    report, figures = stage.report, stage.figures
    report.begin("Look-ups by four workers")
    service, answers = "lookup", "desk.answers"
    wanted = figures.lookups(LOOKUPS)
    async with connect(stage.daemon.endpoint, identity="desk") as client:
        with ExitStack() as crew:
            workers = [
                crew.enter_context(program("worker", stage.daemon.endpoint, service))
                for _ in range(WORKERS)
            ]
            began = time.perf_counter()
            asked = [
                json.dumps({"row": row, "carrier": carrier, "dest": dest}).encode()
                for row, carrier, dest, _, _ in wanted
            ]
            await asyncio.gather(
                *(client.submit(service, body, reply_to=answers) for body in asked)
            )
            in_hand = await _in_hand(client, service)
            workers[0].kill()
            found: list[tuple[int, str | None, str | None]] = []
            async with client.inbox(answers) as inbox:
                while len(found) < len(wanted):
                    mail = await asyncio.wait_for(anext(inbox), PATIENCE_S)
                    answer = json.loads(mail.body)
                    found.append((answer["row"], answer["airline"], answer["airport"]))
            seconds = time.perf_counter() - began
            info = await client.service_info(service)
            left = (await client.mailbox_info(answers)).messages
    report.say(
        f"{len(wanted):,} requests answered in {seconds:.1f} s, one worker killed on the way"
    )
    report.holds(
        "the worker that is killed has requests in hand", "some", f"{in_hand:,}", in_hand > 0
    )
    report.same_rows("every request is answered, once", [row for row, *_ in wanted],
                     sorted(row for row, *_ in found))  # fmt: skip
    expected = {row: (airline, airport) for row, _, _, airline, airport in wanted}
    differing = sum(expected.get(row) != (airline, airport) for row, airline, airport in found)
    report.equal("answers that differ from the tables", 0, differing)
    report.equal("requests and answers left behind", (0, 0), (info.waiting + info.held, left))


async def _in_hand(client: Client, service: str) -> int:
    """Wait until each worker holds requests; returns the least that one of them holds.

    0: some worker has none after 5 s.
    """
    for _ in range(500):
        info = await client.service_info(service)
        held = [worker.held for worker in info.workers]
        if len(held) == WORKERS and min(held) > 0:
            return min(held)
        await asyncio.sleep(0.01)
    return 0


async def absent_crew(stage: Stage) -> None:
    """Send mail to a crew that is away, kill the broker, and check that the crew finds it all."""
    report = stage.report
    report.begin("Mail for an absent crew")
    mailbox = "crew.JFK"
    sent = stage.figures.rows("origin = 'JFK' and delayed")[:CREW]
    async with connect(stage.daemon.endpoint) as desk:
        confirmed = await asyncio.gather(
            *(desk.send(mailbox, json.dumps({"row": row}).encode()) for row in sent)
        )
        stage.daemon.kill()
        stage.daemon.start()
        async with connect(stage.daemon.endpoint) as crew, crew.inbox(mailbox) as inbox:
            rows: list[int] = []
            while len(rows) < len(sent):
                rows.append(row_of((await asyncio.wait_for(anext(inbox), PATIENCE_S)).body))
        left = (await desk.mailbox_info(mailbox)).messages
    levels = Counter(each.level for each in confirmed)
    report.equal("messages confirmed as synced before the broker was killed", len(sent),
                 levels["synced"])  # fmt: skip
    report.same_rows("the crew finds its mail, in order", sent, rows)
    report.equal("messages left behind", 0, left)


async def shared_group(stage: Stage) -> None:
    """Have three members share the stream, of which one leaves while a fourth one joins.

    The check: each record is processed once.
    """
    report, total = stage.report, len(stage.flights)
    report.begin("A group of three")
    rows: dict[str, list[int]] = {}
    """Rows that each member has processed, by its name."""
    done = 0
    a_third_done = asyncio.Event()

    async def member(name: str, until: int) -> None:
        """Read as a member of the group until all members together have done `until` rows."""
        nonlocal done
        mine = rows.setdefault(name, [])
        async with (
            connect(stage.daemon.endpoint, identity=f"member-{name}") as client,
            client.group(
                STREAM,
                "readers",
                kind="shared",
                start="earliest",
                ack="manual",
                credit_records=CREDIT,
            ) as group,
        ):
            while done < until:
                try:
                    batch = await group.next_batch(timeout_ms=250)
                except Timeout:
                    continue
                if batch is None:
                    break
                mine.extend(row_of(body) for body in batch.bodies())
                done += len(batch)
                await group.ack(batch)
                if done > total // 3:
                    a_third_done.set()
                await asyncio.sleep(PAUSE_S)

    async def follower() -> None:
        """Join as the fourth member when a third of the records are done."""
        await a_third_done.wait()
        await member("d", total)

    began = time.perf_counter()
    # c leaves half way, and the follower joins as d.
    await asyncio.wait_for(
        asyncio.gather(member("a", total), member("b", total), member("c", total // 2), follower()),
        PATIENCE_S,
    )
    seconds = time.perf_counter() - began
    async with connect(stage.daemon.endpoint) as client:
        info = await client.group_info(STREAM, "readers")
    seen = Counter(row for mine in rows.values() for row in mine)
    shares = ", ".join(f"{len(rows[name]):,}" for name in sorted(rows))
    report.say(f"{total:,} records in {seconds:.1f} s, shared as {shares}")
    report.same_rows("every record is processed", stage.figures.rows("true"), sorted(seen))
    report.equal("records that were processed twice", 0,
                 sum(count > 1 for count in seen.values()))  # fmt: skip
    report.holds("all four members had a share", "some each", shares,
                 len(rows) == WORKERS and all(rows.values()))  # fmt: skip
    report.equal("the group's lag", 0, info.lag)


async def enrichment(stage: Stage) -> None:
    """Kill an enricher at random, again and again; check that each departure is published once.

    It consumes, transforms, publishes and moves its cursor in atomic steps: see crew.enrich().
    """
    report, figures = stage.report, stage.figures
    report.begin("Enriched exactly once")
    target = "flights.enriched"
    dice = Random(len(stage.flights))
    endpoint = stage.daemon.endpoint
    began = time.perf_counter()
    progress: list[int] = []
    async with connect(endpoint) as client:
        for death in range(ENRICHER_DEATHS + 1):
            with program("enricher", endpoint, STREAM, target) as process:
                if death == ENRICHER_DEATHS:  # The last one lives to the end.
                    await asyncio.to_thread(process.wait, PATIENCE_S)
                    break
                # Records in the target at which this one dies: deaths are spread over the year.
                goal = (death + 1) * len(stage.flights) // (ENRICHER_DEATHS + 2)
                await _until(client, target, goal)
                await asyncio.sleep(dice.random() * 0.2)
                process.kill()
                if death == 1:  # once, the broker dies with it
                    stage.daemon.kill()
                    stage.daemon.start()
            progress.append((await client.stream_info(target)).tail)
        seconds = time.perf_counter() - began
        rows: list[int] = []
        differing = 0
        expected = figures.airlines()
        subscription = client.subscribe(target, start="earliest", until="tail")
        async for batch in subscription.batches():
            for body in batch.bodies():
                departure = json.loads(body)
                rows.append(departure["row"])
                differing += departure["airline"] != expected[departure["row"]]
        cursor = await client.cursor(STREAM, "enricher").info()
    report.say(f"{len(rows):,} departures enriched in {seconds:.1f} s; killed at "
               + ", ".join(f"{each:,}" for each in progress))  # fmt: skip
    report.holds("it was killed on its way", f"{ENRICHER_DEATHS} times, once with the broker",
                 f"at {', '.join(f'{each:,}' for each in progress)}",
                 all(each < len(stage.flights) for each in progress))  # fmt: skip
    report.same_rows("each departure is there once, in order", figures.rows("true"), rows)
    report.equal("departures with a wrong airline", 0, differing)
    report.equal("the cursor stands after the last", len(stage.flights), cursor.next)


async def _until(client: Client, stream: str, tail: int) -> None:
    """Wait until a stream is there and has so many records, or until PATIENCE_S is over."""
    for _ in range(int(PATIENCE_S / 0.02)):
        facts = {each.name: each.tail for each in await client.list_streams(stream)}
        if facts.get(stream, 0) >= tail:
            return
        await asyncio.sleep(0.02)


async def play(stage: Stage) -> None:
    """Play the scenes with mail, services, groups and steps, in order."""
    await lookups(stage)
    await absent_crew(stage)
    await shared_group(stage)
    await enrichment(stage)
