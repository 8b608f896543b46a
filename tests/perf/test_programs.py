"""Programs beside the suite: each explains itself, and names the peers that it leaves out."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from perf import keys
from perf.peers.nats.server import Nats
from perf.peers.redis.server import Redis

PROGRAMS = sorted(
    path.stem
    for path in Path(keys.__file__).parent.glob("*.py")
    if "\ndef main(" in path.read_text("utf-8") and path.stem != "__main__"
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "spark":
        pytest.importorskip("pyspark")
    program = importlib.import_module(f"perf.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    first = str(program.__doc__).splitlines()[0]
    assert " ".join(first.split()) in " ".join(shown.split())


def test_the_programs_are_found() -> None:
    assert {"keys", "removal", "transactions"} <= set(PROGRAMS)


@pytest.mark.parametrize(("server", "mode"), [(Nats(), "jetstream"), (Redis(), "stream-sync")])
def test_keys_name_a_peer_whose_server_is_not_installed(
    server: Nats | Redis,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert not list(keys.peer(server.name, server, mode, tmp_path, 1, None))
    assert f"{server.name}: not measured: {server.name}-server is not" in capsys.readouterr().out
