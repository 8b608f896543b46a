"""Fixtures of every test: isolation from the person's own settings, and how hypothesis runs.

Owns nothing else; a fixture that one area needs lives in that area's folder.
"""

from __future__ import annotations

import gc
import os
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
settings.load_profile("thorough" if os.environ.get("CI") else "fast")


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage a look at all tests that were collected."""
    gc.collect()
    gc.freeze()


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
