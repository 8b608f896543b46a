"""Running the command line: in this process, without a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from typer.main import get_command
from typer.testing import CliRunner

from malamute_py import EmbeddedBroker
from malamute_py.cli.app import app
from malamute_py.server.authentication.credentials import hash_password

_COMMAND = get_command(app)
"""Made once: making the commands anew took most of each run."""


class Outcome:
    """A command's output and its exit code."""

    def __init__(self, code: int, out: bytes, err: str) -> None:
        self.code = code
        self.bytes = out
        self.err = err

    @property
    def out(self) -> str:
        return self.bytes.decode()

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def rows(self) -> list[list[str]]:
        return [line.split("\t") for line in self.lines]

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.lines]

    def ok(self) -> Outcome:
        assert self.code == 0, self.err
        return self


Run = Callable[..., Outcome]


def run_cli(*args: str, stdin: str | bytes | None = None, env: dict[str, str] | None = None
            ) -> Outcome:  # fmt: skip
    with patch("typer.testing._get_command", return_value=_COMMAND):
        result = CliRunner().invoke(app, list(args), input=stdin, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout_bytes, result.stderr)


_PASSWORD = "pw"
_HASH = hash_password(_PASSWORD, salt=bytes(16))


def broker_of(permissions: dict[str, Any], **settings: Any) -> EmbeddedBroker:
    """A broker with a user of each name that has permissions."""
    users = dict.fromkeys((name for name in permissions if name != "*"), _HASH)
    return EmbeddedBroker(
        tcp=True, authentication__mechanism="plain", authentication__users=users,
        permissions=permissions, **settings,
    )  # fmt: skip


def as_user(broker: EmbeddedBroker, user: str) -> Run:
    """Run `malamute ...` against the broker as one of its users."""

    def run(*args: str, stdin: str | bytes | None = None) -> Outcome:
        env = {
            "MALAMUTE_ENDPOINT": broker.tcp_endpoint, "MALAMUTE_USER": user,
            "MALAMUTE_PASSWORD": _PASSWORD,
        }  # fmt: skip
        return run_cli(*args, stdin=stdin, env=env)

    return run


class Torn(io.BytesIO):
    """An output whose reader goes away after so many writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self._left = writes

    def write(self, data: Any) -> int:
        if not self._left:
            raise BrokenPipeError
        self._left -= 1
        return super().write(data)
