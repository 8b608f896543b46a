"""The simple twin of the index: one pattern against one header, read off the definition.

Shares no code with what it checks, except the check of the wire form. Tests compare the index with
it, and readers can look up in it what a pattern means.
"""

from __future__ import annotations

from typing import Any

import re2

from malamute_protocol.pattern import validate


def matches(wire: object, keys: tuple[str, ...], fields: tuple[tuple[str, str], ...]) -> bool:
    """Whether a pattern in wire form matches a header; raises PatternError if malformed."""
    return _holds(validate(wire), keys, dict(fields))


def _holds(pattern: list[Any], keys: tuple[str, ...], fields: dict[str, str]) -> bool:
    """Whether a pattern matches, by its definition alone."""
    kind, *rest = pattern
    if kind == "all":
        return True
    if kind == "topic":
        return any(_topic(rest[0].split("."), key.split(".")) for key in keys)
    if kind == "prefix":
        return any(key[: len(rest[0])] == rest[0] for key in keys)
    if kind == "regex":
        options = re2.Options()
        options.log_errors = False
        return any(re2.search(rest[0], key, options) is not None for key in keys)
    if kind == "fields":
        mode, criteria = rest
        hits = 0
        for name, *value in criteria:  # [name] asks for presence, [name, value] for the value
            if name in fields and (not value or fields[name] == value[0]):
                hits += 1
        return hits == len(criteria) if mode == "all" else hits >= 1
    if kind == "and":
        return all(_holds(each, keys, fields) for each in rest)
    if kind == "or":
        return any(_holds(each, keys, fields) for each in rest)
    if kind == "not":
        return not _holds(rest[0], keys, fields)
    raise ValueError(f"scan knows the built-in kinds only, not '{kind}'")


def _topic(pattern: list[str], parts: list[str]) -> bool:
    """Whether a topic pattern matches a key, both cut into parts."""
    if _parts(pattern, parts):
        return True
    # A trailing ".*" also matches its parent.
    return len(pattern) > 1 and pattern[-1] == "*" and _parts(pattern[:-1], parts)


def _parts(pattern: list[str], parts: list[str]) -> bool:
    """Whether the parts of a key match those of a topic pattern; `#` takes one or more."""
    if not pattern:
        return not parts
    if not parts:
        return False
    if pattern[0] == "#":
        return any(_parts(pattern[1:], parts[used:]) for used in range(1, len(parts) + 1))
    return pattern[0] in ("*", parts[0]) and _parts(pattern[1:], parts[1:])
