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
        return lambda self: sorted(original(self), key=lambda batch: -batch.base)

    replace(stack, Transaction, "in_order", make)


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
    "places-ignored": Planted(
        "transactions", "batches of a transaction are appended newest first",
        _places_ignored, codes("order"), 10,
    ),
}  # fmt: skip
