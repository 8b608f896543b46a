"""Keys of steps: what each was accepted for, and whether a command is that.

Owns the comparison of a command with the one that a key was accepted for. The rule: the kind, the
mailbox or service, and a digest of what was said are compared. Times, expiries, properties and
producers are not in the digest: a program that was restarted may encode the same message with
another time. Source: SPEC.md, section 4.8.

A key is the name that a client gives a command, so that the broker takes it once when it is sent
again. The tables keep a row for it (KeyRow).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final

import google_crc32c
import numpy as np

from malamute_protocol.commands import Command, Publish, Request, Send, Stage
from malamute_protocol.content import Content
from malamute_protocol.framing import NUMBERS
from malamute_py.changelog.tables import KeyRow, Queues

KEYED: Final = (Send, Request)
"""Commands whose own key names the batch that they put into a mailbox or service."""
_DIGEST_BYTES: Final = 8
_SHAPE: Final = struct.Struct("<IIIB")
_COPY_BELOW: Final = 4_096
"""Bytes up to which copying them for the checksum costs less than making an array."""


def digest_of(content: Content) -> int:
    """Return a digest of the messages of a content: their subjects, keys, fields and bodies.

    Two checksums side by side: of the header sections with the counts, and of the body section as
    it was sent, which is never decompressed. Never 0. Raises BatchError: the sections do not fill
    the content.
    """
    # at: where each section of the content begins; -1: it has no such section.
    head, at, view = content.head, content.sections, content.view
    # What makes a header lies together, in front of the columns of times and the properties: the
    # first of those that is there ends it.
    end = at.body
    for position in (at.client_time, at.expiry, at.properties, at.deltas, at.append_times):
        if position >= 0:
            end = position
            break
    shape = _SHAPE.pack(head.count, head.body_raw_bytes, head.parts_count, head.body_kind)
    headers = google_crc32c.value(shape + bytes(view[at.subjects : end]))
    body = view[at.body : at.body + head.body_bytes]
    return (headers << 32 | _checksum(body)) or 1  # 0 stands for no content.


def digest_of_parts(parts: Iterable[tuple[Command, Content | None]]) -> int:
    """Return a digest of the contents of a step, and of where each goes; 0: it has no content."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    counted = False
    for command, content in parts:
        if content is not None:
            counted = True
            digest.update(f"{NUMBERS[type(command)]} {_place(command)}\0".encode())
            digest.update(digest_of(content).to_bytes(_DIGEST_BYTES, "little"))
    return (int.from_bytes(digest.digest(), "little") or 1) if counted else 0


def _checksum(view: Any) -> int:
    """Return the CRC of some bytes of a frame. The library takes no memoryview."""
    data: Any = bytes(view) if len(view) < _COPY_BELOW else np.frombuffer(view, np.uint8)
    return int(google_crc32c.value(data))


def differ(one: int, other: int) -> bool:
    """Whether digests are of different contents; 0: no content, or not known: it never differs."""
    return bool(one and other) and one != other


def use_of(command: Command, place: int) -> int:
    """Return what a key's row remembers of its command, to tell it from others later.

    That is `place`, the number of the mailbox or service, of a SEND or REQUEST, and of an answer or
    a step the number of the command, below 0.
    """
    return place if isinstance(command, KEYED) else -NUMBERS[type(command)]


def is_use(use: Command | KeyRow, command: Command, queues: Queues) -> bool:
    """Whether a key may have been accepted for a command: by its kind and where it goes to.

    False: the client has given the key to something else, a conflict. use: the command that the key
    was accepted for while that is on its way, then its row in the tables.
    """
    kind = type(command)
    if not isinstance(use, KeyRow):
        return type(use) is kind and _place(use) == _place(command)
    if not use.use:  # The row does not say what the key was for.
        return True
    if kind not in KEYED:
        return use.use == use_of(command, place=0)
    if use.use < 0:  # The key was of a step or an answer.
        return False
    # Mailboxes and services share their numbers: a SEND is compared with a mailbox, a REQUEST with
    # a service. One that has gone cannot be compared, and counts as the same.
    mailbox, service = queues.mailboxes.get(use.use), queues.services.get(use.use)
    same_kind, other_kind = (mailbox, service) if kind is Send else (service, mailbox)
    return other_kind is None and (same_kind is None or same_kind.name == _place(command))


def _place(command: Command) -> str:
    """Return the mailbox, service or stream that a command's content goes to; "": none of them."""
    if isinstance(command, Send):
        return command.mailbox
    if isinstance(command, Request):
        return command.service
    return command.stream if isinstance(command, Publish | Stage) else ""
