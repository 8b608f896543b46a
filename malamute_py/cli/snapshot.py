"""`malamute snapshot ...`: copies of a broker's data, taken while it runs.

Owns the words for what was taken, found and restored, and the exit codes: 1 when anything is
damaged. The rules: the broker is not asked, its directory is read on the machine where it lies;
existing files are never overwritten. Source: store/snapshot.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from malamute_py.cli import output
from malamute_py.cli.commands import group, say
from malamute_py.cli.failures import FAILED, CommandFailed
from malamute_py.cli.progress import Progress
from malamute_py.cli.values import iso_text

if TYPE_CHECKING:
    from malamute_py.store.snapshot import Manifest

app = group("snapshot")

_DATA: Final = "malamute-data"

Snapshot = Annotated[
    Path, typer.Argument(metavar="DIR", help="The snapshot's directory.", show_default=False)
]


@app.command(
    "take",
    epilog="""\b
Examples:
  malamute snapshot take backup
  malamute snapshot take backup --data /var/lib/malamute""",
)
def take(
    directory: Snapshot,
    data: Annotated[Path, typer.Option(metavar="DATA", help="The broker's data directory.")] = Path(
        _DATA
    ),
    as_json: output.Json = False,
) -> int:
    """Copy a broker's data, running or not, and verify the copy."""
    from malamute_py.store.snapshot import take as take_it

    if not data.is_dir():
        raise CommandFailed(f"{data}: there is no such directory; name the broker's with --data")
    with Progress("copying") as progress:
        manifest = take_it(data, directory, progress=progress.bytes)
    _tell(directory, manifest, manifest.findings, as_json=as_json)
    if manifest.findings:  # Damage of the original, which the copy has as well.
        say(
            "it was taken as it is; the original is damaged, see: malamute journal verify"
            f" {data} (with the broker stopped)"
        )
        return FAILED
    return 0


@app.command(
    "verify",
    epilog="""\b
Examples:
  malamute snapshot verify backup""",
)
def verify(directory: Snapshot, as_json: output.Json = False) -> int:
    """Read a whole snapshot and say whether it can be restored."""
    from malamute_py.store.snapshot import verify as verify_it

    with Progress("verifying") as progress:
        manifest, wrong = verify_it(directory, progress=progress.bytes)
    # Findings of the original do not hinder a restore; what is wrong with the copy does.
    _tell(directory, manifest, [*manifest.findings, *wrong], as_json=as_json)
    if wrong:
        say("it cannot be restored; use another snapshot")
        return FAILED
    return 0


@app.command(
    "restore",
    epilog="""\b
Examples:
  malamute snapshot restore backup --data new-data""",
)
def restore(
    directory: Snapshot,
    data: Annotated[
        Path,
        typer.Option(metavar="NEW", help="The data directory to be made.", show_default=False),
    ],
    as_json: output.Json = False,
) -> int:
    """Make a new data directory from a snapshot, for a broker to use."""
    from malamute_py.store.snapshot import restore as restore_it

    with Progress("restoring") as progress:
        manifest = restore_it(directory, data, progress=progress.bytes)
    _tell(data, manifest, manifest.findings, as_json=as_json)
    if not as_json and output.on_terminal():
        say(f"start it with: malamute broker --data {data}")
    return 0


def _tell(directory: Path, manifest: Manifest, findings: list[str], *, as_json: bool) -> None:
    """Print what a snapshot has, and what was found wrong with it."""
    facts = {
        "directory": str(directory),
        "taken": iso_text(manifest.taken_ms),
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "rings": {name: list(bounds) for name, bounds in manifest.rings.items()},
        "tables_lsn": manifest.lsn,
        "epoch": manifest.epoch,
        "findings": findings,
    }
    output.facts(facts, as_json=as_json)
