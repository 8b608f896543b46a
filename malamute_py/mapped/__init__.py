"""A running broker's log, read by another program of the same machine through mappings.

    from malamute_py.journal import open_reader

    with open_reader("malamute-data") as log:
        for batch in log.read("trades", "forex.*", until="tail"):
            print(batch.to_arrow().num_rows)

The broker is not asked and does not notice. Source: FORMAT.md, section 8.
"""

from malamute_py.journal.errors import NewerFormat
from malamute_py.mapped.batch import MappedBatch
from malamute_py.mapped.errors import NoJournal, Overwritten, StreamRemoved, UnknownStream
from malamute_py.mapped.reader import LogReader, open_reader
from malamute_py.mapped.reading import Reading
from malamute_py.mapped.streams import StreamEntry

__all__ = [
    "LogReader",
    "MappedBatch",
    "NewerFormat",
    "NoJournal",
    "Overwritten",
    "Reading",
    "StreamEntry",
    "StreamRemoved",
    "UnknownStream",
    "open_reader",
]
