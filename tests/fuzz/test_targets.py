"""The corpus of the guided fuzzer is read again, and hostile contents, without atheris."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from malamute_protocol.content import Content
from malamute_py.store.forms import FORMS, Form
from tests.fuzz import contents
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_was_found_raise_nothing_but_their_errors(name: str) -> None:
    target = TARGETS[name]
    seeds = list(target.seeds())
    assert len(seeds) >= 3
    for seed in seeds:
        target.read(seed)
        for cut in range(0, len(seed), max(1, len(seed) // 40)):
            target.read(seed[:cut])
    kept = CORPUS / name
    for path in sorted(kept.iterdir()) if kept.is_dir() else ():
        target.read(path.read_bytes())


@pytest.mark.slow
def test_hostile_contents_raise_nothing_but_their_errors() -> None:
    assert contents.run(1_500, 1) is None


@pytest.mark.slow
def test_many_hostile_contents_raise_nothing_but_their_errors() -> None:
    assert contents.run(20_000, 2) is None


def test_a_check_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Content, "check_codes", lambda self: None)
    assert any(contents.run(3_000, seed) is not None for seed in range(3))


def test_a_row_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(self: Form[Any, Any], data: bytes) -> Any:
        return self.read(data[4:])

    monkeypatch.setattr(type(FORMS[0]), "unpack", unpacked)
    target = TARGETS["checkpoint"]
    with pytest.raises(Exception, match=r".+"):
        target.read(b"\xc1" * 20)
