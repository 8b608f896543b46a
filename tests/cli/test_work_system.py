"""`malamute work`, `inbox` and `sub --cursor` as processes: signals, pipes, a killed worker."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_system import end, listening, run, start
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.system

MARKED = "trap 'echo told > {told}; exit 1' TERM; echo $$ > {begun}; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    process = start(
        "broker", "--listen", "tcp://127.0.0.1:0",
        "--data", str(tmp_path_factory.mktemp("broker") / "data"),
    )  # fmt: skip
    try:
        yield "--endpoint", listening(process)
    finally:
        process.terminate()
        assert end(process)[0] == 0


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


def working(service: str, at: tuple[str, str], script: str, begun: Path) -> subprocess.Popen[str]:
    """Start a worker of two threads: one runs the script for request x, the other has no more."""
    for body in ("x", "short"):
        run("request", service, body, "--reply-to", f"{service}.{body}", *at)
    script = f'body=$(cat); [ "$body" = short ] && exit; {script}'
    worker = start("work", service, "-c", "2", "--grace", "1h", *at, "--", "sh", "-c", script)
    assert worker.stdout is not None
    assert worker.stdout.readline().split("\t")[1] == "done"
    until(lambda: begun.exists() and begun.read_text().strip())
    return worker


def end_taking(worker: subprocess.Popen[str], number: int) -> None:
    """Send a first signal, and wait until the thread that has nothing has ended for it.

    Two signals at once would count as one.
    """
    before = threads(worker)
    worker.send_signal(number)
    until(lambda: threads(worker) < before)
    assert worker.poll() is None


def threads(process: subprocess.Popen[str]) -> int:
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_two_signals_stop_the_run_and_its_request_goes_back_as_no_attempt(
    at: tuple[str, str], tmp_path: Path, number: int, code: int
) -> None:
    service = f"stopped-{number}"
    begun, told = tmp_path / "begun", tmp_path / "told"
    script = MARKED.format(told=quoted(told), begun=quoted(begun))
    worker = working(service, at, script, begun)
    end_taking(worker, number)
    assert not told.exists()
    worker.send_signal(number)
    ended, out, err = end(worker)
    assert ended == code, err
    (row,) = [line.split("\t") for line in out.splitlines()]
    assert row[1] == "returned"
    assert told.exists()
    facts = json.loads(run("service", "info", service, "--json", *at).stdout)
    assert facts["waiting"] == 1
    assert facts["held"] == facts["dead"] == facts["delayed"] == 0
    assert facts["attempts"] == {"0": 1}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_what_runs_come_to_its_end_and_begins_nothing_more(
    at: tuple[str, str], tmp_path: Path, number: int, code: int
) -> None:
    service = f"drained-{number}"
    begun, go = tmp_path / "begun", tmp_path / "go"
    script = (
        f'printf %s "$body"; echo $$ > {quoted(begun)}; '
        f"while [ ! -e {quoted(go)} ]; do sleep 0.05; done"
    )
    worker = working(service, at, script, begun)
    end_taking(worker, number)
    run("request", service, "y", "--reply-to", f"{service}.y", *at)
    go.touch()
    ended, out, err = end(worker)
    assert ended == code, err
    assert [line.split("\t")[1] for line in out.splitlines()] == ["done"]
    answers = run("inbox", f"{service}.x", "--until-empty", "--bodies-only", *at)
    assert answers.stdout == "x\n"
    facts = json.loads(run("service", "info", service, "--json", *at).stdout)
    assert (facts["waiting"], facts["attempts"]) == (1, {"0": 1})


def test_a_third_signal_does_not_wait_for_the_run(at: tuple[str, str], tmp_path: Path) -> None:
    begun, told = tmp_path / "begun", tmp_path / "told"
    script = MARKED.replace("; exit 1", "").format(told=quoted(told), begun=quoted(begun))
    worker = working("stubborn", at, script, begun)
    end_taking(worker, signal.SIGTERM)
    worker.send_signal(signal.SIGTERM)
    while not told.exists():
        assert worker.poll() is None
    worker.send_signal(signal.SIGTERM)
    ended, out, err = end(worker)
    assert ended == 0, err
    assert out.split("\t")[1] == "returned"


def test_what_a_killed_worker_had_goes_to_the_next(at: tuple[str, str], tmp_path: Path) -> None:
    run("request", "killed", "x", "--reply-to", "killed.answers", *at)
    begun, told = tmp_path / "begun", tmp_path / "told"
    # It is fed when the guard knows of it, which ends it after the worker.
    script = "read body; " + MARKED.format(told=quoted(told), begun=quoted(begun))
    worker = start("work", "killed", *at, "--", "sh", "-c", script)
    while not begun.exists() or not begun.read_text().strip():
        assert worker.poll() is None
    worker.kill()
    end(worker)
    told_next = run("work", "killed", "-n", "1", *at, "--", sys.executable, "-S", "-E", "-c",
                    "import os; print(os.environ['MALAMUTE_ATTEMPTS'])")  # fmt: skip
    assert told_next.stdout.split("\t")[1] == "done"
    answers = run("inbox", "killed.answers", "--until-empty", "--bodies-only", *at)
    assert answers.stdout == "2\n\n"


def test_a_killed_worker_takes_what_it_runs_along(at: tuple[str, str], tmp_path: Path) -> None:
    run("request", "taken", "x", "--reply-to", "desk", *at)
    begun, child = tmp_path / "begun", tmp_path / "child"
    # It is fed when the guard knows of it.
    script = f"read body; sleep 1000 & echo $! > {quoted(child)}; echo $$ > {quoted(begun)}; wait"
    worker = start("work", "taken", *at, "--", "sh", "-c", script)
    while not begun.exists() or not begun.read_text().strip():
        assert worker.poll() is None
    numbers = [int(file.read_text()) for file in (begun, child)]
    worker.kill()
    end(worker)
    deadline = time.monotonic() + WAIT_S
    while any(map(alive, numbers)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(number: int) -> bool:
    """Whether a process runs; one that has ended and whose end no parent takes does not."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_the_exit_code_of_a_request_says_what_became_of_it(at: tuple[str, str]) -> None:
    script = 'read body; [ "$body" = good ] && echo fine && exit; echo "no $body" >&2; exit 1'
    worker = start("work", "judge", *at, "--", "sh", "-c", script)
    good = run("request", "judge", "good", *at)
    assert (good.returncode, good.stdout, good.stderr) == (0, "fine\n", "")
    bad = run("request", "judge", "bad", *at)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == "error: judge gave it up: no bad\n"
    worker.terminate()
    code, out, err = end(worker)
    assert (code, err) == (0, "no bad\n")
    assert [line.split("\t")[1] for line in out.splitlines()] == ["done", "failed"]
    late = run("request", "judge", "x", "--timeout", "200ms", *at)
    assert late.returncode == 4
    assert "no worker offers it" in late.stderr


def test_mail_that_was_not_printed_stays(at: tuple[str, str]) -> None:
    lines = "".join(f"{number:0100}\n" for number in range(20_000))
    run("send", "long", *at, stdin=lines)
    reader = start("inbox", "long", *at)
    assert reader.stdout is not None
    assert reader.stdout.readline() == f"{0:0100}\n"
    reader.stdout.close()
    reader.stdout = None
    assert reader.wait() == 0
    assert reader.stderr is not None
    with reader.stderr as errors:
        assert errors.read() == ""
    rest = run("inbox", "long", "--until-empty", *at).stdout
    assert rest
    assert lines.endswith(rest)


def test_ctrl_c_leaves_the_cursor_behind_what_was_printed(at: tuple[str, str]) -> None:
    run("pub", "read", *at, stdin="a\nb\n")
    reader = start("sub", "read", "--cursor", "c", *at)
    assert reader.stdout is not None
    assert [reader.stdout.readline() for _ in range(2)] == ["a\n", "b\n"]
    reader.send_signal(signal.SIGINT)
    assert end(reader)[0] == 130
    run("pub", "read", "c", *at)
    assert run("sub", "read", "--cursor", "c", "--until-tail", *at).stdout == "c\n"


def test_names_are_completed(at: tuple[str, str]) -> None:
    run("send", "completed-box", "x", *at)
    run("service", "edit", "completed-work", "--create", *at)
    run("pub", "completed-log", "x", *at)
    run("cursor", "move", "completed-log", "completed-c", "1", *at)
    for words, expected in (
        ("malamute inbox compl", "completed-box"),
        ("malamute mailbox peek compl", "completed-box"),
        ("malamute work compl", "completed-work"),
        ("malamute cursor info completed-log compl", "completed-c"),
    ):
        deadline = time.monotonic() + WAIT_S
        while True:  # A broker that does not answer at once is not waited for.
            told = run(
                MALAMUTE_ENDPOINT=at[1], _MALAMUTE_COMPLETE="complete_bash", COMP_WORDS=words,
                COMP_CWORD=str(len(words.split()) - 1),
            )  # fmt: skip
            if told.stdout or time.monotonic() > deadline:
                break
        assert told.stdout.split() == [expected]
