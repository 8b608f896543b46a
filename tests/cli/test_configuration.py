"""`malamute config`: problems with their places, and the origin of each value."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import zmq

from malamute_py.config import load
from malamute_py.config_check import MASK, examine, lines_of
from malamute_py.sections import ConfigError
from malamute_py.server import Server
from malamute_py.server.authentication.credentials import hash_password, read_server_key
from tests.cli.running import Run, run_cli
from tests.server.fakes import Lines

EXAMPLE = Path(__file__).parents[2] / "deploy" / "malamute.toml"

WRONG = """\
# A file with a problem on nearly every line.
listn = ["x"]
[journal]
ring_bytes = "4 GiB"
segment_bytes = "64 Mb/s"
full = "maybe"
[permissions.ann]
reed = ["a"]
[permissions."b.c"]
read = [
  "x", 3,
]
[quotas.identities.web]
strems = 3
[authentication]
mechanism = "curve"
"""


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    file = tmp_path / "wrong.toml"
    file.write_text(WRONG)
    return file


@pytest.mark.moderate
def test_all_problems_are_told_at_once_each_with_its_line(wrong: Path) -> None:
    outcome = run_cli("config", "check", str(wrong), "--set", "log.level=loud",
                      env={"MALAMUTE_LOOP_TURN_US": "5MiB"})  # fmt: skip
    assert outcome.code == 2
    told = [line.removeprefix(f"{wrong}:").split(": ")[:2] for line in outcome.lines]
    assert told == [
        ["2", "listn"],
        ["5", "journal.segment_bytes"],
        ["6", "journal.full"],
        ["8", "permissions.ann"],
        ["10", "permissions.b.c.read[1]"],
        ["MALAMUTE_LOOP_TURN_US", "loop.turn_us"],
        ["command line", "log.level"],
        ["13", "quotas.identities.web.strems"],
        ["15", "authentication.clients"],
        ["15", "authentication.server_key_file"],
    ]


USERS = """\
[users.ann]
password = "nonsense"
public_key = "short"
colour = "red"

[users.bob]
identities = ["web"]

[users.eve]
identities = ["tom-{n}"]

[users."no name"]

[permissions.ann]
read = [1]
wright = ["x"]
deny = { write = "x", read = ["y"] }

[permissions.web]

[permissions.tim.deny]
raed = ["x"]

[quotas.ann]
strems = 1
streams = -1

[colours.bogus]
"""


@pytest.mark.moderate
def test_all_problems_of_a_users_file_are_told_at_once_and_each_once(tmp_path: Path) -> None:
    file, users = tmp_path / "malamute.toml", tmp_path / "users.toml"
    file.write_text(
        '[authentication]\nmechanism = "plain"\nusers_file = "users.toml"\n'
        f'[authentication.users]\ntom = "{hash_password("x")}"\n'
        "[permissions.web]\n[quotas.identities.web]\nstrems = 1\n"
    )
    users.write_text(USERS)
    users.chmod(0o600)
    checked = run_cli("config", "check", str(file))
    assert checked.code == 2
    told = [line.removeprefix(f"{tmp_path}/").split(": ")[:2] for line in checked.lines]
    assert sorted(told) == sorted(
        [
            ["malamute.toml:7", "quotas.identities.web.strems"],
            ["users.toml:2", "users.ann.password"],
            ["users.toml:3", "users.ann.public_key"],
            ["users.toml:4", "users.ann.colour"],
            ["users.toml:7", "users.bob.identities"],
            ["users.toml:10", "users.eve.identities"],
            ["users.toml:12", "users.no name"],
            ["users.toml:15", "permissions.ann.read"],
            ["users.toml:16", "permissions.ann.wright"],
            ["users.toml:17", "permissions.ann.deny.write"],
            ["users.toml:19", "permissions.web"],
            ["users.toml:22", "permissions.tim.deny.raed"],
            ["users.toml:25", "quotas.ann.strems"],
            ["users.toml:26", "quotas.ann.streams"],
            ["users.toml:28", "colours"],
        ]
    )
    assert "there is no such key: raed; did you mean read?" in checked.out
    # The others that read the configuration tell the same.
    for command in (
        ["config", "show", str(file)],
        ["broker", "--check", "--config", str(file)],
        ["broker", "--config", str(file)],
    ):
        ended = run_cli(*command)
        assert (ended.code, ended.err.splitlines()) == (2, checked.lines), command
    # The values are right, and only a start would fail: they are shown.
    shown = run_cli("config", "show", str(file), "--set", "links.linger=1")
    assert (shown.code, shown.rows) == (2, [])
    file.write_text(file.read_text().partition("[permissions.web]")[0])
    shown = run_cli("config", "show", str(file), "--changed")
    assert shown.code == 2
    assert f"{users}:2: users.ann.password" in shown.err
    assert ["authentication.mechanism", "plain", f"{file}:2"] in shown.rows
    users.write_text("[users.ann\n")
    assert run_cli("config", "check", str(file)).lines[-1].startswith(f"{users}:1: not valid TOML")
    users.unlink()
    assert f"there is no {users}" in run_cli("config", "check", str(file)).lines[-1]


@pytest.mark.moderate
def test_no_problem_of_an_entry_hides_another(tmp_path: Path) -> None:
    """A misspelt quota of a namespace ended the command in a traceback."""
    file = tmp_path / "malamute.toml"
    file.write_text(
        '[authentication]\nmechanism = "plain"\n[namespaces.acme]\nprefix = 4\nusers = "x"\n'
        'default_stream = { max_age = "7d", max_age_ms = "x" }\n'
        "quotas = { stream = 100, links = -1 }\n"
        '[quotas.identities.bob]\nstream = 5\nstreams = "x"\nmail_bytes = "y"\n'
        '[permissions.bob]\nread = "orders"\nreed = ["x"]\n'
    )
    checked = run_cli("config", "check", str(file))
    assert checked.code == 2
    told = {tuple(line.removeprefix(f"{file}:").split(": ")[:2]) for line in checked.lines}
    assert told >= {
        ("4", "namespaces.acme.prefix"), ("5", "namespaces.acme.users"),
        ("7", "namespaces.acme.quotas.stream"), ("7", "namespaces.acme.quotas.links"),
        ("9", "quotas.identities.bob.stream"), ("10", "quotas.identities.bob.streams"),
        ("11", "quotas.identities.bob.mail_bytes"),
        ("13", "permissions.bob.read"), ("14", "permissions.bob"),
    }  # fmt: skip
    assert any("max_age_ms" in line for line in checked.lines)


def test_problems_are_json_for_a_program(wrong: Path) -> None:
    outcome = run_cli("config", "check", str(wrong), "--json")
    assert outcome.code == 2
    assert outcome.json["good"] is False
    assert outcome.json["problems"][0] == {
        "place": f"{wrong}:2",
        "key": "listn",
        "why": "there is no such key; did you mean listen?",
    }


def test_a_good_configuration_is_said_to_be_good() -> None:
    assert run_cli("config", "check", str(EXAMPLE)).ok().lines == [f"{EXAMPLE} is good"]
    assert run_cli("config", "check", str(EXAMPLE), "--json").ok().json["good"] is True


@pytest.mark.moderate
def test_a_namespace_without_users_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(
        f'[authentication]\nmechanism = "plain"\nusers = {{"acme.ann" = "{hash_password("a")}"}}\n'
        "[namespaces.acmee]\nquotas = {streams = 1}\n"
    )
    why = "no user's name fits acmee.*"
    first, second, last = run_cli("config", "check", str(file)).ok().lines
    assert first == f"{file}:4: namespaces.acmee: warning: {why}"
    assert second.startswith(f"{file}:4: namespaces.acmee.users: warning: user acme.ann is in no")
    assert last == f"{file} is good"
    told = run_cli("config", "check", str(file), "--json").ok().json
    assert (told["good"], told["problems"], len(told["warnings"])) == (True, [], 2)
    assert told["warnings"][0] == {"place": f"{file}:4", "key": "namespaces.acmee", "why": why}


@pytest.mark.moderate
def test_a_pattern_that_fits_no_name_is_a_warning(tmp_path: Path) -> None:
    file, users = tmp_path / "malamute.toml", tmp_path / "users.toml"
    password = hash_password("a")
    file.write_text(
        '[authentication]\nmechanism = "plain"\nusers_file = "users.toml"\n'
        f'users = {{bob = "{password}"}}\n[permissions.bob]\nread = ["trades.>"]\n'
    )
    users.write_text(
        f'[users.ann]\npassword = "{password}"\n[permissions.ann]\nread = ["*", "a.*.b"]\n'
        '[permissions.ann.deny]\nread = ["salaries.#"]\n'
        '[permissions."bob.eve"]\nread = ["fares.#"]\n'  # The configuration has one for bob.
    )
    users.chmod(0o600)
    told = run_cli("config", "check", str(file), "--json").ok().json
    assert (told["good"], told["problems"]) == (True, [])
    places = {(each["place"], each["key"]) for each in told["warnings"]}
    assert places == {
        (f"{file}:5", "permissions.bob.read"),
        (str(users), "permissions.ann.deny.read"),
        (str(users), "permissions.bob.eve.read"),
    }
    assert all("fits no name" in each["why"] for each in told["warnings"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = " + "[" * 100_000, "nested too deep"),
        ('[streams.default]\nring_bytes = "99999999999TiB"\n', "ring_bytes is beyond 63 bits"),
    ],
)
def test_what_is_far_too_much_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(text)
    outcome = run_cli("config", "check", str(file))
    assert outcome.code == 2
    assert why in outcome.out


@pytest.mark.moderate
def test_files_that_a_configuration_names_are_looked_for_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "users.toml").write_text("# none yet\n")
    (folder / "users.toml").chmod(0o600)
    (folder / "token").write_text("a-token-of-thirty-two-characters")
    (folder / "token").chmod(0o600)
    file = folder / "malamute.toml"
    file.write_text(
        'data_directory = "data"\n[authentication]\nmechanism = "plain"\n'
        'users_file = "users.toml"\n[http]\nbind = "127.0.0.1:0"\ntoken_file = "token"\n'
    )
    warned, good = run_cli("config", "check", str(file)).ok().lines
    assert "authentication.users_file: warning: nobody may connect" in warned
    assert good == f"{file} is good"
    assert run_cli("broker", "--check", "--config", str(file)).code == 0
    shown = {row[0]: row[1] for row in run_cli("config", "show", str(file)).ok().rows}
    assert shown["authentication.users_file"] == str(folder / "users.toml")
    assert shown["data_directory"] == "data"
    absent = run_cli("config", "check", str(file), "--set", "authentication.users_file=users.toml")
    assert "there is no users.toml" in absent.out
    run_cli("user", "add", "ann", "--new-key", str(folder / "ann.key"), "--config", str(file)).ok()
    assert "[users.ann]" in (folder / "users.toml").read_text()


def test_a_variable_that_sets_nothing_is_named_once_with_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALAMUTE_LIMITS_MAX_LINKS", "5")
    file = tmp_path / "malamute.toml"
    file.write_text("")
    [line] = run_cli("config", "check", str(file)).lines
    assert line == (
        "MALAMUTE_LIMITS_MAX_LINKS: no setting has this variable; "
        "did you mean MALAMUTE_LINKS_LINKS_MAX?"
    )


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["users.toml", "users"])
def test_an_empty_users_file_is_refused_and_one_without_users_is_warned_of(
    tmp_path: Path, name: str
) -> None:
    """A check called it good, a start took it up, and every user was shut out."""
    users = tmp_path / name
    users.write_text(" \n")
    users.chmod(0o600)
    file = tmp_path / "malamute.toml"
    file.write_text(f'[authentication]\nmechanism = "plain"\nusers_file = "{name}"\n')
    refused = run_cli("config", "check", str(file))
    assert refused.code == 2
    assert f"{users} is empty, as if it was cut short" in refused.out
    with (
        pytest.raises(ConfigError, match="is empty, as if it was cut short"),
        Server(load(file), log=Lines()),
    ):
        pass
    users.write_text("# none\n")
    warned, good = run_cli("config", "check", str(file)).ok().lines
    assert warned == (
        f"{file}:3: authentication.users_file: warning: nobody may connect: no user has a password"
    )
    assert good == f"{file} is good"


@pytest.mark.moderate
def test_files_that_a_configuration_names_may_be_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token was found there, and neither users nor the key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "users.toml").write_text(f'[users.ann]\npassword = "{hash_password("a")}"\n')
    (tmp_path / "users.toml").chmod(0o600)
    file = tmp_path / "malamute.toml"
    file.write_text('[authentication]\nmechanism = "plain"\nusers_file = "~/users.toml"\n')
    assert run_cli("config", "check", str(file)).ok().lines == [f"{file} is good"]


def test_a_text_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("listen = []\n[log\n")
    outcome = run_cli("config", "check", str(file))
    assert outcome.code == 2
    assert outcome.lines[0].startswith(f"{file}:2: not valid TOML")


def test_what_a_start_would_refuse_is_told_and_nothing_is_made(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    key = tmp_path / "broker.key"
    file.write_text(
        f'listen = ["tcp://0.0.0.0:1", "udp://x"]\ndata_directory = "{tmp_path / "data"}"\n'
        '[streams.default]\nmax_byte = 1\n[authentication]\nmechanism = "none"\n'
    )
    outcome = run_cli("config", "check", str(file))
    assert outcome.code == 2
    assert [line.split(": ")[1] for line in outcome.lines] == [
        "listen", "listen", "streams.default",
    ]  # fmt: skip
    assert "'udp://x' is not an endpoint" in outcome.lines[0]
    file.write_text(
        f'[authentication]\nmechanism = "curve"\nserver_key_file = "{key}"\n'
        '[authentication.clients]\nann = "short"\n'
    )
    outcome = run_cli("config", "check", str(file))
    assert outcome.lines == [
        f"{file}:5: authentication.clients.ann: is not a CURVE key: 40 characters of Z85"
    ]
    assert list(tmp_path.iterdir()) == [file]


def test_a_token_that_the_http_side_would_refuse_is_told(tmp_path: Path) -> None:
    file, token = tmp_path / "malamute.toml", tmp_path / "token"
    file.write_text('[http]\nbind = "127.0.0.1:9798"\ntoken_file = "token"\n')
    for text, mode, said in (
        ("short", 0o600, "does not hold one word of 16 characters"),
        ("sixteen-letters-and-more", 0o644, "mode 0644: others can use it"),
    ):
        token.write_text(text)
        token.chmod(mode)
        outcome = run_cli("config", "check", str(file))
        assert outcome.code == 2
        assert outcome.lines[0].startswith(f"{file}:3: http.token_file: {token} ")
        assert said in outcome.lines[0]
    token.chmod(0o600)
    assert run_cli("config", "check", str(file)).lines == [f"{file} is good"]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of others")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "good"),
    [
        (0, 2, 0o640, True),
        (10_001, 10_001, 0o600, True),
        (0, 0, 0o640, False),
        (0, 2, 0o660, False),
        (10_001, 10_001, 0o640, False),
        (0, 2, 0o644, False),
    ],
)
def test_root_checks_the_keys_of_a_broker_that_another_user_runs(
    owner: int, group: int, mode: int, good: bool, tmp_path: Path
) -> None:
    file, key = tmp_path / "malamute.toml", tmp_path / "broker.key"
    read_server_key(str(key))
    file.write_text(
        '[authentication]\nmechanism = "curve"\nserver_key_file = "broker.key"\n'
        f'[authentication.clients]\nann = "{zmq.curve_keypair()[0].decode()}"\n'
    )
    os.chown(key, owner, group)
    key.chmod(mode)
    outcome = run_cli("config", "check", str(file))
    assert (outcome.lines == [f"{file} is good"]) is good, outcome.lines
    # A broker that root runs wants them for itself.
    with pytest.raises(ConfigError):
        read_server_key(str(key))


def test_each_value_is_shown_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text('listen = ["inproc://x"]\n\n[journal]\nring_bytes = "8GiB"\n')
    outcome = run_cli(
        "config", "show", str(file), "--changed", "--set", "links.heartbeat_ms=2s",
        env={"MALAMUTE_LOG_LEVEL": "debug"},
    ).ok()  # fmt: skip
    assert outcome.rows == [
        ["listen", "inproc://x", f"{file}:1"],
        ["links.heartbeat_ms", "2000", "command line"],
        ["journal.ring_bytes", str(8 << 30), f"{file}:4"],
        ["log.level", "debug", "MALAMUTE_LOG_LEVEL"],
    ]
    every = {each["key"]: each for each in run_cli("config", "show", "--json").ok().json}
    assert every["journal.full"] == {
        "key": "journal.full", "value": "overwrite", "origin": "default",
    }  # fmt: skip


@pytest.mark.moderate
def test_a_running_broker_tells_what_is_in_force_and_what_a_reload_left(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    text = 'listen = ["tcp://127.0.0.1:0"]\ndata_directory = ""\n[streams]\nstreams_max = 5\n'
    file.write_text(text)
    server = Server(load(file), log=Lines(), reread=partial(examine, file))
    with server:
        m = partial(run_cli, "--endpoint", server.endpoints[0])
        assert m("config", "show", "--running", "--changed").ok().rows == [
            ["data_directory", "", f"{file}:2", ""],
            ["listen", "tcp://127.0.0.1:0", f"{file}:1", ""],
            ["streams.streams_max", "5", f"{file}:4", ""],
        ]
        new = "\n[loop]\ndrain_ms = 7\n[links]\nlinks_max = 0\n"
        file.write_text("# A line.\n" + text.replace("= 5", "= 6") + new)
        assert m("config", "reload").code == 1
        rows = m("config", "show", "--running", "--changed").ok().rows
        assert ["streams.streams_max", "6", f"{file}:5", "applied"] in rows, "the new line"
        assert ["listen", "tcp://127.0.0.1:0", f"{file}:2", ""] in rows, "the line has moved"
        [links] = [row for row in rows if row[0] == "links.links_max"]
        assert links[1:3] == ["12000", "default"], "the old value, with its origin"
        assert links[3].startswith("refused: ")
        [drain] = [row for row in rows if row[0] == "loop.drain_ms"]
        assert drain[2:] == ["default", "restart"]
        every = {each["key"]: each for each in m("config", "show", "--running", "--json").ok().json}
        assert every["journal.full"]["origin"] == "default"
        refused = m("config", "show", "--running", str(file))
        assert refused.code == 2
        assert "give no FILE" in refused.err


@pytest.mark.moderate
def test_hashes_of_passwords_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    secret = hash_password("secret")
    file.write_text(
        f'[authentication]\nmechanism = "plain"\n[authentication.users]\n"a.b" = "{secret}"\n'
    )
    outcome = run_cli("config", "show", str(file)).ok()
    assert ["authentication.users.a.b", MASK, f"{file}:4"] in outcome.rows
    assert secret not in outcome.out


def test_a_line_within_a_value_is_no_key() -> None:
    text = 'a = """\nb = 1\n[c]\n"""\n# d = 1\ne."f.g" = [\n  1,\n]\n[[h]]\ni = 2\n'
    found = {("a",): 1, ("e",): 6, ("e", "f.g"): 6, ("h",): 9, ("h", "i"): 10}
    assert lines_of(text) == found


def test_a_table_without_a_line_of_its_own_has_that_of_the_first_in_it(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(
        '[log]\nlevel = "info"\n[colours.red]\na = 1\n[permissions.x.deny]\nraed = ["y"]\n'
    )
    places = [line.removeprefix(f"{file}:").split(": ")[:2] for line in
              run_cli("config", "check", str(file)).lines]  # fmt: skip
    assert places == [["3", "colours"], ["6", "permissions.x.deny"]]


@pytest.mark.moderate
def test_a_running_broker_reads_its_configuration_anew(m: Run) -> None:
    assert m("config", "reload").ok().rows == []
    assert m("config", "reload", "--json").ok().json == []
