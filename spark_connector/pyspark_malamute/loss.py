"""Loss of records that cannot be read any more: it fails the query, or is logged.

Owns the one decision that option failOnDataLoss makes. The rules: no loss is silent; it
fails the query, or it is logged with its offsets and its reason, and never anything else. Records
that a trim has removed are no loss: they are logged, and fail the query only where it asks for
that. A purge by subject leaves nothing to tell: its records are no part of the stream any more.
"""

from __future__ import annotations

import logging
from typing import Final

from malamute_protocol.errors import CODES
from pyspark_malamute.errors import DataLoss
from pyspark_malamute.options import SourceOptions

LOG = logging.getLogger("pyspark_malamute")

_GO_ON: Final = (
    "To go on without these records, set option failOnDataLoss to false; to prevent it, give the "
    "stream more ring_bytes or run the query more often."
)


def fail_or_log_lost(
    options: SourceOptions, begin: int, end: int, code: str, reason: str = ""
) -> None:
    """Fail or log, as the options say, since records [begin, end) of the stream are gone.

    code: why, one of CODES; reason: the broker's words for it. Raises DataLoss.
    """
    why = CODES.get(code, code) + (f" ({reason})" if reason else "")
    what = (
        f"stream '{options.stream}': offsets {begin} to {end - 1} cannot be read any more: "
        f"{code}, {why}"
    )
    _fail_or_log(options, what)


def fail_or_log_gone(
    options: SourceOptions, begin: int, end: int, trimmed_to: int, code: str
) -> None:
    """Fail or log: records [begin, end) are gone, those before `trimmed_to` by a trim.

    code: why the others are gone. Raises DataLoss.
    """
    if begin < min(end, trimmed_to):
        fail_or_log_trimmed(options, begin, min(end, trimmed_to))
    if max(begin, trimmed_to) < end:
        fail_or_log_lost(options, max(begin, trimmed_to), end, code)


def fail_or_log_trimmed(options: SourceOptions, begin: int, end: int) -> None:
    """Log that a trim removed records [begin, end), or fail where failOnDataLoss is `all`.

    Raises DataLoss.
    """
    what = f"stream '{options.stream}': offsets {begin} to {end - 1} were removed by a trim"
    if options.fail_on_trim:
        raise DataLoss(
            f"malamute source: {what}. To go on without these records, set option failOnDataLoss "
            "to true"
        )
    LOG.warning("malamute source: %s; going on, as that is no loss", what)


def fail_or_log_rewound(options: SourceOptions, position: int, tail: int) -> None:
    """Raise DataLoss, or log: the stream ends at `tail`, before a position that was read up to."""
    what = (
        f"stream '{options.stream}' now ends at offset {tail}, before {position}, where this query "
        "was: the broker has lost what lay between, and gives those offsets to new records"
    )
    _fail_or_log(options, what)


def fail_or_log_removed(options: SourceOptions) -> None:
    """Raise DataLoss, or log: the query finds a stream that it read there no more."""
    what = f"stream '{options.stream}' was removed, with what this query had not read of it"
    _fail_or_log(options, what)


def _fail_or_log(options: SourceOptions, what: str) -> None:
    """Raise DataLoss, or log where failOnDataLoss is false."""
    if options.fail_on_data_loss:
        raise DataLoss(f"malamute source: {what}. {_GO_ON}")
    LOG.warning("malamute source: %s; going on, since failOnDataLoss is false", what)
