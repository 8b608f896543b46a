"""The synchronous client is equal to the output of its generator.

The rule: a change is made in client/aio/, and `make sync-client` carries it over.
"""

from __future__ import annotations

import pytest

from tools.sync_client import COMMAND, FILES, TARGETS, Text, blocking, generate, marked


@pytest.mark.moderate
@pytest.mark.parametrize("name", FILES)
def test_a_generated_file_is_what_its_source_makes(name: str) -> None:
    assert (TARGETS / name).read_text() == generate(name), f"run `{COMMAND}`"


def test_a_file_for_threads_is_generated_or_the_links_own() -> None:
    assert {path.name for path in TARGETS.glob("*.py")} - set(FILES) == BY_HAND


BY_HAND = {"__init__.py", "handlers.py", "link.py"}


MARKED = '''\
import asyncio  # asyncio only

# How many at once.
EVERY = 3  # asyncio only
"""Its explanation."""


class Reader:
    def take(
        self,
        first: int,  # asyncio only
        # sync: second: int,
    ) -> None:
        if True:  # sync: with self.lock:
            self.count += 1
        # A comment of what is left out.
        if self.count:  # asyncio only
            self.count = 0
        return None
'''

MADE = """\



class Reader:
    def take(
        self,
        second: int,
    ) -> None:
        with self.lock:
            self.count += 1
        return None
"""


def test_marks_say_what_has_no_twin_and_what_is_for_threads() -> None:
    assert marked(Text(MARKED)) == MADE


WAITING = """\
async def commit(self, size, wait):
    future = self._link.loop.create_future()
    left = await self._link.room(size, wait, "a step")
    async with self.window as window:
        await window.add(future)
    self._link.notify(self)
    return await self._link.limit(future, left, STEP)
"""

BLOCKING = """\
def commit(self, size, wait):
    future = Pending(self._link)
    left = self._link.room(wait, "a step")
    with self.window as window:
        window.add(future)
    self._link.notify()
    return future.result(left, STEP)
"""


def test_what_is_awaited_is_called_and_futures_are_pending() -> None:
    assert blocking(Text(WAITING)) == BLOCKING
