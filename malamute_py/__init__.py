"""Malamute: streams, mailboxes and service queues in one broker, for Python and Spark.

    import malamute_py as malamute

    async with malamute.connect() as client:
        await client.publish("orders", b"one", subject="orders.new")
        async for record in client.subscribe("orders", start="earliest"):
            print(record.offset, record.body)

Every name here is loaded when it is first used, so that importing costs nothing. Type checkers read
the imports below, `X as X` for them to count as public; a program reads _HOMES.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from malamute_protocol.batch import Batch as Batch
    from malamute_protocol.batch import Record as Record
    from malamute_protocol.commands import Welcome as Welcome
    from malamute_protocol.errors import BatchError as BatchError
    from malamute_protocol.errors import BrokerRefused as BrokerRefused
    from malamute_protocol.errors import ConnectionLost as ConnectionLost
    from malamute_protocol.errors import LocalProtocolError as LocalProtocolError
    from malamute_protocol.errors import MalamuteError as MalamuteError
    from malamute_protocol.errors import ProtocolError as ProtocolError
    from malamute_protocol.errors import RevisionConflict as RevisionConflict
    from malamute_protocol.errors import Timeout as Timeout
    from malamute_protocol.pattern import Pattern as Pattern
    from malamute_protocol.pattern import PatternError as PatternError
    from malamute_protocol.pattern import all_of as all_of
    from malamute_protocol.pattern import any_of as any_of
    from malamute_protocol.pattern import everything as everything
    from malamute_protocol.pattern import fields as fields
    from malamute_protocol.pattern import not_ as not_
    from malamute_protocol.pattern import prefix as prefix
    from malamute_protocol.pattern import regex as regex
    from malamute_protocol.pattern import topic as topic
    from malamute_py.client.aio.client import Client as Client
    from malamute_py.client.aio.client import connect as connect
    from malamute_py.client.aio.cursors import StreamCursor as StreamCursor
    from malamute_py.client.aio.keys import KeyView as KeyView
    from malamute_py.client.aio.keys import KeyWatch as KeyWatch
    from malamute_py.client.aio.mail import Inbox as Inbox
    from malamute_py.client.aio.mail import Mail as Mail
    from malamute_py.client.aio.mail import MailBatch as MailBatch
    from malamute_py.client.aio.members import Member as Member
    from malamute_py.client.aio.publishing import BulkPublisher as BulkPublisher
    from malamute_py.client.aio.steps import AtomicStep as AtomicStep
    from malamute_py.client.aio.subscription import Subscription as Subscription
    from malamute_py.client.aio.transactions import Transaction as Transaction
    from malamute_py.client.aio.work import Request as Request
    from malamute_py.client.aio.work import Worker as Worker
    from malamute_py.client.facts import BrokerFacts as BrokerFacts
    from malamute_py.client.facts import CursorFacts as CursorFacts
    from malamute_py.client.facts import GroupFacts as GroupFacts
    from malamute_py.client.facts import LinkFacts as LinkFacts
    from malamute_py.client.facts import MailboxFacts as MailboxFacts
    from malamute_py.client.facts import MemberFacts as MemberFacts
    from malamute_py.client.facts import NamespaceFacts as NamespaceFacts
    from malamute_py.client.facts import PeekedMail as PeekedMail
    from malamute_py.client.facts import PeekedRequest as PeekedRequest
    from malamute_py.client.facts import Purged as Purged
    from malamute_py.client.facts import ReadPlan as ReadPlan
    from malamute_py.client.facts import ReloadedSetting as ReloadedSetting
    from malamute_py.client.facts import ServiceFacts as ServiceFacts
    from malamute_py.client.facts import SettingsInForce as SettingsInForce
    from malamute_py.client.facts import StreamFacts as StreamFacts
    from malamute_py.client.facts import StreamVersions as StreamVersions
    from malamute_py.client.facts import TransactionFacts as TransactionFacts
    from malamute_py.client.facts import UserFacts as UserFacts
    from malamute_py.client.facts import WorkerFacts as WorkerFacts
    from malamute_py.client.keys import KeyEntry as KeyEntry
    from malamute_py.client.options import CursorOptions as CursorOptions
    from malamute_py.client.options import GroupOptions as GroupOptions
    from malamute_py.client.options import MailboxOptions as MailboxOptions
    from malamute_py.client.options import ServiceOptions as ServiceOptions
    from malamute_py.client.options import StreamOptions as StreamOptions
    from malamute_py.client.position import AfterMessage as AfterMessage
    from malamute_py.client.position import AtClientTime as AtClientTime
    from malamute_py.client.position import AtMessage as AtMessage
    from malamute_py.client.position import AtTime as AtTime
    from malamute_py.client.position import Confirmation as Confirmation
    from malamute_py.client.position import FromCursor as FromCursor
    from malamute_py.client.position import LastPerSubject as LastPerSubject
    from malamute_py.client.position import Position as Position
    from malamute_py.client.position import StartPoint as StartPoint
    from malamute_py.client.session.calls import Bodies as Bodies
    from malamute_py.client.session.calls import Body as Body
    from malamute_py.client.session.calls import Fields as Fields
    from malamute_py.client.session.calls import Properties as Properties
    from malamute_py.client.session.calls import Time as Time
    from malamute_py.client.session.events import Closed as Closed
    from malamute_py.client.session.events import Linked as Linked
    from malamute_py.client.session.events import LinkEvent as LinkEvent
    from malamute_py.client.session.events import Unlinked as Unlinked
    from malamute_py.client.session.held_batches import HeldBatch as HeldBatch
    from malamute_py.client.session.letters import Reply as Reply
    from malamute_py.client.session.letters import RequestFailed as RequestFailed
    from malamute_py.client.session.subscription import BegunNotice as BegunNotice
    from malamute_py.client.session.subscription import GapError as GapError
    from malamute_py.client.session.subscription import GapNotice as GapNotice
    from malamute_py.client.session.subscription import ModeNotice as ModeNotice
    from malamute_py.client.session.subscription import Notice as Notice
    from malamute_py.client.session.subscription import PassedOverNotice as PassedOverNotice
    from malamute_py.client.session.subscription import RewoundNotice as RewoundNotice
    from malamute_py.client.settings import ClientOptions as ClientOptions
    from malamute_py.client.settings import ClientSettings as ClientSettings
    from malamute_py.client.settings import Credential as Credential
    from malamute_py.client.settings import Curve as Curve
    from malamute_py.client.settings import Plain as Plain
    from malamute_py.client.settings import SettingError as SettingError
    from malamute_py.client.settings import Wait as Wait
    from malamute_py.client.sync.client import SyncClient as SyncClient
    from malamute_py.client.sync.client import connect_sync as connect_sync
    from malamute_py.client.sync.cursors import SyncStreamCursor as SyncStreamCursor
    from malamute_py.client.sync.keys import SyncKeyView as SyncKeyView
    from malamute_py.client.sync.keys import SyncKeyWatch as SyncKeyWatch
    from malamute_py.client.sync.link import Pending as Pending
    from malamute_py.client.sync.mail import SyncInbox as SyncInbox
    from malamute_py.client.sync.mail import SyncMail as SyncMail
    from malamute_py.client.sync.mail import SyncMailBatch as SyncMailBatch
    from malamute_py.client.sync.members import SyncMember as SyncMember
    from malamute_py.client.sync.publishing import SyncBulkPublisher as SyncBulkPublisher
    from malamute_py.client.sync.steps import SyncAtomicStep as SyncAtomicStep
    from malamute_py.client.sync.subscription import SyncSubscription as SyncSubscription
    from malamute_py.client.sync.transactions import SyncTransaction as SyncTransaction
    from malamute_py.client.sync.work import SyncRequest as SyncRequest
    from malamute_py.client.sync.work import SyncWorker as SyncWorker
    from malamute_py.client.tracing import Tracing as Tracing
    from malamute_py.client.words import AckWhen as AckWhen
    from malamute_py.client.words import ConfirmAt as ConfirmAt
    from malamute_py.client.words import GroupKind as GroupKind
    from malamute_py.client.words import GroupVisibility as GroupVisibility
    from malamute_py.client.words import OnError as OnError
    from malamute_py.client.words import ReadVisibility as ReadVisibility
    from malamute_py.client.words import Until as Until
    from malamute_py.embedded import EmbeddedBroker as EmbeddedBroker

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
        "MailBatch",
    ),
    "malamute_py.client.aio.members": ("Member",),
    "malamute_py.client.aio.publishing": ("BulkPublisher",),
    "malamute_py.client.aio.steps": ("AtomicStep",),
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
        "StreamVersions",
        "LinkFacts",
        "MemberFacts",
        "NamespaceFacts",
        "Purged",
        "ReadPlan",
        "ReloadedSetting",
        "SettingsInForce",
        "TransactionFacts",
        "UserFacts",
        "WorkerFacts",
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
        "StartPoint",
    ),
    "malamute_py.client.session.letters": (
        "Reply",
        "RequestFailed",
    ),
    "malamute_py.client.session.held_batches": ("HeldBatch",),
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
        "Credential",
        "Wait",
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
        "SyncMailBatch",
    ),
    "malamute_py.client.sync.members": ("SyncMember",),
    "malamute_py.client.sync.publishing": ("SyncBulkPublisher",),
    "malamute_py.client.sync.steps": ("SyncAtomicStep",),
    "malamute_py.client.sync.subscription": ("SyncSubscription",),
    "malamute_py.client.sync.transactions": ("SyncTransaction",),
    "malamute_py.client.sync.work": (
        "SyncRequest",
        "SyncWorker",
    ),
    "malamute_py.client.aio.cursors": ("StreamCursor",),
    "malamute_py.client.sync.cursors": ("SyncStreamCursor",),
    "malamute_py.client.sync.link": ("Pending",),
    "malamute_py.client.session.events": (
        "Closed",
        "LinkEvent",
        "Linked",
        "Unlinked",
    ),
    "malamute_py.client.session.calls": ("Bodies", "Body", "Fields", "Properties", "Time"),
    "malamute_protocol.commands": ("Welcome",),
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


def __getattr__(name: str) -> Any:
    """Load a public name from where it lives; `__all__` is the names of all of them."""
    if name == "__all__":
        return sorted(_HOME_OF)
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
