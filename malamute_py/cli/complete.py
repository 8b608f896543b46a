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


def _listed(
    ask: Callable[[SyncClient, str, str], Iterable[str]],
) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion that offers names of the chosen broker; none on any failure.

    ask: fetches names. It is given the word so far, and the stream that was named before.
    """

    def offered(ctx: typer.Context, incomplete: str) -> list[str]:
        """Return the names that begin with the word so far; called when a person presses Tab."""
        try:
            from malamute_py.client.sync.client import connect_sync

            # Lines about links would spoil the word that is being completed.
            logging.getLogger("malamute.client").setLevel(logging.CRITICAL)
            context = contexts.chosen(options(ctx))
            if context.asks:
                return []  # In the middle of a word.
            with connect_sync(
                context.endpoints, wait=False, timeout_ms=_WAIT_MS, call_timeout_ms=_WAIT_MS,
                credential=context.credential(),
            ) as client:  # fmt: skip
                found = ask(client, incomplete, ctx.params.get("stream") or "")
                return [name for name in found if name.startswith(incomplete)][:_OFFERED_MAX]
        except Exception:  # noqa: BLE001 - a completion that complains is worse than none
            return []

    return offered


streams = _listed(
    lambda client, begin, _: [each.name for each in client.list_streams(begin, limit=_OFFERED_MAX)]
)
mailboxes = _listed(
    lambda client, begin, _: [
        each.name for each in client.list_mailboxes(begin, limit=_OFFERED_MAX)
    ]
)
services = _listed(
    lambda client, begin, _: [each.name for each in client.list_services(begin, limit=_OFFERED_MAX)]
)
cursors = _listed(
    lambda client, begin, stream: [
        each.cursor for each in client.list_cursors(stream, begin, limit=_OFFERED_MAX)
    ]
)
groups = _listed(
    lambda client, begin, stream: [
        each.group for each in client.list_groups(stream, begin, limit=_OFFERED_MAX)
    ]
)
links = _listed(lambda client, _, __: [str(each.link) for each in client.list_links(1000)])


def context_names(incomplete: str) -> list[str]:
    """List names of the person's contexts, for --context and the commands about contexts."""
    try:
        return [name for name in contexts.Contexts.load().contexts if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - a completion that complains is worse than none
        return []


def among(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion that offers words of a fixed list."""

    def offered(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offered
