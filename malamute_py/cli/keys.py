"""`malamute key ...`: CURVE key pairs, of brokers and of clients.

Owns the files of keys: FILE with the secret key, for its owner only, and FILE.pub with the public
one, for everyone. The rules: no file is replaced; a secret key is never printed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from malamute_py.cli import output
from malamute_py.cli.commands import group
from malamute_py.cli.contexts import KEY_CHARACTERS
from malamute_py.cli.failures import USAGE, CommandFailed

app = group("key")

PUBLIC_SUFFIX: Final = ".pub"


@app.command(
    "new",
    epilog="""\b
Examples:
  malamute key new broker.key      for server_key_file of the configuration
  malamute key new ~/.malamute/ann.key

FILE gets the secret key and mode 600, FILE.pub the public one, which is printed as well.""",
)
def new(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File for the secret key; must not exist yet.")
    ],
    as_json: output.Json = False,
) -> None:
    """Make a CURVE key pair, for a broker or a client."""
    path = file.expanduser()
    public = make_pair(path)
    if as_json:
        output.print_json({"public_key": public, "secret_key_file": str(path)}, compact=True)
    else:
        print(public)


@app.command(
    "show",
    epilog="""\b
Examples:
  malamute key show broker.key""",
)
def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File with a secret key, or FILE.pub.")
    ],
    as_json: output.Json = False,
) -> None:
    """Print the public key of a key pair: a broker's for its clients, a client's for the broker."""
    public = public_key(str(file.expanduser()))
    if as_json:
        output.print_json({"public_key": public}, compact=True)
    else:
        print(public)


def make_pair(path: Path) -> str:
    """Write the two files of a new pair, both or none; return the public key.

    Raises FileExistsError: a key that may be in use is never replaced.
    """
    import zmq

    public, secret = zmq.curve_keypair()
    beside = Path(f"{path}{PUBLIC_SUFFIX}")
    made: list[Path] = []
    try:
        for each, key, mode in ((path, secret, 0o600), (beside, public, 0o644)):
            with open(os.open(each, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                made.append(each)
                out.write(key + b"\n")
    except BaseException:
        for each in made:
            each.unlink()
        raise
    return str(public.decode())


def public_key(text: str, option: str = "") -> str:
    """Return a public key. text: the key, or a file with it or with the secret key of its pair.

    option: the option that had the text, for the error. Raises CommandFailed: it is neither.
    """
    import zmq
    from zmq.utils import z85

    if len(text) == KEY_CHARACTERS and not Path(text).exists():
        return text
    path = Path(text).expanduser()
    try:
        key = path.read_text().strip()
        if len(key) != KEY_CHARACTERS:
            raise ValueError
        z85.decode(key.encode("ascii"))  # Called for its check of the characters.
    except FileNotFoundError:
        where = f"{option}: " if option else ""
        raise CommandFailed(
            f"{where}{text!r} is neither a CURVE key of {KEY_CHARACTERS} characters nor a file with"
            " one; `malamute key new FILE` makes a pair", USAGE,
        ) from None  # fmt: skip
    except (ValueError, KeyError):
        raise CommandFailed(f"{path}: holds no CURVE key of {KEY_CHARACTERS} characters") from None
    if path.suffix == PUBLIC_SUFFIX:
        return key
    return zmq.curve_public(key.encode()).decode()
