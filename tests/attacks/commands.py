"""The attacks by what a link says: contents, patterns, subjects, numbers and credit.

Owns what is sent over links that were opened properly; attacks on connections, on bytes and on
what one client may take are in attacks.py. Source: ARCHITECTURE.md, "What a peer may cost".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

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
from tests.attacks.aim import Aim, Raw, burst
from tests.attacks.attack import ALL, MIB, attack
from tests.fuzz.messages import Messages
from tests.fuzz.zmtp import GREETING, message, ready
from tests.protocol.hostile import claim, craft, ints, packed

_HEADERS: Final = 65_536

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
            wire.Subscribe(1, "attacked", pattern, [0], ALL, ALL),
            wire.JoinGroup(2, "attacked", "group", pattern, "shared", [0], ALL, ALL),
            wire.OpenInbox(3, "attacked", ALL, ALL),
            wire.Offer(4, "attacked", pattern, ALL, ALL),
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
                wire.Subscribe(number, "equal", pattern, [0], ALL, ALL),
                wire.JoinGroup(9 + number, "equal", f"g{number}", pattern, "keyed", [0], ALL, ALL),
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
    reader.first(lambda: reader.say(wire.Subscribe(1, "bomb", ["topic", "s"], [0], ALL, ALL)))
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
            wire.Subscribe(1, "hostile", ["all"], [0], ALL, ALL),
            wire.Subscribe(2, "hostile", ["topic", "*.b"], [0], ALL, ALL),
            wire.OpenInbox(3, "hostile", 1_000, ALL),
            wire.Offer(4, "hostile", ["all"], 1_000, ALL),
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
            reader.say(wire.Subscribe(number, "regex", pattern, [1], ALL, ALL))

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
            reader.say(wire.Subscribe(number, "headers", pattern, [1], ALL, ALL))

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
                    wire.Subscribe(n, "many", ["topic", f"*.*.{n}"], [0], ALL, ALL, gathered=True)
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
                            n, "many", ["topic", f"*.*.{n}"], [0], ALL, ALL, gathered=True
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
            worker.say(wire.Offer(number, "subjects", pattern, 1, ALL))

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
        reader.say(wire.OpenInbox(aim.round, box, ALL, ALL))
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


@attack(1, keeps=96 * MIB)
def requests_that_end(aim: Aim) -> None:
    """72,000 requests with keys of one client, all of which reach their deadline at once."""
    content = encode([b""] * 4_000)
    while aim.more():
        peer = aim.peer()
        due = time.monotonic() + 1.5
        for tracker in range(1, 19):
            left_ms = max(1, int((due - time.monotonic()) * 1_000))
            key = aim.chance.randbytes(16)
            peer.say(
                wire.Request("ends", tracker, reply_to="ends", key=key, timeout_ms=left_ms),
                frames=[content],
            )
            peer.take(wire.Confirm)
        time.sleep(max(0.0, due + 0.5 - time.monotonic()))
        peer.close()


@attack(20, keeps=192 * MIB, files=40)
def lists_of_keys(aim: Aim) -> None:
    """A client that lists the keys of a stream, by a pattern that none has, 64 times a message."""
    peer = aim.peer()
    peer.say(wire.CreateStream(1, "listed", {"keep": "last-per-subject", "ring_bytes": 64 * MIB}))
    assert peer.take(wire.Result) is not None
    for first in range(0, 20_000, 1_000):
        subjects = [f"key.{first + n}" for n in range(1_000)]
        content = encode([b"value"] * 1_000, subject=subjects)
        peer.say(wire.Publish("listed", 0, keyed=True), wire.Ping(first), frames=[content])
        peer.take(wire.Pong)
    while aim.more():
        peer.say(*[wire.ListKeys(n, "listed", ["topic", "#.none"]) for n in range(64)])
        peer.say(wire.Ping(aim.round))
        peer.take(wire.Pong)


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
                *[wire.Subscribe(n, "slow", ["all"], [0], ALL, ALL) for n in range(4)]
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


@attack(6)
def many_subscriptions(aim: Aim) -> None:
    """Ten clients with a thousand subscriptions each, and one record after another for them all."""
    readers = [aim.peer() for _ in range(10)]

    def begin(reader: Any) -> None:
        for first in range(0, 1_000, 50):
            numbers = range(first, first + 50)
            reader.say(*[wire.Subscribe(n + 1, "many", ["all"], [1], ALL, ALL) for n in numbers])
        reader.say(wire.Ping(1))
        reader.take(wire.Pong)

    for reader in readers:
        reader.first(lambda reader=reader: begin(reader))  # type: ignore[misc]
    writer = aim.peer()
    content = encode([b"x"])
    while aim.more():
        writer.say(*[wire.Publish("many", n + 1) for n in range(64)], frames=[content] * 64)
        for peer in (*readers, writer):
            peer.discard()


@attack(30, keeps=32 * MIB)
def memberships(aim: Aim) -> None:
    """Ten clients that join groups and leave them, 32 times a message."""
    writer = aim.peer()
    subjects = [f"key.{n}" for n in range(1_000)]
    for tracker in range(8):
        content = encode([b"x"] * 1_000, subject=subjects)
        writer.say(wire.Publish("joined", tracker), frames=[content])
    peers = [aim.peer() for _ in range(10)]
    kinds = ("keyed", "shared", "exclusive")
    commands = [
        command
        for n in range(32)
        for command in (
            wire.JoinGroup(n + 1, "joined", f"g{n % 3}", ["all"], kinds[n % 3], [0], 100, ALL),
            wire.Unsubscribe(n + 1),
        )
    ]
    while aim.more():
        for peer in peers:
            peer.say(*commands)
            peer.discard()


@attack(20, keeps=96 * MIB, files=8)
def pages_of_all(aim: Aim) -> None:
    """Ten clients that ask for pages of streams and of mail, and for facts, 64 times a message."""
    peer = aim.peer()
    for first in range(0, 1_000, 50):
        peer.say(*[wire.CreateStream(n + 1, f"listed.{n}", {}) for n in range(first, first + 50)])
    for tracker in range(4):
        peer.say(wire.Send("listed", tracker), frames=[encode([b"x" * 200] * 1_000)])
    peer.say(wire.Ping(1))
    peer.take(wire.Pong)
    asked: tuple[Callable[[int], Any], ...] = (
        lambda n: wire.ListStreams(n, limit=1_000),
        lambda n: wire.PeekMail(n, "listed", -1, 1_000, 1_000),
        lambda n: wire.BrokerInfo(n, ""),
    )
    messages = [[question(n) for n in range(64)] for question in asked]
    peers = [aim.peer() for _ in range(10)]
    while aim.more():
        for place, peer in enumerate(peers):
            peer.say(*messages[(aim.round + place) % 3])
            peer.discard()


@attack(6)
def came_and_went(aim: Aim) -> None:
    """Clients that come thirty at a time, ask for 60 subscriptions each and go at once."""
    subscriptions = [wire.Subscribe(n, "canary", ["all"], [1], 9, 9) for n in range(60)]
    while aim.more():
        commands = [wire.Hello((1, 1), aim.chance.randbytes(16), ""), *subscriptions]
        data = message(encode_message(commands))
        sent = [Raw(aim, GREETING + ready(), data) for _ in range(30)]
        for each in sent:
            each.close()


@attack(4, keeps=64 * MIB)
def new_subjects(aim: Aim) -> None:
    """Six clients that send batches of 3,000 subjects which no batch had before, 8 a message."""
    reader = aim.peer()
    reader.say(
        *[wire.Subscribe(n + 1, "new", ["topic", f"*.{n}.#"], [1], ALL, ALL) for n in range(40)]
    )
    peers = [aim.peer() for _ in range(6)]
    while aim.more():
        for peer in peers:
            first = aim.chance.getrandbits(40)
            contents = []
            for batch in range(8):
                names = [f"n{first + n:x}.{batch}.{n}" for n in range(3_000)]
                contents.append(encode([b""] * 3_000, subject=names))
            peer.say(*[wire.Publish("new", n + 1) for n in range(8)], frames=contents)
            peer.discard()
        reader.discard()
