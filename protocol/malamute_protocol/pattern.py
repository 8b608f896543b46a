"""Patterns on the wire: builders, the text form, and the check of a well-formed pattern.

Owns the wire form of a pattern (a MessagePack array whose first element is the kind) and the limits
on it. The rule: `validate` is structural; it says whether a pattern is well formed, never what it
matches, and a regular expression is only measured here, since only the broker has the engine that
compiles it. Source: SPEC.md, section 7.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from malamute_protocol.errors import BrokerRefused

Pattern: TypeAlias = list[Any]
"""A pattern in wire form: [kind, ...]."""

Criterion: TypeAlias = "str | tuple[str, str | None]"
"""An argument of `fields`: "name", "name=value", or (name, value), where None is any value."""

DEPTH_MAX: Final = 8
"""Depth to which `and`, `or` and `not` may nest; a leaf alone has depth 1."""
NODES_MAX: Final = 256
"""Kinds that a pattern may name in all, counted through its combinations."""
TOPIC_BYTES_MAX: Final = 255
PREFIX_BYTES_MAX: Final = 255
REGEX_BYTES_MAX: Final = 1024
CRITERIA_MAX: Final = 64
FIELD_NAME_BYTES_MAX: Final = 255
FIELD_VALUE_BYTES_MAX: Final = 1024

_QUOTE: Final = 40
"""Characters of a value that a message shows."""
_COMPARISONS: Final = ("<", ">", "!")
_SIGNS: Final = ("=", *_COMPARISONS)
_TEXT_KINDS: Final = ("prefix:", "regex:", "fields:", "any:", "[")
"""Beginnings by which from_text() tells other kinds from a topic."""


class PatternError(BrokerRefused, ValueError):
    """A pattern was refused; nothing was done.

    `code` is bad_pattern, unknown_pattern_kind or, where a broker holds as many patterns of this
    kind as it may, limit; `reason` says why, in words for the person who wrote it.
    """


def _bad_pattern(reason: str) -> PatternError:
    """Return the error of a pattern that is not well formed."""
    return PatternError("bad_pattern", reason)


def _show(value: object) -> str:
    """Return a value for a message: cut when long, only its type when it is nested."""
    if not isinstance(value, str | bytes | int | float | None):
        return f"a {type(value).__name__}"
    if isinstance(value, str | bytes) and len(value) > _QUOTE:
        return f"{value[:_QUOTE]!r}..."
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a huge number"
    return repr(value)


# --- builders --------------------------------------------------------------------


def topic(pattern: str) -> Pattern:
    """Subjects by their parts between dots: `forex.*.#`.

    `*` stands for exactly one part, `#` for one or more. A `.*` at the end also selects the parent:
    `forex.*` matches `forex.gbp` and `forex`; `forex.#` does not match `forex`.
    """
    return validate(["topic", pattern])


def prefix(text: str) -> Pattern:
    """Subjects that begin with the text."""
    return validate(["prefix", text])


def regex(expression: str) -> Pattern:
    """Subjects in which the RE2 expression is found; anchor it with ^ and $."""
    return validate(["regex", expression])


def fields(
    *criteria: Criterion,
    mode: Literal["all", "any"] = "all",
    equal: Mapping[str, str] | None = None,
) -> Pattern:
    """Records whose fields meet all (or any) criteria.

    criteria: "name" (the record has the field), "name=value", or the pairs (name, value) and (name,
    None), which mean the same. equal: further criteria by name, for values that are not known when
    the program is written. Raises PatternError: a criterion is none of these.
    """
    if equal is not None and not isinstance(equal, Mapping):
        raise _bad_pattern(f"equal is a mapping of names to values, not {_show(equal)}")
    wire: list[list[str]] = []
    criterion: Any  # Callers without types may hand in anything.
    for criterion in criteria:
        if isinstance(criterion, str):
            wire.append(_criterion(criterion))
        elif isinstance(criterion, list | tuple) and len(criterion) == 2:
            wire.append([criterion[0]] if criterion[1] is None else [criterion[0], criterion[1]])
        else:
            raise _bad_pattern(
                'a criterion is "name", "name=value" or (name, value), not '
                f"{_show(criterion)}; a mapping goes to fields(equal=...)"
            )
    wire.extend([name, value] for name, value in (equal or {}).items())
    return validate(["fields", mode, wire])


def _criterion(text: str) -> list[str]:
    """Return [name, value] of "name=value", [name] of "name"; PatternError for a comparison."""
    name, equals, value = text.partition("=")
    if any(sign in name for sign in _COMPARISONS):
        raise _bad_pattern(
            f"the criterion {_show(text)} compares: a criterion is a field's name, or name=value; "
            f"for a field whose name has {' '.join(_COMPARISONS)} in it write the pattern's array"
        )
    return [name, value] if equals else [name]


def any_of(*patterns: Pattern) -> Pattern:
    """Records that at least one of the patterns matches."""
    return validate(["or", *patterns])


def all_of(*patterns: Pattern) -> Pattern:
    """Records that every one of the patterns matches."""
    return validate(["and", *patterns])


def not_(pattern: Pattern) -> Pattern:
    """Records that the pattern does not match."""
    return validate(["not", pattern])


def everything() -> Pattern:
    """Every record."""
    return ["all"]


# --- validation ------------------------------------------------------------------

Check: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Check one kind's array, raise PatternError, and return the patterns nested in it."""


def check_text(kind: str, what: str, value: object, bytes_max: int) -> str:
    """Return the value if it is a string of at most bytes_max bytes; raises PatternError."""
    if not isinstance(value, str):
        raise _bad_pattern(f"the {what} of a '{kind}' pattern must be a string, not {_show(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise _bad_pattern(
            f"the {what} {_show(value)} of a '{kind}' pattern is not valid text"
        ) from None
    if size > bytes_max:
        raise _bad_pattern(
            f"the {what} of a '{kind}' pattern has {size} bytes; at most {bytes_max}"
        )
    return value


def check_length(wire: Sequence[Any], length: int, form: str) -> None:
    """Raise PatternError unless the array has this many elements; form shows the right shape."""
    if len(wire) != length:
        raise _bad_pattern(
            f"a '{wire[0]}' pattern is {form}, with {length} elements; got {len(wire)}"
        )


def check_topic(wire: Sequence[Any]) -> Sequence[Any]:
    """Check ["topic", text], which has no patterns inside. Raises PatternError."""
    check_length(wire, 2, '["topic", "a.*.#"]')
    text = check_text("topic", "topic", wire[1], TOPIC_BYTES_MAX)
    if not text:
        raise _bad_pattern("a topic pattern may not be empty; '#' matches every subject")
    for part in text.split("."):
        if len(part) > 1 and ("*" in part or "#" in part):
            raise _bad_pattern(
                f"in topic {_show(text)} the part {_show(part)} mixes a wildcard with text: "
                "'*' and '#' stand for whole parts; use prefix or regex to match within one"
            )
    return ()


def check_prefix(wire: Sequence[Any]) -> Sequence[Any]:
    """Check ["prefix", text], which has no patterns inside. Raises PatternError."""
    check_length(wire, 2, '["prefix", "a."]')
    check_text("prefix", "text", wire[1], PREFIX_BYTES_MAX)
    return ()


def check_regex(wire: Sequence[Any]) -> Sequence[Any]:
    """Check the size of ["regex", expression]; the broker compiles it. Raises PatternError."""
    check_length(wire, 2, '["regex", "^a.+"]')
    check_text("regex", "expression", wire[1], REGEX_BYTES_MAX)
    return ()


def check_fields(wire: Sequence[Any]) -> Sequence[Any]:
    """Check ["fields", "all" | "any", [[name] | [name, value], ...]]. Raises PatternError.

    Returns the patterns inside that are still to be checked: none here.
    """
    check_length(wire, 3, '["fields", "all" or "any", [[name], [name, value], ...]]')
    if wire[1] not in ("all", "any"):
        raise _bad_pattern(f'a \'fields\' pattern asks for "all" or "any", not {_show(wire[1])}')
    criteria = wire[2]
    if not isinstance(criteria, list | tuple) or not criteria:
        raise _bad_pattern("a 'fields' pattern needs a list of at least one criterion")
    if len(criteria) > CRITERIA_MAX:
        raise _bad_pattern(
            f"a 'fields' pattern has {len(criteria)} criteria; at most {CRITERIA_MAX}"
        )
    for criterion in criteria:
        if not isinstance(criterion, list | tuple) or len(criterion) not in (1, 2):
            raise _bad_pattern(f"a criterion is [name] or [name, value], not {_show(criterion)}")
        if not check_text("fields", "field name", criterion[0], FIELD_NAME_BYTES_MAX):
            raise _bad_pattern("a field name may not be empty")
        if len(criterion) == 2:
            check_text("fields", "field value", criterion[1], FIELD_VALUE_BYTES_MAX)
    return ()


def check_many(wire: Sequence[Any]) -> Sequence[Any]:
    """Check the form of ["and" | "or", pattern, ...]; returns the patterns inside."""
    if len(wire) < 2:
        raise _bad_pattern(f"an '{wire[0]}' pattern needs at least one pattern to combine")
    return wire[1:]


def check_not(wire: Sequence[Any]) -> Sequence[Any]:
    """Check the form of ["not", pattern]; returns the pattern inside, in a list."""
    check_length(wire, 2, '["not", pattern]')
    return wire[1:]


def check_all(wire: Sequence[Any]) -> Sequence[Any]:
    """Check ["all"], which has no patterns inside."""
    check_length(wire, 1, '["all"]')
    return ()


_CHECKS: Final[dict[str, Check]] = {
    "topic": check_topic,
    "prefix": check_prefix,
    "regex": check_regex,
    "fields": check_fields,
    "and": check_many,
    "or": check_many,
    "not": check_not,
    "all": check_all,
}


def register_check(kind: str, check: Check) -> None:
    """Make a kind that is added to the matcher known to `validate`; ValueError: it is taken."""
    if kind in _CHECKS:
        raise ValueError(f"pattern kind '{kind}' is registered already")
    _CHECKS[kind] = check


def unregister_check(kind: str) -> None:
    """Forget a kind that register_check made known."""
    del _CHECKS[kind]


def validate(wire: object) -> Pattern:
    """Return the pattern as lists, checked through all its combinations; raises PatternError.

    Asked of each pattern: by the client that sends it, and by the broker.
    """
    nodes = 0
    depth = 0
    level: Sequence[object] = (wire,)
    """The patterns of one depth, checked together."""
    # Level by level, not by recursion: a hostile nesting must not reach Python's own limit.
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            raise _bad_pattern(f"the pattern nests deeper than {DEPTH_MAX} levels")
        below: list[object] = []
        for node in level:
            if not isinstance(node, list | tuple) or not node or not isinstance(node[0], str):
                raise _bad_pattern(f"a pattern is an array [kind, ...], not {_show(node)}")
            check = _CHECKS.get(node[0])
            if check is None:
                raise PatternError(
                    "unknown_pattern_kind",
                    f"there is no pattern kind {_show(node[0])}; known are {', '.join(_CHECKS)}",
                )
            below.extend(check(node))
        nodes += len(level)
        if nodes + len(below) > NODES_MAX:
            raise _bad_pattern(f"the pattern combines more than {NODES_MAX} patterns")
        level = below
    pattern: Pattern = _lists(wire)
    return pattern


def _lists(value: Any) -> Any:
    """Return the value with tuples turned to lists, as a MessagePack decoder gives them."""
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


# --- text form -------------------------------------------------------------------


def from_text(text: str) -> Pattern:
    """Read a pattern as typed on a command line or in a Spark option; raises PatternError.

    Bare text is a topic pattern. `prefix:x`, `regex:x`, `fields:a=b,c` (all of them) and
    `any:a=b,c` are patterns of those kinds; text that begins with `[` is the wire form as JSON and
    can say everything else.
    """
    if text.startswith("["):
        try:
            return validate(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise _bad_pattern(
                f"{_show(text)} begins like a JSON array but is none: {error}"
            ) from None
    kind, colon, rest = text.partition(":")
    if colon and kind in ("prefix", "regex"):
        return validate([kind, rest])
    if colon and kind in ("fields", "any"):
        criteria = [_criterion(item) for item in rest.split(",")]
        return validate(["fields", "any" if kind == "any" else "all", criteria])
    return validate(["topic", text])


def to_text(wire: object) -> str:
    """Return the text that from_text reads back as this pattern; raises PatternError.

    JSON, where the short form would be read as another pattern.
    """
    pattern = validate(wire)
    match pattern:
        case ["topic", str(text)] if not text.startswith(_TEXT_KINDS):
            return text
        case ["prefix" | "regex" as kind, str(text)]:
            return f"{kind}:{text}"
        case ["fields", mode, criteria] if all(
            "," not in text for criterion in criteria for text in criterion
        ) and not any(sign in criterion[0] for criterion in criteria for sign in _SIGNS):
            items = ",".join("=".join(criterion) for criterion in criteria)
            return f"{'any' if mode == 'any' else 'fields'}:{items}"
    return json.dumps(pattern, ensure_ascii=False)
