"""Every problem of a configuration at once, and where each value in force comes from.

Owns the places: a line of the file, a variable, the command line, the default. The rules: a wrong
value is reported and left out, so that one problem hides no other; a value that is a secret is
never shown. Source: config/, which has the checks themselves.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from malamute_py.config import (
    KEYS,
    Config,
    key_of_variable,
    parse_value,
    path_of_override,
    put,
    read_file,
    read_override,
    typed,
    wrong_in_combination,
)
from malamute_py.sections import ConfigError

DEFAULT: Final = "default"
COMMAND_LINE: Final = "command line"
PROGRAM: Final = "program"
"""Origin of a value that the program which embeds the broker gave."""
MASK: Final = "********"
"""Text in place of a secret."""
_SECRETS: Final = ("authentication.users",)
"""Settings whose values are secrets: hashes of passwords."""
_KEY_LINE: Final = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*'|[ .])+?)\s*=""")
_BY_ITEM: Final = {key for key, kind in KEYS.items() if kind is dict}
"""Settings with keys of their own, which are looked at one by one."""

Keys = tuple[str, ...]
"""The names that lead to a value, from its section on."""


class Problem(NamedTuple):
    """A value that is wrong, and what to write instead."""

    place: str
    """FILE:LINE, the name of a variable, or the command line."""
    key: str
    why: str


class Setting(NamedTuple):
    """A value in force."""

    key: str
    value: Any
    origin: str
    """As Problem.place; `default`: the value is not written anywhere; `program`: see PROGRAM."""


class Examined(NamedTuple):
    """The content of a configuration, as far as it is right."""

    config: Config
    settings: list[Setting]
    problems: list[Problem]
    place_of: Callable[[str], str]
    """Returns the place of the setting that a dotted name begins with."""

    def all_problems(self, faults: Iterable[ConfigError]) -> list[Problem]:
        """Return the problems, and faults of a further check in values that are not left out."""
        wrong = [problem.key for problem in self.problems]
        # A value that was left out is not compared with others.
        return self.problems + [
            Problem(error.place or self.place_of(error.key), error.name, error.why)
            for error in faults
            if not any(key and (key == error.key or key in error.why) for key in wrong)
        ]


def examine(
    path: str | Path | None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Examined:
    """Read a configuration as load() does, but go on after each problem, and note origins.

    For `malamute broker --check` and reloads.
    """
    return _Examination(path).run(environment or {}, overrides or {})


class _Examination:
    """One reading of a configuration that goes on after each problem; examine() makes it."""

    def __init__(self, path: str | Path | None) -> None:
        self._path = path
        self._table: dict[str, Any] = {}
        """Values that are right by themselves, in tables of tables."""
        self._origins: dict[Keys, str] = {}
        """Where each of them was written."""
        self._problems: list[Problem] = []
        self._lines: dict[Keys, int] = {}
        """Lines of the file, by what begins there."""

    def run(self, environment: Mapping[str, str], overrides: Mapping[str, Any]) -> Examined:
        """Take each value of the file, the environment and the overrides, then check the whole."""
        if self._path is not None:
            self._read(Path(self._path))
        for name, text in sorted(environment.items()):
            try:
                key = key_of_variable(name)
                if key is not None:
                    self._take(tuple(key.split(".")), parse_value(key, text), name)
            except ConfigError as error:
                self._problems.append(Problem(name, error.key, error.why))
        for key, value in overrides.items():
            try:
                keys = tuple(path_of_override(key))
                self._take(keys, read_override(key, value), COMMAND_LINE)
            except ConfigError as error:
                self._problems.append(Problem(COMMAND_LINE, error.key, error.why))
        # The table has only values that are right by themselves.
        config = typed(self._table)
        settings = [Setting(".".join(k), v, self._origin(k)) for k, v in _shown(config)]
        examined = Examined(config, settings, self._problems, self.place_of)
        return examined._replace(problems=examined.all_problems(wrong_in_combination(config)))

    def _read(self, path: Path) -> None:
        """Take each value of the file; a file that cannot be read is a problem by itself."""
        try:
            table = read_file(path)
        except ConfigError as error:
            line = re.search(r"\(at line (\d+)", error.why)
            place = f"{path}:{line[1]}" if line else str(path)
            self._problems.append(Problem(place, "", error.why))
            return
        self._lines = lines_of(path.read_text("utf-8"))
        for keys, value in _items(table):
            self._take(keys, value, self._file_place(keys))

    def _take(self, keys: Keys, value: Any, origin: str) -> None:
        """Take one value into the table if it is right by itself, or note its problem.

        keys: names that lead to it. origin: its place (file and line, variable, command line).
        """
        # A configuration of this value alone, so that its error is about no other.
        alone: dict[str, Any] = {}
        put(alone, keys, value)
        try:
            typed(alone)
        except ConfigError as error:
            if len(keys) > 1 and isinstance(value, Mapping) and value:
                # One fault of an entry hides no other: each of its values is taken by itself.
                for name, inner in value.items():
                    place = self._file_place((*keys, name)) if (*keys, name) in self._lines else ""
                    self._take((*keys, name), inner, place or origin)
                return
            # The problem names the value as the operator wrote it. The error's key leaves out the
            # key of an entry in a table of them (a user's name, say): it is put in here.
            key = error.key
            for length in range(len(keys) - 1, 0, -1):
                known = ".".join(keys[:length])
                if known in _BY_ITEM and key.startswith(known) and ".".join(keys) not in key:
                    key = ".".join(keys[: length + 1]) + key.removeprefix(known)
            full = ".".join(keys)
            if full.startswith(f"{key}.") and not error.why.startswith("there is no such key"):
                key = full  # the error names only the table that the value is in
            self._problems.append(Problem(origin, key, error.why))
            return
        put(self._table, keys, value)
        self._origins[keys] = origin

    def _file_place(self, keys: Keys) -> str:
        """Return file and line of a key, or of the nearest table around it."""
        for length in range(len(keys), 0, -1):
            line = self._lines.get(keys[:length])
            if line is not None:
                return f"{self._path}:{line}"
        return str(self._path)

    def place_of(self, key: str) -> str:
        """Return the place of the setting that a dotted name begins with, for a later fault."""
        for keys, origin in self._origins.items():
            if key == ".".join(keys) or key.startswith(".".join(keys) + "."):
                return origin
        section = key.partition(".")[0]
        if (section,) in self._lines:
            return self._file_place((section,))
        return str(self._path) if self._path is not None else DEFAULT

    def _origin(self, keys: Keys) -> str:
        """Return where the value of a key comes from, or that of the nearest table around it."""
        for length in range(len(keys), 0, -1):
            origin = self._origins.get(keys[:length])
            if origin is not None:
                return origin
        return DEFAULT


def of_program(config: Config) -> list[Setting]:
    """Return the settings of a configuration that a program made, each with its origin."""
    default = dict(_shown(Config()))
    return [
        Setting(".".join(keys), value, DEFAULT if default.get(keys) == value else PROGRAM)
        for keys, value in _shown(config)
    ]


def in_force(config: Config, before: Iterable[Setting], read: Iterable[Setting]) -> list[Setting]:
    """Return the settings that are in force after a reload, each with its origin.

    config: in force now; it took up some of the values that the reload read. before: settings in
    force before the reload. read: settings that the reload read.
    """
    origin_before = {setting.key: setting.origin for setting in before}
    read_by_key = {setting.key: setting for setting in read}
    found = []
    for keys, value in _shown(config):
        key = ".".join(keys)
        new = read_by_key.get(key)
        if new is not None and new.value == value:
            origin = new.origin
        else:
            # The reload did not take up this setting: the value before it is still in force.
            origin = origin_before.get(key, DEFAULT)
        found.append(Setting(key, value, origin))
    return found


def _shown(config: Config) -> Iterator[tuple[Keys, Any]]:
    """Return the values of a configuration, with MASK in place of secrets."""
    for keys, value in _items(msgspec.to_builtins(config)):
        secret = any(".".join(keys).startswith(f"{each}.") for each in _SECRETS)
        yield keys, MASK if secret else value


def _items(table: Mapping[str, Any], prefix: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values of a configuration with the names that lead to each.

    A section is taken value by value. So are its tables that have keys of their own (_BY_ITEM);
    any other table is one value.
    """
    for name, value in table.items():
        keys = (*prefix, name)
        is_section = not prefix and any(key.startswith(f"{name}.") for key in KEYS)
        if isinstance(value, Mapping) and (is_section or ".".join(keys) in _BY_ITEM):
            if value or is_section:
                yield from _items(value, keys)
        else:
            yield keys, value


def lines_of(text: str) -> dict[Keys, int]:
    """Return the line, from 1, of each table and key of a TOML text, which tomllib does not tell.

    For messages to a person. A table without a line of its own begins where the first table or key
    in it does.
    """
    found: dict[Keys, int] = {}

    def note(keys: Keys, line: int) -> None:
        """Keep the line as that of the key and of each table around it that has none yet."""
        for length in range(len(keys), 0, -1):
            found.setdefault(keys[:length], line)

    section: Keys = ()
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.lstrip().startswith("["):
            section = _path(line)
            note(section, at)
            continue
        key = _KEY_LINE.match(line)
        if key is None or line.lstrip().startswith("#"):
            continue
        # The key, which may be dotted or quoted, with a value that makes it TOML by itself.
        note((*section, *_path(f"{key[1]} = 0")), at)
        # A value may go over several lines, which are passed over: what looks like a key there is
        # none.
        value = line[key.end() :]
        while at < len(lines) and not _is_whole(value):
            value += "\n" + lines[at]
            at += 1
    return found


def _path(line: str) -> Keys:
    """Return the keys that a line of TOML names, outermost first; none: it is not TOML by itself.

    line: a head such as [a.b] or [[a.b]], or a key with a value: read as a whole text.
    """
    keys: list[str] = []
    try:
        inner: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    # One table in the other, down to the value; a table of [[a]] is the entry of a list.
    while isinstance(inner, Sequence | Mapping) and inner:
        if isinstance(inner, Sequence):
            inner = inner[0]
            continue
        name, inner = next(iter(inner.items()))
        keys.append(name)
    return tuple(keys)


def _is_whole(value: str) -> bool:
    """Whether a text is a whole value of TOML; False: the value goes on in the next line."""
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True
