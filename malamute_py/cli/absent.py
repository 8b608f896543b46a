"""Messages for a name that the broker does not have.

Owns the words. The rule: the nearest name is offered, and otherwise how such a thing comes into
being; a misspelt name never makes a new thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from malamute_protocol.errors import BrokerRefused
from malamute_py.cli.failures import CommandFailed

Facts = TypeVar("Facts")


def absent(
    ask: Callable[[], Facts],
    kind: str,
    name: str,
    names: Callable[[], Iterable[str]],
    following: str,
    where: str = "",
) -> Facts:
    """Return the answer of ask() about the thing of this name.

    kind: stream, mailbox, service, cursor or group. names: those that there are. following: what to
    do when none is near. where: says of which stream. Raises CommandFailed when there is none;
    BrokerRefused.
    """
    try:
        return ask()
    except BrokerRefused as error:
        if error.code != f"unknown_{kind}":
            raise
    import difflib

    near = difflib.get_close_matches(name, list(names()), n=1)
    hint = f"did you mean {near[0]}?" if near else f"`malamute {kind} ls` lists them; {following}"
    raise CommandFailed(f"there is no {kind} {name}{where}; {hint}")


def changed(
    ask: Callable[[], object],
    kind: str,
    named: str,
    asked: Iterable[str],
    change: Callable[[], Facts],
) -> tuple[Facts, str]:
    """Make or change a thing; return its facts, and the sentence that tells what was done.

    ask: asks about the thing, which `change` makes when there is none. named: its name, as the
    sentence has it. asked: names of the settings.
    """
    settings = ", ".join(asked)
    try:
        ask()
    except BrokerRefused as error:
        if error.code == f"unknown_{kind}":
            return change(), f"made {named}{settings and ': '}{settings}"
        # What may be changed may be nothing to look at for this user: the change decides.
    return change(), f"edited {named}: {settings or 'as it was'}"
