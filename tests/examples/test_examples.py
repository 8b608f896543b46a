"""Programs of examples/ do what they say."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import httpx
import pytest

from malamute_py import EmbeddedBroker, GapError, connect_sync
from tests.examples.running import example


@pytest.fixture
def endpoint() -> object:
    with EmbeddedBroker(tcp=True) as broker:
        yield broker.tcp_endpoint


@pytest.mark.moderate
def test_a_late_subscriber_and_each_selection_get_their_quotes(endpoint: str) -> None:
    counts = asyncio.run(example("market_data").main(endpoint))
    assert counts["forex.#"] == 10_000
    assert 0 < counts["forex.eur.*"] < 10_000
    assert len(counts) == 4


@pytest.mark.moderate
def test_each_job_is_done_or_given_up(endpoint: str) -> None:
    assert asyncio.run(example("job_queue").main(endpoint)) == {"done": 45, "given up": 5}


@pytest.mark.moderate
def test_a_projection_goes_on_where_it_stopped(endpoint: str, tmp_path: Path) -> None:
    main = example("event_sourcing").main
    path = str(tmp_path / "accounts.db")
    assert main(endpoint, path) == {"ada": 70, "bob": 50}
    assert main(endpoint, path) == {"ada": 140, "bob": 100}


def test_a_projection_whose_database_has_an_earlier_form_is_built_anew(
    endpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "accounts.db"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("create table balance (account primary key, amount int)")
        database.execute("create table progress (stream primary key, next int)")
        database.execute("insert into balance values ('ada', 1000)")
        database.execute("insert into progress values ('accounts', 99)")
    assert example("event_sourcing").main(endpoint, str(path)) == {"ada": 70, "bob": 50}


@pytest.mark.moderate
def test_a_projection_takes_no_other_stream_for_its_own(endpoint: str, tmp_path: Path) -> None:
    """A broker in memory that was started anew has other events at the same offsets."""
    main = example("event_sourcing").main
    path = str(tmp_path / "accounts.db")
    assert main(endpoint, path) == {"ada": 70, "bob": 50}
    with connect_sync(endpoint) as client:
        client.remove_stream("accounts")
    with pytest.raises(GapError):
        main(endpoint, path)


@pytest.mark.moderate
def test_the_web_service_answers_by_its_worker_and_says_so_when_there_is_none(
    endpoint: str,
) -> None:
    module = example("web_service")

    async def ask() -> list[tuple[int, str]]:
        app = module.application(endpoint)
        answers = []
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://web") as web,
        ):
            found = await web.post("/shout", content=b"hello")
            answers.append((found.status_code, found.text))
            working = asyncio.create_task(module.worker(endpoint))
            while found.status_code == 503:
                await asyncio.sleep(0.01)
                found = await web.post("/shout", content=b"hello")
            answers.append((found.status_code, found.text))
            working.cancel()
        return answers

    (status, why), answer = asyncio.run(ask())
    assert (status, why.partition(":")[0]) == (503, "no_workers")
    assert answer == (200, "HELLO")
