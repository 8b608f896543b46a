"""The planted bugs of the checkpoint of mail, services and groups."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

from malamute_py.server.checkpointing.checkpoints import Checkpoints
from malamute_py.store import checkpoint
from malamute_py.store.checkpoint import Checkpoint
from malamute_py.store.follow import Follow
from tests.simulation.plants.planted import Planted, codes, replace
from tests.simulation.work_machine import WorkMachine


def _checkpoint_runs_ahead(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def step(self: Any, job: Any, **named: Any) -> Any:
            end = self.rings["main"].end_lsn
            return original(self, Follow(end, [(0, end)]), **named)

        return step

    replace(stack, WorkMachine, "checkpoint_advance", make)


def _hold_before_commit(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def ask(self: Any, ranges: Any) -> None:
            original(self, ranges)
            self.parts.drop(self._visible)
            self._hold()

        return ask

    replace(stack, Checkpoints, "_ask", make)


def _half_a_checkpoint(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        return lambda connection: contextlib.nullcontext()

    replace(stack, checkpoint, "writing", make)
    stack.enter_context(patch.object(WorkMachine, "kill_share", 0.7))


def _bodies_not_copied(stack: contextlib.ExitStack) -> None:
    replace(stack, Checkpoint, "_copy_bodies", lambda original: lambda self, *rest: (0, 0))


PLANTS: dict[str, Planted] = {
    "checkpoint-runs-ahead": Planted(
        "work", "the tables follow what is not on disk yet",
        _checkpoint_runs_ahead, codes("checkpoint", "tables"), 60,
    ),
    "hold-before-commit": Planted(
        "work", "the ring lets go of what the tables were only asked to take",
        _hold_before_commit, codes("checkpoint", "bodies"), 60,
    ),
    "half-a-checkpoint": Planted(
        "work", "a step of the checkpoint is no transaction",
        _half_a_checkpoint, codes("checkpoint", "tables", "bodies", "broken"), 60,
        first=240,
    ),
    "bodies-not-copied": Planted(
        "work", "bodies go with the segment that they lie in",
        _bodies_not_copied, codes("bodies", "stuck"), 60,
    ),
}  # fmt: skip
