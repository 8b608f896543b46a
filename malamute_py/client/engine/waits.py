"""Words by which a Timeout names what a call waited for.

Owns the sentences that say what did not happen in time, and what may still become of what was
sent. The rule: a sentence promises nothing that the broker has not confirmed. Each takes what the
call was about and the time in milliseconds. Source: SPEC.md, section 8.
"""

from __future__ import annotations

from typing import Final

from malamute_protocol.errors import Timeout

ANSWER: Final = "no answer{} within {} ms; what was asked for may be done yet"
PUBLISHED: Final = (
    "a record for stream {!r} was not confirmed within {} ms; whether it is in the log is unknown: "
    "this client goes on sending it, under the same sequence, so that it is there once"
)
ASKED: Final = "{} was not answered within {} ms; it is not asked again, but may have been done"
ROOM: Final = "no room for {} within {} ms, as too much is unconfirmed; nothing of it was taken"
STEP: Final = "a step{} was not confirmed within {} ms; it was taken as a whole, or not at all"
STAGED: Final = (
    "what a transaction{} had staged was not confirmed within {} ms; it is open, and nothing of it "
    "is committed: call commit() again, which is safe, or roll_back()"
)
COMMIT: Final = (
    "the commit of a transaction{} was not confirmed within {} ms; it was taken as a whole, or not "
    "at all: call commit() again, which asks for the same commit and is safe"
)
APPENDED: Final = (
    "the transaction{} is committed, and its records were not known to be in all their streams "
    "within {} ms: call commit() again, which waits for the rest; do not publish them again"
)
NOT_STAGED: Final = (
    "records of a transaction{} that were too large for a ring were not staged in smaller batches "
    "within {} ms; nothing of it is committed, and it is rolled back: begin another"
)
WINDOW: Final = (
    "no batch for stream {!r} was confirmed for {} ms; what is unconfirmed may be in the log: this "
    "client goes on sending it, under the same sequence, so that it is there once"
)
ACKED: Final = "{} was not confirmed within {} ms; it may be confirmed yet"
NOTHING: Final = "no {} came within {} ms; nothing is lost"
PASSED_OVER: Final = (
    "no {} came within {} ms: the member is passed over, since the lease of records that it holds "
    "has ended; acknowledge some, or give them back"
)
OPENED: Final = "{} was not accepted within {} ms; it is asked for again on each new link"


def timed_out(what: str, name: str, waited_ms: int | None, standing: str) -> Timeout:
    """Return the error of a wait that was over.

    what: one of the sentences above. name: of what was waited for, where the sentence names it.
    standing: what is known of the link, in words.
    """
    return Timeout(f"{what.format(name, waited_ms)}; {standing}")
