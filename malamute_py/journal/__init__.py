"""The journal: circular logs of record batches, each carrying many streams.

A library of its own: append, sync, read, recover, retain. It starts no thread, reads no
clock and logs nothing. The bytes on disk are described in FORMAT.md beside this file.
"""

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
]
