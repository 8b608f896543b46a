"""Sessions of people: a signed random id in a cookie, and a link of their own to the broker.

Owns which sessions there are and when each ends. The rules: a session is known by a random id that
is kept here only, and its cookie carries a signature, so that a forged one costs no look-up; it
ends after idle_s without an action of the person, after lasting_s in any case, when its link is
over, and when too many others began since; its end closes its link. The clock is an argument.
Source: OWASP, Session Management.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from malamute_py.client.aio.client import Client
from malamute_py.http.console.copying import Copy
from malamute_py.http.source import Source

SESSIONS_MAX: Final = 32
USER_SESSIONS_MAX: Final = 8
NOTES_MAX: Final = 8
_ID_BYTES: Final = 32
_COOKIE_CHARACTERS_MAX: Final = 256


class Session:
    """One person's session."""

    def __init__(self, user: str, client: Client, now: float) -> None:
        """user: the name by which the person logged in; empty: none. client: the session's link."""
        self.id = secrets.token_urlsafe(_ID_BYTES)
        self.user = user
        self.client = client
        self.source = Source(labels_max=0)  # for pages: no metrics are made of it
        """The facts of the overview, asked over the person's own link, once a second at most."""
        self.source.client = client
        self.source.unlinked = "there is no link to the broker"
        self.csrf = secrets.token_urlsafe(_ID_BYTES)
        """The token that every form of the session carries."""
        self.began = self.used = now
        self.over = False
        """The session has ended, or its link has for good."""
        self.notes: list[tuple[str, str]] = []
        """Notes for the next page: (kind, sentence)."""
        self.closings: set[Callable[[], None]] = set()
        """Calls that end things that go on for the session: event streams and copies."""
        self.copy: Copy | None = None
        """The last copy of a stream that the person began."""
        self.streams = 0
        """Event streams that are open."""

    async def broker_ms(self) -> int:
        """Return the broker's clock; 0: the broker does not tell it just now."""
        return int((await self.source.facts()).broker.get("now_ms", 0))

    def note(self, kind: str, sentence: str) -> None:
        """Have the next page tell something. kind: `done` or `failed`."""
        self.notes.append((kind, sentence))
        del self.notes[:-NOTES_MAX]

    def take_notes(self) -> list[tuple[str, str]]:
        """Return the notes that no page has told yet: the page that is shown now tells them."""
        notes, self.notes = self.notes, []
        return notes

    def fits(self, token: str) -> bool:
        """Whether a form's token is this session's."""
        return hmac.compare_digest(token.encode(), self.csrf.encode())


class Sessions:
    """All sessions of one HTTP side."""

    def __init__(
        self,
        *,
        idle_s: float,
        lasting_s: float,
        most: int = SESSIONS_MAX,
        most_of_user: int = USER_SESSIONS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """idle_s, lasting_s: after so long a session ends, without an action and in any case.

        most, most_of_user: sessions there may be, in all and of one user.
        """
        # Signs cookies and login forms; a new one for each process.
        self._key = secrets.token_bytes(_ID_BYTES)
        self._idle_s = idle_s
        self._lasting_s = lasting_s
        self._most = most
        self._most_of_user = most_of_user
        self._clock = clock
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, user: str, client: Client) -> Session:
        """Begin a session. Where there are too many, the one that was idle longest ends.

        That is one of the same user where this user has too many, else of the user with most.
        """
        self.sweep()
        if sum(each.user == user for each in self._sessions.values()) >= self._most_of_user:
            self._end_idlest(user)
        elif len(self._sessions) >= self._most:
            ((busiest, _),) = Counter(each.user for each in self._sessions.values()).most_common(1)
            self._end_idlest(busiest)
        session = Session(user, client, self._clock())
        self._sessions[session.id] = session
        return session

    def _end_idlest(self, user: str) -> None:
        theirs = (each for each in self._sessions.values() if each.user == user)
        self.end(min(theirs, key=lambda each: each.used))

    def cookie(self, session: Session) -> str:
        """Return the value of a session's cookie: its id and the signature."""
        return f"{session.id}.{self.sign('session', session.id)}"

    def sign(self, purpose: str, text: str) -> str:
        """Return the signature of a text, for one purpose."""
        return hmac.new(self._key, f"{purpose}:{text}".encode(), "sha256").hexdigest()

    def signed(self, purpose: str, text: str, signature: str) -> bool:
        """Whether the signature is this process's own."""
        return hmac.compare_digest(self.sign(purpose, text).encode(), signature.encode())

    def find(self, cookie: str) -> Session | None:
        """Return the session of a cookie; None: forged, ended or unknown."""
        if len(cookie) > _COOKIE_CHARACTERS_MAX:
            return None
        name, _, signature = cookie.partition(".")
        if not self.signed("session", name, signature):
            return None
        session = self._sessions.get(name)
        if session is None or self.ended(session):
            return None
        return session

    def ended(self, session: Session) -> bool:
        """Whether a session is over; one whose time has come is ended by this."""
        now = self._clock()
        if (
            not session.over
            and now - session.used < self._idle_s
            and now - session.began < self._lasting_s
        ):
            return False
        self.end(session)
        return True

    def touch(self, session: Session) -> None:
        """Note that the person did something: pages that refresh by themselves do not count."""
        session.used = self._clock()

    def end(self, session: Session) -> None:
        """End a session once, with its event streams and copies (`closings`), and its link."""
        session.over = True
        if self._sessions.pop(session.id, None) is None:
            return
        for close in list(session.closings):
            close()
        session.client.abort()

    def sweep(self) -> None:
        """End the sessions whose time has come: now and then, and before one begins."""
        for session in list(self._sessions.values()):
            self.ended(session)

    def close(self) -> None:
        """End all sessions, as the HTTP side ends."""
        for session in list(self._sessions.values()):
            self.end(session)
