"""Validating: typed batches are checked in full in a thread.

Owns the thread and its one way to pyarrow, which is an extra of the package. The rule: pyarrow
checks without the interpreter lock, so that the loop goes on beside it; an error that no code
foresaw costs the link whose batch it was. Source: SPEC.md, section 5.9.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError
from malamute_protocol.limits import Limits
from malamute_py.broker.ready import BatchCheck, BatchChecked
from malamute_py.server.journaling.journal_threads import Worker
from malamute_py.server.result_queue import ResultQueue

_SCHEMAS_MAX = 64
"""Schemas that are kept as pyarrow reads them."""


def can_validate() -> bool:
    """Whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


class Validator:
    """The thread that validates batches; it starts with the first one."""

    def __init__(self, results: ResultQueue, limits: Limits) -> None:
        """limits: bound what a batch may decompress to."""
        self._limits = limits
        self._results = results
        self._worker: Worker[BatchCheck] = Worker("validation", self._check, results)
        self._started = False

    def put(self, check: BatchCheck) -> None:
        """Have a batch validated by the thread, which the first one starts; from the loop."""
        if not self._started:
            try:
                self._worker.start()
            except RuntimeError as error:  # The system has no room for a thread.
                self._results.put(BatchChecked(check.token, "wait", str(error)))
                return
            self._started = True
        self._worker.put(check)

    def stop(self) -> None:
        """Finish the batches that were given, then end."""
        self._worker.stop()

    def _check(self, check: BatchCheck) -> BatchChecked:
        return validate(check, self._limits)


def validate(check: BatchCheck, limits: Limits) -> BatchChecked:
    """Check each value of a typed batch against its schema; called in the validating thread."""
    # Imported here: pyarrow is an extra, which a broker without typed streams does not need.
    from malamute_protocol.arrow import aligned, check_typed

    try:
        content = aligned(Content(check.content))  # as pyarrow wants its buffers in memory
        content.bodies(limits)  # raises BatchError where the lengths do not fit
        check_typed(content, _schema_of(check.schema))
    except BatchError as error:
        return BatchChecked(check.token, error.code, error.reason)
    except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
        return BatchChecked(check.token, "internal", type(error).__name__, error)
    return BatchChecked(check.token)


@lru_cache(_SCHEMAS_MAX)
def _schema_of(message: bytes) -> Any:
    """Return the schema in a message of Arrow's; kept, as batch after batch has the same one."""
    from malamute_protocol.arrow import parse_schema

    return parse_schema(message)
