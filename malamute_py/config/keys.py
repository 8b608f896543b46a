"""The names of settings: dotted keys, variables of the environment, and what a wrong one meant.

Owns the table of all keys, which is made of the sections. The rule: an unknown key is an error that
names the nearest one. Source: sections.py, which has the keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from malamute_py.changelog.settings import MailboxSettings, ServiceSettings, StreamSettings
from malamute_py.config.sections import Config, Denied, Grant, NamespaceSection, QuotasSection
from malamute_py.sections import ConfigError

ENVIRONMENT_PREFIX: Final = "MALAMUTE_"

FILES: Final = (
    "authentication.users_file", "authentication.server_key_file", "http.token_file",
)  # fmt: skip
"""Settings that name a file; in a configuration file it is looked for beside that."""


def _kinds(section: type[msgspec.Struct], prefix: str = "") -> dict[str, Any]:
    """Return the kind of each key of a section and the sections in it, by dotted key.

    A kind is str, list, dict, the tuple of the words that are allowed, or None for numbers and the
    like; parse_value() reads the text of a variable by it.
    """
    found: dict[str, Any] = {}
    for field in msgspec.inspect.type_info(section).fields:  # type: ignore[attr-defined]
        kind = field.type
        if isinstance(kind, msgspec.inspect.StructType):
            found |= _kinds(kind.cls, f"{prefix}{field.encode_name}.")
            continue
        simple: Any = None
        if isinstance(kind, msgspec.inspect.StrType):
            simple = str
        elif isinstance(kind, msgspec.inspect.ListType):
            simple = list
        elif isinstance(kind, msgspec.inspect.DictType):
            simple = dict
        elif isinstance(kind, msgspec.inspect.LiteralType):
            simple = tuple(kind.values)
        found[prefix + field.encode_name] = simple
    return found


QUOTAS: Final = tuple(name for name in QuotasSection.__struct_fields__ if name != "identities")
"""The resources that a quota may bound."""

KEYS: Final[dict[str, Any]] = _kinds(Config)
"""Dotted key -> how its value is written."""
_DEFAULTS: Final = {
    "streams": StreamSettings.__struct_fields__,
    "mailboxes": MailboxSettings.__struct_fields__,
    "services": ServiceSettings.__struct_fields__,
}
"""Section -> settings that its table `default` takes."""

_VARIABLES: Final = {
    ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): key
    for key, kind in KEYS.items()
    if kind is not dict
}
SECTIONS: Final = sorted({key.partition(".")[0] for key in KEYS if "." in key})
FIELDS: Final = {
    "permissions": Grant.__struct_fields__, "permissions.deny": Denied.__struct_fields__,
    "namespaces": NamespaceSection.__struct_fields__,
}  # fmt: skip
"""Tables of tables by name -> the keys that each of them may have."""
WITH_UNITS: Final = ("streams.default", "mailboxes.default", "services.default",
                      "quotas.identities", "namespaces")  # fmt: skip
"""Tables with sizes and times whose keys KEYS lacks: settings that the core reads, and names."""


_MISTYPED: Final = 0.9
"""Likeness from which on two names differ by a slip of the finger."""
_OF_MEASURE: Final = frozenset(
    {"max", "maximum", "min", "byte", "size", "m", "", "limit", "count", "number"}
)
"""Words of keys, without an `s` at their ends, that tell how much is meant and not of what."""


def key_of_variable(name: str) -> str | None:
    """Return the key of the setting that an environment variable gives; None: it gives none.

    Variables of other programs that begin with MALAMUTE_ (the client's, for example) pass. Raises
    ConfigError for one that begins like a section of ours: it is misspelt.
    """
    if not name.startswith(ENVIRONMENT_PREFIX):
        return None
    key = _VARIABLES.get(name)
    for section in SECTIONS:
        beginning = f"{ENVIRONMENT_PREFIX}{section.upper()}_"
        if key is None and name.startswith(beginning):
            meant = f"{section}.{name.removeprefix(beginning).lower()}"
            variables = {key: variable for variable, key in _VARIABLES.items()}
            near = _nearest(meant, [*variables])
            hint = f"; did you mean {variables[near]}?" if near else ""
            raise ConfigError(name, f"no setting has this variable{hint}")
    return key


def path_of_override(key: str) -> list[str]:
    """Take apart the dotted name of a setting on the command line. Raises ConfigError."""
    # In these sections users choose keys, so that KEYS has none of them.
    if key.partition(".")[0] not in ("permissions", "namespaces") and key not in KEYS:
        raise _unknown(key)
    return key.split(".")


def put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set one value in a table of tables. Raises ConfigError: a part of the path is a value."""
    *sections, last = path
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(section, "is a section, not a value")
        table = inner
    table[last] = value


def key_faults(table: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each section and key of a file that there is not, with the likely one."""
    for name, value in table.items():
        if name in KEYS:  # a key outside of the sections
            continue
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, n=1)
            if near and isinstance(value, Mapping):
                yield ConfigError(name, f"there is no such section; did you mean {near[0]}?")
            else:
                yield _unknown(name)
        elif not isinstance(value, Mapping):
            yield ConfigError(name, f"is a section; write [{name}] and its keys below")
        else:
            for inner in value:
                if f"{name}.{inner}" not in KEYS:
                    yield _unknown(f"{name}.{inner}")


def _unknown(key: str) -> ConfigError:
    """Return the error for a key that there is not, with a hint at what was meant."""
    section, _, last = key.partition(".")
    if last in _DEFAULTS.get(section, ()):  # a setting of what first use creates
        return ConfigError(key, f"there is no such key; did you mean {section}.default.{last}?")
    return ConfigError(key, f"there is no such key{nearest(key, KEYS) or _there_is(key)}")


def _there_is(key: str) -> str:
    """List what may be written where a key stands that resembles none."""
    section = key.partition(".")[0]
    if section in SECTIONS:
        names = [name.partition(".")[2] for name in KEYS if name.startswith(f"{section}.")]
        return f"; [{section}] has {', '.join(names)}"
    alone = ", ".join(name for name in KEYS if "." not in name)
    return f"; the sections are {', '.join(SECTIONS)}; outside them stand {alone}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the key that was meant by a wrong one; empty: none is near."""
    near = _nearest(name, list(known))
    return f"; did you mean {near}?" if near else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return the key that was meant by a wrong one; empty: none is near.

    Tried in this order: a missing section, a slip of the keyboard, the same words in another
    order, a similar key of the same section. known: keys that there are.
    """
    if "." not in name:
        near = [key for key in known if key.rpartition(".")[2] == name][:1]
        if near:
            return near[0]
    if mistyped := difflib.get_close_matches(name, known, n=1, cutoff=_MISTYPED):
        return mistyped[0]
    if same := _of_the_same_words(name, known):
        return same[0]
    section, _, last = name.rpartition(".")
    # Compared without the section: a long one would make any two of its keys similar.
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(last, beside, n=1)
    return beside[near[0]] if near else ""


def _of_the_same_words(name: str, known: Iterable[str]) -> list[str]:
    """Return the keys that have the words of a wrong one, in any order; the most similar first.

    Words of measure, such as `max` or `bytes`, are not compared: `max_stream_bytes` may mean
    `stream_bytes_max`. known: keys that there are.
    """
    words, section = _words(name), name.rpartition(".")[0]
    about = words - _OF_MEASURE

    def likeness(key: str) -> tuple[bool, bool, float]:
        """Return the order of a key: by section, by whether all words are the same, by letters."""
        alike = difflib.SequenceMatcher(None, name, key).ratio()
        return key.rpartition(".")[0] == section, _words(key) == words, alike

    # A table is left out: `users` is not meant by `users_max`, which bounds a number.
    keys = [key for key in known if KEYS.get(key) is not dict]
    found = [key for key in keys if about and _words(key) - _OF_MEASURE == about]
    return sorted(found, key=likeness, reverse=True)


def _words(key: str) -> frozenset[str]:
    """Return the words of a key without its section, each without an `s` at its end."""
    return frozenset(word.removesuffix("s") for word in key.rpartition(".")[2].lower().split("_"))
