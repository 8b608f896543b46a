"""A configuration that is read anew: what of it a running broker takes up, and what it says of it.

Owns the comparison of two configurations. The rules: each setting that differs is applied, refused
(the old value stays in force) or needs a restart, and is named; users, permissions and quotas are
taken up together or not at all; nothing of the broker is touched here. Source: SPEC.md, section
4.3, RELOAD_CONFIG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from malamute_py.config import (
    KEYS,
    Config,
    Denied,
    Grant,
    NamedVerbs,
    NamespaceSection,
    wrong_in_combination,
)
from malamute_py.config_check import Examined, Setting, in_force
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.credentials import check_credentials
from malamute_py.server.authentication.namespaces import Namespaces, check_namespaces
from malamute_py.server.authentication.users_file import UsersFileWrong
from malamute_py.server.defaults import check_defaults

APPLIED: Final = "applied"
REFUSED: Final = "refused"
RESTART: Final = "restart"

SECURITY: Final = (
    "authentication.users", "authentication.users_file", "authentication.clients",
    "authentication.identities", "permissions", "quotas.identities", "namespaces",
)  # fmt: skip
"""Settings that are taken up together or not at all."""
_TOGETHER: Final = "users, permissions, quotas and namespaces are taken up together or not at all"
_BY_NAME: Final = tuple(key for key in SECURITY if key != "authentication.users_file")
_LIVE_SECTIONS: Final = (
    "quotas", "streams", "mailboxes", "services", "groups", "transactions",
)  # fmt: skip
_NOT_LIVE: Final = frozenset({"mailboxes.default", "mailboxes.peek_bytes_max"})
_LIVE_LINKS: Final = frozenset(
    {
        "links_max", "replicas_max", "replica_grace_ms", "heartbeat_ms", "heartbeat_min_ms",
        "heartbeat_max_ms", "expiry_beats", "outbox_commands_max", "queries_max",
    }
)  # fmt: skip
RELOADED: Final = frozenset(
    {
        *SECURITY,
        *(f"links.{name}" for name in _LIVE_LINKS),
        *(key for key in KEYS if key.partition(".")[0] in _LIVE_SECTIONS and key not in _NOT_LIVE),
    }
)
"""Settings that the core reads whenever it needs them; a running broker takes them up."""


CHANGES_SHOWN: Final = 1_000
"""Changes of a configuration that are logged and told, of one reading."""


class Change(NamedTuple):
    """A setting that differs from the one in force, or is wrong."""

    key: str
    outcome: str
    """`applied`, `refused` or `restart`."""
    why: str = ""


class Reread(NamedTuple):
    """The result of a thread that has read the configuration anew."""

    reading: Reading
    link: int
    """The link that asked; 0: a signal did."""
    request: int
    failed: str = ""
    """Why nothing was read; empty: it was."""


class Reading(NamedTuple):
    """A configuration that was read anew."""

    config: Config
    """Configuration in force now, without the users file."""
    complete: Config
    """This configuration with the users file and the broker's own users."""
    changes: list[Change]
    settings: Sequence[Setting] = ()
    """Settings in force, each with its origin."""
    at_ms: int = 0
    """When the configuration was read anew and taken up; 0: not since the start."""

    def told(self) -> dict[str, Any]:
        """Return what BROKER_INFO tells: the settings with their origins, and the last reload.

        See SPEC.md, section 4.7.
        """
        told: dict[str, Any] = {"settings": sorted(map(list, self.settings))}
        if self.at_ms:
            told["reload"] = {"at_ms": self.at_ms, **self.changes_told()}
        return told

    def changes_told(self) -> dict[str, Any]:
        """Return what RELOAD_CONFIG tells of the changes."""
        shown = [list(change) for change in self.changes[:CHANGES_SHOWN]]
        return {"changes": shown, "more": len(self.changes) > CHANGES_SHOWN}


def take_up(before: Reading, examined: Examined, complete: Callable[[Config], Config]) -> Reading:
    """Return what is in force after a configuration was read anew, with each change and its fate.

    A setting that is wrong, by itself or beside others, stays as it was; so do all of SECURITY
    together. before: in force until now. examined: what was read. complete: adds the users file,
    which it reads, and the broker's own users.
    """
    changes = [Change(key or place, REFUSED, why) for place, key, why in examined.problems]
    if any(not problem.key for problem in examined.problems):
        return before._replace(changes=changes)  # The file as a whole cannot be read.
    # Settings that are wrong by themselves stay as they were. `values` is what is to be applied.
    held = {_setting_of(change.key) for change in changes}
    values: dict[str, Any] = {}
    # Each setting that differs: to be applied, refused beside a wrong one, or left for a restart.
    for key in KEYS:
        old, new = value_of(before.config, key), value_of(examined.config, key)
        if old == new or key in held:
            continue
        if key in SECURITY and not held.isdisjoint(SECURITY):
            changes.append(Change(key, REFUSED, _TOGETHER))
        elif key in RELOADED:
            values[key] = new
        else:
            changes.append(Change(key, RESTART))
    # What is wrong together was right before: the settings of the fault stay as they were. Others
    # may be wrong beside these then.
    while errors := list(wrong_in_combination(with_values(before.config, values))):
        taken = len(values)
        for error in errors:
            setting = _setting_of(error.key)
            wrong = SECURITY if setting in SECURITY else (setting,)
            # The text of an error names the settings that do not agree.
            for key in [key for key in values if key in wrong or key in error.why]:
                del values[key]
                if key in SECURITY and key != setting:
                    changes.append(Change(key, REFUSED, _TOGETHER))
            changes.append(Change(error.key, REFUSED, error.why))
        if len(values) == taken:
            break  # no value that was read is at fault
    # What only the users file and the tables of credentials show.
    config = with_values(before.config, values)
    try:
        check_defaults(config)
        # Where one of these settings stays as it was, the users file is not read anew either.
        if any(_setting_of(change.key) in SECURITY for change in changes):
            completed = with_values(before.complete, values)
        else:
            completed = complete(config)
        check_credentials(completed.authentication)
        check_namespaces(completed)
    except ConfigError as error:
        faults = error.faults if isinstance(error, UsersFileWrong) else (error,)
        changes += [Change(fault.key, REFUSED, fault.why) for fault in faults]
        held = {*SECURITY}  # none of these is applied
        if ".default" in error.key:
            # A default of all, or their bound, may be what does not fit a namespace's own.
            held |= {
                "streams.settings_bytes_max",
                *(key for key in KEYS if key.endswith(".default")),
            }
        for key in [key for key in values if key in held]:
            del values[key]
            if key != _setting_of(error.key):
                changes.append(Change(key, REFUSED, str(error)))
        config, completed = (with_values(each, values) for each in (before.config, before.complete))
    changes += [Change(key, APPLIED) for key in values if key not in _BY_NAME]
    changes += _by_name(before.complete, completed)
    settings = in_force(config, before.settings, examined.settings)
    return Reading(config, completed, changes, settings)


def _setting_of(key: str) -> str:
    """Return the setting that a dotted name lies in: permissions, of permissions.ann.read."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in KEYS:
            return ".".join(parts[:length])
    return key


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting, by its dotted name."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with these values, by dotted name: a reload takes up only some."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    alone = sections.pop("", {})  # settings outside of all sections
    for section, inner in sections.items():
        alone[section] = msgspec.structs.replace(getattr(config, section), **inner)
    return msgspec.structs.replace(config, **alone)


def _by_name(before: Config, after: Config) -> Iterator[Change]:
    """Yield a change for each user, permission, quota and namespace that came, went or changed.

    Each is named alone, since the setting that it is in may have thousands; of a namespace, each
    field.
    """
    for key in _BY_NAME:
        old, new = value_of(before, key), value_of(after, key)
        for name in sorted({*old, *new}):
            if key == "namespaces" and name in old and name in new:
                for field in _fields(NamespaceSection):
                    if getattr(old[name], field) != getattr(new[name], field):
                        yield Change(f"{key}.{name}.{field}", APPLIED, "changed")
            elif old.get(name) != new.get(name):
                why = "added" if name not in old else "changed" if name in new else "removed"
                yield Change(f"{key}.{name}", APPLIED, why)


def lost_credentials(before: Config, after: Config) -> frozenset[str]:
    """Return the users that a reload removed or gave another credential: their links end."""
    mechanism = after.authentication.mechanism
    if mechanism == "none":
        return frozenset()
    table = "users" if mechanism == "plain" else "clients"
    old, new = getattr(before.authentication, table), getattr(after.authentication, table)
    return frozenset(name for name in old if old[name] != new.get(name))


def narrowed(before: Config, after: Config, owner: str) -> bool:
    """Whether an owner may do less by the configuration `after` a reload than by the one `before`.

    The reload then ends the owner's open links. Compared are templates of identities, the
    namespace, and the permissions.
    """
    old_templates, new_templates = (
        config.authentication.identities.get(owner, []) for config in (before, after)
    )
    if not set(old_templates) <= set(new_templates):
        return True
    old_home, new_home = (Namespaces(config.namespaces).of(owner) for config in (before, after))
    # A namespace confines its users to its prefix and to the mailboxes of its users.
    if new_home is not None and (
        old_home is None
        or not old_home.prefix.startswith(new_home.prefix)
        or not set(old_home.users) <= set(new_home.users)
    ):
        return True
    # Without any permissions in the configuration everything is allowed.
    if not after.permissions:
        return False
    if not before.permissions:
        return True
    old, new = (
        config.permissions.get(owner) or config.permissions.get("*") or Grant()
        for config in (before, after)
    )
    return not _allows_all_of(new, old)


def _allows_all_of(new: Grant, old: Grant) -> bool:
    """Whether a new grant allows all that an old one does, by the patterns in their lists.

    Patterns are compared as texts: False also where a new pattern selects what two old ones did.
    """
    flags = ("admin", "manage_clients", "manage_users")
    return (
        all(set(getattr(old, verb)) <= set(getattr(new, verb)) for verb in _fields(NamedVerbs))
        # Of denials the new ones have to be among the old ones.
        and all(set(getattr(new.deny, verb)) <= set(getattr(old.deny, verb))
                for verb in _fields(Denied))
        and all(getattr(new, flag) or not getattr(old, flag) for flag in flags)
        and all(set(subjects) <= set(new.write_subjects.get(stream, ()))
                for stream, subjects in old.write_subjects.items())
    )  # fmt: skip


def _fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__
