"""Ends of a command: exit codes, and errors as one line.

Owns the meaning of each exit code and the words for every failure that is expected. The rule: a
line says what happened, to what, and what to do next; only a bug shows a traceback.
"""

from __future__ import annotations

import errno
from typing import Any, Final

import typer

from malamute_protocol.errors import (
    BrokerRefused,
    ConnectionLost,
    MalamuteError,
    ProtocolError,
    Timeout,
)
from malamute_py.extras import missing

OK: Final = 0
FAILED: Final = 1
"""Exit code: the broker refused, or something is damaged or missing."""
USAGE: Final = 2
"""Exit code: the command line, a setting or a pattern is wrong."""
UNREACHABLE: Final = 3
"""Exit code: there was no link to a broker, or it was lost."""
TIMED_OUT: Final = 4
LOST: Final = 5
"""Exit code: the command did what it was asked for, and records were lost."""
INTERRUPTED: Final = 130

_NEXT: Final = {
    "unknown_stream": "`malamute stream ls` lists the streams, `malamute stream create NAME`"
    " makes one",
    "stream_exists": "`malamute stream info NAME` shows its settings, `stream edit` changes them",
    "bad_setting": "`malamute stream info NAME` shows the settings by name; so does `info` of a"
    " mailbox, service or cursor",
    "unauthenticated": "check the credential of the context (`malamute context show`), or, without"
    " a context, MALAMUTE_USER and MALAMUTE_PASSWORD",
    "forbidden": "ask the broker's operator for the permission",
    "full": "the stream refuses when full: remove old records, or keys, or give it a larger ring",
    "journal_failed": "see the broker's log; it has to be restarted",
    "limit": "see the broker's configuration: its section [limits], or that of the kind of thing",
    "queues_lost": "see the broker's log: its operator restores a snapshot, or accepts the loss",
    "too_large": "see the section [limits] of the broker's configuration",
    "permissions_changed": "run the command again",
    "draining": "try again when the broker is back",
    "no_workers": "start one with `malamute work SERVICE -- COMMAND`, or wait for one: leave"
    " --need-workers off",
    "unknown_link": "`malamute client ls` lists them",
    "kicked": "the broker's operator ended this link",
}
"""Code of a refusal -> what to do next."""

_USAGE_CODES: Final = frozenset(
    {"bad_name", "bad_setting", "bad_pattern", "unknown_pattern_kind", "bad_start"}
)
"""Codes of refusals that the words of the command line caused."""


class CommandFailed(typer.TyperException):
    """A command cannot go on; `exit_code` is one of the above."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        """message: what happened, to what, what to do next; without a final stop."""
        super().__init__(message)
        self.exit_code = exit_code


def unreachable(endpoint: str, why: str, following: str = "") -> CommandFailed:
    """Return the error for a broker that no link could be made to.

    why: the client's words for the last attempt, which decide what to do next. following: says
    that where the caller knows better.
    """
    following = following or (
        "start one with `malamute broker`, or name another with --endpoint or --context"
    )
    if why.startswith("nothing answers"):
        return CommandFailed(f"no broker answers at {endpoint}; {following}", UNREACHABLE)
    if "credential" in why:  # The broker answers, and wants another one.
        following = "`malamute context add NAME --user USER` (or --server-key) makes one with it"
    elif "host name" in why:
        following = "--endpoint or --context names another broker"
    return CommandFailed(f"no link to {endpoint}: {why}; {following}", UNREACHABLE)


def _has_settings(ctx: Any) -> bool:
    """Whether the command takes --set; then a bare `max_messages=1` was meant as its value."""
    return ctx is not None and any("--set" in each.opts for each in ctx.command.params)


def explained(error: BaseException) -> tuple[str, int] | None:
    """Return one line and the exit code for an expected failure; None for a bug.

    Called where a command ends, so that None shows a traceback. The line says what happened, and
    what to do next where that is known.
    """
    from malamute_py.cli import late

    if isinstance(error, typer.TyperException):
        # The framework's own error about the command line, or CommandFailed of a command.
        text = error.format_message().replace("Value error, ", "")  # The framework's prefix.
        ctx = getattr(error, "ctx", None)
        if "unexpected extra argument" in text and "=" in text and _has_settings(ctx):
            text = f"{text.rstrip('.')}: a setting is written --set NAME=VALUE"
        if ctx is not None and not text.startswith("Usage:"):
            text = text.rstrip(".")
            text += " See " if text.endswith("?") else "; see "
            text += f"`{ctx.command_path} --help`"
        return text, error.exit_code
    if isinstance(error, BrokerRefused):
        text = str(error)
        # The reason names the quota's setting, which says more than the advice for its code.
        following = None if "quotas." in text else _NEXT.get(error.code)
        code = USAGE if error.code in _USAGE_CODES else FAILED
        return (f"{text}; {following}" if following else text), code
    if isinstance(error, ConnectionLost):
        return f"the link to the broker was lost: {error}", UNREACHABLE
    if isinstance(error, Timeout):
        return str(error), TIMED_OUT
    if late.is_config_error(error):
        return str(error), USAGE
    if isinstance(error, ProtocolError):
        return str(error), USAGE if error.code in _USAGE_CODES else FAILED
    if isinstance(error, MalamuteError):
        return str(error), FAILED
    if isinstance(error, ModuleNotFoundError):
        advice = missing(error, "this command")
        return None if advice is None else (advice, FAILED)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}", FAILED
    # Output that cannot be written, as on a full disk, has no file's name.
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return f"writing failed: {(error.strerror or str(error)).lower()}", FAILED
    return None
