"""Settings of what the broker keeps: streams, mailboxes, services, cursors.

Owns their names, defaults and what each may be. The rule: a setting that is unknown or out of
range is refused by name, and nothing else of the command is done. Source: SPEC.md, section 13.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.errors import BrokerRefused

BODY_KINDS = ("blob", "list", "arrow")
LEVELS = ("stored", "synced")
RING_BYTES_MIN = 1 << 20
_SHOWN_MAX = 60


class StreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one stream was asked to be. Zero means without a bound of its own."""

    memory: bool = False
    """Kept in memory only: gone when the broker ends."""
    ring_bytes: int = 0
    """A ring of its own of this size; 0: the ring that it shares with others."""
    full: str = "overwrite"
    """What a full ring of its own does: `overwrite` the oldest, or `refuse`."""
    max_bytes: int = 0
    max_age_ms: int = 0
    body_kind: str = ""
    """`blob`, `list` or `arrow`; empty until the first batch settles it."""
    schema: bytes = b""
    """Typed streams: the Arrow schema message that the bodies follow."""
    level: str = "synced"
    """What a publish of level 0 is confirmed at: `stored` or `synced`."""
    description: str = ""

    def check(self) -> None:
        """Raises BrokerRefused `bad_setting`, naming the setting and what it may be."""
        for name in ("ring_bytes", "max_bytes", "max_age_ms"):
            if not 0 <= getattr(self, name) < 1 << 62:
                raise BrokerRefused("bad_setting", f"{name} is a number of at least 0")
        if self.full not in ("overwrite", "refuse"):
            raise BrokerRefused("bad_setting", f"full is overwrite or refuse, not '{self.full}'")
        if self.full == "refuse" and not self.ring_bytes:
            raise BrokerRefused(
                "bad_setting", "full = refuse needs ring_bytes: a shared ring overwrites"
            )
        if 0 < self.ring_bytes < RING_BYTES_MIN:
            raise BrokerRefused(
                "bad_setting", f"ring_bytes is at least {RING_BYTES_MIN}, or 0 to share a ring"
            )
        if self.body_kind and self.body_kind not in BODY_KINDS:
            raise BrokerRefused("bad_setting", f"body_kind is one of {', '.join(BODY_KINDS)}")
        if self.level not in LEVELS:
            raise BrokerRefused("bad_setting", f"level is one of {', '.join(LEVELS)}")
        if self.schema and self.body_kind != "arrow":
            raise BrokerRefused("bad_setting", "a schema needs body_kind = arrow")


FIXED_SETTINGS = ("memory", "ring_bytes", "full", "schema")
"""What an edit cannot change: records lie where they lie. body_kind may be settled once."""


def settings_of(values: dict[str, Any], bytes_max: int) -> StreamSettings:
    """Settings as a client named them, over the defaults.

    Raises BrokerRefused `bad_setting`: unknown, of a wrong type, out of range, too much.
    """
    try:
        settings = msgspec.convert(values, StreamSettings)
        size = len(encode_settings(settings))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise BrokerRefused("bad_setting", _fault(StreamSettings, error)) from error
    if size > bytes_max:
        raise BrokerRefused("bad_setting", f"settings of {size} bytes, at most {bytes_max}")
    settings.check()
    return settings


def _fault(kind: type[msgspec.Struct], error: Exception) -> str:
    """What a conversion found wrong, in words: the setting first, then what is allowed."""
    message, _, path = str(error).partition(" - at `$.")
    known = ", ".join(kind.__struct_fields__)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL)
    if unknown:
        return f"there is no setting '{unknown[1][:_SHOWN_MAX]}'; known are {known}"
    wanted = re.match(r"Expected `(\w+)`, got `(\w+)`", message)
    if wanted and path:
        return f"{path.rstrip('`')} is of type {wanted[1]}, not {wanted[2]}"
    return message


def encode_settings(settings: StreamSettings) -> bytes:
    """Settings as MessagePack, those at their default left out."""
    return msgspec.msgpack.encode(settings)


class MailboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one mailbox was asked to be. Zero means without a bound of its own."""

    memory: bool = False
    """Kept in memory only: gone when the broker ends, and confirmed as `none`."""
    max_messages: int = 0
    """Beyond it SEND is refused `wait`; 0: the broker's own bound."""
    max_bytes: int = 0
    ttl_ms: int = 0
    """Time to live of messages that name no expiry; 0: they do not expire."""
    level: str = "synced"
    """What a SEND of level 0 is confirmed at: `stored` or `synced`."""
    description: str = ""

    def check(self) -> None:
        """Raises BrokerRefused `bad_setting`, naming the setting and what it may be."""
        check_numbers(self, "max_messages", "max_bytes", "ttl_ms")
        check_level(self.level)


class ServiceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one service queue was asked to be. Zero means the broker's default."""

    memory: bool = False
    max_requests: int = 0
    """Waiting or in hand; beyond it REQUEST is refused `wait`."""
    max_bytes: int = 0
    attempts_max: int = 0
    """Handed out so often without completion, a request becomes a dead letter."""
    lease_ms: int = 0
    """Silence of a worker about a request after which it goes to another."""
    backoff_ms: int = 0
    """Pause before a request is handed out again; doubles with each attempt."""
    backoff_max_ms: int = 0
    timeout_ms: int = 0
    """Timeout of requests that name none; 0: no timeout."""
    dead_letters: str = ""
    """Mailbox for what could not be done; empty: `NAME.dead`."""
    level: str = "synced"
    description: str = ""

    def check(self) -> None:
        """Raises BrokerRefused `bad_setting`, naming the setting and what it may be."""
        check_numbers(
            self, "max_requests", "max_bytes", "attempts_max", "lease_ms", "backoff_ms",
            "backoff_max_ms", "timeout_ms",
        )  # fmt: skip
        check_level(self.level)
        if self.dead_letters and name_fault(self.dead_letters):
            raise BrokerRefused("bad_setting", f"dead_letters: {name_fault(self.dead_letters)}")


class CursorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one cursor was asked to be."""

    pin: bool = False
    """History at and behind the cursor is kept, up to pin_bytes_max."""
    pin_bytes_max: int = 0
    """0: the broker's default."""
    description: str = ""

    def check(self) -> None:
        """Raises BrokerRefused `bad_setting`, naming the setting and what it may be."""
        check_numbers(self, "pin_bytes_max")


def check_numbers(settings: msgspec.Struct, *names: str) -> None:
    """Raises BrokerRefused `bad_setting` when one of them is negative or beyond all sense."""
    for name in names:
        if not 0 <= getattr(settings, name) < 1 << 62:
            raise BrokerRefused("bad_setting", f"{name} is a number of at least 0")


def check_level(level: str) -> None:
    """Raises BrokerRefused `bad_setting` when it is no level that can be a default."""
    if level not in LEVELS:
        raise BrokerRefused("bad_setting", f"level is one of {', '.join(LEVELS)}")


_S = TypeVar("_S", MailboxSettings, ServiceSettings, CursorSettings)


def queue_settings(kind: type[_S], values: dict[str, Any], bytes_max: int, over: _S | None) -> _S:
    """Settings as a client named them, over those that hold (None: the defaults).

    Raises BrokerRefused `bad_setting`: unknown, of a wrong type, out of range, too much.
    """
    known = {} if over is None else {name: getattr(over, name) for name in kind.__struct_fields__}
    try:
        settings = msgspec.convert({**known, **values}, kind)
        size = len(msgspec.msgpack.encode(settings))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise BrokerRefused("bad_setting", _fault(kind, error)) from error
    if size > bytes_max:
        raise BrokerRefused("bad_setting", f"settings of {size} bytes, at most {bytes_max}")
    settings.check()
    return settings
