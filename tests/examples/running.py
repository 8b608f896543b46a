"""Runs a program of examples/ and a page of docs/ beside a broker of their own.

Owns how the Python of a page is run: its blocks are one program, and a client that names no
endpoint connects to the page's broker.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import malamute_py
from tests.house.checkout import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def example(name: str) -> ModuleType:
    """Return a program of examples/ as a module."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of a page in a language, each with the line that it begins at."""
    text = (DOCS / page).read_text()
    return [
        (text.count("\n", 0, found.start(1)) + 1, found.group(1))
        for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


def run_page(page: str, endpoint: str) -> dict[str, Any]:
    """Run the Python of a page, and return its names."""
    names: dict[str, Any] = {"__name__": "page"}
    connect = functools.partial(malamute_py.connect, endpoint)
    connect_sync = functools.partial(malamute_py.connect_sync, endpoint)
    with (
        patch.object(malamute_py, "connect", connect, create=True),
        patch.object(malamute_py, "connect_sync", connect_sync, create=True),
    ):
        for line, block in blocks(page, "python"):
            source = "\n" * (line - 1) + block
            exec(compile(source, str(Path("docs") / page), "exec"), names)
    return names
