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
    """Return the answer of ask() about the thing of this name; a missing one is told with advice.

    kind: stream, mailbox, service, cursor or group. names: lists the names that there are, called
    only after a failure. following: the advice when no name is near, such as how one is made.
    where: " of stream NAME", for a cursor or group. Raises CommandFailed: there is no such thing;
    BrokerRefused: the broker refused for another reason.
    """
    try:
        return ask()
    except BrokerRefused as error:
        if error.code != f"unknown_{kind}":
            raise
    hint = nearest(name, names(), f"`malamute {kind} ls` lists them; {following}")
    raise CommandFailed(f"there is no {kind} {name}{where}; {hint}")


def nearest(name: str, names: Iterable[str], otherwise: str, rest: str = "") -> str:
    """Return the hint for a name that is unknown: the one that is near, or else `otherwise`.

    rest: text after the near name.
    """
    import difflib

    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]}{rest}?" if near else otherwise


def made_or_edited(
    ask: Callable[[], object],
    kind: str,
    named: str,
    asked: Iterable[str],
    change: Callable[[], Facts],
    replace: bool,
) -> tuple[Facts, str]:
    """Make or edit a thing; return its facts, and the sentence that says which of both was done.

    The broker edits by a command that makes what is not there, and its answer does not say whether
    it was: ask() finds that out before. Thus no settings are compared: "edited" means that the
    thing was there. ask: raises BrokerRefused when there is none. change: does it. named: its
    name, as the sentence has it. asked: names of the settings that the person gave. replace: all
    others go back to their defaults.
    """
    settings = ", ".join(asked)
    try:
        ask()
    except BrokerRefused as error:
        if error.code == f"unknown_{kind}":
            return change(), f"made {named}{settings and ': '}{settings}"
        # Any other refusal: this user may not look at the thing, but may perhaps change it.
    return change(), f"edited {named}: {settings or ('all settings' if replace else 'as it was')}"
