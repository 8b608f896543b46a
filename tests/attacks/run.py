"""`python -m tests.attacks`: each known attack at a broker's process, one after the other.

Owns the measurements and the verdicts. The rules: the broker is a process of its own with the
configuration of an operator; the canary is another, and is measured quiet, under attack and quiet
again; the attacker is a third, and yields to both. An attack fails when the broker ends or meets an
error of its own, when the canary misses anything, when memory or descriptors pass their bounds or
do not come back, when the broker goes on using a processor, and, where latency is judged, when a
confirm's 99th percentile passes so many times its quiet value or a turn of the loop takes as long
as the broker itself calls too long. Source: ARCHITECTURE.md, "What a peer may cost";
docs/robustness.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from malamute_protocol.commands import BrokerInfo, Result
from malamute_py.config import Config
from malamute_py.demo.daemon import Daemon
from tests.attacks.attack import MIB, Attack
from tests.attacks.attacks import ATTACKS
from tests.fuzz.live import Broker, own_errors
from tests.server.peer import RawPeer

SETTINGS: Final = ("log.level=warning", "log.form=json", "quotas.links_s=0")
"""Settings of the broker; all others have their defaults. An attack has no rate of links, as one
from many addresses has none."""
OTHER_BYTES: Final = 128 * MIB
"""Bytes that an attack may add besides unread ones: hot windows, outboxes, a message of
batch_bytes_max in several forms, and what comes between two looks of the guard."""
PEAK_BYTES: Final = Config().limits.unread_share_bytes_max + OTHER_BYTES
"""Bytes that any attack from one address may add to the broker's memory while it goes on, by the
default configuration. An attack names the bytes of lasting things itself."""
ADDRESSES_PEAK_BYTES: Final = Config().limits.unread_bytes_max + OTHER_BYTES
"""Bytes that an attack from many addresses may add to the broker's memory while it goes on."""
BACK_BYTES: Final = 160 * MIB
"""Bytes of those that may stay: hot windows, memos, and memory that the allocator does not give
back."""
SPARE_FILES: Final = 40
"""Files of the journal that may be open beyond those before: segments."""
BUSY_PERCENT: Final = 90
"""Percent of the time for which the broker's loop may run or wait for a processor after an attack:
one that never sleeps does so always, whatever else the machine does."""
TURN_MS: Final = 100.0
"""Processor time of a turn from which on the broker logs it (event long_turn)."""
_SAMPLE_S: Final = 0.05
_LOOK_S: Final = 0.25
_SETTLE_S: Final = 0.3
_SLACK_S: Final = 60.0


class Found(msgspec.Struct, kw_only=True):
    """The outcome and the cost of one attack."""

    name: str
    sent: int = 0
    seconds: float = 0.0
    before: dict[str, int] = {}
    peak: dict[str, int] = {}
    after: dict[str, int] = {}
    busy_percent: tuple[float, float] = (0.0, 0.0)
    """Percent of the time in which the broker's loop did not sleep, before the attack and after."""
    broker_cpu_s: float = 0.0
    attacker_cpu_s: float = 0.0
    longest_turn_ms: float = 0.0
    """The longest turn of the broker's loop, in time of a processor: the delay that the attack
    itself causes others."""
    canary: dict[str, Any] = {}
    factor: float = 0.0
    faults: list[str] = []
    slow: str = ""
    """Say that the confirms or a turn took too long, if they did."""

    @property
    def held(self) -> bool:
        """Whether every bound held."""
        return not self.faults and not self.slow


class Watch:
    """Measures the broker's memory and descriptors again and again, from a thread."""

    def __init__(self, broker: Broker) -> None:
        """broker: a running one."""
        self.peak: dict[str, int] = {}
        self._broker = broker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        import psutil

        while not self._over.wait(_SAMPLE_S):
            try:
                now = self._broker.facts()
            except (psutil.Error, OSError):
                return
            for name, value in now.items():
                self.peak[name] = max(value, self.peak.get(name, 0))

    def stop(self) -> dict[str, int]:
        """Return the greatest values that were seen."""
        self._over.set()
        self._thread.join()
        return self.peak


def run(
    attack: Attack, directory: Path, *, rounds: int, seconds: float, quiet_s: float,
    p99_factor: float = 0.0, seed: int = 0, program: Sequence[str] = (),
) -> Found:  # fmt: skip
    """Run one attack at a broker of its own.

    rounds, seconds: whichever comes first ends it. p99_factor: 0: latency and the longest turn
    are only measured. program: to run instead of the broker, for planted bugs.
    """
    found = Found(name=attack.name, faults=[])
    with Daemon(directory, SETTINGS + attack.settings, program) as daemon:
        broker = Broker(daemon)
        canary = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.canary", str(attack.patience_s), daemon.endpoint,
             attack.password, attack.canary],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert canary.stdin is not None
        assert canary.stdout is not None
        try:
            # Until it has connected, nothing is quiet: its first phase is thrown away.
            canary.stdout.readline()
            _phase(canary.stdin, "before")
            quiet_percent = _busy_percent(daemon, quiet_s)
            found.before = broker.facts()
            cpu_s = daemon.cpu_s()
            _phase(canary.stdin, "attack")
            watch = Watch(broker)
            _attacked(attack, daemon, found, rounds, seconds, seed)
            if not daemon.gone(_SETTLE_S):
                found.broker_cpu_s = round(daemon.cpu_s() - cpu_s, 1)
            found.peak = watch.stop()
            if daemon.alive():
                _phase(canary.stdin, "after")
                time.sleep(quiet_s)
                found.after = _come_back(attack, broker, found)
                found.busy_percent = quiet_percent, _rest(attack, daemon, found)
                found.longest_turn_ms = _longest_turn_ms(attack, daemon)
                heard, _ = canary.communicate(timeout=2 * _SLACK_S + 30)
                found.canary = json.loads(heard.splitlines()[-1])
                found.faults += found.canary["wrong"]
        except (BrokenPipeError, subprocess.TimeoutExpired, ValueError) as error:
            found.faults.append(f"the canary did not go on: {error!r}")
        finally:
            canary.kill()
            canary.wait()
        if not daemon.alive():
            found.faults.append(f"the broker ended, by {daemon.ended()}: {daemon.tail()[-1500:]}")
        found.faults += own_errors(directory / "broker.log")
    _judge_memory(attack, found)
    _judge_latency(found, p99_factor)
    return found


def _phase(pipe: IO[str], name: str) -> None:
    pipe.write(name + "\n")
    pipe.flush()


def _attacked(
    attack: Attack, daemon: Daemon, found: Found, rounds: int, seconds: float, seed: int
) -> None:
    """Attack, and note what was sent."""
    words = [attack.name, daemon.endpoint, rounds, seconds, seed, daemon.process.pid]
    attacker = subprocess.Popen(
        [sys.executable, "-m", "tests.attacks.attacker", *map(str, words)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        told, _ = attacker.communicate(timeout=seconds + _SLACK_S)
    except subprocess.TimeoutExpired:
        attacker.kill()
        attacker.communicate()
        found.faults.append("the attacker had no answer that it waited for")
        return
    if attacker.returncode:
        found.faults.append(f"the attacker failed by exit code {attacker.returncode}")
        return
    facts = json.loads(told)
    found.sent, found.seconds = facts["sent"], facts["seconds"]
    found.attacker_cpu_s = facts["cpu_s"]
    if facts["ended"]:
        found.faults.append(facts["ended"])


def _longest_turn_ms(attack: Attack, daemon: Daemon) -> float:
    """Return the longest turn of the broker's loop, as the broker reports it."""
    options: dict[str, Any] = {}
    if attack.password:
        name, word = f"{attack.canary}-4", attack.password
        options = {"plain_username": name.encode(), "plain_password": word.encode()}
    with RawPeer(daemon.endpoint, **options) as peer:
        peer.send(BrokerInfo(1))
        return float(peer.get(Result)[0].value["longest_turn_us"] / 1_000)


def _come_back(attack: Attack, broker: Broker, found: Found) -> dict[str, int]:
    """Return the broker's usage once it is what it was before, or when its time is over."""
    before = found.before
    most = {
        "sockets": before["sockets"],
        "files": before["files"] + SPARE_FILES + attack.files,
        "resident_bytes": before["resident_bytes"] + BACK_BYTES + attack.keeps,
    }
    until = time.monotonic() + attack.back_s
    while True:
        now = broker.facts()
        over = [name for name, value in now.items() if value > most[name]]
        if not over:
            return now
        if time.monotonic() > until:
            found.faults += [
                f"{name} were {before[name]} and stay {now[name]}, beyond {most[name]}"
                for name in over
            ]
            return now
        time.sleep(0.25)


def _busy_percent(daemon: Daemon, seconds: float) -> float:
    """Return for how much of these seconds the broker's loop runs or waits for a processor."""
    # The loop has the process's first thread. proc(5): nanoseconds of both kinds, and a count.
    path = Path(f"/proc/{daemon.process.pid}/schedstat")
    began_s, began_ns = time.monotonic(), sum(map(int, path.read_text().split()[:2]))
    time.sleep(seconds)
    busy_ns = sum(map(int, path.read_text().split()[:2])) - began_ns
    return round(busy_ns / 1e7 / (time.monotonic() - began_s), 1)


def _rest(attack: Attack, daemon: Daemon, found: Found) -> float:
    """Return how busy the broker is once it rests again, or when its time for that is over."""
    until = time.monotonic() + attack.back_s
    while (now_percent := _busy_percent(daemon, _LOOK_S)) > BUSY_PERCENT:
        if time.monotonic() > until:
            found.faults.append(f"the broker never sleeps any more: it is busy {now_percent} %")
            break
    return now_percent


def _judge_memory(attack: Attack, found: Found) -> None:
    if not found.peak:
        return
    grown = found.peak["resident_bytes"] - found.before["resident_bytes"]
    bound = (ADDRESSES_PEAK_BYTES if attack.addresses else PEAK_BYTES) + attack.keeps
    if grown > bound:
        found.faults.append(f"memory grew by {grown >> 20} MiB, and {bound >> 20} is its bound")


def _judge_latency(found: Found, factor: float) -> None:
    confirms = found.canary.get("confirms_ms", {})
    quiet, attacked = confirms.get("before"), confirms.get("attack")
    if quiet is None or attacked is None:
        if factor:
            found.faults.append("the canary had no confirm before or amid the attack")
        return
    found.factor = round(attacked["p99"] / quiet["p99"], 1)
    if factor and found.factor > factor:
        found.slow = (
            f"a confirm's p99 was {attacked['p99']} ms, {found.factor} times its quiet "
            f"{quiet['p99']} ms"
        )
    elif factor and found.longest_turn_ms > TURN_MS:
        found.slow = f"a turn took {found.longest_turn_ms:.0f} ms of a processor"


# --- what is said -----------------------------------------------------------------------

_COLUMNS: Final = (
    ("attack", 26), ("sent", 9), ("s", 5), ("RSS MiB before/peak/after", 25), ("fd b/p/a", 13),
    ("cpu s", 6), ("turn ms", 8), ("confirm ms p50/p99/max quiet", 28), ("under attack", 22),
    ("x p99", 6), ("PONG p99 q/a", 13), ("late p99 q/a", 12), ("", 6),
)  # fmt: skip


def heading() -> str:
    """Return the first line of the table."""
    return " ".join(name.ljust(width) for name, width in _COLUMNS).rstrip()


def row(found: Found) -> str:
    """Return one attack's line of the table."""
    states = (found.before, found.peak, found.after)

    def each(name: str, unit: int = 1) -> str:
        return "/".join(str(state[name] // unit) if state else "-" for state in states)

    files = "/".join(str(s["sockets"] + s["files"]) if s else "-" for s in states)
    canary = found.canary

    def three(kind: str, phase: str) -> str:
        times = canary.get(kind, {}).get(phase)
        return "/".join(f"{times[name]:g}" for name in ("p50", "p99", "max")) if times else "-"

    def pair(kind: str) -> str:
        times = canary.get(kind, {})
        both = (times.get(phase, {}).get("p99", 0) for phase in ("before", "attack"))
        return "/".join(f"{value:g}" for value in both)

    cells = (
        found.name, f"{found.sent:,}", f"{found.seconds:.0f}", each("resident_bytes", MIB), files,
        f"{found.broker_cpu_s:.1f}", f"{found.longest_turn_ms:.0f}",
        three("confirms_ms", "before"), three("confirms_ms", "attack"),
        f"{found.factor:g}", pair("pongs_ms"), pair("lateness_ms"),
        "held" if found.held else "FAILED",
    )  # fmt: skip
    return " ".join(
        cell.ljust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True)
    ).rstrip()


def noise(founds: Sequence[Found]) -> str:
    """Say in a sentence what the machine itself did to the canary."""
    control = [found for found in founds if found.name == "only-processor"]
    quiet = [
        found.canary["confirms_ms"][phase]["p99"]
        for found in founds
        for phase in ("before", "after")
        if phase in found.canary.get("confirms_ms", {})
    ]
    late = [
        found.canary["lateness_ms"]["before"]["p99"]
        for found in founds
        if "before" in found.canary.get("lateness_ms", {})
    ]
    if not quiet or not late:
        return "the machine's noise was not measured"
    text = (
        f"the machine's own noise: a quiet confirm's p99 was {min(quiet):g} to {max(quiet):g} ms, "
        f"and the quiet canary was woken up to {max(late):g} ms late (p99)"
    )
    if control and control[0].factor:
        text += f"; a mere user of a processor beside it took p99 to {control[0].factor:g} times"
    return text


def main() -> int:
    """Run the attacks; returns 0: all held; 1: something did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=ATTACKS)
    parser.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument(
        "--quiet", type=float, default=10.0,
        help="seconds before and after each: a 99th percentile needs a thousand confirms",
    )  # fmt: skip
    parser.add_argument(
        "--p99-factor", type=float, default=10.0,
        help="a confirm's p99 beyond so many times the quiet one is a failure, as is a turn of"
        f" more than {TURN_MS:.0f} ms; 0: both are only printed",
    )  # fmt: skip
    parser.add_argument(
        "--tries", type=int, default=2,
        help="an attack that fails by latency alone is tried so often: others use the machine, too",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for all figures, a line an attack")
    parser.add_argument("--keep", type=Path, help="keep the brokers' directories under this one")
    given = parser.parse_args()
    if given.list:
        for one in ATTACKS.values():
            print(f"{one.name:26} {one.what}")
        return 0
    founds: list[Found] = []
    terminal = sys.stderr.isatty()
    print(heading(), flush=True)
    for name in given.only or ATTACKS:
        attack = ATTACKS[name]
        for attempt in range(1, given.tries + 1):
            if terminal:
                print(f"\r\x1b[K{name}: {attack.what}", end="", file=sys.stderr, flush=True)
            found = _one(attack, given, attempt)
            if terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            print(row(found), flush=True)
            for fault in (*found.faults, *([found.slow] if found.slow else [])):
                print(f"    {fault}", flush=True)
            if given.json is not None:
                with given.json.open("ab") as file:
                    file.write(msgspec.json.encode(found) + b"\n")
            if found.faults or not found.slow:
                break
        founds.append(found)
    print(noise(founds))
    failed = [found.name for found in founds if not found.held]
    print(f"{len(founds) - len(failed)} of {len(founds)} attacks held", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0


def _one(attack: Attack, given: argparse.Namespace, attempt: int) -> Found:
    parent = given.keep
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"malamute-{attack.name}-", dir=parent))
    try:
        return run(
            attack, folder, rounds=1 << 60, seconds=given.seconds, quiet_s=given.quiet,
            p99_factor=given.p99_factor, seed=given.seed + attempt - 1,
        )  # fmt: skip
    finally:
        if parent is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
