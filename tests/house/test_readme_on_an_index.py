"""The README as a package index shows it has no link that leads nowhere."""

from __future__ import annotations

import re

import pytest

from hatch_readme import checked, on_an_index, urls
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


def test_a_path_of_the_repository_is_a_link_where_a_build_has_its_address() -> None:
    text = "[docs](docs/start.md#begin) ![a plot](perf/plot.svg) [figures](#figures)"
    address = "https://example.org/team/malamute"
    assert on_an_index(text, address).startswith(
        f"[docs]({address}/blob/HEAD/docs/start.md#begin) "
        f"![a plot]({address}/raw/HEAD/perf/plot.svg) figures\n"
    )


def test_the_urls_of_the_project_lead_to_files_that_there_are() -> None:
    address = checked("https://example.org/team/malamute/")
    found = urls(address)
    assert list(found) == ["Source", "Documentation", "Changelog", "Issues"]
    for label in ("Documentation", "Changelog"):
        assert (ROOT / found[label].removeprefix(f"{address}/blob/HEAD/")).is_file()
    assert urls("") == {}


@pytest.mark.parametrize("address", ["http://example.org/a/b", "example.org/a/b", "https://x"])
def test_an_address_that_is_none_ends_the_build(address: str) -> None:
    with pytest.raises(ValueError, match="MALAMUTE_PROJECT_URL"):
        checked(address)


def test_the_readme_has_no_such_link_left() -> None:
    shown = on_an_index((ROOT / "README.md").read_text())
    text = re.sub(r"^```.*?^```$", "", shown, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "malamute_py/journal/FORMAT.md" in text
