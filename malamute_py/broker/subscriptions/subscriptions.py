"""Subscriptions: how they begin and end.

A subscription is entered when its SUBSCRIBE comes, begun when its stream is known, and started when
its first position is. Owns SUBSCRIBE, and the end of a subscription. The rule: a SUBSCRIBE is
checked whole before anything is changed. Source: docs/design.md, Flow control.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from malamute_protocol.commands import Ended, Gap, Rewound, Schema, Subscribe, Subscribed
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.stream import NEVER
from malamute_py.broker.subscriptions.audience import audience_of
from malamute_py.broker.subscriptions.subscription import SUBSCRIBE, VISIBILITIES, Subscription

if TYPE_CHECKING:
    from malamute_py.broker.log.stream import Stream
    from malamute_py.broker.streams.catalogue import Catalogue
    from malamute_py.broker.streams.start_positions import Begin, Starts
    from malamute_py.broker.subscriptions.lagging import Lagging
    from malamute_py.broker.subscriptions.live import Delivery


class Subscriptions:
    """The command SUBSCRIBE, and the ends of subscriptions that links, streams and turns cause."""

    def __init__(
        self, shard: Shard, links: Links, catalogue: Catalogue, delivery: Delivery,
        lagging: Lagging, starts: Starts,
    ) -> None:  # fmt: skip
        self._shard = shard
        self._links = links
        self._catalogue = catalogue
        self._delivery = delivery
        self._lagging = lagging
        self._starts = starts
        self.count = 0
        """All subscriptions."""
        self.pattern_bytes = 0
        """Bytes of all patterns, as MessagePack."""

    # --- the commands -------------------------------------------------------------------

    def subscribe(self, link: Link, command: Subscribe) -> None:
        """Take a SUBSCRIBE: check it, enter the subscription, begin it once its stream is there.

        A stream that is not there is created where the command wants that.
        """
        number = command.subscription
        wrong: tuple[str, str] | None
        try:
            self._links.check_number(link, number)
            wrong = self.check(link, command)
        except BrokerRefused as error:
            wrong = error.code, error.reason
        if wrong is None and not self._shard.settings.permit(link.owner, "read", command.stream):
            wrong = "forbidden", f"you may not read stream '{command.stream}'"
        if wrong is None and not command.create and self._catalogue.get(command.stream) is None:
            wrong = "unknown_stream", self._catalogue.absent(link.owner, command.stream)
        if wrong is not None:
            self._links.refuse(link, SUBSCRIBE, number, *wrong)
            return
        sub = self.enter(link, command)
        use = partial(self.begin, sub, command)
        # Contained: an error in it ends this link alone.
        self._catalogue.use(
            command.stream, link.owner,
            self._links.contained(link, "SUBSCRIBE", use, SUBSCRIBE, number),
            partial(self.refuse, sub),
        )  # fmt: skip

    def check(self, link: Link, command: Subscribe) -> tuple[str, str] | None:
        """Check a SUBSCRIBE by itself; returns code and reason of a refusal, None: it may go on.

        The bounds are on the number of subscriptions and the bytes of their patterns, in all and by
        quota of the link's owner. The pattern itself is read when the stream is known.
        """
        settings = self._shard.settings
        if self.count >= settings.subscriptions_max:
            reason = f"at most {settings.subscriptions_max} subscriptions in all"
            refused = self._shard.quotas.limit_told_to(link.owner, "subscriptions", reason)
            return refused.code, refused.reason
        if not 0 <= command.visibility < len(VISIBILITIES):
            return "unsupported", f"no visibility {command.visibility}"
        if command.until not in ("", "tail"):
            return "unsupported", f"no end of the kind '{command.until}'"
        size = len(msgspec.msgpack.encode(command.pattern))
        if size > settings.pattern_bytes_max:
            return "too_large", f"a pattern of {size} bytes, at most {settings.pattern_bytes_max}"
        if self.pattern_bytes + size > settings.all_patterns_bytes_max:
            reason = f"patterns of at most {settings.all_patterns_bytes_max} bytes in all"
            refused = self._shard.quotas.limit_told_to(
                link.owner, "patterns of subscriptions", reason
            )
            return refused.code, refused.reason
        try:
            self._shard.quotas.check_receiver(link.quota_owner, "subscriptions", size)
        except BrokerRefused as error:
            return error.code, error.reason
        return None

    def enter(self, link: Link, command: Subscribe) -> Subscription:
        """Take up a subscription whose stream is not known yet, so that credit can reach it."""
        sub = Subscription(self, link, command)
        sub.pattern_bytes = len(msgspec.msgpack.encode(command.pattern))
        self.pattern_bytes += sub.pattern_bytes
        link.receivers[sub.number] = sub
        self.count += 1
        self._shard.quotas.add_receiver(link.quota_owner, "subscriptions", sub.pattern_bytes)
        return sub

    def begin(self, sub: Subscription, command: Subscribe, stream: Stream) -> None:
        """Enter a subscription into its stream's audience, and find where it begins.

        Called when the stream is known or was created. The subscription is started by _start()
        once its first position is found, which may take a look into the journal.
        """
        if sub.ended:  # Meanwhile.
            return
        try:
            audience_of(stream).enter(sub, command.pattern)
        except BrokerRefused as error:
            self.refuse(sub, error.code, error.reason)
            return
        sub.stream = stream
        if command.until == "tail":  # It is to end where the stream ends now.
            sub.stop = min(sub.stop, sub.tail)
        sub.plain = sub.client_time is None and not sub.whole and sub.stop == NEVER

        # The resolver answers once, now or later.
        def found(begin: Begin | BrokerRefused) -> None:
            """Start the subscription at the position that was found, or refuse it."""
            sub.link.queries -= 1  # The question was counted when it was asked.
            if sub.ended:
                return
            if isinstance(begin, BrokerRefused):
                self.refuse(sub, begin.code, begin.reason, begin.retry_ms)
            elif stream.removed:
                self.refuse(sub, "stream_removed", f"stream '{stream.name}' was removed")
            else:
                self._start(sub, begin)

        link = sub.link
        try:
            self._links.count_query(link)  # found() takes the question off the count again.
        except BrokerRefused as error:
            self.refuse(sub, error.code, error.reason, error.retry_ms)
            return
        self._starts.resolve(
            stream, command.start, sub.durable, sub.pattern,
            self._links.contained(link, "SUBSCRIBE", found),
            end=sub.stop, asker=link, wanted=lambda: not sub.ended,
        )  # fmt: skip

    def _start(self, sub: Subscription, begin: Begin) -> None:
        """Send SUBSCRIBED to a subscription whose first position is known, and have it served.

        begin: that position; where it is not the one asked for, REWOUND follows. A start at the
        last record of each subject has single offsets, too (`wanted`), which alone are delivered
        before `wanted_to`.
        """
        stream = sub.stream
        sub.position = sub.covered = begin.next
        sub.wanted, sub.wanted_to = begin.wanted, begin.wanted_to
        sub.started = True
        self._links.say(
            sub.link,
            Subscribed(
                sub.number, stream.uuid, self._shard.epoch, begin.next,
                stream.first_at(self._shard.now_ms), sub.tail,
                -1 if sub.stop == NEVER else sub.stop, schemas=list(stream.schemas.items()),
                begin=int(stream.keys is not None),  # First offset of all; with keys, 0 is none.
            ),
        )  # fmt: skip
        if begin.rewound_from is not None:
            # The epoch is that of this run, not that of the record there: records before are in the
            # log as of now, and a resume that got no further must not be rewound again.
            epoch = self._shard.epoch
            self._links.say(sub.link, Rewound(sub.number, begin.rewound_from, begin.next, epoch))
        self._shard.counters["subscribed"] += 1
        tail = min(sub.tail, sub.stop)
        if begin.next < tail and not self._shard.settings.permit(
            sub.link.owner, "replay", stream.name
        ):
            self._pass_over_history(sub, tail)
        self._lagging.consider(sub)

    def _pass_over_history(self, sub: Subscription, tail: int) -> None:
        """Have a subscription begin at the tail, since its owner may not `replay`: read history.

        Whatever lies before is a GAP to it. tail: where the stream, or the subscription, ends now.
        """
        reason = f"you may not replay stream '{sub.stream.name}'"
        self._shard.counters["gaps"] += 1
        self._links.say(sub.link, Gap(sub.number, sub.position, tail, "forbidden", reason))
        sub.position = sub.covered = tail
        sub.wanted, sub.wanted_to = None, 0

    def refuse(self, sub: Subscription, code: str, reason: str, retry_ms: int = 0) -> None:
        """Refuse a subscription that was entered, and forget it, unless it has ended since."""
        if sub.ended:
            return
        self._links.refuse(sub.link, SUBSCRIBE, sub.number, code, reason, retry_ms)
        self._drop(sub)

    # --- what a receiver owes its link ----------------------------------------------------

    def resume(self, sub: Subscription) -> None:
        """Let a subscription that is not live have its turn: there is credit, or room, again."""
        if not sub.live:
            self._lagging.consider(sub)

    def end(self, sub: Subscription, code: str) -> None:
        """Send ENDED to a subscription, and forget it. code: why it ends."""
        if sub.started:
            self._delivery.cover(sub)  # `covered` is where it has come to, then.
        self._links.say(sub.link, Ended(sub.number, sub.covered, code))
        self._drop(sub)

    def link_ended(self, link: Link, subs: list[Subscription]) -> None:
        """Forget all subscriptions of a link that has ended: it is sent nothing more."""
        for sub in subs:
            self._drop(sub)

    def schema_changed(self, stream: Stream, number: int, schema: bytes) -> None:
        """Tell a stream's subscriptions of a new version of its schema, before batches of it."""
        for sub in audience_of(stream).subscriptions:
            if sub.started and sub.link.typed:
                self._links.say(sub.link, Schema(sub.number, number, schema))

    def stream_removed(self, stream: Stream) -> None:
        """End all subscriptions of a stream that was removed, each with an ENDED."""
        for sub in audience_of(stream).subscriptions:
            if sub.started:  # Else it is refused once its position is found.
                self.end(sub, "stream_removed")

    def _drop(self, sub: Subscription) -> None:
        """Take a subscription out of all that knows it, once."""
        if sub.ended:
            return
        sub.leave()
        self.count -= 1
        self.pattern_bytes -= sub.pattern_bytes
        self._shard.quotas.add_receiver(
            sub.link.quota_owner, "subscriptions", sub.pattern_bytes, sign=-1
        )
        stream = getattr(sub, "stream", None)  # None: it was refused before its stream was known.
        if stream is not None:
            self._lagging.forget(sub)
            audience_of(stream).leave(sub)
        sub.started = sub.live = False
