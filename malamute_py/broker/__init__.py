"""The broker core: a state machine without sockets, clock, threads or randomness.

`Broker` takes commands and answers of the journal, and hands out a `Ready`; see ready.py for the
contract with its shell. Source: docs/design.md, The core and its shell.
"""

from malamute_py.broker.broker import Broker
from malamute_py.broker.limits import BrokerSettings
from malamute_py.broker.ready import (
    Append,
    AppendBundle,
    Appended,
    AppendRefused,
    Event,
    HistoryRead,
    HistoryRun,
    IndexAnswer,
    IndexFailure,
    IndexQuery,
    ReadFailed,
    ReadRange,
    Ready,
    RecoveredState,
    RingFacts,
    Send,
    StreamFacts,
)

__all__ = [
    "Append",
    "AppendBundle",
    "AppendRefused",
    "Appended",
    "Broker",
    "BrokerSettings",
    "Event",
    "HistoryRead",
    "HistoryRun",
    "IndexAnswer",
    "IndexFailure",
    "IndexQuery",
    "ReadFailed",
    "ReadRange",
    "Ready",
    "RecoveredState",
    "RingFacts",
    "Send",
    "StreamFacts",
]
