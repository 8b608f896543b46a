"""`malamute export` and `import`: what there is, made the same elsewhere, once."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from malamute_py import EmbeddedBroker
from tests.cli.running import Run, as_user, broker_of


@pytest.fixture
def there() -> Iterator[EmbeddedBroker]:
    """A broker with one thing of each kind."""
    with EmbeddedBroker(tcp=True) as running, running.connect_sync() as client:
        client.create_stream("trades", max_age_ms=5_000, description="of today")
        client.create_stream("plain")
        client.edit_mailbox("desk", max_messages=7)
        client.edit_service("lookup", attempts_max=3, dead_letters="ops")
        client.cursor("trades", "etl").edit(pin=True)
        with client.group("trades", "packers", settings={"attempts_max": 2}) as member:
            member.accepted()
        yield running


@pytest.fixture
def empty() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tcp=True) as running:
        yield running


def at(broker: EmbeddedBroker) -> dict[str, str]:
    return {"MALAMUTE_ENDPOINT": broker.tcp_endpoint}


def actions(rows: list[list[str]]) -> list[list[str]]:
    return [row[:3] for row in rows]


@pytest.mark.moderate
def test_definitions_are_made_elsewhere_and_the_second_time_nothing_differs(
    m: Run, there: EmbeddedBroker, empty: EmbeddedBroker
) -> None:
    told = m("export", env=at(there)).ok()
    assert told.json["streams"]["trades"]["max_age_ms"] == 5_000
    assert told.json["cursors"]["trades"]["etl"]["pin"] is True
    assert told.json["groups"]["trades"]["packers"]["attempts_max"] == 2
    expected = [
        ["streams", "plain", "create"], ["streams", "trades", "create"],
        ["mailboxes", "desk", "create"], ["services", "lookup", "create"],
        ["cursors", "trades/etl", "create"], ["groups", "trades/packers", "missing"],
    ]  # fmt: skip
    for _ in range(2):  # A dry run changes nothing.
        dry = m("import", "-", "--dry-run", stdin=told.out, env=at(empty)).ok()
        assert actions(dry.rows) == expected
    made = m("import", "-", stdin=told.out, env=at(empty)).ok()
    assert actions(made.rows) == expected
    assert "made by their first members" in made.err
    again = m("import", "-", stdin=told.out, env=at(empty)).ok()
    assert actions(again.rows) == expected[-1:]
    with empty.connect_sync() as client, client.group("trades", "packers") as member:
        member.accepted()
    assert actions(m("import", "-", stdin=told.out, env=at(empty)).ok().rows) == [
        ["groups", "trades/packers", "edit"]
    ]
    assert m("import", "-", stdin=told.out, env=at(empty)).ok().out == ""
    assert m("export", env=at(empty)).ok().json == told.json


@pytest.mark.moderate
def test_toml_with_units_sets_what_it_names_and_leaves_the_rest(
    m: Run, there: EmbeddedBroker, tmp_path: Path
) -> None:
    file = tmp_path / "d.toml"
    file.write_text('[streams.trades]\nmax_age_ms = "7d"\n[mailboxes.desk]\nmax_bytes = "1MiB"\n')
    told = m("import", str(file), "--dry-run", "--json", env=at(there)).ok().json
    assert [(each["kind"], each["settings"]) for each in told] == [
        ("streams", {"max_age_ms": 604_800_000}),
        ("mailboxes", {"max_bytes": 1 << 20}),
    ]
    rows = m("import", str(file), env=at(there)).ok().rows
    assert rows[0][3] == "max_age_ms: 5000 to 604800000"
    settings = m("export", env=at(there)).ok().json["streams"]["trades"]
    assert (settings["max_age_ms"], settings["description"]) == (604_800_000, "of today")
    with there.connect_sync() as client:
        assert client.mailbox_info("desk").settings["max_messages"] == 7


def test_what_the_broker_refuses_is_named_and_the_rest_is_done(
    m: Run, there: EmbeddedBroker
) -> None:
    asked = {"streams": {"trades": {"memory": True}}, "mailboxes": {"new": {"max_messages": 5}}}
    told = m("import", "-", "--json", stdin=json.dumps(asked), env=at(there))
    assert told.code == 1
    stream, mailbox = told.json
    assert "bad_setting" in stream["refused"]
    assert mailbox["refused"] == ""
    with there.connect_sync() as client:
        assert client.mailbox_info("new").settings["max_messages"] == 5


REFUSED: list[dict[str, Any]] = [
    {"streams": {"trades": {"memory": True}}},
    {"streams": {"trades": {"max_age": 3}}},
    {"streams": {"bad name": {}, "new": {"body_kind": "stone"}}},
    {"streams": {"trades": {"schema": "ff"}}},
    {"streams": {"new": {"level": "never"}}},
    {"mailboxes": {"desk": {"memory": True}, "new": {"max_messages": -1}}},
    {"services": {"lookup": {"memory": True}}},
    {"cursors": {"nowhere": {"c": {"pin": True}}, "trades": {"etl": {"colour": "red"}}}},
    {"groups": {"trades": {"packers": {"attempts_max": -1}}}},
]


@pytest.mark.moderate
@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_a_dry_run_names_what_the_import_is_refused(
    m: Run, there: EmbeddedBroker, asked: dict[str, Any]
) -> None:
    run = partial(m, "import", "-", "--json", stdin=json.dumps(asked), env=at(there))
    before = m("export", env=at(there)).ok().json
    dry = run("--dry-run")
    assert m("export", env=at(there)).ok().json == before
    done = run()
    assert (dry.code, done.code) == (1, 1)
    codes = [[each["refused"].partition(":")[0] for each in told.json] for told in (dry, done)]
    assert codes[0] == codes[1]
    assert all(codes[0])


RIGHTS: list[dict[str, Any]] = [
    {"read": ["*"]},
    {"read": ["*"], "create": ["*"]},
    {"read": ["trades"], "manage_streams": ["*"], "deny": {"create": ["new"]}},
    {"read": ["*"], "manage_queues": ["*"]},
    {"manage_streams": ["*"], "manage_queues": ["*"], "deny": {"send": ["ops"]}},
    {"admin": True, "deny": {"create": ["new"]}},
    {"admin": True},
]


@pytest.mark.moderate
@pytest.mark.parametrize("grant", RIGHTS, ids=str)
def test_a_dry_run_names_what_the_user_may_not_do(grant: dict[str, Any]) -> None:
    everything = {verb: ["*"] for verb in ("read", "send", "request", "write")}
    asked = json.dumps(
        {
            "streams": {"trades": {"description": "d"}, "new": {}},
            "mailboxes": {"desk": {"description": "d"}, "new": {}},
            "services": {"lookup": {"description": "d"}, "new": {"dead_letters": "ops"}},
            "cursors": {"trades": {"etl": {"description": "d"}, "new": {"pin": True}}},
            "groups": {"trades": {"packers": {"dead_letters": "ops"}}},
        }
    )
    with broker_of({"root": {"admin": True, **everything}, "ann": grant}) as running:
        root = as_user(running, "root")
        root("pub", "trades", "a").ok()
        root("sub", "trades", "--group", "packers", "-n", "1").ok()
        made: dict[str, Any] = {
            kind: {name: {}} for kind, name in (("mailboxes", "desk"), ("services", "lookup"))
        }
        root("import", "-", stdin=json.dumps({**made, "cursors": {"trades": {"etl": {}}}})).ok()
        ann = as_user(running, "ann")
        dry, done = (
            ann("import", "-", "--json", *more, stdin=asked) for more in (["--dry-run"], [])
        )
    assert dry.code == done.code
    told, did = (
        {(e["kind"], e["name"]): e["refused"].partition(":")[0] for e in each.json}
        for each in (dry, done)
    )
    assert told == did


@pytest.mark.moderate
def test_a_dry_run_says_of_which_streams_nothing_is_foreseen() -> None:
    asked = json.dumps(
        {"streams": {name: {"max_records": 5} for name in ("orders", "seen", "gone")}}
    )
    grants = {"root": {"admin": True}, "ann": {"create": ["orders", "seen"], "read": ["seen"]}}
    with broker_of(grants) as running:
        as_user(running, "root")("stream", "create", "orders").ok()
        ann = as_user(running, "ann")
        dry, done = (
            ann("import", "-", "--json", *more, stdin=asked) for more in (["--dry-run"], [])
        )
    told, did = (
        {each["name"]: each["refused"].partition(":")[0] for each in outcome.json}
        for outcome in (dry, done)
    )
    assert told == {"orders": "", "seen": "", "gone": "forbidden"}
    assert did == {"orders": "stream_exists", "seen": "", "gone": "forbidden"}
    assert "not foreseen: whether there are streams orders already" in dry.err
    assert "not foreseen" not in done.err


@pytest.mark.moderate
def test_an_export_may_be_of_a_part_by_its_prefix(m: Run, there: EmbeddedBroker) -> None:
    told = m("export", "--prefix", "tr", env=at(there)).ok().json
    assert (list(told["streams"]), told["mailboxes"]) == (["trades"], {})
    assert list(told["cursors"]) == list(told["groups"]) == ["trades"]


@pytest.mark.moderate
def test_a_typed_stream_keeps_its_newest_schema(
    m: Run, there: EmbeddedBroker, empty: EmbeddedBroker
) -> None:
    fields: list[tuple[str, pa.DataType]] = [("price", pa.float64()), ("place", pa.string())]
    with there.connect_sync() as client:
        client.create_stream("typed", schema=pa.schema(fields[:1]), validate="full")
        client.edit_stream("typed", schema=pa.schema(fields))
        kept = client.stream_info("typed").settings["schema"]
    told = m("export", "--prefix", "typed", env=at(there)).ok().out
    m("import", "-", stdin=told, env=at(empty)).ok()
    with empty.connect_sync() as client:
        settings = client.stream_info("typed").settings
        assert (settings["schema"], settings["validate"]) == (kept, "full")
    assert m("import", "-", stdin=told, env=at(empty)).ok().out == ""


@pytest.mark.moderate
def test_an_export_in_toml_is_imported_as_one_in_json(
    m: Run, there: EmbeddedBroker, empty: EmbeddedBroker
) -> None:
    with there.connect_sync() as client:
        client.edit_stream("trades", description='a "quoted" \x7f\n text')
        client.cursor("trades", "a.b:c@").edit()
    toml = m("export", "--toml", env=at(there)).ok().out
    told = tomllib.loads(toml)
    assert told == {
        kind: each for kind, each in m("export", env=at(there)).ok().json.items() if each
    }
    m("import", "-", stdin=toml, env=at(empty)).ok()
    with empty.connect_sync() as client:
        assert client.stream_info("trades").settings["description"] == 'a "quoted" \x7f\n text'
        assert client.cursor_info("trades", "a.b:c@").next == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "-: "),
        ("[]", "it is no map"),
        ('{"stream": {}}', "there is no kind 'stream'"),
        ('{"streams": {"t": 5}}', "streams.t is no map"),
        ('{"cursors": {"t": {"c": true}}}', "cursors.t.c is no map"),
        ('{"streams": {"t": {"max_bytes": "much"}}}', "streams.t: 'much' is not a size"),
        ('{"streams": {"t": {"schema": "zz"}}}', "streams.t: "),
        (b'{"streams": {"\xff": {}}}', "-: not UTF-8"),
        ("[" * 100_000, "-: nested too deep"),
        ("streams = " + "[" * 100_000, "-: nested too deep"),
    ],
)
def test_a_file_that_is_no_definitions_is_refused_before_anything_is_done(
    m: Run, text: str | bytes, words: str
) -> None:
    told = m("import", "-", stdin=text)
    assert told.code == 2
    assert words in told.err


@pytest.mark.moderate
def test_users_go_with_the_definitions_from_one_file_into_another(
    m: Run, there: EmbeddedBroker, empty: EmbeddedBroker, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("ann", "bob"):
        m("user", "add", name, "--users", "users.toml", stdin="secret\n").ok()
    m("grant", "ann", "read", "trades", "--users", "users.toml").ok()
    before = tomllib.loads(Path("users.toml").read_text())
    told = m("export", "--users", "users.toml", env=at(there)).ok().out
    assert json.loads(told)["users"] == before["users"]
    Path("all.json").write_text(told)
    left = m("import", "all.json", env=at(empty)).ok()
    assert "3 entries of a users file are left alone" in left.err
    assert not Path("other.toml").exists()

    m("user", "add", "bob", "--users", "other.toml", stdin="else\n").ok()
    m("grant", "bob", "write", "plain", "--users", "other.toml").ok()
    dry = m(
        "import", "all.json", "--users", "other.toml", "--dry-run", "--json", env=at(empty)
    ).ok()
    found = [(each["kind"], each["name"], each["action"]) for each in dry.json]
    assert found[1:] == [
        ("users", "ann", "create"), ("users", "bob", "edit"), ("permissions", "ann", "create"),
    ]  # fmt: skip
    assert before["users"]["ann"]["password"] not in dry.out
    done = m("import", "all.json", "--users", "other.toml", env=at(empty)).ok()
    assert before["users"]["ann"]["password"] not in done.out + done.err
    after = tomllib.loads(Path("other.toml").read_text())
    assert after["users"] == before["users"]
    assert after["permissions"] == {"ann": {"read": ["trades"]}, "bob": {"write": ["plain"]}}
    again = m("import", "all.json", "--users", "other.toml", env=at(empty)).ok()
    assert "ann" not in again.out, "nothing differs"


@pytest.mark.moderate
def test_what_is_denied_and_not_named_by_the_file_stays_denied(
    m: Run, empty: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    m("user", "add", "ann", "--users", "users.toml", stdin="secret\n").ok()
    for verb, name, more in (
        ("read", "*", []), ("read", "salaries.*", ["--deny"]), ("trim", "old", ["--deny"]),
        ("write", "a", ["--subject", "x"]),
    ):  # fmt: skip
        m("grant", "ann", verb, name, *more, "--users", "users.toml").ok()
    with Path("users.toml").open("a") as file:
        file.write("# the end\n")
    Path("new.toml").write_text(
        '[permissions.ann.deny]\ntrim = ["new"]\npurge = ["box"]\n'
        '[permissions.ann.write_subjects]\nb = ["y"]\n'
    )
    told = m("import", "new.toml", "--users", "users.toml", "--json", env=at(empty)).ok().json
    wanted = {
        "read": ["*"],
        "deny": {"read": ["salaries.*"], "trim": ["new"], "purge": ["box"]},
        "write_subjects": {"a": ["x"], "b": ["y"]},
    }
    assert told[0]["settings"] == {key: wanted[key] for key in ("deny", "write_subjects")}
    assert tomllib.loads(Path("users.toml").read_text())["permissions"]["ann"] == wanted
    assert "# the end" in Path("users.toml").read_text()
    again = m("import", "new.toml", "--users", "users.toml", env=at(empty)).ok()
    assert "ann" not in again.out, "nothing differs"


@pytest.mark.moderate
def test_users_that_a_broker_would_refuse_are_not_written(
    m: Run, empty: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all.toml").write_text('[users.ann]\npassword = "no hash"\n[streams.made]\n')
    for more in (["--dry-run"], []):
        failed = m("import", "all.toml", "--users", "users.toml", *more, env=at(empty))
        assert failed.code != 0
        assert "ann" in failed.err
    assert not Path("users.toml").exists()
    with empty.connect_sync() as client:
        assert client.list_streams("") == []


def test_a_null_of_a_users_entry_is_refused_by_name(
    m: Run, empty: EmbeddedBroker, tmp_path: Path
) -> None:
    (tmp_path / "all.json").write_text('{"users": {"ann": {"password": null}}}')
    failed = m("import", str(tmp_path / "all.json"), "--users", str(tmp_path / "u.toml"),
               env=at(empty))  # fmt: skip
    assert "users.ann has a null" in failed.err


def test_a_null_of_a_setting_is_refused_by_name(m: Run) -> None:
    told = m("import", "-", stdin='{"cursors": {"t": {"c": {"pin": null}}}}')
    assert told.code == 2
    assert "cursors.t.c has a null" in told.err


def test_export_takes_json_like_every_other_command(m: Run) -> None:
    assert m("export", "--json").ok().json == m("export").ok().json
    assert m("export", "--json", "--toml").code == 2
