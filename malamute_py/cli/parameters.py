"""Arguments and options that several commands have, each with one help text.

Owns their types, for typer. The rule: an option that two commands have means the same in both.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import typer

from malamute_py.cli import complete
from malamute_py.cli.options import remember

Prefix: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="PREFIX", show_default=False, help="Only names that begin like this."),
]
PrefixOption: TypeAlias = Annotated[
    str, typer.Option("--prefix", metavar="PREFIX", help="Only names that begin like this.")
]
OfStream: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="STREAM", help="Only those of this stream.", show_default=False,
        autocompletion=complete.streams,
    ),
]  # fmt: skip
OneStream: TypeAlias = Annotated[
    str, typer.Argument(metavar="STREAM", help="The stream.", autocompletion=complete.streams)
]
Stream: TypeAlias = Annotated[
    str, typer.Argument(metavar="STREAM", help="Its stream.", autocompletion=complete.streams)
]
NewStream: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="STREAM", help="The stream; made when new.", autocompletion=complete.streams
    ),
]
Pattern: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="PATTERN", help="Records to select: a.*.#, prefix:a., regex:^a, fields:k=v, any:k,l"
    ),
]
RangeFrom: TypeAlias = Annotated[
    str | None, typer.Option("--from", metavar="OFFSET|TIME", help="First; default the earliest.")
]
RangeTo: TypeAlias = Annotated[
    str | None, typer.Option("--to", metavar="OFFSET|TIME", help="End; default the tail.")
]
TimesBy: TypeAlias = Annotated[
    Literal["append", "client"],
    typer.Option(help="Times are those of the append, or those the producers gave."),
]
Subject: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--subject", "-s", metavar="SUBJECT", help="Subject of all; again for further keys."
    ),
]
Fields: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--field", "-f", metavar="NAME=VALUE", help="A field (repeatable)."),
]
Properties: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--property", "-p", metavar="NAME=VALUE", help="A property (repeatable)."),
]
Expires: TypeAlias = Annotated[
    str | None,
    typer.Option("--expires", metavar="TIME", help="When they expire: 10m from now, or a time."),
]
Confirm: TypeAlias = Annotated[
    Literal["default", "none", "stored", "synced"],
    typer.Option(
        "--confirm",
        metavar="LEVEL",
        show_default=False,
        help="Wait for: none, stored, synced. Without it: its own level, mostly synced.",
    ),
]
JsonLines: TypeAlias = Annotated[
    bool, typer.Option("--json-lines", help="Each line of the input is a JSON object.")
]
SubjectFromName: TypeAlias = Annotated[
    bool, typer.Option("--subject-from-name", help="With --file: SUBJECT.NAME of each file.")
]
BodiesOnly: TypeAlias = Annotated[
    bool, typer.Option("--bodies-only", help="Only bodies, on a terminal too.")
]
MemoryOnCreate: TypeAlias = Annotated[
    bool, typer.Option("--memory", help="In memory only; with --create.")
]
Tracing: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--tracing/--no-tracing",
        help="Tell OpenTelemetry its spans; OTEL_* variables say to where.",
        callback=remember,
        expose_value=False,
        show_default=False,
    ),
]
