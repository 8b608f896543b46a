"""Settings that the scenario `resets` edits: what each kind is made with, and what may be given.

Owns the tables of both. Source: SPEC.md, section 13 (Settings).
"""

from __future__ import annotations

from typing import Any

STREAM_DEFAULTS = {"description": "as configured", "max_records": 1 << 40}
MADE: dict[str, dict[str, Any]] = {
    "stream": {**STREAM_DEFAULTS, "max_bytes": 0, "level": "synced"},
    "group": {"attempts_max": 0, "lease_ms": 0, "description": "", "dead_letters": ""},
    "cursor": {"pin_bytes_max": 0, "description": ""},
    "mailbox": {"ttl_ms": 0, "max_messages": 0, "description": ""},
    "service": {"attempts_max": 0, "lease_ms": 0, "description": ""},
}
"""Kind -> settings of one that is made without any."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "description": ("x", "y"), "max_records": (0, 1 << 41), "max_bytes": (0, 1 << 50),
    "level": ("stored", "synced"), "attempts_max": (1_000,), "lease_ms": (0, 1 << 40),
    "pin_bytes_max": (1, 2), "ttl_ms": (0, 1 << 40), "max_messages": (0, 1 << 40),
}  # fmt: skip
