"""Changes that a person makes: each asks the broker over the person's own link.

Owns one function for each change, which returns the sentence that tells of it. The rules: the
broker decides what is allowed; a change names what it changes in full; nothing is removed without a
second press of a button.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from malamute_protocol.errors import BrokerRefused
from malamute_py.client.aio.client import Client
from malamute_py.client.position import Position
from malamute_py.health.words import many
from malamute_py.http.console.copying import Copy, check_range
from malamute_py.http.console.forms import Form, of
from malamute_py.http.console.rendering import url
from malamute_py.http.console.sessions import Session
from malamute_py.http.console.words import NotUnderstood, start_point, visible, whole_number
from malamute_py.units import in_unit_of

EDITABLE: Final = ("max_bytes", "max_age_ms", "max_records", "level", "description")
"""Settings of a stream that the console changes."""
_NUMBER_MAX: Final = 1 << 62
_PUBLISH_MS: Final = 5_000
"""How long a page waits for the confirm of a record."""


class Action(NamedTuple):
    """One change: what it does, and the page to show afterwards."""

    run: Callable[[Session, Form], Awaitable[str]]
    back: Callable[[Form], str]
    outcome: str = "done"
    """`begun`: it goes on after the answer, and its page tells how it ends."""


# --- streams ----------------------------------------------------------------------------------


async def copy(session: Session, form: Form) -> str:
    """Begin to copy a range of a stream into another one, beside the pages.

    The form gives both ends of the range as a person writes them: an offset, a time or a word.
    """
    stream, to = of(form, "name"), of(form, "to").strip()
    check_range(stream, to)
    if session.copy is not None and session.copy.running:
        raise NotUnderstood("another copy of this session is under way: wait, or cancel it")
    facts = await session.client.stream_info(stream)
    await _check_target(session.client, to)
    begin, end = of(form, "from").strip() or "earliest", of(form, "until").strip() or "latest"
    now_ms = await session.broker_ms()
    # The range ends at the tail of now: what is published meanwhile is not copied.
    start, stop = start_point(begin, now_ms), facts.tail
    if end != "latest":
        stop = min(stop, await session.client.find_offset(stream, start_point(end, now_ms)))
    # Offset at which the copy will begin, only to refuse an empty range: the copy asks for `start`.
    first = start if isinstance(start, int) else facts.first
    if not isinstance(start, int | str):
        first = await session.client.find_offset(stream, start)
    elif start == "latest":
        first = facts.tail
    if max(first, facts.first) >= stop:
        raise NotUnderstood(
            f"{stream} has no record from {begin} until {end}: that is from offset {first} until"
            f" {stop}, and the stream has offsets {facts.first} until {facts.tail}"
        )
    made = Copy(stream, of(form, "pattern"), to)
    made.start(session.client, start, stop)
    session.copy = made
    session.closings.add(made.cancel)  # the copy ends with the session
    made.then(lambda: session.closings.discard(made.cancel))
    return f"Copying {stream} into {to}; this page tells how far it is."


async def _check_target(client: Client, to: str) -> None:
    """Raise NotUnderstood where the person may not write to a stream, or not make a missing one.

    A person who may write a stream and not read it is not told whether it is there: then the copy
    itself finds out.
    """
    needed = "write"
    try:
        if await client.may("write", to):
            try:
                await client.stream_info(to)
            except BrokerRefused as error:
                if error.code != "unknown_stream" or await client.may("create", to):
                    return
                needed = "create"
            else:
                return
    except BrokerRefused:
        return  # A broker of an earlier version does not tell: the copy finds out.
    raise NotUnderstood(f"a copy into {to} takes the permission {needed} on {to}")


async def cancel_copy(session: Session, form: Form) -> str:
    """End the copy that is under way."""
    if session.copy is None or not session.copy.running:
        raise NotUnderstood("no copy is under way")
    session.copy.cancel()
    return f"The copy into {session.copy.to} ends; what was copied stays."


async def publish(session: Session, form: Form) -> str:
    """Publish one record, whose body is text, to a stream that there is."""
    name = of(form, "name")
    await session.client.stream_info(name)  # Publishing would make a stream that is not there.
    confirmed = await session.client.publish(
        name, _lines(of(form, "body")), subject=of(form, "subject").strip(),
        fields=_fields(of(form, "fields")), timeout_ms=_PUBLISH_MS,
    )  # fmt: skip
    return f"Record published to {name} at offset {confirmed.offset}, {confirmed.level}."


def _lines(text: str) -> str:
    """Return a text without the carriage returns that browsers put at the ends of its lines."""
    return text.replace("\r\n", "\n")


def _fields(text: str) -> dict[str, str] | None:
    """Read the fields of a record to publish, one a line. Raises NotUnderstood."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, _lines(text).split("\n"))):
        name, equals, value = line.partition("=")
        if not equals:
            raise NotUnderstood(f"a field is a line NAME=VALUE, not “{visible(line[:40])}”")
        found[name.strip()] = value.strip()
    return found or None


async def create_stream(session: Session, form: Form) -> str:
    """Make a stream with the settings of the form. Raises NotUnderstood where there is one."""
    name = of(form, "name")
    wanted = {key: _setting(key, of(form, key)) for key in ("ring_bytes", *EDITABLE) if key in form}
    try:
        await session.client.stream_info(name)
    except BrokerRefused as error:
        # A person who may not read the stream may still make one: the broker decides below.
        if error.code not in ("unknown_stream", "forbidden"):
            raise
    else:
        raise NotUnderstood(f"there is a stream {visible(name)} already: nothing was changed")
    # A field that was left empty has the broker's default.
    await session.client.create_stream(name, {key: each for key, each in wanted.items() if each})
    return f"Stream {name} made."


async def edit_stream(session: Session, form: Form) -> str:
    """Change settings of a stream: those fields of the form that differ from what is in force."""
    name = of(form, "name")
    before = (await session.client.stream_info(name)).settings
    wanted: dict[str, int | str] = {
        key: _setting(key, of(form, key)) for key in EDITABLE if key in form
    }
    changed = {key: value for key, value in wanted.items() if value != before.get(key)}
    if not changed:
        raise NotUnderstood("no setting is another one: nothing was changed")
    await session.client.edit_stream(name, changed)
    return f"Settings of {name} changed: {', '.join(changed)}."


def _setting(key: str, text: str) -> int | str:
    """Return the value of a stream's setting as a person types it. Raises NotUnderstood."""
    wanted = text.strip()
    if key in ("level", "description"):
        return wanted
    try:
        value = in_unit_of(key, wanted or "0")  # such as 5MiB or 10m; None: a mere number
    except ValueError as error:
        raise NotUnderstood(f"{key}: {visible(str(error)[:200])}") from None
    return whole_number(wanted or "0", 0, _NUMBER_MAX, key) if value is None else value


async def trim(session: Session, form: Form) -> str:
    """Remove the records of a stream before a place: an offset, a time, or a word for one."""
    name = of(form, "name")
    start = start_point(of(form, "before"), await session.broker_ms())
    facts = await session.client.stream_info(name)
    offset = start
    if not isinstance(offset, int):
        offset = await session.client.find_offset(name, start)
    if offset > facts.tail:
        raise NotUnderstood(f"{name} ends at {facts.tail}: nothing was removed")
    # With uuid and epoch: a stream that was made anew meanwhile is not trimmed.
    await session.client.trim(name, Position(facts.uuid, facts.epoch, offset))
    gone = max(0, offset - facts.first)
    return f"{many(gone, 'record')} of {name} before offset {offset} removed for good."


async def purge(session: Session, form: Form) -> str:
    """Remove the records of some subjects before a place."""
    name, pattern = of(form, "name"), of(form, "pattern").strip()
    if not pattern:
        raise NotUnderstood("say which subjects: a topic such as forex.*, or prefix:forex.")
    before = start_point(of(form, "before").strip() or "latest", await session.broker_ms())
    offset = await session.client.purge(name, pattern, before=before)
    return f"Records of {name} that match {visible(pattern)} before offset {offset} are gone."


# --- mailboxes, services ----------------------------------------------------------------------


async def purge_mailbox(session: Session, form: Form) -> str:
    """Take all messages out of a mailbox that no reader has in hand."""
    name = of(form, "name")
    purged = await session.client.purge_mailbox(name)
    left = f"; {many(purged.held, 'message')} in a reader's hand stayed" if purged.held else ""
    return f"{many(purged.count, 'message')} of {name} purged{left}."


async def requeue(session: Session, form: Form) -> str:
    """Put dead letters back into their service's queue."""
    name = of(form, "name")
    marked = _marked(form)
    done = await session.client.requeue(name, marked)
    return f"{many(done, 'request')} back in the queue of {name}{_left(marked, done)}."


async def requeue_group(session: Session, form: Form) -> str:
    """Have members of a group get the records of dead letters again."""
    stream, name = of(form, "stream"), of(form, "name")
    marked = _marked(form)
    done = await session.client.requeue_group(stream, name, marked)
    return f"{many(done, 'record')} of {stream} again for {name}{_left(marked, done)}."


def _marked(form: Form) -> list[int]:
    """Return the numbers of the dead letters that a form marks; []: all. Raises NotUnderstood."""
    if of(form, "which") == "all":
        return []
    numbers = [whole_number(each, 0, _NUMBER_MAX, "A number") for each in form.get("number", ())]
    if not numbers:
        raise NotUnderstood("mark the ones to put back")
    return numbers


def _left(marked: list[int], done: int) -> str:
    """Return how many of the marked dead letters stay, as the end of a sentence; empty: none."""
    left = len(set(marked)) - done
    return f"; {left} of those marked stay, because they are gone or held" if left > 0 else ""


# --- cursors, groups, clients -----------------------------------------------------------------


async def reset_cursor(session: Session, form: Form) -> str:
    """Move a cursor to another place."""
    stream, name = of(form, "stream"), of(form, "name")
    start = start_point(of(form, "point"), await session.broker_ms())
    before = (await session.client.cursor_info(stream, name)).next
    offset = await session.client.cursor(stream, name).reset(start)
    return f"Cursor {name} of {stream} stands at {offset}; it stood at {before}."


async def reset_group(session: Session, form: Form) -> str:
    """Have a group stand at another place."""
    stream, name = of(form, "stream"), of(form, "name")
    start = start_point(of(form, "point"), await session.broker_ms())
    found = await session.client.reset_group(stream, name, start, force=of(form, "force") == "yes")
    before = int(found.more.get("before", 0))
    return f"Group {name} of {stream} stands at {found.next}; it stood at {before}."


async def remove_group(session: Session, form: Form) -> str:
    """Forget a group without members."""
    stream, name = of(form, "stream"), of(form, "name")
    await session.client.remove_group(stream, name)
    return f"Group {name} of {stream} is forgotten; the records stay."


async def kick(session: Session, form: Form) -> str:
    """End a client's link."""
    link = whole_number(of(form, "link"), 0, _NUMBER_MAX, "A link")
    await session.client.kick(link, of(form, "reason").strip())
    return f"Link {link} was ended; its client does not come back by itself."


async def reload(session: Session, form: Form) -> str:
    """Have the broker read its configuration and users anew."""
    counts = Counter(change.outcome for change in await session.client.reload_config())
    if not counts:
        return "The configuration was read anew: nothing differs from what is in force."
    return (
        f"The configuration was read anew: {counts['applied']} applied, {counts['refused']}"
        f" refused, {counts['restart']} left for a restart."
    )


ACTIONS: Final = {
    "copy": Action(copy, lambda form: url("stream", name=of(form, "name")), "begun"),
    "cancel-copy": Action(cancel_copy, lambda form: url("stream", name=of(form, "name"))),
    "publish": Action(publish, lambda form: url("stream", name=of(form, "name"))),
    "create-stream": Action(create_stream, lambda form: url("streams", prefix=of(form, "name"))),
    "edit-stream": Action(edit_stream, lambda form: url("stream", name=of(form, "name"))),
    "purge": Action(purge, lambda form: url("stream", name=of(form, "name"))),
    "trim": Action(trim, lambda form: url("stream", name=of(form, "name"))),
    "purge-mailbox": Action(purge_mailbox, lambda form: url("mailbox", name=of(form, "name"))),
    "requeue": Action(requeue, lambda form: url("service", name=of(form, "name"))),
    "requeue-group": Action(
        requeue_group, lambda form: url("group", stream=of(form, "stream"), name=of(form, "name"))
    ),
    "reset-cursor": Action(
        reset_cursor, lambda form: url("cursor", stream=of(form, "stream"), name=of(form, "name"))
    ),
    "reset-group": Action(
        reset_group, lambda form: url("group", stream=of(form, "stream"), name=of(form, "name"))
    ),
    "remove-group": Action(remove_group, lambda form: url("groups")),
    "reload": Action(reload, lambda form: url("settings")),
    "kick": Action(kick, lambda form: url("clients")),
}
"""Changes by their address below /console/do/."""
