"""The root of the command line: which commands there are, and how they end.

Owns the group class that every command belongs to. The rules: a command's module is loaded when it
is called and not before, so that help is quick; --endpoint, --context, --identity and
--connect-timeout may stand before or after the command; every expected failure leaves as one line
on standard error and an exit code; a closed pipe is quiet.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from malamute_py.cli import failures


class Entry(NamedTuple):
    """A command that is loaded when it is called."""

    home: str
    """The command's module in this package, and the name of a function or group in it."""
    help: str
    at_a_broker: bool | tuple[str, ...] = True
    """True: the command talks to a broker, and so takes the options that say to which. Names: only
    the commands of these names in the group do."""
    hidden: bool = False


COMMANDS: Final[dict[str, Entry]] = {
    "broker": Entry("broker:broker", "Run a broker.", at_a_broker=False),
    "pub": Entry("publish:pub", "Publish records: an argument, lines, JSON lines or files."),
    "sub": Entry("subscribe:sub", "Subscribe to a stream and print its records."),
    "replay": Entry("replay:replay", "Replay a range of a stream."),
    "send": Entry(
        "send:send", "Send messages to a mailbox: an argument, lines, JSON lines or files."
    ),
    "inbox": Entry("inbox:inbox", "Read a mailbox: print its messages and take them out."),
    "request": Entry("request:request", "Ask a service and print the reply."),
    "work": Entry("work:work", "Work for a service: run a command for each request."),
    "stream": Entry(
        "streams:app",
        "Streams: list, show, create, edit, trim, purge, remove, peek, export, import.",
    ),
    "kv": Entry("kv:app", "Keys of a stream: get, put, update, delete, keys, watch, history."),
    "mailbox": Entry("mailboxes:app", "Mailboxes: list, show, peek, purge, edit, remove."),
    "service": Entry("services:app", "Services: list, show, peek, requeue, edit, remove."),
    "cursor": Entry("cursors:app", "Cursors of streams: list, show, move, reset, edit, remove."),
    "group": Entry("groups:app", "Groups of consumers: list, show, edit, reset, requeue, remove."),
    "transaction": Entry("transactions:app", "Open transactions: list, end."),
    "journal": Entry(
        "journal:app", "Files of a stopped broker: stat, verify, dump, repair.", at_a_broker=False
    ),
    "snapshot": Entry(
        "snapshot:app", "Copies of a broker's data: take, verify, restore.", at_a_broker=False
    ),
    "client": Entry("links:app", "Clients that are linked: list, kick."),
    "info": Entry("links:info", "Show facts and counters of the broker."),
    "top": Entry("top:top", "Watch the broker: rates, lags, rings, and what is slow or stuck."),
    "watch": Entry(
        "watch:watch", "Print what happens: links, gaps, dead letters, errors, troubles."
    ),
    "check": Entry(
        "check:check", "Judge the broker: one line and an exit code for monitoring systems."
    ),
    "rtt": Entry(
        "rtt:rtt", "Measure round trips: of a question, and of a record until it is confirmed."
    ),
    "bench": Entry("bench:app", "Measure the broker at hand: pub, sub, request, mail."),
    "export": Entry(
        "definitions:export",
        "Print definitions: streams, mailboxes, services, cursors and groups with their settings.",
    ),
    "import": Entry("definitions:import_", "Make and set what a file defines; nothing is removed."),
    "http": Entry("http_side:http", "Serve metrics, health and the console of a broker over HTTP."),
    "spark": Entry(
        "spark:app",
        "Pipelines of Spark: archive, compact, aggregate, replay; and its package.",
        at_a_broker=("archive", "aggregate", "replay"),
    ),
    "verify-promises": Entry(
        "promises:verify_promises", "Check what a broker confirms while it is disturbed."
    ),
    "config": Entry(
        "configuration:app",
        "A broker's configuration: check, show, reload.",
        at_a_broker=("show", "reload"),
    ),
    "deploy": Entry(
        "deploying:deploy",
        "Write files to run a broker with: a unit, an image, a chart, alerts, a dashboard.",
        at_a_broker=False,
    ),
    "context": Entry(
        "context_commands:app",
        "Contexts: brokers by name, with their credentials.",
        at_a_broker=False,
    ),
    "key": Entry("keys:app", "CURVE keys of brokers and clients: new, show.", at_a_broker=False),
    "namespace": Entry("namespaces:app", "Namespaces (tenants) and what they hold: list, show."),
    "user": Entry(
        "users:app", "Users of a broker: add, rm, ls, passwd, key, hash.", at_a_broker=("ls",)
    ),
    "grant": Entry("grants:grant", "Allow a user something, or deny it.", at_a_broker=False),
    "revoke": Entry("grants:revoke", "Take back what was granted or denied.", at_a_broker=False),
    "who-can": Entry("grants:who_can", "Tell which users may do something."),
}

SHARED: Final = frozenset({"endpoint", "context_name", "identity", "connect_timeout"})
"""Options of the root that a command which talks to a broker also takes."""


_MEANT: Final[dict[str, tuple[str, ...]]] = {
    "show": ("info",), "describe": ("info", "show"), "view": ("info", "show", "peek"),
    "info": ("show",), "list": ("ls",), "delete": ("rm",), "remove": ("rm",), "del": ("rm",),
    "add": ("create", "new"), "new": ("create", "add"), "create": ("new", "add"),
    "update": ("edit",), "set": ("edit", "put"), "clear": ("purge",),
}  # fmt: skip
"""Words of other tools for a command of a group, and the ones that may be meant, first to last."""


def group(name: str) -> typer.Typer:
    """Return the group of this name for the commands of a module; its help is plain, as ours."""
    return typer.Typer(
        help=COMMANDS[name].help,
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        cls=Verbs,
    )


class Verbs(TyperGroup):
    """A group of commands that knows by which other words theirs are sought."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is meant; a word of _MEANT ends with a hint at the command."""
        meant = next((own for own in _MEANT.get(args[0], ()) if own in self.commands), None)
        if meant is not None and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)


class Commands(TyperGroup):
    """The root group."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._loaded: dict[str, Any] = {}
        # The base class wants only the names: for the list, and for "did you mean".
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load one command, once; None when there is none of that name.

        Called by the framework. Commands that talk to a broker get the root's options that say to
        which, so that these may stand after the command, too.
        """
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = self._loaded.get(cmd_name)
        if command is None:
            command = self._loaded[cmd_name] = _load(cmd_name, entry)
            if entry.at_a_broker:
                shared = [param for param in self.params if param.name in SHARED]
                # True: all commands of this group; else the names of those that talk to one.
                for leaf in _leaves(command):
                    if entry.at_a_broker is True or leaf.name in (entry.at_a_broker or ()):
                        leaf.params.extend(shared)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands without loading them; called by the framework for the help."""
        rows = [(name, entry.help) for name, entry in COMMANDS.items() if not entry.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a reader that closed its end of the pipe has seen enough."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(failures.OK) from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run one command; ends the process with its exit code.

        Called by app(). The framework passes on what a command returns and raises, as it is not in
        its standalone mode; the words and exit codes of failures are decided here.
        """
        try:
            result = super().main(
                args=args,
                prog_name=prog_name or "malamute",
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            sys.stdout.flush()
        except BrokenPipeError:  # Writing failed at the last flush.
            _drop_output()
            sys.exit(failures.OK)
        except typer.Abort:
            say("interrupted")
            sys.exit(failures.INTERRUPTED)
        except Exception as error:
            explained = failures.explained(error)
            if explained is None:  # A bug: its traceback is wanted.
                raise
            text, code = explained
            # A wrong command line of `check` ends with the codes of monitoring plugins.
            words = sys.argv[1:] if args is None else args
            if code == failures.USAGE and next(filter(COMMANDS.get, words), "") == "check":
                from malamute_py.cli.check import tell_usage

                sys.exit(tell_usage(text, words))
            if text.startswith("Usage:"):  # A group without a command prints its help.
                print(text, file=sys.stderr)
            else:
                say(f"error: {text}")
            sys.exit(code)
        sys.exit(result if isinstance(result, int) else failures.OK)


def _load(name: str, entry: Entry) -> Any:
    """Import the module of a command, and return the command.

    entry.home: the module's name, and the name in it.
    """
    module_name, _, attribute = entry.home.partition(":")
    module = import_module(f"malamute_py.cli.{module_name}")
    found = getattr(module, attribute)
    if isinstance(found, typer.Typer):
        command: Any = get_group(found)
    else:
        # A function becomes the only command of a group of its own, which get_command() then
        # returns as a plain command. Its module may have a class that parses, and an epilog.
        alone = group(name)
        parser = getattr(module, "PARSER", None)
        alone.command(name, cls=parser, epilog=getattr(module, "EPILOG", None))(found)
        command = get_command(alone)
    command.name = name
    command.hidden = entry.hidden
    return command


def _leaves(command: Any) -> Iterator[Any]:
    """Yield the commands that run something: this one, or all below it when it is a group."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield command
        return
    for each in inner.values():
        yield from _leaves(each)


def say(text: str) -> None:
    """Write one line for a person to standard error, whether or not it is read."""
    with contextlib.suppress(OSError, ValueError):
        print(" ".join(text.split()), file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Discard what is still buffered, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
