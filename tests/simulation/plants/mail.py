"""The planted bugs of mailboxes."""

from __future__ import annotations

import contextlib
from typing import Any

from malamute_py.broker.mail import inboxes
from malamute_py.broker.mail.puts import Puts
from tests.simulation.plants.planted import Planted, codes, replace


def _expired_delivered(stack: contextlib.ExitStack) -> None:
    replace(stack, inboxes, "expired", lambda original: lambda mailbox, row, now_ms: (0, 0))


def _notices_forgotten(stack: contextlib.ExitStack) -> None:
    replace(stack, Puts, "notice", lambda original: lambda self, name, **named: None)


def _coming_forgotten(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def check_room(self: Any, mailbox: Any, count: int, size: int) -> None:
            coming, mailbox.coming = mailbox.coming, 0
            try:
                original(self, mailbox, count, size)
            finally:
                mailbox.coming = coming

        return check_room

    replace(stack, Puts, "_check_room", make)


PLANTS: dict[str, Planted] = {
    "expired-delivered": Planted(
        "work", "no code asks whether a message has expired when it is handed out",
        _expired_delivered, codes("expired"), 60,
    ),
    "notices-forgotten": Planted(
        "work", "requests end without a word to who asked",
        _notices_forgotten, codes("lost"), 60,
    ),
    "coming-forgotten": Planted(
        "work", "a mailbox's limit counts only what is in the log",
        _coming_forgotten, codes("limit"), 120, 340,
    ),
}  # fmt: skip
