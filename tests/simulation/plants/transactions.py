"""The planted bugs of transactions."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

from malamute_py.broker.transactions.moving import Moving
from malamute_py.broker.transactions.transaction import Transaction
from malamute_py.broker.transactions.transactions import Transactions
from malamute_py.changelog import applying, records
from tests.simulation.plants.planted import Planted, codes, replace


def _staged_in_the_stream(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def prepare_stage(self: Any, link: Any, command: Any, frame: Any) -> Any:
            part = original(self, link, command, frame)
            stream = self._catalogue.get(command.stream)
            if stream.ring.name == "main":
                part.also = [self._publishing.later_part(stream, part.content, frame)]
            return part

        return prepare_stage

    replace(stack, Transactions, "prepare_stage", make)


def _commit_not_resumed(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def recovered(self: Any) -> None:
            with patch.object(Moving, "begin", lambda *_: None):
                original(self)

        return recovered

    replace(stack, Transactions, "recovered", make)


def _moved_twice(stack: contextlib.ExitStack) -> None:
    effects = {records.TransactionMoved: lambda *_: None}
    stack.enter_context(patch.dict(applying._EFFECTS, effects))


def _places_ignored(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        return lambda self, ring: sorted(original(self, ring), key=lambda batch: -batch.base)

    replace(stack, Transaction, "in_order", make)


def _marks_not_recovered(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.arrivals import Arrivals

    replace(stack, Arrivals, "witness", lambda original: lambda *_: None)


def _marks_not_in_snapshots(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.streams.arrivals import Arrivals

    replace(stack, Arrivals, "sequences", lambda original: lambda *_: iter(()))


def _apart_before_the_commit_is_durable(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.transactions.moving import Moving

    def make(original: Any) -> Any:
        return lambda self, transaction, commit_lsn=0: original(self, transaction)

    replace(stack, Moving, "begin", make)


def _moved_before_it_is_durable_apart(stack: contextlib.ExitStack) -> None:
    from malamute_py.broker.transactions.moving import Moving

    def make(original: Any) -> Any:
        def count_down(self: Any, bundle: Any) -> None:
            bundle.ring = None
            original(self, bundle)

        return count_down

    replace(stack, Moving, "_count_down", make)


def _given_up_and_tried_once_more(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def drop_apart(self: Any, bundle: Any) -> None:
            batch = bundle.batches[0]
            stream = self._catalogue.by_number(batch.stream)
            if stream is not None and (batch.stream, batch.base) not in self._arrivals:
                again = type(bundle)(bundle.lane, bundle.transaction, [batch], [None], 1)

                def found(body: Any) -> None:
                    if body is not None:
                        self._hand_over(again, batch, stream, body)

                self._bodies.want(batch.base, batch.size, found)
            original(self, bundle)

        return drop_apart

    replace(stack, Moving, "_drop_apart", make)


def _given_up_in_memory_alone(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def recovered(self: Any) -> None:
            self._shard.queues.ends.clear()
            original(self)

        return recovered

    replace(stack, Transactions, "recovered", make)


PLANTS: dict[str, Planted] = {
    "staged-in-the-stream": Planted(
        "transactions", "a batch is in its stream as soon as it is staged",
        _staged_in_the_stream, codes("rolled_back"), 10,
    ),
    "commit-not-resumed": Planted(
        "transactions", "a start forgets what a commit has not appended yet",
        _commit_not_resumed, codes("lost", "half"), 20,
    ),
    "moved-twice": Planted(
        "transactions", "the tables do not know which batches of a commit were appended",
        _moved_twice, codes("twice"), 20,
    ),
    "marks-not-recovered": Planted(
        "transactions", "a start does not know which batches a stream's own ring has",
        _marks_not_recovered, codes("twice"), 20,
    ),
    "marks-not-in-snapshots": Planted(
        "transactions", "a mark is forgotten with the segment that has the batch",
        _marks_not_in_snapshots, codes("twice"), 40,
    ),
    "apart-before-the-commit": Planted(
        "transactions", "a stream's own ring gets records of a commit that a power loss takes back",
        _apart_before_the_commit_is_durable, codes("half"), 10, 75,
    ),
    "moved-before-it-is-durable": Planted(
        "transactions", "a batch is staged no more before its own ring has it on the disk",
        _moved_before_it_is_durable_apart, codes("lost", "half"), 40, 9,
    ),
    "places-ignored": Planted(
        "transactions", "batches of a transaction are appended newest first",
        _places_ignored, codes("order"), 10,
    ),
    "given-up-and-tried-once-more": Planted(
        "transactions", "a ring is handed records once more that are told to be given up",
        _given_up_and_tried_once_more, codes("given_up"), 40, 9,
    ),
    "given-up-in-memory-alone": Planted(
        "transactions", "a start forgets that records were given up",
        _given_up_in_memory_alone, codes("given_up"), 40,
    ),
}  # fmt: skip
