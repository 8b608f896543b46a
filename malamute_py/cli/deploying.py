"""`malamute deploy`: files to run a broker with, written to a directory.

Owns which files belong together, under which names. The rules: the files are those of deploy/ in
the repository, unchanged, which the wheel has inside; where a file is there already, none is
written without --force.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from malamute_py.cli import complete, output
from malamute_py.cli.failures import FAILED, USAGE, CommandFailed

EPILOG = """\b
Examples:
  malamute deploy                              lists what there is
  malamute deploy systemd --to /etc/malamute
  malamute deploy compose --to malamute && cd malamute && docker compose up -d
  malamute deploy kubernetes && helm install prod ./malamute"""


class Kit(NamedTuple):
    """Files that belong together."""

    help: str
    files: dict[str, str]
    """Name that is written -> its file, or its folder with all that is in it, in deploy/."""
    then: str
    """The next command."""


_CONTAINER: Final = {
    "Containerfile": "container/Containerfile",
    "malamute.toml": "container/malamute.toml",
}
_RULES: Final = {"alerts.yml": "alerts.yml"}
KITS: Final[dict[str, Kit]] = {
    "config": Kit(
        "A configuration with every setting and its default.",
        {"malamute.toml": "malamute.toml"},
        "malamute config check malamute.toml",
    ),
    "systemd": Kit(
        "A systemd unit with a watchdog and a sandbox, and the configuration.",
        {"malamute.service": "malamute.service", "malamute.toml": "malamute.toml"},
        "see the first lines of malamute.service",
    ),
    "container": Kit(
        "A Containerfile for podman or docker, and the configuration in the image.",
        _CONTAINER,
        "podman build --format docker -t malamute .",
    ),
    "compose": Kit(
        "A broker with Prometheus, alerts and Grafana, for docker compose.",
        {
            **_CONTAINER,
            **_RULES,
            "compose.yml": "compose/compose.yml",
            "prometheus.yml": "compose/prometheus.yml",
            "grafana.json": "grafana.json",
            "grafana": "compose/grafana",
        },
        "GRAFANA_PASSWORD=... docker compose up -d",
    ),
    "kubernetes": Kit(
        "A Helm chart: StatefulSet, configuration, service, disruption budget.",
        {"malamute": "kubernetes/malamute"},
        "see malamute/values.yaml, then: helm install prod ./malamute",
    ),
    "prometheus": Kit(
        "A scrape configuration and alert rules for Prometheus.",
        {"prometheus.yml": "prometheus.yml", **_RULES},
        "prometheus --config.file=prometheus.yml",
    ),
    "grafana": Kit(
        "A dashboard for Grafana.",
        {"grafana.json": "grafana.json"},
        "import it: Dashboards, New, Import",
    ),
    "logrotate": Kit(
        "Rotation of a log that systemd appends to a file.",
        {"malamute": "logrotate/malamute"},
        "copy it to /etc/logrotate.d/",
    ),
}


def deploy(
    kit: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="What to write; without it: list what there is.",
            autocompletion=complete.among(KITS),
        ),
    ] = None,
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="The directory; it is made when it is not there.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: output.Json = False,
) -> None:
    """Write files to run a broker with: a unit, an image, a chart, alerts, a dashboard."""
    if kit is None:
        rows = [(name, each.help) for name, each in KITS.items()]
        columns = [output.Column("name", "Name", style="cyan"), output.Column("help", "What it is")]
        output.listing(columns, rows, as_json=as_json, empty="")
        return
    if kit not in KITS:
        raise CommandFailed(f"there is no {kit!r}; there are {', '.join(KITS)}", USAGE)
    files = contents(kit)
    # Before any is written: one that is there stops them all. A link that leads nowhere counts.
    there = [name for name in files if os.path.lexists(to / name)]
    if there and not force:
        raise CommandFailed(
            f"{to / there[0]} is there; nothing was written (--force replaces {', '.join(there)})",
            FAILED,
        )
    for name, content in files.items():
        path = to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if as_json:
        output.print_json({"written": [str(to / name) for name in files]}, compact=True)
        return
    for name in files:
        print(to / name)
    where = "" if to == Path() else f", in {to}"
    # On standard error, so that a pipe gets the paths alone.
    typer.echo(f"next{where}: {KITS[kit].then}", err=True)


def contents(kit: str) -> dict[str, bytes]:
    """Return name -> content of the files of a kit; a folder gives all files below it."""
    folder = _folder()
    found: dict[str, bytes] = {}
    for name, source in KITS[kit].files.items():
        path = folder / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                inside = file.relative_to(path)
                found[str(Path(name) / inside)] = file.read_bytes()
    return found


def _folder() -> Path:
    """Return deploy/: in an installed package inside it, in a checkout beside it."""
    package = Path(__file__).parents[1]
    inside = package / "deploy"
    return inside if inside.is_dir() else package.parent / "deploy"
