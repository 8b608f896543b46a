"""Hostile messages: every command, in every state of a link, made to reach deep.

Owns the making of messages from the broker's answers so far: numbers in use, offsets, held work and
ids are tried again, doubled and exceeded. The rules: all choices come from one seed; each result is
a `Step`, which can be written to a file as one line and played again. Source: SPEC.md, sections 2
to 4.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from malamute_protocol import commands as wire
from malamute_protocol.batch import iter_batches
from malamute_protocol.errors import BatchError
from malamute_protocol.framing import COMMANDS, NUMBERS
from malamute_protocol.link import CLIENT_COMMANDS, CONTENT_COMMANDS
from tests.fuzz.hostile import BAD_MESSAGEPACK, EXTREMES, Chance, Contents

PEERS: Final = 6
"""Peers that send at the same time."""
STREAMS: Final = ("s", "t", "u", "own", "ram", "full", "kv")
_REMEMBERED: Final = 40
_KEPT_BYTES: Final = 1 << 16
_NUMBERS: Final = (0, 1, 1, 2, 2, 3, 4)
_COMMANDS_OF_A_STEP: Final = tuple(
    command for command in COMMANDS.values() if command in wire.STEP_PARTS
)
_LIKELY: Final[tuple[type[wire.Command], ...]] = (
    wire.Publish, wire.Publish, wire.Publish, wire.Publish, wire.Subscribe, wire.Subscribe,
    wire.Credit, wire.Unsubscribe, wire.Send, wire.OpenInbox, wire.AckMail, wire.Request,
    wire.Offer, wire.AckWork, wire.Reply, wire.JoinGroup, wire.JoinGroup, wire.AckRecords,
    wire.MoveCursor, wire.Atomic, wire.OpenProducer, wire.Ping, wire.BeginTransaction, wire.Stage,
    wire.CommitTransaction,
)  # fmt: skip
_ALL: Final = tuple(COMMANDS.values())
_HINTS: Final = {command: get_type_hints(command) for command in _ALL}


def _form(hint: Any) -> str:
    """Return the form of a field, as far as the making of its values needs it."""
    text = str(hint)
    if hint is bool:
        return "bool"
    if "ge=" in text:
        return "bounded"
    if hint is int or "int" in text:
        return "int"
    if hint is str or "max_length=1024" in text:
        return "str"
    return "bytes" if hint is bytes or "bytes" in text else ""


_FORMS: Final = {
    command: {name: _form(hint) for name, hint in hints.items()}
    for command, hints in _HINTS.items()
}
_BOUNDS: Final = (0, 1, 2**31, 2**53 - 1, 2**53)
_TEXTS: Final = ("", "x", "tail", "é" * 20, "y" * 300, "z" * 1024)
_BYTES: Final = (b"", b"k", bytes(16), b"z" * 128)
_HOLDS: Final[dict[type[wire.Command], type[wire.Command]]] = {
    wire.AckMail: wire.Mail, wire.AckWork: wire.Work, wire.Reply: wire.Work,
    wire.AckRecords: wire.Deliver,
}  # fmt: skip
"""Command -> the delivery by which a peer holds the numbers that the command names."""
_pack = msgspec.msgpack.encode


class Step(NamedTuple):
    """One event of the broker's world: a message of a peer, or something without one."""

    peer: int
    kind: str
    """`message`, `more` (a message, and the turn that takes it takes another), `lost` (the peer's
    connection ends), `wait` (milliseconds go by); of live peers also `abort` (it ends by a reset),
    `fresh` (a new one, its first bytes) and `raw` (bytes)."""
    frames: tuple[bytes, ...] = ()
    ms: int = 0

    def line(self) -> str:
        """Return the step as one line of a file."""
        parts = [str(self.peer), self.kind]
        if self.kind == "wait":
            parts.append(str(self.ms))
        return " ".join(parts + [frame.hex() or "-" for frame in self.frames])

    @classmethod
    def of(cls, line: str) -> Step:
        """Return the step of one line. Raises ValueError."""
        peer, kind, *rest = line.split()
        if kind == "wait":
            return cls(int(peer), kind, (), int(rest[0]))
        frames = tuple(b"" if text == "-" else bytes.fromhex(text) for text in rest)
        return cls(int(peer), kind, frames)


def read_steps(path: Path) -> list[Step]:
    """Return the steps of a file; lines that begin with # are for people."""
    lines = path.read_text("ascii").splitlines()
    return [Step.of(line) for line in lines if line and not line.startswith("#")]


def write_steps(path: Path, steps: Iterable[Step], about: Sequence[str] = ()) -> None:
    """Write a file that read_steps() reads."""
    text = "".join(f"# {line}\n" for line in about)
    path.write_text(text + "".join(step.line() + "\n" for step in steps), "ascii")


class View:
    """Facts that one peer knows of its link from the broker's messages."""

    def __init__(self) -> None:
        """Begin as a link that was not greeted."""
        self.open = False
        self.greeted = False
        self.tracker = 0
        self.subscriptions: list[int] = []
        self.offsets: list[int] = [0]
        """Offsets and numbers of messages that were seen."""
        self.held: dict[type[wire.Command], list[tuple[int, int, int]]] = {
            wire.Mail: [], wire.Work: [], wire.Deliver: [],
        }  # fmt: skip
        """(subscription, first number, number after the last) of each delivery."""

    def take(self, commands: Sequence[Any], frames: Sequence[Any], shared: Shared) -> None:
        """Learn from one message of the broker."""
        at = 0
        for command in commands:
            owned = list(frames[at : at + command.content_frames])
            at += command.content_frames
            kind = type(command)
            if kind is wire.Welcome:
                self.open = True
            elif kind is wire.Bye:
                self.open = self.greeted = False
            elif kind is wire.Confirm:
                self._keep(self.offsets, command.offset)
                self._keep(shared.times, command.append_time_ms)
            elif kind is wire.Subscribed:
                self._keep(self.subscriptions, command.subscription)
                self._keep(self.offsets, command.tail)
                self._keep(shared.uuids, command.stream)
            elif kind in (wire.Mail, wire.Work, wire.Deliver):
                self._hold(command, owned)
            elif kind is wire.Result:
                number = command.value.get("id")
                if type(number) is int and "epoch" in command.value:
                    self._keep(shared.producers, (number, command.value["epoch"], 0))

    def _keep(self, place: list[Any], value: Any) -> None:
        place.append(value)
        if len(place) > _REMEMBERED:
            del place[0]

    def _hold(self, command: Any, frames: list[Any]) -> None:
        try:
            first = next(iter_batches([bytes(frame) for frame in frames]), None)
        except BatchError:
            return
        if first is not None:
            numbers = first.offsets
            held = self.held[type(command)]
            self._keep(held, (command.subscription, int(numbers[0]), int(numbers[-1]) + 1))
            self._keep(self.offsets, int(numbers[0]))


class Shared:
    """Facts that all peers share."""

    def __init__(self) -> None:
        """Begin without any fact."""
        self.producers: list[tuple[int, int, int]] = []
        self.uuids: list[bytes] = [b"", bytes(16)]
        self.times: list[int] = [0]
        self.links: list[int] = []
        """Numbers of links that may be kicked."""


class Messages:
    """A source of steps; one seed and equal answers make one sequence."""

    def __init__(self, seed: int, peers: int = PEERS) -> None:
        """peers: how many links there are at a time."""
        self.chance: random.Random = Chance(seed)
        self.contents = Contents(self.chance)
        self.shared = Shared()
        self.contents.producers = self.shared.producers
        self.views = [View() for _ in range(peers)]
        self.wild = False
        """Whether the present message may break the grammar: that ends its link, and deep states
        would never be reached if all did."""
        self._made: deque[bytes] = deque(maxlen=_REMEMBERED)
        """The newest contents."""
        self.held: tuple[int, int, int] | None = None
        """Numbers that its link holds and that the present command is about."""
        self._fields: dict[str, Callable[[View, type[wire.Command]], Any]] = {
            "stream": self._stream, "mailbox": self._mailbox, "service": self._service,
            "pattern": self._pattern, "start": self._start, "settings": self._settings,
            "session": self._session, "versions": self._versions, "identity": self._identity,
            "ranges": self._ranges, "requests": self._requests, "numbers": self._requests,
            "group": self._group, "cursor": self._group, "kind": self._kind, "key": self._key,
            "subscription": self._subscription, "tracker": self._tracker, "until": self._until,
            "id": self._producer, "client_time": self._window, "about": self._about,
            "uuid": self._uuid, "reply_to": self._mailbox, "confirm": self._mailbox,
            "frames": self._frames_owned, "after": self._after, "rows": self._rows,
            "link": self._link, "transaction": self._transaction, "place": self._place,
        }  # fmt: skip

    # --- one step ---------------------------------------------------------------------------

    def step(self) -> Step:
        """Return the next step."""
        chance = self.chance
        peer = chance.randrange(len(self.views))
        view = self.views[peer]
        draw = chance.random()
        if draw < 0.012:
            self.views[peer] = View()
            return Step(peer, "lost")
        if draw < 0.03:
            return Step(peer, "wait", (), chance.choice((1, 5, 100, 700, 6_000)))
        if not view.greeted and draw < 0.9:
            view.greeted = True
            return Step(peer, "message", (self._hello(),))
        self.wild = chance.random() < 0.07
        commands, frames = self._commands(view)
        head = self._packed(commands)
        kind = "message" if chance.random() < 0.4 else "more"
        if not self.wild:
            return Step(peer, kind, (head, *frames))
        draw = chance.random()
        if draw < 0.4:
            head = self.contents.mutated(head)
        elif draw < 0.5:
            frames.insert(chance.randrange(len(frames) + 1), self._frame())
        elif draw < 0.6 and frames:
            del frames[chance.randrange(len(frames))]
        elif draw < 0.63:
            head = chance.choice(BAD_MESSAGEPACK)
        return Step(peer, kind, (head, *frames))

    def _hello(self) -> bytes:
        session = self.chance.randbytes(16)
        return _pack([[1, [1, 1], session, "", "fuzz", self.chance.choice((0, 0, 60_000, 1))]])

    def _commands(self, view: View) -> tuple[list[Any], list[bytes]]:
        chance = self.chance
        commands: list[Any] = []
        frames: list[bytes] = []
        many = chance.random() < 0.001
        for _ in range(30 if many else chance.choice((1, 1, 1, 1, 2, 3, 6))):
            command = chance.choice(_LIKELY)
            if chance.random() < 0.25:
                command = chance.choice(_ALL if self.wild else CLIENT_COMMANDS)
            if command in (wire.Bye, wire.Kick, wire.Hello) and chance.random() < 0.8:
                continue
            if not view.open and command in CONTENT_COMMANDS and not self.wild:
                continue
            self._add(view, command, commands, frames)
            if command is wire.Atomic:
                self._parts(view, commands, frames)
        if not commands:
            commands.append([3, 1])
        if many:
            # More than a message may have; to make each anew takes as long as 500 messages.
            times = 4_096 // len(commands) + 1
            commands, frames = commands * times, frames * times
        return commands, frames

    def _parts(self, view: View, commands: list[Any], frames: list[bytes]) -> None:
        chance = self.chance
        count = chance.choice((1, 2, 3, 5))
        commands[-1][2:3] = [count if not self.wild else chance.choice(EXTREMES)]
        for _ in range(count):
            kind = chance.choice(_COMMANDS_OF_A_STEP)
            self._add(view, kind, commands, frames)
            names, part = kind.__struct_fields__, commands[-1]
            at = names.index("tracker") + 1
            if at < len(part) and not self.wild:
                part[at] = 0
            if kind is wire.AckWork and len(part) > 3 and not self.wild:
                part[3] = chance.choice((3, 4, 5))

    def _add(
        self, view: View, kind: type[wire.Command], commands: list[Any], frames: list[bytes]
    ) -> None:
        """Add one command, with the frames that it owns."""
        chance = self.chance
        held = view.held[_HOLDS.get(kind, wire.Mail) if not self.wild else wire.Work]
        self.held = chance.choice(held) if held and chance.random() < 0.9 else None
        values = [self._value(view, kind, name) for name in kind.__struct_fields__]
        if chance.random() < 0.3:
            least = 0 if self.wild else len(kind.__struct_fields__) - len(kind.__struct_defaults__)
            del values[chance.randrange(least, len(values) + 1) :]
        elif chance.random() < 0.02:
            values.append(self._anything())
        commands.append([NUMBERS[kind], *values])
        if kind in CONTENT_COMMANDS and kind is not wire.Atomic:
            frames.append(self._frame())

    def _packed(self, commands: list[Any]) -> bytes:
        try:
            return _pack(commands)
        except (OverflowError, UnicodeEncodeError):
            return b"\x91\x92\x03\x01"

    def _frame(self) -> bytes:
        chance = self.chance
        draw = chance.random()
        if draw < 0.3:
            return self.contents.plain(chance.choice((1, 1, 3, 20)), chance.choice("abk"))
        if draw < 0.64 and self._made:
            # A content that was sent once comes again: to another place, as mail, or a second time.
            return chance.choice(self._made)
        if draw < 0.98:
            made = self.contents.content()
            if len(made) < _KEPT_BYTES:
                self._made.append(made)
            return made
        return chance.randbytes(chance.choice((0, 1, 127, 128, 300)))

    # --- values of fields -------------------------------------------------------------------

    def _value(self, view: View, kind: type[wire.Command], name: str) -> Any:
        chance = self.chance
        draw = chance.random()
        if self.wild and draw < 0.1:
            return self._anything()
        made = self._fields.get(name)
        if made is not None and not (self.wild and draw < 0.2):
            return made(view, kind)
        form = _FORMS[kind][name]
        if form == "bool":
            return chance.random() < 0.5
        if name in ("credit_records", "credit_bytes") and draw < 0.8:
            return chance.choice((1, 10, 1000, 1 << 30, 1 << 40))
        if name in ("level", "visibility") and draw < 0.95:
            return chance.choice((0, 0, 0, 1, 1, 2, 3))
        if name in ("state", "priority"):
            return chance.choice((1, 2, 3, 3, 4, 5) if not self.wild else EXTREMES)
        if name in ("end", "next", "after", "from_", "to") and draw < 0.8:
            return max(0, chance.choice(view.offsets) + chance.choice((0, 0, 1, -1, 100)))
        if name.endswith("_ms") and draw < 0.8:
            return chance.choice((0, 0, 1, 100, 2_000, 60_000, chance.choice(self.shared.times)))
        if name == "limit" and draw < 0.8:
            return chance.choice((1, 2, 10, 1000))
        if form == "bounded":
            return chance.choice(_BOUNDS if not self.wild else EXTREMES)
        if form == "int":
            return chance.choice(EXTREMES)
        if form == "str":
            return chance.choice(_TEXTS)
        if form == "bytes":
            return chance.choice(_BYTES)
        return self._anything()

    def _anything(self) -> Any:
        chance = self.chance
        return chance.choice(
            (None, True, 1.5, float("nan"), "", "text", b"", b"bin", [], {}, [[[]]], {"a": [1, {}]},
             [1, 2], {"": 0}, *chance.sample(EXTREMES, 4))
        )  # fmt: skip

    def _stream(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        draw = chance.random()
        if kind in (wire.CreateStream, wire.RemoveStream) and draw < 0.7:
            return chance.choice(("u", "own", "ram", "full", "kv", f"n{chance.randrange(9)}"))
        if draw < 0.93:
            return chance.choice(STREAMS)
        return chance.choice(("", "bad name", "~x", "a" * 256, "*", "s*", "é", "{t}", "witness*"))

    def _mailbox(self, view: View, kind: type[wire.Command]) -> Any:
        draw = self.chance.random()
        if draw < 0.9:
            return self.chance.choice(("m", "m", "n", "small", "jobs.dead", ""))
        return self.chance.choice(("bad name", "~", "~x", "m*", "*", "a" * 256))

    def _service(self, view: View, kind: type[wire.Command]) -> Any:
        if self.chance.random() < 0.92:
            return self.chance.choice(("jobs", "jobs", "sums", "quick"))
        return self.chance.choice(("", "bad name", "j*", "*", "a" * 256))

    def _pattern(self, view: View, kind: type[wire.Command], deep: int = 0) -> Any:
        chance = self.chance
        draw = chance.random()
        if draw < 0.35:
            return ["all"]
        if draw < 0.5:
            return [
                "topic",
                chance.choice(("a.*", "*", "#", "*.b", "a.#", "forex.*", "a..b", "*a")),
            ]
        if draw < 0.6:
            return ["prefix", chance.choice(("", "a", "forex.", "x" * 256, "\x00"))]
        if draw < 0.7:
            return ["regex", self._expression()]
        if draw < 0.8:
            criteria = chance.choice(
                ([["k"]], [["k", "v"], ["f", ""]], [], [[""]], [["k", "v", "w"]], [["k"]] * 65)
            )
            return ["fields", chance.choice(("all", "any", "none")), criteria]
        if draw < 0.93 and deep < 10:
            count = chance.choice((0, 1, 2, 2, 3))
            inner = [self._pattern(view, kind, deep + 1) for _ in range(count)]
            return [chance.choice(("and", "or", "not")), *inner]
        return chance.choice(([], ["x"], ["all", 1], [1], ["topic"], ["regex", 1], None, "all"))

    def _expression(self) -> str:
        chance = self.chance
        return chance.choice(
            ("a", "^a\\.", "(a+)+$", "(", "[", "a{1000}", "(a{100}){100}", "\\C", "\\pL*",
             "x" * 1100, "((a?){30}a{30})", "(?i)forex|é", ".*.*.*.*=.*",
             f"n{chance.randrange(200)}.*7")
        )  # fmt: skip

    def _start(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        draw = chance.random()
        number = chance.choice(view.offsets)
        if draw < 0.5:
            return [chance.choice((0, 0, 0, 1, 6))]
        if draw < 0.65:
            return [2, number, chance.choice((0, 1, 2, 99)), chance.choice(self.shared.uuids)]
        if draw < 0.75:
            time = chance.choice(self.shared.times) + chance.choice((0, 1, -1, 10_000))
            return [chance.choice((3, 4)), time, chance.random() < 0.5]
        if draw < 0.85:
            time, offset = chance.choice((number, chance.choice(EXTREMES))), chance.choice(EXTREMES)
            return [5, (time % 2**64).to_bytes(8, "big") + (offset % 2**64).to_bytes(8, "big")]
        if draw < 0.92:
            return [7, chance.choice(("g", "h", "", "bad name")), [0]]
        return [chance.choice(EXTREMES), chance.choice(EXTREMES), chance.choice(EXTREMES), b""]

    def _settings(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        if kind is wire.CreateStream and chance.random() < 0.2:
            return {"keep": "last-per-subject", "ring_bytes": 1 << 20}
        names = ("memory", "full", "max_bytes", "max_age_ms", "body_kind", "schema", "level",
                 "description", "max_messages", "ttl_ms", "max_requests", "attempts_max",
                 "lease_ms", "backoff_ms", "timeout_ms", "dead_letters", "pin", "pin_bytes_max",
                 "x", "ring_bytes")  # fmt: skip
        usual = (True, False, 0, 1, 2, 100, 5_000, 1 << 20, "stored", "synced", "refuse", "blob",
                 "overwrite", "", b"", "m")  # fmt: skip
        return {
            chance.choice(names): chance.choice(usual)
            if chance.random() < 0.9
            else self._anything()
            for _ in range(chance.choice((0, 0, 1, 2, 3)))
        }

    def _session(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        if chance.random() < 0.5:
            return chance.randbytes(16)
        return chance.choice((bytes(16), b"1" * 16, b"", b"x" * 15))

    def _versions(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice(([1, 1], [1, 1], [1, 9], [2, 3], [0, 0], [5, 1], [1], []))

    def _identity(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice(("", "", "m", "n", "worker", "bad name", "~x", "a" * 300))

    def _ranges(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        draw = chance.random()
        if draw < 0.8 and self.held is not None:
            _, first, end = self.held
            return [[first, max(first + 1, end + chance.choice((0, 0, 0, 1, -1)))]]
        if draw < 0.9:
            first = max(0, chance.choice(view.offsets))
            return [[first, first + chance.choice((1, 3, 1000))]]
        if not self.wild:
            return [[n, n + 1] for n in range(0, 300, 2)]
        return chance.choice(
            ([], [[0, 0]], [[5, 1]], [[0, 1], [0, 1]], [[3, 4], [1, 2]], [[0, 1 << 20]],
             [[0, (1 << 20) + 1]], [[2**63 - 1, 2**63]], [[2**64 - 2, 2**64 - 1]], [[-5, 5]],
             [[n, n + 1] for n in range(0, 300, 2)], [[0]], [[0, 1, 2]])
        )  # fmt: skip

    def _requests(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        if self.held is not None and chance.random() < 0.9:
            _, first, end = self.held
            numbers = list(range(first, min(end, first + 4)))
            return numbers * chance.choice((1, 1, 1, 2))
        return [chance.choice((*view.offsets[-3:], *EXTREMES[:14])) for _ in range(2)]

    def _group(self, view: View, kind: type[wire.Command]) -> Any:
        if self.chance.random() < 0.85:
            return self.chance.choice(("g", "g", "h"))
        return self.chance.choice(("", "g*", "*", "bad name", "a" * 256))

    def _kind(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice(("shared", "shared", "keyed", "exclusive", "", "x"))

    def _transaction(self, view: View, kind: type[wire.Command]) -> bytes:
        return self.chance.choice((b"t", b"u", b"v"))

    def _place(self, view: View, kind: type[wire.Command]) -> int:
        return self.chance.choice(_NUMBERS)

    def _key(self, view: View, kind: type[wire.Command]) -> Any:
        keys = (b"", b"", b"k", b"l", self.chance.randbytes(8), b"x" * 128, b"x" * 129)
        return self.chance.choice(keys if self.wild else keys[:-1])

    def _subscription(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        draw = chance.random()
        opens = kind in (wire.Subscribe, wire.OpenInbox, wire.Offer, wire.JoinGroup)
        if self.held is not None and draw < 0.85 and kind in _HOLDS:
            return self.held[0]
        if view.subscriptions and draw < (0.1 if opens else 0.9):
            return chance.choice(view.subscriptions)
        return chance.choice(_NUMBERS) if draw < 0.97 else chance.choice(EXTREMES)

    def _tracker(self, view: View, kind: type[wire.Command]) -> Any:
        if self.chance.random() < 0.95:
            view.tracker += 1
            return view.tracker
        return self.chance.choice((0, view.tracker, *self.chance.sample(EXTREMES, 2)))

    def _until(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice(("", "", "tail", "?"))

    def _producer(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        if self.shared.producers and chance.random() < 0.7:
            return chance.choice(self.shared.producers)[0]
        return chance.choice((0, 0, *chance.sample(EXTREMES, 2)))

    def _window(self, view: View, kind: type[wire.Command]) -> Any:
        chance = self.chance
        if chance.random() < 0.8:
            return None
        return [chance.choice((0, 5, *chance.sample(EXTREMES, 2))) for _ in range(2)]

    def _about(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice(([], [[b"k", 0, 1]], [[b"k", -1, 2**63]]))

    def _uuid(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice(self.shared.uuids)

    def _frames_owned(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice((0, 1, 1, -1, 5000, 2**63 - 1))

    def _after(self, view: View, kind: type[wire.Command]) -> Any:
        hint = _HINTS[kind]["after"]
        if hint is int:
            return self.chance.choice((*view.offsets, -1, *self.chance.sample(EXTREMES, 2)))
        return self.chance.choice(("", "a", "zz", "\x00", "é"))

    def _link(self, view: View, kind: type[wire.Command]) -> Any:
        # Small numbers are those of the canary's links, which live on.
        return self.chance.choice((0, -1, 2**63 - 1, 2**64 - 1, *self.shared.links[-8:]))

    def _rows(self, view: View, kind: type[wire.Command]) -> Any:
        return self.chance.choice((None, b"", b"\x01", b"\xff" * 9))
