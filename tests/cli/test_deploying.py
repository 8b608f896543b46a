"""`malamute deploy`: files to run a broker with, as they lie in deploy/."""

from __future__ import annotations

from pathlib import Path

import pytest

from malamute_py.cli.deploying import KITS, contents
from tests.cli.running import run_cli
from tests.house.checkout import ROOT

DEPLOY = ROOT / "deploy"


def test_what_there_is_is_listed_with_a_line_each() -> None:
    outcome = run_cli("deploy")
    assert [line.split("\t")[0] for line in outcome.lines] == list(KITS)
    assert all(line.split("\t")[1].endswith(".") for line in outcome.lines)


@pytest.mark.parametrize("kit", KITS)
def test_the_files_of_a_kit_are_written(kit: str, tmp_path: Path) -> None:
    outcome = run_cli("deploy", kit, "--to", str(tmp_path / "new" / "folder"))
    assert outcome.code == 0
    written = {Path(line) for line in outcome.lines}
    assert written == {path for path in tmp_path.rglob("*") if path.is_file()}
    assert written
    known = {path.read_bytes() for path in DEPLOY.rglob("*") if path.is_file()}
    assert {path.read_bytes() for path in written} <= known


def test_every_file_of_deploy_belongs_to_a_kit() -> None:
    shipped = {content for kit in KITS for content in contents(kit).values()}
    left = {
        str(path.relative_to(DEPLOY))
        for path in DEPLOY.rglob("*")
        if path.is_file() and path.read_bytes() not in shipped
    }
    assert left == {"metrics.md"}


def test_a_file_that_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    there = tmp_path / "alerts.yml"
    there.write_text("mine")
    refused = run_cli("deploy", "prometheus", "--to", str(tmp_path))
    assert refused.code == 1
    assert f"{there} is there; nothing was written (--force replaces alerts.yml)" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["alerts.yml"]
    assert there.read_text() == "mine"
    assert run_cli("deploy", "prometheus", "--to", str(tmp_path), "--force").code == 0
    assert there.read_text() != "mine"


def test_an_unknown_name_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    outcome = run_cli("deploy", "helm", "--to", str(tmp_path))
    assert outcome.code == 2
    assert "there is no 'helm'; there are config, systemd" in outcome.err
