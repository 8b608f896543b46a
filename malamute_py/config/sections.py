"""The sections of a configuration: each key, its type, its default and its bounds.

Owns the classes that a configuration is made of. The rules: units are part of a key's name; a
default that the core or the protocol checks is written where it is checked (broker/limits.py,
malamute_protocol/limits.py) and only named here. Source: deploy/malamute.toml.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_protocol.limits import BatchRecords, Limits
from malamute_py.broker.limits import BrokerSettings
from malamute_py.sections import HttpSection

PUBLIC_WORDS: Final = "I understand that anyone can read and write"
"""Text that an operator has to write to open a broker to a network without authentication."""

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
    settings_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=256 << 10)] = _CORE.settings_bytes_max
    """Bound of one stream's settings. An answer (1 MiB) has room for them beside the other facts,
    and for the three defaults of a namespace."""
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
    links_s: MaybeCount = 200
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
