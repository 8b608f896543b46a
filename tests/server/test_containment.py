"""Errors that no code foresees, at the loop: they cost one peer, and the others are served."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol.commands import Pong
from malamute_protocol.framing import decode_message
from malamute_py.broker.ready import (
    Event,
)
from malamute_py.server import inbound as inbound_module
from tests.server.fakes import LOCAL, RunningLoop
from tests.server.peer import dealer, ping


def test_an_error_in_decoding_a_message_is_its_peers_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plainly = decode_message

    def planted(frames: Any, limits: Any) -> Any:
        if len(frames) > 1:
            raise IndexError("planted")
        return plainly(frames, limits)

    monkeypatch.setattr(inbound_module, "decode_message", planted)
    with (
        RunningLoop(LOCAL) as running,
        dealer(running.endpoint) as bad,
        dealer(running.endpoint) as good,
    ):
        ping(good)
        bad.send_multipart([b"anything", b"else"])
        ping(bad)  # Messages that were sent before have been looked at by then.
        ping(good)
        ((link, doing, error),) = running.core.failures
        assert (link > 0, doing) == (True, "receiving")
        assert isinstance(error, IndexError)


def test_a_number_that_no_wire_carries_costs_the_link_that_was_to_be_told_it() -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        ping(peer)
        number = running.loop.peers.numbers()[0]
        running.core.send(number, Pong(1 << 64))
        ping(peer)
        ((link, doing, error),) = running.core.failures
        assert (link, doing) == (number, "sending")
        assert isinstance(error, OverflowError)


def test_an_event_with_an_error_says_where_it_arose() -> None:
    with RunningLoop(LOCAL) as running, dealer(running.endpoint) as peer:
        try:
            raise IndexError("planted")
        except IndexError as error:
            running.core.ready.events.append(
                Event("internal_error", "error", {"error": error, "link": 7})
            )
        ping(peer)
        # Messages that are sent go before it.
        running.until(lambda: running.log.of("internal_error"))
        (facts,) = running.log.of("internal_error")
        assert facts["error"] == "IndexError('planted')"
        assert "test_an_event_with_an_error" in facts["trace"]
        assert facts["link"] == 7
