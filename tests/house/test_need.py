"""tests/need, with programs of our own on the PATH in place of the machine's.

The rule: missing programs are installed where that can be done (Debian, root), and otherwise named
with the command to type. Nothing here touches the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.house.checkout import ROOT

if TYPE_CHECKING:
    from pathlib import Path


class Machine:
    """A folder of programs that is the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        bash = shutil.which("bash")
        assert bash is not None
        (folder / "bash").symlink_to(bash)
        self.has("id", "echo 1000")

    def has(self, name: str, script: str) -> None:
        program = self.folder / name
        program.write_text(f"#!{self.folder}/bash\n{script}\n")
        program.chmod(0o755)

    def has_java(self, version: str) -> None:
        self.has("java", f"echo 'openjdk version \"{version}\" 2025-04-15' >&2")

    def has_apt_that_brings(self, *names: str) -> None:
        bring = "; ".join(f": > {self.folder}/{name}.brought" for name in names)
        self.has("apt-get", f'echo "$@" >> {self.log}; [ "$1" = update ] || {{ {bring}; true; }}')
        for name in names:
            answer = "echo 'openjdk version \"17.0.15\"' >&2" if name == "java" else "true"
            self.has(name, f"[ -e {self.folder}/{name}.brought ] || exit 127; {answer}")

    def need(self, what: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder), "HOME": str(self.folder)}
        return subprocess.run(
            [str(self.folder / "bash"), str(ROOT / "tests" / "need"), what],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("version", ["17.0.15", "21.0.2", "25"])
def test_a_java_that_spark_can_use_is_left_as_it_is(machine: Machine, version: str) -> None:
    machine.has_java(version)
    machine.has_apt_that_brings()
    assert machine.need("java").returncode == 0
    assert machine.log.read_text() == ""


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.22"])
def test_a_java_too_old_for_spark_is_not_enough(machine: Machine, version: str) -> None:
    machine.has_java(version)
    assert machine.need("java").returncode == 1


def test_a_missing_java_is_installed_on_debian_as_root(machine: Machine) -> None:
    machine.has("id", "echo 0")
    machine.has_apt_that_brings("java")
    result = machine.need("java")
    assert result.returncode == 0, result.stderr
    update, install = machine.log.read_text().splitlines()
    assert update.startswith("update")
    assert install.startswith("install")
    assert install.endswith("openjdk-17-jre-headless")


def test_a_missing_java_is_named_with_the_command_to_type_when_not_root(machine: Machine) -> None:
    machine.has("apt-get", f'echo "$@" >> {machine.log}')
    result = machine.need("java")
    assert result.returncode == 1
    assert "Java 17" in result.stderr
    assert "sudo" in result.stderr
    assert "openjdk-17-jre-headless" in result.stderr
    assert machine.log.read_text() == ""


@pytest.mark.parametrize("what", ["java", "node", "prometheus"])
def test_what_is_missing_is_named_where_there_is_no_apt(machine: Machine, what: str) -> None:
    result = machine.need(what)
    assert result.returncode == 1
    assert "missing" in result.stderr
    assert "apt-get install" in result.stderr


def test_an_install_that_brings_nothing_fails(machine: Machine) -> None:
    machine.has("id", "echo 0")
    machine.has("apt-get", "true")
    assert machine.need("java").returncode == 1


def test_node_without_npm_is_not_enough(machine: Machine) -> None:
    machine.has("node", "true")
    assert machine.need("node").returncode == 1
    machine.has("npm", "true")
    assert machine.need("node").returncode == 0


def test_prometheus_without_its_tool_is_not_enough(machine: Machine) -> None:
    machine.has("prometheus", "true")
    assert machine.need("prometheus").returncode == 1
    machine.has("promtool", "true")
    assert machine.need("prometheus").returncode == 0


def test_an_unknown_need_is_a_usage_error(machine: Machine) -> None:
    result = machine.need("ruby")
    assert result.returncode == 2
    assert "usage" in result.stderr
    assert os.access(ROOT / "tests" / "need", os.X_OK)
