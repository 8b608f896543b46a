"""Fixtures of every test: isolation from the person's shell, and how hypothesis runs.

Owns nothing else; a fixture that one area needs lives in that area's folder.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# No deadline: the machine may be shared, and timings live in perf/. `quick` is what `make check`
# asks for, `fast` is what a local run uses; `thorough` is for CI, where a failure prints the blob
# that repeats it.
settings.register_profile("quick", deadline=None, max_examples=15, print_blob=True)
settings.register_profile("fast", deadline=None, max_examples=50)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=200,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
OLDEST = 2
"""Generation of which a collection looks at all objects that are not put aside."""
_looked_at_all = False

settings.load_profile("thorough" if os.environ.get("CI") else "fast")


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage a look at all tests that were collected."""
    gc.collect()
    gc.freeze()
    # 700, Python's own, took 18% of the processor time of the fast tests together with looks at all
    # that earlier tests had left.
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    gc.callbacks.append(_note_looks)


def _note_looks(phase: str, info: dict[str, int]) -> None:
    global _looked_at_all
    if phase == "stop" and info["generation"] == OLDEST:
        _looked_at_all = True


def pytest_runtest_logfinish() -> None:
    """Put aside what outlived a look at all objects: pytest keeps some of each test that ran."""
    global _looked_at_all
    if _looked_at_all:
        _looked_at_all = False
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard() -> None:
    """Have processes that tests start end at SIGINT, which a shell's background jobs ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_settings_of_the_person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the person's contexts and MALAMUTE_ variables; daemons started by tests inherit that."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MALAMUTE_")]:
            patch.delenv(name)
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(home / name.lower()))
        patch.setenv("NO_COLOR", "1")
        yield
