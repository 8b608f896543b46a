"""Facts that a broker tells about itself, typed.

Owns the client's types for the answers to administration commands. The rule: a field that
this version does not know is kept in `more`, and one that a broker leaves out has a default.
Source: SPEC.md, section 4.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from malamute_protocol.errors import LocalProtocolError, RemoteProtocolError

Uuid: TypeAlias = bytes
"""16 bytes. An alias, because facts have a field that is called `bytes`."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Base: facts by name, and those without a field of their own in `more`."""

    more: dict[str, Any] = {}


class StreamFacts(Facts, frozen=True, kw_only=True):
    """One stream."""

    name: str = ""
    uuid: Uuid = b""
    generation: int = 0
    """Rises with each stream that is made under the same name after one was removed."""
    epoch: int = 0
    first: int = 0
    """Oldest offset that can be read."""
    tail: int = 0
    """Offset after the newest record."""
    bytes: int = 0
    aged_bytes: int = 0
    """Bytes of records past the stream's age or number that still take space, as far as known."""
    trimmed: int = 0
    """Offset before which all records were removed by `trim`; 0: none were."""
    purges: list[tuple[Any, int]] = []
    """Patterns on subjects whose records before an offset were removed by `purge`, as long as they
    take space."""
    settings: dict[str, Any] = {}
    subscriptions: int = 0

    @property
    def records(self) -> int:
        """Records that can be read."""
        return self.tail - self.first


class StreamVersions(Facts, frozen=True, kw_only=True, rename={"uuid": "stream"}):
    """One stream, as its writers are told of it."""

    name: str = ""
    uuid: Uuid = b""
    """Another stream that is made under the name later has another one."""
    keep: str = ""
    """Setting keep, by which the stream has keys; empty: it has none."""
    schemas: list[tuple[int, bytes]] = []
    """Id and Arrow schema message of each version of a typed stream's schema, oldest first."""


def told_to_writers(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return of an answer to STREAM_INFO what an older broker leaves out of STREAM_SCHEMAS.

    That is which stream it is, and whether and how it keeps keys, under the names that a newer
    broker's answer to STREAM_SCHEMAS has.
    """
    settings = info.get("settings", {})
    told = {key: settings[key] for key in ("keep", "body_kind") if settings.get(key)}
    return {"stream": info["uuid"], **told}


class BrokerFacts(Facts, frozen=True, kw_only=True):
    """The broker."""

    software: str = ""
    uuid: Uuid = b""
    epoch: int = 0
    counters: dict[str, int] = {}


class LinkFacts(Facts, frozen=True, kw_only=True):
    """One link of a client."""

    link: int = 0
    identity: str = ""
    software: str = ""
    state: str = ""
    subscriptions: int = 0


class UserFacts(Facts, frozen=True, kw_only=True):
    """One user of a broker, and the permissions in force."""

    user: str = ""
    """Name; `*` stands for all who have no entry of their own."""
    credential: str = ""
    """password, key, or empty: the name has permissions only."""
    templates: list[str] = []
    """Templates of identities beside `<user>-{n}`."""
    own: bool = False
    """Whether the user has an entry of permissions; otherwise those of `*` hold."""
    grant: dict[str, Any] = {}
    """Verbs with their names, or True, without what is empty; `everything`: no lists are set."""
    may: bool = False
    """Whether the user may do what was asked."""
    subjects: list[str] = []
    """Subjects under which alone; none: under any."""
    namespace: str = ""
    """Namespace of the user; empty: none."""


RATES: Final = ("publish_bytes_s", "messages_s", "links_s")
"""Quotas that bound a rate: nothing of them is held."""


class NamespaceFacts(Facts, frozen=True, kw_only=True):
    """One namespace of a broker, and what its users hold together."""

    namespace: str = ""
    """Name."""
    prefix: str = ""
    """Beginning of the names of its streams, mailboxes and services."""
    users: list[str] = []
    """Patterns of the names of its users."""
    held: dict[str, int] = {}
    """Amounts by resource, without what is 0."""
    quotas: dict[str, int] = {}
    """Bounds by resource, where there are any."""
    messages_in: int = 0
    """Records, messages and requests taken from its users since the broker was started."""
    bytes_in: int = 0
    """Bytes of these."""
    refused: dict[str, int] = {}
    """Times that its users met a quota since then, by resource; `rate`: they sent too fast."""
    default_stream: dict[str, Any] = {}
    """Settings of streams that first use creates under the prefix."""
    default_mailbox: dict[str, Any] = {}
    default_service: dict[str, Any] = {}


class ReloadedSetting(NamedTuple):
    """A setting that differed, or was wrong, when a broker read its configuration anew."""

    key: str
    outcome: str
    """`applied`, `refused` (the old value stays in force), or `restart`: it needs one."""
    why: str


class SettingInForce(NamedTuple):
    """A setting of a running broker."""

    key: str
    value: Any
    origin: str
    """Where the value comes from, as `malamute config show` says it; `program`: the program that
    embeds the broker gave it."""

    @property
    def is_default(self) -> bool:
        """Whether the value is the default, which is written nowhere."""
        return self.origin == "default"


class SettingsInForce(NamedTuple):
    """The settings of a running broker, and what its last reload did."""

    settings: list[SettingInForce]
    """By name; none: the broker is an earlier one that does not tell them."""
    reloaded_ms: int
    """When the configuration was last read anew; 0: not since the start."""
    changes: list[ReloadedSetting]
    """Outcome of that reload for each setting that differed or was wrong."""

    def change_of(self, key: str) -> ReloadedSetting | None:
        """Return what the last reload did with a setting, or with the one that it is a part of.

        None: the reload did not touch it.
        """
        for change in self.changes:
            # With the dots `log.level` is a part of `log`, and `logs` is not.
            if f"{key}.".startswith(f"{change.key}."):
                return change
        return None


class Split(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a planned read: offsets [from_offset, to_offset) and its bytes in the journal."""

    from_offset: int
    to_offset: int
    bytes: int


class ReadPlan(Facts, frozen=True, kw_only=True, rename={"from_offset": "from", "to_offset": "to"}):
    """A bounded read, planned by the broker from its index."""

    stream: Uuid = b""
    """UUID of the stream."""
    epoch: int = 0
    first: int = 0
    trimmed: int = 0
    """Offset before which a TRIM removed all records; 0: none."""
    tail: int = 0
    from_offset: int = 0
    to_offset: int = 0
    splits: list[Split] = []
    records: int = 0
    bytes: int = 0
    unbroken: list[tuple[int, int]] = []
    """Parts [from, to) of which a read brings every record, as far as the broker's index knows;
    none of a read that selects."""
    rewound: bool = False


class MailboxFacts(Facts, frozen=True, kw_only=True):
    """One mailbox."""

    name: str = ""
    messages: int = 0
    bytes: int = 0
    oldest_ms: int = 0
    """When the oldest message was put that waits for no time; 0: there is none."""
    readers: int = 0
    held: int = 0
    """Messages that a reader has in hand."""
    delayed: int = 0
    """Messages that are not due yet."""
    settings: dict[str, Any] = {}
    created_ms: int = 0
    by: str = ""


class RecordOrigin(Facts, frozen=True, kw_only=True):
    """The record of a group that became a dead letter."""

    stream: str = ""
    group: str = ""
    offset: int = 0
    epoch: int = 0
    """Epoch of the log in which the offset was the record's."""
    attempts: int = 0


class PeekedMail(Facts, frozen=True, kw_only=True):
    """One message, looked at where it lies."""

    number: int = 0
    sender: str = ""
    at_ms: int = 0
    """Time at which the message was put."""
    bytes: int = 0
    """Size of the body; of a list, of the blobs in it."""
    subject: str = ""
    fields: dict[str, str] = {}
    priority: int = 0
    attempts: int = 0
    held: bool = False
    not_before_ms: int = 0
    expires_at_ms: int = 0
    why: str = ""
    origin: RecordOrigin | None = None
    """The record of a group that a dead letter was; None: it was none."""
    body: Any = b""
    """As much of it as was asked for; of a list of blobs, of their MessagePack array."""


class Purged(Facts, frozen=True, kw_only=True):
    """Counts of the messages of a mailbox that was emptied."""

    count: int = 0
    """Taken out."""
    held: int = 0
    """Left, because a reader has them in hand."""


class WorkerFacts(Facts, frozen=True, kw_only=True):
    """A worker or absent holder that has requests of a service in hand."""

    holder: str = ""
    link: int = 0
    """0: it is not there; the requests wait for it, or for the end of their lease."""
    held: int = 0
    received: int = 0
    since_ms: int = 0
    lease_until_ms: int = 0
    attempts: int = 0
    """The most that one of them was handed out."""


class PeekedRequest(Facts, frozen=True, kw_only=True):
    """One request, looked at where it waits."""

    number: int = 0
    subject: str = ""
    sender: str = ""
    """The requester."""
    at_ms: int = 0
    """Time at which the request was put."""
    deadline_ms: int = 0
    """Time at which it is given up; 0: never."""
    priority: int = 0
    attempts: int = 0
    """Hand-outs so far."""
    state: str = ""
    """waiting, delayed (until not_before_ms) or held (by a worker)."""
    not_before_ms: int = 0
    holder: str = ""
    """Worker that has it in hand."""
    link: int = 0
    """Link of that worker; 0: it is not there."""
    since_ms: int = 0
    lease_until_ms: int = 0


class PutOffFacts(Facts, frozen=True, kw_only=True):
    """Why a ring takes nothing of a committed transaction for now."""

    stream: str = ""
    """Stream whose ring it is; empty: the ring of the change log."""
    code: str = ""
    """Code of the ring's refusal, as `full` or `journal_failed`."""
    reason: str = ""
    since_ms: int = 0
    """Time from which on the ring has refused; a broker that starts counts anew."""
    records: int = 0
    """Records that wait for the ring."""


class TransactionFacts(Facts, frozen=True, kw_only=True):
    """One transaction that is open, or committed and being appended to its streams."""

    transaction: Uuid = b""
    """Id, which a client draws by itself."""
    identity: str = ""
    """Client that began it: its identity, or `~` and its session."""
    by: str = ""
    state: str = ""
    """open, committing, committed or ending."""
    since_ms: int = 0
    touched_ms: int = 0
    """Time of the newest batch that was staged."""
    timeout_ms: int = 0
    deadline_ms: int = 0
    """Time at which the broker rolls it back if it is open."""
    batches: int = 0
    """Batches that are staged and not in their streams."""
    records: int = 0
    bytes: int = 0
    streams: list[str] = []
    """Streams that they are for; of many, some."""
    committed_ms: int = 0
    """Time of the commit; 0: it is open."""
    put_off: list[PutOffFacts] = []
    """Rings that take nothing of it for now, and why."""


class ServiceFacts(Facts, frozen=True, kw_only=True):
    """One service queue."""

    name: str = ""
    waiting: int = 0
    held: int = 0
    delayed: int = 0
    bytes: int = 0
    oldest_ms: int = 0
    """When the oldest of the waiting requests was put; 0: none waits."""
    offers: int = 0
    credit: int = 0
    """Requests that the offers would take now."""
    attempts: list[tuple[int, int]] = []
    """(times handed out, how many requests)."""
    workers: list[WorkerFacts] = []
    dead: int = 0
    """Dead letters in all mailboxes of `dead_in`."""
    dead_letters: str = ""
    """Mailbox that new dead letters go to; where it takes none, the default one gets them."""
    dead_in: dict[str, int] = {}
    """Mailbox -> dead letters that lie in it, where there are some; empty from an older broker."""
    settings: dict[str, Any] = {}
    created_ms: int = 0
    by: str = ""


class CursorFacts(Facts, frozen=True, kw_only=True):
    """One cursor."""

    stream: str = ""
    cursor: str = ""
    next: int = 0
    first: int = 0
    """Oldest offset of the stream that can be read."""
    tail: int = 0
    lag: int = 0
    """Records from `next` to the tail."""
    moved_ms: int = 0
    by: str = ""
    pinned: bool = False
    pinned_bytes: int = 0
    settings: dict[str, Any] = {}


class MemberFacts(Facts, frozen=True, kw_only=True):
    """One member of a group."""

    identity: str = ""
    link: int = 0
    held: int = 0
    since_ms: int = 0
    oldest_ms: int = 0
    """Time at which the oldest record that the member holds was delivered; 0: none."""
    lease_ms: int = 0
    """Silence about a record after which another member gets it; 0: none."""
    aside: bool = False
    """Whether it is given nothing, since a lease of it has ended."""


class GroupFacts(Facts, frozen=True, kw_only=True):
    """One group."""

    stream: str = ""
    group: str = ""
    kind: str = ""
    pattern: list[Any] = []
    next: int = 0
    tail: int = 0
    lag: int = 0
    done: int = 0
    """Offsets that are done ahead of `next`."""
    moved_ms: int = 0
    by: str = ""
    attempts: list[tuple[int, int]] = []
    """(attempts that have ended, how many records); where the settings bound attempts."""
    dead: int = 0
    """Dead letters in all mailboxes of `dead_in`."""
    dead_letters: str = ""
    """Mailbox that new dead letters go to; where it takes none, the default one gets them."""
    dead_in: dict[str, int] = {}
    """Mailbox -> dead letters that lie in it, where there are some; empty from an older broker."""
    settings: dict[str, Any] = {}
    members: list[MemberFacts] = []


Kind = TypeVar("Kind", bound=Facts)


def facts(kind: type[Kind], value: Mapping[str, Any]) -> Kind:
    """Return an answer's fields as facts of a kind; those that it does not know are in `more`.

    Raises RemoteProtocolError: a known one is of another type; LocalProtocolError: the answer is a
    listing, for which a name with `*` at its end asks, or no name of a stream.
    """
    if "entries" in value:
        raise LocalProtocolError(
            "bad_name", "an empty name, or one that ends in *, names no single thing"
        )
    known = _known(kind)
    plain = {name: fact for name, fact in value.items() if name in known}
    plain["more"] = {name: fact for name, fact in value.items() if name not in known}
    try:
        return msgspec.convert(plain, kind, strict=False)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(
            "malformed", f"the facts of a {kind.__name__}: {error}"
        ) from error


@cache
def _known(kind: type[Facts]) -> frozenset[str]:
    """Names of the fields on the wire; to ask msgspec takes 0.1 ms."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def fact_list(kind: type[Kind], value: Mapping[str, Any], name: str) -> list[Kind]:
    """Return the list of facts that an answer has under `name`. Raises as facts()."""
    entries = value.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RemoteProtocolError("malformed", f"the answer has no list of maps {name!r}")
    return [facts(kind, entry) for entry in entries]


def place_of(entry: Any) -> Any:
    """Return what names the last entry of a page: the next page is asked for after it."""
    match entry:
        case CursorFacts():
            return f"{entry.stream}/{entry.cursor}"
        case GroupFacts():
            return f"{entry.stream}/{entry.group}"
        case TransactionFacts():
            return entry.transaction
        case LinkFacts():
            return entry.link
        case UserFacts():
            return entry.user
        case NamespaceFacts():
            return entry.namespace
    return entry.name
