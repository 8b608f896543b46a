"""The end of a task's rows: whether Spark ended them, or what makes them failed.

Owns one look into PySpark's worker. When the input of a task fails, the worker sees its rows end
as if there were no more; what follows on the worker's socket tells the two apart. The rule: where a
PySpark keeps its socket elsewhere, the end is believed, and the cuts of sink_rows.py follow what
was published too early. Source: SpecialLengths and load_stream of PySpark 4.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

_END_OF_STREAM: Final = struct.pack("!i", -4)
"""Number that Spark sends once it has sent all rows."""


def end_check(rows: Iterator[Any]) -> Callable[[], bool]:
    """Return a function that says, once `rows` has ended, whether Spark sent all of them.

    rows: as PySpark hands them to a writer, before the first is taken. The function says True
    where PySpark keeps its socket elsewhere than expected.
    """
    try:
        # The rows are a map over the generator that reads Arrow batches from the socket. A map
        # reduces to (map, (function, iterator)), and the generator has the socket in a local.
        reduced: Any = rows.__reduce__()
        _, (_, generator, *_), *_ = reduced
        peek = generator.gi_frame.f_locals["stream"].peek
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return lambda: True

    def ended() -> bool:
        """Whether Spark's end of the rows comes next in the input."""
        try:
            found: bytes = peek(len(_END_OF_STREAM))
        except OSError:  # The socket failed before the end came.
            return False
        return found.startswith(_END_OF_STREAM)

    return ended
