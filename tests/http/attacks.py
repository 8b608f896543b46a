"""Attacks a broker's HTTP side in many ways at once: `python -m tests.http.attacks --seconds 120`.

Owns the attackers, each a function that does one hostile thing over a connection of its own, and
what must hold meanwhile. The rules: an attacker has a port and the cookie of a session, as a person
has whom the broker lets in; a canary publishes beside them all the time, a person at another
address asks for /livez and is mostly answered, and no answer leads where it must not. Source:
docs/robustness.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlencode, urlsplit

import psutil

from malamute_py.client.sync.client import connect_sync
from malamute_py.http.serving import BACKLOG
from malamute_py.sections import HttpSection
from tests.http.console.browsing import FORM, Browser
from tests.server.daemon import Daemon
from tests.waiting import WAIT_S

GROWTH_BYTES_MAX: Final = 64 << 20
"""Memory that the broker, and its HTTP process, may take beside what they had before."""
DESCRIPTORS_MAX: Final = HttpSection().connections_max + 4 * BACKLOG + 64
"""Descriptors of the HTTP process: its connections, its own, and four turns of its loop with a
backlog each, in which a connection is accepted, begun, cut and closed."""
HELD_MAX: Final = 600
ELSEWHERE: Final = ("127.77.0.1", 0)
HOST: Final = b" HTTP/1.1\r\nHost: localhost\r\n"
PATHS: Final = (
    b"../../../etc/passwd", b"console/static/..%2f..%2f..%2f..%2fpyproject.toml",
    b"console/static/%00", b"/evil/%2f..", b"console/stream?name=%ff%fe", b"console/do/kick",
    b"console/tail?name=" + 3_000 * b"a", b"console?x=" + 900 * b"%00", b"%", b"\r\nX: y",
    b"console/stream?name=a&count=99999999999999999999999", b"console/settings?page=-1",
)  # fmt: skip
SECRETS: Final = (b"root:x:", b"[project]")


class Target(NamedTuple):
    """The HTTP side as an attacker knows it: its port, and a session."""

    address: tuple[str, int]
    cookie: bytes
    """Name and value of a session's cookie."""
    chance: random.Random
    held: list[socket.socket]
    """Connections that are left open, the oldest first."""

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """Connect from an address of this machine."""
        return socket.create_connection(
            self.address, timeout=WAIT_S, source_address=(source, 0)
        )  # fmt: skip

    def ask(self, sent: bytes, source: str = "127.0.0.1") -> bytes:
        """Send bytes; returns the beginning of the answer."""
        with self.connect(source) as connection:
            connection.sendall(sent)
            return connection.recv(65_536)

    def hold(self, connection: socket.socket) -> None:
        """Leave a connection open."""
        self.held.append(connection)
        if len(self.held) > HELD_MAX:
            self.held.pop(0).close()


def half_open(target: Target) -> None:
    """Leave a request unfinished, from one of thousands of addresses."""
    form = b"POST /console/login" + HOST + b"Content-Type: %s\r\n" % FORM.encode()
    begun = (b"", b"G", b"GET /" + HOST, form + b"Content-Length: 60000\r\n\r\ntoken=")
    near = target.chance.randrange(1, 250), target.chance.randrange(1, 250)
    connection = target.connect(f"127.0.{near[0]}.{near[1]}")
    connection.sendall(target.chance.choice(begun))
    target.hold(connection)


def slow(target: Target) -> None:
    """Send a byte now and then."""
    with target.connect() as connection:
        for sign in b"GET /metrics" + HOST + b"X: " + 100 * b"a":
            connection.sendall(bytes([sign]))
            time.sleep(0.02)


def huge_line(target: Target) -> None:
    """Send a path of 200 KB."""
    target.ask(b"GET /" + 200_000 * b"a" + b" HTTP/1.1\r\n\r\n")


def huge_head(target: Target) -> None:
    """Send 300 headers of 900 bytes."""
    target.ask(b"GET /" + HOST + b"".join(b"h%d: %s\r\n" % (n, 900 * b"x") for n in range(300)))


def huge_body(target: Target) -> None:
    """Send a body without end, of a length that no number has."""
    head = b"POST /console/do/publish" + HOST + b"Cookie: %s\r\n" % target.cookie
    target.ask(head + b"Content-Length: 99999999999999999999\r\n\r\n" + (4 << 20) * b"a")


def huge_chunks(target: Target) -> None:
    """Send a body in chunks, without its length."""
    chunk = b"ffff\r\n" + 65_535 * b"a" + b"\r\n"
    target.ask(b"POST /console/login" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + 64 * chunk)


def hostile_path(target: Target) -> None:
    """Ask for what must not be found, with and without a session."""
    cookie = target.chance.choice((target.cookie, b"malamute_console=a.b", b"x=y"))
    answer = target.ask(
        b"GET /" + target.chance.choice(PATHS) + HOST + b"Cookie: %s\r\n\r\n" % cookie
    )
    assert not any(secret in answer for secret in SECRETS), answer[:500]


def forged_session(target: Target) -> None:
    """Change one sign of a session's cookie."""
    name, _, value = target.cookie.partition(b"=")
    at = target.chance.randrange(len(value))
    sign = target.chance.choice(b"abcdefABC0._-")
    if sign == value[at]:
        return
    forged = value[:at] + bytes([sign]) + value[at + 1 :]
    answer = target.ask(b"GET /console/settings" + HOST + b"Cookie: %s=%s\r\n\r\n" % (name, forged))
    assert b" 200 " not in answer[:20], forged


def forged_form(target: Target) -> None:
    """Send a change with the session, but without its token."""
    answer = target.ask(_form(b"/console/do/create-stream", target.cookie, csrf="x", name="victim"))
    assert answer[9:10] in (b"", b"4"), answer[:100]


def wrong_password(target: Target) -> None:
    """Try a password."""
    target.ask(_form(b"/console/login", b"", token="x", user="root", password=os.urandom(4).hex()))


def unread_answer(target: Target) -> None:
    """Ask for a large answer, and read nothing of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.connect(target.address)
    pages = (b"/metrics", b"/console/static/htmx.min.js", b"/console/rates")
    page = target.chance.choice((*pages, b"/console/tail?name=canary"))
    connection.sendall(b"GET " + page + HOST + b"Cookie: %s\r\n\r\n" % target.cookie)
    target.hold(connection)
    time.sleep(0.01)


def event_stream(target: Target) -> None:
    """Begin a tail, and leave."""
    target.ask(b"GET /console/tail?name=canary" + HOST + b"Cookie: %s\r\n\r\n" % target.cookie)


def garbage(target: Target) -> None:
    """Send bytes at random."""
    target.ask(target.chance.randbytes(target.chance.randrange(1, 20_000)))


ATTACKS: Final[tuple[Callable[[Target], None], ...]] = (
    half_open, slow, huge_line, huge_head, huge_body, huge_chunks, hostile_path, forged_session,
    forged_form, wrong_password, unread_answer, event_stream, garbage,
)  # fmt: skip


def _form(path: bytes, cookie: bytes, **fields: str) -> bytes:
    body = urlencode(fields).encode()
    head = b"POST " + path + HOST + b"Cookie: %s\r\nContent-Type: %s\r\n" % (cookie, FORM.encode())
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Process:
    """Memory and descriptors of a process, and the most of both."""

    def __init__(self, number: int) -> None:
        self._process = psutil.Process(number)
        self.before = self._process.memory_info().rss
        self.memory = self.before
        self.descriptors = 0

    def look(self) -> None:
        """Measure it now."""
        self.memory = max(self.memory, self._process.memory_info().rss)
        self.descriptors = max(self.descriptors, self._process.num_fds())

    @property
    def growth(self) -> int:
        """Most bytes that it took beside those of the beginning."""
        return self.memory - self.before


class Outcome(NamedTuple):
    """Counts of acts, faults that were found, and lines for a person."""

    acts: Counter[str]
    faults: list[str]
    """Sentences about bounds that did not hold; none: all held."""
    told: list[str]
    """Lines for a person."""


def run(folder: Path, seconds: float, seed: int = 13) -> Outcome:
    """Attack a broker of its own for so long."""
    with Daemon(folder, http__bind="127.0.0.1:0") as daemon:
        side = daemon.wait_for("http_listening")
        parts = urlsplit(side["url"])
        assert parts.hostname is not None
        assert parts.port is not None
        browser = Browser((parts.hostname, parts.port))
        assert browser.log_in("", "").status == 200
        [(name, value)] = browser.cookies.items()
        target = Target(browser.address, f"{name}={value}".encode(), random.Random(seed), [])
        outcome = _attack(daemon, int(side["pid"]), target, seconds)
        for connection in target.held:
            connection.close()
        assert daemon.terminate() == 0
        known = {line["event"] for line in daemon.lines}
        outcome.faults.extend(f"the log says {each}" for each in known & {"internal_error"})
        strange = daemon.text.count("Traceback")
        outcome.faults.extend(f"{strange} tracebacks in the log" for _ in range(bool(strange)))
    return outcome


def _attack(daemon: Daemon, side: int, target: Target, seconds: float) -> Outcome:
    acts: Counter[str] = Counter()
    faults: list[str] = []
    stop = threading.Event()

    def attack(act: Callable[[Target], None]) -> None:
        while not stop.is_set():
            try:
                with contextlib.suppress(OSError):
                    act(target)
            except AssertionError as error:
                faults.append(f"{act.__name__}: {error}")
            acts[act.__name__] += 1

    asked: list[float] = []
    unanswered: list[str] = []

    def ask_from_elsewhere() -> None:
        while not stop.wait(0.1):
            began = time.perf_counter()
            try:
                connection = http.client.HTTPConnection(
                    *target.address, timeout=WAIT_S, source_address=ELSEWHERE
                )
                connection.request("GET", "/livez")
                assert connection.getresponse().status == 200
                connection.close()
            except (OSError, AssertionError, http.client.HTTPException) as error:
                unanswered.append(repr(error))
            else:
                asked.append(time.perf_counter() - began)

    broker, process = Process(daemon.process.pid), Process(side)
    threads = [threading.Thread(target=attack, args=(act,)) for act in ATTACKS]
    threads.append(threading.Thread(target=ask_from_elsewhere))
    confirms: list[float] = []
    with connect_sync(daemon.endpoint, timeout_ms=60_000) as client:
        client.create_stream("canary")
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                began = time.perf_counter()
                offset = client.publish("canary", b"x").offset
                if offset != len(confirms):
                    faults.append(f"the canary's record {len(confirms)} has offset {offset}")
                confirms.append(time.perf_counter() - began)
                broker.look()
                process.look()
                time.sleep(0.01)
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        if [each.name for each in client.list_streams()] != ["canary"]:
            faults.append("an attacker has made a stream")
    for what, seen in (("the broker", broker), ("the HTTP process", process)):
        if seen.growth > GROWTH_BYTES_MAX:
            faults.append(f"{what} grew by {seen.growth >> 20} MiB")
    if process.descriptors > DESCRIPTORS_MAX:
        faults.append(f"the HTTP process had {process.descriptors} descriptors")
    # Where thousands of addresses have a connection each, whose is cut is a matter of order.
    if len(unanswered) > len(asked):
        faults.append(f"a person at another address was not answered: {unanswered[-1]}")
    told = [
        f"canary: {len(confirms)} confirms, {_spans(confirms)}",
        f"/livez elsewhere: {len(asked)} answers, {len(unanswered)} cut, {_spans(asked)}",
        f"broker: grew by {broker.growth >> 20} MiB",
        f"HTTP process: grew by {process.growth >> 20} MiB",
        f"descriptors of the HTTP process: {process.descriptors} at most",
    ]
    return Outcome(acts, faults, told)


def _spans(times: list[float]) -> str:
    ordered = sorted(times)
    return ", ".join(
        f"{name} {1_000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]:.1f} ms"
        for name, part in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))
    )


def main() -> int:
    """Attack; returns 1 if something did not hold."""
    parser = argparse.ArgumentParser(description=re.split("[:`]", __doc__ or "")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=13)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), options.seconds, options.seed)
    print(*(f"{name} {count:,}" for name, count in outcome.acts.most_common()), sep=", ")
    print(*outcome.told, *Counter(outcome.faults).most_common(20), sep="\n")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
