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

from tests.house.checkout import ROOT, committed_files, text_of

BEGINNINGS = re.compile(r"(Of|And|The same|These|Those|Who|What)\b")
SUSPECT = re.compile(rf"\"\s*{BEGINNINGS.pattern}")
"""A text without it, and without NO_NOUNS, need not be parsed."""
NO_NOUNS = re.compile(r"\b(nobody|somebody|whoever)\b", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of each docstring of a file, also of constants and attributes."""
    source = text_of(path) or ""
    if not SUSPECT.search(source) and not NO_NOUNS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


@pytest.mark.moderate
def test_a_docstring_can_be_read_by_itself() -> None:
    found = [
        f"{where}: {text.strip().splitlines()[0]}"
        for path in committed_files()
        if path.suffix == ".py"
        for where, text in docstrings(path)
        if BEGINNINGS.match(text.strip()) or NO_NOUNS.search(text)
    ]
    assert not found
