"""Users and permissions in force as they are told."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_py.config import Config, from_table
from malamute_py.server.authentication.credentials import carriers_of, hash_password
from malamute_py.server.authentication.in_force import UsersInForce
from malamute_py.server.authentication.permissions import Permissions

HASH = hash_password("secret")


def told(permissions: dict[str, Any], verb: str = "", name: str = "") -> dict[str, dict[str, Any]]:
    config: Config = from_table(
        {
            "authentication": {
                "mechanism": "plain", "users": {"ann": HASH, "bob": HASH},
                "identities": {"ann": ["web-{n}"]},
            },
            "permissions": permissions,
        }
    )  # fmt: skip
    decided = Permissions(config.permissions, carriers_of(config.authentication))
    return {each["user"]: each for each in UsersInForce(config, decided)(verb, name)}


def test_each_user_is_told_with_credential_and_grant_and_without_secrets() -> None:
    found = told({"ann": {"read": ["a*"], "admin": True, "deny": {"read": ["ab"]}}, "*": {}})
    assert found["ann"] == {
        "user": "ann", "credential": "password", "templates": ["web-{n}"], "own": True,
        "grant": {"read": ["a*"], "admin": True, "deny": {"read": ["ab"]}},
        "namespace": "",
    }  # fmt: skip
    assert (found["bob"]["own"], found["bob"]["grant"]) == (False, {})
    assert found["*"]["credential"] == ""
    assert "scrypt" not in repr(found)


def test_without_lists_everybody_may_do_everything() -> None:
    found = told({}, "write", "x")
    assert [each["grant"] for each in found.values()] == [{"everything": True}] * 2
    assert all(each["may"] for each in found.values())


@pytest.mark.parametrize(
    ("verb", "name", "may"),
    [
        ("read", "orders", {"ann": True, "bob": False}),
        ("read", "ordered", {"ann": False, "bob": False}),
        ("manage_users", "", {"ann": False, "bob": True}),
        ("write", "orders", {"ann": True, "bob": False}),
        ("no such verb", "orders", {"ann": False, "bob": False}),
    ],
)
def test_who_may_do_something_is_decided_as_the_core_decides(
    verb: str, name: str, may: dict[str, bool]
) -> None:
    found = told(
        {
            "ann": {
                "read": ["order*"], "deny": {"read": ["ordered"]},
                "write_subjects": {"ord*": ["eu.*"]},
            },
            "bob": {"manage_users": True},
        },
        verb, name,
    )  # fmt: skip
    assert {user: each["may"] for user, each in found.items()} == may
    assert found["ann"]["subjects"] == (["eu.*"] if verb == "write" else [])
