"""Permissions that the commands of mail, services, cursors and groups need."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.post import Post

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


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (wire.Send("box", 9), {("send", "box")}),
        (wire.OpenInbox(9, "box"), {("receive", "box")}),
        (wire.PeekMail(9, "box"), {("receive", "box")}),
        (wire.PurgeMail(9, "box", "box"), {("admin", "box")}),
        (wire.MailboxInfo(9, "box"), {("receive", "box")}),
        (wire.EditMailbox(9, "box", {}), {("admin", "box")}),
        (wire.RemoveMailbox(9, "box", "box"), {("admin", "box")}),
        (wire.Request("svc", 9), {("request", "svc")}),
        (wire.Offer(9, "svc", ALL), {("work", "svc")}),
        (wire.CancelRequest(9, "svc", b"k"), {("request", "svc")}),
        (wire.ServiceInfo(9, "svc"), {("request", "svc"), ("work", "svc"), ("admin", "svc")}),
        (wire.EditService(9, "svc", {}), {("admin", "svc")}),
        (wire.Requeue(9, "svc"), {("admin", "svc")}),
        (wire.RemoveService(9, "svc", "svc"), {("admin", "svc")}),
        (wire.MoveCursor("s", "c", 1, 9), {("read", "s")}),
        (wire.CursorInfo(9, "s", "c"), {("read", "s")}),
        (wire.EditCursor(9, "s", "c", {}), {("read", "s")}),
        (wire.RemoveCursor(9, "s", "c"), {("admin", "s")}),
        (wire.JoinGroup(9, "s", "g", ALL), {("read", "s")}),
        (wire.GroupInfo(9, "s", "g"), {("read", "s")}),
        (wire.RemoveGroup(9, "s", "g"), {("admin", "s")}),
        (wire.UpdateKey("s", 9), {("write", "s")}),
        (wire.GetKey(9, "s", "k"), {("read", "s")}),
        (wire.ListKeys(9, "s", ALL), {("read", "s")}),
    ],
    ids=lambda value: type(value).__name__,
)
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
