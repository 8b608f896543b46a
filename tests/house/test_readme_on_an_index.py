"""The README as a package index shows it has no link that leads nowhere."""

from __future__ import annotations

import re

import pytest

from hatch_readme import on_an_index
from tests.house.checkout import ROOT


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [the docs](docs/start.md#begin) and [a page](https://example.org/)",
         "see the docs and [a page](https://example.org/)"),
        ("![a plot](perf/plot.svg)", ""),
        ("[figures](#figures)", "figures"),
        ("```python\nrow[0](x)\n```", "```python\nrow[0](x)\n```"),
    ],
)  # fmt: skip
def test_a_path_of_the_repository_is_no_link(text: str, shown: str) -> None:
    assert on_an_index(text).startswith(shown + "\nPaths in this text")


def test_the_readme_has_no_such_link_left() -> None:
    shown = on_an_index((ROOT / "README.md").read_text())
    text = re.sub(r"^```.*?^```$", "", shown, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "malamute_py/journal/FORMAT.md" in text
