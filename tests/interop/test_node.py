"""A second implementation, in JavaScript and from SPEC.md alone, agrees with ours.

It runs the golden vectors, and talks to a running broker over tcp. Needs Node 20 and npm;
the packages are installed from package-lock.json on first use, nothing is compiled.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from malamute_py.embedded import EmbeddedBroker
from tests.waiting import WAIT_S

NODE = Path(__file__).parent / "node"
TYPE_THIS = f"npm ci --prefix {NODE.relative_to(Path(__file__).parents[2])}"

pytestmark = pytest.mark.system


@pytest.fixture(scope="session")
def node() -> str:
    """Path of node, with the packages in place."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed: apt-get install nodejs npm")
    with (NODE / "package-lock.json").open() as lock:
        # Test workers are processes of their own: one installs, the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (NODE / "node_modules" / "zeromq").is_dir():
            installed = subprocess.run(
                [npm, "ci"],
                cwd=NODE,
                capture_output=True,
                text=True,
                timeout=5 * WAIT_S,
                check=False,
            )
            if installed.returncode:
                pytest.skip(f"`{TYPE_THIS}` failed: {installed.stderr.strip()[-300:]}")
    return node


def run(*command: str) -> dict[str, Any]:
    """Run a program that prints one line of JSON."""
    done = subprocess.run(
        command, cwd=NODE, capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_node_reads_every_vector_as_the_spec_says(node: str) -> None:
    told = run(node, "vectors.mjs")
    vectors = Path(__file__).parents[2] / "protocol" / "vectors"
    counts = json.loads((vectors / "index.json").read_text())["counts"]
    assert told["skipped"] == counts["patterns"]
    assert told["checked"] == sum(counts.values()) - counts["patterns"]
    assert len(told["accepted"]) <= 3


def test_node_publishes_confirmed_and_reads_back_what_its_pattern_selects(
    node: str, tmp_path: Path
) -> None:
    with EmbeddedBroker(tmp_path / "data", tcp=True) as broker:
        told = run(node, "talk.mjs", broker.tcp_endpoint, "interop")
        assert told["welcome"]["version"] == 1
        assert [c["tracker"] for c in told["confirms"]] == [1, 2, 3]
        assert [c["offset"] for c in told["confirms"]] == [0, 10, 20]
        assert {c["level"] for c in told["confirms"]} == {3}
        odd = [(10 * batch + n, f"{batch}/{n}") for batch in range(3) for n in range(1, 10, 2)]
        found = [(r["offset"], bytes.fromhex(r["parts"][0]).decode()) for r in told["records"]]
        assert found == odd
        assert {tuple(r["keys"]) for r in told["records"]} == {("node.odd",)}
        assert told["covered"] == 30
        assert told["ended"]["code"] == "cancelled"
        with broker.connect_sync() as client, client.subscribe("interop", start="earliest") as all_:
            records = [next(all_) for _ in range(30)]
        assert [record.offset for record in records] == list(range(30))
        assert [record.body for record in records] == [
            b"%d/%d" % (batch, n) for batch in range(3) for n in range(10)
        ]
        assert records[0].subject == "node.even.deep"


def test_node_sends_and_reads_mail_asks_and_serves_and_takes_a_step_once(
    node: str, tmp_path: Path
) -> None:
    with EmbeddedBroker(tmp_path / "data", tcp=True) as broker:
        told = run(node, "queues.mjs", broker.tcp_endpoint)
        assert told["welcome"]["features"] & 15 == 15
        assert told["welcome"]["identity"] == "node"

        def texts(rows: list[dict[str, Any]]) -> list[str]:
            return [bytes.fromhex(row["parts"][0]).decode() for row in rows]

        # Mail: one number after the other, accepted once, gone with its acknowledgement.
        first = told["sent"]["offset"]
        assert (told["sent"]["duplicate"], told["again"]["duplicate"]) == (False, True)
        assert told["again"]["offset"] == first
        assert texts(told["mail"]) == ["one", "two", "three"]
        assert [row["offset"] for row in told["mail"]] == [first, first + 1, first + 2]
        assert {(row["said"]["sender"], row["said"]["attempts"]) for row in told["mail"]} == {
            ("node", 1)
        }
        assert told["inbox"]["stream"] == ""
        assert told["acknowledged"]["level"] == 3
        assert (told["late"]["command"], told["late"]["code"]) == (43, "not_held")

        # The service: each request handed out once, each reply names the request it answers.
        assert texts(told["work"]) == ["abc", "def"]
        assert {(row["said"]["reply_to"], row["said"]["attempts"]) for row in told["work"]} == {
            ("node", 1)
        }
        assert {row["said"]["key"] for row in told["work"]} == {b"request 1".hex()}
        assert texts(told["replies"]) == ["cba", "fed"]
        about = [run for row in told["replies"][:1] for run in row["said"]["about"]]
        assert about == [[b"request 1".hex(), 0, 2]]
        assert told["replies"][0]["said"]["last"] is True

        # The step: all of it, once, and nothing of the one that was refused.
        assert (told["taken"]["duplicate"], told["repeated"]["duplicate"]) == (False, True)
        assert (told["conflict"]["command"], told["conflict"]["code"]) == (66, "conflict")
        assert texts(told["members"]) == ["x", "y", "z"]
        assert (told["group"]["next"], told["group"]["lag"]) == (3, 0)
        with broker.connect_sync() as client:
            for stream, bodies in (
                ("node.out", [b"X", b"Y"]),
                ("node.audit", [b"took x and y"]),
            ):
                records = client.subscribe(stream, start="earliest", until="tail")
                assert [record.body for record in records] == bodies
            assert client.cursor_info("node.in", "reader").next == 2
            # The inbox was closed before it acknowledged what the step had sent to it.
            assert [message.bytes for message in client.peek("desk")] == [len(b"stepped")]
            assert client.mailbox_info("node").messages == 0
            facts = client.service_info("reverse")
            assert (facts.waiting, facts.held, facts.dead) == (0, 0, 0)
