"""Completion of names in the shell.

Owns the words offered for the broker's names, for contexts, and for words of a fixed list. The
rule: it answers at once or not at all: when anything goes wrong, it offers and prints nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import typer

from malamute_py.cli import contexts
from malamute_py.cli.options import options

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient

_WAIT_MS: Final = 400
"""Time for an answer of the broker: a person who pressed Tab waits for it."""
_OFFERED_MAX: Final = 200
"""Names that the shell is offered at most."""


def _asked(
    ctx: typer.Context, incomplete: str, ask: Callable[[SyncClient], list[str]]
) -> list[str]:
    """List names of the chosen broker that begin with the word so far; none on any failure.

    ctx: has the options that choose the broker. ask: fetches the names.
    """
    try:
        from malamute_py.client.sync.client import connect_sync

        # Lines about links would spoil the word that is being completed.
        logging.getLogger("malamute.client").setLevel(logging.CRITICAL)
        context = contexts.chosen(options(ctx))
        if context.authentication == "plain" and not (
            context.password_env or context.password_file
        ):
            return []  # The credential would ask for the password in the middle of a word.
        with connect_sync(
            context.endpoints, wait=False, timeout_ms=_WAIT_MS, credential=context.credential()
        ) as client:
            names = [name for name in ask(client) if name.startswith(incomplete)]
            return names[:_OFFERED_MAX]
    except Exception:  # noqa: BLE001 - a completion that complains is worse than none
        return []


def streams(ctx: typer.Context, incomplete: str) -> list[str]:
    """List names of streams."""
    return _asked(
        ctx, incomplete, lambda client: [each.name for each in client.list_streams(incomplete)]
    )


def mailboxes(ctx: typer.Context, incomplete: str) -> list[str]:
    """List names of mailboxes."""
    return _asked(
        ctx, incomplete, lambda client: [each.name for each in client.list_mailboxes(incomplete)]
    )


def services(ctx: typer.Context, incomplete: str) -> list[str]:
    """List names of services."""
    return _asked(
        ctx, incomplete, lambda client: [each.name for each in client.list_services(incomplete)]
    )


def cursors(ctx: typer.Context, incomplete: str) -> list[str]:
    """List names of cursors of the stream named before."""
    stream = ctx.params.get("stream") or ""
    return _asked(
        ctx, incomplete,
        lambda client: [each.cursor for each in client.list_cursors(stream, incomplete)],
    )  # fmt: skip


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """List names of groups of the stream named before."""
    stream = ctx.params.get("stream") or ""
    return _asked(
        ctx,
        incomplete,
        lambda client: [each.group for each in client.list_groups(stream, incomplete)],
    )


def links(ctx: typer.Context, incomplete: str) -> list[str]:
    """List numbers of links."""
    return _asked(
        ctx, incomplete, lambda client: [str(each.link) for each in client.list_links(1000)]
    )


def context_names(incomplete: str) -> list[str]:
    """List names of the person's contexts."""
    try:
        return [name for name in contexts.Contexts.load().contexts if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - a completion that complains is worse than none
        return []


def among(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion that offers words of a fixed list."""

    def offered(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offered
