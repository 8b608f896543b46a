"""Every command of the pages for newcomers does, in order, what the page says of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from malamute_py import EmbeddedBroker, connect_sync
from tests.examples.running import DOCS
from tests.ports import Port
from tests.waiting import WAIT_S

CONSOLE = DOCS / "console.md"
OPERATING = DOCS / "guides" / "operating.md"
TROUBLESHOOTING = DOCS / "guides" / "troubleshooting.md"
SECURITY = DOCS / "guides" / "security.md"
DEPLOYING = DOCS / "guides" / "deploying.md"
PORT, HTTP_PORT = "9797", "9798"
NOT_HERE = ("python3 -m venv", "pip ", "prometheus ", "promtool ")
"""Commands that install, and those of other programs, which tests/deploy runs."""
TEST_BROKER = "tcp://test.example:9797"
"""Endpoint of the second broker of a page."""
EXIT_CODES = {"error:": 1, "MALAMUTE CRITICAL": 2}
"""Beginning of an output that is shown -> the exit code of its command; others: 0."""


class Step(NamedTuple):
    """A command with its further lines of input, or a program; and the output that is shown."""

    text: str
    shown: list[str]
    python: bool = False


def steps(page: Path) -> Iterator[Step]:
    for language, block in re.findall(
        r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        if language == "py":
            yield Step(block, [], python=True)
            continue
        if language == "nginx":
            continue
        assert language == "console", "each block of the page is run"
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, _, rest = command.partition("\n")
            if first.startswith(NOT_HERE):
                continue
            if "<<" in first:
                yield Step(command, [])
            else:
                yield Step(first, rest.splitlines())


class Terminal:
    """A shell in a directory of its own, with the command `malamute` of this environment."""

    def __init__(self, folder: Path, port: int, test_broker: str = "") -> None:
        self.folder = folder
        self.port = str(port)
        self.test_broker = test_broker
        self.environment = {
            **{name: value for name, value in os.environ.items() if "MALAMUTE" not in name},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(folder / "home"),
        }
        self.broker: subprocess.Popen[str] | None = None
        self.beside: subprocess.Popen[str] | None = None
        """An HTTP side of its own."""

    def run(self, step: Step) -> None:
        text = step.text.replace(TEST_BROKER, self.test_broker)
        text = text.replace(PORT, self.port).replace(HTTP_PORT, "0")
        if "context add" in text and "--endpoint" not in text:
            text += f" --endpoint tcp://127.0.0.1:{self.port}"
        if text.startswith("malamute broker"):
            self.stop()
            self.serve(text)
            return
        if text.startswith("malamute http"):
            self.serve_http(text)
            return
        if text.startswith("malamute journal"):
            self.stop()
        command = [sys.executable, "-c", text] if step.python else ["bash", "-c", text]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            check=False, timeout=WAIT_S,
        )  # fmt: skip
        shown = "\n".join(step.shown)
        code = next((EXIT_CODES[each] for each in EXIT_CODES if shown.startswith(each)), 0)
        told = done.stderr if shown.startswith("error:") else done.stdout
        assert done.returncode == code, f"{text}\n{done.stdout}{done.stderr}"
        assert not shown or told.strip() == shown, text
        if "&& cd " in text:
            self.folder /= text.rpartition("cd ")[2].strip()

    def serve(self, text: str) -> None:
        self.broker = self.started(text)
        wanted = '"http_listening"' if "http.bind" in text else '"listening"'
        line = self.said(self.broker, wanted)
        if "http.bind" in text:
            assert_console(json.loads(line)["url"])

    def serve_http(self, text: str) -> None:
        self.beside = self.started(f"{text} --endpoint tcp://127.0.0.1:{self.port}")
        line = self.said(self.beside, "serving ")
        assert_console(line.partition("serving ")[2].partition("/metrics")[0])

    def started(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"exec {text}"], cwd=self.folder, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def said(self, process: subprocess.Popen[str], wanted: str) -> str:
        """Return the line of a process that has these words."""
        assert process.stdout is not None
        for line in process.stdout:
            if wanted in line:
                return line
        raise AssertionError(f"it did not say {wanted}")

    def stop(self) -> None:
        """End what runs, as an operator does."""
        ended = [each for each in (self.beside, self.broker) if each is not None]
        for process in ended:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WAIT_S)
        assert self.broker is None or self.broker.returncode == 0
        self.broker = self.beside = None


def assert_console(url: str) -> None:
    """Fail unless a person finds the console's first page there."""
    with urllib.request.urlopen(f"{url}/", timeout=WAIT_S) as page:
        assert page.status == 200
        assert "Log in" in page.read().decode()


@contextmanager
def terminal(folder: Path, port: int, test_broker: str = "") -> Iterator[Terminal]:
    made = Terminal(folder, port, test_broker)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.system
@pytest.mark.parametrize(("page", "least"), [(SECURITY, 20), (DEPLOYING, 15)])
def test_a_newcomer_has_two_users_with_keys_by_the_page_alone(
    page: Path, least: int, tmp_path: Path
) -> None:
    with Port() as port, terminal(tmp_path, port.number) as shell:
        ran = 0
        for step in steps(page):
            shell.run(step)
            ran += 1
        assert ran > least
        assert shell.broker is not None
        assert shell.broker.poll() is None


@pytest.mark.system
def test_an_operator_watches_keeps_copies_and_repairs_by_the_page_alone(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tcp=True) as test_broker,
        Port() as port,
        terminal(tmp_path, port.number, test_broker.tcp_endpoint) as shell,
    ):
        shell.environment["MALAMUTE_LISTEN"] = json.dumps([port.endpoint])
        ran = 0
        for step in steps(OPERATING):
            shell.run(step)
            ran += 1
        assert ran > 20
        with test_broker.connect_sync() as client:
            assert client.stream_info("trades").records == 0
            assert client.cursor("trades", "etl").info().next == 0
        with connect_sync(port.endpoint) as client:
            assert client.stream_info("trades").records == 7_120
            assert client.stream_info("trades-again").records == 7_120
            assert client.stream_info("trades").settings["max_age_ms"] == 7 * 86_400_000
        assert (tmp_path / "new-data").is_dir()


@pytest.mark.system
def test_the_console_is_where_its_page_says(tmp_path: Path) -> None:
    with Port() as port, terminal(tmp_path, port.number) as shell:
        shell.environment["MALAMUTE_LISTEN"] = json.dumps([port.endpoint])
        for step in steps(CONSOLE):
            shell.run(step)
        assert shell.broker is not None
        assert shell.beside is not None


@pytest.mark.system
def test_the_commands_of_the_troubleshooting_page_run(tmp_path: Path) -> None:
    commands = set(re.findall(r"`(malamute [^`]+)`", TROUBLESHOOTING.read_text()))
    assert len(commands) > 4
    meant = {"DIR": "data", "HOST": "127.0.0.1", "NAME": "trades", "VERB": "read"}
    (tmp_path / "users.toml").touch(mode=0o600)
    (tmp_path / "malamute.toml").write_text('[authentication]\nusers_file = "users.toml"\n')
    with Port() as port, terminal(tmp_path, port.number) as shell:
        shell.serve(f"malamute broker --data data --listen {port.endpoint}")
        shell.run(Step("malamute context add here", []))
        shell.run(Step("malamute pub trades 1", []))
        meant["PORT"] = str(port.number)
        # The one that looks at the files of a stopped broker comes last.
        for command in sorted(commands, key=lambda each: "journal" in each):
            shell.run(Step(re.sub(r"[A-Z]+", lambda word: meant[word[0]], command), []))
