"""The facts that all parts of one core share.

Owns the identity of the log, the time, the counters, the events, and the questions that are under
way to the journal's index. The rule: time moves forward only, and the shell moves it. Source:
docs/design.md, The core and its shell.

A share is the time of a turn of the loop that one kind of work may take. A batch that the broker
cannot handle is quarantined: readers skip it, and are told of a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

from malamute_protocol.content import Content
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.quotas import Quotas
from malamute_py.broker.ready import Event, IndexFailure, IndexQuery
from malamute_py.broker.structures.fair_queue import FairQueue
from malamute_py.broker.structures.histogram import Histogram
from malamute_py.changelog.tables import Queues

QUARANTINED_MAX = 4_096
"""Batches whose names are remembered, so that each is logged once; then all are forgotten."""


class Inconsistent(BaseException):
    """An error amid a change of state that all links share; no boundary contains it.

    It is no Exception: a boundary that catches errors on behalf of one link must let it through.
    The daemon ends aloud, and the next start takes up what the log has.
    """


def always() -> bool:
    """Return True: a share that lasts, since nothing measures the work."""
    return True


Answered = Callable[[Any], None]
"""Function that is called with the value of an answer, or with an IndexFailure."""
SKEW_MS: Final = 60_000
"""Milliseconds by which a clock may have been set back, while the broker was away, without harm."""
QUESTIONS_AT_ONCE: Final = 4
"""Questions that the shell has at one time; the others wait here, and links have their turns. One
client with 1,000 questions delayed another's replay by 14 s when the shell had them all."""


class Asker(Protocol):
    """A link that has questions."""

    quota_owner: str


class Verdict(NamedTuple):
    """The outcome of a full validation of a typed batch."""

    schema: bytes
    """Arrow schema message by which the batch was validated."""
    code: str = ""
    """Code of the refusal; empty: the batch is one of the schema."""
    reason: str = ""


class Shard:
    """Facts that all parts of one core share."""

    __slots__ = (
        "_quarantined",
        "_tokens",
        "_under_way",
        "_waiting",
        "asking",
        "began_ms",
        "contents",
        "counters",
        "delivery_times",
        "epoch",
        "events",
        "now_ms",
        "queues",
        "quotas",
        "random",
        "request_times",
        "settings",
        "uuid",
        "verdicts",
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
        self.began_ms = 0
        """Time at which the broker began; 0: it is not known."""
        self.counters: defaultdict[str, int] = defaultdict(int)
        """Counts since the start. A Counter would cost two and a half times as much for each
        addition."""
        self.delivery_times = Histogram()
        """Time from a batch's append until it was given to live subscriptions, by batch; to the
        millisecond, as the log's times are."""
        self.request_times = Histogram()
        """Time from a request's acceptance, or the end of its delay, until its reply or completion
        was appended; to the millisecond."""
        self.events: list[Event] = []
        self.quotas = Quotas(self)
        self.asking: Final[FairQueue[Asker | None, IndexQuery]] = FairQueue()
        """Questions that the shell has not been given, by link."""
        self._under_way: set[int] = set()
        """Tokens of questions that the shell has."""
        self._waiting: dict[int, tuple[Answered, Asker | None]] = {}
        """Token of a question -> who is called with the answer, and the link that asked."""
        self._tokens = 0
        """The newest token."""
        self.contents: dict[int, Content] = {}
        """Contents whose header tables were read in steps, by the identity of their frame."""
        self.verdicts: dict[int, Verdict] = {}
        """Outcomes of the batches of the next message that were validated in full, by the identity
        of their frame."""
        self._quarantined: set[tuple[str, int]] = set()
        """(stream, first offset) of batches that cannot be handled."""

    def advance(self, now_ms: int) -> None:
        """Take the time of a call by the shell; it stands still while the clock goes back."""
        if now_ms > self.now_ms:
            self.now_ms = now_ms

    def trusted_end(self, until_ms: int, pause_ms: int) -> int:
        """Return the end of a pause or timeout that began before the start, for its recovery.

        until_ms: the end that was noted, which holds: time counts in which the broker was down.
        pause_ms: the whole length. An end that is further ahead of the start was noted while the
        clock was set ahead, and a request that pauses for five seconds might wait for a day: such
        an end is cut to the start and the length.
        """
        latest_ms = self.began_ms + pause_ms
        if pause_ms and self.began_ms and until_ms > latest_ms + SKEW_MS:
            return latest_ms
        return until_ms

    def share(self, part: int = 1) -> Callable[[], bool]:
        """Begin a share of a turn of the loop; the function that is returned tells if it lasts.

        Each kind of serving asks it between two pieces of its work, and stops when it says False.
        part: only one part in so many of the share.
        """
        meter, most = self.settings.meter, self.settings.matching_share // part
        if meter is None:
            return always
        until = meter() + most
        return lambda: meter() < until

    def event(self, name: str, level: str = "info", **facts: Any) -> None:
        """Note an event worth a log line; a message or a record never is."""
        self.events.append(Event(name, level, facts))

    def erred(self, doing: str, error: Exception, **facts: Any) -> None:
        """Note an error that no code foresaw and that was contained: one log line has all of it."""
        self.counters["internal_errors"] += 1
        self.event("internal_error", "error", doing=doing, error=error, **facts)

    def quarantine(
        self, stream: str, base: int, next: int, doing: str, error: Exception, **facts: Any
    ) -> str:
        """Report a stored batch that cannot be handled; returns the reason that readers are told.

        Called where an error arose over a batch on its way to readers, which skip it. It is counted
        and logged once, however many readers it is met for. base, next: its first offset, and the
        offset after it. doing: what failed. facts: more for the event.
        """
        batch = stream, base
        if batch not in self._quarantined:
            if len(self._quarantined) >= QUARANTINED_MAX:  # Some may be logged twice then.
                self._quarantined.clear()
            self._quarantined.add(batch)
            self.counters["batches_quarantined"] += 1
            self.event(
                "batch_quarantined", "error", stream=stream, **{"from": base, "to": next},
                doing=doing, error=error, **facts,
            )  # fmt: skip
        return f"the broker cannot handle this batch: {type(error).__name__}"

    def content(self, frame: Any) -> Content:
        """Return the content that a peer sent, checked. Raises BatchError: it is not taken."""
        content = self.unchecked_content(frame)
        content.check(self.settings.limits, taking=True)  # A writer's reserved bytes are 0, too.
        return content

    def unchecked_content(self, frame: Any) -> Content:
        """Return the content that a peer sent. Raises BatchError as Content() does.

        Its limits are not checked: for a look at a content that another call checks.
        """
        if self.contents:  # It may have been read ahead, when the message came.
            found = self.contents.get(id(frame))
            if found is not None:
                return found
        return Content(frame)

    def was_read(self, contents: Iterable[Content]) -> None:
        """Keep contents that were read before their message, for content(); none: forget all."""
        self.contents = {id(content.buffer): content for content in contents}

    def token(self) -> int:
        """Return a number that no other question, read or bundle has: its answer names it."""
        self._tokens += 1
        return self._tokens

    @property
    def questions(self) -> int:
        """How many questions to the index are under way."""
        return len(self._waiting)

    def ask(
        self, ring: str, stream: int, kind: str, arguments: dict[str, Any], then: Answered,
        asker: Asker | None = None, wanted: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        """Ask the journal's index; `then` gets the value or an IndexFailure, later.

        A question that a bound refuses is answered at once. kind, arguments: the question, as
        IndexQuery has it. asker: the link for whose quota it counts; None: the broker itself asks.
        wanted: see IndexQuery.
        """
        if len(self._waiting) >= self.settings.queries_max:
            then(IndexFailure("wait", "too many questions to the journal are under way"))
            return
        if asker is not None:
            try:
                self.quotas.check(asker.quota_owner, "questions")
            except BrokerRefused as error:
                then(IndexFailure(error.code, error.reason))
                return
            self.quotas.add(asker.quota_owner, "questions")
        token = self.token()
        self._waiting[token] = then, asker
        self.asking.add(asker, IndexQuery(ring, stream, token, kind, arguments, wanted))

    def take_queries(self) -> list[IndexQuery]:
        """Return the questions that the shell is to ask the index now: one of each link, in turn.

        The shell has QUESTIONS_AT_ONCE of them at most; the others wait in `asking`.
        """
        taken: list[IndexQuery] = []
        while self.asking and len(self._under_way) < QUESTIONS_AT_ONCE:
            query = self.asking.take()
            self._under_way.add(query.token)
            taken.append(query)
        return taken

    def answered(self, token: int, value: Any) -> None:
        """Hand an answer of the index to its asker; it is dropped where none waits for it."""
        self._under_way.discard(token)
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            then, asker = waiting
            if asker is not None:
                self.quotas.add(asker.quota_owner, "questions", -1)
            then(value)
