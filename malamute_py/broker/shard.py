"""The facts that all parts of one core share.

Owns the identity of the log, the time, the counters, the events, and the questions that
are under way to the journal's index. The rule: time moves forward only, by what the
shell says. Source: DESIGN.md, sections 4 and 12 (a shard is one core with its rings).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.ready import Event, IndexFailure, IndexQuery
from malamute_py.changelog.tables import Queues

Answered = Callable[[Any], None]
"""What goes on with the value of an answer, or with an IndexFailure."""


class Shard:
    """One core's common ground."""

    __slots__ = (
        "_tokens",
        "_waiting",
        "counters",
        "epoch",
        "events",
        "now_ms",
        "queries",
        "queues",
        "random",
        "settings",
        "uuid",
    )

    def __init__(
        self,
        settings: BrokerSettings,
        uuid: bytes,
        epoch: int,
        random: Callable[[int], bytes],
    ) -> None:
        self.settings = settings
        self.uuid = uuid
        self.epoch = epoch
        self.random = random
        self.queues = Queues()
        """Mailboxes, services, cursors, groups and keys, as the change log has them."""
        self.now_ms = 0
        self.counters: defaultdict[str, int] = defaultdict(int)
        """Not a Counter: adding to one costs two and a half times as much."""
        self.events: list[Event] = []
        self.queries: list[IndexQuery] = []
        self._waiting: dict[int, Answered] = {}
        self._tokens = 0

    def advance(self, now_ms: int) -> None:
        """Move time on; a clock that went back is taken to stand still."""
        if now_ms > self.now_ms:
            self.now_ms = now_ms

    def event(self, name: str, level: str = "info", **facts: Any) -> None:
        """Something worth a log line; never a message or a record."""
        self.events.append(Event(name, level, facts))

    def token(self) -> int:
        """A number that this core has not given before."""
        self._tokens += 1
        return self._tokens

    @property
    def questions(self) -> int:
        """How many questions to the index are under way."""
        return len(self._waiting)

    def ask(
        self, ring: str, stream: int, kind: str, arguments: dict[str, Any], then: Answered,
        wanted: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        """Ask the journal's index; `then` gets the value, later. wanted: see IndexQuery."""
        if len(self._waiting) >= self.settings.queries_max:
            then(IndexFailure("wait", "too many questions to the journal are under way"))
            return
        token = self.token()
        self._waiting[token] = then
        self.queries.append(IndexQuery(ring, stream, token, kind, arguments, wanted))

    def answered(self, token: int, value: Any) -> None:
        """The index answered; an answer that nobody waits for is dropped."""
        then = self._waiting.pop(token, None)
        if then is not None:
            then(value)
