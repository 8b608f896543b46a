"""Parts of every micro-benchmark: a reference loop around it, and a place on the disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest

OUT = Path(__file__).parent.parent / "out"


def reference_ns() -> int:
    """Time a loop like those of the parts: dictionaries, small objects, copies; best of seven."""
    best, block = 1 << 62, bytes(4096)
    for _ in range(7):
        begun, table = perf_counter_ns(), {}
        for n in range(2000):
            table[n % 97] = (n, str(n), block[: n % 1024])
        best = min(best, perf_counter_ns() - begun)
    return best


@pytest.fixture(autouse=True)
def reference(benchmark: Any) -> Iterator[None]:
    """The machine's speed at this minute, so that ratios hold on another machine, too."""
    before = reference_ns()
    yield
    benchmark.extra_info["reference_ns"] = min(before, reference_ns())


@pytest.fixture
def per(benchmark: Any) -> Callable[..., None]:
    """Return a function that notes how many records and bytes a call handles."""

    def say(*, records: int, size: int = 0) -> None:
        benchmark.extra_info.update(records=records, bytes=size)

    return say


@pytest.fixture
def small(request: pytest.FixtureRequest) -> bool:
    """Whether the run only shows that the benchmarks run."""
    return bool(request.config.getoption("benchmark_disable"))


@pytest.fixture
def disk(tmp_path: Path, small: bool) -> Iterator[Path]:
    """Return a directory on the disk of the checkout, not in a memory file system."""
    if small:
        yield tmp_path
        return
    OUT.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="micro-", dir=OUT))
    try:
        yield path
    finally:
        shutil.rmtree(path)
