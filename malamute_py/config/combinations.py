"""Values of a configuration that are right by themselves and wrong beside another value.

Owns every comparison of two settings. The rule: each fault names the key to be changed and the
values that do not agree. Source: deploy/malamute.toml.
"""

from __future__ import annotations

from collections.abc import Iterator

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_protocol.address import REPLICA, name_fault, template_fault
from malamute_py.config.keys import QUOTAS, nearest
from malamute_py.config.sections import Authentication, Config
from malamute_py.sections import ConfigError, check_http


def wrong_in_combination(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each value that is right by itself and wrong beside another value.

    load() raises the first one; a check of the configuration tells all of them.
    """
    if not config.listen:
        yield ConfigError("listen", f"name at least one endpoint, for instance {DEFAULT_ENDPOINT}")
    links, limits, journal = config.links, config.limits, config.journal
    # A default lies within the bounds of what a client may choose instead.
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
    # What RingSettings of the journal would refuse, and ring_settings() relies on.
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
    # As ring main fills up, an advance of the tables is forced before clients have to wait.
    if checkpoint.force_percent >= checkpoint.pressure_percent:
        yield ConfigError(
            "checkpoint.force_percent",
            f"{checkpoint.force_percent} is not below checkpoint.pressure_percent "
            f"({checkpoint.pressure_percent})",
        )
    yield from faults_of_users(config)
    yield from _namespace_faults(config)
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


def faults_of_users(config: Config) -> Iterator[ConfigError]:
    """Yield faults of users that one value alone does not show: unknown quotas, wrong templates.

    config: with or without what its users file has.
    """
    tables = [(f"quotas.identities.{name}", own) for name, own in config.quotas.identities.items()]
    tables += [(f"namespaces.{name}.quotas", own.quotas) for name, own in config.namespaces.items()]
    for table, quotas in tables:
        for quota in quotas:
            if quota not in QUOTAS:
                near = nearest(quota, QUOTAS) or f"; there are {', '.join(QUOTAS)}"
                yield ConfigError(f"{table}.{quota}", f"there is no such quota{near}")
    yield from _identity_faults(config.authentication)


def _namespace_faults(config: Config) -> Iterator[ConfigError]:
    """Find namespaces whose prefixes cannot be right, lie in each other, or have no users."""
    if config.namespaces and config.authentication.mechanism == "none":
        yield ConfigError(
            "namespaces", 'need users: set authentication.mechanism to "plain" or "curve"'
        )
    prefixes = {name: each.prefix_of(name) for name, each in config.namespaces.items()}
    for name, prefix in prefixes.items():
        # A prefix is right where a name that begins with it is one.
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
    """Find templates of identities that give none, or the same ones to two users.

    A template has {n} for a number, so that each replica of a program gets an identity of its own.
    """
    users = {*authentication.users, *authentication.clients}
    # Template -> its user; each user has `<user>-{n}` without a word in the configuration.
    given: dict[str, str] = {f"{user}-{REPLICA}": user for user in users}
    for user, templates in authentication.identities.items():
        key = f"authentication.identities.{user}"
        if user not in users and not authentication.users_file:  # which may have the user
            yield ConfigError(key, f"there is no user of this name{nearest(user, users)}")
        for template in templates:
            fault = template_fault(template)
            if fault:
                yield ConfigError(key, fault)
            if given.setdefault(template, user) != user:
                yield ConfigError(key, f"user {given[template]} derives from {template!r} already")
