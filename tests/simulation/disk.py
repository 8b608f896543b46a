"""A disk that lies exactly as much as real ones do.

Owns the bytes of the simulated machine: what the page cache shows and what the platter
holds. The rule: nothing here is random by itself; every choice is drawn from the rng that
the caller passes, so that a seed replays a run.

The fault model
---------------
A file is two images of the same bytes, the *live* one (page cache: what reads return) and
the *durable* one, compared in sectors of 512 bytes.

- A write changes the live image and marks its sectors dirty. Nothing else is promised.
- Write-back: at any moment the kernel may make any dirty sectors durable, in any order
  (`write_back`). So a power loss may also keep a version between the last sync and the end.
- `sync` of a file makes its dirty sectors and its size durable. Names are not covered: a
  created, renamed or removed entry is durable only after `sync_directory`.
- Process death (`crash`): the page cache stays, open handles, mappings and locks are gone.
  A write that was under way is cut at any byte.
- Power loss (`power_loss`): each dirty sector is kept or lost independently; or none, all,
  a prefix by position, or a prefix in write order. The size is the old or the new one (a
  truncated tail may come back; an extended file may be short). Unsynced directory entries
  are kept as a prefix of their order or as any subset; one rename is atomic.
- A failing sync raises EIO, makes some of the dirty sectors durable and *marks all of them
  clean*: the cache goes on showing content that a later, succeeding sync does not write.
  Rewriting a sector makes it dirty again.
- Allocation beyond the capacity raises ENOSPC and changes nothing.
- A read error: reads that touch a bad sector raise EIO, until its page is written to again.
- Bit rot: one bit of a durable sector flips, in both images.

Not modelled: misdirected writes, a disk that acknowledges a sync and forgets, writes that fail half
way with an error (only a crash cuts them), faults of mapped pages (SIGBUS). Source:
docs/design.md, Journal.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from random import Random

SECTOR_BYTES = 512
PAGE_SECTORS = 8


class CrashNow(BaseException):
    """The simulated process died here: passes through every `except Exception`."""


def _directory_of(change: dict[str, Inode | None]) -> str:
    return next(iter(change)).rpartition("/")[0]


class Inode:
    """One file's bytes, apart from its name."""

    __slots__ = ("bad", "dirty", "durable", "durable_size", "live", "lost", "number", "size")

    def __init__(self, number: int) -> None:
        self.number = number
        self.live = bytearray()
        self.size = 0
        self.durable = bytearray()
        self.durable_size = 0
        self.dirty: dict[int, None] = {}
        """Dirty sectors in the order in which they were first written since their last sync."""
        self.lost: set[int] = set()
        """Sectors that a failed sync marked clean though they never reached the platter."""
        self.bad: set[int] = set()

    def grow(self, size: int) -> None:
        """Extend the live image with zeros."""
        if size > len(self.live):
            # Bytes beyond a cut that is not durable yet: the zeros must reach the platter too.
            for sector in range(
                len(self.live) // SECTOR_BYTES, -(-min(size, len(self.durable)) // SECTOR_BYTES)
            ):
                self.dirty[sector] = None
            # A new object, not extend(): a mapping of the old one may be exported.
            fresh = bytearray(size)
            fresh[: len(self.live)] = self.live
            self.live = fresh
        self.size = max(self.size, size)

    def store(self, position: int, data: bytes | memoryview) -> None:
        """Write to the page cache."""
        length = len(data)
        if not length:
            return
        end = position + length
        if end > self.size:
            self.grow(end)
        self.live[position:end] = data
        for sector in range(position // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1):
            self.dirty[sector] = None
        if self.lost or self.bad:
            whole = range(position // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1)
            self.lost.difference_update(whole)
            # By pages, as the kernel keeps them: what is in its cache is read from there.
            first = whole.start // PAGE_SECTORS * PAGE_SECTORS
            stop = -(-whole.stop // PAGE_SECTORS) * PAGE_SECTORS
            self.bad.difference_update(range(first, stop))

    def settle(self, sectors: Iterable[int]) -> None:
        """Make sectors durable as the page cache shows them."""
        live = self.live
        if len(self.durable) < len(live):
            self.durable.extend(bytes(len(live) - len(self.durable)))
        for sector in sectors:
            low = sector * SECTOR_BYTES
            # A short last sector must not shorten the durable image.
            high = min(low + SECTOR_BYTES, len(live))
            self.durable[low:high] = live[low:high]

    def settle_all(self) -> None:
        """Make all sectors durable, as a succeeding sync does."""
        self.settle(self.dirty)
        self.dirty.clear()
        self.durable_size = self.size
        del self.durable[self.size :]

    def forget_cache(self) -> None:
        """Lose the page cache, as at a power loss: it shows what the platter holds."""
        size = self.durable_size
        if len(self.durable) < size:
            self.durable.extend(bytes(size - len(self.durable)))
        del self.durable[size:]
        self.live = bytearray(self.durable)
        self.size = size
        self.dirty.clear()
        self.lost.clear()


class Disk:
    """Files by name, with all that a crash may do to them."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.pending: list[dict[str, Inode | None]] = []
        """Directory changes since the last sync_directory; each is atomic."""
        self.directories: set[str] = set()
        """Directories that are durable: the journal syncs the parent when it makes one."""
        self.opening = 0
        """Number of the process: a handle or lock of an earlier one is dead."""
        self.locks: dict[str, int] = {}
        self.between: Callable[[str], None] | None = None
        """Called during a slow call, for the work of other threads; the shell sets it."""
        self._inodes = 0
        self.writes = 0
        self.syncs = 0
        self.crash_at_write = -1
        """The write with this number is cut and raises CrashNow; -1: none."""
        self.crash_at_sync = -1
        self.fail_syncs = 0
        """How many of the next syncs fail."""
        self.failed_syncs = 0
        """How many syncs have failed, ever."""
        self.rng = Random(0)
        """Random numbers for cuts inside a write and partly failed syncs; the simulation sets
        it."""

    # --- names -------------------------------------------------------------------

    def inode(self, name: str) -> Inode:
        """Return a file. Raises FileNotFoundError."""
        found = self.names.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return found

    def create(self, name: str) -> Inode:
        """Find or make a file."""
        found = self.names.get(name)
        if found is None:
            self._inodes += 1
            found = Inode(self._inodes)
            self._entry({name: found})
        return found

    def rename(self, old: str, new: str) -> None:
        """Rename a file: atomic, and durable only after sync_directory."""
        self._mutation()
        inode = self.inode(old)
        self._entry({old: None, new: inode})

    def remove(self, name: str) -> None:
        """Remove a file: durable only after sync_directory."""
        self._mutation()
        self.inode(name)
        self._entry({name: None})

    def sync_directory(self, directory: str) -> None:
        """Make the names of one directory durable; each change lies in one directory."""
        self._sync_begins()
        mine = [change for change in self.pending if _directory_of(change) == directory]
        self._apply_pending(mine)
        self.pending = [change for change in self.pending if _directory_of(change) != directory]

    def _entry(self, change: dict[str, Inode | None]) -> None:
        for name, inode in change.items():
            if inode is None:
                self.names.pop(name, None)
            else:
                self.names[name] = inode
        self.pending.append(change)

    def _apply_pending(self, changes: Iterable[dict[str, Inode | None]]) -> None:
        for change in changes:
            for name, inode in change.items():
                if inode is None:
                    self.durable_names.pop(name, None)
                else:
                    self.durable_names[name] = inode

    # --- bytes -------------------------------------------------------------------

    def used(self) -> int:
        """Return the bytes that all files take."""
        return sum(inode.size for inode in self.names.values())

    def allocate(self, name: str, size: int) -> Inode:
        """Create or extend a file to `size` with zeros; raises ENOSPC and changes nothing."""
        old = self.names.get(name)
        more = size - (old.size if old is not None else 0)
        if more > 0 and self.used() + more > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        self._mutation()
        inode = self.create(name)
        if size > inode.size:
            inode.grow(size)
        return inode

    def write(self, inode: Inode, position: int, buffers: Iterable[bytes | memoryview]) -> int:
        """Write to the page cache; a crash planned for this write cuts it at any byte."""
        data = b"".join(buffers)
        if inode.size < position + len(data):
            more = position + len(data) - inode.size
            if self.used() + more > self.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.writes += 1
        if self.writes == self.crash_at_write:
            inode.store(position, data[: self.rng.randint(0, len(data))])
            raise CrashNow
        inode.store(position, data)
        return len(data)

    def read(self, inode: Inode, position: int, length: int) -> bytes:
        """Return what the page cache shows; raises EIO on a bad sector; short at the end."""
        if inode.bad:
            last = (position + length - 1) // SECTOR_BYTES
            for sector in range(position // SECTOR_BYTES, last + 1):
                if sector in inode.bad:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        return bytes(memoryview(inode.live)[position : min(position + length, inode.size)])

    def truncate(self, inode: Inode, size: int) -> None:
        """Cut (the tail may come back at a power loss) or extend with zeros."""
        self._mutation()
        if size < inode.size:
            inode.live = inode.live[:size]
            inode.size = size
            beyond = (size + SECTOR_BYTES - 1) // SECTOR_BYTES
            for sector in [sector for sector in inode.dirty if sector >= beyond]:
                del inode.dirty[sector]
        else:
            inode.grow(size)

    def sync(self, inode: Inode) -> None:
        """Do fdatasync; raises EIO and marks the pages clean when a failure is planned."""
        self._sync_begins()
        if self.fail_syncs:
            self.fail_syncs -= 1
            self.failed_syncs += 1
            kept = [sector for sector in inode.dirty if self.rng.random() < 0.5]
            inode.settle(kept)
            inode.lost.update(set(inode.dirty).difference(kept))
            inode.dirty.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        inode.settle_all()

    def _mutation(self) -> None:
        self.writes += 1
        if self.writes == self.crash_at_write:
            raise CrashNow

    def _sync_begins(self) -> None:
        self.syncs += 1
        if self.syncs == self.crash_at_sync:
            raise CrashNow

    # --- what happens to machines ---------------------------------------------------

    def write_back(self, rng: Random, share: float) -> None:
        """Have the kernel write some dirty sectors on its own."""
        for inode in self.names.values():
            if inode.dirty:
                chosen = [sector for sector in inode.dirty if rng.random() < share]
                inode.settle(chosen)
                for sector in chosen:
                    del inode.dirty[sector]

    def crash(self) -> None:
        """Kill the process: the page cache stays, open handles and locks are gone."""
        self._process_ends()

    def _process_ends(self) -> None:
        self.opening += 1
        self.locks.clear()
        self.between = None
        self.crash_at_write = self.crash_at_sync = -1
        self.fail_syncs = 0

    def power_loss(self, rng: Random, mode: str) -> None:
        """Lose what was not synced; mode: none, all, any, prefix, order."""
        names = sorted(set(self.names) | set(self.durable_names))
        for inode in {
            inode.number: inode
            for table in (self.durable_names, self.names)
            for name in names
            if (inode := table.get(name)) is not None
        }.values():
            inode.settle(self._kept(rng, mode, inode))
            if inode.size != inode.durable_size and (
                mode == "all" or (mode != "none" and rng.random() < 0.5)
            ):
                inode.durable_size = inode.size
        if mode == "all":
            kept = self.pending
        elif mode == "none":
            kept = []
        elif mode == "any" and rng.random() < 0.5:
            kept = [change for change in self.pending if rng.random() < 0.5]
        else:
            kept = self.pending[: rng.randint(0, len(self.pending))]
        self._apply_pending(kept)
        self.pending.clear()
        self.names = dict(self.durable_names)
        for inode in self.names.values():
            inode.forget_cache()
        self._process_ends()

    @staticmethod
    def _kept(rng: Random, mode: str, inode: Inode) -> list[int]:
        dirty = list(inode.dirty)
        if not dirty or mode == "none":
            return []
        if mode == "all":
            return dirty
        if mode == "any":
            share = rng.choice((0.1, 0.5, 0.9))
            return [sector for sector in dirty if rng.random() < share]
        if mode == "prefix":
            dirty.sort()
        return dirty[: rng.randint(0, len(dirty))]

    def rot(self, name: str, position: int, bit: int) -> None:
        """Flip one bit, on the platter and in the cache."""
        inode = self.inode(name)
        inode.live[position] ^= 1 << bit
        if position < len(inode.durable):
            inode.durable[position] ^= 1 << bit

    def make_bad(self, name: str, sector: int) -> None:
        """Have reads of this sector fail until it is written."""
        self.inode(name).bad.add(sector)
