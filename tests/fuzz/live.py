"""`python -m tests.fuzz.live`: hostile peers at a broker's process, honest ones beside them.

Owns the attack on real connections: the messages of messages.py, wrong bytes below them, cut
connections, peers that read nothing. The rules: the broker is a process of its own, as an operator
runs it; the honest clients miss nothing; when the hostile peers are gone, the broker's sockets,
descriptors and memory come back; every byte that was sent can be recorded and sent again. Source:
SPEC.md, section 15.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from malamute_protocol.errors import RemoteProtocolError
from malamute_protocol.framing import decode_message
from malamute_py.demo.daemon import Daemon
from tests.fuzz import zmtp
from tests.fuzz.canary import PATIENCE_S
from tests.fuzz.inside import ERRORS
from tests.fuzz.messages import Messages, Step, View, read_steps

SETTINGS: Final = (
    "limits.batch_bytes_max=1048576", "limits.record_bytes_max=524288",
    "journal.segment_bytes=4194304", "journal.ring_bytes=134217728", "log.level=warning",
    "quotas.links_s=0",
)  # fmt: skip
QUIET_S: Final = 3.0
_SETTLE_S: Final = 2.0
_ANSWER_S: Final = 0.0003
_GREETING_S: Final = 2.0
"""Time to wait for the READY of the broker's side, before which a message is an error."""
_WELCOME_S: Final = 0.05
"""Time within which sockets, descriptors and memory must come back: links of half-open peers end by
their expiry."""
SPARE_BYTES: Final = 200 << 20
"""Bytes that the broker may keep beyond its memory before the attack: the windows of hot batches,
memos, and memory that the allocator does not give back."""
SPARE_FILES: Final = 80
"""Files of the journal that it may keep open beyond those before: segments and rings."""
_MISCHIEF: Final = ("half", "mutated", "greeting", "long", "endless", "commands", "identity",
                    "deaf", "abort", "empty")  # fmt: skip


class Attack:
    """The hostile peers: they connect, send and are cut, each from one seed."""

    def __init__(self, port: int, seed: int, without: Sequence[str] = ()) -> None:
        """port: of the broker. without: kinds of attack that are left out."""
        self._port = port
        self._source = Messages(seed)
        self._chance = random.Random(seed + 1)
        self._wires: dict[int, zmtp.Wire] = {}
        self._mischief = [name for name in _MISCHIEF if name not in without]
        self.record: TextIO | None = None
        self.messages = 0
        self.connections = 0
        self.answers = 0

    def steps(self, messages: int) -> Iterator[Step]:
        """Yield steps until so many messages were sent."""
        chance = self._chance
        while self.messages < messages:
            if chance.random() < 0.03:
                yield self._noted(self._wrong(chance.randrange(len(self._source.views))))
                continue
            for peer, wire in list(self._wires.items()):
                if wire.closed:
                    self._drop(peer, abort=False)
            step = self._source.step()
            if step.kind != "wait" or step.ms <= 5:
                yield self._noted(step)

    def _noted(self, step: Step) -> Step:
        """Write a step to the record, before it is played."""
        if self.record is not None:
            self.record.write(step.line() + "\n")
            self.record.flush()
        return step

    def play(self, step: Step) -> None:
        """Do one step: send it, and learn from the answers that have come."""
        if step.kind == "wait":
            time.sleep(step.ms / 1000)
            return
        if step.kind in ("lost", "abort"):
            self._drop(step.peer, abort=step.kind == "abort")
            return
        if step.kind == "fresh":
            self._drop(step.peer, abort=False)
            self._wires[step.peer] = self._connect(step.frames[0])
            for data in step.frames[1:]:
                self._wires[step.peer].send(data)
            return
        wire = self._wires.get(step.peer)
        if wire is None:
            self.play(self._noted(Step(step.peer, "fresh", (zmtp.GREETING + zmtp.ready(),))))
            wire = self._wires[step.peer]
            wire.greet(_GREETING_S)
        self.messages += 1
        wire.send(step.frames[0] if step.kind == "raw" else zmtp.message(step.frames))
        view = self._source.views[step.peer]
        # The next message follows from the answer now: a greeting is waited for.
        for frames in wire.receive(_ANSWER_S if view.open else _WELCOME_S):
            self.answers += 1
            try:
                commands = [command for command, _ in decode_message(frames)]
            except RemoteProtocolError:
                continue
            view.take(commands, frames[1:], self._source.shared)

    def end(self) -> None:
        """Close all connections."""
        for peer in list(self._wires):
            self._drop(peer, abort=False)

    def _connect(self, hello: bytes) -> zmtp.Wire:
        self.connections += 1
        return zmtp.Wire(self._port, hello)

    def _drop(self, peer: int, *, abort: bool) -> None:
        wire = self._wires.pop(peer, None)
        if wire is not None:
            wire.close(abort=abort)
        self._source.views[peer] = View()

    def _wrong(self, peer: int) -> Step:
        """Send bytes that break ZMTP, or end or stall the connection in the middle."""
        chance, mutated = self._chance, self._source.contents.mutated
        kind = chance.choice(self._mischief)
        whole = zmtp.message((self._source._hello(), b""))
        if kind == "half":
            return Step(peer, "raw", (whole[: chance.randrange(1, len(whole))],))
        if kind == "mutated":
            return Step(peer, "raw", (mutated(whole),))
        if kind == "greeting":
            return Step(peer, "fresh", (mutated(zmtp.GREETING + zmtp.ready()),))
        if kind == "long":
            size = chance.choice((2**63 - 1, 2**64 - 1, 2**31, 1 << 24, 1 << 20))
            head = bytes((zmtp.LONG,)) + size.to_bytes(8, "big") + bytes(100)
            return Step(peer, "raw", (head,))
        if kind == "endless":
            return Step(peer, "raw", (zmtp.frame(b"x", zmtp.MORE) * chance.choice((100, 6_000)),))
        if kind == "commands":
            body = chance.choice(
                (b"\x05READY", b"\x05ERROR\x02no", b"\x09SUBSCRIBEx", b"\x04PING\x00\x01abc",
                 b"\x04PING", b"\x04PONG", b"\xffX", b"", b"\x04PING\xff\xff" + b"z" * 200)
            )  # fmt: skip
            return Step(peer, "raw", (zmtp.frame(body, zmtp.COMMAND),))
        if kind == "identity":
            claims = (b"\x00" + chance.randbytes(4), b"x", b"", b"y" * 255, b"\x00", b"z" * 256)
            hello = zmtp.GREETING + zmtp.ready(identity=chance.choice(claims))
            return Step(peer, "fresh", (hello, whole))
        if kind == "deaf":
            ping = zmtp.message((b"\xdc\x0f\xa0" + b"\x92\x03\x01" * 4_000,))
            return Step(peer, "fresh", (zmtp.GREETING + zmtp.ready(), whole, ping * 3))
        if kind == "abort":
            return Step(peer, "abort")
        if kind == "empty":
            return Step(peer, "raw", (zmtp.message((b"", b"")),))
        return Step(peer, "fresh", (zmtp.GREETING[: chance.randrange(1, 64)],))


class Broker:
    """Resources of the broker's process, as the system tells them."""

    def __init__(self, daemon: Daemon) -> None:
        """daemon: a running one."""
        self._daemon = daemon
        self._process = daemon.process

    def facts(self) -> dict[str, int]:
        """Return sockets, descriptors and resident bytes."""
        folder = Path(f"/proc/{self._process.pid}/fd")
        targets = []
        for name in os.listdir(folder):
            try:
                targets.append(os.readlink(folder / name))
            except FileNotFoundError:
                continue
        sockets = sum(target.startswith("socket:") for target in targets)
        return {
            "sockets": sockets,
            "files": len(targets) - sockets,
            "resident_bytes": self._process.memory_info().rss,
        }

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._daemon.alive()


def run(
    directory: Path, *, messages: int, seconds: float = 0.0, seed: int = 0,
    record: Path | None = None, without: Sequence[str] = (), program: Sequence[str] = (),
    steps: Iterable[Step] | None = None, patience_s: float = PATIENCE_S,
) -> dict[str, Any]:  # fmt: skip
    """Attack a broker of its own; returns the finds. `faults` is empty when all held.

    seconds: end then, however few the messages were; 0: the messages alone decide. steps: play
    these instead. program: to run instead of the broker, for planted bugs. patience_s: how long
    the canary waits for an answer, and the broker has to be what it was.
    """
    faults: list[str] = []
    with Daemon(directory, SETTINGS, program) as daemon:
        broker = Broker(daemon)
        port = int(daemon.endpoint.rpartition(":")[2])
        canary = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.canary", str(patience_s), daemon.endpoint],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert canary.stdin is not None
        time.sleep(QUIET_S)
        before = broker.facts()
        canary.stdin.write("attack\n")
        canary.stdin.flush()
        began = time.monotonic()
        attack = Attack(port, seed, without)
        if record is not None:
            attack.record = record.open("w", encoding="ascii")
        try:
            for step in attack.steps(messages) if steps is None else steps:
                try:
                    attack.play(step)
                except OSError as error:
                    # A process that ends refuses connections before it is gone.
                    if daemon.gone(10.0):
                        break
                    faults.append(f"it takes no connections: {error}")
                    break
                took = time.monotonic() - began
                if seconds and took > seconds:
                    break
                if attack.messages % 256 == 0 and not broker.alive():
                    break
            # The last messages are still on their way, and their readers must be there to get them.
            time.sleep(_SETTLE_S)
            attack.end()
            took = time.monotonic() - began
        finally:
            if attack.record is not None:
                attack.record.close()
        if not broker.alive():
            faults.append(f"the broker ended, by {daemon.ended()}: {daemon.tail()[-1500:]}")
            canary.kill()
            canary.communicate()
            return {"faults": faults, "messages": attack.messages, "seconds": round(took, 1)}
        after = _come_back(broker, before, faults, patience_s)
        heard, _ = canary.communicate()
        told = json.loads(heard.splitlines()[-1])
        faults += told["wrong"]
        faults += own_errors(directory / "broker.log")
    return {
        "faults": faults, "messages": attack.messages, "connections": attack.connections,
        "answers": attack.answers, "seconds": round(took, 1), "before": before, "after": after,
        "canary": told,
    }  # fmt: skip


def own_errors(log: Path) -> list[str]:
    """Return the lines of the broker's log that report an error of its own."""
    lines = log.read_text(errors="replace").splitlines()
    wrong = [line for line in lines if any(f'"{event}"' in line for event in ERRORS)]
    return [line[:2_000] for line in wrong[:3]]


def _come_back(
    broker: Broker, before: dict[str, int], faults: list[str], patience_s: float
) -> dict[str, int]:
    """Return the broker's usage once it is what it was before, or when its time is over."""
    most = {
        "sockets": before["sockets"],
        "files": before["files"] + SPARE_FILES,
        "resident_bytes": before["resident_bytes"] + SPARE_BYTES,
    }
    until = time.monotonic() + patience_s
    while True:
        now = broker.facts()
        over = [name for name, value in now.items() if value > most[name]]
        if not over:
            return now
        if time.monotonic() > until:
            faults += [f"{name} were {before[name]}, and stay {now[name]}" for name in over]
            return now
        time.sleep(0.25)


def main() -> int:
    """Run; returns 0: all held; 1: something did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.live", description=__doc__)
    parser.add_argument("--messages", type=int, default=1 << 62)
    parser.add_argument("--minutes", type=float, default=0.0, help="end then; 0: by --messages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a file for every step that is played")
    parser.add_argument("--replay", type=Path, help="play the steps of such a file instead")
    parser.add_argument("--without", action="append", default=[], choices=_MISCHIEF)
    parser.add_argument(
        "--p99-factor", type=float, default=0.0,
        help="a confirm's 99th percentile beyond so many times the quiet one is a fault",
    )  # fmt: skip
    given = parser.parse_args()
    if not given.minutes and given.messages == 1 << 62 and given.replay is None:
        parser.error("say how long: --minutes or --messages")
    steps = None if given.replay is None else read_steps(given.replay)
    with tempfile.TemporaryDirectory(prefix="malamute-fuzz-") as directory:
        found = run(
            Path(directory), messages=given.messages, seconds=given.minutes * 60, seed=given.seed,
            record=given.record, without=given.without, steps=steps,
        )  # fmt: skip
    confirms = found.get("canary", {}).get("confirms_ms", {})
    if given.p99_factor and {"quiet", "attack"} <= confirms.keys():
        quiet, attack = confirms["quiet"]["p99"], confirms["attack"]["p99"]
        if attack > given.p99_factor * quiet:
            found["faults"].append(f"the canary's p99 was {quiet} ms, and {attack} ms beside it")
    print(json.dumps(found, indent=2))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
