"""REQUEST: batches of requests on their way into a queue.

Owns the checks of a REQUEST, and the batches that are on their way into the log. The rules: a
REQUEST that is refused has changed nothing; a request that a ready worker takes is handed out in
the bundle that logs it. An effect is called when its part is taken into a step, when it is numbered
(`based`), and when the log has it (`appended`) or refuses it. Source: docs/design.md, Queues and
the checkpoint; SPEC.md, section 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from malamute_protocol.address import name_fault
from malamute_protocol.commands import Request
from malamute_protocol.content import Content
from malamute_protocol.errors import BatchError, BrokerRefused
from malamute_protocol.limits import TIME_MAX
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link
from malamute_py.broker.log.bodies import Bodies
from malamute_py.broker.log.keys import digest_of
from malamute_py.broker.log.steps import NO_TABLES, Effect, Part, Steps, content_size
from malamute_py.broker.mail.puts import Puts
from malamute_py.broker.services.hand_outs import HandOuts
from malamute_py.broker.services.registry import Registry
from malamute_py.broker.services.returns import Returns
from malamute_py.broker.services.service import DRAFT, REMOVING, Offer, RequestBatch, Service
from malamute_py.broker.structures.bitmaps import ones, runs_of
from malamute_py.changelog.applying import apply
from malamute_py.changelog.records import Change, RequestPut, WorkTaken, rows_of

SLOW_SUBJECTS_MAX: Final = 8
"""Subjects of a batch with `need_workers` that are compared with regular expressions at most."""
REQUESTING_MAX: Final = 1_000
"""Services that a link may ask without another check of its permission (`Link.requesting`)."""


class Requests:
    """Makes the parts of steps that REQUESTs become, and answers those that come again."""

    def __init__(
        self,
        shard: Shard,
        steps: Steps,
        bodies: Bodies,
        puts: Puts,
        registry: Registry,
        returns: Returns,
        hand_outs: HandOuts,
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._bodies = bodies
        self._mailboxes = puts.mailboxes
        self._puts = puts
        self._registry = registry
        self._returns = returns
        self._hand_outs = hand_outs

    def prepare(self, link: Link, command: Request, frame: Any) -> Part:
        """Return a part of a step that adds the requests of a REQUEST to the queue of its service.

        Raises BrokerRefused: nothing was done.
        """
        service = link.requesting.get(command.service)
        if service is None or service.state == REMOVING:
            service = self._permitted_service(link, command.service)
        limits = self._shard.settings
        try:
            content = self._shard.content(frame)
        except BatchError as error:
            raise BrokerRefused(error.code, error.reason) from error
        count = content.head.count
        if count > limits.request_rows_max:
            raise BrokerRefused(
                "too_large", f"{count} requests in a batch, at most {limits.request_rows_max}"
            )
        size = content_size(content)
        self._check_room(service, count, size)
        self._shard.quotas.check_sent(link.holder, service.resource, size)
        if not 0 <= command.timeout_ms <= TIME_MAX:
            raise BrokerRefused("malformed", f"a timeout is 0 to {TIME_MAX} ms")
        delay_ms = command.delay_ms
        reply_to = command.reply_to
        if not reply_to:
            reply_to = link.identity or self._mailboxes.temporary(link)
        elif not link.owns(reply_to):
            self._check_reply_to(link, reply_to)
        subjects = _subjects(content, limits.request_subjects_max)
        if command.need_workers:
            self._check_served(service, subjects)
        now_ms = self._shard.now_ms
        timeout_ms = command.timeout_ms or service.row.settings.timeout_ms
        # A later REQUEST with the same key is compared with it: other contents are refused.
        digest = digest_of(content) if command.key else 0
        # The number is -1 until the batch gets one, in its bundle: `based` sets it.
        change = RequestPut(
            service.number, -1, count, size, link.holder, reply_to, now_ms,
            now_ms + delay_ms + timeout_ms if timeout_ms else 0, command.key,
            subjects, delay_ms, command.priority, digest,
        )  # fmt: skip
        kind = _Later if delay_ms else _Incoming
        return Part(
            [change], content, frame, effects=[kind(self, service, change, shares={})],
            level=service.level, memory=service.memory, place=service.number, digest=digest,
        )  # fmt: skip

    def _check_served(self, service: Service, subjects: Sequence[str]) -> None:
        """Raise BrokerRefused `no_workers` for a subject that no offer takes.

        Called for a REQUEST with `need_workers`. Only few subjects that have to be compared with
        regular expressions are looked up, as that takes the turn's time.
        """
        slow = 0
        for subject in dict.fromkeys(subjects):
            queue = service.queue_of(subject, waits=False)
            if service.is_slow(queue):
                slow += 1
                if slow > SLOW_SUBJECTS_MAX:
                    raise BrokerRefused(
                        "too_large", f"service '{service.name}' has workers by regular expressions:"
                        f" {SLOW_SUBJECTS_MAX} subjects that are new to it may need workers at once"
                    )  # fmt: skip
            if not service.takers_of(queue):
                self._shard.counters["requests_without_workers"] += len(subjects)
                what = f" for the subject '{subject}'" if subject else ""
                raise BrokerRefused(
                    "no_workers", f"no worker offers service '{service.name}'{what}"
                )

    def again(self, link: Link, command: Request) -> None:
        """Tell a requester that repeats a REQUEST by its key which replies were lost, by a notice.

        Replies to a session's temporary mailbox (`~...`) are lost when the mailbox goes, as after a
        lost link: the requester would wait for them in vain.
        """
        reply_to = command.reply_to
        key = link.holder, command.key
        if (reply_to or link.identity) and not reply_to.startswith("~"):
            # The broker knows what was lost for the temporary mailbox of a session only.
            return
        taken = None if self._steps.under_way(key) else self._steps.row_of(key)
        try:
            name = self._mailboxes.temporary(link)
        except BrokerRefused:
            # The OPEN_INBOX of the link is refused for the same reason, and says so.
            return
        if taken is None or taken.base < 0 or reply_to not in ("", name):
            return  # The first REQUEST is not in the log, or its replies go elsewhere.
        row = self._shard.queues.requests.get(taken.base)
        # Rows that have ended: their replies were put, and may be lost.
        gone = ones(taken.count) & ~(0 if row is None else row.left)
        if not gone or not self._mailboxes.answers_lost(name, taken.base):
            return
        runs = [(command.key, first, count) for first, count in runs_of(gone)]
        part = self._puts.notice(name, asked_by=link.holder, about=runs, why="lost")
        if part is not None:
            self._shard.counters["answers_lost"] += gone.bit_count()
            self._steps.take([part])

    def _permitted_service(self, link: Link, name: str) -> Service:
        """Check that a link may ask a service, and return it; a draft where there is none.

        Called for a link's first REQUEST to it: `Link.requesting` keeps it, so that later ones are
        not checked. That stays right: a reload of the configuration that narrows a user's
        permissions ends the user's links (Rereading.taken_up). Raises BrokerRefused: the link may
        not use it, or a bound is reached.
        """
        if not self._shard.settings.permit(link.owner, "request", name):
            raise BrokerRefused("forbidden", f"you may not ask service '{name}'")
        service = self._registry.use(name, link.owner)
        if service.memory and service.state == DRAFT and not service.making:
            # Its requests are not logged, so they cannot bring the change that makes the service.
            self._registry.make(service)
        if len(link.requesting) >= REQUESTING_MAX:
            link.requesting.clear()  # Those that are asked again are checked again.
        link.requesting[name] = service
        return service

    def _check_reply_to(self, link: Link, reply_to: str) -> None:
        """Raise BrokerRefused if replies to a link's requests may not go to this mailbox.

        A name with `~` is the temporary mailbox of a session, which only that session may name.
        """
        if reply_to.startswith("~"):
            if reply_to != self._mailboxes.temporary(link):
                raise BrokerRefused("forbidden", f"mailbox '{reply_to}' is another session's")
            return
        fault = name_fault(reply_to)
        if fault:
            raise BrokerRefused("bad_name", f"reply_to: {fault}")
        if not self._shard.settings.permit(link.owner, "send", reply_to):
            raise BrokerRefused("forbidden", f"you may not send to mailbox '{reply_to}'")

    def _check_room(self, service: Service, count: int, size: int) -> None:
        """Raise BrokerRefused unless a service has room for `count` requests of `size` bytes.

        `limit` for what it can never hold, `wait` for what it may hold later.
        """
        limits, settings = self._shard.settings, service.row.settings
        rows_max = settings.max_requests or limits.service_requests_max
        size_max = settings.max_bytes or limits.service_bytes_max
        if count > rows_max or size > size_max:
            raise BrokerRefused(
                "limit", f"service '{service.name}' holds {rows_max} requests of {size_max} bytes"
            )
        if (
            service.rows + service.reserved_rows + count > rows_max
            or service.size + service.reserved_size + size > size_max
        ):
            self._shard.counters["services_full"] += 1
            raise BrokerRefused(
                "wait",
                f"service '{service.name}' is full: it has {service.rows} of at most {rows_max} "
                f"requests, {service.size} of {size_max} bytes; {count} of {size} bytes are too "
                "much",
                limits.retry_ms,
            )
        if self._registry.size + size > limits.all_requests_bytes_max:
            raise BrokerRefused("wait", "the service queues are full", limits.retry_ms)


class _Incoming(Effect):
    """Effect of a REQUEST: a batch of requests that is queued or handed out once it is logged."""

    requests: Requests
    service: Service
    change: RequestPut
    shares: dict[Offer, tuple[int, int]]
    """Offer -> (rows that it gets, bytes of credit that were taken for them)."""

    def taken(self, part: Part) -> None:
        """Reserve room in the service until the log answers; weigh on the sender's quota.

        What weighs does so until the requests end, and counts for the bound of all services, too.
        """
        service, change = self.service, self.change
        service.reserved_rows += change.count
        service.reserved_size += change.size
        self.requests._registry.weigh(service, change.sender, change.size)

    def based(self, part: Part) -> None:
        """Make the changes for the log: the requests, now numbered, and what workers take at once.

        A service that the log does not have is made by the same step.
        """
        service, change = self.service, self.change
        base = change.base = part.base
        changes: list[Change] = []
        if service.state == DRAFT and not service.memory:
            changes.append(self.requests._registry.creation(service))
        changes.append(change)
        if service.direct:  # Some offers may be handed requests at once.
            self._share()
            now_ms = self.requests._shard.now_ms
            for offer, (rows, _) in self.shares.items():
                changes.append(
                    WorkTaken(
                        service.number, [(base, rows_of(rows))], offer.in_flight.holder, now_ms,
                        offer.lease_ms,
                    )
                )  # fmt: skip
        part.changes = changes

    def _share(self) -> None:
        """Allot rows to ready offers as shares: the step that logs them hands them out, too.

        Only of subjects of which nothing waits already.
        """
        service, change, shares = self.service, self.change, self.shares
        for subject, rows in _by_subject(change.subjects, change.count):
            queue = service.queue_of(subject, change.priority, waits=False)
            if queue.rows or service.is_slow(queue):
                # Requests that wait in the queue go first, and expressions take a turn's time: the
                # rows wait, and HandOuts hands them out.
                continue
            for offer, some in service.allot(queue, rows, change.size, rows.bit_count()):
                before, cost = shares.get(offer, (0, 0))
                shares[offer] = before | some, cost + change.size

    def appended(self, part: Part, end_lsn: int) -> None:
        """Add the requests to the queue, hand out the shares of offers, and let the rest wait."""
        requests, service, change = self.requests, self.service, self.change
        content = part.content
        assert content is not None
        if service.memory:
            # Nothing was logged, so that the tables do not have the changes yet.
            for one in part.changes:
                apply(NO_TABLES, requests._shard.queues, one)
            requests._bodies.hold(change.base, stamp=None, frame=part.frame, content=content)
        else:
            requests._bodies.keep(change.base, part.stamp, part.frame, content)
            if service.state == DRAFT:
                requests._registry.made(service)
        service.reserved_rows -= change.count
        service.reserved_size -= change.size
        batch = RequestBatch(service, requests._shard.queues.requests[change.base])
        requests._registry.add(service, batch, weighed=True)
        requests._shard.counters["requests_in"] += change.count
        given = 0
        for offer, (rows, cost) in self.shares.items():
            given |= rows
            requests._hand_outs.lease(offer, batch, rows, cost)
        rest = ones(change.count) & ~given
        if rest:
            self._wait(batch, rest)

    def _wait(self, batch: RequestBatch, rows: int) -> None:
        """Let rows that no offer got wait in the queue."""
        self.service.wait(batch, rows, again=False)
        self.requests._registry.runnable[self.service] = None

    def refused(self, part: Part, code: str, reason: str, retry_ms: int) -> None:
        """Give back the reserved room, and the credit of the offers that had shares."""
        requests, service, change = self.requests, self.service, self.change
        service.reserved_rows -= change.count
        service.reserved_size -= change.size
        requests._registry.weigh(service, change.sender, -change.size)
        for offer, (rows, cost) in self.shares.items():
            requests._hand_outs.return_credit(offer, rows.bit_count(), cost)
        self.shares = {}
        requests._registry.forget_unused(service)


class _Later(_Incoming):
    """Effect of a REQUEST with a delay: no worker gets its requests before their time."""

    def _share(self) -> None:
        """Give no worker anything."""

    def _wait(self, batch: RequestBatch, rows: int) -> None:
        """Let the rows wait for the end of the delay, then in the queue."""
        put = self.change
        self.requests._returns.delay(batch, rows, put.at_ms + put.delay_ms)


def _subjects(content: Content, most: int) -> list[str]:
    """Return the subjects of the rows of a batch: one for all rows, or one for each row.

    most: different subjects that a batch may have; more raise BrokerRefused.
    """
    headers, codes = content.headers()
    # The first key of a header is its subject; `codes` has the number of each row's header.
    if codes is None:
        return [headers[0].keys[0]]
    subjects = [header.keys[0] for header in headers]
    rows = [subjects[code] for code in codes.tolist()]
    different = len(set(rows))
    if different == 1:
        return rows[:1]
    if different > most:
        raise BrokerRefused(
            "too_large", f"{different} different subjects in a batch of requests, at most {most}"
        )
    return rows


def _by_subject(subjects: Sequence[str], count: int) -> list[tuple[str, int]]:
    """Return each distinct subject with a bitmap of its rows.

    subjects: one for all rows, or one each.
    """
    if len(subjects) == 1:
        return [(subjects[0], ones(count))]
    found: dict[str, int] = {}
    for row, subject in enumerate(subjects):
        found[subject] = found.get(subject, 0) | (1 << row)
    return list(found.items())
