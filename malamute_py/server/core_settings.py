"""The settings of the core, by the configuration.

Owns which key of the configuration each setting has. The rules: a key of the sections streams,
memory, services, groups and transactions is the setting of its name, if the core has one; what is
left out of the configuration is the core's own default, which a test compares. Source: limits.py,
config/sections.py.
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
    config: Config,
    reload: Callable[[int, int], str],
    facts: Callable[[], dict[str, Any]],
    in_force: Callable[[], dict[str, Any]],
) -> BrokerSettings:
    """Return the core's settings, by a configuration that is complete (with the users file).

    Called at a start and for each reload. reload, facts, in_force: what the core calls for
    RELOAD_CONFIG and BROKER_INFO; see BrokerSettings.
    """
    links, streams = config.links, config.streams
    mailboxes, services, groups = config.mailboxes, config.services, config.groups
    transactions = config.transactions
    # Keys of these sections that have the name of a setting of the core.
    alike = {
        name: getattr(section, name)
        for section in (streams, config.memory, services, groups, transactions)
        for name in section.__struct_fields__
        if name in BrokerSettings.__struct_fields__
    }
    carriers = carriers_of(config.authentication)
    namespaces = Namespaces(config.namespaces)
    permissions = Permissions(config.permissions, carriers, namespaces)
    return BrokerSettings(
        limits=config.limits.of_messages(),
        software=f"malamute-py {version()}",
        permit=permissions,
        subjects=permissions.subjects,
        allows_some=permissions.allows_some,
        quota=QuotaTable(config.quotas).of,
        known=carriers.knows,
        reload=reload,
        users=UsersInForce(config, permissions),
        namespaces=namespaces.all,
        namespace_of=namespaces.of,
        carrier=carriers,
        facts=facts,
        in_force=in_force,
        validates=can_validate(),
        meter=time.perf_counter_ns,
        matching_share=1_000 * config.loop.matching_us,  # in nanoseconds, as the meter counts
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
        default_stream=streams.default,
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
        default_service=services.default,
        service_requests_max=services.requests_max,
        service_bytes_max=services.bytes_max,
        all_requests_bytes_max=services.all_bytes_max,
        request_rows_max=services.rows_max,
        request_subjects_max=services.subjects_max,
        group_members_max=groups.members_max,
        group_window_records=groups.window_records,
        group_hold_ms=groups.hold_ms,
        group_hold_max_ms=groups.hold_max_ms,
        group_flush_ms=groups.flush_ms,
        transaction_bytes_max=transactions.bytes_max,
        transaction_batches_max=transactions.batches_max,
        staged_bytes_max=transactions.all_bytes_max,
        transaction_timeout_ms=transactions.timeout_ms,
        transaction_timeout_max_ms=transactions.timeout_max_ms,
        **alike,
    )
