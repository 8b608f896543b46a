"""Files of others: each is what its README says, and its licence is beside it."""

from __future__ import annotations

import hashlib
import re

from malamute_py.http.console import rendering
from tests.house.checkout import ROOT

VENDOR = ROOT / "malamute_py/http/console/static/vendor"
ROW = re.compile(
    r"^\| `([^`]+)` \| `[^`]+` \| [\d.]+ \| \w+, `([^`]+)` \| `(\w{64})` \|$", re.MULTILINE
)


def test_every_vendored_file_has_its_row_with_version_licence_and_hash() -> None:
    rows = ROW.findall((VENDOR / "README.md").read_text())
    licences = {licence for _, licence, _ in rows}
    named = {name for name, _, _ in rows} | licences | {"README.md"}
    assert {path.name for path in VENDOR.iterdir()} == named
    for name, _, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name


def test_every_static_file_is_served_under_its_own_name() -> None:
    static = rendering.Static()
    for name in ("htmx.min.js", "uPlot.iife.min.js", "uPlot.min.css", "console.js", "console.css"):
        assert static.url(name).startswith(f"/console/static/{name}?v=")
