"""Errors of the protocol: the side that erred decides the type.

Owns the exception hierarchy that broker, client and connector share, and the table of codes that
travel in REFUSED, BYE, GAP and ENDED. The rule: a code, once released, keeps its meaning. Source:
SPEC.md, section 9.
"""

from __future__ import annotations

from typing import Final

CODES: Final[dict[str, str]] = {
    # The message or the sender is wrong.
    "malformed": "the message breaks the grammar; the link ends",
    "too_large": "a size or count is over its limit",
    "corrupt": "a checksum does not fit its bytes; nothing was stored",
    "unexpected": "the command is not allowed in this state of the link",
    "unsupported": "this broker has not the feature",
    "version": "no protocol version in common",
    "bad_name": "the name of a stream, mailbox, service, cursor or group is not allowed",
    "bad_setting": "a setting is unknown or its value is not allowed",
    "bad_pattern": "the pattern cannot be compiled",
    "unknown_pattern_kind": "the broker knows no such kind of pattern",
    "bad_start": "the start position cannot be understood",
    "bad_batch": "the batch breaks the format or the stream's body kind",
    "bad_schema": "the schema cannot be declared or cannot follow the stream's, or the batch is "
    "of none of the stream's",
    # Permission and identity.
    "unauthenticated": "the credential is missing or wrong",
    "forbidden": "the identity may not do this",
    "fenced": "a newer epoch of the producer, or a session that asked for the identity, took over",
    "replaced": "another link of the same session took over",
    "kicked": "an operator ended the link",
    # State.
    "unknown_stream": "there is no such stream",
    "stream_exists": "the stream exists with other settings",
    "stream_removed": "the stream was removed",
    "unknown_subscription": "the link has no such subscription",
    "subscription_exists": "the number is in use on this link",
    "unknown_producer": "the broker does not know this producer id",
    "out_of_sequence": "a sequence before this one is missing",
    "unknown_link": "there is no such link",
    "unknown_mailbox": "there is no such mailbox",
    "unknown_service": "there is no such service queue",
    "unknown_cursor": "there is no such cursor",
    "unknown_group": "there is no such group",
    "unknown_request": "there is no such request, or not any more",
    "unknown_transaction": "there is no such transaction, or not any more",
    "transaction_timed_out": "the transaction was open for too long, and was rolled back",
    "transaction_ended": "an operator rolled the transaction back",
    "put_off": "the transaction is committed, and a ring takes its records later",
    "given_up": "the transaction is committed, and an operator gave up records of it",
    "no_workers": "no worker offers the service for the request's subject",
    "not_held": "this link does not hold the message, request or record (any more)",
    "in_use": "it has members or readers, another link holds it, or it is being reset",
    # Limits and load.
    "wait": "full for the moment; try again after retry_ms",
    "window": "more unconfirmed bytes than the window allows",
    "limit": "a configured count is reached",
    "full": "the stream's ring is full and its setting is to refuse",
    "disk_full": "the disk has no space for the ring",
    "journal_failed": "the journal cannot take anything more; see the broker's log",
    "draining": "the broker is about to stop",
    "permissions_changed": "the identity may do less than before: open a new link",
    "queues_lost": "mail, services, cursors and groups were lost; the broker's operator must go on",
    # Ends and gaps.
    "closed": "ended in order",
    "silent": "nothing was heard within the expiry time",
    "end": "the subscription reached its end",
    "cancelled": "the subscription was cancelled",
    "group_reset": "the group was reset by force while it had members: join it again",
    "retention": "the records were removed to keep the log within its bounds",
    "purged": "the records were removed because a client asked for it",
    "damaged": "the records are in a damaged part of the journal, or their batch cannot be read",
    "lost": "the records were in memory only, and the broker has restarted",
    # Scale-out, reserved.
    "not_leader": "another broker leads this shard",
    "moved": "the stream is placed elsewhere",
    "cross_ring": "the parts of one step live in different rings",
    "conflict": "a condition of the command or step does not hold (any more), or the sequence was "
    "taken by another batch, or the key by another command or content",
    "expired": "the time for it is over",
    "internal": "the broker erred; the log has the cause",
}
"""Code -> its one meaning. SPEC.md holds the same table, checked by a test."""


class MalamuteError(Exception):
    """Base of every error that this project raises."""


class ProtocolError(MalamuteError):
    """The protocol was broken; `code` and `reason` say how."""

    def __init__(self, code: str, reason: str) -> None:
        """code: one of CODES. reason: what, where, and what to do."""
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class LocalProtocolError(ProtocolError):
    """This side was about to break the protocol: nothing was sent."""


class BatchTooLarge(LocalProtocolError):
    """Records are more than one batch holds, each of them within its limits: fewer may fit."""

    def __init__(self, reason: str) -> None:
        """reason: the limit of a batch, and what goes over it."""
        super().__init__("too_large", reason)


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: its link is to be ended."""


class BatchError(RemoteProtocolError):
    """Bytes that claim to be a batch are not one; `position` is where reading stopped."""

    def __init__(self, code: str, reason: str, position: int = 0) -> None:
        """position: byte in the buffer that was being read."""
        super().__init__(code, f"{reason} (byte {position})")
        self.position = position


class BrokerRefused(MalamuteError):
    """The broker refused a command, with nothing done."""

    def __init__(self, code: str, reason: str = "", retry_ms: int = 0) -> None:
        """retry_ms: when to try again; 0 is not before something changes."""
        super().__init__(f"{code}: {reason or CODES.get(code, 'refused')}")
        self.code = code
        self.reason = reason
        self.retry_ms = retry_ms


class RevisionConflict(BrokerRefused):
    """The broker refused to change a key, for its revision is another one than was asked for."""

    def __init__(self, reason: str, revision: int) -> None:
        """revision: the key's revision now; 0: there is no such key."""
        super().__init__("conflict", reason)
        self.revision = revision


class ConnectionLost(MalamuteError, ConnectionError):
    """The link is gone; unconfirmed sends may or may not be in the log."""


class Timeout(MalamuteError, TimeoutError):
    """No answer within the time that the caller set."""
