"""The client's session alone, beside a broker that confirms at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode_fixed
from malamute_protocol.framing import decode_message, encode_message
from malamute_py.client.session.calls import make_row
from malamute_py.client.session.publisher import level_number
from malamute_py.client.session.session import Session
from malamute_py.client.settings import ClientSettings

NOW_MS = 1_700_000_000_000
WELCOME = wire.Welcome(
    version=1, broker=b"b" * 16, epoch=1, heartbeat_ms=1000, expiry_ms=3000,
    window_bytes=1 << 30, record_bytes_max=1 << 20, batch_bytes_max=1 << 22,
    batch_records_max=1 << 16, message_commands_max=1000,
)  # fmt: skip


class Linked:
    """A session whose link is up, and whose sends are confirmed."""

    def __init__(self) -> None:
        self.session = Session(ClientSettings(endpoints=("tcp://one:1",)), bytes, NOW_MS)
        self.answer()
        self.hear(WELCOME)
        self.published = 0

    def hear(self, *commands: wire.Command) -> None:
        self.session.receive(encode_message(commands, []), NOW_MS)

    def answer(self) -> None:
        """Answer all commands of the session, until it sends no more."""
        session, sends = self.session, True
        while sends:
            sends = False
            session.take_transport()
            for message in session.take_outgoing(NOW_MS):
                sends = True
                for command, _ in decode_message(message):
                    if isinstance(command, wire.Publish):
                        tracker, offset = command.tracker, self.published
                        self.published += 1
                        self.hear(wire.Confirm(tracker, 3, 1, offset, NOW_MS))
                    elif isinstance(command, wire.OpenProducer):
                        facts: dict[str, Any] = {"id": 7, "epoch": 0, "next": {}}
                        self.hear(wire.Result(command.request, facts))
        session.take_events()


def publishing(rows: int) -> tuple[Linked, Callable[[], None]]:
    linked = Linked()
    publisher, level = linked.session.publisher, level_number("synced")

    def publish() -> None:
        for n in range(rows):
            publisher.add("s", level, make_row(b"x" * 140, "a", None, None, None, None, n))
        linked.answer()

    return linked, publish


@pytest.mark.parametrize("rows", [1, 64, 512])
def test_publish_and_its_confirm(benchmark: Any, per: Any, rows: int) -> None:
    linked, publish = publishing(rows)
    publish()
    assert linked.published == 1
    per(records=rows)
    benchmark(publish)


def test_publish_a_content_and_its_confirm(benchmark: Any, per: Any) -> None:
    linked, level = Linked(), level_number("synced")
    content = encode_fixed(bytes(140 * 512), 140, subject="a")

    def publish() -> None:
        linked.session.publisher.add_content("s", level, content, 512, None)
        linked.answer()

    publish()
    assert linked.published == 1
    per(records=512)
    benchmark(publish)
