"""The broker's configuration: every key, its default and what it may be.

Owns the sections below and how they are filled: the file, then MALAMUTE_* variables, then the
command line, the later over the earlier. The rule: an unknown key is an error that names the
nearest one, and is never ignored; units are part of the name; a default that the core or the
protocol checks is written where it is checked (broker/limits.py, malamute_protocol/limits.py) and
only named here. A number of bytes or a time may be a text with its unit ("4GiB", "5s"). Source:
deploy/malamute.toml explains each key (a test compares the two).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_protocol.address import REPLICA, name_fault, template_fault
from malamute_protocol.limits import BatchRecords, Limits
from malamute_py import units
from malamute_py.broker.limits import BrokerSettings
from malamute_py.sections import ConfigError, HttpSection, check_http

PUBLIC_WORDS: Final = "I understand that anyone can read and write"
"""Text that an operator has to write to open a broker to a network without authentication."""

ENVIRONMENT_PREFIX: Final = "MALAMUTE_"

_CORE: Final = BrokerSettings()
"""The bounds that the core has by default."""

MaybeCount = Annotated[int, msgspec.Meta(ge=0)]
"""A count; 0: there is no bound of its own."""
Count = Annotated[int, msgspec.Meta(ge=1)]
"""A count of at least one."""
Bytes = Annotated[int, msgspec.Meta(ge=1)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1)]
MaybeMilliseconds = Annotated[int, msgspec.Meta(ge=0)]
"""A duration; 0: never."""
Names = list[str]


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: a misspelt key is refused."""


class Authentication(Section, frozen=True):
    """Credentials of clients over tcp and ipc; inproc is the same process."""

    mechanism: Literal["none", "plain", "curve"] = "none"
    ipc_without: bool = False
    """Value that leaves ipc endpoints to the permissions of their socket files."""
    users: dict[str, str] = {}
    """plain only: name -> scrypt hash, as `malamute user hash` or hash_password() makes it."""
    users_file: str = ""
    """A file that ends in .toml, with users, permissions and quotas as `malamute user` writes them;
    or, plain only, one of lines `name hash`. Beside what the configuration has."""
    hash_threads: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """plain only: passwords that are hashed at one time, 50 ms and 16 MiB each."""
    server_key_file: str = ""
    """curve only: the broker's secret key, 40 characters of Z85; made on first use."""
    clients: dict[str, str] = {}
    """curve only: identity -> public key, 40 characters of Z85."""
    identities: dict[str, Names] = {}
    """User -> templates of the identities that its replicas may have beside `<user>-{n}`."""


class NamedVerbs(Section, frozen=True):
    """Verbs on named streams, mailboxes and services; in names `*` stands for any characters."""

    read: Names = []
    """Streams that the identity may read, with their cursors and groups."""
    write: Names = []
    """Streams that the identity may publish to, and create by first use."""
    create: Names = []
    """Streams, mailboxes and services that the identity may create without using them."""
    trim: Names = []
    """Streams whose records the identity may remove."""
    send: Names = []
    """Mailboxes that the identity may send to, and create by first use."""
    receive: Names = []
    """Mailboxes that the identity may read beside its own, which has its name."""
    purge: Names = []
    """Mailboxes that the identity may empty."""
    request: Names = []
    """Services that the identity may ask, and create by first use."""
    work: Names = []
    """Services that the identity may offer."""
    manage_streams: Names = []
    """Streams that the identity may create, edit, trim and remove, with cursors and groups."""
    manage_queues: Names = []
    """Mailboxes and services that the identity may create, edit, empty and remove."""


class Denied(NamedVerbs, frozen=True):
    """Names that a verb does not reach, whatever else is granted."""

    replay: Names = []
    """Streams that the identity reads from now on only; their history is a gap."""


class Grant(NamedVerbs, frozen=True):
    """Permissions of one identity."""

    write_subjects: dict[str, Names] = {}
    """Stream -> subjects under which the identity may publish to it; `write` has no such bound."""
    manage_clients: bool = False
    """True: the identity may list the links and end them."""
    manage_users: bool = False
    """True: the identity may have the broker read its configuration anew."""
    admin: bool = False
    """True: everything that is administration, on every name."""
    deny: Denied = Denied()


class LinksSection(Section, frozen=True):
    """Bounds of connections: how many, their silence, and the bytes that wait for each."""

    links_max: Count = _CORE.links_max
    replicas_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = _CORE.replicas_max
    replica_grace_ms: MaybeMilliseconds = _CORE.replica_grace_ms
    connections_max: Count = 16_384
    address_connections_max: Count = 12_288
    user_connections_max: Count = 12_288
    greetings_max: Count = 4_096
    address_greetings_max: Count = 2_048
    greeting_ms: MaybeMilliseconds = 5_000
    heartbeat_ms: Milliseconds = _CORE.heartbeat_ms
    heartbeat_min_ms: Milliseconds = _CORE.heartbeat_min_ms
    heartbeat_max_ms: Milliseconds = _CORE.heartbeat_max_ms
    expiry_beats: Annotated[int, msgspec.Meta(ge=2)] = _CORE.expiry_beats
    window_bytes: Bytes = _CORE.window_bytes
    outbox_commands_max: Count = _CORE.outbox_commands_max
    pending_bytes_max: Bytes = 32 << 20
    queries_max: Count = _CORE.link_queries_max
    handshake_ms: Milliseconds = 5_000
    hello_ms: Milliseconds = 10_000
    keepalive_ms: Milliseconds = 30_000
    backlog: Count = 1_024
    send_messages_max: Count = 1_000
    ipv6: bool = False


class LimitsSection(Section, Limits, frozen=True):
    """Sizes and counts of what a client may send; beyond them it is refused `too_large`.

    Those of one message, batch and record are the protocol's, with its defaults.
    """

    partial_message_bytes_max: Bytes = 48 << 20
    amplified_bytes_max: Bytes = 48 << 20
    unread_bytes_max: Bytes = 512 << 20
    unread_share_bytes_max: Bytes = 256 << 20

    def of_messages(self) -> Limits:
        """Return the bounds of one message, batch and record, which the protocol's code checks."""
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


class StreamsSection(Section, frozen=True):
    """Bounds of streams, their subscriptions and producers: beyond a count, `limit`."""

    auto_create: bool = _CORE.auto_create
    default: dict[str, Any] = {}
    """Settings of streams that first use creates, as in CREATE_STREAM."""
    streams_max: Count = _CORE.streams_max
    rings_max: Count = _CORE.rings_max
    rings_bytes_max: Bytes = _CORE.rings_bytes_max
    rings_memory_bytes_max: Bytes = _CORE.rings_memory_bytes_max
    settings_bytes_max: Bytes = _CORE.settings_bytes_max
    all_settings_bytes_max: Bytes = _CORE.all_settings_bytes_max
    link_subscriptions_max: Count = _CORE.link_subscriptions_max
    """Subscriptions, inboxes, offers and memberships that one link may have, all together."""
    subscriptions_max: Count = _CORE.subscriptions_max
    pattern_bytes_max: Bytes = _CORE.pattern_bytes_max
    all_patterns_bytes_max: Bytes = _CORE.all_patterns_bytes_max
    producers_max: Count = _CORE.producers_max
    producer_streams_max: Count = _CORE.producer_streams_max
    producer_places_max: Count = _CORE.producer_places_max
    last_per_subject_max: Count = _CORE.last_per_subject_max
    keys_max: Count = _CORE.keys_max
    all_keys_bytes_max: Bytes = _CORE.all_keys_bytes_max
    deleted_keys_ms: Milliseconds = _CORE.deleted_keys_ms
    retention_ms: Milliseconds = _CORE.retention_ms
    retry_ms: Milliseconds = _CORE.retry_ms


class MemorySection(Section, frozen=True):
    """Memory that the broker may use for streams and for peers that read slowly."""

    hot_bytes: Bytes = _CORE.hot_bytes
    unsynced_bytes_max: Bytes = _CORE.unsynced_bytes_max
    outstanding_bytes: Bytes = _CORE.outstanding_bytes
    share_min_bytes: Bytes = _CORE.share_min_bytes
    share_max_bytes: Bytes = _CORE.share_max_bytes
    quantum_bytes: Bytes = _CORE.quantum_bytes
    step_bytes: Bytes = _CORE.step_bytes
    reads_max: Count = _CORE.reads_max


class JournalSection(Section, frozen=True):
    """Settings of ring `main`, and of rings that streams ask for unless they say otherwise."""

    segment_bytes: Bytes = 64 << 20
    ring_bytes: Bytes = 4 << 30
    memory_ring_bytes: Bytes = 1 << 30
    full: Literal["overwrite", "refuse"] = "overwrite"
    index_interval_bytes: Annotated[int, msgspec.Meta(ge=0)] = 16 << 10
    distinct_headers_max: Count = 16_384
    index_memory_bytes: Bytes = 32 << 20
    pin_bytes_max: Bytes = 1 << 30
    open_files_max: Count = 32
    mapped_reads: bool = False


class MailboxesSection(Section, frozen=True):
    """Bounds of mailboxes: a full one answers `wait`, never drops; too many of them `limit`."""

    mailboxes_max: Count = _CORE.mailboxes_max
    default: dict[str, Any] = {}
    """Settings of mailboxes that first use creates, as in EDIT_MAILBOX."""
    messages_max: Count = _CORE.mailbox_messages_max
    bytes_max: Bytes = _CORE.mailbox_bytes_max
    all_bytes_max: Bytes = _CORE.mail_bytes_max
    memory_bytes_max: Bytes = _CORE.mail_memory_bytes_max
    temporary_bytes_max: Bytes = _CORE.temporary_bytes_max
    hot_bytes: Bytes = _CORE.mail_hot_bytes
    read_bytes: Bytes = _CORE.mail_read_bytes
    reads_max: Count = _CORE.mail_reads_max
    inbox_read_bytes: Bytes = _CORE.inbox_read_bytes
    inbox_reads: Count = _CORE.inbox_reads
    peek_bytes_max: Bytes = _CORE.peek_bytes_max


class ServicesSection(Section, frozen=True):
    """Bounds of service queues: beyond a count `limit`, beyond a queue's own bounds `wait`."""

    services_max: Count = _CORE.services_max
    default: dict[str, Any] = {}
    """Settings of service queues that first use creates, as in EDIT_SERVICE."""
    requests_max: Count = _CORE.service_requests_max
    bytes_max: Bytes = _CORE.service_bytes_max
    all_bytes_max: Bytes = _CORE.all_requests_bytes_max
    rows_max: BatchRecords = _CORE.request_rows_max
    subjects_max: Count = _CORE.request_subjects_max
    offers_max: Count = _CORE.offers_max
    lease_ms: Milliseconds = _CORE.lease_ms
    lease_min_ms: Milliseconds = _CORE.lease_min_ms
    lease_max_ms: Milliseconds = _CORE.lease_max_ms
    attempts_max: Count = _CORE.attempts_max
    backoff_ms: MaybeMilliseconds = _CORE.backoff_ms
    backoff_max_ms: Milliseconds = _CORE.backoff_max_ms


class GroupsSection(Section, frozen=True):
    """Bounds of cursors and consumer groups: beyond a count `limit`."""

    cursors_max: Count = _CORE.cursors_max
    pin_bytes_max: Bytes = _CORE.pin_bytes_max
    groups_max: Count = _CORE.groups_max
    members_max: Count = _CORE.group_members_max
    window_records: Count = _CORE.group_window_records
    hold_ms: Milliseconds = _CORE.group_hold_ms
    hold_max_ms: Milliseconds = _CORE.group_hold_max_ms
    flush_ms: Milliseconds = _CORE.group_flush_ms


class TransactionsSection(Section, frozen=True):
    """Bounds of open transactions: beyond a count, or the bytes of all, `limit`."""

    transactions_max: Count = _CORE.transactions_max
    bytes_max: Bytes = _CORE.transaction_bytes_max
    batches_max: Count = _CORE.transaction_batches_max
    all_bytes_max: Bytes = _CORE.staged_bytes_max
    timeout_ms: Milliseconds = _CORE.transaction_timeout_ms
    timeout_max_ms: Milliseconds = _CORE.transaction_timeout_max_ms


class QuotasSection(Section, frozen=True):
    """Quotas of one identity in what all share: beyond them `limit`, or `wait` if it passes.

    The defaults leave others at least half of a bound over all, or a sixth of it (links).
    """

    links: MaybeCount = 10_000
    streams: MaybeCount = 10_000
    settings_bytes: MaybeCount = 4 << 20
    rings: MaybeCount = 128
    rings_bytes: MaybeCount = 128 << 30
    rings_memory_bytes: MaybeCount = 2 << 30
    mailboxes: MaybeCount = 500_000
    mail_bytes: MaybeCount = 128 << 30
    mail_memory_bytes: MaybeCount = 128 << 20
    services: MaybeCount = 5_000
    request_bytes: MaybeCount = 4 << 30
    request_memory_bytes: MaybeCount = 128 << 20
    cursors: MaybeCount = 50_000
    groups: MaybeCount = 5_000
    transactions: MaybeCount = 500
    staged_bytes: MaybeCount = 2 << 30
    subscriptions: MaybeCount = 100_000
    pattern_bytes: MaybeCount = 64 << 20
    offers: MaybeCount = 50_000
    questions: MaybeCount = 5_000
    publish_bytes_s: MaybeCount = 0
    messages_s: MaybeCount = 0
    identities: dict[str, dict[str, MaybeCount]] = {}
    """Quotas of identities by name, in which `*` stands for any characters."""


class NamespaceSection(Section, frozen=True):
    """A tenant: a prefix of names, and users who reach nothing outside of it."""

    prefix: str = ""
    """Beginning of the names of its streams, mailboxes and services; empty: the name and a dot."""
    users: Names = []
    """Its users, in whose names `*` stands for any characters; none: all with the prefix."""
    quotas: dict[str, MaybeCount] = {}
    """Bounds of what its users have together, as in [quotas]; 0: none."""
    default_stream: dict[str, Any] = {}
    """Settings of streams that first use creates under the prefix, over [streams] default."""
    default_mailbox: dict[str, Any] = {}
    default_service: dict[str, Any] = {}

    def prefix_of(self, name: str) -> str:
        """Return the prefix of a namespace of this name."""
        return self.prefix or f"{name}."


class CheckpointSection(Section, frozen=True):
    """Settings of the tables of mailboxes, services, cursors and groups, which follow ring main."""

    interval_ms: Milliseconds = 5_000
    log_bytes: Bytes = 64 << 20
    idle_ms: Milliseconds = 60_000
    force_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 75
    pressure_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 90
    retry_ms: Milliseconds = 1_000
    retry_max_ms: Milliseconds = 30_000
    stall_ms: MaybeMilliseconds = 30_000
    stop_ms: MaybeMilliseconds = 10_000
    lost_changes: Literal["refuse", "accept"] = "refuse"


class LoopSection(Section, frozen=True):
    """How much a turn of the loop takes from the sockets before it is answered."""

    burst_messages: Count = 256
    burst_bytes: Bytes = 2 << 20
    burst_commands: Count = 1_024
    share_commands: Count = 64
    turn_us: Annotated[int, msgspec.Meta(ge=100)] = 2_500
    guard_ms: Milliseconds = 25
    matching_us: Annotated[int, msgspec.Meta(ge=100)] = _CORE.matching_share // 1_000
    drain_ms: MaybeMilliseconds = 2_000


class LogSection(Section, frozen=True):
    """Settings of the log, which goes to standard error."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    form: Literal["auto", "console", "json"] = "auto"


class Config(Section, frozen=True):
    """A whole configuration; the defaults are a broker for this machine only."""

    data_directory: str = "malamute-data"
    """Directory of all data; empty: everything is in memory, gone when the broker stops."""
    listen: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_ENDPOINT])
    listen_public_without_authentication: str = ""
    authentication: Authentication = Authentication()
    permissions: dict[str, Grant] = {}
    links: LinksSection = LinksSection()
    limits: LimitsSection = LimitsSection()
    streams: StreamsSection = StreamsSection()
    mailboxes: MailboxesSection = MailboxesSection()
    services: ServicesSection = ServicesSection()
    groups: GroupsSection = GroupsSection()
    transactions: TransactionsSection = TransactionsSection()
    quotas: QuotasSection = QuotasSection()
    namespaces: dict[str, NamespaceSection] = {}
    memory: MemorySection = MemorySection()
    journal: JournalSection = JournalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    loop: LoopSection = LoopSection()
    http: HttpSection = HttpSection()
    log: LogSection = LogSection()


FILES: Final = (
    "authentication.users_file", "authentication.server_key_file", "http.token_file",
)  # fmt: skip
"""Settings that name a file; in a configuration file it is looked for beside that."""


def load(
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Read the file, apply the variables, then the overrides (dotted names).

    environment: usually os.environ; MALAMUTE_JOURNAL_RING_BYTES is journal.ring_bytes.
    Raises ConfigError naming the key and where it was written.
    """
    table: dict[str, Any] = {}
    if path is not None:
        table = read_file(Path(path))
        try:
            # The file is checked by itself: once variables and overrides are in it, no fault could
            # be attributed to it.
            typed(table)
        except ConfigError as error:
            raise ConfigError(error.key, f"{error.why} (in {path})") from None
    for name, text in sorted((environment or {}).items()):
        key = key_of_variable(name)
        if key is not None:
            put(table, key.split("."), parse_value(key, text))
    for key, value in (overrides or {}).items():
        put(table, path_of_override(key), read_override(key, value))
    return from_table(table)


def path_of_override(key: str) -> list[str]:
    """Take apart the dotted name of a setting on the command line. Raises ConfigError."""
    if key.partition(".")[0] not in ("permissions", "namespaces") and key not in KEYS:
        raise _unknown(key)
    return key.split(".")


def read_override(key: str, value: Any) -> Any:
    """Read the value of an override, which may be a text as on the command line."""
    return parse_value(key, value) if isinstance(value, str) else value


def from_table(table: Mapping[str, Any]) -> Config:
    """Check a table of tables and fill in the defaults; raises ConfigError."""
    config = typed(table)
    for fault in wrong_in_combination(config):
        raise fault
    return config


def typed(table: Mapping[str, Any]) -> Config:
    """Check each value of a table of tables by itself; raises ConfigError."""
    for fault in _key_faults(table):
        raise fault
    try:
        return msgspec.convert(_in_units(table), Config, strict=True)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None


def _in_units(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the table with numbers where sizes and times are texts. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (key in _SECTIONS or key.startswith(_WITH_UNITS)):
            value = _in_units(value, f"{key}.")
        elif isinstance(value, str) and (KEYS.get(key, str) is None or key.startswith(_WITH_UNITS)):
            value = _number(key, value)
        found[name] = value
    return found


def _number(key: str, text: str) -> Any:
    """Read a size or a time; other texts stay what they are, for convert() to judge."""
    try:
        number = units.in_unit_of(key.rpartition(".")[2], text)
    except ValueError as error:
        raise ConfigError(key, str(error)) from None
    return text if number is None else number


def parse_value(key: str, text: str) -> Any:
    """Read a key's value: a TOML value, or the text itself where text fits.

    A list may be written with commas: tcp://127.0.0.1:9797,ipc:///run/malamute.sock; a number of
    bytes with its unit: 64MiB.
    """
    kind = KEYS.get(key)
    if kind is str:
        return text
    if kind is list:
        if text.lstrip().startswith("["):
            return _toml_value(key, text)
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(kind, tuple):
        return text  # One of a few words; convert() names them when it is none.
    if kind is None and not text.lstrip().startswith(("-", "+")):
        number = _number(key, text.replace("_", ""))
        if not isinstance(number, str):
            return number
    return _toml_value(key, text)


def _toml_value(key: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(key, f"{text!r} is neither a number, true or false, nor a list") from None


def read_file(path: Path) -> dict[str, Any]:
    """Read a TOML file, with the FILES that it names looked for beside it.

    Raises ConfigError with the file as its key.
    """
    try:
        with path.open("rb") as file:
            return _beside(path.parent, tomllib.load(file))
    except FileNotFoundError:
        raise ConfigError(
            str(path), "there is no such file; `malamute deploy config` writes an example"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"not valid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"not UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None


def _beside(folder: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose paths of files begin at `folder`, its own, `/` or a home."""
    for key in FILES:
        section, _, name = key.partition(".")
        inner = table.get(section)
        if isinstance(inner, dict) and isinstance(named := inner.get(name), str) and named:
            inner[name] = str(folder / os.path.expanduser(named))
    return table


def _kinds(section: type[msgspec.Struct], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> str, list, dict, a tuple of words, or None for all others."""
    found: dict[str, Any] = {}
    for field in msgspec.inspect.type_info(section).fields:  # type: ignore[attr-defined]
        kind = field.type
        if isinstance(kind, msgspec.inspect.StructType):
            found |= _kinds(kind.cls, f"{prefix}{field.encode_name}.")
            continue
        simple: Any = None
        if isinstance(kind, msgspec.inspect.StrType):
            simple = str
        elif isinstance(kind, msgspec.inspect.ListType):
            simple = list
        elif isinstance(kind, msgspec.inspect.DictType):
            simple = dict
        elif isinstance(kind, msgspec.inspect.LiteralType):
            simple = tuple(kind.values)
        found[prefix + field.encode_name] = simple
    return found


QUOTAS: Final = tuple(name for name in QuotasSection.__struct_fields__ if name != "identities")
"""The resources that a quota may bound."""

KEYS: Final[dict[str, Any]] = _kinds(Config)
"""Dotted key -> how its value is written."""

_VARIABLES: Final = {
    ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): key
    for key, kind in KEYS.items()
    if kind is not dict
}
_SECTIONS: Final = sorted({key.partition(".")[0] for key in KEYS if "." in key})
_FIELDS: Final = {
    "permissions": Grant.__struct_fields__, "namespaces": NamespaceSection.__struct_fields__,
}  # fmt: skip
"""Tables of tables by name -> the keys that each of them may have."""
_WITH_UNITS: Final = ("streams.default", "mailboxes.default", "services.default",
                      "quotas.identities", "namespaces")  # fmt: skip
"""Tables whose keys are no keys of ours, and in which sizes and times stand."""


def key_of_variable(name: str) -> str | None:
    """Return the key of an environment variable; None when it is none of ours.

    MALAMUTE_ variables of other programs (the client's, for example) pass; one that begins like a
    section of ours is a misspelling.
    """
    if not name.startswith(ENVIRONMENT_PREFIX):
        return None
    key = _VARIABLES.get(name)
    if key is None and any(
        name.startswith(f"{ENVIRONMENT_PREFIX}{section.upper()}_") for section in _SECTIONS
    ):
        raise ConfigError(name, f"no setting has this variable{_nearest(name, _VARIABLES)}")
    return key


def put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set one value in a table of tables. Raises ConfigError: a part of the path is a value."""
    *sections, last = path
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(section, "is a section, not a value")
        table = inner
    table[last] = value


def _key_faults(table: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each section and key that does not exist, with the likely one."""
    for name, value in table.items():
        if name in KEYS:
            continue
        if name not in _SECTIONS:
            near = difflib.get_close_matches(name, _SECTIONS, n=1)
            if near and isinstance(value, Mapping):
                yield ConfigError(name, f"there is no such section; did you mean {near[0]}?")
            else:
                yield _unknown(name)
        elif not isinstance(value, Mapping):
            yield ConfigError(name, f"is a section; write [{name}] and its keys below")
        else:
            for inner in value:
                if f"{name}.{inner}" not in KEYS:
                    yield _unknown(f"{name}.{inner}")


def _unknown(key: str) -> ConfigError:
    return ConfigError(key, f"there is no such key{_nearest(key, KEYS) or _there_is(key)}")


def _there_is(key: str) -> str:
    """List what may be written where a key stands that resembles none."""
    section = key.partition(".")[0]
    if section in _SECTIONS:
        names = [name.partition(".")[2] for name in KEYS if name.startswith(f"{section}.")]
        return f"; [{section}] has {', '.join(names)}"
    alone = ", ".join(name for name in KEYS if "." not in name)
    return f"; the sections are {', '.join(_SECTIONS)}; outside them stand {alone}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the key that was meant by a wrong one; empty: none is near."""
    known = list(known)
    near: list[str] = []
    if "." not in name:  # The right key without its section.
        near = [key for key in known if key.rpartition(".")[2] == name][:1]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not near:  # The right key in the wrong section.
        last = name.rpartition(".")[2]
        near = [key for key in known if key.rpartition(".")[2] == last][:1]
    return f"; did you mean {near[0]}?" if near else ""


def _validation_error(text: str) -> ConfigError:
    """Put msgspec's finding in our words: the key first, then what is allowed."""
    message, _, path = text.partition(" - at `$")
    key = re.sub(r"\[\.\.\.\]", "", path.rstrip("`")).lstrip(".")
    words = KEYS.get(key)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message)
    if isinstance(words, tuple):
        message = f"must be one of {', '.join(words)}"
    elif unknown:
        fields = _FIELDS.get(key, ())
        near = _nearest(unknown[1], fields) or (
            "; there are " + ", ".join(fields) if fields else ""
        )
        message = f"there is no such key: {unknown[1]}{near}"
    message = message.replace("`array`", "`list`").replace("`object`", "`table`")
    if words is list and "`str`" in message:
        message = 'must be a list: ["...", "..."], of one entry where there is one'
    return ConfigError(key or "configuration", message[:1].lower() + message[1:])


def wrong_in_combination(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each value that is right by itself and wrong beside another value."""
    if not config.listen:
        yield ConfigError("listen", f"name at least one endpoint, for instance {DEFAULT_ENDPOINT}")
    links, limits, journal = config.links, config.limits, config.journal
    if not links.heartbeat_min_ms <= links.heartbeat_ms <= links.heartbeat_max_ms:
        yield ConfigError(
            "links.heartbeat_ms",
            f"{links.heartbeat_ms} lies outside links.heartbeat_min_ms and links.heartbeat_max_ms "
            f"({links.heartbeat_min_ms} to {links.heartbeat_max_ms})",
        )
    if limits.record_bytes_max > limits.batch_bytes_max:
        yield ConfigError(
            "limits.record_bytes_max",
            f"{limits.record_bytes_max} is more than limits.batch_bytes_max "
            f"({limits.batch_bytes_max}): a record travels in a batch",
        )
    if limits.partial_message_bytes_max < limits.batch_bytes_max + links.window_bytes:
        yield ConfigError(
            "limits.partial_message_bytes_max",
            f"must be at least limits.batch_bytes_max and links.window_bytes together "
            f"({limits.batch_bytes_max + links.window_bytes}): an honest client may send as much",
        )
    if not limits.partial_message_bytes_max <= limits.unread_share_bytes_max:
        yield ConfigError(
            "limits.unread_share_bytes_max",
            f"{limits.unread_share_bytes_max} is less than limits.partial_message_bytes_max "
            f"({limits.partial_message_bytes_max}): one connection may have as much",
        )
    if not limits.unread_share_bytes_max <= limits.unread_bytes_max:
        yield ConfigError(
            "limits.unread_bytes_max",
            f"{limits.unread_bytes_max} is less than limits.unread_share_bytes_max "
            f"({limits.unread_share_bytes_max})",
        )
    services = config.services
    if not services.lease_min_ms <= services.lease_ms <= services.lease_max_ms:
        yield ConfigError(
            "services.lease_ms",
            f"{services.lease_ms} lies outside services.lease_min_ms and services.lease_max_ms "
            f"({services.lease_min_ms} to {services.lease_max_ms})",
        )
    groups, checkpoint, transactions = config.groups, config.checkpoint, config.transactions
    for key, least, most_key, most in (
        ("services.backoff_ms", services.backoff_ms, "backoff_max_ms", services.backoff_max_ms),
        ("groups.hold_ms", groups.hold_ms, "hold_max_ms", groups.hold_max_ms),
        (
            "transactions.timeout_ms",
            transactions.timeout_ms,
            "timeout_max_ms",
            transactions.timeout_max_ms,
        ),
        ("checkpoint.retry_ms", checkpoint.retry_ms, "retry_max_ms", checkpoint.retry_max_ms),
    ):
        if least > most:
            section = key.partition(".")[0]
            yield ConfigError(key, f"{least} is more than {section}.{most_key} ({most})")
    if journal.segment_bytes % 4096 or not 65_536 <= journal.segment_bytes < 1 << 32:
        yield ConfigError(
            "journal.segment_bytes",
            f"{journal.segment_bytes} is not a multiple of 4096 between 65536 and 4 GiB",
        )
    if journal.segment_bytes < 2 * limits.batch_bytes_max:
        yield ConfigError(
            "journal.segment_bytes",
            f"{journal.segment_bytes} is less than two batches of limits.batch_bytes_max "
            f"({limits.batch_bytes_max})",
        )
    if journal.ring_bytes < 3 * journal.segment_bytes:
        yield ConfigError(
            "journal.ring_bytes",
            f"{journal.ring_bytes} is less than three segments of journal.segment_bytes "
            f"({journal.segment_bytes})",
        )
    if checkpoint.force_percent >= checkpoint.pressure_percent:
        yield ConfigError(
            "checkpoint.force_percent",
            f"{checkpoint.force_percent} is not below checkpoint.pressure_percent "
            f"({checkpoint.pressure_percent})",
        )
    tables = [(f"quotas.identities.{name}", own) for name, own in config.quotas.identities.items()]
    tables += [(f"namespaces.{name}.quotas", own.quotas) for name, own in config.namespaces.items()]
    for table, quotas in tables:
        for quota in quotas:
            if quota not in QUOTAS:
                near = _nearest(quota, QUOTAS) or f"; there are {', '.join(QUOTAS)}"
                yield ConfigError(f"{table}.{quota}", f"there is no such quota{near}")
    yield from _namespace_faults(config)
    yield from _identity_faults(config.authentication)
    try:
        check_http(config.http)
    except ConfigError as error:
        yield error
    authentication = config.authentication
    if authentication.mechanism == "plain" and not (
        authentication.users or authentication.users_file
    ):
        yield ConfigError("authentication.users", 'mechanism = "plain" needs users or a users_file')
    in_toml = authentication.users_file.endswith(".toml")
    if authentication.mechanism == "curve" and not (authentication.clients or in_toml):
        yield ConfigError(
            "authentication.clients",
            'mechanism = "curve" needs the public key of each client: name = "key", or a '
            "users_file that ends in .toml",
        )


def _namespace_faults(config: Config) -> Iterator[ConfigError]:
    """Find namespaces that are none, or that overlap."""
    if config.namespaces and config.authentication.mechanism == "none":
        yield ConfigError(
            "namespaces", 'need users: set authentication.mechanism to "plain" or "curve"'
        )
    prefixes = {name: each.prefix_of(name) for name, each in config.namespaces.items()}
    for name, prefix in prefixes.items():
        fault = name_fault(name) or name_fault(f"{prefix}x")
        if fault:
            yield ConfigError(f"namespaces.{name}", fault)
        elif prefix[-1].isalnum():
            # Without an end, a prefix `acme` would have the names that begin with `acmex`.
            yield ConfigError(
                f"namespaces.{name}.prefix",
                f"{prefix!r} has no end; write for instance '{prefix}.'",
            )
        for other, beginning in prefixes.items():
            if other != name and prefix.startswith(beginning):
                yield ConfigError(
                    f"namespaces.{name}.prefix", f"{prefix!r} lies in the namespace {other}"
                )


def _identity_faults(authentication: Authentication) -> Iterator[ConfigError]:
    """Find templates that give no identity, or the same ones to two users."""
    users = {*authentication.users, *authentication.clients}
    given: dict[str, str] = {f"{user}-{REPLICA}": user for user in users}
    for user, templates in authentication.identities.items():
        key = f"authentication.identities.{user}"
        if user not in users and not authentication.users_file:
            yield ConfigError(key, f"there is no user of this name{_nearest(user, users)}")
        for template in templates:
            fault = template_fault(template)
            if fault:
                yield ConfigError(key, fault)
            if given.setdefault(template, user) != user:
                yield ConfigError(key, f"user {given[template]} derives from {template!r} already")
