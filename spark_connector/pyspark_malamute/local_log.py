"""The broker's log, read in place by a task that runs on the broker's machine.

Owns the choice between the files and the wire. The rules: what the files give is what the broker
would have sent; wherever that is not certain (another stream, a gap, a loss, a file that cannot be
read, a record that is not there yet) the range goes on over the wire from that offset, so that the
broker alone decides what is lost; a task is told of the change once a process and reason.
Source: FORMAT.md, section 8; option logDirectory.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

from malamute_protocol.errors import MalamuteError, Timeout
from malamute_py.client.position import Position
from malamute_py.client.session.subscription import GapError
from pyspark_malamute.columns import Columns, take_in
from pyspark_malamute.options import SourceOptions
from pyspark_malamute.planning import Range

if TYPE_CHECKING:
    from malamute_py.mapped import LogReader, StreamEntry

LOG = logging.getLogger("pyspark_malamute")
_TROUBLE: Final = (MalamuteError, OSError)
_logged: Final[set[tuple[str, str, str]]] = set()
"""(directory, stream, reason) of what was logged in this process."""


class LocalLog:
    """The log in `logDirectory`, for the time of one task; nothing where the option is not set."""

    def __init__(self, options: SourceOptions) -> None:
        """Open the log, if the option names one; where that fails, all is read over the wire."""
        self._options = options
        self._log: LogReader | None = None
        self._streams: dict[str, StreamEntry] = {}
        if options.log_directory:
            from malamute_py.mapped import open_reader

            try:
                self._log = open_reader(options.log_directory)
                self._streams = {each.name: each for each in self._log.streams()}
            except _TROUBLE as error:
                self._tell("", str(error))

    @property
    def is_open(self) -> bool:
        """Whether there is a log on this machine."""
        return self._log is not None

    def read(
        self, options: SourceOptions, part: Range, columns: Columns
    ) -> Generator[Any, None, int]:
        """Yield a range as record batches, as far as the files have it for certain.

        options: those for its stream. columns: collects the records, the last of which stay in it.
        Returns the offset from which on the broker is to be asked over the wire.
        """
        position = part.start
        # Before `first` the files may still have records that a bound of the stream has removed.
        if self._log is None or position < part.first:
            return position
        fault = self._fault(part)
        if fault:
            self._tell(part.name, fault)
            return position
        try:
            reading = self._log.read(
                part.name,
                options.pattern,
                start=Position(bytes.fromhex(part.stream), part.epoch, part.start),
                # The broker has planned up to records that are synced.
                visibility="live",
                end=part.end,
                client_time=options.client_time,
                # Nothing is taken from a batch that is only counted.
                copy=not options.counts_only,
                strict=True,  # a gap is raised, and not passed over with a notice
            )
        except _TROUBLE as error:
            self._tell(part.name, str(error))
            return position
        with reading:
            while position < part.end:
                try:
                    batch = reading.next_batch(0)  # What is not there yet, the broker sends.
                except (GapError, Timeout):
                    # What was lost, and whether it matters, the broker says.
                    return position
                except _TROUBLE as error:
                    self._tell(part.name, str(error))
                    return position
                if batch is None:  # The end of the range, whatever of it was selected.
                    return max(position, reading.position.next)
                yield from take_in(columns, batch)
                position = max(position, reading.position.next)
        return position

    def _fault(self, part: Range) -> str:
        """Return why the stream's records are not to be taken from these files; empty: they are."""
        found = self._streams.get(part.name)
        if found is None or found.uuid.hex() != part.stream:
            return "they are of another broker, or the stream was just created"
        if found.settings.keep:
            return "they do not say which of its records were replaced"
        return ""

    def _tell(self, stream: str, reason: str) -> None:
        """Log once for each stream and reason that the files cannot be used."""
        fact = (self._options.log_directory, stream, reason)
        if fact not in _logged:
            _logged.add(fact)
            LOG.warning(
                "malamute source: %s is read over the wire, for its files in logDirectory '%s' "
                "cannot be used here: %s",
                f"stream '{stream}'" if stream else self._options.reads,
                self._options.log_directory,
                reason,
            )

    def __enter__(self) -> LocalLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
