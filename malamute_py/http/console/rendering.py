"""Pages made of templates, and files that browsers keep.

Owns the templates' environment, the headers of every page, and the static files. The rules: every
value is escaped for HTML and every text shows its control characters; nothing runs that is not a
file from here (Content-Security-Policy); files are named by their hash, so that a browser keeps
them for as long as they are the same. Source: CSP level 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from malamute_py.health.words import age, count, size, span
from malamute_py.http.console import words

ROOT: Final = "/console"
_HERE: Final = Path(__file__).parent
_KINDS: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Static:
    """The files for browsers, read once."""

    def __init__(self) -> None:
        """Read all static files into memory; their hashes become part of their addresses."""
        paths = [path for path in (_HERE / "static").rglob("*") if path.suffix in _KINDS]
        self._files = {path.name: (path.read_bytes(), _KINDS[path.suffix]) for path in paths}
        self._hashes = {
            name: hashlib.sha256(data).hexdigest()[:16] for name, (data, _) in self._files.items()
        }

    def url(self, name: str) -> str:
        """Return the address of a file as it is now."""
        return f"{ROOT}/static/{name}?v={self._hashes[name]}"

    async def show(self, request: Request) -> Response:
        """Answer with a static file, to be kept by the browser where its address has the hash."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            return Response("there is no such file\n", HTTPStatus.NOT_FOUND)
        data, kind = found
        keep = "public, max-age=31536000, immutable" if request.url.query else "no-cache"
        return Response(data, headers={**HEADERS, "cache-control": keep, "content-type": kind})


def url(page: str, **query: object) -> str:
    """Return the address of a page, with what is not empty as its query."""
    given = {key: str(value) for key, value in query.items() if value not in ("", None)}
    path = f"{ROOT}/{page}" if page else ROOT
    return f"{path}?{urlencode(given)}" if given else path


def _finalized(value: object) -> object:
    """Return what a template shows of a value, with the control characters of a text as escapes.

    Called by Jinja. Markup is of our own, and Shown was made visible before.
    """
    if isinstance(value, Markup | words.Shown) or not isinstance(value, str):
        return value
    return words.visible(value)


class Templates:
    """The pages' templates."""

    def __init__(self, static: Static) -> None:
        """Make the environment that renders every page of the console; static: its other files."""
        self._environment = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,  # a value that the page does not have is an error
            finalize=_finalized,  # each text: control characters become visible
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals |= {"url": url, "static": static.url}
        self._environment.filters |= {
            "age": age,
            "body": words.body_text,
            "count": count,
            "size": size,
            "span": span,
            "time": words.time_text,
        }

    def page(
        self, name: str, values: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK
    ) -> Response:
        """Return a page. Raises jinja2.UndefinedError for a value that is not given."""
        text = self._environment.get_template(f"{name}.html").render(values)
        return HTMLResponse(text, status, headers=dict(HEADERS))
