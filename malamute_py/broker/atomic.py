"""Commands that change something, alone or as parts of one atomic step.

Owns the way from such a command to a step: the order of the checks, and the one answer. The rules:
a command outside ATOMIC is a step of one part; a step whose key was taken before is confirmed
again, and nothing of it happens twice; a key that another command took, or the same one with
another content, is a conflict; the reason that refuses one part refuses all parts, and what the
others had reserved is free again. Source: SPEC.md, section 4.8; docs/design.md, Queues and the
checkpoint.

A part is what one command adds to a step. The window of a link is the bytes that its client may
have sent without a confirm. A key is the name of a command, by which it is taken once. A waiter is
a sender that is to be confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from malamute_protocol import commands as wire
from malamute_protocol.commands import Command
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.framing import NUMBERS
from malamute_protocol.stamp import STAMP_BYTES
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import ERRED, Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.confirms import LEVEL_NAMES, NONE, STORED, SYNCED
from malamute_py.broker.log.keys import KEYED, differ, digest_of, digest_of_parts, is_use
from malamute_py.broker.log.ring import Waiter
from malamute_py.broker.log.steps import Part, Steps, content_size
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.streams.validation import needed_setting
from malamute_py.changelog.records import StepTaken

Prepare: TypeAlias = Callable[[Link, Any, Any], Part]
"""(link, command, its content frame or None) -> part; raises BrokerRefused."""

ATOMIC: Final = 66
ADDING: Final = (wire.Send, wire.Request, wire.Publish, wire.Stage)
"""Commands that bring more than they take away: they are the first to wait when the log is full."""
WRITING: Final = (wire.Publish, wire.Stage)
"""Commands that create their stream when it is not there."""
ENDING: Final = (wire.Reply, wire.AckWork)
"""Commands whose key the log keeps beside the end of the work that they name."""
_HAVE_KEYS: Final = frozenset((*KEYED, *ENDING))


class Intake:
    """Takes the commands that change something."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        steps: Steps,
        publishing: Publishing,
        catalogue: Catalogue,
        prepares: Mapping[type[Command], Prepare],
        together: Mapping[type[Command], Prepare],
        again: Callable[[Link, wire.Request], None],
        answers: Answers,
        lost: str,
    ) -> None:
        """prepares: by type of command, the method that checks it and makes its part of a step.

        together: those that differ when the command is one of several parts. again: called with a
        REQUEST whose key was taken before, to tell of lost replies. lost: why there are no queues,
        and so no steps; "": there are queues.
        """
        self._shard = shard
        self._links = links
        self._steps = steps
        self._publishing = publishing
        self._catalogue = catalogue
        self._prepares = dict(prepares)
        self._together = {**prepares, **together}
        self._again = again
        self._answers = answers
        self._lost = lost
        self.kinds = frozenset(self._prepares)
        """The commands that are steps of their own."""

    # --- alone -----------------------------------------------------------------------------

    def single(self, link: Link, command: Any, frame: Any) -> None:
        """Take one command as a step of its own, or refuse it by name.

        Called for each command of `kinds` that is not in an ATOMIC. frame: the content that came
        with it; None: it has none.
        """
        kind = type(command)
        try:
            if self._lost:
                self._check_lost()
            size = window_bytes(frame)
            key: tuple[str, bytes] | None = None
            if kind in _HAVE_KEYS and command.key:
                key = link.holder, command.key
                if self._taken_before(link, command, key, size, [(command, frame)]):
                    if kind is wire.Request:  # Its reply may be lost, which the requester is told.
                        self._again(link, command)
                    return
            adds = kind in ADDING
            self._steps.check(link, size, adds=adds, awaited=_awaited(command))
            # counted: its messages count for the owner or its namespace; metered: there is a rate.
            counted = adds and link.usage.counted
            if counted and link.usage.metered:
                self._shard.quotas.check_rate(link.usage)
            part = self._prepares[kind](link, command, frame)
            waiter = self._waiter(link, command, size, part.level)
            if part.memory and command.level in (STORED, SYNCED) and waiter is not None:
                raise BrokerRefused(
                    "unsupported",
                    f"what is in memory only cannot confirm '{LEVEL_NAMES[command.level]}'",
                )
        except BrokerRefused as error:
            self._answers.refuse_with(link, command, error)
            return
        parts = [part]
        if counted:
            _spend(link, parts)
        digest = part.digest
        if key is not None and kind in ENDING:
            # Of other commands the change of the part itself brings key and digest into the log.
            digest = self._digest(command, [(command, frame)])
            if not part.memory:
                parts.append(self._key_taken(link, command, digest))
        self._steps.take(parts, waiter, key, command=command, digest=digest)

    def _key_taken(self, link: Link, command: Any, digest: int) -> Part:
        """Return a part that puts the key of an answer or a step into the log, to know retries."""
        number = NUMBERS[type(command)]
        return Part([StepTaken(link.holder, command.key, self._shard.now_ms, number, digest)])

    def _digest(self, command: Command, parts: Sequence[tuple[Command, Any]]) -> int:
        """Return a digest of the contents that a command brings; 0: none. Raises BatchError.

        By it a command that comes again under the same key is told from another one. parts: of
        ATOMIC its parts, else the command itself, each with its frame or None.
        """
        # The limits of the contents are checked where the parts are prepared, not here.
        content = self._shard.unchecked_content
        if type(command) is wire.Atomic:
            return digest_of_parts(
                (part, content(frame)) for part, frame in parts if frame is not None
            )
        frame = parts[0][1]
        return 0 if frame is None else digest_of(content(frame))

    def _check_lost(self) -> None:
        """Raise BrokerRefused `queues_lost` if the broker began without its queues."""
        if self._lost:
            raise BrokerRefused("queues_lost", self._lost)

    def _taken_before(
        self,
        link: Link,
        command: Any,
        key: tuple[str, bytes],
        size: int,
        parts: Sequence[tuple[Command, Any]],
    ) -> bool:
        """Whether a step is a retry of one that was taken; its answer is on its way then.

        The question comes before all that may let the step wait: a client that is refused may take
        the step for not taken, and send it anew under another key. parts: as `_digest` has them.
        Raises BrokerRefused: as `_known` does, or ring main refuses every append.
        """
        self._steps.check_ring()
        return self._known(link, command, key, self._waiter(link, command, size, SYNCED), parts)

    def _known(
        self,
        link: Link,
        command: Any,
        key: tuple[str, bytes],
        waiter: Waiter | None,
        parts: Sequence[tuple[Command, Any]],
    ) -> bool:
        """Whether a key was accepted for this command; the waiter is confirmed then.

        Asked when the command comes, and of a step again once its streams are created: the same
        step may have been taken meanwhile. Raises BrokerRefused: `conflict`, the key was accepted
        for another command or content; or what is wrong with a content.
        """
        use, digest = self._steps.accepted_for(key)
        if use is None:  # No command was accepted under the key.
            return False
        if not is_use(use, command, self._shard.queues):
            raise self._conflict(link, command, "by another command")
        if digest:  # The content is digested only where there is a digest to compare with.
            try:
                same = not differ(digest, self._digest(command, parts))
            except BatchError as error:
                raise BrokerRefused(error.code, error.reason) from error
            if not same:
                raise self._conflict(link, command, "with another content")
        return self._steps.known(key, waiter)

    def _conflict(self, link: Link, command: Any, why: str) -> BrokerRefused:
        """Return the refusal of a key taken with other content; report the first one of a link."""
        self._shard.counters["steps_conflicting"] += 1
        if not link.conflicted:
            link.conflicted = True
            self._shard.event(
                "key_conflicting", "warning", link=link.number, holder=link.holder,
                command=type(command).__name__,
            )  # fmt: skip
        return BrokerRefused("conflict", f"key {command.key!r} was taken before, {why}")

    def _waiter(self, link: Link, command: Any, size: int, default: int) -> Waiter | None:
        """Return the waiter for a confirm; None: no answer is wanted.

        size: bytes of the sender's window that the step takes. default: level of a command without
        one. Raises BrokerRefused: there is no such level.
        """
        level = command.level or default
        if level not in (NONE, STORED, SYNCED):
            name = LEVEL_NAMES.get(level, str(level))
            raise BrokerRefused("unsupported", f"this broker has no confirm level '{name}'")
        if not command.tracker:
            return None
        if level == NONE and not command.level:
            # The sender did not ask for `none`: STORED lets it have a confirm, which says by its
            # level what memory can do.
            level = STORED
        number = NUMBERS[type(command)]
        # A step that is never confirmed takes nothing of the sender's window. patient: the confirm
        # goes out with what is sent to the link next.
        return Waiter(
            link, command.tracker, level, 0 if level == NONE else size, command=number,
            patient=type(command) is wire.Reply and command.patient,
        )  # fmt: skip

    # --- together --------------------------------------------------------------------------

    def atomic(
        self, link: Link, command: wire.Atomic, parts: Sequence[tuple[Command, Any]]
    ) -> None:
        """Take the commands of an ATOMIC, each with its content frame or None, as one step.

        Streams that the step is the first to write to are created before it is taken.
        """
        try:
            self._check_lost()
            self._check_parts(parts)
            size = sum(window_bytes(frame) for _, frame in parts)
            limit = self._shard.settings.limits.batch_bytes_max
            if size > limit:
                raise BrokerRefused("too_large", f"a step of {size} bytes, at most {limit}")
            key = (link.holder, command.key) if command.key else None
            if key is not None and self._taken_before(link, command, key, size, parts):
                for part, _ in parts:
                    if type(part) is wire.Request and part.key:
                        self._again(link, part)
                return
            adds = any(isinstance(part, ADDING) for part, _ in parts)
            self._steps.check(link, size, adds=adds, awaited=_awaited(command))
            missing = self._missing(parts)
        except BrokerRefused as error:
            self._answers.refuse_with(link, command, error)
            return
        if not missing:
            self._take(link, command, parts)
            return
        # While the step waits it is held in memory: the window counts it like a taken one.
        link.unconfirmed_bytes += size
        self._with_streams(link, command, parts, missing, at=0, size=size)

    def _missing(self, parts: Sequence[tuple[Command, Any]]) -> list[str]:
        """Return the names of the streams that are made for a step: those that it is to write to.

        A stream of which a part needs a setting (`keep`, a schema) is not made by first use: the
        part is refused when it is prepared. Raises BrokerRefused `wait`: such a stream is being
        created.
        """
        missing = set()
        for part, _ in parts:
            if not isinstance(part, WRITING) or self._catalogue.get(part.stream) is not None:
                continue
            if not needed_setting(part):  # Any stream of the name will do.
                missing.add(part.stream)
            elif self._catalogue.expects(part.stream):
                raise BrokerRefused("wait", f"stream '{part.stream}' is being created")
        return sorted(missing)

    def _check_parts(self, parts: Sequence[tuple[Command, Any]]) -> None:
        """Raise BrokerRefused unless an ATOMIC may have these commands, before any is prepared.

        They have no tracker, since the step has the one answer; a key of their own have only those
        whose key names a batch (SEND, REQUEST).
        """
        if not parts:
            raise BrokerRefused("malformed", "a step without parts")
        most = self._shard.settings.limits.step_parts_max
        if len(parts) > most:
            raise BrokerRefused("too_large", f"a step of {len(parts)} parts, at most {most}")
        for part, _ in parts:
            name = type(part).__name__
            if type(part) not in self.kinds and not isinstance(part, wire.Publish):
                raise BrokerRefused("unsupported", f"{name} cannot be a part of a step")
            if getattr(part, "tracker", 0):
                raise BrokerRefused("malformed", f"{name} in a step has a tracker of its own")
            if isinstance(part, ENDING) and part.key:
                raise BrokerRefused(
                    "malformed", f"{name} in a step has a key: the step's own key names it"
                )

    def _with_streams(
        self,
        link: Link,
        command: wire.Atomic,
        parts: Sequence[tuple[Command, Any]],
        missing: list[str],
        at: int,
        size: int,
    ) -> None:
        """Create streams that the step is the first to use, one by one, and take the step.

        missing: their names, of which those before `at` are there by now. size: bytes of the step,
        which the link's window counts meanwhile.
        """
        while at < len(missing) and self._catalogue.get(missing[at]) is not None:
            # Another step has created this stream meanwhile: the loop goes on without a call, since
            # a chain of calls would be as deep as the streams are many.
            at += 1
        if at == len(missing):  # All are there: the step is taken, and its bytes count there.
            link.unconfirmed_bytes -= size
            if link.open:
                self._take(link, command, parts)
            return
        name = missing[at]

        shard = self._shard
        verdicts = shard.verdicts

        def created(stream: Stream) -> None:
            """Go on with the parts of the step now that a missing stream of it is there."""
            # By now another message may be under way, whose batches were validated with outcomes of
            # their own (`verdicts`): those of this step are put in their place for its turn.
            others, shard.verdicts = shard.verdicts, verdicts
            try:
                self._with_streams(link, command, parts, missing, at + 1, size)
            finally:
                shard.verdicts = others

        def refused(code: str, reason: str, retry_ms: int) -> None:
            link.unconfirmed_bytes -= size
            self._answers.refuse(link, command, code, reason, retry_ms)

        settings = self._shard.settings
        if (
            not settings.permit(link.owner, "write", name)
            and settings.subjects(link.owner, name) is None
        ):
            refused("forbidden", f"you may not write to stream '{name}'", retry_ms=0)
            return
        self._catalogue.use(
            name, link.owner,
            self._links.contained(link, "ATOMIC", created, ATOMIC, command.tracker), refused,
        )  # fmt: skip

    def _take(self, link: Link, command: wire.Atomic, parts: Sequence[tuple[Command, Any]]) -> None:
        """Prepare every part of a step and hand it to Steps; a part that fails undoes the others.

        Called once the streams that the step writes to are there. Each part reserves what it needs
        (a place in a mailbox, an end of work) before the next one is prepared, which so finds it
        taken.
        """
        prepared: list[Part] = []
        key = (link.holder, command.key) if command.key else None
        keys = set() if key is None else {key}
        number = 0  # of the part that is being prepared: a refusal names it
        try:
            size = sum(window_bytes(frame) for _, frame in parts)
            waiter = self._waiter(link, command, size, SYNCED)
            # The same step may have come again, and been taken, while streams were created.
            if key is not None and self._known(link, command, key, waiter, parts):
                return
            counted = link.usage.counted and any(isinstance(part, ADDING) for part, _ in parts)
            if counted and link.usage.metered:
                # The rate is checked once for all parts: a part in debt by earlier ones would never
                # be taken.
                self._shard.quotas.check_rate(link.usage)
            for number, (part, frame) in enumerate(parts, 1):  # noqa: B007
                made = self._prepare(link, part, frame, keys)
                if made.memory:  # No write can have both together.
                    raise BrokerRefused(
                        "cross_ring", "what is in memory only: a step is in the log"
                    )
                made.reserve()
                prepared.append(made)
        except BrokerRefused as error:
            _undo(prepared, error)
            # A step of one part, such as a cursor that moves, answers the caller as that part does.
            several = number and len(parts) > 1
            name = f"part {number} ({type(parts[number - 1][0]).__name__}): " if several else ""
            self._answers.refuse(link, command, error.code, name + error.reason, error.retry_ms)
            return
        except Exception:
            # The caller ends the link; what the step had reserved is free again.
            _undo(prepared, BrokerRefused("internal", ERRED))
            raise
        if counted:
            adding = zip(parts, prepared, strict=True)
            _spend(link, [made for (part, _), made in adding if isinstance(part, ADDING)])
        digest = 0
        if command.key:
            # The key is a part of its own: some of the others make their changes anew when they are
            # based.
            digest = digest_of_parts(
                (part, self._read_by(made, frame))
                for (part, frame), made in zip(parts, prepared, strict=True)
                if frame is not None
            )
            prepared.append(self._key_taken(link, command, digest))
        self._steps.take(prepared, waiter, key, reserved=True, command=command, digest=digest)

    def _read_by(self, made: Part, frame: Any) -> Content:
        """Return the content of a frame: the one that preparing its part has read, if it has."""
        content = made.content
        if content is not None and made.frame is frame:
            return content
        return self._shard.unchecked_content(frame)

    def _prepare(self, link: Link, part: Command, frame: Any, keys: set[tuple[str, bytes]]) -> Part:
        """Prepare one part of a step. keys: those that the step has until now.

        Raises BrokerRefused: the part cannot be taken, or its own key was taken before: the step
        would not be what its sender put together without that part.
        """
        if isinstance(part, wire.Publish):
            return self._publishing.prepare(link, part, frame, self._catalogue.get(part.stream))
        made = self._together[type(part)](link, part, frame)
        if isinstance(part, KEYED) and part.key:
            key = link.holder, part.key
            if key in keys or self._steps.known(key, waiter=None):
                raise BrokerRefused("conflict", f"key {part.key!r} was taken before")
            keys.add(key)
            made.key = key
            made.command = part
        return made


def _spend(link: Link, parts: Sequence[Part]) -> None:
    """Count messages and bytes of taken parts for their sender's rate and namespace."""
    for part in parts:
        if part.content is not None:
            link.usage.spend(part.content.head.count, content_size(part.content))


def _undo(prepared: Sequence[Part], error: BrokerRefused) -> None:
    """Give back what the parts of a refused step had reserved."""
    for part in reversed(prepared):
        part.undo(error.code, error.reason, error.retry_ms)


def window_bytes(frame: Any) -> int:
    """Bytes of its sender's window that a content takes; 0 without one."""
    return 0 if frame is None else STAMP_BYTES + len(memoryview(frame))


def _awaited(command: Any) -> bool:
    """Whether a command wants a confirm."""
    return bool(command.tracker) and command.level != NONE
