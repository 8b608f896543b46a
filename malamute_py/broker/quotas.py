"""Quotas: what one identity may have of what all clients share.

Owns the counts by identity, and the buckets of its rates. The rules: an object that outlives a link
(a stream, a mailbox, a service, a cursor, a group, messages in mailboxes, requests) counts for its
creator or sender, a reply for its requester, as the change log has it, so that a restart counts the
same; an object that ends with a link counts for the link's owner. The owner is the credential, so
that all replicas of one are one owner; without a credential it is the identity, or the template of
the replicas (their mail and requests count for each, as the log has nothing but the sender). Links
without an identity are one owner for what the log has; for rates, and for what ends with a link,
those of one network address are, or of one local user: no address can use up what others may have.
A count that is reached is refused `limit`; a rate, and
bytes that drain by themselves, `wait`; each refusal is counted, and logged once until it is eased.
What owners of a namespace have counts for the namespace as well, which has bounds of its own, and
so do their messages and what they were refused. A batch of records needs no look-up: a link carries
its owner's counts.

Source: SPEC.md, section 4.

A holder is the name under which a client sends: its identity, or one that begins with `~`. A
resource is what a quota bounds, by the name of the setting. A receiver is a subscription, an inbox,
an offer of a worker, or a membership of a group.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final, Protocol

from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.limits import BrokerSettings, Namespace, Quota

PASSING: Final = frozenset(
    {"mail_bytes", "mail_memory_bytes", "request_bytes", "request_memory_bytes", "questions"}
)
"""Resources that become free by themselves: refused `wait`."""
EASED_PERCENT: Final = 90
"""Share of a quota: once an owner holds no more than this, its next refusal is logged again."""
NAMELESS: Final = "~"
"""First character of holders without an identity, and of addresses as owners of their links."""
LINE_MS: Final = 5_000
"""The longest time after which a peer that found no place for its link is told to come again."""
IDLE_OWNERS_MAX: Final = 1_024
"""Owners in the table from which on owners that hold nothing are looked for and forgotten."""


class Bucket:
    """A rate: a second's worth may be spent at once, and a batch may go into debt for more."""

    __slots__ = ("_at_ms", "_level", "rate")

    def __init__(self, rate: int, now_ms: int) -> None:
        """rate: units a second, at least 1."""
        self.rate = rate
        self._level = rate * 1_000
        """Amount that may be spent, in thousandths of a unit, so that a millisecond adds `rate` of
        them; below 0: a debt."""
        self._at_ms = now_ms
        """Time up to which the level has been raised."""

    def wait_ms(self, now_ms: int) -> int:
        """Raise the level to its present height; return the time until it is above 0; 0: now."""
        if now_ms > self._at_ms:
            gained = self.rate * (now_ms - self._at_ms)
            self._level = min(self.rate * 1_000, self._level + gained)
            self._at_ms = now_ms
        # Thousandths of a unit, by units a second, are milliseconds.
        return 0 if self._level > 0 else -self._level // self.rate + 1

    def spend(self, amount: int) -> None:
        """Spend units; the level may fall below nothing."""
        self._level -= amount * 1_000

    def full(self, now_ms: int) -> bool:
        """Whether the bucket is full again, so that it may be forgotten and made anew."""
        self.wait_ms(now_ms)
        return self._level >= self.rate * 1_000


class Line:
    """A rate at which links are opened. Those that find no place are told to come one by one."""

    __slots__ = ("_bucket", "_last_us")

    def __init__(self, rate: int, now_ms: int) -> None:
        """rate: links a second, at least 1."""
        self._bucket = Bucket(rate, now_ms)
        self._last_us = 0
        """Time for which the last of those that found no place was told to come again."""

    def enter(self, now_ms: int) -> int:
        """Take a place; returns 0, or the milliseconds after which to come again.

        Places are not kept: who comes then may find them taken by others.
        """
        if not self._bucket.wait_ms(now_ms):
            self._bucket.spend(1)
            return 0
        now_us = now_ms * 1_000
        self._last_us = max(self._last_us, now_us) + 1_000_000 // self._bucket.rate
        if self._last_us > now_us + LINE_MS * 1_000:
            self._last_us = now_us + 1_000  # The line is full: from here on two come at a time.
        return -(-(self._last_us - now_us) // 1_000)

    def full(self, now_ms: int) -> bool:
        """Whether none took a place lately, so that the line may be forgotten and made anew."""
        return self._bucket.full(now_ms)


class Usage:
    """The amounts that one owner, or one namespace, holds."""

    __slots__ = (
        "_bytes",
        "_messages",
        "bytes_in",
        "counted",
        "held",
        "is_namespace",
        "line",
        "messages_in",
        "metered",
        "owner",
        "quota",
        "refused",
        "shared",
        "told",
    )

    def __init__(
        self, owner: str, quota: Quota, now_ms: int, shared: Usage | None = None,
        *, is_namespace: bool = False,
    ) -> None:  # fmt: skip
        """owner: its name. shared: amounts of its namespace, of which these are a part."""
        self.owner = owner
        self.is_namespace = is_namespace
        self.quota = quota
        self.shared = shared
        self.held: defaultdict[str, int] = defaultdict(int)
        """Amounts that it has now, by the name of the quota (a field of Quota)."""
        self.told: set[str] = set()
        """Quotas that were logged as reached, and have not been eased since."""
        self._bytes = Bucket(quota.publish_bytes_s, now_ms) if quota.publish_bytes_s else None
        self._messages = Bucket(quota.messages_s, now_ms) if quota.messages_s else None
        self.line = Line(quota.links_s, now_ms) if quota.links_s else None
        """Where its new links wait for their turn; None: they have no bound in time."""
        self.messages_in = self.bytes_in = 0
        """Messages and their bytes that were taken, of a namespace or where there is a rate."""
        self.refused: dict[str, int] = {}
        """Times that a namespace's users met a quota, its own or theirs, by its name."""
        self.metered = self._is_metered()
        """Whether the owner, or its namespace, has a rate."""
        self.counted = self.metered or shared is not None
        """Whether messages are counted: spend() is called for them."""

    def _is_metered(self) -> bool:
        """Whether the owner or its namespace has a rate."""
        return bool(self._bytes or self._messages or (self.shared and self.shared.metered))

    @property
    def named(self) -> str:
        """The owner, or namespace, as a reason names it."""
        if self.is_namespace:
            return f"namespace '{self.owner}'"
        if self.owner[:1] == NAMELESS:
            return f"the clients without an identity at {self.owner[1:]}"
        return f"identity '{self.owner}'" if self.owner else "the clients without an identity"

    def key(self, resource: str) -> str:
        """Return the setting that bounds a resource, as a reason names it."""
        return f"namespaces.{self.owner}.quotas.{resource}" if self.is_namespace else (
            f"quotas.{resource}"
        )  # fmt: skip

    def renew(self, quota: Quota, now_ms: int, shared: Usage | None = None) -> None:
        """Have other bounds from now on, as the configuration was read anew.

        A rate that has changed begins with a second's worth; one that has not keeps its debt.
        """
        before, self.quota, self.shared = self.quota, quota, shared
        if quota.publish_bytes_s != before.publish_bytes_s:
            rate = quota.publish_bytes_s
            self._bytes = Bucket(rate, now_ms) if rate else None
        if quota.messages_s != before.messages_s:
            rate = quota.messages_s
            self._messages = Bucket(rate, now_ms) if rate else None
        if quota.links_s != before.links_s:
            self.line = Line(quota.links_s, now_ms) if quota.links_s else None
        self.metered = self._is_metered()
        self.counted = self.metered or shared is not None
        self.told.clear()

    def wait_ms(self, now_ms: int) -> int:
        """Milliseconds until something may be spent, of its own rates; 0: now."""
        wait_ms = 0
        if self._bytes is not None:
            wait_ms = self._bytes.wait_ms(now_ms)
        if self._messages is not None:
            wait_ms = max(wait_ms, self._messages.wait_ms(now_ms))
        return wait_ms

    def exceeded(self, now_ms: int) -> tuple[str, int]:
        """Return the setting and bound of the rate for which it has to wait longest."""
        messages = self._messages
        if messages is not None and messages.wait_ms(now_ms) == self.wait_ms(now_ms):
            return "messages_s", self.quota.messages_s
        return "publish_bytes_s", self.quota.publish_bytes_s

    def spend(self, count: int, size: int) -> None:
        """Spend messages and their bytes, which were taken: a rate may fall into debt by them."""
        self.messages_in += count
        self.bytes_in += size
        if self._bytes is not None:
            self._bytes.spend(size)
        if self._messages is not None:
            self._messages.spend(count)
        if self.shared is not None:
            self.shared.spend(count, size)

    def idle(self, now_ms: int) -> bool:
        """Whether the owner may be forgotten: it holds nothing, and its rates are as at first."""
        return not any(self.held.values()) and all(
            bucket is None or bucket.full(now_ms)
            for bucket in (self._bytes, self._messages, self.line)
        )


UNMETERED: Final = Usage("", Quota(), 0)
"""Usage of a link that was not welcomed yet: it can spend nothing."""


class QuotaContext(Protocol):
    """The core's time, settings, counters and log, as far as quotas need them."""

    now_ms: int
    settings: BrokerSettings
    counters: defaultdict[str, int]

    def event(self, name: str, level: str = "info", **facts: Any) -> None: ...  # noqa: D102


class Quotas:
    """The amounts of all owners."""

    def __init__(self, context: QuotaContext) -> None:
        self._context = context
        self._owners: dict[str, Usage] = {}
        self._shared: dict[str, Usage] = {}
        """Amounts of the namespaces by name, sums over their owners."""
        self._prune_at = IDLE_OWNERS_MAX
        self.total: defaultdict[str, int] = defaultdict(int)
        """Totals over all owners of the resources that are bounded in all and counted nowhere
        else."""

    def of(self, owner: str) -> Usage:
        """Return the amounts of an owner, made at its first use and kept while there are any."""
        usage = self._owners.get(owner)
        if usage is None:
            now_ms = self._context.now_ms
            if len(self._owners) >= self._prune_at:
                # Owners that hold nothing are dropped, at each doubling alone: each costs a look.
                self._owners = {
                    name: usage for name, usage in self._owners.items() if not usage.idle(now_ms)
                }
                self._prune_at = max(IDLE_OWNERS_MAX, 2 * len(self._owners))
            # named: the owner as the settings know it; all network addresses are "" there.
            settings, named = self._context.settings, _configured(owner)
            namespace = settings.namespace_of(named)
            shared = None if namespace is None else self.shared_by(namespace)
            usage = self._owners[owner] = Usage(owner, settings.quota(named), now_ms, shared)
        return usage

    def shared_by(self, namespace: Namespace) -> Usage:
        """Return what the owners of a namespace have together."""
        usage = self._shared.get(namespace.name)
        if usage is None:
            usage = self._shared[namespace.name] = Usage(
                namespace.name, namespace.quota, self._context.now_ms, is_namespace=True
            )
        return usage

    def renew(self) -> None:
        """Give all owners the bounds of the settings in force now, and sum up the namespaces.

        Called when the configuration was read anew: namespaces may have come, gone, or other users.
        """
        settings, now_ms = self._context.settings, self._context.now_ms
        names = {namespace.name for namespace in settings.namespaces}
        self._shared = {name: usage for name, usage in self._shared.items() if name in names}
        for namespace in settings.namespaces:
            usage = self.shared_by(namespace)
            usage.renew(namespace.quota, now_ms)
            usage.held.clear()
        for owner, usage in self._owners.items():
            named = _configured(owner)
            of = settings.namespace_of(named)
            shared = None if of is None else self.shared_by(of)
            usage.renew(settings.quota(named), now_ms, shared)
            if shared is not None:
                for resource, amount in usage.held.items():
                    shared.held[resource] += amount

    def check(self, owner: str, resource: str, amount: int = 1, asker: str | None = None) -> None:
        """Raise BrokerRefused unless an owner may have so much more of a resource.

        asker: who is told of a refusal, as a user who edits a stream of another owner; None: the
        owner.
        """
        try:
            self._check(self.of(owner), resource, amount)
        except BrokerRefused as error:
            if asker is None:
                raise
            reason = "the quota of the identity that it counts for is used up; ask the operator"
            raise self.shown(error, owner, asker, reason) from None

    def shown(self, error: BrokerRefused, owner: str, asker: str, instead: str) -> BrokerRefused:
        """Return a refusal about what an owner has, as another may see it.

        instead: reason for one who is in a namespace to which the owner does not belong.
        """
        if self._context.settings.shares_namespace(asker, owner):
            return error
        return BrokerRefused(error.code, instead, error.retry_ms)

    def limit_told_to(self, asker: str, noun: str, reason: str) -> BrokerRefused:
        """Return the refusal `limit`, to be raised, for a bound over all clients that is reached.

        asker: decides the words alone. A user of a namespace is not told the bound, since it says
        how much all others have.
        """
        if self._context.settings.namespace_of(asker) is not None:
            reason = f"the broker takes no more {noun}; ask the operator"
        return BrokerRefused("limit", reason)

    def _check(self, usage: Usage, resource: str, amount: int) -> None:
        """Raise BrokerRefused if a resource would exceed the quota of its owner or namespace."""
        bound: int = getattr(usage.quota, resource)
        if bound and usage.held[resource] + amount > bound:
            raise self._refusal(usage, resource, bound, amount)
        if usage.shared is not None:
            self._check(usage.shared, resource, amount)

    def add(self, owner: str, resource: str, amount: int = 1) -> None:
        """Count that an owner has so much more of a resource; below 0: less."""
        self.total[resource] += amount
        self._add(self.of(owner), resource, amount)

    def check_receiver(self, owner: str, resource: str, pattern_bytes: int) -> None:
        """Raise BrokerRefused unless an owner may have one more receiver with such a pattern."""
        self.check(owner, resource)
        self.check(owner, "pattern_bytes", pattern_bytes)

    def add_receiver(self, owner: str, resource: str, pattern_bytes: int, sign: int = 1) -> None:
        """Count a receiver and its pattern for an owner. sign: 1: it begins; -1: it has ended."""
        self.add(owner, resource, sign)
        self.add(owner, "pattern_bytes", sign * pattern_bytes)

    def _add(self, usage: Usage, resource: str, amount: int) -> None:
        """Count an amount for an owner and its namespace. amount: below 0 to give it back."""
        usage.held[resource] += amount
        if usage.told and amount < 0:
            self._ease(usage, resource)
        if usage.shared is not None:
            self._add(usage.shared, resource, amount)

    def _ease(self, usage: Usage, resource: str) -> None:
        """Let the operator be told of the next refusal, once the use is well below the quota."""
        bound: int = getattr(usage.quota, resource)
        if usage.held[resource] * 100 <= bound * EASED_PERCENT:
            usage.told.discard(resource)

    def check_sent(self, holder: str, resource: str, size: int) -> None:
        """Raise BrokerRefused unless a sender may have so many bytes more on their way.

        resource: bytes in mailboxes or in the queues of services; see PASSING.
        """
        # Mostly a holder is its own owner.
        usage = self._owners.get(holder) or self.of(self.owner_of(holder))
        bound: int = getattr(usage.quota, resource)
        if bound and usage.held[resource] + size > bound:
            raise self._refusal(usage, resource, bound, size)
        if usage.shared is not None:
            self._check(usage.shared, resource, size)

    def check_beside(self, holder: str, resource: str, size: int, beside: dict[str, int]) -> None:
        """Raise BrokerRefused unless a sender's namespace may have so many bytes beside others.

        For several senders' bytes that come together, each of which check_sent() has found good.
        beside: bytes of the others, by namespace; gets these.
        """
        shared = self.of(self.owner_of(holder)).shared
        if shared is not None:
            size += beside.get(shared.owner, 0)
            self._check(shared, resource, size)
            beside[shared.owner] = size

    def weigh(self, holder: str, resource: str, size: int) -> None:
        """Add bytes (below 0: subtract) to those that a holder's owner has in mailboxes or queues.

        Holders that begin with `~` have no identity and are one owner. Where enough has left, the
        next refusal of this resource is logged again.
        """
        # Mostly a holder is its own owner, which saves the question whose its identity is.
        usage = self._owners.get("" if holder[:1] == NAMELESS else holder)
        if usage is None:
            usage = self.of(self.owner_of(holder))
        usage.held[resource] += size
        if size < 0 and usage.told:
            self._ease(usage, resource)
        if usage.shared is not None:
            self._add(usage.shared, resource, size)

    def check_rate(self, usage: Usage) -> None:
        """Check that an owner that has a rate, or is of a namespace with one, may spend now.

        Called before messages of the owner are taken. Raises BrokerRefused `wait`, with the time
        after which it may spend.
        """
        wait_ms = usage.wait_ms(self._context.now_ms)
        if not wait_ms:
            if usage.shared is not None:
                self.check_rate(usage.shared)
            return
        rate, bound = usage.exceeded(self._context.now_ms)
        self._note(usage, "rate", bound)
        raise BrokerRefused(
            "wait", f"{usage.named} sends more than {usage.key(rate)} ({bound})", wait_ms
        )

    def enter_line(self, owner: str) -> None:
        """Count that an owner opens a link. Raises BrokerRefused `wait`: too many came lately.

        owner: a user, or the address of peers without a credential. An identity that such a peer
        asks for has no line of its own: it may ask for another each time.
        """
        now_ms = self._context.now_ms
        usage = self.of(owner)
        for each in (usage, usage.shared):  # The namespace's places are for those with their own.
            if each is None or each.line is None:
                continue
            if "links_s" in each.told and each.line.full(now_ms):
                each.told.discard("links_s")
            wait_ms = each.line.enter(now_ms)
            if wait_ms:
                self._note(each, "links_s", each.quota.links_s)
                who = f"address {owner[1:]}" if each.owner[:1] == NAMELESS else each.named
                bound = f"{each.key('links_s')} ({each.quota.links_s})"
                reason = f"more links a second come from {who} than {bound}"
                raise BrokerRefused("wait", reason, wait_ms)

    def check_total(self, resource: str, amount: int, bound: int, key: str, asker: str) -> None:
        """Check that all owners together may have so much more. Raises BrokerRefused `limit`."""
        if self.total[resource] + amount > bound:
            reason = f"{key} is {bound}, over all clients, and {self.total[resource]} are taken"
            what, _, unit = resource.partition("_")  # As `settings_bytes`, or `rings`.
            raise self.limit_told_to(asker, f"bytes of {what}" if unit else what, reason)

    def owner_of(self, holder: str) -> str:
        """The owner of what a holder sent: its identity's credential, else the identity itself."""
        if holder[:1] == NAMELESS:
            return ""  # All clients without an identity are one owner.
        return self._context.settings.carrier(holder) or holder

    def _refusal(self, usage: Usage, resource: str, bound: int, amount: int) -> BrokerRefused:
        """Return the refusal by a quota: `wait` if the resource frees itself, else `limit`.

        amount: what was asked for; more than the whole quota never fits, and waiting is no use.
        """
        self._note(usage, resource, bound)
        reason = (
            f"{usage.named} has {usage.held[resource]} and asks for {amount} more: "
            f"{usage.key(resource)} is {bound}"
        )
        if resource in PASSING and amount <= bound:
            return BrokerRefused("wait", reason, self._context.settings.retry_ms)
        return BrokerRefused("limit", f"{reason}; remove some, or ask the operator for more")

    def _note(self, usage: Usage, resource: str, bound: int) -> None:
        """Count a refusal by a quota or rate; tell the operator of the first until it is eased."""
        self._context.counters[f"quota_{resource}"] += 1
        refused = (usage.shared or usage).refused  # Of the namespace, where there is one.
        refused[resource] = refused.get(resource, 0) + 1
        if resource not in usage.told:
            usage.told.add(resource)
            who = {"namespace" if usage.is_namespace else "identity": usage.owner}
            self._context.event("quota_reached", "warning", **who, resource=resource, bound=bound)


def _configured(owner: str) -> str:
    """Return an owner as the configuration has it: an address is a client without identity."""
    return "" if owner[:1] == NAMELESS else owner
