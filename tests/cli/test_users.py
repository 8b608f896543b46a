"""`malamute key`, `user`, `grant`, `revoke`, `who-can`: files, modes, and what a broker reads."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import tomlkit
import zmq

from malamute_py import EmbeddedBroker
from malamute_py.cli import contexts
from malamute_py.client.settings import Plain
from malamute_py.config import Config, load
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.credentials import PlainTable
from malamute_py.server.authentication.users_file import with_users
from tests.cli.running import Outcome, Run, run_cli

CURVE = """\
[authentication]
mechanism = "curve"
server_key_file = "broker.key"
users_file = "users.toml"
"""


@pytest.fixture
def m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `malamute ...` in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return run_cli


@pytest.fixture
def plain(m: Run) -> Run:
    """Run commands beside a configuration for passwords, with user ann."""
    Path("malamute.toml").write_text(CURVE.replace("curve", "plain"))
    m("user", "add", "ann", stdin="secret\n").ok()
    return m


def read() -> Config:
    return with_users(load("malamute.toml"))


def mode(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_a_user_that_is_refused_leaves_no_key_behind(m: Run) -> None:
    m("key", "new", "broker.key").ok()
    Path("malamute.toml").write_text(CURVE)
    assert m("user", "add", "ann b", "--new-key", "ann.key").code == 2
    assert [each.name for each in Path().glob("ann.key*")] == []
    m("user", "add", "ann", "--new-key", "ann.key").ok()
    secret = Path("ann.key").read_bytes()
    assert m("user", "add", "bob", "--new-key", "ann.key").code == 1, "another's key stays"
    assert Path("ann.key").read_bytes() == secret


def test_a_key_pair_is_two_files_and_none_is_replaced(m: Run) -> None:
    public = m("key", "new", "broker.key").ok().out.strip()
    assert (mode("broker.key"), mode("broker.key.pub")) == (0o600, 0o644)
    secret = Path("broker.key").read_bytes()
    assert zmq.curve_public(secret.strip()).decode() == public
    for file in ("broker.key", "broker.key.pub"):
        assert m("key", "show", file).ok().out.strip() == public
    assert m("key", "new", "broker.key").code == 1
    assert Path("broker.key").read_bytes() == secret
    Path("half.key.pub").touch()
    assert m("key", "new", "half.key").code == 1
    assert not Path("half.key").exists()
    assert m("key", "show", "none.key").code == 2
    Path("short.key").write_text("short")
    assert m("key", "show", "short.key").code == 1


def test_a_context_pins_the_brokers_key_and_keeps_absolute_paths(m: Run, tmp_path: Path) -> None:
    public = m("key", "new", "broker.key").ok().out.strip()
    m("key", "new", "ann.key").ok()
    m("context", "add", "a", "--server-key", "broker.key.pub", "--secret-key-file", "ann.key").ok()
    m("context", "add", "b", "--user", "bob", "--password-file", "bob.password").ok()
    kept = contexts.Contexts.load()
    assert kept.get("a").server_key == public
    assert kept.get("a").secret_key_file == str(tmp_path / "ann.key")
    assert kept.get("b").password_file == str(tmp_path / "bob.password")


@pytest.mark.moderate
def test_a_user_is_added_with_a_password_of_which_only_the_hash_is_kept(plain: Run) -> None:
    assert mode("users.toml") == 0o600
    assert "secret" not in Path("users.toml").read_text()
    table = PlainTable(read().authentication.users)
    assert table.fits("ann", b"secret")
    told = plain("user", "add", "bob", "--generate").ok()
    table = PlainTable(read().authentication.users)
    assert table.fits("bob", told.out.strip().encode())
    plain("user", "passwd", "ann", stdin="other\n").ok()
    table = PlainTable(read().authentication.users)
    assert table.fits("ann", b"other")
    assert not table.fits("ann", b"secret")


@pytest.mark.moderate
@pytest.mark.parametrize("text", [b" of ann \n", b" of ann ", b" of ann \r\n", b" of ann \nmore\n"])
def test_a_file_is_the_same_password_for_a_user_and_for_a_context(plain: Run, text: bytes) -> None:
    Path("ann.password").write_bytes(text)
    plain("user", "passwd", "ann", stdin=text).ok()
    assert PlainTable(read().authentication.users).fits("ann", b" of ann ")
    plain("context", "add", "a", "--user", "ann", "--password-file", "ann.password").ok()
    assert contexts.Contexts.load().get("a").credential() == Plain("ann", " of ann ")


@pytest.mark.moderate
def test_what_is_no_utf8_is_refused_in_one_line(plain: Run) -> None:
    for arguments in (("hash",), ("add", "bob"), ("passwd", "ann")):
        told = plain("user", *arguments, stdin=b"\xffpw\n")
        assert (told.code, "the password is not UTF-8" in told.err) == (2, True), told.err
    before = Path("users.toml").read_bytes()
    Path("users.toml").write_bytes(before + b"# \xff\n")
    told = plain("grant", "ann", "read", "trades")
    assert (told.code, "not UTF-8" in told.err) == (2, True), told.err
    assert Path("users.toml").read_bytes() == before + b"# \xff\n"


def test_a_user_is_added_with_a_key_which_another_replaces(m: Run) -> None:
    Path("malamute.toml").write_text(CURVE)
    assert m("user", "add", "ann", stdin="pw\n").code == 2, "the mechanism wants a key"
    m("user", "add", "ann", "--new-key", "ann.key", "--identity", "web-{n}").ok()
    public = m("key", "show", "ann.key").ok().out.strip()
    assert read().authentication.clients == {"ann": public}
    assert read().authentication.identities == {"ann": ["web-{n}"]}
    second = m("key", "new", "second.key").ok().out.strip()
    m("user", "key", "ann", "--public-key", "second.key.pub").ok()
    assert read().authentication.clients == {"ann": second}
    assert m("user", "key", "ann").code == 2
    told = m("user", "add", "bob", "--public-key", "second.key.pub")
    assert (told.code, "is also the key of ann" in told.err) == (2, True)
    assert set(read().authentication.clients) == {"ann"}, "nothing was written"


@pytest.mark.moderate
def test_nothing_is_allowed_that_is_not_granted(plain: Run) -> None:
    assert plain("who-can", "read", "orders").ok().rows == []
    plain("grant", "ann", "read", "orders", "eu.*").ok()
    plain("grant", "ann", "read", "eu.secret", "--deny").ok()
    plain("grant", "ann", "manage_clients").ok()

    def can(*args: str) -> list[str]:
        return [row[0] for row in plain("who-can", *args).ok().rows]

    assert [can("read", name) for name in ("orders", "eu.x", "eu.secret", "us")] == [
        ["ann"], ["ann"], [], [],
    ]  # fmt: skip
    assert can("manage_clients") == ["ann"]
    plain("revoke", "ann", "read", "orders").ok()
    plain("revoke", "ann", "read", "--deny").ok()
    plain("revoke", "ann", "manage_clients").ok()
    assert [can("read", name) for name in ("orders", "eu.secret")] == [[], ["ann"]]
    assert can("manage_clients") == []
    assert plain("revoke", "ann", "read", "orders").code == 1


@pytest.mark.moderate
def test_writing_is_granted_under_subjects(plain: Run) -> None:
    plain("grant", "ann", "write", "orders", "--subject", "eu.*", "--subject", "ch.*").ok()
    assert plain("who-can", "write", "orders").ok().rows == [["ann", "under subjects: eu.*, ch.*"]]
    plain("revoke", "ann", "write", "orders").ok()
    assert plain("who-can", "write", "orders").ok().rows == []
    assert "write_subjects" not in Path("users.toml").read_text()


@pytest.mark.moderate
def test_all_users_have_what_is_granted_to_the_star(plain: Run) -> None:
    plain("grant", "*", "read", "public.*").ok()
    assert plain("who-can", "read", "public.x", "--json").ok().json == [
        {"user": "*", "condition": ""}, {"user": "ann", "condition": ""},
    ]  # fmt: skip


@pytest.mark.moderate
def test_comments_and_order_of_the_file_stay(plain: Run) -> None:
    path = Path("users.toml")
    mine = "# The people of the office.\n"
    path.write_text(mine + path.read_text() + "\n[quotas.ann] # few\nlinks = 5\n")
    path.chmod(0o640)
    plain("grant", "ann", "read", "orders").ok()
    text = path.read_text()
    assert text.startswith(mine)
    assert "[quotas.ann] # few\n" in text
    assert mode("users.toml") == 0o640
    assert read().quotas.identities == {"ann": {"links": 5}}
    plain("user", "rm", "ann").ok()
    assert tomlkit.parse(path.read_text()).unwrap().get("users", {}) == {}
    assert read().quotas.identities == {}


@pytest.mark.moderate
def test_a_file_whose_last_user_was_removed_is_not_empty(plain: Run) -> None:
    """A broker did not start with it: it looked as if it was cut short."""
    path = Path("users.toml")
    path.write_text(path.read_text().partition("\n\n")[2])
    assert path.read_text().startswith("[users.ann]")
    plain("user", "rm", "ann").ok()
    assert path.read_text().startswith("#")
    assert plain("config", "check", "malamute.toml").code == 0


@pytest.mark.moderate
def test_users_are_listed(plain: Run) -> None:
    plain("grant", "ann", "write", "orders").ok()
    assert plain("user", "ls").ok().rows == [["ann", "password", "", "write orders", ""]]
    with Path("malamute.toml").open("a") as file:
        file.write('[namespaces.acme]\nusers = ["ann"]\n')
    assert plain("user", "ls").ok().rows == [["ann", "password", "", "write orders", "acme"]]
    plain("grant", "ann", "write", "acme.*").ok()
    plain("grant", "ann", "admin").ok()
    assert plain("who-can", "write", "orders").ok().rows == []
    assert plain("who-can", "write", "acme.x").ok().rows == [["ann", ""]]
    assert plain("who-can", "manage_clients").ok().rows == [["ann", "in namespace acme"]]


@pytest.mark.moderate
def test_a_list_of_the_file_shows_names_denials_and_what_is_for_all(plain: Run) -> None:
    """They were in --running alone: a user who was denied something looked allowed."""
    plain("grant", "ann", "write", "orders", "--subject", "eu.*").ok()
    plain("grant", "ann", "read", "*").ok()
    plain("grant", "ann", "read", "salaries.*", "--deny").ok()
    plain("grant", "*", "read", "public.*").ok()
    everyone, ann = plain("user", "ls").ok().rows
    assert everyone == ["*", "", "", "read public.*", ""]
    assert "read *; " in ann[3]
    assert "write orders under eu.*" in ann[3]
    assert ann[3].endswith("not read salaries.*")
    grant = plain("user", "ls", "--json").ok().json[1]["grant"]
    assert (grant["read"], grant["deny"]) == (["*"], {"read": ["salaries.*"]})


def failed(outcome: Outcome, code: int, says: str) -> None:
    assert (outcome.code, says in outcome.err) == (code, True), outcome.err


@pytest.mark.moderate
def test_what_cannot_be_done_is_said_and_nothing_is_written(plain: Run) -> None:
    before = Path("users.toml").read_text()
    failed(plain("user", "add", "ann", stdin="x\n"), 1, "exists")
    failed(plain("user", "add", "a b\n", stdin="x\n"), 2, "users.a b")
    failed(plain("user", "add", "bob", stdin=""), 2, "empty")
    failed(plain("user", "rm", "amn"), 1, "did you mean ann?")
    failed(plain("grant", "amn", "read", "x"), 1, "did you mean ann?")
    failed(plain("grant", "ann", "reed", "x"), 2, "did you mean read?")
    failed(plain("grant", "ann", "read"), 2, "read what?")
    failed(plain("grant", "ann", "admin", "x"), 2, "has no names")
    failed(plain("grant", "ann", "replay", "x"), 2, "can be denied")
    without = ("manage_clients", "manage_users", "admin")
    for command in ("grant", "revoke"):
        for verb in without:
            failed(plain(command, "ann", verb, "--deny"), 2, "no denial")
        told = " ".join(plain(command, "--help").ok().out.split())
        assert f"there is none of {', '.join(without)}" in told
    failed(plain("grant", "ann", "read", "x", "--subject", "y"), 2, "goes with write")
    failed(plain("who-can", "read"), 2, "read what?")
    failed(plain("grant", "ann", "read", ""), 2, "must not be empty")
    failed(plain("grant", "ann", "read", "salaries.#", "--deny"), 2, "`*` stands for any")
    failed(plain("grant", "ann", "write", "orders.>", "--subject", "x"), 2, "fits no name")
    failed(plain("who-can", "raed", "x"), 2, "did you mean read?")
    failed(plain("who-can", "frob", "x"), 2, "denied: replay")
    assert Path("users.toml").read_text() == before
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["malamute.toml", "users.toml"]


@pytest.mark.moderate
def test_a_file_must_be_named(m: Run) -> None:
    failed(m("user", "ls"), 2, "--users FILE")
    failed(m("user", "ls", "--users", "users.txt"), 2, "ends in .toml")
    m("user", "add", "ann", "--users", "users.toml", stdin="pw\n").ok()
    assert m("user", "ls", "--users", "users.toml").ok().rows[0][0] == "ann"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[user.ann]\n", "a users file has users, permissions, quotas"),
        ("[users.ann]\npasswort = 'x'\n", "passwort"),
        ("[users.ann]\npassword = 'x'\n", "users.ann.password"),
        ("[users.ann]\npublic_key = 'x'\n", "users.ann.public_key"),
        ("[permissions.ann]\nreed = []\n", "did you mean read?"),
        ("[quotas.ann]\nlinks = 'x'\n", "quotas"),
        ("[users", "not valid TOML"),
        ("a = " + "[" * 100_000, "nested too deep"),
        ("[users.bob]\n", "stands in the configuration as well"),
        ("[permissions.bob]\n", "stands in the configuration as well"),
    ],
)
def test_a_wrong_users_file_is_named_with_what_is_wrong(m: Run, text: str, why: str) -> None:
    key = m("key", "new", "bob.key").ok().out.strip()
    Path("malamute.toml").write_text(
        CURVE + f'[authentication.clients]\nbob = "{key}"\n[permissions.bob]\nread = ["x"]\n'
    )
    Path("users.toml").write_text(text)
    Path("users.toml").chmod(0o600)
    with pytest.raises(ConfigError, match=r"users\.toml") as caught:
        read()
    assert why in str(caught.value)
    assert why in m("config", "check", "malamute.toml").out


def test_a_password_is_not_given_where_keys_are_asked_for(m: Run) -> None:
    m("key", "new", "broker.key").ok()
    Path("malamute.toml").write_text(CURVE)
    m("user", "add", "ann", "--new-key", "ann.key").ok()
    before = Path("users.toml").read_text()
    failed(m("user", "passwd", "ann", stdin="secret\n"), 2, "malamute user key ann")
    assert Path("users.toml").read_text() == before


@pytest.mark.moderate
def test_an_edit_of_a_linked_file_changes_what_the_link_leads_to(plain: Run) -> None:
    Path("kept").mkdir()
    Path("users.toml").rename("kept/users.toml")
    Path("users.toml").symlink_to("kept/users.toml")
    plain("grant", "ann", "read", "orders").ok()
    assert Path("users.toml").is_symlink()
    assert "orders" in Path("kept/users.toml").read_text()


def test_a_directory_in_place_of_the_users_file_is_named(plain: Run) -> None:
    Path("users.toml").unlink()
    Path("users.toml").mkdir()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match=r"users\.toml is not a regular file") as caught:
        read()
    assert "Errno" not in str(caught.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.moderate
def test_a_users_file_that_others_can_read_is_refused(plain: Run) -> None:
    Path("users.toml").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read()


@pytest.mark.moderate
def test_a_running_broker_tells_its_users_and_who_may_do_what() -> None:
    permissions = {
        "*": {"admin": True},
        "ann": {
            "read": ["orders", "eu.*"], "write_subjects": {"orders": ["eu.*"]},
            "deny": {"read": ["eu.secret"]},
        },
    }  # fmt: skip
    with EmbeddedBroker(tcp=True, permissions=permissions) as broker:
        at = ("--running", "--endpoint", broker.tcp_endpoint)
        told = run_cli("user", "ls", *at).ok().rows
        assert told == [
            ["*", "", "", "admin", ""],
            ["ann", "", "", "read orders, eu.*; write orders under eu.*; not read eu.secret", ""],
        ]
        ann = run_cli("user", "ls", *at, "--json").ok().json[1]
        assert (ann["name"], ann["grant"]["read"]) == ("ann", ["orders", "eu.*"])
        assert run_cli("who-can", "read", "orders", *at).ok().rows == [["ann", ""]]
        assert run_cli("who-can", "read", "eu.secret", *at).ok().rows == []
        assert run_cli("who-can", "write", "orders", *at).ok().rows == [
            ["ann", "under subjects: eu.*"]
        ]
        failed(run_cli("user", "ls", *at, "--users", "users.toml"), 2, "give no --users")
        failed(run_cli("who-can", "read", "x", *at, "--config", "c.toml"), 2, "no --config")


@pytest.mark.moderate
def test_a_new_user_is_told_the_namespace_and_one_that_nearly_has_one_is_warned_of(
    plain: Run,
) -> None:
    with Path("malamute.toml").open("a") as file:
        file.write('[namespaces.acme]\n[namespaces.beta]\nusers = ["ann"]\n')
    assert "is in the namespace acme" in plain("user", "add", "acme.eve", "--generate").ok().err
    told = plain("user", "add", "acmee.bob", "--generate").ok().err
    assert "warning: user acmee.bob is in no namespace" in told
    assert "did you mean acme.*" in told
    assert "namespace" not in plain("user", "add", "other", "--generate").ok().err
    assert "namespaces.beta.users still names ann" in plain("user", "rm", "ann").ok().err
