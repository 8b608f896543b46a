"""The sink's options: names, defaults, meaning, and what can be wrong with them.

Owns the SINK_OPTIONS table, which is all there is to know about them. The rule: an option is
refused by its name before anything connects; nothing is ignored but what Spark adds by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from malamute_protocol.address import name_fault
from pyspark_malamute.option_values import (
    LinkOptions,
    Option,
    OptionTable,
    as_names,
    as_number,
    as_size,
)
from pyspark_malamute.options import OPTIONS
from pyspark_malamute.options import TABLE as SOURCE

KINDS: Final[dict[str, tuple[str, ...]]] = {
    "stream": ("string",),
    "subject": ("string",),
    "body": ("binary", "string"),
    "fields": ("map<string,string>",),
    "properties": ("map<string,string>",),
    "client_time": ("timestamp",),
}
"""Columns that a frame may have -> the types that each may have."""
CHUNK_BYTES: Final = (64 << 10, 12 << 20)
"""Least and most bytes of a chunk: a step has 16 MiB at most, headers included."""
SINK_ID_BYTES_MAX: Final = 64
LINK_OPTIONS: Final = (
    "user", "password", "curveServerKey", "curvePublicKey", "curveSecretKey", "connectTimeoutMs",
    "requestTimeoutMs", "brokerOutageMs",
)  # fmt: skip
"""Options of the link, which the source has as well."""
_OPTIONS_OF_SPARK: Final = ("checkpointlocation", "queryname")
"""Options of the query itself, which Spark hands to the sink too."""


def _chunk_bytes(value: str) -> int:
    """Return a chunk's size from its text, within the bounds. Raises ValueError."""
    least, most = CHUNK_BYTES
    size = as_size(value)
    if not least <= size <= most:
        raise ValueError(f"{value} is not between 64k and 12m: a step holds 16 MiB at most")
    return size


def _name(value: str) -> str:
    """Return a name that the broker takes. Raises ValueError."""
    name = value.strip()
    fault = name_fault(name)
    if fault:
        raise ValueError(fault)
    return name


def _sink_id(value: str) -> str:
    """Return a sinkId, which is a part of subjects. Raises ValueError."""
    name = _name(value)
    if len(name) > SINK_ID_BYTES_MAX:
        raise ValueError(f"has {len(name)} bytes, at most {SINK_ID_BYTES_MAX}")
    if "." in name:
        raise ValueError(f"{name!r} has a dot, which divides the subjects of its records")
    return name


SINK_OPTIONS: Final[tuple[Option, ...]] = (
    *(row for row in OPTIONS if row.name == "endpoint"),
    Option("stream", _name, None, "the stream to write into; column `stream` is not looked at then",
           aliases=("topic",)),
    Option("fieldColumns", as_names, None,
           "string columns that become fields of each record, in place of column `fields`"),
    Option("sinkId", _sink_id, None,
           "name of what is written: rows of one sinkId and batchId are published once, however "
           "often the job is run", "write"),
    Option("batchId", as_number, "0", "number of the batch within sinkId", "write"),
    Option("commitStream", _name, "spark.commits",
           "the stream that has a record of each chunk and of each finished batch; the sink reads "
           "it as well"),
    Option("chunkBytes", _chunk_bytes, "4m", "about how many bytes are published in one step"),
    *(row for row in OPTIONS if row.name in LINK_OPTIONS),
)  # fmt: skip

_ELSEWHERE: Final[dict[str, str]] = {
    "kafka.bootstrap.servers": "endpoint",
    "host": "endpoint",
    "url": "endpoint",
    "broker": "endpoint",
    "topics": "stream",
    "streams": "stream",
    "path": "stream",
    "headers": "fieldColumns",
    "includeheaders": "fieldColumns",
    "includefields": "fieldColumns",
    "identity": "user",
    "queryid": "sinkId",
    "txnappid": "sinkId",
    "txnversion": "batchId",
    "splitbytes": "chunkBytes",
    "batchsize": "chunkBytes",
}
"""Option as users of other sinks write it -> name of the option here."""

TABLE: Final = OptionTable("sink", SINK_OPTIONS, _ELSEWHERE)


class SinkOptions(LinkOptions, frozen=True, kw_only=True):
    """All options of one sink, checked. Passwords and keys are left out of its repr."""

    side = "sink"
    stream: str
    """The stream that is written; empty: column `stream` names it."""
    field_columns: tuple[str, ...]
    sink_id: str
    batch_id: int
    commit_stream: str
    chunk_bytes: int

    def __repr__(self) -> str:
        """Without credentials: this text may end up in a log or a plan."""
        return f"SinkOptions({', '.join(self.endpoints)}, {self.stream or 'column stream'})"

    @property
    def permission(self) -> str:
        """The permission that a link needs, for the error of one that lacks it."""
        written = f"stream '{self.stream}'" if self.stream else "each stream of column stream"
        return f"permission to write and read {written} and stream '{self.commit_stream}'"

    @property
    def has_credential(self) -> bool:
        """Whether a credential says who the links are."""
        return bool(self.user or self.curve_keys[0])

    def named(self, identity: str) -> SinkOptions:
        """Return these options with an identity to ask for, unless a credential has one."""
        if self.has_credential:
            return self
        return msgspec.structs.replace(self, identity=identity)


def parse_sink_options(raw: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Return the options of a sink, checked as far as that goes without rows and broker.

    raw: as Spark gives them, keys in any case. Raises OptionError.
    """
    ours = {key: value for key, value in raw.items() if key.lower() not in _OPTIONS_OF_SPARK}
    # An option that only the source has is no misspelling, for which TABLE would take it.
    for key in ours:
        # TABLE itself names the remedy for what is unknown or stands in _ELSEWHERE.
        sources = SOURCE.by_key.get(key.lower())
        if key.lower() not in TABLE.by_key and key.lower() not in _ELSEWHERE and sources:
            raise TABLE.error(key, "is an option of the source; remove it")
    given, keys, values = TABLE.read(ours)
    if streaming:
        for name in ("sinkId", "batchId"):
            if name in given:
                raise TABLE.error(
                    keys[name],
                    "is for write only; a streaming query has its id and its batches' numbers from "
                    "its checkpoint. Remove it",
                )
    if "batchId" in given and not values["sinkId"]:
        raise TABLE.error(
            "sinkId", "is missing beside batchId: a number alone does not tell two jobs apart"
        )
    return SinkOptions(
        **TABLE.linking(values),
        stream=values["stream"] or "",
        field_columns=values["fieldColumns"] or (),
        sink_id=values["sinkId"] or "",
        batch_id=values["batchId"],
        commit_stream=values["commitStream"],
        chunk_bytes=values["chunkBytes"],
    )


def columns_fault(columns: Mapping[str, str], options: SinkOptions) -> str:
    """Say what is wrong with a frame's columns, before it is written; "" when they can be.

    columns: name -> type, as Spark's simpleString has it.
    """
    fields = options.field_columns
    for name in fields:
        if name in KINDS:
            return f"column '{name}' of fieldColumns has a meaning of its own; rename it"
        if columns.get(name) != "string":
            found = columns.get(name, "not there")
            return f"column '{name}' of fieldColumns is to be a string and is {found}"
    if fields and "fields" in columns:
        return "column 'fields' and option 'fieldColumns' exclude each other; drop one"
    for name, found in columns.items():
        kinds = ("string",) if name in fields else KINDS.get(name, ())
        if found not in kinds:
            remedy = f"it is to be {' or '.join(kinds)}" if kinds else "the sink has no such column"
            return f"column '{name}' is {found}: {remedy}. Select what is to be written"
    if "body" not in columns:
        return "column 'body' (binary or string) is missing"
    if not options.stream and "stream" not in columns:
        return "neither option 'stream' nor a column 'stream' says where the rows go"
    return ""
