"""Clients of tests that kill the broker: their calls never give up."""

from __future__ import annotations

from malamute_py.client.aio.client import Connecting, connect


def patient(endpoint: str, identity: str = "") -> Connecting:
    """Connect a client that waits for ever and tries each second.

    A call gives up after 30 s by default, and pauses between attempts add up over kills in a row.
    """
    return connect(
        endpoint, timeout_ms=None, call_timeout_ms=None, retry_max_ms=1_000, identity=identity
    )
