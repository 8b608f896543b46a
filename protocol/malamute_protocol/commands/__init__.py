"""The commands of the protocol: one table of names, numbers, fields and meaning.

Owns the command types and their MessagePack form: each is an array whose first element is the
command's number. They lie in a file for each thing that they are about, and every name is known
here, `X as X` for type checkers to count it as public. The rule: a number or a field, once
released, keeps its meaning; new fields are appended with a default. Source: SPEC.md, section 4 (the
two are compared by tests/protocol/test_spec_agrees_with_code.py).
"""

from __future__ import annotations

from typing import TypeAlias, Union

from malamute_protocol.commands.administration import BrokerInfo as BrokerInfo
from malamute_protocol.commands.administration import Kick as Kick
from malamute_protocol.commands.administration import ListLinks as ListLinks
from malamute_protocol.commands.administration import ListNamespaces as ListNamespaces
from malamute_protocol.commands.administration import ListUsers as ListUsers
from malamute_protocol.commands.administration import ReloadConfig as ReloadConfig
from malamute_protocol.commands.atomic import STEP_PARTS as STEP_PARTS
from malamute_protocol.commands.atomic import Atomic as Atomic
from malamute_protocol.commands.command import Command as Command
from malamute_protocol.commands.command import WithContent as WithContent
from malamute_protocol.commands.cursors import CursorInfo as CursorInfo
from malamute_protocol.commands.cursors import EditCursor as EditCursor
from malamute_protocol.commands.cursors import MoveCursor as MoveCursor
from malamute_protocol.commands.cursors import RemoveCursor as RemoveCursor
from malamute_protocol.commands.fields import Level as Level
from malamute_protocol.commands.fields import Pattern as Pattern
from malamute_protocol.commands.fields import Start as Start
from malamute_protocol.commands.fields import StartKind as StartKind
from malamute_protocol.commands.fields import Visibility as Visibility
from malamute_protocol.commands.fields import WorkState as WorkState
from malamute_protocol.commands.groups import AckRecords as AckRecords
from malamute_protocol.commands.groups import EditGroup as EditGroup
from malamute_protocol.commands.groups import GroupInfo as GroupInfo
from malamute_protocol.commands.groups import JoinGroup as JoinGroup
from malamute_protocol.commands.groups import RemoveGroup as RemoveGroup
from malamute_protocol.commands.groups import RequeueGroup as RequeueGroup
from malamute_protocol.commands.groups import ResetGroup as ResetGroup
from malamute_protocol.commands.link import Bye as Bye
from malamute_protocol.commands.link import Hello as Hello
from malamute_protocol.commands.link import Ping as Ping
from malamute_protocol.commands.link import Pong as Pong
from malamute_protocol.commands.link import Refused as Refused
from malamute_protocol.commands.link import Result as Result
from malamute_protocol.commands.link import Welcome as Welcome
from malamute_protocol.commands.mail import AckMail as AckMail
from malamute_protocol.commands.mail import EditMailbox as EditMailbox
from malamute_protocol.commands.mail import Mail as Mail
from malamute_protocol.commands.mail import MailboxInfo as MailboxInfo
from malamute_protocol.commands.mail import OpenInbox as OpenInbox
from malamute_protocol.commands.mail import PeekMail as PeekMail
from malamute_protocol.commands.mail import PurgeMail as PurgeMail
from malamute_protocol.commands.mail import RemoveMailbox as RemoveMailbox
from malamute_protocol.commands.mail import Send as Send
from malamute_protocol.commands.services import AckWork as AckWork
from malamute_protocol.commands.services import CancelRequest as CancelRequest
from malamute_protocol.commands.services import EditService as EditService
from malamute_protocol.commands.services import Offer as Offer
from malamute_protocol.commands.services import PeekRequests as PeekRequests
from malamute_protocol.commands.services import RemoveService as RemoveService
from malamute_protocol.commands.services import Reply as Reply
from malamute_protocol.commands.services import Request as Request
from malamute_protocol.commands.services import Requeue as Requeue
from malamute_protocol.commands.services import ServiceInfo as ServiceInfo
from malamute_protocol.commands.services import Work as Work
from malamute_protocol.commands.streams import Confirm as Confirm
from malamute_protocol.commands.streams import CreateStream as CreateStream
from malamute_protocol.commands.streams import EditStream as EditStream
from malamute_protocol.commands.streams import FindOffset as FindOffset
from malamute_protocol.commands.streams import GetKey as GetKey
from malamute_protocol.commands.streams import ListKeys as ListKeys
from malamute_protocol.commands.streams import ListStreams as ListStreams
from malamute_protocol.commands.streams import OpenProducer as OpenProducer
from malamute_protocol.commands.streams import PlanRead as PlanRead
from malamute_protocol.commands.streams import Publish as Publish
from malamute_protocol.commands.streams import PurgeSubjects as PurgeSubjects
from malamute_protocol.commands.streams import RemoveStream as RemoveStream
from malamute_protocol.commands.streams import StreamInfo as StreamInfo
from malamute_protocol.commands.streams import StreamSchemas as StreamSchemas
from malamute_protocol.commands.streams import Trim as Trim
from malamute_protocol.commands.streams import UpdateKey as UpdateKey
from malamute_protocol.commands.subscriptions import Cover as Cover
from malamute_protocol.commands.subscriptions import Credit as Credit
from malamute_protocol.commands.subscriptions import Deliver as Deliver
from malamute_protocol.commands.subscriptions import Ended as Ended
from malamute_protocol.commands.subscriptions import Gap as Gap
from malamute_protocol.commands.subscriptions import Mode as Mode
from malamute_protocol.commands.subscriptions import Rewound as Rewound
from malamute_protocol.commands.subscriptions import Schema as Schema
from malamute_protocol.commands.subscriptions import Subscribe as Subscribe
from malamute_protocol.commands.subscriptions import Subscribed as Subscribed
from malamute_protocol.commands.subscriptions import Unsubscribe as Unsubscribe
from malamute_protocol.commands.transactions import AwaitTransaction as AwaitTransaction
from malamute_protocol.commands.transactions import BeginTransaction as BeginTransaction
from malamute_protocol.commands.transactions import CommitTransaction as CommitTransaction
from malamute_protocol.commands.transactions import EndTransaction as EndTransaction
from malamute_protocol.commands.transactions import ListTransactions as ListTransactions
from malamute_protocol.commands.transactions import RollBackTransaction as RollBackTransaction
from malamute_protocol.commands.transactions import Stage as Stage

AnyCommand: TypeAlias = Union[  # noqa: UP007 - msgspec reads the union at run time
    Hello, Welcome, Ping, Pong, Bye, Refused, Result,
    Publish, Confirm, Subscribe, Subscribed, Unsubscribe, Ended, Credit, Deliver, Cover, Gap,
    Rewound, Mode, OpenProducer,
    CreateStream, EditStream, RemoveStream, StreamInfo, ListStreams, FindOffset, PlanRead,
    BrokerInfo, ListLinks, Kick,
    Send, OpenInbox, Mail, AckMail, PeekMail, PurgeMail, MailboxInfo, EditMailbox,
    RemoveMailbox,
    Request, Offer, Work, AckWork, Reply, CancelRequest, ServiceInfo, EditService, Requeue,
    RemoveService,
    MoveCursor, CursorInfo, RemoveCursor, JoinGroup, AckRecords, GroupInfo, Atomic,
    EditCursor, RemoveGroup, Trim, PurgeSubjects, EditGroup, RequeueGroup, PeekRequests,
    ResetGroup, UpdateKey, GetKey, ListKeys, StreamSchemas, Schema, ReloadConfig, ListUsers,
    ListNamespaces,
    BeginTransaction, Stage, CommitTransaction, RollBackTransaction, ListTransactions,
    EndTransaction, AwaitTransaction,
]  # fmt: skip
