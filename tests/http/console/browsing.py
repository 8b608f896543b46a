"""A browser of the tests: cookies, forms and event streams, over real connections."""

from __future__ import annotations

import html
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tests.waiting import WAIT_S

FORM = "application/x-www-form-urlencoded"


class Page(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def words(self) -> str:
        """The text that a person reads."""
        plain = re.sub(r"<[^>]*>", " ", self.text)
        return re.sub(r"\s+", " ", html.unescape(plain)).strip()


class Event(NamedTuple):
    kind: str
    value: Any


class Browser:
    """One person's browser."""

    def __init__(self, address: tuple[str, int]) -> None:
        """address: host and port of an HTTP side."""
        self.address = address
        self.cookies: dict[str, str] = {}
        self.csrf = ""

    def _open(
        self, path: str, method: str, body: str | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self.address, timeout=WAIT_S)
        if self.cookies:
            jar = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            headers = {"Cookie": jar, **headers}
        connection.request(method, path, body=body, headers=headers)
        return connection.getresponse()

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Page:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self._open(path, method, body, named) as answer:
            for name, value in answer.getheaders():
                if name.lower() == "set-cookie":
                    key, _, kept = value.partition(";")[0].partition("=")
                    if "Max-Age=0" in value:
                        self.cookies.pop(key, None)
                    else:
                        self.cookies[key] = kept
            told = {name.lower(): value for name, value in answer.getheaders()}
            page = Page(answer.status, told, answer.read().decode())
        found = re.search(r'name="csrf" value="([^"]+)"', page.text)
        if found is not None:
            self.csrf = found[1]
        return page

    def get(self, path: str = "", **query: object) -> Page:
        """A page of the console."""
        return self.ask(_path(path, query))

    def post(self, path: str, fields: Mapping[str, object] | None = None, **headers: str) -> Page:
        """Send a form with the session's token; the answer is the page that it leads to."""
        sent = {"csrf": self.csrf, **(fields or {})}
        headers.setdefault("content_type", FORM)
        page = self.ask(_path(path, {}), "POST", urlencode(sent, doseq=True), **headers)
        return self.ask(page.headers["location"]) if page.status == 303 else page

    def log_in(self, user: str = "", password: str = "", **headers: str) -> Page:
        page = self.get("login")
        token = re.search(r'name="token" value="([^"]+)"', page.text)
        assert token is not None
        fields = {"token": token[1], "user": user, "password": password}
        page = self.ask("/console/login", "POST", urlencode(fields), content_type=FORM, **headers)
        return self.ask(page.headers["location"]) if page.status == 303 else page

    @contextmanager
    def events(self, path: str, **query: object) -> Iterator[Iterator[Event]]:
        """The events of a stream, until the block ends."""
        with self._open(_path(path, query), "GET", None, {}) as answer:
            assert answer.status == 200, answer.status
            assert answer.headers["content-type"] == "text/event-stream"
            yield _events(answer)


def _path(path: str, query: dict[str, object]) -> str:
    full = f"/console/{path}" if path else "/console"
    return f"{full}?{urlencode(query)}" if query else full


def _events(answer: http.client.HTTPResponse) -> Iterator[Event]:
    kind = ""
    while line := answer.readline():
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            kind = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield Event(kind, json.loads(text.removeprefix("data: ")))
