"""Values as typed, help, and what loads when."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from click import Context
from typer.main import get_command

from malamute_py import EmbeddedBroker
from malamute_py.cli import complete, output, values
from malamute_py.cli.app import app
from malamute_py.cli.commands import COMMANDS
from malamute_py.cli.failures import CommandFailed
from malamute_py.cli.records import printable
from malamute_py.cli.subscribe import tell_notice
from malamute_py.client.session.subscription import (
    BegunNotice,
    GapNotice,
    ModeNotice,
    RewoundNotice,
)
from malamute_py.client.sync import client
from malamute_py.units import in_unit_of
from tests.cli.running import Run, as_user, broker_of, run_cli
from tests.waiting import until

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", 10 * HOUR_MS),
        ("now-1h", 9 * HOUR_MS),
        ("now+1h30m", 11 * HOUR_MS + HOUR_MS // 2),
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01T01:00:01.5+01:00", 1500),
        ("1700000000000", 1_700_000_000_000),
        ("@5", 5),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert values.time_ms(text, 10 * HOUR_MS) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 500),
        ("10s", 10_000),
        ("1.5h", 5_400_000),
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
    ],
)
def test_durations(text: str, expected: int) -> None:
    assert values.duration_ms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("4096", 4096), ("64MiB", 64 << 20), ("1GiB", 1 << 30), ("2.5kB", 2500), ("1g", 1 << 30)),
        ("9007199254740993", (1 << 53) + 1),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert values.size_bytes(text) == expected


@pytest.mark.parametrize("unit", ["GiB", "d", ".5d", "h9s"])
def test_numbers_beyond_any_bound_are_refused_as_the_others_are(unit: str) -> None:
    """Python's own OverflowError ended a start, and a page of the console."""
    for name in ("ring_bytes", "max_age_ms"):
        with pytest.raises(ValueError, match="is not a"):
            in_unit_of(name, "9" * 400 + unit)


@pytest.mark.parametrize("text", ["", "5", "h", "5x", "-5s", "5s!", "now"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(CommandFailed, match="is not a duration"):
        values.duration_ms(text)


@pytest.mark.parametrize("text", ["", "soon", "2013-13-01", "now-", "99999999999999999999"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(CommandFailed):
        values.time_ms(text)


def test_bodies_cannot_steer_a_terminal() -> None:
    shown = printable(b"\x1b[31mred\x07\n\xff" + "\u202e\x9b".encode())
    assert shown == "\\x1b[31mred\\x07\\n\\xff\\u202e\\x9b"
    assert printable(b"x" * 5000).endswith(" … 904 more bytes")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_agrees_with_the_list(name: str) -> None:
    told = run_cli(name, "--help").ok()
    assert " ".join(COMMANDS[name].help.split()) in " ".join(told.out.split())


def commands_below(found: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (words, command) of each command that runs something."""
    inner = getattr(found, "commands", None)
    if inner is None:
        yield path, found
        return
    for name, one in inner.items():
        yield from commands_below(one, (*path, name))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_of_options_that_it_has_within_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root: Any = get_command(app)
    top = root.get_command(Context(root), name)
    for command, found in commands_below(top, (name,)):
        lines = run_cli(*command, "--help").ok().lines
        assert not [line for line in lines if len(line) > 80], command
        assert "  Examples:" in lines, command
        known = {
            option
            for parameter in found.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for line in itertools.takewhile(str.strip, lines[lines.index("  Examples:") + 1 :]):
            assert re.match("    .*malamute ", line), (command, line)
            own = re.search(f"malamute {' '.join(command)} ([^|;&]*?)(?: -- | [|;&]|$)", line)
            given = re.findall("(?<= )--[a-z-]+", f" {own[1]}" if own else "")
            assert known.issuperset(given), (command, line)


def test_a_group_alone_shows_its_help_with_code_2() -> None:
    told = run_cli("stream")
    assert told.code == 2
    assert "peek" in told.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_written_for_the_shell_and_answers_it(
    shell: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            app([], prog_name="malamute", standalone_mode=True)
        assert ended.value.code == 0
        return capfd.readouterr().out

    script = told(_MALAMUTE_COMPLETE=f"source_{shell}")
    assert f"complete_{shell}" in script
    offered = told(
        _MALAMUTE_COMPLETE=f"complete_{shell}", COMP_WORDS="malamute journal s", COMP_CWORD="2",
        _TYPER_COMPLETE_ARGS="malamute journal s", _TYPER_COMPLETE_FISH_ACTION="get-args",
    )  # fmt: skip
    assert "stat" in offered
    assert "verify" not in offered


def _completed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str
) -> list[str]:
    monkeypatch.setenv("_MALAMUTE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        app([], prog_name="malamute", standalone_mode=True)
    return capfd.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("grant ann manage_s", ["manage_streams"]),
        ("revoke ann tr", ["trim"]),
        ("who-can rep", ["replay"]),
        ("deploy sys", ["systemd"]),
    ],
)
def test_words_of_a_fixed_list_are_completed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, words: list[str]
) -> None:
    assert _completed(monkeypatch, capfd, f"malamute {line}") == words


def test_numbers_of_links_are_completed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], broker: EmbeddedBroker
) -> None:
    monkeypatch.setenv("MALAMUTE_ENDPOINT", broker.tcp_endpoint)
    with broker.connect_sync() as client:
        there = {str(each.link) for each in client.list_links()}
        # A broker that does not answer at once offers nothing: a busy machine asks again.
        until(lambda: there <= {*_completed(monkeypatch, capfd, "malamute client kick ")})


@pytest.mark.moderate
def test_names_are_completed_for_a_user_whose_password_is_in_a_variable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with broker_of({"ann": {"admin": True}}) as broker:
        as_user(broker, "ann")("stream", "create", "orders").ok()
        monkeypatch.setenv("MALAMUTE_ENDPOINT", broker.tcp_endpoint)
        monkeypatch.setenv("MALAMUTE_USER", "ann")
        assert _completed(monkeypatch, capfd, "malamute sub or") == []
        monkeypatch.setenv("MALAMUTE_PASSWORD", "pw")
        # A broker that does not answer at once offers nothing: a busy machine asks again.
        until(lambda: _completed(monkeypatch, capfd, "malamute sub or") == ["orders"])


def test_a_completion_asks_for_no_more_names_than_it_offers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    @contextmanager
    def connected(*args: Any, **options: Any) -> Iterator[Any]:
        def listed(*names: str, limit: int) -> list[Any]:
            asked.append((names, limit))
            return [SimpleNamespace(name="orders", cursor="order", group="ordinary")]

        kinds = ("streams", "mailboxes", "services", "cursors", "groups")
        asked.append(options["call_timeout_ms"])
        yield SimpleNamespace(**{f"list_{kind}": listed for kind in kinds})

    monkeypatch.setattr(client, "connect_sync", connected)
    ctx: Any = SimpleNamespace(meta={}, params={"stream": "s"})
    for offered in (complete.streams, complete.mailboxes, complete.services):
        assert offered(ctx, "ord") == ["orders"]
        assert asked[-2:] == [complete._WAIT_MS, (("ord",), complete._OFFERED_MAX)]
    for offered in (complete.cursors, complete.groups):
        assert len(offered(ctx, "ord")) == 1
        assert asked[-2:] == [complete._WAIT_MS, (("s", "ord"), complete._OFFERED_MAX)]


def test_notices_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    tell_notice(RewoundNotice(120, 100, 3))
    tell_notice(RewoundNotice(2, 0, 3))
    tell_notice(GapNotice(5, 6, "trimmed"))
    tell_notice(ModeNotice(True, 9))
    tell_notice(BegunNotice(7))
    rewound, other, gap, begun = capsys.readouterr().err.splitlines()
    assert "ends at 100, before offset 120" in rewound
    assert "offset 2 is not in the log" in other
    assert "or it is an earlier stream's; going on from 0" in other
    assert gap.startswith("gap: offsets 5 to 5 (1 record) are gone: ")
    assert begun == "the oldest record that is left has offset 7: others were removed"


@pytest.mark.parametrize("width", [20, 50, 200])
def test_a_table_never_cuts_a_figure_however_narrow_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    columns = [output.Column("stream", "Stream"), output.Column("records", "Records", right=True),
               output.Column("at", "Oldest", whole=True, spare=True),
               output.Column("bytes", "Bytes", right=True)]  # fmt: skip
    row = ("a-stream-of-a-long-name", 123_456_789, "2026-01-31 10:00:00", "1,023.9 MiB")
    output.listing(columns, [row, row], as_json=False, empty="")
    shown = capsys.readouterr().out
    assert shown.count("123456789") == shown.count("1,023.9 MiB") == 2
    assert ("2026-01-31 10:00:00" in shown) == (width == 200)
    assert ("not shown for want of room: Oldest" in shown) == (width < 200)


@pytest.mark.moderate
def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom malamute_py.cli import main\n"
        "sys.argv[1:] = ['--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in told.stderr.split()}
    assert not loaded & {
        "zmq", "numpy", "rich", "msgspec", "asyncio", "structlog", "re2", "textual",
    }  # fmt: skip


def test_info_shows_sizes_in_units_to_a_person_and_numbers_to_a_program(
    m: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = m("info", "--json").ok().json
    assert told["bounds"]["unread_bytes"] == 512 << 20
    assert ["bounds.unread_bytes", str(512 << 20)] in m("info").ok().rows
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    shown = m("info").ok().out
    told_of = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    assert ["unread bytes", "512.0 MiB"] in told_of
    sizes = [words[1] for words in told_of if "bytes" in words[0].split() and len(words) > 1]
    assert len(sizes) > 10
    assert all(re.fullmatch(r"[0-9.]+ (B|[KMGT]iB)", size) for size in sizes), sizes


@pytest.mark.parametrize(
    ("span_ms", "duration", "age"),
    [
        (0, "0 ms", "0 ms"),
        (59_949, "59.9 s", "59.9 s"),
        (90_999, "1 m 30 s", "1 m 30 s"),
        (3_605_000, "1 h 5 s", "1 h 5 s"),
        (5_405_000, "1 h 30 m 5 s", "1 h 30 m"),
        (86_400_000 * 7, "7 d", "7 d"),
        (93_784_000, "1 d 2 h 3 m", "1 d 2 h"),
    ],
)
def test_a_duration_is_told_by_its_largest_units(span_ms: int, duration: str, age: str) -> None:
    assert (values.duration_text(span_ms), values.age_text(span_ms)) == (duration, age)


def test_a_time_is_told_to_the_millisecond_however_far_away_it_is() -> None:
    for year in (1, 1969, 2026, 2112, 2500, 9999):
        begin_ms = values.time_ms(f"{year:04}-06-30T12:34:56Z")
        for at_ms in range(begin_ms, begin_ms + 1000, 7):
            assert values.time_ms(values.iso_text(at_ms)) == at_ms
