"""The planted bugs of the client's shell for threads."""

from __future__ import annotations

import contextlib
from typing import Any

from malamute_py.client.session.events import Settled
from malamute_py.client.sync.handlers import HandlerRun
from malamute_py.client.sync.link import ThreadLink
from malamute_py.client.sync.mail import SyncInbox
from tests.simulation.plants.planted import Planted, codes, replace
from tests.simulation.threads import Condition


def _one_is_told(stack: contextlib.ExitStack) -> None:
    class One(Condition):
        def notify_all(self) -> None:
            for thread in self._waiting:
                del self._waiting[thread]
                self._threads.ready(thread)
                return

    def make(original: Any) -> Any:
        def begin(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            self._happened = One(self.lock)

        return begin

    replace(stack, ThreadLink, "__init__", make)


def _dropped_unheard(stack: contextlib.ExitStack) -> None:
    replace(stack, ThreadLink, "dropped", lambda original: lambda self, opened: None)


def _read_at_once(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def begin(self: Any, delivered: Any, batch: Any) -> None:
            original(self, delivered, batch)
            if self._acks_next:
                for number in batch.offsets.tolist():
                    self._view.done(number)

        return begin

    replace(stack, SyncInbox, "_begin", make)


def _none_completes_nothing(stack: contextlib.ExitStack) -> None:
    left = []  # A request that nothing refers to is given back.

    def make(original: Any) -> Any:
        def answer(self: Any, request: Any, result: Any) -> None:
            if result is not None:
                original(self, request, result)
            else:
                left.append(request)

        return answer

    replace(stack, HandlerRun, "_answer", make)


def _first_settled(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def handle(self: Any, event: Any) -> bool:
            if isinstance(event, Settled):
                event = Settled(event.pairs[:1])
            return bool(original(self, event))

        return handle

    replace(stack, ThreadLink, "_handle", make)


PLANTS: dict[str, Planted] = {
    "one-is-told": Planted(
        "threads", "of several threads that wait for a client's answers one is woken",
        _one_is_told, codes("stuck"), 20,
    ),
    "dropped-unheard": Planted(
        "threads", "what a program dropped unclosed holds on to what it had",
        _dropped_unheard, codes("stuck"), 60, 22,
    ),
    "read-at-once": Planted(
        "threads", "messages are acknowledged when they come to an inbox, before they are read",
        _read_at_once, codes("unseen"), 60,
    ),
    "none-completes-nothing": Planted(
        "threads", "a handler that returns nothing leaves its request in hand",
        _none_completes_nothing, codes("stuck", "unlawful"), 40, 7,
    ),
    "first-settled": Planted(
        "threads", "of several calls that end by one message one is told",
        _first_settled, codes("stuck"), 60, 105,
    ),
}  # fmt: skip
