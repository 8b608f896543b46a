"""A client without tracing: nothing of it is imported, and no call is made for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.house.test_extras import run_without

COUNTING = """
import asyncio, sys
{before}
from malamute_protocol.batch import encode
from malamute_py.client.aio.client import Client
from malamute_py.client.settings import ClientSettings

async def main():
    client = Client(ClientSettings(endpoints=("tcp://127.0.0.1:9",)))
    content, window = encode([b"1"]), client.publisher("trades")
    calls = []

    def publish():
        client.publish_nowait("trades", b"1")
        for call in (
            client.publish("trades", b"1"), client.publish_batch("trades", content),
            window.publish_batch(content), window.publish_many([b"1"]),
        ):
            try:
                call.send(None)
            except StopIteration:
                pass
            call.close()

    publish()
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    for n in range(100):
        publish()
    sys.setprofile(None)
    print(len(calls), sorted(set(calls)))
    assert not [name for name in sys.modules if name.startswith("opentelemetry")] or {imported}
    client.abort()

asyncio.run(main())
"""


def count(before: str, imported: bool, run: Callable[..., Any]) -> str:
    ended = run(COUNTING.format(before=before, imported=imported))
    assert ended.returncode == 0, ended.stderr
    return str(ended.stdout)


@pytest.mark.slow
def test_a_client_without_tracing_imports_nothing_and_makes_no_call_more() -> None:
    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
        )

    without = count("", False, lambda program: run_without(["opentelemetry"], program))
    installed = count("", False, run)
    in_use = count(
        "import malamute_py.client.aio.traced, opentelemetry.sdk.trace",
        True,
        run,
    )
    assert without == installed == in_use
    assert "add" in without


@pytest.mark.moderate
def test_tracing_without_its_extra_says_how_to_install_it() -> None:
    ended = run_without(["opentelemetry"], "import malamute_py; malamute_py.Tracing()")
    assert (
        "tracing needs the package opentelemetry: pip install 'malamute-py[otel]'" in ended.stderr
    )
