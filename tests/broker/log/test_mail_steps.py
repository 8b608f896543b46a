"""Mail as parts of atomic steps: together or not at all, and nothing stays reserved."""

from __future__ import annotations

from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.post import Post


class Stepping(Post):
    """A post whose links send steps."""

    def step(self, link: int, *parts: Any, key: bytes = b"", tracker: int = -1) -> Any:
        """Send one step; a part is a command, or a SEND and its bodies."""
        if tracker < 0:
            self._trackers += 1
            tracker = self._trackers
        commands: list[wire.Command] = []
        frames: list[bytes] = []
        for part in parts:
            if isinstance(part, tuple):
                commands.append(part[0])
                frames.append(encode(part[1], subject="s"))
            else:
                commands.append(part)
        self.send(link, wire.Atomic(tracker, len(parts), 0, key), *commands, frames=frames)
        return self.answer(link, tracker)


def send(mailbox: str, *bodies: bytes, **fields: Any) -> tuple[wire.Send, list[bytes]]:
    return wire.Send(mailbox, 0, **fields), list(bodies)


def code(answer: Any) -> str:
    return answer.code if isinstance(answer, wire.Refused) else type(answer).__name__


def test_mail_to_several_new_mailboxes_is_one_step() -> None:
    post = Stepping()
    answer = post.step(1, send("one", b"a"), send("two", b"b"), send("one", b"c", b"d"))
    assert (code(answer), answer.offset) == ("Confirm", 0)
    bundles = [bundle for ready in post.readies for bundle in ready.appends]
    assert len(bundles) == 1
    assert len(post.told("mailbox_created")) == 2
    post.restart()
    post.inbox(2, mailbox="one")
    assert (post.got(2), post.numbers(2)) == ([b"a", b"c", b"d"], [0, 2, 3])


def test_a_message_is_acknowledged_and_another_sent_together() -> None:
    post = Stepping(sync=False)
    post.inbox(2)
    post.mail(1, "bert", [b"in"])
    post.sync()
    post.run()
    assert post.step(2, wire.AckMail(7, [(0, 1)]), send("out", b"x"), tracker=9) is None
    assert post.info("bert")["messages"] == 0
    post.restart(power_loss=True)
    post.inbox(2)
    assert post.got(2) == [b"in"]
    assert code(post.info("out")) == "unknown_mailbox"
    post.auto_sync = True
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), send("out", b"x"), tracker=9)) == "Confirm"
    post.restart(power_loss=True)
    assert (post.info("bert")["messages"], post.info("out")["messages"]) == (0, 1)


def test_a_part_that_cannot_be_leaves_nothing_of_the_others() -> None:
    post = Stepping()
    post.inbox(2)
    post.mail(1, "bert", [b"in"])
    post.ask(1, wire.EditMailbox, "small", {"max_messages": 1})
    assert code(post.step(2, send("small", b"x"), send("small", b"y"))) == "wait"
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), wire.AckMail(7, [(0, 1)]))) in (
        "not_held", "conflict",
    )  # fmt: skip
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), send("~gone", b"x"))) == "unknown_mailbox"
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), wire.AckMail(7, [(5, 6)]))) == "not_held"
    assert post.info("bert")["held"] == 1
    assert post.info("small")["messages"] == 0
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), send("small", b"x"))) == "Confirm"
    assert post.info("bert")["messages"] == 0
    assert post.broker.gauges["mail_messages"] == 1


def test_a_step_that_the_journal_refuses_leaves_nothing() -> None:
    post = Stepping()
    post.inbox(2)
    post.mail(1, "bert", [b"in"])
    post.refuse["main"] = ("disk_full", "no space")
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), send("new", b"x"), key=b"k")) == "disk_full"
    post.refuse.clear()
    assert post.info("bert")["held"] == 1
    assert code(post.info("new")) == "unknown_mailbox"
    assert code(post.step(2, wire.AckMail(7, [(0, 1)]), send("new", b"x"), key=b"k")) == "Confirm"
    again = post.step(2, wire.AckMail(7, [(0, 1)]), send("new", b"x"), key=b"k")
    assert again.duplicate
    assert post.info("new")["messages"] == 1


def test_mail_in_memory_cannot_be_part_of_a_step() -> None:
    post = Stepping()
    post.ask(1, wire.EditMailbox, "quick", {"memory": True})
    assert code(post.step(1, send("kept", b"x"), send("quick", b"y"))) == "cross_ring"
    assert code(post.info("kept")) == "unknown_mailbox"
    post.mail(1, "quick", [b"z"])
    post.inbox(2, mailbox="quick")
    (number,) = post.numbers(2)
    ack = wire.AckMail(7, [(number, number + 1)])
    assert code(post.step(2, send("kept", b"x"), ack)) == "cross_ring"
    assert post.info("quick")["held"] == 1
    assert code(post.ack(2, (number, number + 1))) == "Confirm"


def test_a_message_is_given_back_in_a_step() -> None:
    post = Stepping()
    post.inbox(2)
    post.mail(1, "bert", [b"a", b"b"])
    answer = post.step(
        2, wire.AckMail(7, [(0, 1)], again_ms=0), wire.AckMail(7, [(1, 2)]), send("out", b"x")
    )
    assert code(answer) == "Confirm"
    assert post.got(2) == [b"a", b"b", b"a"]
    assert post.letters(2)[-1].mail.attempts == 2
