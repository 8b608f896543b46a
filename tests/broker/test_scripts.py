"""Interactions as text: what is done, and below it, indented, everything that is told.

Each file in scripts/ is one test. A line that is not indented is an action; the indented
lines after it are all commands that any client was sent because of it, in order. To write
one, leave the indented lines out and take over what the failure shows, once it is right.

    NAME hello
    NAME publish STREAM [stored|none] SUBJECT=BODY ...
    NAME subscribe NUMBER STREAM [PATTERN] [start=earliest|latest|OFFSET|OFFSET@EPOCH|last]
         [credit=RECORDS] [end=OFFSET] [tail] [durable]
    NAME credit NUMBER RECORDS | unsubscribe NUMBER | pong | bye | create STREAM [KEY=VALUE ...]
    sync | evict | read | wait MS | restart | power-loss | trim STREAM-NUMBER OFFSET
    block NAME | unblock NAME | refuse CODE | take
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.commands import Level
from malamute_protocol.pattern import from_text
from tests.broker.shell import Peer, Shell

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    script = Script()
    shown: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            shown.append(line)
        elif not line.startswith(" "):
            shown.append(line)
            shown += [f"    {told}" for told in script.do(line)]
    assert "\n".join(shown) + "\n" == path.read_text()


class Script:
    """The clients of one script, by name, before one broker."""

    def __init__(self) -> None:
        self.shell = Shell(sync=False, heartbeat_ms=1_000)
        self.links: dict[str, int] = {}
        self.shown: dict[int, int] = {}
        self.trackers = 0

    def do(self, line: str) -> Iterator[str]:
        words = line.split()
        act = getattr(self, f"at_{words[0].replace('-', '_')}", None)
        if act is not None:
            act(*words[1:])
        else:
            getattr(self, f"on_{words[1]}")(words[0], *words[2:])
        for name, link in self.links.items():
            peer = self.shell.peers.get(link, Peer())
            for command, bodies in peer.told[self.shown.get(link, 0) :]:
                yield f"{name}: {show(command, bodies)}"
            self.shown[link] = len(peer.told)

    # --- what clients do ---------------------------------------------------------------

    def on_hello(self, name: str, *words: str) -> None:
        self.links[name] = len(self.shown) + 1
        session = (words[0] if words else name).encode().ljust(16)
        self.shown[self.links[name]] = 0
        self.shell.hello(self.links[name], session=session)

    def on_publish(self, name: str, stream: str, *words: str) -> None:
        level = 0
        if words[0] in ("none", "stored"):
            level, words = int(Level[words[0].upper()]), words[1:]
        self.trackers += 1
        subjects, records = zip(*(word.split("=") for word in words), strict=True)
        self.shell.publish(
            self.links[name], stream, [record.encode() for record in records],
            subject=subjects, tracker=self.trackers, level=level,
        )  # fmt: skip

    def on_subscribe(self, name: str, number: str, stream: str, *words: str) -> None:
        pattern: Any = ["all"]
        start: list[Any] = [0]
        fields: dict[str, Any] = {}
        for word in words:
            key, _, value = word.partition("=")
            match key:
                case "start":
                    start = start_of(value)
                case "credit":
                    fields["records"] = int(value)
                case "end":
                    fields["end"] = int(value)
                case "tail":
                    fields["until"] = "tail"
                case "durable":
                    fields["visibility"] = 1
                case _:
                    pattern = from_text(word)
        self.shell.subscribe(self.links[name], int(number), stream, pattern, start, **fields)

    def on_credit(self, name: str, number: str, records: str) -> None:
        self.shell.send(self.links[name], wire.Credit(int(number), int(records), 1 << 50))

    def on_unsubscribe(self, name: str, number: str) -> None:
        self.shell.send(self.links[name], wire.Unsubscribe(int(number)))

    def on_pong(self, name: str) -> None:
        self.shell.send(self.links[name], wire.Pong())

    def on_bye(self, name: str) -> None:
        self.shell.send(self.links[name], wire.Bye())

    def on_create(self, name: str, stream: str, *words: str) -> None:
        pairs = dict(word.split("=") for word in words)
        values = {key: int(v) if v.isdigit() else v == "true" for key, v in pairs.items()}
        self.shell.send(self.links[name], wire.CreateStream(1, stream, values))

    # --- what happens around them --------------------------------------------------------

    def at_sync(self) -> None:
        self.shell.sync()
        self.shell.run()

    def at_evict(self) -> None:
        self.shell.evict()

    def at_wait(self, ms: str) -> None:
        self.shell.wait(int(ms))

    def at_restart(self) -> None:
        self._again(power_loss=False)

    def at_power_loss(self) -> None:
        self._again(power_loss=True)

    def _again(self, *, power_loss: bool) -> None:
        self.shell.restart(power_loss=power_loss)
        self.links.clear()
        self.shown.clear()

    def at_trim(self, number: str, offset: str) -> None:
        self.shell.firsts[int(number)] = int(offset)
        self.shell.broker.trimmed("main", {int(number): int(offset)})
        self.shell.run()

    def at_block(self, name: str) -> None:
        self.shell.broker.blocked(self.links[name])

    def at_unblock(self, name: str) -> None:
        self.shell.broker.writable(self.links[name])
        self.shell.run()

    def at_refuse(self, code: str) -> None:
        self.shell.refuse["main"] = (code, "")

    def at_take(self) -> None:
        self.shell.refuse.clear()


def start_of(text: str) -> list[Any]:
    if text in ("earliest", "latest", "last"):
        return [{"earliest": 0, "latest": 1, "last": 6}[text]]
    return [2, *(int(part) for part in text.split("@"))]


def show(command: Any, bodies: list[bytes]) -> str:
    name = type(command).__name__.upper()
    match command:
        case wire.Deliver():
            records = " ".join(body.decode() for body in bodies)
            return f"{name} {command.subscription} [{command.from_}, {command.next}) {records}"
        case wire.Cover():
            return f"{name} {command.subscription} [{command.from_}, {command.next})"
        case wire.Gap():
            return f"{name} {command.subscription} [{command.from_}, {command.to}) {command.code}"
        case wire.Rewound():
            where = f"{command.from_} to {command.to}, epoch {command.epoch}"
            return f"{name} {command.subscription} {where}"
        case wire.Mode():
            mode = "live" if command.live else "on demand"
            return f"{name} {command.subscription} {mode} at {command.offset}"
        case wire.Subscribed():
            bounds = f"at {command.next} of [{command.first}, {command.tail})"
            return f"{name} {command.subscription} {bounds}"
        case wire.Ended():
            return f"{name} {command.subscription} at {command.next} {command.code}"
        case wire.Confirm():
            level = Level(command.level).name.lower()
            return f"{name} {command.tracker} {level} at {command.offset}"
        case wire.Refused():
            return f"{name} {command.command} {command.reference} {command.code}"
        case wire.Bye():
            return f"{name} {command.code}"
        case _:
            return name
