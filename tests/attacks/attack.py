"""An attack: its function, its settings, what it may fill, and the table of all attacks.

Owns the table, which the files of attacks fill as they are imported, and the measure that the
attacks are compared with. Source: ARCHITECTURE.md, "What a peer may cost"; docs/robustness.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from malamute_protocol import commands as wire
from malamute_protocol.framing import encode_message
from tests.attacks.aim import Aim
from tests.fuzz.canary import PATIENCE_S
from tests.fuzz.zmtp import message

MIB: Final = 1 << 20
PASSWORD: Final = "a canary's password"
ALL: Final = 1 << 40


class Attack(msgspec.Struct, frozen=True):
    """One attack, and its settings."""

    name: str
    do: Callable[[Aim], None]
    rounds: int
    """Rounds of the short form, which takes a second or so."""
    settings: tuple[str, ...] = ()
    """Settings of its broker, `key=value`."""
    keeps: int = 0
    """Bytes that lasting things may take, as far as the configuration lets it: streams, mailboxes,
    cursors."""
    addresses: bool = False
    """True: it comes from many addresses, which may leave unread what all connections may."""
    seconds: float = 120.0
    """Seconds after which the short form ends, however few its rounds were: peers of a broker that
    keeps them out wait."""
    back_s: float = PATIENCE_S
    """Seconds after which memory, sockets and files are what they were."""
    files: int = 0
    """Descriptors that lasting things may take."""
    patience_s: float = PATIENCE_S
    """How long the canary waits for an answer before it counts as lost."""
    password: str = ""
    """The canary's password, where the broker asks for one."""
    canary: str = "canary"
    """The canary's name; empty: it has none, where the broker allows none."""

    @property
    def what(self) -> str:
        """Describe the attack in a sentence."""
        return (self.do.__doc__ or "").strip()


ATTACKS: Final[dict[str, Attack]] = {}


def attack(rounds: int, **needs: Any) -> Callable[[Callable[[Aim], None]], Callable[[Aim], None]]:
    """Make an attack of a function."""

    def made(do: Callable[[Aim], None]) -> Callable[[Aim], None]:
        name = do.__name__.replace("_", "-")
        ATTACKS[name] = Attack(name, do, rounds, **needs)
        return do

    return made


def hello(identity: str = "") -> bytes:
    """Return a message that begins a link."""
    return message(encode_message([wire.Hello((1, 1), os.urandom(16), identity)]))


# --- the measure of the others ----------------------------------------------------------


@attack(20)
def only_processor(aim: Aim) -> None:
    """No attack: a processor is used beside the broker, as each attack uses one."""
    while aim.more():
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
