"""The settings of the core, by the configuration.

Owns which key of the configuration each setting has. The rule: what is left out of the
configuration is the core's own default, which a test compares. Source: limits.py, config.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from malamute_py.broker import BrokerSettings
from malamute_py.config import Config
from malamute_py.form import version
from malamute_py.server.authentication.credentials import carriers_of
from malamute_py.server.authentication.in_force import UsersInForce
from malamute_py.server.authentication.namespaces import Namespaces
from malamute_py.server.authentication.permissions import Permissions, QuotaTable
from malamute_py.server.validating import can_validate


def core_settings(
    config: Config, reload: Callable[[int, int], str], facts: Callable[[], dict[str, Any]]
) -> BrokerSettings:
    """Return the core's settings. reload, facts: as in BrokerSettings."""
    links, streams, memory = config.links, config.streams, config.memory
    mailboxes, services, groups = config.mailboxes, config.services, config.groups
    transactions = config.transactions
    carriers = carriers_of(config.authentication)
    namespaces = Namespaces(config.namespaces)
    permissions = Permissions(config.permissions, carriers, namespaces)
    return BrokerSettings(
        limits=config.limits.of_messages(),
        software=f"malamute-py {version()}",
        permit=permissions,
        subjects=permissions.subjects,
        quota=QuotaTable(config.quotas).of,
        known=carriers.knows,
        reload=reload,
        users=UsersInForce(config, permissions),
        namespaces=namespaces.all,
        namespace_of=namespaces.of,
        carrier=carriers,
        facts=facts,
        validates=can_validate(),
        meter=time.perf_counter_ns,
        matching_share=1_000 * config.loop.matching_us,
        links_max=links.links_max,
        replicas_max=links.replicas_max,
        replica_grace_ms=links.replica_grace_ms,
        heartbeat_ms=links.heartbeat_ms,
        heartbeat_min_ms=links.heartbeat_min_ms,
        heartbeat_max_ms=links.heartbeat_max_ms,
        expiry_beats=links.expiry_beats,
        window_bytes=links.window_bytes,
        outbox_commands_max=links.outbox_commands_max,
        link_queries_max=links.queries_max,
        outstanding_bytes=memory.outstanding_bytes,
        share_min_bytes=memory.share_min_bytes,
        share_max_bytes=memory.share_max_bytes,
        streams_max=streams.streams_max,
        rings_max=streams.rings_max,
        rings_bytes_max=streams.rings_bytes_max,
        rings_memory_bytes_max=streams.rings_memory_bytes_max,
        settings_bytes_max=streams.settings_bytes_max,
        all_settings_bytes_max=streams.all_settings_bytes_max,
        link_subscriptions_max=streams.link_subscriptions_max,
        subscriptions_max=streams.subscriptions_max,
        pattern_bytes_max=streams.pattern_bytes_max,
        all_patterns_bytes_max=streams.all_patterns_bytes_max,
        producers_max=streams.producers_max,
        producer_streams_max=streams.producer_streams_max,
        producer_places_max=streams.producer_places_max,
        auto_create=streams.auto_create,
        default_stream=streams.default,
        unsynced_bytes_max=memory.unsynced_bytes_max,
        hot_bytes=memory.hot_bytes,
        quantum_bytes=memory.quantum_bytes,
        step_bytes=memory.step_bytes,
        reads_max=memory.reads_max,
        last_per_subject_max=streams.last_per_subject_max,
        keys_max=streams.keys_max,
        all_keys_bytes_max=streams.all_keys_bytes_max,
        deleted_keys_ms=streams.deleted_keys_ms,
        retention_ms=streams.retention_ms,
        retry_ms=streams.retry_ms,
        mailboxes_max=mailboxes.mailboxes_max,
        default_mailbox=mailboxes.default,
        mailbox_messages_max=mailboxes.messages_max,
        mailbox_bytes_max=mailboxes.bytes_max,
        mail_bytes_max=mailboxes.all_bytes_max,
        mail_memory_bytes_max=mailboxes.memory_bytes_max,
        temporary_bytes_max=mailboxes.temporary_bytes_max,
        mail_hot_bytes=mailboxes.hot_bytes,
        mail_read_bytes=mailboxes.read_bytes,
        mail_reads_max=mailboxes.reads_max,
        inbox_read_bytes=mailboxes.inbox_read_bytes,
        inbox_reads=mailboxes.inbox_reads,
        peek_bytes_max=mailboxes.peek_bytes_max,
        services_max=services.services_max,
        default_service=services.default,
        service_requests_max=services.requests_max,
        service_bytes_max=services.bytes_max,
        all_requests_bytes_max=services.all_bytes_max,
        request_rows_max=services.rows_max,
        request_subjects_max=services.subjects_max,
        offers_max=services.offers_max,
        lease_ms=services.lease_ms,
        lease_min_ms=services.lease_min_ms,
        lease_max_ms=services.lease_max_ms,
        attempts_max=services.attempts_max,
        backoff_ms=services.backoff_ms,
        backoff_max_ms=services.backoff_max_ms,
        cursors_max=groups.cursors_max,
        pin_bytes_max=groups.pin_bytes_max,
        groups_max=groups.groups_max,
        group_members_max=groups.members_max,
        group_window_records=groups.window_records,
        group_hold_ms=groups.hold_ms,
        group_hold_max_ms=groups.hold_max_ms,
        group_flush_ms=groups.flush_ms,
        transactions_max=transactions.transactions_max,
        transaction_bytes_max=transactions.bytes_max,
        transaction_batches_max=transactions.batches_max,
        staged_bytes_max=transactions.all_bytes_max,
        transaction_timeout_ms=transactions.timeout_ms,
        transaction_timeout_max_ms=transactions.timeout_max_ms,
    )
