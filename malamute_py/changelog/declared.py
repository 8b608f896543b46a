"""Declared schemas: which one a stream may have, and which may follow it.

Owns the versions of a typed stream's schema. The rules: a schema that a stream has declared stays
one of its own, so that a producer that knows an older version only may go on; a version that does
not fit those before it is refused with the column that differs. Source: SPEC.md, section 5.9.
"""

from __future__ import annotations

import msgspec

from malamute_protocol.errors import BrokerRefused
from malamute_protocol.schema import SchemaError, misfit, read_schema, schema_id
from malamute_py.changelog.settings import StreamSettings, encode_settings, versions


def declared(wanted: StreamSettings) -> StreamSettings:
    """Return the settings of a new stream: a schema makes its bodies arrow.

    For a create, and for an edit that declares the first schema. Raises BrokerRefused: the schema
    cannot be read.
    """
    if not wanted.schema:
        return wanted
    try:
        read_schema(wanted.schema)
    except SchemaError as error:
        raise BrokerRefused(error.code, error.reason) from error
    return msgspec.structs.replace(wanted, body_kind="arrow")


def evolved(old: StreamSettings, wanted: StreamSettings, bytes_max: int) -> StreamSettings:
    """The settings of a stream whose schema is to be `wanted`'s, with all versions that it had.

    For an EDIT_STREAM. wanted: the settings of the stream as edited, which may declare a schema, or
    its next version. To declare the newest version again is no change.

    Raises BrokerRefused: `bad_schema`: it cannot follow, or is an older version; `bad_setting`: the
    schema would be taken away, or the settings get too large.
    """
    if wanted.schema == old.schema:
        return wanted
    if not wanted.schema:
        raise BrokerRefused("bad_setting", "schema cannot be taken away: records are of it")
    if not old.schema:
        return declared(wanted)
    number, newest = version_of(old, wanted.schema), len(old.former_schemas) + 1
    if 0 < number < newest:
        raise BrokerRefused(
            "bad_schema",
            f"it is version {number} of the stream's schema, which is at version {newest} and never"
            " goes back; batches of an older version are taken all the same",
        )
    if number:  # The newest version in other bytes: those that are known stay.
        return msgspec.structs.replace(wanted, schema=old.schema)
    try:
        fault = misfit(read_schema(old.schema), read_schema(wanted.schema))
    except SchemaError as error:
        raise BrokerRefused(error.code, error.reason) from error
    if fault:
        raise BrokerRefused("bad_schema", fault)
    if schema_id(wanted.schema) in versions(old):
        raise BrokerRefused("bad_schema", "its id is that of an earlier version: change metadata")
    settings = msgspec.structs.replace(wanted, former_schemas=(*old.former_schemas, old.schema))
    size = len(encode_settings(settings))
    if size > bytes_max:
        raise BrokerRefused(
            "bad_setting",
            f"settings of {size} bytes with all versions of the schema, at most {bytes_max}",
        )
    return settings


def is_version(settings: StreamSettings, schema: bytes) -> bool:
    """Whether a schema says the same as a version that a stream has, for a `create` of it.

    Raises BrokerRefused: the schema cannot be read.
    """
    return version_of(settings, schema) > 0


def version_of(settings: StreamSettings, schema: bytes) -> int:
    """Number of the newest version that says the same as a schema, from 1 on; 0: there is none.

    Raises BrokerRefused: the schema cannot be read.
    """
    known = list(versions(settings).values())
    if not known:
        return 0
    try:
        # Mostly the bytes are the same; other bytes may declare the same columns.
        columns = None if schema in known else read_schema(schema)
        for number in range(len(known), 0, -1):
            message = known[number - 1]
            if schema == message or (columns is not None and columns == read_schema(message)):
                return number
    except SchemaError as error:
        raise BrokerRefused(error.code, error.reason) from error
    return 0
