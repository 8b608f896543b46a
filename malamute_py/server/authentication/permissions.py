"""Permissions and quotas of identities: allow lists and quotas from the configuration.

Owns the two questions that the core asks about an owner: a credential or, without one, an identity
or a template. The rules: without any list everything is allowed; with one, a name that is not
listed is refused, and so is a text that cannot be a name at all, which is neither compared with a
list nor remembered; a denial goes before what is allowed. A user of a namespace reaches what lies
under its prefix and the mailboxes that bear the names of its users, whatever the lists say. A
client gets no identity but that of its credential, and those that templates of the credential give;
their permissions are the credential's. Source: SPEC.md, section 15.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Final

from malamute_protocol.address import NAME_BYTES_MAX
from malamute_py.broker.limits import Quota
from malamute_py.config import QUOTAS, Denied, Grant, NamedVerbs, QuotasSection
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.carriers import Carriers
from malamute_py.server.authentication.name_patterns import compiled, pattern_fault
from malamute_py.server.authentication.namespaces import HTTP_USER, Namespaces

_DOUBTED_MAX: Final = 20
"""Patterns of a configuration that are doubted; further ones would say the same."""
GIVEN_BY: Final[dict[str, tuple[str, ...]]] = {
    "read": ("read",),
    "replay": ("read",),
    "write": ("write",),
    "create": ("create", "write", "manage_streams"),
    "trim": ("trim", "manage_streams"),
    "send": ("send",),
    "receive": ("receive",),
    "create_mailbox": ("create", "send", "receive", "manage_queues"),
    "purge": ("purge", "manage_queues"),
    "request": ("request",),
    "work": ("work",),
    "create_service": ("create", "request", "work", "manage_queues"),
    "manage_streams": ("manage_streams",),
    "manage_queues": ("manage_queues",),
    "dead_letters": ("send", "manage_queues"),
}
"""Action of the core on a name -> verbs of a grant that allow it, each where no denial of that verb
fits the name."""
DENIED_BY: Final = {
    "create_mailbox": "create", "create_service": "create", "dead_letters": "send"
}  # fmt: skip
"""Action -> verb whose denial forbids it, where that has another name."""
OF_ADMINISTRATORS: Final = frozenset(
    {
        "create",
        "create_mailbox",
        "create_service",
        "trim",
        "purge",
        "manage_streams",
        "manage_queues",
        "manage_clients",
        "manage_users",
        "admin",
        "dead_letters",
    }
)
"""Actions that `admin = true` allows."""
FLAGS: Final = ("manage_clients", "manage_users")
"""Verbs without names."""
_ON_MAILBOXES: Final = frozenset({"send", "receive", "create_mailbox", "purge", "dead_letters"})
"""Actions on mailboxes alone: a user's own mailbox has the user's name, not the prefix."""
MEMO_MAX: Final = 16_384
"""Answers that are remembered. No name in them is longer than NAME_BYTES_MAX characters, so that
all of them take 20 MiB at most, 5 MiB with usual names."""


class _Rule:
    """The grant of one identity, compiled."""

    __slots__ = ("admin", "allowed", "denied", "flags", "some", "subjects")

    def __init__(self, grant: Grant) -> None:
        """Compile the lists of names of a grant, so that a question is one match."""
        self.allowed = _compiled_lists(grant, NamedVerbs)
        self.denied = _compiled_lists(grant.deny, Denied)
        self.flags = frozenset(flag for flag in FLAGS if getattr(grant, flag))
        self.admin = grant.admin
        self.subjects = [
            (compiled([stream]), compiled(subjects))
            for stream, subjects in grant.write_subjects.items()
        ]
        self.some = frozenset(action for action in GIVEN_BY if _allows_some(grant, action))
        """Actions that are allowed on some name."""

    def allows(self, action: str, name: str) -> bool:
        """Whether the action is allowed on the name: a denial goes before everything.

        The tables at the top of this file say which verbs of a grant allow and forbid an action.
        """
        if self.denies(DENIED_BY.get(action, action), name):
            return False
        if action in self.flags or (self.admin and action in OF_ADMINISTRATORS):
            return True
        return any(
            self.allowed[verb].fullmatch(name) and not self.denies(verb, name)
            for verb in GIVEN_BY.get(action, ())
        )

    def denies(self, verb: str, name: str) -> bool:
        """Whether a denial of the verb fits the name."""
        pattern = self.denied.get(verb)
        return pattern is not None and pattern.fullmatch(name) is not None


class Permissions:
    """Answers (identity, action, name), the `permit` of the broker core.

    Actions: `identity` (may the credential `identity` be called `name`), `template` (may it have
    identities that the template `name` gives), those of GIVEN_BY on a name, those of FLAGS,
    `list_namespaces`, which manage_users and being the broker's own HTTP side allow, and `admin`.
    """

    def __init__(
        self, grants: Mapping[str, Grant], carriers: Carriers | None = None,
        namespaces: Namespaces | None = None,
    ) -> None:  # fmt: skip
        """grants: what each identity may do; `*` is for every identity without an entry of its own.

        carriers: knows the owner of an identity that a template gave; None: there is no
        authentication.
        """
        self._carriers = carriers or Carriers((), {})
        self._namespaces = namespaces or Namespaces({})
        self._rules = {identity: _Rule(grant) for identity, grant in grants.items()}
        self._everything = not self._rules and not self._namespaces.all
        """Whether everybody may do everything, so that nothing is to be decided."""
        self._memo: dict[tuple[str, str, str], bool] = {}

    def __call__(self, identity: str, action: str, name: str) -> bool:
        """Whether an action is allowed; the core asks for each command of a client.

        identity: the credential's; empty: none. action: a verb such as `read`. name: of the stream,
        mailbox or service; for the actions `identity` and `template`, the name that a client asks
        to have itself.
        """
        if action == "identity":
            # Without permissions a credential has its own name, and a client without a credential
            # ("") any. With permissions a client has no name ("") or that of its credential.
            return identity in ("", name) if not self._rules else name in ("", identity)
        if action == "template":
            return self._carriers.may_use(identity, name) if identity else not self._rules
        if self._everything:
            return True
        key = (identity, action, name)
        answer = self._memo.get(key)
        if answer is None:
            if len(name) > NAME_BYTES_MAX or len(identity) > NAME_BYTES_MAX:
                return False  # such a text is no name, and is not kept
            if len(self._memo) >= MEMO_MAX:
                self._memo.clear()
            answer = self._memo[key] = self._decide(*key)
        return answer

    def subjects(self, identity: str, stream: str) -> Callable[[str], bool] | None:
        """Return the test of subjects under which an identity may publish to a stream; None: none.

        Asked only where the identity may not `write` the stream under every subject.
        """
        rule = self._rule(identity)
        if rule is None or len(stream) > NAME_BYTES_MAX or rule.denies("write", stream):
            return None
        if not self._reaches(identity, "write", stream):
            return None
        # Of each entry of the grant's write_subjects that fits the stream, its subjects.
        found = [subjects for streams, subjects in rule.subjects if streams.fullmatch(stream)]
        return (lambda subject: any(each.fullmatch(subject) for each in found)) if found else None

    def allows_some(self, identity: str, action: str) -> bool:
        """Whether an action is allowed on some name at least, as a client asks of itself: may()."""
        if action not in GIVEN_BY:
            return self(identity, action, "broker")  # an action on no name: any will do
        rule = self._rule(identity)
        return not self._rules or (rule is not None and action in rule.some)

    def _rule(self, identity: str) -> _Rule | None:
        """Return an identity's own rule, else that of all without one; None: there is neither."""
        return self._rules.get(identity) or self._rules.get("*")

    def _reaches(self, identity: str, action: str, name: str) -> bool:
        """Whether an action on a name stays within the namespace of an identity.

        True for an identity without a namespace. Whether the lists allow the action is decided
        elsewhere.
        """
        namespace = self._namespaces.of(identity)
        if namespace is None or action in FLAGS:
            # FLAGS are no actions on names. The core shows and ends for a user of a namespace only
            # the namespace's own links, users and transactions.
            return True
        if action == "admin":
            return False  # admin is about the broker as a whole
        if name.startswith(namespace.prefix):
            return True
        # Besides, the mailboxes that bear the names of users of the namespace.
        if action not in _ON_MAILBOXES:
            return False
        user = self._carriers(name)  # the owner of the identity `name`; "": there is none
        return user != "" and self._namespaces.of(user) is namespace

    def _decide(self, identity: str, action: str, name: str) -> bool:
        """Whether an identity may do something to a name, by its namespace and its rule.

        __call__() remembers the answer. A broker without rules allows everything within the
        namespace.
        """
        if action == "list_namespaces":
            # The HTTP side needs the list for the metrics.
            return identity == HTTP_USER or self._decide(identity, "manage_users", name)
        if not self._reaches(identity, action, name):
            return False
        if not self._rules:
            return True
        rule = self._rule(identity)
        return rule is not None and rule.allows(action, name)


def _allows_some(grant: Grant, action: str) -> bool:
    """Whether a grant allows an action on some name; of denials only that of all names counts.

    For _Rule.some: a client asks so whether it may do something at all.
    """
    everything = "*"
    if everything in getattr(grant.deny, DENIED_BY.get(action, action), ()):
        return False
    if grant.admin and action in OF_ADMINISTRATORS:
        return True
    return (action == "write" and bool(grant.write_subjects)) or any(
        getattr(grant, verb) and everything not in getattr(grant.deny, verb)
        for verb in GIVEN_BY[action]
    )


def _compiled_lists(lists: NamedVerbs, kind: type[NamedVerbs]) -> dict[str, re.Pattern[str]]:
    return {verb: compiled(getattr(lists, verb)) for verb in kind.__struct_fields__}


class QuotaTable:
    """Answers (identity), the `quota` of the broker core."""

    def __init__(self, quotas: QuotasSection) -> None:
        """quotas: of every identity, and those of some that differ."""
        common = {name: getattr(quotas, name) for name in QUOTAS}
        self._common = Quota(**common)
        self._named = {
            pattern: Quota(**{**common, **values}) for pattern, values in quotas.identities.items()
        }
        self._patterns = [(compiled([name]), name) for name in self._named if "*" in name]

    def of(self, identity: str) -> Quota:
        """Return an identity's quotas: by its own name, by the first pattern, or the default."""
        found = self._named.get(identity)
        if found is None:
            fitting = (
                self._named[name] for names, name in self._patterns if names.fullmatch(identity)
            )
            found = next(fitting, self._common)
        return found


def permission_doubts(permissions: Mapping[str, Grant]) -> Iterator[ConfigError]:
    """Yield a warning for each pattern that fits no name; the configuration stays valid.

    Such a permission allows nothing, and such a denial denies nothing. A start, a reload and a
    check of the configuration tell them.
    """
    yield from islice(_without_names(permissions), _DOUBTED_MAX)


def _without_names(permissions: Mapping[str, Grant]) -> Iterator[ConfigError]:
    """Yield each pattern that fits no name, by the key that it stands under."""
    for owner, grant in permissions.items():
        for table, verbs in (("", grant), ("deny.", grant.deny)):
            for verb in verbs.__struct_fields__:
                named = getattr(verbs, verb)
                for pattern in named if isinstance(named, list | dict) else ():
                    if fault := pattern_fault(pattern):
                        yield ConfigError(f"permissions.{owner}.{table}{verb}", fault)
