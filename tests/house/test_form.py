"""What is said to be compiled is, and the rest is plain.

`make test-compiled` runs this over build/compiled, with MALAMUTE_FORM=compiled.
"""

from __future__ import annotations

import importlib
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from malamute_py.form import compiled_modules
from tests.house.checkout import ROOT, pyproject

GROUPS = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["groups"]
MODULES = [module for group in GROUPS for module in group["modules"]]
COMPILED = os.environ.get("MALAMUTE_FORM") == "compiled"


@pytest.mark.parametrize("path", MODULES)
def test_a_listed_module_runs_in_the_form_that_is_meant(path: str) -> None:
    assert (ROOT / path).is_file()
    name = path.removesuffix(".py").removeprefix("protocol/").replace("/", ".")
    found = importlib.import_module(name).__file__
    assert found is not None
    assert found.endswith(tuple(EXTENSION_SUFFIXES)) == COMPILED


def test_the_form_is_told_by_what_lies_in_the_package() -> None:
    listed = [module for module in MODULES if module.startswith("malamute_py/")]
    assert compiled_modules() == (len(listed) if COMPILED else 0)


def test_nothing_compiled_lies_beside_the_sources() -> None:
    folders = {(ROOT / module).parent for module in MODULES}
    assert [path for folder in folders for path in Path(folder).glob("*.so")] == []
