"""The planted bugs of the journal, and of the storage below it."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

from malamute_py.journal import recovery, repair
from malamute_py.journal.errors import JournalFailed
from malamute_py.journal.layout import FAILED_FILE
from malamute_py.journal.mapping import Mappings
from malamute_py.journal.recovery import Scan
from malamute_py.journal.ring import Ring
from tests.simulation.plants.planted import Planted, codes, replace
from tests.simulation.ring_run import RingRun
from tests.simulation.storage import SimulatedStorage


def _ghost(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(RingRun, "tight_share", 1.0))

    def make(original: Any) -> Any:
        def fault(self: Any, found: Any) -> Any:
            epoch = self.epoch
            if not isinstance(found, str):
                self.epoch = min(epoch, found.stamp.epoch)
            try:
                return original(self, found)
            finally:
                self.epoch = epoch

        return fault

    replace(stack, Scan, "_fault", make)


def _half_bundle(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def take(self: Any, segment: Any, found: Any, data: Any) -> None:
            original(self, segment, found, data)
            self._flush()
            self._bundle = recovery._ANY_BUNDLE
            self._complete = self._boundary(found.end)

        return take

    replace(stack, recovery.Scan, "_take", make)


def _too_short(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def fault(self: Any, found: Any) -> Any:
            if not isinstance(found, str) and found.stamp.lsn - found.stamp.bundle_lsn > 12_000:
                return "so long a bundle must be torn"
            return original(self, found)

        return fault

    replace(stack, Scan, "_fault", make)


def _damage_ends_the_log(stack: contextlib.ExitStack) -> None:
    replace(stack, Scan, "_proven", lambda _: lambda _self, _lsn, _at: False)


def _epoch_from_the_log(stack: contextlib.ExitStack) -> None:
    opened = Ring.open

    def open_(storage: Any, *, epoch: int, **more: Any) -> Any:
        for lower in range(max(1, epoch - 3), epoch):
            with contextlib.suppress(ValueError):
                return opened(storage, epoch=lower, **more)
        return opened(storage, epoch=epoch, **more)

    stack.enter_context(patch.object(Ring, "open", staticmethod(open_)))


def _sync_claims_more(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def sync(self: Any) -> int:
            original(self)
            self._synced = self.end_lsn
            return int(self._synced)

        return sync

    replace(stack, Ring, "sync", make)


def _sync_tried_again(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def sync(self: Any) -> int:
            try:
                return int(original(self))
            except JournalFailed:
                self._failure = None
                self._storage.remove(FAILED_FILE)
                return int(original(self))

        return sync

    replace(stack, Ring, "sync", make)


def _names_not_synced(stack: contextlib.ExitStack) -> None:
    replace(stack, SimulatedStorage, "sync_directory", lambda _: lambda _self: None)


def _mapped_bytes_overwritten(stack: contextlib.ExitStack) -> None:
    replace(stack, Mappings, "detach", lambda _: lambda _self, _segment: True)


def _stamp_left(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(RingRun, "tight_share", 1.0))
    stack.enter_context(patch.object(RingRun, "edge_share", 1.0))
    replace(stack, repair, "_clear_end", lambda original: lambda storage, scan: None)


PLANTS: dict[str, Planted] = {
    "ghost-batch": Planted(
        "journal", "recovery takes a batch of an older epoch in a rewritten tail",
        _ghost, codes("ghost"), 300,
    ),
    "half-bundle": Planted(
        "journal", "recovery keeps the part of a bundle that it finds",
        _half_bundle, codes("half_bundle", "ghost"), 40,
    ),
    "truncates-too-much": Planted(
        "journal", "recovery takes long bundles for torn ones",
        _too_short, codes("lost"), 40,
    ),
    "damage-ends-the-log": Planted(
        "journal", "damage before the tail is taken for a torn tail",
        _damage_ends_the_log, codes("lost"), 120,
    ),
    "offset-reused": Planted(
        "journal", "the epoch is counted from the log, which a power loss shortens",
        _epoch_from_the_log, codes("reused"), 60,
    ),
    "sync-claims-more": Planted(
        "journal", "a sync claims what was appended while it ran",
        _sync_claims_more, codes("lost"), 120,
    ),
    "sync-tried-again": Planted(
        "journal", "a failed sync is tried again, and succeeds",
        _sync_tried_again, codes("lost"), 200,
    ),
    "names-not-synced": Planted(
        "journal", "directory entries are never synced",
        _names_not_synced, codes("lost", "broken", "ghost"), 40,
    ),
    "mapped-bytes-overwritten": Planted(
        "journal", "a segment is written over while a peer has mapped bytes of it to read",
        _mapped_bytes_overwritten, codes("changed"), 60,
    ),
    "stamp-left": Planted(
        "journal", "the stamp of a dropped batch stays where the next one is written",
        _stamp_left, codes("ghost", "lost", "half_bundle"), 200, 222,
    ),
}  # fmt: skip
