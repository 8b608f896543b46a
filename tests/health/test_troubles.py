"""Troubles: which stands before which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from malamute_py.health.troubles import of_group, of_service


@pytest.mark.parametrize("lag", [1, 10**9, 10**15])
def test_however_far_a_group_is_behind_a_service_without_workers_comes_first(lag: int) -> None:
    """A lag of 900 million records came before it: the weight of one kind grew into the next."""
    group: Any = SimpleNamespace(stream="s", group="g", moved_ms=0, lag=lag, members=[], dead=0)
    service: Any = SimpleNamespace(
        name="v", waiting=1, oldest_ms=0, offers=0, credit=0, workers=[], dead=0
    )
    [behind] = of_group(cast("Any", group), 0.0)
    [unserved] = of_service(cast("Any", service), 0.0)
    assert unserved.weight > behind.weight
