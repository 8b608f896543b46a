"""Administration of the broker: facts about it, its links, and their end.

Owns the commands about the whole broker that a RESULT answers; a handler raises BrokerRefused, and
the broker answers with it. The rule: each list is bounded.
Source: SPEC.md, section 4; docs/design.md, Safety.

An owner is the credential (or identity) of a link, which has permissions. A namespace is a tenant:
its users see nothing of others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from heapq import nsmallest
from operator import attrgetter, itemgetter
from typing import Any

from msgspec.structs import asdict

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_protocol.commands import (
    BrokerInfo,
    Command,
    Kick,
    ListLinks,
    ListNamespaces,
    ListUsers,
    ReloadConfig,
)
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard
from malamute_py.broker.limits import Namespace
from malamute_py.broker.links.link import Link
from malamute_py.broker.links.links import Links
from malamute_py.broker.log.answers import Answers
from malamute_py.broker.log.pages import Entries
from malamute_py.broker.log.ring import RingState
from malamute_py.broker.streams.catalogue import Catalogue
from malamute_py.broker.streams.producers import Producers
from malamute_py.broker.subscriptions.subscription import Subscription


class Administration:
    """The commands about the broker and its links."""

    def __init__(
        self, shard: Shard, links: Links, catalogue: Catalogue, producers: Producers,
        answers: Answers,
    ) -> None:  # fmt: skip
        self._shard = shard
        self._links = links
        self._catalogue = catalogue
        self._producers = producers
        self._answers = answers

    def handlers(self) -> dict[type[Command], Callable[[Link, Any], None]]:
        """Return the handler of each command, for the broker's table of commands."""
        return {
            BrokerInfo: self.broker_info,
            ListLinks: self.list_links,
            Kick: self.kick,
            ReloadConfig: self.reload_config,
            ListUsers: self.list_users,
            ListNamespaces: self.list_namespaces,
        }

    def broker_info(self, link: Link, command: BrokerInfo) -> None:
        """Answer with facts about the broker, and a page of its settings if they are asked for.

        A user of a namespace gets no counts. Only administrators are told where the data lies, and
        the settings. Raises BrokerRefused `forbidden`.
        """
        shard = self._shard
        told = {
            "software": shard.settings.software, "uuid": shard.uuid, "epoch": shard.epoch,
            "now_ms": shard.now_ms,
        }  # fmt: skip
        namespace = shard.settings.namespace_of(link.owner)
        administers = shard.settings.permit(link.owner, "admin", "broker")
        if command.settings is not None:
            if namespace is not None or not administers:
                raise BrokerRefused("forbidden", "you may not see the settings")
            told |= self._settings_after(command.settings)
        if namespace is not None:
            # Counts of all clients tell what other namespaces do.
            self._answers.result(link, command, {**told, "namespace": namespace.name})
            return
        facts = dict(shard.settings.facts())
        if not administers:
            facts.pop("data", None)
        # range() ends the list where a page is full.
        rings = {
            ring.name: self._ring_facts(ring, link.owner)
            for _, ring in zip(range(shard.settings.page_max), self._catalogue.rings.values(),
                               strict=False)
        }  # fmt: skip
        self._answers.result(
            link, command,
            {
                **told, "links": len(self._links), "streams": len(self._catalogue),
                "producers": len(self._producers), "rings": rings,
                "counters": dict(shard.counters), **facts,
            },
        )  # fmt: skip

    def _settings_after(self, after: str) -> dict[str, Any]:
        """Return a page of the settings in force, and what the last reload did.

        after: name of the last setting that the caller has seen; each setting begins with its name.
        """
        told = dict(self._shard.settings.in_force())
        settings = told.get("settings", [])
        following = settings[bisect_right(settings, after, key=itemgetter(0)) :]
        page_max = self._shard.settings.page_max
        page: Entries[list[Any]] = Entries(page_max, page_max)
        more = page.add_all(following)
        return {**told, "settings": page.found, "settings_more": more}

    def _ring_facts(self, ring: RingState, owner: str) -> dict[str, Any]:
        """Return the facts about a ring that BROKER_INFO tells.

        stream: name of the one whose own ring it is, told to those who may read it.
        """
        code, _ = ring.failed or ("", "")
        facts = {
            "end_lsn": ring.end_lsn, "visible": ring.visible, "memory": ring.memory,
            "failed": code,
        }  # fmt: skip
        stream = self._catalogue.owner_of(ring)
        if stream is not None and self._shard.settings.permit(owner, "read", stream.name):
            facts["stream"] = stream.name
        return facts

    def list_links(self, link: Link, command: ListLinks) -> None:
        """Answer with a page of the links, for administrators only.

        An administrator of a namespace sees the links of that namespace. Raises BrokerRefused.
        """
        settings = self._shard.settings
        if not settings.permit(link.owner, "manage_clients", "links"):
            raise BrokerRefused("forbidden", "you may not list links")
        limit = max(1, min(command.limit, settings.page_max))
        shown = (
            one for one in self._links
            if one.number > command.after and settings.shares_namespace(link.owner, one.owner)
        )  # fmt: skip
        # One more than the page has tells whether others follow.
        first = nsmallest(limit + 1, shown, key=attrgetter("number"))
        self._list(link, command, "links", map(_link_facts, first))

    def kick(self, link: Link, command: Kick) -> None:
        """End another link, for KICK; only administrators may. Raises BrokerRefused."""
        settings = self._shard.settings
        if not settings.permit(link.owner, "manage_clients", "links"):
            raise BrokerRefused("forbidden", "you may not end links")
        other = self._links.get(command.link)
        if (
            other is None
            or not other.open
            or not settings.shares_namespace(link.owner, other.owner)
        ):
            raise BrokerRefused("unknown_link", f"there is no link {command.link}")
        self._answers.result(link, command, {})
        self._links.close(other, "kicked", "kicked", command.reason[:200])

    def reload_config(self, link: Link, command: ReloadConfig) -> None:
        """Have the shell read the configuration anew; it calls `reloaded` with the answer later.

        Raises BrokerRefused: the link may not, or the shell has a reason why it does not now.
        """
        settings = self._shard.settings
        of_all = settings.namespace_of(link.owner) is None
        if not (of_all and settings.permit(link.owner, "manage_users", "broker")):
            raise BrokerRefused("forbidden", "you may not have the configuration read anew")
        refusal = settings.reload(link.number, command.request)
        if refusal:
            raise BrokerRefused("wait", refusal)

    def list_users(self, link: Link, command: ListUsers) -> None:
        """Answer with the users and permissions in force, or with what the link's own user may.

        A `verb` asks of each user whether it may do that with the stream, mailbox or service of a
        `name`. `own` asks of the link's own user alone: without a name, whether it may do that with
        any. Raises BrokerRefused.
        """
        settings = self._shard.settings
        if not (command.own or settings.permit(link.owner, "manage_users", "broker")):
            raise BrokerRefused("forbidden", "you may not list users")
        if max(map(len, (command.verb, command.name, command.after))) > NAME_BYTES_MAX:
            raise BrokerRefused("bad_name", "no verb or name is so long")
        if command.own:
            owner, verb, name = link.owner, command.verb, command.name
            if name:
                # A user may be bound to some subjects of a stream that it may not write as a whole.
                may = settings.permit(owner, verb, name) or (
                    verb == "write" and settings.subjects(owner, name) is not None
                )
            else:
                may = settings.allows_some(owner, verb)
            entry = {"user": owner, "may": may}
            self._answers.result(link, command, {"users": [entry], "more": False})
            return
        users = settings.users(command.verb, command.name)
        namespace = settings.namespace_of(link.owner)
        if namespace is not None:
            users = [user for user in users if user["namespace"] == namespace.name]
        users = users[bisect_right(users, command.after, key=itemgetter("user")) :]
        self._list(link, command, "users", users)

    def list_namespaces(self, link: Link, command: ListNamespaces) -> None:
        """Answer with a page of the namespaces and what each holds.

        A user of a namespace is told of that one alone. Raises BrokerRefused `forbidden`.
        """
        settings = self._shard.settings
        own = settings.namespace_of(link.owner)
        if own is None and not settings.permit(link.owner, "list_namespaces", "broker"):
            raise BrokerRefused("forbidden", "you may not list namespaces")
        shown = sorted(
            (
                each
                for each in (settings.namespaces if own is None else (own,))
                if each.name > command.after
            ),
            key=attrgetter("name"),
        )
        self._list(link, command, "namespaces", map(self._namespace_facts, shown))

    def _list(
        self, link: Link, command: Any, listed: str, entries: Iterable[dict[str, Any]]
    ) -> None:
        """Answer a command with a page of entries; listed: their key in the answer."""
        page: Entries[dict[str, Any]] = Entries(command.limit, self._shard.settings.page_max)
        more = page.add_all(entries)
        self._answers.result(link, command, {listed: page.found, "more": more})

    def _namespace_facts(self, namespace: Namespace) -> dict[str, Any]:
        """Return the facts of a namespace for LIST_NAMESPACES: users, holdings, quotas, ..."""
        usage = self._shard.quotas.shared_by(namespace)
        return {
            "namespace": namespace.name, "prefix": namespace.prefix,
            "users": list(namespace.users),
            "held": {resource: amount for resource, amount in sorted(usage.held.items()) if amount},
            "quotas": {
                resource: bound for resource, bound in asdict(namespace.quota).items() if bound
            },
            "messages_in": usage.messages_in, "bytes_in": usage.bytes_in,
            "refused": dict(sorted(usage.refused.items())),
            "default_stream": namespace.default_stream,
            "default_mailbox": namespace.default_mailbox,
            "default_service": namespace.default_service,
        }  # fmt: skip

    def reloaded(self, link: int, request: int, value: dict[str, Any]) -> None:
        """Answer a RELOAD_CONFIG with what the shell has read, unless its link has ended."""
        asker = self._links.get(link)
        if asker is not None:
            self._answers.result(asker, ReloadConfig(request), value)


def _link_facts(link: Link) -> dict[str, Any]:
    """Return the facts of one link for LIST_LINKS.

    live: subscriptions that get batches as they come; without_credit: those that get nothing until
    the client gives more credit; lag: records that the slowest one has not been given yet, up to
    where it stops or the stream ends; unread_bytes: those that the peer has not shown to have read.
    """
    subs = [one for one in link.receivers.values() if isinstance(one, Subscription)]
    started = [one for one in subs if one.started]
    return {
        "link": link.number,
        "identity": link.identity,
        "state": link.state.value,
        "software": link.software,
        "opened_ms": link.opened_ms,
        "heard_ms": link.heard_ms,
        "blocked": link.blocked,
        "subscriptions": len(subs),
        "live": sum(1 for sub in subs if sub.live),
        "without_credit": sum(1 for sub in started if min(sub.left_records, sub.left_bytes) <= 0),
        "lag": max((max(0, min(sub.tail, sub.stop) - sub.place) for sub in started), default=0),
        "unconfirmed_bytes": link.unconfirmed_bytes,
        "unread_bytes": link.delivered_bytes - link.cleared_bytes,
    }
