"""The connector as one file for `--py-files`.

Owns what is in it: the sources of the three packages. The rule: what these need besides has native
parts, which Python cannot import from a zip, and must be installed where executors run.
Source: docs/guides/spark-cluster.md.
"""

from __future__ import annotations

import zipfile
from importlib import import_module
from pathlib import Path
from typing import Final

PACKAGES: Final = ("malamute_protocol", "malamute_py", "pyspark_malamute")
NEEDED: Final = ("google-crc32c", "msgspec", "numpy", "pyarrow", "pyzmq")
"""Distributions that executors need beside the file; a compressed stream needs its codec, too."""
_MADE: Final = (1980, 1, 1, 0, 0, 0)
"""Date of each file in the zip, the first that a zip can say: equal files make equal bytes."""


def build_zip(file: Path) -> int:
    """Write the connector's sources into a zip, the same bytes each time; return how many files."""
    count = 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in PACKAGES:
            home = Path(import_module(name).__path__[0])
            for path in sorted(home.rglob("*.py")):
                entry = zipfile.ZipInfo(f"{name}/{path.relative_to(home)}", _MADE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
                count += 1
    return count
