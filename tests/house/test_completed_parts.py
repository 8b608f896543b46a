"""No part is completed from outside: what an object calls is given when it is made.

Two parts that know each other are a circle that no import shows, once the one puts its own method
into an attribute of the other. A part takes what it calls in its constructor, or in a call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.checkout import PACKAGES, ROOT

MADE = "malamute_py/client/sync/"
"""Generated from aio/, which is read."""


def sources() -> dict[str, ast.Module]:
    paths = [path for folder in PACKAGES.values() for path in Path(folder).rglob("*.py")]
    names = {str(path.relative_to(ROOT)): path for path in paths}
    return {n: ast.parse(path.read_text()) for n, path in names.items() if not n.startswith(MADE)}


def attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Attributes that classes set or declare, each with its type as far as it is written down."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            written = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, written
            elif isinstance(target, ast.Name) and written:
                yield target.id, written


def own_methods(tree: ast.Module) -> set[str]:
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not node.decorator_list
    }


def hands_over_itself(value: ast.expr, methods: set[str]) -> bool:
    """Whether a value is the object that assigns it, or a method of that object."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "partial":
        value = value.args[0]
    if isinstance(value, ast.Attribute):
        return ast.unparse(value.value) == "self" and value.attr in methods
    return isinstance(value, ast.Name) and value.id == "self"


def completed(trees: dict[str, ast.Module]) -> list[str]:
    known = {name: list(attributes(tree)) for name, tree in trees.items()}
    kinds = [(attr, "Callable[" in written) for each in known.values() for attr, written in each]
    functions = {attr for attr, function in kinds if function}
    functions -= {attr for attr, function in kinds if not function}
    found = []
    for name, tree in trees.items():
        methods = own_methods(tree)
        elsewhere = functions - {attr for attr, _ in known[name]}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign) or isinstance(node.value, ast.Constant):
                continue
            for target in node.targets:
                if not isinstance(target, ast.Attribute) or ast.unparse(target.value) == "self":
                    continue
                if hands_over_itself(node.value, methods) or target.attr in elsewhere:
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.moderate
def test_no_part_is_completed_by_another_after_it_was_made() -> None:
    assert not completed(sources())


def test_a_part_that_is_completed_by_another_is_found() -> None:
    lower = "class Lower:\n    def __init__(self):\n        self.told: Callable[[], None] = print\n"
    upper = "class Upper:\n    def use(self, lower, other):\n        {}\n    def hear(self): ...\n"

    def found(line: str) -> int:
        trees = {"lower.py": ast.parse(lower), "upper.py": ast.parse(upper.format(line))}
        return len(completed(trees))

    assert found("lower.told = other") == 1
    assert found("lower.anything = self.hear") == 1
    assert found("lower.anything = partial(self.hear, 1)") == 1
    assert found("lower.owner = self") == 1
    assert found("lower.count = self.count") == 0
    assert found("self.told = self.hear") == 0
