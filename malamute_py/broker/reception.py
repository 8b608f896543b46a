"""Messages of peers: which handler each command gets, in which order.

Owns the walk over the commands of one message. The rules: a command is handled before the next one
is looked at; a malformed message, or a command that the link's state does not allow, ends the link;
an acknowledgement that no caller waits for may be taken after the rest. Source: SPEC.md, sections 3
and 4.

A step is commands that happen together, those after an ATOMIC, or a command that changes something
alone. A frame of a message is the content (a batch) of one command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from malamute_protocol import commands as wire
from malamute_protocol.commands import Command
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.framing import NUMBERS, reference_of
from malamute_protocol.link import State
from malamute_py.broker.atomic import Intake
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import RECEIVES, Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.mail.mail import Mail
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.key_commands import KeyCommands
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.streams.validation import check_needed, needed_setting

ANSWERED: Final = frozenset(kind for kind in NUMBERS if "request" in kind.__struct_fields__)
"""Commands that a RESULT answers: a RESULT is bounded in size, and the waiting ones in number."""
_BESIDE_ACKS: Final = frozenset({wire.Request, wire.Reply, wire.AckWork})
"""Commands after which acknowledgements of mail may be taken; a SEND would find its mailbox
full."""
PUBLISHING_MAX: Final = 1_000
"""Streams of a link for which a PUBLISH needs no look-up."""


class Reception:
    """The commands of peers, on their way to their handlers."""

    def __init__(
        self,
        shard: Shard,
        links: Links,
        catalogue: Catalogue,
        publishing: Publishing,
        mail: Mail,
        intake: Intake,
        key_commands: KeyCommands,
        answers: Answers,
        handlers: dict[type[Command], Callable[[Link, Any], None]],
    ) -> None:
        """handlers: by type, of commands that do not go into a step.

        They are called once the link's state was checked.
        """
        self._shard = shard
        self._links = links
        self._catalogue = catalogue
        self._publishing = publishing
        self._mail = mail
        self._intake = intake
        self._key_commands = key_commands
        self._answers = answers
        self.handlers = handlers
        self.acks: list[tuple[Link, wire.AckMail]] = []
        """Acknowledgements that no caller waits for: they are taken when nothing else is left to
        do."""
        self.handling: Command | None = None
        """The command that is being handled, of the message that is being received."""

    def receive(self, link: Link, commands: Sequence[Command], frames: Sequence[Any]) -> None:
        """Take up the commands of one message in order, each with the frames that it owns.

        A command that is refused is answered, and the next one is taken up; a message that is
        malformed ends the link, and the rest of it is not looked at. `handling` tells the caller of
        an error at which command it came.
        """
        self.handling = None
        commands_max = self._shard.settings.limits.message_commands_max
        if len(commands) > commands_max:
            self.malformed(
                link, "too_large",
                f"{len(commands)} commands in a message, at most {commands_max}",
            )  # fmt: skip
            return
        # place: index of the first frame that no command so far owns. skip: how many of the
        # commands that follow are parts of a step, which were taken with their ATOMIC.
        place = skip = 0
        publishing = link.publishing
        allowed = RECEIVES[link.state]
        opened = link.state is State.OPEN
        for number, command in enumerate(commands, 1):
            kind = type(command)
            if kind is wire.Publish and opened and link.state is State.OPEN and not skip:
                # PUBLISH is the one command for which a shortcut pays.
                if place >= len(frames):
                    self.malformed(link, "malformed", "a PUBLISH without its content frame")
                    return
                frame = frames[place]
                place += 1
                try:
                    # A stream that the link may write to was noted by its first PUBLISH. A command
                    # that needs a setting which the stream lacks is refused by the longer way.
                    stream = publishing.get(command.stream)  # type: ignore[attr-defined]
                    if (
                        stream is None
                        or stream.removed
                        or (command.keyed and stream.keys is None)  # type: ignore[attr-defined]
                        or (command.typed and not stream.schemas)  # type: ignore[attr-defined]
                    ):
                        self._first_publish(link, command, frame)
                    else:
                        self._publishing.publish(link, command, stream, frame)  # type: ignore[arg-type]
                except Exception:
                    # The command is noted here and not before: an assignment for each PUBLISH would
                    # cost all.
                    self.handling = command
                    raise
                continue
            self.handling = command
            first = place  # the command's own frames: frames[first:place]
            place += command.content_frames
            if place > len(frames) or place < first:  # The peer may say a number below 0.
                self.malformed(link, "malformed", "fewer content frames than its commands own")
                return
            if skip:
                skip -= 1
                continue
            if kind not in allowed:
                self._out_of_order(link, command)
                return
            if kind is wire.Atomic:
                skip = command.count  # type: ignore[attr-defined]
                if not 0 <= skip <= len(commands) - number:
                    self.malformed(link, "malformed", f"a step of {skip} commands")
                    return
                parts = self._parts(commands[number : number + skip], frames[place:])
                if parts is None:
                    self.malformed(link, "malformed", "fewer content frames than its commands own")
                    return
                self.take_acks()
                self._intake.atomic(link, command, parts)  # type: ignore[arg-type]
            elif kind is wire.AckMail and self._may_put_off(link, command):  # type: ignore[arg-type]
                self.acks.append((link, command))  # type: ignore[arg-type]
            elif kind in self._intake.kinds:
                # Such a command is a step of its own. Acknowledgements that were put off are taken
                # before it, unless it is of a kind that does not depend on them.
                if kind not in _BESIDE_ACKS:
                    self.take_acks()
                self._intake.single(link, command, frames[first] if place > first else None)
            elif kind is wire.UpdateKey:
                self._key_commands.update_key(link, command, frames[first])  # type: ignore[arg-type]
            else:
                self.take_acks()
                self._dispatch(link, kind, command)
            if link.state is State.CLOSED:
                return
            if kind is wire.Hello:
                # The rest of this message is ignored: its sender has seen no WELCOME yet.
                allowed = RECEIVES[State.GREETED]
        if place != len(frames):
            self.malformed(link, "malformed", f"{len(frames) - place} frames that no command owns")

    def _may_put_off(self, link: Link, command: wire.AckMail) -> bool:
        """Whether an acknowledgement may be taken after the requests that it came with.

        No caller waits for one of a mailbox in memory, which takes 12 us of a lone round trip.
        """
        return not command.tracker and self._mail.in_memory(link, command.subscription)

    def take_acks(self) -> None:
        """Take acknowledgements that _may_put_off() let wait, before what may depend on them."""
        if self.acks:
            acks, self.acks = self.acks, []
            for link, command in acks:
                if link.open:
                    try:
                        self._intake.single(link, command, frame=None)
                    except Exception as error:  # noqa: BLE001 - as in receive()
                        self.failed(link, command, error)

    @staticmethod
    def _parts(
        commands: Sequence[Command], frames: Sequence[Any]
    ) -> list[tuple[Command, Any]] | None:
        """Return the parts of a step, each with its content frame; None: frames are missing.

        For ATOMIC, whose parts are the commands after it. frames: from the first one on that may
        be theirs.
        """
        parts: list[tuple[Command, Any]] = []
        place = 0
        for command in commands:
            owned = command.content_frames
            # The sender says how many frames are a command's: more than came, or fewer than none.
            if owned < 0 or place + owned > len(frames):
                return None
            parts.append((command, frames[place] if owned else None))
            place += owned
        return parts

    def _dispatch(self, link: Link, kind: type[Command], command: Command) -> None:
        """Call the handler of a command that is no step, or refuse the command.

        It is refused when this broker has no handler for it, when the link has too many
        answers to read, or as the handler says.
        """
        handler = self.handlers.get(kind)
        if handler is None:
            self._links.refuse(
                link, NUMBERS[kind], reference_of(command), "unsupported",
                f"this broker has no {kind.__name__}",
            )  # fmt: skip
        else:
            try:
                if kind in ANSWERED:
                    self._answers.check(link)
                handler(link, command)
            except BrokerRefused as error:
                self._answers.refuse_with(link, command, error)

    # --- links that end by what they sent -----------------------------------------------------

    def failed(self, link: Link, command: Command | None, error: Exception) -> None:
        """End the link of a peer whose message caused an error that no code foresaw.

        command: the command that was being handled, if there was one.
        """
        if command is None:
            self._links.fail(link, "message", error)
        else:
            number = NUMBERS[type(command)]
            self._links.fail(
                link, type(command).__name__.upper(), error, number, reference_of(command)
            )

    def _out_of_order(self, link: Link, command: Command) -> None:
        """End a link that sent what its state does not allow."""
        reason = f"{type(command).__name__.upper()} on a link that is {link.state.value}"
        number = NUMBERS[type(command)]
        self._links.refuse(link, number, reference_of(command), "unexpected", reason)
        self._links.close(link, "refused", "unexpected", reason)

    def malformed(self, link: Link, code: str, reason: str) -> None:
        """End a link whose message cannot be decoded, or does not fit its commands or bounds."""
        self._shard.counters["malformed"] += 1
        no_command = no_reference = 0
        self._links.refuse(link, no_command, no_reference, code, reason)
        self._links.close(link, "malformed", code, reason)

    # --- the first PUBLISH to a stream ----------------------------------------------------------

    def _first_publish(self, link: Link, command: Any, frame: Any) -> None:
        """Take a PUBLISH to a stream that the link has not written to before.

        The stream may have to be created first: the PUBLISH goes on in `_publish_to`, at once or
        when the stream is there, or ends in `_not_published`.
        """
        name = command.stream
        refuse = self._publishing.refuse
        bound = None
        if not self._shard.settings.permit(link.owner, "write", name):
            bound = self._shard.settings.subjects(link.owner, name)
            if bound is None:
                refuse(link, command, "forbidden", f"you may not write to stream '{name}'")
                return
        # First use makes no stream of which the command needs a setting (keys, a schema).
        needed = needed_setting(command)
        if needed and not self._catalogue.expects(name):
            absent = self._catalogue.absent(link.owner, name, needed)
            refuse(link, command, "unknown_stream", absent)
            return
        size = len(memoryview(frame))
        if link.unconfirmed_bytes and link.unconfirmed_bytes + size > link.window_bytes:
            refuse(link, command, "window", link.overrun(self._shard.settings.window_bytes))
            return
        link.unconfirmed_bytes += size
        use = partial(self._publish_to, link, command, frame, size, self._shard.contents, bound)
        self._catalogue.use(
            name, link.owner,
            self._links.contained(link, "PUBLISH", use, NUMBERS[wire.Publish], command.tracker),
            partial(self._not_published, link, command, size),
        )  # fmt: skip

    def _publish_to(
        self, link: Link, command: Any, frame: Any, size: int, contents: Any, bound: Any,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Take a first PUBLISH to a stream, which exists by now.

        size: bytes that the link's window was charged meanwhile. contents: what was read ahead of
        its frame. bound: tells whether the writer may use the keys of a record; None: the writer
        may use any.
        """
        # Counted while the stream was being made; publish() counts it again.
        link.unconfirmed_bytes -= size
        if not link.open:
            return
        try:
            check_needed(command, stream)
        except BrokerRefused as error:
            self._publishing.refuse(link, command, error.code, error.reason)
            return
        # The stream may be created first: what was read of the frame is still good afterwards.
        self._shard.contents = contents
        if bound is None:
            if len(link.publishing) >= PUBLISHING_MAX:
                link.publishing.clear()
            link.publishing[command.stream] = stream
            self._publishing.publish(link, command, stream, frame)
        else:
            # The link is not noted as one that may publish: each of its batches comes by here.
            self._publishing.publish_bound(link, command, stream, frame, bound)
        self._shard.contents = {}

    def _not_published(
        self, link: Link, command: Any, size: int, code: str, reason: str, retry_ms: int
    ) -> None:
        """Refuse a PUBLISH whose stream was not created, and take it off the link's window."""
        link.unconfirmed_bytes -= size
        self._publishing.refuse(link, command, code, reason, retry_ms)
