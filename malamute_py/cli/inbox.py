"""`malamute inbox`: read a mailbox.

Owns the words for a reader of mail. The rule: a message is acknowledged when it has been printed
and flushed, never before: however the command ends, messages that were not printed go to the next
reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_protocol.errors import BrokerRefused, Timeout
from malamute_py.cli import complete, output
from malamute_py.cli.absent import absent
from malamute_py.cli.commands import say
from malamute_py.cli.failures import INTERRUPTED, USAGE, CommandFailed
from malamute_py.cli.letters import MailWriter
from malamute_py.cli.linking import linked, uninterrupted
from malamute_py.cli.parameters import BodiesOnly, Tracing
from malamute_py.cli.values import count_text, duration_ms

if TYPE_CHECKING:
    from malamute_py.client.sync.client import SyncClient
    from malamute_py.client.sync.mail import SyncInbox

EPILOG: Final = """\b
Examples:
  malamute inbox ann                     what lies there, and what comes
  malamute inbox ann --until-empty       what lies there, then end
  malamute inbox ann -n 1 --json
  malamute inbox                         your own: the name of your identity

A message is taken out of the mailbox once it is printed. To look without taking, use
`malamute mailbox peek`; to run a command for each and try again what fails, `malamute work`."""

_CREDIT: Final = 1024
"""Messages that the broker may have sent without an acknowledgement, at most."""
_CREDIT_BYTES: Final = 8 << 20
_LEFT_RECORDS: Final = 1 << 20
_LEFT_BYTES: Final = 1 << 30
"""Credit with --no-ack, where messages are held to the end and given back then only."""
_LOOK_MS: Final = 200
"""Time between two questions whether a mailbox is empty."""


def inbox(
    ctx: typer.Context,
    mailbox: Annotated[
        str | None,
        typer.Argument(metavar="MAILBOX", help="The mailbox; default: your own.",
                       autocompletion=complete.mailboxes),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", metavar="N", min=1, help="End after so many messages."),
    ] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when there is nothing left to deliver.")
    ] = False,
    wait: Annotated[
        str | None,
        typer.Option("--timeout", metavar="DURATION", help="End when none comes for so long."),
    ] = None,
    no_ack: Annotated[
        bool,
        typer.Option("--no-ack", help="Leave them in the mailbox; they count as handed out."),
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the mailbox when there is none.")
    ] = False,
    bodies_only: BodiesOnly = False,
    with_fields: Annotated[
        bool, typer.Option("--fields", help="Fields too; in a pipe: subject, fields, body.")
    ] = False,
    tracing: Tracing = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> int:  # fmt: skip
    """Read a mailbox: print its messages and take them out."""
    timeout_ms = None if wait is None else duration_ms(wait)
    writer = MailWriter(as_json=as_json, bodies_only=bodies_only, with_fields=with_fields)
    with linked(ctx, stays=True, traces=True) as client:
        name = mailbox or own(client)
        if mailbox is not None and not create:
            known(client, mailbox)
        # With --no-ack no acknowledgement gives credit back: it has to last for all messages.
        reader = client.inbox(
            mailbox, ack="manual",
            credit_records=_LEFT_RECORDS if no_ack else min(count or _CREDIT, _CREDIT),
            credit_bytes=_LEFT_BYTES if no_ack else _CREDIT_BYTES,
        )  # fmt: skip
        printed = _Printed(reader, name, no_ack)
        try:
            with reader:  # At its end, messages without an acknowledgement go back.
                reader.accepted()
                if output.on_terminal() and not until_empty:
                    say(f"{name}: waiting for mail; end with Ctrl-C")
                try:
                    _print(client, reader, printed, writer, count, until_empty, timeout_ms)
                finally:
                    # Also when the program that reads our output went away: messages that were
                    # printed are not to come again.
                    printed.acknowledge()
        except KeyboardInterrupt:
            if output.on_terminal():
                say(f"{count_text(writer.count, 'message')} read")
            return INTERRUPTED
        except Timeout:
            raise Timeout(f"{name}: no message came within {wait}") from None
        if until_empty and output.on_terminal() and not writer.count:
            say(f"{name} is empty")
    return 0


def own(client: SyncClient) -> str:
    """Return the name of the client's own mailbox, which is that of its identity.

    Raises CommandFailed: it has no identity.
    """
    if not client.identity:
        raise CommandFailed(
            "which mailbox? this client has no identity, and so none of its own; name one"
            " (`malamute mailbox ls` lists them) or use a context with a credential",
            USAGE,
        )
    return client.identity


def known(client: SyncClient, mailbox: str, following: str = "") -> Any:
    """Return facts about a mailbox. Raises CommandFailed, with the nearest name: there is none.

    following: the advice how it is made; empty: by sending to it.
    """
    return absent(
        lambda: client.mailbox_info(mailbox),
        "mailbox",
        mailbox,
        lambda: [each.name for each in client.list_mailboxes()],
        following or f"sending to it makes it: malamute send {mailbox} 'a message'",
    )


class _Printed:
    """Messages that were printed, and are not acknowledged yet."""

    def __init__(self, reader: SyncInbox, name: str, no_ack: bool) -> None:
        self.name = name
        self._reader = reader
        self._no_ack = no_ack
        self._ranges: list[tuple[int, int]] = []
        self._count = 0

    def add(self, messages: Any) -> None:
        """Note messages that were printed, for acknowledge(); with --no-ack none are.

        messages: a list of single ones, or those that came together.
        """
        from malamute_py.client.session.letters import ranges_of

        if self._no_ack:
            return
        if isinstance(messages, list):
            self._ranges += [(each.number, each.number + 1) for each in messages]
        else:
            self._ranges += ranges_of(messages.batch)
        self._count += len(messages)

    @property
    def due(self) -> bool:
        """Whether to acknowledge now: the credit is used up, and no more would come."""
        return self._count >= _CREDIT

    def acknowledge(self) -> None:
        """Take the printed messages out of the mailbox: when `due`, before a wait, at the end."""
        # Taken out first, so that an exception does not have them acknowledged twice.
        ranges, self._ranges, self._count = sorted(self._ranges), [], 0
        if not ranges:
            return
        try:
            with uninterrupted():  # Ctrl-C waits until it is done.
                self._reader.acknowledge(ranges)
        except BrokerRefused as error:
            if error.code != "not_held":
                raise
            say(f"{self.name}: some of that went to another reader, too: the link was lost")


def _print(
    client: SyncClient,
    reader: SyncInbox,
    printed: _Printed,
    writer: MailWriter,
    count: int | None,
    until_empty: bool,
    timeout_ms: int | None,
) -> None:
    """Print messages and acknowledge them until there are enough, or the mailbox is empty.

    count: how many, each by itself, so that no more are taken out; None: without end. until_empty:
    end when nothing is left to deliver.
    """
    single = count is not None
    while True:
        try:
            messages = _next(reader, single, 0)  # Without waiting, as long as there are any.
        except Timeout:
            printed.acknowledge()  # Before a wait: a command that is ended then lost nothing.
            messages = (
                _at_hand(client, reader, printed.name, single)
                if until_empty
                else _next(reader, single, timeout_ms)
            )
        if messages is None:
            return
        with uninterrupted():  # Ctrl-C must not come between printing and noting.
            writer.write_all(messages)
            printed.add(messages)
        if printed.due:
            printed.acknowledge()
        if count is not None and writer.count >= count:
            return


def _next(reader: SyncInbox, single: bool, timeout_ms: int | None) -> Any:
    """Return one message (single), or those sent together; None at the end. Raises Timeout."""
    if single:
        mail = reader.next(timeout_ms)
        return None if mail is None else [mail]
    return reader.next_batch(timeout_ms)


def _at_hand(client: SyncClient, reader: SyncInbox, name: str, single: bool) -> Any:
    """Return the next messages of the mailbox; None: it has none that could be delivered.

    Asks the broker, since silence does not tell an empty mailbox from a slow one.
    """
    while True:
        try:
            return _next(reader, single, 0)
        except Timeout:
            facts = client.mailbox_info(name)
        # Messages on their way to us came before that answer, on the same link.
        try:
            return _next(reader, single, 0)
        except Timeout:
            # Held by other readers, or delayed: not for us, or not now.
            if facts.messages - facts.held - facts.delayed <= 0:
                return None
        try:
            return _next(reader, single, _LOOK_MS)
        except Timeout:
            continue
