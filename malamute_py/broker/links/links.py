"""Client links: states, identity, sessions, heartbeat, expiry, receivers and outboxes.

Owns the table of links, their timers, what leaves for them, and the receivers of each by number:
the bound of that table, CREDIT and UNSUBSCRIBE; the facts of one link are in link.py. The rules:
the protocol's table alone says which commands a client may send in which state; a newer HELLO of a
session ends the older link; a HELLO that asks for an identity by name ends the link of another
session that had asked for it (many sessions may have an identity from their credential alone);
credit is cumulative and only rises; the bytes that a peer has not shown to have read are bounded by
its share (a PONG shows it), and the commands that are kept for a peer that does not read at all by
a count. Source: SPEC.md, sections 2 and 8; docs/design.md (The core and its shell; Flow control;
Queues and the checkpoint; Safety).

A link's room is the bytes of records that it may be sent yet. A probe is a PING that asks how far
its peer has read. A session is a client's secret, by which its next link replaces its last one.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any, Final

from malamute_protocol.address import is_template, name_fault, template_fault
from malamute_protocol.commands import (
    Bye,
    Command,
    Credit,
    Hello,
    Ping,
    Pong,
    Refused,
    Unsubscribe,
    Welcome,
)
from malamute_protocol.errors import BrokerRefused
from malamute_protocol.framing import COMMANDS, NUMBERS
from malamute_protocol.link import TRANSITIONS, Moves, Side, State
from malamute_protocol.version import VERSIONS, Feature, negotiate
from malamute_py.broker.context import Shard
from malamute_py.broker.links.link import Link, Owner, Receiver
from malamute_py.broker.links.messages import message_bounds, split
from malamute_py.broker.links.replicas import Replicas
from malamute_py.broker.quotas import NAMELESS
from malamute_py.broker.ready import Send

FEATURES = int(
    Feature.MAIL
    | Feature.SERVICES
    | Feature.CURSORS
    | Feature.ATOMIC
    | Feature.TRANSACTIONS
    | Feature.REMOVAL
    | Feature.KEYS
    | Feature.TYPED
)
"""Features that this broker serves beyond streams."""
LATER_MS = 5
"""Time that a command which no peer waits for may wait for another to leave with."""
BEAT_SLOTS = 32
"""Parts of a heartbeat; links whose heartbeat ends in the same part are looked at together. With
10,000 idle clients, each at a time of its own, every PING and PONG had a turn of the loop alone."""
PROBE_TOKENS = 1 << 32
"""First token of the PINGs that ask how far a peer has read; lower tokens keep alive."""
ERRED = "the broker met an error of its own; its log has the cause"
RECEIVES: dict[State, Moves] = {state: TRANSITIONS[state][Side.CLIENT] for state in State}
"""State -> commands that a client may send in it, as the protocol's table has it. A link is never
GREETED after a turn: a HELLO is answered in the turn in which it came."""


class Links:
    """All links, their timers and their outboxes."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.table: dict[int, Link] = {}
        """Number of a link -> the link."""
        self._sessions: dict[bytes, Link] = {}
        """Session that a HELLO named -> its link."""
        self._identities: dict[str, Link] = {}
        """Identity -> the one link that asked for it by name."""
        self.replicas = Replicas(shard)
        self._timers: list[tuple[int, int, Link]] = []
        """A heap of (time, number of the timer, link); a link's newest timer alone counts."""
        self._armed = 0
        """Number of the timer that was set last."""
        self._closes: Final[dict[int, None]] = {}
        """Numbers of links that ended in this turn and that the shell must forget."""
        self._probes = PROBE_TOKENS
        """Token of the last PING that asked how far a peer has read."""
        self._later: Final[dict[Link, int]] = {}
        """Link -> time at which its `later` commands leave at the latest, ascending."""
        self.dirty: Final[list[Link]] = []
        """Links whose outbox may have become non-empty."""
        self.leaving: Final = (self.dirty, self._closes, self._later)
        """While all of them are empty, outgoing() has nothing to return."""
        self.ended: list[Link] = []
        """Links that ended since the last turn and whose receivers must be forgotten."""
        self.unread_answers = 0
        """Bytes of RESULTs that open links were given and have not shown to have read."""
        self._left_unread = 0
        """Bytes that links which ended without a goodbye had not shown to have read: see lost()."""

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Return the handlers of commands about links and receivers, for the broker's table."""
        return {
            Hello: self.hello,
            Ping: self.answer_ping,
            Pong: self.pong,
            Bye: self.bye,
            Unsubscribe: self.unsubscribe,
            Credit: self.credit,
        }

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Any:
        return iter(self.table.values())

    def get(self, number: int) -> Link | None:
        """Return the link of a number, unless it has ended."""
        return self.table.get(number)

    def session(self, session: bytes) -> Link | None:
        """Return the open link of a session."""
        return self._sessions.get(session)

    def heard(self, number: int, credential: str) -> Link | None:
        """Return the link that a message came on, which is made for its first message.

        number, credential: as the shell knows the connection. None: the link ended in this turn,
        and the message is ignored; or there are too many links, and the peer was refused.
        """
        shard = self._shard
        link = self.table.get(number)
        if link is None:
            if number in self._closes:
                return None
            link = Link(number, credential, shard.now_ms)
            self.table[number] = link
            shard.counters["links_opened"] += 1
            # A link on which no HELLO comes until then ends.
            self._arm(link, shard.settings.heartbeat_ms * shard.settings.expiry_beats)
            if len(self.table) > shard.settings.links_max:
                reason = f"at most {shard.settings.links_max} links"
                refused = shard.quotas.limit_told_to(credential, "links", reason)
                no_command = no_reference = 0
                self.refuse(link, no_command, no_reference, refused.code, refused.reason)
                self.close(link, "refused", "limit", "")
                return None
        link.heard_ms = shard.now_ms
        return link

    # --- opening and ending ---------------------------------------------------------

    def hello(self, link: Link, hello: Hello) -> None:
        """Answer HELLO: welcome a link, or refuse and end it.

        A HELLO of a session that has a link replaces that link: its client lost it and came back.
        """
        shard, settings = self._shard, self._shard.settings
        version = negotiate(VERSIONS, hello.versions)
        # A client may ask for a name, or for the next free number of a template (`app-{n}`).
        template = hello.identity if is_template(hello.identity) else ""
        wanted = hello.identity or link.credential
        older = self._sessions.get(hello.session)
        refusal = self._fault_of(link, hello, version is not None, wanted, template)
        owner = link.credential or wanted
        nameless = f"{NAMELESS}{link.address}" if link.address else ""
        quota_owner = owner or nameless
        retry_ms = 0
        if refusal is None:
            try:
                shard.quotas.enter_line(link.credential or nameless)
                if older is None and (template or hello.identity not in self._identities):
                    # Otherwise it replaces a link that is counted already.
                    shard.quotas.check(quota_owner, "links")
                if template:  # `wanted` becomes the identity that the template gives the session.
                    wanted = self.replicas.claim(
                        link.credential, template, hello.session, hello.number, self._identities
                    )
            except BrokerRefused as error:
                refusal, retry_ms = (error.code, error.reason), error.retry_ms
        if version is None or refusal is not None:
            assert refusal is not None
            self.refuse(link, NUMBERS[Hello], 0, *refusal, retry_ms)  # 0: it has no reference
            self.close(link, "refused", *refusal)
            return
        if older is not None and older is not link:
            shard.counters["links_fenced"] += 1
            # Without a template close() does not free the replica's number: it stays with the
            # session, which this link has now.
            older.template = ""
            self.close(older, "fenced", "replaced", "another link of this session took over")
        link.owner, link.quota_owner, link.template = owner, quota_owner, template
        if hello.identity:
            self._claim_identity(link, wanted)
        asked = hello.heartbeat_ms or settings.heartbeat_ms
        link.heartbeat_ms = max(settings.heartbeat_min_ms, min(asked, settings.heartbeat_max_ms))
        link.expiry_ms = link.heartbeat_ms * settings.expiry_beats
        link.identity = wanted
        link.session = hello.session
        # Other clients see the holder: with the session itself they could take the link over.
        link.holder = wanted or f"~{blake2b(hello.session, digest_size=16).hexdigest()}"
        link.software = hello.software[:200]
        link.typed = bool(hello.features & Feature.TYPED)
        link.usage = shard.quotas.of(quota_owner)
        shard.quotas.add(quota_owner, "links")
        self._sessions[hello.session] = link
        link.state = State.OPEN
        link.room = self.share()
        link.window_bytes = settings.window_bytes
        link.ask_below = link.room // 2
        limits = settings.limits
        self.say(
            link,
            Welcome(
                version=version,
                broker=shard.uuid,
                epoch=shard.epoch,
                heartbeat_ms=link.heartbeat_ms,
                expiry_ms=link.expiry_ms,
                window_bytes=settings.window_bytes,
                record_bytes_max=limits.record_bytes_max,
                batch_bytes_max=limits.batch_bytes_max,
                batch_records_max=limits.batch_records_max,
                message_commands_max=limits.message_commands_max,
                identity=wanted,
                software=settings.software,
                features=FEATURES,
                now_ms=shard.now_ms,
            ),
        )
        self._arm(link, link.heartbeat_ms)
        shard.event("link_opened", link=link.number, identity=wanted, software=link.software)

    def _fault_of(
        self, link: Link, hello: Hello, speaks: bool, wanted: str, template: str
    ) -> tuple[str, str] | None:
        """Return code and reason why a HELLO is refused, whatever the quotas say; None: it is not.

        speaks: whether client and broker have a version in common. wanted: the identity, or the
        template, that it asks for. template: "" where it asks for an identity.
        """
        if not speaks:
            ours, theirs = (f"{low} to {high}" for low, high in (VERSIONS, hello.versions))
            return "version", f"this broker speaks versions {ours}, you {theirs}"
        if len(hello.session) != 16:
            return "malformed", f"a session has 16 bytes, not {len(hello.session)}"
        if link.credential and not self._shard.settings.known(link.credential):
            return "unauthenticated", f"there is no user '{link.credential}' any more"
        if hello.identity not in ("", link.credential):
            refusal = self._may_be_called(link.credential, wanted, template)
            if refusal is not None:
                return refusal
        older = self._sessions.get(hello.session)
        # A session is a secret of its client: under another name it was guessed or copied.
        if older is not None and (
            older.credential != link.credential or (older.template or older.identity) != wanted
        ):
            return "forbidden", "the session belongs to another identity"
        return None

    def _may_be_called(self, credential: str, wanted: str, template: str) -> tuple[str, str] | None:
        """Return code and reason why a credential may not have an identity or use a template.

        None: it may. An identity that a template gives is not to be had by name.
        """
        fault = template_fault(template) if template else name_fault(wanted)
        if fault:
            return "bad_name", f"identity: {fault}"
        kind = "template" if template else "identity"
        if not self._shard.settings.permit(credential, kind, wanted):
            carries = "give identities of the template" if template else "carry the identity"
            return "forbidden", f"your credential does not {carries} '{wanted}'"
        family = None if template else self.replicas.family_of(wanted)
        if family is not None:
            return "in_use", f"the identity '{wanted}' is a replica's, of '{family.template}'"
        return None

    def _claim_identity(self, link: Link, identity: str) -> None:
        """Give an identity to the newest session that asks for it by name; end the older link.

        Of two programs with one name each would get some of the mail: the older one is told so.
        """
        older = self._identities.get(identity)
        if older is not None and older is not link:
            self._shard.counters["links_fenced"] += 1
            self._shard.event(
                "identity_taken", "warning", identity=identity, link=older.number, by=link.number
            )
            reason = (
                f"another session took the identity '{identity}': give each process one of its "
                f"own, or '{identity}-{{n}}' to all of them"
            )
            self.close(older, "fenced", "fenced", reason)
        self._identities[identity] = link
        link.named = True

    def bye(self, link: Link, command: Bye) -> None:
        """End a link whose client has said BYE."""
        # A client that says BYE with another code leaves this link and comes back on another.
        happened = "bye" if command.code == "closed" else "lost"
        self.close(link, happened, "closed", command.reason[:200])

    def lost(self, number: int) -> int:
        """End a link whose peer the transport has lost.

        Returns the bytes that it, and links that ended since the last call, may have left unread.
        """
        if (link := self.table.get(number)) is not None:
            self.close(link, "lost", "closed", "the transport lost the peer")
        left, self._left_unread = self._left_unread, 0
        return left

    def close(self, link: Link, happened: str, code: str, reason: str) -> None:
        """End a link, after a BYE with the code unless the link is lost.

        happened: how it ends, as `Link.happened` has it. What the link holds elsewhere is given
        back later in the turn, by `forget_receivers`.
        """
        if link.state is State.CLOSED:
            return
        shard = self._shard
        if happened != "lost":
            if link.blocked:
                # The peer did not accept these commands before, and will not now.
                link.out, link.frames = [], []
            self.say(link, Bye(code, reason))
        if link.state is State.OPEN:
            shard.quotas.add(link.quota_owner, "links", -1)
        link.state = State.CLOSED
        link.room = 0
        if happened != "bye":
            self._left_unread += link.delivered_bytes - link.cleared_bytes
        self.unread_answers -= link.unread_answers
        link.unread_answers = 0
        self.table.pop(link.number, None)
        self._later.pop(link, None)
        if self._sessions.get(link.session) is link:
            del self._sessions[link.session]
        if link.named and self._identities.get(link.identity) is link:
            del self._identities[link.identity]
        if link.template:
            self.replicas.left(link.credential, link.template, link.session, happened)
        link.happened = happened
        self.ended.append(link)
        self._closes[link.number] = None
        shard.counters["links_closed"] += 1
        level = "info" if happened in ("bye", "lost", "fenced", "draining") else "warning"
        shard.event(
            "link_closed", level, link=link.number, identity=link.identity,
            happened=happened, code=code, reason=reason,
        )  # fmt: skip

    def fail(
        self, link: Link, doing: str, error: Exception, command: int = 0, reference: int = 0
    ) -> None:
        """End a link after an error of the broker that arose on behalf of it; log the error.

        command, reference: number of the command and of its reference, as in REFUSED; 0: the
        error concerns the link as a whole.
        """
        self._shard.erred(
            doing, error, link=link.number, identity=link.identity,
            command=_name(command), reference=reference,
        )  # fmt: skip
        self.refuse(link, command, reference, "internal", ERRED)
        self.close(link, "failed", "internal", ERRED)

    def contained(
        self, link: Link, doing: str, call: Callable[..., None], command: int = 0,
        reference: int = 0,
    ) -> Callable[..., None]:  # fmt: skip
        """Wrap a call on behalf of a link: an error that it raises ends that link only.

        For calls that come after the link's command was handled: nothing around them contains what
        they raise. doing, command, reference: as `fail` reports the error.
        """

        def run(*arguments: Any) -> None:
            """Make the call; an error in it ends the link."""
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001 - contained: ARCHITECTURE.md, Containment
                self.fail(link, doing, error, command, reference)

        return run

    # --- receivers --------------------------------------------------------------------

    def check_number(self, link: Link, number: int) -> None:
        """Raise BrokerRefused unless a link may have one more receiver, under this number."""
        if number in link.receivers:
            raise BrokerRefused("subscription_exists", f"subscription {number} exists")
        most = self._shard.settings.link_subscriptions_max
        if len(link.receivers) >= most:
            reason = f"at most {most} subscriptions, inboxes, offers and memberships a link"
            raise BrokerRefused("limit", reason)

    def count_query(self, link: Link) -> None:
        """Count a question until its answer counts it off. Raises BrokerRefused: too many are."""
        settings = self._shard.settings
        if link.queries >= settings.link_queries_max:
            reason = "too many unanswered questions on this link"
            raise BrokerRefused("wait", reason)
        link.queries += 1

    def credit(self, link: Link, command: Credit) -> None:
        """Raise the credit of a receiver, for CREDIT, and let it be served; credit never falls."""
        receiver = link.receivers.get(command.subscription)
        if receiver is None:
            # The receiver may have ended while the CREDIT was under way; a client ignores this.
            self._refuse_unknown(link, command)
            return
        # A CREDIT tells totals since the beginning: an older one that comes late changes nothing.
        records = command.credit_records - receiver.credit_records
        if records > 0:
            receiver.credit_records += records
            receiver.left_records += records
        size = command.credit_bytes - receiver.credit_bytes
        if size > 0:
            receiver.credit_bytes += size
            receiver.left_bytes += size
        receiver.owner.resume(receiver)

    def unsubscribe(self, link: Link, command: Unsubscribe) -> None:
        """End a receiver as its client asked, for UNSUBSCRIBE."""
        receiver = link.receivers.get(command.subscription)
        if receiver is None:
            self._refuse_unknown(link, command)
        else:
            receiver.owner.end(receiver, "cancelled")

    def _refuse_unknown(self, link: Link, command: Credit | Unsubscribe) -> None:
        """Refuse a command for a receiver that the link does not have."""
        number = command.subscription
        self.refuse(
            link, NUMBERS[type(command)], number, "unknown_subscription",
            f"no subscription {number}",
        )  # fmt: skip

    def _resume(self, link: Link) -> None:
        """Give the receivers of a link that has room again their turns."""
        for receiver in link.receivers.values():
            receiver.owner.resume(receiver)

    def forget_receivers(self, link: Link) -> None:
        """Have each owner forget its receivers of a link that has ended, all at once."""
        by_owner: dict[Owner, list[Receiver]] = {}
        for receiver in link.receivers.values():
            by_owner.setdefault(receiver.owner, []).append(receiver)
        for owner, receivers in by_owner.items():
            owner.link_ended(link, receivers)

    # --- saying -----------------------------------------------------------------------

    def say(self, link: Link, command: Command) -> None:
        """Add a command to the outbox of a link; too many end a link whose peer does not read."""
        if link.state is State.CLOSED:
            return
        out = link.out
        if not out:
            self.dirty.append(link)
        out.append(command)
        if len(out) > self._shard.settings.outbox_commands_max and link.blocked:
            self.close(link, "limit", "limit", "the peer does not read its answers")

    def say_later(self, link: Link, command: Command) -> None:
        """Send a command without frames with the next command, or after LATER_MS.

        For commands that no peer waits for, such as confirms of patient senders: a message costs
        either side some 50 us, and its reader a turn.
        """
        if link.out or link.blocked:
            self.say(link, command)
        elif link.state is not State.CLOSED:
            link.later.append(command)
            if link not in self._later:
                self._later[link] = self._shard.now_ms + LATER_MS

    def _say_due(self) -> None:
        """Move commands that say_later() put off LATER_MS ago or earlier to their outboxes."""
        later, now_ms = self._later, self._shard.now_ms
        while later:
            link = next(iter(later))
            if later[link] > now_ms:
                return
            if not link.out:
                self.dirty.append(link)
            self._move_later(link)

    def _move_later(self, link: Link) -> None:
        """Put what say_later() held back in front of the outbox: it is due, or a message leaves."""
        link.out[:0] = link.later  # in front, since a BYE in the outbox is the last command
        link.later = []
        self._later.pop(link, None)

    def refuse(
        self, link: Link, command: int, reference: int, code: str, reason: str, retry_ms: int = 0,
        revision: int = -1,
    ) -> None:  # fmt: skip
        """Answer a command with REFUSED; `wait` always says when to try again.

        command: its number; 0: no command is meant. reference: its tracker or request, by which the
        client finds it; 0: it has none. revision: see Refused.
        """
        if link.state is State.CLOSED:
            return
        if code == "wait" and not retry_ms:
            retry_ms = self._shard.settings.retry_ms
        self._shard.counters["refused_" + code] += 1
        if code == "forbidden":
            self._shard.event(
                "forbidden", "warning", identity=link.owner or link.credential, link=link.number,
                command=_name(command), reason=reason,
            )  # fmt: skip
        reason = reason[: self._shard.settings.reason_max]
        self.say(link, Refused(command, reference, code, reason, retry_ms, revision))

    def outgoing(self) -> tuple[list[Send], list[int]]:
        """Return the messages to send now, and the numbers of the links to forget after that.

        A link gets all of its outbox in one message, or in several where a message may not be so
        large. What a blocked link has stays until it is unblocked, unless the link has ended.
        """
        sends: list[Send] = []
        if self._later:
            self._say_due()
        if not self.dirty and not self._closes:
            return sends, []
        now_ms = self._shard.now_ms
        commands_max, frames_max = message_bounds(self._shard.settings.limits)
        if len(self.dirty) > 1:
            # Messages with frames go before those that only confirm: each message costs the
            # transport some 50 us, for which the others wait.
            self.dirty.sort(key=_carries_nothing)
        for link in self.dirty:
            out = link.out
            if not out or (link.blocked and link.state is not State.CLOSED):
                continue
            if link.later:
                self._move_later(link)
            frames = link.frames
            link.out, link.frames = [], []
            link.results = 0
            link.said_ms = now_ms
            if len(out) <= commands_max and len(frames) <= frames_max:
                sends.append(Send(link.number, out, frames))
            else:
                sends.extend(split(link.number, out, frames, commands_max, frames_max))
        self.dirty.clear()
        closes = list(self._closes)
        self._closes.clear()
        return sends, closes

    # --- room of a link: what transport and peer accept ---------------------------------

    def share(self) -> int:
        """Return the bytes that a link may have unread: an equal share of the budget, bounded."""
        settings = self._shard.settings
        share = settings.outstanding_bytes // max(1, len(self.table))
        return max(settings.share_min_bytes, min(share, settings.share_max_bytes))

    def ask_if_little_room(self, link: Link) -> None:
        """Ask a link how far it has read, if less than half of its room is left.

        Called after deliveries; the answer is a PONG, which makes room: pong().
        """
        if link.room < link.ask_below:
            self.ask(link)

    def ask(self, link: Link) -> None:
        """Ask a link how far it has read, unless such a question is under way."""
        if not link.probe:
            self._probes += 1
            link.probe = self._probes
            link.probe_bytes = link.delivered_bytes
            link.probe_answers = link.unread_answers
            self.say(link, Ping(link.probe))

    def pong(self, link: Link, pong: Pong) -> None:
        """Note that a peer has read everything that was sent before a PING which it answers."""
        if link.probe and pong.token == link.probe:
            link.probe = 0
            link.cleared_bytes = link.probe_bytes
            link.unread_answers -= link.probe_answers
            self.unread_answers -= link.probe_answers
            self._make_room(link)

    def _make_room(self, link: Link) -> None:
        """Compute the room of a link anew: its share less the bytes that it may not have read.

        Called when the peer has shown how far it has read, or its socket takes messages again. A
        link with little room is asked how far it has read; the receivers of one that has any have
        their turns.
        """
        if link.blocked or link.state is not State.OPEN:
            link.room = 0
            return
        share = self.share()
        link.ask_below = share // 2
        link.room = share - (link.delivered_bytes - link.cleared_bytes)
        self.ask_if_little_room(link)
        if link.room > 0:
            self._resume(link)

    def block(self, link: Link) -> None:
        """Give a link nothing more: the shell says that its peer's socket takes nothing now."""
        link.blocked = True
        link.room = 0
        self._shard.counters["links_blocked"] += 1

    def unblock(self, link: Link) -> None:
        """Serve a link again: the shell says that its peer's socket takes messages again."""
        link.blocked = False
        if link.out:
            self.dirty.append(link)
        self._make_room(link)

    # --- time ---------------------------------------------------------------------------

    def _arm(self, link: Link, after_ms: int) -> None:
        """Set the one timer of a link, for its HELLO or next heartbeat; an earlier one is void."""
        self._armed += 1
        link.timer = self._armed
        heappush(self._timers, (self._shard.now_ms + after_ms, self._armed, link))

    def _arm_beat(self, link: Link) -> None:
        """Set the timer of a link to a heartbeat from now, together with links that are due then.

        Called each time the timer has fired, whether a PING was due or not. Links that are due in
        the same slot of time have one turn of the loop together, so the timer is up to a slot
        early. It is moved to the expiry of the link where that would come shortly after, so that
        one timer does for both.
        """
        now_ms = self._shard.now_ms
        slot_ms = link.heartbeat_ms // BEAT_SLOTS or 1
        due_ms = now_ms + link.heartbeat_ms
        due_ms -= due_ms % slot_ms  # the beginning of its slot
        expires_at_ms = link.heard_ms + link.expiry_ms
        if due_ms < expires_at_ms <= due_ms + slot_ms:
            due_ms = expires_at_ms
        self._arm(link, due_ms - now_ms)

    @property
    def wake_at_ms(self) -> int | None:
        """Time at which a timer, or a command that was put off, is due next; None: none is."""
        wake = self._timers[0][0] if self._timers else None
        if self._later:
            later = next(iter(self._later.values()))
            wake = later if wake is None else min(wake, later)
        return wake

    def beat(self) -> list[Link]:
        """End the links that were silent too long; return those whose heartbeat is due.

        Called at each tick. The caller has `keep_alive` look at those that are returned, last of
        all: what a link is sent in this turn may spare it the PING.
        """
        due: list[Link] = []
        now_ms = self._shard.now_ms
        timers = self._timers
        while timers and timers[0][0] <= now_ms:
            _, timer, link = heappop(timers)
            if link.state is State.CLOSED or timer != link.timer:  # A later timer replaced it.
                continue
            if link.state is State.NEW:
                no_command = no_reference = 0
                self.refuse(link, no_command, no_reference, "silent", "no HELLO came")
                self.close(link, "silent", "silent", "no HELLO came")
                continue
            if now_ms - link.heard_ms >= link.expiry_ms:
                silent_ms = now_ms - link.heard_ms
                self.close(link, "silent", "silent", f"nothing was heard for {silent_ms} ms")
                continue
            due.append(link)
            self._arm_beat(link)
        return due

    def keep_alive(self, link: Link) -> None:
        """Send PING to a link that sent or was sent nothing for a heartbeat; see beat()."""
        # The timer of the link may have been early by this much.
        beat = link.heartbeat_ms - link.heartbeat_ms // BEAT_SLOTS
        now_ms = self._shard.now_ms
        if not link.out and (now_ms - link.said_ms >= beat or now_ms - link.heard_ms >= beat):
            self.say(link, Ping(0))

    def answer_ping(self, link: Link, ping: Ping) -> None:
        """Send PONG with the token of a PING."""
        self.say(link, Pong(ping.token))


def _carries_nothing(link: Link) -> bool:
    """Sort key of outgoing(): whether a link's outbox has commands without frames only."""
    return not link.frames


def _name(command: int) -> str:
    """Return the name of a command, for the log; empty: no command is meant."""
    return COMMANDS[command].__name__ if command else ""
