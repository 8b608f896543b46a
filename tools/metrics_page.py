"""Write the table of metrics into deploy/metrics.md.

`python -m tools.metrics_page` makes it from malamute_py/http/table.py, which is the source; a test
says when the page is behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from malamute_py.http.table import METRICS

PAGE: Final = Path(__file__).parents[1] / "deploy" / "metrics.md"
BEGIN: Final = "<!-- The table is made by `make metrics-page` from malamute_py/http/table.py. -->"
END: Final = "<!-- The end of the table. -->"


def table() -> str:
    """The table, as the page has it."""
    rows = [
        "| Metric | Type | Labels | In `malamute info` | What it says |",
        "|---|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        source = f"`{metric.source}`" if metric.source else ""
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {source} | {metric.help} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with the table that belongs into it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text()))
    print(f"{PAGE.name} written")


if __name__ == "__main__":
    main()
