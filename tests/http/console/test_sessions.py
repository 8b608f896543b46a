"""Sessions: who comes in, for how long, and what does not pass as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import pytest
import zmq

from malamute_py import Curve, EmbeddedBroker, SyncClient
from malamute_py.client.aio.client import Client
from malamute_py.http.console import logins
from malamute_py.http.console.logins import WRONG_FREE, Attempts
from malamute_py.http.console.sessions import Sessions
from tests.http.console.browsing import FORM, Browser
from tests.http.console.conftest import PASSWORDS
from tests.http.running import RunningHttp, at, until


@pytest.fixture(scope="module")
def open_broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tcp=True) as running:
        yield running


@pytest.fixture(scope="module")
def open_http(open_broker: EmbeddedBroker) -> Iterator[RunningHttp]:
    with at(open_broker) as running:
        yield running


@pytest.mark.parametrize("path", ["", "streams", "stream", "nothing/else"])
def test_without_a_session_there_is_the_login_page_only(http: RunningHttp, path: str) -> None:
    page = Browser(http.address).get(path)
    if path == "nothing/else":
        assert page.status == 404
    else:
        assert page.status == 303
        assert page.headers["location"].startswith("/console/login")


@pytest.mark.moderate
def test_an_address_that_no_page_has_is_answered_with_the_menu(root: Browser) -> None:
    page = root.get("nothing/else")
    assert page.status == 404
    assert "No such page" in page.words
    assert 'href="/console/streams"' in page.text


@pytest.mark.moderate
def test_an_address_that_no_page_has_takes_no_note_away(root: Browser) -> None:
    root.get("streams")
    created = root.ask(
        "/console/do/create-stream", "POST",
        urlencode({"csrf": root.csrf, "name": "noted"}), content_type=FORM,
    )  # fmt: skip
    assert created.status == 303
    assert "noted" not in root.get("favicon.ico").words
    assert "noted" in root.get("streams", prefix="none").words


def test_the_root_leads_to_the_console(http: RunningHttp) -> None:
    for path in ("/", "/console/"):
        page = Browser(http.address).ask(path)
        assert (page.status, page.headers["location"]) == (303, "/console")


def test_a_person_logs_in_as_a_user_of_the_broker(root: Browser, client: SyncClient) -> None:
    page = root.get()
    assert page.status == 200
    assert "root" in page.words
    assert [each.software for each in client.list_links() if each.software == "malamute console"]


@pytest.mark.moderate
def test_a_wrong_password_brings_no_session(http: RunningHttp) -> None:
    browser = Browser(http.address)
    page = browser.log_in("root", "wrong")
    assert page.status == 401
    assert "The broker does not know this name and password." in page.words
    assert browser.get().status == 303
    assert Browser(http.address).log_in("root", PASSWORDS["root"]).status == 200


@pytest.mark.moderate
def test_a_broker_with_authentication_takes_nobody_in_without_a_name(http: RunningHttp) -> None:
    assert Browser(http.address).log_in("", "").status == 401


@pytest.mark.moderate
def test_a_broker_without_authentication_takes_people_in_without_a_name(
    open_http: RunningHttp,
) -> None:
    assert Browser(open_http.address).log_in().status == 200


@pytest.mark.moderate
def test_a_broker_with_curve_takes_people_in_by_their_secret_key(tmp_path: Path) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    key_file = tmp_path / "server.key"
    key_file.write_text(f"{server_secret}\n")
    key_file.chmod(0o600)
    curve: dict[str, Any] = {
        "authentication.mechanism": "curve",
        "authentication.server_key_file": str(key_file),
        "authentication.clients": {"ann": public},
    }
    with EmbeddedBroker(tcp=True, **curve) as broker:
        own = Curve(server_public, public, secret)
        with RunningHttp(broker.tcp_endpoint, own) as http:
            browser = Browser(http.address)
            assert "Secret key" in browser.get("login").words
            assert browser.log_in("", "").status == 401
            assert browser.log_in("", "x" * 40).status == 401
            other = zmq.curve_keypair()[1].decode()
            page = browser.log_in("", other)
            assert page.status == 401
            assert "The broker does not know this key." in page.words
            page = browser.log_in("", secret)
            assert page.status == 200
            assert "ann" in page.words


@pytest.mark.moderate
def test_a_socket_file_with_permissions_is_not_opened_to_people_without_a_name(
    tmp_path: Path,
) -> None:
    with EmbeddedBroker(listen=[f"ipc://{tmp_path}/broker.sock"]) as broker:
        with RunningHttp(broker.endpoint) as http:
            page = Browser(http.address).log_in()
            assert page.status == 401
            assert "A name is needed." in page.words
        with RunningHttp(broker.endpoint, console="open") as http:
            assert Browser(http.address).log_in().status == 200


@pytest.mark.moderate
def test_a_login_that_the_broker_has_no_room_for_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told that the broker was not there, or asked for another kind of credential."""
    monkeypatch.setattr(logins, "_CONNECT_MS", 500)
    one: dict[str, Any] = {"links.links_max": 1}
    with EmbeddedBroker(tcp=True, **one) as broker, at(broker) as http:
        http.samples()  # The HTTP side has the one link that there may be.
        page = Browser(http.address).log_in()
        assert page.status == 401
        assert "The broker did not take the link: at most 1 links" in page.words


@pytest.mark.moderate
def test_where_a_name_is_asked_for_an_open_broker_takes_nobody_in(
    open_broker: EmbeddedBroker,
) -> None:
    with at(open_broker, console="login") as http:
        page = Browser(http.address).log_in()
        assert page.status == 401
        assert "A name is needed." in page.words


@pytest.mark.moderate
def test_no_console_is_served_where_it_is_off(open_broker: EmbeddedBroker) -> None:
    with at(open_broker, console="off") as http:
        assert Browser(http.address).ask("/").status == 404
        assert Browser(http.address).get("login").status == 404


@pytest.mark.moderate
def test_other_machines_reach_the_console_only_where_the_settings_say_so(
    open_broker: EmbeddedBroker, tmp_path: Any
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    token.chmod(0o600)
    for console, status in (("local", 404), ("login", 200)):
        with at(open_broker, bind="0.0.0.0:0", token_file=str(token), console=console) as http:
            assert (
                Browser(http.address).ask("/console/login", host="broker.example").status == status
            )


def test_a_page_of_a_browser_reaches_no_open_console_by_a_name_of_its_own(
    open_http: RunningHttp,
) -> None:
    assert Browser(open_http.address).ask("/console/login", host="evil.example").status == 421


@pytest.mark.parametrize("how", ["another id", "another signature", "no signature", "huge", "none"])
def test_a_forged_session_is_no_session(root: Browser, how: str) -> None:
    name, _, signature = root.cookies["malamute_console"].partition(".")
    forged = {
        "another id": f"{name[:-1]}_.{signature}",
        "another signature": f"{name}.{'0' * len(signature)}",
        "no signature": name,
        "huge": f"{name}.{signature}" + "a" * 4_000,
        "none": "",
    }[how]
    browser = Browser(root.address)
    browser.cookies["malamute_console"] = forged
    assert browser.get().status == 303
    assert root.get().status == 200


def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites(http: RunningHttp) -> None:
    browser = Browser(http.address)
    browser.get("login")
    page = browser.ask(
        "/console/login", "POST", "", content_type="application/x-www-form-urlencoded"
    )
    assert page.status == 403  # the form has no token
    browser.log_in("root", PASSWORDS["root"])
    for page in (browser.get("login"), browser.get()):
        cookie = page.headers.get("set-cookie", "HttpOnly SameSite=strict Path=/console")
        assert {"HttpOnly", "SameSite=strict", "Path=/console"} <= set(
            cookie.replace(";", "").split()
        )


def test_who_logs_out_has_no_session_and_no_link(
    enter: Callable[[str], Browser], http: RunningHttp, client: SyncClient
) -> None:
    browser = enter("root")
    cookies = dict(browser.cookies)
    before = len(client.list_links())
    browser.get()
    browser.post("logout")
    browser.cookies = cookies
    assert browser.get().status == 303
    until(lambda: len(client.list_links()) < before)


def test_a_change_needs_the_token_of_the_session(root: Browser) -> None:
    root.get()
    for token in ("", "x", root.csrf + "x"):
        assert root.post("logout", {"csrf": token}).status == 403
    assert root.post("logout", sec_fetch_site="cross-site").status == 403
    assert root.post("logout", content_type="text/plain").status == 403
    assert root.ask("/console/logout").status == 405
    assert root.get().status == 200


def test_the_way_back_after_a_login_stays_in_the_console(http: RunningHttp) -> None:
    for to in ("https://evil.example/", "//evil.example", "/console@evil", "/metrics"):
        page = Browser(http.address).get("login", to=to)
        assert "evil" not in page.text
        assert 'name="to" value="/console"' in page.text


def test_every_page_forbids_what_is_no_file_of_ours(root: Browser) -> None:
    for page in (root.get(), Browser(root.address).get("login")):
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-frame-options"] == "DENY"
        assert "<script>" not in page.text
        assert " style=" not in page.text
        assert " onclick" not in page.text


def test_files_are_kept_by_browsers_under_their_hash(root: Browser) -> None:
    page = root.get("login")
    start = page.text.index("/console/static/console.js")
    path = page.text[start : page.text.index('"', start)]
    found = root.ask(path)
    assert found.status == 200
    assert "immutable" in found.headers["cache-control"]
    assert root.ask("/console/static/../site.py").status == 404
    assert root.ask("/console/static/README.md").status == 404


# --- how long, and how many -------------------------------------------------------------------


class Linked:
    """A client that is linked until it is ended."""

    def __init__(self) -> None:
        self.linked = True

    def abort(self) -> None:
        self.linked = False


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def client_of(sessions: Sessions, user: str) -> tuple[str, Linked]:
    linked = Linked()
    return sessions.cookie(sessions.begin(user, cast("Client", linked))), linked


def test_a_session_ends_when_it_is_idle_and_its_link_with_it() -> None:
    time = Time()
    sessions = Sessions(idle_s=10, lasting_s=100, clock=time)
    cookie, link = client_of(sessions, "a")
    for time.now in (5.0, 14.0, 23.0):
        session = sessions.find(cookie)
        assert session is not None
        sessions.touch(session)
    time.now = 33.0
    sessions.sweep()
    assert not link.linked
    assert sessions.find(cookie) is None
    assert len(sessions) == 0


def test_a_session_ends_after_its_time_however_busy_it_is() -> None:
    time = Time()
    sessions = Sessions(idle_s=10, lasting_s=25, clock=time)
    cookie, link = client_of(sessions, "a")
    for time.now in (8.0, 16.0, 24.0):
        session = sessions.find(cookie)
        assert session is not None
        sessions.touch(session)
    time.now = 25.0
    assert sessions.find(cookie) is None
    assert not link.linked


def test_beyond_the_bound_the_idlest_session_of_the_user_with_most_ends() -> None:
    time = Time()
    sessions = Sessions(idle_s=10, lasting_s=100, most=3, most_of_user=2, clock=time)
    first, _ = client_of(sessions, "a")
    time.now = 1.0
    second, second_link = client_of(sessions, "a")
    third, _ = client_of(sessions, "b")
    time.now = 2.0
    kept = sessions.find(first)
    assert kept is not None
    sessions.touch(kept)
    time.now = 3.0
    fourth, _ = client_of(sessions, "a")  # one too many of its user
    assert sessions.find(second) is None
    assert not second_link.linked
    client_of(sessions, "c")  # one too many of all: `a` has most, and `first` is idlest
    assert sessions.find(first) is None
    assert [sessions.find(each) is not None for each in (third, fourth)] == [True, True]
    assert len(sessions) == 3


@pytest.mark.moderate
async def test_a_session_without_a_link_says_so() -> None:
    """Its overview said that the broker had not been reached yet."""
    sessions = Sessions(idle_s=10, lasting_s=100)
    cookie, link = client_of(sessions, "a")
    session = sessions.find(cookie)
    assert session is not None
    link.linked = False
    assert (await session.source.facts()).reason == "there is no link to the broker"


@pytest.mark.moderate
def test_an_address_waits_after_wrong_attempts_and_longer_each_time() -> None:
    time = Time()
    attempts = Attempts(clock=time)
    for _ in range(WRONG_FREE):
        attempts.wrong("here")
        assert attempts.wait_s("here") == 0
    waits = []
    for _ in range(9):
        attempts.wrong("here")
        waits.append(attempts.wait_s("here"))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert attempts.wait_s("there") == 0
    time.now = 61.0
    assert attempts.wait_s("here") == 0
    attempts.right("here")
    attempts.wrong("here")
    assert attempts.wait_s("here") == 0


@pytest.mark.moderate
def test_a_session_whose_link_an_operator_ended_is_over(
    enter: Callable[[str], Browser], client: SyncClient
) -> None:
    before = {each.link for each in client.list_links()}
    browser = enter("reader")
    (link,) = {each.link for each in client.list_links()} - before
    client.kick(link, "go home")
    until(lambda: browser.get().status == 303)
