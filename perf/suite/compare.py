"""Changes since another recording, beyond the noise.

Pure: two recordings in, text out.
"""

from __future__ import annotations

from perf.suite.results import Results
from perf.suite.summary import changed, median

LOWER_IS_BETTER = frozenset({"match_s", "p50_us", "p99_us", "p999_us", "start_s"})


def changes(before: Results, now: Results) -> list[tuple[str, str, str, float]]:
    """Return (work, column, figure, ratio now to before) of each change, the largest first."""
    found = []
    for work in now.works:
        for column, measured in now.at(work.name):
            old = before.of(work.name, column.name)
            if old is None:
                continue
            values, earlier = measured.values(work.figure), old.values(work.figure)
            if not values or not earlier:
                continue
            ratio = changed(earlier, values)
            if ratio is not None:
                found.append((work.name, column.name, work.figure, ratio))
    return sorted(found, key=lambda change: -abs(change[3] - 1))


def compare(before: Results, now: Results) -> str:
    """Return a text for a person: figures better or worse by more than the runs spread."""
    lines = [
        f"against {before.commit.commit[:12]} of {before.started}"
        + (" on another machine" if before.machine != now.machine else "")
    ]
    for work, column, figure, ratio in changes(before, now):
        better = (ratio < 1) == (figure in LOWER_IS_BETTER)
        old, new = before.of(work, column), now.of(work, column)
        assert old is not None
        assert new is not None
        lines.append(
            f"{'better' if better else 'WORSE '} {work:20} {column:28} x{ratio:.2f}"
            f" ({median(old.values(figure)):,.4g} -> {median(new.values(figure)):,.4g} {figure})"
        )
    if min(before.runs, now.runs) < 2:
        lines.append("of one run the noise is not known: what is told here may be that")
    elif len(lines) == 1:
        lines.append("nothing changed beyond the noise")
    return "\n".join(lines)
