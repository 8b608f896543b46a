"""The manual page that the wheel has: made of the command tree."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from malamute_py.cli.commands import COMMANDS
from malamute_py.cli.man import _escaped, man_page
from tests.cli.running import run_cli
from tools.man_page import PAGE


@pytest.mark.moderate
def test_the_page_is_the_one_of_the_commands() -> None:
    assert PAGE.read_text() == man_page(), "make man"


@pytest.mark.moderate
def test_every_command_stands_in_it_with_its_options() -> None:
    page = man_page().replace("\\-", "-")
    for name in COMMANDS:
        assert f".SS malamute {name}" in page, name
    assert "--no-keys" in page
    assert page.count("\n\\fB--endpoint URL\\fR\n") == 1


def test_text_that_roff_would_read_as_a_request_is_text() -> None:
    assert _escaped(".so /etc/passwd") == r"\&.so /etc/passwd"
    assert _escaped("a\\b - c") == r"a\eb \- c"


@pytest.mark.moderate
def test_the_command_prints_it() -> None:
    assert run_cli("--man").ok().out == man_page()


@pytest.mark.moderate
@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_nothing_to_say_against_it() -> None:
    told = subprocess.run(
        ["groff", "-man", "-ww", "-z", str(PAGE)], capture_output=True, check=True, text=True
    )
    assert told.stderr == ""
