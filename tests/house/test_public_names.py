"""The public names: each explains itself, and its annotations can be read by a program.

The rule: help() and inspect, editors and frameworks read annotations at run time; a name that only
a type checker imports fails there.
"""

from __future__ import annotations

import inspect
import pydoc
import typing

import pytest

import malamute_py as malamute

CLASSES = [name for name in malamute.__all__ if inspect.isclass(getattr(malamute, name))]
ALIASES = {
    "AckWhen", "ConfirmAt", "GroupKind", "GroupVisibility", "Notice", "OnError", "Pattern",
    "ReadVisibility", "Until",
}  # fmt: skip
"""Names of types that have no name of their own at run time."""
OPTIONAL = {"Batch.to_arrow"}
"""Methods whose annotations name a package that an extra brings."""


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
    if not issubclass(cls, BaseException) or "__init__" in vars(cls):
        inspect.signature(cls)
