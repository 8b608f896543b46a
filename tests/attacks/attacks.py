"""The attacks of hostile peers on a broker, each as a function of its own.

Owns what is sent. The rules: an attack needs nothing but a port (and a password where there is
one), says in its docstring what it does, in one sentence, and names the settings that it needs and
the memory that the broker's configuration lets it fill. Source: ARCHITECTURE.md, "What a peer may
cost" and "Containment"; docs/robustness.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import psutil
import zmq

from malamute_protocol import commands as wire
from malamute_protocol.content_layout import (
    PROPERTIES_COLUMN,
    PROPERTIES_CONSTANT,
    PROPERTIES_DICTIONARY,
)
from malamute_protocol.encode import encode
from malamute_protocol.framing import encode_message
from malamute_protocol.limits import RANGES_MAX
from malamute_protocol.stamp import message_id
from malamute_py.server.authentication.credentials import hash_password
from tests.attacks.aim import Aim, Raw, burst
from tests.fuzz import live
from tests.fuzz.messages import Messages
from tests.fuzz.zmtp import COMMAND, GREETING, LONG, MORE, frame, message, ready
from tests.protocol.hostile import claim, craft, ints, packed

MIB: Final = 1 << 20
PASSWORD: Final = "a canary's password"
_ALL: Final = 1 << 40
_HEADERS: Final = 65_536


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
    files: int = 0
    """Descriptors that lasting things may take."""
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


# --- contents ---------------------------------------------------------------------------


@attack(60)
def bad_properties(aim: Aim) -> None:
    """Properties that are no MessagePack or too many, wherever rows are cut out for a reader."""
    subjects = packed(["a", "b"])
    sections = (
        (PROPERTIES_CONSTANT, b"\xc1 no MessagePack"),
        (PROPERTIES_CONSTANT, packed({"k": "v" * 70_000})),
        (PROPERTIES_DICTIONARY, ints([0] * 40) + b"\x91\xc1"),
        (PROPERTIES_COLUMN, ints(range(41)) + b"\xc1" * 40),
    )
    contents = [
        craft(40, subjects=subjects, subjects_count=2, subject_codes=[1] + [0] * 39,
              properties=section)
        for section in sections
    ]  # fmt: skip
    reader, writer = aim.peer(), aim.peer()
    pattern = ["topic", "b"]

    def begin() -> None:
        reader.say(
            wire.Subscribe(1, "attacked", pattern, [0], _ALL, _ALL),
            wire.JoinGroup(2, "attacked", "group", pattern, "shared", [0], _ALL, _ALL),
            wire.OpenInbox(3, "attacked", _ALL, _ALL),
            wire.Offer(4, "attacked", pattern, _ALL, _ALL),
        )

    reader.first(begin)
    while aim.more():
        for content in contents:
            writer.say(
                wire.Publish("attacked", 1), wire.Send("attacked", 2), wire.Request("attacked", 3),
                frames=[content] * 3,
            )  # fmt: skip
        number = 10 + aim.round % 900
        reader.say(wire.Unsubscribe(number), wire.Subscribe(number, "attacked", pattern, [0], 9, 9))
        writer.discard()
        reader.discard()


@attack(60)
def equal_tables(aim: Aim) -> None:
    """Batches whose header tables are equal and whose codes are not, for readers and groups."""
    subjects = packed(["a", "b"])
    coded = craft(2, subjects=subjects, subjects_count=2, subject_codes=[0, 1])
    plain = craft(2, subjects=subjects, subjects_count=2, body=ints([0, 1, 2]) + b"yy")
    reader, writer = aim.peer(), aim.peer()

    def begin() -> None:
        for number, subject in enumerate("ab", 1):
            pattern = ["topic", subject]
            reader.say(
                wire.Subscribe(number, "equal", pattern, [0], _ALL, _ALL),
                wire.JoinGroup(
                    9 + number, "equal", f"g{number}", pattern, "keyed", [0], _ALL, _ALL
                ),
            )

    reader.first(begin)
    while aim.more():
        writer.say(*[wire.Publish("equal", n) for n in range(8)], frames=[coded, plain] * 4)
        writer.discard()
        reader.discard()


@attack(8)
def header_table_of_millions(aim: Aim) -> None:
    """A header table of 15 million entries of one byte each, with the right checksum."""
    table = claim(15 << 20) + b"\xa0" * (15 << 20)
    content = craft(subjects=table, subjects_count=1)
    writer = aim.peer()
    while aim.more():
        writer.say(wire.Publish("table", 1), frames=[content])
        writer.discard()


@attack(40)
def compression_bombs(aim: Aim) -> None:
    """Bodies that say they are a gigabyte when they are decompressed."""
    from malamute_protocol.codec import compress

    bomb = compress(2, bytes(8 * MIB))
    contents = [
        craft(1, body=bomb, body_raw=size, codec=2) for size in (8 * MIB, 1 << 30, (1 << 32) - 8)
    ]
    reader, writer = aim.peer(), aim.peer()
    reader.first(lambda: reader.say(wire.Subscribe(1, "bomb", ["topic", "s"], [0], _ALL, _ALL)))
    while aim.more():
        for content in contents:
            writer.say(wire.Publish("bomb", 1), wire.Request("bomb", 2), frames=[content] * 2)
        writer.discard()
        reader.discard()


@attack(60)
def hostile_contents(aim: Aim) -> None:
    """Batches with hostile insides to streams, mailboxes and services that are read."""
    source = Messages(7).contents
    reader, writer = aim.peer(), aim.peer()

    def begin() -> None:
        reader.say(
            wire.Subscribe(1, "hostile", ["all"], [0], _ALL, _ALL),
            wire.Subscribe(2, "hostile", ["topic", "*.b"], [0], _ALL, _ALL),
            wire.OpenInbox(3, "hostile", 1_000, _ALL),
            wire.Offer(4, "hostile", ["all"], 1_000, _ALL),
        )

    reader.first(begin)
    kinds: tuple[Callable[[], wire.Command], ...] = (
        lambda: wire.Publish("hostile", 1), lambda: wire.Send("hostile", 1),
        lambda: wire.Request("hostile", 1),
    )  # fmt: skip
    while aim.more():
        for _ in range(20):
            writer.say(aim.chance.choice(kinds)(), frames=[source.content()])
        writer.discard()
        reader.discard()


# --- matching ---------------------------------------------------------------------------


@attack(4)
def regular_expressions(aim: Aim) -> None:
    """17 expressions that cost much, and batches of 500 subjects that no broker has seen."""
    reader, writer = aim.peer(), aim.peer()

    def begin() -> None:
        for number in range(17):
            pattern = ["regex", f"([ab]{{0,12}}a){{0,5}}c{number}"]
            reader.say(wire.Subscribe(number, "regex", pattern, [1], _ALL, _ALL))

    reader.first(begin)
    while aim.more():
        names = [
            "".join(aim.chance.choices("ab", k=200)) + f"c{at % 17}{aim.round}" for at in range(500)
        ]
        writer.say(wire.Publish("regex", 1), frames=[encode([b"x"] * 500, subject=names)])
        writer.discard()
        reader.discard()
        time.sleep(0.05)


def new_headers(aim: Aim, count: int = _HEADERS) -> bytes:
    """A batch of so many subjects that no broker has seen."""
    start = aim.chance.getrandbits(40)
    names = [f"n{start + at:x}.{at % 7}.{at}" for at in range(count)]
    return encode([b""] * count, subject_table=names, subject_codes=range(count))


@attack(3)
def deep_subjects(aim: Aim) -> None:
    """Batches of 65,536 subjects of 111 parts that differ in the first."""
    writer = aim.peer()
    rest = ".x" * 110
    while aim.more():
        start = aim.chance.getrandbits(30)
        names = [f"{start + at:x}{rest}" for at in range(_HEADERS)]
        content = encode([b""] * _HEADERS, subject_table=names, subject_codes=range(_HEADERS))
        writer.say(wire.Publish("deep", 1), frames=[content])
        writer.discard()


@attack(3)
def new_headers_for_one(aim: Aim) -> None:
    """Batches of 65,536 subjects that no broker has seen, for a few subscriptions."""
    reader, writer = aim.peer(), aim.peer()

    def begin() -> None:
        for number in range(8):
            pattern = ["topic", f"*.{number}.#"]
            reader.say(wire.Subscribe(number, "headers", pattern, [1], _ALL, _ALL))

    reader.first(begin)
    while aim.more():
        writer.say(wire.Publish("headers", 1), frames=[new_headers(aim)])
        writer.discard()
        reader.discard()


@attack(2)
def new_headers_for_many(aim: Aim) -> None:
    """Batches of 65,536 new subjects for 2,000 subscriptions that are served together."""
    readers, writer = [aim.peer(), aim.peer()], aim.peer()
    writer.say(wire.Publish("many", 1), frames=[new_headers(aim)])
    for reader in readers:

        def begin(reader: Any = reader) -> None:
            for first in range(0, 1_000, 100):
                some = range(first, first + 100)
                reader.say(*[
                    wire.Subscribe(n, "many", ["topic", f"*.*.{n}"], [0], _ALL, _ALL, gathered=True)
                    for n in some
                ])  # fmt: skip

        reader.first(begin)
    while aim.more():
        writer.say(wire.Publish("many", 1), frames=[new_headers(aim)])
        for reader in readers:
            reader.discard()
        writer.discard()
        # The subscriptions lag: each begins again at the first record.
        for reader in readers:
            for first in range(0, 1_000, 250):
                some = range(first, first + 250)
                reader.say(*[
                    part
                    for n in some
                    for part in (
                        wire.Unsubscribe(n),
                        wire.Subscribe(
                            n, "many", ["topic", f"*.*.{n}"], [0], _ALL, _ALL, gathered=True
                        ),
                    )
                ])  # fmt: skip
            reader.discard()


# Half of its requests wait for a worker, in memory: a service may hold `services.requests_max`.
@attack(30, keeps=96 * MIB)
def request_subjects(aim: Aim) -> None:
    """Requests of 1,024 subjects that no broker has seen, against 64 expressions of workers."""
    worker, asker = aim.peer(), aim.peer()

    def begin() -> None:
        for number in range(64):
            pattern = ["regex", f"([ab]{{0,12}}a){{0,5}}c{number}"]
            worker.say(wire.Offer(number, "subjects", pattern, 1, _ALL))

    worker.first(begin)
    while aim.more():
        names = [
            "".join(aim.chance.choices("ab", k=200)) + f"d{at}.{aim.round}" for at in range(1_024)
        ]
        content = encode([b""] * 1_024, subject_table=names, subject_codes=range(1_024))
        asker.say(wire.Request("subjects", 1, need_workers=aim.round % 2 == 0), frames=[content])
        asker.discard()
        worker.discard()


@attack(4, keeps=96 * MIB)
def mail_ranges(aim: Aim) -> None:
    """ACK_MAIL, ACK_WORK and ACK_RECORDS of 4,096 and of 65,536 ranges, held and not held."""
    reader, writer = aim.peer(), aim.peer()
    content = encode([b"x"] * 16_384)
    ones = [(2 * at, 2 * at + 1) for at in range(RANGES_MAX)]
    many = [(2 * at, 2 * at + 1) for at in range(65_536)]
    while aim.more():
        box = f"ranges-{aim.round}"
        reader.say(wire.OpenInbox(aim.round, box, _ALL, _ALL))
        begun = reader.take(wire.Subscribed)
        for tracker in range(1, 9):
            writer.say(wire.Send(box, tracker), frames=[content])
        confirmed = [writer.take(wire.Confirm, 5.0) for _ in range(8)]
        base = min((one.offset for one in confirmed if one is not None), default=-1)
        if base < 0 or begun is None:
            continue
        for _ in range(8):
            if reader.take(wire.Mail, 1.0) is None:
                break
        some = [(base + 2 * at, base + 2 * at + 1) for at in range(RANGES_MAX)]
        for ranges in (some, ones, [(first + 1, end + 1) for first, end in some]):
            for _ in range(16):
                reader.say(wire.AckMail(aim.round, ranges, 1))
                reader.say(wire.AckWork(aim.round, ranges, 3, 2))
                reader.say(wire.AckRecords(aim.round, ranges, 3))
        reader.discard()
        reader.say(wire.AckMail(aim.round, many, 1))
        writer.discard()


# --- what links may say -----------------------------------------------------------------


@attack(100)
def message_ids_at_the_end(aim: Aim) -> None:
    """SUBSCRIBE after message ids at the end of all numbers."""
    peer = aim.peer()
    peer.say(wire.Publish("ends", 1), frames=[encode([b"x"])])
    number = 0
    while aim.more():
        for offset in ((1 << 64) - 1, 1 << 63, (1 << 63) - 1, 1 << 62):
            number = (number + 1) % 500
            peer.say(
                wire.Unsubscribe(number),
                wire.Subscribe(number, "ends", ["all"], [5, message_id(0, offset)], 9, 9),
            )
        peer.discard()


@attack(100)
def numbers_twice(aim: Aim) -> None:
    """Numbers of inboxes, offers, memberships and subscriptions used for another of them."""
    peer = aim.peer()
    made: tuple[Callable[[int], wire.Command], ...] = (
        lambda n: wire.Subscribe(n, "twice", ["all"], [1], 9, 9),
        lambda n: wire.OpenInbox(n, "twice", 9, 9),
        lambda n: wire.Offer(n, "twice", ["all"], 9, 9),
        lambda n: wire.JoinGroup(n, "twice", "g", ["all"], "shared", [0], 9, 9),
    )
    while aim.more():
        number = aim.round % 200
        kinds = aim.chance.sample(made, 4)
        peer.say(*[kind(number) for kind in kinds], wire.Unsubscribe(number))
        peer.discard()


@attack(30)
def producers(aim: Aim) -> None:
    """OPEN_PRODUCER by the thousand, for which no permission is needed."""
    peer = aim.peer()
    while aim.more():
        peer.say(*[wire.OpenProducer(n) for n in range(1_000)])
        peer.discard()


@attack(20, keeps=64 * MIB)
def keys(aim: Aim) -> None:
    """Keyed messages by the thousand, each of which has to be remembered."""
    peer = aim.peer()
    content = encode([b""])
    while aim.more():
        batch = [wire.Send("keys", n, key=aim.chance.randbytes(16)) for n in range(1_000)]
        peer.say(*batch, frames=[content] * len(batch))
        peer.discard()


@attack(40, settings=('permissions.*.write=["canary"]', 'permissions.*.read=["canary"]',
                      'permissions.*.request=["canary"]', 'permissions.*.work=["canary"]'),
        canary="")  # fmt: skip
def permission_names(aim: Aim) -> None:
    """Names that the broker has never heard of, each looked for among the permissions."""
    peer = aim.peer()
    while aim.more():
        start = aim.chance.getrandbits(60)
        names = [f"{start + n:x}".ljust(120, "n") for n in range(2_000)]
        peer.say(*[wire.StreamInfo(n, name) for n, name in enumerate(names)])
        peer.discard()


@attack(100)
def malformed_storm(aim: Aim) -> None:
    """Links that end by a malformed command and come back at once, with the same command."""
    bad = [b"\x91\x9a\x0a", b"\xc1", b"\x91\x94\x28\xa1b\x01\x05", b"\x90", b"\x91\x92\x0a\xa1s"]
    peers = [aim.peer() for _ in range(10)]
    while aim.more():
        for number, peer in enumerate(peers):
            peer.write(message([bad[number % len(bad)]]))
            peer.discard()
            if aim.round % 4 == 0:
                peer.close()


@attack(300)
def reconnect_storm(aim: Aim) -> None:
    """Connections that begin a link and end at once, by FIN and by RST."""
    while aim.more():
        peer = aim.peer()
        if aim.round % 2:
            peer.reset()
        else:
            peer.close()


@attack(1_500)
def silent_connections(aim: Aim) -> None:
    """Connections that say nothing, as many as are allowed, each remade when it is cut."""
    kept: list[Raw] = []
    while aim.more():
        with contextlib.suppress(OSError):
            kept.append(Raw(aim, GREETING + ready() if aim.round % 2 else b""))
        if len(kept) > 3_000:
            kept.pop(0).close()
    for each in kept:
        each.close()


@attack(20)
def unread_pongs(aim: Aim) -> None:
    """20 peers with 4,000 PINGs a message, none of which reads an answer."""
    data = message(encode_message([wire.Ping(number) for number in range(4_000)]))
    peers = [aim.peer() for _ in range(20)]
    while aim.more():
        for peer in peers:
            peer.write(data)


@attack(200)
def read_pongs(aim: Aim) -> None:
    """20 peers with 4,000 PINGs a message, all of which read the answers."""
    data = message(encode_message([wire.Ping(number) for number in range(4_000)]))
    peers = [aim.peer() for _ in range(20)]
    while aim.more():
        for peer in peers:
            peer.write(data)
            peer.discard()


@attack(10)
def tiny_messages(aim: Aim) -> None:
    """Messages of one PING each, as fast as a socket takes them."""
    data = burst([wire.Ping(1)] * 20_000)
    peer = aim.peer()
    while aim.more():
        peer.write(data, 20_000)
        peer.discard()


@attack(20)
def index_questions(aim: Aim) -> None:
    """Questions to the journal's index, 1,000 at a time."""
    peer = aim.peer()
    for tracker in range(50):
        names = [f"s{n}" for n in range(200)]
        peer.say(wire.Publish("index", tracker), frames=[encode([b"x" * 100] * 200, subject=names)])
    while aim.more():
        peer.say(*[
            wire.PlanRead(n, "index", ["topic", f"s{n % 200}"], [0], split_bytes=1)
            if n % 2
            else wire.FindOffset(n, "index", [3, n])
            for n in range(1_000)
        ])  # fmt: skip
        peer.discard()


@attack(8)
def slow_readers(aim: Aim) -> None:
    """Readers with all possible credit that read nothing, of a stream that a peer fills."""
    readers = [aim.peer() for _ in range(40)]
    for reader in readers:
        reader.first(
            lambda reader=reader: reader.say(  # type: ignore[misc]
                *[wire.Subscribe(n, "slow", ["all"], [0], _ALL, _ALL) for n in range(4)]
            )
        )
    writer = aim.peer()
    content = encode([b"x" * 1_000] * 1_000)
    while aim.more():
        for tracker in range(8):
            writer.say(wire.Publish("slow", tracker), frames=[content])
        writer.discard()
        if aim.round % 20 == 0:
            for reader in readers:
                reader.say(wire.Ping(1))


@attack(60)
def credit_abuse(aim: Aim) -> None:
    """Credit of all sizes, falling and rising, below nothing and beyond all numbers."""
    reader, writer = aim.peer(), aim.peer()
    content = encode([b"x" * 100] * 100)
    reader.first(
        lambda: reader.say(
            wire.Subscribe(1, "credit", ["all"], [0]), wire.OpenInbox(2, "credit"),
            wire.Offer(3, "credit", ["all"]),
            wire.JoinGroup(4, "credit", "g", ["all"], "shared", [0]),
        )
    )  # fmt: skip
    sizes = (0, 1, -1, 1 << 31, (1 << 53) - 1, 1 << 53, 1 << 62, (1 << 63) - 1)
    while aim.more():
        writer.say(
            wire.Publish("credit", 1), wire.Send("credit", 2), wire.Request("credit", 3),
            frames=[content] * 3,
        )  # fmt: skip
        for number in range(1, 5):
            for size in aim.chance.sample(sizes, 4):
                reader.say(wire.Credit(number, size, aim.chance.choice(sizes)))
        reader.discard()
        writer.discard()


# --- connections and bytes --------------------------------------------------------------


@attack(20)
def routing_ids(aim: Aim) -> None:
    """Peers that claim the routing ids which libzmq gives next, or another's."""
    while aim.more():
        claimed: list[Raw] = []
        start = aim.chance.getrandbits(32)
        for at in range(100):
            number = (start + at) & 0xFFFFFFFF
            identity = b"\0" + number.to_bytes(4, "big") if at % 4 else b"alice"
            with contextlib.suppress(OSError):
                claimed.append(Raw(aim, GREETING + ready(identity=identity), hello()))
        aim.peer().close()
        for each in claimed:
            each.close()


@attack(20)
def reset_behind_a_full_queue(aim: Aim) -> None:
    """Many messages and ZMTP's own PING after slow ones, and a reset before they are answered."""
    slow = message(encode_message([wire.Ping(n) for n in range(4_000)])) * 3
    few = burst([wire.Ping(1)]) * 16
    ping = frame(b"\x04PING\x00\x0a", COMMAND)
    while aim.more():
        peer = aim.peer()
        peer.write(slow + (few + ping) * 200, 3_203)
        peer.reset()


@attack(2_000)
def mutated_traffic(aim: Aim) -> None:
    """Messages of the live fuzzer: any command in any state, wrong ZMTP, half messages, resets."""
    source = live.Attack(aim.port, aim.chance.getrandbits(20))
    for step in source.steps(1 << 60):
        if not aim.more():
            break
        with contextlib.suppress(ConnectionError, TimeoutError):
            source.play(step)
    source.end()
    aim.sent += source.messages + source.connections


@attack(40)
def partial_messages(aim: Aim) -> None:
    """60 connections with 47 MiB each of a message that never ends."""
    part = frame(bytes(MIB), MORE)
    kept: list[Raw] = []
    while aim.more():
        if len(kept) < 60:
            with contextlib.suppress(OSError):
                kept.append(Raw(aim, GREETING + ready(), hello()))
        for peer in kept:
            peer.send(part)
            aim.sent += 1
        kept = [peer for peer in kept if peer.open]
    for peer in kept:
        peer.close()


@attack(40)
def endless_frames(aim: Aim) -> None:
    """Frames of one byte that say that more of their message follow, without end."""
    data = frame(b"x", MORE) * 50_000
    kept: list[Raw] = []
    while aim.more():
        if len(kept) < 10:
            with contextlib.suppress(OSError):
                kept.append(Raw(aim, GREETING + ready(), data))
        for peer in kept:
            peer.send(data)
            aim.sent += 1
        kept = [peer for peer in kept if peer.open]
    for peer in kept:
        peer.close()


@attack(200)
def claims_of_4_gib(aim: Aim) -> None:
    """Frames that say that they are 4 GiB and more, before and after the handshake."""
    while aim.more():
        size = aim.chance.choice((1 << 32, (1 << 63) - 1, (1 << 64) - 1, 1 << 25, 1 << 24))
        head = bytes((LONG,)) + struct.pack(">Q", size)
        with contextlib.suppress(OSError):
            if aim.round % 3 == 0:
                peer = Raw(aim, GREETING + bytes((LONG | COMMAND,)) + head[1:])
            else:
                peer = Raw(aim, GREETING + ready(), head)
            peer.send(bytes(1_000))
            peer.close()


# --- what one client may take -----------------------------------------------------------


@attack(10, keeps=192 * MIB, files=8)
def streams(aim: Aim) -> None:
    """One client takes all the streams that it can get."""
    _take(aim, "streams", wire.CreateStream)


@attack(10, keeps=192 * MIB)
def mailboxes(aim: Aim) -> None:
    """One client takes all the mailboxes that it can get."""
    _take(aim, "mailboxes", lambda n, name: wire.EditMailbox(n, name, {}))


@attack(10, keeps=192 * MIB)
def services(aim: Aim) -> None:
    """One client takes all the services that it can get."""
    _take(aim, "services", lambda n, name: wire.EditService(n, name, {}))


@attack(10, keeps=192 * MIB)
def cursors(aim: Aim) -> None:
    """One client takes all the cursors and groups that it can get."""
    _take(
        aim,
        "cursors",
        lambda n, name: (
            wire.EditCursor(n, "canary", name, {}, [0])
            if n % 2
            else wire.MoveCursor("canary", name, 0, n)
        ),
    )


def _take(aim: Aim, kind: str, made: Callable[[int, str], wire.Command]) -> None:
    peer = aim.peer()
    number = 0
    while aim.more():
        peer.say(*[made(n, f"{kind}-{number + n}") for n in range(500)])
        number += 500
        peer.discard()


@attack(10)
def subscriptions(aim: Aim) -> None:
    """Links with 1,000 subscriptions each, with patterns of all kinds, made again and again."""
    while aim.more():
        peer = aim.peer()
        for first in range(0, 1_000, 250):
            peer.say(*[
                wire.Subscribe(n, "subscribed", ["topic", f"{aim.round}.{n}.#"], [1], 9, 9)
                for n in range(first, first + 250)
            ])  # fmt: skip
        peer.discard()
        if aim.round % 2:
            peer.reset()


RINGS: Final = 8
SMALL_SEGMENTS: Final = (
    "journal.segment_bytes=16777216", "limits.batch_bytes_max=4194304",
    "limits.record_bytes_max=4194304",
)  # fmt: skip


@attack(
    3, settings=(f"quotas.rings={RINGS}", *SMALL_SEGMENTS),
    keeps=64 * MIB, files=8 * RINGS,
)  # fmt: skip
def rings(aim: Aim) -> None:
    """One client makes streams with a ring each, and writes to all of them."""
    peer = aim.peer()
    content = encode([b"x" * 1_000] * 100)
    while aim.more():
        for at in range(50):
            name = f"ring-{at}"
            peer.say(
                wire.CreateStream(at, name, {"ring_bytes": 67_108_864}), wire.Publish(name, at),
                frames=[content],
            )  # fmt: skip
        peer.discard()
        time.sleep(0.1)


@attack(
    10,
    settings=("quotas.rings_memory_bytes=134217728", "journal.memory_ring_bytes=134217728",
              *SMALL_SEGMENTS),
    keeps=320 * MIB,
)  # fmt: skip
def memory_streams(aim: Aim) -> None:
    """One client makes streams in memory, with rings of their own and without, and fills them."""
    peer = aim.peer()
    content = encode([b"x" * 1_000] * 1_000)
    for at in range(8):
        settings: dict[str, Any] = {"storage": "memory"}
        if at % 2:
            settings["ring_bytes"] = 67_108_864
        peer.say(wire.CreateStream(at, f"memory-{at}", settings))
    while aim.more():
        for at in range(8):
            peer.say(wire.Publish(f"memory-{at}", at), frames=[content])
        peer.discard()


# --- passwords --------------------------------------------------------------------------


def _users() -> tuple[str, ...]:
    hashed = hash_password(PASSWORD)
    names = [f"canary-{number}" for number in range(5)] + ["alice"]
    users = ", ".join(f'"{name}" = "{hashed}"' for name in names)
    return ("authentication.mechanism=plain", "authentication.users={" + users + "}")


@attack(10, settings=_users(), password=PASSWORD)
def guessed_passwords(aim: Aim) -> None:
    """200 connections that guess passwords, of a user that exists and of many that do not."""
    with zmq.Context() as context:
        kept: list[zmq.Socket[bytes]] = []
        while aim.more():
            for number in range(20):
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RECONNECT_IVL, 20)
                socket.plain_username = b"alice" if number % 2 else b"nobody%d" % len(kept)
                socket.plain_password = b"guess %d" % aim.chance.getrandbits(40)
                socket.connect(aim.endpoint)
                aim.sent += 1
                kept.append(socket)
            while len(kept) > 200:
                kept.pop(0).close()
            time.sleep(0.1)
        for socket in kept:
            socket.close()


@attack(10, settings=_users(), password=PASSWORD)
def wrong_passwords(aim: Aim) -> None:
    """Wrong passwords for the canary's own users, from the canary's address."""
    with zmq.Context() as context:
        kept: list[zmq.Socket[bytes]] = []
        while aim.more():
            for number in range(5):
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                socket.plain_username = b"canary-%d" % number
                socket.plain_password = b"wrong"
                socket.connect(aim.endpoint)
                aim.sent += 1
                kept.append(socket)
            while len(kept) > 60:
                kept.pop(0).close()
            time.sleep(0.05)
        for socket in kept:
            socket.close()


# --- the broker's own helpers -----------------------------------------------------------


@attack(20, settings=("checkpoint.stall_ms=2000", "checkpoint.interval_ms=200"))
def stopped_checkpoint(aim: Aim) -> None:
    """The checkpoint's process is stopped, again and again, while mail goes on."""
    peer = aim.peer()
    content = encode([b"x" * 1_000] * 100)
    broker = psutil.Process(aim.broker)
    while aim.more():
        peer.say(wire.Send("stopped", aim.round), frames=[content])
        peer.discard()
        for child in broker.children():
            with contextlib.suppress(psutil.Error, OSError):
                os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.05)


def names(only: Sequence[str] = ()) -> list[str]:
    """Return the attacks' names, or those of them that were asked for."""
    return [name for name in ATTACKS if not only or name in only]
