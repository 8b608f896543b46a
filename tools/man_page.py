"""The manual page of the command line, in a file that the wheel has.

`python -m tools.man_page` makes it from the command tree, which is the source; a test compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from malamute_py.cli.man import man_page

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "man" / "malamute.1"


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(man_page())
    print(f"{PAGE.relative_to(Path.cwd())} written")


if __name__ == "__main__":
    main()
