"""The configuration of the documents that `make docs` builds.

Owns which files of the repository are pages, and where their links lead. The rule: a text has one
home. ARCHITECTURE.md, SPEC.md, FORMAT.md, the changelog and the pages of deploy/ are read from
where they lie, and their links are turned into links between pages.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "malamute-py"
version = release = version_of("malamute-py")
copyright = "the developers of malamute-py"  # noqa: A001 - Sphinx wants this name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"malamute-py {release}"
html_show_sphinx = False
default_role = "code"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
copybutton_prompt_text = "$ "
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Pygments prints what it has no lexer for as it is. Headings of SPEC.md leave out a level, as its
# commands have one of their own.
suppress_warnings = ["misc.highlighting_failure", "myst.header"]

PAGES = {
    "architecture": "ARCHITECTURE.md",
    "changes": "CHANGELOG.md",
    "reference/files": "malamute_py/journal/FORMAT.md",
    "reference/metrics": "deploy/metrics.md",
    "reference/spark": "spark_connector/README.md",
    "reference/wire": "protocol/SPEC.md",
}
"""Page -> file of the repository whose text it is."""
_OF_FILE = {(ROOT / path).resolve(): page for page, path in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s:]+)\)")


def linked(text: str, page: str, home: Path) -> str:
    """Return a page's text with links between files of the repository as links between pages.

    home: the folder that its links start from. The name of a file that is no page stays, as code.
    """
    here = (ROOT / "docs" / page).parent

    def replace(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path:
            return found.group(0)
        file = (home / path).resolve()
        if file.suffix == ".md" and file.is_relative_to(ROOT / "docs") and file.exists():
            to = file
        elif file in _OF_FILE:
            to = ROOT / "docs" / f"{_OF_FILE[file]}.md"
        elif mark and file.exists():
            return f"![{label}]({os.path.relpath(file, here)})"
        else:
            return label if label.startswith("`") else f"`{label}`"
        relative = os.path.relpath(to, here)
        return f"[{label}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(replace, text)


def read_source(app: Any, page: str, source: list[str]) -> None:
    """Take a page's text from where it lies, and turn its links."""
    if page in PAGES:
        file = ROOT / PAGES[page]
        source[0] = linked(file.read_text(), page, file.parent)
    elif page == "reference/commands":
        from tools.commands_page import commands_page

        source[0] = source[0] + commands_page()
    else:
        source[0] = linked(source[0], page, (ROOT / "docs" / page).parent)


def setup(app: Any) -> None:
    """Connect the hook."""
    app.connect("source-read", read_source)
