"""The pages: /metrics, /livez and /readyz, and what a request has to be.

Owns the routes and the checks before them. The rules: a request has a short head and a short path,
and a body only where it is a form of the console; with a token, metrics and reasons are for those
who bring it, while health itself is answered to everyone, as probes have no secrets; without one,
and for a console of this machine, only names of this machine are taken for the host, so that no
page of a browser reaches it by a name of its own (DNS rebinding); every answer ends its connection.
Source: RFC 9110, RFC 6750.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from malamute_py.health import readiness
from malamute_py.http import metrics
from malamute_py.http.console.forms import FORM_BYTES_MAX
from malamute_py.http.console.rendering import ROOT
from malamute_py.http.console.site import Console
from malamute_py.http.source import Source

PATH_BYTES_MAX: Final = 256
CONSOLE_PATH_BYTES_MAX: Final = 4_096
"""Bytes of a path and query of the console, which name streams and patterns."""
HEAD_BYTES_MAX: Final = 8 << 10
AUTHORIZED: Final = "malamute.authorized"
"""In the scope of a request: whether it brought the token, or needs none."""
_HEADERS: Final = [
    (b"connection", b"close"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]


def application(source: Source, token: str, console: Console | None = None) -> ASGIApp:
    """Return the whole HTTP side as an ASGI application: checks, metrics, health, console.

    source: asks the broker. token: what /metrics asks for; empty: nothing. console: the pages for
    people; None: there are none.
    """

    async def show_metrics(request: Request) -> Response:
        """Answer with the metrics of the broker and this process, or ask for the token."""
        if not request.scope[AUTHORIZED]:
            return PlainTextResponse(
                "a token is needed: Authorization: Bearer TOKEN\n",
                HTTPStatus.UNAUTHORIZED,
                {"www-authenticate": "Bearer"},
            )
        everything = await source.everything()
        page = metrics.render(everything, source.labels)
        return Response(page, media_type=metrics.CONTENT_TYPE)

    async def show_live(request: Request) -> Response:
        return _told("live", readiness.live(await source.facts()), request)

    async def show_ready(request: Request) -> Response:
        return _told("ready", readiness.ready(await source.facts()), request)

    async def show_absent(request: Request, error: Exception) -> Response:
        """Answer for an address that no page has."""
        if console is not None and request.url.path.startswith(f"{ROOT}/"):
            return await console.show_absent(request)
        return PlainTextResponse("there is no such page\n", HTTPStatus.NOT_FOUND)

    pages = Starlette(
        exception_handlers={HTTPStatus.NOT_FOUND: show_absent},
        routes=[
            Route("/metrics", show_metrics),
            Route("/livez", show_live),
            Route("/readyz", show_ready),
            *(console.routes() if console is not None else ()),
        ],
    )
    # A redirection would name whatever host the request named.
    pages.router.redirect_slashes = False
    return Checked(pages, token, console)


def _told(name: str, verdict: readiness.Verdict, request: Request) -> Response:
    """Answer with a verdict: 200 if it holds, else 503. Requests with the token get the reasons."""
    value: dict[str, Any] = {name: verdict.holds}
    if request.scope[AUTHORIZED]:
        for key, entries in (("reasons", verdict.reasons), ("warnings", verdict.warnings)):
            value[key] = [{"check": check, "reason": reason} for check, reason in entries]
    status = HTTPStatus.OK if verdict.holds else HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(value, status)


class Checked:
    """Lets through what may be asked, and ends the connection after each answer."""

    def __init__(self, pages: ASGIApp, token: str, console: Console | None) -> None:
        self._pages = pages
        self._token = token.encode()
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: refuse what no page takes, else hand it to the pages.

        The pages learn by scope[AUTHORIZED] whether the request may see what the token protects.
        """

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            """Add the security headers to an answer's head, where the page has not set them."""
            if message["type"] == "http.response.start":
                given = message.get("headers", ())
                kept = {name for name, _ in given}
                added = ((name, value) for name, value in _HEADERS if name not in kept)
                message = {**message, "headers": [*given, *added]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            status, reason = refusal
            await PlainTextResponse(f"{reason}\n", status)(scope, receive, send_with_headers)
            return
        authorized = not self._token or self._brings_token(scope)
        await self._pages({**scope, AUTHORIZED: authorized}, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[HTTPStatus, str] | None:
        """Return status and reason to refuse a request before any page sees it; None: it may go on.

        Checked: the sizes of path, headers and body, and the Host that the request names.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        path = scope["path"]
        of_console = self._console is not None and (
            path in ("/", ROOT) or path.startswith(f"{ROOT}/")
        )
        path_bytes_max = CONSOLE_PATH_BYTES_MAX if of_console else PATH_BYTES_MAX
        if len(scope["raw_path"]) + len(scope["query_string"]) > path_bytes_max:
            return HTTPStatus.REQUEST_URI_TOO_LONG, f"the path is over {path_bytes_max} bytes long"
        if sum(len(name) + len(value) for name, value in headers) > HEAD_BYTES_MAX:
            return (
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the headers are over {HEAD_BYTES_MAX} bytes long",
            )
        given = dict(headers)
        bytes_max = FORM_BYTES_MAX if of_console and scope["method"] == "POST" else 0
        size = given.get(b"content-length", b"0").strip()
        # Twenty digits are more than any bound, and cheap to read. Not all HTTP parsers bound them.
        too_large = len(size) > 20 or not size.isdigit() or int(size) > bytes_max
        if b"transfer-encoding" in given or too_large:
            return (
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a form has at most {bytes_max} bytes" if bytes_max else "no page takes a body",
            )
        if of_console:
            assert self._console is not None
            names_us_only = self._console.hosts_of_this_machine
        else:
            names_us_only = not self._token
        # Against DNS rebinding: a page of a browser would bring the name of its own site.
        if names_us_only and not _is_of_this_machine(given.get(b"host", b"")):
            return HTTPStatus.MISDIRECTED_REQUEST, "ask by an address of this machine: 127.0.0.1"
        return None

    def _brings_token(self, scope: Scope) -> bool:
        """Whether a request has one Authorization header, with the token."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def _is_of_this_machine(host: bytes) -> bool:
    """Whether a Host header is an address or `localhost`, and no name of a site on the internet."""
    text = host.decode("latin-1").strip().lower()
    text = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    if text in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
