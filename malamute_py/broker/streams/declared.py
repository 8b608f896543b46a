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
    """The settings of a stream that is to be created. Raises BrokerRefused `bad_schema`."""
    if not wanted.schema:
        return wanted
    try:
        read_schema(wanted.schema)
    except SchemaError as error:
        raise BrokerRefused(error.code, error.reason) from error
    return msgspec.structs.replace(wanted, body_kind="arrow")


def evolved(old: StreamSettings, wanted: StreamSettings, bytes_max: int) -> StreamSettings:
    """The settings of a stream that is to be changed; a version that it has already is no change.

    Raises BrokerRefused: `bad_schema`: it cannot follow; `bad_setting`: the settings get too large.
    """
    if wanted.schema == old.schema:
        return wanted
    if not wanted.schema:
        raise BrokerRefused("bad_setting", "schema cannot be taken away: records are of it")
    if not old.schema:
        return declared(wanted)
    if is_version(old, wanted.schema):
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
    """Whether a schema says the same as a version that a stream has. Raises BrokerRefused."""
    known = versions(settings)
    if not known or schema in known.values():
        return bool(known)
    try:
        columns = read_schema(schema)
        return any(columns == read_schema(message) for message in known.values())
    except SchemaError as error:
        raise BrokerRefused(error.code, error.reason) from error
