"""The users file as commands edit it: found, read, changed, and replaced whole.

Owns the edit. The rules: comments and order stay; what a broker would refuse is never written; the
file is replaced by a rename, for its owner only, and two commands edit it one after the other.
Source: server/authentication/users_file.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from malamute_py.cli.absent import nearest
from malamute_py.cli.failures import USAGE, CommandFailed
from malamute_py.cli.replacing import alone_in, replace_whole

if TYPE_CHECKING:
    from malamute_py.config import Config

UsersOption = Annotated[
    Path | None,
    typer.Option("--users", metavar="FILE", help="The users file; without it, --config's."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The broker's configuration, which names the users file; default malamute.toml.",
    ),
]
HERE: Final = Path("malamute.toml")
TAKEN_UP: Final = "`malamute config reload` has a running broker take it up"
_BEGINNING: Final = """\
# Users of a malamute broker: edited by `malamute user`, `malamute grant` and `malamute revoke`.
"""


def read_config(users: Path | None, config: Path | None) -> Config:
    """Return the configuration with the path of the users file that a command is to edit or read.

    The users file itself is not read. It is that of --users, or else the one that the configuration
    names. Raises ConfigError: the configuration is wrong; CommandFailed: no users file is named.
    """
    import msgspec

    from malamute_py.config import Config, load

    if config is None and HERE.exists():
        config = HERE
    # With --users no configuration is needed: its defaults will do.
    loaded = Config() if users and config is None else load(config, environment=os.environ)
    if users is not None:
        replaced = msgspec.structs.replace(loaded.authentication, users_file=str(users))
        loaded = msgspec.structs.replace(loaded, authentication=replaced)
    path = loaded.authentication.users_file
    if not path:
        raise CommandFailed(
            "which users file? name it with --users FILE, or as authentication.users_file in the"
            " configuration (--config FILE, or malamute.toml here)", USAGE,
        )  # fmt: skip
    if not path.endswith(".toml"):
        raise CommandFailed(f"{path}: the name of a users file ends in .toml", USAGE)
    return loaded


class Edit:
    """A users file that is being changed, in memory until save(). editing() makes it."""

    def __init__(self, path: Path) -> None:
        import tomlkit

        self.path = path
        self.made: list[Path] = []
        """Files that were made for the change, and go where it fails."""
        try:
            text = path.read_text("utf-8") if path.exists() else _BEGINNING
        except UnicodeDecodeError as error:
            raise CommandFailed(f"{path}: not UTF-8: {error}", USAGE) from None
        self._check(text)
        self._document: Any = tomlkit.parse(text)

    def _check(self, text: str) -> None:
        """Raise ConfigError for a text that a broker would refuse."""
        from malamute_py.server.authentication.users_file import parse_users

        parse_users(text, str(self.path))

    def table(self, *names: str) -> Any:
        """Return a table, made when there is none. names: lead to it from the outermost one."""
        import tomlkit

        found = self._document
        for place, name in enumerate(names):
            if name not in found:
                # A table around others has no header of its own in the file.
                found[name] = tomlkit.table(is_super_table=place < len(names) - 1)
            found = found[name]
        return found

    def find(self, *names: str) -> Any:
        """Return a table; None: there is none."""
        found = self._document
        for name in names:
            found = found.get(name)
            if found is None:
                return None
        return found

    def remove(self, *names: str) -> bool:
        """Remove a table or a value; False: there was none.

        names: lead to it. A table within a user's section, as `deny`, goes too when it is empty.
        """
        *above, last = names
        found = self.find(*above)
        if found is None or last not in found:
            return False
        del found[last]
        if not found and len(above) > 2:
            del self.find(*above[:-1])[above[-1]]
        return True

    def user(self, name: str) -> Any:
        """Return the table of a user. Raises CommandFailed, with the nearest name."""
        found = self.find("users", name)
        if found is None:
            hint = nearest(name, self.find("users") or (), "`malamute user ls` lists them")
            raise CommandFailed(f"there is no user {name!r} in {self.path}; {hint}")
        return found

    def checked(self) -> str:
        """Return the new text. Raises ConfigError: a broker would refuse it."""
        text: str = self._document.as_string()
        if not text.strip():
            # A broker takes an empty file for one that was cut short.
            text = _BEGINNING
        self._check(text)
        return text

    def save(self) -> None:
        """Replace the file, by a rename after the new one is on disk.

        Raises ConfigError: a broker would refuse it, and nothing was written.
        """
        replace_whole(self.path, self.checked())


@contextlib.contextmanager
def editing(users: Path | None, config: Path | None, *, dry_run: bool = False) -> Iterator[Edit]:
    """Give the block a users file to change, and replace the file at its end.

    dry_run: the file is checked and not replaced.
    Raises CommandFailed, ConfigError: nothing was written, and what the edit made is removed.
    """
    # A link stays: the file that it leads to is replaced.
    path = Path(read_config(users, config).authentication.users_file).resolve()
    with alone_in(path.parent):
        edit = Edit(path)
        try:
            yield edit
            if dry_run:
                edit.checked()
            else:
                edit.save()
        except BaseException:
            for made in edit.made:
                made.unlink(missing_ok=True)
            raise
