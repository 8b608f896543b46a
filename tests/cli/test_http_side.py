"""`malamute http`, as a person runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from malamute_py import EmbeddedBroker
from tests.cli.running import Run
from tests.http.running import until
from tests.waiting import WAIT_S


def test_an_address_that_others_reach_needs_a_token(m: Run) -> None:
    told = m("http", "--bind", "0.0.0.0:0")
    assert told.code == 2
    assert "set http.token_file" in told.err


def test_a_token_that_others_can_read_is_refused(m: Run, tmp_path: object) -> None:
    path = f"{tmp_path}/token"
    with open(path, "w") as file:
        file.write(32 * "a")
    os.chmod(path, 0o644)
    told = m("http", "--bind", "0.0.0.0:0", "--token-file", path)
    assert told.code == 2
    assert f"chmod 600 {path}" in told.err


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_any_broker_is_served_until_a_signal_comes(
    broker: EmbeddedBroker, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "malamute_py.cli", "http", "--bind", "127.0.0.1:0",
         "--endpoint", broker.tcp_endpoint],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().split()[1].removesuffix("/metrics,")

        def answers() -> bool:
            with urllib.request.urlopen(f"{url}/metrics") as page:
                return b"malamute_up 1.0" in page.read()

        until(answers)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
