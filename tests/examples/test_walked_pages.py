"""Every command of the pages for newcomers does, in order, what the page says of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from malamute_py import EmbeddedBroker, connect_sync
from malamute_py.config import load
from tests.examples.running import DOCS, PAGES
from tests.house.checkout import ROOT
from tests.ports import Port
from tests.waiting import WAIT_MS, WAIT_S

CONSOLE = DOCS / "console.md"
OPERATING = DOCS / "guides" / "operating.md"
GUIDES = DOCS / "guides"
TROUBLESHOOTING = DOCS / "guides" / "troubleshooting.md"
SECURITY = DOCS / "guides" / "security.md"
DEPLOYING = DOCS / "guides" / "deploying.md"
PORT, HTTP_PORT = "9797", "9798"
NOT_HERE = ("python3 -m venv", ". ../.venv", "pip ", "prometheus ", "promtool ")
"""Commands that install, and those of other programs, which tests/deploy runs."""
TEST_BROKER = "tcp://test.example:9797"
"""Endpoint of the second broker of a page."""
EXIT_CODES = {"error:": 1, "MALAMUTE CRITICAL": 2}
"""Beginning of an output that is shown -> the exit code of its command; others: 0."""


RUN = {
    "console": {
        "console.md", "start.md", *(f"guides/{name}.md" for name in (
            "deploying", "groups", "keys", "operating", "security", "services", "tracing", "tuning",
        )),
    },
    "py": {"guides/security.md"},
    "sh": {"guides/deploying.md", "guides/spark-cluster.md", "guides/spark-weather.md"},
    "nginx": {"console.md"},
    "": {"guides/operating.md"},
}  # fmt: skip
"""Language of a block -> the pages whose blocks are run: here, by tests/spark and tests/demo. What
nginx is told, and a line that a broker prints, are not."""


class Step(NamedTuple):
    """A command with its further lines of input, or a program; and the output that is shown."""

    text: str
    shown: list[str]
    python: bool = False


def commands(page: str) -> list[Step]:
    """Return the commands of a guide, whose programs tests/examples/test_pages.py runs."""
    text = "".join(
        re.findall(r"^```console\n(.*?)^```", (GUIDES / page).read_text(), re.MULTILINE | re.DOTALL)
    )
    return [
        Step(line.removeprefix("$ "), [])
        for line in text.splitlines()
        if not line.removeprefix("$ ").startswith(NOT_HERE)
    ]


def steps(page: Path) -> Iterator[Step]:
    for language, block in re.findall(
        r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        if language == "py":
            yield Step(block, [], python=True)
            continue
        if language in ("nginx", "sh"):  # sh: of programs that are not here, see below
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

    def run(self, step: Step) -> str:
        """Run a step; returns what it printed, of a broker or HTTP side nothing."""
        text = step.text.replace(TEST_BROKER, self.test_broker)
        text = text.replace(PORT, self.port).replace(HTTP_PORT, "0")
        if "context add" in text and "--endpoint" not in text:
            text += f" --endpoint tcp://127.0.0.1:{self.port}"
        if text.startswith("malamute broker"):
            self.stop()
            self.serve(text)
            return ""
        if text.startswith("malamute http"):
            self.serve_http(text)
            return ""
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
        return done.stdout

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


def test_no_page_has_commands_that_no_test_runs() -> None:
    found: dict[str, set[str]] = {}
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", (DOCS / page).read_text(), re.MULTILINE)
        for language in fences[::2]:
            found.setdefault(language.partition(" ")[0], set()).add(page)
    others = {language for language in found if language.startswith("{")} | {"python"}
    assert {language: found[language] for language in found.keys() - others} == RUN


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
    (tmp_path / "users.toml").write_text("# none yet\n")
    (tmp_path / "malamute.toml").write_text('[authentication]\nusers_file = "users.toml"\n')
    with Port() as port, terminal(tmp_path, port.number) as shell:
        shell.serve(f"malamute broker --data data --listen {port.endpoint}")
        shell.run(Step("malamute context add here", []))
        shell.run(Step("malamute pub trades 1", []))
        meant["PORT"] = str(port.number)
        # The one that looks at the files of a stopped broker comes last.
        for command in sorted(commands, key=lambda each: "journal" in each):
            shell.run(Step(re.sub(r"[A-Z]+", lambda word: meant[word[0]], command), []))


@pytest.mark.system
def test_the_commands_of_the_guide_on_tuning_measure_a_broker(tmp_path: Path) -> None:
    with EmbeddedBroker(tcp=True) as broker, terminal(tmp_path, 0) as shell:
        shell.environment["MALAMUTE_ENDPOINT"] = broker.tcp_endpoint
        ran = commands("tuning.md")
        assert {step.text.split()[1] for step in ran} == {"rtt", "bench"}
        for step in ran:
            # As few as there may be: the figures are of no use here.
            shell.run(Step(f"{step.text} --count 2000", []))
        with broker.connect_sync() as client:
            assert [each.name for each in client.list_streams("malamute-bench")] == []


@pytest.mark.system
def test_the_commands_of_the_guide_on_groups_run(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tcp=True) as broker,
        broker.connect_sync() as client,
        terminal(tmp_path, 0) as shell,
    ):
        shell.environment["MALAMUTE_ENDPOINT"] = broker.tcp_endpoint
        client.publish_many("jobs", [b"job"] * 5_000)
        with client.group("jobs", "workers", ack="manual", start="earliest") as member:
            held = member.next_batch(timeout_ms=WAIT_MS)
            assert held is not None
            member.fail(held, "no number")
        assert client.group_info("jobs", "workers").dead
        for step in commands("groups.md"):
            shell.run(step)
            if step.text.startswith("malamute group requeue"):
                facts = client.group_info("jobs", "workers")
                assert (facts.dead, facts.settings["attempts_max"]) == (0, 5)
                assert facts.settings["lease_ms"] == 60_000
        assert client.group_info("jobs", "workers").next == 4_711


@pytest.mark.system
def test_the_commands_of_the_guide_on_services_run(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tcp=True) as broker,
        broker.connect_sync(identity="web") as client,
        terminal(tmp_path, 0) as shell,
    ):
        shell.environment["MALAMUTE_ENDPOINT"] = broker.tcp_endpoint
        client.submit("reports", b"2026-11")
        with client.worker("reports") as worker:
            request = worker.next(timeout_ms=WAIT_MS)
            assert request is not None
            request.fail("no template")
        client.submit("reports", b"2026-12")
        ran = commands("services.md")
        assert len(ran) == 3
        for step in ran:
            shell.run(step)
        facts = client.service_info("reports")
        assert (facts.dead, facts.waiting) == (0, 2)


@pytest.mark.system
def test_the_commands_of_the_guide_on_keys_keep_a_value(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tcp=True) as broker,
        broker.connect_sync() as client,
        terminal(tmp_path, 0) as shell,
    ):
        shell.environment["MALAMUTE_ENDPOINT"] = broker.tcp_endpoint
        *ran, watching = commands("keys.md")
        assert len(ran) == 4
        for step in ran:
            shell.run(step)
        found = client.kv("settings").get("colour")
        assert found is not None
        assert found.value == b"blue"
        shell.beside = shell.started(watching.text)
        assert "colour" in shell.said(shell.beside, "blue")


@pytest.mark.system
def test_a_traced_command_of_the_guide_publishes(tmp_path: Path) -> None:
    """The exporter of the page is not installed here: spans go to standard error."""
    exported, traced = commands("tracing.md")
    with (
        EmbeddedBroker(tcp=True) as broker,
        broker.connect_sync() as client,
        terminal(tmp_path, 0) as shell,
    ):
        shell.environment |= {
            "MALAMUTE_ENDPOINT": broker.tcp_endpoint, "OTEL_TRACES_EXPORTER": "console",
        }  # fmt: skip
        shell.run(Step(f"{exported.text} && {traced.text}", []))
        (record,) = client.subscribe("trades", "forex.*", start="earliest", until="tail")
        assert record.body == b"101.5"
        assert "traceparent" in record.properties


@pytest.mark.system
def test_the_quick_start_shows_what_was_published_and_answered(tmp_path: Path) -> None:
    broker, *ran = commands("../start.md")
    assert len(ran) == 5
    with Port() as port, terminal(tmp_path, port.number) as shell:
        shell.environment |= {
            "MALAMUTE_LISTEN": json.dumps([port.endpoint]), "MALAMUTE_ENDPOINT": port.endpoint,
        }  # fmt: skip
        shell.run(broker)
        printed: list[str] = []
        for step in ran:
            if step.text.startswith("malamute work"):
                shell.beside = shell.started(step.text)
            else:
                printed.append(shell.run(step))
        assert '{"price": 101.5}' in printed[2]
        assert '{"price": 1.27}' in printed[2]
        assert "WHO IS THERE?" in printed[-1]


@pytest.mark.system
def test_the_first_five_minutes_of_the_readme_show_a_result(tmp_path: Path) -> None:
    part = (ROOT / "README.md").read_text().partition("## Five minutes to a first result")[2]
    block = re.search(r"(?:^    .+\n)+", part, re.MULTILINE)
    assert block is not None
    activate, *lines = textwrap.dedent(block[0]).splitlines()
    assert activate == ". .venv/bin/activate"
    with EmbeddedBroker(tcp=True) as broker, terminal(tmp_path, 0) as shell:
        shell.environment["MALAMUTE_ENDPOINT"] = broker.tcp_endpoint
        printed = shell.run(Step("set -e\n" + "\n".join(lines), []))
    for wanted in ('{"price": 101.5}', '{"price": 1.27}', "gate 12", "WHO IS THERE?"):
        assert wanted in printed


STUB = """#!/bin/sh
# A program that is not here: notes its words, and fails where a file that they name is missing.
echo "${0##*/} $*" >> "$CALLS"
for word in "$@"; do
    case $word in
        --from-file=*) test -s "${word#*=}" || exit 1 ;;
        ./malamute) test -f malamute/Chart.yaml || exit 1 ;;
        image) test -f image/Containerfile || exit 1 ;;
        up) test -f compose.yml || exit 1 ;;
    esac
done
"""
ELSEWHERE = ("systemctl", "groupadd", "chgrp", "podman", "docker", "kubectl", "helm")
"""Programs of the second half of the page, of which a machine of tests has none."""


@pytest.mark.system
def test_the_commands_to_run_a_broker_for_good_name_files_that_are_there(tmp_path: Path) -> None:
    """Programs that are not here are stubs, and /etc is a directory of the test."""
    half = DEPLOYING.read_text().partition("## systemd")[2]
    blocks = re.findall(r"^```sh\n(.*?)^```", half, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    stubs, calls = tmp_path / "stubs", tmp_path / "calls"
    stubs.mkdir()
    for name in ELSEWHERE:
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    with terminal(tmp_path, 0) as shell:
        shell.environment["CALLS"] = str(calls)
        shell.environment["PATH"] = f"{stubs}:{shell.environment['PATH']}"
        for number, block in enumerate(blocks):
            shell.folder = tmp_path / str(number)
            shell.folder.mkdir()
            kept = [
                line for line in block.splitlines() if not line.startswith((*NOT_HERE, "ln -s "))
            ]
            text = "\n".join(["set -e", *kept])
            shell.run(Step(text.replace("/etc/", f"{tmp_path}/etc/"), []))
    assert {line.split()[0] for line in calls.read_text().splitlines()} == set(ELSEWHERE)
    etc = tmp_path / "etc/malamute"
    config = load(etc / "malamute.toml")
    assert config.authentication.mechanism == "curve"
    assert config.authentication.server_key_file == str(etc / "broker.key")
    assert "ann" in (etc / "users.toml").read_text()
    assert not (etc / "malamute.service").exists()
    unit = (tmp_path / "etc/systemd/system/malamute.service").read_text()
    program = re.search(r"^ln -s \S+ (\S+)$", blocks[0], re.MULTILINE)
    assert program
    assert f"ExecStart={program[1]} broker" in unit
