"""Attacks on the console: its bounds hold, and the broker does not notice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from malamute_py import EmbeddedBroker, SyncClient
from malamute_py.client.aio.client import Client
from malamute_py.http.console.actions import ACTIONS
from malamute_py.http.console.events import SESSION_STREAMS_MAX, EventStreams
from malamute_py.http.console.forms import FORM_BYTES_MAX
from malamute_py.http.console.logins import WRONG_FREE
from malamute_py.http.console.sessions import USER_SESSIONS_MAX, Session
from tests.http.console.browsing import FORM, Browser
from tests.http.console.conftest import PASSWORDS
from tests.http.running import RunningHttp, at, until
from tests.waiting import WAIT_S

PAGES = (
    "", "streams", "stream", "mailboxes", "mailbox", "services", "service", "groups", "group",
    "cursors", "cursor", "clients", "settings",
)  # fmt: skip
FIELDS = (
    "name", "stream", "prefix", "page", "after", "place", "at", "pattern", "count", "poll", "point",
    "number", "which", "to", "from", "until", "link", "reason", "subject", "fields", "body",
    "max_bytes", "max_age_ms", "max_records", "level", "description",
)  # fmt: skip
NASTY = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", "a", "-1", "0", "9" * 30, "\x00", "~", "{n}", "../../etc", "regex:(", "[1", "{{7*7}}",
         "%ff", "at", "newest", "subjects", "all", "earliest", "now-1h", "𝟙", "<script>"]
    ),
)  # fmt: skip


def raw(browser: Browser, request: bytes) -> bytes:
    """Send bytes; returns what comes until the connection ends."""
    with socket.create_connection(browser.address, timeout=WAIT_S) as connection:
        connection.sendall(request)
        found = b""
        try:
            while data := connection.recv(65_536):
                found += data
        except ConnectionError:
            pass
        return found


@pytest.mark.moderate
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(page=st.sampled_from(PAGES), query=st.dictionaries(st.sampled_from(FIELDS), NASTY))
def test_no_query_breaks_a_page(root: Browser, page: str, query: dict[str, str]) -> None:
    answer = root.get(page, **query)
    assert answer.status in (200, 400, 403, 404, 409), (answer.status, answer.text)
    assert "<script>alert" not in answer.text


@pytest.mark.moderate
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    action=st.sampled_from(sorted(set(ACTIONS) - {"kick"})),
    fields=st.dictionaries(st.sampled_from(FIELDS), NASTY),
)
def test_no_form_breaks_a_change(root: Browser, action: str, fields: dict[str, str]) -> None:
    if not root.csrf:
        root.get()
    answer = root.post(f"do/{action}", dict(fields))
    assert answer.status in (200, 400, 403, 404, 409), (answer.status, answer.text)


@pytest.mark.moderate
@pytest.mark.parametrize(
    "path",
    [
        "/console/../metrics", "/console/static/..%2f..%2fsite.py", "/console/static/%00",
        "/console//", "/console/do/", "/console/do/nothing", "/console/static/", "/console%00",
        "/console/stream/../../x", "//console",
    ],
)  # fmt: skip
def test_a_hostile_path_leads_nowhere(root: Browser, path: str) -> None:
    answer = root.ask(path)
    assert answer.status in (404, 405)
    assert "location" not in answer.headers


def test_a_path_without_end_is_refused(root: Browser) -> None:
    assert root.get("stream", name="a" * 5_000).status == 414


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("a" * (FORM_BYTES_MAX + 1), {}, 413),
        ("&".join(f"f{number}=1" for number in range(600)), {}, 403),
        ("csrf=%ff", {}, 403),
        ("\x00\x01", {}, 403),
        ("csrf=x", {"content_type": "multipart/form-data; boundary=x"}, 403),
        ("csrf=x", {"content_type": "application/json"}, 403),
        ("", {}, 403),
    ],
)
def test_a_hostile_form_is_refused(
    root: Browser, body: str, headers: dict[str, str], status: int
) -> None:
    answer = root.ask(
        "/console/do/purge-mailbox", "POST", body, **{"content_type": FORM, **headers}
    )
    assert answer.status == status


def test_a_form_of_no_stated_length_is_not_read(root: Browser) -> None:
    answer = raw(
        root,
        b"POST /console/login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.moderate
def test_a_form_that_comes_too_slowly_ends_with_its_connection(broker: EmbeddedBroker) -> None:
    with at(broker, request_ms=200) as http:
        browser = Browser(http.address)
        answer = raw(
            browser,
            b"POST /console/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\na=",
        )
        assert b"200 OK" not in answer
        until(lambda: len(http.serving.bounds) == 0)


def test_a_browser_that_leaves_amid_its_form_is_no_error(
    http: RunningHttp, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /console/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n"
    with socket.create_connection(http.address, timeout=WAIT_S) as connection:
        connection.sendall(b"%sContent-Type: %s\r\n\r\na=" % (head, FORM.encode()))
        until(lambda: len(http.serving.bounds) > 0)
    until(lambda: len(http.serving.bounds) == 0)
    assert http.get("/livez").status == 200
    assert not caplog.records


@pytest.mark.moderate
def test_a_name_that_cannot_be_one_is_refused(http: RunningHttp) -> None:
    for user, password in (("a" * 300, "x"), ("a", "x" * 300), ("\x00", "\x00"), ("ü" * 200, "x")):
        assert Browser(http.address).log_in(user, password).status == 401


@pytest.mark.moderate
def test_wrong_passwords_are_not_tried_without_end(broker: EmbeddedBroker) -> None:
    with at(broker) as http:
        browser = Browser(http.address)
        answers = [browser.log_in("root", "wrong") for _ in range(WRONG_FREE + 3)]
        assert all(answer.status == 401 for answer in answers)
        assert "Too many wrong attempts" in answers[-1].words
        # Neither the right password for this name, nor another name, tells more.
        assert "Too many wrong attempts" in browser.log_in("root", PASSWORDS["root"]).words
        assert browser.log_in("reader", PASSWORDS["reader"]).status == 200


@pytest.mark.moderate
def test_a_user_has_so_many_sessions_and_links_at_most(
    broker: EmbeddedBroker, client: SyncClient
) -> None:
    with at(broker) as http:
        browsers = [Browser(http.address) for _ in range(USER_SESSIONS_MAX + 2)]
        for each in browsers:
            assert each.log_in("reader", PASSWORDS["reader"]).status == 200
        assert [each.get().status for each in browsers[:2]] == [303, 303]
        assert browsers[-1].get().status == 200

        def links() -> int:
            return sum(each.software == "malamute console" for each in client.list_links())

        until(lambda: links() <= USER_SESSIONS_MAX + 2)  # those of other tests of this broker


@pytest.mark.moderate
def test_who_logs_in_anew_ends_the_session_before(enter: Callable[[str], Browser]) -> None:
    browser = enter("reader")
    before = dict(browser.cookies)
    assert browser.log_in("reader", PASSWORDS["reader"]).status == 200
    other = Browser(browser.address)
    other.cookies = before
    assert other.get().status == 303


# --- event streams ----------------------------------------------------------------------------


@pytest.fixture
def crowded_http(broker: EmbeddedBroker) -> Iterator[RunningHttp]:
    with at(broker) as http:
        yield http


@pytest.fixture
def crowded(crowded_http: RunningHttp) -> Browser:
    browser = Browser(crowded_http.address)
    assert browser.log_in("root", PASSWORDS["root"]).status == 200
    return browser


@pytest.mark.moderate
def test_a_session_has_so_many_event_streams_at_most(crowded: Browser, client: SyncClient) -> None:
    client.publish("crowd", b"x")
    with ExitStack() as stack:
        for _ in range(SESSION_STREAMS_MAX):
            events = stack.enter_context(crowded.events("tail", name="crowd"))
            assert next(events).kind == "begun"
        assert crowded.get("tail", name="crowd").status == 503
        # Others are served meanwhile.
        assert crowded.get("streams").status == 200
        assert crowded.ask("/livez").status == 200
    until(lambda: crowded.get("streams").status == 200)

    def again() -> bool:
        try:
            with crowded.events("tail", name="crowd") as events:
                return next(events).kind == "begun"
        except AssertionError:
            return False

    until(again)


@pytest.mark.moderate
def test_event_streams_end_with_their_session(
    crowded: Browser, crowded_http: RunningHttp, client: SyncClient
) -> None:
    client.publish("crowd", b"x")
    with crowded.events("tail", name="crowd") as events:
        assert next(events).kind == "begun"
        crowded.get()
        crowded.post("logout")
        assert [event.kind for event in events] == []
    until(lambda: len(crowded_http.serving.bounds) == 0)


@pytest.mark.moderate
def test_an_open_event_stream_ends_with_the_http_side_in_order(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        with at(broker) as http:
            browser = Browser(http.address)
            assert browser.log_in("root", PASSWORDS["root"]).status == 200
            events = stack.enter_context(browser.events("rates"))
            assert next(events).kind == "rates"
        assert {event.kind for event in events} <= {"rates"}
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []


@pytest.mark.moderate
def test_without_a_session_there_are_no_event_streams(http: RunningHttp) -> None:
    for path in ("tail", "rates"):
        assert Browser(http.address).get(path, name="crowd").status == 204


@pytest.mark.moderate
def test_a_browser_that_reads_nothing_costs_the_broker_little(
    crowded: Browser, client: SyncClient, broker: EmbeddedBroker
) -> None:
    client.create_stream("unread")
    jar = "; ".join(f"{name}={value}" for name, value in crowded.cookies.items())
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with connection:
        connection.connect(crowded.address)
        request = f"GET /console/tail?name=unread HTTP/1.1\r\nHost: localhost\r\nCookie: {jar}"
        connection.sendall(f"{request}\r\n\r\n".encode())
        until(lambda: client.stream_info("unread").subscriptions == 1)
        before = client.broker_info().counters.get("records_out", 0)
        bulk = 200_000
        client.publish_many("unread", [b"x" * 100] * bulk)
        for link in client.list_links():
            if link.software == "malamute console":
                assert link.more["unread_bytes"] <= 4 << 20
        delivered = client.broker_info().counters.get("records_out", 0) - before
        assert delivered < bulk / 2
        # Who else asks is answered.
        assert crowded.get("stream", name="unread").status == 200
    until(lambda: client.stream_info("unread").subscriptions == 0)


@pytest.mark.moderate
async def test_an_event_stream_whose_browser_takes_nothing_ends_in_its_time() -> None:
    lengthened: list[float] = []
    streams = EventStreams(lambda scope, seconds: lengthened.append(seconds), lasting_s=0.05)
    session = Session("a", cast("Client", None), 0.0)

    async def events() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x"

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    answer = streams.answer(session, events())
    assert answer is not None
    await answer({"type": "http"}, receive, send)
    assert (streams.open, session.streams, session.closings) == (0, 0, set())
    assert lengthened == [1.05]


@pytest.mark.moderate
def test_an_event_stream_outlives_the_time_of_a_request(
    broker: EmbeddedBroker, client: SyncClient
) -> None:
    client.publish("patient", b"x")
    with at(broker, request_ms=300) as http:
        browser = Browser(http.address)
        assert browser.log_in("root", PASSWORDS["root"]).status == 200
        cut = http.serving.bounds.cut
        with browser.events("rates") as events:
            # Two events are a second apart: more than a request may take.
            assert [next(events).kind for _ in range(2)] == ["rates", "rates"]
        assert http.serving.bounds.cut == cut


@pytest.mark.moderate
def test_names_of_the_page_are_quoted(root: Browser) -> None:
    hostile = '"><script>alert(1)</script>'
    for page in ("stream", "mailbox", "service", "streams", "clients"):
        answer = root.ask(f"/console/{page}?name={quote(hostile)}&prefix={quote(hostile)}")
        assert "<script>alert" not in answer.text
