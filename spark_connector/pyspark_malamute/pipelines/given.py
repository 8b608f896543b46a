"""Options that a caller of a pipeline gives by keyword.

Owns how they become those of the connector. The rule: values are text, as Spark has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark_malamute.options import TABLE


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """The options with their values as text."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def of_source(options: Mapping[str, Any]) -> dict[str, str]:
    """The options of the source under their own names. Raises OptionError."""
    given, _, _ = TABLE.read(texts(options))
    return dict(given)
