"""Which form of the hot modules is installed: compiled by mypyc, or plain Python.

Owns nothing; tells what lies in the package's folders. The list of what is compiled is in
pyproject.toml, and both forms do the same (ARCHITECTURE.md).
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def compiled_modules() -> int:
    """How many of the modules beside this one are compiled; 0: all of them are plain."""
    return sum(1 for _ in Path(__file__).parent.rglob(f"*{EXTENSION_SUFFIXES[0]}"))


def form() -> str:
    """A word for people: "31 modules compiled", or "plain Python"."""
    count = compiled_modules()
    return f"{count} modules compiled" if count else "plain Python"
