"""Readings of a caller's arguments, for both shells.

Owns the reading of arguments into rows, batches and subscription requests, and of
commands into confirmations. The rule: nothing here waits, and whatever a caller got
wrong is raised before anything was queued.

Words: a blob is the bytes of one body, or of one of a body's list. A row is one record, message or
request that leaves; its packing is its codec, and whether its body is a list. A content is the
encoded form of a batch. `bounds` of bodies: where each begins in their bytes, and where the last
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias, TypedDict

import numpy as np

from malamute_protocol.batch import encode_bulk, encode_columns, encode_lists
from malamute_protocol.commands import PlanRead
from malamute_protocol.content_layout import HEAD
from malamute_protocol.errors import BatchTooLarge, LocalProtocolError, MalamuteError
from malamute_protocol.limits import DEFAULT_LIMITS, REQUEST_PRIORITY_MAX, Limits
from malamute_protocol.pattern import Pattern, PatternError, from_text, validate
from malamute_py.client.arguments import (
    codec_of,
    column_of,
    column_time,
    duration,
    fields_of,
    integer,
    later_of,
    no_near_column,
    one_of,
    pattern_of,
    properties_of,
    several,
    subject_of,
    text,
    truth,
    wrong,
)
from malamute_py.client.position import StartPoint, start_on_wire
from malamute_py.client.session.requests import Terms
from malamute_py.client.session.rows import PACKINGS, More, OutgoingRow, Packing
from malamute_py.client.session.subscription import VISIBILITIES, SubscribeOptions
from malamute_py.client.session.tables import subject_options
from malamute_py.client.words import ReadVisibility, Until

Blob: TypeAlias = bytes | bytearray | memoryview | str
"""Bytes; a str is sent as UTF-8."""
Body: TypeAlias = Blob | Sequence[Blob]
"""One record's body: a blob, or a list or tuple of blobs, which its readers get as `parts`."""
Bodies: TypeAlias = Sequence[bytes] | Sequence[Sequence[bytes]]
"""Bodies of many records: a blob each, or a list of blobs each."""
Fields: TypeAlias = Mapping[str, str]
Properties: TypeAlias = Mapping[str, Any]
Time: TypeAlias = int | datetime
"""Milliseconds since 1970, or a datetime."""

_SUBJECT_MAX: Final = DEFAULT_LIMITS.subject_bytes_max
_VISIBILITIES: Final = ("live", "durable", "committed")
"""Visibilities that a reader may ask for; `committed` is reserved."""


def make_row(
    body: Body,
    subject: str | Sequence[str],
    fields: Fields | None,
    client_time_ms: Time | None,
    expires_at_ms: Time | None,
    properties: Properties | None,
    token: Any,
    codec: str | None = None,
) -> OutgoingRow:
    """One record, message, request or reply of a caller, as it is gathered into batches.

    token: object at which the caller waits. Raises LocalProtocolError: an argument is wrong.
    """
    if codec is None and type(body) is bytes:  # almost always: checked without a call
        size, packing = len(body), None
    else:
        body, size, packing = _packed(body, codec)
    # Almost all subjects are short ASCII strings: those need no look at their bytes.
    if type(subject) is not str or (
        subject and (len(subject) > _SUBJECT_MAX or not subject.isascii())
    ):
        subject = subject_of(subject)
    # Most records have nothing else: those need no second object.
    if (
        fields is None
        and client_time_ms is None
        and expires_at_ms is None
        and properties is None
        and packing is None
    ):
        return OutgoingRow(body, size, subject, token)
    more = More(
        None if fields is None else fields_of(fields),
        None if client_time_ms is None else column_time("client_time_ms", client_time_ms),
        None if expires_at_ms is None else later_of("expires_at_ms", expires_at_ms, "bad_batch"),
        None if properties is None else properties_of(properties),
    )
    return OutgoingRow(body, size, subject, token, more, packing)


def _packed(body: Any, codec: str | None) -> tuple[bytes | list[bytes], int, Packing | None]:
    """Return (body to encode, count of its bytes, packing) of a body that needs a look.

    Only plain bytes without a codec need none. Raises LocalProtocolError.
    """
    number = codec_of(codec)
    if isinstance(body, list | tuple):
        blobs = list(map(_blob, body))
        return blobs, sum(map(len, blobs)), PACKINGS[True, number]  # (is it a list, codec)
    blob = _blob(body)
    return blob, len(blob), PACKINGS[False, number]


def _blob(body: Any) -> bytes:
    """Return one blob as bytes: text as UTF-8. Raises LocalProtocolError: it is neither."""
    if isinstance(body, str):
        try:
            return body.encode()
        except UnicodeEncodeError:
            raise wrong("body", body, "text that UTF-8 can express", "bad_batch") from None
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise LocalProtocolError(
        "bad_batch",
        f"a body is bytes, str or a list of these, not {type(body).__name__}; encode it first",
    )


ZERO: Final = 0
"""Delay or priority of most requests. What else a caller passes is looked at: an array, for one,
cannot be asked whether it is 0."""


def request_terms(need_workers: bool, delay_ms: int, priority: int) -> Terms:
    """Return terms that few requests have and their callers gave. Raises LocalProtocolError."""
    return Terms(
        truth("need_workers", need_workers),
        duration("delay_ms", delay_ms),
        integer("priority", priority, 0, REQUEST_PRIORITY_MAX),
    )


class BulkOptions(TypedDict, total=False):
    """Further columns of many records; a sequence has one value a record."""

    fields: Fields | Sequence[Fields | None] | None
    client_time_ms: int | Sequence[int | None] | None
    expires_at_ms: int | Sequence[int] | None
    properties: Properties | Sequence[Properties | None] | None
    codec: str | None


_BULK_OPTIONS: Final = BulkOptions.__annotations__.keys()


class Bulk:
    """The arguments of a bulk publish, cut into batches one after the other."""

    def __init__(
        self,
        bodies: Bodies,
        *,
        batch_bytes: int,
        limits: Limits,
        subject: str | None,
        subjects: Sequence[str | Sequence[str]] | None,
        options: Mapping[str, Any],
    ) -> None:
        """batch_bytes: bytes of bodies that a batch is filled to. limits: the broker's.

        subject: one for all records. subjects: one a record, instead. options: BulkOptions.
        Raises LocalProtocolError: the columns differ in length, or an option is wrong.
        """
        bodies = several("bodies", bodies)
        self._bodies: Sequence[Any] = bodies
        self._lists = len(bodies) > 0 and isinstance(bodies[0], list | tuple)  # so are all, then
        self._batch_bytes = batch_bytes
        self._records_max = limits.batch_records_max
        self._start = 0
        """First of the records that `_bounds` is of."""
        self._bounds = np.zeros(1, np.int64)
        """Bounds of the bodies from `_start` on."""
        self._whole: dict[str, Any] = {"limits": limits}
        """Options with one value for all records."""
        self._columns: dict[str, Any] = {}
        """Options with a value for each record."""
        self._halved = False
        """Whether encode() found that the newest cut does not fit into one batch."""
        if subjects is not None:
            if subject is not None:
                raise LocalProtocolError("bad_batch", "give subject or subjects, not both")
            self._columns["subject"] = column_of("subjects", subjects, len(bodies))
        else:
            self._whole["subject"] = subject if subject is None else subject_of(subject)
        if not options.keys() <= _BULK_OPTIONS:
            unknown = options.keys() - _BULK_OPTIONS
            known = ", ".join(sorted(_BULK_OPTIONS))
            raise LocalProtocolError(
                "bad_setting", f"there is no option {min(unknown)!r}; known are {known}"
            )
        for name, value in options.items():
            if value is None:
                continue
            if name == "codec":
                self._whole[name] = codec_of(value)
                continue
            is_column = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
            if name == "expires_at_ms" and not is_column:
                value = later_of(name, value, "bad_batch")
            (self._columns if is_column else self._whole)[name] = value
        for name, values in self._columns.items():
            self._columns[name] = column_of(name, values, len(bodies))

    def cuts(self) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of the records of each batch, one after the other.

        The caller encodes each by encode() before it asks for the next: a cut that was too large is
        followed by its halves. Raises LocalProtocolError: a body is none.
        """
        bodies = self._bodies
        size_of: Callable[[Any], int] = _list_size if self._lists else len
        most = self._records_max
        for start in range(0, len(bodies), most):
            # By slice: an islice would walk through all that lies before it, each time.
            part = bodies[start : start + most] if len(bodies) > most else bodies
            count = len(part)
            bounds = np.zeros(count + 1, np.int64)
            try:
                # Running sums of the sizes are where the bodies end, and the next begin.
                np.cumsum(np.fromiter(map(size_of, part), np.int64, count), out=bounds[1:])
            except TypeError as error:
                wanted = "lists of bytes, all of them" if self._lists else "bytes"
                raise LocalProtocolError("bad_batch", f"bodies are {wanted}: {error}") from error
            self._start, self._bounds = start, bounds
            for cut in _cuts(bounds, self._batch_bytes):
                waiting = [cut]
                while waiting:
                    first, end = waiting.pop()
                    yield start + first, start + end
                    if self._halved:  # set by encode(), which was called meanwhile
                        self._halved = False
                        middle = (first + end) // 2
                        waiting += [(middle, end), (first, middle)]  # the lower one is next

    def encode(
        self, first: int, end: int, producer: tuple[int, int, int]
    ) -> bytes | bytearray | None:
        """Content of the newest cut, records [first, end); None: too large: cuts() halves it next.

        producer: its id and epoch, and the sequence of the first record; zeros: none.
        Bodies alone decide about the cuts: what else records have may be more than a batch holds.
        Raises LocalProtocolError: it cannot be encoded.
        """
        whole = first == 0 and end == len(self._bodies)
        bodies = self._bodies if whole else self._bodies[first:end]
        columns = self._columns
        if columns and not whole:
            columns = {name: column[first:end] for name, column in columns.items()}
        options = {**self._whole, **columns}
        options["producer_id"], options["producer_epoch"], options["first_sequence"] = producer
        try:
            if self._lists:
                return encode_lists(bodies, **options)
            bounds = self._bounds[first - self._start : end - self._start + 1]
            return encode_bulk(bodies, bounds, **options)
        except BatchTooLarge:
            if end - first == 1:
                raise
            self._halved = True
            return None
        except MalamuteError:
            raise
        except Exception as error:  # whatever a value of another type raises, it is this call's
            reason = f"records {first} to {end} cannot be encoded: {error}"
            raise LocalProtocolError("bad_batch", reason) from error


def _cuts(bounds: np.ndarray[Any, Any], batch_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of bodies that fill a batch to so many bytes; one at least.

    bounds: where each body begins, and where the last one ends.
    """
    first = 0
    while first < len(bounds) - 1:
        full = int(bounds[first]) + batch_bytes
        # The last bound that is not beyond `full`.
        end = max(int(bounds.searchsorted(full, "right")) - 1, first + 1)
        yield first, end
        first = end


def _list_size(body: Any) -> int:
    """Return the bytes of a body that is a list of blobs."""
    return sum(map(len, body))


def arrow_contents(
    table: Any,
    body: str,
    subject: str,
    properties: Properties | None,
    batch_bytes: int,
    limits: Limits,
) -> Iterator[bytes]:
    """Yield the contents in which an Arrow table or record batch leaves, a row a record.

    body: name of the column with the bodies. subject: name of a column, or one subject for all.
    properties: of each row. batch_bytes, limits: as of Bulk. Raises LocalProtocolError: a column is
    missing or of a wrong type.
    """
    import pyarrow as pa

    whole = pa.table(table) if isinstance(table, pa.RecordBatch) else table
    if not isinstance(whole, pa.Table):
        allowed = f"a pyarrow table or record batch, not a {type(table).__name__}"
        raise wrong("table", table, allowed, "bad_batch")
    for name, given in (("body", body), ("subject", subject)):
        text(name, given, DEFAULT_LIMITS.command_frame_bytes_max, "bad_batch")
    kept = None if properties is None else properties_of(properties)
    if body not in whole.column_names:
        raise LocalProtocolError("bad_batch", f"the table has no column {body!r}")
    for name in (body, subject):
        if whole.column_names.count(name) > 1:
            raise LocalProtocolError(
                "bad_batch", f"several columns of the table are named {name!r}"
            )
    no_near_column(subject, whole.column_names)
    used = whole.select([name for name in whole.column_names if name in (body, subject)])
    for column, subjects in _pieces(used, body, subject, batch_bytes, limits.batch_records_max):
        # Buffers of a column of bytes: which values are null, their bounds, the bytes of all.
        bounds, [_, _, blob] = _bounds(column), column.buffers()
        waiting = list(_cuts(bounds, batch_bytes))[::-1]  # the first one last, for pop()
        while waiting:
            first, end = waiting.pop()
            options: dict[str, Any] = {"subject": subject}
            if subjects is not None:
                options = subject_options(subjects.slice(first, end - first), subject)
            options["properties"], options["limits"] = kept, limits
            try:
                content = encode_columns(bounds[first : end + 1], blob or b"", **options)
            except BatchTooLarge:
                # What rows have beside their bodies is more than the cut has reckoned with.
                if end - first == 1:
                    raise
                middle = (first + end) // 2
                waiting += [(middle, end), (first, middle)]
            else:
                yield content


def _pieces(
    table: Any, body: str, subject: str, batch_bytes: int, rows_max: int
) -> Iterator[tuple[Any, Any]]:
    """Yield (bodies, subjects or None) of rows that follow each other, as Arrow arrays.

    Each is a chunk of the table, or several small ones that fill one batch together: only these are
    copied. Raises LocalProtocolError: a column is of a wrong type, or has nulls.
    """
    pieces: list[tuple[Any, Any]] = []
    size = rows = 0
    for chunk in table.to_batches(max_chunksize=rows_max):
        if not chunk.num_rows:
            continue
        bodies = _body_column(chunk.column(body), body)
        subjects = chunk.column(subject) if subject in chunk.schema.names else None
        if subjects is not None:
            _check_subjects(subjects.type, subject)
        bounds = _bounds(bodies)
        chunk_bytes = int(bounds[-1]) - int(bounds[0])
        if pieces and (size + chunk_bytes > batch_bytes or rows + len(bodies) > rows_max):
            yield _together(pieces)
            pieces, size, rows = [], 0, 0
        pieces.append((bodies, subjects))
        size += chunk_bytes
        rows += len(bodies)
    if pieces:
        yield _together(pieces)


def _together(pieces: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return neighbouring (bodies, subjects or None) joined to one; a single one as it is."""
    if len(pieces) == 1:
        return pieces[0]
    import pyarrow as pa

    from malamute_protocol.arrow import without_views

    subjects = [column for _, column in pieces if column is not None]
    if subjects and pa.types.is_dictionary(subjects[0].type):
        # A dictionary column is codes and a table of values. Each may have a table of its own, and
        # all values together more than the codes can count: so they become plain ones.
        subjects = [without_views(column).dictionary_decode() for column in subjects]
    joined = pa.concat_arrays(subjects) if subjects else None
    return pa.concat_arrays([bodies for bodies, _ in pieces]), joined


def _body_column(column: Any, name: str) -> Any:
    """Return a column of bodies as one that has bounds and bytes, so that _bounds() can read it.

    name: of the column, for errors. Raises LocalProtocolError: it has nulls, or no bytes or text.
    """
    import pyarrow as pa

    if column.null_count:
        raise LocalProtocolError("bad_batch", f"column {name!r} has nulls")
    if column.type in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string()):
        return column
    try:
        return column.cast(pa.large_binary())
    except pa.ArrowException as error:
        raise LocalProtocolError(
            "bad_batch", f"column {name!r} has no bodies, but {column.type}: {error}"
        ) from error


def _bounds(column: Any) -> np.ndarray[Any, Any]:
    """Return where each body of a column begins in the column's bytes, and where the last ends.

    They are read from Arrow's own buffer, not copied.
    """
    import pyarrow as pa

    _, bounds, _ = column.buffers()  # which values are null, bounds, the bytes of all
    assert bounds is not None, "a binary column without bounds"
    width = 4 if column.type in (pa.binary(), pa.string()) else 8  # the large types have 8 bytes
    # A slice of a column begins at `offset` in the buffers of the whole.
    return np.frombuffer(memoryview(bounds), f"<i{width}", len(column) + 1, width * column.offset)


def _check_subjects(kind: Any, name: str) -> None:
    """Raise LocalProtocolError for a column of subjects of a type that is no text.

    kind: its type, of which pyarrow writes `string`, `large_string` or `string_view`.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if str(kind).removeprefix("large_").removesuffix("_view") not in ("string", "binary"):
        raise LocalProtocolError("bad_batch", f"column {name!r} has no subjects, but {kind}")


def content_count(content: Any) -> int:
    """Records in a content that a caller has encoded, by its head.

    Raises LocalProtocolError: it is not one.
    """
    count: int
    try:
        _magic, _version, _head_bytes, _crc, content_bytes, count, *_ = HEAD.unpack_from(content)
    except Exception as error:
        raise LocalProtocolError("bad_batch", "not an encoded batch content") from error
    if content_bytes != len(content):
        raise LocalProtocolError(
            "bad_batch", f"{len(content)} bytes where the content's head says {content_bytes}"
        )
    if not count:
        raise LocalProtocolError("bad_batch", "a batch content without records")
    return count


def subscribe_options(
    stream: str,
    pattern: str | Pattern,
    *,
    start: StartPoint,
    visibility: ReadVisibility,
    end: int | None,
    until: Until,
    client_time: tuple[Time, Time] | None,
    create: bool,
    whole: bool,
    credit_records: int,
    credit_bytes: int,
) -> SubscribeOptions:
    """A subscription as a caller asks for it, checked and in the form of the wire.

    Raises PatternError or LocalProtocolError for what the broker would refuse anyway.
    """
    one_of("visibility", visibility, _VISIBILITIES)
    one_of("until", until, ("", "tail"))
    return SubscribeOptions(
        stream=stream,
        pattern=make_pattern(pattern),
        start=start_on_wire(start),
        visibility=VISIBILITIES[visibility],
        end=_end(end),
        until=until,
        client_time=_times(client_time),
        create=truth("create", create),
        whole=truth("whole", whole),
        credit_records=integer("credit_records", credit_records, 1),
        credit_bytes=integer("credit_bytes", credit_bytes, 1),
    )


def _end(end: int | None) -> int:
    """The end of a read as commands have it; -1: none. Raises LocalProtocolError."""
    return -1 if end is None else integer("end", end, 0)


def _times(client_time: Any) -> tuple[int, int] | None:
    """The two times of a range of client times, or None. Raises LocalProtocolError."""
    if client_time is None:
        return None
    if isinstance(client_time, str | memoryview) or not isinstance(client_time, Sequence):
        raise wrong("client_time", client_time, "a pair of times, or None")
    if len(client_time) != 2:
        raise wrong("client_time", client_time, "a pair of times, or None")
    first, end = client_time
    return column_time("client_time", first), column_time("client_time", end)


def make_plan(
    stream: str,
    pattern: str | Pattern,
    *,
    start: StartPoint,
    end: int | None,
    records_max: int,
    bytes_max: int,
    split_bytes: int,
    visibility: ReadVisibility,
    client_time: tuple[Time, Time] | None,
) -> Callable[[int], PlanRead]:
    """Return a function that makes PLAN_READ, which divides a range of a stream for many readers.

    The function is given the number of the request.
    Its arguments are checked now: the number is known only when the command is queued.
    Raises PatternError, or LocalProtocolError: an argument is wrong.
    """
    one_of("visibility", visibility, _VISIBILITIES)
    selected, first, times = make_pattern(pattern), start_on_wire(start), _times(client_time)
    last = _end(end)
    return lambda number: PlanRead(
        number,
        stream,
        selected,
        first,
        records_max,
        bytes_max,
        split_bytes,
        last,
        VISIBILITIES[visibility],
        times,
    )


def make_pattern(pattern: str | Pattern) -> Pattern:
    """Wire form of a pattern; "#" and "" select everything.

    Raises PatternError or LocalProtocolError.
    """
    if isinstance(pattern, str):
        return ["all"] if pattern in ("", "#") else from_text(pattern)
    return validate(pattern_of(pattern))


def purge_pattern(pattern: str | Pattern) -> Pattern:
    """Wire form of a pattern whose records are removed: a name left empty must not remove all.

    Raises PatternError, also for "", or LocalProtocolError.
    """
    if isinstance(pattern, str) and not pattern:
        raise PatternError("bad_pattern", "a purge of every subject is asked for as '#'")
    return make_pattern(pattern)
