"""A real browser: headless Chromium, driven by chromedriver over the WebDriver protocol.

Owns the two processes and the few commands that the tests and the screenshots need. The rule: no
package is needed, since WebDriver is JSON over HTTP. Source: W3C WebDriver.
"""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from tests.waiting import WAIT_S

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
PROGRAMS = ("chromium", "chromedriver")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--disable-dev-shm-usage",
]  # fmt: skip


def missing() -> str:
    """Say which program is not there; empty: all are."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed here: {', '.join(absent)}" if absent else ""


class Chromium:
    """One window of a browser."""

    def __init__(
        self, profile: Path, *, width: int = 1200, height: int = 900, dark: bool = False
    ) -> None:
        self._profile = profile
        self._size = width, height
        self._dark = dark
        self._session = ""

    def __enter__(self) -> Self:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={self._port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._wait_for_driver()
        width, height = self._size
        arguments = [
            *ARGUMENTS,
            f"--user-data-dir={self._profile}",
            f"--window-size={width},{height}",
        ]
        if self._dark:
            arguments.append("--force-dark-mode")
        options = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self._session = f"/session/{made['sessionId']}"
        self.resize(width, height)
        return self

    def resize(self, width: int, height: int) -> None:
        """Show the page in a window of this size."""
        # Emulated: a window has a least width, and a phone's is below it.
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("chromedriver did not come up")

    def __exit__(self, *_: object) -> None:
        if self._session:
            self._ask("DELETE", self._session)
        self._driver.terminate()
        self._driver.wait(WAIT_S)

    def _ask(self, method: str, path: str, value: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        try:
            body = None if value is None and method != "POST" else json.dumps(value or {})
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{answer['error']}: {answer['message']}")
        return answer

    def go(self, url: str) -> None:
        """Open an address."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *values: Any) -> Any:
        """Run a script of the test in the page; returns what it returns."""
        return self._ask(
            "POST", f"{self._session}/execute/sync", {"script": script, "args": list(values)}
        )

    def devtools(self, command: str, **values: Any) -> Any:
        """Run a command of the DevTools."""
        return self._ask(
            "POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": values}
        )

    def _find(self, selector: str) -> str:
        found = self._ask(
            "POST", f"{self._session}/element", {"using": "css selector", "value": selector}
        )
        return f"{self._session}/element/{found[_ELEMENT]}"

    def type(self, selector: str, text: str) -> None:
        """Type into a field."""
        self._ask("POST", f"{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Press a button or follow a link."""
        self._ask("POST", f"{self._find(selector)}/click")

    def press(self, keys: str) -> None:
        """Press keys, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        value = {"actions": [{"type": "key", "id": "keys", "actions": actions}]}
        self._ask("POST", f"{self._session}/actions", value)

    def text(self, selector: str = "body") -> str:
        """Return the text that a person sees."""
        return str(self._ask("GET", f"{self._find(selector)}/text"))

    def until(self, script: str, *values: Any) -> None:
        """Wait until a script returns something true."""
        deadline = time.monotonic() + WAIT_S
        while not self.run(script, *values):
            assert time.monotonic() < deadline, f"it did not come: {script}\n{self.text()}"
            time.sleep(0.05)

    def said(self) -> list[str]:
        """Return what the browser complained about since the last time: errors, refused scripts."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path) -> None:
        """Save what the window shows."""
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))
