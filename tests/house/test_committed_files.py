"""No committed file knows the machine or the registries of its authors.

The rule: a fresh clone elsewhere, behind other mirrors, behaves the same. Hosts are spelled in
pieces here, for this file is committed too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.house.checkout import ROOT, committed_files, text_of

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("npmjs", "org"),
    ("npmjs", "com"),
    ("yarnpkg", "com"),
    ("deb", "debian", "org"),
    ("security", "debian", "org"),
    ("crates", "io"),
    ("conda", "anaconda", "org"),
]
REGISTRY = re.compile(r"\b(" + "|".join(r"\.".join(parts) for parts in HOSTS) + r")\b")

# Only a path at the start of a word: a folder that is called `work` may lie anywhere.
MACHINE = re.compile(r"(?<![\w.}\-])/(work|root|farm|home/\w+|opt/(pypi|wheels)[\w-]*|tmp/\w)")


def files() -> list[Path]:
    return [path for path in committed_files() if path.name != "LICENSE"]


def hits(pattern: re.Pattern[str], path: Path) -> list[str]:
    text = text_of(path)
    if text is None or not pattern.search(text):
        return []
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.moderate
def test_no_committed_file_names_a_registry_host() -> None:
    assert [hit for path in files() for hit in hits(REGISTRY, path)] == []


@pytest.mark.moderate
def test_no_committed_file_names_a_path_of_one_machine() -> None:
    assert [hit for path in files() for hit in hits(MACHINE, path)] == []


def test_no_committed_file_is_larger_than_a_megabyte() -> None:
    assert [str(path) for path in files() if path.stat().st_size > 1_000_000] == []


@pytest.mark.parametrize("name", [".".join(parts) for parts in HOSTS])
def test_each_registry_host_would_be_found(name: str) -> None:
    assert REGISTRY.search(f"see https://{name}/simple")


@pytest.mark.parametrize("path", ["main", "x.toml"])
@pytest.mark.parametrize("folder", ["work", "root", "home/ann", "opt/wheels", "tmp"])
def test_each_kind_of_machine_path_would_be_found(folder: str, path: str) -> None:
    assert MACHINE.search(f'open("/{folder}/{path}")')
    assert not MACHINE.search(f"tests/{folder}/{path}")
