"""`malamute spark ...` before Spark is started."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.cli.running import run_cli


def test_a_wrong_pace_is_refused_before_spark_starts() -> None:
    told = run_cli("spark", "replay", "/no", "--into", "x", "--name", "n", "--pace", "fast")
    assert told.code == 2
    assert "--pace fast: write flat, real, or a factor such as 2x" in told.err


def test_a_command_that_asks_no_broker_takes_no_endpoint() -> None:
    told = run_cli("spark", "compact", "/no", "--endpoint", "tcp://127.0.0.1:1")
    assert told.code == 2
    assert "--endpoint" in told.err


def test_without_java_one_line_says_what_is_missing(tmp_path: Path) -> None:
    told = run_cli("spark", "compact", "/no", env={"PATH": str(tmp_path), "JAVA_HOME": ""})
    assert (told.code, "Spark needs Java 17 or later" in told.err) == (1, True)


@pytest.mark.moderate
def test_the_package_says_what_executors_need_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "malamute.zip"
    told = run_cli("spark", "package", str(file)).ok()
    assert told.out.endswith("google-crc32c, msgspec, numpy, pyarrow, pyzmq installed\n")
    assert "pyspark_malamute/__init__.py" in zipfile.ZipFile(file).namelist()
