"""The loggers of a client, and the calling of its user's functions.

Owns the names of the loggers. The rule: whatever a user's function raises is logged, and the link
goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger("malamute.client")
LINK_LOG = logging.getLogger("malamute.client.link")
"""One line when the link is lost and one when it is back."""


def guarded(what: str, call: Callable[[Any], None], argument: Any) -> None:
    """Call a user's function; what it raises is logged and goes no further."""
    try:
        call(argument)
    except Exception:
        LOG.exception("%s raised; the link goes on", what)
