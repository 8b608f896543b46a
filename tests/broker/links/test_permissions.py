"""Permissions that the commands of mail, services, cursors and groups need."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.post import Post, code

ALL = ["all"]


class Gate:
    """Permissions that allow what is not closed, and keep what was asked."""

    def __init__(self) -> None:
        self.closed = False
        self.asked: set[tuple[str, str]] = set()

    def __call__(self, identity: str, action: str, name: str) -> bool:
        if not self.closed or action == "identity":
            return True
        self.asked.add((action, name))
        return False


FACTS = {("read", "s"), ("trim", "s"), ("manage_streams", "s")}
COMMANDS: list[tuple[wire.Command, set[tuple[str, str]]]] = [
    (wire.Publish("s", 9), {("write", "s")}),
    (wire.Subscribe(9, "s", ALL, [0]), {("read", "s")}),
    (wire.CreateStream(9, "new"), {("create", "new")}),
    (wire.EditStream(9, "s", {}), {("manage_streams", "s")}),
    (wire.RemoveStream(9, "s"), {("manage_streams", "s")}),
    (wire.StreamInfo(9, "s"), FACTS),
    (wire.FindOffset(9, "s", [0]), FACTS),
    (wire.FindOffset(9, "s", [4, 5]), {("read", "s")}),
    (wire.PlanRead(9, "s", ALL, [0]), {("read", "s")}),
    (wire.ListLinks(9), {("manage_clients", "links")}),
    (wire.Kick(9, 2), {("manage_clients", "links")}),
    (wire.EndTransaction(9, b"t"), {("manage_clients", "transactions")}),
    (wire.Send("box", 9), {("send", "box")}),
    (wire.OpenInbox(9, "box"), {("receive", "box")}),
    (wire.PeekMail(9, "box"), {("receive", "box")}),
    (wire.PurgeMail(9, "box", "box"), {("purge", "box")}),
    (wire.MailboxInfo(9, "box"), {("receive", "box"), ("purge", "box"), ("manage_queues", "box")}),
    (wire.EditMailbox(9, "box", {}), {("manage_queues", "box")}),
    (wire.RemoveMailbox(9, "box", "box"), {("manage_queues", "box")}),
    (wire.Request("svc", 9), {("request", "svc")}),
    (wire.Offer(9, "svc", ALL), {("work", "svc")}),
    (wire.CancelRequest(9, "svc", b"k"), {("request", "svc")}),
    (
        wire.ServiceInfo(9, "svc"),
        {("request", "svc"), ("work", "svc"), ("manage_queues", "svc")},
    ),
    (wire.EditService(9, "svc", {}), {("manage_queues", "svc")}),
    (wire.Requeue(9, "svc"), {("manage_queues", "svc")}),
    (wire.RemoveService(9, "svc", "svc"), {("manage_queues", "svc")}),
    (wire.PeekRequests(9, "svc"), {("manage_queues", "svc")}),
    (wire.MoveCursor("s", "c", 1, 9), {("read", "s"), ("manage_streams", "s")}),
    (wire.Trim("s", 1, 9), {("trim", "s")}),
    (wire.PurgeSubjects("s", ["all"], 1, 9), {("trim", "s")}),
    (wire.CursorInfo(9, "s", "c"), FACTS),
    (wire.EditCursor(9, "s", "c", {}), {("read", "s"), ("manage_streams", "s")}),
    (wire.RemoveCursor(9, "s", "c"), {("manage_streams", "s")}),
    (wire.JoinGroup(9, "s", "g", ALL), {("read", "s")}),
    (wire.GroupInfo(9, "s", "g"), FACTS),
    (wire.RemoveGroup(9, "s", "g"), {("manage_streams", "s")}),
    (wire.UpdateKey("s", 9), {("write", "s")}),
    (wire.GetKey(9, "s", "k"), {("read", "s"), ("replay", "s")}),
    (wire.ListKeys(9, "s", ALL), {("read", "s"), ("replay", "s")}),
    (wire.StreamSchemas(9, "s"), {("read", "s"), ("write", "s")}),
    (wire.EditGroup(9, "s", "g", {}), {("manage_streams", "s")}),
    (wire.RequeueGroup(9, "s", "g"), {("manage_streams", "s")}),
    (wire.ResetGroup(9, "s", "g", [0]), {("manage_streams", "s")}),
]
"""Command -> permissions that it may ask for."""


@pytest.mark.parametrize(("command", "needs"), COMMANDS, ids=lambda value: type(value).__name__)
def test_a_command_without_its_permission_is_refused_and_does_nothing(
    command: wire.Command, needs: set[tuple[str, str]]
) -> None:
    gate = Gate()
    post = Post(permit=gate)
    frame = encode([b"a"], subject="s")
    post.mail(2, "box", [b"kept"])
    post.publish(2, "s", [b"a", b"b"])
    post.send(2, wire.Request("svc", 0), wire.MoveCursor("s", "c", 0, 0), frames=[frame])
    before = repr(post.broker._shard.queues)
    gate.closed = True
    post.send(3, command, frames=[frame] * command.content_frames)
    answer: Any = post.peers[3].commands[-1]
    assert isinstance(answer, wire.Refused)
    assert (answer.code, answer.reference) == ("forbidden", 9)
    assert gate.asked <= needs
    assert gate.asked
    assert repr(post.broker._shard.queues) == before


def test_a_step_needs_what_its_parts_need_and_a_page_leaves_out_what_is_not_allowed() -> None:
    gate = Gate()
    post = Post(permit=gate)
    frame = encode([b"a"], subject="s")
    post.mail(2, "box", [b"kept"])
    post.publish(2, "s", [b"a"])
    gate.closed = True
    for part in (
        wire.Send("box", 0), wire.Publish("s", 0), wire.Publish("new", 0), wire.Request("svc", 0),
        wire.MoveCursor("s", "c", 1, 0),
    ):  # fmt: skip
        post.send(3, wire.Atomic(8, 1), part, frames=[frame] * part.content_frames)
        assert post.answer(3, 8).code == "forbidden"
        assert post.info("box") is not None
    assert post.ask(3, wire.MailboxInfo, "*") == {"entries": [], "more": False}
    post.mail(3, "carla", [b"own"])
    assert post.answer(3, post._trackers).code == "forbidden", "sending is not reading"
    assert isinstance(post.inbox(3).last(wire.Subscribed), wire.Subscribed), "its own it may read"
    assert post.ask(3, wire.PeekMail, "carla")["messages"] == []


class Verbs:
    """Permissions of all verbs but some."""

    def __init__(self, *without: str) -> None:
        self.without = without

    def __call__(self, identity: str, action: str, name: str) -> bool:
        return action not in self.without


class Only(Verbs):
    """Permissions of some verbs alone."""

    def __call__(self, identity: str, action: str, name: str) -> bool:
        return action in (*self.without, "identity")


@pytest.mark.parametrize("verb", ["trim", "manage_streams", "read", "write"])
def test_who_may_trim_or_manage_a_stream_is_told_its_facts_and_none_of_its_records(
    verb: str,
) -> None:
    gate = Gate()
    post = Post(permit=lambda *asked: gate(*asked) or Only(verb)(*asked))
    post.publish(2, "s", [b"a", b"b"])
    post.send(2, wire.MoveCursor("s", "c", 1, 9), wire.JoinGroup(10, "s", "g", ALL))
    gate.closed = True
    told = verb != "write"
    for kind, *names in (
        (wire.StreamInfo, "s"), (wire.CursorInfo, "s", "c"), (wire.CursorInfo, "s"),
        (wire.GroupInfo, "s", "g"), (wire.GroupInfo, "s"),
    ):  # fmt: skip
        assert code(post.ask(3, kind, *names)) == ("dict" if told else "forbidden"), kind
    assert len(post.ask(3, wire.ListStreams)["streams"]) == told
    assert len(post.ask(3, wire.CursorInfo, "")["entries"]) == told
    assert len(post.ask(3, wire.GroupInfo, "")["entries"]) == told
    for start in ([0], [1], [2, 1], [3, 5]):
        assert code(post.ask(3, wire.FindOffset, "s", start)) == ("dict" if told else "forbidden")
    assert code(post.ask(3, wire.FindOffset, "s", [4, 5])) == (
        "dict" if verb == "read" else "forbidden"
    )
    post.send(3, wire.Subscribe(11, "s", ALL, [0], credit_records=9, credit_bytes=999_999))
    assert len(post.peers[3].of(wire.Subscribed)) == (verb == "read")


@pytest.mark.parametrize("verb", ["purge", "manage_queues", "receive", "send"])
def test_who_may_purge_or_manage_a_mailbox_is_told_its_facts_and_none_of_its_messages(
    verb: str,
) -> None:
    post = Post(permit=Only(verb, "send", "create_mailbox"))
    post.mail(2, "box", [b"kept"])
    told = verb != "send"
    assert code(post.ask(3, wire.MailboxInfo, "box")) == ("dict" if told else "forbidden")
    assert code(post.ask(3, wire.PeekMail, "box")) == ("dict" if verb == "receive" else "forbidden")
    assert len(post.ask(3, wire.MailboxInfo, "*")["entries"]) == told


def gaps(post: Post, link: int) -> list[tuple[int, str]]:
    """The gaps that a link was told of, as (first offset, next offset and code)."""
    return [
        (each.from_, f"{each.to}:{each.code}")
        for each in post.peers[link].commands
        if isinstance(each, wire.Gap)
    ]


@pytest.mark.parametrize("start", [[0], [2, 1], [6]], ids=["earliest", "offset", "last"])
def test_history_is_a_gap_for_a_reader_that_may_not_replay(start: list[Any]) -> None:
    post = Post(permit=Verbs("replay"))
    post.publish(2, "s", [b"a", b"b"])
    post.send(3, wire.Subscribe(9, "s", ALL, start, credit_records=9, credit_bytes=999_999))
    begun = post.peers[3].last(wire.Subscribed)
    assert gaps(post, 3) == [(begun.next, "2:forbidden")]
    post.publish(2, "s", [b"c"])
    delivered = post.peers[3].of(wire.Deliver)
    assert [(each.from_, each.next) for each in delivered] == [(2, 3)]


def test_a_reader_that_may_not_replay_begins_at_the_tail_without_a_gap_and_joins_no_group() -> None:
    post = Post(permit=Verbs("replay"))
    post.publish(2, "s", [b"a", b"b"])
    post.send(3, wire.Subscribe(9, "s", ALL, [1], credit_records=9, credit_bytes=999_999))
    assert gaps(post, 3) == []
    post.send(3, wire.JoinGroup(10, "s", "g", ALL))
    assert post.answer(3, 10).code == "forbidden"


def test_first_use_creates_no_mailbox_or_service_where_that_is_denied() -> None:
    post = Post(permit=Verbs("create_mailbox", "create_service"))
    frame = encode([b"a"], subject="s")
    for command in (
        wire.Send("box", 9), wire.OpenInbox(9, "box"), wire.Request("svc", 9),
        wire.Offer(9, "svc", ALL), wire.EditService(9, "svc", {}), wire.EditMailbox(9, "box", {}),
    ):  # fmt: skip
        answers = len(post.peers[3].commands)
        post.send(3, command, frames=[frame] * command.content_frames)
        assert list(map(code, post.peers[3].commands[answers:])) == ["forbidden"], command
    assert isinstance(post.inbox(3).last(wire.Subscribed), wire.Subscribed), "its own is its own"


class Bound(Verbs):
    """Permissions to write under subjects that begin with `eu.` only."""

    def __init__(self) -> None:
        super().__init__("write")

    def subjects(self, owner: str, stream: str) -> Any:
        return (lambda key: key.startswith("eu.")) if stream == "s" else None


def test_a_writer_that_is_bound_to_subjects_publishes_under_no_other() -> None:
    bound = Bound()
    post = Post(permit=bound, subjects=bound.subjects)
    good, bad = (encode([b"a", b"b"], subject=["eu.x", name]) for name in ("eu.y", "us.y"))
    for frame, says in ((good, None), (bad, "us.y"), (encode([b"a"]), "''"), (good, None)):
        for command in (
            [wire.Publish("s", 8)],
            [wire.Atomic(8, 1), wire.Publish("s", 0)],
        ):
            post.send(3, *command, frames=[frame])
            answer = post.answer(3, 8)
            if says is None:
                assert isinstance(answer, wire.Confirm)
            else:
                assert (answer.code, says in answer.reason) == ("forbidden", True)
    post.send(3, wire.Publish("other", 8), frames=[good])
    assert post.answer(3, 8).code == "forbidden"
    many = encode([b""] * 9_000, subject=[f"eu.{n}" for n in range(9_000)])
    post.send(3, wire.Publish("s", 8), frames=[many])
    assert post.answer(3, 8).code == "too_large"


def test_events_tell_what_was_refused_and_what_administrators_did() -> None:
    post = Post(permit=Verbs("purge"))
    post.mail(2, "box", [b"a"])
    post.ask(3, wire.PurgeMail, "box", "box")
    assert [(each["identity"], each["command"]) for each in post.told("forbidden")] == [
        ("carla", "PurgeMail")
    ]
    post.ask(3, wire.CreateStream, "orders")
    post.ask(3, wire.StreamInfo, "orders")
    post.send(3, wire.MoveCursor("orders", "c", 0, 9, force=True))
    post.ask(3, wire.Kick, 2)
    assert post.told("administered") == [
        {"by": "carla", "link": 3, "command": "CreateStream", "stream": "orders"},
        {"by": "carla", "link": 3, "command": "MoveCursor", "stream": "orders", "cursor": "c"},
        {"by": "carla", "link": 3, "command": "Kick", "ended": 2},
    ]


def test_users_are_told_to_those_who_manage_users_only() -> None:
    asked: list[tuple[str, str]] = []

    def users(verb: str, name: str) -> list[dict[str, Any]]:
        asked.append((verb, name))
        return [{"user": "ann"}, {"user": "bob"}]

    post = Post(users=users, page_max=1)
    post.send(2, wire.ListUsers(7, "read", "orders"))
    assert asked == [("read", "orders")]
    assert post.peers[2].last(wire.Result).value == {"users": [{"user": "ann"}], "more": True}
    post.send(2, wire.ListUsers(8, "read", "x" * 300))
    assert post.peers[2].last(wire.Refused).code == "bad_name"
    post = Post(permit=Verbs("manage_users"), users=users)
    post.send(2, wire.ListUsers(9))
    assert post.peers[2].last(wire.Refused).code == "forbidden"


def test_a_user_asks_what_it_may_do_without_a_permission_and_is_told_of_nobody_else() -> None:
    post = Post(
        permit=Only("read"), users=lambda verb, name: [{"user": "secret"}],
        subjects=lambda owner, stream: (lambda key: True) if stream == "s" else None,
    )  # fmt: skip
    for verb, name, may in (
        ("read", "s", True), ("trim", "s", False), ("write", "s", True), ("write", "t", False),
        ("nonsense", "s", False),
    ):  # fmt: skip
        told = post.ask(3, wire.ListUsers, verb, name, own=True)
        assert told == {"users": [{"user": "carla", "may": may}], "more": False}
    assert code(post.ask(3, wire.ListUsers, "read", "x" * 300, own=True)) == "bad_name"


def test_settings_are_told_page_by_page_to_administrators_who_ask_for_them() -> None:
    settings = [["a", 1, "default"], ["b", "x", "file:2"], ["c", True, "VARIABLE"]]
    reload = {"at_ms": 5, "changes": [["a", "restart", ""]], "more": False}

    def in_force() -> dict[str, Any]:
        return {"settings": settings, "reload": reload}

    post = Post(in_force=in_force, page_max=2)
    first = post.ask(2, wire.BrokerInfo, "")
    assert (first["settings"], first["settings_more"]) == (settings[:2], True)
    assert first["reload"] == reload
    second = post.ask(2, wire.BrokerInfo, "b")
    assert (second["settings"], second["settings_more"]) == (settings[2:], False)
    assert "settings" not in post.ask(2, wire.BrokerInfo)
    post = Post(permit=Verbs("admin"), in_force=in_force)
    assert post.ask(2, wire.BrokerInfo, "").code == "forbidden"
    assert "counters" in post.ask(2, wire.BrokerInfo)


def test_the_shell_is_asked_to_read_the_configuration_anew_and_answers_later() -> None:
    asked: list[tuple[int, int]] = []
    refusal = [""]

    def reload(link: int, request: int) -> str:
        asked.append((link, request))
        return refusal[0]

    post = Post(reload=reload)
    post.send(2, wire.ReloadConfig(7))
    assert asked == [(2, 7)]
    post.broker.reloaded(2, 7, {"changes": []})
    post.run()
    assert post.peers[2].last(wire.Result).value == {"changes": []}
    refusal[0] = "already"
    post.send(2, wire.ReloadConfig(8))
    assert post.peers[2].last(wire.Refused).code == "wait"
    post = Post(permit=Verbs("manage_users"), reload=reload)
    post.send(2, wire.ReloadConfig(9))
    assert post.peers[2].last(wire.Refused).code == "forbidden"
    assert asked == [(2, 7), (2, 8)]


def test_a_credential_that_counts_no_more_opens_no_link() -> None:
    post = Post(known=lambda credential: credential != "gone")
    post.send(8, wire.Hello((1, 1), bytes(16)), identity="gone")
    assert post.peers[8].last(wire.Refused).code == "unauthenticated"
