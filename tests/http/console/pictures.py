"""The pictures in docs/console.md: `python -m tests.http.console.pictures docs/pictures`.

Owns a broker with something to look at, and what is photographed of it.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from malamute_protocol.errors import MalamuteError
from malamute_py import EmbeddedBroker, SyncClient
from tests.http.console.chromium import Chromium
from tests.http.running import at

SUBJECTS: Final = ("forex.eur", "forex.gbp", "forex.usd", "metal.gold")
DRAWN_S: Final = 40.0
OPENED: Final = """
for (const title of ["publish-title", "settings-title"])
  document.querySelector(`#${title} ~ details`).open = true;
document.getElementById("publish-title").scrollIntoView();
"""
"""Script that opens the forms of a stream's page, and shows them."""


def prepare(client: SyncClient) -> None:
    """Make streams, mailboxes, services, a cursor and a group, some of them in trouble."""
    client.create_stream("trades", description="every trade of the day", max_age_ms=7 * 86_400_000)
    client.publish("audit", b'{"user": "ann"}', subject="login.ok")
    trade(client, 500)
    for number in range(12):
        client.send("crew.berlin", b"gate %d" % number, subject="gate")
    client.edit_service("render", attempts_max=1)
    for number in range(3):
        client.submit("render", b'{"page": %d}' % number, subject="pdf")
    with client.worker("render") as offer:
        for _ in range(3):
            request = offer.next()
            assert request is not None
            request.fail("no template with this name")
    for number in range(25):
        client.submit("lookup", b"%d" % number)
    client.cursor("trades", "billing").move(200)
    with client.group("trades", "reports") as member:
        member.accepted()


def trade(client: SyncClient, count: int) -> None:
    """Publish so many trades."""
    bodies = [
        b'{"price": %.2f, "amount": %d}' % (random.uniform(90, 110), random.randint(1, 900))
        for _ in range(count)
    ]
    subjects = [random.choice(SUBJECTS) for _ in bodies]
    client.publish_many("trades", bodies, subjects=subjects, fields={"currency": "EUR"})


def flow(client: SyncClient, stop: threading.Event) -> None:
    """Publish, send and ask until it is stopped."""
    for turn in range(1_000_000):
        if stop.wait(0.2):
            return
        trade(client, int(150 + 100 * math.sin(turn / 12) + random.randint(0, 40)))
        if random.random() < 0.4:
            client.send("news", b"x")
            client.submit("lookup", b"x")


def read(client: SyncClient) -> None:
    """Read the trades of one subject until the client is closed."""
    with contextlib.suppress(MalamuteError):
        for _ in client.subscribe("trades", "forex.*", credit_records=1_000):
            pass


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    with (
        EmbeddedBroker(tcp=True) as broker,
        at(broker) as http,
        broker.connect_sync(identity="pricing", software="pricing 2.1") as client,
        broker.connect_sync(identity="feed", software="feed 1.0") as feed,
        tempfile.TemporaryDirectory() as profiles,
    ):
        prepare(client)
        stop = threading.Event()
        flowing = threading.Thread(target=flow, args=(feed, stop))
        flowing.start()
        reading = threading.Thread(target=read, args=(client,), daemon=True)
        reading.start()
        url = f"{http.serving.url}/console"
        try:
            with Chromium(Path(profiles) / "wide", width=1160, height=860) as window:
                window.go(url)
                window.click("button.first")
                time.sleep(DRAWN_S)
                window.picture(folder / "console-overview.png")
                window.go(f"{url}/stream?name=trades&place=newest&count=3")
                window.type("#tail input", "forex.*")
                window.click("#tail-button")
                window.until("return document.querySelectorAll('#tail-rows tr').length > 20")
                window.picture(folder / "console-stream.png")
                window.click("#tail-button")
                window.resize(1160, 1580)
                window.run(OPENED)
                window.picture(folder / "console-changes.png")
                window.resize(1160, 860)
                window.go(f"{url}/service?name=render")
                window.picture(folder / "console-service.png")
            with Chromium(Path(profiles) / "phone", width=380, height=760) as phone:
                phone.go(url)
                phone.click("button.first")
                phone.until(
                    "return /[0-9]/.test(document.querySelector('[data-rate=mail]')?.textContent)"
                )
                phone.go(f"{url}/services")
                phone.picture(folder / "console-phone.png")
        finally:
            stop.set()
            flowing.join()


if __name__ == "__main__":
    main()
