"""The import contracts hold, and would notice if they did not.

The rule is written down as contracts in pyproject.toml. A contract that names a module wrongly
passes for ever, so each is also shown a violation, in a copy of the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.checkout import PACKAGES, ROOT

CHECKED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
"""Lines before an import that only a type checker reads."""


def lint(sources: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=sources,
        env=os.environ | {"PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the three packages in one folder, with the contracts beside them."""
    for name, folder in PACKAGES.items():
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.moderate
def test_every_import_contract_holds(sources: Path) -> None:
    result = lint(sources)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("malamute_py/broker", "import time"),
        ("malamute_py/broker", "import threading"),
        ("malamute_py/broker", "import os"),
        ("malamute_py/broker", "import random"),
        ("malamute_py/broker", "import logging"),
        ("malamute_py/broker", "import structlog"),
        ("malamute_py/broker", "import socket"),
        ("malamute_py/broker", "import asyncio"),
        ("malamute_py/broker", "import zmq"),
        ("malamute_py/broker", "import malamute_py.client"),
        ("malamute_py/broker", "import malamute_py.journal"),
        ("malamute_py/broker", "import malamute_py.server"),
        ("malamute_py/broker", "import malamute_py.telemetry"),
        ("malamute_py/matcher", "import time"),
        ("malamute_py/matcher", "import malamute_py.broker"),
        ("malamute_py/journal", "import malamute_py.matcher"),
        ("malamute_py/journal", "import malamute_py.config"),
        ("malamute_py/journal", "import zmq"),
        ("malamute_py/client/engine", "import malamute_py.broker"),
        ("malamute_py/client/engine", "import malamute_py.server"),
        ("malamute_py/client/engine", "import malamute_py.journal"),
        ("malamute_py/client/engine", "import malamute_py.config"),
        ("malamute_py/client/session", "import time"),
        ("malamute_py/client/session", "import os"),
        ("malamute_py/client/session", "import zmq"),
        ("malamute_py/client/session", "import malamute_py.client.engine.engine"),
        ("malamute_py/client/engine", "import malamute_py.client.readers.mail"),
        ("malamute_py/client/readers", "import malamute_py.client.aio.link"),
        ("malamute_py/client/aio", "import malamute_py.client.sync.link"),
        ("malamute_py/client/sync", "import malamute_py.client.aio.link"),
        ("malamute_py/client/sync", f"{CHECKED}import malamute_py.client.aio.link"),
        ("malamute_py/server/connections", "import malamute_py.server.sockets"),
        ("malamute_py/server/journaling", "import malamute_py.server.checkpointing.process"),
        ("malamute_protocol", "import malamute_py"),
        ("malamute_protocol", "import zmq"),
        ("pyspark_malamute", "import malamute_py.server"),
        ("pyspark_malamute", "import malamute_py.embedded"),
    ],
)
def test_a_forbidden_import_is_refused(package: str, line: str, sources: Path) -> None:
    (sources / package / "planted.py").write_text(f'"""A violation."""\n{line}\n')
    result = lint(sources)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "planted" in result.stdout


@pytest.mark.slow
def test_a_circle_between_two_files_of_the_client_is_refused(sources: Path) -> None:
    room = sources / "malamute_py" / "client" / "session"
    with (room / "outgoing.py").open("a") as outgoing:
        outgoing.write(f"{CHECKED}import malamute_py.client.session.publisher\n")
    result = lint(sources)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "client: no circle between the files of a room BROKEN" in result.stdout
