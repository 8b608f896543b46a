"""Every command of the pages for newcomers does, in order, what the page says of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.examples.running import DOCS
from tests.ports import Port
from tests.waiting import WAIT_S

SECURITY = DOCS / "guides" / "security.md"
DEPLOYING = DOCS / "guides" / "deploying.md"
PORT, HTTP_PORT = "9797", "9798"
NOT_HERE = ("python3 -m venv", "pip ", "prometheus ", "promtool ")
"""Commands that install, and those of other programs, which tests/deploy runs."""


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

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = str(port)
        self.environment = {
            **{name: value for name, value in os.environ.items() if "MALAMUTE" not in name},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(folder / "home"),
        }
        self.broker: subprocess.Popen[str] | None = None

    def run(self, step: Step) -> None:
        text = step.text.replace(PORT, self.port).replace(HTTP_PORT, "0")
        if "context add" in text:
            text += f" --endpoint tcp://127.0.0.1:{self.port}"
        if text.startswith("malamute broker"):
            self.serve(text)
            return
        command = [sys.executable, "-c", text] if step.python else ["bash", "-c", text]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            check=False, timeout=WAIT_S,
        )  # fmt: skip
        shown = "\n".join(step.shown)
        refused = shown.startswith("error:")
        told = done.stderr if refused else done.stdout
        assert done.returncode == int(refused), f"{text}\n{done.stdout}{done.stderr}"
        assert not shown or told.strip() == shown, text
        if "&& cd " in text:
            self.folder /= text.rpartition("cd ")[2].strip()

    def serve(self, text: str) -> None:
        self.broker = subprocess.Popen(
            ["bash", "-c", f"exec {text}"], cwd=self.folder, env=self.environment,
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.broker.stderr is not None
        for line in self.broker.stderr:
            if '"listening"' in line:
                return
        raise AssertionError("the broker does not listen")


@contextmanager
def terminal(folder: Path, port: int) -> Iterator[Terminal]:
    made = Terminal(folder, port)
    try:
        yield made
    finally:
        if made.broker is not None:
            made.broker.send_signal(signal.SIGTERM)
            made.broker.communicate(timeout=WAIT_S)


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
