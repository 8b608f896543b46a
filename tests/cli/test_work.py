"""`malamute request`, `work` and `service`, as scripts use them."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_py import EmbeddedBroker
from malamute_py.cli import output, services, values
from malamute_py.cli.request import _failed
from malamute_py.cli.work import _Crew
from malamute_py.client.sync.work import SyncRequest
from tests.cli.running import Run
from tests.waiting import WAIT_MS, WAIT_S

PYTHON = sys.executable


@pytest.fixture
def service(stream: str) -> str:
    """A service name that no other test uses."""
    return stream


@contextmanager
def serving(broker: EmbeddedBroker, service: str, handle: Callable[[Any], Any]) -> Iterator[None]:
    """Run a worker beside the command under test."""
    with broker.connect_sync() as client:
        worker = client.worker(service, concurrency=4)
        worker.accepted(WAIT_MS)

        def run() -> None:
            try:
                worker.run(handle)
            except MalamuteError as error:
                failures.append(error)

        failures: list[MalamuteError] = []
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            worker.close()
            thread.join(WAIT_S)
        assert not failures


def queued(m: Run, service: str, *bodies: str, subject: str = "") -> None:
    """Requests whose replies go to the mailbox SERVICE.answers."""
    for body in bodies:
        m("request", service, body, "-s", subject, "--reply-to", f"{service}.answers").ok()


def answers(m: Run, service: str) -> list[Any]:
    return m("inbox", f"{service}.answers", "--until-empty", "--json").ok().json_lines


def python(code: str) -> tuple[str, ...]:
    """Return a command that runs some Python: quick to start, and the same on every machine."""
    return (PYTHON, "-S", "-E", "-c", code)


# --- request -------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_reply_is_printed_as_it_is(m: Run, broker: EmbeddedBroker, service: str) -> None:
    with serving(broker, service, lambda request: bytes(request.body) * 2):
        assert m("request", service, "ab").ok().bytes == b"abab"
        assert m("request", service, stdin=b"\xff\n").ok().bytes == b"\xff\n\xff\n"
        told = m("request", service, "ab", "--json").ok().json
        assert (told["body"], told["last"]) == ("abab", True)


@pytest.mark.slow
def test_requests_are_looked_at_without_being_taken(m: Run, service: str) -> None:
    queued(m, service, "a", "b", "c", subject="x")
    found = m("service", "peek", service, "--json").ok().json
    assert [one["subject"] for one in found] == ["x"] * 3
    assert {one["state"] for one in found} == {"waiting"}
    after = str(found[0]["number"])
    rows = m("service", "peek", service, "--after", after, "-n", "1").ok().rows
    assert [int(row[0]) for row in rows] == [found[1]["number"]]
    assert m("service", "info", service, "--json").ok().json["waiting"] == 3


def test_a_delayed_request_is_shown_with_its_time_and_its_priority(m: Run, service: str) -> None:
    m(
        "request",
        service,
        "a",
        "--reply-to",
        f"{service}.answers",
        "--delay",
        "2h",
        "--priority",
        "7",
    ).ok()
    (one,) = m("service", "peek", service, "--json").ok().json
    assert (one["state"], one["not_before_ms"] - one["at_ms"]) == ("delayed", 7_200_000)
    (row,) = m("service", "peek", service).ok().rows
    assert [int(cell) for cell in row[10:]] == [one["not_before_ms"], 7]


def test_several_replies_are_lines(m: Run, broker: EmbeddedBroker, service: str) -> None:
    def count(request: Any) -> Iterator[bytes]:
        for number in range(3):
            yield b"%d" % number

    with serving(broker, service, count):
        assert m("request", service, "x", "--stream").ok().lines == ["0", "1", "2"]


def test_a_failure_is_code_1_and_says_why(m: Run, broker: EmbeddedBroker, service: str) -> None:
    def fail(request: Any) -> None:
        request.fail("no such flight")

    with serving(broker, service, fail):
        told = m("request", service, "x")
    assert told.code == 1
    assert told.err.splitlines() == [f"error: {service} gave it up: no such flight"]


@pytest.mark.moderate
def test_no_answer_in_time_is_code_4_and_says_what_is_missing(m: Run, service: str) -> None:
    m("service", "edit", service, "--create").ok()
    told = m("request", service, "x", "--timeout", "100ms")
    assert told.code == 4
    assert "no worker offers it" in told.err


def test_without_workers_a_request_fails_at_once_when_it_is_to(m: Run, service: str) -> None:
    failed = m("request", service, "x", "--need-workers")
    assert failed.code == 1
    assert f"no worker offers service '{service}'" in failed.err
    assert "malamute work" in failed.err


def test_completion_without_a_reply_is_code_0(m: Run, broker: EmbeddedBroker, service: str) -> None:
    with serving(broker, service, lambda request: None):
        told = m("request", service, "x").ok()
    assert (told.out, "replied nothing" in told.err) == ("", True)


def test_a_request_can_be_left_with_a_mailbox_for_its_reply(
    m: Run, broker: EmbeddedBroker, service: str
) -> None:
    (row,) = m("request", service, "ab", "--reply-to", f"{service}.answers").ok().rows
    assert (row[0], row[2]) == (service, "synced")
    with serving(broker, service, lambda request: bytes(request.body).upper()):
        box = f"{service}.answers"
        found = m("inbox", box, "--create", "-n", "1", "--json").ok().json_lines
    assert [(each["body"], each["last"]) for each in found] == [("AB", True)]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["x", "--stream", "--no-wait"], 2, "do not"),
        (["x", "--no-wait"], 2, "--reply-to"),
        (["x", "--timeout", "soon"], 2, "is not a duration"),
        (["x", "--field", "=v"], 2, "NAME=VALUE"),
        (["x", "y"], 2, "unexpected extra argument"),
    ],
)
def test_wrong_usage_of_request_is_one_line(
    m: Run, service: str, args: list[str], code: int, says: str
) -> None:
    told = m("request", service, *args)
    assert (told.code, len(told.err.splitlines())) == (code, 1)
    assert says in told.err


def test_a_failure_that_the_broker_names_is_put_in_words() -> None:
    assert _failed("attempts") == "gave it up after too many tries"
    assert _failed("elsewise") == "will not answer (elsewise)"


# --- work ----------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_request_that_a_command_cannot_read_fails_alone(
    m: Run, broker: EmbeddedBroker, service: str
) -> None:
    """A list as body ended each `malamute work` of its service, and starved the others."""
    with broker.connect_sync() as client:
        client.submit(service, [b"a", b"b"], reply_to=f"{service}.answers")
        client.submit(service, b"good", reply_to=f"{service}.answers")
        client.submit(service, [b"one"], reply_to=f"{service}.answers")
    m("work", service, "-n", "3", "--", *python("print(input())"))
    assert {answer["body"] for answer in answers(m, service)} >= {"good\n", "one\n"}
    with broker.connect_sync() as client:
        facts = client.service_info(service)
        assert (facts.waiting, facts.dead) == (0, 1)


@pytest.mark.moderate
def test_a_command_gets_the_body_and_its_output_is_the_reply(m: Run, service: str) -> None:
    queued(m, service, "one", "two")
    code = "import sys; sys.stdout.write(sys.stdin.read().upper())"
    rows = m("work", service, "-n", "2", "--", *python(code)).ok().rows
    assert [row[1] for row in rows] == ["done", "done"]
    assert sorted(each["body"] for each in answers(m, service)) == ["ONE", "TWO"]


@pytest.mark.moderate
def test_the_environment_tells_about_the_request(m: Run, service: str) -> None:
    m("request", service, "x", "-s", "a.b", "-f", "my-field=v", "--timeout", "1h",
      "--reply-to", f"{service}.answers", "--key", "k1").ok()  # fmt: skip
    code = (
        "import os, json; print(json.dumps({name: value for name, value in os.environ.items()"
        " if name.startswith('MALAMUTE_')}))"
    )
    m("work", service, "-n", "1", "--", *python(code)).ok()
    (reply,) = answers(m, service)
    found = json.loads(reply["body"])
    assert found["MALAMUTE_SERVICE"] == service
    assert found["MALAMUTE_SUBJECT"] == "a.b"
    assert found["MALAMUTE_FIELD_MY_FIELD"] == "v"
    assert found["MALAMUTE_REPLY_TO"] == f"{service}.answers"
    assert found["MALAMUTE_ATTEMPTS"] == "1"
    assert found["MALAMUTE_KEY"] == "k1/0"
    assert found["MALAMUTE_NUMBER"].isdigit()
    assert found["MALAMUTE_DEADLINE"].endswith("Z")
    assert reply["about"] == {"key": "k1", "row": 0}


@pytest.mark.moderate
def test_another_exit_code_fails_it_with_the_last_words(m: Run, service: str) -> None:
    queued(m, service, "x")
    code = "import sys; sys.stderr.write('looking\\nno such flight\\n'); sys.exit(3)"
    (row,) = m("work", service, "-n", "1", "--", *python(code)).ok().rows
    assert (row[1], row[3]) == ("failed", "no such flight")
    (dead,) = m("mailbox", "peek", f"{service}.dead", "--json").ok().json_lines
    assert (dead["body"], dead["why"]) == ("x", "failed: no such flight")
    (notice,) = answers(m, service)
    assert notice["why"].startswith("failed")


@pytest.mark.moderate
def test_without_words_the_exit_code_is_the_reason(m: Run, service: str) -> None:
    queued(m, service, "x", "y")
    code = (
        "import os, signal, sys; sys.stdin.read() == 'x' and sys.exit(9);"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    rows = m("work", service, "-n", "2", "--", *python(code)).ok().rows
    assert [row[3] for row in rows] == ["exit code 9", "ended by SIGKILL"]


@pytest.mark.moderate
def test_code_75_gives_it_back(m: Run, service: str) -> None:
    queued(m, service, "x")
    code = (
        "import os, sys; attempts = os.environ['MALAMUTE_ATTEMPTS'];"
        " attempts == '1' and sys.exit(75); print('at', attempts)"
    )
    args = ("work", service, "-n", "2", "--delay", "1ms", "--json", "--")
    told = m(*args, *python(code)).ok().json_lines
    assert [each["outcome"] for each in told] == ["returned", "done"]
    assert [each["body"] for each in answers(m, service)] == ["at 2\n"]


@pytest.mark.moderate
def test_each_line_can_be_a_reply(m: Run, service: str) -> None:
    queued(m, service, "x")
    m(
        "work", service, "-n", "1", "--lines", "--", *python("print('a\\nb'); print('c', end='')")
    ).ok()
    assert [(each["body"], each["last"]) for each in answers(m, service)] == [
        ("a", False), ("b", False), ("c", True),
    ]  # fmt: skip


@pytest.mark.moderate
def test_a_line_that_is_no_reply_fails_its_request_and_the_worker_goes_on(
    m: Run, broker: EmbeddedBroker, service: str
) -> None:
    queued(m, service, "long", "short")
    code = (
        "import sys; print('x' * (9 << 20) if sys.stdin.read() == 'long' else 'fine'); print('end')"
    )
    rows = m("work", service, "-n", "2", "--lines", "--", *python(code)).ok().rows
    assert sorted(row[1] for row in rows) == ["done", "failed"]
    replies = [each["body"] for each in answers(m, service) if "why" not in each]
    assert replies == ["fine", "end"]
    (dead,) = m("mailbox", "peek", f"{service}.dead", "--json").ok().json_lines
    assert "a record of 9437184 bytes" in dead["why"]


@pytest.mark.moderate
def test_a_line_that_the_broker_refuses_fails_its_request_and_the_worker_goes_on(
    m: Run, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = SyncRequest.reply

    def refused(self: SyncRequest, body: bytes, **how: Any) -> Any:
        if body == b"a":
            raise BrokerRefused("forbidden", "not into that mailbox")
        return reply(self, body, **how)

    monkeypatch.setattr(SyncRequest, "reply", refused)
    queued(m, service, "x", "y")
    code = "import sys; print('a' if sys.stdin.read() == 'x' else 'b'); print('c')"
    rows = m("work", service, "-n", "2", "--lines", "--", *python(code)).ok().rows
    assert sorted(row[1] for row in rows) == ["done", "failed"]


@pytest.mark.moderate
def test_a_run_that_takes_too_long_is_ended_and_has_failed(m: Run, service: str) -> None:
    queued(m, service, "x")
    args = ("work", service, "-n", "1", "--timeout", "100ms", "--grace", "10ms", "--")
    (row,) = m(*args, *python("import time; time.sleep(600)")).ok().rows
    assert (row[1], row[3]) == ("failed", "it did not end within 100 ms")


@pytest.mark.slow
def test_a_request_that_is_cancelled_ends_its_run(
    m: Run, broker: EmbeddedBroker, service: str, tmp_path: Path
) -> None:
    begun, told = tmp_path / "begun", tmp_path / "told"
    code = (
        "import pathlib, signal, sys, time\n"
        "def told(*_):\n"
        f"    pathlib.Path({str(told)!r}).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(600)"
    )
    with broker.connect_sync() as client:
        client.submit(service, b"x", key=b"k", reply_to=f"{service}.answers")
        cancelled: list[int] = []

        def cancel() -> None:
            deadline = time.monotonic() + WAIT_S
            while not begun.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            cancelled.append(client.cancel(service, b"k"))

        thread = threading.Thread(target=cancel)
        thread.start()
        (row,) = m("work", service, "-n", "1", "--", *python(code)).ok().rows
        thread.join(WAIT_S)
    assert cancelled == [1]
    assert row[1] == "gone"
    assert told.exists()


def test_a_command_that_does_not_read_and_leaves_children_is_no_trap(m: Run, service: str) -> None:
    queued(m, service, "x" * 300_000)
    script = f"{shlex.quote(PYTHON)} -S -E -c 'import time; time.sleep(60)' & echo done"
    (row,) = m("work", service, "-n", "1", "--", "sh", "-c", script).ok().rows
    assert row[1] == "done"
    assert [each["body"] for each in answers(m, service)] == ["done\n"]


@pytest.mark.moderate
def test_a_command_that_closes_its_outputs_gets_the_rest_of_its_input(
    m: Run, service: str, tmp_path: Path
) -> None:
    queued(m, service, "x" * 300_000)
    file = tmp_path / "got"
    script = f"exec >&- 2>&-; sleep 0.2; cat > {shlex.quote(str(file))}"
    args = ("work", service, "-n", "1", "--timeout", "10s", "--grace", "10ms", "--")
    (row,) = m(*args, "sh", "-c", script).ok().rows
    assert row[1] == "done"
    assert file.stat().st_size == 300_000


@pytest.mark.moderate
def test_only_requests_of_the_pattern_are_taken(m: Run, service: str) -> None:
    queued(m, service, "no", subject="b.x")
    queued(m, service, "yes", subject="a.x")
    args = ("work", service, "-n", "1", "--pattern", "a.*", "--")
    m(*args, *python("import sys; print(sys.stdin.read())")).ok()
    assert [each["body"] for each in answers(m, service)] == ["yes\n"]


def test_a_command_that_is_not_there_is_said_before_anything_is_taken(m: Run, service: str) -> None:
    told = m("work", service, "--", "no-such-command-at-all")
    assert told.code == 2
    assert "there is no command" in told.err
    assert m("service", "ls", service).ok().lines == []


# --- service -------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_service_is_made_shown_edited_and_removed(m: Run, service: str) -> None:
    m("service", "edit", service, "--create", "--lease", "30s", "--attempts", "5",
      "--dead-letters", f"{service}.graves").ok()  # fmt: skip
    shown = m("service", "edit", service, "--backoff", "2s", "--json").ok().json
    settings = shown["settings"]
    assert (settings["lease_ms"], settings["attempts_max"]) == (30_000, 5)
    assert (settings["backoff_ms"], settings["dead_letters"]) == (2000, f"{service}.graves")
    queued(m, service, "x")
    (row,) = m("service", "ls", service).ok().rows
    assert row[:4] == [service, "1", "0", "0"]
    assert ["waiting", "1"] in m("service", "info", service).ok().rows
    assert m("service", "rm", service).code == 2
    assert m("service", "rm", service, "--yes").ok().lines == [f"removed {service} and 1 request"]
    assert m("service", "info", service).code == 1


def test_the_progress_of_a_removal_counts_requests_that_are_delayed(
    m: Run, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(title: str, total: int, ask: Callable[[], Any], left: Callable[[], int]) -> Any:
        assert (total, left()) == (1, 1)
        return ask()

    monkeypatch.setattr(services, "watched", watched)
    m("request", service, "x", "--reply-to", f"{service}.desk", "--delay", "1h").ok()
    m("service", "rm", service, "--yes").ok()


def test_who_has_what_in_hand_is_shown(m: Run, broker: EmbeddedBroker, service: str) -> None:
    queued(m, service, "x")
    with broker.connect_sync() as client, client.worker(service) as worker:
        assert worker.next(WAIT_MS) is not None
        shown = m("service", "info", service, "--json").ok().json
        (holder,) = shown["workers"]
        assert (shown["held"], holder["held"], holder["attempts"]) == (1, 1, 1)
        rows = m("service", "info", service).ok().rows
        assert [row[1] for row in rows if row[0] == "worker"] == [holder["holder"]]


@pytest.mark.moderate
def test_dead_letters_go_back_into_the_queue(m: Run, service: str) -> None:
    queued(m, service, "x", "y", "z")
    m("work", service, "-n", "3", "--", *python("raise SystemExit(1)")).ok()
    dead = m("mailbox", "peek", f"{service}.dead", "--json").ok().json_lines
    told = m("service", "requeue", service, str(dead[0]["number"]), "--json").ok().json
    assert told["requeued"] == 1
    told = m("service", "requeue", service, str(dead[1]["number"]), "99999").ok()
    assert "1 request back" in told.out
    assert "1 of these numbers stay" in told.out
    assert m("service", "requeue", service).ok().lines == [
        f"1 request back in the queue of {service}"
    ]
    assert "no dead letters" in m("service", "requeue", service).ok().out
    shown = m("service", "info", service, "--json").ok().json
    assert shown["waiting"] + shown["delayed"] == 3


@pytest.mark.moderate
def test_a_requeue_where_the_mailbox_has_letters_of_others_alone_is_no_fault(
    m: Run, service: str
) -> None:
    other = f"{service}-other"
    for name in (service, other):
        m("service", "edit", name, "--create", "--dead-letters", f"{service}.shared").ok()
    queued(m, other, "x")
    m("work", other, "-n", "1", "--", *python("raise SystemExit(1)")).ok()
    assert "no dead letters" in m("service", "requeue", service).ok().out
    by_number = m("service", "requeue", service, "77")
    assert (by_number.code, "no such dead letter or request" in by_number.err) == (1, True)
    assert "1 request back" in m("service", "requeue", other).ok().out


@pytest.mark.moderate
def test_a_misspelt_service_is_named_right(m: Run, service: str) -> None:
    m("service", "edit", service, "--create").ok()
    for args in (("info",), ("requeue",), ("edit", "--lease", "1s"), ("rm", "--yes")):
        told = m("service", args[0], f"{service}x", *args[1:])
        assert told.code == 1
        assert f"did you mean {service}?" in told.err


def test_a_request_that_comes_again_while_its_run_is_noted_is_another_run() -> None:
    class Asked:
        """A request."""

        number = 7

    crew = object.__new__(_Crew)
    crew._lock = threading.Lock()
    crew._running = {}
    notes: list[str] = []
    requests: Any = [Asked(), Asked()]

    def run(request: Any, began: float) -> tuple[str, str]:
        if request is requests[0]:
            crew._handle(requests[1])
        return "done", ""

    def note(request: Any, *told: Any) -> None:
        notes.append("first" if request is requests[0] else "again")

    crew._run_traced = run  # type: ignore[method-assign]
    crew._note = note  # type: ignore[assignment, method-assign]
    crew._handle(requests[0])
    assert notes == ["again", "first"]
    assert not crew._running


@pytest.mark.parametrize("linked", [True, False])
def test_no_run_is_renewed_one_by_one_while_the_broker_is_away(linked: bool) -> None:
    renewed: list[int] = []

    class Asked:
        """A request whose renewal would be waited for."""

        def renew(self, timeout_ms: int) -> None:
            renewed.append(timeout_ms)

    crew: Any = object.__new__(_Crew)
    crew._lock = threading.Lock()
    crew._client = SimpleNamespace(linked=linked)
    crew._running = {Asked(): 0.0, Asked(): 0.0}
    crew._ask()
    assert len(renewed) == (2 if linked else 0)


@pytest.mark.moderate
def test_ages_are_counted_by_the_clock_of_the_broker(
    m: Run, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(m, service, "one")
    m("send", service, "one").ok()
    m("pub", service, "one").ok()
    m("sub", service, "--cursor", "etl", "--count", "1").ok()
    ahead = SimpleNamespace(time_ns=lambda: time.time_ns() + (50 << 50))  # by 651 days
    monkeypatch.setattr(values, "time", ahead)
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    for command in (
        ("service", "ls", service), ("service", "info", service), ("service", "peek", service),
        ("mailbox", "ls", service), ("mailbox", "info", service), ("cursor", "ls", service),
        ("client", "ls"),
    ):  # fmt: skip
        shown = m(*command).ok().out
        assert re.search(r"[0-9] m?s\b", shown), shown
        assert not re.search(r"[0-9] d\b", shown), shown
