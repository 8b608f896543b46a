"""The lowest versions that pyproject.toml admits, as a requirements file for pip.

Owns how the floors are read: `python tests/floors.py` prints each run-time requirement at its
lowest version, and the newest of the tools that the fast tests need. Spark, the demo and perf are
left out: they take the newest of what they need. The SDK of OpenTelemetry fits the API of its own
version only, and is printed at its lowest, too.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("arrow", "cli", "codecs", "http", "otel", "pandas", "polars", "server")
TOOLS = frozenset(
    {
        "hypothesis",
        "msgpack",
        "psutil",
        "pyyaml",
        "pytest",
        "pytest-asyncio",
        "pytest-rerunfailures",
        "pytest-timeout",
        "pytest-xdist",
    }
)

FITTING = "opentelemetry-sdk"


def floors(requirements: list[str]) -> list[str]:
    """Each requirement `name>=version` as `name==version`; extras of our own are left out."""
    named = (re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", each) for each in requirements)
    return [f"{match[1]}=={match[2]}" for match in named if match is not None]


def main() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    project = project["project"]
    optional = project["optional-dependencies"]
    lowest: list[str] = []
    for requirements in (project["dependencies"], *(optional[extra] for extra in EXTRAS)):
        wanted = [each for each in requirements if not each.startswith("malamute-py[")]
        found = floors(wanted)
        assert len(found) == len(wanted), f"a floor and no more in each of {wanted}"
        lowest += found
    lowest += floors([each for each in optional["dev"] if each.startswith(FITTING)])
    tools = [
        each
        for each in (*optional["dev"], *optional["perf"])
        if re.split(r"[>=\[]", each)[0] in TOOLS
    ]
    print("\n".join([*lowest, *tools]))


if __name__ == "__main__":
    main()
