"""The README as a package index shows it: text alone, where links would lead nowhere.

Owns the long description of the distribution. The rules: README.md is its one source; a link or a
picture that is a path of this repository means nothing on an index's page, so the label of the link
stays and the picture goes; blocks of code are left as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)[^)\s]*\)")
_LAST = "\nPaths in this text are those of the source distribution.\n"


def on_an_index(text: str) -> str:
    """Return the text of README.md without links and pictures that are paths."""
    pieces: list[str] = []
    begin = 0
    for fence in _FENCE.finditer(text):
        pieces += [_without_paths(text[begin : fence.start()]), fence.group()]
        begin = fence.end()
    return "".join([*pieces, _without_paths(text[begin:])]) + _LAST


def _without_paths(text: str) -> str:
    return _LINK.sub(lambda found: "" if found[1] else found[2], text)


try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # the tests need no hatchling
    pass
else:

    class Readme(MetadataHookInterface):
        """A hook of hatchling, which gives the distribution its long description."""

        def update(self, metadata: dict[str, Any]) -> None:
            """Add the text; see hatchling's metadata hooks."""
            text = on_an_index(Path(self.root, "README.md").read_text())
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
