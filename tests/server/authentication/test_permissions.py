"""Every verb of a grant against every action of the core, denials and subjects included."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from malamute_py.config import Denied, Grant, NamedVerbs, NamespaceSection
from malamute_py.server.authentication.carriers import Carriers
from malamute_py.server.authentication.namespaces import HTTP_USER, Namespaces
from malamute_py.server.authentication.permissions import GIVEN_BY, Permissions

ALLOWS: dict[str, set[str]] = {
    "read": {"read", "replay"},
    "write": {"write", "create"},
    "create": {"create", "create_mailbox", "create_service"},
    "trim": {"trim"},
    "send": {"send", "create_mailbox", "dead_letters"},
    "receive": {"receive", "create_mailbox"},
    "purge": {"purge"},
    "request": {"request", "create_service"},
    "work": {"work", "create_service"},
    "manage_streams": {"manage_streams", "create", "trim"},
    "manage_queues": {
        "manage_queues", "create_mailbox", "create_service", "purge", "dead_letters",
    },
    "manage_clients": {"manage_clients"},
    "manage_users": {"manage_users"},
    "admin": {
        "admin", "manage_streams", "manage_queues", "manage_clients", "manage_users", "trim",
        "purge", "dead_letters", "create", "create_mailbox", "create_service",
    },
}  # fmt: skip
"""Verb -> actions that it allows alone."""
ACTIONS = sorted(set().union(*ALLOWS.values()))
LISTS = NamedVerbs.__struct_fields__
FLAGS = ("manage_clients", "manage_users", "admin")


def granted(verb: str, **more: Any) -> Grant:
    value: Any = True if verb in FLAGS else ["orders", "eu.*"]
    return msgspec.convert({verb: value, **more}, Grant)


def test_the_table_has_every_verb_and_every_action() -> None:
    assert set(ALLOWS) == set(Grant.__struct_fields__) - {"deny", "write_subjects"}
    assert set(ACTIONS) == {*GIVEN_BY, *FLAGS}


@pytest.mark.parametrize(("verb", "action"), [*itertools.product(ALLOWS, ACTIONS)])
def test_a_verb_allows_its_actions_on_its_names_and_nothing_else(verb: str, action: str) -> None:
    permit = Permissions({"ann": granted(verb)})
    expected = action in ALLOWS[verb]
    assert permit("ann", action, "orders") is expected
    assert permit("ann", action, "eu.orders") is expected
    named = verb in LISTS
    assert permit("ann", action, "orders2") is (expected and not named)
    assert not permit("bob", action, "orders")


@pytest.mark.parametrize(("verb", "action"), [*itertools.product(ALLOWS, ACTIONS)])
def test_it_is_told_whether_an_action_is_allowed_on_any_name(verb: str, action: str) -> None:
    permissions = Permissions({"ann": granted(verb)})
    assert permissions.allows_some("ann", action) is (action in ALLOWS[verb])
    assert not permissions.allows_some("bob", action)


def test_a_denial_of_all_names_leaves_none_and_another_some() -> None:
    for verb in LISTS:
        denied = Permissions(
            {"ann": granted(verb, deny={verb: ["*"]}), "bob": granted(verb, deny={verb: ["x"]})}
        )
        own = verb if verb in GIVEN_BY else "create"
        assert not denied.allows_some("ann", own)
        assert denied.allows_some("bob", own)
    bound = msgspec.convert({"write_subjects": {"s": ["eu.*"]}}, Grant)
    assert Permissions({"ann": bound}).allows_some("ann", "write")
    assert not Permissions({"ann": bound}).allows_some("ann", "create")
    tenants = Namespaces({"acme": NamespaceSection(users=["ann"])})
    assert Permissions({}, namespaces=tenants).allows_some("ann", "read")
    assert not Permissions({}, namespaces=tenants).allows_some("ann", "admin")


@pytest.mark.parametrize("verb", ["manage_streams", "manage_queues"])
def test_admin_allows_all_that_the_verbs_of_administration_allow(verb: str) -> None:
    admin, some = Permissions({"*": granted("admin")}), Permissions({"*": granted(verb)})
    assert [each for each in ACTIONS if some("ann", each, "orders")] == [
        each for each in ACTIONS if some("ann", each, "orders") and admin("ann", each, "orders")
    ]


@pytest.mark.parametrize(
    ("verb", "action"), [*itertools.product(Denied.__struct_fields__, ACTIONS)]
)
def test_a_denial_goes_before_everything_that_is_allowed(verb: str, action: str) -> None:
    everything: dict[str, Any] = {name: ["*"] for name in LISTS}
    everything |= dict.fromkeys(FLAGS, True)
    open_ = Permissions({"ann": msgspec.convert(everything, Grant)})
    shut = Permissions({"ann": msgspec.convert({**everything, "deny": {verb: ["eu.*"]}}, Grant)})
    forbidden = {verb}
    if verb == "read":
        forbidden.add("replay")
    if verb == "create":
        forbidden |= {"create_mailbox", "create_service"}
    if verb == "send":
        forbidden.add("dead_letters")
    assert open_("ann", action, "eu.orders")
    assert shut("ann", action, "eu.orders") is (action not in forbidden)
    assert shut("ann", action, "orders")


OUTSIDE = ("orders", "acme", "acmex.orders", "Acme.orders", "xacme.orders", "", "beta.orders", "*")
"""Names that lie in no namespace of ann's, some of which look nearly so."""
ON_MAILBOXES = {"send", "receive", "create_mailbox", "purge", "dead_letters"}


@pytest.mark.parametrize(("verb", "action"), [*itertools.product(ALLOWS, ACTIONS)])
def test_a_verb_on_all_names_ends_at_the_prefix_of_its_users_namespace(
    verb: str, action: str
) -> None:
    users = ("acme.ann", "acme.bob", "ann", "root", "beta.eve")
    value: Any = True if verb in FLAGS else ["*"]
    grants = {user: msgspec.convert({verb: value}, Grant) for user in users}
    namespaces = {"acme": NamespaceSection(users=["acme.*", "ann"]), "beta": NamespaceSection()}
    permit = Permissions(grants, Carriers(users, {}), Namespaces(namespaces))
    expected = action in ALLOWS[verb]
    for user in ("acme.ann", "ann"):
        assert permit(user, action, "acme.orders") is (expected and action != "admin")
        # Flags are asked about the broker; the core tells and ends what is in the namespace.
        assert [permit(user, action, name) for name in OUTSIDE] == [
            expected and action in FLAGS and action != "admin"
        ] * len(OUTSIDE)
        about_mailboxes = action in ON_MAILBOXES or (action in FLAGS and action != "admin")
        assert permit(user, action, "ann-3") is (expected and about_mailboxes), "its users' own"
        assert not permit(user, action, "root-3") or action in FLAGS
        assert not permit(user, action, "beta.eve") or action in FLAGS
    assert permit("root", action, "acme.orders") is expected
    assert permit("root", action, "beta.orders") is expected


def test_a_namespace_bounds_its_users_also_where_no_permissions_are_set() -> None:
    namespaces = Namespaces({"acme": NamespaceSection()})
    permit = Permissions({}, Carriers(["acme.ann", "root"], {}), namespaces)
    assert permit("acme.ann", "write", "acme.orders")
    assert permit("acme.ann", "manage_streams", "acme.orders")
    assert not permit("acme.ann", "write", "orders")
    assert not permit("acme.ann", "admin", "broker")
    assert permit("root", "write", "acme.orders")


def test_namespaces_are_listed_by_who_manages_users_and_by_the_brokers_own_http_side() -> None:
    namespaces = Namespaces({"acme": NamespaceSection()})
    for grants in ({}, {"ann": granted("manage_users"), "*": Grant(read=["*"])}):
        permit = Permissions(grants, namespaces=namespaces)
        assert permit("ann", "list_namespaces", "broker")
        assert permit(HTTP_USER, "list_namespaces", "broker")
        assert permit("bob", "list_namespaces", "broker") is not bool(grants)
    assert not permit(HTTP_USER, "manage_users", "broker"), "it may change nothing"


def test_subjects_open_no_stream_outside_of_a_namespace() -> None:
    grants = {"acme.ann": Grant(write_subjects={"*": ["eu.*"]})}
    permit = Permissions(grants, None, Namespaces({"acme": NamespaceSection()}))
    assert permit.subjects("acme.ann", "acme.orders") is not None
    assert permit.subjects("acme.ann", "acmex.orders") is None


def test_what_a_denied_verb_would_give_besides_is_not_given() -> None:
    permit = Permissions({"ann": Grant(write=["*"], deny=Denied(write=["eu.*"]))})
    assert permit("ann", "create", "orders")
    assert not permit("ann", "create", "eu.orders")


def test_an_identity_without_a_section_has_that_of_all_others() -> None:
    permit = Permissions({"ann": Grant(), "*": Grant(read=["public"])})
    assert permit("bob", "read", "public")
    assert not permit("ann", "read", "public")


def test_writing_may_be_bound_to_subjects() -> None:
    permit = Permissions(
        {
            "ann": Grant(write_subjects={"orders": ["eu.*", "ch"], "o*": ["all"]}),
            "bob": Grant(write_subjects={"*": ["*"]}, deny=Denied(write=["orders"])),
        }
    )
    assert not permit("ann", "write", "orders")
    bound = permit.subjects("ann", "orders")
    assert bound is not None
    assert [bound(key) for key in ("eu.x", "ch", "all", "us", "")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert permit.subjects("ann", "trades") is None
    assert permit.subjects("bob", "orders") is None
    assert permit.subjects("bob", "trades") is not None
    assert permit.subjects("carl", "orders") is None
