"""The thread that speaks to the checkpoint's process: what becomes of it when it cannot start."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from malamute_py.config import CheckpointSection
from malamute_py.server.checkpointing.process import CheckpointFailed, CheckpointProcess
from malamute_py.server.result_queue import ResultQueue
from malamute_py.store.follow import Follow
from tests.waiting import until


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.moderate
def test_a_system_without_room_for_the_thread_costs_one_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was the loop's, and ended the broker."""
    results = ResultQueue()
    process = CheckpointProcess(tmp_path, CheckpointSection(), results)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        process.ask(Follow(0, []))
    failed = CheckpointFailed("died", "no thread could be started: can't start new thread")
    assert results.take() == [failed]
    process.ask(Follow(0, []))
    until(lambda: results.waiting)
    (answer,) = results.take()
    assert isinstance(answer, CheckpointFailed), "there is no log to follow"
    assert answer != failed
    process.stop(time.monotonic() + 10)
    results.close()
