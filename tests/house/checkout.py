"""The checkout as its own tests see it: where it is, what is committed, what pyproject.toml says.

Owns no rule; the tests beside it do.
"""

from __future__ import annotations

import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "malamute_protocol": ROOT / "protocol" / "malamute_protocol",
    "malamute_py": ROOT / "malamute_py",
    "pyspark_malamute": ROOT / "spark_connector" / "pyspark_malamute",
}
"""The import packages of the distribution and their folders."""


def pyproject() -> dict[str, Any]:
    """Return pyproject.toml as it stands in the checkout."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def committed_files() -> tuple[Path, ...]:
    """Return the files that git tracks, those deleted but not yet committed left out."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    paths = (ROOT / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file())


@cache
def text_of(path: Path) -> str | None:
    """Return a file's text, or None if it holds bytes that are no text."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
