"""A broker that hangs: each page says so before the bound of a request cuts the connection."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from malamute_py.promises.daemon import Daemon
from tests.http.console.browsing import Browser
from tests.http.running import RunningHttp

pytestmark = [pytest.mark.slow, pytest.mark.system]


@pytest.mark.parametrize("path", ["", "streams"])
def test_a_page_of_a_silent_broker_says_so(path: str, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, RunningHttp(daemon.endpoint) as http:
        browser = Browser(http.address)
        assert browser.log_in().status == 200  # its facts are known, and still new
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            page = browser.get(path)
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        # The overview shows what is known, unless its facts were so new that it asked for more.
        assert (page.status, path) in ((200, ""), (503, ""), (503, "streams"))
        assert re.search("The broker does not answer: |was not answered within", page.words)
