"""Screens of `malamute top`: figures, troubles and tables, made of two looks at the broker.

Owns the columns, the order of rows and the lines above them; top_screen.py puts them on a terminal.
The rules: a rate is the growth between two looks by the broker's clock, and is left out where there
is one look only; what has no room on a line goes to the next one, a name in the table is cut, a
figure is never broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from malamute_py.cli.looking import Look
from malamute_py.cli.values import age_text, count_text, size_text, within
from malamute_py.health.facts import ring_title, was_started
from malamute_py.health.troubles import STUCK, Trouble, of_all

if TYPE_CHECKING:
    from rich.text import Text

THINGS_MAX: Final = 1000
"""Things of each kind that are looked at."""
_TROUBLES_MAX: Final = 5
"""Troubles that are shown; the others are counted."""
_ONE_LINE: Final = 110
"""Width from which all rates have one line; below, two, so that no figure moves the others."""
_GAP: Final = "  "
_NAME_MIN: Final = 16
"""Width that names have at least: columns of figures give way to them."""
_RATES: Final = {
    "published": ("records_in",),
    "delivered": ("records_out", "group_records_out"),
    "bytes_in": ("bytes_in",),
    "bytes_out": ("bytes_out",),
    "mail": ("mail_in",),
    "requests": ("requests_in",),
    "gaps": ("gaps", "group_records_lost"),
}
"""Rates by name, and the counters of the broker that they are the growth of."""


class Sample(NamedTuple):
    """One look, and when it was taken."""

    look: Look
    at_s: float
    """By a clock that only goes forward."""


Value = float | str | None
"""A figure or text of a row; None: there is none, as a rate after one look."""


class Field(NamedTuple):
    """One column of a table."""

    key: str
    title: str
    text: Callable[[float], str] = lambda value: count_text(int(value))
    falling: bool = True
    """True: the largest first when rows are sorted by it."""


class View(NamedTuple):
    """One table."""

    kind: str
    fields: tuple[Field, ...]
    """Columns of figures, after the name."""
    rows: Callable[[Sample, Sample | None], list[dict[str, Value]]]
    """Makes the rows of a look; with the look before they have rates."""
    order: int
    """Column by which it is sorted at first."""


def _rate(value: float) -> str:
    """Write a rate: a small one with a decimal, so that it does not look like 0."""
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def _age(value: float) -> str:
    """Write an age in milliseconds, rounded down to whole seconds."""
    return age_text(int(value) // 1000 * 1000) if value >= 1000 else "0 s"


def _bytes(value: float) -> str:
    return size_text(int(value))


def _spent_s(now: Sample, before: Sample | None) -> float:
    """Return the time between two looks by the broker's clock.

    0: there is one look only, or the broker was started between them, so that its counters began
    anew: there are no rates then.
    """
    if before is None or was_started(now.look.broker, before.look.broker):
        return 0.0
    return max(0, now.look.now_ms - before.look.now_ms) / 1000


def _growth(place: int, stood: int | None, spent_s: float) -> float | None:
    """Return by how much a position grew a second. stood: where it stood at the look before.

    None: there is no look before, or the position fell: the stream was made anew, or the reader
    went back.
    """
    return None if stood is None or place < stood or not spent_s else (place - stood) / spent_s


def _streams(now: Sample, before: Sample | None) -> list[dict[str, Value]]:
    """Return rows about streams; the rate needs the look before."""
    spent_s = _spent_s(now, before)
    stood = {each.name: each.tail for each in before.look.everything.streams} if before else {}
    return [
        {
            "name": each.name,
            "rate": _growth(each.tail, stood.get(each.name), spent_s),
            "records": each.records,
            "bytes": each.bytes,
            "tail": each.tail,
        }
        for each in now.look.everything.streams
    ]  # fmt: skip


def _readers(now: Sample, before: Sample | None) -> list[dict[str, Value]]:
    """Return rows about cursors and groups; the rate needs the look before."""
    spent_s = _spent_s(now, before)

    def rate(each: Any, stood: dict[tuple[str, str], int], name: str) -> float | None:
        """Return the rate of a reader. stood: positions at the look before."""
        return _growth(each.next, stood.get((each.stream, name)), spent_s)

    kept = before.look.everything if before else None
    cursors = {(e.stream, e.cursor): e.next for e in kept.cursors} if kept else {}
    groups = {(e.stream, e.group): e.next for e in kept.groups} if kept else {}
    found: list[dict[str, Value]] = [
        {
            "name": f"{each.stream}/{each.cursor}", "kind": "cursor", "lag": each.lag,
            "rate": rate(each, cursors, each.cursor), "held": 0, "members": None,
            "unmoved_ms": _since(each.moved_ms, now),
        }
        for each in now.look.everything.cursors
    ]  # fmt: skip
    found += [
        {
            "name": f"{each.stream}/{each.group}", "kind": each.kind, "lag": each.lag,
            "rate": rate(each, groups, each.group),
            "held": sum(member.held for member in each.members), "members": len(each.members),
            "unmoved_ms": _since(each.moved_ms, now),
        }
        for each in now.look.everything.groups
    ]  # fmt: skip
    return found


def _mailboxes(now: Sample, before: Sample | None) -> list[dict[str, Value]]:
    """Return rows about mailboxes."""
    return [
        {
            "name": each.name, "messages": each.messages, "oldest_ms": _since(each.oldest_ms, now),
            "held": each.held, "bytes": each.bytes, "readers": each.readers,
        }
        for each in now.look.everything.mailboxes
    ]  # fmt: skip


def _services(now: Sample, before: Sample | None) -> list[dict[str, Value]]:
    """Return rows about services; `room`: how many more requests their workers would take."""
    return [
        {
            "name": each.name, "waiting": each.waiting, "oldest_ms": _since(each.oldest_ms, now),
            "held": each.held, "workers": each.offers, "room": each.credit, "dead": each.dead,
        }
        for each in now.look.everything.services
    ]  # fmt: skip


def _clients(now: Sample, before: Sample | None) -> list[dict[str, Value]]:
    """Return rows about the links of clients."""
    return [
        {
            "name": each.identity or "anonymous", "link": each.link,
            "software": each.software,
            "unread_bytes": each.more.get("unread_bytes", 0),
            "unconfirmed_bytes": each.more.get("unconfirmed_bytes", 0),
            "subscriptions": each.subscriptions,
            "age_ms": _since(each.more.get("opened_ms", 0), now),
        }
        for each in now.look.links
    ]  # fmt: skip


def _since(at_ms: int, now: Sample) -> float | None:
    return max(0, now.look.now_ms - at_ms) if at_ms else None


VIEWS: Final = (
    View("streams", (
        Field("rate", "records/s", _rate), Field("records", "kept"),
        Field("bytes", "bytes", _bytes), Field("tail", "tail"),
    ), _streams, 0),
    View("readers", (
        Field("lag", "behind"), Field("rate", "records/s", _rate), Field("held", "in hand"),
        Field("members", "members"), Field("unmoved_ms", "unmoved", _age),
        Field("kind", "kind", falling=False),
    ), _readers, 0),
    View("mailboxes", (
        Field("messages", "messages"), Field("oldest_ms", "oldest", _age),
        Field("held", "in hand"), Field("bytes", "bytes", _bytes), Field("readers", "readers"),
    ), _mailboxes, 0),
    View("services", (
        Field("waiting", "waiting"), Field("oldest_ms", "oldest", _age),
        Field("held", "in hand"), Field("workers", "workers"), Field("room", "room"),
        Field("dead", "dead"),
    ), _services, 0),
    View("clients", (
        Field("unread_bytes", "unread", _bytes),
        Field("unconfirmed_bytes", "unconfirmed", _bytes), Field("subscriptions", "subs"),
        Field("age_ms", "for", _age), Field("link", "link"),
        Field("software", "software", falling=False),
    ), _clients, 0),
)  # fmt: skip


def rates(now: Sample, before: Sample | None) -> dict[str, float]:
    """Return what the broker counted a second; empty with one look only."""
    spent_s = _spent_s(now, before)
    if before is None or not spent_s:
        return {}
    new, old = (each.look.broker.get("counters", {}) for each in (now, before))
    return {
        name: sum(max(0, new.get(each, 0) - old.get(each, 0)) for each in counters) / spent_s
        for name, counters in _RATES.items()
    }


def troubles_of(now: Sample) -> list[Trouble]:
    """Return what is slow or stuck, the worst first; nothing without facts about the broker."""
    if "broker" in now.look.unseen:
        return []
    return of_all(now.look.everything, now.look.links)


def snapshot(now: Sample, before: Sample | None) -> dict[str, Any]:
    """Return all that the screens show, for programs."""
    broker = now.look.broker
    return {
        "software": broker.get("software", ""),
        "uptime_ms": broker.get("uptime_ms"),
        "links": broker.get("gauges", {}).get("links"),
        "resident_bytes": broker.get("resident_bytes"),
        "rates": rates(now, before),
        "rings": {name: {"used": used, "full": full} for name, used, full in _rings(now)},
        "troubles": [
            {"kind": each.kind, "what": each.what, "name": list(each.name), "words": each.words}
            for each in troubles_of(now)
        ],
        "things": {
            view.kind: _sorted(view.rows(now, before), view.fields[view.order], turned=False)
            for view in VIEWS
        },
        "unseen": now.look.unseen,
    }


def _rings(now: Sample) -> Iterator[tuple[str, float, str]]:
    """Yield of each ring its title, its used share, and what it does when full, as `refuse`."""
    for name, facts in now.look.broker.get("disk", {}).items():
        size = facts.get("ring_bytes")
        if size:
            used = (facts["end_lsn"] - facts["start_lsn"]) / size
            yield ring_title(now.look.broker, name), min(1.0, used), facts.get("full", "")


def _sorted(rows: list[dict[str, Value]], by: Field, *, turned: bool) -> list[dict[str, Value]]:
    """Sort rows by a column, and by name within it; rows without a value come last.

    turned: True: against the column's own direction, Field.falling.
    """
    there = [row for row in rows if row[by.key] is not None]
    # A sort keeps the order of equal rows: that by name is left within one value.
    there.sort(key=lambda row: str(row["name"]))
    there.sort(key=lambda row: row[by.key], reverse=by.falling is not turned)  # type: ignore[arg-type, return-value]
    return there + [row for row in rows if row[by.key] is None]


KEYS: Final = """\
  1 to 5, Tab     streams, readers, mailboxes, services,
                  clients
  s, left, right  sort by the next column, or the former
  r               sort in the other direction
  up, down        scroll (also j, k); by pages and to the
                  ends: PgUp, PgDn, Home, End (also g, G)
  /               show what has a text in its name
  Esc             show all
  p, Space        pause; look at once
  +, -            look half as often; twice as often
  ?, q            these keys; quit
  the mouse       click on a table, or a column to sort"""
"""The keys, for the screen and for the help of the command."""


class Shown(NamedTuple):
    """Choices of the person at the screen."""

    view: int = 0
    order: int = 0
    """Column of figures that sorts; one more than there are: the name."""
    turned: bool = False
    sought: str = ""
    """Text that a name has to have."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """Columns, with the name at the end, where `order` has it."""
        return (*VIEWS[self.view].fields, _NAME)


class Table(NamedTuple):
    """Columns that have room, and the rows that were found."""

    columns: list[tuple[int, str, int]]
    """Place in `Shown.order`, title and width."""
    rows: list[list[Text]]


def above(now: Sample, before: Sample | None, gone: str, width: int, height: int) -> list[Text]:
    """Return the lines above the tables, of which troubles take half the screen at most.

    gone: why there is no newer look; empty: this is the newest.
    """
    head = _head(now, before, gone, width)
    return head + _troubles(now, width, max(1, height // 2 - len(head)))


def tabs(now: Sample, at: int, width: int) -> list[Text]:
    """Return the line of tables to choose from. at: place of the chosen one, which is marked."""
    found = []
    for place, view in enumerate(VIEWS):
        words = f"{place + 1} {view.kind} {_counted(now, view)}"
        text = _text(f"[{words}]", "reverse") if place == at else _text(f" {words} ")
        found.append(text.on(click=f"app.view({place})"))  # An action of top_screen.py.
    return _flowed(found, width, gap="")


def table(now: Sample, before: Sample | None, shown: Shown, width: int) -> Table:
    """Return the table that was chosen, with as many columns as have room.

    Columns are known by their place in Shown.fields: the figures, then the name.
    """
    fields, order = shown.fields, shown.order
    by = fields[order]
    rows = _sorted(VIEWS[shown.view].rows(now, before), by, turned=shown.turned)
    rows = [row for row in rows if shown.sought.casefold() in _searched(row)]
    cells = [[_cell(row, field) for field in fields] for row in rows]
    titles = [field.title for field in fields]
    # The arrow points down where the largest stands first.
    titles[order] += "▼" if by.falling is not shown.turned else "▲"
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    name = len(fields) - 1  # Place of the column of names.
    kept = list(range(name))  # Places of the columns of figures that have room.
    while len(kept) > 1 and width - _width_of(widths, kept) < _NAME_MIN + len(_GAP):
        # The last column goes first; the one that sorts stays.
        kept.remove(max(at for at in kept if at != order))
    widths[name] = max(_NAME_MIN, min(widths[name], width - _width_of(widths, kept) - len(_GAP)))
    places = [name, *kept]  # Names are shown first.
    return Table(
        [(at, titles[at], widths[at]) for at in places],
        [[_aligned(row[at], widths[at], at == name) for at in places] for row in cells],
    )


def none_of(now: Sample, shown: Shown) -> str:
    """Return why a table is empty, for the line above it."""
    kind = VIEWS[shown.view].kind
    having = f" with {shown.sought} in the name" if shown.sought else ""
    return now.look.unseen.get(kind, f"no {kind}{having}")


def _aligned(words: str, width: int, is_name: bool) -> Text:
    """Return a cell's words: a figure at the right, a name at the left and cut to the width."""
    from rich.text import Text

    if not is_name:
        return Text(words, justify="right", no_wrap=True)
    return Text(f"{words[: width - 1]}…" if len(words) > width else words, "cyan", no_wrap=True)


def _searched(row: dict[str, Value]) -> str:
    """Return the text of a row that the filter is sought in."""
    return f"{row['name']} {row.get('software', '')}".casefold()


def _counted(now: Sample, view: View) -> str:
    """Return how many things a table has; with a plus where a look was bounded by THINGS_MAX."""
    seen = now.look
    lists = {"readers": (seen.everything.cursors, seen.everything.groups), "clients": (seen.links,)}
    listed = lists.get(view.kind) or (getattr(seen.everything, view.kind),)
    more = "+" if any(len(each) >= THINGS_MAX for each in listed) else ""
    return f"{count_text(sum(map(len, listed)))}{more}"


_NAME: Final = Field("name", "name", falling=False)


def _text(words: str, style: str = "") -> Text:
    """Return a text that is not broken, in the form that the terminal's screen takes."""
    from rich.text import Text

    return Text(words, style, no_wrap=True)


def _flowed(parts: Sequence[Text], width: int, gap: str = _GAP) -> list[Text]:
    """Return lines with these parts, as many in each as have room; a part is never broken."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1].append(gap)
            lines[-1].append_text(part)
        else:
            # A line has no style of its own, which would spread over what follows.
            lines.append(_text("").append_text(part))
    return lines


def _head(now: Sample, before: Sample | None, gone: str, width: int) -> list[Text]:
    """Return the lines about the broker as a whole. gone: as of above()."""
    broker = now.look.broker
    words = [str(broker.get("software", "the broker"))]
    if "uptime_ms" in broker:
        words.append(f"up {_age(broker['uptime_ms'])}")
    words.append(count_text(broker.get("gauges", {}).get("links", 0), "link"))
    if broker.get("resident_bytes"):
        words.append(f"memory {_bytes(broker['resident_bytes'])}")
    if broker.get("disk_free_bytes"):
        words.append(f"disk free {_bytes(broker['disk_free_bytes'])}")
    lines = _flowed([_text(word, "bold") for word in words], width)
    found = rates(now, before)
    if found:
        streams = [
            f"in {_rate(found['published'])} records/s {_bytes(found['bytes_in'])}/s",
            f"out {_rate(found['delivered'])} records/s {_bytes(found['bytes_out'])}/s",
        ]
        others = [f"mail {_rate(found['mail'])}/s", f"requests {_rate(found['requests'])}/s"]
        if found["gaps"]:  # Rare, and bad: shown only when there are any.
            others.append(f"gaps {_rate(found['gaps'])}/s")
        for group in [streams + others] if width >= _ONE_LINE else [streams, others]:
            lines += _flowed([_text(word) for word in group], width)
    else:
        lines.append(_text("rates come with the second look"))
    spans = [f"{name} p99 within {within_s * 1000:g} ms" for name, within_s in _spans(now, before)]
    lines += _flowed([_text(word) for word in [*spans, *_fullest_rings(now, width)]], width)
    if gone:
        lines += _folded(f"no newer look: {gone}", width, "bold red")
    return lines


def _fullest_rings(now: Sample, width: int) -> Iterator[str]:
    """Yield one text about the rings, the fullest first, as many as one line has room for.

    Nothing without rings.
    """
    rings = [
        f"{name} {used:.0%} {'refuses' if full == 'refuse' else 'overwrites'}"
        for name, used, full in sorted(_rings(now), key=lambda ring: -ring[1])
    ]
    for count in range(len(rings), 0, -1):  # One ring less each time, until it fits.
        text = f"rings: {', '.join(rings[:count])}"
        if count < len(rings):
            text += f", {count_text(len(rings) - count)} less full"
        if len(text) <= width or count == 1:
            yield text
            return


def _folded(words: str, width: int, style: str) -> list[Text]:
    """Return a sentence as lines, the further ones indented."""
    return [
        _text(line, style) for line in wrap(words, max(width, _NAME_MIN), subsequent_indent=" " * 7)
    ]


def _troubles(now: Sample, width: int, room: int) -> list[Text]:
    """Return lines about what is slow or stuck, the worst first.

    room: lines that they should not exceed; the first trouble is shown in any case.
    """
    troubles = troubles_of(now)
    lines: list[Text] = []
    for at, each in enumerate(troubles):
        name = "" if each.what == "broker" else f" {'/'.join(each.name)}"
        style = "red" if each.kind == STUCK else "yellow"
        more = _folded(f"{each.kind}  {each.what}{name}: {each.words}", width, style)
        if at and (at == _TROUBLES_MAX or len(lines) + len(more) > room):
            return [*lines, _text(f"and {count_text(len(troubles) - at)} more", "dim")]
        lines += more
    return lines


def _spans(now: Sample, before: Sample | None) -> Iterator[tuple[str, float]]:
    """Yield the times within which 99 of 100 confirms and syncs since the look before came.

    The broker counts them in buckets by time, from its start on: the growth of each bucket since
    the look before is the histogram between the two. A time beyond the last bound is not told.
    """
    kept = before.look.broker.get("latency", {}) if before and _spent_s(now, before) else {}
    for name in ("confirm", "sync"):
        new, old = now.look.broker.get("latency", {}).get(name), kept.get(name)
        if new and old:
            counts = [
                late - early for late, early in zip(new["counts"], old["counts"], strict=True)
            ]
            if (within_s := within(new, counts, 99)) is not None:
                yield name, within_s


def _width_of(widths: Sequence[int], shown: Sequence[int]) -> int:
    """Return the width that columns take with their gaps. shown: their places."""
    return sum(widths[at] + len(_GAP) for at in shown)


def _cell(row: dict[str, Value], field: Field) -> str:
    """Return the text of a row in a column; a dash where there is no figure."""
    value = row[field.key]
    if value is None:
        return "-"
    return value if isinstance(value, str) else field.text(value)
