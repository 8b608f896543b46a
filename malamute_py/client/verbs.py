"""What the verbs of each shell stand on.

Owns the names under which a client's link and session are found. The rule: a group of
verbs is a class of its own over one of these two, and the client is nothing but their sum.
"""

from __future__ import annotations

from malamute_py.client.loop import LoopLink
from malamute_py.client.session.session import Session
from malamute_py.client.thread import ThreadLink


class AsyncVerbs:
    """Verbs of the asyncio client."""

    _link: LoopLink
    _session: Session


class SyncVerbs:
    """Verbs of the client for threads."""

    _link: ThreadLink
    _session: Session
