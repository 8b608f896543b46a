"""Places that the records of a stream may be in when a test looks at them."""

from __future__ import annotations

from tests.broker.shell import Shell


def in_memory(shell: Shell) -> None:
    """All records are in the hot window."""


def on_disk(shell: Shell) -> None:
    """No record is in the hot window."""
    shell.evict()


def restarted(shell: Shell) -> None:
    """The broker was killed and started again."""
    shell.restart()
    shell.hello(1)
