"""`python -m tests.attacks.neighbours`: how long honest neighbours of an attacker wait.

Owns the measurement of clients that share the attacker's address. The rules: an attack goes on at a
broker's process; meanwhile one neighbour stays connected and asks for PONGs, and others connect
anew, one after the other, until each has its WELCOME. The attacker begins first, so that its
connections are known when the neighbours come. Source: ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from malamute_protocol.commands import AnyCommand, Command, Hello, Ping, Pong, Welcome
from malamute_protocol.framing import encode_message
from malamute_py.demo.daemon import Daemon
from tests.attacks.attack import Attack
from tests.attacks.attacks import ATTACKS
from tests.attacks.run import SETTINGS
from tests.fuzz.zmtp import GREETING, Wire, message, ready

PROVOKE: Final = (
    "partial-messages", "endless-frames", "claims-of-4-gib", "tiny-messages",
    "reset-behind-a-full-queue", "reconnect-storm", "only-processor",
)  # fmt: skip
"""Attacks that fill memory and connect again and again, and one that does neither."""
_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 60.0
_COMMANDS: Final = msgspec.msgpack.Decoder(list[AnyCommand]).decode


def hears(wire: Wire, kind: type[Command]) -> bool:
    """Whether a command of this kind comes before the connection ends, or patience does."""
    until_s = time.monotonic() + _PATIENCE_S
    while not wire.closed and time.monotonic() < until_s:
        for frames in wire.receive(0.5):
            if any(isinstance(one, kind) for one in _COMMANDS(frames[0])):
                return True
    return False


def connected(port: int, until_s: float) -> Wire:
    """Return a connection whose link is open; tries again as a client does."""
    while True:
        try:
            wire = Wire(port, GREETING + ready())
            if wire.greet():
                wire.send(message(encode_message([Hello((1, 1), os.urandom(16))])))
                if hears(wire, Welcome):
                    return wire
            wire.close()
        except OSError:
            pass
        if time.monotonic() > until_s:
            raise TimeoutError("the broker let no client in")
        time.sleep(_PAUSE_S)


class Waits(msgspec.Struct):
    """How long the neighbours of one attack waited."""

    newcomers_s: list[float]
    connected_s: list[float]
    """Time until the neighbour that stays connected had its PONG."""
    cut: int = 0
    """How often that neighbour lost its connection."""
    turned_away: int = 0
    """How often the kernel was told to drop the connection requests of the address."""


def measure(attack: Attack, seconds: float, directory: Path) -> Waits:
    """Run an attack beside its neighbours."""
    waits = Waits([], [])
    with Daemon(directory, (*SETTINGS, *attack.settings)) as daemon:
        port = int(daemon.endpoint.rpartition(":")[2])
        words = [attack.name, daemon.endpoint, 1 << 40, seconds, 0, daemon.process.pid]
        staying = connected(port, time.monotonic() + _PATIENCE_S)
        attacker = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.attacker", *map(str, words)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while attacker.poll() is None:
                began_s = time.monotonic()
                connected(port, began_s + _PATIENCE_S).close()
                waits.newcomers_s.append(time.monotonic() - began_s)
                began_s = time.monotonic()
                staying.send(message(encode_message([Ping(1)])))
                if hears(staying, Pong):
                    waits.connected_s.append(time.monotonic() - began_s)
                else:
                    waits.cut += 1
                    staying = connected(port, began_s + _PATIENCE_S)
                time.sleep(_PAUSE_S)
        finally:
            attacker.kill()
            attacker.wait()
        staying.close()
        waits.turned_away = (directory / "broker.log").read_text().count('"address_turned_away"')
    return waits


def _shown(spans_s: list[float]) -> str:
    if not spans_s:
        return "-"
    spans_s.sort()
    middle, high, most = (spans_s[int(part * (len(spans_s) - 1))] for part in (0.5, 0.95, 1))
    return f"{len(spans_s)}: {middle * 1e3:.0f}/{high * 1e3:.0f}/{most * 1e3:.0f}"


def main() -> int:
    """Print a line for each attack."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.neighbours", description=__doc__)
    parser.add_argument("--only", action="append", default=[], choices=ATTACKS)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    given = parser.parse_args()
    print(
        f"{'attack':26} {'newcomers: ms p50/p95/max':>32} {'connected: ms p50/p95/max':>32}"
        f" {'cut':>4} {'turned away':>12}"
    )
    for name in given.only or PROVOKE:
        with tempfile.TemporaryDirectory(prefix="malamute-neighbours-") as folder:
            waits = measure(ATTACKS[name], given.seconds, Path(folder))
        print(
            f"{name:26} {_shown(waits.newcomers_s):>32} {_shown(waits.connected_s):>32}"
            f" {waits.cut:>4} {waits.turned_away:>12}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
