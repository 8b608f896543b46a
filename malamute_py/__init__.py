"""Malamute: streams, mailboxes and service queues in one broker, for Python and Spark.

    import malamute_py as malamute

    async with malamute.connect() as client:
        await client.publish("orders", b"one", subject="orders.new")
        async for record in client.subscribe("orders", start="earliest"):
            print(record.offset, record.body)

Every name here is loaded when it is first used, so that importing costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch, Record
    from malamute_protocol.errors import (
        BatchError,
        BrokerRefused,
        ConnectionLost,
        LocalProtocolError,
        MalamuteError,
        ProtocolError,
        RevisionConflict,
        Timeout,
    )
    from malamute_protocol.pattern import (
        Pattern,
        PatternError,
        all_of,
        any_of,
        everything,
        fields,
        not_,
        prefix,
        regex,
        topic,
    )
    from malamute_py.client.aio.client import Client, connect
    from malamute_py.client.aio.keys import KeyView, KeyWatch
    from malamute_py.client.aio.mail import Inbox, Mail
    from malamute_py.client.aio.publishing import BulkPublisher
    from malamute_py.client.aio.queues import AtomicStep, Member
    from malamute_py.client.aio.subscription import Subscription
    from malamute_py.client.aio.transactions import Transaction
    from malamute_py.client.aio.work import Request, Worker
    from malamute_py.client.facts import (
        BrokerFacts,
        CursorFacts,
        GroupFacts,
        MailboxFacts,
        PeekedMail,
        PeekedRequest,
        ServiceFacts,
        StreamFacts,
    )
    from malamute_py.client.keys import KeyEntry
    from malamute_py.client.options import (
        CursorOptions,
        GroupOptions,
        MailboxOptions,
        ServiceOptions,
        StreamOptions,
    )
    from malamute_py.client.position import (
        AfterMessage,
        AtClientTime,
        AtMessage,
        AtTime,
        Confirmation,
        FromCursor,
        LastPerSubject,
        Position,
    )
    from malamute_py.client.session.letters import Reply, RequestFailed
    from malamute_py.client.session.memberships import HeldBatch
    from malamute_py.client.session.subscription import (
        BegunNotice,
        GapError,
        GapNotice,
        ModeNotice,
        Notice,
        PassedOverNotice,
        RewoundNotice,
    )
    from malamute_py.client.settings import (
        ClientOptions,
        ClientSettings,
        Curve,
        Plain,
        SettingError,
    )
    from malamute_py.client.sync.client import SyncClient, connect_sync
    from malamute_py.client.sync.keys import SyncKeyView, SyncKeyWatch
    from malamute_py.client.sync.mail import SyncInbox, SyncMail
    from malamute_py.client.sync.publishing import SyncBulkPublisher
    from malamute_py.client.sync.queues import SyncAtomicStep, SyncMember
    from malamute_py.client.sync.subscription import SyncSubscription
    from malamute_py.client.sync.transactions import SyncTransaction
    from malamute_py.client.sync.work import SyncRequest, SyncWorker
    from malamute_py.client.tracing import Tracing
    from malamute_py.client.words import (
        AckWhen,
        ConfirmAt,
        GroupKind,
        GroupVisibility,
        OnError,
        ReadVisibility,
        Until,
    )
    from malamute_py.embedded import EmbeddedBroker

_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "malamute_protocol.batch": (
        "Batch",
        "Record",
    ),
    "malamute_protocol.errors": (
        "BatchError",
        "ConnectionLost",
        "LocalProtocolError",
        "MalamuteError",
        "ProtocolError",
        "BrokerRefused",
        "RevisionConflict",
        "Timeout",
    ),
    "malamute_protocol.pattern": (
        "Pattern",
        "PatternError",
        "all_of",
        "any_of",
        "everything",
        "fields",
        "not_",
        "prefix",
        "regex",
        "topic",
    ),
    "malamute_py.client.aio.client": (
        "Client",
        "connect",
    ),
    "malamute_py.client.aio.keys": (
        "KeyView",
        "KeyWatch",
    ),
    "malamute_py.client.aio.mail": (
        "Inbox",
        "Mail",
    ),
    "malamute_py.client.aio.publishing": ("BulkPublisher",),
    "malamute_py.client.aio.queues": (
        "AtomicStep",
        "Member",
    ),
    "malamute_py.client.aio.subscription": ("Subscription",),
    "malamute_py.client.aio.transactions": ("Transaction",),
    "malamute_py.client.aio.work": (
        "Request",
        "Worker",
    ),
    "malamute_py.client.facts": (
        "BrokerFacts",
        "CursorFacts",
        "GroupFacts",
        "MailboxFacts",
        "PeekedMail",
        "PeekedRequest",
        "ServiceFacts",
        "StreamFacts",
    ),
    "malamute_py.client.keys": ("KeyEntry",),
    "malamute_py.client.options": (
        "CursorOptions",
        "GroupOptions",
        "MailboxOptions",
        "ServiceOptions",
        "StreamOptions",
    ),
    "malamute_py.client.position": (
        "AfterMessage",
        "AtClientTime",
        "AtMessage",
        "AtTime",
        "Confirmation",
        "FromCursor",
        "LastPerSubject",
        "Position",
    ),
    "malamute_py.client.session.letters": (
        "Reply",
        "RequestFailed",
    ),
    "malamute_py.client.session.memberships": ("HeldBatch",),
    "malamute_py.client.session.subscription": (
        "BegunNotice",
        "GapError",
        "GapNotice",
        "ModeNotice",
        "Notice",
        "PassedOverNotice",
        "RewoundNotice",
    ),
    "malamute_py.client.settings": (
        "ClientOptions",
        "ClientSettings",
        "Curve",
        "Plain",
        "SettingError",
    ),
    "malamute_py.client.sync.client": (
        "SyncClient",
        "connect_sync",
    ),
    "malamute_py.client.sync.keys": (
        "SyncKeyView",
        "SyncKeyWatch",
    ),
    "malamute_py.client.sync.mail": (
        "SyncInbox",
        "SyncMail",
    ),
    "malamute_py.client.sync.publishing": ("SyncBulkPublisher",),
    "malamute_py.client.sync.queues": (
        "SyncAtomicStep",
        "SyncMember",
    ),
    "malamute_py.client.sync.subscription": ("SyncSubscription",),
    "malamute_py.client.sync.transactions": ("SyncTransaction",),
    "malamute_py.client.sync.work": (
        "SyncRequest",
        "SyncWorker",
    ),
    "malamute_py.client.tracing": ("Tracing",),
    "malamute_py.client.words": (
        "AckWhen",
        "ConfirmAt",
        "GroupKind",
        "GroupVisibility",
        "OnError",
        "ReadVisibility",
        "Until",
    ),
    "malamute_py.embedded": ("EmbeddedBroker",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AckWhen",
    "AfterMessage",
    "AtClientTime",
    "AtMessage",
    "AtTime",
    "AtomicStep",
    "Batch",
    "BatchError",
    "BegunNotice",
    "BrokerFacts",
    "BrokerRefused",
    "BulkPublisher",
    "Client",
    "ClientOptions",
    "ClientSettings",
    "ConfirmAt",
    "Confirmation",
    "ConnectionLost",
    "CursorFacts",
    "CursorOptions",
    "Curve",
    "EmbeddedBroker",
    "FromCursor",
    "GapError",
    "GapNotice",
    "GroupFacts",
    "GroupKind",
    "GroupOptions",
    "GroupVisibility",
    "HeldBatch",
    "Inbox",
    "KeyEntry",
    "KeyView",
    "KeyWatch",
    "LastPerSubject",
    "LocalProtocolError",
    "Mail",
    "MailboxFacts",
    "MailboxOptions",
    "MalamuteError",
    "Member",
    "ModeNotice",
    "Notice",
    "OnError",
    "PassedOverNotice",
    "Pattern",
    "PatternError",
    "PeekedMail",
    "PeekedRequest",
    "Plain",
    "Position",
    "ProtocolError",
    "ReadVisibility",
    "Record",
    "Reply",
    "Request",
    "RequestFailed",
    "RevisionConflict",
    "RewoundNotice",
    "ServiceFacts",
    "ServiceOptions",
    "SettingError",
    "StreamFacts",
    "StreamOptions",
    "Subscription",
    "SyncAtomicStep",
    "SyncBulkPublisher",
    "SyncClient",
    "SyncInbox",
    "SyncKeyView",
    "SyncKeyWatch",
    "SyncMail",
    "SyncMember",
    "SyncRequest",
    "SyncSubscription",
    "SyncTransaction",
    "SyncWorker",
    "Timeout",
    "Tracing",
    "Transaction",
    "Until",
    "Worker",
    "all_of",
    "any_of",
    "connect",
    "connect_sync",
    "everything",
    "fields",
    "not_",
    "prefix",
    "regex",
    "topic",
]


def __getattr__(name: str) -> Any:
    """Load a public name from where it lives."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        from malamute_py.extras import missing

        advice = missing(error, f"malamute_py.{name}")
        if advice is None:
            raise
        raise ModuleNotFoundError(advice, name=error.name) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
