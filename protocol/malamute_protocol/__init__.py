"""The Malamute protocol: commands, record batches, patterns, errors.

Imports no other package of this project. The normative text is SPEC.md beside this package.
"""

from typing import Final

DEFAULT_PORT: Final = 9797
"""Port on which a broker listens on loopback, and a client looks, unless told otherwise."""

DEFAULT_ENDPOINT: Final = f"tcp://127.0.0.1:{DEFAULT_PORT}"
"""The endpoint of a broker on this machine that was started without any settings."""
