"""Answers: RESULT, REFUSED, and RESULT once a change is durable.

Owns how the answer to a command is made. The rules: a handler raises BrokerRefused, and the broker
answers with it; a refusal names the command and the number that its sender gave it; a refusal
`wait` always says when to try again; a RESULT that no peer would take is refused `too_large`
instead; a link that leaves too many RESULTs unread has its questions refused `wait`; a change is
answered when ring main is visible up to the end of the change, and at once if the change is in
memory only. Source: SPEC.md, section 4.

An LSN is a position in ring main, which has all changes; what lies before the position up to which
a ring is visible is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from malamute_protocol import commands as wire
from malamute_protocol.commands import Command, Result
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.framing import NUMBERS, reference_of
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.links.messages import COMMAND_BYTES_MAX
from malamute_py.broker.log.ring import Settlement
from malamute_py.broker.log.steps import Effect, Part

ADMINISTRATION: Final = frozenset(
    {
        wire.CreateStream, wire.EditStream, wire.RemoveStream, wire.Kick,
        wire.PurgeMail, wire.EditMailbox, wire.RemoveMailbox,
        wire.EditService, wire.Requeue, wire.RemoveService,
        wire.EditCursor, wire.RemoveCursor, wire.EditGroup, wire.RequeueGroup, wire.ResetGroup,
        wire.RemoveGroup, wire.ReloadConfig,
    }
)  # fmt: skip
"""Commands that change what others use; an event tells each that was done."""
_OBJECTS: Final = ("stream", "mailbox", "service", "cursor", "group")
"""Fields that name what a command is about."""

RESULT_BYTES_MAX: Final = COMMAND_BYTES_MAX - 64
"""Bytes of a RESULT's value: the rest of the command has some 20."""


class Answers:
    """Answers to the commands of links."""

    def __init__(
        self, shard: Shard, links: Links, when_visible: Callable[[int, Settlement], None]
    ) -> None:
        """when_visible: Publishing.when_visible of ring main."""
        self._shard = shard
        self._links = links
        self._when_visible = when_visible

    def result(self, link: Link, command: Any, value: dict[str, Any]) -> None:
        """Answer a command with RESULT, unless its link has ended.

        An event tells what an administrator has done, also where the link is gone.
        """
        if type(command) in ADMINISTRATION:
            self._shard.event(
                "administered", by=link.owner, link=link.number,
                command=type(command).__name__, **_objects(command),
            )  # fmt: skip
        if link.open:
            number, reference = NUMBERS[type(command)], reference_of(command)
            # An error in the encoding ends that link only.
            doing = type(command).__name__.upper()
            self._links.contained(link, doing, self._say, number, reference)(link, command, value)

    def check(self, link: Link) -> None:
        """Raise BrokerRefused `wait` if a link has as many answers to read as it may.

        A link alone may leave `share_max_bytes` unread: a client that asks for many pages at once
        is not refused. Where all links together have left as much as they may, one that has more
        than its share has to read first.
        """
        settings = self._shard.settings
        if link.results >= settings.link_results_max:
            raise BrokerRefused("wait", "too many results wait to be sent")
        unread = link.unread_answers
        if unread >= settings.share_max_bytes or (
            self._links.unread_answers >= settings.outstanding_bytes
            and unread >= self._links.share()
        ):
            # Its share may have become less since it was asked last.
            self._links.ask(link)
            raise BrokerRefused("wait", f"{unread} bytes of answers are not read on this link")

    def _say(self, link: Link, command: Any, value: dict[str, Any]) -> None:
        """Send a RESULT, or a refusal where no peer would take so large a one."""
        encoded = msgspec.msgpack.encode(value)
        size = len(encoded)
        if size > RESULT_BYTES_MAX:
            reason = f"the answer has {size} bytes, and a command {COMMAND_BYTES_MAX} at most"
            self.refuse(link, command, "too_large", reason)
            return
        link.results += 1
        # Encoded: as objects, a page would take three times the memory until the peer has read it.
        raw: Any = msgspec.Raw(encoded)
        self._links.say(link, Result(command.request, raw))
        # It counts like a delivery, and apart as well: deliveries alone refuse no question.
        link.room -= size
        link.delivered_bytes += size
        link.unread_answers += size
        self._links.unread_answers += size
        self._links.ask_if_little_room(link)

    def refuse(
        self, link: Link, command: Command, code: str, reason: str, retry_ms: int = 0
    ) -> None:
        """Answer a command with REFUSED."""
        number = NUMBERS[type(command)]
        self._links.refuse(link, number, reference_of(command), code, reason, retry_ms)

    def refuse_with(self, link: Link, command: Command, error: BrokerRefused) -> None:
        """Answer a command with REFUSED, as an error has it."""
        self.refuse(link, command, error.code, error.reason, error.retry_ms)

    def settle(self, end_lsn: int, call: Settlement) -> None:
        """Make a call with None once a change is durable, or with the reason why it never is.

        end_lsn: where ring main has the change; 0: it is in memory only.
        """
        if end_lsn:
            self._when_visible(end_lsn, call)
        else:
            call(None)


class Answer(Effect):
    """The answer to a command: RESULT once its change is durable, or REFUSED."""

    answers: Answers
    link: Link
    command: Any
    value: Callable[[], dict[str, Any]] = dict

    def appended(self, part: Part, end_lsn: int) -> None:
        """Answer once the change is durable."""
        self.after(end_lsn)

    def after(self, end_lsn: int) -> None:
        """Answer once ring main is durable up to an LSN; 0: at once."""
        self.answers.settle(end_lsn, self._settled)

    def _settled(self, failure: tuple[str, str] | None) -> None:
        """Send the answer, now that it is known whether the change is durable.

        failure: code and reason why the change did not get durable; None: it is.
        """
        if failure is None:
            self.answers.result(self.link, self.command, self.value())
        else:
            self.refuse(*failure)

    def refuse(self, code: str, reason: str, retry_ms: int = 0) -> None:
        """Answer with REFUSED."""
        self.answers.refuse(self.link, self.command, code, reason, retry_ms)

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Answer with the reason why the log refused the change."""
        self.refuse(code, reason, retry_ms)


def _objects(command: Command) -> dict[str, Any]:
    """Return what a command is about, for the event `administered`; of KICK the link, as `ended`.

    The event's `link` is the one that asked.
    """
    found = {name: getattr(command, name) for name in _OBJECTS if hasattr(command, name)}
    if isinstance(command, wire.Kick):
        found["ended"] = command.link
    return found
