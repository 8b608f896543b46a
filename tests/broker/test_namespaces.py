"""Namespaces: what a user of one reaches, what its users share, and what first use makes in it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker.limits import Namespace, Quota
from malamute_py.config import NamespaceSection
from malamute_py.server.authentication.carriers import Carriers
from malamute_py.server.authentication.namespaces import Namespaces
from malamute_py.server.authentication.permissions import Permissions
from tests.broker.links.test_permissions import COMMANDS
from tests.broker.post import Post, code
from tests.broker.test_quotas import MAKES

ALL = ["all"]
USERS = ("anna", "bert", "carla")
ABOUT_THE_BROKER = (wire.ListLinks, wire.Kick, wire.EndTransaction)
"""Commands that name nothing: they have tests of their own."""


def tenants(*, users: tuple[str, ...] = ("bert", "carla"), **more: Any) -> dict[str, Any]:
    """Settings of a broker where users are in the namespace `acme`, and all may do everything."""
    section = msgspec.convert({"users": list(users), **more}, NamespaceSection)
    namespaces = Namespaces({"acme": section})
    carriers = Carriers(USERS, {})
    return {
        "permit": _trusting(Permissions({}, carriers, namespaces)), "carrier": carriers,
        "namespaces": namespaces.all, "namespace_of": namespaces.of,
    }  # fmt: skip


def _trusting(permissions: Permissions) -> Any:
    """Permissions with which a fake peer may have any name, as it has no credential."""
    return lambda owner, action, name: action == "identity" or permissions(owner, action, name)


@pytest.mark.parametrize(
    "command",
    [command for command, _ in COMMANDS if not isinstance(command, ABOUT_THE_BROKER)],
    ids=lambda command: type(command).__name__,
)
def test_no_command_of_a_user_reaches_what_lies_outside_of_the_namespace(
    command: wire.Command,
) -> None:
    post = Post(**tenants())
    frame = encode([b"a"], subject="s")
    post.mail(1, "box", [b"kept"])
    post.publish(1, "s", [b"a", b"b"])
    post.send(1, wire.Request("svc", 0), wire.MoveCursor("s", "c", 0, 0), frames=[frame])
    before = repr(post.broker._shard.queues)
    post.send(3, command, frames=[frame] * command.content_frames)
    answer: Any = post.peers[3].commands[-1]
    assert isinstance(answer, wire.Refused)
    assert (answer.code, answer.reference) == ("forbidden", 9)
    assert repr(post.broker._shard.queues) == before
    assert [each["identity"] for each in post.told("forbidden")] == ["carla"], "it is audited"


def test_no_part_of_a_step_or_transaction_reaches_outside() -> None:
    post = Post(**tenants())
    frame = encode([b"a"], subject="s")
    post.mail(1, "box", [b"kept"])
    post.publish(1, "s", [b"a", b"b"])
    post.publish(3, "acme.s", [b"a"])
    post.send(3, wire.BeginTransaction(b"t", 1))
    for part in (
        wire.Send("box", 0), wire.Publish("s", 0), wire.Publish("new", 0), wire.Request("svc", 0),
        wire.MoveCursor("s", "c", 1, 0), wire.Trim("s", 1, 0), wire.PurgeSubjects("s", ALL, 1, 0),
        wire.Stage(b"t", "s", 0, 0),
    ):  # fmt: skip
        frames = [frame] * part.content_frames
        post.send(3, wire.Atomic(8, 1), part, frames=frames)
        assert post.answer(3, 8).code == "forbidden", part
    post.send(3, wire.Stage(b"t", "s", 0, 9), frames=[frame])
    assert post.answer(3, 9).code == "forbidden"
    post.send(3, wire.Stage(b"t", "acme.s", 0, 10), frames=[frame])
    assert code(post.answer(3, 10)) == "Confirm"


def test_listings_show_a_user_what_lies_in_the_namespace_and_others_everything() -> None:
    post = Post(**tenants())
    frame = encode([b"a"], subject="s")
    for prefix in ("acme.", "acmex.", ""):
        post.publish(1, f"{prefix}s", [b"a"])
        post.mail(1, f"{prefix}box", [b"a"])
        post.send(
            1, wire.Request(f"{prefix}svc", 0), wire.MoveCursor(f"{prefix}s", "c", 0, 0),
            wire.JoinGroup(len(prefix) + 20, f"{prefix}s", "g", ALL), frames=[frame],
        )  # fmt: skip

    def listed(link: int) -> list[list[str]]:
        return [
            [each["name"] for each in post.ask(link, wire.ListStreams)["streams"]],
            *(
                [each[key] for each in post.ask(link, kind, *fields)["entries"]]
                for kind, fields, key in (
                    (wire.MailboxInfo, ("*",), "name"),
                    (wire.ServiceInfo, ("*",), "name"),
                    (wire.CursorInfo, ("", "*"), "stream"),
                    (wire.GroupInfo, ("", "*"), "stream"),
                )
            ),
        ]

    assert listed(3) == [["acme.s"], ["acme.box"], ["acme.svc"], ["acme.s"], ["acme.s"]]
    assert [len(each) for each in listed(1)] == [3] * 5
    assert post.ask(3, wire.CursorInfo, "s", "*").code == "forbidden"
    missed = post.ask(3, wire.GroupInfo, "acme.x", "*")
    assert missed.code == "unknown_stream"
    wrong = post.send(3, wire.Subscribe(9, "acmex.s", ALL, [0], create=False)).last(wire.Refused)
    assert wrong.code == "forbidden"
    near = post.send(3, wire.Subscribe(9, "acme.ss", ALL, [0], create=False)).last(wire.Refused)
    assert "'acme.s'" in near.reason
    assert "acmex" not in near.reason


def test_links_transactions_and_users_are_those_of_the_namespace() -> None:
    users = [
        {"user": "anna", "namespace": ""}, {"user": "bert", "namespace": "acme"},
    ]  # fmt: skip
    post = Post(users=lambda verb, name: users, **tenants())
    post.send(1, wire.BeginTransaction(b"anna", 1))
    post.send(2, wire.BeginTransaction(b"bert", 1))
    assert [each["identity"] for each in post.ask(3, wire.ListLinks)["links"]] == ["bert", "carla"]
    assert post.ask(3, wire.ListLinks, 1)["more"]
    assert not post.ask(3, wire.ListLinks, 2)["more"]
    first = post.ask(3, wire.ListLinks, 1)["links"][0]["link"]
    [second] = post.ask(3, wire.ListLinks, 1, first)["links"]
    assert second["identity"] == "carla"
    assert len(post.ask(1, wire.ListLinks)["links"]) == 3
    opened = post.ask(3, wire.ListTransactions)["transactions"]
    assert [each["identity"] for each in opened] == ["bert"]
    assert len(post.ask(1, wire.ListTransactions)["transactions"]) == 2
    assert post.ask(3, wire.EndTransaction, b"anna").code == "unknown_transaction"
    assert post.ask(3, wire.EndTransaction, b"bert") == {}
    assert post.ask(3, wire.ListUsers)["users"] == users[1:]
    assert post.ask(1, wire.ListUsers)["users"] == users
    first = post.ask(1, wire.ListUsers, "", "", "", 1)
    assert (first["users"], first["more"]) == (users[:1], True)
    following = post.ask(1, wire.ListUsers, "", "", users[0]["user"])
    assert (following["users"], following["more"]) == (users[1:], False)
    assert post.ask(3, wire.Kick, 1).code == "unknown_link"
    assert post.ask(3, wire.Kick, 2) == {}
    assert post.ask(1, wire.Kick, 3) == {}


def test_what_is_about_the_whole_broker_is_not_a_namespaces() -> None:
    post = Post(reload=lambda link, request: "", **tenants())
    assert post.ask(3, wire.ReloadConfig).code == "forbidden"
    told = post.ask(3, wire.BrokerInfo)
    assert set(told) == {"software", "uuid", "epoch", "now_ms", "namespace"}
    assert "counters" in post.ask(1, wire.BrokerInfo)
    assert post.ask(3, wire.BrokerInfo, "").code == "forbidden"
    assert "settings" in post.ask(1, wire.BrokerInfo, "")


def test_mail_goes_between_the_users_of_a_namespace_and_replies_come_to_their_own_mailbox() -> None:
    post = Post(**tenants())
    assert code(post.mail(3, "bert", [b"hello"])) == "Confirm"
    assert code(post.mail(3, "anna", [b"hello"])) == "forbidden"
    post.inbox(2)
    assert post.got(2) == [b"hello"]
    frame = encode([b"a"], subject="s")
    for reply_to, answered in (
        ("", "Confirm"), ("carla", "Confirm"), ("acme.replies", "Confirm"), ("bert", "Confirm"),
        ("anna", "forbidden"), ("acmex.replies", "forbidden"),
    ):  # fmt: skip
        post.send(3, wire.Request("acme.svc", 8, reply_to=reply_to), frames=[frame])
        assert code(post.answer(3, 8)) == answered, reply_to


def test_dead_letters_stay_in_the_namespace() -> None:
    post = Post(**tenants())
    post.mail(1, "box", [b"kept"])
    post.publish(2, "acme.s", [b"a"])
    outside, inside = {"dead_letters": "box"}, {"dead_letters": "acme.dead"}
    assert post.ask(3, wire.EditService, "acme.svc", outside).code == "forbidden"
    assert post.ask(3, wire.ServiceInfo, "acme.svc").code == "unknown_service"
    assert post.ask(3, wire.EditService, "acme.svc", inside)["dead_letters"] == "acme.dead"
    post.send(3, wire.JoinGroup(9, "acme.s", "g", ALL))
    assert post.ask(3, wire.EditGroup, "acme.s", "g", outside).code == "forbidden"
    assert post.ask(3, wire.EditGroup, "acme.s", "g", inside)["dead_letters"] == "acme.dead"


def test_a_service_may_have_dead_letters_only_where_its_administrator_may_send() -> None:
    may = {"manage_queues": {"svc"}, "create_service": {"svc"}, "dead_letters": {"letters", "svc"}}
    post = Post(
        permit=lambda owner, action, name: (
            owner != "carla" or action in ("identity", "work") or name in may.get(action, ())
        )
    )
    edit = wire.EditService
    assert post.ask(3, edit, "svc", {"dead_letters": "box"}).code == "forbidden"
    assert post.ask(3, edit, "svc", {"dead_letters": "letters"})["dead_letters"] == "letters"
    assert post.ask(3, edit, "svc", {"dead_letters": "svc"})["dead_letters"] == "svc"
    assert post.ask(3, edit, "svc", {"dead_letters": 5}).code == "bad_setting"


def test_a_worker_that_makes_a_service_has_its_dead_letters_within_the_namespace() -> None:
    post = Post(**tenants())
    post.mail(1, "box", [b"kept"])
    offer = wire.Offer(7, "acme.svc", ALL, 1, 1 << 20, settings={"dead_letters": "box"})
    refused = post.send(3, offer).commands[-1]
    assert isinstance(refused, wire.Refused)
    assert (refused.code, refused.reference) == ("forbidden", 7)
    inside = msgspec.structs.replace(offer, settings={"dead_letters": "acme.dead"})
    assert isinstance(post.send(3, inside).commands[-1], wire.Subscribed)
    assert post.ask(1, wire.ServiceInfo, "acme.svc")["dead_letters"] == "acme.dead"


# --- quotas ---------------------------------------------------------------------------------


def under(commands: list[wire.Command]) -> list[wire.Command]:
    """Put what commands name under the prefix."""
    return [
        msgspec.structs.replace(
            command,
            **{
                field: f"acme.{getattr(command, field)}"
                for field in ("stream", "mailbox", "service")
                if hasattr(command, field)
            },
        )
        for command in commands
    ]


@pytest.mark.parametrize("resource", MAKES)
def test_the_users_of_a_namespace_share_its_quota_in_sum(resource: str) -> None:
    post = Post(**tenants(quotas={resource: 3}))
    post.publish(1, "acme.shared", [b"a", b"b"])
    for at in range(10, 14):
        for link in (1, 2, 3):
            commands, frames = MAKES[resource](100 * link + at)
            post.send(link, *under(commands), frames=frames)
    refused = [each for link in (2, 3) for each in post.peers[link].of(wire.Refused)]
    assert [each.code for each in refused] == ["limit"] * 5
    assert "namespace 'acme' has 3" in refused[0].reason
    assert f"namespaces.acme.quotas.{resource} is 3" in refused[0].reason
    assert not post.peers[1].of(wire.Refused), "anna is in no namespace, and takes nothing of it"
    assert post.told("quota_reached") == [{"namespace": "acme", "resource": resource, "bound": 3}]
    [facts] = post.ask(2, wire.ListNamespaces)["namespaces"]
    assert facts["held"][resource] == 3
    assert facts["quotas"] == {resource: 3}


@pytest.mark.parametrize(
    "resource", ["streams", "rings", "mailboxes", "services", "cursors", "transactions"]
)
def test_what_a_namespace_holds_is_the_same_after_a_restart(resource: str) -> None:
    post = Post(**tenants(quotas={resource: 3}))
    post.publish(1, "acme.shared", [b"a", b"b"])
    for link, at in ((2, 1), (3, 2), (3, 3)):
        commands, frames = MAKES[resource](10 + at)
        post.send(link, *under(commands), frames=frames)
    [before] = post.ask(2, wire.ListNamespaces)["namespaces"]
    post.restart()
    [after] = post.ask(2, wire.ListNamespaces)["namespaces"]
    assert after == {**before, "messages_in": 0, "bytes_in": 0}, "counts begin anew"
    commands, frames = MAKES[resource](20)
    post.send(2, *under(commands), frames=frames)
    assert [each.code for each in post.peers[2].of(wire.Refused)] == ["limit"]


def test_bytes_that_lie_in_mailboxes_count_for_the_namespace_until_they_are_gone() -> None:
    quota = 2 * (96 + len(encode([bytes(1_000)], subject="s"))) + 100
    post = Post(**tenants(quotas={"mail_bytes": quota}))
    body = [bytes(1_000)]
    assert [code(post.mail(link, "acme.box", body)) for link in (2, 3, 2, 1)] == [
        "Confirm", "Confirm", "wait", "Confirm",
    ]  # fmt: skip
    post.restart()
    assert code(post.mail(3, "acme.box", body)) == "wait"
    post.ask(1, wire.PurgeMail, "acme.box", "acme.box")
    post.run()
    assert code(post.mail(3, "acme.box", body)) == "Confirm"


def test_a_rate_of_a_namespace_is_spent_by_all_its_users() -> None:
    post = Post(**tenants(quotas={"messages_s": 4}))
    for link in (2, 3, 1):
        post.publish(link, "acme.s", [b"a"] * 4)
    refused = post.peers[3].of(wire.Refused)
    assert [each.code for each in refused] == ["wait"]
    assert "namespaces.acme.quotas.messages_s (4)" in refused[0].reason
    assert not post.peers[2].of(wire.Refused)
    assert not post.peers[1].of(wire.Refused)


def test_what_comes_in_from_the_users_of_a_namespace_is_counted_and_what_they_are_refused() -> None:
    post = Post(**tenants(quotas={"streams": 1, "messages_s": 100}))
    frame = encode([b"a", b"b"], subject="s")
    post.publish(1, "acme.s", [b"x"] * 7)
    post.publish(2, "acme.s", [b"a", b"b", b"c"])
    post.mail(3, "acme.box", [b"a"])
    post.send(3, wire.Request("acme.svc", 8), frames=[frame])
    post.send(3, wire.Atomic(9, 2), wire.Publish("acme.s", 0), wire.Send("acme.box", 0),
              frames=[frame, encode([b"a"])])  # fmt: skip
    before = post.ask(2, wire.ListNamespaces)["namespaces"][0]
    assert before["messages_in"] == 3 + 1 + 2 + 2 + 1, "anna's seven are none of them"
    assert 5 * len(frame) < before["bytes_in"] < 10 * len(frame)
    assert before["refused"] == {}
    for at in range(3):
        post.send(2, wire.CreateStream(at + 1, f"acme.{at}"))
    post.publish(2, "acme.s", [b"a"] * 100)
    post.publish(3, "acme.s", [b"a"])
    after = post.ask(2, wire.ListNamespaces)["namespaces"][0]
    assert after["refused"] == {"rate": 1, "streams": 2}
    assert after["messages_in"] == before["messages_in"] + 100


def test_what_a_user_is_refused_by_a_quota_of_its_own_shows_at_the_namespace() -> None:
    post = Post(quota=lambda name: Quota(streams=1 if name == "bert" else 0), **tenants())
    for at in range(2):
        for link in (1, 2):
            post.send(link, wire.CreateStream(at + 1, f"acme.s{link}{at}"))
    [facts] = post.ask(2, wire.ListNamespaces)["namespaces"]
    assert facts["refused"] == {"streams": 1}


OVER_ALL: dict[str, tuple[dict[str, Any], list[wire.Command]]] = {
    "streams": ({"streams_max": 2}, [wire.CreateStream(9, "acme.new")]),
    "rings": (
        {"rings_max": 0, "rings_bytes_max": 1 << 40},
        [wire.CreateStream(9, "acme.new", {"ring_bytes": 256 << 20})],
    ),
    "bytes of rings": (
        {"rings_bytes_max": 1_000}, [wire.CreateStream(9, "acme.new", {"ring_bytes": 256 << 20})],
    ),
    "bytes of settings": (
        {"all_settings_bytes_max": 1_000},
        [wire.EditStream(9, "acme.s", {"description": "x" * 990})],
    ),
    "mailboxes": ({"mailboxes_max": 1}, [wire.EditMailbox(9, "acme.new", {})]),
    "services": ({"services_max": 1}, [wire.EditService(9, "acme.new", {})]),
    "cursors": ({"cursors_max": 1}, [wire.MoveCursor("acme.s", "new", 0, 9)]),
    "groups": ({"groups_max": 0}, [wire.JoinGroup(9, "acme.s", "g", ALL)]),
    "transactions": ({"transactions_max": 1}, [wire.BeginTransaction(b"new", 9)]),
    "bytes of open transactions": (
        {"staged_bytes_max": 100},
        [wire.BeginTransaction(b"new", 8), wire.Stage(b"new", "acme.s", 0, 9)],
    ),
    "offers": ({"offers_max": 0}, [wire.Offer(9, "acme.svc", ALL)]),
    "patterns of offers": ({"all_patterns_bytes_max": 1}, [wire.Offer(9, "acme.svc", ALL)]),
    "inboxes": ({"subscriptions_max": 0}, [wire.OpenInbox(9, "acme.box")]),
    "subscriptions": ({"subscriptions_max": 0}, [wire.Subscribe(9, "acme.s", ALL, [0])]),
    "patterns of subscriptions": (
        {"all_patterns_bytes_max": 1}, [wire.Subscribe(9, "acme.s", ALL, [0])],
    ),
}  # fmt: skip
"""Noun of a bound over all clients -> settings that make it reached, and commands for more."""


@pytest.mark.moderate
@pytest.mark.parametrize("noun", OVER_ALL)
def test_a_user_of_a_namespace_is_not_told_what_all_clients_have(noun: str) -> None:
    bounds, commands = OVER_ALL[noun]

    def refused(link: int) -> Any:
        post = Post(**tenants(), **bounds)
        frame = encode([b"a"], subject="s")
        post.publish(1, "s", [b"a"])
        post.publish(1, "acme.s", [b"a"])
        post.mail(1, "box", [b"a"])
        post.send(1, wire.Request("svc", 0), wire.MoveCursor("s", "c", 0, 0), frames=[frame])
        post.send(1, wire.BeginTransaction(b"anna", 1))
        post.send(link, *commands, frames=[frame] if noun == "bytes of open transactions" else [])
        return post.peers[link].last(wire.Refused)

    own = refused(3)
    assert (own.code, own.reason) == ("limit", f"the broker takes no more {noun}; ask the operator")
    others = refused(1)
    assert others.code == "limit"
    assert any(each.isdigit() for each in others.reason)


def test_too_many_links_are_refused_without_the_bound() -> None:
    quotas = Post(**tenants()).broker._shard.quotas
    told = [
        quotas.limit_told_to(user, "links", "at most 9 links").reason for user in ("bert", "anna")
    ]
    assert told == ["the broker takes no more links; ask the operator", "at most 9 links"]


def test_a_user_of_a_namespace_is_not_told_what_one_outside_of_it_has() -> None:
    post = Post(
        quota=lambda name: Quota(settings_bytes=500, mail_bytes=600) if name == "anna" else Quota(),
        **tenants(),
    )  # fmt: skip
    frame = encode([b"a"], subject="s")
    post.ask(1, wire.CreateStream, "acme.s", {"description": "x" * 300})
    edited = {"description": "y" * 600}
    refused = post.ask(3, wire.EditStream, "acme.s", edited)
    assert refused.code == "limit"
    assert refused.reason == (
        "the quota of the identity that it counts for is used up; ask the operator"
    )
    assert "identity 'anna' has" in post.ask(1, wire.EditStream, "acme.s", edited).reason
    post.send(1, wire.Request("acme.svc", 0), frames=[frame])
    post.send(3, wire.Offer(9, "acme.svc", ALL), wire.Credit(9, 10, 1 << 20))
    assert post.peers[3].of(wire.Work)
    number = next(iter(post.broker._shard.queues.requests))
    large = encode([bytes(1_000)], subject="s")
    post.send(3, wire.Reply(9, [number], 7), frames=[large])
    assert post.answer(3, 7).reason == "the requester's mailbox is full"


def test_a_users_own_quota_holds_within_the_namespace() -> None:
    own = Quota(streams=1)
    post = Post(quota=lambda name: own if name == "bert" else Quota(), **tenants(
        quotas={"streams": 3}
    ))  # fmt: skip
    for at in range(4):
        for link in (2, 3):
            post.send(link, wire.CreateStream(at + 1, f"acme.s{link}{at}"))
    assert "identity 'bert' has 1" in post.peers[2].of(wire.Refused)[0].reason
    assert [len(post.peers[link].of(wire.Refused)) for link in (2, 3)] == [3, 2]


def test_other_members_and_bounds_count_from_a_reload_on() -> None:
    post = Post(**tenants(quotas={"streams": 3}))
    post.send(2, wire.CreateStream(1, "acme.a"))
    post.send(3, wire.CreateStream(1, "acme.b"))

    def renew(**more: Any) -> None:
        settings = msgspec.structs.replace(post.broker._shard.settings, **tenants(**more))
        post.broker.reconfigure(settings, lambda credential, owner: None)

    renew(users=("carla",), quotas={"streams": 2})
    [facts] = post.ask(3, wire.ListNamespaces)["namespaces"]
    assert (facts["held"]["streams"], facts["quotas"]) == (1, {"streams": 2})
    assert facts["held"]["links"] == 1
    post.send(3, wire.CreateStream(2, "acme.c"), wire.CreateStream(3, "acme.d"))
    assert [each.code for each in post.peers[3].of(wire.Refused)] == ["limit"]
    renew(quotas={"streams": 4, "messages_s": 1})
    [facts] = post.ask(3, wire.ListNamespaces)["namespaces"]
    assert facts["held"]["streams"] == 3
    post.publish(3, "acme.a", [b"a"])
    post.publish(2, "acme.a", [b"a"])
    assert post.peers[2].last(wire.Refused).code == "wait", "a rate that is new binds at once"


# --- defaults, facts ------------------------------------------------------------------------


def test_first_use_under_a_prefix_makes_what_the_namespace_says() -> None:
    defaults: dict[str, Any] = {
        "default_stream": {"max_records": 7}, "default_mailbox": {"max_messages": 8},
        "default_service": {"attempts_max": 9},
    }  # fmt: skip
    common = {"default_stream": {"max_age_ms": 60_000, "max_records": 1}}
    post = Post(**common, **tenants(**defaults))
    frame = encode([b"a"], subject="s")
    for prefix in ("acme.", "acmex."):
        post.publish(1, f"{prefix}s", [b"a"])
        post.mail(1, f"{prefix}box", [b"a"])
        post.inbox(1, mailbox=f"{prefix}read", number=len(prefix), level="stored")
        post.send(1, wire.Request(f"{prefix}svc", 0), frames=[frame])
        post.ask(1, wire.CreateStream, f"{prefix}made", {"max_age_ms": 5})
        post.ask(1, wire.EditMailbox, f"{prefix}edited", {"ttl_ms": 5})

    def settings(kind: Any, name: str) -> dict[str, Any]:
        found: dict[str, Any] = post.ask(1, kind, name)["settings"]
        return found

    stream = settings(wire.StreamInfo, "acme.s")
    assert (stream["max_records"], stream["max_age_ms"]) == (7, 60_000)
    stream = settings(wire.StreamInfo, "acme.made")
    assert (stream["max_records"], stream["max_age_ms"]) == (7, 5)
    assert settings(wire.StreamInfo, "acmex.s")["max_records"] == 1
    for name in ("acme.box", "acme.read", "acme.edited"):
        assert settings(wire.MailboxInfo, name)["max_messages"] == 8
    assert settings(wire.MailboxInfo, "acmex.box")["max_messages"] == 0
    assert settings(wire.ServiceInfo, "acme.svc")["attempts_max"] == 9
    assert settings(wire.ServiceInfo, "acmex.svc")["attempts_max"] == 0
    post.ask(1, wire.EditStream, "acme.made", {}, replace=True)
    assert settings(wire.StreamInfo, "acme.made")["max_records"] == 7


def test_namespaces_are_told_to_their_users_and_to_those_who_manage_users() -> None:
    settings = tenants(users=("carla",), default_stream={"max_records": 7})
    other = Namespace(name="beta", prefix="beta.", users=("eve",))
    settings["namespaces"] = (*settings["namespaces"], other)
    permit = settings.pop("permit")

    def but_bert(owner: str, action: str, name: str) -> bool:
        return action == "identity" or (owner != "bert" and permit(owner, action, name))

    post = Post(permit=but_bert, **settings)
    told = post.ask(1, wire.ListNamespaces)
    assert [each["namespace"] for each in told["namespaces"]] == ["acme", "beta"]
    assert not told["more"]
    first = post.ask(1, wire.ListNamespaces, "", 1)
    assert ([each["namespace"] for each in first["namespaces"]], first["more"]) == (["acme"], True)
    second = post.ask(1, wire.ListNamespaces, "acme", 1)
    assert [each["namespace"] for each in second["namespaces"]] == ["beta"]
    assert not second["more"]
    assert post.ask(3, wire.ListNamespaces, "acme")["namespaces"] == []
    assert post.ask(2, wire.ListNamespaces).code == "forbidden"
    [own] = post.ask(3, wire.ListNamespaces)["namespaces"]
    assert own == {
        "namespace": "acme", "prefix": "acme.", "users": ["carla"], "held": {"links": 1},
        "quotas": {}, "messages_in": 0, "bytes_in": 0, "refused": {},
        "default_stream": {"max_records": 7}, "default_mailbox": {},
        "default_service": {},
    }  # fmt: skip
