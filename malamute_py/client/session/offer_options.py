"""An offer as a worker asks for it: its options, and how a request may end.

Owns the options of an offer and the words for what a worker says of a request.
Source: SPEC.md, section 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.commands import Pattern, WorkState
from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.arguments import duration, integer, name_of, one_of, settings_of
from malamute_py.client.session.calls import make_pattern
from malamute_py.client.session.publisher import level_number
from malamute_py.client.words import ConfirmAt, OnError

RECEIVED: Final = int(WorkState.RECEIVED)
RENEWED: Final = int(WorkState.RENEWED)
COMPLETED: Final = int(WorkState.COMPLETED)
FAILED: Final = int(WorkState.FAILED)
RETURNED: Final = int(WorkState.RETURNED)
RELEASED: Final = int(WorkState.RELEASED)
CREDIT_BYTES: Final = 64 << 20
ON_ERROR: Final = ("fail", "nack")
"""Ways to end a request whose handler raised."""


class OfferOptions(msgspec.Struct, frozen=True):
    """Options of a worker's offer."""

    service: str
    pattern: Pattern
    concurrency: int = 16
    """Requests that may be in hand and not finished."""
    credit_bytes: int = CREDIT_BYTES
    """Bytes of requests that may be on their way here."""
    lease_ms: int = 0
    """0: the broker's default."""
    level: int = 0
    """At which replies are confirmed."""
    settings: dict[str, Any] = {}


def offer_options(
    service: str,
    pattern: str | Pattern,
    concurrency: int,
    lease_ms: int | None,
    confirm: ConfirmAt,
    credit_bytes: int,
    settings: Mapping[str, Any] | None,
) -> OfferOptions:
    """The options of an offer as a worker gives them, checked.

    Raises PatternError or LocalProtocolError `bad_setting` for what the broker would refuse anyway.
    """
    name_of("service", service)
    if fault := name_fault(service):
        # serve() registers only: the broker would tell it in run(), and for all services at once.
        raise LocalProtocolError("bad_name", f"service {service!r}: {fault}")
    return OfferOptions(
        service,
        make_pattern(pattern),
        integer("concurrency", concurrency, 1),
        integer("credit_bytes", credit_bytes, 1),
        0 if lease_ms is None else duration("lease_ms", lease_ms, 1),
        level_number(confirm),
        settings_of(settings),
    )


def make_on_error(on_error: OnError) -> None:
    """Check what a worker does when a handler raises; LocalProtocolError: it is not in ON_ERROR."""
    one_of("on_error", on_error, ON_ERROR)
