"""What the verbs for threads stand on.

Owns the names under which a client's link and session are found. The rule: a group of
verbs is a class of its own over this one, and the client is nothing but their sum.
"""

from __future__ import annotations

from malamute_py.client.session.session import Session
from malamute_py.client.thread import ThreadLink


class SyncVerbs:
    """Verbs of the client for threads."""

    _link: ThreadLink
    _session: Session
