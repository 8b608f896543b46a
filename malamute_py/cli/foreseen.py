"""Refusals of an import that can be foreseen, for its dry run.

Owns the checks. The rules: what the broker checks of settings is checked by the broker's own code;
what this user may do is asked of the broker, which decides; nothing is changed. Not foreseen are
bounds of the broker (quotas, counts, bytes) and things that this user is not told of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from malamute_protocol.address import name_fault
from malamute_protocol.errors import BrokerRefused
from malamute_py.cli.looking import TOLD_TO

if TYPE_CHECKING:
    from malamute_py.cli.definitions import Change, Definitions
    from malamute_py.client.sync.client import SyncClient

_BYTES_MAX: Final = 4 << 20
"""Largest bound of one thing's settings that any broker may have; this broker's is not told."""
_CREATES: Final = {
    "streams": ("create",), "mailboxes": ("manage_queues", "create_mailbox"),
    "services": ("manage_queues", "create_service"),
}  # fmt: skip
"""Kind -> permissions that making one needs, all of them."""
_EDITS: Final = {
    "streams": "manage_streams", "mailboxes": "manage_queues", "services": "manage_queues",
    "groups": "manage_streams",
}  # fmt: skip
"""Kind -> permission that changing settings needs."""


def refusal(client: SyncClient, change: Change, there: Definitions, coming: set[str]) -> str:
    """Return why the broker would refuse a change; empty: nothing that can be asked is against it.

    there: what the broker has. coming: streams that the import makes before.
    """
    try:
        _check_settings(change, there)
    except BrokerRefused as error:
        return str(error)
    stream = change.name[0]  # A name is a tuple, in which a cursor's stream comes first.
    if change.kind == "cursors" and (stream,) not in there["streams"] and stream not in coming:
        return f"unknown_stream: there is no stream '{stream}', or you are not told of it"
    for actions, name in _needs(change, there):
        try:
            allowed = any(client.may(action, name) for action in actions)
        except BrokerRefused:
            continue  # The broker is an older one and does not tell: nothing is foreseen.
        if not allowed:
            return f"forbidden: it needs the permission {' or '.join(actions)} on '{name}'"
    return ""


def may_be_there(client: SyncClient, change: Change) -> bool:
    """Whether the broker may have a stream that is to be made, of which this user is not told.

    The import would then be refused with `stream_exists` if its settings differ. Mailboxes and
    services are told to every user who may make them, so False for them.
    """
    if (change.kind, change.action) != ("streams", "create"):
        return False
    try:
        return not any(client.may(action, change.name[0]) for action in TOLD_TO["streams"])
    except BrokerRefused:
        return False  # A broker of an earlier version does not tell.


def _needs(change: Change, there: Definitions) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what a change needs: actions of which one is enough, and the name they are on."""
    name, settings = change.name[0], change.settings
    if change.kind == "cursors":
        # A reader may have a cursor; one that keeps records of the log is for the manager alone.
        pinned = "pin" in settings or there["cursors"].get(change.name, {}).get("pin")
        yield ("manage_streams",) if pinned else ("read", "manage_streams"), name
        return
    needed = _CREATES[change.kind] if change.action == "create" else (_EDITS[change.kind],)
    for action in needed:
        yield (action,), name
    if letters := settings.get("dead_letters"):  # The mailbox that dead letters go to.
        yield ("dead_letters",), letters


def _check_settings(change: Change, there: Definitions) -> None:
    """Check names and settings with the broker's own code. Raises BrokerRefused.

    Reading the settings checks each one; after it come the rules about old and new ones together.
    """
    from malamute_py.changelog import settings as kinds
    from malamute_py.changelog.declared import declared, evolved

    for part in change.name:
        if fault := name_fault(part):
            raise BrokerRefused("bad_name", fault)
    has = there[change.kind].get(change.name)
    if change.kind == "streams":
        old = None if has is None else kinds.settings_of(_plain(has), _BYTES_MAX)
        wanted = kinds.settings_of(_plain(change.settings), _BYTES_MAX, old)
        if old is None:
            declared(wanted)  # Refuses a schema that no stream may have.
            return
        # Refuses a schema that old records could not be read with.
        evolved(old, wanted, _BYTES_MAX)
        for name in kinds.FIXED_SETTINGS:
            if getattr(wanted, name) != getattr(old, name):
                raise BrokerRefused("bad_setting", f"{name} cannot be changed")
        if old.body_kind and wanted.body_kind != old.body_kind:
            raise BrokerRefused("bad_setting", "body_kind cannot be changed once it is settled")
        return
    kind: Any = {
        "mailboxes": kinds.MailboxSettings, "services": kinds.ServiceSettings,
        "cursors": kinds.CursorSettings, "groups": kinds.GroupSettings,
    }[change.kind]  # fmt: skip
    before = None if has is None else kinds.queue_settings(kind, dict(has), _BYTES_MAX, None)
    after = kinds.queue_settings(kind, change.settings, _BYTES_MAX, before)
    if before is not None and getattr(after, "memory", 0) != getattr(before, "memory", 0):
        raise BrokerRefused("bad_setting", "memory cannot be changed")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a stream as the broker has them: a file has a schema as hexadecimal."""
    schema = settings.get("schema")
    return {**settings, "schema": bytes.fromhex(schema)} if schema else dict(settings)
