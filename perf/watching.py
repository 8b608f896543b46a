"""Measure what watching costs: throughput and round trips with metrics scraped, against without.

    python -m perf.watching [--rounds 12] [--seconds 3] [--things 0] [--console] [--top]

Owns this comparison. The rule: the two take turns within one run, so that both see the same
machine, and the ratio of their medians is the figure; the broker's processor time a record says the
same where others load the machine. While the broker is watched, one client reads /metrics each
second; the HTTP side runs in both cases, as a broker starts it. `things`: streams, mailboxes and
services that there are besides. `console`: a person looks on besides, with the overview open and
the tail of the stream that is published to. `top`: `malamute top` runs besides, in a terminal of
its own, and looks each two seconds. All that watches runs in processes apart from the publisher.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import socket
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

from malamute_py import connect_sync
from malamute_py.client.sync.client import SyncClient
from malamute_py.promises.daemon import Daemon
from perf.curves.brokers import broker

BODIES = [bytes(1_024)] * 500
EACH_S = 1.0
REFRESH_S = 10.0
FOLLOWED = ("/rates", "/tail?name=bulk")
ROWS, COLUMNS = 24, 80
DRAWN_S = 60.0


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def scraped(url: str) -> Iterator[list[float]]:
    """One scrape each second; yields how long each takes."""
    took: list[float] = []
    stop = threading.Event()

    def run() -> None:
        while True:
            began = time.perf_counter()
            with urllib.request.urlopen(f"{url}/metrics") as page:
                assert b"malamute_up 1.0" in page.read()
            took.append(time.perf_counter() - began)
            if stop.wait(max(0.0, EACH_S - took[-1])):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join()


class Person:
    """A person at the console: an overview, which refreshes itself, and a tail."""

    def __init__(self, url: str) -> None:
        """Log in at a broker without authentication."""
        self._url = url
        cookies = HTTPCookieProcessor()
        self._browser = build_opener(cookies)
        form = self._read("/login")
        token = re.search(r'name="token" value="([^"]+)"', form)
        assert token is not None
        self._read("/login", urlencode({"token": token[1]}).encode())
        self.events = 0
        """Events that came."""

    def _read(self, page: str, form: bytes | None = None) -> str:
        with self._browser.open(f"{self._url}/console{page}", form) as answer:
            return str(answer.read().decode())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look on until the block ends."""
        stop = threading.Event()

        def follow(page: str) -> None:
            with self._browser.open(f"{self._url}/console{page}") as answer:
                for line in answer:
                    self.events += line.startswith(b"event:")
                    if stop.is_set():
                        return

        def refresh() -> None:
            while not stop.wait(REFRESH_S):
                assert "To look at" in self._read("?poll=1")

        threads = [threading.Thread(target=follow, args=(page,)) for page in FOLLOWED]
        threads.append(threading.Thread(target=refresh))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@contextmanager
def topped(endpoint: str) -> Iterator[None]:
    """`malamute top` draws on a terminal, whose output is read and thrown away."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "malamute_py", "top", "--endpoint", endpoint]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        drawn = threading.Event()

        def drain() -> None:
            try:
                while os.read(ours, 65_536):
                    drawn.set()
            except OSError:  # the terminal's end: the process is gone
                return

        thread = threading.Thread(target=drain)
        thread.start()
        try:
            # A key that is pressed before the first screen is lost.
            assert drawn.wait(DRAWN_S), "nothing was drawn"
            yield
        finally:
            process.terminate()
            process.wait()
            thread.join()
            os.close(ours)


def watch(url: str, *, console: bool) -> None:
    """Look on, as a process of its own, until the input ends; then tell what was seen."""
    with ExitStack() as stack:
        took = stack.enter_context(scraped(url))
        person = Person(url) if console else None
        if person is not None:
            stack.enter_context(person.looking())
        print("ready", flush=True)
        sys.stdin.read()
        events = 0 if person is None else person.events
        print(json.dumps({"scrapes": took, "events": events}), flush=True)
        os._exit(0)  # A thread that waits for an event would keep the process for minutes.


class Watching:
    """The process that scrapes and looks at the console, and what it has told."""

    def __init__(self, url: str, *, console: bool) -> None:
        self._command = [sys.executable, "-m", "perf.watching", "--watch", url]
        self._command += ["--console"] * console
        self.scrapes: list[float] = []
        """Seconds that each scrape took."""
        self.events = 0
        """Events that came to the console."""

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Run the process until the block ends."""
        with subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "ready\n"
                yield
                process.stdin.close()
                seen = json.loads(process.stdout.readline())
                self.scrapes += seen["scrapes"]
                self.events += seen["events"]
            finally:
                process.kill()


def _await_up(url: str) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{url}/metrics") as page:
                if b"malamute_up 1.0" in page.read():
                    return
        except urllib.error.URLError:
            time.sleep(0.1)


def published(client: SyncClient, seconds: float) -> float:
    """Records of 1 KiB a second, confirmed `synced`, in batches of 500."""
    began = time.perf_counter()
    count = 0
    with client.publisher("bulk") as publisher:
        while time.perf_counter() - began < seconds:
            publisher.publish_many(BODIES)
            count += len(BODIES)
    return count / (time.perf_counter() - began)


def round_trips(client: SyncClient, seconds: float) -> list[float]:
    """Seconds of each publish of one record, confirmed `synced`, one after the other."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        client.publish("single", b"x")
        times.append(time.perf_counter() - began)
    return times


def percentile(times: list[float], part: float) -> float:
    """Return a percentile of times in seconds, in milliseconds; part: 0.5 is the median."""
    ordered = sorted(times)
    return 1_000 * ordered[min(int(len(ordered) * part), len(ordered) - 1)]


class Side:
    """Measurements of one kind: with the broker watched, or without."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.trips: list[float] = []
        self.costs: list[float] = []
        """Processor time of the broker for a million records, by round."""
        self.shares: list[float] = []
        """Processor time of the broker in a second, by round."""

    def round(self, daemon: Daemon, client: SyncClient, seconds: float) -> None:
        began, began_at = daemon.cpu_s(), time.perf_counter()
        rate = published(client, seconds)
        spent = daemon.cpu_s() - began
        self.costs.append(spent / (rate * seconds) * 1e6)
        self.shares.append(spent / (time.perf_counter() - began_at))
        self.rates.append(rate)
        self.trips += round_trips(client, seconds)


def show(what: str, without: float, watched: float, digits: int) -> None:
    print(f"{what:<44} without {without:,.{digits}f}   watched {watched:,.{digits}f}"
          f"   ratio {watched / without:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=12, help="of each kind")
    parser.add_argument("--seconds", type=float, default=3, help="of each round")
    parser.add_argument("--things", type=int, default=0,
                        help="streams, mailboxes and services besides")  # fmt: skip
    parser.add_argument("--console", action="store_true", help="a person looks on")
    parser.add_argument("--top", action="store_true", help="`malamute top` runs")
    parser.add_argument("--watch", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch, console=options.console)
        return
    url = f"http://127.0.0.1:{_free_port()}"
    settings = [f"http.bind={url.removeprefix('http://')}"]
    with broker(settings) as daemon, connect_sync(daemon.endpoint) as client:
        for number in range(options.things):
            client.create_stream(f"stream.{number}")
            client.edit_mailbox(f"class-{number}.box")
            client.edit_service(f"service-{number}")
        published(client, options.seconds)
        _await_up(url)
        watching = Watching(url, console=options.console)
        without, watched = Side(), Side()
        for number in range(options.rounds):
            # Whichever comes second has the fuller disk: they change places.
            for side in (without, watched) if number % 2 else (watched, without):
                if side is without:
                    side.round(daemon, client, options.seconds)
                    continue
                with ExitStack() as stack:
                    stack.enter_context(watching.looking())
                    if options.top:
                        stack.enter_context(topped(daemon.endpoint))
                    side.round(daemon, client, options.seconds)
    median = statistics.median
    show("records a second", median(without.rates), median(watched.rates), 0)
    show("broker's processor seconds a million records", median(without.costs),
         median(watched.costs), 3)  # fmt: skip
    show("broker's processor seconds a second", median(without.shares), median(watched.shares), 3)
    for part in (0.5, 0.99):
        show(f"confirm p{100 * part:.0f}, ms", percentile(without.trips, part),
             percentile(watched.trips, part), 2)  # fmt: skip
    if options.console:
        print(f"events at the console: {watching.events}")
    took = watching.scrapes
    print(f"a scrape: {percentile(took, 0.5):.0f} ms median, {len(took)} of them")


if __name__ == "__main__":
    main()
