"""Options of the command's root that every command may read: the broker, the identity, the wait.

Owns where they are kept between the root and the command. The rule: an option means the same
wherever on the line it stands. Source: click, Context.meta.
"""

from __future__ import annotations

from typing import Any, Final

import typer

_KEPT: Final = "malamute.options"


def remember(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Keep an option for options(). Called by the framework for each place it may stand at.

    value: None: it does not stand there.
    """
    if value is not None:
        ctx.meta.setdefault(_KEPT, {})[param.name] = value
    return value


def options(ctx: typer.Context) -> dict[str, Any]:
    """Return the options of the root that the person gave, by name, for a command."""
    kept: dict[str, Any] = ctx.meta.get(_KEPT, {})
    return kept
