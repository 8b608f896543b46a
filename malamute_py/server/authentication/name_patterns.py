"""Patterns of names in the configuration: of permissions, quotas and namespaces.

Owns their meaning. The rule: `*` stands for any characters, everything else for itself. Source:
SPEC.md, section 15.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from malamute_protocol.address import name_fault


def compiled(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return the expression that fits what one of the patterns fits; of no patterns: nothing."""
    expressions = [".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    return re.compile("|".join(expressions) if expressions else r"(?!)", re.DOTALL)


def pattern_fault(pattern: str) -> str:
    """Say why a pattern fits no name that there can be; "" when it may fit one."""
    if not pattern:
        return "a pattern must not be empty; '*' is for all"
    if not name_fault(pattern.replace("*", "x")):
        return ""
    return (
        f"{pattern!r} fits no name: a name is made of letters, digits and _ . : @ + = - and starts"
        " with a letter, a digit or _; in a pattern `*` stands for any characters"
    )


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits a name."""
    return compiled([pattern]).fullmatch(name) is not None
