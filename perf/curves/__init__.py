"""Scaling curves: the cost of a record against the number of everything else.

Each curve is a module with a `PLAN`; `CURVES` has them in the order of the report. A cost that
grows in proportion where it need not is a defect of the product.
"""

from __future__ import annotations

from typing import Final

from perf.curves import (
    backlog,
    clients,
    groups,
    headers,
    journal_size,
    mailboxes,
    streams,
    subscriptions,
)
from perf.curves.curve import Curve, Line, Plan, Point

CURVES: Final[dict[str, Plan]] = {
    module.PLAN.name: module.PLAN
    for module in (
        subscriptions,
        clients,
        streams,
        headers,
        groups,
        backlog,
        mailboxes,
        journal_size,
    )
}

__all__ = ["CURVES", "Curve", "Line", "Plan", "Point"]
