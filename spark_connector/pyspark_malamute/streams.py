"""The streams of a query: which there are, and questions about many of them at once.

Owns the names that the options select. The rules: one question tells which streams there are and
how far each reaches; questions about several streams are under way together.
Source: SPEC.md, LIST_STREAMS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Final, TypeVar

from malamute_py.client.facts import StreamFacts
from pyspark_malamute.errors import OptionError, SourceUnavailable
from pyspark_malamute.links import Broker
from pyspark_malamute.options import Places, SourceOptions

_AT_ONCE: Final = 8
"""Questions that are under way together; the broker answers them one by one."""
_LITERAL: Final = re.compile(r"[A-Za-z0-9_:@=/-]*")
"""The beginning of an expression that stands for itself."""

Answer = TypeVar("Answer")


def find_streams(broker: Broker, options: SourceOptions) -> dict[str, StreamFacts]:
    """The streams that the options select, and how far each reaches, as the broker lists them.

    Raises SourceUnavailable: a stream that is named is not there.
    """
    prefix = _prefix(options)
    listed = broker.ask("list the streams", lambda client: client.list_streams(prefix))
    found = {facts.name: facts for facts in listed}
    if options.streams_pattern:
        expression = re.compile(options.streams_pattern)
        return {name: facts for name, facts in found.items() if expression.fullmatch(name)}
    missing = next((name for name in options.streams if name not in found), None)
    if missing is not None:
        option = "stream" if options.stream else "streams"
        raise SourceUnavailable(
            f"malamute source: there is no stream '{missing}' at {', '.join(options.endpoints)} "
            f"that this identity may read. Correct option '{option}', or create it: malamute "
            f"stream create {missing}"
        )
    return {name: found[name] for name in options.streams}


def begin_with(broker: Broker, options: SourceOptions) -> dict[str, StreamFacts]:
    """The streams of a query that begins, as find_streams() has them.

    Raises OptionError: an option names a place in a stream that is not there. Raises as
    find_streams() does.
    """
    found = find_streams(broker, options)
    for places, begins in ((options.starting, "starting"), (options.ending, "ending")):
        _check_there(places, begins, found)
    return found


def gone(names: Iterable[str], found: Mapping[str, object], options: SourceOptions) -> set[str]:
    """Return names of streams that the query read, still selects, and finds there no more.

    names: of the streams in the checkpoint. found: streams that there are, by name.
    """
    if not options.streams_pattern:
        return set()  # Streams are named, and find_streams() has found each of them.
    expression = re.compile(options.streams_pattern)
    return {name for name in names if name not in found and expression.fullmatch(name)}


def together(ask: Callable[[str], Answer], names: Iterable[str]) -> dict[str, Answer]:
    """The answer for each of several streams, asked for at the same time in threads.

    ask: puts the question to the broker, given a stream's name.
    """
    wanted = list(names)
    if len(wanted) < 2:
        return {name: ask(name) for name in wanted}
    pool = ThreadPoolExecutor(min(_AT_ONCE, len(wanted)), "malamute-plan")
    try:
        return dict(zip(wanted, pool.map(ask, wanted), strict=True))
    finally:
        # Without waiting: where one fails, the others may wait for an absent broker.
        pool.shutdown(wait=False, cancel_futures=True)


def _check_there(places: Places, begins: str, found: Mapping[str, object]) -> None:
    """Raise OptionError where an option names a place in a stream that was not found.

    places: where reading begins or ends. begins: `starting` or `ending`, with which the names of
    the two options that can say so begin.
    """
    for name, place in places.by_stream.items():
        if name not in found:
            option = f"{begins}Timestamp" if place.kind == "time" else f"{begins}Offsets"
            raise OptionError(
                option,
                f"names stream '{name}', which is not there, or which this identity may not read. "
                "Correct the name, or leave it out",
            )


def _prefix(options: SourceOptions) -> str:
    """Return the text with which the names of all selected streams begin.

    The broker is asked for streams with this prefix only; "" asks for all, and is never wrong.
    """
    if not options.streams_pattern:
        # What the first and the last name in order begin with, all between them begin with.
        least, greatest = min(options.streams), max(options.streams)
        pairs = zip(least, greatest, strict=False)
        return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    expression = options.streams_pattern
    if "|" in expression:  # Alternatives may have nothing in common.
        return ""
    found = _LITERAL.match(expression)
    literal = found[0] if found else ""
    follows = expression[len(literal) : len(literal) + 1]
    # A quantifier belongs to the last character before it.
    return literal[:-1] if follows in ("*", "?", "{") else literal
