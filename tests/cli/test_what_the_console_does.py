"""Commands do and show what the console does and shows, also as JSON."""

from __future__ import annotations

import pytest

from malamute_py.http.console.actions import ACTIONS
from malamute_py.http.console.site import _PAGES
from tests.house.test_documents import check_command_line

CHANGES = {
    "copy": "replay", "cancel-copy": "replay", "publish": "pub", "create-stream": "stream create",
    "edit-stream": "stream edit", "purge": "stream purge", "trim": "stream trim",
    "purge-mailbox": "mailbox purge", "requeue": "service requeue",
    "requeue-group": "group requeue", "reset-cursor": "cursor reset",
    "reset-group": "group reset", "remove-group": "group rm", "reload": "config reload",
    "kick": "client kick",
}  # fmt: skip
"""Change of the console -> its command; a replay is cancelled by Ctrl-C."""
PAGES = {
    "": "top", "streams": "stream ls", "stream": "stream info", "mailboxes": "mailbox ls",
    "mailbox": "mailbox info", "services": "service ls", "service": "service info",
    "groups": "group ls", "group": "group info", "cursors": "cursor ls", "cursor": "cursor info",
    "clients": "client ls", "users": "user ls --running", "settings": "config show --running",
}  # fmt: skip
"""Page of the console -> the command that tells the same."""
WITHIN = (
    "stream peek", "sub", "mailbox peek", "service peek", "who-can --running", "namespace show",
)  # fmt: skip
"""Commands for further parts of pages."""


def test_every_change_and_page_has_its_command() -> None:
    assert CHANGES.keys() == ACTIONS.keys()
    assert PAGES.keys() == _PAGES.keys()


@pytest.mark.parametrize("command", sorted({*CHANGES.values(), *PAGES.values(), *WITHIN}))
def test_a_command_of_the_console_asks_a_broker_and_prints_json(command: str) -> None:
    check_command_line([*command.split(), "--json", "--context"])
