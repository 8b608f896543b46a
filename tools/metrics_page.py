"""Write the tables of metrics and events into deploy/metrics.md.

`python -m tools.metrics_page` makes them from malamute_py/http/table.py and malamute_py/events.py,
which are the sources; a test says when the page is behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from malamute_py.events import EVENTS
from malamute_py.http.table import METRICS

PAGE: Final = Path(__file__).parents[1] / "deploy" / "metrics.md"
BEGIN: Final = "<!-- The table is made by `make metrics-page` from {source}. -->"
END: Final = "<!-- The end of the table. -->"


def metrics() -> str:
    """The table of metrics, as the page has it."""
    rows = [
        "| Metric | Type | Labels | In `malamute info` | What it says |",
        "|---|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        source = f"`{metric.source}`" if metric.source else ""
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {source} | {metric.help} |")
    return "\n".join(rows)


def events() -> str:
    """The table of events, as the page has it."""
    head = ["| Event | Level | What happened; what to do |", "|---|---|---|"]
    rows = [
        f"| `{event.name}` | {event.levels.replace(' ', ', ')} | {event.meaning} |"
        for event in EVENTS
    ]
    return "\n".join([*head, *rows])


def page(text: str) -> str:
    """The page with the tables that belong into it."""
    for source, table in (
        ("malamute_py/http/table.py", metrics()),
        ("malamute_py/events.py", events()),
    ):
        begin = BEGIN.format(source=source)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(END)
        text = f"{before}{begin}\n\n{table}\n\n{END}{after}"
    return text


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text()))
    print(f"{PAGE.name} written")


if __name__ == "__main__":
    main()
