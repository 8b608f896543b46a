"""Settings of streams, mailboxes, services, cursors and groups.

Owns their names, their defaults and the values that each may have. The rule: a setting that is
unknown or out of range is refused by name, and the command that names it changes nothing. A create
or an edit makes settings of what it names and of what holds, and check() looks at them. Source:
SPEC.md, section 13.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from malamute_protocol.address import name_fault
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.keys import LAST_PER_SUBJECT
from malamute_protocol.schema import schema_id

BODY_KINDS = ("blob", "list", "arrow")
LEVELS = ("stored", "synced")
KEEPS = ("", LAST_PER_SUBJECT)
FULL = "full"
VALIDATES = ("schema", FULL)
RING_BYTES_MIN = 1 << 20
_SHOWN_MAX = 60
_BITS_MAX = 63


class StreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of one stream. Zero means that the stream has no bound of its own."""

    memory: bool = False
    """True: the stream is kept in memory only and is gone when the broker ends."""
    ring_bytes: int = 0
    """Size of the stream's own ring; 0: the stream shares a ring with others."""
    full: str = "overwrite"
    """Behaviour of the stream's own ring when it is full: `overwrite` the oldest records, or
    `refuse` new ones."""
    max_bytes: int = 0
    max_age_ms: int = 0
    max_records: int = 0
    body_kind: str = ""
    """`blob`, `list` or `arrow`; empty until the first batch of the stream decides it."""
    schema: bytes = b""
    """Arrow schema message of the newest version; empty: the stream is not typed."""
    former_schemas: tuple[bytes, ...] = ()
    """Earlier versions of the schema, oldest first; no client may set them."""
    validate: str = "schema"
    """Check of a typed batch before it is stored: `schema`: of its schema's id alone; `full`: of
    each of its values as well."""
    level: str = "synced"
    """Level at which a publish that asks for level 0 is confirmed: `stored` or `synced`."""
    description: str = ""
    keep: str = ""
    """`last-per-subject`: the newest record of each subject is kept whatever comes after it, and
    the subjects are keys; empty: records go as the ring and the bounds say."""

    def __post_init__(self) -> None:
        """Have a stream with keys never overwrite records, also where an older log differs."""
        if self.keep:
            msgspec.structs.force_setattr(self, "full", "refuse")

    def check(self) -> None:
        """Raise BrokerRefused `bad_setting`, which names the setting and its allowed values."""
        check_numbers(self, "ring_bytes", "max_bytes", "max_age_ms", "max_records")
        if self.keep:
            self._check_keep()
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
        check_level(self.level)
        if self.schema and self.body_kind not in ("", "arrow"):
            raise BrokerRefused("bad_setting", "a schema needs body_kind = arrow")
        if self.validate not in VALIDATES:
            raise BrokerRefused("bad_setting", f"validate is one of {', '.join(VALIDATES)}")
        if self.validate == FULL and not self.schema:
            raise BrokerRefused("bad_setting", "validate = full needs a schema")

    def _check_keep(self) -> None:
        """Raise BrokerRefused unless the other settings let it keep the last of each subject."""
        if self.keep not in KEEPS:
            raise BrokerRefused("bad_setting", f"keep is {LAST_PER_SUBJECT} or empty")
        if not self.ring_bytes or self.memory:
            raise BrokerRefused(
                "bad_setting", "keep needs ring_bytes, and a ring that is not in memory only"
            )
        if self.max_bytes or self.max_age_ms or self.max_records:
            raise BrokerRefused(
                "bad_setting",
                "max_bytes, max_age_ms and max_records drop records that keep has to keep",
            )
        if self.body_kind == "arrow" or self.schema:
            raise BrokerRefused("bad_setting", "keep needs body_kind = blob or list")


FIXED_SETTINGS = ("memory", "ring_bytes", "full", "keep")
"""Settings that an edit cannot change, since records stay where they were written. An empty
body_kind may be set once."""
KEPT_SETTINGS = (*FIXED_SETTINGS, "body_kind", "schema", "former_schemas")
"""Settings that stay when all others are replaced, unless they are named: no edit takes them
back."""


def settings_of(
    values: dict[str, Any],
    bytes_max: int,
    over: StreamSettings | None = None,
    defaults: dict[str, Any] | None = None,
) -> StreamSettings:
    """Return a stream's settings: those that a client named over those that hold.

    values, bytes_max, over, defaults: as queue_settings() has them. Raises BrokerRefused
    `bad_setting`: unknown, of a wrong type, out of range, too much.
    """
    if "former_schemas" in values:
        raise BrokerRefused("bad_setting", "former_schemas is kept by the broker: set schema")
    settings = queue_settings(StreamSettings, values, bytes_max, over, defaults)
    if settings.keep and values.get("full", "refuse") != "refuse":
        raise BrokerRefused("bad_setting", "keep needs full = refuse: no newest record goes")
    return settings


def versions(settings: StreamSettings) -> dict[int, bytes]:
    """Return id -> schema message of each version, oldest first; empty: the stream is not typed."""
    if not settings.schema:
        return {}
    return {schema_id(message): message for message in (*settings.former_schemas, settings.schema)}


def _fault(kind: type[msgspec.Struct], error: Exception) -> str:
    """Say what a conversion found wrong: the setting first, then what is allowed.

    error: what msgspec raised, as "message - at `$.setting`"; its words are put into ours.
    """
    message, _, path = str(error).partition(" - at `$.")
    setting = path.rstrip("`")
    known = ", ".join(kind.__struct_fields__)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL)
    if unknown:
        return f"there is no setting '{unknown[1][:_SHOWN_MAX]}'; known are {known}"
    wanted = re.match(r"Expected `(\w+)`, got `(\w+)`", message)
    if wanted and setting:
        return f"{setting} is of type {wanted[1]}, not {wanted[2]}"
    return f"{setting}: {message}" if setting else message


def encode_settings(settings: StreamSettings) -> bytes:
    """Encode settings as MessagePack, without those that have their default."""
    return msgspec.msgpack.encode(settings)


class MailboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of one mailbox. Zero means that the mailbox has no bound of its own."""

    memory: bool = False
    """True: the mailbox is kept in memory only, is gone when the broker ends, and mail to it is
    confirmed as `none`."""
    max_messages: int = 0
    """Messages beyond which SEND is refused with `wait`; 0: the broker's bound for all
    mailboxes."""
    max_bytes: int = 0
    ttl_ms: int = 0
    """Time to live of messages that name no expiry; 0: such messages do not expire."""
    level: str = "synced"
    """Level at which a SEND that asks for level 0 is confirmed: `stored` or `synced`."""
    description: str = ""

    def check(self) -> None:
        """Raise BrokerRefused `bad_setting`, which names the setting and its allowed values."""
        check_numbers(self, "max_messages", "max_bytes", "ttl_ms")
        check_level(self.level)


class ServiceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of one service queue. Zero means the broker's default."""

    memory: bool = False
    max_requests: int = 0
    """Requests, waiting or held by workers, beyond which REQUEST is refused with `wait`."""
    max_bytes: int = 0
    attempts_max: int = 0
    """Hand-outs of a request without an end after which it becomes a dead letter."""
    lease_ms: int = 0
    """Time without a word from the worker about a request after which another worker gets it."""
    backoff_ms: int = 0
    """Pause before a request is handed out again; it doubles with each attempt."""
    backoff_max_ms: int = 0
    timeout_ms: int = 0
    """Timeout of requests that name none; 0: such requests have no timeout."""
    dead_letters: str = ""
    """Mailbox of the service's dead letters; empty: `NAME.dead`."""
    level: str = "synced"
    description: str = ""

    def check(self) -> None:
        """Raise BrokerRefused `bad_setting`, which names the setting and its allowed values."""
        check_numbers(
            self, "max_requests", "max_bytes", "attempts_max", "lease_ms", "backoff_ms",
            "backoff_max_ms", "timeout_ms",
        )  # fmt: skip
        check_level(self.level)
        # Empty stands for the mailbox `NAME.dead`: dead letters always go to a mailbox.
        if self.dead_letters and name_fault(self.dead_letters):
            raise BrokerRefused("bad_setting", f"dead_letters: {name_fault(self.dead_letters)}")


class CursorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of one cursor."""

    pin: bool = False
    """True: the journal keeps the records from the cursor on, up to pin_bytes_max."""
    pin_bytes_max: int = 0
    """Bytes of history that the cursor may hold; 0: the broker's default."""
    description: str = ""

    def check(self) -> None:
        """Raise BrokerRefused `bad_setting`, which names the setting and its allowed values."""
        check_numbers(self, "pin_bytes_max")


class GroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of one group."""

    attempts_max: int = 0
    """Attempts of a record after which it becomes a dead letter; 0: it comes again for ever, and
    its attempts are not counted."""
    dead_letters: str = ""
    """Mailbox of the group's dead letters; empty: `STREAM.GROUP.dead`."""
    lease_ms: int = 0
    """Time without a word from a member about a record after which another member gets it; 0: it
    has the record as long as its link lives."""
    description: str = ""

    def check(self) -> None:
        """Raise BrokerRefused `bad_setting`, which names the setting and its allowed values."""
        check_numbers(self, "attempts_max", "lease_ms")
        # Empty stands for the mailbox `STREAM.GROUP.dead`: dead letters always go to a mailbox.
        if self.dead_letters and name_fault(self.dead_letters):
            raise BrokerRefused("bad_setting", f"dead_letters: {name_fault(self.dead_letters)}")


def check_numbers(settings: msgspec.Struct, *names: str) -> None:
    """Raise BrokerRefused `bad_setting` when a number is negative or absurdly large."""
    for name in names:
        if not 0 <= getattr(settings, name) < 1 << 62:
            raise BrokerRefused("bad_setting", f"{name} is a number from 0 to 2^62 - 1")


def check_level(level: str) -> None:
    """Raise BrokerRefused `bad_setting` unless a level may be a default; `none` may not."""
    if level not in LEVELS:
        raise BrokerRefused("bad_setting", f"level is one of {', '.join(LEVELS)}")


_S = TypeVar("_S", StreamSettings, MailboxSettings, ServiceSettings, CursorSettings, GroupSettings)


def queue_settings(
    kind: type[_S],
    values: dict[str, Any],
    bytes_max: int,
    over: _S | None,
    defaults: dict[str, Any] | None = None,
) -> _S:
    """Return settings of a kind: those that a client named (`values`) over those that hold.

    bytes_max: the most that they may take encoded. over: those that hold; None: the defaults of the
    kind. defaults: what takes the place of those that hold, but for KEPT_SETTINGS, where all are to
    be replaced; None: they stay.
    Raises BrokerRefused `bad_setting`: unknown, of a wrong type, out of range, too much.
    """
    known = {} if over is None else {name: getattr(over, name) for name in kind.__struct_fields__}
    if defaults is not None:
        kept = {name: value for name, value in known.items() if name in KEPT_SETTINGS}
        known = {**defaults, **kept}
    for name, value in {**known, **values}.items():
        if isinstance(value, int) and value.bit_length() > _BITS_MAX:
            raise BrokerRefused("bad_setting", f"{name[:_SHOWN_MAX]} is beyond {_BITS_MAX} bits")
    try:
        settings = msgspec.convert({**known, **values}, kind)
        size = len(msgspec.msgpack.encode(settings))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise BrokerRefused("bad_setting", _fault(kind, error)) from error
    if size > bytes_max:
        raise BrokerRefused("bad_setting", f"settings of {size} bytes, at most {bytes_max}")
    settings.check()
    return settings
