"""How long a test waits for what must come.

Owns the bound and nothing else. The rule: it is paid on failure only, so it is far beyond
what a loaded machine takes, and below the time after which pytest ends a test.
"""

from __future__ import annotations

from typing import Final

WAIT_S: Final = 60.0
WAIT_MS: Final = 60_000
