"""The guide's tests are tests: pytest runs them as a user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.running import blocks


@pytest.mark.moderate
def test_the_tests_of_the_guide_pass(tmp_path: Path) -> None:
    source = "\n\n".join(block for _, block in blocks("guides/testing.md", "python"))
    (tmp_path / "test_guide.py").write_text(source)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, check=False, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
