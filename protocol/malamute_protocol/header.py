"""Header tables: the distinct subjects and field maps of a batch.

Owns their MessagePack form and the memo of tables seen before. The rules: a table is parsed and
validated once for equal bytes; all objects handed out are immutable and shared; a table that is too
large for the memo can be read in steps. Source: SPEC.md, section 5.3.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import google_crc32c
import msgspec

from malamute_protocol.errors import BatchError
from malamute_protocol.limits import DEFAULT_LIMITS, Limits


def _plain(value: Any) -> Any:
    """Return a value as a type that MessagePack has; for ENCODER. Raises TypeError.

    numpy's scalars, and other kinds of str, bytes and float, are what they are kinds of.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    return float(value) if isinstance(value, float) else operator.index(value)


ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
"""Encoder of all that is sent; it asks _plain() only about types that MessagePack lacks."""
SHORT_ARRAY = 0x90
"""The upper four bits of the first byte of a MessagePack array of less than 16 entries."""
OVER_LENGTH = "of length <="
"""Text of msgspec's error for an array, a map or a text that is longer than allowed."""
_Bytes: TypeAlias = bytes | memoryview
"""A table's bytes, mostly a view of its batch: a copy of 16 MiB took the loop up to 5 ms."""
_MEMO_BYTES = 16 << 20
TABLE_BYTES_MAX: Final = 64 << 10
"""Size above which a table is not remembered: it is not likely to come again."""
STEP_ENTRIES: Final = 1_024
"""Keys or fields that one step of a TableReading parses; about a millisecond."""
STEP_BYTES: Final = 1 << 16
"""Bytes of entries from which a step parses no more: a subject may have hundreds of them."""
LEAD_PARTS_MAX: Final = 8
"""Leading parts of a subject that an index keeps at most."""
LEADS_MAX: Final = 8_192
"""Distinct leading parts at one depth, or field names, that an index is told of a large table."""
_HEADERS_MAX = 1 << 17
"""Headers that one table keeps made."""
_MEMO_ENTRY_BYTES: Final = 200
"""Bytes that an entry of the memo counts beside its key."""
_SUBJECTS_COUNT_AT: Final = 84
_FIELDMAPS_COUNT_AT: Final = 92
"""Positions of both counts in a content's head, for errors."""
_LARGEST_SIZES: Final = (
    "subject_bytes", "keys_most", "fields_most", "field_name_bytes", "field_value_bytes",
)  # fmt: skip
"""Limits of a header table besides the number of its entries."""


class Header(NamedTuple):
    """Keys and fields of a record, which patterns are matched with. Hashable; equal by value."""

    keys: tuple[str, ...]
    """The subject, then further keys."""
    fields: tuple[tuple[str, str], ...] = ()
    """(name, value) in the order of the names; a value of "" marks mere presence."""

    @property
    def subject(self) -> str:
        """The first key."""
        return self.keys[0]


class Outline:
    """Facts that an index notes of a large header table, gathered as it is read in steps."""

    __slots__ = ("_counts", "_parts", "items", "leads", "names")

    def __init__(self) -> None:
        self.items: array[int] = array("I")
        """Hashes as of items_of(): of all keys, and of all pairs of the field maps."""
        self.leads: list[set[tuple[str, ...]]] = [set()] * LEAD_PARTS_MAX
        """Sets of the subjects cut after one part between dots, after two parts, and so on: an
        index tells by them which topics a batch may have. Depths at which the sets have more than
        LEADS_MAX keys are left out. Depths at which every key is whole share one set."""
        self._parts = 1
        """Parts of the key that has most, as far as they are told apart."""
        self._counts = [0] * LEAD_PARTS_MAX
        """How many keys each set of `leads` has."""
        self.names: set[str] | None = set()
        """Names of the fields; None: there are more than LEADS_MAX."""

    def add_subjects(self, keys: list[tuple[str, ...]]) -> Iterator[None]:
        """Note subjects, in steps: all keys for `items`, and their first parts for `leads`.

        keys: of the next subjects of the table. A depth whose set gets too large is dropped with
        all deeper ones.
        """
        texts = list(chain.from_iterable(keys))
        self.items += items_of(texts)
        leads, counts = self.leads, self._counts
        parts = min(LEAD_PARTS_MAX, 1 + max(text.count(".") for text in texts))
        for depth in range(self._parts + 1, min(parts, len(leads)) + 1):
            # No key had so many parts before, so that this depth and all deeper ones shared the
            # set of the depth above. They get a copy, which they share in turn.
            leads[depth - 1 :] = [set(leads[depth - 2])] * (len(leads) - depth + 1)
            counts[depth - 1] = counts[depth - 2]
        self._parts = max(self._parts, parts)
        tops: Collection[tuple[str, ...]] = keys
        # The deepest first: a key that is known there is known at every depth above, so that only
        # new ones are cut further, and none new ends it.
        for depth in range(min(self._parts, len(leads)), 0, -1):
            known = leads[depth - 1]
            new = {leading_parts(top, depth) for top in tops} - known
            known |= new
            counts[depth - 1] += sum(map(len, new))
            yield
            if counts[depth - 1] > LEADS_MAX:
                dropped = leads[depth - 1 :]
                del leads[depth - 1 :], known  # `known` is one of them.
                while dropped:
                    # To free eight such sets at once takes 15 ms.
                    some = dropped.pop()
                    for _ in range(min(STEP_ENTRIES, len(some))):
                        some.pop()
                    if some:
                        dropped.append(some)
                    yield
            elif new:
                tops = new
            else:
                return

    def add_fieldmaps(self, fieldmaps: list[dict[str, str]]) -> None:
        """Note field maps: all pairs for `items`, and names, as long as an index has room."""
        self.items += items_of(pair_text(*pair) for entry in fieldmaps for pair in entry.items())
        if self.names is not None:
            self.names.update(*fieldmaps)
            if len(self.names) > LEADS_MAX:
                self.names = None


class HeaderTable:
    """The parsed table of one or many batches: equal bytes share one object."""

    __slots__ = (
        "_headers",
        "_plain",
        "_sorted",
        "arrow",
        "entries",
        "field_name_bytes",
        "field_value_bytes",
        "fieldmaps",
        "fields_most",
        "keys",
        "keys_most",
        "outline",
        "passed",
        "subject_bytes",
    )

    def __init__(self, keys: list[tuple[str, ...]], fieldmaps: list[dict[str, str]]) -> None:
        """keys: one entry for each subject. fieldmaps: one for each field map. Never changed."""
        self.keys = keys
        self.fieldmaps = fieldmaps
        self._headers: dict[int, Header] = {}
        self._sorted: dict[int, tuple[tuple[str, str], ...]] = {}
        """Sorted fields by the code of a field map: all headers with the map share them."""
        self.passed: Limits | None = None
        """The limits that the table was last checked against, and kept."""
        self.arrow: Any = None
        """Arrow columns of the table, kept here by arrow.py once they are made."""
        self._plain: tuple[Header, ...] | None = None
        self.outline: Outline | None = None
        """The index's facts of the table, where it was read in steps."""
        texts, names = list(chain.from_iterable(keys)), list(chain.from_iterable(fieldmaps))
        self.entries = len(texts) + len(names)
        """Keys of all subjects and fields of all field maps."""
        # Sizes of the largest of each sort, which check() compares with limits.
        self.subject_bytes = _longest(texts)
        self.keys_most = max(map(len, keys), default=0)
        self.fields_most = max(map(len, fieldmaps), default=0)
        self.field_name_bytes = _longest(names)
        self.field_value_bytes = _longest(
            list(chain.from_iterable(entry.values() for entry in fieldmaps))
        )

    def extend(self, keys: list[tuple[str, ...]], fieldmaps: list[dict[str, str]]) -> None:
        """Add the entries of one step to a table that TableReading has not handed out yet."""
        more = HeaderTable(keys, fieldmaps)  # It has the sizes of the new entries.
        self.keys += keys
        self.fieldmaps += fieldmaps
        self.entries += more.entries
        for name in _LARGEST_SIZES:
            setattr(self, name, max(getattr(self, name), getattr(more, name)))

    def header(self, subject_code: int, field_code: int) -> Header:
        """Return the header of one pair of codes, as headers() does; field code -1: no fields."""
        return self.headers([subject_code * (len(self.fieldmaps) + 1) + field_code + 1])[0]

    def headers(self, pairs: list[int]) -> tuple[Header, ...]:
        """Return the header of each pair of codes; those made before are kept and shared.

        pairs: each is one number, subject code * (count of field maps + 1) + field code + 1, where
        a field code of -1 stands for no fields.
        """
        known = self._headers
        try:
            return tuple(map(known.__getitem__, pairs))
        except KeyError:
            pass
        if len(known) + len(pairs) > _HEADERS_MAX:
            # Tables live in the memo, and a peer may pair their entries as it likes.
            known = self._headers = {}
        field_choices = len(self.fieldmaps) + 1  # Each map, and none.
        for pair in pairs:
            if pair not in known:
                subject, field = divmod(pair, field_choices)
                known[pair] = Header(self.keys[subject], self._fields(field - 1) if field else ())
        return tuple(map(known.__getitem__, pairs))

    def _fields(self, code: int) -> tuple[tuple[str, str], ...]:
        """Return the fields of a map, sorted; all its headers share the tuple, to save memory."""
        found = self._sorted.get(code)
        if found is None:
            found = self._sorted[code] = tuple(sorted(self.fieldmaps[code].items()))
        return found

    def plain(self) -> tuple[Header, ...]:
        """Return the headers of a table without field maps, by code of the subject; made once."""
        if self._plain is None:
            self._plain = tuple(Header(keys) for keys in self.keys)
        return self._plain

    def make_headers(self, pairs: list[int] | None) -> Iterator[None]:
        """Make headers in steps, for a loop; headers(pairs), or for None plain(), is quick then."""
        if pairs is not None:
            for first in range(0, len(pairs), STEP_ENTRIES):
                self.headers(pairs[first : first + STEP_ENTRIES])
                yield
        elif self._plain is None:
            made: list[Header] = []
            for first in range(0, len(self.keys), STEP_ENTRIES):
                made += map(Header, self.keys[first : first + STEP_ENTRIES])
                yield
            self._plain = tuple(made)

    def map_bytes(self) -> list[int]:
        """About how many bytes each field map takes in a row of an Arrow column of whole maps."""
        # 8: the Arrow offsets of a name and of its value.
        return [
            sum(map(len, entry)) + sum(map(len, entry.values())) + 8 * len(entry)
            for entry in self.fieldmaps
        ]

    def check(self, limits: Limits) -> None:
        """Raise BatchError `too_large` naming the first limit that the table breaks."""
        for what, size, most in (
            ("keys and fields of all headers", self.entries, limits.header_entries_max),
            ("a key's bytes", self.subject_bytes, limits.subject_bytes_max),
            ("keys of a record", self.keys_most, limits.keys_max),
            ("fields of a map", self.fields_most, limits.fields_max),
            ("a field name's bytes", self.field_name_bytes, limits.field_name_bytes_max),
            ("a field value's bytes", self.field_value_bytes, limits.field_value_bytes_max),
        ):
            if size > most:
                raise BatchError("too_large", f"{what}: {size}, at most {most}")
        self.passed = limits


class Remains:
    """Entries of large tables that are not needed any more, which are freed in steps.

    To free 65,536 headers at once takes 5 to 10 ms, for which a loop would stand still.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.parts: deque[list[Any] | dict[Any, Any] | deque[Any]] = deque()

    def free(self, most: int) -> int:
        """Free so many entries at most; returns how many more might have been freed.

        A loop calls it in each of its turns.
        """
        parts = self.parts
        while parts and most > 0:
            part = parts[-1]
            some = min(len(part), most)
            if isinstance(part, list):
                del part[len(part) - some :]
            else:
                take = part.popitem if isinstance(part, dict) else part.pop
                for _ in range(some):
                    take()
            if not part:
                parts.pop()
            most -= some
        return most


class LargeTable(HeaderTable):
    """A table that was read in steps, and is freed in steps."""

    __slots__ = ("_remains",)

    def __init__(self, remains: Remains) -> None:
        """remains: takes the entries once the table is not needed any more."""
        super().__init__([], [])
        self._remains = remains

    def __del__(self) -> None:
        """Leave the entries to be freed in steps."""
        self._remains.parts += (
            self.keys,
            self.fieldmaps,
            self._headers,
            list(self._plain or ()),
            self._sorted,
        )


class HeaderMemo:
    """Bounded memo of tables by their bytes: two generations, the older is dropped whole.

    Dropping a generation keeps look-ups to one dictionary hit and needs no lock: a race
    between threads costs a second parse, never a wrong table.
    """

    def __init__(self, bytes_max: int = _MEMO_BYTES) -> None:
        """bytes_max: of table bytes held as keys, over both generations."""
        self._young: dict[tuple[bytes, bytes], HeaderTable] = {}
        """(subjects, field maps) -> table; once full, it becomes the old generation."""
        self._old: dict[tuple[bytes, bytes], HeaderTable] = {}
        self._young_bytes = 0
        self._bytes_max = bytes_max

    def table(
        self, subjects: bytes, fieldmaps: bytes, limits: Limits = DEFAULT_LIMITS
    ) -> HeaderTable:
        """Return the table of these section bytes (b"": no field maps).

        limits: checked while parsing. A table from the memo may have been parsed under others:
        HeaderTable.check() compares. Raises BatchError when they are not what SPEC.md, section 5.3,
        says.
        """
        key = (subjects, fieldmaps)
        found = self._young.get(key)
        if found is not None:
            return found
        found = self._old.get(key)
        if found is None:
            found = parse_table(subjects, fieldmaps, limits)
        # Found nowhere or in the old generation: into the young one, unless it is too large.
        size = len(subjects) + len(fieldmaps) + _MEMO_ENTRY_BYTES
        if size <= TABLE_BYTES_MAX:
            if self._young_bytes + size > self._bytes_max // 2:
                self._old, self._young, self._young_bytes = self._young, {}, 0
            self._young[key] = found
            self._young_bytes += size
        return found


MEMO = HeaderMemo()
"""The default memo: a cache of pure facts, so that brokers in one process may share it."""


@cache
def _decoders(headers_max: int, keys_max: int, fields_max: int) -> tuple[Any, Any]:
    """Return decoders of the subjects and of the field maps, which count before they parse.

    A length that an array or a map claims is refused before an entry of it becomes an object: 16
    MiB of empty strings would take 1.3 GiB.
    """
    entries, keys, fields = (
        msgspec.Meta(max_length=n) for n in (headers_max, keys_max, fields_max)
    )
    # Any: compiled, a name that is given a type alone is an alias, and never assigned.
    subjects: Any = Annotated[list[str | Annotated[list[str], keys]], entries]
    fieldmaps: Any = Annotated[list[Annotated[dict[str, str], fields]], entries]
    return msgspec.msgpack.Decoder(subjects), msgspec.msgpack.Decoder(fieldmaps)


def parse_table(subjects: bytes, fieldmaps: bytes, limits: Limits = DEFAULT_LIMITS) -> HeaderTable:
    """Parse the two sections without the memo.

    Raises BatchError: not MessagePack of the right shape, bad UTF-8, an entry without keys;
    `too_large`: more entries, keys or fields than the limits allow, of which none was parsed.
    """
    of_subjects, of_fieldmaps = _decoders(limits.headers_max, limits.keys_max, limits.fields_max)
    entries = _decode(of_subjects, subjects, "subjects")
    maps = _decode(of_fieldmaps, fieldmaps, "field maps") if fieldmaps else []
    return HeaderTable(_keys(entries), maps)


def _keys(entries: list[Any]) -> list[tuple[str, ...]]:
    """Return the keys of each entry, a text or a list of texts. Raises BatchError: one has none."""
    keys = [(entry,) if type(entry) is str else tuple(entry) for entry in entries]
    if not all(keys):
        raise BatchError("bad_batch", "the subjects table has an entry without a key")
    return keys


class TableReading:
    """A header table that is read in steps, so that a loop does other things in between.

    For tables that are too large for the memo: 640,000 fields take hundreds of milliseconds.
    """

    def __init__(
        self, subjects: _Bytes, fieldmaps: _Bytes, limits: Limits, *, outlined: bool = True,
        remains: Remains | None = None,
    ) -> None:  # fmt: skip
        """limits: checked while reading. outlined: also gather facts for an index.

        remains: takes the entries of the table in the end; None: they are freed at once.
        """
        self._table = HeaderTable([], []) if remains is None else LargeTable(remains)
        if outlined:
            self._table.outline = Outline()
        self._wrong: tuple[str, str, int] | None = None
        """Text of the error that ended the reading. Not the error itself: its trace would hold this
        object and the bytes of the table, free only when the collector found the circle."""
        # The generator does not refer to this object, so that a reading that is given up is free at
        # once: what a cycle holds stays until the collector looks at all objects, and one reading
        # takes megabytes.
        self._steps = self._read(self._table, subjects, fieldmaps, limits)

    def run(self, more: Callable[[], bool]) -> bool:
        """Go on until all is read (True), or until `more`, asked after each step, says no (False).

        A fault of the table ends its reading; table() raises it.
        """
        try:
            return all(more() for _ in self._steps)
        except BatchError as error:
            position = error.position
            # BatchError adds the position to its reason, and will again.
            reason = error.reason.removesuffix(f" (byte {position})")
            self._wrong = error.code, reason, position
            return True

    def table(self) -> HeaderTable:
        """Return the table, once what is left of it is read. Raises as parse_table()."""
        if not self.run(_always) or self._wrong is not None:
            assert self._wrong is not None
            raise BatchError(*self._wrong)
        return self._table

    @staticmethod
    def _read(
        table: HeaderTable, subjects: _Bytes, fieldmaps: _Bytes, limits: Limits
    ) -> Iterator[None]:
        """Read a header table in portions, with a yield after each. Raises BatchError.

        Subjects and field maps are read alike. Where an outline is wanted, the reader gathers it
        meanwhile; the outline looks at each part of each subject, and yields in between.
        """
        outline = table.outline
        decoders = _decoders(limits.headers_max, limits.keys_max, limits.fields_max)
        left = limits.header_entries_max
        for data, decoder, what in (
            (subjects, decoders[0], "subjects"),
            (fieldmaps, decoders[1], "field maps"),
        ):
            if not data:
                continue
            if claimed_length(data) > limits.headers_max:
                raise BatchError("too_large", f"more than {limits.headers_max} {what} in a batch")
            for some, count in _portions(data, decoder, what):
                left -= count
                if left < 0:
                    most = limits.header_entries_max
                    raise BatchError(
                        "too_large", f"keys and fields of all headers: more than {most}"
                    )
                found = _decode(decoder, some, what)
                if data is subjects:
                    keys = _keys(found)
                    table.extend(keys, [])
                    if outline is not None:
                        yield from outline.add_subjects(keys)
                else:
                    table.extend([], found)
                    if outline is not None:
                        outline.add_fieldmaps(found)
                yield


def _portions(data: _Bytes, decoder: Any, what: str) -> Iterator[tuple[bytes, int]]:
    """Yield a table as arrays of few of its entries each, with how many keys or fields each claims.

    Only lengths are read: whatever is no string, array or map ends up in a portion that its decoder
    refuses. In MessagePack the bytes 0xA0 to 0xBF begin a string of 0 to 31 bytes; 0x80 to 0x8F,
    0xDE and 0xDF a map, each member of which is two strings; 0xDC an array, with its length in two
    bytes.
    """
    left = claimed_length(data)
    if left < 0:
        _decode(decoder, data, what)  # It raises the error: this is no array.
    _, at = _members(data, 0)
    size = len(data)
    while left:
        begun, entries, count = at, 0, 0
        while entries < left and count < STEP_ENTRIES and at - begun < STEP_BYTES and at < size:
            entries += 1
            length = data[at] - 0xA0
            if 0 <= length < 0x20:  # A short text, by far the most frequent, without a call.
                at += 1 + length
                count += 1
                continue
            members, after = _members(data, at)
            if members < 0:  # A longer text.
                at = _after_text(data, at)
                count += 1
                continue
            # An array of keys or a field map: each of its texts is passed over.
            count += max(1, members)
            if data[at] & 0xF0 == 0x80 or data[at] >= 0xDE:  # A map: a name and a value each.
                members *= 2
            at = after
            while members and at < size:
                length = data[at] - 0xA0
                at = at + 1 + length if 0 <= length < 0x20 else _after_text(data, at)
                members -= 1
        if not entries:
            raise BatchError("bad_batch", f"the {what} table ends before its last entry")
        # The entries become an array by themselves, with its length in two bytes.
        yield b"\xdc" + entries.to_bytes(2, "big") + data[begun:at], count
        left -= entries
    if at != size:
        raise BatchError("bad_batch", f"the {what} table has bytes after its last entry")


def _members(data: _Bytes, at: int) -> tuple[int, int]:
    """Return the count of members of a MessagePack array or map, and where the first one begins.

    A count of -1: neither begins here.
    """
    kind = data[at]
    if kind & 0xE0 == 0x80:  # Up to 15 members, their count within the first byte.
        return kind & 0x0F, at + 1
    if 0xDC <= kind <= 0xDF:  # The count follows, in 2 bytes where the kind is even, else in 4.
        after = at + (5 if kind & 1 else 3)
        return int.from_bytes(data[at + 1 : after], "big"), after
    return -1, at


def _after_text(data: _Bytes, at: int) -> int:
    """Return where a text ends that begins here; of anything else, where its first byte ends.

    A decoder refuses the latter when it gets the portion.
    """
    kind = data[at]
    if kind & 0xE0 == 0xA0:  # The length is within the first byte.
        return at + 1 + (kind & 0x1F)
    if 0xD9 <= kind <= 0xDB:  # The length follows, in 1, 2 or 4 bytes.
        after = at + 1 + (1 << (kind - 0xD9))
        return after + int.from_bytes(data[at + 1 : after], "big")
    return at + 1


def items_of(texts: Iterable[str]) -> array[int]:
    """Return the CRC32C of each text, by which the journal's index finds keys and fields.

    texts: keys as they are, fields as pair_text().
    """
    crc = google_crc32c.value
    return array("I", [crc(text.encode()) for text in texts])


def pair_text(name: str, value: str) -> str:
    """Return a field's name and value as the one text that an index hashes."""
    return f"{name}\0{value}"


def leading_parts(keys: tuple[str, ...], depth: int) -> tuple[str, ...]:
    """Return each key of a subject cut after `depth` parts between dots, each result once.

    The journal's index finds by them which topics a batch may have.
    """
    if len(keys) == 1:
        return (_leading(keys[0], depth),)
    return tuple(dict.fromkeys([_leading(key, depth) for key in keys]))


def _leading(key: str, depth: int) -> str:
    """Return the first `depth` parts of a key; the key itself where it has no more."""
    parts = key.split(".", depth)
    return ".".join(parts[:depth]) if len(parts) > depth else key


def _always() -> bool:
    """Answer TableReading.run() so that it reads to the end."""
    return True


def _decode(decoder: Any, data: _Bytes, what: str) -> Any:
    """Decode a part of a header table. Raises BatchError. what: `subjects` or `field maps`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        code = "too_large" if OVER_LENGTH in str(error) else "bad_batch"
        raise BatchError(code, f"the {what} table: {error}") from error


def check_counts(table: HeaderTable, subjects_count: int, fieldmaps_count: int) -> None:
    """Raise BatchError when the head's counts are not the table's."""
    if len(table.keys) != subjects_count:
        raise BatchError(
            "bad_batch", f"{len(table.keys)} subjects where the head says {subjects_count}",
            _SUBJECTS_COUNT_AT,
        )  # fmt: skip
    if len(table.fieldmaps) != fieldmaps_count:
        raise BatchError(
            "bad_batch", f"{len(table.fieldmaps)} field maps, the head says {fieldmaps_count}",
            _FIELDMAPS_COUNT_AT,
        )  # fmt: skip


def claimed_length(data: Any) -> int:
    """Return how many entries MessagePack bytes claim to have as an array; -1: they are none."""
    kind = data[0] if len(data) else 0
    if kind & 0xF0 == SHORT_ARRAY:
        return int(kind & 0x0F)
    width = {0xDC: 2, 0xDD: 4}.get(kind, 0)  # Bytes of the length after an array's first byte.
    if not width or len(data) <= width:
        return -1
    return int.from_bytes(data[1 : 1 + width], "big")


def _longest(texts: Collection[str]) -> int:
    """Return the bytes of the longest text as UTF-8."""
    if all(map(str.isascii, texts)):
        return max(map(len, texts), default=0)
    return max(len(text.encode()) for text in texts)
