"""Settings of a client: endpoints, credentials, times and bounds.

Owns the settings' names, defaults and checks. The rule: a setting that cannot work is refused here,
by name, before a socket exists. Source: docs/design.md (Flow control; Safety).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict

import msgspec

from malamute_protocol import DEFAULT_ENDPOINT
from malamute_protocol.address import is_template, name_fault, template_fault
from malamute_protocol.errors import MalamuteError, Timeout
from malamute_protocol.limits import Limits
from malamute_py.client.arguments import duration

_SCHEMES: Final = ("tcp://", "ipc://", "inproc://")
_PORT: Final = DEFAULT_ENDPOINT.rpartition(":")[2]
"""The port of a broker that was given none."""
_PORTS: Final = re.compile("[0-9]{1,5}")
_HOST: Final = re.compile(r"tcp://(\[[^]]*\]|[^:/]*)")
_CURVE_KEY_CHARACTERS: Final = 40


# Types of the settings that are checked by type alone; check() looks at the others one by one.
_KINDS: Final[dict[str, type]] = {
    "endpoints": tuple,
    "identity": str,
    "software": str,
    "heartbeat_ms": int,
    "retry_min_ms": int,
    "retry_max_ms": int,
    "attempt_ms": int,
    "window_bytes": int,
    "batch_bytes": int,
    "linger_ms": int,
    "frame_bytes_max": int,
    "idempotent": bool,
}


class SettingError(MalamuteError, ValueError):
    """A client setting cannot work: `key` names it, `why` says what to do."""

    def __init__(self, key: str, why: str) -> None:
        """key: name of the setting. why: what is wrong and what would be right."""
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = why


class Plain(msgspec.Struct, frozen=True):
    """User name and password; use it on loopback or inside CURVE's reach only."""

    user: str
    password: str

    def __repr__(self) -> str:
        """Without the password."""
        return f"Plain(user={self.user!r})"


class Curve(msgspec.Struct, frozen=True):
    """Key pair of this client and public key of the broker, each 40 characters of Z85."""

    server_key: str
    public_key: str
    secret_key: str

    def __repr__(self) -> str:
        """Without the secret key."""
        return f"Curve(server_key={self.server_key!r}, public_key={self.public_key!r})"


Credential: TypeAlias = Plain | Curve | None


Wait: TypeAlias = int | Literal["default"] | None
"""Wait of a call in milliseconds; None: for ever; "default": as the client's settings say."""
DEFAULT_WAIT: Final = "default"
"""The wait of almost all calls, told by identity; an equal string takes the longer way."""


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `connect()` and `connect_sync()`; times in milliseconds.

    endpoints: addresses of the broker, tried in turn; the first argument of connect().
    credential: Plain(user, password) or Curve(server_key, public_key, secret_key); None where the
        broker asks for none.
    identity: the name by which the broker knows this client: its mailbox, and the owner of its
        cursors' and groups' work. It belongs to one link: a second client with it ends the
        first one's link (`fenced`). With `{n}` in it, such as "web-{n}", several clients may ask
        for the same: the broker puts the least free number there, from 0, and `client.identity`
        says what came of it. The credential must allow it. Empty: the credential's own, or none.
    software: shown to the operator by `malamute client ls`.
    heartbeat_ms: longest silence of this client; 0: as the broker says.
    retry_min_ms, retry_max_ms: bounds of the pause before a new attempt to connect; it is doubled
        with each attempt, then jittered by half.
    attempt_ms: longest time of one attempt, from connecting to the broker's welcome.
    window_bytes: unconfirmed bytes that this client allows itself; the broker's own window may be
        smaller. A call that finds the window full waits.
    batch_bytes: target size of a batch made from single or bulk records, at most half of what the
        broker takes and a quarter of the window.
    linger_ms: longest time that a single record waits for others to share its batch; 0: until the
        next wake-up, and where records come fast, for a confirm or a millisecond or two.
    frame_bytes_max: the largest frame taken from the broker; a larger one ends the connection.
    call_timeout_ms: how long a call waits for the broker when the call itself does not say; None:
        for ever. The `timeout_ms` of connect() is for connecting alone.
    idempotent: publish with a producer id, so that a retried record is in the log once.
    """

    endpoints: tuple[str, ...] = (DEFAULT_ENDPOINT,)
    credential: Credential = None
    identity: str = ""
    software: str = "malamute-py"
    heartbeat_ms: int = 0
    retry_min_ms: int = 100
    retry_max_ms: int = 10_000
    attempt_ms: int = 5_000
    window_bytes: int = 8 << 20
    batch_bytes: int = 2 << 20
    linger_ms: int = 0
    frame_bytes_max: int = 64 << 20
    call_timeout_ms: int | None = 30_000
    idempotent: bool = True

    def batch_target(self, limits: Limits) -> int:
        """Bytes of bodies to fill a batch with, by the settings and a broker's limits.

        Headers and stamp have the other half of the largest batch. A quarter of the window: the
        next batches gather while this one is unconfirmed.
        """
        return min(self.batch_bytes, limits.batch_bytes_max // 2, max(self.window_bytes // 4, 1))

    def wait_ms(self, asked: Wait) -> int | None:
        """Wait of a call in milliseconds, from what its caller asked; None: without end.

        Raises LocalProtocolError.
        """
        if asked is None:
            return None
        if isinstance(asked, str) and asked == "default":
            return self.call_timeout_ms
        return duration("timeout_ms", asked)

    def check(self) -> ClientSettings:
        """Return the settings themselves; raises SettingError for what cannot work."""
        self._check_kinds()
        self._check_identity()
        self._check_endpoints()
        self._check_curve_keys()
        self._check_numbers()
        return self

    def _check_kinds(self) -> None:
        """Check the type of each setting, and of the credential's parts. Raises SettingError."""
        for key, kind in _KINDS.items():
            value = getattr(self, key)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wanted = "an integer" if kind is int else f"a {kind.__name__}"
                raise SettingError(key, f"{value!r} is not {wanted}")
        credential: Any = self.credential
        if credential is not None and not isinstance(credential, Plain | Curve):
            kind_name = type(credential).__name__
            raise SettingError(
                "credential", f"Plain(user, password) or Curve(...), not a {kind_name}"
            )
        if isinstance(self.credential, Plain | Curve):
            for field in self.credential.__struct_fields__:
                if not isinstance(getattr(self.credential, field), str):
                    raise SettingError(f"credential.{field}", "must be a str")

    def _check_identity(self) -> None:
        """Check the identity: a name, or a template as web-{n}. Raises SettingError."""
        if self.identity:
            template = is_template(self.identity)
            fault = template_fault(self.identity) if template else name_fault(self.identity)
            if fault:
                raise SettingError("identity", fault)

    def _check_endpoints(self) -> None:
        """Check that each endpoint has a known scheme and, for tcp, a port. Raises SettingError."""
        if not self.endpoints:
            raise SettingError("endpoints", f"name at least one, such as {DEFAULT_ENDPOINT}")
        for endpoint in self.endpoints:
            if not isinstance(endpoint, str):
                raise SettingError("endpoints", f"{endpoint!r} is not a str")
            if not endpoint.startswith(_SCHEMES):
                known = ", ".join(_SCHEMES)
                raise SettingError("endpoints", f"{endpoint!r} does not begin with {known}")
            host = _HOST.match(endpoint)
            if host and not _PORTS.fullmatch(endpoint.rpartition(":")[2]):
                raise SettingError(
                    "endpoints", f"{endpoint!r} names no port; write {host[0]}:{_PORT}"
                )

    def _check_curve_keys(self) -> None:
        """Check the length of the keys of a Curve. Raises SettingError."""
        if isinstance(self.credential, Curve):
            for key in ("server_key", "public_key", "secret_key"):
                if len(getattr(self.credential, key)) != _CURVE_KEY_CHARACTERS:
                    raise SettingError(
                        f"credential.{key}", f"a CURVE key has {_CURVE_KEY_CHARACTERS} characters"
                    )

    def _check_numbers(self) -> None:
        """Check the bounds of times and sizes. Raises SettingError."""
        for key in (
            "retry_min_ms",
            "retry_max_ms",
            "attempt_ms",
            "window_bytes",
            "batch_bytes",
            "frame_bytes_max",
        ):
            if getattr(self, key) <= 0:
                raise SettingError(key, "must be greater than 0")
        for key in ("heartbeat_ms", "linger_ms"):
            if getattr(self, key) < 0:
                raise SettingError(key, "must not be negative")
        _check_wait("call_timeout_ms", self.call_timeout_ms)
        if self.retry_max_ms < self.retry_min_ms:
            raise SettingError("retry_max_ms", "must not be less than retry_min_ms")


def _check_wait(key: str, value: Any) -> None:
    """Check a time to wait, or None: for ever. Raises SettingError."""
    if value is not None and (type(value) is not int or value <= 0):
        allowed = "milliseconds as an integer greater than 0, or None: for ever"
        raise SettingError(key, f"{value!r} is not {allowed}")


class ClientOptions(TypedDict, total=False):
    """The options of `connect()` and `connect_sync()`, as ClientSettings explains them.

    A function that passes options on names them so: `def desk(**options: Unpack[ClientOptions])`.
    """

    credential: Credential
    identity: str
    software: str
    heartbeat_ms: int
    retry_min_ms: int
    retry_max_ms: int
    attempt_ms: int
    window_bytes: int
    batch_bytes: int
    linger_ms: int
    frame_bytes_max: int
    call_timeout_ms: int | None
    idempotent: bool


_INSTEAD: Final = {
    "user": "write credential=malamute_py.Plain(user, password)",
    "password": "write credential=malamute_py.Plain(user, password)",
    "username": "write credential=malamute_py.Plain(user, password)",
    "client_id": "write identity=NAME",
}
"""Advice by the names of options that clients of other brokers have."""


def make_settings(
    endpoints: str | Sequence[str], options: ClientOptions, timeout_ms: int | None = None
) -> ClientSettings:
    """Build checked settings from what `connect` was called with.

    timeout_ms: how long connecting may take; only checked.
    Raises SettingError: an option is unknown or cannot work.
    """
    _check_wait("timeout_ms", timeout_ms)
    try:
        names = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
    except TypeError:
        raise SettingError("endpoints", f"{endpoints!r} is not a str, nor several") from None
    unknown = set(options) - set(ClientSettings.__struct_fields__)
    if unknown:
        known = ", ".join(ClientSettings.__struct_fields__)
        name = min(unknown)
        advice = _INSTEAD.get(name, f"known are {known}")
        raise SettingError(name, f"there is no such option; {advice}")
    return ClientSettings(endpoints=names, **options).check()


NO_ANSWER: Final = "no answer"
"""Reason of a link that is not there where nothing was refused."""
PAUSED: Final = "after wrong passwords a broker does not answer their user's address for a while"
"""Words for that reason where the credential is a password."""


def no_link(settings: ClientSettings, timeout_ms: int | None, why: str) -> Timeout:
    """Return the Timeout of connect() at a broker that has not answered: why, and what to do.

    why: the reason that the last attempt ended with, as transport.py words it, or NO_ANSWER.
    """
    endpoints = settings.endpoints
    advice = "; `malamute broker` starts one" if why.startswith("nothing answers") else ""
    if why == NO_ANSWER and isinstance(settings.credential, Plain):
        advice = f"; {PAUSED}"
    if any(endpoint.startswith("inproc://") for endpoint in endpoints):
        advice = (
            "; an inproc endpoint is reached with the zmq.Context of its broker alone: connect by "
            "EmbeddedBroker.connect(), or give connect(context=broker.context)"
        )
    return Timeout(
        f"no link to a broker at {', '.join(endpoints)} within {timeout_ms} ms: {why}{advice}"
    )
