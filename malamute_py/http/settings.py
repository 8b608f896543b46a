"""Settings that a broker gives to its HTTP side when it starts it.

Owns the message by which a broker starts its HTTP side. The rule: a secret comes by standard input
or from a file that is its owner's alone, never by an argument, which every user of the machine can
read.
"""

from __future__ import annotations

import msgspec

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_py.client.settings import Credential, Curve, Plain
from malamute_py.sections import HttpSection


class Start(msgspec.Struct, frozen=True):
    """The first line of standard input of a process that a broker starts."""

    http: HttpSection
    endpoint: str = DEFAULT_ENDPOINT
    user: str = ""
    password: str = ""
    server_key: str = ""
    public_key: str = ""
    secret_key: str = ""

    def credential(self) -> Credential:
        """The credential that the broker made for this process."""
        if self.server_key:
            return Curve(self.server_key, self.public_key, self.secret_key)
        return Plain(self.user, self.password) if self.user else None
