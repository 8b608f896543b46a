"""The table of all metrics: name, type, labels, meaning, and where the broker tells it.

Owns what is called how. The rules: names and units are Prometheus' (base units, `_total` on what
only grows); a name says the same thing for ever, so that dashboards outlive versions; a count of
the broker that is not in this table is not shown. The page deploy/metrics.md is made of this table
(`make metrics-page`), and a test compares both with what the broker counts.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

PREFIX: Final = "malamute_"
Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    source: str = ""
    """Path of the figure in `malamute info`; empty: the figure is computed."""
    factor: float = 1
    """Number by which the broker's figure is multiplied to come to base units."""


def _gauges(path: str, rows: str, prefix: str = "", *, total: bool = False) -> dict[str, Metric]:
    """Return metrics by the key in the broker's facts, read from lines `source [-> name] | meaning`.

    path: where in BROKER_INFO the sources are. prefix: of the names. A metric without a name has
    its source's, with `_total` if total says so. One whose name ends in `_total` is a counter.
    """
    found: dict[str, Metric] = {}
    for line in rows.strip().splitlines():
        left, _, meaning = line.partition(" | ")
        source, _, name = left.partition(" -> ")
        own = f"{source.removesuffix('_total')}_total" if total else source
        full = PREFIX + prefix + (name or own)
        kind: Kind = "counter" if full.endswith("_total") else "gauge"
        found[source] = Metric(full, kind, meaning, (), f"{path}.{source}".lstrip("."))
    return found


def _counters(path: str, rows: str) -> dict[str, Metric]:
    """Return metrics as _gauges() does, whose names end in `_total`."""
    return _gauges(path, rows, total=True)


COUNTERS: Final = _counters(
    "counters",
    """
links_opened | Sessions of clients that began.
links_closed | Sessions of clients that ended.
links_fenced | Sessions that ended because another one took their identity (event identity_taken).
replicas_refused | Greetings refused because all numbers of a template of identities are taken (links.replicas_max).
links_blocked | Times that a link's socket took no more.
malformed -> malformed_messages_total | Messages that broke the protocol.
internal_errors | Errors of the broker's own that were contained (event internal_error); report each.
batches_quarantined | Stored batches that could not be handled for some reader (event batch_quarantined).
batches_in -> published_batches_total | Batches published to streams.
records_in -> published_records_total | Records published to streams.
bytes_in -> published_bytes_total | Bytes of batches published to streams.
publishes_dropped | Publishes without a confirm that were refused.
publishes_duplicate | Publishes that the log had already.
publishes_conflicting | Batches refused because their sequence is in the log with another content (event publish_conflicting).
publishes_damaged | Batches refused because damage took them from the log (event publish_damaged).
appends_refused | Bundles that the journal took nothing of.
deliveries -> delivered_batches_total | Batches delivered to subscriptions.
records_out -> delivered_records_total | Records delivered to subscriptions.
bytes_out -> delivered_bytes_total | Bytes delivered to subscriptions.
subscribed -> subscriptions_opened_total | Subscriptions that began.
caught_up -> subscriptions_caught_up_total | Times that a subscription became live.
fell_behind -> subscriptions_fell_behind_total | Times that a live subscription had no credit for what it selects, and went on demand.
gaps | Gaps that readers were told of: offsets overwritten, damaged or rewound.
records_overwritten | Records that a shared ring overwrote although their stream had set no bound that they were beyond.
records_moved | Newest records of their subjects that were copied so that the ring has room (streams with keep).
compaction_failures | Questions about the oldest records of streams with keep that the journal did not answer (event compaction_failed).
records_trimmed | Records that TRIM removed (event stream_trimmed).
purges_by_subject | Purges of streams by subject (event stream_purged).
reads | Reads of history.
producers_forgotten | Producers that made room for others (streams.producers_max, producer_places_max).
steps_duplicate | Mail, requests and atomic steps that were sent again and taken once.
steps_conflicting | Mail, requests, answers and atomic steps refused because their key was taken before for something else (event key_conflicting).
mailboxes_created | Mailboxes created.
mailboxes_removed | Mailboxes removed.
temporary_mailboxes_created | Temporary mailboxes created, of requesters without an identity.
temporary_mailboxes_ended | Temporary mailboxes that ended with their requester.
mail_sends -> mail_put_batches_total | Batches of mail put into mailboxes.
mail_in -> mail_put_messages_total | Messages put into mailboxes.
mail_deliveries -> mail_delivered_batches_total | Batches of mail delivered to readers.
mail_out -> mail_delivered_messages_total | Messages delivered to readers.
mail_acknowledged -> mail_acknowledged_messages_total | Messages that their reader acknowledged.
mail_again -> mail_returned_messages_total | Messages that a reader gave back.
mail_redelivered -> mail_redelivered_messages_total | Messages whose reader went away before it acknowledged them.
mail_expired -> mail_expired_messages_total | Messages whose time was over.
mail_purged -> mail_purged_messages_total | Messages that were purged.
mail_unread -> mail_unread_messages_total | Messages that ended with their temporary mailbox.
mail_without_mailbox | Messages whose mailbox was being removed when the broker died.
mail_lost -> mail_lost_messages_total | Messages whose body is nowhere: damage (event mail_lost).
mailbox_full -> mailbox_full_total | Sends that had to wait for a full mailbox.
mail_full -> mail_full_total | Sends that had to wait because all mailboxes together were full.
mail_memory_full | Sends that had to wait because mail in memory was full.
mail_reads | Reads of bodies that were no longer in memory.
mail_reads_failed | Reads of bodies that failed.
inboxes_opened | Readers of mailboxes that came.
services_created | Service queues created.
services_removed | Service queues removed.
requests_without_workers | Requests refused because no worker was there, as their senders asked.
services_full | Requests that had to wait for a full queue.
requests_in -> requests_put_total | Requests put into service queues.
requests_out -> requests_handed_out_total | Requests handed to workers, each hand-out counted.
work_bytes_out -> requests_handed_out_bytes_total | Bytes of requests handed to workers.
requests_completed | Requests that were completed.
requests_returned | Requests that came back to their queue: given back, lease over, or worker gone.
requests_requeued | Dead or held requests that were queued anew by hand.
requests_cancelled | Requests that were cancelled.
requests_expired | Requests whose time was over (event request_expired).
requests_dead | Requests that failed or were tried too often (event request_dead).
request_reads_failed | Reads of requests' bodies that failed; they are tried again.
requests_lost | Requests whose body is nowhere: damage (event request_lost).
dead_letters | Requests and records that went to a dead-letter mailbox.
leases_expired | Requests whose worker was silent for too long (event lease_expired).
workers_died | Workers that went away with requests in hand (event worker_died).
replies_in -> replies_total | Replies of workers.
replies_late | Replies refused because their request had expired, been cancelled or gone to another worker.
requests_ended_late | Replies and ends taken of workers whose link was lost, of requests that still waited.
answers_lost | Requests sent again whose answer had ended with their sender's temporary mailbox.
replies_undeliverable | Replies to requesters that are gone (event reply_undeliverable).
group_records_out -> group_delivered_records_total | Records given to members of groups.
group_records_done -> group_acknowledged_records_total | Records that members of groups acknowledged.
group_records_returned -> group_returned_records_total | Records of groups that went to another member.
group_records_dead -> group_dead_records_total | Records that members gave up, or that had too many attempts (event record_dead).
group_leases_ended -> group_ended_leases_records_total | Records that went to another member since their lease was over (event group_lease_ended).
group_records_requeued -> group_requeued_records_total | Records of dead letters that came again.
groups_held_up | Times that a group read no further because a member does not acknowledge (event group_held_up).
group_records_lost -> group_lost_records_total | Records that the ring had given up before their group had them (event group_gap).
group_places_lost | Holders of exclusive groups that did not return in time.
cursors_clamped | Cursors whose stream had given up their place (event cursor_clamped).
groups_clamped | Groups whose stream had given up their place.
matching_put_off | Batches of new headers that were matched in more than one turn of the loop.
matching_overtaken | Times that a stream's live subscriptions went on demand because too much waited to be matched or given to them.
pins_near_limit | Pins of cursors that came near to what they may hold.
pins_broken | Pins of cursors that came beyond what they may hold, and gave way.
transactions_begun | Transactions that clients opened.
transactions_committed | Transactions that were committed.
transactions_rolled_back | Transactions that their clients rolled back.
transactions_timed_out | Transactions rolled back since they were open for too long (event transaction_timed_out).
transactions_put_off | Times that a ring of a stream's own refused records of a committed transaction, which come later (event transaction_put_off).
transactions_ended | Transactions that operators rolled back (event transaction_ended).
given_up_records -> transactions_given_up_records_total | Records of committed transactions that operators gave up (event transaction_given_up).
staged_records -> transactions_staged_records_total | Records that transactions staged.
staged_records_lost -> transactions_lost_records_total | Records of committed transactions that damage took (event staged_records_lost).
""",
)
"""Counters of the core, by their name in `malamute info`."""

SHELL: Final = _counters(
    "shell",
    """
messages_in_total -> socket_received_messages_total | Messages taken from sockets.
bytes_in_total -> socket_received_bytes_total | Bytes of messages taken from sockets.
messages_out_total -> socket_sent_messages_total | Messages given to sockets.
content_bytes_out_total -> socket_sent_content_bytes_total | Bytes of contents in messages given to sockets.
malformed_total -> socket_malformed_messages_total | Messages that could not be decoded.
appends_refused_total -> ring_refused_appends_total | Bundles that a ring refused (events append_refused and appends_still_refused).
overflowed_total -> links_overflowed_total | Links that ended because their client did not read what it was sent.
denied_total -> denied_connections_total | Connections turned away, for whatever reason.
authentication_errors_total | Attempts to authenticate that met an error of the broker's own (event internal_error).
password_pauses_total | Names at addresses whose password was wrong too often.
accepted_total -> accepted_connections_total | Connections accepted.
accept_failed_total -> failed_accepts_total | Connections that could not be accepted, often for want of descriptors.
cut_total -> cut_connections_total | Connections that the broker cut.
connections_refused_total -> refused_connections_total | Connections refused because there are too many, of all, of an address or of a user.
addresses_turned_away_total | Times that the kernel was told to drop an address' connection requests.
newcomers_turned_away_total | Times that the kernel was told to drop all connection requests, for what ended connections left.
connections_held_total -> held_connections_total | Times that a connection was held back while the loop stood still.
trims_failed_total | Times that memory of cut connections could not be given back to the system.
claimed_ids_total | Routing ids that peers claimed though libzmq gives them.
messages_dropped_total -> dropped_messages_total | Messages dropped that cut connections had left behind, or peers that came and went.
disconnected_total -> disconnections_total | Connections that ended.
handshake_failed_total -> failed_handshakes_total | Handshakes of ZeroMQ that failed, for whatever reason.
handshake_abandoned_total -> abandoned_handshakes_total | Of these, connections that ended amid the handshake where credentials are asked for (event handshake_abandoned): probes, and some clients without a credential.
long_turns_total | Turns of the loop that used a processor for more than 100 ms.
""",
)
"""Counters of the shell that have a metric of their own."""

EVENTS: Final = Metric(
    PREFIX + "events_total", "counter",
    "Events of rings, of the checkpoint and of the HTTP side, by their name in the log.",
    ("event",), "shell.EVENT_total",
)  # fmt: skip
DENIALS: Final = Metric(
    PREFIX + "denied_connections_by_reason_total", "counter",
    "Connections turned away: credential (wrong password or key), mechanism (none, or one of "
    "another kind than the broker asks for), paused (unhashed after too many wrong ones), busy "
    "(too many wait for a hash).",
    ("reason",), "shell.denied_REASON_total",
)  # fmt: skip
REFUSALS: Final = Metric(
    PREFIX + "refusals_total", "counter", "Commands refused, by the code of the refusal.",
    ("code",), "counters.refused_CODE",
)  # fmt: skip
QUOTA_REFUSALS: Final = Metric(
    PREFIX + "quota_refusals_total", "counter",
    "Times that an identity met a quota, by the resource (rate: it sent too fast).",
    ("resource",), "counters.quota_RESOURCE",
)  # fmt: skip

GAUGES: Final = _gauges(
    "gauges",
    """
links | Sessions of clients that are connected.
streams | Streams.
subscriptions | Subscriptions to streams.
producers | Producers whose sequence is known.
hot_bytes | Bytes of the newest batches of streams, which are in memory.
late_bytes | Bytes of batches that wait to be matched or given to live subscriptions; at most memory.hot_bytes.
unsettled_bytes | Bytes of batches and steps that were taken and are not on disk yet.
reads_under_way | Reads of history that are under way.
queries_under_way | Questions to the journal's index that are under way.
mailboxes | Mailboxes, with the temporary ones.
temporary_mailboxes | Mailboxes of requesters without an identity.
mail_messages | Messages that no reader has acknowledged.
mail_bytes | Bytes of the messages that no reader has acknowledged.
mail_hot_bytes | Bytes of bodies of mail and requests that are in memory.
mail_memory_bytes | Bytes of bodies of mailboxes and services that are kept in memory only.
mail_reads_under_way | Reads of bodies that are under way.
inboxes | Readers of mailboxes.
services | Service queues.
requests | Requests that wait or are in hand.
request_bytes | Bytes of the requests that wait or are in hand.
offers | Offers of workers.
cursors | Cursors.
pins | Cursors that hold history.
pinned_bytes | Bytes of rings after the oldest place of each pin.
groups | Groups.
group_members -> members_of_groups | Members of all groups.
group_records_held -> records_in_hand_of_groups | Records that members of all groups have in hand.
group_reads_under_way | Reads for groups that are under way.
transactions | Transactions that are open, or committed and being appended.
staged_bytes -> transactions_staged_bytes | Bytes of batches that transactions staged and that are not in their streams.
""",
)
"""Gauges of the core."""

FACTS: Final = {
    **_gauges(
        "",
        """
epoch | How often the log was opened.
resident_bytes -> resident_memory_bytes | Resident memory of the broker's process.
connections | Connections, with a session or not.
silent_connections | Connections that have not sent a message yet.
unread_bytes | Memory of what came in and was not taken up at the last look.
blocked_links | Links whose sockets take no more at the moment: their clients do not read.
disk_free_bytes | Free bytes of the disk with the data directory.
collector_passes_total | Looks of Python's collector at all objects.
collector_garbage_total -> collector_garbage_objects_total | Objects that these looks found to be garbage.
""",
    ),
    "longest_turn_us": Metric(
        PREFIX + "longest_turn_seconds", "gauge",
        "Processor time of the longest turn of the loop since the start; all peers waited for it.",
        (), "longest_turn_us", 1e-6,
    ),
}  # fmt: skip
"""Facts of the process, by their name at the top of `malamute info`."""

CHECKPOINT: Final = _gauges(
    "checkpoint",
    """
lsn -> position_bytes | How far the tables came in ring main.
lost | 1: the tables are lost, and mail, services, cursors and groups are refused (event queues_lost).
lag_bytes | Bytes of the log after the tables that concern mail, services, cursors and groups.
seconds -> last_step_seconds | How long the last step took.
step_seconds -> step_under_way_seconds | How long the step under way takes so far; 0: there is none.
failures_total | Steps of the tables that failed.
restarts_total | Processes of the checkpoint that died and were replaced.
hangs_total | Processes of the checkpoint that were killed because they did nothing (event checkpoint_process_hung).
ring_use -> ring_use_ratio | Share of ring main that waits for the tables; they are forced at 0.75, and new mail, requests and records of ring main wait from 0.9 on.
pressed | 1: new mail, requests and records of ring main wait for the tables.
failing | 1: the last step failed, and none has gone well since.
""",
    "checkpoint_",
)  # fmt: skip
"""Tables of mail, services, cursors and groups; absent when nothing outlives the process."""


def _labelled(labels: tuple[str, ...], prefix: str, rows: str) -> dict[str, Metric]:
    """Return metrics that have a sample for each thing, with these labels; rows: as of _gauges().

    `source` is empty, for the page of metrics: metrics.py computes these figures.
    """
    return {
        source: metric._replace(labels=labels, source="")
        for source, metric in _gauges("", rows, prefix).items()
    }


RING: Final = _labelled(
    ("ring", "full"), "ring_",
    """
end_lsn -> written_bytes_total | Bytes ever written to the ring.
synced_lsn -> synced_bytes_total | Bytes of the ring that are on disk.
used -> used_bytes | Bytes of the ring between its oldest and its newest record.
ring_bytes -> capacity_bytes | Bytes that the ring may have; then it overwrites (full="overwrite") or refuses (full="refuse").
headroom -> headroom_bytes | Bytes that the ring takes before it overwrites or refuses.
disk_bytes | Size of the ring's files.
prepared_in_append_total | Appends that found no segment prepared, and prepared one while all peers waited.
damaged_bytes | Bytes that were missing or damaged when the ring was opened.
refusing | 1: the last append to the ring was refused.
failed | 1: a write or sync of the ring failed, and it takes nothing until the broker is started again.
unprepared | 1: no new segment can be had for the ring, as a rule because the disk is full.
""",
)  # fmt: skip
"""Each ring."""

STREAM: Final = _labelled(
    ("stream",), "stream_",
    """
tail -> records_total | Records that the stream was ever given: the offset after its newest one.
first -> removed_records_total | Records that retention or the ring has removed: the offset of the oldest one left.
records | Records that can be read.
bytes | Bytes of the records that can be read.
subscriptions | Subscriptions to the stream.
lagging | Subscriptions that read history or have no credit, and get no batch as it arrives.
last_time_ms -> last_append_timestamp_seconds | When the newest batch was appended, in seconds since 1970; 0: none was.
""",
)  # fmt: skip
"""Each stream; the last three metrics have no figure for streams without a label."""

MAILBOX: Final = _labelled(
    ("class",), "mailbox_class_",
    """
mailboxes | Mailboxes of the class: the part of a mailbox's name before its first dot.
messages | Messages in mailboxes of the class that no reader has acknowledged.
bytes | Bytes of these messages.
held -> held_messages | Messages that a reader has in hand.
delayed -> delayed_messages | Messages that are not due yet.
readers | Readers of mailboxes of the class.
oldest -> oldest_message_age_seconds | Age of the oldest message that is due in any mailbox of the class; 0: there is none.
""",
)  # fmt: skip
"""Mailboxes by class."""

SERVICE: Final = _labelled(
    ("service",), "service_",
    """
waiting -> waiting_requests | Requests that wait for a worker.
held -> held_requests | Requests that workers have in hand.
delayed -> delayed_requests | Requests that wait for their next attempt.
retried -> retried_requests | Requests in the queue that were handed out more than once.
bytes | Bytes of the requests in the queue.
offers | Offers of workers.
credit -> credit_requests | Requests that the offers would take now; 0 while requests wait: workers are too few or too slow.
dead -> dead_letters | Dead letters that lie in the service's dead-letter mailbox.
oldest -> oldest_request_age_seconds | Age of the oldest request that waits for a worker; 0: there is none.
""",
)  # fmt: skip
"""Each service queue."""

CURSOR: Final = _labelled(
    ("stream", "cursor"), "cursor_",
    """
lag -> lag_records | Records from the cursor to the stream's tail.
pinned_bytes | Bytes of the ring that the cursor holds.
moved -> unmoved_seconds | Time since the cursor was moved; 0: it never was.
""",
)  # fmt: skip
"""Each cursor."""

GROUP: Final = _labelled(
    ("stream", "group"), "group_",
    """
lag -> lag_records | Records from the group's place to the stream's tail.
members | Members of the group.
held -> records_in_hand | Records that members have in hand.
oldest -> oldest_record_in_hand_age_seconds | How long the record in hand that was delivered first has not been acknowledged; 0: there is none.
moved -> unmoved_seconds | Time since the group's place moved; 0: it never did.
dead -> dead_letters | Dead letters that lie in the group's dead-letter mailbox.
""",
)  # fmt: skip
"""Each group."""

NAMESPACE: Final = _labelled(
    ("namespace",), "namespace_",
    """
messages_in -> messages_total | Records, messages and requests that were taken from users of the namespace.
bytes_in -> bytes_total | Bytes of the records, messages and requests that were taken from users of the namespace.
""",
)  # fmt: skip
"""Each namespace."""
NAMESPACE_LIMIT: Final = Metric(
    PREFIX + "namespace_limit", "gauge",
    "How much the users of a namespace may have together of a resource with a quota; of "
    "links_s, messages_s and publish_bytes_s how much in a second.", ("namespace", "resource"),
)  # fmt: skip
NAMESPACE_LIMIT_USED: Final = Metric(
    PREFIX + "namespace_limit_used", "gauge",
    "How much the users of a namespace have of a resource: links are connections with a session.",
    ("namespace", "resource"),
)  # fmt: skip
NAMESPACE_REFUSALS: Final = Metric(
    PREFIX + "namespace_quota_refusals_total", "counter",
    "Times that users of a namespace met a quota, their own or the namespace's, by the resource "
    "(rate: they sent too fast).", ("namespace", "resource"),
)  # fmt: skip

LATENCIES: Final = {
    "sync": Metric(
        PREFIX + "sync_duration_seconds", "histogram",
        "How long a sync of a ring to its disk takes.", (), "latency.sync",
    ),
    "confirm": Metric(
        PREFIX + "confirm_duration_seconds", "histogram",
        "Time from the write of a bundle to when its confirms of level synced are sent.",
        (), "latency.confirm",
    ),
    "delivery": Metric(
        PREFIX + "delivery_duration_seconds", "histogram",
        "Time from the append of a batch until it was given to live subscriptions, by batch; to "
        "the millisecond.", (), "latency.delivery",
    ),
    "request": Metric(
        PREFIX + "request_duration_seconds", "histogram",
        "Time from the acceptance of a request, or the end of its delay, until its reply or "
        "completion was in the log; to the millisecond.", (), "latency.request",
    ),
}  # fmt: skip
"""Histograms of durations that the broker measures."""

UP: Final = Metric(
    PREFIX + "up", "gauge", "1: the broker answered; 0: it did not, and nothing else is shown."
)
BUILD: Final = Metric(
    PREFIX + "build_info", "gauge", "The broker's version; always 1.", ("software",), "software"
)
STARTED: Final = Metric(
    PREFIX + "start_time_seconds", "gauge", "When the broker was started, in seconds since 1970.",
    (), "uptime_ms",
)  # fmt: skip
DAMAGE: Final = Metric(
    PREFIX + "damage_found", "gauge",
    "Things that the start found missing or damaged; `malamute info` names up to 100.",
    (), "damage",
)  # fmt: skip
LIMIT: Final = Metric(
    PREFIX + "limit", "gauge", "How much there may be of a resource.", ("resource",), "bounds.NAME"
)
LIMIT_USED: Final = Metric(
    PREFIX + "limit_used", "gauge", "How much there is of a resource that has a limit.",
    ("resource",),
)  # fmt: skip
UNLISTED: Final = Metric(
    PREFIX + "unlisted", "gauge",
    "Streams, mailboxes and so on that were not looked at, because there are more than 1000.",
    ("kind",),
)  # fmt: skip
ANSWER_TIME: Final = Metric(
    PREFIX + "asking_seconds", "gauge", "How long the broker took to answer for these metrics."
)

METRICS: Final[tuple[Metric, ...]] = (
    UP, BUILD, STARTED, DAMAGE, ANSWER_TIME, UNLISTED, LIMIT, LIMIT_USED,
    *FACTS.values(), *GAUGES.values(), *CHECKPOINT.values(), *RING.values(),
    *LATENCIES.values(), *STREAM.values(), *MAILBOX.values(), *SERVICE.values(),
    *CURSOR.values(), *GROUP.values(), *NAMESPACE.values(), NAMESPACE_LIMIT, NAMESPACE_LIMIT_USED,
    NAMESPACE_REFUSALS, *COUNTERS.values(), *SHELL.values(),
    REFUSALS, QUOTA_REFUSALS, DENIALS, EVENTS,
)  # fmt: skip
"""All metrics, in the order in which they are shown."""
