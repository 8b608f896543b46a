"""Metadata of the distribution that name an address: links of the README, and the project's URLs.

Owns the long description of the distribution. The rules: README.md is its one source; the address
of the repository is MALAMUTE_PROJECT_URL, where a build is given it; a link or a picture that is a
path of this repository is made absolute by it. Without an address such a path means nothing on an
index's page, so the label of the link stays and the picture goes. Blocks of code are left as they
are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)\s]*)\)")
_LAST = "\nPaths in this text are those of the source distribution.\n"


def on_an_index(text: str, address: str = "") -> str:
    """Return the text of README.md without links and pictures that are paths.

    address: of the repository, as MALAMUTE_PROJECT_URL has it; then they are URLs. Empty: they go.
    """
    pieces: list[str] = []
    begin = 0
    for fence in _FENCE.finditer(text):
        pieces += [_without_paths(text[begin : fence.start()], address), fence.group()]
        begin = fence.end()
    return "".join([*pieces, _without_paths(text[begin:], address)]) + _LAST


def urls(address: str) -> dict[str, str]:
    """Return the project's URLs by their labels; none without an address of the repository."""
    if not address:
        return {}
    return {
        "Source": address,
        "Documentation": f"{address}/blob/HEAD/docs/index.md",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def checked(address: str) -> str:
    """Return an address without a slash at its end. Raises ValueError: it is no https URL."""
    if address and not re.fullmatch(r"https://[^\s/]+/\S+", address):
        raise ValueError(f"MALAMUTE_PROJECT_URL is {address!r}, and no https URL of a repository")
    return address.rstrip("/")


def _without_paths(text: str, address: str) -> str:
    def shown(found: re.Match[str]) -> str:
        picture, label, path = found.groups()
        if path.startswith("#") or not address:
            return "" if picture else label
        return f"{picture}[{label}]({address}/{'raw' if picture else 'blob'}/HEAD/{path})"

    return _LINK.sub(shown, text)


try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # the tests need no hatchling
    pass
else:

    class Readme(MetadataHookInterface):
        """A hook of hatchling, which gives the distribution its long description and its URLs."""

        def update(self, metadata: dict[str, Any]) -> None:
            """Add both; see hatchling's metadata hooks."""
            address = checked(os.environ.get("MALAMUTE_PROJECT_URL", ""))
            text = on_an_index(Path(self.root, "README.md").read_text(), address)
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
            metadata["urls"] = urls(address)
