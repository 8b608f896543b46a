"""Each kind of serving has a share of a turn of the loop, and what is left of it the next one.

The meter counts how often it was asked: once a turn of a group, a mailbox or a service, once a
batch within a group's turn, and once a subject within a service's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from malamute_py.broker import Broker, Ready
from malamute_py.broker.services.dispatch import SubjectQueue
from malamute_py.broker.services.service import Offer, RequestBatch, Service
from tests.broker.sliced import Sliced

SHARE = 5
COUNT = 60
MUCH = 1 << 40
GIVEN = (wire.Deliver, wire.Mail, wire.Work)


def groups(shell: Sliced) -> None:
    """Many groups of one member each, and a batch for all of them."""
    for number in range(COUNT):
        shell.send(
            2,
            wire.JoinGroup(
                number, "s", f"g{number}", ["all"], "shared", [0], MUCH, MUCH, create=True
            ),
        )
    shell.publish(1, "s", [b"x"])


def group(shell: Sliced) -> None:
    """One group, and many batches."""
    for _ in range(COUNT):
        shell.publish(1, "s", [b"x"])
    shell.send(2, wire.JoinGroup(1, "s", "g", ["all"], "shared", [0], MUCH, MUCH))


def mailboxes(shell: Sliced) -> None:
    """Many mailboxes with a message each."""
    for number in range(COUNT):
        shell.send(1, wire.Send(f"box{number}", 1), frames=[encode([b"x"])])
    shell.send(2, *[wire.OpenInbox(at, f"box{at}", MUCH, MUCH) for at in range(COUNT)])


def services(shell: Sliced) -> None:
    """Many services with a request each."""
    for number in range(COUNT):
        shell.send(1, wire.Request(f"s{number}", 1), frames=[encode([b"x"])])
    shell.send(2, *[wire.Offer(at, f"s{at}", ["all"], MUCH, MUCH) for at in range(COUNT)])


@pytest.mark.parametrize("waits", [groups, group, mailboxes, services])
def test_a_step_serves_as_much_as_its_share_lasts_and_the_next_ones_the_rest(
    waits: Callable[[Sliced], None],
) -> None:
    shell = Sliced(SHARE)
    shell.hello(1)
    shell.hello(2)
    waits(shell)
    given = [
        sum(isinstance(one, GIVEN) for send in ready.sends for one in send.commands)
        for ready in shell.readies
    ]
    assert sum(given) == COUNT
    assert max(given) <= SHARE


@pytest.mark.parametrize("waits", [False, True], ids=["as-they-come", "that-waited"])
def test_a_step_compares_few_subjects_with_expressions_once_its_share_is_used(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = [0], Service.takers_of

    def counted(self: Service, queue: SubjectQueue[RequestBatch, Offer]) -> object:
        looks[-1] += self.is_slow(queue)
        return look(self, queue)

    take_ready: Callable[[Broker], Ready] = Broker.take_ready

    def next_step(self: Broker) -> Ready:
        looks.append(0)
        return take_ready(self)

    monkeypatch.setattr(Broker, "take_ready", next_step)
    monkeypatch.setattr(Service, "takers_of", counted)
    shell = Sliced(0)
    shell.hello(1)
    shell.hello(2)
    names = [f"a{n}" for n in range(COUNT)]
    content = encode([b"x"] * COUNT, subject_table=names, subject_codes=range(COUNT))
    if waits:
        shell.send(1, wire.Request("s", 1), frames=[content])
    shell.send(2, wire.Offer(1, "s", ["regex", "a[0-9]+"], MUCH, MUCH))
    if not waits:
        shell.send(1, wire.Request("s", 1), frames=[content])
    assert sum(looks) >= COUNT
    assert max(looks) <= 2
