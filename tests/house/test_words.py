"""Docstrings can be read by themselves: each begins with a noun or a verb.

The rule: a reader who has only this sentence understands it. A beginning of BEGINNINGS points at
the line above, or says that something follows instead of what it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.checkout import ROOT, committed_files

READ = (
    "hatch_build.py", "malamute_py/*.py", "malamute_py/changelog", "malamute_py/cli",
    "malamute_py/demo", "malamute_py/matcher", "malamute_py/promises", "malamute_py/server",
    "malamute_py/store", "perf", "protocol", "tests/*.py", "tests/attacks", "tests/cli",
    "tests/fuzz", "tests/house", "tests/matcher", "tests/perf", "tests/powerloss",
    "tests/promises", "tests/protocol", "tests/server", "tests/simulation", "tests/store",
    "tests/system", "tools",
)  # fmt: skip
"""Folders and files whose docstrings keep to the rule; others are added when they do."""
BEGINNINGS = re.compile(r"(Of|And|The same|These|Those|Who|What)\b")
NO_NOUNS = re.compile(r"\b(nobody|somebody|whoever)\b", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of each docstring of a file, also of constants and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


@pytest.mark.parametrize("place", READ)
def test_a_docstring_can_be_read_by_itself(place: str) -> None:
    folder, _, only_here = place.partition("/*")
    files = [
        path
        for path in committed_files()
        if path.suffix == ".py"
        and (path.parent == ROOT / folder if only_here else path.is_relative_to(ROOT / folder))
    ]
    assert files
    found = [
        f"{where}: {text.strip().splitlines()[0]}"
        for path in files
        for where, text in docstrings(path)
        if BEGINNINGS.match(text.strip()) or NO_NOUNS.search(text)
    ]
    assert not found
