"""The data directory at a start: opening it, recovering its rings, and the report.

Owns what is logged of a recovery, and the damage that BROKER_INFO shows while the broker runs. The
rule: anything wrong is one StartError that says what to do, and leaves everything as it was.
Source: docs/design.md, Journal.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Final

from malamute_py.broker.ready import MAIN, RingFacts
from malamute_py.config import Config, JournalSection
from malamute_py.journal import (
    DiskFull,
    JournalCorrupt,
    JournalError,
    JournalLocked,
    MemoryStorage,
    NewerFormat,
    Recovery,
    Storage,
)
from malamute_py.journal.directory import Journal, removal_rests
from malamute_py.server.checkpointing.recovered import ring_facts, rings_asked
from malamute_py.server.errors import StartError
from malamute_py.server.journaling.rings import ring_settings
from malamute_py.store.checking import foreign_main
from malamute_py.telemetry import Log

_DAMAGE_SHOWN = 100
_AHEAD_MS: Final = 1_000
"""Milliseconds by which a ring may be ahead of the clock without a word of it at the start."""


def open_journal(config: Config, storage: Storage | None) -> Journal:
    """Open the data directory at a start. Raises StartError, which says what to do about it.

    storage: of a test, instead of the data directory of the configuration.
    """
    # No data directory: everything is kept in memory.
    directory, mapped = config.data_directory, config.journal.mapped_reads
    where = directory or "memory"
    elsewhere = "or choose another: malamute broker --data DIRECTORY"
    try:
        if storage is not None:
            return Journal.open(storage, mapped=mapped)
        return Journal.open(directory or MemoryStorage(), mapped=mapped)
    except JournalLocked as error:
        raise StartError(error.what, where, "one directory serves one broker") from error
    except DiskFull as error:
        raise StartError(str(error), where, f"free space on its disk, {elsewhere}") from error
    except (JournalCorrupt, NewerFormat) as error:
        raise StartError(str(error), where, "nothing was changed") from error
    except JournalError as error:
        raise StartError(str(error), where, elsewhere.removeprefix("or ")) from error
    except OSError as error:
        raise _explained(error, where, elsewhere) from error


class StoredRings:
    """The rings of a data directory as a start finds them."""

    def __init__(
        self, journal: Journal, config: JournalSection, batch_bytes_max: int, log: Log
    ) -> None:
        """journal: the data directory, open. batch_bytes_max: of a published batch."""
        self.damage: list[str] = []
        """Data that was missing or damaged at the start."""
        self.damaged: dict[str, int] = {}
        """Ring -> bytes that were missing or damaged at the start."""
        self.rests: list[str] = []
        """Rings whose removal an earlier run did not end."""
        self._journal = journal
        self._config = config
        self._batch_bytes_max = batch_bytes_max
        self._log = log

    def recover(self, now_ms: int, *, held: bool) -> dict[str, RingFacts]:
        """Open the rings that are there, ring main first, and log what was found of each.

        held: nothing of ring main is overwritten before the checkpoint's tables have it. Returns
        what the core has to know of each ring. Raises StartError.
        """
        where = self._journal.storage.describe()
        exposed = self._journal.exposure
        if exposed:
            self._log.warning(
                "directory_exposed", directory=where, reason=exposed,
                do=f"let it belong to the broker's user alone: chown -R {os.geteuid()} {where} &&"
                f" chmod -R go-rwx {where}. Nothing, if only this broker is in the group that may"
                " change it",
            )  # fmt: skip
        unmapped = self._journal.unmapped
        way = {"way": "pread", "reason": unmapped} if unmapped else {"way": "mapped"}
        self._log.info("history_reads", **way)
        for file, reason in self._journal.restored:
            self._log.error("file_restored", file=file, reason=reason)
            self.note_damage(f"{file}: {reason}")
        if self._journal.moved:
            self._log.warning(
                "directory_moved", directory=where, differs=list(self._journal.moved),
                epoch=self._journal.epoch,
                do="nothing if it was moved, or its disk. If it is a copy and the original goes on,"
                " let no client use both: make second directories with malamute snapshot restore",
            )  # fmt: skip
        for unknown in self._journal.unknown:
            self._log.warning("file_left_alone", file=unknown.file, reason=unknown.reason)
        foreign = foreign_main(self._journal.storage)
        if foreign:
            raise StartError(
                foreign, where, "put the directories of rings back where they were, or restore the"
                " directory from a snapshot (malamute snapshot restore SNAPSHOT --data NEW)",
            )  # fmt: skip
        # Ring main tells which other rings streams have, and how they were asked for.
        try:
            asked = {"full": self._config.full}
            facts = {MAIN: self._recover_ring(MAIN, asked, held=held)}
            if not facts[MAIN].end_lsn:
                # A new ring: its first segment is prepared now, in one call, since a full disk is a
                # reason not to start, and the first publish need not wait.
                while self._journal.rings[MAIN].prepare_step(budget_bytes=1 << 62):
                    pass
            names = self._journal.names()
            wanted, removed = rings_asked(facts[MAIN])
            # Rings whose streams are gone, of which files are left: housekeeping removes them.
            rests = {*removal_rests(self._journal.storage), *removed.intersection(names)}
            self.rests = sorted(rests.difference(wanted))
            for name in self.rests:
                self._log.info("ring_removal_resumed", ring=name)
            for name in names:
                if name == MAIN or name in self.rests:
                    continue
                if name not in wanted:
                    self._log.warning(
                        "ring_left_alone", ring=name, reason="no stream lives in it any more"
                    )
                    continue
                facts[name] = self._recover_ring(name, wanted[name])
        except DiskFull as error:
            raise StartError(str(error), where, "free space on its disk") from error
        except JournalError as error:
            raise StartError(
                str(error), where, f"look at it with: malamute journal verify {where}"
            ) from error
        except ValueError as error:
            raise StartError(str(error), where, "see the section [journal]") from error
        except OSError as error:
            raise _explained(error, where, "") from error
        # Records whose times lie in the future: the clock was wrong, then or now.
        for name in facts:
            ahead_ms = self._journal.rings[name].last_append_time_ms - now_ms
            if ahead_ms > _AHEAD_MS:
                self._log.warning(
                    "log_ahead", ring=name, ms=ahead_ms, do="if the clock is right now, nothing"
                )
        return facts

    def _recover_ring(self, name: str, asked: dict[str, Any], *, held: bool = False) -> RingFacts:
        """Open one ring at a start, and log what was found in it. Raises JournalError.

        asked: the ring's own settings; those that it does not have are the configuration's. held:
        nothing of it is overwritten before the checkpoint's tables have it (ring main). Raises
        JournalCorrupt where ring main has lost the table of streams.
        """
        settings = ring_settings(self._config, asked, self._batch_bytes_max)
        ring, recovery = self._journal.ring(name, settings, held=held)
        # In bytes, as LSNs are.
        self.damaged[name] = sum(each.to_lsn - each.from_lsn for each in recovery.damages)
        self._report(name, recovery)
        if recovery.unreadable_state and name == MAIN:
            raise JournalCorrupt(
                f"ring {name}",
                "no snapshot of the table of streams can be read, and to go on without it could "
                "give a new stream an old one's records; restore the directory from a backup",
            )
        return ring_facts(name, ring, recovery)

    def _report(self, name: str, recovery: Recovery) -> None:
        """Log what the recovery of a ring found, and note what is damage for BROKER_INFO."""
        for damage in recovery.damages:
            self._log.error("journal_damaged", ring=name, **damage._asdict())
            self.note_damage(
                f"ring {name}, positions {damage.from_lsn} to {damage.to_lsn}: {damage.reason}"
            )
        for dropped in recovery.dropped:
            self._log.warning("unconfirmed_tail_dropped", ring=name, **dropped._asdict())
        for unknown in recovery.unknown:
            self._log.error("file_left_alone", ring=name, **unknown._asdict())
            self.note_damage(f"ring {name}, {unknown.file}: {unknown.reason}")
        for file, reason in recovery.restored:
            self._log.error("file_restored", ring=name, file=file, reason=reason)
            self.note_damage(f"ring {name}, {file}: {reason}")
        for number, (first, following) in recovery.skipped.items():
            self._log.error(
                "offsets_left_out", ring=name, stream=number, **{"from": first, "to": following}
            )
        for file in recovery.rewritten:
            self._log.warning("segment_rewritten", ring=name, file=file)
        if recovery.end_lsn:
            self._log.info("recovered", ring=name, end_lsn=recovery.end_lsn, clean=recovery.clean)

    def note_damage(self, text: str) -> None:
        """Keep a sentence about damage that this start found; BROKER_INFO shows it from then on."""
        if len(self.damage) < _DAMAGE_SHOWN:
            self.damage.append(text)


def _explained(error: OSError, where: str, elsewhere: str) -> StartError:
    """Return the StartError for an error of the system, with what the operator can do about it.

    where: the data directory. elsewhere: how to choose another, as the end of a sentence.
    """
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StartError(
            f"no permission ({error})", where,
            f"run the broker as the owner of the directory, {elsewhere}".rstrip(", "),
        )  # fmt: skip
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StartError(f"the disk is full ({error})", where, "free space there")
    return StartError(str(error), where, "look at the directory and its disk")
