"""Options that a caller of a pipeline gives by keyword.

Owns how they become those of the connector. The rule: values are text, as Spark has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark_malamute.options import TABLE


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options with their values as text, as Spark has them: true in lower case."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def of_source(options: Mapping[str, Any]) -> dict[str, str]:
    """The caller's options as those of the source, under the names in its table, as text.

    Raises OptionError: one is not known, or its value is wrong.
    """
    given, _, _ = TABLE.read(texts(options))
    return dict(given)
