"""Permissions and quotas of identities: allow lists and quotas from the configuration.

Owns the two questions that the core asks about an owner: a credential or, without one, an identity
or a template. The rules: without any list everything is allowed; with one, a name that is not
listed is refused, and so is a text that cannot be a name at all, which is neither compared with a
list nor remembered. A client gets no identity but that of its credential, and those that templates
of the credential give; their permissions are the credential's. Source: SPEC.md, section 15.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_py.broker.limits import Quota
from malamute_py.config import QUOTAS, Grant, QuotasSection
from malamute_py.server.authentication.carriers import Carriers

LISTED: Final = ("read", "write", "trim", "send", "receive", "request", "work")
"""Actions on named streams, mailboxes and services: a grant has a list for each."""
MEMO_MAX: Final = 16_384
"""Answers that are remembered. No name in them is longer than NAME_BYTES_MAX characters, so that
all of them take 20 MiB at most, 5 MiB with usual names."""


class Permissions:
    """Answers (identity, action, name), the `permit` of the broker core.

    Actions: `identity` (may the credential `identity` be called `name`), `template` (may it have
    identities that the template `name` gives), those of LISTED on the names that a grant lists,
    `create` (first use of a stream: as write), `admin`.
    """

    def __init__(self, grants: Mapping[str, Grant], carriers: Carriers | None = None) -> None:
        """grants: by identity; `*` is for every identity without an entry of its own.

        carriers: knows the templates of the credentials; None: there is no authentication.
        """
        self._carriers = carriers or Carriers((), {})
        self._rules = {
            identity: (
                {action: _compiled(getattr(grant, action)) for action in LISTED},
                grant.admin,
            )
            for identity, grant in grants.items()
        }
        self._memo: dict[tuple[str, str, str], bool] = {}

    def __call__(self, identity: str, action: str, name: str) -> bool:
        """Whether the action is allowed."""
        if action == "identity":
            return identity in ("", name) if not self._rules else name in ("", identity)
        if action == "template":
            return self._carriers.may_use(identity, name) if identity else not self._rules
        if not self._rules:
            return True
        key = (identity, action, name)
        answer = self._memo.get(key)
        if answer is None:
            if len(name) > NAME_BYTES_MAX or len(identity) > NAME_BYTES_MAX:
                return False
            if len(self._memo) >= MEMO_MAX:
                self._memo.clear()
            answer = self._memo[key] = self._decide(*key)
        return answer

    def _decide(self, identity: str, action: str, name: str) -> bool:
        rule = self._rules.get(identity) or self._rules.get("*")
        if rule is None:
            return False
        listed, admin = rule
        names = listed.get("write" if action == "create" else action)
        if names is not None:
            return names.fullmatch(name) is not None
        return admin and action == "admin"


class QuotaTable:
    """Answers (identity), the `quota` of the broker core."""

    def __init__(self, quotas: QuotasSection) -> None:
        """quotas: of every identity, and those of some that differ."""
        common = {name: getattr(quotas, name) for name in QUOTAS}
        self._common = Quota(**common)
        self._named = {
            pattern: Quota(**{**common, **values}) for pattern, values in quotas.identities.items()
        }
        self._patterns = [(_compiled([name]), name) for name in self._named if "*" in name]

    def of(self, identity: str) -> Quota:
        """Return an identity's quotas: by its own name, by the first pattern, or the default."""
        found = self._named.get(identity)
        if found is None:
            fitting = (
                self._named[name] for names, name in self._patterns if names.fullmatch(identity)
            )
            found = next(fitting, self._common)
        return found


def _compiled(patterns: list[str]) -> re.Pattern[str]:
    if not patterns:
        return re.compile(r"(?!)")
    return re.compile(
        "|".join(".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns), re.DOTALL
    )
