"""Each block of code in the documents runs, and each command exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker
from tests.examples.running import DOCS, PAGES, blocks, run_page
from tests.house.checkout import ROOT
from tests.house.test_documents import check_command_line

WITH_CODE = [page for page in PAGES if blocks(page, "python")]
LINES = [
    (page, line.removeprefix("$ "))
    for page in PAGES
    for _, block in blocks(page, "console")
    for line in block.splitlines()
    if line.startswith("$ malamute ")
] + [
    (page, line)
    for page in PAGES
    for line in re.findall(r"`(malamute [a-z][^`\n]*)`", (DOCS / page).read_text())
    if line != "malamute console"  # the software of a link
]


def test_most_guides_have_code() -> None:
    assert {"start.md", "guides/streams.md", "guides/steps.md"} <= set(WITH_CODE)


@pytest.mark.moderate
@pytest.mark.parametrize("page", WITH_CODE)
def test_the_python_of_a_page_runs(page: str) -> None:
    with EmbeddedBroker(tcp=True) as broker:
        run_page(page, broker.tcp_endpoint)


@pytest.mark.parametrize(("page", "line"), LINES)
def test_each_command_of_a_page_exists(page: str, line: str) -> None:
    check_command_line(re.sub(r"'[^']*'|\"[^\"]*\"", "QUOTED", line).split()[1:])


@pytest.mark.system
def test_the_documents_are_built_without_a_warning(tmp_path: Path) -> None:
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path)]
    built = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, check=False, text=True
    )
    assert built.returncode == 0, built.stderr
    shown = (tmp_path / "reference" / "python.html").read_text()
    assert "malamute_py.Client.publish" in shown
    assert "malamute stream info" in (tmp_path / "reference" / "commands.html").read_text()
