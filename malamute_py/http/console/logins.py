"""Logging in: a name and password of the broker become a link of the person's own.

Owns the way from a form to a session. The rules: the broker alone judges the credential; an address
that gave a wrong one for a name waits, longer each time, before it may try the name again, and few
attempts are under way at once, because each of them costs the broker a password hash; a login
without a name is a link without a credential, which a broker with authentication refuses, and is
possible where the settings say so only. Source: ARCHITECTURE.md, "The console".
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from malamute_protocol.errors import BrokerRefused, MalamuteError, Timeout
from malamute_py.client.aio.client import connect
from malamute_py.client.session.events import Closed, LinkEvent, Unlinked
from malamute_py.client.settings import Credential, Curve, Plain, SettingError
from malamute_py.http.console.sessions import Session, Sessions

UNDER_WAY_MAX: Final = 8
ADDRESS_UNDER_WAY_MAX: Final = 2
NAME_BYTES_MAX: Final = 255
"""Bytes of a name or a password that ZeroMQ carries."""
WRONG_FREE: Final = 3
"""Wrong attempts for a name before the address has to wait."""
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
REMEMBERED_MAX: Final = 1_024
_CONNECT_MS: Final = 5_000
_CALL_MS: Final = 5_000
_RETRY_MAX_MS: Final = 1_000
SOFTWARE: Final = "malamute console"


class LoginRefused(MalamuteError):
    """A login was refused: the sentence says why."""


class Attempts:
    """Wrong attempts by address and name, and how long each of them waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Address and name -> (wrong attempts, time until which the next one waits)."""

    def wait_s(self, who: str) -> float:
        """Return how long an address still waits for a name; 0: it may try."""
        _, until_s = self._wrong.get(who, (0, 0.0))
        return max(0.0, until_s - self._clock())

    def wrong(self, who: str) -> None:
        """Count a wrong attempt of an address for a name; from the fourth on it has to wait.

        Of too many, the one that was wrong longest ago is forgotten.
        """
        before, _ = self._wrong.pop(who, (0, 0.0))
        times = before + 1
        pause = 0.0
        if times > WRONG_FREE:
            pause = min(PAUSE_MAX_S, PAUSE_S * 2 ** min(times - WRONG_FREE - 1, 10))
        self._wrong[who] = times, self._clock() + pause
        if len(self._wrong) > REMEMBERED_MAX:
            self._wrong.popitem(last=False)

    def right(self, who: str) -> None:
        """Forget the wrong attempts of an address for a name: it has logged in."""
        self._wrong.pop(who, None)


class Logins:
    """Makes sessions."""

    def __init__(
        self,
        sessions: Sessions,
        endpoints: Sequence[str],
        own: Credential,
        *,
        name_optional: bool,
        attempts: Attempts | None = None,
    ) -> None:
        """endpoints: of the broker. own: the HTTP side's credential, which has the broker's key.

        name_optional: whether a login without a name may be tried. attempts: of a test.
        """
        self._sessions = sessions
        self._endpoints = tuple(endpoints)
        self._server_key = own.server_key if isinstance(own, Curve) else ""
        self.name_optional = name_optional and not self._server_key
        """Whether the form takes no name, where the broker has no authentication."""
        self.by_key = bool(self._server_key)
        """Whether the broker asks for CURVE keys: the form takes a secret key."""
        self._attempts = attempts or Attempts()
        self._under_way: Counter[str] = Counter()
        """Attempts under way, by address."""

    async def log_in(self, user: str, password: str, address: str) -> Session:
        """Log in with what a person typed into the form, and return the new session.

        address: of the browser, by which attempts are counted. Raises LoginRefused with the
        sentence for the form.
        """
        if max(len(user.encode()), len(password.encode())) > NAME_BYTES_MAX:
            raise LoginRefused(f"A name and a password have at most {NAME_BYTES_MAX} bytes.")
        who = f"{address} {user}"
        wait_s = self._attempts.wait_s(who)
        if wait_s:
            raise LoginRefused(f"Too many wrong attempts: wait {math.ceil(wait_s)} seconds.")
        if (
            self._under_way.total() >= UNDER_WAY_MAX
            or self._under_way[address] >= ADDRESS_UNDER_WAY_MAX
        ):
            raise LoginRefused("Too many others are logging in: try again in a moment.")
        credential = self._credential(user, password)
        if self.by_key:
            user = ""  # the key alone says who it is: the broker tells the name once it is linked
        self._under_way[address] += 1
        try:
            session = await self._open_session(user, credential)
        except (BrokerRefused, SettingError):
            self._attempts.wrong(who)
            known = "key" if self.by_key else "name and password"
            raise LoginRefused(f"The broker does not know this {known}.") from None
        finally:
            self._under_way[address] -= 1
            self._under_way += Counter()  # an addition drops the addresses that count 0
        self._attempts.right(who)
        return session

    def _credential(self, user: str, password: str) -> Credential:
        """Return the credential for a login, of the kind that the broker asks for.

        With CURVE the password is the secret key, and the name is not needed. None: no credential.
        Raises LoginRefused.
        """
        if self._server_key:
            try:
                public = zmq.curve_public(password.encode("ascii")).decode()
            except (ValueError, zmq.ZMQError):
                raise LoginRefused("That is no secret key: it has 40 characters.") from None
            return Curve(self._server_key, public, password)
        if user:
            return Plain(user, password)
        if password or not self.name_optional:
            raise LoginRefused("A name is needed.")
        return None

    async def _open_session(self, user: str, credential: Credential) -> Session:
        """Link to the broker with a credential, and begin a session that ends with the link.

        user: as typed; empty: the broker tells it. Raises LoginRefused; BrokerRefused or
        SettingError where the credential is wrong, which the caller counts as a wrong attempt.
        """
        # The session, once there is one: the link's events begin to come before.
        begun: list[Session] = []
        reason = ""

        def on_link(event: LinkEvent) -> None:
            """Keep why there is no link; where it has ended for good, end a session that began."""
            nonlocal reason
            if isinstance(event, Unlinked):
                reason = f": {event.reason}"
            for session in begun:
                if isinstance(event, Closed):
                    self._sessions.end(session)

        try:
            client = await connect(
                self._endpoints, timeout_ms=_CONNECT_MS, credential=credential, on_link=on_link,
                software=SOFTWARE, retry_max_ms=_RETRY_MAX_MS, call_timeout_ms=_CALL_MS,
            )  # fmt: skip
        except (BrokerRefused, SettingError):
            raise
        except Timeout:
            raise LoginRefused(f"The broker did not take the link{reason}.") from None
        except MalamuteError as error:
            raise LoginRefused(f"There is no link to the broker: {error}.") from None
        session = self._sessions.begin(user or client.identity, client)
        begun.append(session)
        return session
