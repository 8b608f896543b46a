"""The contents of the distribution: three typed packages, each import declared, nothing else.

The rule: a user who installs the distribution, with or without an extra, can import what that extra
promises; an optional package is imported only where it is used.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.house.checkout import PACKAGES, ROOT, pyproject

PROJECT = pyproject()["project"]


def distribution_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[._-]+", "-", match.group()).lower()


@cache
def declared(*extras: str) -> set[str]:
    """Return the distributions that the core and these extras bring, extras of extras included."""
    names = {distribution_name(requirement) for requirement in PROJECT["dependencies"]}
    for extra in extras:
        for requirement in PROJECT["optional-dependencies"][extra]:
            if distribution_name(requirement) != "malamute-py":
                names.add(distribution_name(requirement))
                continue
            nested = re.search(r"\[(.*)\]", requirement)
            assert nested is not None
            names |= declared(*nested.group(1).split(","))
    return names


RUN_TIME_EXTRAS = [extra for extra in PROJECT["optional-dependencies"] if extra != "dev"]


def imported_at_import_time(tree: ast.Module) -> set[str]:
    """Return top-level names imported with the module, `if TYPE_CHECKING:` blocks left out."""
    names: set[str] = set()
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif isinstance(node, ast.If):
            pending.extend([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            # An import that may fail is an optional one.
            pending.extend([*node.orelse, *node.finalbody])
    return names


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All statements, however deep: an import is one, and no expression holds any."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, ())
            # The body of a lambda or of a conditional expression is no list.
            pending.extend(inner if isinstance(inner, list) else ())


def imported_anywhere(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


@cache
def _providers() -> Mapping[str, list[str]]:
    """Return top-level name -> distributions; reading all metadata takes half a second."""
    return {**packages_distributions(), **SHARED}


SHARED = {"opentelemetry": ["opentelemetry-api"]}
"""Top-level name that several distributions share -> the one that is imported from."""


def foreign(names: set[str]) -> set[str]:
    """Return the distributions of these top-level names that are neither ours nor Python's."""
    return {
        re.sub(r"[._-]+", "-", _providers().get(name, [name])[0]).lower()
        for name in names
        if name not in sys.stdlib_module_names and name not in PACKAGES and name != "__future__"
    }


BROKER_PARTS = (
    "broker",
    "config",
    "embedded.py",
    "journal",
    "mapped",
    "matcher",
    "server",
    "store",
    "telemetry.py",
)
"""Files and folders of malamute_py that only a broker imports."""


def extras_of_the_place(path: Path) -> list[str]:
    """Return the extras without which this module is not meant to be imported."""
    if path.is_relative_to(PACKAGES["pyspark_malamute"]):
        return ["spark"]
    if path.is_relative_to(PACKAGES["malamute_py"] / "demo"):
        return ["demo", "spark"]
    if path.parent == PACKAGES["malamute_protocol"] and path.stem in ("arrow", "arrow_check"):
        return ["arrow"]
    if path.is_relative_to(PACKAGES["malamute_py"] / "cli"):
        return ["cli"]
    if path.name in ("spans.py", "traced.py"):
        return ["otel"]
    if path.is_relative_to(PACKAGES["malamute_py"] / "http"):
        return ["http"]
    if any(path.is_relative_to(PACKAGES["malamute_py"] / part) for part in BROKER_PARTS):
        return ["server"]
    return []


SOURCES = [path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))]


@pytest.mark.moderate
def test_every_import_is_of_a_declared_dependency_and_each_of_the_core_is_imported() -> None:
    unused = set(declared())
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        assert foreign(imported_at_import_time(tree)) <= declared(*extras_of_the_place(path)), path
        anywhere = foreign(imported_anywhere(tree))
        assert anywhere <= declared(*RUN_TIME_EXTRAS), path
        unused -= anywhere
    assert not unused


@pytest.mark.slow
def test_the_wheel_holds_three_typed_packages_and_the_licence(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if name != "MALAMUTE_COMPILE"},
    )
    (wheel,) = tmp_path.glob("*.whl")
    check = Path(sys.executable).parent / "check-wheel-contents"  # as `make dist` does
    checked = subprocess.run([check, wheel], cwd=ROOT, capture_output=True, check=False, text=True)
    assert checked.returncode == 0, checked.stdout
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == set(PACKAGES)
    assert any(name.endswith(".data/data/share/man/man1/malamute.1") for name in names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    deploy = ROOT / "deploy"
    files = (path.relative_to(deploy) for path in deploy.rglob("*") if path.is_file())
    assert {f"malamute_py/deploy/{path}" for path in files} <= set(names)
    for path in SOURCES:
        (folder,) = (folder for folder in PACKAGES.values() if path.is_relative_to(folder))
        assert str(path.relative_to(folder.parent)) in names


@pytest.mark.moderate
def test_the_installed_version_is_that_of_pyproject() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('malamute-py'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert printed == PROJECT["version"], "run `make setup`"
