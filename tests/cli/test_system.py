"""The command as processes: the broker, its refusals, signals and pipes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.waiting import WAIT_MS, WAIT_S

pytestmark = pytest.mark.system

PROGRAM = (sys.executable, "-m", "malamute_py.cli", "--connect-timeout", f"{WAIT_MS}ms")


def run(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args], input=stdin, capture_output=True, text=True, timeout=WAIT_S,
        env={**os.environ, **env}, check=False,
    )  # fmt: skip


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def listening(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        entry = json.loads(line)
        if entry["event"] == "listening":
            endpoint: str = entry["endpoints"][0]
            return endpoint
    raise AssertionError("it ended without listening")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broker") / "data"


@pytest.fixture(scope="module")
def endpoint(data: Path) -> Iterator[str]:
    process = start("broker", "--listen", "tcp://127.0.0.1:0", "--data", str(data))
    try:
        yield listening(process)
    finally:
        process.terminate()
        code, out, _ = end(process)
        assert (code, out) == (0, "")


def test_it_takes_records_and_gives_them_back(endpoint: str) -> None:
    assert run("pub", "s", "--endpoint", endpoint, stdin="a\nb\n").stdout == "s\t2\tsynced\n"
    told = run("sub", "s", "--until-tail", MALAMUTE_ENDPOINT=endpoint)
    assert (told.returncode, told.stdout, told.stderr) == (0, "a\nb\n", "")


def test_a_second_broker_on_the_directory_is_refused(endpoint: str, data: Path) -> None:
    told = run("broker", "--listen", "tcp://127.0.0.1:0", "--data", str(data))
    assert told.returncode == 1
    (line,) = told.stderr.splitlines()
    assert str(data) in line
    assert "one directory serves one broker" in line
    assert run("journal", "verify", str(data)).returncode == 1


def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        told = run("broker", "--listen", at, "--data", str(tmp_path / "data"))
    assert told.returncode == 1
    assert at in told.stderr.splitlines()[-1]
    assert "in use" in told.stderr.splitlines()[-1]


def test_a_public_address_needs_words_or_authentication() -> None:
    told = run("broker", "--listen", "tcp://0.0.0.0:0", "--memory")
    assert told.returncode == 2
    assert "I understand that anyone can read and write" in told.stderr
    assert run("broker", "--listen", "tcp://0.0.0.0:0", "--check").returncode == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--set", "journal.rign_bytes=1"], "did you mean journal.ring_bytes?"),
        (["--set", "journal.ring_bytes=lots"], "journal.ring_bytes"),
        (["--set", "nonsense"], "KEY=VALUE"),
        (["--config", "no-such-file.toml"], "no-such-file.toml"),
        (["--memory", "--data", "x"], "exclude each other"),
        (["--listen", "127.0.0.1:9797"], "is not an endpoint"),
        (["--json"], "--check"),
    ],
)
def test_a_wrong_setting_is_one_line_and_code_2(args: list[str], says: str) -> None:
    told = run("broker", "--check", *args) if args != ["--json"] else run("broker", *args)
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert says in line


def test_settings_come_from_file_variable_and_option_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('data_directory = "f"\n[links]\nlinks_max = 1\nbacklog = 1\nqueries_max = 1\n')
    told = run(
        "broker", "--check", "--json", "--config", str(file), "--set", "links.backlog=3",
        MALAMUTE_LINKS_BACKLOG="2", MALAMUTE_LINKS_QUERIES_MAX="2",
    )  # fmt: skip
    links = json.loads(told.stdout)["links"]
    assert (links["links_max"], links["queries_max"], links["backlog"]) == (1, 2, 3)


def test_ctrl_c_ends_a_subscriber_with_130_and_the_broker_with_0(endpoint: str) -> None:
    run("stream", "create", "quiet", "--endpoint", endpoint)
    subscriber = start("sub", "quiet", "--endpoint", endpoint)
    assert subscriber.stdout is not None
    run("pub", "quiet", "x", "--endpoint", endpoint)
    # It may have subscribed after the first record: publish until one arrives.
    os.set_blocking(subscriber.stdout.fileno(), False)
    while not _ready(subscriber.stdout):
        run("pub", "quiet", "x", "--endpoint", endpoint)
    os.set_blocking(subscriber.stdout.fileno(), True)
    subscriber.send_signal(signal.SIGINT)
    code, out, err = end(subscriber)
    assert (code, err) == (130, "")
    assert set(out.split()) <= {"x"}

    broker = start("broker", "--memory", "--listen", "tcp://127.0.0.1:0")
    listening(broker)
    broker.send_signal(signal.SIGINT)
    assert end(broker)[0] == 0


def _ready(stream: IO[str]) -> bool:
    import select

    return bool(select.select([stream], [], [], 0.05)[0])


def test_a_closed_pipe_is_quiet(endpoint: str) -> None:
    run("pub", "long", "--endpoint", endpoint,
        stdin="".join(f"{number:0100}\n" for number in range(20_000)))  # fmt: skip
    reader = start("sub", "long", "--until-tail", "--endpoint", endpoint)
    assert reader.stdout is not None
    assert reader.stdout.readline() == f"{0:0100}\n"
    reader.stdout.close()
    reader.stdout = None
    assert reader.wait(WAIT_S) == 0
    assert reader.stderr is not None
    with reader.stderr as errors:
        assert errors.read() == ""


def run_closed(closed: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *PROGRAM, *args],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_as_the_null_device(
    endpoint: str, tmp_path: Path, closed: str
) -> None:
    at = ("--endpoint", endpoint)
    done = run_closed(closed, "pub", "closed", "word", *at)
    assert (done.returncode, done.stderr) == (0, "")
    # Without an argument it reads lines: there are none.
    done = run_closed(closed, "pub", "closed", *at)
    assert (done.returncode, done.stderr) == (0, "")
    # What went wrong is no output.
    done = run_closed(closed, "stream", "info", "nope", *at)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_publisher_that_is_interrupted_keeps_what_it_has_read(endpoint: str) -> None:
    read, write = os.pipe()
    publisher = subprocess.Popen(
        [*PROGRAM, "pub", "typed", "--endpoint", endpoint], stdin=read,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(read)
    os.write(write, b"one\ntwo\n")
    while run("stream", "ls", "typed", "--endpoint", endpoint).stdout.split("\t")[1:2] != ["2"]:
        pass
    publisher.send_signal(signal.SIGINT)
    code, out, err = end(publisher)
    os.close(write)
    assert (code, out, err) == (130, "typed\t2\tsynced\n", "")


def test_a_replay_that_is_interrupted_tells_what_it_wrote(endpoint: str, tmp_path: Path) -> None:
    lines = [json.dumps({"body": "x", "client_time": at}) for at in (0, 1, 9_999_999)]
    run("pub", "far", "--json-lines", "--endpoint", endpoint, stdin="\n".join(lines))
    file = tmp_path / "out.txt"
    replay = start("replay", "far", "--by", "client", "--pace", "real", "--output", str(file),
                   "--endpoint", endpoint)  # fmt: skip
    while not file.exists() or file.read_text().count("\n") < 2:
        assert replay.poll() is None
    replay.send_signal(signal.SIGINT)
    code, _, err = end(replay)
    assert code == 130
    assert "2 records of 2 in the range (offsets 0 to 1)" in err
    assert "stopped before offset 2" in err


def test_a_copy_whose_broker_is_gone_ends_and_tells_what_is_certain(tmp_path: Path) -> None:
    broker = start("broker", "--listen", "tcp://127.0.0.1:0", "--data", str(tmp_path / "d"))
    at = ("--endpoint", listening(broker))
    lines = [json.dumps({"body": "x", "client_time": at}) for at in (0, 1, 9_999_999)]
    run("pub", "far", "--json-lines", *at, stdin="\n".join(lines))
    copy = start("replay", "far", "--by", "client", "--pace", "real", "--to-stream", "near", *at)
    while run("stream", "ls", "near", *at).stdout.split("\t")[1:2] != ["2"]:
        assert copy.poll() is None
    # On disk, too: its confirm left the broker before these records did.
    assert run("sub", "near", "--start", "0", "-n", "2", "--durable", *at).stdout == "x\nx\n"
    broker.kill()
    end(broker)
    copy.send_signal(signal.SIGINT)
    code, _, err = end(copy)
    assert code == 130
    assert "2 records of 2 in the range" in err


def test_a_lost_broker_ends_a_question_with_3(tmp_path: Path) -> None:
    told = run("stream", "ls", "--endpoint", "tcp://127.0.0.1:1", "--connect-timeout", "100ms")
    assert told.returncode == 3
    (line,) = told.stderr.splitlines()
    assert "malamute broker" in line


def test_names_of_streams_are_completed(endpoint: str) -> None:
    run("stream", "create", "completed", "--endpoint", endpoint)
    deadline = time.monotonic() + WAIT_S
    while True:
        told = run(
            MALAMUTE_ENDPOINT=endpoint, _MALAMUTE_COMPLETE="complete_bash",
            COMP_WORDS="malamute sub compl", COMP_CWORD="2",
        )  # fmt: skip
        if told.stdout or time.monotonic() > deadline:
            break  # A broker that does not answer at once is not waited for.
    assert told.stdout.split() == ["completed"]
    silent = run(
        MALAMUTE_ENDPOINT="tcp://127.0.0.1:1", _MALAMUTE_COMPLETE="complete_bash",
        COMP_WORDS="malamute sub compl", COMP_CWORD="2",
    )  # fmt: skip
    assert (silent.stdout.strip(), silent.stderr) == ("", "")


def test_a_watch_of_keys_goes_on_when_the_broker_is_back(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    broker = start("broker", "--listen", "tcp://127.0.0.1:0", "--data", data)
    at = ("--endpoint", listening(broker))
    run("stream", "create", "s", "--keys", "--ring-bytes", "16MiB", *at)
    run("kv", "put", "s", "a", "1", *at)
    watching = start("kv", "watch", "s", "--json", *at)
    try:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["key"] == "a"
        assert json.loads(watching.stdout.readline()) == {"complete": True}
        broker.terminate()
        end(broker)
        broker = start("broker", "--listen", at[1], "--data", data)
        listening(broker)
        run("kv", "put", "s", "b", "2", *at)
        assert json.loads(watching.stdout.readline())["key"] == "b"
    finally:
        watching.terminate()
        end(watching)
        broker.terminate()
        end(broker)
