"""Every limit of the broker core, in one place.

Owns the settings of a broker: sizes, counts, times and the callbacks by which the shell answers
questions that the core cannot. The rule: no table, queue or buffer of the core grows beyond a
number that stands here, and each has a named answer when the number is reached. Source:
docs/design.md (The core and its shell; Flow control; Safety).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from malamute_protocol.limits import DEFAULT_LIMITS, Limits

Permit = Callable[[str, str, str], bool]
"""(owner, action, name) -> allowed. Actions: identity and template, which a credential may ask
for; of streams read, replay, write, create, trim, manage_streams; of mailboxes send, receive,
create_mailbox, purge, manage_queues; of services request, work, create_service, manage_queues;
manage_clients, manage_users, list_namespaces, admin."""
Subjects = Callable[[str, str], Callable[[str], bool] | None]
"""(owner, stream) -> test of the keys under which the owner may publish to a stream that it may not
`write`; None: under none."""


def permit_all(identity: str, action: str, name: str) -> bool:
    """Allow every action, except to take another client's name.

    The default of a core without a shell, in tests and the simulator. A broker gives its core
    `Permissions` (server/authentication), also where it has no users.
    """
    if action == "template":  # As `app-{n}`, for replicas of `app`.
        return identity in ("", name.removesuffix("-{n}"))
    return action != "identity" or identity in ("", name)


def some_name(owner: str, action: str) -> bool:
    """Return that every action is allowed on some name."""
    return True


def no_subjects(owner: str, stream: str) -> None:
    """Return that there are no subjects to which an owner's writing is bound."""


def no_carrier(identity: str) -> str:
    """Return that no identity belongs to a credential."""
    return ""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one identity; 0: no bound but that of all identities together. See quotas.py."""

    links: int = 0
    links_s: int = 0
    """Links a second that are opened: by a user, or without a credential from an address."""
    streams: int = 0
    settings_bytes: int = 0
    """Bytes of the settings of its streams."""
    rings: int = 0
    """Streams with a ring of their own, on disk or in memory."""
    rings_bytes: int = 0
    """Bytes of the own rings of its streams on disk."""
    rings_memory_bytes: int = 0
    """Bytes of the own rings of its streams in memory."""
    mailboxes: int = 0
    mail_bytes: int = 0
    """Bytes of the batches that it sent, or that answer it, in mailboxes in the log."""
    mail_memory_bytes: int = 0
    """Bytes of the batches that it sent, or that answer it, in mailboxes in memory."""
    services: int = 0
    request_bytes: int = 0
    """Bytes of the batches of requests that it sent and that are in services in the log."""
    request_memory_bytes: int = 0
    """Bytes of the batches of requests that it sent and that are in services in memory."""
    cursors: int = 0
    groups: int = 0
    transactions: int = 0
    """Open transactions."""
    staged_bytes: int = 0
    """Bytes of the batches that its transactions have staged and that are not in their streams."""
    subscriptions: int = 0
    """Subscriptions, inboxes and memberships together."""
    pattern_bytes: int = 0
    """Bytes of the patterns of its subscriptions, offers and memberships as MessagePack."""
    offers: int = 0
    questions: int = 0
    """Unanswered questions to the journal's index."""
    publish_bytes_s: int = 0
    """Bytes a second of published batches, mail and requests."""
    messages_s: int = 0
    """Records, messages and requests a second."""


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant: a prefix of names with users of its own, who reach nothing outside of it."""

    name: str
    prefix: str
    """Beginning of the names of its streams, mailboxes and services."""
    users: tuple[str, ...] = ()
    """Patterns of the names of its users."""
    quota: Quota = Quota()
    """Bounds of what all its users have together; their own quotas hold beside it."""
    default_stream: dict[str, Any] = {}
    """Settings of streams under the prefix, over those of the broker's default."""
    default_mailbox: dict[str, Any] = {}
    default_service: dict[str, Any] = {}


def no_namespace(owner: str) -> Namespace | None:
    """Return that an owner belongs to no namespace."""
    return None


def no_quota(identity: str) -> Quota:
    """Return that no identity has a bound of its own."""
    return Quota()


def every_credential(credential: str) -> bool:
    """Return that a credential which the transport let in counts."""
    return True


def no_reload(link: int, request: int) -> str:
    """Return that this broker has no configuration to read anew."""
    return "this broker has no configuration that could be read anew"


def no_users(verb: str, name: str) -> list[dict[str, Any]]:
    """Return that this broker has no users."""
    return []


def no_facts() -> dict[str, Any]:
    """Return no facts to add."""
    return {}


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one broker. Sizes in bytes, times in milliseconds."""

    limits: Limits = DEFAULT_LIMITS
    """Bounds of one message, batch and record."""
    software: str = "malamute-py"
    permit: Permit = permit_all
    subjects: Subjects = no_subjects
    """Asked only where `permit` refuses `write`."""
    allows_some: Callable[[str, str], bool] = some_name
    """Whether an owner may do an action on any name at all."""
    quota: Callable[[str], Quota] = no_quota
    """Bounds of an identity, by its name; "": all links without one."""
    namespaces: tuple[Namespace, ...] = ()
    namespace_of: Callable[[str], Namespace | None] = no_namespace
    """Returns the namespace of an owner. `permit` keeps its users under the prefix; what has no
    name of its own, as links and transactions, is compared by this."""
    carrier: Callable[[str], str] = no_carrier
    """Returns the credential to which an identity belongs: its own, or one that has a template for
    it; empty: it belongs to none."""
    known: Callable[[str], bool] = every_credential
    """Whether a credential still counts: its user may have been removed since it connected."""
    reload: Callable[[int, int], str] = no_reload
    """Has the shell read the configuration anew for (link, request), which Broker.reloaded()
    answers later; returns the reason why it does not, or ""."""
    users: Callable[[str, str], list[dict[str, Any]]] = no_users
    """Returns the users by name, and whether each may do (verb, name); see SPEC.md, LIST_USERS."""
    facts: Callable[[], dict[str, Any]] = no_facts
    """Returns the shell's part of BROKER_INFO: rings, disk, endpoints."""
    in_force: Callable[[], dict[str, Any]] = no_facts
    """Returns the settings in force by name, and the last reload; see SPEC.md, BROKER_INFO."""
    validates: bool = False
    """Whether the shell can validate typed batches in full."""
    meter: Callable[[], int] | None = None
    """Returns the work done so far, in units of the shell's (nanoseconds); None: nothing counts it,
    and matching is not cut into slices."""
    matching_share: int = 1_000_000
    """Share of one turn of the loop that matching may take, by the meter; and each kind of serving
    (readers, groups, mailboxes, services, lists) as much."""

    # --- links: beyond links_max a HELLO is refused `limit`
    links_max: int = 12_000
    replicas_max: int = 1_024
    """Numbers of a template of identities, from 0; when all are taken: `limit`."""
    replica_grace_ms: int = 30_000
    """Time for which a number is kept for a session that lost its link."""
    heartbeat_ms: int = 5_000
    heartbeat_min_ms: int = 50
    heartbeat_max_ms: int = 60_000
    expiry_beats: int = 3
    """Heartbeats of silence after which a link is given up."""
    window_bytes: int = 16 << 20
    """Unconfirmed bytes of a link; beyond it PUBLISH is refused `window`, and the link has a
    narrower window from then on."""
    outbox_commands_max: int = 20_000
    """Answers kept for a peer that does not read; beyond it the link ends: `limit`."""
    link_queries_max: int = 1_000
    """Unanswered questions of a link to the journal; beyond it: `wait`."""
    link_results_max: int = 256
    """Results that wait to be sent to a link; beyond it its questions are answered `wait`."""
    reason_max: int = 300
    """Characters of a reason that is sent: it may repeat what the peer said."""

    # --- what may lie between the core and a peer that has not shown to have read it
    outstanding_bytes: int = 256 << 20
    """Budget over all links; each has an equal share within the next two."""
    share_min_bytes: int = 256 << 10
    share_max_bytes: int = 16 << 20

    # --- streams, subscriptions, producers: beyond a count `limit`
    streams_max: int = 20_000
    settings_bytes_max: int = 64 << 10
    """Size of one stream's settings as MessagePack; beyond it `bad_setting`."""
    all_settings_bytes_max: int = 8 << 20
    """Size of the settings of all streams; beyond it `limit`: each segment begins with all of
    them."""
    rings_max: int = 256
    """Streams with a ring of their own; beyond it `limit`: each has files and descriptors."""
    rings_bytes_max: int = 256 << 30
    """Bytes of all rings of streams on disk; beyond it `limit`."""
    rings_memory_bytes_max: int = 4 << 30
    """Bytes of all rings of streams in memory; beyond it `limit`."""
    link_subscriptions_max: int = 1_000
    """Subscriptions, inboxes, offers and memberships of one link together; beyond it `limit`."""
    subscriptions_max: int = 200_000
    pattern_bytes_max: int = 64 << 10
    """Size of one pattern as MessagePack; beyond it `too_large`."""
    all_patterns_bytes_max: int = 128 << 20
    """Size of the patterns of all subscriptions; beyond it `limit`."""
    producers_max: int = 10_000
    """Beyond it the identity that has the most loses its longest unused: `unknown_producer`."""
    producer_streams_max: int = 10_000
    """Streams whose sequence one producer has; beyond it PUBLISH is refused `limit`."""
    producer_places_max: int = 20_000
    """Streams of all producers together; identities share them as they share producers."""
    producer_batches_max: int = 128
    """Runs of batches of a producer in a stream whose positions a duplicate can be told."""
    snapshot_batches_max: int = 32
    """Runs among them that a snapshot keeps; the journal after it has the rest."""
    auto_create: bool = True
    default_stream: dict[str, Any] = {}
    """Settings of streams that first use creates."""
    waiting_commands_max: int = 10_000
    """Commands that wait for a stream to be created; beyond it: `wait`."""

    # --- publishing
    unsynced_bytes_max: int = 256 << 20
    """Bytes that are appended or queued and not yet synced; beyond it PUBLISH is refused `wait`."""

    # --- delivery
    hot_bytes: int = 16 << 20
    """Newest batches of all streams kept in memory."""
    quantum_bytes: int = 1 << 20
    """Bytes that one subscription on demand is given in its turn."""
    step_bytes: int = 8 << 20
    """Bytes that all subscriptions on demand are given in one turn of the loop."""
    reads_max: int = 8
    """Reads of history under way at one time."""
    shared_window_min: int = 4
    """Subscriptions of a stream on demand from which on they are served as a cohort."""
    shared_read_min: int = 32
    """Subscriptions from which on one read of the journal serves a cohort; fewer are served alone,
    by selection."""
    queries_max: int = 10_000
    """Questions to the journal's index under way; beyond it: `wait`."""
    matching_bytes_max: int = 8 << 20
    """Batches of a stream that wait to be matched or given; beyond it its live subscriptions go on
    demand."""
    fan_out_max: int = 2_048
    """Live subscriptions that are given something in one turn of the loop; the others wait, and
    later batches. It is more where many links get something."""
    extract_bytes_min: int = 4 << 10
    """A smaller batch goes out whole with a row bitmap: extracting would cost more."""
    extract_share: float = 0.25
    """Rows are extracted when fewer than this share of a batch is selected."""
    last_per_subject_max: int = 100_000
    """Records of one last-per-subject start; beyond it the start is refused `limit`."""

    # --- keys: beyond a bound `limit`
    keys_max: int = 1_000_000
    """Keys of one stream that keeps the last record of each subject, deleted ones included."""
    all_keys_bytes_max: int = 512 << 20
    """Memory that the keys of all such streams take, at some 250 bytes beside each name."""
    deleted_keys_ms: int = 24 * 3_600_000
    """Time after which a deleted key may be forgotten, with its deletion marker."""

    # --- mailboxes: a full one answers `wait`, never drops
    mailboxes_max: int = 1_000_000
    """Mailboxes; beyond it first use is refused `limit`."""
    default_mailbox: dict[str, Any] = {}
    """Settings of mailboxes that first use creates."""
    mail_rows_max: int = 16_384
    """Messages of one SEND: who has which of a batch is bitmaps of its length; beyond it
    `too_large`."""
    mailbox_messages_max: int = 10_000_000
    """Messages of one mailbox that has no bound of its own."""
    mailbox_bytes_max: int = 64 << 30
    """Bytes of the batches of such a mailbox; a batch counts until none of its messages is left."""
    mail_bytes_max: int = 256 << 30
    """Bytes of the batches of all mailboxes in the log; beyond it `wait`."""
    mail_memory_bytes_max: int = 256 << 20
    """Bytes of the batches of all mailboxes in memory, temporary ones included; beyond it
    `wait`."""
    temporary_bytes_max: int = 64 << 20
    """Bytes of one temporary mailbox."""
    mail_hot_bytes: int = 32 << 20
    """Newest batches of mail, requests and replies kept in memory; older ones are read back."""
    mail_read_bytes: int = 16 << 20
    """Bytes that are read back at one time; a batch larger than that is read alone."""
    mail_reads_max: int = 8
    """Reads of such batches under way at one time."""
    inbox_puts_max: int = 4_096
    """Batches of which one inbox holds something; it is given no more until it acknowledges. An
    acknowledgement of all of them is taken in one turn of the loop."""
    inbox_read_bytes: int = 1 << 20
    """Bytes that one inbox has read ahead of its deliveries; one batch is always allowed."""
    inbox_reads: int = 512
    """Batches that one inbox has read ahead."""
    peek_bytes_max: int = 8 << 20
    """Bytes that one PEEK_MAIL reads; the page ends there."""

    # --- services: beyond a count `limit`, beyond what a queue holds `wait`
    services_max: int = 10_000
    service_requests_max: int = 1_000_000
    """Requests waiting or in hand of one service that names no bound; beyond it `wait`."""
    service_bytes_max: int = 1 << 30
    """Bytes of the batches of such a service."""
    all_requests_bytes_max: int = 8 << 30
    """Bytes of the batches of all services."""
    request_rows_max: int = 4_096
    """Requests of one REQUEST: what is in hand of a batch is bitmaps of its length; beyond it
    `too_large`."""
    request_subjects_max: int = 1_024
    """Different subjects among them; beyond it `too_large`."""
    offers_max: int = 100_000
    lease_ms: int = 30_000
    """Silence of a worker after which its request goes to another worker, unless the offer has a
    time."""
    lease_min_ms: int = 100
    lease_max_ms: int = 24 * 3_600_000
    attempts_max: int = 5
    """Attempts after which a request that was not completed becomes a dead letter."""
    backoff_ms: int = 100
    """Pause before a request whose worker died or fell silent is handed out again; it doubles."""
    backoff_max_ms: int = 60_000
    default_service: dict[str, Any] = {}
    """Settings of service queues that first use creates."""
    hand_outs_max: int = 256
    """Batches that are handed out in one step, over all services."""
    timers_max: int = 512
    """Requests and leases whose time is over that one step looks at."""

    # --- cursors and groups: beyond a count `limit`
    cursors_max: int = 100_000
    pin_bytes_max: int = 1 << 30
    """Bytes of a ring that a cursor's pin holds back where its settings have no bound; beyond it
    the pin is broken."""
    groups_max: int = 10_000
    group_members_max: int = 1_000
    group_window_records: int = 65_536
    """Records that a group reads ahead of its position; each costs about a quarter of a byte a
    member."""
    group_hold_ms: int = 10_000
    """Time for which the place of a lost holder of an exclusive group is kept, unless its JOIN has
    one."""
    group_hold_max_ms: int = 600_000
    group_flush_ms: int = 1_000
    """Time after which the log learns of acknowledgements that no caller waits for, and of records
    passed over."""

    # --- transactions: beyond a count, or the bytes of all, `limit`
    transactions_max: int = 1_000
    """Transactions that are open, or committed and not yet appended."""
    transaction_bytes_max: int = 1 << 30
    """Bytes that one transaction stages; beyond it `too_large`."""
    transaction_batches_max: int = 4_096
    """Batches that one transaction stages; beyond it `too_large`: its end is one change, and takes
    one turn of the loop."""
    staged_bytes_max: int = 4 << 30
    """Bytes that all transactions stage."""
    commit_bytes: int = 1 << 20
    """Staged batches that one bundle of a commit appends to their streams, in bytes."""
    transaction_timeout_ms: int = 60_000
    """Time after which a transaction is rolled back whose BEGIN_TRANSACTION has none."""
    transaction_timeout_max_ms: int = 900_000
    """The longest such time that a client may ask for; beyond it `limit`."""

    # --- administration
    page_max: int = 1_000
    splits_max: int = 10_000
    retention_ms: int = 1_000
    """Time in which bounds by bytes and age are applied to all streams once."""
    retry_ms: int = 100
    """Time that a refusal `wait` names."""

    def default_of(
        self, kind: Literal["stream", "mailbox", "service"], name: str
    ) -> dict[str, Any]:
        """Return the settings of a stream, mailbox or service that is made without any.

        Those of the namespace whose prefix the name has go before the broker's.
        """
        key = f"default_{kind}"
        common: dict[str, Any] = getattr(self, key)
        for namespace in self.namespaces:
            if name.startswith(namespace.prefix):
                return {**common, **getattr(namespace, key)}
        return common

    def shares_namespace(self, owner: str, other: str) -> bool:
        """Whether an owner may be told of another one: it is in no namespace, or in the same."""
        namespace = self.namespace_of(owner)
        return namespace is None or self.namespace_of(other) == namespace
