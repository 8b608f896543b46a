"""Mail as text: columns for a person, bodies or JSON lines for programs.

Owns what a message shows beside a record's parts: number, sender, attempts, and the request that it
is about. Source: records.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from malamute_py.cli.records import ESCAPES, RecordWriter, as_object, body_of, printable
from malamute_py.cli.values import count_text, iso_text, time_text

if TYPE_CHECKING:
    from malamute_protocol.batch import Record
    from malamute_py.client.facts import PeekedMail
    from malamute_py.client.session.letters import Letter

_ANONYMOUS_SHOWN: Final = 9
"""Characters that are shown of a client without an identity: `~` and the first digits."""


class MailWriter(RecordWriter):
    """Writes messages in the form that the command's options ask for. Source: RecordWriter."""

    def write_all(self, messages: Iterable[Any]) -> None:
        """Write some messages, and flush once."""
        if self._plain and not self._escaped:
            bodies = [body_of(each) for each in messages]
            if bodies:
                self._emit(b"\n".join(bodies) + b"\n", len(bodies))
        else:
            self.write_records(messages)

    def _object(self, record: Record) -> dict[str, Any]:
        return mail_object(record)

    def _row(self, record: Record) -> str:
        """Return one message as a line with columns, for a person.

        Numbers in _paint() are colours of terminals. ESCAPES: replaces what would move the cursor.
        """
        mail: Letter = record  # type: ignore[assignment]
        subject = mail.subject.translate(ESCAPES)
        self._width = self._wider(self._width, subject)  # Of the column, as lines come one by one.
        cells = [
            self._paint("2", f"{mail.number:>6}"),
            self._paint("2", self._time(mail.append_time_ms)),
            self._paint("32", f"{sender_text(mail.sender):<10}"),
            self._paint("36", f"{subject:<{self._width}}"),
        ]
        if self._fields:
            cells.append(self._named(mail))
        notes = notes_of(mail)
        if notes:
            cells.append(self._paint("33", f"({'; '.join(notes)})".translate(ESCAPES)))
        cells.append(printable(body_of(mail)))
        return "  ".join(cells)


def sender_text(sender: str) -> str:
    """Return a sender's name for a person: an anonymous sender's is cut."""
    if not sender:
        return "the broker"
    if sender.startswith("~"):
        return f"{sender[:_ANONYMOUS_SHOWN]}…"
    return sender.translate(ESCAPES)


def notes_of(mail: Letter | Peeked) -> list[str]:
    """List remarks that a person reads before the body: attempts, why it is here, what it is about.

    mail.why: why a dead letter is one. mail.about: the request that a reply answers, if it is one.
    """
    notes = []
    if mail.attempts > 1:
        notes.append(f"handed out {mail.attempts} times")
    if mail.why:
        notes.append(mail.why)
    if mail.origin is not None:
        origin = mail.origin
        notes.append(
            f"record {origin.offset:,} of {origin.stream}, group {origin.group},"
            f" {count_text(origin.attempts, 'attempt')}"
        )
    if getattr(mail, "held", False):
        notes.append("in hand")
    if not_before := getattr(mail, "not_before_ms", 0):
        notes.append(f"not before {time_text(not_before)}")
    # A dead letter is about a request, too, and no reply.
    if mail.about is not None and not mail.why:
        notes.append("a reply" if mail.last else "a reply, more follow")
    return notes


def mail_object(mail: Any) -> dict[str, Any]:
    """Return a message as one JSON object, without keys for what it does not have.

    mail: one that was read, or Peeked.
    """
    found: dict[str, Any] = {"number": mail.number, "sender": mail.sender}
    found.update(as_object(mail))
    del found["offset"]  # a message has its number instead
    if mail.attempts > 1:
        found["attempts"] = mail.attempts
    if mail.about is not None:  # it is a reply: the request that it is about
        key, row = mail.about
        found["about"] = {"key": key_text(key), "row": row}
        found["last"] = mail.last
    if mail.why:
        found["why"] = mail.why
    if mail.origin is not None:
        origin = mail.origin
        found["origin"] = {
            "stream": origin.stream, "group": origin.group, "offset": origin.offset,
            "attempts": origin.attempts,
        }  # fmt: skip
    if isinstance(mail, Peeked):
        found.update(mail.beside())
    return found


class Peeked:
    """A message that was looked at in its mailbox, with the attributes of one that was read.

    So that MailWriter prints both. What a look does not tell is as it is of a message without it.
    """

    about = None
    last = False
    client_time_ms = None
    properties: Mapping[str, Any] = {}

    def __init__(self, facts: PeekedMail) -> None:
        self.number = self.offset = facts.number
        self.sender = facts.sender
        self.append_time_ms = facts.at_ms
        self.subject = facts.subject
        self.keys = (facts.subject,)
        self.fields = facts.fields
        self.attempts = facts.attempts
        self.why = facts.why
        self.origin = facts.origin
        self.held = facts.held
        self.not_before_ms = facts.not_before_ms
        self.expires_at_ms = facts.expires_at_ms or None
        self.priority = facts.priority
        self.size = facts.bytes
        shown = bytes(facts.body)
        # The broker shows a body that is a list as MessagePack, which is longer than its blobs.
        parts = _list_of(shown) if len(shown) > self.size else None
        self.body = shown if parts is None else parts
        self.cut = parts is None and len(shown) != self.size
        """Whether the broker showed a part of the body only."""

    def beside(self) -> dict[str, Any]:
        """Return, for JSON, the facts that only a look at the mailbox tells."""
        found: dict[str, Any] = {"held": self.held}
        if self.priority:
            found["priority"] = self.priority
        if self.not_before_ms:
            found["not_before"] = iso_text(self.not_before_ms)
        if self.cut:
            found["body_bytes"] = self.size
        return found


def _list_of(shown: bytes) -> list[bytes] | None:
    """Return the blobs of a list; None: the broker showed a part of it only."""
    import msgspec

    try:
        return msgspec.msgpack.decode(shown, type=list[bytes])
    except msgspec.DecodeError:
        return None


def key_text(key: bytes) -> str:
    """Return a key as text: as it was typed, or in hexadecimal digits when it is no text."""
    try:
        text = key.decode("ascii")
    except UnicodeDecodeError:
        return key.hex()
    return text if text.isprintable() else key.hex()
