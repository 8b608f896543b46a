"""Limits of the protocol: every size and count that a message may have.

Owns the default values and nothing else; a broker announces its own in WELCOME. The rule: a limit
is checked where bytes are made (LocalProtocolError) and where they arrive (BatchError or
RemoteProtocolError, code `too_large`); limits of single fields are constants, checked while a
command is decoded. Source: SPEC.md, section 11.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

KEY_BYTES_MAX: Final = 128
"""Bytes of a sender's name for a batch or a step."""
REASON_BYTES_MAX: Final = 1024
"""Characters of a worker's reason for a failure."""
RANGES_MAX: Final = 4_096
"""Ranges in one acknowledgement."""
RUNS_MAX: Final = 65_536
"""Numbers or runs in one command."""
NUMBERS_MAX: Final = 1 << 20
"""Messages, requests or records that the ranges of one command may name."""
ELEMENTS_MAX: Final = 65_536
"""Elements of all arrays and maps within one field of a command; in RESULT as many as fit."""
SETTINGS_MAX: Final = 1_024
"""Settings in one command. 60,000 of them, none of which exists, took 25 ms to be read."""
TIME_MAX: Final = 1 << 53
"""Largest time or duration, in milliseconds: every language has it exactly, and sums stay in 64
bits."""
PRIORITY_MIN: Final = -128
PRIORITY_MAX: Final = 127
REQUEST_PRIORITY_MAX: Final = 9
"""Priorities of requests are 0 to this one."""


Positive = Annotated[int, msgspec.Meta(ge=1)]
"""A size or count of at least one."""
BatchRecords = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
"""A count of records in one batch."""


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Sizes in bytes, counts in pieces; the defaults are those of SPEC.md, section 11."""

    record_bytes_max: Positive = 8 << 20
    """Bytes of one record's body, before compression."""
    batch_bytes_max: Positive = 16 << 20
    """Bytes of one batch, stamp included; also the most that a body may decompress to."""
    batch_records_max: BatchRecords = 65_536
    subject_bytes_max: Positive = 255
    keys_max: Positive = 16
    """Keys of one record, its subject included."""
    headers_max: Positive = 65_536
    """Distinct subjects of a batch, and distinct field maps of a batch."""
    header_entries_max: Positive = 262_144
    """Keys of all distinct subjects and fields of all distinct field maps of a batch, together."""
    fields_max: Positive = 64
    """Fields of one map."""
    field_name_bytes_max: Positive = 255
    field_value_bytes_max: Positive = 1024
    property_bytes_max: Positive = 65_536
    """Bytes of one record's properties, as MessagePack."""
    message_commands_max: Positive = 4096
    message_frames_max: Positive = 4096
    step_parts_max: Positive = 512
    """Parts of one atomic step, which is done in one go."""
    command_frame_bytes_max: Positive = 1 << 20
    nesting_max: Positive = 32
    """Depth of arrays and maps inside the command frame."""


DEFAULT_LIMITS = Limits()
UNBOUNDED = Limits(
    record_bytes_max=1 << 40, batch_bytes_max=1 << 40, headers_max=1 << 20, keys_max=1 << 20,
    header_entries_max=1 << 24, fields_max=1 << 20, property_bytes_max=1 << 40,
)  # fmt: skip
"""Limits for making a batch of some rows of another, which was checked, perhaps under limits above
the defaults."""
UNCHECKED = Limits(
    headers_max=1 << 20, keys_max=1 << 20, header_entries_max=1 << 24, fields_max=1 << 20
)
"""Limits for parsing the header table of a content that is not checked here: one that was stored
under limits which may have been other than these, or one that is about to be checked."""
