"""The core and the rings of one shard, as the loop sees them.

Owns what the loop calls of either, so that a test can put others in their place. The real ones are
`malamute_py/broker/broker.py` and `journaling/rings.py`. Source: docs/design.md (The core and its
shell).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from malamute_protocol.commands import Command
from malamute_py.broker.ready import (
    AppendBundle,
    Appended,
    AppendRefused,
    BatchChecked,
    BodiesFound,
    BodiesRead,
    HistoryRead,
    IndexAnswer,
    IndexQuery,
    ReadFailed,
    ReadRange,
    Ready,
)


class Core(Protocol):
    """The methods of the broker core that the loop calls."""

    def receive(  # noqa: D102
        self, link: int, identity: str, commands: Sequence[Command], frames: Sequence[Any],
        now_ms: int,
    ) -> None: ...  # fmt: skip
    @property
    def ahead_bytes(self) -> int: ...  # noqa: D102
    def takes_long(self, frame: Any) -> bool: ...  # noqa: D102
    def reads_first(self, frame: Any) -> bool: ...  # noqa: D102
    def came_from(self, link: int, address: str, now_ms: int) -> None: ...  # noqa: D102
    def read_ahead(  # noqa: D102
        self, link: int, commands: Sequence[Command], frames: Sequence[Any], now_ms: int
    ) -> bool: ...
    def validating(self, link: int) -> bool: ...  # noqa: D102
    def checked(self, answer: BatchChecked) -> int: ...  # noqa: D102
    def malformed(self, link: int, code: str, reason: str, now_ms: int) -> None: ...  # noqa: D102
    def failed(  # noqa: D102
        self, link: int, doing: str, error: Exception, now_ms: int
    ) -> None: ...
    def link_lost(self, link: int, now_ms: int) -> int: ...  # noqa: D102
    def blocked(self, link: int) -> None: ...  # noqa: D102
    def writable(self, link: int) -> None: ...  # noqa: D102
    def tick(self, now_ms: int) -> None: ...  # noqa: D102
    @property
    def has_work(self) -> bool: ...  # noqa: D102
    @property
    def skipped(self) -> Callable[[int, int], None]: ...  # noqa: D102
    def appended(self, answer: Appended) -> None: ...  # noqa: D102
    def append_refused(self, answer: AppendRefused) -> None: ...  # noqa: D102
    def synced(self, ring: str, lsn: int, now_ms: int) -> None: ...  # noqa: D102
    def hurries(self, ring: str) -> bool: ...  # noqa: D102
    def ring_failed(self, ring: str, code: str, reason: str) -> None: ...  # noqa: D102
    def history(self, answer: HistoryRead | ReadFailed) -> None: ...  # noqa: D102
    def answered(self, answer: IndexAnswer) -> None: ...  # noqa: D102
    def trimmed(self, ring: str, firsts: Mapping[int, int]) -> None: ...  # noqa: D102
    def bodies(self, answer: BodiesFound) -> None: ...  # noqa: D102
    def drain(self, now_ms: int) -> None: ...  # noqa: D102
    def take_outgoing(self) -> Ready: ...  # noqa: D102
    def take_ready(self) -> Ready: ...  # noqa: D102
    def wake_at_ms(self) -> int | None: ...  # noqa: D102


class Journaled(Protocol):
    """The methods of the rings that the loop calls; see journaling/rings.py."""

    def open(self, name: str, settings: dict[str, Any]) -> None: ...  # noqa: D102
    def append(  # noqa: D102
        self, bundles: list[AppendBundle]
    ) -> Iterable[Appended | AppendRefused]: ...
    def read(self, wanted: ReadRange) -> None: ...  # noqa: D102
    def ask(self, query: IndexQuery) -> None: ...  # noqa: D102
    def read_bodies(self, wanted: BodiesRead) -> None: ...  # noqa: D102
    def pin(self, ring: str, name: str, stream: int, offset: int | None) -> None: ...  # noqa: D102
    def trim(self, ring: str, stream: int, offset: int) -> None: ...  # noqa: D102

    sync_at_ms: int | None
    syncs_due: int

    def sync(self, hurries: Callable[[str], bool], now_ms: int) -> None: ...  # noqa: D102
    def sync_ended(self, name: str, lsn: int) -> None: ...  # noqa: D102
    def syncing(self) -> bool: ...  # noqa: D102
