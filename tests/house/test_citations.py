"""Citations in docstrings and documents: each is in the repository, down to the section."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.house.checkout import ROOT, committed_files, text_of

DESIGN = "docs/design.md"
SECTION = re.compile(rf"{re.escape(DESIGN)}(?:, (?P<one>[A-Z][^.;:()]*)| \((?P<several>[^)]*)\))")


@cache
def texts() -> dict[str, str]:
    """Return the documents and sources by their paths."""
    return {
        str(path.relative_to(ROOT)): text_of(path) or ""
        for path in committed_files()
        if path.suffix in {".md", ".py", ".toml"}
    }


@pytest.mark.moderate
def test_every_document_that_is_cited_is_in_the_repository() -> None:
    documents = {name.rpartition("/")[2] for name in texts() if name.endswith(".md")}
    missing = {
        f"{name} cites {cited}"
        for name, text in texts().items()
        for cited in re.findall(r"\b[\w-]+\.md\b", text)
        if cited not in documents
    }
    assert not missing


@pytest.mark.moderate
def test_every_section_of_the_design_that_is_cited_is_there() -> None:
    sections = set(re.findall(r"^## (.+)$", texts()[DESIGN], re.MULTILINE))
    cited = {
        (name, section.strip())
        for name, text in texts().items()
        if name.endswith(".py") and name != "tests/house/test_citations.py"
        for found in SECTION.finditer(" ".join(text.split()))
        for section in (found["one"] or found["several"]).split(";")
    }
    assert {section for _, section in cited} >= {"Journal", "Promises", "Matching"}
    assert not {(name, section) for name, section in cited if section not in sections}
