"""The page of settings: values with their origin, and what a reload did with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from malamute_py.broker.administration import Administration
from malamute_py.config import load
from malamute_py.config_check import examine
from malamute_py.server import Server
from tests.http.console.browsing import Browser
from tests.http.running import RunningHttp
from tests.server.fakes import Lines

TEXT = """\
listen = ["tcp://127.0.0.1:0"]
data_directory = ""
[streams]
streams_max = 5
"""


@pytest.mark.moderate
def test_a_reload_is_asked_for_and_the_page_tells_what_it_did(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(TEXT)
    server = Server(load(file), log=Lines(), reread=partial(examine, file))
    with server, RunningHttp(server.endpoints[0]) as http:
        browser = Browser(http.address)
        assert browser.log_in().status == 200
        words = browser.get("settings").words
        assert f"streams.streams_max 5 {file}:4 –" in words
        assert "was not read anew since the start" in words
        page = browser.post("do/reload")
        assert "Done: The configuration was read anew: nothing differs" in page.words
        assert "Nothing differed from what was in force" in page.words
        new = "[loop]\ndrain_ms = 7\n[links]\nlinks_max = 0\n"
        file.write_text(TEXT.replace("= 5", "= 6") + new)
        words = browser.post("do/reload").words
        assert "1 applied, 1 refused, 1 left for a restart" in words
        assert f"streams.streams_max 6 {file}:4 applied" in words
        assert "links.links_max 12,000 default refused" in words
        assert "loop.drain_ms 2 s default restart" in words
        assert "links.links_max ✕ refused" in words


@pytest.mark.moderate
def test_a_person_who_is_no_administrator_is_told_why_no_values_are_shown(reader: Browser) -> None:
    words = reader.get("settings").words
    assert "Not shown: forbidden: you may not see the settings" in words
    assert "********" not in words
    assert "you may not have the configuration read anew" in reader.post("do/reload").words


@pytest.mark.moderate
def test_an_earlier_broker_tells_no_settings(
    root: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Administration, "_settings_after", lambda self, after: {})
    page = root.get("settings")
    assert "Not told: this broker is an earlier one" in page.words
