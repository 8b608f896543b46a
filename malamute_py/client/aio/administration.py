"""The broker's administration in asyncio: facts, links, users, namespaces, its configuration.

Owns the verbs as awaitables. The rule: a cancelled call leaves the link and all other calls as
they were.
"""

from __future__ import annotations

from functools import partial

from malamute_protocol import commands as c
from malamute_protocol.errors import BrokerRefused
from malamute_py.client.aio.pages import PagedVerbs
from malamute_py.client.facts import (
    BrokerFacts,
    LinkFacts,
    NamespaceFacts,
    ReloadedSetting,
    SettingInForce,
    SettingsInForce,
    UserFacts,
    facts,
)


class AdministrationVerbs(PagedVerbs):
    """Verbs for the broker as a whole."""

    async def broker_info(self) -> BrokerFacts:
        """Facts about the broker."""
        return facts(BrokerFacts, await self._link.ask(c.BrokerInfo))

    async def settings_in_force(self) -> SettingsInForce:
        """Ask for the settings in force, where each comes from, and what the last reload did.

        Needs the permission admin. Raises BrokerRefused.
        """
        found: list[SettingInForce] = []
        while True:  # a page each; the last answer tells the reload, too
            after = found[-1].key if found else ""
            value = await self._link.ask(partial(_info, after))
            page = value.get("settings", [])
            found += [SettingInForce(*setting) for setting in page]
            if not page or not value.get("settings_more"):
                break
        reload = value.get("reload", {})
        changes = [ReloadedSetting(*change) for change in reload.get("changes", [])]
        return SettingsInForce(found, reload.get("at_ms", 0), changes)

    async def list_links(self, limit: int = 1000) -> list[LinkFacts]:
        """The links that the broker has, the oldest first. Raises BrokerRefused `forbidden`.

        limit: at most so many; 0: all.
        """
        return await self._pages(
            LinkFacts,
            lambda number, after: c.ListLinks(number, limit or 1000, after),  # links of a page
            limit,
            listed="links",
            first=0,
        )

    async def kick(self, link: int, reason: str = "") -> None:
        """End a link by its number. Raises BrokerRefused."""
        await self._link.ask(lambda number: c.Kick(number, link, reason))

    async def list_users(self, verb: str = "", name: str = "") -> list[UserFacts]:
        """Ask for the users and permissions in force, by name. Needs the permission manage_users.

        verb, name: what each user is asked about, such as "read" and a stream's name: see `may`.
        Raises BrokerRefused.
        """
        return await self._pages(
            UserFacts,
            lambda number, after: c.ListUsers(number, verb, name, after),
            limit=0,  # all
            listed="users",
        )

    async def may(self, verb: str, name: str = "") -> bool:
        """Ask whether this client's user may do something: a verb of permissions, on a name.

        name: empty: on any name at all. Some subjects alone are enough for "write". Raises
        BrokerRefused `unsupported` or `forbidden`: an older broker, which does not tell.
        """
        value = await self._link.ask(lambda number: c.ListUsers(number, verb, name, own=True))
        users = value["users"]
        if len(users) != 1 or "grant" in users[0]:
            # An older broker passes over `own` and lists all users with their permissions.
            raise BrokerRefused("unsupported", "this broker does not tell what its own user may do")
        return facts(UserFacts, users[0]).may

    async def list_namespaces(self, *, limit: int = 0) -> list[NamespaceFacts]:
        """Ask for the namespaces by name and what each holds, or for the caller's own alone.

        limit: at most so many; 0: all. Raises BrokerRefused `forbidden`: the caller is in no
        namespace and may not manage users.
        """
        return await self._pages(NamespaceFacts, c.ListNamespaces, limit, listed="namespaces")

    async def reload_config(self) -> list[ReloadedSetting]:
        """Have the broker read its configuration and users anew. Raises BrokerRefused.

        Returns each setting that differs or is wrong, and what became of it.
        """
        value = await self._link.ask(c.ReloadConfig)
        return [ReloadedSetting(*change) for change in value["changes"]]


def _info(settings_after: str, number: int) -> c.BrokerInfo:
    """Return the question for a page of settings: those whose keys follow after a key."""
    return c.BrokerInfo(number, settings_after)
