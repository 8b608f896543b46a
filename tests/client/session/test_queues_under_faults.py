"""Mail, requests and work of one session under faults, by seed.

The model keeps what a broker promises (queue_model.py); links are lost with and without the
broker, answers are lost, mailboxes are full, commands are put off. Nothing confirmed may be
lost, nothing may be taken twice, every request is answered once. Replay a failure with the
seed in the test's name.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused, MalamuteError
from malamute_protocol.framing import NUMBERS
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.events import Confirmed, Settled
from malamute_py.client.session.inbox_options import InboxOptions
from malamute_py.client.session.letters import Letter
from malamute_py.client.session.offer_options import OfferOptions
from malamute_py.client.session.offering import ReplyToken, RequestBase
from malamute_py.client.session.requests import Replies
from tests.client.queue_model import QueueModel
from tests.client.script import Script
from tests.seeds import seeds

BOXES = ("one", "two")


class Token:
    """Stands for a caller that waits."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.outcomes: list[Any] = []


class Run:
    def __init__(self, seed: int, **options: Any) -> None:
        self.chance = random.Random(seed)
        self.script = Script(
            batch_bytes=400, retry_min_ms=10, retry_max_ms=40, identity="ann", **options
        )
        self.script.random = self.chance.randbytes  # type: ignore[method-assign, assignment]
        self.script.session.outbox._random = self.chance.randbytes
        self.session = self.script.session
        self.model = QueueModel()
        self.link = 0
        self.up = False
        self.seen = 0
        self.answers: list[Any] = []
        self.tokens: list[Token] = []
        self.sent: list[Token] = []
        self.asked: list[Token] = []
        self.streams: list[tuple[Replies, bytes]] = []
        self.serial = 0
        self.views = [self.session.mailboxes.read(InboxOptions(box)) for box in BOXES]
        self.read: list[bytes] = []
        self.at_hand: list[tuple[Any, int]] = []
        self.offering = self.session.offerings.offer(OfferOptions("svc", ["all"], 4), RequestBase)
        self.working: list[RequestBase] = []
        self.worked: list[bytes] = []

    # --- what callers do ---

    def token(self, what: str) -> Token:
        self.serial += 1
        token = Token(b"%s-%04d" % (what.encode(), self.serial))
        self.tokens.append(token)
        return token

    def send(self) -> None:
        token = self.token("mail")
        self.sent.append(token)
        row = make_row(token.body, "a", None, None, None, None, token)
        self.session.outbox.send(self.chance.choice(BOXES), row, 0)

    def ask(self) -> None:
        if self.chance.random() < 0.2:
            self.serial += 1
            replies = Replies()
            body = b"many-%04d" % self.serial
            self.streams.append((replies, body))
            row = make_row(body, "a", None, None, None, None, replies)
        else:
            token = self.token("ask")
            self.asked.append(token)
            row = make_row(token.body, "a", None, None, None, None, token)
        self.session.requests.request("svc", row, self.chance.choice([0, 1]))

    def take_mail(self) -> None:
        for view in self.views:
            item = view.take()
            if item is None:
                continue
            delivered, batch = item
            self.session.consumed(view.mailbox)
            for row in range(batch.content.head.count):
                if batch.rows is None or batch.rows[row]:
                    letter = Letter(batch, row, delivered)
                    self.read.append(letter.body)
                    self.at_hand.append((view, letter.number))

    def ack(self) -> None:
        self.chance.shuffle(self.at_hand)
        for _ in range(min(len(self.at_hand), 5)):
            view, number = self.at_hand.pop()
            view.done(number)

    def begin(self) -> None:
        while (job := self.offering.take()) is not None:
            self.working.append(job)
            self.worked.append(job.body)

    def answer(self) -> None:
        self.chance.shuffle(self.working)
        for _ in range(min(len(self.working), 2)):
            job = self.working.pop()
            offerings = self.session.offerings
            if job.body.startswith(b"many"):
                for part in range(2):
                    row = make_row(
                        b"%s/%d" % (job.body, part), "", None, None, None, None, ReplyToken(job)
                    )
                    offerings.reply(job, row, False)
            row = make_row(b"re:" + job.body, "", None, None, None, None, ReplyToken(job))
            offerings.reply(job, row, True)

    # --- the broker ---

    def refuse(self, command: c.Command) -> c.Refused | None:
        """Some commands are put off."""
        tracker = getattr(command, "tracker", 0)
        if tracker and self.chance.random() < 0.08:
            number = NUMBERS[type(command)]
            return c.Refused(number, tracker, "wait", "", self.chance.choice([0, 30]))
        return None

    def hear(self) -> None:
        heard = self.script.heard
        self.model.now_ms = self.script.now_ms
        while self.seen < len(heard):
            command, frames = heard[self.seen]
            self.seen += 1
            if isinstance(command, c.Hello):
                if self.up:
                    self.model.link_down(self.link)
                self.link += 1
                self.model.link_up(self.link, command)
                self.up = True
                self.script.open(window_bytes=self.chance.choice([900, 1 << 20]), identity="ann")
            elif isinstance(command, c.Atomic):
                part, content = heard[self.seen]
                self.seen += 1
                refused = self.refuse(command)
                self.answers += (
                    [(self.link, refused, ())]
                    if refused
                    else self.model.step(self.link, command, part, bytes(content[0]))
                )
            elif self.up:
                self.answers += self.model.answer(self.link, command, frames)

    def tell(self, most: int) -> None:
        given, self.answers = self.answers[:most], self.answers[most:]
        for link, command, frames in given:
            if link == self.link and self.up:
                self.script.say(command, frames=frames)

    def lose(self) -> None:
        """The link or the broker is gone; commands and answers under way may be lost."""
        if self.chance.random() < 0.5:
            self.hear()
        self.seen = len(self.script.heard)
        self.answers.clear()
        if self.up:
            self.model.link_down(self.link, restart=self.chance.random() < 0.5)
        self.up = False
        self.script.lose()

    def settle(self) -> None:
        for event in self.script.happened:
            if isinstance(event, Confirmed):
                for token in event.tokens:
                    if token is not None:
                        token.outcomes.append(event.outcome)
            elif isinstance(event, Settled):
                for token, outcome in event.pairs:
                    token.outcomes.append(outcome)
        self.script.happened.clear()

    def drain(self) -> None:
        for _ in range(3000):
            self.script.wait(50)
            self.hear()
            self.tell(1000)
            self.take_mail()
            self.ack()
            self.begin()
            self.answer()
            self.script.step()
            self.settle()
            if self.over():
                return
        raise AssertionError("something waits for ever")

    def over(self) -> bool:
        return (
            self.session.idle
            and not self.at_hand
            and not self.working
            and not self.offering.in_hand
            and all(token.outcomes for token in self.tokens)
            and all(replies.ended for replies, _ in self.streams)
            and not any(self.model.mail.values())
            and not any(self.model.work.values())
        )


def chaos(seed: int, steps: int) -> Run:
    run = Run(seed)
    run.model.refuse = run.refuse
    actions = [
        (0.2, run.send),
        (0.2, run.ask),
        (0.1, run.take_mail),
        (0.05, run.ack),
        (0.1, run.begin),
        (0.08, run.answer),
        (0.1, run.script.step),
        (0.1, run.hear),
        (0.15, lambda: run.tell(run.chance.randint(1, 5))),
        (0.02, run.lose),
        (0.05, lambda: run.script.wait(run.chance.choice([1, 20, 200]))),
    ]
    weights, calls = zip(*actions, strict=True)
    for _ in range(steps):
        run.chance.choices(calls, weights)[0]()
        run.settle()
    run.drain()
    return run


@pytest.mark.parametrize("seed", seeds(10, 60))
def test_nothing_is_lost_and_nothing_comes_twice(seed: int) -> None:
    run = chaos(seed, 400)
    mail = [body for box, body in run.model.accepted if box in BOXES]
    assert sorted(mail) == sorted(token.body for token in run.sent), "each taken once"
    for box in BOXES:
        mine = [body for name, body in run.model.accepted if name == box]
        assert mine == sorted(mine), "in the order of the calls"
    for token in run.sent:
        [outcome] = token.outcomes
        assert isinstance(outcome, c.Confirm)
    assert sorted(run.read) == sorted(mail), "each read once"
    assert sorted(body for box, body in run.model.acked if box in BOXES) == sorted(mail)
    for token in run.asked:
        [reply] = token.outcomes
        assert not isinstance(reply, MalamuteError)
        assert reply.body == b"re:" + token.body
    for replies, body in run.streams:
        assert replies.error is None
        parts = [reply.body for reply in replies.queue]
        whole = [b"%s/0" % body, b"%s/1" % body, b"re:" + body]
        # A request that was handed out anew may begin its replies anew, and leaves no hole.
        assert parts[-3:] == whole
        assert set(parts[:-3]) <= set(whole[:2])
    asked = [token.body for token in run.asked] + [body for _, body in run.streams]
    assert sorted(run.model.completed) == sorted(asked), "each completed once"
    window = run.session.window
    assert (window.queued_bytes, window.unconfirmed_bytes) == (0, 0)
    assert not run.session.awaited.asked
    assert not run.session.awaited.batches


def test_a_failed_request_says_why() -> None:
    run = Run(1)
    run.ask()
    while not run.asked:
        run.ask()
    token = run.asked[0]
    for _ in range(10):
        run.script.wait(20)
        run.hear()
        run.tell(100)
        run.begin()
        for job in run.working:
            run.session.offerings.end(job, 4, reason="no such airport")
        run.working.clear()
        run.settle()
    assert isinstance(token.outcomes[0], MalamuteError)
    assert not isinstance(token.outcomes[0], BrokerRefused)
    assert (token.body, "no such airport") in run.model.dead["svc"]
