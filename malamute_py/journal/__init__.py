"""The journal: circular logs of record batches, each carrying many streams.

A library of its own: append, sync, read, recover, retain. It starts no thread, reads no
clock and logs nothing. The bytes on disk are described in FORMAT.md beside this file.

One name stands above it: open_reader() is malamute_py.mapped's, which knows streams by name and
matches patterns. It is loaded when it is asked for, and the journal itself never asks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from malamute_py.journal.directory import Journal
from malamute_py.journal.errors import (
    BatchTooLarge,
    DiskFull,
    FollowLost,
    JournalCorrupt,
    JournalError,
    JournalFailed,
    JournalFull,
    JournalLocked,
    NewerFormat,
    StorageRefused,
)
from malamute_py.journal.follow import Follower, Wanted
from malamute_py.journal.log import Log
from malamute_py.journal.ring import Ring
from malamute_py.journal.storage import FileStorage, MemoryStorage, Storage
from malamute_py.journal.types import (
    NO_KEYS,
    UNINDEXED_FROM,
    Append,
    Appended,
    Candidates,
    Control,
    EpochStart,
    Gap,
    HeaderIndex,
    History,
    Plan,
    Produced,
    Recovery,
    RingEvent,
    RingSettings,
    Run,
    Split,
    StreamFacts,
)

if TYPE_CHECKING:
    from malamute_py.mapped.reader import open_reader

__all__ = [
    "NO_KEYS",
    "UNINDEXED_FROM",
    "Append",
    "Appended",
    "BatchTooLarge",
    "Candidates",
    "Control",
    "DiskFull",
    "EpochStart",
    "FileStorage",
    "FollowLost",
    "Follower",
    "Gap",
    "HeaderIndex",
    "History",
    "Journal",
    "JournalCorrupt",
    "JournalError",
    "JournalFailed",
    "JournalFull",
    "JournalLocked",
    "Log",
    "MemoryStorage",
    "NewerFormat",
    "Plan",
    "Produced",
    "Recovery",
    "Ring",
    "RingEvent",
    "RingSettings",
    "Run",
    "Split",
    "Storage",
    "StorageRefused",
    "StreamFacts",
    "Wanted",
    "open_reader",
]


def __getattr__(name: str) -> Any:
    """Load the reader of running brokers' logs when `open_reader` is first asked for.

    Python calls this for a name that the module lacks.
    """
    if name != "open_reader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = import_module("malamute_py.mapped.reader").open_reader
    globals()[name] = value
    return value
