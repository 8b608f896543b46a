"""Keys of a stream that keeps the last record of each subject.

Owns the field that makes a record a deletion marker. Source: SPEC.md, section 8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LAST_PER_SUBJECT: Final = "last-per-subject"
"""Value of a stream's setting `keep`."""
DELETION_FIELD: Final = "kv-deleted"
"""Field of a deletion marker: a record that has it says that there is no such key any more."""


def is_deletion(fields: Iterable[tuple[str, str]]) -> bool:
    """Whether the fields of a record, as pairs, make it a deletion marker: its key is gone."""
    return any(name == DELETION_FIELD for name, _ in fields)
