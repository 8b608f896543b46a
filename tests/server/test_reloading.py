"""A configuration that is read anew: what is taken up, and whose links end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import malamute_py as malamute
from malamute_protocol.commands import Bye, Refused, ReloadConfig, Result
from malamute_py.client.settings import Plain
from malamute_py.config import (
    KEYS,
    Config,
    NamespaceSection,
    from_table,
    load,
    wrong_in_combination,
)
from malamute_py.config_check import Examined, examine
from malamute_py.server import Server
from malamute_py.server.authentication.credentials import hash_password
from malamute_py.server.authentication.users_file import with_users
from malamute_py.server.reloading import (
    RELOADED,
    Reading,
    lost_credentials,
    narrowed,
    take_up,
    value_of,
    with_values,
)
from tests.server.daemon import Daemon
from tests.server.fakes import Lines
from tests.server.peer import RawPeer
from tests.waiting import WAIT_MS, WAIT_S

ANN, BOB = (hash_password(word, salt=bytes(16)) for word in ("a", "b"))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def reading(before: dict[str, Any], after: dict[str, Any] | Examined) -> Reading:
    config = from_table(before)
    found = after if isinstance(after, Examined) else Examined(from_table(after), [], [], str)
    return take_up(Reading(config, config, []), found, with_users)


def test_each_setting_is_applied_refused_or_needs_a_restart() -> None:
    found = reading(
        {"streams": {"streams_max": 5}},
        {
            "streams": {"streams_max": 6, "default": {"max_bytes": "1MiB"}},
            "journal": {"ring_bytes": "8GiB"},
            "quotas": {"links": 3, "identities": {"web-*": {"links": 1}}},
            "permissions": {"ann": {"read": ["x"]}},
        },
    )
    assert sorted(found.changes) == [
        ("journal.ring_bytes", "restart", ""),
        ("permissions.ann", "applied", "added"),
        ("quotas.identities.web-*", "applied", "added"),
        ("quotas.links", "applied", ""),
        ("streams.default", "applied", ""),
        ("streams.streams_max", "applied", ""),
    ]
    assert found.config.streams.streams_max == 6
    assert found.config.journal == Config().journal
    assert found.complete == found.config


def test_what_is_wrong_is_refused_and_the_rest_is_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(
        "[streams]\nstreams_max = 0\nrings_max = 7\n[links]\nheartbeat_ms = 1\n"
        "[permissions.ann]\nreed = []\n"
    )
    found = reading({"streams": {"streams_max": 5}, "permissions": {"ann": {}}}, examine(file))
    assert {(key, outcome) for key, outcome, _ in found.changes} == {
        ("streams.streams_max", "refused"),
        ("permissions.ann", "refused"),
        ("links.heartbeat_ms", "refused"),
        ("streams.rings_max", "applied"),
    }
    assert (found.config.streams.streams_max, found.config.streams.rings_max) == (5, 7)
    assert set(found.config.permissions) == {"ann"}
    assert found.config.links == Config().links


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[links]\nheartbeat_min_ms = 60000", "links.heartbeat_min_ms"),
        ("[links]\nheartbeat_max_ms = 500", "links.heartbeat_max_ms"),
        ("[services]\nlease_min_ms = 1000000", "services.lease_min_ms"),
        ("[services]\nlease_max_ms = 1000", "services.lease_max_ms"),
        ("[services]\nbackoff_max_ms = 1", "services.backoff_max_ms"),
        ("[groups]\nhold_max_ms = 1\nhold_ms = 5", "groups.hold_max_ms"),
    ],
)
def test_a_bound_that_does_not_fit_to_what_it_bounds_stays_as_it_was(
    tmp_path: Path, text: str, key: str
) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(text)
    found = reading({}, examine(file))
    assert [change.outcome for change in found.changes] == ["refused"] * len(found.changes)
    assert value_of(found.config, key) == value_of(Config(), key)
    assert not list(wrong_in_combination(found.config))


def test_settings_that_are_wrong_once_others_stay_as_they_were_stay_too(tmp_path: Path) -> None:
    before = {"links": {"heartbeat_min_ms": 100, "heartbeat_ms": 1000, "heartbeat_max_ms": 2000}}
    file = tmp_path / "malamute.toml"
    file.write_text(
        "[links]\nheartbeat_min_ms = 5000\nheartbeat_ms = 9000\nheartbeat_max_ms = 8000"
    )
    found = reading(before, examine(file))
    assert found.config == from_table(before)
    assert {change.outcome for change in found.changes} == {"refused"}


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    found = reading({"streams": {"streams_max": 5}}, examine(tmp_path / "none.toml"))
    assert [change.outcome for change in found.changes] == ["refused"]
    assert found.config.streams.streams_max == 5


def test_users_and_permissions_are_taken_up_together_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    file.write_text(f'[users.ann]\npassword = "{ANN}"\n[permissions.ann]\nread = ["x"]\n')
    file.chmod(0o600)
    plain = {"authentication": {"mechanism": "plain", "users_file": str(file)}}
    config = from_table(plain)
    before = Reading(config, with_users(config), [])
    file.write_text('[users.ann]\npassword = "nonsense"\n[permissions.ann]\nwrite = ["x"]\n')
    found = take_up(
        before,
        Examined(from_table({**plain, "streams": {"streams_max": 6}}), [], [], str),
        with_users,
    )
    outcomes = {outcome: key for key, outcome, _ in found.changes}
    assert outcomes == {
        "refused": f"{file}:2: users.ann.password", "applied": "streams.streams_max",
    }  # fmt: skip
    assert found.complete.permissions["ann"].read == ["x"]
    assert found.complete.authentication == before.complete.authentication
    assert found.complete.streams.streams_max == 6


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[quotas.ann]\nstreems = 1", "quotas.ann.streems"),
        ('[users.bob]\nidentities = ["web"]', "users.bob.identities"),
        ('[users.bob]\nidentities = ["ann-{n}"]', "users.bob.identities"),
    ],
)
def test_a_users_file_is_checked_as_a_configuration_is(tmp_path: Path, text: str, key: str) -> None:
    """A misspelt quota ended the broker at a reload; templates took another user's identities."""
    file = tmp_path / "users.toml"
    good = f'[users.ann]\npassword = "{ANN}"\n'
    file.write_text(good)
    file.chmod(0o600)
    config = from_table({"authentication": {"mechanism": "plain", "users_file": str(file)}})
    before = Reading(config, with_users(config), [])
    file.write_text(good + text)
    found = take_up(before, Examined(config, [], [], str), with_users)
    assert [(each, outcome) for each, outcome, _ in found.changes] == [
        (f"{file}:4: {key}", "refused")
    ]
    assert found.complete == before.complete


def test_a_bound_that_defaults_do_not_fit_stays_as_it_was() -> None:
    """Each stream that was to be made by first use was refused from then on."""
    before = {"streams": {"default": {"description": "x" * 100}}}
    after = {"streams": {"default": {"description": "x" * 100}, "settings_bytes_max": 50}}
    found = reading(before, after)
    assert {(key, outcome) for key, outcome, _ in found.changes} == {
        ("streams.default", "refused"), ("streams.settings_bytes_max", "refused"),
    }  # fmt: skip
    assert found.config == from_table(before)


@pytest.mark.moderate
def test_a_fault_of_the_configuration_holds_the_users_file_back(tmp_path: Path) -> None:
    file, users = tmp_path / "malamute.toml", tmp_path / "users.toml"
    text = f'[authentication]\nmechanism = "plain"\nusers_file = "{users}"\n'
    ann = f'[users.ann]\npassword = "{ANN}"\n'
    users.write_text(ann)
    users.chmod(0o600)
    file.write_text(text)
    config = load(file)
    before = Reading(config, with_users(config), [])
    users.write_text(f'{ann}[users.bob]\npassword = "{BOB}"\n')
    file.write_text(f"{text}[permissions.ann]\nreed = []\n")
    found = take_up(before, examine(file), with_users)
    assert [(key, outcome) for key, outcome, _ in found.changes] == [("permissions.ann", "refused")]
    assert found.complete == before.complete
    file.write_text(text)
    found = take_up(before, examine(file), with_users)
    assert set(found.complete.authentication.users) == {"ann", "bob"}


def test_a_reload_tells_every_fault_of_the_users_file_with_its_line(tmp_path: Path) -> None:
    file, users = tmp_path / "malamute.toml", tmp_path / "users.toml"
    file.write_text(f'[authentication]\nmechanism = "plain"\nusers_file = "{users}"\n')
    ann = f'[users.ann]\npassword = "{ANN}"\n'
    users.write_text(ann)
    users.chmod(0o600)
    config = load(file)
    before = Reading(config, with_users(config), [])
    users.write_text(
        f'{ann}[users.bob]\npassword = "x"\nidentities = 5\n[permissions.ann]\nreed = ["a"]\n'
    )
    found = take_up(before, examine(file), with_users)
    assert [(key, outcome) for key, outcome, _ in found.changes] == [
        (f"{users}:4: users.bob.password", "refused"),
        (f"{users}:5: users.bob.identities", "refused"),
        (f"{users}:7: permissions.ann.reed", "refused"),
    ]
    assert found.complete == before.complete


def test_what_a_wrong_users_file_holds_back_is_told_by_name(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    before = {"authentication": {"mechanism": "plain", "users": {"ann": ANN}}}
    after = {
        "authentication": {"mechanism": "plain", "users": {"ann": ANN}, "users_file": str(file)},
        "permissions": {"ann": {"read": ["x"]}},
    }
    found = reading(before, after)
    assert {(key, outcome) for key, outcome, _ in found.changes} == {
        ("authentication.users_file", "refused"), ("permissions", "refused"),
    }  # fmt: skip
    assert found.config == from_table(before)


TOGETHER = """\
[authentication]
mechanism = "plain"
[authentication.users]
ann = "{ann}"
bob = "{bob}"
[permissions.ann]
{verb} = ["x"]
[permissions.bob]
read = ["*"]
[quotas.identities.ann]
links = 3
[streams]
streams_max = 6
"""


@pytest.mark.moderate
def test_a_fault_in_the_permissions_of_one_user_has_no_other_user_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(TOGETHER.format(ann=ANN, bob=BOB, verb="reed"))
    before = {
        "authentication": {"mechanism": "plain", "users": {"ann": ANN}},
        "permissions": {"ann": {"write": ["x"]}},
    }
    found = reading(before, examine(file))
    assert found.config.authentication == from_table(before).authentication
    assert found.config.permissions == from_table(before).permissions
    assert found.config.quotas.identities == {}
    assert found.config.streams.streams_max == 6
    outcomes = {key: outcome for key, outcome, _ in found.changes}
    assert outcomes == {
        "permissions.ann": "refused", "authentication.users": "refused",
        "quotas.identities": "refused", "streams.streams_max": "applied",
    }  # fmt: skip
    file.write_text(TOGETHER.format(ann=ANN, bob=BOB, verb="read"))
    found = reading(before, examine(file))
    assert set(found.config.authentication.users) == {"ann", "bob"}


def test_settings_are_read_and_replaced_by_their_dotted_names() -> None:
    config = Config()
    for key in RELOADED:
        assert key in KEYS
        assert with_values(config, {key: value_of(config, key)}) == config
    changed = with_values(config, {"listen": ["inproc://x"], "links.links_max": 3})
    assert (changed.listen, changed.links.links_max) == (["inproc://x"], 3)


def security(users: dict[str, str], permissions: dict[str, Any] | None = None) -> Config:
    authentication: dict[str, Any] = {"mechanism": "plain", "users": users}
    return from_table({"authentication": authentication, "permissions": permissions or {}})


def test_a_user_that_is_gone_or_has_another_credential_has_lost_it() -> None:
    before = security({"ann": ANN, "bob": BOB, "carl": ANN})
    after = security({"ann": ANN, "bob": ANN, "dan": ANN})
    assert lost_credentials(before, after) == {"bob", "carl"}


@pytest.mark.parametrize(
    ("before", "after", "less"),
    [
        ({"read": ["a"]}, {"read": ["a", "b"], "admin": True}, False),
        ({"read": ["a", "b"]}, {"read": ["a"]}, True),
        ({"admin": True}, {}, True),
        ({"read": ["a"]}, {"read": ["a"], "deny": {"read": ["b"]}}, True),
        ({"read": ["a"], "deny": {"read": ["b"]}}, {"read": ["a"]}, False),
        ({"write_subjects": {"s": ["a"]}}, {"write_subjects": {"s": ["b"]}}, True),
    ],
)
def test_an_owner_is_narrowed_when_something_is_taken_back(
    before: dict[str, Any], after: dict[str, Any], less: bool
) -> None:
    old, new = (security({"x": ANN}, {"ann": grant}) for grant in (before, after))
    assert narrowed(old, new, "ann") is less
    assert not narrowed(old, old, "ann")
    assert narrowed(security({"x": ANN}), new, "ann"), "everything was allowed without a list"
    assert not narrowed(old, security({"x": ANN}), "ann")


USERS = """\
[users.ann]
password = "{ann}"
[users.bob]
password = "{bob}"
[users.root]
password = "{ann}"
[permissions.ann]
write = ["*"]
read = ["*"]
[permissions.bob]
read = ["*"]
[permissions.root]
manage_users = true
"""


class World:
    """A broker with a users file, over tcp."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "malamute.toml"
        self.users = folder / "users.toml"
        self.write(USERS.format(ann=ANN, bob=BOB))
        self.file.write_text(
            'data_directory = ""\nlisten = ["tcp://127.0.0.1:0"]\n[authentication]\n'
            f'mechanism = "plain"\nusers_file = "{self.users}"\n'
        )
        self.lines = Lines()
        self.server = Server(load(self.file), log=self.lines, reread=partial(examine, self.file))

    def write(self, text: str) -> None:
        self.users.write_text(text)
        self.users.chmod(0o600)

    def peer(self, name: str, password: str, *, hello: bool = True) -> RawPeer:
        return RawPeer(
            self.server.endpoints[0], hello=hello, plain_username=name.encode(),
            plain_password=password.encode(),
        )  # fmt: skip

    def reload(self, peer: RawPeer) -> dict[str, str]:
        peer.send(ReloadConfig(1))
        result, _ = peer.get(Result)
        return {key: f"{outcome} {why}".strip() for key, outcome, why in result.value["changes"]}


@contextmanager
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    with made.server:
        yield made


@pytest.mark.moderate
def test_a_reload_warns_once_of_a_user_who_is_nearly_in_a_namespace(tmp_path: Path) -> None:
    with world(tmp_path) as made, made.peer("root", "a") as root:
        made.file.write_text(made.file.read_text() + "[namespaces.annn]\n")
        like = f'[users."ann.x"]\npassword = "{ANN}"\n'
        made.write(USERS.format(ann=ANN, bob=BOB) + like)
        assert made.reload(root)["authentication.users.ann.x"] == "applied added"
        doubted = made.lines.of("namespace_doubted")
        assert [each["key"] for each in doubted] == ["namespaces.annn", "namespaces.annn.users"]
        assert doubted[1]["reason"].startswith("user ann.x is in no namespace")
        assert made.reload(root) == {}
        assert made.lines.of("namespace_doubted") == doubted


@pytest.mark.moderate
def test_a_removed_user_loses_its_link_and_its_connection_lets_nobody_in(tmp_path: Path) -> None:
    with (
        world(tmp_path) as made,
        made.peer("root", "a") as root,
        made.peer("bob", "b") as bob,
        made.peer("ann", "a") as ann,
    ):
        made.write(USERS.format(ann=ANN, bob=BOB).replace("users.bob", "users.bert"))
        assert made.reload(root) == {
            "authentication.users.bob": "applied removed",
            "authentication.users.bert": "applied added",
        }
        bye, _ = bob.get(Bye)
        assert bye.code == "unauthenticated"
        until(lambda: made.server.metrics()["shell"].get("cut_total", 0) >= 1)
        ann.send(ReloadConfig(1))
        assert ann.get(Refused)[0].code == "forbidden", "the others' links stay"
        with made.peer("bert", "b") as bert:
            assert bert.welcome is not None
    told = made.lines.of("configuration_reloaded")
    assert [(each["applied"], each["refused"]) for each in told] == [(2, 0)]


@pytest.mark.moderate
def test_a_user_of_whom_something_is_taken_back_opens_a_new_link(tmp_path: Path) -> None:
    with (
        world(tmp_path) as made,
        made.peer("root", "a") as root,
        malamute.connect_sync(
            made.server.endpoints[0], credential=Plain("ann", "a"), timeout_ms=WAIT_MS
        ) as ann,
    ):
        ann.publish("orders", b"one")
        made.write(USERS.format(ann=ANN, bob=BOB).replace('write = ["*"]', 'write = ["x"]'))
        assert made.reload(root) == {"permissions.ann": "applied changed"}
        with pytest.raises(malamute.BrokerRefused, match="forbidden"):
            ann.publish("orders", b"two")
        ann.publish("x", b"three")
        assert ann.reconnects == 1


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("manage_users = true", 'read = ["x"]', "permissions_changed"),
        ("[permissions.root]", "[permissions.bert]", "permissions_changed"),
        ("[users.root]", "[users.bert]", "unauthenticated"),
    ],
    ids=["narrowed", "nothing left", "removed"],
)
def test_a_user_who_loses_something_by_the_own_reload_gets_the_answer_before_the_link_ends(
    tmp_path: Path, old: str, new: str, code: str
) -> None:
    with world(tmp_path) as made, made.peer("root", "a") as root:
        made.write(USERS.format(ann=ANN, bob=BOB).replace(old, new))
        root.send(ReloadConfig(1))
        told = {key for key, *_ in root.get(Result)[0].value["changes"]}
        assert any(key.endswith(".root") for key in told)
        assert root.get(Bye)[0].code == code


@pytest.mark.moderate
def test_the_users_that_are_told_are_those_in_force(tmp_path: Path) -> None:
    with (
        world(tmp_path) as made,
        malamute.connect_sync(
            made.server.endpoints[0], credential=Plain("root", "a"), timeout_ms=WAIT_MS
        ) as root,
    ):
        told = {each.user: each for each in root.list_users("read", "orders")}
        assert (told["bob"].may, told["root"].may, told["bob"].credential) == (
            True, False, "password",
        )  # fmt: skip
        made.write(USERS.format(ann=ANN, bob=BOB).replace("permissions.bob", "permissions.eve"))
        root.reload_config()
        told = {each.user: each for each in root.list_users("read", "orders")}
        assert (told["bob"].may, told["eve"].may) == (False, True)


@pytest.mark.moderate
def test_quotas_that_are_read_anew_bind_those_that_are_linked(tmp_path: Path) -> None:
    with (
        world(tmp_path) as made,
        made.peer("root", "a") as root,
        malamute.connect_sync(
            made.server.endpoints[0], credential=Plain("ann", "a"), timeout_ms=WAIT_MS
        ) as ann,
    ):
        ann.create_stream("one")
        made.write(USERS.format(ann=ANN, bob=BOB) + "[quotas.ann]\nstreams = 1\n")
        assert made.reload(root) == {"quotas.identities.ann": "applied added"}
        with pytest.raises(malamute.BrokerRefused, match="limit"):
            ann.create_stream("two")
        assert ann.reconnects == 0
        made.write(USERS.format(ann=ANN, bob=BOB))
        ann.publish("one", b"x")
        made.reload(root)
        ann.create_stream("two")


ACME = """
[namespaces.acme]
users = ["ann"]
[namespaces.acme.quotas]
streams = 2
[namespaces.acme.default_stream]
max_records = 7
"""


@pytest.mark.moderate
def test_a_namespace_that_comes_changes_and_goes_is_taken_up(tmp_path: Path) -> None:
    with (
        world(tmp_path) as made,
        made.peer("root", "a") as root,
        malamute.connect_sync(
            made.server.endpoints[0], credential=Plain("ann", "a"), timeout_ms=WAIT_MS
        ) as ann,
    ):
        plain = made.file.read_text()
        ann.publish("orders", b"x")
        made.file.write_text(plain + ACME)
        assert made.reload(root) == {"namespaces.acme": "applied added"}
        with pytest.raises(malamute.BrokerRefused, match="forbidden"):
            ann.publish("orders", b"x")
        assert ann.reconnects == 1, "her link was remembered to write to orders"
        ann.publish("acme.one", b"x")
        assert ann.stream_info("acme.one").settings["max_records"] == 7
        [own] = ann.list_namespaces()
        assert (own.namespace, own.held["streams"]) == ("acme", 2), "orders is hers, too"
        with pytest.raises(malamute.BrokerRefused, match=r"limit.*namespaces\.acme\.quotas"):
            ann.publish("acme.two", b"x")
        changed = ACME.replace("streams = 2", "streams = 3").replace("= 7", "= 8")
        made.file.write_text(plain + changed)
        assert made.reload(root) == {
            "namespaces.acme.quotas": "applied changed",
            "namespaces.acme.default_stream": "applied changed",
        }
        ann.publish("acme.two", b"x")
        assert ann.stream_info("acme.two").settings["max_records"] == 8
        assert ann.reconnects == 1
        made.file.write_text(
            plain + changed.replace("[namespaces.acme]", "[namespaces.acme]\nprefix='a:'")
        )
        assert made.reload(root) == {"namespaces.acme.prefix": "applied changed"}
        with pytest.raises(malamute.BrokerRefused, match="forbidden"):
            ann.publish("acme.two", b"x")
        made.file.write_text(plain)
        assert made.reload(root) == {"namespaces.acme": "applied removed"}
        ann.publish("orders", b"x")


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('users = ["ann", "bob"]\nprefix = "root"', "namespaces.acme.prefix"),
        ('users = ["*"]', "namespaces.acme.users"),
        ("[namespaces.acme.quotas]\nstream = 1", "namespaces.acme.quotas.stream"),
        ("[namespaces.acme.default_stream]\nmax_age = 1", "namespaces.acme.default_stream"),
        ('[namespaces.beta]\nusers = ["acme.x"]\nprefix = "bob."', ""),
    ],
)
def test_a_namespace_that_is_wrong_is_refused_and_what_was_in_force_stays(
    tmp_path: Path, text: str, key: str
) -> None:
    with world(tmp_path) as made, made.peer("root", "a") as root:
        made.file.write_text(made.file.read_text() + f"[namespaces.acme]\n{text}\n")
        changes = made.reload(root)
        if key:
            assert [name for name, says in changes.items() if says.startswith("refused")] == [key]
            assert not made.server.config.namespaces
        else:
            assert set(changes) == {"namespaces.acme", "namespaces.beta"}


def test_who_belongs_to_a_namespace_is_narrowed_by_its_prefix_and_its_users() -> None:
    def of(namespaces: dict[str, Any]) -> Config:
        config = security({"x": ANN})
        return msgspec.structs.replace(
            config, namespaces=msgspec.convert(namespaces, dict[str, NamespaceSection])
        )

    none, both = of({}), of({"a": {"users": ["ann", "bob"]}})
    one, wide = of({"a": {"users": ["ann"]}}), of({"a": {"users": ["ann"], "prefix": "b."}})
    told = [
        narrowed(before, after, "ann")
        for before, after in ((none, one), (one, none), (one, both), (both, one), (one, wide))
    ]
    assert told == [True, False, False, True, True]


@pytest.mark.moderate
def test_an_embedded_broker_reads_its_users_anew(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.server.rereading.read = None
        made.write(USERS.format(ann=ANN, bob=ANN))
        assert made.server.rereading.request() == ""
        until(lambda: bool(made.lines.of("configuration_reloaded")))
        with made.peer("bob", "a") as bob:
            assert bob.welcome is not None


@pytest.mark.system
def test_sighup_has_a_broker_read_its_users_anew(tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text("# none yet")
    users.chmod(0o600)
    with Daemon("", authentication__mechanism="plain", authentication__users_file=users) as daemon:
        users.write_text(f'[users.ann]\npassword = "{ANN}"\n')
        os.kill(daemon.process.pid, signal.SIGHUP)
        assert daemon.wait_for("configuration_reloaded")["applied"] == 1
        with malamute.connect_sync(
            daemon.endpoint, credential=Plain("ann", "a"), timeout_ms=WAIT_MS
        ) as ann:
            assert ann.linked


@pytest.mark.system
def test_a_broker_in_a_terminal_ends_with_it() -> None:
    outer, inner = os.openpty()
    try:
        with Daemon("", stdin=inner) as daemon:
            os.kill(daemon.process.pid, signal.SIGHUP)
            daemon.wait_for("stopped")
            assert daemon.process.wait(WAIT_S) == 0
    finally:
        os.close(outer)
        os.close(inner)


class Gate:
    """Readings of a configuration that wait while the gate is shut."""

    def __init__(self, file: Path) -> None:
        self.count = 0
        self.open = threading.Event()
        self.open.set()
        self._file = file

    def read(self) -> Examined:
        found = examine(self._file)
        self.count += 1
        assert self.open.wait(WAIT_S)
        return found


def test_a_signal_amid_a_reading_has_the_configuration_read_once_more(tmp_path: Path) -> None:
    """A change after the file had been read was not taken up until the next signal."""
    file = tmp_path / "malamute.toml"
    file.write_text('data_directory = ""\nlisten = ["inproc://reloads"]\n')
    gate = Gate(file)
    with Server(load(file), log=Lines(), reread=gate.read) as server:
        gate.open.clear()
        server.rereading.on_signal(signal.SIGHUP, None)
        until(lambda: gate.count == 2)
        file.write_text(file.read_text() + "[streams]\nstreams_max = 7\n")
        for _ in range(3):
            server.rereading.on_signal(signal.SIGHUP, None)
        gate.open.set()
        until(lambda: server.config.streams.streams_max == 7)
        assert gate.count == 3


def test_a_system_without_room_for_a_thread_costs_one_reload_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reload was possible afterwards, and one that a signal asked for was lost in silence."""
    file = tmp_path / "malamute.toml"
    file.write_text('data_directory = ""\nlisten = ["inproc://reloads"]\n')
    gate = Gate(file)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lines = Lines()
    with Server(load(file), log=lines, reread=gate.read) as server:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            assert "can't start new thread" in server.rereading.request(5, 1)
            server.rereading.on_signal(signal.SIGHUP, None)
        until(lambda: len(lines.of("reload_failed")) == 2)
        assert [(one["link"], one["reason"]) for one in lines.of("reload_failed")] == [
            (5, "can't start new thread"), (0, "can't start new thread"),
        ]  # fmt: skip
        assert gate.count == 1
        server.rereading.on_signal(signal.SIGHUP, None)
        until(lambda: gate.count == 2)
