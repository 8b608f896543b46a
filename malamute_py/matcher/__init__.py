"""The matcher: which patterns match a header, however many patterns there are.

`Index` holds the patterns of a stream; `scan.matches` is its simple twin for tests; `candidates`
narrows a replay to the batches that may match. A further kind of pattern subclasses `PatternKind`
and is made known by `register_kind`; kinds.py tells how. Imports the protocol and no module of the
broker. Source: docs/design.md, Matching.
"""

from malamute_py.matcher.candidates import ByKey, HeaderIndex, candidates
from malamute_py.matcher.combine import (
    AllKind,
    AndKind,
    CompiledPattern,
    NotKind,
    OrKind,
    asks_subjects_only,
    compile_pattern,
)
from malamute_py.matcher.expressions import RegexKind
from malamute_py.matcher.fields import FieldsKind
from malamute_py.matcher.index import Classing, Index
from malamute_py.matcher.kinds import PatternKind, install, register_kind, unregister_kind
from malamute_py.matcher.prefixes import PrefixKind
from malamute_py.matcher.rows import SubjectRows, rows_by_subject
from malamute_py.matcher.scan import matches
from malamute_py.matcher.topics import TopicKind

for _kind in (
    TopicKind(),
    PrefixKind(),
    RegexKind(),
    FieldsKind(),
    AndKind(),
    OrKind(),
    NotKind(),
    AllKind(),
):
    install(_kind)

__all__ = [
    "ByKey",
    "Classing",
    "CompiledPattern",
    "HeaderIndex",
    "Index",
    "PatternKind",
    "SubjectRows",
    "asks_subjects_only",
    "candidates",
    "compile_pattern",
    "matches",
    "register_kind",
    "rows_by_subject",
    "unregister_kind",
]
