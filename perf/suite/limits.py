"""Limits of this machine without any broker: memory, loopback, ZeroMQ and the disk.

Owns the limits that every figure is a share of. The rule: each is measured with what the broker
itself uses (the same pyzmq, the same calls on the same file system), by the simplest program that
does nothing else, and over several sizes the best counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from perf.suite.machine import Disk
from perf.suite.results import Limit
from perf.suite.roles import ROOT

MIB = 1 << 20
SEGMENT_BYTES = 64 * MIB
SMALL = 140
LARGE = 64 << 10
NO_FLUSH_US = 15.0
"""Time that every flush takes which reaches a device, host or controller."""
NO_DRIVE_MB_S = 3_500.0
"""Rate of synced writes, one after the other, that no single drive sustains."""


class Disks(msgspec.Struct):
    """One pass over the disk."""

    first_mb_s: float
    reused_mb_s: float
    sync_p50_us: float
    sync_p99_us: float
    direct_p50_us: float
    """A write past the page cache without a sync; 0: not possible here."""


# --- memory ------------------------------------------------------------------------------


def memory_copy(scale: float) -> float:
    """Return GB/s of one thread that copies 256 MiB."""
    source = np.ones(256 * MIB, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)  # From here on the pages are there.
    times = max(2, int(8 * scale))
    begun = time.perf_counter()
    for _ in range(times):
        np.copyto(target, source)
    return times * len(source) / (time.perf_counter() - begun) / 1e9


# --- two processes -----------------------------------------------------------------------


@contextmanager
def _sender(what: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "perf.suite.limits", what, *map(str, arguments)], cwd=ROOT
    )
    try:
        yield process
        if process.wait(timeout=60):
            raise OSError(f"the sender of {what} ended with status {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def loopback(scale: float) -> float:
    """Return GB/s of one TCP connection between two processes."""
    total = int(2_000 * MIB * scale)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        with _sender("tcp", server.getsockname()[1], total):
            connection, _ = server.accept()
            with connection:
                buffer = memoryview(bytearray(MIB))
                received = connection.recv_into(buffer)
                begun, first = time.perf_counter(), received
                while received < total:
                    got = connection.recv_into(buffer)
                    if not got:
                        raise OSError(f"{received} of {total} bytes came")
                    received += got
                return (received - first) / (time.perf_counter() - begun) / 1e9


def _send_tcp(port: int, total: int) -> None:
    block = bytes(256 << 10)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while total > 0:
            connection.sendall(block[: min(len(block), total)])
            total -= len(block)


def raw_zmq(size: int, copy: bool, count: int) -> float:
    """Return messages/s of one PUSH to one PULL socket over tcp, received in a tight loop."""
    context = zmq.Context()
    socket_ = context.socket(zmq.PULL)
    try:
        # No bound but the kernel's: the loop that receives is the limit, not a full queue.
        socket_.rcvhwm = 10_000
        socket_.rcvtimeo = 30_000
        port = socket_.bind_to_random_port("tcp://127.0.0.1")
        with _sender("zmq", port, size, count, int(copy)):
            socket_.recv(copy=copy)
            begun = time.perf_counter()
            last: Any = b""
            for _ in range(count - 1):
                last = socket_.recv(copy=copy)
            seconds = time.perf_counter() - begun
            if len(last if copy else last.buffer) != size:
                raise OSError("what came is not what was sent")
        return (count - 1) / seconds
    finally:
        socket_.close(0)
        context.term()


def _send_zmq(port: int, size: int, count: int, copy: int) -> None:
    context = zmq.Context()
    socket_ = context.socket(zmq.PUSH)
    socket_.sndhwm = 10_000
    socket_.connect(f"tcp://127.0.0.1:{port}")
    body = bytes(size)
    for _ in range(count):
        socket_.send(body, 0, bool(copy))
    socket_.close(-1)
    context.term()


def zmq_small(scale: float) -> float:
    return raw_zmq(SMALL, True, int(800_000 * scale))


def zmq_large(scale: float) -> float:
    """Return MB/s, by the faster of receiving with and without a copy into a bytes object."""
    count = int(20_000 * scale)
    return max(raw_zmq(LARGE, copy, count) for copy in (True, False)) * LARGE / 1e6


# --- a broker that does nothing: three processes over ZeroMQ ------------------------------

RELAYED = 140


class Relay:
    """An asker, a relay and a worker, each a process: DEALER, ROUTER, DEALER, one hop each way.

    A request or a record through our broker takes at least this way.
    """

    def __init__(self, role: str, count: int) -> None:
        """role: of the worker, `echo` or `listen` to so many."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._port = _free_port()
        self._processes = [
            subprocess.Popen([sys.executable, "-m", "perf.suite.limits", *words], cwd=ROOT)
            for words in (["relay", str(self._port)], [role, str(self._port), str(count)])
        ]
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.hwm = 0
        self.socket.routing_id = b"asker"
        self.socket.connect(f"tcp://127.0.0.1:{self._port}")
        # Goes through when the worker is there: until then the relay drops it.
        self.socket.rcvtimeo = 100
        for _ in range(300):
            self.socket.send(b"there?")
            with contextlib.suppress(zmq.Again):
                self.socket.recv()
                break
        else:
            self.close()
            raise OSError("the relay does not answer")
        while True:
            try:
                self.socket.recv()
            except zmq.Again:
                break
        self.socket.rcvtimeo = 30_000

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.socket.close(0)
        self._context.term()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def relay_trips(flight: int, count: int) -> float:
    """Return round trips a second with so many in flight."""
    relay = Relay("echo", count)
    try:
        body = bytes(RELAYED)
        send, receive = relay.socket.send, relay.socket.recv
        begun = time.perf_counter()
        for _ in range(flight):
            send(body)
        for _ in range(count - flight):
            receive()
            send(body)
        for _ in range(flight):
            receive()
        return count / (time.perf_counter() - begun)
    finally:
        relay.close()


def _trips(flight: int, scale: float) -> float:
    return relay_trips(flight, max(flight, int((10_000 if flight == 1 else 100_000) * scale)))


class Ways(msgspec.Struct):
    """Times of one way through the relay, at an even pace; microseconds."""

    p50: float
    p99: float


def relay_ways(rate: int, count: int) -> Ways:
    relay = Relay("listen", count)
    try:
        filler = bytes(RELAYED - 8)
        begun = time.monotonic()
        for number in range(count):
            wait = begun + number / rate - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            relay.socket.send(time.monotonic_ns().to_bytes(8, "little") + filler)
        took = np.frombuffer(relay.socket.recv(), "<i8") / 1e3
        return Ways(float(np.percentile(took, 50)), float(np.percentile(took, 99)))
    finally:
        relay.close()


def _relay(port: int) -> None:
    router: Any = zmq.Context.instance().socket(zmq.ROUTER)
    router.hwm = 0  # Without a high-water mark of 1,000, at which it would drop messages.
    router.bind(f"tcp://127.0.0.1:{port}")
    other = {b"asker": b"worker", b"worker": b"asker"}
    while True:
        sender, body = router.recv_multipart()
        router.send_multipart([other[sender], body])


def _worker(port: int) -> Any:
    dealer: Any = zmq.Context.instance().socket(zmq.DEALER)
    dealer.hwm = 0
    dealer.routing_id = b"worker"
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return dealer


def _echo(port: int, count: int) -> None:
    dealer = _worker(port)
    while True:
        dealer.send(dealer.recv())


def _listen(port: int, count: int) -> None:
    dealer = _worker(port)
    took = np.zeros(count, "<i8")
    heard = 0
    while heard < count:
        body = dealer.recv()
        now = time.monotonic_ns()
        if len(body) != RELAYED:
            dealer.send(body)
            continue
        took[heard] = now - int.from_bytes(body[:8], "little")
        heard += 1
    dealer.send(took.tobytes())
    dealer.recv()


# --- the disk ----------------------------------------------------------------------------


def disk(folder: Path, scale: float) -> Disks:
    """Write and sync one allocated segment twice, then sync small writes one by one.

    As the journal does it: fallocate, pwrite, fdatasync. The sustained rate is that of the best
    size of a write.
    """
    path = folder / "limits.segment"
    os.sync()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        first, reused = [], []
        sizes = (256 << 10, MIB, 8 * MIB) if scale >= 1 else (MIB, 8 * MIB)
        for size in sizes:
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, SEGMENT_BYTES)
            os.fsync(descriptor)
            first.append(_write_through(descriptor, size))
            reused += [_write_through(descriptor, size) for _ in range(3 if scale >= 1 else 1)]
        syncs = _syncs(descriptor, max(100, int(500 * scale)))
        direct = _direct(path, max(50, int(300 * scale)))
    finally:
        os.close(descriptor)
        path.unlink()
    return Disks(
        max(first),
        max(reused),
        statistics.median(syncs),
        sorted(syncs)[len(syncs) * 99 // 100],
        statistics.median(direct) if direct else 0.0,
    )


def _write_through(descriptor: int, size: int) -> float:
    """Return MB/s of writing the segment from its start, each write synced."""
    # Not all zeros: no layer on the way may find that there is nothing to store.
    block = np.random.default_rng(1).bytes(size)
    begun = time.perf_counter()
    for place in range(0, SEGMENT_BYTES, size):
        os.pwrite(descriptor, block, place)
        os.fdatasync(descriptor)
    return SEGMENT_BYTES / (time.perf_counter() - begun) / 1e6


def _syncs(descriptor: int, times: int) -> list[float]:
    """Return microseconds of fdatasync alone, each after 4 KiB were overwritten."""
    block = np.random.default_rng(2).bytes(4096)
    took = []
    for number in range(times):
        os.pwrite(descriptor, block, number * 4096)
        begun = time.perf_counter()
        os.fdatasync(descriptor)
        took.append((time.perf_counter() - begun) * 1e6)
    return took


def _direct(path: Path, times: int) -> list[float]:
    """Return microseconds of a write of 4 KiB to the device without a flush; none: impossible."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return []
    took = []
    try:
        block = mmap.mmap(-1, 4096)  # On a page of its own, as O_DIRECT asks.
        block.write(np.random.default_rng(3).bytes(4096))
        for number in range(times):
            begun = time.perf_counter()
            os.pwrite(descriptor, block, number * 4096)
            took.append((time.perf_counter() - begun) * 1e6)
    except OSError:
        return []
    finally:
        os.close(descriptor)
    return took


def cache_verdict(device: Disk, disks: list[Disks]) -> str:
    """Say what can be concluded from here about the promise of a sync."""
    sync = statistics.median(found.sync_p50_us for found in disks)
    direct = statistics.median(found.direct_p50_us for found in disks)
    if device.write_cache == "write through":
        said = (
            "the kernel takes the device's cache for write-through and sends it no flush: what"
            " was written is as safe as the device says"
        )
    elif sync < NO_FLUSH_US:
        said = (
            f"a sync takes {sync:.0f} us, which no flush of a device does: it looks as if nothing"
            " was flushed, and a confirmed record would not survive a power loss"
        )
    elif direct and sync < 1.5 * direct:
        said = (
            f"a sync after a small write takes {sync:.0f} us, hardly longer than a write past the"
            f" page cache alone ({direct:.0f} us): the flush itself costs next to nothing, so the"
            " device's cache is either protected against power loss or not told to be emptied"
        )
    else:
        said = (
            f"a sync after a small write takes {sync:.0f} us, a write past the page cache alone"
            f" {direct:.0f} us: the difference is a flush that somebody carries out"
        )
    fastest = max(found.reused_mb_s for found in disks)
    if fastest > NO_DRIVE_MB_S:
        said += (
            f". Synced writes at {fastest:,.0f} MB/s are faster than one drive sustains: a cache"
            " behind the device takes part, and `synced` rests on whoever keeps that"
        )
    return f"{said}. Behind a virtual disk, what the host does with a flush cannot be seen"


# --- all of it ---------------------------------------------------------------------------

LIMITS: dict[str, tuple[str, str, Callable[[float], float]]] = {
    "memory": ("memory copy, one thread", "GB/s", memory_copy),
    "tcp": ("loopback TCP, one connection", "GB/s", loopback),
    "zmq-small": (f"raw ZeroMQ (pyzmq), {SMALL} B", "messages/s", zmq_small),
    "zmq-large": ("raw ZeroMQ (pyzmq), 64 KiB", "MB/s", zmq_large),
    **{
        f"relay-{flight}": (
            f"raw ZeroMQ (pyzmq) through three processes, {flight:,} in flight",
            "round trips/s",
            partial(_trips, flight),
        )
        for flight in (1, 64, 1024)
    },
}
RELAY_LIMITS = {
    "relay-p50": (
        "raw ZeroMQ (pyzmq) through three processes, one way at 1,000/s, p50",
        "us",
        "p50",
    ),
    "relay-p99": (
        "raw ZeroMQ (pyzmq) through three processes, one way at 1,000/s, p99",
        "us",
        "p99",
    ),
}
DISK_LIMITS = {
    "disk-first": ("first write of a segment, each write synced", "MB/s", "first_mb_s"),
    "disk-reused": ("reused segment, each write synced", "MB/s", "reused_mb_s"),
    "sync-p50": ("fdatasync after 4 KiB, median", "us", "sync_p50_us"),
    "sync-p99": ("fdatasync after 4 KiB, p99", "us", "sync_p99_us"),
    "direct-p50": ("write past the page cache, 4 KiB, median", "us", "direct_p50_us"),
}


def measure(
    folder: Path, device: Disk, runs: int, scale: float, say: Callable[[str], None]
) -> list[Limit]:
    """Measure all limits so many times; scale: share of the usual length."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, (title, unit, how) in LIMITS.items():
        say(title)
        found.append(Limit(name, title, unit, [how(scale) for _ in range(runs)]))
    say("raw ZeroMQ (pyzmq) through three processes, one way")
    ways = [relay_ways(1_000, max(200, int(2_000 * scale))) for _ in range(runs)]
    for name, (title, unit, field) in RELAY_LIMITS.items():
        found.append(Limit(name, title, unit, [getattr(one, field) for one in ways]))
    say("the disk")
    disks = [disk(folder, scale) for _ in range(runs)]
    verdict = cache_verdict(device, disks)
    for name, (title, unit, field) in DISK_LIMITS.items():
        note = verdict if name == "sync-p50" else ""
        found.append(Limit(name, title, unit, [getattr(one, field) for one in disks], note))
    return found


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    parts: dict[str, Callable[..., None]] = {
        "tcp": _send_tcp,
        "zmq": _send_zmq,
        "relay": _relay,
        "echo": _echo,
        "listen": _listen,
    }
    parts[what](*map(int, numbers))
