"""The console in a real browser: what its scripts draw and refresh, and that nothing else runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from malamute_py import EmbeddedBroker, SyncClient
from tests.http.console.chromium import Chromium, missing
from tests.http.console.conftest import PASSWORDS
from tests.http.running import RunningHttp, at

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser"),
]

COLOURED = """
const canvas = document.querySelector(".plot canvas");
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const halves = [0, 0];
for (let at = 0; at < pixels.length; at += 4)
  if (pixels[at + 3] > 200 && pixels[at] < 90 && pixels[at + 2] > pixels[at] + 60)
    halves[(at / 4) % canvas.width < canvas.width / 2 ? 0 : 1] += 1;
return halves;
"""
"""Script that counts the pixels of a plot that have the line's colour, in its left and right
half."""
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
TAB, ENTER = "\ue004", "\ue007"
PAGES = (
    "", "/streams", "/stream?name=walked&place=newest", "/mailboxes", "/mailbox?name=walked.box",
    "/services", "/service?name=walked.service", "/groups", "/group?stream=walked&name=readers",
    "/cursors", "/cursor?stream=walked&name=billing", "/clients", "/users?verb=read&name=walked",
    "/settings?all=yes",
)  # fmt: skip
CONTROLS = """
for (const each of document.querySelectorAll("details")) each.open = true;
const kinds =
  "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']";
return [...document.querySelectorAll(kinds)].filter(each => each.checkVisibility()).map(
  (each, at) => each.dataset.at = `${at} ${each.tagName} ${each.textContent.trim()}`);
"""
"""Script that opens all forms, and names all that a person can press or fill in."""
SMALL = """
for (const each of document.querySelectorAll("details")) each.open = true;
const kinds = "a[href]:not(.skip, .hint a), button, input:not([type=hidden]), select, summary";
return [...document.querySelectorAll(kinds)].filter(each => each.checkVisibility()).filter(each => {
  const box = each.getBoundingClientRect();
  return box.width < 24 || box.height < 24;
}).map(each => each.outerHTML);
"""
"""Script that opens all forms, and names what is too small to be pressed by a finger; a link amid a
sentence is as high as the sentence."""
FOCUS = """
const at = document.activeElement, box = at.getBoundingClientRect(), style = getComputedStyle(at);
const field = ["INPUT", "SELECT", "TEXTAREA"].includes(at.tagName);
return [at.dataset.at, style.outlineStyle !== "none" && parseInt(style.outlineWidth) > 1,
  box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
  !field || at.labels.length > 0 || at.hasAttribute("aria-label")];
"""
"""Script that tells where the focus is: the name; whether it is marked, in the window, labelled."""


@pytest.fixture(scope="module")
def window(http: RunningHttp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        log_in(opened, http)
        yield opened


def log_in(window: Chromium, http: RunningHttp) -> None:
    window.go(f"{http.serving.url}/")
    window.type("#user", "root")
    window.type("#password", PASSWORDS["root"])
    window.press(ENTER)
    window.until("return document.querySelector('h1').textContent === 'Overview'")


def test_the_plots_draw_and_the_page_refreshes_itself(
    window: Chromium, http: RunningHttp, client: SyncClient
) -> None:
    window.go(f"{http.serving.url}/console")
    window.run("window.marked = true")
    assert window.run("return document.querySelectorAll('.plot canvas').length") == 3
    for number in itertools.count():
        client.publish("drawn", b"%d" % number)
        rate = window.run("return document.querySelector('[data-rate=published]').textContent")
        if rate not in ("–", "0"):
            break
    # The plot is two minutes wide: what came in the last seconds stands at its right.
    window.until(f"return (() => {{{COLOURED}}})()[1] > 0")
    assert window.run(COLOURED)[0] == 0
    client.send("new.box", b"x")
    script = "return document.querySelector('#live').textContent.includes(arguments[0])"
    client.edit_service("waiting.service")
    client.submit("waiting.service", b"x")
    window.until(script, "service waiting.service")
    assert window.run("return window.marked") is True  # the page was not loaded anew
    # Chromium has advice for those who read a canvas often, as this test does.
    assert [line for line in window.said() if "willReadFrequently" not in line] == []


def test_a_tail_shows_hostile_text_as_text(
    window: Chromium, http: RunningHttp, client: SyncClient
) -> None:
    client.publish("tailed", HOSTILE.encode(), subject=HOSTILE)
    window.go(f"{http.serving.url}/console/stream?name=tailed&place=newest")
    window.click("#tail-button")
    window.until("return document.querySelector('#tail-state').textContent.startsWith('Following')")
    client.publish("tailed", HOSTILE.encode(), subject=HOSTILE, fields={HOSTILE: HOSTILE})
    window.until("return document.querySelectorAll('#tail-rows tr').length === 1")
    assert HOSTILE in window.text("#tail-rows")
    assert window.run("return document.querySelectorAll('main img, main script').length") == 0
    assert window.run("return document.title") == "tailed · malamute"
    window.click("#tail-button")
    assert window.text("#tail-state") == "Stopped."
    assert window.said() == []


def test_a_change_is_made_by_keyboard_alone(
    window: Chromium, http: RunningHttp, client: SyncClient
) -> None:
    client.send("typed.box", b"x")
    window.go(f"{http.serving.url}/console/mailbox?name=typed.box")
    window.press(TAB)
    assert window.run("return document.activeElement.className") == "skip"
    window.run("document.querySelector('details summary').focus()")
    window.press(ENTER)
    window.press(TAB)
    assert window.run("return document.activeElement.textContent") == "Purge typed.box"
    window.press(ENTER)
    window.until("return document.querySelector('.note.done') !== null")
    assert "1 message of typed.box purged" in window.text()


@pytest.mark.parametrize("width", [1_160, 380])
def test_the_tabulator_reaches_all_that_can_be_pressed_or_filled_in(
    http: RunningHttp, client: SyncClient, tmp_path: Path, width: int
) -> None:
    client.publish("walked", b"x")
    client.send("walked.box", b"x")
    client.edit_service("walked.service")
    client.cursor("walked", "billing").edit()
    with client.group("walked", "readers", start="latest") as member:
        member.accepted()
    with Chromium(tmp_path / "keyboard", width=width, height=800) as window:
        log_in(window, http)
        for page in PAGES:
            window.go(f"{http.serving.url}/console{page}")
            # A page that refreshes itself would put new elements in the place of the named ones.
            window.run("document.getElementById('refresh').checked = false")
            wanted = window.run(CONTROLS)
            assert len(wanted) > 10, page
            reached = []
            for _ in wanted:
                window.press(TAB)
                name, marked, in_window, labelled = window.run(FOCUS)
                assert (marked, in_window, labelled) == (True, True, True), (page, name)
                reached.append(name)
            assert reached == wanted, page


def test_a_phone_shows_every_page_without_scrolling_sideways(
    http: RunningHttp, client: SyncClient, tmp_path: Path
) -> None:
    client.publish("narrow", 2_000 * b"a", subject=200 * "b")
    with Chromium(tmp_path / "phone", width=380, height=800) as phone:
        log_in(phone, http)
        for page in (
            "", "/streams", "/stream?name=narrow&place=newest", "/mailboxes", "/services",
            "/groups", "/cursors", "/clients", "/users", "/settings",
        ):  # fmt: skip
            phone.go(f"{http.serving.url}/console{page}")
            assert phone.run("return document.documentElement.scrollWidth") <= 380, page
            # A form that is opened is no wider than the page.
            phone.run("for (const each of document.querySelectorAll('details')) each.open = true")
            assert phone.run("return document.documentElement.scrollWidth") <= 380, page
            cut = phone.run(
                "return [...document.querySelectorAll('section :is(textarea, input, select)')]"
                ".filter(each => !each.closest('.table')"
                " && each.getBoundingClientRect().right > 354).length"
            )
            assert cut == 0, page
        assert phone.run("return document.querySelector('[name=all]').offsetHeight") < 30
        client.edit_service("marked", attempts_max=1)
        client.submit("marked", b"1")
        with client.worker("marked") as worker:
            request = worker.next()
            assert request is not None
            request.fail("no template with this name")
        phone.go(f"{http.serving.url}/console/service?name=marked")
        phone.until("return document.querySelector('th.mark') !== null")
        assert phone.run("return document.querySelector('th.mark').offsetWidth") < 80
        assert phone.run("return document.querySelector('.records tbody tr').offsetHeight") < 80


def test_what_is_pressed_on_a_phone_is_24_pixels_wide_and_high(
    http: RunningHttp, client: SyncClient, tmp_path: Path
) -> None:
    """Links in tables were 17 pixels high, and as narrow as a name of one sign."""
    for name in ("a", "walked"):
        client.publish(name, b"x")
    client.send("walked.box", b"x")
    client.edit_service("walked.service", attempts_max=1)
    client.submit("walked.service", b"x")
    client.cursor("walked", "billing").edit()
    with client.group("walked", "readers", start="latest") as member:
        member.accepted()
    with client.worker("walked.service") as worker:
        request = worker.next()
        assert request is not None
        request.fail("not today")
    client.submit("walked.service", b"x")
    with Chromium(tmp_path / "pressed", width=380, height=800) as phone:
        log_in(phone, http)
        for page in (*PAGES, "/nowhere"):
            phone.go(f"{http.serving.url}/console{page}")
            assert phone.run(SMALL) == [], page


def test_a_refresh_leaves_a_table_where_it_was_scrolled_to_and_what_is_marked(
    http: RunningHttp, client: SyncClient, tmp_path: Path
) -> None:
    client.publish("wide", b"x")
    with Chromium(tmp_path / "scrolled", width=320, height=800) as phone:
        log_in(phone, http)
        phone.go(f"{http.serving.url}/console/streams?prefix=wide")
        phone.run("window.before = document.querySelector('#live table')")
        phone.run("before.parentElement.scrollLeft = 40")
        assert phone.run("return before.parentElement.scrollLeft") == 40
        trigger = phone.run("return document.querySelector('#live').getAttribute('hx-trigger')")
        assert trigger.startswith("every ")
        phone.until("return !before.isConnected")
        assert phone.run("return document.querySelector('#live .table').scrollLeft") == 40
        phone.run(
            "window.before = document.querySelector('#live table');"
            "getSelection().selectAllChildren(before)"
        )
        asked = "return performance.getEntriesByType('resource').length"
        count = phone.run(asked)
        time.sleep(int(trigger.split()[1].removesuffix("s")) + 1)
        assert phone.run(asked) == count
        phone.run("getSelection().removeAllRanges()")
        phone.until("return !before.isConnected")


def test_the_plots_have_the_time_of_day_before_the_first_rates(
    http: RunningHttp, tmp_path: Path
) -> None:
    with Chromium(tmp_path / "early") as window:
        window.devtools(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.written = []; const fill = CanvasRenderingContext2D.prototype.fillText;"
            "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
            "written.push(text); fill.call(this, text, ...at); };",
        )
        log_in(window, http)
        window.until("return written.some(text => text.includes(':'))")
        clocks = window.run("return written.filter(text => text.includes(':'))")
    now = time.time() % 86_400
    for text in clocks:
        hours, minutes, seconds = map(int, text.split(":"))
        age = (now - (hours * 3_600 + minutes * 60 + seconds)) % 86_400
        assert age < 600, clocks


def test_a_page_whose_session_is_over_leads_to_the_login(tmp_path: Path) -> None:
    with (
        EmbeddedBroker(tcp=True) as broker,
        at(broker) as http,
        broker.connect_sync() as client,
        Chromium(tmp_path / "profile") as window,
    ):
        window.go(f"{http.serving.url}/")
        window.click("button.first")
        window.until("return document.querySelector('#live') !== null")
        for each in client.list_links():
            if each.software == "malamute console":
                client.kick(each.link)
        window.until("return location.pathname === '/console/login'")
