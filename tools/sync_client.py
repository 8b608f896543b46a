"""The generator of the synchronous client: client/sync/ is made from client/aio/.

Owns how a file of the asyncio client becomes the file of the same name for threads. The rule: what
it makes is committed, and tests/house compares it; files that FILES does not name are written by
hand. `make sync-client` writes all of them.

`async` and `await` go, names become those of TERMS and of the file's own table, and docstrings and
comments follow the table of words. What a table cannot say, the source marks:

- `if link.is_here():  # sync: with link.lock:` is `with link.lock:` for threads; what follows
  `sync:` takes the place of the line.
- A line that is nothing but `# sync: CODE` is CODE for threads, and a comment in asyncio.
- A statement, argument or import whose first line ends in `# asyncio only` has no twin. Comments
  directly above it, and the docstring of a constant below it, go with it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ROOT / "malamute_py" / "client" / "aio"
TARGETS: Final = ROOT / "malamute_py" / "client" / "sync"

COMMAND: Final = "make sync-client"
HEADER: Final = "# DO NOT EDIT: made from ../aio/{name} by `{command}` (tools/sync_client.py).\n"
ONLY: Final = "# asyncio only"
INSTEAD: Final = "# sync: "
WIDTH: Final = 100
LEFT_OVER: Final = re.compile(
    r".*(\b(async|asyncio|await|awaits|awaited)\b|\bis_here\b|# *sync:).*", re.IGNORECASE
)
"""Text that a generated file must not have: a table lacks something, or a mark was mistyped."""

TERMS: Final = {
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
    "AsyncVerbs": "SyncVerbs",
    "LoopLink": "ThreadLink",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aio": "sync",
    "future": "pending",
    "set_result": "settle",
}
"""Names in code, for all files."""

UNNEEDED: Final = {"room": 0, "notify": 0, "until": 1}
"""Arguments that only the event loop's link takes, by their places: it wakes callers one by one."""

WORDS: Final = (
    ("in asyncio", "for threads"),
    ("an `async with`", "a `with`"),
    ("async with", "with"),
    ("async for", "for"),
    ("aclosing", "closing"),
    ("an async iterator", "an iterator"),
    ("an async context manager", "a context manager"),
    ("one task at a time", "one thread at a time"),
    ("a task that waits", "a thread that waits"),
    ("several tasks", "several threads"),
    ("Steps of tasks", "Steps of threads"),
)
"""Words of docstrings, comments and messages, for all files, in the order of their replacement."""


class File(NamedTuple):
    """Facts about one file beside TERMS and WORDS."""

    classes: tuple[str, ...]
    """Classes with `Sync` before their names in the synchronous client."""
    words: tuple[tuple[str, str], ...] = ()
    """Further words, replaced before WORDS; each must occur."""
    names: Mapping[str, str] = {}
    """Further names."""


CODE: Final = (
    ("asyncio.Future[", "Pending["),
    ("(Timeout, asyncio.CancelledError)", "BaseException"),
    ("asyncio.CancelledError", "BaseException"),
    ("Generator[Reply, None]", "Generator[Reply, None, None]"),
    ("link.leave_with_others()", "link.wake_up()"),
    ("link.leave()", "link.wake_up()"),
    ("sync.link import ", "sync.link import Pending, "),
)
"""Pieces of code, in the order in which they are replaced; an import that nothing needs goes."""

TIMEOUT: Final = " ".join(
    (
        "timeout_ms: iteration raises Timeout when nothing came for so long;",
        "it can then be gone on with.",
    )
)
"""Text about iterators and tasks, which can be cancelled, for which threads need no word."""

RESULT: Final = "`result()` of what this returns"
ROOM_MS: Final = "timeout_ms: how long to wait for room in the window; None: until there is some."

CANCELLED: Final = (
    "a cancelled call leaves the link and all other calls as they were",
    "any thread may call any of them; a wait ends by its timeout, or by the client's close",
)

INTERRUPTED: Final = (
    "a cancelled call leaves all others as they were",
    "a timeout or the client's end interrupts a waiting caller",
)

FILES: Final = {
    "administration.py": File(
        ("AdministrationVerbs", "PagedVerbs"),
        (
            ("as awaitables", "as blocking calls"),
            CANCELLED,
        ),
    ),
    "client.py": File(
        (
            "AdministrationVerbs",
            "AtomicStep",
            "BulkPublisher",
            "Client",
            "Inbox",
            "KeyView",
            "MailVerbs",
            "Member",
            "PublishVerbs",
            "QueueVerbs",
            "Served",
            "StreamVerbs",
            "Subscription",
            "TracedClient",
            "Transaction",
            "WorkVerbs",
            "Worker",
        ),
        (
            ("The asyncio client", "The synchronous client"),
            ("as awaitables", "as blocking calls"),
            CANCELLED,
            ("await it, or use it with", "use the result as a context manager, or close() it."),
            (" `async with`.", ""),
            ("each change of the link.", "each change of the link, in the client's own thread."),
            ("Raises SettingError at once; Timeout", "Raises SettingError, Timeout"),
            ("refused is final) when awaited", "refused is final)"),
            ("in the event loop that made it;", "with a thread of its own;"),
            ("use it from that loop only", "for callers in any thread"),
            ("`connect` is", "`connect_sync` is"),
            ("see connect()", "see connect_sync()"),
            ("fails with ConnectionLost.", "fails with ConnectionLost; calls that wait end."),
        ),
        {"connect": "connect_sync"},
    ),
    "cursors.py": File(
        ("AtomicStep", "Client", "StreamCursor"),
        (
            ("as awaitables", "as blocking calls"),
            INTERRUPTED,
        ),
    ),
    "keys.py": File(
        ("KeyView", "KeyWatch", "Subscription"),
        (
            ("as awaitables", "as blocking calls"),
            (
                "a cancelled call leaves all others as they were;",
                "a wait ends by its timeout, or by the client's close;",
            ),
            ("a change whose call was cancelled", "a change whose call timed out"),
            ("or StopAsyncIteration at the end", "or StopIteration at the end"),
        ),
    ),
    "mail.py": File(
        ("Client", "Inbox", "Mail", "MailBatch", "MailVerbs"),
        (
            ("as awaitables", "as blocking calls"),
            (
                "a cancelled call leaves the link and all",
                "any thread may call any of them; a wait ends",
            ),
            (
                "other calls as they were",
                "by its timeout, by the client's close, or by what it waits for",
            ),
            ("whose caller was cancelled", "whose caller was interrupted"),
            ("waiting; the future is its confirm", f"waiting: {RESULT}"),
            ("await some of it first", "wait for some of it"),
            ("exist yet. Replies", f"exist yet. {TIMEOUT} Replies"),
            ("iterator of Mail;", "iterator of SyncMail;"),
        ),
    ),
    "members.py": File(
        ("Client", "Member"),
        (
            ("as awaitables", "as blocking calls"),
            INTERRUPTED,
            ("the future is what", "its result is what"),
        ),
    ),
    "pages.py": File(("PagedVerbs",)),
    "publishing.py": File(
        ("BulkPublisher", "Client", "PublishVerbs"),
        (
            ("as awaitables", "as blocking calls"),
            (
                "a cancelled call leaves the link and all other calls as they were;",
                "any thread may call any of them; a wait ends by its timeout,",
            ),
            (
                "a record whose publish was cancelled may still be in the log",
                "by the client's close, or by what it waits for, and never harms the link",
            ),
            (
                "without waiting; the future is its confirm",
                f"without waiting for its confirm: {RESULT}",
            ),
            (
                "What was not sent when the program ends",
                f"{ROOM_MS} What was not sent when the program ends",
            ),
            (
                "when too much is unconfirmed",
                "when there was none and 0 was to be waited, else Timeout",
            ),
            ("are awaited together", "are waited for together"),
            ("called by the link", "called by the link, under its lock"),
        ),
    ),
    "queues.py": File(
        (
            "AtomicStep",
            "Member",
            "PagedVerbs",
            "QueueVerbs",
            "StreamCursor",
            "Transaction",
        ),
        (
            ("as awaitables", "as blocking calls"),
            INTERRUPTED,
        ),
    ),
    "steps.py": File(
        ("AtomicStep", "Client"),
        (
            ("as an awaitable", "as a blocking call"),
            ("whose commit was cancelled", "whose commit timed out"),
            ("may still be taken, and then is taken whole", "may still be taken, whole"),
        ),
    ),
    "streams.py": File(
        ("KeyView", "PagedVerbs", "StreamVerbs", "Subscription"),
        (
            ("as awaitables", "as blocking calls"),
            CANCELLED,
            ("Iterate the result, or its batches().", TIMEOUT),
        ),
    ),
    "tables.py": File(("Client",), ((" The event loop has its turn meanwhile.", ""),)),
    "transactions.py": File(
        ("Client", "Transaction"),
        (
            ("as awaitables", "as blocking calls"),
            INTERRUPTED,
            ("whose call was cancelled", "whose call timed out"),
        ),
    ),
    "work.py": File(
        ("Client", "Request", "Served", "WorkVerbs", "Worker"),
        (
            (
                "from requests in hand to tasks and back",
                "from requests in hand to threads and back",
            ),
            (
                "leases are renewed by the link while",
                "leases are renewed by the client's own thread while",
            ),
            ("as long as it wants as long as it lets the event loop turn", "as long as it wants"),
            ("exist yet. close(),", f"exist yet. {TIMEOUT} close(),"),
            ("ends once it is collected", "ends within a heartbeat after it was collected"),
            ("gets a Request.", "gets a SyncRequest, in one of `concurrency` threads."),
            ("an async generator's", "a generator's"),
            (" A handler that is no coroutine function runs in one of `concurrency` threads.", ""),
            ("closed or this call is cancelled", "closed, or an interrupt"),
            (
                "requests that were not begun, and those of cancelled handlers,",
                "requests that are not finished",
            ),
            (
                "as no attempt; a handler in a thread cannot be cancelled, and what it returns",
                "as no attempt. run() waits for handlers that run, unless it was an interrupt;",
            ),
            ("then is dropped", "what they return then is dropped"),
            ("lets handlers end first", "lets them finish first"),
            (
                "A second signal cancels the handlers.",
                "A second signal interrupts. Only in the main thread.",
            ),
            ("as many at a time as the", "in as many threads as the"),
        ),
    ),
    "traced.py": File(
        (
            "BulkPublisher",
            "Client",
            "AtomicStep",
            "Inbox",
            "KeyView",
            "Member",
            "Request",
            "Subscription",
            "TracedBulkPublisher",
            "TracedClient",
            "TracedInbox",
            "TracedKeyView",
            "TracedMember",
            "TracedStep",
            "TracedSubscription",
            "TracedTransaction",
            "TracedWorker",
            "Transaction",
            "Worker",
        ),
        (
            ("which connect(tracing=...) chooses", "which connect_sync(tracing=...) chooses"),
            ("a span, which ends with the confirm", "a span, which ends as it returns"),
        ),
        {"aclosing": "closing"},
    ),
    "subscription.py": File(
        ("Subscription", "Client"),
        (("to a cancelled wait", "to a timeout"),),
    ),
}
"""The files that are generated."""


class Edit(NamedTuple):
    """A piece of the text that is replaced."""

    start: int
    end: int
    text: str


class Text:
    """A source with the offsets of its lines."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Return the offset of a token's place: lines from 1, columns in characters."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Return where an expression begins and ends; its columns are in bytes."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._at_bytes(node.lineno, node.col_offset),
            self._at_bytes(node.end_lineno, node.end_col_offset),
        )

    def _at_bytes(self, line: int, column: int) -> int:
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def of(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        start, end = self.span(node)
        return self.text[start:end]

    def edited(self, edits: list[Edit]) -> str:
        """Return the text with all edits done, which must not overlap."""
        pieces, place = [], 0
        for start, end, text in sorted(edits):
            assert start >= place, self.text[start:end]
            pieces += [self.text[place:start], text]
            place = end
        return "".join((*pieces, self.text[place:]))


def generate(name: str) -> str:
    """Make the synchronous file from asyncio's file of this name. Raises ValueError."""
    file = FILES[name]
    names = {**TERMS, **{known: f"Sync{known}" for known in file.classes}, **file.names}
    text = marked(Text((SOURCES / name).read_text()))
    text = blocking(Text(text))
    text = _names(Text(text), names)
    for known, instead in CODE:
        text = text.replace(known, instead)
    text = _words(Text(text), file)
    text = _formatted(text, TARGETS / name)
    if left := LEFT_OVER.search(text):
        raise ValueError(f"{name}: a word or mark of asyncio is left over: {left[0].strip()}")
    return HEADER.format(name=name, command=COMMAND) + text


# --- marks ---------------------------------------------------------------------------------------


def marked(source: Text) -> str:
    """Leave out what is marked for asyncio only, and put in what is marked for threads."""
    lines = source.text.splitlines(keepends=True)
    statements = {
        line: node
        for node in reversed(list(ast.walk(source.tree)))
        if isinstance(node, ast.stmt)
        for line in {node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))}
    }
    gone: set[int] = set()
    for token in source.tokens:
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        before = token.line[: token.start[1]]
        if token.string.startswith(INSTEAD):
            indentation = before[: len(before) - len(before.lstrip())]
            lines[line - 1] = indentation + token.string.removeprefix(INSTEAD) + "\n"
        elif token.string == ONLY:
            gone.update(_without_twin(source, line, statements.get(line)))
    return "".join(text for number, text in enumerate(lines, 1) if number not in gone)


def _without_twin(source: Text, line: int, statement: ast.stmt | None) -> Iterator[int]:
    """Return the lines that go with one that is marked `# asyncio only`."""
    first = last = line
    if statement is not None:
        first = min(
            [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]
        )
        last = statement.end_lineno or line
        for node in ast.walk(source.tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and statement in body[:-1]:
                after = body[body.index(statement) + 1]
                if isinstance(statement, ast.Assign | ast.AnnAssign) and _is_docstring(after):
                    last = after.end_lineno or last
    lines = source.text.splitlines()
    while lines[first - 2].lstrip().startswith("#") and INSTEAD not in lines[first - 2]:
        first -= 1
    yield from range(first, last + 1)


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# --- code ----------------------------------------------------------------------------------------


def blocking(source: Text) -> str:
    """Drop `async` and `await`, and have futures be Pending."""
    edits = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Await):
            edits.append(_wait(source, node))
            if isinstance(node.value, ast.Call):
                edits += _without_unneeded(source, node.value)
        elif isinstance(node, ast.Call) and _called(node) == "create_future":
            start, end = source.span(node)
            link = source.of(node.func).removesuffix(".loop.create_future")
            edits.append(Edit(start, end, f"Pending({link})"))
        elif isinstance(node, ast.Call) and _called(node) == "notify" and node.args:
            edits += _without_unneeded(source, node)
    for token, following in zip(source.tokens, source.tokens[1:], strict=False):
        if token.type == tokenize.NAME and token.string == "async":
            edits.append(Edit(source.at(*token.start), source.at(*following.start), ""))
    return source.edited(edits)


def _wait(source: Text, node: ast.Await) -> Edit:
    """Turn `await future` into pending.result(None), and link.limit(...) into result(...)."""
    start, _ = source.span(node)
    inner, end = source.span(node.value)
    if isinstance(node.value, ast.Name):
        return Edit(start, end, f"{node.value.id}.result(None)")
    if isinstance(node.value, ast.Call) and _called(node.value) == "limit":
        future, wait, *_ = node.value.args
        return Edit(start, source.span(wait)[0], f"{source.of(future)}.result(")
    return Edit(start, inner, "")


def _without_unneeded(source: Text, call: ast.Call) -> Iterator[Edit]:
    if (place := UNNEEDED.get(_called(call))) is not None:
        _, *rest = call.args[place:]
        start, end = source.span(call.args[place])
        yield Edit(start, source.span(rest[0])[0] if rest else end, "")


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _names(source: Text, names: Mapping[str, str]) -> str:
    return source.edited(
        [
            Edit(source.at(*token.start), source.at(*token.end), names[token.string])
            for token in source.tokens
            if token.type == tokenize.NAME and token.string in names
        ]
    )


# --- words ---------------------------------------------------------------------------------------


def _words(source: Text, file: File) -> str:
    """Put the words of threads into strings and comments. Raises ValueError: one is not there."""
    unseen = dict(file.words)

    def worded(text: str) -> str:
        for known, instead in (*file.words, *WORDS):
            if known in text:
                unseen.pop(known, None)
                text = text.replace(known, instead)
        # A class's words are known by the class with the method: `Client.subscribe()`.
        for known in file.classes:
            text = re.sub(rf"(?<![\w.]){known}(?=\.\w)", f"Sync{known}", text)
        return text

    edits = []
    for token in source.tokens:
        if token.type == tokenize.STRING and token.string.startswith('"""'):
            text = _refilled(token.string, token.start[1], worded)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            text = worded(token.string)
        else:
            continue
        edits.append(Edit(source.at(*token.start), source.at(*token.end), text))
    if unseen:
        raise ValueError(f"words that are not in the source any more: {list(unseen)}")
    return source.edited(edits)


def _refilled(docstring: str, column: int, worded: Callable[[str], str]) -> str:
    """Put the docstring in other words, and break lines anew only in pieces that have changed."""
    lines = (" " * column + docstring).split("\n")
    made: list[str] = []
    piece: list[str] = []
    for line, following in zip_longest(lines, lines[1:], fillvalue=""):
        piece.append(line)
        first, *_ = (*following.split(), "")
        # A sentence that ends where the next word had room ends a piece, as an empty line does.
        ends = line.endswith(".") and len(line) + 1 + len(first) <= WIDTH
        if line.strip() and first not in ("", '"""') and not ends:
            continue
        text = " ".join(one.strip() for one in piece)
        if (instead := worded(text)) != text:
            indentation = " " * (len(line) - len(line.lstrip()))
            piece = wrap(
                instead, WIDTH, initial_indent=indentation, subsequent_indent=indentation,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
        made += piece
        piece = []
    return "\n".join(made).removeprefix(" " * column)


def _formatted(text: str, path: Path) -> str:
    """Format the text, without imports that nothing needs, in the project's form."""
    for arguments in (
        ("check", "--fix-only", "--select", "F401,I001,PIE790,W291"),
        ("format",),
    ):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *arguments,
            "--quiet",
            "--stdin-filename",
            path,
            "-",
        ]
        ran = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, cwd=ROOT
        )
        if ran.returncode:
            raise ValueError(f"{path.name}: ruff {arguments[0]} failed: {ran.stderr}")
        text = ran.stdout
    return text


def main() -> int:
    """Write the files that have changed; --check: only say which would."""
    parser = argparse.ArgumentParser(description="Write client/sync/ from client/aio/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if one differs")
    check = parser.parse_args().check
    changed = [
        (TARGETS / name, text)
        for name in FILES
        if (text := generate(name)) != (TARGETS / name).read_text()
    ]
    for path, text in changed:
        if not check:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)} {'differs' if check else 'written'}")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
