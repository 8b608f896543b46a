"""Time that passed without the broker: the clock was set forward, or the process stood still.

Owns what is moved when that happens. The rule: peers could not be heard in such a time, so that it
counts for no silence of theirs: links, leases, kept places and names, and open transactions go on
with what was left to them. Times that clients name (deadlines, delays, expiries) and the age of
records are the wall clock's, and stay. Source: ARCHITECTURE.md, "Time that the broker missed".
"""

from __future__ import annotations

from malamute_py.broker.context import Shard
from malamute_py.broker.groups.groups import Groups
from malamute_py.broker.links.links import Links
from malamute_py.broker.mail.mail import Mail
from malamute_py.broker.services.services import Services
from malamute_py.broker.transactions.transactions import Transactions


def skip_time(
    shard: Shard, links: Links, mail: Mail, services: Services, groups: Groups,
    transactions: Transactions, skipped_ms: int, now_ms: int,
) -> None:  # fmt: skip
    """Put off all that peers would lose by a silence.

    Called by the shell, as `Broker.skipped`, when a turn begins much later than it should: by
    `skipped_ms`. now_ms: the time after that.
    """
    shard.advance(now_ms)
    for link in links:
        link.heard_ms += skipped_ms
    links.replicas.put_off(skipped_ms)
    mail.mailboxes.endings.put_off(skipped_ms)
    services.put_off_leases(skipped_ms)
    groups.put_off(skipped_ms)
    transactions.put_off(skipped_ms)
    shard.event("time_skipped", "warning", ms=skipped_ms)
