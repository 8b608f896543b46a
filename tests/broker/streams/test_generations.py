"""The generation of a stream: it rises with each stream that is made under the same name."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol import commands as wire
from malamute_py.changelog.effects import streams
from tests.broker.shell import Shell


def generation(shell: Shell, name: str) -> int:
    answer: Any = shell.send(1, wire.StreamInfo(3, name)).last(wire.Result)
    (entry,) = shell.send(1, wire.ListStreams(4, name)).last(wire.Result).value["streams"]
    found: int = answer.value["generation"]
    assert entry["generation"] == found
    return found


def remade(shell: Shell, name: str, **settings: Any) -> int:
    shell.send(1, wire.RemoveStream(2, name))
    shell.send(1, wire.CreateStream(3, name, settings))
    return generation(shell, name)


@pytest.mark.parametrize("settings", [{}, {"memory": True}, {"ring_bytes": 8 << 20}])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_stream_that_is_made_again_is_of_a_higher_generation(
    settings: dict[str, Any], snapshot: bool
) -> None:
    shell = Shell()
    shell.hello(1)
    shell.send(1, wire.CreateStream(1, "s", settings), wire.CreateStream(2, "other"))
    assert (generation(shell, "s"), generation(shell, "other")) == (1, 1)
    assert remade(shell, "s", **settings) == 2
    shell.send(1, wire.RemoveStream(2, "other"))
    if snapshot:
        shell.snapshot_now()
    shell.restart()
    shell.hello(1)
    assert generation(shell, "s") == 2
    shell.send(1, wire.CreateStream(2, "other"))
    assert generation(shell, "other") == 2
    assert remade(shell, "s") == 3


def test_a_generation_that_is_not_remembered_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "GENERATIONS_MAX", 2)
    shell = Shell()
    shell.hello(1)
    for name in "abc":
        shell.send(1, wire.CreateStream(1, name))
    assert [remade(shell, "a") for _ in range(3)] == [2, 3, 4]
    for name in "abc":
        shell.send(1, wire.RemoveStream(2, name))
    shell.send(1, wire.CreateStream(1, "a"))
    assert generation(shell, "a") == 5
    shell.send(1, wire.CreateStream(1, "b"), wire.CreateStream(2, "new"))
    assert (generation(shell, "b"), generation(shell, "new")) == (2, 5)
