"""The public names: each explains itself, and its annotations can be read by a program.

The rule: help() and inspect, editors and frameworks read annotations at run time; a name that only
a type checker imports fails there.
"""

from __future__ import annotations

import ast
import inspect
import pydoc
import typing
from pathlib import Path

import pytest

import malamute_py as malamute
from malamute_protocol import errors
from tests.house.checkout import ROOT

CLASSES = [name for name in malamute.__all__ if inspect.isclass(getattr(malamute, name))]
ALIASES = {
    "AckWhen", "Bodies", "Body", "ConfirmAt", "Credential", "Fields", "GroupKind",
    "GroupVisibility", "LinkEvent", "Notice", "OnError", "Pattern", "Properties", "ReadVisibility",
    "StartPoint", "Time", "Until", "Wait",
}  # fmt: skip
"""Names of types that have no name of their own at run time."""
OPTIONAL = {
    "Batch.to_arrow", "Batch.to_pandas", "Batch.to_polars", "HeldBatch.to_arrow",
    "HeldBatch.to_pandas", "HeldBatch.to_polars", "Tracing.context_of",
}  # fmt: skip
"""Methods whose annotations name a package that an extra brings."""
CLIENT = ROOT / "malamute_py" / "client"
SHELLS = sorted(path for pattern in ("aio/*.py", "sync/*.py") for path in CLIENT.glob(pattern))


@pytest.mark.parametrize("name", malamute.__all__)
def test_help_explains_a_public_name(name: str) -> None:
    explained = pydoc.plain(pydoc.render_doc(getattr(malamute, name)))
    assert name in explained or name in ALIASES


@pytest.mark.parametrize("name", CLASSES)
def test_annotations_of_a_public_class_can_be_read(name: str) -> None:
    cls = getattr(malamute, name)
    typing.get_type_hints(cls)
    for method, value in inspect.getmembers(cls, inspect.isfunction):
        if not method.startswith("_") and f"{name}.{method}" not in OPTIONAL:
            inspect.signature(value)
            typing.get_type_hints(value)


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_of_a_public_class_can_be_read(name: str) -> None:
    cls = getattr(malamute, name)
    if typing.is_typeddict(cls):
        return  # Its keys are compared.
    if not issubclass(cls, BaseException) or "__init__" in vars(cls):
        inspect.signature(cls)


def unused(path: Path) -> set[str]:
    """Return the parameters of public methods in a module that their bodies never read."""
    found = set()
    for cls in ast.walk(ast.parse(path.read_text())):
        if not isinstance(cls, ast.ClassDef) or any(
            isinstance(base, ast.Name) and base.id == "Protocol" for base in cls.bases
        ):
            continue
        for method in cls.body:
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if method.name.startswith("_"):
                continue
            given = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
            read = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
            found |= {
                f"{path.relative_to(CLIENT)}: {cls.name}.{method.name}({one.arg})"
                for one in given
                if one.arg not in read | {"self", "cls"}
            }
    return found


@pytest.mark.parametrize("path", SHELLS, ids=lambda path: str(path.relative_to(CLIENT)))
def test_a_shell_uses_every_argument_that_it_takes(path: Path) -> None:
    assert not unused(path)


def test_what_ends_by_time_or_with_the_link_is_what_python_calls_so() -> None:
    assert issubclass(errors.Timeout, TimeoutError)
    assert issubclass(errors.ConnectionLost, ConnectionError)
    assert str(errors.Timeout("no answer within 5 s")) == "no answer within 5 s"
