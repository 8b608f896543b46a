"""The thread that validates batches: what becomes of a batch when it cannot be started."""

from __future__ import annotations

import threading

import pytest

from malamute_protocol.limits import Limits
from malamute_py.broker.ready import BatchCheck, BatchChecked
from malamute_py.server.result_queue import ResultQueue
from malamute_py.server.validating import Validator
from tests.waiting import until


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_system_without_room_for_the_thread_has_a_batch_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error was the loop's, and ended the broker."""
    results = ResultQueue()
    validator = Validator(results, Limits())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        validator.put(BatchCheck(1, b"", b""))
    assert results.take() == [BatchChecked(1, "wait", "can't start new thread")]
    validator.put(BatchCheck(2, b"", b""))
    until(lambda: results.waiting)
    (answer,) = results.take()
    assert (answer.token, answer.code != "wait") == (2, True), "the next one is looked at"
    validator.stop()
    results.close()
