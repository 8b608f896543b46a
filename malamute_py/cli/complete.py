"""Completion of names in the shell.

Owns the words offered for streams and contexts. The rule: it answers at once or not at
all: whatever goes wrong, nothing is offered and nothing is said.
"""

from __future__ import annotations

from typing import Final

import typer

from malamute_py.cli import contexts, linking

_WAIT_MS: Final = 400
_OFFERED_MAX: Final = 200


def streams(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of streams of the chosen broker."""
    try:
        from malamute_py.client.sync import connect_sync

        context = contexts.chosen(linking.options(ctx))
        if context.authentication == "plain" and not (
            context.password_env or context.password_file
        ):
            return []  # it would ask for the password in the middle of a word
        with connect_sync(
            context.endpoints, wait=False, timeout_ms=_WAIT_MS, credential=context.credential()
        ) as client:
            return [found.name for found in client.list_streams(incomplete)[:_OFFERED_MAX]]
    except Exception:  # noqa: BLE001 - a completion that complains is worse than none
        return []


def context_names(incomplete: str) -> list[str]:
    """Names of the person's contexts."""
    try:
        return [name for name in contexts.Contexts.load().contexts if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - as above
        return []
