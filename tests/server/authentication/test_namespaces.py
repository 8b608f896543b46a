"""Namespaces: who belongs to which, and what of them is refused before a start."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from malamute_py.config import Config, from_table
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.namespaces import (
    Namespaces,
    check_namespaces,
    doubts,
)

KEY = "x" * 40


def config(
    namespaces: dict[str, Any], users: tuple[str, ...] = ("acme.ann", "ops"), **more: Any
) -> Config:
    authentication = {"mechanism": "curve", "clients": dict.fromkeys(users, KEY), **more}
    return from_table({"authentication": authentication, "namespaces": namespaces})


def test_a_user_belongs_to_the_namespace_whose_pattern_fits() -> None:
    found = Namespaces(
        config({"acme": {}, "beta": {"prefix": "b:", "users": ["eve", "team-*"]}}).namespaces
    )
    home = {
        name: None if (each := found.of(name)) is None else each.name
        for name in (
            "acme.ann", "acme", "acmex.ann", "ACME.ann", "acme\u2024ann", "xacme.ann", "", "*",
            "eve", "evelyn", "team-", "team-a", "b:x",
        )
    }  # fmt: skip
    assert home == {
        "acme.ann": "acme", "eve": "beta", "team-": "beta", "team-a": "beta",
        **dict.fromkeys(
            ("acme", "acmex.ann", "ACME.ann", "acme\u2024ann", "xacme.ann", "", "*", "evelyn",
             "b:x")
        ),
    }  # fmt: skip
    assert [(each.prefix, each.users) for each in found.all] == [
        ("acme.", ("acme.*",)),
        ("b:", ("eve", "team-*")),
    ]


@pytest.mark.parametrize(
    ("namespaces", "key", "why"),
    [
        ({"acme": {"prefix": "acme"}}, "namespaces.acme.prefix", "has no end"),
        ({"acme": {}, "part": {"prefix": "acme.eu."}}, "namespaces.part.prefix", "lies in"),
        ({"acme": {}, "same": {"prefix": "acme."}}, "namespaces.acme.prefix", "lies in"),
        ({"~acme": {}}, "namespaces.~acme", "~"),
        ({"acme": {"prefix": "\n."}}, "namespaces.acme", "is made of"),
        ({"acme": {"quotas": {"stream": 1}}}, "namespaces.acme.quotas.stream", "mean streams"),
        ({"acme": {"user": []}}, "namespaces", "did you mean users"),
        ({"acme": {"quotas": {"streams": -1}}}, "namespaces.quotas", ">= 0"),
    ],
)
def test_a_namespace_that_is_none_is_refused_by_its_key(
    namespaces: dict[str, Any], key: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        config(namespaces)
    assert refused.value.key == key


def test_namespaces_need_users() -> None:
    with pytest.raises(ConfigError, match="mechanism"):
        from_table({"namespaces": {"acme": {}}})


@pytest.mark.parametrize(
    ("namespaces", "users", "why"),
    [
        ({"acme": {}, "beta": {"users": ["*.ann"]}}, ("acme.ann",), "belongs to acme already"),
        ({"acme": {"users": ["acme.ann"]}}, ("acme.bob",), "is none of its users"),
        ({"acme": {}, "beta": {"users": ["acme.b*"]}}, ("acme.bob",), "belongs to"),
        ({"acme": {"users": ["ann"]}, "beta": {"users": ["acme.x"]}}, ("acme.x",), "none of its"),
        ({"acme": {"users": ["*"]}}, (), "HTTP side"),
    ],
)
def test_users_who_would_reach_into_two_namespaces_are_refused(
    namespaces: dict[str, Any], users: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        check_namespaces(config(namespaces, (*users, "ops")))


def test_a_template_under_the_prefix_of_another_namespace_is_refused() -> None:
    good = config({"acme": {}}, identities={"acme.ann": ["acme.web-{n}"]})
    check_namespaces(good)
    with pytest.raises(ConfigError, match=r"acme\.web"):
        check_namespaces(config({"acme": {}}, identities={"ops": ["acme.web-{n}"]}))


def test_a_namespace_that_no_user_belongs_to_is_doubted() -> None:
    found = doubts(config({"acme": {}, "acmee": {}, "beta": {"users": ["b-*", "eve"]}}))
    assert [(each.key, each.why) for each in found] == [
        ("namespaces.acmee", "no user's name fits acmee.*"),
        ("namespaces.beta", "no user's name fits b-* or eve"),
    ]
    misspelt, like = doubts(config({"acmee": {}}))
    assert (misspelt.key, like.key) == ("namespaces.acmee", "namespaces.acmee.users")
    assert like.why.startswith("user acme.ann is in no namespace")


@pytest.mark.parametrize(
    "user",
    ["acmee.eve", "amce.eve", "acm.eve", "ACME.eve", "Acme.eve", "acme-eve", "acme_eve", "acme"],
)
def test_a_user_in_no_namespace_whose_name_is_like_those_of_one_is_doubted(user: str) -> None:
    [doubt] = doubts(config({"acme": {}}, ("acme.ann", "ops", user)))
    assert doubt.key == "namespaces.acme.users"
    assert doubt.why.startswith(f"user {user} is in no namespace, ")
    assert doubt.why.endswith("did you mean acme.*?")


@pytest.mark.parametrize(
    "user",
    ["acme.eve", "ops", "acmex", "eve", "other.eve", "ac", "malamute-http", "beta1", "eve.acme"],
)
def test_a_user_whose_name_is_like_no_prefix_is_not_doubted(user: str) -> None:
    sections: dict[str, Any] = {"acme": {}, "beta": {"users": ["beta1", "ops.*.x"]}}
    assert not list(doubts(config(sections, ("acme.ann", "beta1", user))))
    assert not list(doubts(config({}, ("acme.ann",))))


def test_doubts_of_a_large_configuration_are_bounded() -> None:
    sections: dict[str, Any] = {f"tenant{at}": {} for at in range(100)}
    found = list(doubts(config(sections, tuple(f"tenamt{at}.x" for at in range(500)))))
    assert len([each for each in found if each.key.endswith(".users")]) == 20


def test_sizes_in_quotas_and_defaults_may_have_units() -> None:
    made = config(
        {
            "acme": {
                "quotas": {"mail_bytes": "1GiB"},
                "default_stream": {"max_age_ms": "7d", "description": "5s"},
            }
        }
    )
    acme = made.namespaces["acme"]
    assert acme.quotas == {"mail_bytes": 1 << 30}
    assert acme.default_stream == {"max_age_ms": 7 * 86_400_000, "description": "5s"}
    assert msgspec.to_builtins(acme)["default_mailbox"] == {}
