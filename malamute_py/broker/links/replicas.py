"""Numbers of replicas: which session has which identity of a template.

Owns the identities that were derived from templates, and the sessions for which they are kept. The
rules: a new session gets the least free number; a session keeps its number for a grace time after
its link has ended, unless the client ended the link in order; a name that belongs to another
credential, or that a client asked for as it is, is never derived. Source: SPEC.md, section 4.8.

A template (`app-{n}`) gives each session that asks for it a number, and so an identity of its own:
its sessions are replicas, and those of one template and credential a family.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from malamute_protocol.address import replica_name
from malamute_protocol.errors import BrokerRefused
from malamute_py.broker.context import Shard

ENDED: Final = frozenset({"bye", "kicked"})
"""Ends of a link after which its session does not come back: its number is free at once."""


class Family:
    """Replicas of one template under one credential."""

    __slots__ = ("credential", "numbers", "sessions", "template")

    def __init__(self, credential: str, template: str) -> None:
        self.credential = credential
        self.template = template
        self.numbers: dict[int, bytes] = {}
        """Number -> the session that has it."""
        self.sessions: dict[bytes, int] = {}


class Replicas:
    """All derived identities."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._families: dict[tuple[str, str], Family] = {}
        self.names: dict[str, Family] = {}
        """Derived identity -> its family."""
        self._absent: dict[tuple[Family, bytes], int] = {}
        """(family, session without a link) -> since when it has none, ascending."""

    def __len__(self) -> int:
        return len(self.names)

    def claim(
        self, credential: str, template: str, session: bytes, wanted: int, taken: Container[str]
    ) -> str:
        """Return the identity of a session: the one that it has or had, or the next free one.

        Called for a HELLO that asks for a template (`app-{n}`). wanted: the number that the session
        had, as its client says; -1: none; a broker that was restarted knows no numbers. taken:
        identities that clients asked for by name. Raises BrokerRefused `limit`: every number is
        taken.
        """
        self._forget_absent()
        key = credential, template
        family = self._families.get(key)
        if family is None:
            family = Family(credential, template)
        number = family.sessions.get(session, -1)
        if number < 0:
            number = self._pick(family, wanted, taken)
            self._families[key] = family
            family.sessions[session] = number
            family.numbers[number] = session
            self.names[replica_name(template, number)] = family
        self._absent.pop((family, session), None)
        return replica_name(template, number)

    def _pick(self, family: Family, wanted: int, taken: Container[str]) -> int:
        """Return a free number of a family, the wanted one if possible, else the least.

        Raises BrokerRefused `limit`: there is none.
        """
        most = self._shard.settings.replicas_max
        if 0 <= wanted < most and self._may_give(family, wanted, taken):
            return wanted
        for number in range(most):
            if number not in family.numbers and self._may_give(family, number, taken):
                return number
        self._shard.counters["replicas_refused"] += 1
        raise BrokerRefused(
            "limit",
            f"each of the {most} numbers of '{family.template}' is taken (links.replicas_max)",
            self._shard.settings.retry_ms,
        )

    def _may_give(self, family: Family, number: int, taken: Container[str]) -> bool:
        """Whether no client has the identity of a number, and no other credential may have it."""
        name = replica_name(family.template, number)
        if name in self.names or name in taken:
            return False
        return self._shard.settings.carrier(name) == family.credential

    def left(self, credential: str, template: str, session: bytes, happened: str) -> None:
        """Keep the number of a session, whose link has ended, for a grace time, or free it at once.

        happened: how the link ended, as `Link.happened` has it.
        """
        family = self._families[credential, template]
        if happened in ENDED:
            self._free_number(family, session)
            return
        settings = self._shard.settings
        if len(self._absent) >= settings.links_max:  # The one that has been absent longest goes.
            first = next(iter(self._absent))
            del self._absent[first]
            self._free_number(*first)
        self._absent[family, session] = self._shard.now_ms

    def put_off(self, ms: int) -> None:
        """Keep the numbers of absent sessions so much longer: the broker stood still meanwhile."""
        self._absent = {session: since_ms + ms for session, since_ms in self._absent.items()}

    def _forget_absent(self) -> None:
        """Free the numbers of sessions without a link for too long, before any is looked for."""
        absent = self._absent
        since_ms = self._shard.now_ms - self._shard.settings.replica_grace_ms
        while absent:
            first = next(iter(absent))  # the one that has been absent longest
            if absent[first] > since_ms:
                return
            del absent[first]
            self._free_number(*first)

    def _free_number(self, family: Family, session: bytes) -> None:
        """Free the number of a session, and with the last number its family."""
        number = family.sessions.pop(session)
        del family.numbers[number]
        del self.names[replica_name(family.template, number)]
        if not family.numbers:
            del self._families[family.credential, family.template]

    def family_of(self, name: str) -> Family | None:
        """Return the family of which a replica has an identity, or may come back to it.

        Asked when a client wants the identity by name: it is refused then. None: no family.
        """
        if name not in self.names:
            return None
        self._forget_absent()
        return self.names.get(name)
