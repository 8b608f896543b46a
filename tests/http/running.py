"""An HTTP side in a thread of the test, at a broker of the test."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from malamute_py import EmbeddedBroker
from malamute_py.client.settings import Credential
from malamute_py.http.serving import Serving
from malamute_py.sections import HttpSection
from tests.waiting import WAIT_S


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


class RunningHttp:
    """Serves at a free port until the block ends."""

    def __init__(self, endpoint: str, credential: Credential = None, /, **settings: object) -> None:
        self.section = HttpSection(**{"bind": "127.0.0.1:0", **settings})  # type: ignore[arg-type]
        self._endpoint = endpoint
        self._credential = credential
        self._serves = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.serving = Serving(self.section, [self._endpoint], self._credential)
        await self.serving.run(lambda url: self._serves.set())

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._serves.wait(WAIT_S)
        parts = urlsplit(self.serving.url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = parts.hostname, parts.port
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self.serving.stop)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=WAIT_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, told, answer.read().decode())
        finally:
            connection.close()

    def samples(self) -> dict[str, float]:
        """Value by `name{label="value"}`, once the broker answers."""
        found: dict[str, float] = {}

        def answered() -> bool:
            nonlocal found
            found = parsed(self.get("/metrics").text)
            return found["malamute_up"] == 1

        until(answered)
        return found

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WAIT_S)


def parsed(text: str) -> dict[str, float]:
    """Value by `name{label="value"}`, labels by name; each family has a help."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found
            found[name] = sample.value
    return found


def until(holds: Callable[[], bool]) -> None:
    """Wait for what must come."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def at(broker: EmbeddedBroker, **settings: object) -> RunningHttp:
    return RunningHttp(broker.tcp_endpoint, **settings)
