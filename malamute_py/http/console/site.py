"""The console as a part of the HTTP side: its addresses, and who may come through.

Owns the routes and what holds for each of them. The rules: without a session there is the login
page only; a change is a POST with the session's token, comes from this site, and is answered with a
redirection to the page that shows what became of it; what the broker refuses is told in its words.
Source: OWASP, Cross-Site Request Forgery Prevention.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from malamute_protocol.errors import BrokerRefused, LocalProtocolError, MalamuteError, Timeout
from malamute_py.http.console import events, pages
from malamute_py.http.console.actions import ACTIONS, Action
from malamute_py.http.console.events import EventStreams
from malamute_py.http.console.forms import Form, form_of, of
from malamute_py.http.console.logins import LoginRefused, Logins
from malamute_py.http.console.rendering import ROOT, Static, Templates, url
from malamute_py.http.console.sessions import Session, Sessions
from malamute_py.http.console.words import NotUnderstood

_COOKIE: Final = "malamute_console"
_LOGIN_COOKIE: Final = "malamute_login"
_SWEEP_S: Final = 15.0

_MENU: Final = (
    ("", "Overview"),
    ("streams", "Streams"),
    ("mailboxes", "Mailboxes"),
    ("services", "Services"),
    ("groups", "Groups"),
    ("cursors", "Cursors"),
    ("clients", "Clients"),
    ("users", "Users"),
    ("settings", "Settings"),
)
_BELOW: Final = {
    "stream": "streams",
    "mailbox": "mailboxes",
    "service": "services",
    "group": "groups",
    "cursor": "cursors",
}
"""Page of one thing -> the page of the menu that it is below."""
_PAGES: Final[dict[str, tuple[str, pages.Page]]] = {
    "": ("overview", pages.overview),
    "streams": ("streams", pages.streams),
    "stream": ("stream", pages.stream),
    "mailboxes": ("mailboxes", pages.mailboxes),
    "mailbox": ("mailbox", pages.mailbox),
    "services": ("services", pages.services),
    "service": ("service", pages.service),
    "groups": ("groups", pages.groups),
    "group": ("group", pages.group),
    "cursors": ("cursors", pages.cursors),
    "cursor": ("cursor", pages.cursor),
    "clients": ("clients", pages.clients),
    "users": ("users", pages.users),
    "settings": ("settings", pages.settings),
}
"""Address below ROOT -> its template and its page."""


class Console:
    """The pages for people."""

    def __init__(
        self,
        sessions: Sessions,
        logins: Logins,
        streams: EventStreams,
        *,
        hosts_of_this_machine: bool = True,
    ) -> None:
        """hosts_of_this_machine: whether a request's Host has to name this machine.

        It has to where a person may log in without a name, so that no other site's page gets in.
        """
        self.sessions = sessions
        self.hosts_of_this_machine = hosts_of_this_machine
        self._logins = logins
        self._streams = streams
        self._static = Static()
        self._templates = Templates(self._static)

    def routes(self) -> list[BaseRoute]:
        """Return the addresses of the console, each with the handler of its requests."""
        found = [
            Route("/", self._to_the_overview),
            Route(f"{ROOT}/", self._to_the_overview),
            Route(f"{ROOT}/static/{{name}}", self._static.show),
            Route(f"{ROOT}/login", self._show_login),
            Route(f"{ROOT}/login", self._log_in, methods=["POST"]),
            Route(f"{ROOT}/logout", self._log_out, methods=["POST"]),
            Route(f"{ROOT}/rates", self._streaming(_rates)),
            Route(f"{ROOT}/tail", self._streaming(_tail)),
        ]
        for name, (template, page) in _PAGES.items():
            path = f"{ROOT}/{name}" if name else ROOT
            found.append(Route(path, self._showing(template, page)))
        for name, action in ACTIONS.items():
            found.append(Route(f"{ROOT}/do/{name}", self._doing(action), methods=["POST"]))
        return list(found)

    async def keep(self) -> None:
        """End the sessions whose time has come; until it is cancelled, when all end."""
        try:
            while True:
                await asyncio.sleep(_SWEEP_S)
                self.sessions.sweep()
        finally:
            self.sessions.close()

    # --- logging in --------------------------------------------------------------------------

    async def _to_the_overview(self, request: Request) -> Response:
        return _see(ROOT)

    async def _show_login(self, request: Request) -> Response:
        return self._login_page(request, "")

    def _login_page(
        self, request: Request, fault: str, status: HTTPStatus = HTTPStatus.OK
    ) -> Response:
        """Return the page to log in on, with a cookie that its form has to match.

        While there is no session, the cookie's nonce and the form's signature of it show that the
        form is from this page, and not from another site. fault: the sentence about the last
        attempt; empty: there was none.
        """
        nonce = secrets.token_urlsafe(24)
        values = {
            "fault": fault, "by_key": self._logins.by_key,
            "name_optional": self._logins.name_optional,
            "token": self.sessions.sign("login", nonce), "to": _inside(_last(request, "to")),
            "session": None, "menu": (), "here": "login", "notes": [],
        }  # fmt: skip
        answer = self._templates.page("login", values, status)
        answer.set_cookie(
            _LOGIN_COOKIE, nonce, path=ROOT, httponly=True, samesite="strict", max_age=3_600
        )
        return answer

    async def _log_in(self, request: Request) -> Response:
        """Take the login form: begin a session and show the page that was wanted, or the fault."""
        form = await form_of(request)
        nonce = request.cookies.get(_LOGIN_COOKIE, "")
        if (
            form is None
            or not _from_here(request)
            or not self.sessions.signed("login", nonce, of(form, "token"))
        ):
            return self._login_page(
                request, "The page was too old: try again.", HTTPStatus.FORBIDDEN
            )
        address = request.client.host if request.client is not None else ""
        try:
            session = await self._logins.log_in(
                of(form, "user").strip(), of(form, "password"), address
            )
        except LoginRefused as error:
            return self._login_page(request, str(error), HTTPStatus.UNAUTHORIZED)
        # Of the same browser, whose cookie is about to be another one.
        former = self._session(request)
        if former is not None:
            self.sessions.end(former)
        answer = _see(_inside(of(form, "to")))
        answer.set_cookie(
            _COOKIE, self.sessions.cookie(session), path=ROOT, httponly=True, samesite="strict",
            # A proxy with TLS says so; a browser that lies harms its own cookie only.
            secure=request.headers.get("x-forwarded-proto") == "https",
        )  # fmt: skip
        answer.delete_cookie(_LOGIN_COOKIE, path=ROOT)
        return answer

    # --- who may come through ----------------------------------------------------------------

    def _session(self, request: Request) -> Session | None:
        return self.sessions.find(request.cookies.get(_COOKIE, ""))

    def _showing(
        self, template: str, page: pages.Page, *, absent: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the request handler of a page: it shows the page, or sends the person to log in.

        page: returns the values for the template. absent: whether the page is the one that says
        that there is none at its address.
        """

        async def show(request: Request) -> Response:
            """Show the page; a refresh by the page itself does not count as the person's doing."""
            session = self._session(request)
            refreshing = "poll" in request.query_params  # the page's script asks, not the person
            if session is None:
                return _to_login(request, refreshing)
            if not refreshing:
                self.sessions.touch(session)  # the idle time of the session begins anew
            query = dict(request.query_params)
            status, silent = HTTPStatus.NOT_FOUND if absent else HTTPStatus.OK, False
            try:
                values = await page(session, query)
            except MalamuteError as error:
                if session.over:  # the link has ended for good, for example as the user is gone
                    return _to_login(request, refreshing)
                silent = isinstance(error, Timeout)
                template_, status, values = "fault", _status(error), {"fault": str(error)}
            else:
                template_ = template
            # What asks by itself, as a page that refreshes and a browser in search of an icon do,
            # must not take what the person is to be told.
            notes = [] if refreshing or absent else session.take_notes()
            # Waiting for a silent broker once more would last longer than a request may.
            broker = {} if silent else (await session.source.facts()).broker
            here = request.url.path.removeprefix(ROOT).strip("/")
            common: dict[str, Any] = {
                "session": session, "menu": _MENU, "query": query, "notes": notes,
                # The page of one thing marks the list of such things in the menu.
                "here": _BELOW.get(here, here),
                "now_ms": broker.get("now_ms", 0),
                "unlinked": "" if session.client.linked else "There is no link to the broker.",
                "again": _refreshed(request),
            }  # fmt: skip
            return self._templates.page(template_, {**common, **values}, status)

        return show

    async def show_absent(self, request: Request) -> Response:
        """Answer for an address that the console does not have, with its menu within a session."""
        if self._session(request) is None:
            return PlainTextResponse(
                f"There is no such page; the console begins at {ROOT}\n", HTTPStatus.NOT_FOUND
            )
        return await self._showing("absent", pages.absent, absent=True)(request)

    def _streaming(
        self, make: Callable[[Session, Request], events.Events]
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return the request handler of an event stream (live rates, or the tail of a stream).

        make: makes the events for the session and the request.
        """

        async def stream(request: Request) -> ASGIApp:
            """Send the events; without a session, or with too many streams, refuse."""
            session = self._session(request)
            if session is None:
                # 204 tells a browser's EventSource not to connect again.
                return Response(status_code=HTTPStatus.NO_CONTENT)
            answer = self._streams.answer(session, make(session, request))
            if answer is None:
                return Response("too many event streams\n", HTTPStatus.SERVICE_UNAVAILABLE)
            return answer

        return stream

    async def _log_out(self, request: Request) -> Response:
        """End the session of a form from this site, and show the login page."""
        checked = await self._checked(request)
        if isinstance(checked, Response):
            return checked
        session, _ = checked
        self.sessions.end(session)
        answer = _see(url("login"))
        answer.delete_cookie(_COOKIE, path=ROOT)
        return answer

    def _doing(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        """Return the request handler of one change: it redirects to the page that tells of it."""

        async def do(request: Request) -> Response:
            """Run the action and keep its sentence, or the refusal, for the session's next page."""
            checked = await self._checked(request)
            if isinstance(checked, Response):
                return checked  # no session, or a form that is not of this session
            session, form = checked
            try:
                session.note(action.outcome, await action.run(session, form))
            except MalamuteError as error:
                session.note("failed", str(error))
            return _see(action.back(form))

        return do

    async def _checked(self, request: Request) -> tuple[Session, Form] | Response:
        """Return the session and the form of a change, or the answer that refuses it.

        The form has to come from a page of this session: its token says so.
        """
        session = self._session(request)
        if session is None:
            return _see(url("login"))
        form = await form_of(request)
        if form is None or not _from_here(request) or not session.fits(of(form, "csrf")):
            return Response("the form is not of this session\n", HTTPStatus.FORBIDDEN)
        self.sessions.touch(session)
        return session, form


def _rates(session: Session, request: Request) -> events.Events:
    return events.rates(session.source)


def _tail(session: Session, request: Request) -> events.Events:
    return events.tail(session, _last(request, "name"), _last(request, "pattern"))


# --- requests ---------------------------------------------------------------------------------


def _last(request: Request, name: str) -> str:
    return str(request.query_params.get(name, ""))


def _from_here(request: Request) -> bool:
    """Whether a form was sent by a page of this site, as far as the browser tells."""
    return request.headers.get("sec-fetch-site", "same-origin") == "same-origin"


def _inside(path: str) -> str:
    """Return the path that was given if it is one of the console, else the console's first page.

    So a login never leads to another site.
    """
    inside = path == ROOT or path.startswith((f"{ROOT}/", f"{ROOT}?"))
    return path if inside and path.isascii() and path.isprintable() else ROOT


def _refreshed(request: Request) -> str:
    """Return the address at which a page refreshes itself.

    poll=1 says that the page asks and not the person, whose session may end meanwhile.
    """
    query = "&".join(
        each for each in request.url.query.split("&") if each and not each.startswith("poll=")
    )
    return f"{request.url.path}?{query}&poll=1" if query else f"{request.url.path}?poll=1"


def _to_login(request: Request, refreshing: bool) -> Response:
    """Send the person to the login page, and from there back to the page that was asked for."""
    if refreshing:  # the page's script, htmx, takes the browser there by this header
        return Response(status_code=HTTPStatus.NO_CONTENT, headers={"hx-redirect": url("login")})
    to = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return _see(url("login", to=to if to != ROOT else ""))


def _see(where: str) -> Response:
    return RedirectResponse(where, HTTPStatus.SEE_OTHER)


def _status(error: MalamuteError) -> HTTPStatus:
    """Return the status of a page that shows this error."""
    if isinstance(error, NotUnderstood | LocalProtocolError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, BrokerRefused):
        if error.code in ("forbidden", "unauthenticated"):
            return HTTPStatus.FORBIDDEN
        if error.code.startswith("unknown_"):
            return HTTPStatus.NOT_FOUND
        return HTTPStatus.CONFLICT
    return HTTPStatus.SERVICE_UNAVAILABLE
