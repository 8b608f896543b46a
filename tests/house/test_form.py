"""Modules that are said to be compiled are, and the others are plain.

`make test-compiled` runs this over build/compiled, with MALAMUTE_FORM=compiled.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import msgspec
import pytest

from malamute_py.form import (
    PLAIN,
    VARIABLE,
    another_than_asked,
    compiled_modules,
    loaded_modules,
    running_form,
)
from tests.house.checkout import ROOT, pyproject

GROUPS = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["groups"]
MODULES = [module for group in GROUPS for module in group["modules"]]
COMPILED = os.environ.get(VARIABLE) == "compiled"


def module_name(path: str) -> str:
    return path.removesuffix(".py").removeprefix("protocol/").replace("/", ".")


@pytest.mark.parametrize("path", MODULES)
def test_a_listed_module_runs_in_the_form_that_is_meant(path: str) -> None:
    assert (ROOT / path).is_file()
    found = importlib.import_module(module_name(path)).__file__
    assert found is not None
    assert found.endswith(tuple(EXTENSION_SUFFIXES)) == COMPILED


@pytest.mark.parametrize("path", MODULES)
def test_a_struct_of_a_compiled_module_names_no_class_that_comes_later(path: str) -> None:
    # What mypyc makes of such a module ends the process when it is imported.
    module = importlib.import_module(module_name(path))
    classes = [node for node in ast.parse((ROOT / path).read_text()).body
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    later = {node.name for node in classes}
    for node in classes:
        later.discard(node.name)
        if issubclass(getattr(module, node.name), msgspec.Struct):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            assert not later & {ast.unparse(field.annotation) for field in fields}, node.name


@pytest.mark.parametrize("path", MODULES)
def test_a_compiled_module_claims_no_type_that_mypyc_would_check(path: str) -> None:
    # Compiled, cast() raises TypeError where the object is of another type: of answers that were
    # encoded before and cast to a dict, each ended its link.
    tree = ast.parse((ROOT / path).read_text())
    called = {
        ast.unparse(node.func).removeprefix("typing.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert "cast" not in called


@pytest.mark.parametrize("path", MODULES)
def test_a_class_of_a_compiled_module_has_no_keyword(path: str) -> None:
    # mypyc drops it: a Struct with eq=False would compare by identity in the plain form alone.
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ClassDef):
            assert not node.keywords, node.name


def test_the_form_is_told_by_what_lies_in_the_packages() -> None:
    assert compiled_modules() == (len(MODULES) if COMPILED else 0)


def test_a_process_tells_what_it_has_loaded() -> None:
    importlib.import_module("malamute_protocol.content")
    assert (loaded_modules() > 0) == COMPILED
    assert (running_form() == PLAIN) != COMPILED


@pytest.mark.parametrize(
    ("asked", "running", "wrong"),
    [
        ("compiled", PLAIN, True),
        ("compiled", "35 modules compiled", False),
        ("plain", "35 modules compiled", True),
        ("plain", PLAIN, False),
        ("", PLAIN, False),
    ],
)
def test_a_form_that_was_not_asked_for_is_told(
    asked: str, running: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    assert bool(another_than_asked(running)) == wrong


@pytest.mark.moderate
def test_a_driver_ends_in_failure_in_another_form_than_the_one_asked_for() -> None:
    other = "plain" if COMPILED else "compiled"
    command = [sys.executable, "-m", "perf.peers.malamute.python_driver", "role=publish", "url=x"]
    environment = {**os.environ, VARIABLE: other}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"{VARIABLE}={other} was asked for" in done.stderr


def test_nothing_compiled_lies_beside_the_sources() -> None:
    folders = {(ROOT / module).parent for module in MODULES}
    assert [path for folder in folders for path in Path(folder).glob("*.so")] == []


def test_tests_that_the_compiled_modules_are_spared_are_there() -> None:
    text = (ROOT / "Makefile").read_text()
    begin, end = text.index("LOOK_INSIDE :="), text.index("test-compiled:")
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text[begin:end])
    assert len(named) > 15
    for path, test in named:
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test
        assert (ROOT / path).is_file()
