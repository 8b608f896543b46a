"""`malamute broker`: run a broker in the foreground.

Owns its options and the words for the person who starts it on a terminal. The rule: options
override variables, which override the file; in a pipe there are JSON log lines and no other text.
Source: config/; deploy/malamute.toml.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from malamute_py.cli.configuration import tell_problems
from malamute_py.cli.failures import FAILED, USAGE, CommandFailed
from malamute_py.cli.values import setting_pairs

if TYPE_CHECKING:
    from malamute_py.config import Config
    from malamute_py.config_check import Problem
    from malamute_py.server import Server
    from malamute_py.telemetry import Log

EPILOG = """\b
Examples:
  malamute broker
  malamute broker --listen tcp://127.0.0.1:9797 --listen ipc:///run/m.sock
  malamute broker --memory --set streams.auto_create=false
  malamute broker --config malamute.toml --check

It stops in order on Ctrl-C or SIGTERM (exit code 0)."""


def broker(
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Endpoint to listen on (repeatable): tcp://HOST:PORT, port 0 for any; ipc:///PATH.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the data; default malamute-data."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Keep everything in memory; gone at the end.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file with settings.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="One setting (repeatable): journal.ring_bytes=..."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration, say what it means, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --check: the whole configuration as JSON.")
    ] = False,
) -> int:
    """Run a broker."""
    from malamute_py.config import load

    if memory and data is not None:
        raise CommandFailed("--memory and --data exclude each other; give one of them", USAGE)
    if as_json and not check:
        raise CommandFailed("--json goes with --check; a broker in a pipe logs JSON anyway", USAGE)
    overrides: dict[str, Any] = {}  # Options, which win over variables and the file.
    if listen:
        overrides["listen"] = list(listen)
    if data is not None:
        overrides["data_directory"] = str(data)
    if memory:
        overrides["data_directory"] = ""  # The configuration's word for "in memory".
    overrides.update(setting_pairs(settings))
    if check:
        return _check(config, overrides, as_json)
    from malamute_py.sections import ConfigError

    try:
        return _run(load(config, environment=os.environ, overrides=overrides), config, overrides)
    except ConfigError:
        # A start ends with the first fault; a person wants to mend all of them at once.
        _, problems = _examined(config, overrides)
        if not problems:  # The file was mended between the two readings.
            raise
        tell_problems(problems, err=True)
        return USAGE


def _run(loaded: Config, path: Path | None, overrides: dict[str, Any]) -> int:
    """Serve with a configuration until the broker is ended; return the exit code.

    path, overrides: where `loaded` came from, for the reload of a running broker. Raises
    ConfigError: the configuration cannot be served with; CommandFailed: the broker ended by itself.
    """
    from malamute_py.config_check import examine
    from malamute_py.server import Server
    from malamute_py.telemetry import open_log

    log = open_log(loaded.log.level, loaded.log.form)
    if sys.stderr.isatty() and loaded.log.form != "json":
        log = _Greeting(log, loaded)
    reread = partial(examine, path, environment=os.environ, overrides=overrides)
    server = Server(loaded, log=log, reread=reread)
    _stop_on_signals(server)
    code = server.run()
    if code:
        raise CommandFailed("the broker failed; see its log above", code if code > 1 else FAILED)
    return 0


def _stop_on_signals(server: Server) -> None:
    """Have a signal that comes during a start stop the broker in order, once all is open.

    A second signal ends the process at once. Server.run() puts its own handlers in the place of
    these while it serves.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        server.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _check(path: Path | None, overrides: dict[str, Any], as_json: bool) -> int:
    """Check a configuration as a start would, and print what it means, or all that is wrong.

    as_json: print the whole configuration. Returns the exit code.
    """
    config, problems = _examined(path, overrides)
    if problems:
        tell_problems(problems, err=True)
        return USAGE
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(config)).decode())
        return 0
    print("the configuration is good")
    print(f"listens on  {', '.join(config.listen)}")
    print(f"data in     {_place(config.data_directory)}")
    print(f"clients     {config.authentication.mechanism} authentication")
    return 0


def _examined(path: Path | None, overrides: dict[str, Any]) -> tuple[Config, list[Problem]]:
    """Return a configuration as far as it is right, and everything that a start would refuse."""
    from malamute_py.config_check import examine
    from malamute_py.server.start_faults import start_faults

    examined = examine(path, environment=os.environ, overrides=overrides)
    return examined.config, examined.all_problems(start_faults(examined.config))


def _place(directory: str) -> str:
    return str(Path(directory).absolute()) if directory else "memory only, gone at the end"


class _Greeting:
    """A log for a person at a terminal: a few events become words, the others stay log lines."""

    def __init__(self, log: Log, config: Config) -> None:
        self._log = log
        self._config = config
        # The other levels go straight to the log; info() alone has words of its own.
        self.debug = log.debug
        self.warning = log.warning
        self.error = log.error
        self.critical = log.critical

    def info(self, event: str, **facts: Any) -> None:
        """Print the events of starting and stopping for the person; log each other one as usual."""
        if event == "listening":
            _greet(facts, self._config.authentication.mechanism)
        elif event == "http_listening":
            _show_page(facts, self._config)
        elif event == "stopping":
            print("stopping; Ctrl-C again ends at once", file=sys.stderr)
        elif event == "stopped":
            print("stopped", file=sys.stderr)
        elif event != "open_files":  # A figure for operators, at each start.
            self._log.info(event, **facts)


def _greet(facts: Mapping[str, Any], mechanism: str) -> None:
    """Tell the person at the terminal where the broker listens, and commands to begin with.

    facts: those of the event `listening`. mechanism: of authentication; with one a client needs
    its credentials in a context before any other command.
    """
    from rich.console import Console
    from rich.text import Text

    endpoints: list[str] = facts["endpoints"]
    data = str(facts["data"])  # An absolute path, or words that say "in memory".
    in_memory = not data.startswith("/")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    lines = [
        ("listens on", ", ".join(endpoints), "bold cyan"),
        ("data", "in memory, gone when it stops" if in_memory else data, "yellow" if in_memory
         else ""),
    ]  # fmt: skip
    console.print(Text.assemble(("malamute", "bold"), f" {facts['version']}"))
    for name, value, style in lines:
        console.print(Text.assemble((f"  {name:<11}", "dim"), (value, style)))
    where = _endpoint_option(endpoints[0])
    begin = [
        ("publish", f"malamute pub hello 'my first record' --subject greetings{where}"),
        ("subscribe", f"malamute sub hello --start earliest{where}"),
    ]
    if mechanism != "none":
        login = "--user USER"
        if mechanism == "curve":
            login = f"--server-key '{facts['server_key']}' --secret-key-file USER.key"
        begin = [("connect", f"malamute context add USER {login}{where}")]
    for name, command in begin:
        console.print(Text.assemble((f"  {name:<11}", "dim"), (command, "green")))
    console.print(Text.assemble(("  stop       ", "dim"), "Ctrl-C"))


def _show_page(facts: Mapping[str, Any], config: Config) -> None:
    """Tell the person at the terminal where the console is, or else the metrics."""
    from malamute_py.sections import serves_console

    name, page = ("console", "/") if serves_console(config.http) else ("metrics", "/metrics")
    print(f"  {name:<11}{facts['url']}{page}", file=sys.stderr)


def _endpoint_option(endpoint: str) -> str:
    """Return the option that a command needs to reach an endpoint; empty for the default one."""
    from malamute_protocol import DEFAULT_ENDPOINT

    return "" if endpoint == DEFAULT_ENDPOINT else f" --endpoint {endpoint}"
