"""The installed version and its form, and the form that runs: compiled by mypyc, or plain.

Tells which files lie in the packages' folders and which of them this process has loaded. The list
of compiled modules is in pyproject.toml, and both forms do the same (ARCHITECTURE.md). A measuring
person sets MALAMUTE_FORM, and a program that runs in another form than that must not go on.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import malamute_protocol

VARIABLE = "MALAMUTE_FORM"
"""Environment variable with the form that is meant: `compiled`, `plain`, or empty for either."""
PLAIN = "plain Python"
_SUFFIX = EXTENSION_SUFFIXES[0]
_PACKAGES = ("malamute_py", "malamute_protocol")


def version() -> str:
    """Return the version of the installed package; "unknown" where it is not installed."""
    try:
        return metadata.version("malamute-py")
    except metadata.PackageNotFoundError:
        return "unknown"


def compiled_modules() -> int:
    """Return how many modules of the installed packages are compiled; 0: all of them are plain."""
    folders = (Path(__file__).parent, Path(malamute_protocol.__file__).parent)
    return sum(1 for folder in folders for _ in folder.rglob(f"*{_SUFFIX}"))


def loaded_modules() -> int:
    """Return how many modules that this process has loaded until now are compiled."""
    return sum(
        name.partition(".")[0] in _PACKAGES
        and (getattr(module, "__file__", None) or "").endswith(_SUFFIX)
        for name, module in list(sys.modules.items())
    )


def form() -> str:
    """Say for people what is installed: "35 modules compiled", or "plain Python"."""
    return _word(compiled_modules())


def running_form() -> str:
    """Return the form of the modules that this process has loaded."""
    return _word(loaded_modules())


def another_than_asked(running: str) -> str:
    """Return an error text when MALAMUTE_FORM means another form than the running one, else "".

    running: as running_form() returns it.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked or (asked == "plain") == (running == PLAIN):
        return ""
    return f"{VARIABLE}={asked} was asked for, and this runs: {running}"


def _word(count: int) -> str:
    """Return the form for people, by how many modules are compiled."""
    return f"{count} modules compiled" if count else PLAIN
