"""Patterns of names in the configuration: of permissions, quotas and namespaces.

Owns their meaning. The rule: `*` stands for any characters, everything else for itself. Source:
SPEC.md, section 15.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def compiled(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return the expression that fits what one of the patterns fits; of no patterns: nothing."""
    expressions = [".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    return re.compile("|".join(expressions) if expressions else r"(?!)", re.DOTALL)


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits a name."""
    return compiled([pattern]).fullmatch(name) is not None
