"""Replicas: identities that the broker derives from a template, one a session."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from malamute_protocol import commands as wire
from malamute_protocol.address import replica_name, replica_number, template_fault
from malamute_protocol.encode import encode
from malamute_py.broker.limits import Quota
from malamute_py.config import Grant
from malamute_py.server.authentication.carriers import Carriers
from malamute_py.server.authentication.permissions import Permissions
from tests.broker.shell import Peer, Shell

GRACE_MS = 30_000


def hello(
    shell: Shell, link: int, template: str = "web-{n}", *, session: int = 0, number: int = -1,
    credential: str = "",
) -> Peer:  # fmt: skip
    """Send the HELLO of a replica; its session is that of its link unless it comes back."""
    shell.send(
        link,
        wire.Hello((1, 1), (session or link).to_bytes(16, "big"), template, number=number),
        identity=credential,
    )
    return shell.peers[link]


def name(peer: Peer) -> str:
    welcome: wire.Welcome = peer.last(wire.Welcome)
    return welcome.identity


def refusal(peer: Peer) -> wire.Refused:
    assert peer.closed
    refused: wire.Refused = peer.last(wire.Refused)
    return refused


def with_users(*users: str, templates: Any = None, **settings: Any) -> Shell:
    """Return a broker whose users authenticate."""
    carriers = Carriers(users, templates or {})
    grants: dict[str, Grant] = settings.pop("grants", {})
    return Shell(permit=Permissions(grants, carriers), carrier=carriers, **settings)


def test_replicas_get_the_least_free_number_and_do_not_fence_each_other() -> None:
    shell = Shell()
    peers = [hello(shell, link) for link in (1, 2, 3)]
    assert [name(peer) for peer in peers] == ["web-0", "web-1", "web-2"]
    assert not any(peer.closed for peer in peers)
    shell.send(2, wire.Bye())
    assert name(hello(shell, 4)) == "web-1", "freed at once by a client that ended in order"
    assert name(hello(shell, 5, "api-{n}")) == "api-0"


@pytest.mark.parametrize("how", ["lost", "silent", "bye silent", "replaced"])
def test_a_session_that_comes_back_gets_its_own_number(how: str) -> None:
    shell = Shell()
    hello(shell, 1)
    hello(shell, 2)
    match how:
        case "lost":
            shell.broker.link_lost(1, shell.now_ms)
            shell.run()
        case "silent":
            shell.wait(14_999)
            shell.send(2, wire.Ping())
            shell.wait(5_000)
        case "bye silent":
            shell.send(1, wire.Bye("silent", "you were not heard"))
    assert shell.peers[1].closed == (how != "replaced")
    assert name(hello(shell, 3)) == "web-2"
    assert name(hello(shell, 4, session=1, number=0)) == "web-0"
    assert shell.peers[1].closed
    assert not shell.peers[2].closed


def test_another_session_takes_a_number_after_its_grace_time_and_not_before() -> None:
    shell = Shell(replica_grace_ms=GRACE_MS)
    hello(shell, 1)
    shell.broker.link_lost(1, shell.now_ms)
    shell.wait(GRACE_MS - 1)
    assert name(hello(shell, 2)) == "web-1"
    shell.wait(1)
    assert name(hello(shell, 3)) == "web-0"
    assert name(hello(shell, 4, session=1, number=0)) == "web-2", "its own has gone to another"


def test_a_shorter_grace_time_holds_for_all_who_are_absent() -> None:
    shell = Shell(replica_grace_ms=GRACE_MS)
    hello(shell, 1)
    hello(shell, 2)
    shell.broker.link_lost(1, shell.now_ms)
    shell.wait(1_000)
    settings = msgspec.structs.replace(shell.broker._shard.settings, replica_grace_ms=1_000)
    shell.broker.reconfigure(settings, lambda credential, owner: None)
    shell.broker.link_lost(2, shell.now_ms)
    assert name(hello(shell, 3)) == "web-0"
    assert name(hello(shell, 4)) == "web-2"
    shell.wait(1_000)
    assert name(hello(shell, 5)) == "web-1"


def test_after_a_restart_of_the_broker_replicas_get_the_numbers_that_they_had() -> None:
    shell = Shell()
    for link in (1, 2, 3):
        hello(shell, link)
    shell.restart()
    assert name(hello(shell, 13, session=3, number=2)) == "web-2"
    assert name(hello(shell, 12, session=2, number=1)) == "web-1"
    assert name(hello(shell, 14)) == "web-0"
    assert name(hello(shell, 11, session=1, number=0)) == "web-3"


@pytest.mark.parametrize("number", [-7, 4, 2**62])
def test_a_number_that_cannot_be_had_is_passed_over(number: int) -> None:
    assert name(hello(Shell(replicas_max=4), 1, number=number)) == "web-0"


def test_when_all_numbers_are_taken_the_next_replica_is_refused_until_one_is_free() -> None:
    shell = Shell(replicas_max=2)
    hello(shell, 1)
    hello(shell, 2)
    refused = refusal(hello(shell, 3))
    assert (refused.code, refused.retry_ms) == ("limit", 100)
    assert "each of the 2 numbers of 'web-{n}' is taken" in refused.reason
    assert shell.broker.counters["replicas_refused"] == 1
    shell.send(1, wire.Bye())
    assert name(hello(shell, 4)) == "web-0"


def test_a_number_whose_name_a_client_has_as_it_is_is_passed_over() -> None:
    shell = Shell()
    shell.hello(1, identity="web-0")
    assert name(hello(shell, 2)) == "web-1"
    assert not shell.peers[1].closed
    assert name(hello(shell, 3, "web-1{n}")) == "web-10"
    assert name(hello(shell, 4, number=10)) == "web-2", "another template gave that name"


def test_a_client_that_asks_for_a_replicas_name_is_refused_and_the_replica_stays() -> None:
    shell = Shell()
    hello(shell, 1)
    refused = refusal(shell.hello(2, identity="web-0"))
    assert refused.code == "in_use"
    assert "'web-0' is a replica's, of 'web-{n}'" in refused.reason
    assert not shell.peers[1].closed
    shell.send(1, wire.Bye())
    assert name(shell.hello(3, identity="web-0")) == "web-0"


@pytest.mark.parametrize(
    "template", ["{n}{n}", "web-{x}", "web-{n", "web-n}", "{{n}}", "-{n}", "a b{n}", "~{n}",
                 "w" * 249 + "{n}"],
)  # fmt: skip
def test_a_malformed_template_is_refused_by_name(template: str) -> None:
    assert template_fault(template)
    assert refusal(hello(Shell(), 1, template)).code == "bad_name"


def test_a_template_has_a_name_for_each_number_and_each_name_one_number() -> None:
    for template in ("{n}", "web-{n}", "a{n}b", "w" * 248 + "{n}"):
        assert not template_fault(template)
        for number in (0, 9, 10, 9_999_999):
            assert replica_number(template, replica_name(template, number)) == number
    for other in ("web-", "web-01", "web-1x", "web-x", "we-1", "web-10000000", "web-٣"):
        assert replica_number("web-{n}", other) == -1


def test_a_session_has_one_template_and_one_credential() -> None:
    shell = with_users("ann", "bob")
    hello(shell, 1, "ann-{n}", credential="ann")
    for credential, template in (("bob", "bob-{n}"), ("ann", "ann")):
        peer = hello(shell, 2, template, session=1, credential=credential)
        assert refusal(peer).code == "forbidden"
        del shell.peers[2]
    assert not shell.peers[1].closed


# --- credentials -----------------------------------------------------------------------------


def test_a_user_derives_from_its_own_name_and_from_the_templates_that_it_was_given() -> None:
    shell = with_users("ann", "bob", templates={"ann": ["web-{n}"]})
    assert name(hello(shell, 1, "ann-{n}", credential="ann")) == "ann-0"
    assert name(hello(shell, 2, "web-{n}", credential="ann")) == "web-0"
    for link, credential, template in (
        (3, "bob", "web-{n}"), (4, "bob", "ann-{n}"), (5, "ann", "x{n}"), (6, "ann", "ann{n}"),
    ):  # fmt: skip
        refused = refusal(hello(shell, link, template, credential=credential))
        assert refused.code == "forbidden"
        assert f"identities of the template '{template}'" in refused.reason
    assert refusal(hello(shell, 7, "ann-0", credential="bob")).code == "forbidden"


def test_a_users_own_name_is_never_derived_for_another() -> None:
    shell = with_users("web", "web-0", "web-2", templates={"bob": ["w{n}"], "ann": ["w1{n}"]})
    assert name(hello(shell, 1, "web-{n}", credential="web")) == "web-1"
    assert name(hello(shell, 2, "web-{n}", credential="web", number=2)) == "web-3"
    carriers = Carriers(["ann", "bob"], {"bob": ["w{n}"], "ann": ["w1{n}"]})
    assert [carriers(one) for one in ("w5", "w15", "ann-3", "ann-03", "ann", "eve-1")] == [
        "bob", "bob", "ann", "", "ann", "",
    ]  # fmt: skip


def test_with_permissions_a_replica_may_do_what_its_credential_may_and_nothing_else() -> None:
    grants = {
        "ann": Grant(write=["s"], receive=["shared"]),
        "ann-0": Grant(write=["secret"], admin=True),
        "*": Grant(write=["public"]),
    }
    shell = with_users("ann", grants=grants)
    peer = hello(shell, 1, "ann-{n}", credential="ann")
    assert name(peer) == "ann-0"
    codes = {}
    for number, stream in enumerate(("s", "secret", "public"), 1):
        shell.publish(1, stream, [b"x"], tracker=number)
        codes[stream] = [
            command.code if isinstance(command, wire.Refused) else "taken"
            for command in peer.commands
            if getattr(command, "tracker", getattr(command, "reference", -1)) == number
        ]
    assert codes == {"s": ["taken"], "secret": ["forbidden"], "public": ["forbidden"]}
    for number, box in enumerate(("", "ann-0", "ann", "shared"), 11):
        shell.send(1, wire.OpenInbox(number, box))
    shell.send(1, wire.OpenInbox(20, "bert"), wire.OpenInbox(21, "ann-1"))
    opened = [command.subscription for command in peer.of(wire.Subscribed)]
    assert opened == [11, 12, 13, 14], "its own, its credential's, and what is granted"
    assert [refused.reference for refused in peer.of(wire.Refused)][-2:] == [20, 21]


def test_where_permissions_are_set_a_link_without_a_credential_gets_no_template() -> None:
    shell = Shell(permit=Permissions({"ann": Grant(admin=True)}))
    assert refusal(hello(shell, 1)).code == "forbidden"


@pytest.mark.parametrize("credential", ["", "web"])
def test_replicas_share_one_quota_as_one_owner(credential: str) -> None:
    owner = credential or "web-{n}"
    asked: list[str] = []

    def quota(of: str) -> Quota:
        asked.append(of)
        return Quota(subscriptions=2, streams=1, links=3) if of == owner else Quota()

    carriers = Carriers([credential] if credential else [], {})
    shell = Shell(quota=quota, permit=Permissions({}, carriers), carrier=carriers)
    for link in (1, 2, 3):
        hello(shell, link, credential=credential)
    assert refusal(hello(shell, 4, credential=credential)).code == "limit"
    for link in (1, 2, 3):
        shell.subscribe(link, 9, "s")
    assert [shell.peers[link].of(wire.Refused) != [] for link in (1, 2, 3)] == [False, False, True]
    shell.publish(1, "s", [b"x"])
    shell.publish(2, "other", [b"x"], tracker=2)
    assert shell.peers[2].last(wire.Refused).code == "limit"
    shell.restart()
    hello(shell, 12, credential=credential, session=2, number=1)
    shell.publish(12, "other", [b"x"], tracker=3)
    assert shell.peers[12].last(wire.Refused).code == "limit", "the log says whose streams are"
    assert "web-0" not in asked
    assert "web-1" not in asked


def test_mail_of_all_replicas_of_a_credential_counts_as_its_own_after_a_restart_too() -> None:
    quota = {"web": Quota(mail_bytes=1_500)}
    carriers = Carriers(["web"], {})
    shell = Shell(
        quota=lambda of: quota.get(of, Quota()), permit=Permissions({}, carriers), carrier=carriers
    )

    def send(link: int, tracker: int) -> Any:
        content = encode([b"x" * 700], subject="s")
        shell.send(link, wire.Send("box", tracker), frames=[content])
        return shell.peers[link].commands[-1]

    hello(shell, 1, credential="web")
    hello(shell, 2, credential="web")
    assert isinstance(send(1, 1), wire.Confirm)
    assert send(2, 2).code == "wait", "what the other replica sent counts"
    shell.restart()
    hello(shell, 2, credential="web")
    assert send(2, 2).code == "wait"


def test_a_replicas_mailbox_and_producer_are_those_of_its_number() -> None:
    shell = Shell()
    hello(shell, 1)
    shell.send(1, wire.OpenProducer(5))
    opened = shell.peers[1].last(wire.Result).value["id"]
    shell.send(1, wire.Bye())
    shell.send(2, wire.Hello((1, 1), bytes(16), "api"))
    shell.send(2, wire.Send("web-0", 9), frames=[encode([b"for web-0"], subject="s")])
    hello(shell, 3)
    shell.send(3, wire.OpenInbox(7, "", 9, 1 << 20), wire.OpenProducer(8, opened, 0))
    assert [letter.body for letter in shell.peers[3].mail[7]] == [b"for web-0"]
    assert shell.peers[3].last(wire.Result).value["id"] == opened
    shell.send(3, wire.Send("box", 1), frames=[encode([b"x"], subject="s")])
    shell.send(2, wire.OpenInbox(7, "box", 9, 1 << 20))
    assert shell.peers[2].mail[7][0].mail.sender == "web-0"


def test_numbers_kept_for_sessions_without_a_link_are_bounded_and_forgotten() -> None:
    shell = Shell(links_max=3, replica_grace_ms=GRACE_MS)
    for link in range(1, 11):
        hello(shell, link, f"t{link}-{{n}}")
        shell.broker.link_lost(link, shell.now_ms)
    replicas = shell.broker._links.replicas
    assert len(replicas) == len(replicas._absent) == 3
    shell.wait(GRACE_MS)
    hello(shell, 20)
    assert list(replicas.names) == ["web-0"]
    assert (len(replicas._families), len(replicas._absent)) == (1, 0)
    shell.send(20, wire.Bye())
    assert not replicas.names
    assert not replicas._families
