"""Measure what watching costs: throughput and round trips with metrics scraped, against without.

    python -m perf.watching [--rounds 12] [--seconds 3] [--things 0]

Owns this comparison. The rule: the two take turns within one run, so that both see the same
machine, and the ratio of their medians is the figure; the broker's processor time a record says the
same where others load the machine. While the broker is watched, one client reads /metrics each
second; the HTTP side runs in both cases, as a broker starts it. `things`: streams, mailboxes and
services that there are besides.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from malamute_py import connect_sync
from malamute_py.client.sync.client import SyncClient
from malamute_py.promises.daemon import Daemon
from perf.curves.brokers import broker

BODIES = [bytes(1_024)] * 500
EACH_S = 1.0


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

    def round(self, daemon: Daemon, client: SyncClient, seconds: float) -> None:
        began = daemon.cpu_s()
        rate = published(client, seconds)
        self.costs.append((daemon.cpu_s() - began) / (rate * seconds) * 1e6)
        self.rates.append(rate)
        self.trips += round_trips(client, seconds)


def show(what: str, without: float, watched: float, digits: int) -> None:
    print(f"{what:<44} without {without:,.{digits}f}   watched {watched:,.{digits}f}"
          f"   ratio {watched / without:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--things", type=int, default=0)
    options = parser.parse_args()
    settings = ["http.bind=127.0.0.1:9798"]
    with broker(settings) as daemon, connect_sync(daemon.endpoint) as client:
        for number in range(options.things):
            client.create_stream(f"stream.{number}")
            client.edit_mailbox(f"class-{number}.box")
            client.edit_service(f"service-{number}")
        url = "http://127.0.0.1:9798"
        scrapes: list[float] = []
        published(client, options.seconds)
        _await_up(url)
        without, watched = Side(), Side()
        for number in range(options.rounds):
            # Whichever comes second has the fuller disk: they change places.
            for side in (without, watched) if number % 2 else (watched, without):
                if side is without:
                    side.round(daemon, client, options.seconds)
                    continue
                with scraped(url) as took:
                    side.round(daemon, client, options.seconds)
                scrapes += took
    median = statistics.median
    show("records a second", median(without.rates), median(watched.rates), 0)
    show("broker's processor seconds a million records", median(without.costs),
         median(watched.costs), 3)  # fmt: skip
    for part in (0.5, 0.99):
        show(f"confirm p{100 * part:.0f}, ms", percentile(without.trips, part),
             percentile(watched.trips, part), 2)  # fmt: skip
    print(f"a scrape: {percentile(scrapes, 0.5):.0f} ms median, {len(scrapes)} of them")


if __name__ == "__main__":
    main()
