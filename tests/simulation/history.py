"""Answers to programs, compared with the log: the model of the scenario `clients`.

Owns the history of every call and of everything that was shown to a program. The rules: a confirm
that a caller got names what is in the log, for good when it was synced; what was refused is not
there; what was acknowledged was shown to a program before; a request dies only when its handler
failed it for good or its attempts are used up; an answer is one that a worker gave to this very
request. Source: SPEC.md, sections 4.4, 4.5 and 4.8; README.md, "What is promised".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from malamute_py.broker.ready import MAIL_STREAM
from malamute_py.changelog import records as r
from tests.simulation.acts import LEVEL_SYNCED, Act, Wish
from tests.simulation.model import Violation
from tests.simulation.work_model import WorkModel
from tests.simulation.work_state import State

UNDECIDED = frozenset({"journal_failed", "internal"})
"""Codes of refusals after which the refused act may have happened all the same."""


@dataclass(slots=True)
class History:
    """Words and sights of programs, over every death of the broker."""

    shown: set[tuple[str, int]] = field(default_factory=set)
    """(mailbox, service, or stream and group; serial) that was handed to a program."""
    mails: set[int] = field(default_factory=set)
    """Serials that were sent as mail."""
    failing: set[int] = field(default_factory=set)
    """Serials of requests that a handler has failed for good."""
    replies: dict[int, int] = field(default_factory=dict)
    """Serial of a reply -> serial of the request that it answers."""
    confirmed: int = 0


@dataclass(slots=True)
class ToldState(State):
    """The state, which knows what programs have seen."""

    history: History = field(default_factory=History)

    def _mail_done(self, change: r.MailDone, lsn: int) -> None:
        if change.why == "acknowledged":
            for base, rows in change.rows:
                for number in self._numbers(base, rows, self._letters(change.mailbox, base)):
                    serial = self.records[MAIL_STREAM, number]
                    place = self.boxes[change.mailbox]
                    if serial in self.history.mails and (place, serial) not in self.history.shown:
                        raise Violation("unseen", f"message {number} of {place}, record {serial}")
        State._mail_done(self, change, lsn)

    def _request_done(self, change: r.RequestDone, lsn: int) -> None:
        if change.why == "completed":
            for base, rows in change.rows:
                for number in self._of(base, rows, lambda job: True):
                    serial = self.records[MAIL_STREAM, number]
                    place = self.services[change.service]
                    if (place, serial) not in self.history.shown:
                        raise Violation("unseen", f"request {number} of {place}, record {serial}")
        State._request_done(self, change, lsn)

    def _request_dead(self, change: r.RequestDead, lsn: int) -> None:
        for base, rows in change.rows:
            for number in self._of(base, rows, lambda job: True):
                serial = self.records[MAIL_STREAM, number]
                failed = change.why.partition(":")[0] == "failed"
                if failed and serial not in self.history.failing:
                    raise Violation("dead", f"request {number}, record {serial}: {change.why}")
        State._request_dead(self, change, lsn)

    def _group_done(self, change: r.GroupDone, lsn: int) -> None:
        place = f"{self.streams[change.stream]}/{change.name}"
        for first, end in change.ranges:
            for offset in range(first, end):
                serial = self.records.get((change.stream, offset))
                dead = (change.stream, change.name, offset) in self.buried
                if serial is not None and not dead and (place, serial) not in self.history.shown:
                    raise Violation("unseen", f"{place}: offset {offset}, record {serial}")
        State._group_done(self, change, lsn)


class ToldModel(WorkModel):
    """The model of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History()
        self.state = ToldState(history=self.history)

    def _new_state(self) -> State:
        state = self.state
        return ToldState(
            state.slack_ms, state.attempts_max, state.messages_max, state.keys_max,
            state.unordered, group_attempts=state.group_attempts, history=self.history,
        )  # fmt: skip

    def _step_of(self, change: r.StepTaken) -> Act | None:
        """Return the key of a step; the library merges the steps of several callers under one."""
        return None

    # --- what callers are told ----------------------------------------------------------------

    def show(self, place: str, serial: int) -> None:
        """Note that a program is handed this."""
        self.history.shown.add((place, serial))

    def caller_confirmed(
        self, act: Act, stream: str, offset: int, level: int, *, sure: bool
    ) -> None:
        """Note that a caller was told that this happened.

        stream: of the offset; empty: mail and requests. sure: nothing can have taken it back since
        the broker said so.
        """
        state = self.state
        self.history.confirmed += 1
        number = self.place_of(stream)[0] if stream else MAIL_STREAM
        serials = [serial for wish in act.wishes for serial in wish.serials]
        lsns = set()
        for serial in serials:
            lsn = state.serials.get(serial)
            if lsn is None:
                if level == LEVEL_SYNCED or sure:
                    raise Violation("lost", f"record {serial} of {act} was confirmed to its caller")
                return
            lsns.add(lsn)
        if act.atomic and len(lsns) > 1:
            raise Violation("half_step", f"{act} lies in the bundles {sorted(lsns)}")
        if serials and offset >= 0 and state.records.get((number, offset)) != serials[0]:
            raise Violation("wrong_confirm", f"offset {offset} of {stream or 'mail'} for {act}")
        for wish in act.wishes:
            self._ended(act, wish, sure=sure or level == LEVEL_SYNCED)
        if level == LEVEL_SYNCED:
            for lsn in lsns:
                bundle = self._at(lsn)
                if bundle.end_lsn > self.told_lsn:
                    raise Violation("early", f"{act}: the disk has {self.told_lsn}")
                bundle.promised = bundle.promised or f"confirmed to its caller: {act}"

    def _ended(self, act: Act, wish: Wish, *, sure: bool) -> None:
        state = self.state
        for number in wish.numbers if sure else ():
            if wish.kind == "ack" and number not in state.gone_mail:
                raise Violation("wrong_confirm", f"message {number} is there still: {act}")
            if wish.kind == "end" and number not in state.gone_jobs:
                raise Violation("wrong_confirm", f"request {number} is there still: {act}")
            if wish.kind == "records":
                position, done = state.groups.get(self.place_of(wish.place), (0, frozenset()))
                if number >= position and number not in done:
                    raise Violation("wrong_confirm", f"record {number} is not done: {act}")

    def caller_refused(self, act: Act, code: str) -> None:
        """Note that a caller was told that nothing of this happened."""
        if code in UNDECIDED:
            return
        for wish in act.wishes:
            for serial in wish.serials:
                if serial in self.state.serials:
                    raise Violation("refused_kept", f"{code} for {act}")

    def answered_caller(self, request: int, reply: int) -> None:
        """Note that the caller of a request got this reply."""
        if self.history.replies.get(reply) != request:
            raise Violation(
                "wrong_reply",
                f"record {reply} answers {self.history.replies.get(reply)}, not {request}",
            )

    def failed_caller(self, request: int, why: str, *, power: bool) -> None:
        """Note that the caller of a request was told that it has failed."""
        if why == "failed" and request not in self.history.failing:
            raise Violation("wrong_reply", f"{why} for record {request}, which no handler failed")
