"""Events of a broker's log, each once: its name, its levels and what it means.

Owns the names. The rule: an event that is told anywhere stands here, each row is told somewhere, and
a line has one of its row's levels; a test compares. `make metrics-page` writes the table of
deploy/metrics.md from it.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Event(NamedTuple):
    """One row of the table."""

    name: str
    levels: str
    """The level of its lines, or several with a blank between them, the lowest first."""
    meaning: str
    """Text for an operator: what happened, and what to do."""


EVENTS: Final = (
    Event("listening", "info", "the broker serves"),
    Event("stopped", "info", "the broker ended in order"),
    Event("open_files", "info", "how many files the broker may have open"),
    Event("recovered", "info", "a ring was read back"),
    Event("queues_recovered", "info", "mailboxes, services, cursors and groups were read back"),
    Event("queues_lost", "error", "mailboxes, services, cursors and groups could not be recovered: commands that need them are refused as `queues_lost`, streams are served; `do` says how to go on"),
    Event("queues_log_given_up", "error", "ring main had no room for streams beside the log of the lost queues: the oldest part of that log is gone"),
    Event("queues_rebuilt", "warning", "queues.db was missing or damaged, and was made anew from the log; `lost` says whether anything was missing; the former file lies beside it as `queues.damaged-N.db`"),
    Event("queues_loss_accepted", "error", '`checkpoint.lost_changes = "accept"` was used: the loss in `reason` is accepted, on disk: set the key back'),
    Event("journal_damaged", "error", "a ring has damage: malamute journal verify"),
    Event("unconfirmed_tail_dropped", "warning", "a torn end, never confirmed, was cut off"),
    Event("segment_rewritten", "warning", "data that a failed sync left was written anew"),
    Event("file_restored", "error", "a file was missing, damaged or cut off, and was made anew from other files; the losses of a segment are in `journal_damaged`"),
    Event("offsets_left_out", "error", "damage took the newest records of a stream: the stream goes on after the offsets [`from`, `to`), so that none is given twice"),
    Event("directory_moved", "warning", "the data directory is not where it was (`differs`): a copy, or moved; its epoch has leapt"),
    Event("directory_exposed", "warning", "others than the broker's user may change the data directory: `reason`; `do` says the command"),
    Event("file_left_alone", "warning error", "an unknown file, a link, a FIFO or the like lies in the data directory"),
    Event("ring_left_alone", "warning", "a ring that belongs to no stream lies there"),
    Event("bytes_uncounted", "warning", "this kernel does not count the bytes of a connection: no bound of unread bytes holds for clients of this machine, and an address that others can reach is refused"),
    Event("passwords_in_clear", "warning", 'authentication.mechanism = "curve" would encrypt them'),
    Event("denied", "warning", "a connection was turned away, and why: `credential`, `paused`, `busy`"),
    Event("password_pause", "warning", "a user's password (`user` empty: those of names that no user has) was wrong too often at an address; others there are not concerned"),
    Event("connections_bounded", "warning", "the limit of open files allows fewer connections than the configuration: raise it"),
    Event("long_turn", "warning", "a turn of the loop used a processor for so many `ms`, and all clients waited for it: report what they sent then"),
    Event("connection_cut", "warning", "a connection was cut, and why"),
    Event("address_turned_away", "warning", "bytes of ended connections of an address fill the memory: until they are taken up, or the sockets are empty, the kernel drops the address's connection requests; clients that are connected stay. Find out which program floods the broker from that address"),
    Event("connections_held", "warning", "a turn of the loop waited for a disk or a processor while so many `connections` filled the memory: until the turn ended the kernel dropped what they sent, and their kernels send it again. Nothing was cut or lost (0: only requests for new connections were dropped). If it comes often, the disk or the machine is too slow for the load"),
    Event("filter_refused", "warning", "this kernel has no filters of sockets: a connection of such an address is cut only after it was accepted, and what it has sent by then takes memory"),
    Event("trim_failed", "warning", "the system refused a thread that would give memory of cut connections back; the broker tries again. Follow `do`: raise the limit of tasks or give more memory"),
    Event("accept_failed", "warning", "a connection could not be accepted: too many open files?"),
    Event("malformed", "warning", "a peer broke the protocol"),
    Event("link_opened", "info", "a session began"),
    Event("link_closed", "info warning", "a session ended, and why"),
    Event("quota_reached", "warning", "an identity has what `[quotas]` gives it of a resource (`rate`: it sends faster); said again once a tenth of it was given back. Raise it in `[quotas.identities]`, or find out which program it is"),
    Event("identity_taken", "warning", "a second client has the identity; the first one was fenced"),
    Event("forbidden", "warning", "an identity was refused what it may not do: `command` is the number of SPEC.md, `reason` says what. `malamute who-can` tells who may"),
    Event("administered", "info", "an identity (`by`) changed what others use: `command` and what it was about"),
    Event("configuration_reloaded", "info", "the configuration was read anew, because a signal (`link` 0) or a link asked: how many settings were `applied`, `refused` (the old value stays in force), and need a `restart`"),
    Event("setting_reloaded", "info warning", "one of these settings, and why"),
    Event("stream_created", "info", "a stream was created"),
    Event("stream_removed", "info", "a stream was removed"),
    Event("stream_trimmed", "info", "records before `before` were removed; `by` is the owner who asked"),
    Event("stream_purged", "info", "records of subjects that `pattern` matches were removed before `before`; `by` is the owner who asked"),
    Event("publish_conflicting", "warning", "a producer sent another batch under a sequence that was taken: two of one id, or one that forgot"),
    Event("publish_damaged", "warning", "a producer sent a batch again that the log had and damage took: its program is told, and has to publish these records anew. The journal's own events name the damage"),
    Event("producers_forgotten", "warning", "there were too many producers, or too many streams that they write to: those that this identity, which had the most, did not use for long are forgotten"),
    Event("internal_error", "error", "an error of the broker's own, contained: `doing` says at what, `link`, `identity`, `command` and `stream` for whom, `error` and `trace` what it was. Report it"),
    Event("batch_quarantined", "error", "a stored batch cannot be handled: `stream`, `from`, `to`; readers that need a part of it get a gap `damaged`. Said once for each batch"),
    Event("keys_read", "info", "a start has read the keys of a stream that keeps the last record of each subject"),
    Event("key_lost", "error", "a newest record lies in damage, and cannot be kept while the ring comes round: `key` is forgotten"),
    Event("keys_not_read", "error", "they could not be read: the stream refuses what concerns its keys until the next start"),
    Event("read_erred", "warning", "the reader thread met an error of the broker's own in stored data; the link that asked is told `internal`"),
    Event("read_failed", "error", "history could not be read: look at the disk"),
    Event("read_stuck", "error", "history could not be read, again and again"),
    Event("mailbox_created", "info", "a mailbox was created"),
    Event("mailbox_edited", "info", "settings of a mailbox were changed"),
    Event("mailbox_purged", "info", "a mailbox was emptied by hand"),
    Event("mailbox_removed", "info", "a mailbox was removed"),
    Event("mailbox_full", "warning", "a mailbox takes no more until messages are read; said once until then"),
    Event("mail_redelivered", "info", "a reader went away before it acknowledged messages"),
    Event("mail_expired", "info", "messages expired"),
    Event("mail_read_failed", "error", "bodies could not be read: look at the disk"),
    Event("mail_damaged", "error", "a body is damaged"),
    Event("mail_lost", "error", "bodies are neither in the log nor in the tables"),
    Event("service_created", "info", "a service queue was created"),
    Event("service_removed", "info", "a service queue was removed"),
    Event("worker_died", "warning", "a worker went away while it held requests; other workers get them"),
    Event("lease_expired", "warning", "a worker was silent about requests for too long; others get them"),
    Event("request_expired", "warning", "a request's deadline was over; its requester was told"),
    Event("request_dead", "warning", "a request failed or was tried too often, and lies in the dead-letter mailbox"),
    Event("request_lost", "error", "a request's body is neither in the log nor in the tables; its requester was told"),
    Event("reply_late", "warning", "a worker answered a request that it does not hold any more; said once while it goes on"),
    Event("reply_undeliverable", "warning", "a reply's mailbox is gone, with its requester"),
    Event("dead_letter_refused", "warning error", "the dead-letter mailbox is full or in memory; of a `group`: its record waits until it is taken, and the event is said once until then"),
    Event("cursor_clamped", "info warning", "a stream no longer had a cursor's position"),
    Event("record_dead", "warning", "records of a group had too many attempts or were given up, and lie in the dead-letter mailbox `mailbox`; `offset` is the first of `count`"),
    Event("group_clamped", "info warning", "a stream no longer had a group's position"),
    Event("group_gap", "info warning", "the ring had given up records that the group had not had"),
    Event("group_held_up", "warning", "a member has not acknowledged for so long that its group reads no further: `link` and `identity` hold the oldest record (0: no member does, it was given back with a delay); `client kick` gives it to others"),
    Event("group_joined", "info", "a member joined"),
    Event("group_lease_ended", "warning", "a member was silent for longer than the group's lease: others get `records` records of it, the first of them `offset`, and it gets none until it acknowledges something"),
    Event("group_left", "info", "a member left, or `members` of one link at once"),
    Event("group_place_lost", "info", "the holder of an exclusive group did not return in time"),
    Event("pin_near_limit", "warning", "a cursor's pin holds nearly as much as it may; move the cursor"),
    Event("pin_broken", "warning", "a cursor's pin held more than it may"),
    Event("append_refused", "info error", "a ring takes nothing: full, held by the checkpoint, or the disk is full"),
    Event("appends_still_refused", "warning", "how often the ring has refused since the event before"),
    Event("appends_taken_again", "info", "the ring takes appends again"),
    Event("stream_overwritten", "warning", "the other streams of a shared ring overwrote the last record of a stream. To keep its history apart, create it with `ring_bytes`"),
    Event("segment_retired", "info", "the oldest segment of a ring was given up"),
    Event("segment_not_prepared", "warning", "no new segment could be had: the disk is full?"),
    Event("ring_not_opened", "warning", "a stream's own ring could not be opened"),
    Event("ring_not_closed", "error", "a ring that had failed was left as it is"),
    Event("ring_failed", "error critical", "a write or sync failed; the ring takes nothing more: look at the disk, start again"),
    Event("checkpoint_done", "debug info", "an advance of the tables (debug; info after a failure)"),
    Event("checkpoint_failed", "error", "an advance failed, and when it is tried again. Nothing is lost; the ring fills until it goes well"),
    Event("checkpoint_forced", "warning", "the use of ring main reached checkpoint.force_percent"),
    Event("checkpoint_slow", "warning", "an advance takes more than 30 s"),
    Event("checkpoint_process_hung", "error", "the process that writes the tables did nothing for checkpoint.stall_ms although it had something to do: it was killed, and another goes on"),
    Event("checkpoint_process_restarted", "warning", "the process that writes the tables died, and another goes on"),
    Event("checkpoint_process_said", "warning", "text that the process wrote to its standard error"),
    Event("checkpoint_met_damage", "error", "the log lacks changes or bodies"),
    Event("checkpoint_left_behind", "info", "a stop did not wait for the tables; the next start reads the log"),
    Event("pressure_begins", "warning", "the use of ring main reached checkpoint.pressure_percent: new mail, requests and records for it wait"),
    Event("pressure_ends", "info", "new mail, requests and records for ring main are taken again"),
    Event("http_listening", "info", "the HTTP side serves, at `url`"),
    Event("http_ended", "error", "the process of the HTTP side ended, and the last that it `said`; it is started again"),
    Event("http_said", "warning", "what the process of the HTTP side wrote"),
    Event("log_lines_suppressed", "warning", "how many lines of an event were not written"),
    Event("thread_died", "critical", "a bug in a thread; the broker ends"),
    Event("failed", "critical", "a bug; the broker ends"),
    Event("failed_at_end", "critical", "a fault while it ended"),
)  # fmt: skip
"""All events, what belongs together side by side."""

LEVELS: Final = {event.name: event.levels for event in EVENTS}
