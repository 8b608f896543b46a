"""The extras: a client works without any, and an error about a missing one names it.

The rule: a program runs in a process in which the packages of the extras cannot be imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.extras import EXTRAS
from tests.house.checkout import pyproject
from tests.house.test_packaging import distribution_name

OPTIONAL = pyproject()["project"]["optional-dependencies"]
DISTRIBUTIONS = {
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "re2": "google-re2",
}
"""Distribution of a package whose import name differs from it."""


def run_without(blocked: Iterable[str], program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which these packages are not installed, as far as imports can tell."""
    prelude = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {set(blocked)!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    return subprocess.run(
        [sys.executable, "-c", prelude + program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_table_names_the_extras_of_pyproject() -> None:
    for package, extra in EXTRAS.items():
        wanted = DISTRIBUTIONS.get(package, package)
        assert wanted in {distribution_name(each) for each in OPTIONAL[extra]}


@pytest.mark.slow
def test_a_client_needs_no_extra() -> None:
    with EmbeddedBroker(tcp=True) as broker:
        ended = run_without(
            EXTRAS,
            "import malamute_py as malamute\n"
            f"with malamute.connect_sync({broker.tcp_endpoint!r}) as client:\n"
            "    client.publish('trades', b'1', subject='forex.eur', fields={'a': 'b'})\n"
            "    client.publish_many('trades', [b'2', b'3'], codec='gzip')\n"
            "    sub = client.subscribe('trades', start='earliest', until='tail')\n"
            "    print([bytes(record.body) for record in sub])\n"
            "    client.send('crew', b'gate')\n"
            "    with client.inbox('crew') as inbox:\n"
            "        print(bytes(next(iter(inbox)).body))\n",
        )
    assert ended.stdout == "[b'1', b'2', b'3']\nb'gate'\n", ended.stderr


@pytest.mark.moderate
def test_the_command_line_judges_and_watches_without_the_extra_http() -> None:
    ended = run_without(
        [package for package, extra in EXTRAS.items() if extra == "http"],
        "import malamute_py.cli.check, malamute_py.cli.screens, malamute_py.cli.top\n"
        "import malamute_py.health.troubles, malamute_py.health.readiness\n",
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_dry_run_of_an_import_needs_no_extra_server(tmp_path: Path) -> None:
    """It checks settings with the broker's own code, which must not bring the broker along."""
    file = tmp_path / "definitions.json"
    file.write_text('{"streams": {"s": {"max_bytes": -1}, "t": {}}}')
    with EmbeddedBroker(tcp=True) as broker:
        ended = run_without(
            [package for package, extra in EXTRAS.items() if extra == "server"],
            f"sys.argv[1:] = ['--endpoint', {broker.tcp_endpoint!r}, 'import', {str(file)!r},"
            " '--dry-run']; from malamute_py.cli import main; sys.exit(main())",
        )
    assert ended.returncode == 1, ended.stderr
    assert "bad_setting" in ended.stdout + ended.stderr


@pytest.mark.moderate
def test_commands_are_listed_with_their_help_without_numpy() -> None:
    ended = run_without(
        ["numpy"], "import malamute_py.cli.groups, malamute_py.cli.kv, malamute_py.cli.streams\n"
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("package", "program", "advice"),
    [
        (
            "structlog",
            "import malamute_py; malamute_py.EmbeddedBroker",
            "EmbeddedBroker needs the package structlog: pip install 'malamute-py[server]'",
        ),
        (
            "typer",
            "from malamute_py.cli import main; main()",
            "error: the command line needs the package typer: pip install 'malamute-py[cli]'",
        ),
        (
            "re2",
            "sys.argv[1:] = ['broker', '--check']; from malamute_py.cli import main; main()",
            "error: this command needs the package re2: pip install 'malamute-py[server]'",
        ),
        (
            "lz4",
            "from malamute_protocol.codec import compress; compress(3, b'')",
            "codec lz4 needs the package lz4: pip install 'malamute-py[codecs]'",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_installs_it(
    package: str, program: str, advice: str
) -> None:
    ended = run_without([package], program)
    assert ended.returncode == 1
    assert advice in ended.stderr


def test_an_import_that_no_extra_brings_fails_as_it_is() -> None:
    ended = run_without(["zmq"], "import malamute_py; malamute_py.connect")
    assert re.search(r"ModuleNotFoundError: No module named 'zmq", ended.stderr)
